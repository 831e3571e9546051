#!/usr/bin/env bash
# The whole trainer on tiny models: resuming, evaluation, what it prints and writes.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# 21 windows of 64 tokens and 4 sequences a step: an epoch ends in the middle of every sixth step.
steps=24
common=(--data d/x_train.bin --valid-data d/x_val.bin --eval-iters 1 --eval-interval 5
    --micro-batch-size 2 --global-batch-size 4 --train-iters "$steps" --lr-warmup-iters 3
    --lr 3e-3 --keep 0 --log-interval 1)

prepare() {
    make_shards 1500
}

test_tokenize_keeps_every_byte() {
    make_text 2 5000 >a
    head -c 3000 /dev/urandom | tr -d '\0' >b
    expect_status 0 "$root/tokenize" --output-prefix e/y --valid-fraction 0.25 a b || return
    # version 1 shards: after the header, two bytes a token, end of text is 256
    tail -c +1025 e/y_train.bin >train
    tail -c +1025 e/y_val.bin >valid
    local bytes
    bytes=$(cat train valid | od -An -v -tu2 -w2 | awk '$1 < 256' | wc -l)
    [[ $bytes -eq $(cat a b | wc -c) ]] || fail "$bytes tokens are bytes"
    cat train valid | od -An -v -tu2 -w2 | awk '$1 > 256 { exit 1 }' || fail "a token above 256"
    [[ $(cat train valid | od -An -v -tu2 -w2 | grep -c 256) -eq 4 ]] || fail "not 4 documents"
    head -c 2002 train | tail -c +3 | tr -d '\0' | cmp -s - <(head -c 1000 a) || fail "other bytes"
}

# The bytes of a shard of one document.
bytes_of() {
    tail -c +1027 "$1" | tr -d '\0'
}

test_validation_starts_a_line_that_is_near() {
    make_text 3 5000 >a
    expect_status 0 "$root/tokenize" --output-prefix e/near a || return
    local bytes
    bytes=$(bytes_of e/near_val.bin | wc -c)
    [[ $bytes -ge 400 && $bytes -le 500 ]] || fail "$bytes of 5000 bytes"
    [[ $(bytes_of e/near_train.bin | tail -c 1 | od -An -c) == *'\n'* ]] || fail "not at a line"
    { head -c 4990 /dev/zero | tr '\0' x && printf '\n123456789'; } >b
    expect_status 0 "$root/tokenize" --output-prefix e/far b || return
    [[ $(bytes_of e/far_val.bin | wc -c) -eq 500 ]] || fail "a line far away is waited for"
}

steps_of() {
    "$root/test/metrics_tool.py" "$1/metrics.jsonl" | grep '^step'
}

# $1: name, the rest: options. Straight through; resumed at 6; that resumed at 9; one that is given
# nothing but its checkpoint; and one run in three parts. Every step must be the same to the last
# digit, and every checkpoint to the last bit.
resume_equals_straight() {
    local name=$1 step
    shift
    expect_status 0 train_gpt "${common[@]}" "$@" --save "$name" --save-interval 3 || return
    [[ $(steps_of "$name" | wc -l) -eq $steps ]] || fail "$name: not $steps steps in its metrics"
    expect_status 0 train_gpt "${common[@]}" "$@" --save "$name.6" --save-interval 3 \
        --resume "$name/step_00000006" || return
    for ((step = 9; step <= steps; step += 3)); do
        same_checkpoint "$name/step_$(printf %08d $step)" "$name.6/step_$(printf %08d $step)" ||
            fail "$name: resumed at 6, step $step differs"
    done
    steps_of "$name" | tail -n +7 | cmp -s - <(steps_of "$name.6") || fail "$name: steps differ"
    expect_status 0 train_gpt "${common[@]}" "$@" --save "$name.9" --save-interval 1000 \
        --resume "$name.6/step_00000009" || return
    expect_status 0 train_gpt --save "$name.alone" --resume "$name/step_00000009" || return
    for step in 1 16 "$steps"; do
        expect_status 0 train_gpt "${common[@]}" "$@" --save "$name.parts" --save-interval 1000 \
            --resume latest --train-iters "$step" --lr-decay-iters $steps || return
    done
    for other in "$name.9" "$name.alone" "$name.parts"; do
        same_checkpoint "$name/step_000000$steps" "$other/step_000000$steps" ||
            fail "$name: $other ends otherwise"
    done
    steps_of "$name" | cmp -s - <(steps_of "$name.parts") || fail "$name: steps of parts differ"
}

test_resumed_runs_are_straight_ones() {
    local name options
    while read -r name options; do
        # shellcheck disable=SC2086 # words
        resume_equals_straight "$name" $options
    done <<'ROWS'
fp32 --model llama-tiny
gpt2 --model gpt2-tiny --lr-decay-style linear
bf16 --model llama-tiny --bf16 --lr-decay-style cosine
delayed --model llama-tiny --fp8-format hybrid --fp8-amax-history-len 5
recent --model gpt2-tiny --fp8-format e4m3 --fp8-margin 1 --fp8-amax-history-len 1 --fp8-lm-head --no-fp8-wgrad
tensorwise --model llama-tiny --fp8-format hybrid --fp8-recipe tensorwise --num-layers 3 --first-last-layers-bf16
blockwise --model llama-tiny --fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head
ROWS
    [[ ! -e blockwise/step_000000$steps/scaling.safetensors ]] || fail "blockwise: a scaling state"
}

test_comparison_sees_differences() {
    cp -r fp32/step_00000009 other
    same_checkpoint fp32/step_00000009 other || fail "equal ones differ"
    ! same_checkpoint fp32/step_00000009 fp32/step_00000012 || fail "two steps are the same"
    poke other/model.safetensors 5000 x
    ! same_checkpoint fp32/step_00000009 other || fail "a changed byte is not seen"
}

# A checkpoint's weights, read by a run in another precision and changed by no step.
test_precision_changes_keep_the_weights() {
    local from to options
    for pair in delayed:fp32 fp32:delayed delayed:tensorwise tensorwise:delayed delayed:blockwise \
        blockwise:delayed tensorwise:blockwise blockwise:tensorwise blockwise:bf16 bf16:blockwise; do
        from=${pair%:*} to=${pair#*:}
        case $to in
        fp32) options=(--fp8-format none) ;;
        bf16) options=(--bf16 --fp8-format none) ;;
        delayed) options=(--fp8-format hybrid --fp8-recipe delayed) ;;
        *) options=(--fp8-format hybrid --fp8-recipe "$to") ;;
        esac
        if [[ $from == tensorwise ]]; then options+=(--num-layers 3); fi
        expect_status 0 train_gpt "${common[@]}" --model llama-tiny "${options[@]}" --lr 0 \
            --weight-decay 0 --resume "$from/step_00000012" --train-iters 13 --save "$from.$to" \
            --save-interval 1000 || continue
        cmp -s {"$from/step_00000012","$from.$to/step_00000013"}/model.safetensors ||
            fail "$from read as $to: other weights"
        "$root/test/metrics_tool.py" "$from.$to/metrics.jsonl" >steps || fail "metrics"
        grep '^step' steps | awk '{ exit !($7 > 1 && $7 < 6) }' || fail "$from.$to: $(cat steps)"
    done
    # there and back: the history starts again, and training goes on
    expect_status 0 train_gpt "${common[@]}" --model llama-tiny --fp8-format hybrid --save back \
        --resume delayed.fp32/step_00000013 --save-interval 1000
}

test_evaluation_leaves_no_trace() {
    local options=(--model llama-tiny --fp8-format hybrid --fp8-amax-history-len 5)
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --eval-interval 1 --eval-iters 0 \
        --sample-interval 3 --sample-length 20 --save evals --save-interval 1000 || return
    cmp -s evals/step_000000$steps/optimizer-0-of-1.safetensors \
        delayed/step_000000$steps/optimizer-0-of-1.safetensors || fail "other weights"
    cmp -s {evals,delayed}/step_000000$steps/scaling.safetensors || fail "another scaling state"
}

test_step_line_has_its_fields() {
    expect_status 0 train_gpt "${common[@]}" --model llama-tiny --fp8-format hybrid || return
    local number='[0-9.e+-]+' line
    line="^step +[0-9]+/$steps \| loss $number \| norm $number \| lr $number \| [0-9]+ tok/s"
    line+=" \| $number ms \| "
    [[ $(grep -cE "${line}ETA [0-9hms]+$" log) -eq $((steps - 1)) &&
        $(grep -cE "${line}start [0-9.]+ s$" log) -eq 1 ]] || fail "$(grep '^step' log | head -n 1)"
    # what does not change is said once
    grep -qE '^  model +[0-9]+ parameters, FP8, [0-9.e+]+ FLOPs a token$' log || fail "no model"
    grep -qE '^  memory +[0-9.]+ MiB' log || fail "no memory"
    local eval='^eval after step 5 \| valid loss [0-9.]+ \(best\) \| perplexity [0-9.e+]+ \| '
    grep -qE "$eval" log || fail "no eval"
    ! grep -qP '[^\x20-\x7e]' log || fail "control characters in a log"
}

has_terminal() {
    script -qec true typescript >/dev/null 2>&1 </dev/null || { skip "script(1) gets no terminal"; false; }
}

# What a terminal of $1 columns shows of the steps between two whole lines.
live_lines() {
    local command="'$root/train_gpt' ${common[*]} --model llama-tiny --log-interval 99"
    script -qec "stty cols $1; $command" typescript >/dev/null </dev/null
    tr '\r' '\n' <typescript | sed -n 's/^\x1b\[K\(step .*\)/\1/p' | grep -vE "^step +(1|$steps)/"
}

test_live_line_fits_the_terminal() {
    has_terminal || return
    local columns line number='[0-9.e+-]+'
    while read -r columns line; do
        live_lines "$columns" >live
        grep -qE "^step +2/24 \\| $line$" live || fail "$columns columns: $(cat live)"
    done <<ROWS
160 loss $number \\| norm $number \\| lr $number \\| [0-9]+ tok/s \\| $number ms \\| ETA [0-9hms]+
72 loss $number \\| norm $number \\| [0-9]+ tok/s \\| ETA [0-9hms]+
60 loss $number \\| [0-9]+ tok/s \\| ETA [0-9hms]+
30 loss $number
ROWS
    live_lines 20 >live
    [[ $(head -n 1 live | wc -L) -eq 19 ]] || fail "20 columns: $(cat live)"
}

# sample OPTION...: what is asked for goes to the file `sample`, the rest to `log`.
sample() {
    train_gpt --model llama-tiny "${common[@]}" --resume fp32/latest --sample-length 59 "$@" \
        >sample 2>log || fail "$*: $(tail -n 1 log)"
}

# A sample, or an evaluation, has the standard output to itself.
test_answers_stand_alone() {
    sample --sample-only --sample-prompt 'Anna '
    # a byte a token, and a new line; the end of the text is a line of its own
    [[ $(head -c 5 sample) == 'Anna ' && $(sed '/^---$/d' sample | wc -c) -ge 60 ]] ||
        fail "$(cat sample)"
    ! grep -qaE 'step|Run|--' sample || fail "more than the sample: $(cat sample)"
    [[ ! -s log ]] || fail "not quiet: $(cat log)"
    cp sample quietly
    sample --sample-only --sample-prompt 'Anna ' --no-quiet
    cmp -s sample quietly || fail "not quiet: $(cat sample)"
    has log 'sample after step 24:' || fail "$(cat log)"
    has log '--hidden-size 64' || fail "no options: $(cat log)"
    sample --eval-only
    grep -qxE 'eval after step 24 \| valid loss .* s' sample || fail "$(cat sample)"
    [[ $(wc -l <sample) -eq 1 ]] || fail "$(cat sample)"
    sample --eval-only --plan # asked for, too
    has sample 'Memory plan' || fail "$(cat sample)"
}

# What is asked for and cannot be written is an error; a run that trains goes on.
test_answers_reach_their_file() {
    local words
    while read -r words; do
        # shellcheck disable=SC2086 # options
        ! train_gpt --model llama-tiny "${common[@]}" --resume fp32/latest $words \
            >/dev/full 2>log || fail "$words: status 0"
        has log 'error: the standard output could not be written: No space' || fail "$words: $(cat log)"
    done <<<'--sample-only --sample-length 4
--eval-only --eval-iters 1
--plan
--list-tensors
--list-checkpoints --save fp32
--help
--version
--completion'
    train_gpt --model llama-tiny "${common[@]}" --train-iters 12 >/dev/full 2>log ||
        fail "a run: $(cat log)"
    [[ $(grep -c 'could not be written' log) -eq 1 ]] || fail "a run: $(cat log)"
}

# completes WORD... EXPECTED: what bash offers for the last word.
completes() {
    bash -c 'eval "$("$0" --completion)"; COMP_WORDS=(train_gpt "${@:1:$#-1}"); COMP_CWORD=$(($# - 1))
        _llm8; [[ ${COMPREPLY[*]} == "${*: -1}" ]] || { echo "$*: offers ${COMPREPLY[*]}"; false; }' \
        "$root/train_gpt" "$@" 2>&1
}

test_options_are_completed() {
    mkdir -p some/folder && touch some/file
    completes --no-cu '--no-cuda-graphs' || fail "a flag that is on"
    completes --fp8-f '--fp8-format --fp8-fast-accumulation' || fail "a prefix"
    completes --fp8-recipe '' 'delayed tensorwise blockwise' || fail "choices"
    completes --model llama-q 'llama-quickstart' || fail "presets"
    completes --bf16 --data some/fi 'some/file' || fail "files"
    completes --save some/ 'some/folder' || fail "folders"
    completes --resume l 'latest' || fail "latest"
    completes --lr 1 '' || fail "a number"
    ! completes --lr '' 'x' >log || fail "another answer is not seen"
    ! has log command || fail "$(cat log)"
    bash -uc 'eval "$("$0" --completion)"' "$root/train_gpt" || fail "not under set -u"
}

test_quiet_runs_say_nothing() {
    sample --quiet --train-iters 26 --save hush --lr-decay-iters 25
    [[ ! -s sample ]] || fail "$(cat sample)"
    [[ $(cat log) == 'warning: --lr-decay-iters 25: '* && $(wc -l <log) -eq 1 ]] ||
        fail "$(cat log)"
    has hush/metrics.jsonl '"kind":"step","step":26' || fail "no metrics"
    ! has hush/config.txt quiet || fail "it is kept"
    ! train_gpt --model llama-tiny --data nowhere --quiet >sample 2>log || fail "no error"
    [[ ! -s sample && $(cat log) == 'error: --data nowhere: '* ]] || fail "$(cat sample log)"
}

# What a model writes commands no terminal, nor the one that shows a log; a file gets every byte.
test_samples_are_escaped_on_a_terminal() {
    has_terminal || return
    local prompt=$'a\e[2Jb\r\x7fc\xc2\x9bd\xc3\xa9\t'
    printf '%q ' "$root/train_gpt" --model llama-tiny "${common[@]}" --sample-only --quiet \
        --sample-length 400 --sample-temperature 100 --sample-top-k 0 --sample-prompt "$prompt" >ask
    script -qec "bash ask" typescript >/dev/null </dev/null
    sed '1d; /^Script done/d' typescript >shown
    grep -qaF "$(printf 'a\\x1b[2Jb\\x0d\\x7fc\xc2\\x9bd\xc3\xa9\t')" shown ||
        fail "the prompt: $(head -c 60 shown | cat -v)"
    ! tr -d '\r\n\t' <shown | LC_ALL=C grep -qa '[[:cntrl:]]' || fail "the sample: $(cat -v shown)"
    bash ask >sample
    grep -qaF "$prompt" sample || fail "in a file: $(head -c 60 sample | cat -v)"
    tr -d '\r\n\t\033\177' <sample | LC_ALL=C grep -qa '[[:cntrl:]]' || fail "a file is escaped"
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --sample-interval 4 \
        --sample-length 400 --sample-temperature 100 --sample-top-k 0 --sample-prompt "$prompt"
    has log 'a\x1b[2Jb\x0d' || fail "a run's log: $(cat -v log)"
    ! sed -n '/^sample/,$p' log | tr -d '\n\t' | LC_ALL=C grep -qa '[[:cntrl:]]' || fail "a run's log: $(cat -v log)"
}

test_a_bare_call_says_how_to_begin() {
    expect_status 1 train_gpt
    # the program is called as it was
    [[ $(wc -l <log) -eq 5 && $(sed "s|$root|.|" log | wc -L) -le 100 ]] || fail "$(cat log)"
    has log -- '--help lists every option' || fail "$(cat log)"
}

# Ctrl-C, and what is said after it, while a live line is drawn.
test_a_stop_is_said_on_a_line_of_its_own() {
    has_terminal || return
    local command="exec '$root/train_gpt' ${common[*]} --model llama-tiny --train-iters 100000
        --eval-interval 100000 --log-interval 99999"
    rm -f typescript
    script -qefc "${command//$'\n'/}" typescript >/dev/null </dev/null &
    local script=$!
    wait_until grep -q 'step ' typescript
    kill -INT "$(pgrep -P $script)"
    wait $script
    tr '\r' '\n' <typescript | grep -qE $'^\x1b\\[Kstopped by signal 2 ' ||
        fail "$(tail -n 2 typescript | cat -v)"
}

test_a_finished_run_says_so() {
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --resume fp32/latest || return
    has log "nothing to train: step $steps is done, and --train-iters is $steps" || fail "$(cat log)"
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --resume fp32/latest \
        --train-iters 1 || return
    has log "nothing to train: step $steps is done, and --train-iters is 1" || fail "$(cat log)"
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --resume fp32/latest --eval-only
    ! has log 'nothing to train' || fail "an evaluation"
}

# The best loss is a run's own: an evaluation alone compares with nothing.
test_an_evaluation_alone_is_not_the_best() {
    local way
    for way in '0 --load' "$steps --resume"; do
        # shellcheck disable=SC2086 # words
        expect_said 0 "eval after step ${way% *} | " train_gpt "${common[@]}" ${way#* } fp32/latest \
            --eval-only || return
        ! has log '(best)' || fail "$way: $(cat log)"
    done
}

# $1: what is said at the start; the rest: options.
schedule_says() {
    local says=$1
    shift
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --train-iters 12 "$@" || return
    [[ $(grep '^warning: ' log) == "$says" ]] || fail "$*: $(grep '^warning: ' log)"
}

test_schedules_that_do_not_fit_are_said() {
    local zero='warning: --lr-decay-iters 7: the learning rate is 0 from step 8 to 12; --min-lr sets it'
    local style
    for style in cosine linear wsd; do
        schedule_says "$zero" --lr-decay-style $style --lr-decay-iters 7
        schedule_says '' --lr-decay-style $style --lr-decay-iters 7 --min-lr 1e-5
    done
    schedule_says '' --lr-decay-style constant --lr-decay-iters 7
    schedule_says '' --lr-decay-iters 7 --lr 0
    schedule_says 'warning: --lr-warmup-iters 20: training ends at step 12, before the rate reaches --lr' \
        --lr-warmup-iters 20
    schedule_says '' --lr-warmup-iters 12
}

test_options_without_effect_are_said() {
    local run=(train_gpt --model llama-tiny "${common[@]}" --train-iters 1)
    expect_said 0 'note: --fp8-lm-head has no effect without --fp8-format' "${run[@]}" --fp8-lm-head
    has log 'note: --fp8-recipe has no effect' && fail "what was not given is said"
    expect_said 0 'note: --rope-scaling-factor has no effect without --rope-scaling' "${run[@]}" \
        --rope-scaling-factor 4 --recompute block --no-fp8-lm-head
    has log 'note: --recompute is for the GPU trainer; it has no effect here' || fail "$(cat log)"
    [[ $(grep -c '  note: .* no effect' log) -eq 2 ]] || fail "$(cat log)"
    grep -qE '  note: given more than once.*: --train-iters$' log || fail "$(cat log)"
    expect_said 0 'note: --head-lr-mult has no effect without --untie-embeddings-and-output-weights' \
        "${run[@]}" --embedding-lr-mult 3 --head-lr-mult 0.5
    [[ $(grep -c '  note: .* no effect' log) -eq 1 ]] || fail "$(cat log)"
    has log ' --embedding-lr-mult 3 --head-lr-mult 0.5' || fail "not among the options: $(cat log)"
    expect_status 0 "${run[@]}" --untie-embeddings-and-output-weights --head-lr-mult 0.5
    ! has log 'no effect' || fail "$(cat log)"
    expect_status 0 "${run[@]}" --fp8-lm-head --fp8-format hybrid --fp8-recipe tensorwise
    ! has log 'no effect' || fail "$(cat log)"
}

test_a_start_says_what_it_trains() {
    local run=(train_gpt --model llama-tiny "${common[@]}" --train-iters 3 --bf16)
    expect_said 0 '  schedule    3 steps of 256 tokens (2 x 128 micro-batches), ' "${run[@]}"
    expect_said 0 '  saves       nothing: no --save' "${run[@]}" --save-interval 2
    expect_said 0 '  saves       every 2 steps to saved' "${run[@]}" --save-interval 2 --save saved
    expect_said 0 '  saves       every 1 step to saved' "${run[@]}" --resume latest --save saved \
        --save-interval 1
    ! has log warning || fail "$(cat log)"
    expect_said 0 'warning: --resume saved/latest without --save: nothing is saved from here on' \
        "${run[@]}" --resume saved/latest
    has log '  saves       nothing: no --save' || fail "$(cat log)"
    expect_said 0 '; delayed scaling, history 1024, margin 0 (E5M2: 5); fast accumulation' "${run[@]}" \
        --fp8-format hybrid
    expect_said 0 '; tensorwise scaling; fast accumulation forward, split backward' "${run[@]}" \
        --fp8-format hybrid --fp8-recipe tensorwise
    expect_said 0 '; blockwise scaling, 1 x 128 and 128 x 128, power-of-two scales; split' "${run[@]}" \
        --fp8-format e4m3 --fp8-recipe blockwise
}

# Samples and evaluations read no batch of the training data.
test_answers_need_no_whole_batch() {
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --sample-only --sample-length 2 \
        --global-batch-size 100000
}

# Without a checkpoint, or with --resume latest where none is yet.
test_answers_of_random_weights_are_told() {
    local words says='warning: the weights are random: no checkpoint is loaded (--load, --resume)'
    for words in --sample-only --eval-only '--resume latest --save none --sample-only'; do
        # shellcheck disable=SC2086 # words
        expect_said 0 "$says" train_gpt --model llama-tiny "${common[@]}" $words || return
    done
    for words in '--load fp32/latest --sample-only' '--resume fp32/latest --eval-only' \
        '--train-iters 4'; do
        # shellcheck disable=SC2086 # words
        expect_status 0 train_gpt --model llama-tiny "${common[@]}" $words || return
        ! has log warning || fail "$words: $(cat log)"
    done
}

test_plan_allocates_nothing() {
    (
        ulimit -v 1000000 # KiB
        train_gpt --model llama-3-8b --plan >log 2>&1
    ) || fail "$(tail -n 1 log)"
    for word in 'Memory plan' activations gradients optimizer weights ' all '; do
        has log "$word" || fail "no '$word' in the plan"
    done
    grep -qE '^  all +[0-9.]+ GiB$' log || fail "no sum"
    # less than is available, by a limit of its own
    expect_status 1 bash -c "ulimit -v 1000000; '$root/train_gpt' --model gpt2-124m \
        --vocab-size 257 --data d/x_train.bin --seq-length 64"
    has log 'out of memory: the plan needs' || fail "out of memory: $(tail -n 1 log)"
}

test_checkpoints_are_listed() {
    expect_status 0 train_gpt "${common[@]}" --model llama-tiny --save list --save-interval 10 ||
        return
    printf x >>list/step_00000020/config.json
    expect_status 0 train_gpt --save list --list-checkpoints || return
    grep -qE '^ +10 +[0-9.]+ +[0-9.]+ +FP32 +1 +[0-9.]+ MiB +20[0-9T:-]+Z +whole$' log || fail "10"
    grep -qE '^ +20 +damaged: list/step_00000020/config.json: damaged: ' log || fail "20"
    grep -qE '^ +24 +[0-9.]+ .* whole, latest, best$' log || fail "24: $(tail -n 1 log)"
    [[ $(wc -l <log) -eq 4 ]] || fail "$(cat log)"
}

# Learns, then is resumed with a rate that spoils it: the best checkpoint is an old one, and stays.
test_best_is_the_lowest_validation_loss() {
    local options=(--model llama-tiny --eval-interval 3 --save-interval 3 --save best --keep 1)
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --train-iters 12 || return
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --lr 3 --lr-decay-style constant \
        --resume latest || return
    local lowest
    "$root/test/metrics_tool.py" best/metrics.jsonl >steps || fail "metrics"
    lowest=$(awk '/^eval/ { if (low == "" || $5 < low) { low = $5; at = $3 } } END { print at }' \
        steps)
    [[ $lowest -le 12 ]] || fail "the rate spoils nothing: $(grep eval steps)"
    [[ $(readlink best/best) == "$(printf step_%08d "$lowest")" ]] || fail "$(readlink best/best)"
    expect_status 0 train_gpt --save best --list-checkpoints
    grep -qE "^ +$lowest .* whole, best$" log || fail "not listed as the best: $(cat log)"
    [[ $(grep -c best log) -eq 1 ]] || fail "two are the best: $(cat log)"
    [[ -d best/best/ && $(find best/ -name 'step_*' -type d | wc -l) -eq 2 ]] || fail "$(ls best)"
    # an evaluation that is not saved sets no bar
    expect_status 0 train_gpt "${common[@]}" "${options[@]}" --save bar --save-interval 6 --lr 0.3 \
        --embedding-lr-mult 1 --vector-lr-mult 1 --lr-warmup-iters 24 --lr-decay-iters 1000 \
        --train-iters 12 || return
    "$root/test/metrics_tool.py" bar/metrics.jsonl >steps || fail "metrics"
    awk '/^eval/ { loss[$3] = $5 } END { exit !(loss[3] < loss[6] && loss[6] < loss[12]) }' steps ||
        fail "not the lowest at step 3, then at 6: $(grep eval steps)"
    [[ $(readlink bar/best) == step_00000006 ]] || fail "best is '$(readlink bar/best)'"
}

test_saved_config_starts_the_same_run() {
    sed 's/^save .*/save again/' fp32/config.txt >config
    expect_status 0 train_gpt --config config --save-interval 1000 || return
    same_checkpoint fp32/step_000000$steps again/step_000000$steps || fail "another run"
}

# docs/resume.md's command: more --train-iters stretch the decay, so that no step's rate is 0.
test_saved_config_extends_a_run() {
    sed 's/^save .*/save longer/' fp32/config.txt >config
    cp -r fp32 longer
    expect_status 0 train_gpt --config config --resume latest --train-iters 40 || return
    steps_of longer | awk '$3 > 24 && !($11 > 1e-6) { bad = 1 } END { exit bad || $3 != 40 }' ||
        fail "rates: $(steps_of longer | tail -n 3)"
    grep -q '"lr-decay-iters":"40"' longer/metrics.jsonl || fail "no effective values"
}

test_metrics_without_a_checkpoint() {
    mkdir -p alone && cd alone || return
    expect_status 0 train_gpt --model llama-tiny "${common[@]/#d\//../d/}" --metrics m.jsonl
    [[ $(ls) == $'log\nm.jsonl' ]] || fail "more than metrics: $(ls)"
    cd ..
    "$root/test/metrics_tool.py" alone/m.jsonl | grep '^step' >steps
    steps_of fp32 | cmp -s - steps || fail "other steps"
    expect_status 0 train_gpt --model llama-tiny "${common[@]}" --metrics n.jsonl --save beside
    "$root/test/metrics_tool.py" n.jsonl | grep '^step' | cmp -s - steps || fail "with --save"
    [[ -e beside/latest && -e beside/config.txt && ! -e beside/metrics.jsonl ]] ||
        fail "beside: $(ls beside)"
}

test_sanitized_runs_do_it_all() {
    local asan=$root/build/asan/train_gpt fp8=(--fp8-format hybrid) model
    for model in llama-tiny gpt2-tiny; do
        expect_status 0 "$asan" "${common[@]}" --model $model "${fp8[@]}" --save asan.$model \
            --train-iters 6 --sample-interval 3 --sample-length 8 --save-interval 2 || return
        expect_status 0 "$asan" "${common[@]}" --model $model --fp8-format e5m2 --save asan.$model \
            --fp8-recipe tensorwise --train-iters 8 --resume latest || return
        expect_status 0 "$asan" "${common[@]}" --model $model --fp8-format e4m3 --save asan.$model \
            --fp8-recipe blockwise --train-iters 10 --resume latest || return
        expect_status 0 "$asan" "${common[@]}" --model $model --save asan.$model --resume latest \
            --sample-only --sample-length 5 || return
        expect_status 0 "$asan" "${common[@]}" --model $model --bf16 --resume asan.$model/latest \
            --dump-gradients asan.$model/gradients || return
    done
    expect_status 0 "$asan" --save asan.gpt2-tiny --list-checkpoints || return
    expect_status 0 "$asan" --model gpt2-124m --plan
}

run_tests
