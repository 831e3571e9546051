#!/usr/bin/env bash
# Which products are our own, over the stand-ins. GELU is applied (train/gpu/network.c) by those of
# training steps whose scales are given and whose losses are not counted, and by no other; weight
# gradients are computed (linear.c) with blockwise scaling alone. The numbers are those of a device
# without such products.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"

# losses OPTIONS...: of training and evaluations, in all their digits.
losses() {
    rm -f m.jsonl
    expect_status 0 "$trainer" --data d/x_train.bin --valid-data d/x_val.bin --no-cuda-graphs \
        --micro-batch-size 2 --seq-length 32 --train-iters 4 --eval-iters 2 --eval-interval 2 \
        --metrics m.jsonl "$@" >&2 || return
    grep -oE '"(loss|valid_loss|grad_norm)":[^,}]*' m.jsonl
}

# products KIND OPTIONS...: the same with such products of the stand-in.
products() {
    STANDIN_OWN_PRODUCTS=$1 losses "${@:2}"
}

gpt2="--model gpt2-tiny --fp8-format hybrid"
blockwise="--fp8-format e4m3 --fp8-recipe blockwise"
taken=("$gpt2" "$gpt2 --fp8-format e4m3 --gpus 2" "$gpt2 --recompute activations"
    "$gpt2 --recompute block" "$gpt2 --global-batch-size 4" "--model llama-tiny $blockwise"
    "--model gpt2-tiny $blockwise --fp8-lm-head --global-batch-size 4")
left=("--model gpt2-tiny" "--model llama-tiny --fp8-format hybrid" "$gpt2 --fp8-recipe tensorwise"
    "$gpt2 --fp8-format e5m2" "$gpt2 --fp8-stats-interval 1"
    "--model gpt2-tiny --fp8-format e5m2 --fp8-recipe blockwise")

test_same_numbers() {
    local kind words without
    for kind in "${taken[@]}"; do
        read -ra words <<<"$kind"
        without=$(products none "${words[@]}")
        [[ -n $without ]] || fail "$kind: no losses"
        [[ $(products good "${words[@]}") == "$without" ]] || fail "$kind: other numbers"
        [[ $(products wrong "${words[@]}") != "$without" ]] || fail "$kind: not taken"
    done
}

test_not_taken() {
    local kind words without
    for kind in "${left[@]}"; do
        read -ra words <<<"$kind"
        without=$(products none "${words[@]}")
        [[ -n $without ]] || fail "$kind: no losses"
        [[ $(products wrong "${words[@]}") == "$without" ]] || fail "$kind: taken"
    done
}

test_not_in_evaluations() {
    local without words
    read -ra words <<<"$gpt2"
    products none "${words[@]}" --save s >/dev/null
    without=$(products none "${words[@]}" --save s --resume latest --eval-only)
    [[ -n $without ]] || fail "no losses"
    [[ $(products wrong "${words[@]}" --save s --resume latest --eval-only) == "$without" ]] ||
        fail "an evaluation takes them"
    rm -r s
}

run_tests
