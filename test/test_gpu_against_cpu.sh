#!/usr/bin/env bash
# shellcheck disable=SC2086 # options are words on purpose
# Whole models by the GPU trainer, on the GPU or over the stand-ins, against the CPU trainer: first
# gradients, in every precision, and losses. Prints "N passed, N failed, N skipped" last.
# shellcheck source=test/gpu_runs.sh
source "$(dirname "$0")/gpu_runs.sh"
mapfile -t recipes < <(grep -o -e '--fp8.*' "$root/test/recipes.txt")

# As large as the GPU needs, as small as the stand-ins need.
if [[ -n ${LLM8_BIN:-} ]]; then
    wide="--model gpt2-tiny --num-layers 4 --hidden-size 256 --num-attention-heads 4
        --seq-length 128 --max-position-embeddings 128"
    gradient_models=(
        "--model gpt2-tiny --hidden-size 200 --num-attention-heads 25 --seq-length 17
         --max-position-embeddings 17"
        "$wide"
        "--model llama-tiny --hidden-size 256 --num-attention-heads 4 --num-query-groups 2
         --ffn-hidden-size 344"
        "--model llama-tiny --num-layers 3 --hidden-size 128 --num-attention-heads 8
         --num-query-groups 2 --seq-length 100 --max-position-embeddings 100 $small 8"
        "--model llama-tiny --hidden-size 256 --kv-channels 80 $qwen3"
        "--model llama-tiny --hidden-size 256 --kv-channels 36 $qwen2")
    fp8_models=(
        "--model llama-tiny --num-layers 4 --hidden-size 256 --kv-channels 96 --seq-length 112
         $qwen3 --ffn-hidden-size 352"
        "--model llama-tiny --num-layers 4 --hidden-size 256 --kv-channels 72 --seq-length 112
         $qwen2 --ffn-hidden-size 352"
        "$wide"
        "--model llama-tiny --num-layers 3 --hidden-size 256 --num-attention-heads 4
         --num-query-groups 2 --ffn-hidden-size 352 --seq-length 112 $small 16")
    follow_models=("--model gpt2-tiny" "--model llama-tiny")
    follow="--train-iters 50 --micro-batch-size 8 --lr 1e-3 --lr-warmup-iters 5
        --lr-decay-style cosine --embedding-lr-mult 1 --vector-lr-mult 1" # larger steps part runs
    seen="--seed 2" # another run, for what compares losses
else
    gradient_models=("$gpt2 --hidden-size 200 --num-attention-heads 25 --seq-length 17" "$llama"
        "$untied" "$llama --kv-channels 40 $qwen3" "$llama --kv-channels 18 $qwen2")
    fp8_models=("$gpt2" "$untied" "$untied --kv-channels 24 $qwen3"
        "$untied --kv-channels 32 $qwen2")
    follow_models=("$gpt2" "$llama")
    follow="--train-iters 12 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3
        --lr-warmup-iters 2 --weight-decay 20"
    seen="--lr 1.02e-3"
fi

gradients() { # NAME PROGRAM OPTIONS: of the first step from the run "start"
    local name=$1 program=$2
    shift 2
    $program $DATA "$@" --resume start/latest --train-iters 1 --dump-gradients "$name.st"
}
starts() { # model options
    rm -rf start
    "$BIN/train_gpt" $1 $DATA --train-iters 0 --save start
}
# Everything on the GPU is BF16, where the yardstick rounds the linear layers' operands alone.
against_cpu() { # model options
    local options="$1 --micro-batch-size 3 --global-batch-size 6"
    starts "$1" && gradients fp32 "$cpu" $options && gradients bf16 "$cpu" $options --bf16 &&
        gradients gpu "$gpu" $options && gradients other "$cpu" $options --seed 2 || return
    ! "$COMPARE" other.st fp32.st bf16.st 4 >out || return # other data are seen
    "$COMPARE" gpu.st fp32.st bf16.st 4
}
for model in "${gradient_models[@]}"; do check "gradients, $model" against_cpu "$model"; done

# Documents that do not see each other; it is seen where they do.
documents_against_cpu() { # model options
    local DATA=${DATA//d\/x/d\/lines}
    against_cpu "$1 --reset-attention-mask --reset-position-ids" || return
    gradients packed "$gpu" $1 --micro-batch-size 3 --global-batch-size 6 \
        --no-reset-attention-mask --no-reset-position-ids || return
    ! "$COMPARE" packed.st fp32.st bf16.st 4 >out || return
    "$COMPARE" gpu.st fp32.st bf16.st 4
}
for model in "${gradient_models[@]}"; do
    check "gradients, documents, $model" documents_against_cpu "$model"
done

# FP8 beside its emulation on the CPU: as far from FP32 as that is, and nearer to it than FP32 is;
# gradients of a few numbers, sums over all tokens that nearly cancel, are a little noisier.
against_emulation() { # model options, FP8 options
    local options="$1 --micro-batch-size 4" near=1
    if [[ $1 == *qk-layernorm* || $1 == *add-qkv-bias* ]]; then near=1.3; fi
    gradients emulated "$cpu" $options $2 && gradients gpu "$gpu" $options $2 &&
        "$COMPARE" gpu.st fp32.st emulated.st 1.5 && "$COMPARE" gpu.st emulated.st fp32.st $near
}
for model in "${fp8_models[@]}"; do
    { starts "$model" && gradients fp32 "$cpu" $model --micro-batch-size 4; } >log 2>&1
    for fp8 in "${recipes[@]}"; do
        # with two layers, nothing would be FP8
        if [[ $model != *--num-layers* && $fp8 == *e4m3*first-last-layers* ]]; then continue; fi
        check "gradients, $fp8, ${model:0:18}" against_emulation "$model" "$fp8"
    done
done

# How far the losses may be apart: on the GPU 0.02; over the stand-ins twice what the coarsest FP8
# changes on the CPU. Another run is seen.
coarsest="--fp8-format e4m3 --fp8-recipe tensorwise --fp8-lm-head"
allowed() { # model options
    local noise
    if [[ -n ${LLM8_BIN:-} ]]; then
        echo 0.02
        return
    fi
    rm -rf fp32 coarse
    $cpu $1 $DATA $follow --save fp32 >out && $cpu $1 $DATA $follow $coarsest --save coarse >out &&
        noise=$(apart fp32 coarse) &&
        awk "BEGIN { if (!($noise > 0 && $noise < 0.05)) exit 1; print 2 * $noise }"
}
follows_cpu() { # model options, FP8 options, how far, options of the other run
    rm -rf cpu
    local options="$1 $DATA $follow" precision=${2:---bf16} difference other
    if [[ -n ${LLM8_BIN:-} && -z $2 ]]; then precision=""; fi
    $cpu $options $precision --save cpu && train gpu $options $2 &&
        train other $options $2 ${4:-$seen} || return
    difference=$(apart cpu gpu) other=$(apart cpu other)
    echo "losses apart by at most $difference of $3; another run's: $other"
    awk "BEGIN { exit !($difference <= $3 && $other > $3) }"
}
for model in "${follow_models[@]}"; do
    far=$(allowed "$model")
    for fp8 in "" "--fp8-format hybrid --fp8-lm-head" \
        "--fp8-format hybrid --fp8-recipe tensorwise --fp8-lm-head" \
        "--fp8-format hybrid --optimizer muon"; do
        check "the CPU's losses, $fp8, ${model:0:18}" follows_cpu "$model" "$fp8" "${far:-0}"
    done
    for other in "--embedding-lr-mult 1" "--vector-lr-mult 9"; do
        check "the CPU's losses, groups' rates, not $other, ${model:0:18}" follows_cpu "$model" \
            "$rates" "${far:-0}" "$other"
    done
done

# A run that trains nothing, from weights without FP8 scales, measures its tensors: with the margin,
# as the CPU trainer does. With margin -2 three quarters of a tensor's range are cut off, which is
# seen: the loss differs from the one with scales that leave nothing out.
evaluates_as_cpu() { # model options
    local by cpu_loss gpu_loss whole evaluate="$1 $DATA --load start/latest --eval-only --fp8-format hybrid"
    rm -rf start
    $cpu $1 $DATA --train-iters 40 --micro-batch-size 4 --lr 1e-2 --save start || return
    for by in "cpu_loss $cpu $evaluate --fp8-margin -2" "gpu_loss $gpu $evaluate --fp8-margin -2" \
        "whole $cpu $evaluate"; do
        ${by#* } >out || return
        printf -v "${by%% *}" %s "$(grep -oP 'valid loss \K[0-9.]+' out)"
    done
    echo "margin -2: $cpu_loss on the CPU, $gpu_loss; margin 0: $whole"
    awk "BEGIN { d = $cpu_loss - $gpu_loss; exit !(d * d < 0.02 ^ 2 && $cpu_loss > $whole + 0.1) }"
}
check "evaluation without scales" evaluates_as_cpu "${follow_models[1]}"
summary
