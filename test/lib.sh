#!/usr/bin/env bash
# What the shell tests share, as test.h is for the C ones: functions that are tests, called
# test_..., run by run_tests, that call `fail` when something is wrong. Tests run in a folder of
# their own.
set -u
root=${LLM8_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # quicker, for models this small
standin=$root/build/plain/standin_trainer    # the GPU trainer, where a C++ compiler has built it
# the stand-in for NCCL, except where tests run on a GPU
if [[ -z ${LLM8_BIN:-} && -z ${LLM8_TESTS:-} ]]; then
    export LD_LIBRARY_PATH=$root/build/standin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
script=$(realpath "$0")
mkdir -p work && cd work || exit 1 # test/run.sh keeps its log in the folder above
passed=0 failed=0 skipped=0 failing=0 skipping=0

# Fails the test, by its line; without a text it shows the end of the file `log`.
fail() {
    local i=1
    while [[ ${FUNCNAME[i + 1]:-run_tests} != run_tests ]]; do i=$((i + 1)); done
    printf '  %s, line %s: %s\n' "${FUNCNAME[i]}" "${BASH_LINENO[i - 1]}" "${*:-$(tail -n 5 log)}" >&2
    failing=1
}

skip() {
    echo "  skipped: $*"
    skipping=1
}

# Runs a file's functions `prepare` and test_..., in the order in which they stand.
run_tests() {
    local test
    for test in $(grep -oE '^(prepare|test_[a-z0-9_]+)\(\)' "$script" | tr -d '()'); do
        failing=0 skipping=0
        "$test"
        if [[ $failing -ne 0 ]]; then
            echo "  FAILED $test" >&2
            failed=$((failed + 1))
        elif [[ $skipping -ne 0 ]]; then
            skipped=$((skipped + 1))
        else
            passed=$((passed + 1))
        fi
    done
    summary
}

# The last line, which test/run.sh adds up.
summary() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [[ $failed -eq 0 ]]
}

# Ends a file of tests, none of which can run here, as one skipped test.
skip_all() {
    echo "  skipped: $*"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

# Checks a command's exit status; its output goes to the file `log`.
expect_status() {
    local expected=$1 status=0
    shift
    "$@" >log 2>&1 || status=$?
    if [[ $status -ne $expected ]]; then
        fail "exit status $status, not $expected: $* | $(tail -n 3 log)"
        return 1
    fi
}

# Whether a file contains a text.
has() {
    grep -qF -- "$2" "$1"
}

# Checks that two texts are the same, such as a link's target and a step's folder.
is() {
    [[ $1 == "$2" ]] || fail "'$1', not '$2'"
}

# Checks that the file `log` has all of these texts; a text after a `!` must not be there.
says() {
    local text
    for text; do
        if [[ $text == !* ]]; then
            ! has log "${text#!}" || fail "'${text#!}': $(grep -F -m 3 -- "${text#!}" log)"
        else
            has log "$text" || fail "no '$text': $(tail -n 5 log)"
        fi
    done
}

# Checks a command's exit status and what its output has, as `says` does.
expect_message() {
    local status=$1 text=$2
    shift 2
    expect_status "$status" "$@" || return
    says "$text" '!Traceback'
}

# Checks the rows of a table on standard input: an exit status, a command as the shell reads it (but
# * stays *), and what it says, as of `says`. An error is one printable line:
#   1|train --data no*.bin|error: --data no*.bin: no such file|./tokenize
check_rows() {
    local status command texts words text got
    while IFS='|' read -r status command texts; do
        got=0
        set -f && eval "words=($command)" && set +f
        ("${words[@]}") >out 2>errors </dev/null || got=$?
        cat out errors >log
        [[ $got -eq $status ]] || fail "status $got, not $status: $command: $(tail -n 3 log)"
        if LC_ALL=C grep -q '[[:cntrl:]]' errors; then fail "not printable: $command"; fi
        grep -vE '^(warning|note): ' errors >error
        [[ $status -ne 1 || ($(wc -l <error) -eq 1 && $(<error) == 'error: '*) ]] ||
            fail "not one error: $command: $(<errors)"
        while IFS= read -r text; do [[ -z $text ]] || says "$text"; done < <(tr '|' '\n' <<<"$texts")
    done
}

# Whether a check of one row passes, its complaints apart: to plant faults.
passes() {
    (failing=0 && "$@" && exit $failing) 2>complaints
}

train_gpt() {
    "$root/train_gpt" "$@"
}

# Both trainers with their words, a line each; the GPU trainer over the stand-ins, where it is built.
trainers() {
    echo "$root/train_gpt"
    if [[ -x $standin ]]; then
        echo "$standin --no-cuda-graphs --gpus 2 --distributed-timeout 20"
    fi
}

# Makes the Python environment of `make scripts`, one test at a time; skips all where that fails.
need_scripts() {
    mkdir -p "$root/build"
    flock "$root/build/scripts.lock" \
        env -u MAKEFLAGS -u MFLAGS timeout 600 make -s -C "$root" scripts >scripts.log 2>&1 ||
        skip_all "no .venv, and make scripts fails: $(tail -n 1 scripts.log)"
    rm scripts.log
}

# start LOG COMMAND...: in the background, what it says in a new LOG; its id goes to `started`.
start() {
    rm -f "$1" # so that what is waited for is this run's
    "${@:2}" >"$1" 2>&1 &
    started=$!
}

# Waits for the end of a background process; its exit status goes to `status`.
await_end() {
    wait_until is_gone "$1" || kill -9 "$1"
    status=0
    wait "$1" 2>/dev/null || status=$?
}

# stop SIGNAL STATUS: sends it to what `start` has started, which must end so.
stop() {
    status=0
    kill "-$1" "$started"
    if [[ $1 == KILL ]]; then wait "$started" 2>/dev/null || status=$?; else await_end "$started"; fi
    is "status $status" "status $2"
}

# stopped SIGNAL PATTERN COMMAND...: runs it, with its output in the file `log`, and sends the
# signal once the output has the pattern. Its exit status must be 75; after KILL 137.
stopped() {
    start log "${@:3}"
    wait_until grep -qE "$2" log
    if [[ $1 == KILL ]]; then stop KILL 137; else stop "$1" 75; fi
}

# Waits until a command succeeds, 20 seconds at most.
wait_until() {
    local i
    for ((i = 0; i < 2000; i++)); do
        if "$@" 2>/dev/null; then return; fi
        sleep 0.01
    done
    fail "not within 20 seconds: $*"
    return 1
}

is_gone() {
    ! kill -0 "$1"
}

# About $2 bytes of text on standard output; the same for the same $1.
make_text() {
    awk -v seed="$1" -v size="$2" 'BEGIN {
        split("Anna Ben Clara David sees finds draws counts three seven red blue apples boats", w)
        for (n = 0; n < size; ) {
            line = ""
            for (i = 0; i < 8; i++) {
                seed = (seed * 1103515245 + 12345) % 2147483648
                line = line w[1 + int(seed / 65536) % 14] " "
            }
            print line
            n += length(line) + 1
        }
    }'
}

# Shards d/x_train.bin and d/x_val.bin of about $1 bytes, which stay in the file `text`.
make_shards() {
    make_text 1 "$1" >text
    expect_status 0 "$root/tokenize" --output-prefix d/x text
}

# Overwrites bytes of a file: $1 file, $2 offset, $3 as printf's escapes.
poke() {
    printf '%b' "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# The newest step in a --save folder.
newest_step() {
    printf '%s\n' "$1"/step_* | sed -n 's,.*/step_0*\([0-9]\+\)$,\1,p' | sort -n | tail -n 1
}

# Whether two checkpoints hold the same; meta.json has times and paths in it besides.
same_checkpoint() {
    diff -rq -x meta.json "$1/" "$2/" && diff <(progress_of "$1") <(progress_of "$2")
} >difference 2>&1

progress_of() {
    grep -E '"(step|samples|tokens|skipped|skipped_in_row|loss|valid_loss|best_valid_loss)"|"window_' \
        "$1/meta.json"
}

# The steps and evaluations of a metrics.jsonl, or of the one in a folder, checked on the way.
records_of() {
    local file=$1
    if [[ -d $file ]]; then file=$file/metrics.jsonl; fi
    "$root/test/metrics_tool.py" "$file" || fail "$file"
}

steps_of() {
    records_of "$1" | grep '^step'
}

# resumes WHOLE STEPS COMMAND...: the run `parts`, which ends after each of these steps and is resumed,
# has every step and the end of the run WHOLE, which goes through; COMMAND fixes its schedule.
resumes() {
    local whole=$1 step
    rm -rf parts
    for step in $2 ''; do
        expect_status 0 "${@:3}" --save parts --resume latest ${step:+--train-iters "$step"} || return
    done
    same_checkpoint "$whole/latest" parts/latest || fail "${*:3}: another end: $(<difference)"
    cmp -s <(steps_of "$whole") <(steps_of parts) || fail "${*:3}: other steps"
}
