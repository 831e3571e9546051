#!/usr/bin/env bash
# The GPU trainer as several ranks on a machine without a GPU, over the stand-ins of test/standin:
# ZeRO-1, the same as one rank with accumulation, in BF16 and FP8; on other numbers of ranks later;
# evaluations of the newest weights, for every way in which weights reach what products read.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"
common+=(--valid-data d/x_val.bin --weight-decay 20)
untied=(--untie-embeddings-and-output-weights --num-layers 3 --vocab-size 301
    --make-vocab-size-divisible-by 16)
ends_in_bf16=(--first-last-layers-bf16 --num-layers 3)
coarsest_fp8=(--fp8-format e4m3 --fp8-recipe tensorwise --fp8-lm-head)
# words of each row: options of a run
kinds=("" "--model gpt2-tiny --adam-dtype bf16 --gemm-autotune"
    "--grad-accum-dtype fp32"
    "--fp8-format hybrid --fp8-lm-head --fp8-amax-history-len 4" "${coarsest_fp8[*]}"
    "--optimizer muon --grad-accum-dtype fp32 --fp8-format hybrid ${ends_in_bf16[*]}"
    "--model gpt2-tiny --fp8-format hybrid" "--fp8-format hybrid ${ends_in_bf16[*]}"
    "--optimizer muon --adam-dtype bf16"
    "--optimizer muon --fp8-format e4m3 --fp8-recipe blockwise"
    "--fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head ${untied[*]}"
    "--model gpt2-tiny --fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head"
    "--model gpt2-tiny --fp8-format e4m3 --eval-precision bf16 --fp8-lm-head"
    "${coarsest_fp8[*]} ${untied[*]}"
    "--fp8-format e4m3 --eval-precision bf16 --fp8-lm-head ${untied[*]}")

# The last validation loss, in all its digits.
valid_loss() {
    grep '"eval"' "$1" | tail -n 1 | grep -oE '"valid_loss":[^,}]*'
}

# A rank's state besides.
same_ranks() {
    local file
    for file in "$1"/latest/*.safetensors; do
        cmp -s "$file" "$2/latest/${file##*/}" || return
    done
    same_end "$1" "$2"
}

evaluates_alone() { # CHECKPOINT
    rm -f alone.jsonl
    expect_status 0 "$trainer" "${common[@]}" "${options[@]}" --gpus "$ranks" --resume "$1" \
        --eval-only --metrics alone.jsonl
}

# In what FP8 changes, at most; 2 % of the learning rate are more. The evaluation after the last step
# and one of its checkpoint alone give the same loss, bit for bit; older weights give another.
test_ranks_equal_accumulation() {
    local kind options ranks noise loss
    train plain --train-iters 8 && train coarse "${coarsest_fp8[@]}" --train-iters 8 || return
    noise=$(apart plain coarse)
    for kind in "${kinds[@]}"; do
        rm -rf by.*
        read -ra options <<<"$kind --train-iters 8 --eval-interval 4 --save-interval 4"
        for ranks in 1 2 3; do
            train by.$ranks "${options[@]}" --gpus $ranks || return
            near by.1 by.$ranks "$noise" 1
            [[ $(grep -c '"kind":"eval"' by.$ranks/metrics.jsonl) -eq 2 ]] ||
                fail "$kind: no evaluations"
            [[ $kind != *fp8* ]] || has by.$ranks/metrics.jsonl '"precision":"FP8"' ||
                fail "$kind: no FP8"
            loss=$(valid_loss by.$ranks/metrics.jsonl)
            evaluates_alone by.$ranks/latest || return
            [[ -n $loss && $loss == "$(valid_loss alone.jsonl)" ]] ||
                fail "$kind, $ranks ranks: $loss in the run, $(valid_loss alone.jsonl) alone"
        done
    done
    evaluates_alone by.3/step_00000004 || return
    [[ $loss != "$(valid_loss alone.jsonl)" ]] || fail "old weights are not seen"
    train slower "${options[@]}" --gpus 2 --lr 1.02e-3 || return
    (near by.1 slower "$noise" 1 && exit "$failing") 2>/dev/null && fail "2 % are not seen"
    rm -r by.* slower
}

# An interruption changes no bit.
test_same_bits() {
    local kind options
    for kind in "${kinds[@]}"; do
        read -ra options <<<"$kind --gpus 3 --lr-decay-iters 6"
        train whole "${options[@]}" --train-iters 6 && train cut "${options[@]}" --train-iters 2 &&
            train cut "${options[@]}" --train-iters 6 --resume latest || return
        same_ranks whole cut || fail "$kind: a resumed run differs"
        rm -r cut
        [[ $kind == "${kinds[-1]}" ]] || rm -r whole
    done
    train slower "${options[@]}" --train-iters 6 --lr 1.00001e-3 || return
    ! same_end whole slower || fail "a difference is not seen"
    rm -r whole slower
}

# Checkpoints of one number of ranks, or of the CPU trainer, go on as another.
test_numbers_of_ranks_change() {
    local kind options noise
    noise=$(apart plain coarse)
    for kind in "" "--fp8-format hybrid --fp8-amax-history-len 4" "--optimizer muon"; do
        read -ra options <<<"$kind --lr-decay-iters 8"
        train straight "${options[@]}" --train-iters 8 &&
            train parts "${options[@]}" --gpus 3 --train-iters 2 &&
            train parts "${options[@]}" --gpus 2 --train-iters 4 --resume latest &&
            expect_status 0 train_gpt "${common[@]}" "${options[@]}" --bf16 --save parts \
                --train-iters 6 --resume latest &&
            train parts "${options[@]}" --gpus 2 --train-iters 8 --resume latest ||
            return
        near straight parts "$noise" 1
        rm -r straight parts
    done
}

test_gradients_add_up() {
    local ranks
    for ranks in 1 2 3; do
        expect_status 0 "$trainer" "${common[@]}" --gpus $ranks --dump-gradients "$ranks.st" ||
            return
    done
    expect_status 0 "$trainer" "${common[@]}" --micro-batch-size 1 --dump-gradients half.st &&
        expect_status 0 "$trainer" "${common[@]}" --seed 2 --dump-gradients other.st || return
    for ranks in 2 3; do
        "$root/build/plain/compare_tensors" $ranks.st 1.st half.st 8 >log || fail "$(cat log)"
    done
    ! "$root/build/plain/compare_tensors" other.st 1.st half.st 8 >log || fail "a seed is not seen"
}

# FP8 on all ranks or on none: they exchange weights in one form.
test_one_rank_lacks_fp8() {
    local r of_rank=('.' '. STANDIN_CAPABILITY=80')
    torchrun --train-iters 2 --fp8-format hybrid --save mixed
    for r in 0 1; do
        [[ ${statuses[r]} -eq 0 ]] || fail "rank $r: $(cat err.$r)"
        has err.$r "rank 1: compute capability 8.0 is below 9.0; the run continues in BF16" ||
            fail "rank $r says $(cat err.$r)"
    done
    train unmixed --train-iters 2 --gpus 2 || return
    same_end unmixed mixed || fail "not a run in BF16"
    rm -r unmixed mixed
}

# llama-tiny: in each of 2 blocks q, o; k, v; gate, up, down of 64 channels, 32 and 192.
test_plan_says_what_muon_costs() {
    local flops
    flops=$(awk 'BEGIN { q = 6 * 64 ^ 3; k = 4 * 32 ^ 2 * 64 + 2 * 32 ^ 3; f = 14 * 64 ^ 3
        printf "%.3g", 1e-12 * 2 * 5 * (2 * q + 2 * k + 3 * f) }')
    expect_said 0 "matrices      14, $flops TFLOP a step, " "$trainer" "${common[@]}" --plan --gpus 3 \
        --optimizer muon && has log '  exchanged     at most ' && has log 'matrices in BF16' &&
        expect_said 0 'second moment' "$trainer" "${common[@]}" --plan --gpus 3 || return
    if has log TFLOP || has log 'matrices in BF16'; then fail "AdamW: $(grep TFLOP log)"; fi
}

test_sanitized_ranks() {
    local kind options
    for kind in "${kinds[@]:2:4}"; do
        read -ra options <<<"$kind --gpus 2 --eval-interval 2 --sample-interval 2 --sample-length 9"
        expect_status 0 "$sanitized" "${common[@]}" "${options[@]}" --train-iters 2 --save s &&
            expect_status 0 "$sanitized" "${common[@]}" "${options[@]}" --train-iters 3 --save s \
                --resume latest --profile || return
        rm -r s
    done
}

run_tests
