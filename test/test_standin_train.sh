#!/usr/bin/env bash
# shellcheck disable=SC2086,SC2206 # options are words on purpose
# The GPU trainer on a machine without a GPU, over the stand-ins of test/standin: train_gpt.cu and
# the C files around the kernels. The stand-ins compute with kernels/cpu.c and round where the
# device rounds; test_gpu_*.cu and test_gpu_train.sh test the real kernels.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"
standin=$root/build/plain/standin_trainer
sanitized=$root/build/asan/standin_trainer
compare=$root/build/plain/compare_tensors
export MALLOC_PERTURB_=128 # what is read before it is written is about 3.4e38, never by luck 0
if [[ ! -x $standin ]]; then skip_all "no C++ compiler, so no stand-in trainer"; fi

settings="--data d/x_train.bin --valid-data d/x_val.bin --log-interval 1 --lr 1e-3
    --lr-warmup-iters 2 --weight-decay 20"
export LLM8_TEST_SMALL_FP8=1 # train/gpu/support.c: FP8 in models too small to gain from it
gpt2="--model gpt2-tiny --seq-length 48"
llama="--model llama-tiny --seq-length 48 --hidden-size 64 --num-attention-heads 4
    --num-query-groups 2 --ffn-hidden-size 176"
untied="$llama --untie-embeddings-and-output-weights --num-layers 4 --vocab-size 301
    --make-vocab-size-divisible-by 16"

cpu() {
    expect_status 0 train_gpt $settings "$@"
}

gpu() {
    expect_status 0 "$standin" $settings --no-cuda-graphs "$@"
}

# ---- against the CPU trainer --------------------------------------------------------------------

# dump NAME cpu|gpu OPTIONS...: the gradients of a first step from the folder start
dump() {
    local name=$1 trainer=$2
    shift 2
    "$trainer" "$@" --resume start/latest --dump-gradients "$name.st"
}

# All is rounded to BF16 here, where the yardstick rounds the linear layers' operands alone.
bf16_gradients() {
    local model
    for model in "$gpt2 --hidden-size 200 --num-attention-heads 25 --seq-length 17" "$llama" \
        "$untied"; do
        local options="$model --micro-batch-size 3 --global-batch-size 6"
        cpu $model --train-iters 0 --save start && dump fp32 cpu $options &&
            dump bf16 cpu $options --bf16 && dump gpu gpu $options &&
            dump other cpu $options --seed 2 || return
        "$compare" gpu.st fp32.st bf16.st 4 >log || fail "$model: $(cat log)"
        ! "$compare" other.st fp32.st bf16.st 4 >log || fail "other data are not seen"
        rm -r start
    done
}

coarsest_fp8="--fp8-format e4m3 --fp8-recipe tensorwise --fp8-lm-head"
fp8_options=("hybrid delayed" "e4m3 delayed --fp8-lm-head" "hybrid tensorwise"
    "e4m3 tensorwise --no-fp8-wgrad" "hybrid tensorwise --fp8-lm-head --first-last-layers-bf16")

# As far from FP32 as the CPU's emulation is, and nearer to that than FP32.
fp8_gradients() {
    local model fp8
    for model in "$gpt2" "$untied"; do
        cpu $model --train-iters 0 --save start || return
        for fp8 in "${fp8_options[@]}"; do
            fp8="--micro-batch-size 4 --fp8-format ${fp8/ / --fp8-recipe }"
            dump fp32 cpu $model --micro-batch-size 4 && dump emulated cpu $model $fp8 &&
                dump gpu gpu $model $fp8 || return
            { "$compare" gpu.st fp32.st emulated.st 1.5 &&
                "$compare" gpu.st emulated.st fp32.st 1; } >log || fail "$fp8: $(cat log)"
        done
        rm -r start
    done
}

# Twice what FP8 itself changes in the losses, on the CPU, is allowed; 2 % of the learning rate is
# more than that.
losses_follow() {
    local model fp8 noise
    for model in "$gpt2" "$llama"; do
        local options="$model --micro-batch-size 2 --global-batch-size 4 --train-iters 12"
        cpu $options --save fp32 && cpu $options $coarsest_fp8 --save coarse || return
        noise=$(loss_difference fp32 coarse)
        for fp8 in "--bf16" "--fp8-format hybrid --fp8-lm-head" "$coarsest_fp8"; do
            cpu $options $fp8 --save cpu && gpu $options ${fp8#--bf16} --save gpu &&
                gpu $options ${fp8#--bf16} --lr 1.02e-3 --save lr || return
            near cpu gpu "$noise" 2
            (near cpu lr "$noise" 2 && exit "$failing") 2>/dev/null && fail "2 % are not seen"
            rm -r cpu gpu lr
        done
        rm -r fp32 coarse
    done
}

# ---- the same bits ------------------------------------------------------------------------------

state_options=("" "--adam-dtype bf16 --grad-accum-dtype bf16" "--fp8-format hybrid"
    "--fp8-format e4m3 --fp8-recipe tensorwise --fp8-lm-head --first-last-layers-bf16"
    "--fp8-format hybrid --fp8-lm-head --fp8-amax-history-len 4"
    "--fp8-format e4m3 --no-fp8-wgrad")

resumes_exactly() {
    local model state
    for model in "$gpt2" "$untied"; do
        for state in "${state_options[@]}"; do
            local options="$model $state --micro-batch-size 2 --global-batch-size 4"
            options="$options --lr-decay-iters 8"
            gpu $options --train-iters 8 --save whole && gpu $options --train-iters 3 --save cut &&
                gpu $options --train-iters 8 --save cut --resume latest || return
            if ! same_checkpoint {whole,cut}/latest || ! same_end whole cut; then
                fail "a resumed run differs: $options"
            fi
            rm -r whole cut
        done
    done
}

same_state() {
    cmp -s {"$1","$2"}/latest/optimizer-0-of-1.safetensors && same_end "$1" "$2"
}

# Options that must not change a bit of the result.
same_bits() {
    local state change
    for state in "${state_options[@]}"; do
        local options="$llama $state --num-layers 3 --micro-batch-size 2 --train-iters 4"
        gpu $options --eval-interval 2 --save one || return
        for change in "--recompute activations" "--recompute block" "--eval-precision bf16" \
            "--fp8-stats-interval 2" "--gemm-autotune"; do
            gpu $options --eval-interval 2 $change --save two || return
            same_state one two || fail "$state: $change changes something"
            rm -r two
        done
        gpu $options --lr 1.00001e-3 --save two || return
        ! same_state one two || fail "a change is not seen"
        rm -r one two
    done
}

# ---- the rest of a trainer ----------------------------------------------------------------------

# Each resumes from the other's checkpoint as from its own, with or without FP8 on either side.
checkpoints_cross() {
    local first second noise options="$llama --micro-batch-size 2 --lr-decay-iters 12"
    local fp8="--fp8-format hybrid --fp8-amax-history-len 4"
    cpu $options --train-iters 12 --save fp32 &&
        cpu $options $coarsest_fp8 --train-iters 12 --save coarse || return
    noise=$(loss_difference fp32 coarse)
    for first in "" "$fp8"; do
        for second in "" "$fp8"; do
            cpu $options --bf16 $first --train-iters 4 --save cpu &&
                cpu $options --bf16 $second --train-iters 12 --save cpu --resume latest || return
            gpu $options $first --train-iters 4 --save mixed &&
                cpu $options --bf16 $second --train-iters 8 --save mixed --resume latest &&
                gpu $options $second --train-iters 12 --save mixed --resume latest || return
            near cpu mixed "$noise" 2
            cpu $options --bf16 $first --train-iters 4 --save back &&
                gpu $options $second --train-iters 12 --save back --resume latest || return
            near cpu back "$noise" 2
            rm -r cpu mixed back
        done
    done
}

number_after() { # WORD FILE
    grep -o "$1 [0-9.]*" "$2" | tail -n 1 | cut -d ' ' -f 2
}

evaluates_and_samples() {
    local fp8 loss
    for fp8 in "none" "hybrid" "hybrid --eval-precision bf16"; do
        local options="$llama --fp8-format $fp8 --micro-batch-size 2 --sample-length 70"
        gpu $options --train-iters 6 --sample-interval 3 --save run || return
        grep -q '^sample' log || fail "$fp8: no sample: $(tail -n 5 log)"
        loss=$(number_after 'valid loss' log)
        gpu $options --eval-only --resume run/latest || return
        [[ -n $loss && $(number_after 'valid loss' log) == "$loss" ]] ||
            fail "$fp8: evaluates to another loss than $loss: $(tail -n 1 log)"
        gpu $options --eval-only --plan
        ! grep -qE '^  (gradients|first moment) ' log || fail "$fp8: plans for training: $(cat log)"
        gpu $options --sample-only --resume run/latest || return
        rm -r run
    done
}

fp8_elements() {
    grep '"kind":"fp8"' "$1/metrics.jsonl" | grep -o '[^"]*":{"elements":[0-9]*'
}

# Recomputation counts nothing twice.
counts_and_profiles() {
    local options="$llama --fp8-format hybrid --micro-batch-size 2 --train-iters 4"
    options="$options --fp8-stats-interval 2"
    cpu $options --save cpu && gpu $options --recompute block --save again &&
        gpu $options --profile --save run || return
    has log 'profile of a step' || fail "no profile"
    [[ $(grep -c '"kind":"fp8"' run/metrics.jsonl) -eq 2 ]] || fail "no counts"
    cmp -s <(fp8_elements cpu) <(fp8_elements run) || fail "other tensors than on the CPU"
    cmp -s <(grep '"kind":"fp8"' again/metrics.jsonl) <(grep '"kind":"fp8"' run/metrics.jsonl) ||
        fail "recomputation counts"
}

falls_back_to_bf16() {
    local options="$gpt2 --micro-batch-size 2 --train-iters 3" fp8="--fp8-format hybrid"
    gpu $options --save bf16 && LLM8_TEST_CAPABILITY=80 gpu $options $fp8 --save fallen || return
    has log 'no FP8 here: compute capability 8.0 is below 9.0' || fail "$(cat log)"
    same_end bf16 fallen || fail "not the same as BF16"
    STANDIN_CAPABILITY=89 expect_status 1 "$standin" $settings $options $fp8 --fp8-required
    STANDIN_CAPABILITY=75 expect_said 1 'BF16 training needs 8.0' "$standin" $settings $options
}

stays_in_bf16_where_small() {
    local options="$gpt2 --micro-batch-size 2 --train-iters 3"
    local fp8="--fp8-format hybrid --fp8-lm-head" LLM8_TEST_SMALL_FP8=0
    gpu $options --save plain && gpu $options $fp8 --save small || return
    [[ $(grep -c 'too small to gain' log) -eq 5 ]] || fail "the table: $(cat log)"
    has log 'warning: no linear layer is in FP8' || fail "$(cat log)"
    same_end plain small || fail "not the same as BF16"
    expect_said 1 'error: --fp8-required: no linear layer' \
        "$standin" $settings $options $fp8 --fp8-required
}

# A kernel that leaves its scratch (STANDIN_OVERRUN: column sums, by a row) ends the run.
overruns_are_named() {
    local options="$gpt2 --micro-batch-size 2 --train-iters 2"
    local said="LLM8_GUARD: buffer 'partial sums' (scratch"
    STANDIN_OVERRUN=1 expect_said 1 "$said" "$standin" $settings --no-cuda-graphs $options
    ! has log 'step     1/2' || fail "the step was reported"
    LLM8_GUARD=0 STANDIN_OVERRUN=1 gpu $options
    gpu $options
}

# Under AddressSanitizer and UBSan, with leaks.
sanitized_runs() {
    local state options="--micro-batch-size 2 --global-batch-size 4 --no-cuda-graphs"
    for state in "${state_options[@]:1:3}"; do
        expect_status 0 "$sanitized" $settings $options $untied $state --train-iters 3 --save s \
            --eval-interval 2 --recompute block --fp8-stats-interval 2 --sample-interval 3 \
            --sample-length 20 --save-interval 2 || return
        expect_status 0 "$sanitized" $settings $options $untied $state --train-iters 4 --save s \
            --resume latest || return
        rm -r s
    done
    expect_status 0 "$sanitized" $settings $options $gpt2 --train-iters 3 --profile --gemm-autotune
}

run prepare bf16_gradients fp8_gradients losses_follow resumes_exactly same_bits \
    checkpoints_cross evaluates_and_samples counts_and_profiles \
    falls_back_to_bf16 stays_in_bf16_where_small overruns_are_named sanitized_runs
summary
