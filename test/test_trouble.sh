#!/usr/bin/env bash
# The whole trainer in trouble: stopped, out of disk, out of numbers. test_kills.sh kills it.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
metrics_tool=$root/test/metrics_tool.py
export LD_LIBRARY_PATH=$root/build/standin

common=(--model llama-tiny --data d/x_train.bin --micro-batch-size 2 --lr 3e-3 --log-interval 1)

prepare() {
    make_shards 1500
}

# A run that is sent signal $1 after its first steps; its exit status goes to `status`.
stop_by() {
    start stop.log env "${signals[@]}" "$root/train_gpt" "${common[@]}" --train-iters 1000000 \
        --save "$1" --save-interval 7
    wait_until grep -q '^step ' stop.log
    kill -"$1" "$started"
    # a terminal's end comes twice, the limit of CPU time every second
    if [[ $1 == HUP || $1 == XCPU ]]; then kill -"$1" "$started"; fi
    await_end "$started"
}

test_signals_save_and_say_so() {
    local signal status step says again signals=(--default-signal=HUP)
    for signal in TERM INT USR1 HUP XCPU; do
        stop_by $signal
        [[ $status -eq 75 ]] || fail "$signal: exit status $status"
        says='^stopped by signal [0-9]+ after step [0-9]+; saved; resume with (.* --resume latest)$'
        [[ $(tail -n 1 stop.log) =~ $says ]] || { fail "$signal: $(tail -n 1 stop.log)"; return; }
        again=${BASH_REMATCH[1]}
        step=$(newest_step "$signal")
        has stop.log "after step $step;" || fail "$signal: saved step $step"
        tail -n 1 "$signal/metrics.jsonl" | grep -qF '"status":75' || fail "$signal: metrics"
        expect_status 0 bash -c "$again --train-iters $((step + 3)) \
            --lr-decay-iters 1000000" || return
        has log "resuming from $signal/step_" || fail "$signal: not resumed"
        expect_status 0 train_gpt "${common[@]}" --train-iters $((step + 3)) --save straight \
            --lr-decay-iters 1000000 --save-interval 1000000 || return
        same_checkpoint "$signal/latest" straight/latest || fail "$signal: another end"
        rm -rf straight
    done
}

# The command that a stopped run prints is one to paste, wherever the program and the folder are.
test_the_resume_command_is_quoted() {
    local program="./sp ace/it's \$x" status again
    mkdir -p 'sp ace' && cp "$root/train_gpt" "$program"
    start stop.log "$program" "${common[@]}" --train-iters 1000000 --save "it's/r \$y"
    wait_until grep -q '^step ' stop.log
    kill -TERM "$started"
    await_end "$started"
    again=$(sed -n 's/.*; saved; resume with //p' stop.log)
    expect_said 0 "resuming from it's/r \$y/step_" bash -c "$again --train-iters 1"
}

# A set of 100 questions, "what is it", in byte tokens, each with four answers.
make_choices() {
    python3 - <<'END'
import struct, sys
numbers, longest = [], 0
for i in range(100):
    row = [i, i % 4, 4]
    for text in ("what is it", *(f" {word} of {i}" for word in ("one", "two", "six", "ten"))):
        row += [len(text), *text.encode()]
    longest = max(longest, 4 * (len(row) + 2))
    numbers += [65535, 4 * (len(row) + 2), *row]
sys.stdout.buffer.write(struct.pack("<256i", 20240522, 2, 100, longest, *[0] * 252) +
                        struct.pack(f"<{len(numbers)}I", *numbers))
END
}

# An evaluation or a score that a signal broke off, also after the last step, is made when the run
# is resumed: its records and checkpoints are those of the run that nothing disturbed.
test_a_signal_breaks_an_evaluation_off() {
    local trainer words lacks after status step
    local evaluated=(--valid-data e/v_train.bin --eval-iters 0 --eval-choices e/quiz.bin
        --eval-interval 2 --save-interval 2 --keep 0 --train-iters 6)
    make_text 5 40000 >valid
    expect_status 0 "$root/tokenize" --output-prefix e/v --valid-fraction 0 valid || return
    make_choices >e/quiz.bin
    while read -ra trainer; do
        words="${trainer[*]}"
        rm -rf undisturbed broken
        trainer+=("${common[@]}" "${evaluated[@]}")
        expect_status 0 "${trainer[@]}" --save undisturbed || return
        while IFS=, read -r step lacks after; do
            start stop.log "${trainer[@]}" --save broken --resume latest
            wait_until grep -q "$after" stop.log
            kill -TERM "$started"
            await_end "$started"
            [[ $status -eq 75 ]] || fail "$words: status $status: $(tail -n 3 stop.log)"
            grep -q "after step $step; saved; resume with" stop.log || fail "$(tail -n 1 stop.log)"
            [[ $(newest_step broken) -eq $step ]] || fail "$words: saved $(newest_step broken)"
            ! has stop.log "$lacks after step $step " || fail "$words: $lacks was not broken off"
        done <<<$'2,eval,^step *2/\n4,quiz,^eval after step 4 \n6,eval,^step *6/'
        expect_status 0 "${trainer[@]}" --save broken --resume latest || return
        "$metrics_tool" undisturbed/metrics.jsonl >steps || fail "metrics"
        grep -q '^choices step 6' steps || fail "$words: no score"
        "$metrics_tool" broken/metrics.jsonl | cmp -s - steps ||
            fail "$words: $("$metrics_tool" broken/metrics.jsonl | diff - steps)"
        for step in 2 4 6; do
            same_checkpoint {undisturbed,broken}/step_0000000$step || fail "$words: step $step"
        done
        [[ $(readlink broken/best) == "$(readlink undisturbed/best)" ]] || fail "$words: best"
        expect_status 0 train_gpt --save broken --list-checkpoints
        ! has log damaged || fail "$words: $(cat log)"
    done < <(trainers)
}

# What was broken off is made with the data and the sets of the resume.
test_an_evaluation_is_made_of_what_is_given() {
    local options=(--eval-interval 2 --train-iters 6 --save other --eval-choices) status given
    rm -rf other
    start stop.log "$root/train_gpt" "${common[@]}" "${options[@]}" e/quiz.bin
    wait_until grep -q '^step *2/' stop.log
    kill -TERM "$started"
    await_end "$started"
    grep -q 'after step 2; saved; resume with' stop.log || fail "$(tail -n 1 stop.log)"
    mv other stopped_other
    for given in "'' " "e/quiz.bin " "e/quiz.bin eval" "'' eval"; do
        rm -rf other && cp -a stopped_other other
        # shellcheck disable=SC2046 # words
        eval expect_status 0 train_gpt '"${common[@]}" "${options[@]}"' "${given% *}" \
            --resume latest $([[ $given != *eval ]] || echo --valid-data d/x_val.bin) || return
        [[ $(grep -c '^quiz after step 2 ' log) -eq $(grep -c quiz <<<"$given") &&
            $(grep -c '^eval after step 2 ' log) -eq $(grep -c eval <<<"$given") ]] ||
            fail "$given: $(grep after log)"
    done
}

# A sample is not repeated.
test_a_signal_breaks_a_sample_off() {
    local trainer status
    while read -ra trainer; do
        rm -rf sampled
        start stop.log "${trainer[@]}" "${common[@]}" --train-iters 6 --sample-interval 3 \
            --sample-length 1000000 --save sampled
        wait_until grep -q '^sample after step 3' stop.log
        kill -TERM "$started"
        await_end "$started"
        [[ $status -eq 75 ]] || fail "status $status: $(tail -c 300 stop.log)"
        # of several ranks, the next step tells the others
        [[ $(newest_step sampled) == [345] ]] || fail "saved $(newest_step sampled)"
    done < <(trainers)
}

# What saves nothing has nothing to end first.
test_signals_end_samples_at_once() {
    start stop.log "$root/train_gpt" "${common[@]}" --sample-only --sample-length 1000000 \
        --no-quiet
    wait_until grep -q '^sample after' stop.log
    kill -TERM "$started"
    await_end "$started"
    [[ $status -eq 143 ]] || fail "exit status $status"
}

# A terminal's end reaches scripts/restart.sh alone, whose run is a process group of its own.
test_a_hangup_reaches_a_restarted_run() {
    local status signals=(--default-signal=HUP "$root/scripts/restart.sh")
    stop_by HUP
    [[ $status -eq 75 ]] || fail "exit status $status"
    has stop.log 'stopped by signal 1 after step' || fail "$(tail -n 1 stop.log)"
}

# However many signals come, and when: the end is the run's, and its status. A run that is stopped
# has not ended.
test_a_restarted_run_is_waited_for() {
    local try i run child status
    cat >slow <<'END'
#!/usr/bin/env bash
trap 'asked=yes' HUP
echo $$ >slow.pid
until [[ -n ${asked:-} ]]; do sleep 0.02; done
for i in {1..10}; do sleep 0.02; done
echo ended
exit 75
END
    chmod +x slow
    for try in {1..10}; do
        rm -f slow.pid
        env --default-signal=HUP "$root/scripts/restart.sh" ./slow --save none >slow.log 2>&1 &
        run=$!
        wait_until test -s slow.pid || return
        child=$(cat slow.pid)
        if [[ $try -eq 1 ]]; then
            kill -STOP "$child"
            sleep 0.1
            kill -CONT "$child"
        fi
        for i in {1..20}; do
            kill -HUP $run 2>/dev/null
            read -r -t "0.00$((RANDOM % 10))" <>/dev/null
        done
        status=0
        wait $run || status=$?
        [[ $status -eq 75 && $(cat slow.log) == ended* ]] || fail "$try: $status, $(cat slow.log)"
        wait_until is_gone "$child"
    done 2>/dev/null
}

# nohup has the signal ignored, and so does the run.
test_a_hangup_that_is_ignored_stays_so() {
    start nohup.log env --ignore-signal=HUP "$root/train_gpt" "${common[@]}" \
        --train-iters 1000000 --save nohup
    wait_until grep -q '^step ' nohup.log
    kill -HUP "$started"
    kill -TERM "$started"
    await_end "$started"
    has nohup.log 'stopped by signal 15' || fail "$(tail -n 1 nohup.log)"
}

# | head -n 1
test_a_reader_that_leaves_ends_no_run() {
    local status
    "$root/train_gpt" "${common[@]}" --train-iters 20 --save-interval 5 --save piped 2>err |
        head -n 1 >log
    status=${PIPESTATUS[0]}
    [[ $status -eq 0 ]] || fail "exit status $status"
    [[ $(readlink piped/latest) == step_00000020 ]] || fail "$(ls piped)"
    [[ $(grep -c '"kind":"step"' piped/metrics.jsonl) -eq 20 ]] || fail "steps are missing"
    [[ $(grep -c '^warning: the standard output could not be written' err) -eq 1 ]] ||
        fail "$(cat err)"
}

# Both trainers, where the stand-ins are built.
trainers() {
    local standin=$root/build/plain/standin_trainer
    echo "$root/train_gpt"
    if [[ ! -x $standin ]]; then return; fi
    echo "$standin --no-cuda-graphs"
    echo "$standin --no-cuda-graphs --gpus 2"
}

saves_more() {
    [[ $(readlink moved/latest) > $newest ]]
}

# Moved (a link may lead there), deleted, or another one in its place: what is saved from then on is
# a whole run's folder.
test_a_folder_that_is_moved_is_made_anew() {
    local how trainer newest='' hows=('while ! rm -r moved; do :; done 2>/dev/null' 'mv moved gone; mkdir moved'
        'kill -STOP $started; newest=$(readlink moved/latest); cp -a moved away; mv moved gone
            ln -s away moved; kill -CONT $started; wait_until saves_more' 'mv moved gone')
    while read -ra trainer; do
        for how in "${hows[@]}"; do
            rm -rf gone moved away
            start moved.log "${trainer[@]}" "${common[@]}" --train-iters 1000000 --save moved \
                --save-interval 20
            wait_until test -e moved/latest/
            eval "$how"
            wait_until test -e moved/latest/
            kill "$started"
            await_end "$started"
            has moved.log 'warning: --save moved: the folder was moved or deleted' ||
                fail "$how: $(tail -n 1 moved.log)"
            [[ -s moved/config.txt ]] || fail "$how: no config.txt"
            # a copy lacks the steps until the save that finds it
            [[ -L moved ]] || "$metrics_tool" moved/metrics.jsonl >steps || fail "$how: metrics"
            expect_status 0 "${trainer[@]}" --config moved/config.txt --resume latest \
                --train-iters 1
        done
        "$metrics_tool" gone/metrics.jsonl >steps || fail "metrics of the old folder"
        hows=('mv moved gone')
    done < <(trainers)
}

# A rate that makes the weights infinite within some steps.
diverging=(--lr 100 --weight-decay 100 --clip-grad 0 --lr-decay-style constant --train-iters 200
    --keep 0 --save-interval 1)

test_nonfinite_steps_are_skipped_and_counted() {
    expect_status 3 train_gpt "${common[@]}" "${diverging[@]}" --max-skipped 6 --save nan || return
    local last first
    last=$(newest_step nan) first=$((last - 5))
    [[ $(grep -c '^step .* | SKIPPED$' log) -eq 6 ]] || fail "not 6 steps skipped"
    grep -qE "^step +$first/200 .* SKIPPED$" log || fail "step $first was not the first one"
    has log 'stopped: 6 steps in a row were skipped (--max-skipped)' ||
        fail "$(tail -n 1 log)"
    "$metrics_tool" nan/metrics.jsonl >steps || fail "metrics"
    [[ $(grep -c '^step .* nan .* skipped 1$' steps) -eq 6 ]] || fail "$(tail -n 7 steps)"
    [[ $(grep -c 'null.*"nonfinite":true' nan/metrics.jsonl) -ge 6 ]] || fail "no null with a flag"
    local before after
    printf -v before nan/step_%08d $((first - 1))
    printf -v after nan/step_%08d "$last"
    cmp -s "$before/model.safetensors" "$after/model.safetensors" || fail "the weights changed"
    cmp -s {"$before","$after"}/optimizer-0-of-1.safetensors || fail "the moments changed"
    find nan -type f ! -name .lock -exec cksum {} + >files
    expect_said 3 '(--max-skipped); to go on, resume an earlier checkpoint, or with a larger' \
        train_gpt "${common[@]}" "${diverging[@]}" --max-skipped 6 --save nan --resume latest
    find nan -type f ! -name .lock -exec cksum {} + | cmp -s files - || fail "a file has changed"
    expect_status 3 train_gpt "${common[@]}" "${diverging[@]}" --max-skipped 8 --save nan \
        --resume latest || return
    [[ $(grep -c SKIPPED log) -eq 2 ]] || fail "the count of skipped steps was not resumed"
}

test_divergence_is_printed_as_numbers() {
    expect_status 3 train_gpt "${common[@]}" "${diverging[@]}" --model gpt2-tiny --max-skipped 6 \
        --save numbers || return
    grep -qE '^step .* loss [0-9.]+e\+[0-9]+ .* norm nan ' log || fail "not diverged: $(cat log)"
    ! grep -E '^step' log | grep -qE -- '-nan|[0-9]{7}' || fail "$(grep '^step' log)"
    expect_status 0 train_gpt --save numbers --list-checkpoints || return
    ! grep -qE -- '-nan|[0-9]{7}\.' log || fail "$(cat log)"
}

# An embedding that is looked up for no token decays alone: from almost too large to infinite.
test_infinite_weights_are_not_loaded_in_silence() {
    local options=("${common[@]}" --untie-embeddings-and-output-weights) file at trainer
    expect_status 0 train_gpt "${options[@]}" --train-iters 0 --save large || return
    file=large/latest/model.safetensors
    at=$(head -c 4000 $file | grep -aoE 'embed_tokens.weight":\{[^}]*' | grep -oE '\[[0-9]+,[0-9]+\]$')
    at=$(($(od -An -tu8 -N8 $file) + 8 + $(grep -oE '[0-9]+' <<<"$at" | head -n 1)))
    poke $file $at '\346\261\141\177' # 3e38
    while read -ra trainer; do
        cp -r large/latest/ whole
        expect_said 1 ' --load whole/model.safetensors: damaged: its checksum is ' \
            "${trainer[@]}" "${options[@]}" --load whole --train-iters 1
        rm whole/meta.json # now it is a folder of Hugging Face's
        expect_said 0 'token_embedding.weight has 1 enormous values: is the file damaged?' \
            "${trainer[@]}" "${options[@]}" --lr 100 --weight-decay 100 --load whole \
            --train-iters 1 --save inf || return
        has log 'starting from the weights of whole (it has no checksums' || fail "$(cat log)"
        expect_status 1 "${trainer[@]}" "${options[@]}" --load inf/latest --train-iters 2
        grep -q 'error: --load inf/step_00000001: token_embedding.weight has 1 NaN or infinite ' log ||
            fail "$(tail -n 2 log)"
        expect_status 0 "${trainer[@]}" "${options[@]}" --train-iters 2 --resume inf/latest --save on
        grep 'warning: ' log >warnings
        grep -q 'warning: inf/.*: token_embedding.weight has 1 NaN or infinite value' warnings ||
            fail "$(cat warnings)"
        [[ $(wc -l <warnings) -eq 1 ]] || fail "$(cat warnings)"
        rm -r inf on whole
    done < <(trainers)
}

# Learns, diverges and is resumed: the last checkpoint before it stays, whatever --keep says, and
# can be trained.
test_divergence_leaves_the_last_good_checkpoint() {
    local trainer step
    while read -ra trainer; do
        rm -rf good on
        trainer+=("${common[@]}")
        expect_status 0 "${trainer[@]}" --save good --keep 1 --save-interval 1 --train-iters 40 \
            --lr-decay-style constant || return
        for step in 4 8; do
            expect_status 3 "${trainer[@]}" "${diverging[@]}" --save good --keep 1 --resume latest \
                --max-skipped $step || return
        done
        step=$(find good -name 'step_*' -type d | sort | head -n 1)
        [[ ${step#good/} == step_0000004[01] && $(find good -name 'step_*' -type d | wc -l) -eq 2 ]] ||
            fail "${trainer[*]}: $(ls good)"
        expect_status 0 "${trainer[@]}" --resume "$step" --train-iters 45 --lr 1e-4 --save on || return
        ! grep -E 'SKIPPED|warning' log | grep -qv 'the learning rate falls from 0.003 to 0.0001' ||
            fail "${trainer[*]}: $(cat log)"
    done < <(trainers)
}

# Finite, and far above the best.
test_a_rising_loss_leaves_the_last_good_checkpoint() {
    local options=(--save high --keep 1 --save-interval 10 --lr-decay-style constant)
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --train-iters 60 || return
    [[ $(kept high) == 'step_00000050 step_00000060 ' ]] || fail "$(ls high)"
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --train-iters 100 --lr 3 \
        --resume latest || return
    ! has log SKIPPED || fail "not finite"
    [[ $(kept high) == 'step_00000060 step_00000100 ' ]] || fail "$(ls high; tail -n 3 log)"
    # an evaluation says at once that the newest is good
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --train-iters 20 --save evaluated \
        --valid-data d/x_val.bin --eval-interval 10 || return
    grep -qE '"proven":\s*20,' evaluated/latest/meta.json || fail "$(cat evaluated/latest/meta.json)"
}

kept() {
    find "$1" -name 'step_*' -type d -printf '%f\n' | sort | tr '\n' ' '
}

# A diverging run whose last save fails says so by its status: 1, not 3.
test_a_failed_last_save_decides_the_status() {
    expect_status 3 train_gpt "${common[@]}" "${diverging[@]}" --max-skipped 6 --save nosave \
        --save-interval 100000 --metrics m.jsonl || return
    rm -r nosave
    (
        ulimit -f 1000 # KiB; the optimizer's file is larger
        expect_status 1 train_gpt "${common[@]}" "${diverging[@]}" --max-skipped 6 --save nosave \
            --save-interval 100000 --metrics m.jsonl
        exit $failing
    ) || failing=1
    has log 'stopped: 6 steps in a row' || fail "$(tail -n 2 log)"
    has log 'warning: saving the checkpoint of step' || fail "$(tail -n 2 log)"
}

test_torn_metrics_are_mended() {
    expect_status 0 train_gpt "${common[@]}" --train-iters 5 --save torn || return
    "$metrics_tool" torn/metrics.jsonl >steps || fail "metrics"
    printf '{"kind":"step","step":6,"tok' >>torn/metrics.jsonl
    ! "$metrics_tool" torn/metrics.jsonl >steps 2>&1 || fail "a torn line is not seen"
    expect_status 0 train_gpt "${common[@]}" --train-iters 7 --save torn --resume latest || return
    "$metrics_tool" torn/metrics.jsonl >steps || fail "the torn line stayed"
    [[ $(grep -c '^step' steps) -eq 7 ]] || fail "$(cat steps)"
    printf '{"kin' >begun
    expect_status 0 train_gpt "${common[@]}" --train-iters 1 --metrics begun || return
    "$metrics_tool" begun >steps || fail "$(head -c 50 begun)"
    # zeros: the trace of a power cut, with and without a part of a line
    local torn
    for torn in '' '{"kind":"step","st' '{"k'; do
        printf '%s' "$torn" >>torn/metrics.jsonl
        head -c 5000 /dev/zero >>torn/metrics.jsonl
        expect_status 0 train_gpt "${common[@]}" --train-iters 7 --save torn --resume latest ||
            return
        "$metrics_tool" torn/metrics.jsonl >steps || fail "$torn and zeros stayed"
        [[ $(grep -c '^step' steps) -eq 7 ]] || fail "$torn and zeros: $(cat steps)"
    done
    # another file is not mended, nor appended to
    local text run
    run=$(head -n 1 torn/metrics.jsonl)'\n'
    for text in 'a note\nwithout an end' 'a note\nwith one\n' '\0\0\0\0\0\0\0\0\0\0\0\1' \
        '{"kind":"run"}\na note' '{"kind":"Pod"}' '{"kind":"Pod"}\n' '{"kind":"run"}' \
        '{\n  "kind": "step"\n}\n' '{"kind": "save", "of": 1}\n{"ki' "$run{\"kind\":\"Pod\"}" \
        "$run{\"kind\":\"step\",\"at\""; do
        printf '%b' "$text" >note && cp note notes
        expect_said 1 'error: --metrics notes: not metrics: ' train_gpt "${common[@]}" \
            --metrics notes --train-iters 1
        cmp -s note notes || fail "notes: $(cat notes)"
    done
}

# Two runs would make one file of two histories.
test_metrics_have_one_run() {
    local status
    start first.log "$root/train_gpt" "${common[@]}" --train-iters 1000000 --metrics shared.jsonl
    wait_until grep -q '^step ' first.log
    expect_said 1 'error: --metrics shared.jsonl: another run writes to it' train_gpt \
        "${common[@]}" --train-iters 5 --metrics shared.jsonl
    kill -TERM "$started"
    await_end "$started"
    expect_status 0 train_gpt "${common[@]}" --train-iters 5 --metrics shared.jsonl || return
    [[ $(grep -c '"kind":"run"' shared.jsonl) -eq 2 ]] || fail "$(cut -c 1-60 shared.jsonl)"
    # a device has no history
    start first.log "$root/train_gpt" "${common[@]}" --train-iters 1000000 --metrics /dev/null
    wait_until grep -q '^step ' first.log
    expect_status 0 train_gpt "${common[@]}" --train-iters 5 --metrics /dev/null --save nowhere
    ! has log warning || fail "$(cat log)"
    kill -TERM "$started"
    await_end "$started"
}

# Moved while the run goes on, as by logrotate: from the next save on there is a new one.
test_metrics_that_are_moved_are_begun_anew() {
    local status
    start moved.log "$root/train_gpt" "${common[@]}" --train-iters 1000000 --save rotated \
        --save-interval 20
    wait_until test -e rotated/latest/
    mv rotated/metrics.jsonl rotated/older.jsonl
    wait_until test -s rotated/metrics.jsonl
    kill -TERM "$started"
    await_end "$started"
    has moved.log 'warning: rotated/metrics.jsonl: moved or deleted; ' || fail "$(tail moved.log)"
    "$metrics_tool" rotated/older.jsonl >steps || fail "the older metrics"
    "$metrics_tool" rotated/metrics.jsonl >steps || fail "metrics"
    tail -n 1 rotated/metrics.jsonl | grep -q '"status":75' || fail "no end"
}

test_metrics_need_a_file() {
    mkfifo pipe
    expect_said 1 'error: --metrics pipe: a pipe or a terminal' train_gpt "${common[@]}" \
        --train-iters 1 --metrics pipe
}

test_unwritable_metrics_stop_no_run() {
    mkdir full_metrics
    ln -s /dev/full full_metrics/metrics.jsonl
    expect_status 0 train_gpt "${common[@]}" --train-iters 5 --save full_metrics || return
    [[ $(grep -c '^warning: full_metrics/metrics.jsonl: could not be written' log) -eq 1 ]] ||
        fail "not one warning: $(grep warning log)"
    expect_status 0 train_gpt --save full_metrics --list-checkpoints
}

# What an error ended has it in its metrics, what was killed has no end; a resume goes on after both.
test_an_error_is_in_the_metrics() {
    expect_status 0 train_gpt "${common[@]}" --train-iters 5 --save died || return
    expect_status 1 train_gpt "${common[@]}" --train-iters 9 --save died --resume latest \
        --dump-gradients none/x || return
    [[ $(tail -n 1 died/metrics.jsonl) == \
        "{\"kind\":\"end\",\"step\":5,\"status\":1,\"error\":\"$(sed -n 's/^error: //p' log)\"}" ]] ||
        fail "$(tail -n 1 died/metrics.jsonl)"
    expect_status 0 train_gpt "${common[@]}" --train-iters 7 --save died --resume latest || return
    "$metrics_tool" died/metrics.jsonl >steps || fail "metrics"
    [[ $(tail -n 1 died/metrics.jsonl) == '{"kind":"end","step":7,"status":0}' ]] ||
        fail "$(tail -n 1 died/metrics.jsonl)"
    cp died/metrics.jsonl before # an error before the start is recorded leaves the file as it is
    expect_status 1 train_gpt "${common[@]}" --train-iters 9 --save died --resume latest \
        --num-layers 3 || return
    cmp -s died/metrics.jsonl before || fail "$(tail -n 1 died/metrics.jsonl)"
}

# The tool that the tests above rely on must refuse what is wrong.
test_metrics_tool_sees_faults() {
    local edit
    for edit in 's/"loss":[0-9.]*/"loss":nan/' 's/"loss":[0-9.]*/"loss":null/' 's/"norm"/"nrm"/' \
        's/"skipped":0/"skipped":0,"nonfinite":true/' '3d' 's/"kind":"step"/"kind":"stop"/' \
        's/}$/}}/' 's/"options"/"option"/' 's/"lr":"results",//' \
        's/"seconds":[0-9.e-]*/"seconds":"1"/'; do
        sed "$edit" torn/metrics.jsonl >wrong.jsonl
        ! "$metrics_tool" wrong.jsonl >steps 2>&1 || fail "passed: $edit"
    done
}

# What a run on a full disk must have done: $1 folder, $2 the last whole step before.
check_full_disk() {
    [[ $(cat status) -eq 1 ]] || fail "exit status $(cat status)"
    local warning="^warning: saving the checkpoint of step [0-9]+ failed: $1/.*: could not be "
    warning+='written: .*; earlier checkpoints are as they were$'
    grep -qE "$warning" log || fail "no warning: $(tail -n 3 log)"
    grep -qE '^step +40/40 ' log || fail "the run did not go on: $(tail -n 1 log)"
    [[ $(readlink "$1/latest") == "step_000000$2" ]] || fail "latest: $(readlink "$1/latest")"
    expect_status 0 train_gpt --save "$1" --list-checkpoints || return
    ! has log damaged || fail "$(cat log)"
    compgen -G "$1/.tmp*" && fail "the failed save was left there"
}

run_to_40=(--train-iters 40 --keep 0 --save-interval 10)

test_saving_fails_where_files_may_not_grow() {
    expect_status 0 train_gpt "${common[@]}" "${run_to_40[@]}" --save straight || return
    expect_status 0 train_gpt "${common[@]}" "${run_to_40[@]}" --save small --train-iters 10 \
        --lr-decay-iters 40 || return
    (
        ulimit -f 1000 # KiB; the optimizer's file is larger
        train_gpt "${common[@]}" "${run_to_40[@]}" --save small --resume latest >log 2>&1
        echo $? >status
    )
    check_full_disk small 10
    # the records say which saves there were
    local step why='small/\.tmp-step_000000.*: could not be written: .* as they were'
    grep -qx '{"kind":"save","step":10}' small/metrics.jsonl || fail "no record of step 10"
    for step in 20 30 40; do
        grep -qxE "\{\"kind\":\"save\",\"step\":$step,\"error\":\"$why\"\}" small/metrics.jsonl ||
            fail "$(grep '"save"' small/metrics.jsonl)"
    done
    why="saving the checkpoint of step 40 failed: $why"
    tail -n 1 small/metrics.jsonl | grep -qE "\"status\":1,\"error\":\"$why\"" ||
        fail "$(tail -n 1 small/metrics.jsonl)"
    expect_status 0 train_gpt "${common[@]}" "${run_to_40[@]}" --save small --resume latest
    same_checkpoint small/step_00000040 straight/step_00000040 || fail "another end"
}

# Not when the next save begins.
test_a_failed_save_is_said_at_once() {
    (
        ulimit -f 1000
        train_gpt "${common[@]}" --seq-length 32 --train-iters 600 --save-interval 300 --save early \
            >log 2>&1
    )
    grep -qE '^step +300/600 ' log || fail "$(tail -n 3 log)"
    sed -n '/^warning: .* step 300 failed/,$p' log | grep -qE '^step +500/600 ' ||
        fail "late: $(grep -n -B 1 ^warning log)"
}

# A disk with room for two checkpoints, in a mount namespace of its own.
test_saving_fails_on_a_full_disk() {
    mkdir -p full
    if ! unshare -m mount -t tmpfs none full 2>/dev/null; then
        skip "no disk of one's own can be mounted here"
        return
    fi
    unshare -m bash -c 'mount -t tmpfs -o size=5m none full && "$@" >log 2>&1
        echo $? >status
        rm -rf copy && cp -a full copy
        head -c 9000000 /dev/zero >full/filler 2>>log
        "$@" --resume latest --train-iters 41 >restart.log 2>&1' _ \
        "$root/train_gpt" "${common[@]}" "${run_to_40[@]}" --save full
    grep -q '^error: --save full/config.txt.new: could not be written: No space' restart.log ||
        fail "restart: $(tail -n 1 restart.log)"
    rmdir full && mv copy full
    check_full_disk full 20
    expect_status 0 train_gpt "${common[@]}" "${run_to_40[@]}" --save full --resume latest || return
    same_checkpoint full/step_00000040 straight/step_00000040 || fail "another end"
    "$metrics_tool" full/metrics.jsonl >steps || fail "metrics"
}

run_tests
