#!/usr/bin/env bash
# What a run takes from the checkpoint it starts from (the model's shape, the tokenizer) and from
# the tokenizer of its data (the vocabulary), in both trainers; and what a checkpoint carries so
# that it can.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
export LLM8_TEST_SMALL_FP8=1
standin=$root/build/plain/standin_trainer
trainers=("$root/train_gpt")
if [[ -x $standin ]]; then trainers+=("$standin"); fi

# another shape than any preset's; the vocabulary is the tokenizer's
shape=(--model llama-tiny --num-layers 3 --hidden-size 48 --num-attention-heads 6
    --num-query-groups 3 --ffn-hidden-size 80 --untie-embeddings-and-output-weights
    --rope-theta 500 --norm-epsilon 1e-6 --seq-length 32 --max-position-embeddings 64)
data=(--data d/x_train.bin --micro-batch-size 2 --lr 1e-3 --train-iters 4 --lr-decay-iters 8
    --no-cuda-graphs)

prepare() {
    make_shards 10000
    expect_status 0 train_gpt "${shape[@]}" "${data[@]}" --save s || return
    mkdir elsewhere && cp -r s/step_00000004 elsewhere/c
    cp d/x_train.bin alone.bin # without a tokenizer beside it
}

# Runs a trainer in a folder that holds the checkpoint c and nothing else.
elsewhere() {
    (cd elsewhere && "$@")
}

test_samples_need_the_folder_alone() {
    local trainer way
    for trainer in "${trainers[@]}"; do
        for way in --load --resume; do
            expect_status 0 elsewhere "$trainer" $way c --sample-only --sample-prompt 'Anna AB' \
                --sample-length 9 --sample-temperature 0 || return
            grep -qa '^Anna AB' log || fail "$way: no text: $(tail -n 2 log)"
            tail -n 1 log >"sample.$way"
        done
        cmp -s sample.--load sample.--resume || fail "$trainer: two samples"
    done
}

# A command that ends well, without a warning.
says_nothing() {
    expect_status 0 "$@" || return
    ! has log warning || fail "$*: $(grep warning log)"
}

# An answer that outgrows the sequence is written without sight of the question.
test_a_prompt_that_leaves_the_window_is_told() {
    local trainer says='on, the model does not see the beginning of the prompt: a sequence is 32'
    for trainer in "${trainers[@]}"; do
        local ask=("$trainer" --load s/latest --sample-only --sample-prompt 'Anna ')
        expect_said 0 "--sample-length 28: from token 28 of the sample $says (--seq-length, at most 64)" \
            "${ask[@]}" --sample-length 28 || return
        expect_said 0 "from token 32 of the sample $says" "$trainer" --load s/latest --sample-only \
            --sample-tokens '65 66' --sample-length 60
        [[ $(grep -c warning log) -eq 1 ]] || fail "$(cat log)"
        expect_said 0 '--sample-prompt: 45 tokens, more than a sequence of 32 (--seq-length, at most 64)' \
            "${ask[@]}" --sample-prompt "$(printf '%44s' '')" --sample-length 60
        [[ $(grep -c warning log) -eq 1 ]] || fail "$(cat log)"
        # what fits, or has no question; a run that trains shows what it learns with any length
        says_nothing "${ask[@]}" --sample-length 27
        says_nothing "${ask[@]}" --sample-length 59 --seq-length 64
        says_nothing "$trainer" --load s/latest --sample-only
        says_nothing "$trainer" --load s/latest "${data[@]}" --sample-interval 4 \
            --sample-prompt 'Anna '
    done
}

test_evaluations_need_no_shape() {
    local trainer loss options
    for trainer in "${trainers[@]}"; do
        for options in "${shape[*]} --resume s/latest" '--resume s/latest' '--load s/latest' \
            '--load s/latest --model llama-tiny'; do
            read -ra options <<<"$options"
            expect_status 0 "$trainer" "${options[@]}" --eval-only --valid-data d/x_val.bin ||
                continue
            grep -o 'valid loss [0-9.]*' log >"loss.${#options[@]}"
            loss=${loss:-loss.${#options[@]}}
            if [[ ! -s $loss ]] || ! cmp -s "$loss" "loss.${#options[@]}"; then
                fail "${options[*]}"
            fi
        done
    done
}

test_resumed_runs_need_no_shape() {
    local trainer options
    for trainer in "${trainers[@]}"; do
        for options in "${shape[*]}" '' '--model llama-tiny' "--config s/config.txt"; do
            read -ra options <<<"$options"
            rm -rf r && cp -r s r
            expect_status 0 "$trainer" "${options[@]}" "${data[@]}" --train-iters 8 --save r \
                --resume latest || return
            [[ -d r/step_00000008 ]] || fail "${options[*]}: $(tail -n 2 log)"
            rm -rf "r.${#options[@]}" && mv r "r.${#options[@]}"
        done
        for options in 0 2; do
            same_checkpoint "r.${#shape[@]}/latest" "r.$options/latest" ||
                fail "$trainer: other weights with $options words of options"
        done
    done
    # what the run was is in its config.txt even when nobody said it again
    ! grep resume r.0/config.txt || fail "config.txt goes on with an earlier run"
    sed 's/^save .*/save anew/' r.0/config.txt >config
    expect_status 0 train_gpt --config config --train-iters 4 || return
    sed 's/^save .*/save first/' s/config.txt >config
    expect_status 0 train_gpt --config config || return
    same_checkpoint anew/latest first/latest || fail "config.txt of a resumed run: $(cat config)"
}

# A fine-tuning that goes on with nothing but its checkpoint.
test_resumed_runs_need_no_options() {
    local trainer
    for trainer in "${trainers[@]}"; do
        rm -rf tuned part
        expect_status 0 "$trainer" "${data[@]}" --load s/latest --seed 7 --weight-decay 0.3 \
            --global-batch-size 4 --train-iters 8 --save tuned --save-interval 4 || return
        expect_status 0 "$trainer" --resume tuned/step_00000004 --save part || return
        same_checkpoint tuned/step_00000008 part/step_00000008 || fail "$trainer: other weights"
        expect_said 0 'nothing to train: step 8 is done' "$trainer" --resume latest --save part
        expect_status 0 "$trainer" --resume latest --save part --train-iters 9 || return
        [[ -d part/step_00000009 ]] || fail "$trainer: $(tail -n 2 log)"
        expect_said 1 'error: --global-batch-size 4 (of the checkpoint tuned/step_00000008): must be a ' \
            "$trainer" --resume tuned/latest --micro-batch-size 3
        expect_said 1 'error: --data (of the checkpoint c) d/x_train.bin: ' elsewhere "$trainer" \
            --resume c
    done
}

# Without options, a checkpoint that cannot be read leaves nothing to say of --data.
test_a_lost_checkpoint_is_not_missing_data() {
    local step trainer
    rm -rf broken && cp -r s broken
    for step in broken/step_*; do : >"$step/meta.json"; done
    for trainer in "${trainers[@]}"; do
        expect_said 1 'error: --resume latest: no whole checkpoint under broken; to start afresh' \
            "$trainer" --resume latest --save broken || return
        [[ $(grep -c 'meta.json: damaged .*; trying an earlier checkpoint' log) -eq \
            $(compgen -G 'broken/step_*' | wc -l) ]] || fail "$(cat log)"
        expect_said 1 'no whole checkpoint under broken' "$trainer" --resume latest --save broken \
            --plan
        expect_said 1 'which shards to train on; there is no checkpoint under mistyped that would' \
            "$trainer" --resume latest --save mistyped --model llama-tiny
        [[ ! -e mistyped ]] || fail "$(ls -a mistyped)"
    done
}

test_load_beside_a_resume_is_told() {
    local words says='--load elsewhere/c has no effect: the weights are those of the checkpoint '
    rm -rf begun beside
    expect_status 0 train_gpt "${data[@]}" --load s/latest --save begun --save-interval 2 || return
    for words in '--resume begun/step_00000002 --save beside' '--resume latest --save beside' \
        '--resume begun/latest --sample-only'; do
        # shellcheck disable=SC2086 # words
        expect_said 0 "$says" train_gpt $words --load elsewhere/c || return
    done
    [[ $(grep '^load ' beside/config.txt) == 'load s/latest' ]] || fail "$(cat beside/config.txt)"
    expect_status 0 train_gpt --config begun/config.txt --resume begun/step_00000002 --save other
    ! has log warning || fail "$(cat log)"
}

# $1: what is said; the rest: options beside a checkpoint that they contradict.
contradicts() {
    local says=$1
    shift
    for way in '--load s/latest' '--resume s/step_00000004' '--resume latest --save s'; do
        # shellcheck disable=SC2086 # words
        expect_said 1 "error: $says" train_gpt "${data[@]}" $way "$@"
    done
}

test_a_rate_that_jumps_is_told() {
    local run=(train_gpt --model llama-tiny --data d/x_train.bin --micro-batch-size 2) words step says options
    rm -rf rate*
    expect_status 0 "${run[@]}" --lr 1e-3 --lr-warmup-iters 2 --train-iters 10 --save-interval 1 --keep 0 \
        --save rate || return
    # the rates are 1e-3 in steps 2 to 7, and decay by a quarter in each later step
    while IFS='|' read -r step says options; do
        read -ra words <<<"$options"
        expect_status 0 train_gpt --resume "rate/step_000000$step" --save rate_2 "${words[@]}" || return
        grep 'warning: the learning rate' log >warnings
        if [[ -z $says ]]; then [[ ! -s warnings ]]; else grep -qE "rate $says" warnings; fi ||
            fail "$step $options: $(cat warnings)"
        rm -rf rate_2
    done <<'ROWS'
10|rises from 0.00025 to 0.001 at step 11, .* step 6 or earlier|--train-iters 20
09|rises from 0.0005 to 0.001 at step 10|--train-iters 20
05||--train-iters 20
07||--train-iters 20
05|falls from 0.001 to 0.0005 at step 6|--train-iters 6
05||--train-iters 9
10||--train-iters 20 --lr 2e-4
05|rises from 0.001 to 0.003 at step 6|--lr 3e-3
05|falls from 0.001 to 0.0003 at step 6|--lr 3e-4
01||--lr-warmup-iters 0
05|falls from 0.001 to 0.0006|--lr-warmup-iters 10
05|falls from 0.001 to 0.000625 at step 6|--lr-decay-style linear
08|rises from 0.00075 to 0.001|--lr-decay-style constant
09|rises from 0.0005 to 0.00085|--min-lr 8e-4
05|falls from 0.001 to 0|--lr-decay-iters 4
05||
ROWS
}

test_contradictions_are_told() {
    local option
    for option in 'num-layers 2 3' 'hidden-size 60 48' 'num-attention-heads 12 6' \
        'num-query-groups 6 3' 'kv-channels 16 8' 'ffn-hidden-size 64 80' 'vocab-size 300 257' 'arch gpt2 llama'; do
        # shellcheck disable=SC2086 # words
        set -- $option
        contradicts "--$1 $2: " "--$1" "$2"
        grep -q "it is $3 in the checkpoint s/" log || fail "$1: $(tail -n 2 log)"
        echo "$1 $2" >other.txt
        contradicts "--$1 $2: " --config other.txt
    done
    contradicts '--untie-embeddings-and-output-weights false: ' \
        --no-untie-embeddings-and-output-weights
    # what changes no tensor may be another
    expect_said 0 '--seq-length 16' train_gpt "${data[@]}" --load s/latest --seq-length 16 --plan
    expect_status 0 train_gpt "${data[@]}" --load s/latest --seq-length 64 --plan
    ! has log warning: || fail "$(grep warning: log)"
    # Llama's positions are not a shape, but those above were never trained
    for option in '' '--max-position-embeddings 256'; do
        # shellcheck disable=SC2086 # words
        expect_said 0 'warning: --seq-length 128: the weights of the checkpoint s/latest were trained '\
'with at most 64' train_gpt "${data[@]}" --load s/latest --seq-length 128 --plan $option
        has log '--seq-length 128' || fail "$(cat log)"
    done
    expect_said 0 '--rope-theta 1000 ' train_gpt "${data[@]}" --load s/latest --rope-theta 1000 \
        --plan
    # also a 0, which of other options means "derived"
    expect_status 0 train_gpt "${data[@]}" --model llama-tiny --logit-softcap 30 --train-iters 0 \
        --save capped || return
    expect_said 0 'warning: --logit-softcap 0: the weights' train_gpt "${data[@]}" --plan \
        --load capped/latest --logit-softcap 0
    # a preset that was named and is not the checkpoint's is said; the default one is not
    expect_said 0 'warning: --model gpt2-tiny: ' train_gpt "${data[@]}" --load s/latest \
        --model gpt2-tiny --plan
    has log '--arch llama' || fail "the preset is stronger: $(tail -n 2 log)"
    expect_status 0 train_gpt "${data[@]}" --load s/latest --plan
    ! has log warning: || fail "$(grep warning: log)"
    ! has log gpt2 || fail "$(grep gpt2 log)"
}

# What followed from --seq-length is not in config.txt as if it were given.
test_positions_follow_the_sequences_again() {
    local length
    rm -rf long
    expect_status 0 train_gpt "${data[@]}" --model llama-tiny --train-iters 1 --save long || return
    for length in 80 96 112; do
        expect_said 0 "--max-position-embeddings $length" train_gpt --config long/config.txt --resume latest \
            --seq-length $length --train-iters $((length / 16)) || return
    done
}

# A folder without meta.json is one of Hugging Face's: config.json alone says the shape.
test_config_json_says_the_shape() {
    local trainer
    mkdir -p theirs && cp s/latest/{config.json,model.safetensors} theirs
    for trainer in "${trainers[@]}"; do
        expect_said 0 '--seq-length 64' "$trainer" --load theirs --plan
        local words
        for words in '--num-layers 3' '--hidden-size 48' '--num-attention-heads 6' '--arch llama' \
            '--num-query-groups 3' '--kv-channels 8' '--ffn-hidden-size 80' '--vocab-size 257' '--rope-theta 500' \
            '--norm-epsilon 1e-06' '--max-position-embeddings 64' ' --untie-embeddings'; do
            has log "$words" || fail "no $words: $(tail -n 2 log)"
        done
    done
}

# Where it says a thing twice, what transformers takes.
test_config_json_is_read_as_transformers_reads_it() {
    local edits edit wanted
    for edits in '"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, = --rope-theta 700' \
        '"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, = --rope-scaling-factor 4'; do
        edit=${edits% = *} wanted=${edits#* = }
        rm -rf twice && cp -r theirs twice && sed -i "1s/{/{$edit/" twice/config.json
        expect_said 0 "$wanted" train_gpt --load twice --plan
    done
    rm -rf twice && cp -r theirs twice
    sed -i 's/\("tie_word_embeddings":\s*\)false/\1true/' twice/config.json
    expect_said 1 "lm_head.weight is not the embedding" train_gpt --load twice --eval-only \
        --valid-data d/x_val.bin
}

# transformers 5 refuses a whole number where a float belongs.
test_config_json_writes_floats_as_floats() {
    expect_status 0 train_gpt "${shape[@]}" "${data[@]}" --norm-epsilon 1 --init-method-std 1 \
        --rope-scaling llama3 --save whole || return
    python3 - whole/latest/config.json <<'END' || fail "$(cat whole/latest/config.json)"
import json, sys
c = json.load(open(sys.argv[1]))
values = [c[k] for k in ("rms_norm_eps", "initializer_range", "rope_theta")]
values += [v for k, v in c["rope_scaling"].items() if k.endswith("factor")]
assert len(values) == 6 and all(type(v) is float for v in values), values
assert type(c["hidden_size"]) is int
END
    expect_said 0 '--rope-high-freq-factor 4' train_gpt --load whole/latest --plan
}

# config.json does not always say it.
test_heads_without_a_size_divide_the_channels() {
    cp -r theirs unsaid && sed -i '/"head_dim"/d' unsaid/config.json
    expect_said 0 '--kv-channels 8' train_gpt --load unsaid --plan
}

test_vocabulary_is_the_tokenizers() {
    local trainer small=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --plan)
    for trainer in "${trainers[@]}"; do
        expect_said 0 '--vocab-size 257' "$trainer" "${small[@]}" --data d/x_train.bin
        expect_said 0 '--vocab-size 257' "$trainer" "${small[@]}" --valid-data d/x_val.bin
        expect_said 0 '--vocab-size 257' "$trainer" "${small[@]}" --tokenizer d/x_tokenizer.bin
        expect_said 0 '--vocab-size 257' "$trainer" --model llama-1b --num-layers 1 --plan \
            --data d/x_train.bin
        expect_said 0 '--vocab-size 50257' "$trainer" "${small[@]}" --data alone.bin
        expect_said 0 '--vocab-size 50257' "$trainer" "${small[@]}"
        expect_said 0 '--vocab-size 300' "$trainer" "${small[@]}" --data d/x_train.bin \
            --vocab-size 300
    done
}

test_a_vocabulary_far_above_is_said() {
    local says='note: --vocab-size 5000 is far above the 257 tokens of d/x_tokenizer.bin'
    says+=': leave it out, or give --vocab-size 257'
    expect_said 0 "$says" train_gpt --model llama-tiny "${data[@]}" --vocab-size 5000
    expect_status 0 train_gpt --model llama-tiny "${data[@]}" --vocab-size 300
    ! has log 'far above' || fail "$(grep 'far above' log)"
    expect_status 0 train_gpt --model llama-tiny "${data[@]}"
    ! has log 'far above' || fail "$(grep 'far above' log)"
}

test_checkpoints_carry_what_belongs_to_the_model() {
    local file
    cmp -s d/x_tokenizer.bin s/latest/tokenizer.bin || fail "another tokenizer.bin"
    cp -r s/latest/. start
    echo '{"temperature": 0.6}' >start/generation_config.json
    expect_status 0 train_gpt "${data[@]}" --load start --save f --train-iters 2 || return
    expect_status 0 train_gpt "${data[@]}" --resume latest --save f || return
    for file in tokenizer.bin tokenizer.json tokenizer_config.json generation_config.json; do
        cmp -s start/$file f/step_00000004/$file || fail "$file is lost"
        has f/step_00000004/meta.json "\"$file\"" || fail "meta.json does not list $file"
    done
    # a file that its data has is as it is there
    mkdir -p e && cp d/x_train.bin e/x_train.bin && cp d/x_tokenizer.bin e/x_tokenizer.bin
    echo '{"their": "own"}' >e/x_tokenizer.json
    expect_status 0 train_gpt --model llama-tiny "${data[@]}" --data e/x_train.bin --save g
    cmp -s e/x_tokenizer.json g/latest/tokenizer.json || fail "another tokenizer.json"
}

# Of a start that was not imported, the tokenizer cannot be compared with that of the data.
test_an_unread_tokenizer_is_told() {
    local says='warning: theirs/tokenizer.json is not compared with the tokens of d/x_train.bin: '
    rm -rf theirs
    cp -rL s/latest theirs && rm theirs/meta.json theirs/tokenizer.bin
    expect_said 0 "$says" train_gpt "${data[@]}" --load theirs
    rm theirs/tokenizer.json
    expect_status 0 train_gpt "${data[@]}" --load theirs
    ! has log "$says" || fail "$(cat log)"
}

# Their data had none.
test_checkpoints_without_a_tokenizer_load() {
    expect_status 0 train_gpt --model llama-tiny "${data[@]}" --data alone.bin --vocab-size 257 \
        --save old || return
    [[ ! -e old/latest/tokenizer.bin ]] || fail "it has a tokenizer"
    expect_status 0 train_gpt --load old/latest --sample-only --sample-length 4
    grep -qE '^[0-9 ]+$' log || fail "no numbers: $(tail -n 1 log)"
    expect_said 1 'there is no tokenizer.bin in old/latest to encode it with (--tokenizer)' \
        train_gpt --load old/latest --sample-only --sample-prompt AB
    expect_said 1 'tokenizer.bin in theirs to encode it with (scripts/convert_hf import makes one of' \
        train_gpt --load theirs --sample-only --sample-prompt AB
    expect_status 0 train_gpt --resume latest --save old --sample-only --data d/x_train.bin \
        --sample-prompt AB
    grep -qa '^AB' log || fail "no text: $(tail -n 1 log)"
}

# The newest checkpoint's tokenizer is damaged: the one before is taken, and it is said.
test_a_damaged_tokenizer_is_passed_over() {
    rm -rf r && cp -r s r
    expect_status 0 train_gpt "${data[@]}" --train-iters 8 --save r --resume latest || return
    poke r/step_00000008/tokenizer.bin 1154 '\1\102'
    expect_said 0 'resuming from r/step_00000004' train_gpt --save r --resume latest --sample-only \
        --sample-prompt AB --no-quiet
    grep -q 'r/step_00000008/tokenizer.bin: damaged' log || fail "$(tail -n 2 log)"
    grep -qa '^AB' log || fail "no text: $(tail -n 1 log)"
    expect_said 1 'error: --resume r/step_00000008/tokenizer.bin: damaged' train_gpt \
        --resume r/step_00000008 --sample-only
}

# The data of a fine-tuning must be the model's own tokens.
test_other_tokens_are_refused() {
    mkdir -p o && cp d/x_tokenizer.bin o/other.bin
    poke o/other.bin 1154 '\1\102\1\101'
    "$root/tokenize" --output-prefix o/y --tokenizer o/other.bin text >log || fail "$(tail -n 2 log)"
    expect_said 1 'o/y_train.bin: made with another tokenizer than s/latest/tokenizer.bin; ' \
        train_gpt "${data[@]}" --data o/y_train.bin --load s/latest
    expect_status 0 train_gpt "${data[@]}" --data o/y_train.bin --load s/latest \
        --tokenizer o/y_tokenizer.bin
}

# Of the last step's FP8 gradients, how many codes in ten thousand are the largest or zero ($1).
lost() {
    grep '"kind":"fp8"' b/metrics.jsonl | tail -n 1 | grep -oE '\.dy":\{[^}]*' |
        awk -F '[:,]' -v kind="\"$1\"" '{
            all += $3
            for (i = 4; i < NF; i++) if ($i == kind) lost += $(i + 1)
        }
        END { printf "%d", all ? 10000 * lost / all + 0.5 : 10000 }'
}

# The gradients go with 1 / (tokens of a step), and their scales with them: a resume with more or
# fewer loses no more of them in its first step than the step before it did.
test_fp8_follows_the_batch() {
    local trainer row format kind first second before after options
    for trainer in "${trainers[@]}"; do
        for row in 'e4m3 largest --global-batch-size 64 = --global-batch-size 4' \
            'e4m3 zero --global-batch-size 4 = --global-batch-size 256' \
            'e4m3 largest --global-batch-size 32 = --global-batch-size 1 --seq-length 16' \
            'hybrid largest --global-batch-size 256 = --global-batch-size 1 --fp8-lm-head'; do
            read -r format kind first <<<"${row% = *}"
            read -ra first <<<"$first"
            read -ra second <<<"${row#* = }"
            options=("${shape[@]}" "${data[@]}" --micro-batch-size 1 --fp8-format "$format"
                --fp8-stats-interval 1 --save b)
            rm -rf b
            expect_status 0 "$trainer" "${options[@]}" "${first[@]}" --train-iters 3 || return
            before=$(lost "$kind")
            expect_status 0 "$trainer" "${options[@]}" "${second[@]}" --resume latest || return
            after=$(lost "$kind")
            echo "  measured: ${trainer##*/}, ${row/ = / then }: $before, then $after in 10,000"
            [[ $after -le $((before + 10)) ]] || fail "${trainer##*/}, $row: $before, then $after"
        done
    done
}

if [[ ${#trainers[@]} -eq 1 ]]; then
    echo "  measured: the CPU trainer alone (no build/plain/standin_trainer)"
fi
run_tests
