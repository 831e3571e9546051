#!/usr/bin/env bash
# shellcheck disable=SC2086 # options are words on purpose
# The whole trainer on tiny models: resuming, evaluation, what it prints and writes.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# 21 windows of 64 tokens and 4 sequences a step: an epoch ends in the middle of the sixth step.
steps=12
common=(--data d/x_train.bin --valid-data d/x_val.bin --eval-iters 1 --eval-interval 5
    --micro-batch-size 2 --global-batch-size 4 --train-iters "$steps" --lr-decay-iters "$steps"
    --lr-warmup-iters 3 --lr 3e-3 --keep 0 --log-interval 1)

prepare() {
    make_shards 1500
}

run() {
    train_gpt "${common[@]}" --model llama-tiny "$@"
}

# A run in one go; one that goes on in the second epoch with nothing but the checkpoint; and one in
# three parts. Every step is the same to the last digit, and every checkpoint to the last bit.
test_resumed_runs_are_straight_ones() {
    local name options
    while read -r name options; do
        set -- train_gpt "${common[@]}" $options
        expect_status 0 "$@" --save "$name" --save-interval 3 || return
        is "$(steps_of "$name" | wc -l)" $steps
        expect_status 0 train_gpt --save "$name.alone" --resume "$name/step_00000009" || return
        same_checkpoint "$name/latest" "$name.alone/latest" || fail "$name: alone, another end"
        cmp -s <(steps_of "$name" | tail -n +10) <(steps_of "$name.alone") || fail "$name: other steps"
        resumes "$name" '1 8' "$@" --save-interval 1000
    done <<'ROWS'
fp32 --model llama-tiny
gpt2 --model gpt2-tiny --lr-decay-style linear
bf16 --model llama-tiny --bf16 --lr-decay-style cosine
delayed --model llama-tiny --fp8-format hybrid --fp8-amax-history-len 5
recent --model gpt2-tiny --fp8-format e4m3 --fp8-margin 1 --fp8-amax-history-len 1 --fp8-lm-head --no-fp8-wgrad
tensorwise --model llama-tiny --fp8-format hybrid --fp8-recipe tensorwise --num-layers 3 --first-last-layers-bf16
blockwise --model llama-tiny --fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head
ROWS
    [[ ! -e blockwise/latest/scaling.safetensors ]] || fail "blockwise: a scaling state"
}

# With 40 short texts, a run differs if attention or positions begin anew at each, or some targets
# do not count. A resumed run does as before, and warns if an option changes that. An evaluation
# does as the run.
test_documents_begin_anew() {
    local i name options loss
    for i in {1..40}; do make_text "$i" $((20 + 5 * i)) >"text.$i"; done
    expect_status 0 "$root/tokenize" --output-prefix d/many --valid-fraction 0.2 text.? text.?? || return
    set -- train_gpt "${common[@]}" --model gpt2-tiny --data d/many_train.bin --valid-data d/many_val.bin
    while read -r name options; do
        expect_status 0 "$@" $options --save "docs.$name" || return
        has log "  documents   " || fail "nothing is said of documents"
        steps_of "docs.$name" >"steps.$name"
        resumes "docs.$name" '1 8' "$@" $options --save-interval 1000
        expect_status 0 train_gpt --save "docs.$name.on" --resume "docs.$name/step_00000012" --train-iters 13
        says '!--reset-attention-mask is' '!--reset-position-ids is' '!--eod-mask-loss is'
        loss=$(grep -oE 'valid loss [0-9.]+' <(train_gpt --load "docs.$name/latest" --eval-only 2>&1))
        has <(train_gpt --resume "docs.$name/latest" --eval-only 2>&1) "$loss" || fail "$name: $loss"
        echo "$loss" >>losses
    done <<'ROWS'
none
attention --reset-attention-mask
positions --reset-position-ids
both --reset-attention-mask --reset-position-ids
ends --reset-attention-mask --reset-position-ids --eod-mask-loss
ROWS
    is "$(sort -u losses | wc -l)" 5
    is "$(for name in none attention positions both ends; do md5sum <"steps.$name"; done | sort -u | wc -l)" 5
    expect_message 0 '--reset-attention-mask is false, was true in the checkpoint' "$@" \
        --resume docs.both/latest --no-reset-attention-mask --train-iters 13
    says '!reset-position-ids is'
    # a sample is one document, whatever the batch before it was
    expect_status 0 "$@" --reset-attention-mask --reset-position-ids --save docs.sample --eval-iters 0 \
        --sample-interval $steps --sample-tokens 256 --sample-length 60 --sample-temperature 0
    loss=$(sed -n '/^sample after/ { n; p }' log)
    is "$(train_gpt --load docs.sample/latest --sample-only --sample-tokens 256 --sample-length 60 \
        --sample-temperature 0)" "$loss"
    # a token of the byte tokenizer that is not beside the shards; and one of no tokenizer
    cp d/many_train.bin alone.bin
    expect_message 0 'without SHARD.starts they begin at token 256' "$@" --data alone.bin \
        --reset-attention-mask --train-iters 1
    expect_message 0 'warning: --reset-attention-mask: 2 shards: it is not known where documents begin' \
        "$@" --data alone.bin --valid-data alone.bin --vocab-size 258 --reset-attention-mask --train-iters 1
    expect_message 1 'error: --eod-mask-loss: it is not known which token ends a text; give --tokenizer' \
        "$@" --data alone.bin --valid-data alone.bin --vocab-size 258 --eod-mask-loss
}

test_comparison_sees_differences() {
    cp -r fp32/step_00000009 other
    same_checkpoint fp32/step_00000009 other || fail "equal ones differ"
    ! same_checkpoint fp32/step_00000009 fp32/step_00000012 || fail "two steps are the same"
    poke other/model.safetensors 5000 x
    ! same_checkpoint fp32/step_00000009 other || fail "a changed byte is not seen"
    ! passes resumes fp32 6 run --lr 3.001e-3 || fail "another rate is not seen"
}

# The small presets at the quick start's learning rate, with the default initialization and warm-up;
# and with weights as small as wide models have. test/results has the large ones.
test_presets_start_smoothly() {
    "$root/make_corpus" --bytes 200000 >corpus
    expect_status 0 "$root/tokenize" --output-prefix d/corpus corpus || return
    local start=("$root/test/presets.py" --trainer "$root/train_gpt" --norm 20)
    local options=(--data d/corpus_train.bin --lr 2e-3 --train-iters 20 --lr-decay-iters 200)
    expect_status 0 "${start[@]}" --models "gpt2-tiny llama-tiny llama-quickstart" -- "${options[@]}"
    grep adamw log && grep muon log
    expect_status 1 "${start[@]}" --models llama-quickstart --optimizers adamw -- "${options[@]}" \
        --init-method-std 0.02
    has log 'rises by more than 1, above the first loss, norm above 20'
}

# A checkpoint's weights, read by a run in another precision and changed by no step.
test_precision_changes_keep_the_weights() {
    local from to options
    while read -r from to options; do
        expect_status 0 run $options --lr 0 --weight-decay 0 --resume "$from/step_00000009" \
            --train-iters 10 --save "$from.$to" --save-interval 1000 || continue
        cmp -s {"$from/step_00000009","$from.$to/step_00000010"}/model.safetensors ||
            fail "$from read as $to: other weights"
        steps_of "$from.$to" | awk '{ exit !($7 > 1 && $7 < 6) }' || fail "$from read as $to: $(steps_of "$from.$to")"
    done <<'ROWS'
delayed fp32 --fp8-format none
fp32 delayed --fp8-format hybrid --fp8-recipe delayed
delayed tensorwise --fp8-format hybrid --fp8-recipe tensorwise
tensorwise delayed --fp8-format hybrid --fp8-recipe delayed --num-layers 3
delayed blockwise --fp8-format hybrid --fp8-recipe blockwise
blockwise tensorwise --fp8-format hybrid --fp8-recipe tensorwise
tensorwise blockwise --fp8-format hybrid --fp8-recipe blockwise --num-layers 3
blockwise bf16 --bf16 --fp8-format none
bf16 blockwise --fp8-format hybrid --fp8-recipe blockwise
ROWS
    # there and back: the history starts again, and training goes on
    expect_status 0 run --fp8-format hybrid --resume delayed.fp32/step_00000010
}

test_step_line_has_its_fields() {
    expect_status 0 run --fp8-format hybrid || return
    local number='[0-9.e+-]+' line
    line="^step +[0-9]+/$steps \| loss $number \| norm $number \| lr $number \| [0-9]+ tok/s"
    line+=" \| $number ms \| "
    is "$(grep -cE "${line}ETA [0-9hms]+$" log) $(grep -cE "${line}start [0-9.]+ s$" log)" "$((steps - 1)) 1"
    # what does not change is printed once
    for line in '^  model +[0-9,]+ parameters, FP8, [0-9.e+]+ FLOPs a token$' '^  memory +[0-9.]+ MiB' \
        '^eval after step 5 \| valid loss [0-9.]+ \(best\) \| perplexity [0-9.e+]+ \| '; do
        grep -qE "$line" log || fail "no $line"
    done
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
        grep -qE "^step +2/$steps \\| $line$" live || fail "$columns columns: $(cat live)"
    done <<ROWS
160 loss $number \\| norm $number \\| lr $number \\| [0-9]+ tok/s \\| $number ms \\| ETA [0-9hms]+
72 loss $number \\| norm $number \\| [0-9]+ tok/s \\| ETA [0-9hms]+
60 loss $number \\| [0-9]+ tok/s \\| ETA [0-9hms]+
30 loss $number
ROWS
    live_lines 20 >live
    is "$(head -n 1 live | wc -L)" 19
}

# A checkpoint has the run's loss alone, too, over the same sequences in the same precision, whatever
# the step and the options of the run.
test_a_checkpoint_has_the_loss_of_the_run() {
    local precision said alone
    for precision in --no-bf16 --bf16 '--fp8-format hybrid --fp8-recipe tensorwise'; do
        expect_status 0 run $precision --eval-iters 2 --save "alone $precision" || return
        said=$(grep "^eval after step $steps" log | sed 's/ (best)//; s/ | [0-9.]* s$//')
        [[ $said == *' | 2 sequences, 128 tokens' ]] || fail "$said"
        for alone in --load --resume; do
            expect_message 0 "$said" train_gpt "$alone" "alone $precision/latest" --eval-only
        done
        expect_message 0 "eval after step $steps " train_gpt --load "alone $precision/latest" \
            --eval-only --eval-iters 1 --global-batch-size 1 --micro-batch-size 3
        says '| 1 sequence, 64 tokens |'
    done
}

# sample OPTION...: what is asked for goes to the file `sample`, the rest to `log`.
sample() {
    run --resume fp32/latest --sample-length 59 "$@" >sample 2>log || fail "$*: $(tail -n 1 log)"
}

# A sample, or an evaluation, has the standard output to itself.
test_answers_stand_alone() {
    sample --sample-only --sample-prompt 'Anna '
    # a byte a token, and a new line; the end of the text is a line of its own
    [[ $(head -c 5 sample) == 'Anna ' && $(sed '/^---$/d' sample | wc -c) -ge 60 ]] ||
        fail "$(cat sample)"
    ! grep -qaE 'step|Run|--' sample || fail "more than the sample: $(cat sample)"
    is "$(<log)" ''
    cp sample quietly
    sample --sample-only --sample-prompt 'Anna ' --no-quiet
    cmp -s sample quietly || fail "not quiet: $(cat sample)"
    says "sample after step $steps:" '--hidden-size 64'
    sample --eval-only
    grep -qxE "eval after step $steps \| valid loss .* s" sample || fail "$(cat sample)"
    is "$(wc -l <sample)" 1
    sample --eval-only --plan # asked for, too
    has sample 'Memory plan' || fail "$(cat sample)"
}

# What is asked for and cannot be written is an error; a run that trains goes on.
test_answers_reach_their_file() {
    local words
    for words in '--sample-only --sample-length 4' '--eval-only --eval-iters 1' --plan --list-tensors \
        '--list-checkpoints --save fp32' --help --version --completion; do
        ! run --resume fp32/latest $words >/dev/full 2>log || fail "$words: status 0"
        says 'error: the standard output could not be written: No space'
    done
    run >/dev/full 2>log || fail
    is "$(grep -c 'could not be written' log)" 1
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
    run --quiet --train-iters 6 --save hush --lr-decay-iters 5 >sample 2>log || fail
    is "$(<sample)" ''
    [[ $(<log) == 'warning: --lr-decay-iters 5: '* && $(wc -l <log) -eq 1 ]] || fail
    has hush/metrics.jsonl '"kind":"step","step":6' || fail "no metrics"
    ! has hush/config.txt quiet || fail "it is kept"
    ! train_gpt --model llama-tiny --data nowhere --quiet >sample 2>log || fail "no error"
    [[ ! -s sample && $(<log) == 'error: --data nowhere: '* ]] || fail
}

# What a model writes commands no terminal, nor the one that shows a log; a file gets every byte.
test_samples_are_escaped_on_a_terminal() {
    has_terminal || return
    local prompt=$'a\e[2Jb\r\x7fc\xc2\x9bd\xc3\xa9\t' wild=(--sample-length 400 --sample-temperature 100
        --sample-top-k 0)
    printf '%q ' "$root/train_gpt" --model llama-tiny "${common[@]}" --sample-only --quiet "${wild[@]}" \
        --sample-prompt "$prompt" >ask
    script -qec "bash ask" typescript >/dev/null </dev/null
    sed '1d; /^Script done/d' typescript >shown
    grep -qaF "$(printf 'a\\x1b[2Jb\\x0d\\x7fc\xc2\\x9bd\xc3\xa9\t')" shown ||
        fail "the prompt: $(head -c 60 shown | cat -v)"
    ! tr -d '\r\n\t' <shown | LC_ALL=C grep -qa '[[:cntrl:]]' || fail "the sample: $(cat -v shown)"
    bash ask >sample
    grep -qaF "$prompt" sample || fail "in a file: $(head -c 60 sample | cat -v)"
    tr -d '\r\n\t\033\177' <sample | LC_ALL=C grep -qa '[[:cntrl:]]' || fail "a file is escaped"
    expect_message 0 'a\x1b[2Jb\x0d' run --sample-interval 4 --train-iters 4 "${wild[@]}" --sample-prompt "$prompt"
    ! sed -n '/^sample/,$p' log | tr -d '\n\t' | LC_ALL=C grep -qa '[[:cntrl:]]' || fail "a run's log: $(cat -v log)"
}

# Ctrl-C, and what is printed after it, while a live line is drawn.
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

test_plan_allocates_nothing() {
    local limited=(bash -c "ulimit -v 1000000; exec '$root/train_gpt' \"\$@\"" _) # KiB
    expect_message 0 'Memory plan' "${limited[@]}" --model llama-3-8b --plan
    says activations gradients optimizer weights ' all '
    grep -qE '^  all +[0-9.]+ GiB$' log || fail "no sum"
    # less than is available, by a limit of its own
    expect_message 1 'out of memory: the plan needs' "${limited[@]}" --model gpt2-124m --vocab-size 257 \
        --data d/x_train.bin --seq-length 64
    mkdir -p small/proc && echo 'MemAvailable: 100000 kB' >small/proc/meminfo
    local options=(--model llama-tiny --data d/x_train.bin --max-position-embeddings 8192 --train-iters 1)
    local fits='--micro-batch-size 1 --seq-length 4096'
    export LLM8_TEST_ROOT=small
    expect_message 1 "97.66 MiB are available: try $fits, or a smaller model" \
        train_gpt "${options[@]}" --seq-length 8192
    expect_message 0 'What fits 97.66 MiB' train_gpt "${options[@]}" --seq-length 8192 --plan
    says "  $fits"
    expect_status 0 train_gpt "${options[@]}" $fits --plan || return
    ! grep 'What fits' log || fail "it does not fit"
    expect_message 1 'available: try --micro-batch-size 2, or' train_gpt "${options[@]}" --seq-length 1024 \
        --micro-batch-size 22 --global-batch-size 22 # which 5 would not divide
    expect_message 1 "try $fits, or" train_gpt "${options[@]}" --max-position-embeddings 8208 \
        --seq-length 8208 # FP8 takes multiples of 16, and half of it is none
    # runs that do not train may have any global batch
    options=(--model llama-tiny --micro-batch-size 256 --global-batch-size 7)
    expect_message 1 'available: try --micro-batch-size 128, or' train_gpt "${options[@]}" --eval-only \
        --valid-data d/x_val.bin --seq-length 128
    expect_message 1 'available: try --seq-length 8192, or' train_gpt "${options[@]}" --sample-only \
        --seq-length 16384 --max-position-embeddings 16384
    expect_message 1 'available: try a smaller model' train_gpt --model gpt2-124m --data d/x_train.bin
    unset LLM8_TEST_ROOT
}

test_checkpoints_are_listed() {
    local line
    expect_status 0 run --save list --save-interval 5 || return
    printf x >>list/step_00000010/config.json
    expect_message 1 'error: --list-checkpoints: 1 of 3 under list is damaged; --resume PATH and' \
        train_gpt --save list --list-checkpoints || return
    for line in ' 5 +[0-9.]+ +[0-9.]+ +FP32 +1 +[0-9.]+ MiB +20[0-9T:-]+Z +whole' \
        '10 +damaged: list/step_00000010/config.json: damaged: .*' "$steps +[0-9.]+ .* whole, latest, best"; do
        grep -qE "^ +$line\$" log || fail "no $line: $(<log)"
    done
    is "$(wc -l <log)" 5
}

# docs/resume.md's command: more --train-iters stretch the decay, so that no step's rate is 0.
test_saved_config_starts_or_extends_a_run() {
    grep -v lr-decay-iters fp32/config.txt | sed 's/^save .*/save again/' >config
    expect_status 0 train_gpt --config config --save-interval 1000 || return
    same_checkpoint {fp32,again}/latest || fail "another run: $(<difference)"
    expect_status 0 train_gpt --config config --resume latest --train-iters 20 || return
    steps_of again | awk '$3 > 12 && !($11 > 1e-6) { bad = 1 } END { exit bad || $3 != 20 }' ||
        fail "rates: $(steps_of again | tail -n 3)"
    grep -q '"lr-decay-iters":"20"' again/metrics.jsonl || fail "no effective values"
}

test_metrics_without_a_checkpoint() {
    mkdir -p alone && cd alone || return
    expect_status 0 run --data ../d/x_train.bin --valid-data ../d/x_val.bin --metrics m.jsonl
    is "$(ls)" $'log\nm.jsonl'
    cd ..
    cmp -s <(steps_of fp32) <(steps_of alone/m.jsonl) || fail "other steps"
    expect_status 0 run --metrics n.jsonl --save beside
    cmp -s <(steps_of fp32) <(steps_of n.jsonl) || fail "with --save"
    [[ -e beside/latest && -e beside/config.txt && ! -e beside/metrics.jsonl ]] ||
        fail "beside: $(ls beside)"
}

test_sanitized_runs_do_it_all() {
    local model precision step=0 asan=("$root/build/asan/train_gpt" "${common[@]}")
    for model in llama-tiny gpt2-tiny; do
        step=0
        for precision in '--fp8-format hybrid --sample-interval 2 --sample-length 8' \
            '--fp8-format e5m2 --fp8-recipe tensorwise' '--fp8-format e4m3 --fp8-recipe blockwise' \
            '--sample-only --sample-length 5' "--bf16 --dump-gradients gradients"; do
            step=$((step + 3))
            expect_status 0 "${asan[@]}" --model $model --save asan.$model --save-interval 2 \
                --resume latest --train-iters $step $precision || return
        done
    done
    expect_status 0 "${asan[0]}" --save asan.gpt2-tiny --list-checkpoints || return
    expect_status 0 "${asan[0]}" --model gpt2-124m --plan
}

run_tests
