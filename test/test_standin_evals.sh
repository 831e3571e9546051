#!/usr/bin/env bash
# An evaluation reads the newest weights, however many ranks there are: the one in the run, right
# after a step, and --eval-only on the checkpoint of that step give the same loss, bit for bit, for
# every way in which weights reach what products read.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"
export LLM8_TEST_SMALL_FP8=1 # FP8 although these products are too small to gain from it

tied="--model gpt2-tiny" untied="--model llama-tiny --untie-embeddings-and-output-weights"
kinds=("" "--fp8-format hybrid" "--fp8-format hybrid --fp8-lm-head"
    "--fp8-format e4m3 --fp8-recipe tensorwise --fp8-lm-head"
    "--fp8-format e4m3 --eval-precision bf16 --fp8-lm-head")

# The last validation loss, in all its digits.
valid_loss() {
    grep '"eval"' "$1" | tail -n 1 | grep -oE '"valid_loss":[^,}]*'
}

# run RANKS OPTIONS...
run_ranks() {
    local number=$1
    shift
    expect_status 0 "$trainer" --data d/x_train.bin --valid-data d/x_val.bin --no-cuda-graphs \
        --micro-batch-size 2 --seq-length 32 --lr 1e-3 --weight-decay 20 --train-iters 4 \
        --eval-iters 2 --eval-interval 2 --gpus "$number" "$@"
}

in_the_run_as_alone() {
    local kind model ranks words loss
    for kind in "${kinds[@]}"; do
        for model in "$tied" "$untied"; do
            read -ra words <<<"$model $kind --save s"
            for ranks in 1 2 3; do
                run_ranks $ranks "${words[@]}" || return
                loss=$(valid_loss s/metrics.jsonl)
                [[ $kind != *fp8* ]] || has s/metrics.jsonl '"precision":"FP8"' || fail "$kind: no FP8"
                run_ranks $ranks "${words[@]}" --resume latest --eval-only --metrics e.jsonl ||
                    return
                [[ -n $loss && $loss == "$(valid_loss e.jsonl)" ]] ||
                    fail "$model $kind, $ranks ranks: $loss in the run, $(valid_loss e.jsonl) after"
                rm -r s e.jsonl
            done
        done
    done
}

# The comparison sees weights that are a step old.
old_weights_are_seen() {
    run_ranks 1 --model gpt2-tiny --fp8-format hybrid --save s --save-interval 3 || return
    local loss
    loss=$(valid_loss s/metrics.jsonl)
    run_ranks 1 --model gpt2-tiny --fp8-format hybrid --save s --resume s/step_00000003 --eval-only \
        --metrics e.jsonl || return
    [[ -n $loss && $loss != "$(valid_loss e.jsonl)" ]] || fail "old weights are not seen"
}

for test in prepare in_the_run_as_alone old_weights_are_seen; do run $test; done
summary
