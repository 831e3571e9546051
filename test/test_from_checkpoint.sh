#!/usr/bin/env bash
# shellcheck disable=SC2086 # options are words on purpose
# What a run takes from the checkpoint it starts from (the model's shape, the tokenizer) and from
# the tokenizer of its data (the vocabulary), in both trainers; and what a checkpoint carries so
# that it can.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
export LLM8_TEST_SMALL_FP8=1
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
    mkdir elsewhere theirs && cp -r s/step_00000004 elsewhere/c
    cp d/x_train.bin alone.bin # without a tokenizer beside it
    cp s/latest/{config.json,model.safetensors} theirs # a folder of Hugging Face's
    # transformers writes it without the size of a head, or with one thing twice
    cp -r theirs unsaid && sed -i '/"head_dim"/d' unsaid/config.json
    twice twice_theta '"rope_parameters": {"rope_type": "default", "rope_theta": 700.0},'
    twice twice_scaling '"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"rope_type": "linear", "factor": 4.0},'
    cp -r theirs tied && sed -i 's/\("tie_word_embeddings":\s*\)false/\1true/' tied/config.json
}

twice() {
    cp -r theirs "$1" && sed -i "1s/{/{$2/" "$1/config.json"
}

# Runs a trainer in a folder that holds the checkpoint c and nothing else.
elsewhere() {
    (cd elsewhere && "$@")
}

# Checks the rows on standard input with each trainer, which they call `trainer`.
check_each() {
    local trainer rows
    rows=$(cat)
    for trainer in "${trainers[@]}"; do
        trainer() { "$trainer" "$@"; }
        check_rows <<<"$rows"
    done
}
# shellcheck disable=SC2034 # of the rows
small=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --plan)

test_shape_and_vocabulary_are_found() {
    check_each <<'ROWS'
0|trainer --load theirs --plan|--seq-length 64|--num-layers 3|--hidden-size 48|--num-attention-heads 6|--arch llama|--num-query-groups 3|--kv-channels 8|--ffn-hidden-size 80|--vocab-size 257|--rope-theta 500|--norm-epsilon 1e-06|--max-position-embeddings 64| --untie-embeddings
0|trainer --load unsaid --plan|--kv-channels 8
0|trainer --load twice_theta --plan|--rope-theta 700
0|trainer --load twice_scaling --plan|--rope-scaling-factor 4
1|trainer --load theirs --hidden-size 32 --plan|it is 48 in the checkpoint theirs
1|trainer --load tied --eval-only --valid-data d/x_val.bin|lm_head.weight is not the embedding
0|trainer "${small[@]}" --data d/x_train.bin|--vocab-size 257
0|trainer "${small[@]}" --valid-data d/x_val.bin|--vocab-size 257
0|trainer "${small[@]}" --tokenizer d/x_tokenizer.bin|--vocab-size 257
0|trainer --model llama-1b --num-layers 1 --plan --data d/x_train.bin|--vocab-size 257
0|trainer "${small[@]}" --data alone.bin|--vocab-size 50257
0|trainer "${small[@]}"|--vocab-size 50257
0|trainer "${small[@]}" --data d/x_train.bin --vocab-size 300|--vocab-size 300
ROWS
}

test_samples_need_the_folder_alone() {
    local trainer way
    for trainer in "${trainers[@]}"; do
        for way in --load --resume; do
            expect_message 0 'Anna AB' elsewhere "$trainer" $way c --sample-only --sample-prompt 'Anna AB' \
                --sample-length 9 --sample-temperature 0 || return
            tail -n 1 log >"sample.$way"
        done
        cmp -s sample.--load sample.--resume || fail "$trainer: two samples"
    done
}

memory_plan() {
    sed -n '/^Memory plan/,/^  all /p'
}

# The blocks share the activations of one, and there is one sequence. Planned as for training, a small
# model with sequences of 8,192 tokens did not fit in 22 GiB.
test_samples_need_no_memory_for_training() {
    local trainer way training=' block .* x 3 |^ *(d residual|first moment|gradients) '
    expect_status 0 train_gpt --load theirs --plan || return
    is "$(grep -cE "$training" log) $(grep -c ' inputs  *1.00 KiB' log)" '11 1'
    for way in --sample-only '--eval-only --valid-data d/x_val.bin'; do
        expect_status 0 train_gpt --load theirs --plan $way || return
        ! grep -E "$training" log || fail "planned for training: $way"
    done
    expect_status 0 train_gpt --load theirs --plan --sample-only
    grep -q ' inputs  *256 B' log || fail "more than one sequence: $(cat log)"
    for trainer in "${trainers[@]}"; do
        "$trainer" --load theirs --plan --sample-only | memory_plan >planned
        "$trainer" --load theirs --plan --sample-only --micro-batch-size 1 | memory_plan >one
        if [[ ! -s one ]] || ! cmp planned one; then fail "$trainer: more than one sequence: $(cat planned)"; fi
        ! "$trainer" --load theirs --plan --sample-only | grep -q 'What fits' || fail "batches of a sample"
    done
}

# A run is resumed with the shape or without.
test_a_checkpoint_is_enough() {
    local trainer options
    for trainer in "${trainers[@]}"; do
        for options in "${shape[*]}" '' '--model llama-tiny' "--config s/config.txt"; do
            rm -rf again && cp -r s again
            expect_status 0 "$trainer" $options "${data[@]}" --train-iters 8 --save again --resume latest || return
            [[ -d again/step_00000008 ]] || fail "$options"
            if [[ $options == "${shape[*]}" ]]; then rm -rf first && mv again first; continue; fi
            same_checkpoint {first,again}/latest || fail "$trainer: other weights with '$options'"
        done
    done
    # config.txt says what the run was, even if the options were not given again
    ! grep resume first/config.txt || fail "config.txt goes on with an earlier run"
    sed 's/^save .*/save anew/' first/config.txt >config
    expect_status 0 train_gpt --config config --train-iters 4 || return
    same_checkpoint {s,anew}/latest || fail "config.txt of a resumed run: $(cat config)"
}

# A fine-tuning that goes on with nothing but its checkpoint.
test_resumed_runs_need_no_options() {
    local trainer
    for trainer in "${trainers[@]}"; do
        rm -rf tuned part
        expect_status 0 "$trainer" "${data[@]}" --load s/latest --seed 7 --weight-decay 0.3 \
            --global-batch-size 4 --train-iters 8 --save tuned --save-interval 4 || return
        expect_status 0 "$trainer" --resume tuned/step_00000004 --save part || return
        same_checkpoint {tuned,part}/step_00000008 || fail "$trainer: other weights"
        expect_message 0 'nothing to train' "$trainer" --resume latest --save part
        expect_status 0 "$trainer" --resume latest --save part --train-iters 9 || return
        [[ -d part/step_00000009 ]] || fail "$trainer: $(ls part)"
    done
    check_each <<'ROWS'
1|trainer --resume tuned/latest --micro-batch-size 3|error: --global-batch-size 4 (of the checkpoint tuned/step_00000008): 
1|elsewhere "$trainer" --resume c|error: --data (of the checkpoint c) d/x_train.bin: 
ROWS
    expect_message 0 '!warning' train_gpt --config tuned/config.txt --resume tuned/step_00000004 --save other
}

# What followed from --seq-length is not in config.txt as if it were given.
test_positions_follow_the_sequences_again() {
    local length
    expect_status 0 train_gpt "${data[@]}" --model llama-tiny --train-iters 1 --save long || return
    for length in 80 96 112; do
        expect_message 0 "--max-position-embeddings $length" train_gpt --config long/config.txt --resume latest \
            --seq-length $length --train-iters $((length / 16)) || return
    done
}

# transformers 5 refuses a whole number where a float belongs.
test_config_json_writes_floats_as_floats() {
    expect_status 0 train_gpt "${shape[@]}" "${data[@]}" --norm-epsilon 1 --init-method-std 1 \
        --rope-scaling llama3 --train-iters 0 --save floats || return
    python3 - floats/latest/config.json <<'END' || fail "$(cat floats/latest/config.json)"
import json, sys
c = json.load(open(sys.argv[1]))
values = [c[k] for k in ("rms_norm_eps", "initializer_range", "rope_theta")]
values += [v for k, v in c["rope_scaling"].items() if k.endswith("factor")]
assert len(values) == 6 and all(type(v) is float for v in values), values
assert type(c["hidden_size"]) is int
END
    expect_message 0 '--rope-high-freq-factor 4' train_gpt --load floats/latest --plan
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

# The tokenizer of a start that was not imported cannot be compared with the data's; the data of a
# fine-tuning must be the model's own tokens; and a checkpoint whose data had no tokenizer has none.
test_tokenizers_of_starts() {
    local unread='warning: unread/tokenizer.json is not compared with the tokens of d/x_train.bin'
    cp -rL s/latest unread && rm unread/meta.json unread/tokenizer.bin
    mkdir -p o && cp d/x_tokenizer.bin o/other.bin && poke o/other.bin 1154 '\1\102\1\101'
    expect_status 0 "$root/tokenize" --output-prefix o/y --tokenizer o/other.bin text || return
    expect_status 0 train_gpt --model llama-tiny "${data[@]}" --data alone.bin --vocab-size 257 --save old || return
    [[ ! -e old/latest/tokenizer.bin ]] || fail "it has a tokenizer"
    check_rows <<ROWS
0|train_gpt ${data[*]} --load unread|$unread
0|train_gpt ${data[*]} --load theirs|!is not compared
1|train_gpt ${data[*]} --data o/y_train.bin --load s/latest|o/y_train.bin: made with another tokenizer than s/step_00000004/tokenizer.bin
0|train_gpt ${data[*]} --data o/y_train.bin --load s/latest --tokenizer o/y_tokenizer.bin|
1|train_gpt ${data[*]} --data '{d/x,o/y}_train.bin'|--data o/y_train.bin: made with another tokenizer than d/x_tokenizer.bin
1|train_gpt ${data[*]} --seq-length 64 --valid-data o/y_val.bin|--valid-data o/y_val.bin: made with another tokenizer than d/x_tokenizer.bin
1|train_gpt ${data[*]} --tokenizer o/other.bin|d/x_train.bin: made with another tokenizer than o/other.bin
1|train_gpt --load old/latest --sample-only --sample-prompt AB|no tokenizer.bin in old/step_00000004 to encode it with (--tokenizer)
1|train_gpt --load unread --sample-only --sample-prompt AB|no tokenizer.bin in unread to encode it with (scripts/convert_hf
0|train_gpt --resume latest --save old --sample-only --data d/x_train.bin --sample-prompt AB|AB
0|train_gpt --load old/latest --sample-only --sample-length 4|
ROWS
    grep -qE '^[0-9 ]+$' log || fail "no numbers: $(tail -n 1 log)"
}

# How many codes in ten thousand of the last step's FP8 gradients are the largest or zero ($1).
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
    local trainer format kind first second before after options
    for trainer in "${trainers[@]}"; do
        while IFS='|' read -r format kind first second; do
            options=("${shape[@]}" "${data[@]}" --micro-batch-size 1 --fp8-format "$format"
                --fp8-stats-interval 1 --save b)
            rm -rf b
            expect_status 0 "$trainer" "${options[@]}" $first --train-iters 3 || return
            before=$(lost "$kind")
            expect_status 0 "$trainer" "${options[@]}" $second --resume latest || return
            after=$(lost "$kind")
            echo "  measured: ${trainer##*/}, $first, then $second: $before, then $after in 10,000"
            [[ $after -le $((before + 10)) ]] || fail "${trainer##*/}, $first: $before, then $after"
        done <<'ROWS'
e4m3|largest|--global-batch-size 64|--global-batch-size 4
e4m3|zero|--global-batch-size 4|--global-batch-size 256
e4m3|largest|--global-batch-size 32|--global-batch-size 1 --seq-length 16
hybrid|largest|--global-batch-size 256|--global-batch-size 1 --fp8-lm-head
ROWS
    done
}

if [[ ${#trainers[@]} -eq 1 ]]; then
    echo "  measured: the CPU trainer alone (no build/plain/standin_trainer)"
fi
run_tests
