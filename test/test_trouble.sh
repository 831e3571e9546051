#!/usr/bin/env bash
# The whole trainer in trouble: stopped, out of disk, out of numbers. test_kills.sh kills it.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

common=(--model llama-tiny --data d/x_train.bin --micro-batch-size 2 --lr 3e-3 --log-interval 1)
on=(--train-iters 1000000) # a run that waits for its signal

prepare() {
    make_shards 1500
}

run() {
    train_gpt "${common[@]}" "$@"
}

test_signals_save_and_say_so() {
    local trainer signal step again ends
    while read -ra trainer; do
        trainer+=("${common[@]}")
        for signal in TERM INT USR1 USR2 HUP XCPU; do
            rm -rf $signal through
            start log env --default-signal=HUP "${trainer[@]}" "${on[@]}" --save $signal --save-interval 7
            wait_until grep -q '^step ' log
            # a terminal's end comes twice, the limit of CPU time every second
            if [[ $signal == HUP || $signal == XCPU ]]; then kill -$signal "$started"; fi
            stop $signal 75
            says '!error: ' '!warning: '
            step=$(newest_step $signal)
            again=$(tail -n 1 log | sed -n "s/^stopped by signal $(kill -l $signal) after step $step; saved; resume with //p")
            [[ $again == *' --resume latest' ]] || { fail "$signal: $(tail -n 1 log)"; return; }
            tail -n 1 $signal/metrics.jsonl | grep -qF '"status":75' || fail "$signal: metrics"
            ends=(--train-iters $((step + 3)) --lr-decay-iters 1000000)
            expect_message 0 "resuming from $signal/step_" bash -c "$again ${ends[*]}" || return
            expect_status 0 "${trainer[@]}" "${ends[@]}" --save through --save-interval 1000000 || return
            same_checkpoint {$signal,through}/latest || fail "$signal: another end"
        done
    done < <(trainers)
}

# The command that a stopped run prints is one to paste, wherever the program and the folder are.
test_the_resume_command_is_quoted() {
    local program="./sp ace/it's \$x"
    mkdir -p 'sp ace' && cp "$root/train_gpt" "$program"
    stopped TERM '^step ' "$program" "${common[@]}" "${on[@]}" --save "it's/r \$y"
    expect_message 0 "resuming from it's/r \$y/step_" \
        bash -c "$(sed -n 's/.*; saved; resume with //p' log) --train-iters 1"
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
# is resumed, with the parts that were complete: its records equal those of an undisturbed run, and the
# checkpoints but for the loss.
test_a_signal_breaks_an_evaluation_off() {
    local trainer lacks after step
    make_text 5 20000 >valid
    expect_status 0 "$root/tokenize" --output-prefix e/v --valid-fraction 0 valid || return
    make_choices >e/quiz.bin
    while read -ra trainer; do
        rm -rf undisturbed broken
        trainer+=("${common[@]}" --valid-data e/v_train.bin --eval-iters 0 --eval-choices e/quiz.bin
            --eval-interval 2 --save-interval 2 --keep 0 --train-iters 6)
        expect_status 0 "${trainer[@]}" --save undisturbed || return
        while IFS=, read -r step lacks after; do
            stopped TERM "$after" "${trainer[@]}" --save broken --resume latest
            says "after step $step; saved; resume with" "!$lacks after step $step "
            is "$(newest_step broken)" "$step"
        done <<<$'2,eval,^step *2/\n4,quiz,^eval after step 4 \n6,eval,^step *6/'
        expect_status 0 "${trainer[@]}" --save broken --resume latest || return
        records_of undisturbed >records
        grep -q '^choices step 6' records || fail "no score"
        records_of broken | uniq | diff records - >difference || fail "$(<difference)"
        same_checkpoint {undisturbed,broken}/step_00000004 || fail "step 4: $(<difference)"
        cmp {undisturbed,broken}/step_00000006/model.safetensors || fail "another end"
        expect_message 0 '!damaged' train_gpt --save broken --list-checkpoints
    done < <(trainers)
}

# What was broken off is made with the data and the sets of the resume.
test_an_evaluation_is_made_of_what_is_given() {
    local options=(--eval-interval 2 --train-iters 6 --save other) quiz valid made
    stopped TERM '^step *2/' "$root/train_gpt" "${common[@]}" "${options[@]}" --eval-choices e/quiz.bin
    says 'after step 2; saved; resume with'
    mv other stopped_other
    while IFS='|' read -r quiz valid made; do
        rm -rf other && cp -a stopped_other other
        # shellcheck disable=SC2086 # words
        expect_status 0 run "${options[@]}" --eval-choices "$quiz" $valid --resume latest || return
        is "$(grep -oE '^(eval|quiz) after step 2 ' log | cut -d ' ' -f 1 | xargs)" "$made"
    done <<'ROWS'
||
e/quiz.bin||quiz
e/quiz.bin|--valid-data d/x_val.bin|eval quiz
|--valid-data d/x_val.bin|eval
ROWS
}

# An answer that is too long is refused at the start, not at the first evaluation.
test_answers_fit_in_a_sequence() {
    local trainer
    while read -ra trainer; do
        expect_message 1 'error: --eval-choices e/quiz.bin: answer 0 of question 0 has 9 tokens, too many for --seq-length 8' \
            "${trainer[@]}" "${common[@]}" --seq-length 8 --train-iters 2 --save long --eval-choices e/quiz.bin
        says '!step '
        [[ ! -e long ]] || fail "left: $(ls long)"
        expect_status 0 "${trainer[@]}" "${common[@]}" --seq-length 10 --train-iters 2 --eval-choices e/quiz.bin
    done < <(trainers)
}

# An evaluation alone scores the sets of the checkpoint's run, and with its options; others if they are
# given, and none if that is.
test_an_evaluation_alone_has_the_sets_of_its_run() {
    local trainer quiz way
    while read -ra trainer; do
        rm -rf scored e/mine.bin && cp e/quiz.bin e/mine.bin
        expect_status 0 "${trainer[@]}" "${common[@]}" --seq-length 32 --train-iters 2 --save scored \
            --valid-data d/x_val.bin --eval-choices e/mine.bin || return
        quiz=$(grep -o '^mine after step 2 | [0-9.]*%' log)
        for way in --load --resume; do
            expect_message 0 "$quiz" "${trainer[@]}" $way scored/latest --eval-only
            says 'eval after step 2 '
        done
        expect_message 0 'quiz after step 2 ' "${trainer[@]}" --load scored/latest --eval-only --eval-choices e/quiz.bin
        says '!mine after'
        rm e/mine.bin
        expect_message 1 'error: --eval-choices (of the checkpoint scored/step_00000002) e/mine.bin: no such file' \
            "${trainer[@]}" --load scored/latest --eval-only
        expect_message 0 'eval after step 2 ' "${trainer[@]}" --load scored/latest --eval-only --eval-choices ''
        says '!mine after'
        expect_status 0 "${trainer[@]}" --load scored/latest --sample-only --sample-length 2
    done < <(trainers)
}

# A sample is not repeated; what saves nothing has nothing to end first.
test_a_signal_breaks_a_sample_off() {
    local trainer long=(--sample-length 1000000)
    while read -ra trainer; do
        rm -rf sampled
        stopped TERM '^sample after step 3' "${trainer[@]}" "${common[@]}" --train-iters 6 \
            --sample-interval 3 "${long[@]}" --save sampled
        # with several ranks, the next step informs the others
        [[ $(newest_step sampled) == [345] ]] || fail "saved $(newest_step sampled)"
    done < <(trainers)
    start log "$root/train_gpt" "${common[@]}" --sample-only "${long[@]}" --no-quiet
    wait_until grep -q '^sample after' log
    stop TERM 143
}

# A terminal's end reaches scripts/restart.sh alone, whose run is a process group of its own; so does
# a scheduler's signal. nohup has HUP ignored, and so does the run.
test_signals_reach_a_restarted_run() {
    local signal
    for signal in HUP USR2; do
        stopped $signal '^step ' env --default-signal=HUP "$root/scripts/restart.sh" \
            "$root/train_gpt" "${common[@]}" "${on[@]}" --save restarted-$signal
        says "stopped by signal $(kill -l $signal) after step"
    done
    start log env --ignore-signal=HUP "$root/train_gpt" "${common[@]}" "${on[@]}" --save nohup
    wait_until grep -q '^step ' log
    kill -HUP "$started"
    stop TERM 75
    says 'stopped by signal 15'
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

# sh is dash, or bash in its POSIX mode, whose `wait` forgets a status.
test_restarts_are_the_same_from_other_shells() {
    local shell
    for shell in dash 'bash --posix'; do
        # shellcheck disable=SC2086 # words
        expect_message 7 'restart: status 7 at the start, failure 1 of 2; again in 0 s' \
            $shell "$root/scripts/restart.sh" --pause 0 --failures 2 bash -c 'exit 7' --save none
    done
}

# | head -n 1
test_a_reader_that_leaves_ends_no_run() {
    run --train-iters 20 --save-interval 5 --save piped 2>err | head -n 1 >log
    is "${PIPESTATUS[0]} $(readlink piped/latest)" '0 step_00000020'
    is "$(grep -c '"kind":"step"' piped/metrics.jsonl)" 20
    is "$(grep -c '^warning: the standard output could not be written' err)" 1
}

saves_more() {
    [[ $(readlink moved/latest) > $newest ]]
}

# Moved (a link may lead there), deleted, or another one in its place: what is saved from then on is
# a whole run's folder, which no other run can take.
test_a_folder_that_is_moved_is_made_anew() {
    local how trainer newest='' hows=('while ! rm -r moved; do :; done 2>/dev/null' 'mv moved gone; mkdir moved'
        'kill -STOP $started; newest=$(readlink moved/latest); cp -a moved away; mv moved gone
            ln -s away moved; kill -CONT $started; wait_until saves_more' 'mv moved gone')
    while read -ra trainer; do
        for how in "${hows[@]}"; do
            rm -rf gone moved away
            start log "${trainer[@]}" "${common[@]}" "${on[@]}" --save moved --save-interval 20
            wait_until test -e moved/latest/
            eval "$how"
            wait_until test -e moved/latest/
            "${trainer[@]}" --save moved --resume latest --lock-timeout 0 >second 2>&1
            is $? 6
            grep -q 'in use by another run' second || fail "$how: $(cat second)"
            stop TERM 75
            says 'warning: --save moved: the folder was moved or deleted'
            [[ -s moved/config.txt ]] || fail "$how: no config.txt"
            # a copy lacks the steps until the save that finds it
            [[ -L moved ]] || records_of moved >records
            expect_status 0 "${trainer[@]}" --config moved/config.txt --resume latest --train-iters 1
        done
        records_of gone >records
        hows=('mv moved gone')
    done < <(trainers)
}

has_later() { # FOLDER STEP: whether it has a later checkpoint
    [[ $(newest_step "$1") -gt $2 ]]
}

starts_metrics() {
    rm -rf rotated && mkdir rotated
    start log "$root/train_gpt" "${common[@]}" "${on[@]}" --save rotated/run --save-interval 20 \
        --metrics rotated/m.jsonl
    wait_until test -e rotated/run/latest/
}

# logrotate moves a file; who clears a folder deletes it. The next save finds it.
test_metrics_that_are_moved_are_begun_anew() {
    local how step
    for how in 'mv rotated/m.jsonl rotated/m.jsonl.1' 'rm rotated/m.jsonl'; do
        starts_metrics
        eval "$how"
        wait_until test -s rotated/m.jsonl
        stop TERM 75
        says 'warning: rotated/m.jsonl: the file was moved or deleted; from step '
        is "$(head -n 1 rotated/m.jsonl | grep -o '^{"kind":"[a-z]*"')" '{"kind":"run"'
        tail -n 1 rotated/m.jsonl | grep -q '^{"kind":"end"' || fail "$(tail -n 1 rotated/m.jsonl)"
    done
    # another file in its place, which is no metrics, is warned of once, not at each save
    starts_metrics
    echo text >rotated/text && mv rotated/text rotated/m.jsonl
    wait_until grep -q 'rotated/m.jsonl: the file was moved or deleted' log
    step=$(newest_step rotated/run)
    wait_until has_later rotated/run $((step + 60)) # three more saves
    stop TERM 75
    is "$(grep -c 'the file was moved or deleted' log) $(grep -c 'not metrics' log)" '1 1'
    is "$(cat rotated/m.jsonl)" text
}

# A rate that makes the weights infinite within some steps.
diverging=(--lr 100 --weight-decay 100 --clip-grad 0 --lr-decay-style constant --train-iters 200
    --keep 0 --save-interval 1)

test_nonfinite_steps_are_skipped_and_counted() {
    local last first before after nan=("${diverging[@]}" --save nan)
    expect_message 3 'stopped: 6 steps in a row were skipped (--max-skipped)' run "${nan[@]}" --max-skipped 6 || return
    last=$(newest_step nan) first=$((last - 5))
    is "$(grep -c '^step .* | SKIPPED$' log) $(grep SKIPPED log | grep -oE '[0-9]+/200' | head -n 1)" "6 $first/200"
    is "$(steps_of nan | grep -c '^step .* nan .* skipped 1$')" 6
    [[ $(grep -c 'null.*"nonfinite":true' nan/metrics.jsonl) -ge 6 ]] || fail "no null with a flag"
    printf -v before nan/step_%08d $((first - 1))
    printf -v after nan/step_%08d "$last"
    for file in model optimizer-0-of-1; do
        cmp -s {"$before","$after"}/$file.safetensors || fail "$file has changed"
    done
    find nan -type f ! -name .lock -exec cksum {} + >files
    expect_message 3 '(--max-skipped); to go on, resume an earlier checkpoint, or with a larger' run "${nan[@]}" \
        --max-skipped 6 --resume latest
    find nan -type f ! -name .lock -exec cksum {} + | cmp -s files - || fail "a file has changed"
    expect_status 3 run "${nan[@]}" --max-skipped 8 --resume latest || return
    is "$(grep -c SKIPPED log)" 2 # the count of skipped steps was resumed
}

test_divergence_is_printed_as_numbers() {
    expect_status 3 run "${diverging[@]}" --model gpt2-tiny --max-skipped 6 --save numbers || return
    grep -qE '^step .* loss [0-9.]+e\+[0-9]+ .* norm nan ' log || fail "not diverged: $(cat log)"
    ! grep -E '^step' log | grep -qE -- '-nan|[0-9]{7}' || fail "$(grep '^step' log)"
    expect_status 0 train_gpt --save numbers --list-checkpoints || return
    ! grep -qE -- '-nan|[0-9]{7}\.' log || fail "$(cat log)"
}

# An embedding that is looked up for no token decays alone: from almost too large to infinite.
test_infinite_weights_are_not_loaded_in_silence() {
    local options=("${common[@]}" --untie-embeddings-and-output-weights) at trainer
    local file=large/latest/model.safetensors value='token_embedding.weight has 1'
    expect_status 0 train_gpt "${options[@]}" --train-iters 0 --save large || return
    at=$(head -c 4000 $file | grep -aoE 'embed_tokens.weight":\{[^}]*' | grep -oE '\[[0-9]+,[0-9]+\]$')
    at=$(($(od -An -tu8 -N8 $file) + 8 + $(grep -oE '[0-9]+' <<<"$at" | head -n 1)))
    poke $file $at '\346\261\141\177' # 3e38
    while read -ra trainer; do
        trainer+=("${options[@]}")
        cp -r large/latest/ whole
        expect_message 1 ' --load whole/model.safetensors: damaged: ' "${trainer[@]}" --load whole --train-iters 1
        rm whole/meta.json # now it is a folder of Hugging Face's
        expect_message 0 "$value enormous values" "${trainer[@]}" --lr 100 --weight-decay 100 --load whole \
            --train-iters 1 --save inf || return
        says 'starting from the weights of whole (it has no checksums'
        expect_message 1 "error: --load inf/step_00000001: $value NaN or infinite" "${trainer[@]}" --load inf/latest \
            --train-iters 2
        expect_status 0 "${trainer[@]}" --train-iters 2 --resume inf/latest --save goes
        [[ $(grep 'warning: ' log) == *'warning: inf/'*": $value NaN or infinite value"* ]] || fail "$(grep warning log)"
        is "$(grep -c 'warning: ' log)" 1
        rm -r inf goes whole
    done < <(trainers)
}

kept() {
    find "$1" -name 'step_*' -type d -printf '%f\n' | sort | xargs
}

# Learns, diverges and is resumed: the last checkpoint before it stays, whatever --keep says, and
# can be trained.
test_divergence_leaves_the_last_good_checkpoint() {
    local trainer step
    while read -ra trainer; do
        rm -rf good goes
        trainer+=("${common[@]}")
        expect_status 0 "${trainer[@]}" --save good --keep 1 --save-interval 1 --train-iters 40 \
            --lr-decay-style constant || return
        for step in 4 8; do
            expect_status 3 "${trainer[@]}" "${diverging[@]}" --save good --keep 1 --resume latest \
                --max-skipped $step || return
        done
        step=$(kept good)
        [[ $step == step_0000004[01]\ step_* && $(wc -w <<<"$step") -eq 2 ]] || fail "${trainer[*]}: $step"
        expect_status 0 "${trainer[@]}" --resume "good/${step% *}" --train-iters 45 --lr 1e-4 --save goes || return
        ! grep -E 'SKIPPED|warning' log | grep -qv 'the learning rate falls from 0.003 to 0.0001' || fail "$(cat log)"
    done < <(trainers)
}

# Finite, and far above the best.
test_a_rising_loss_leaves_the_last_good_checkpoint() {
    local options=(--save high --keep 1 --save-interval 10 --lr-decay-style constant)
    expect_status 0 run "${options[@]}" --train-iters 60 || return
    is "$(kept high)" 'step_00000050 step_00000060'
    expect_message 0 '!SKIPPED' run "${options[@]}" --train-iters 100 --lr 3 --resume latest || return
    is "$(kept high)" 'step_00000060 step_00000100'
    # an evaluation says at once that the newest is good
    expect_status 0 run "${options[@]}" --train-iters 20 --save evaluated --valid-data d/x_val.bin \
        --eval-interval 10 || return
    grep -qE '"proven":\s*20,' evaluated/latest/meta.json || fail "$(cat evaluated/latest/meta.json)"
}

# limited COMMAND...: no file may grow beyond 1 MB, and the optimizer's is larger.
limited() {
    (ulimit -f 1000 && "$@")
}

# A diverging run whose last save fails says so by its status: 1, not 3.
test_a_failed_last_save_decides_the_status() {
    expect_message 1 'stopped: 6 steps in a row' limited run "${diverging[@]}" --max-skipped 6 --save nosave \
        --save-interval 100000 --metrics m.jsonl
    says 'warning: saving the checkpoint of step'
}

test_torn_metrics_are_mended() {
    local torn text run go=(run --train-iters 7 --save torn --resume latest)
    expect_status 0 run --train-iters 5 --save torn || return
    printf '{"kind":"step","step":6,"tok' >>torn/metrics.jsonl
    ! passes records_of torn >records || fail "a torn line is not seen"
    expect_status 0 "${go[@]}" || return
    is "$(steps_of torn | wc -l)" 7
    printf '{"kin' >begun
    expect_status 0 run --train-iters 1 --metrics begun || return
    is "$(steps_of begun | wc -l)" 1
    # zeros: the trace of a power cut, with and without a part of a line
    for torn in '' '{"kind":"step","st' '{"k'; do
        printf '%s' "$torn" >>torn/metrics.jsonl
        head -c 5000 /dev/zero >>torn/metrics.jsonl
        expect_status 0 "${go[@]}" || return
        is "$(steps_of torn | wc -l)" 7
    done
    # another file is not mended, nor appended to
    for text in 'a note\nwithout an end' 'a note\nwith one\n' '\0\0\0\0\0\0\0\0\0\0\0\1' \
        '{"kind":"run"}\na note' '{"kind":"Pod"}' '{"kind":"Pod"}\n' '{"kind":"run"}' \
        '{\n  "kind": "step"\n}\n' '{"kind": "save", "of": 1}\n{"ki'; do
        printf '%b' "$text" >note && cp note notes
        expect_message 1 'error: --metrics notes: not metrics: ' run --metrics notes --train-iters 1
        cmp -s note notes || fail "notes: $(cat notes)"
    done
}

# Two runs would make one file of two histories; a device has no history.
test_metrics_have_one_run() {
    start first.log "$root/train_gpt" "${common[@]}" "${on[@]}" --metrics shared.jsonl
    wait_until grep -q '^step ' first.log
    expect_message 1 'error: --metrics shared.jsonl: another run writes to it' run --train-iters 5 --metrics shared.jsonl
    stop TERM 75
    printf '{"kind":"st' >>shared.jsonl && cp shared.jsonl was
    expect_message 1 'error: --metrics shared.jsonl: has the steps of another run' run --train-iters 5 \
        --metrics shared.jsonl
    cmp -s shared.jsonl was || fail "a refused file has changed"
    # a run that may resume goes on, also before its first checkpoint
    expect_status 0 run --train-iters 5 --metrics shared.jsonl --save going --resume latest || return
    expect_status 0 run --train-iters 6 --metrics shared.jsonl --save going --resume latest || return
    is "$(grep -c '"kind":"run"' shared.jsonl)" 3
    expect_message 1 'has the steps of another run' run --eval-only --load going/latest --valid-data d/x_val.bin --metrics shared.jsonl
    for _ in 1 2; do # evaluations alone may share a file
        expect_status 0 run --eval-only --load going/latest --valid-data d/x_val.bin --metrics evaluated.jsonl || return
    done
    start first.log "$root/train_gpt" "${common[@]}" "${on[@]}" --metrics /dev/null
    wait_until grep -q '^step ' first.log
    expect_message 0 '!warning' run --train-iters 5 --metrics /dev/null --save nowhere
    stop TERM 75
}

test_unwritable_metrics_stop_no_run() {
    mkdir full_metrics
    ln -s /dev/full full_metrics/metrics.jsonl
    expect_status 0 run --train-iters 5 --save full_metrics || return
    is "$(grep -c '^warning: full_metrics/metrics.jsonl: could not be written' log)" 1
    expect_status 0 train_gpt --save full_metrics --list-checkpoints
}

# What an error ended has it in its metrics, what was killed has no end; a resume goes on after both.
test_an_error_is_in_the_metrics() {
    local more=(run --save died --resume latest)
    expect_status 0 run --train-iters 5 --save died || return
    expect_status 1 "${more[@]}" --train-iters 9 --dump-gradients none/x || return
    is "$(tail -n 1 died/metrics.jsonl)" \
        "{\"kind\":\"end\",\"step\":5,\"status\":1,\"error\":\"$(sed -n 's/^error: //p' log)\"}"
    expect_status 0 "${more[@]}" --train-iters 7 || return
    records_of died >records
    is "$(tail -n 1 died/metrics.jsonl)" '{"kind":"end","step":7,"status":0}'
    cp died/metrics.jsonl before # an error before the start is recorded leaves the file as it is
    expect_status 1 "${more[@]}" --train-iters 9 --num-layers 3 || return
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
        ! passes records_of wrong.jsonl >records || fail "passed: $edit"
    done
}

run_to_40=(--train-iters 40 --keep 0 --save-interval 10)

# As on a full disk. With room again the run continues, to the same end as the run that always had room.
test_saving_fails_where_files_may_not_grow() {
    local step why='small/\.tmp-step_000000.*: could not be written: .* as they were'
    expect_status 0 run "${run_to_40[@]}" --save straight || return
    expect_status 0 run "${run_to_40[@]}" --save small --train-iters 10 --lr-decay-iters 40 || return
    expect_status 1 limited run "${run_to_40[@]}" --save small --resume latest
    is "$(readlink small/latest)" step_00000010
    grep -qE "^warning: saving the checkpoint of step [0-9]+ failed: $why$" log || fail "no warning: $(tail -n 3 log)"
    grep -qE '^step +40/40 ' log || fail "the run did not go on: $(tail -n 1 log)"
    # the records say which saves there were
    for step in '10' "20,\"error\":\"$why\"" "30,\"error\":\"$why\"" "40,\"error\":\"$why\""; do
        grep -qxE "\{\"kind\":\"save\",\"step\":$step\}" small/metrics.jsonl || fail "$step: $(grep '"save"' small/metrics.jsonl)"
    done
    tail -n 1 small/metrics.jsonl | grep -qE "\"status\":1,\"error\":\"saving the checkpoint of step 40 failed: $why\"" ||
        fail "$(tail -n 1 small/metrics.jsonl)"
    expect_message 0 '!damaged' train_gpt --save small --list-checkpoints
    ! compgen -G "small/.tmp*" || fail "the failed save was left there"
    (ulimit -f 0 && run "${run_to_40[@]}" --save small --resume latest) 2>&1 | cat >log
    says 'error: --save small/config.txt.new: could not be written: File too large'
    expect_status 0 run "${run_to_40[@]}" --save small --resume latest || return
    same_checkpoint {small,straight}/step_00000040 || fail "another end"
    records_of small >records
    (ulimit -f 50 && train_gpt --load straight/latest --export out) 2>&1 | cat >log
    says 'error: --export out/model.safetensors: could not be written: File too large'
    [[ ! -e out ]] || fail "the failed export was left there"
    expect_status 0 train_gpt --load straight/latest --export out
}

# Not when the next save begins.
test_a_failed_save_is_said_at_once() {
    limited run --seq-length 32 --train-iters 600 --save-interval 300 --save early >log 2>&1
    grep -qE '^step +300/600 ' log || fail "$(tail -n 3 log)"
    sed -n '/^warning: .* step 300 failed/,$p' log | grep -qE '^step +500/600 ' ||
        fail "late: $(grep -n -B 1 ^warning log)"
}

run_tests
