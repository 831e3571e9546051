#!/usr/bin/env bash
# The Python around the trainers: compare, plot, monitor. Their parts: scripts_tests.py.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
export NO_COLOR=1 MPLCONFIGDIR=$PWD/matplotlib PATH=$root/scripts:$PATH

common=(--model llama-tiny --data d/x_train.bin --valid-data d/x_val.bin --eval-interval 20
    --eval-iters 2 --micro-batch-size 2 --lr-warmup-iters 5)

prepare() {
    make_text 1 30000 >text
    "$root/tokenize" --output-prefix d/x text >log || fail "tokenize: $(cat log)"
}

is_png() {
    [[ $(head -c 8 "$1" | od -An -tx1) == " 89 50 4e 47 0d 0a 1a 0a" ]] || fail "$1 is no PNG"
}

# With the colours of a dark page.
is_svg() {
    [[ $(tail -c 7 "$1") == "</svg>" ]] || fail "$1 is no SVG"
    has "$1" "prefers-color-scheme: dark" || fail "$1 stays light"
}

# Pages ask for nothing: no address of any kind.
stands_alone() {
    ! grep -qE '(src|href|srcset)="[^d]|https?:|@import' "$1" || fail "$1 makes a request"
}

test_every_script_explains_itself() {
    local file
    mkdir -p tree && cp -r "$root/scripts" tree
    for file in "$root"/* "$root/.venv"; do
        if [[ ! -e tree/${file##*/} ]]; then ln -s "$file" tree; fi
    done
    find tree | grep -v __pycache__ | sort >before
    for file in tree/scripts/*; do
        if [[ -x $file && ! -d $file ]]; then
            expect_status 0 env PYTHONSAFEPATH=1 timeout 30 "$file" --help
            [[ $(wc -l <log) -ge 2 ]] || fail "$file --help says $(cat log)"
        fi
    done
    expect_message 0 "python3 scripts/includes.py" python3 tree/scripts/includes.py --help
    find tree | grep -v __pycache__ | sort | diff before - || fail "--help has side effects"
    expect_message 2 "text/x: Not a directory" compare --out text/x -- "${common[@]}"
    expect_message 2 "bf16: unknown option --no-such" compare --out unmade -- "${common[@]}" --no-such
    [[ ! -e unmade ]] || fail "a folder is left: $(ls -A unmade)"
}

# ---- compare ----------------------------------------------------------------------------------

# What all the other tests of compare look at.
test_comparison_is_run() {
    expect_message 0 "PASS: fp8 against bf16: every limit held; fp8's training loss " \
        compare --out c --seeds 2,3 -- "${common[@]}" --train-iters 60
}

# The weights before the first step are a function of model and seed, whatever the precision.
test_variants_start_from_equal_weights() {
    local options start=(train_gpt "${common[@]}" --train-iters 0 --save s)
    for options in --bf16 "--bf16 --fp8-format hybrid" "--fp8-format e5m2 --fp8-lm-head"; do
        # shellcheck disable=SC2086
        expect_status 0 "${start[@]}" --seed 2 $options || return
        cat s/latest/{model,optimizer-0-of-1}.safetensors | cksum >>sums
        rm -r s
    done
    [[ $(sort -u sums | wc -l) -eq 1 ]] || fail "other weights: $(cat sums)"
    expect_status 0 "${start[@]}" --seed 3 || return
    cat s/latest/{model,optimizer-0-of-1}.safetensors | cksum >>sums
    [[ $(sort -u sums | wc -l) -eq 2 ]] || fail "equal weights from another seed"
}

test_report_shows_what_it_should() {
    cp c/report.md log
    says "80.0% of the linear layers' FLOPs in FP8" "--fp8-lm-head not given" \
        "| qkv | 0-1 | 128 x 64 | E4M3 | E4M3 | E5M2 | FP8 | - | 13.3% |" "Noise of the seeds" \
        "| --fp8-format | none | hybrid |" "| fp8 | same start |" "train_gpt --keep 1" \
        "not judged | on a CPU the rounding is emulated" \
        "| fp8 | time to loss |" loss.svg validation.svg time.svg speed.svg norm.svg
    local part
    for part in loss validation time speed norm; do
        is_svg c/$part.svg
    done
    [[ $(grep -o 'src="data:image/svg' c/report.html | wc -l) -eq 5 ]] || fail "pictures"
    stands_alone c/report.html
}

test_ended_runs_are_not_run_again() {
    local command=(compare --out c --run-only --seeds "2,3" -- "${common[@]}" --train-iters 60)
    expect_status 0 "${command[@]}" || return
    [[ $(grep -c "has ended already" log) -eq 4 ]] || fail "$(cat log)"
    [[ $(grep -c '"kind":"run"' c/fp8/seed-2/metrics.jsonl) -eq 1 ]] || fail "run again"
    expect_message 2 "with other options (--train-iters 61 differs)" \
        "${command[@]}" --train-iters 61
    cp -r c again && rm -r again/*/seed-2
    command=(compare --out again --seeds 2 --no-checkpoints --run-only -- "${common[@]}" --train-iters 10)
    expect_status 0 "${command[@]}" || return
    sed -i '/"kind":"step","step":6/,$d' again/fp8/seed-2/metrics.jsonl # as if it had been killed
    expect_status 0 "${command[@]}" || return
    [[ $(grep -c '"kind":"step"' again/fp8/seed-2/metrics.jsonl) -eq 10 ]] || fail "not anew"
    [[ ! -e again/fp8/seed-2/latest ]] || fail "a checkpoint"
    rm -r again
}

# Runs made elsewhere, on a GPU as far as their records say, judged by limits of the user's.
test_reports_on_runs_from_elsewhere() {
    mkdir -p g && cp -r c/bf16 c/fp8 g
    sed -i 's/"device":"CPU[^"]*"/"device":"NVIDIA H200"/' g/*/*/metrics.jsonl
    sed -i -E 's/"tokens_per_s":[0-9.e+]+/"tokens_per_s":100000/' g/bf16/*/metrics.jsonl
    sed -i -E 's/"tokens_per_s":[0-9.e+]+/"tokens_per_s":130000/' g/fp8/*/metrics.jsonl
    # two thirds of a run, and its end that a kill left out
    sed -i '/"kind":"step","step":41/,$d' g/fp8/seed-3/metrics.jsonl
    expect_message 1 "FAIL        fp8: speed-up" compare --report-only --out g --speed-limit 1.4
    says "1.300x" "FAIL        fp8: every run finished  fp8 seed 3: died" \
        "every run finished: not so, speed-up 1.300x: not above 1.4"
    # a limit that no number of seeds could hold, and one pair of runs, which shows no noise; on a
    # terminal that has no ±
    expect_message 3 "CANNOT TELL: b against a: training loss" \
        env PYTHONIOENCODING=ascii compare --report-only --out h \
        --train-limit 0.000001% --run a:c/bf16/seed-2 --run b:c/fp8/seed-2/metrics.jsonl \
        --run a:c/bf16/seed-3 --run b:c/fp8/seed-3 --valid-limit 50%
    says "the limit of 1e-06% is below the noise" "% ? 0."
    [[ $(sed -n 3p h/report.md) == "**CANNOT TELL: "* ]] || fail "$(sed -n 3p h/report.md)"
    expect_message 3 "one pair of seeds does not show the noise" compare --report-only --out h \
        --run a:c/bf16/seed-2 --run b:c/fp8/seed-2
}

# Nor does a run with the options of another one write into that one's folder.
test_a_config_saves_nowhere_else() {
    expect_status 0 train_gpt "${common[@]}" --train-iters 2 --save configured || return
    find configured | sort >before
    expect_status 0 compare --out from --no-checkpoints --run-only -- \
        --config configured/config.txt --train-iters 1 || return
    find configured | sort | diff before - || fail "it wrote into the folder of its --config"
}

# By name it is the last; a later command runs some of them, in another order.
test_first_variant_given_is_the_baseline() {
    local command=(compare --out o --no-checkpoints --run-only)
    expect_status 0 "${command[@]}" --variant 'plain: --bf16' --variant 'half: --fp8-format e5m2' \
        --variant 'all: --fp8-format hybrid' -- "${common[@]}" --train-iters 2 || return
    expect_message 3 "half, all against plain" compare --report-only --out o
    expect_status 0 "${command[@]}" --variant 'half: --fp8-format e5m2' --variant 'plain: --bf16' \
        -- "${common[@]}" --train-iters 2 || return
    expect_message 3 "plain, all against half" compare --report-only --out o
}

has_steps() {
    [[ $(grep -c '"kind":"step"' "$1/metrics.jsonl") -ge $2 ]]
}

test_interrupted_comparison_goes_on() {
    local command=(compare --out i -- "${common[@]}" --train-iters 150 --save-interval 20)
    local pid trainer status signal ended=0 steps=0
    for signal in INT USR2 HUP; do
        env --default-signal=HUP "${command[@]}" >i.log 2>&1 &
        pid=$! status=0
        wait_until has_steps i/fp8/seed-1234 $((steps + 2)) || return
        kill -$signal $pid
        wait $pid || status=$?
        [[ $status -eq 75 ]] || fail "$signal: status $status: $(cat i.log)"
        has i.log "the same command resumes here" || fail "$(cat i.log)"
        [[ $(head -n 1 i.log) == "one seed: a first look"* ]] || fail "$(cat i.log)"
        ended=$((ended + 1)) steps=$(grep -c '"kind":"step"' i/fp8/seed-1234/metrics.jsonl)
        [[ $(grep -c '"status":75' i/fp8/seed-1234/metrics.jsonl) -eq $ended ]] ||
            fail "the trainer was not asked to stop"
    done
    # killed outright, it leaves its trainer behind: nobody else may write there meanwhile
    : >i/fp8/seed-1234/console.log
    "${command[@]}" >i.log 2>&1 &
    pid=$!
    wait_until has i/fp8/seed-1234/console.log resuming || return
    trainer=$(tr -d ' ' <"/proc/$pid/task/$pid/children")
    kill -STOP "$trainer" && kill -9 $pid
    wait $pid 2>/dev/null
    expect_message 2 "wait for it, end it, or give another --out" "${command[@]}"
    kill -9 "$trainer"
    wait_until test ! -d "/proc/$trainer" || return
    status=0
    "${command[@]}" >i.log 2>&1 || status=$?
    [[ $status -eq 3 ]] || fail "status $status: $(tail -n 3 i.log)"
    grep -q '^Speed, memory .* --seeds 1234,1,2,3 runs those that are missing: 6 runs, about' \
        i.log || fail "no advice: $(cat i.log)"
    [[ $(grep -c '"kind":"run"' i/bf16/seed-1234/metrics.jsonl) -eq 1 ]] || fail "bf16 run again"
    [[ $(grep -c '"kind":"run"' i/fp8/seed-1234/metrics.jsonl) -eq 5 ]] || fail "fp8 not resumed"
    "$root/test/metrics_tool.py" i/fp8/seed-1234/metrics.jsonl >steps || fail "its metrics"
    [[ $(grep -c ^step steps) -eq 150 ]] || fail "not 150 steps"
}

# ---- plot and monitor -------------------------------------------------------------------------

# A run of 12 steps whose last 7 are done again with another learning rate.
test_resumed_run() {
    local options=("${common[@]}" --train-iters 12 --eval-interval 4 --save resumed --keep 0)
    expect_status 0 train_gpt "${options[@]}" --save-interval 5 || return
    cp resumed/metrics.jsonl first.jsonl
    expect_status 0 train_gpt "${options[@]}" --lr 1e-5 --resume resumed/step_00000005 || return
    [[ $(grep -c '"kind":"step"' resumed/metrics.jsonl) -eq 19 ]] || fail "not 19 records"
}

test_runs_are_drawn() {
    expect_status 0 plot resumed || return
    is_png resumed/plot.png
    expect_status 0 plot resumed c/fp8/seed-2 --out both.svg --x hours || return
    is_svg both.svg
}

# What a cluster's modules, a notebook and a user set for another Python than ours.
test_the_surroundings_change_no_picture() {
    expect_status 0 plot c/bf16/seed-2 --out usual.svg || return
    mkdir -p others/numpy
    echo 'raise ImportError("of another Python")' >others/numpy/__init__.py
    printf 'text.usetex: True\nlines.marker: o\n' >matplotlibrc # matplotlib looks for it here, too
    PYTHONPATH=$PWD/others MPLBACKEND=module://of.a_notebook \
        expect_status 0 plot c/bf16/seed-2 --out other.svg || return
    cmp usual.svg other.svg || fail
    rm matplotlibrc
    PYTHONPATH=$(echo "$root"/.venv/lib/python*/site-packages) expect_status 0 plot c/bf16/seed-2 --out other.svg
}

# Standard streams that are closed are as /dev/null.
test_streams_may_be_closed() {
    local closed
    for closed in '<&-' '>&-' '2>&-' '<&- >&- 2>&-'; do
        rm -f closed.png
        eval 'plot resumed --out closed.png' "$closed" || fail "$closed"
        is_png closed.png
    done
}

# The file grows under them: half of it, with a torn line, then the rest, resume and all.
# scripts_tests.py has what the board gets of it.
test_running_files_are_followed() {
    mkdir -p live
    local half
    half=$(($(grep -bm 1 '"step":8,' first.jsonl | cut -d : -f 1) + 20))
    head -c $half first.jsonl >live/metrics.jsonl
    monitor live --interval 0.1 --tensorboard tb >monitor.log 2>&1 &
    local monitor=$! status=0
    wait_until test -e tb/live || return
    tail -c +$((half + 1)) resumed/metrics.jsonl >>live/metrics.jsonl
    wait $monitor || status=$?
    [[ $status -eq 0 ]] || fail "status $status: $(cat monitor.log)"
    [[ $(grep -c "live  *12/12 .*finished" monitor.log) -eq 1 ]] || fail "$(cat monitor.log)"
    [[ -s $(compgen -G 'tb/live/events*') ]] || fail "no events: $(ls tb/live)"
}

test_terminal_shows_runs() {
    expect_message 0 "12/12" monitor --once resumed c/bf16/seed-2
    says "c/bf16/seed-2" $'!\033'
    script -qec "stty columns 70 rows 20; $root/scripts/monitor resumed" /dev/null >log
    says $'\033[H\033[J' "12/12"
    [[ $(tr -d '\r' <log | wc -L) -le 76 ]] || fail "wider than the terminal"
}

test_scripts_say_what_they_lack() {
    local lacking='import sys
sys.path.insert(0, sys.argv[1])
from llm8 import environment
environment.VENV, sys.modules["numpy"] = "venv", None
environment.OLDEST = tuple(map(int, sys.argv[2].split(".")))
environment.start("doctor")'
    expect_message 2 "Python lacks numpy" python3 -c "$lacking" "$root/scripts" 3.11
    says 'run `make scripts` in '
    mkdir venv && touch venv/ready # made, for a Python that is no more
    expect_message 2 'run `rm -r .venv; make scripts` in ' python3 -c "$lacking" "$root/scripts" 3.11
    expect_message 2 "4.1 or newer is needed" python3 -c "$lacking" "$root/scripts" 4.1
}

need_scripts
run_tests
