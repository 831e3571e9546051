#!/usr/bin/env bash
# shellcheck disable=SC2086,SC2317 # options are words on purpose; check calls functions
# Whole models on the GPU: loss and gradients against the CPU trainer, runs that must repeat,
# resume, and give the same bits with recomputation, chunked heads and graphs. Prints "N passed, N
# failed, N skipped" last.
# shellcheck source=test/gpu_runs.sh
source "$(dirname "$0")/gpu_runs.sh"

# ---- against the CPU ----
GPT_WIDE="--model gpt2-tiny --num-layers 4 --hidden-size 256 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128"
MODELS=(
    "--model gpt2-tiny --hidden-size 200 --num-attention-heads 25 --seq-length 17
     --max-position-embeddings 17"
    "$GPT_WIDE"
    "--model llama-tiny --hidden-size 256 --num-attention-heads 4 --num-query-groups 2
     --ffn-hidden-size 344"
    "--model llama-tiny --num-layers 3 --hidden-size 128 --num-attention-heads 8
     --num-query-groups 2 --seq-length 100 --max-position-embeddings 100
     --untie-embeddings-and-output-weights --vocab-size 301 --make-vocab-size-divisible-by 8"
)
against_cpu() { # model options
    rm -rf start
    "$BIN/train_gpt" $1 $DATA --train-iters 0 --save start || return 1
    for run in "fp32 train_gpt" "bf16 train_gpt --bf16" "gpu train_gptcu"; do
        set -- "$1" $run
        local name=$2 program=$3 option=${4:-}
        "$BIN/$program" $1 $DATA --micro-batch-size 3 --global-batch-size 6 --resume start/latest \
            --dump-gradients "$name.st" $option || return 1
    done
    # everything on the GPU is BF16, where the yardstick rounds the linear layers' operands alone
    "$COMPARE" gpu.st fp32.st bf16.st 4
}
for model in "${MODELS[@]}"; do check "gradients, $model" against_cpu "$model"; done

# FP8 beside its emulation on the CPU: as far from FP32 as that is, and nearer to it than FP32 is.
against_emulation() { # model options, FP8 options
    local model=$1 fp8=$2
    run() { # name, program, options
        local name=$1 program=$2
        shift 2
        "$BIN/$program" $model $DATA --micro-batch-size 4 --resume start/latest \
            --dump-gradients "$name.st" "$@"
    }
    rm -rf start
    "$BIN/train_gpt" $model $DATA --train-iters 0 --save start && run fp32 train_gpt &&
        run emulated train_gpt $fp8 && run gpu train_gptcu $fp8 &&
        "$COMPARE" gpu.st fp32.st emulated.st 1.5 && "$COMPARE" gpu.st emulated.st fp32.st 1
}
FP8_MODELS=(
    "$GPT_WIDE"
    "--model llama-tiny --num-layers 3 --hidden-size 256 --num-attention-heads 4
     --num-query-groups 2 --ffn-hidden-size 352 --seq-length 112
     --untie-embeddings-and-output-weights --vocab-size 301 --make-vocab-size-divisible-by 16"
)
for model in "${FP8_MODELS[@]}"; do
    for fp8 in "hybrid delayed" "e4m3 delayed --fp8-lm-head" "e5m2 delayed" "hybrid tensorwise" \
        "e4m3 tensorwise --no-fp8-wgrad" \
        "hybrid tensorwise --fp8-lm-head --first-last-layers-bf16"; do
        set -- $fp8
        fp8="--fp8-format $1 --fp8-recipe ${*:2}"
        check "FP8 gradients, $fp8, ${model:0:18}" against_emulation "$model" "$fp8"
    done
done

follows_cpu() { # model options
    rm -rf cpu gpu
    local options="$1 $DATA --train-iters 50 --micro-batch-size 8 --lr 1e-3 --lr-warmup-iters 5"
    "$BIN/train_gpt" $options --save cpu || return 1
    "$BIN/train_gptcu" $options --save gpu || return 1
    paste <(grep '"kind":"step"' cpu/metrics.jsonl | sed 's/.*"loss":\([^,]*\),.*/\1/') \
        <(grep '"kind":"step"' gpu/metrics.jsonl | sed 's/.*"loss":\([^,]*\),.*/\1/') |
        awk '{d = $1 - $2; if (d < 0) d = -d; n++
              if (!(d <= 0.02)) bad = 1
              if (d > worst) worst = d}
             END {print n " steps, losses apart by at most " worst; exit bad || n != 50}'
}
for fp8 in "" "--fp8-format hybrid" "--fp8-format hybrid --fp8-recipe tensorwise --fp8-lm-head"; do
    check "50 steps beside the CPU, GPT-2 $fp8" follows_cpu "--model gpt2-tiny $fp8"
    check "50 steps beside the CPU, Llama $fp8" follows_cpu "--model llama-tiny $fp8"
done

# ---- the same bits ----
STEPS="$DATA --train-iters 12 --micro-batch-size 4 --save-interval 6 --lr 1e-3"
RUN="--model llama-tiny --num-layers 3 --hidden-size 128 --num-attention-heads 4
     --num-query-groups 2 --global-batch-size 8 --eval-interval 4 $STEPS"
GPT="--model gpt2-tiny --num-layers 3 $STEPS"
variant() { # reference, options: the same bits as the reference
    local reference=$1
    shift
    train variant "$@" && same_weights "$reference" variant
}
check "reference run, Llama" train llama $RUN
check "reference run, GPT-2" train gpt2 $GPT
check "repeat, Llama" variant llama $RUN
check "repeat, GPT-2" variant gpt2 $GPT
for recompute in activations block; do
    check "--recompute $recompute, Llama" variant llama $RUN --recompute $recompute
    check "--recompute $recompute, GPT-2" variant gpt2 $GPT --recompute $recompute
done
check "--no-cuda-graphs" variant llama $RUN --no-cuda-graphs
resumed() {
    local reference=$1
    shift
    train variant "$@" --train-iters 6 --lr-decay-iters 12 &&
        "$BIN/train_gptcu" --save variant "$@" --resume latest && same_weights "$reference" variant
}
check "resume equals straight, Llama" resumed llama $RUN
check "resume equals straight, GPT-2" resumed gpt2 $GPT
# A run that was tuned, stopped and resumed, beside one that went straight on with its choices.
tuned() {
    train stopped "$@" --gemm-autotune --train-iters 6 --lr-decay-iters 12 || return 1
    grep -q "products .*tuned in" log || return 1
    cp stopped/gemm_choices.bin choices.bin
    "$BIN/train_gptcu" --save stopped "$@" --gemm-autotune --resume latest &&
        cmp stopped/gemm_choices.bin choices.bin || return 1
    rm -rf straight && mkdir straight && cp choices.bin straight/gemm_choices.bin
    "$BIN/train_gptcu" --save straight "$@" --gemm-autotune &&
        cmp straight/gemm_choices.bin choices.bin && same_weights stopped straight
}
TUNED="--model llama-tiny --num-layers 2 --hidden-size 512 --num-attention-heads 8
     --num-query-groups 2 --ffn-hidden-size 1408 --seq-length 512 --max-position-embeddings 512
     --global-batch-size 8 $STEPS"
check "tuned products, resumed" tuned $TUNED
check "tuned products, FP8, resumed" tuned $TUNED --fp8-format hybrid --fp8-lm-head
check "tuned products, tensorwise, resumed" tuned $TUNED --fp8-format hybrid \
    --fp8-recipe tensorwise
other_bits_are_seen() { # planted, for what compares runs here
    train variant $RUN --lr 1.00001e-3 && ! same_weights llama variant
}
check "a learning rate 1e-5 larger is seen" other_bits_are_seen
for fp8 in "delayed" "tensorwise" "delayed --fp8-lm-head --first-last-layers-bf16" \
    "delayed --no-fp8-wgrad"; do
    fp8="--fp8-format hybrid --fp8-recipe $fp8"
    check "$fp8" train fp8 $RUN $fp8
    check "$fp8, repeat" variant fp8 $RUN $fp8
    check "$fp8, no graphs" variant fp8 $RUN $fp8 --no-cuda-graphs
    check "$fp8, resumed" resumed fp8 $RUN $fp8
    check "$fp8, recompute activations" variant fp8 $RUN $fp8 --recompute activations
    check "$fp8, recompute block" variant fp8 $RUN $fp8 --recompute block
    check "$fp8, GPT-2" train fp8 $GPT $fp8
    check "$fp8, GPT-2, resumed" resumed fp8 $GPT $fp8
    check "$fp8, GPT-2, recompute" variant fp8 $GPT $fp8 --recompute block
    check "$fp8, evaluation in BF16 leaves no trace" variant fp8 $GPT $fp8 --eval-precision bf16
done
fp8="--fp8-format hybrid"
train fp8 $RUN $fp8 >log 2>&1
counted() { # two records of counts, and no effect on the run
    variant fp8 $RUN $fp8 --fp8-stats-interval 5 &&
        [[ $(grep -c '"kind":"fp8"' variant/metrics.jsonl) -eq 2 ]] &&
        grep -o '"blocks.0.fc1.dy":{[^}]*}' variant/metrics.jsonl
}
check "--fp8-stats-interval leaves no other trace" counted
train bf16 $RUN >log 2>&1
fallen_back() {
    LLM8_TEST_CAPABILITY=80 variant bf16 $RUN $fp8 >out 2>&1 || return 1
    cat out
    local said="no FP8 here: compute capability 8.0 is below 9.0; the run continues in BF16"
    [[ $(grep -c "$said" out) -eq 1 ]]
}
check "without FP8 on the device: one warning, then BF16" fallen_back
required() {
    ! LLM8_TEST_CAPABILITY=89 "$BIN/train_gptcu" $RUN $fp8 --fp8-required >out 2>&1
    cat out
    grep -q "error: --fp8-required: no FP8 here: compute capability 8.9 is below 9.0" out
}
check "--fp8-required refuses instead" required
too_small() {
    train plain $RUN --train-iters 6 &&
        LLM8_TEST_SMALL_FP8=0 train small $RUN $fp8 --train-iters 6 >out 2>&1 || return 1
    grep "too small to gain" out && same_losses plain small
}
check "blocks too small to gain stay in BF16" too_small
# From BF16 to FP8, which measures its first scales, and back: the losses stay near those of BF16.
precision_changes() {
    local recipe options="$RUN --lr 3e-4 --lr-decay-iters 18"
    train plain $options --train-iters 18 || return 1
    for recipe in delayed tensorwise; do
        train changed $options --train-iters 6 &&
            "$BIN/train_gptcu" $options $fp8 --fp8-recipe $recipe --save changed --resume latest \
                --train-iters 12 &&
            "$BIN/train_gptcu" $options --save changed --resume latest --train-iters 18 || return 1
        paste <(losses plain | grep -o '"loss":[^,]*') <(losses changed | grep -o '"loss":[^,]*') |
            tr -d 'a-z":' | awk -v name=$recipe '{d = $1 - $2; if (d < 0) d = -d
                if (!(d <= worst)) worst = d; n++; first = $1 > first ? $1 : first}
                END {print name ": " n " losses, at most " worst " apart"
                     exit !(n == 18 && worst > 0 && worst < 0.02 * first)}' || return 1
    done
}
check "BF16 to FP8 and back" precision_changes
check "BF16 moments" train bf16 $RUN --adam-dtype bf16 --grad-accum-dtype bf16
check "BF16 moments, resumed" resumed bf16 $RUN --adam-dtype bf16 --grad-accum-dtype bf16
head_in_chunks() {
    LLM8_TEST_HEAD_ROWS=100 train variant $RUN --train-iters 1 &&
        diff <(losses llama | head -1 | sed 's/"norm.*//') \
            <(losses variant | head -1 | sed 's/"norm.*//') && echo "the same first loss"
}
check "the LM head in chunks: the same loss" head_in_chunks
cpu_reads_gpu() {
    "$BIN/train_gpt" $RUN --train-iters 14 --save back --resume llama/latest
}
check "the CPU resumes from the GPU's checkpoint" cpu_reads_gpu
sample() {
    "$BIN/train_gptcu" $RUN --resume llama/latest --sample-only --sample-length 80
}
check "sample" sample
too_large() {
    ! "$BIN/train_gptcu" --model llama-3-8b --data d_train.bin --micro-batch-size 64 \
        --vocab-size 257 &&
        grep -q "try --micro-batch-size" log
}
check "a run too large is refused with advice" too_large
summary
