#!/usr/bin/env bash
# Llama 3 8B tuned on conversations, all its weights, on one GPU of 80 GB: in BF16 and in FP8 from
# the same weights over the same data, and what scripts/compare finds between them.
#   START=DIR CHAT=FILE scripts/run_llama3_8b_finetune.sh
#       START: what   scripts/convert_hf import meta-llama/Llama-3.1-8B-Instruct --output DIR   made
#       CHAT: rows of "messages", or of "prompt" and "completion", in .jsonl or .parquet
# scripts/recipe.sh says how a recipe is called; scripts/results writes the lines marked `cost`, of
# one precision, and without what --optimizer-cpu-offload costs.
# cost: 0.0328 billion tokens, 1.53e+18 FLOPs
# cost: BF16: 1 GPU ~44 min, 8 GPUs ~6 min
# cost: FP8: 1 GPU ~32 min, 8 GPUs ~4 min
# cost: on NVIDIA H200, by test/results/bench.jsonl; ~: by other models, options or counts of GPUs
# shellcheck disable=SC2034 # recipe.sh uses what is set here
here=$(dirname "$0")
if [[ ! -e $here/recipe.sh ]]; then here=${SLURM_SUBMIT_DIR:-.}/scripts; fi # sbatch runs a copy
# shellcheck source=scripts/recipe.sh
source "$here/recipe.sh"

name=llama3_8b_finetune
data_set=${CHAT:-}
data_options=(--seq-length 2048)
tokenizer=${START:-}/tokenizer.json
default_precision=both
model=(--model llama-3-8b)
if [[ -n ${START:-} ]]; then model=(--load "$START"); fi
training=(
    --seq-length 2048 --micro-batch-size 2 --global-batch-size 16 # 32,768 tokens a step
    --train-iters 1000
    --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 50 --weight-decay 0 --clip-grad 1.0
    --optimizer-cpu-offload --adam-dtype bf16
    --eval-interval 100 --eval-iters 16 --save-interval 500 --keep 1
)

adapt() {
    if [[ $smoke == 1 || ${DRY:-0} == 1 ]]; then return; fi
    if [[ -z ${START:-} ]]; then
        die "START=DIR is missing: what scripts/convert_hf import has made"
    fi
    if [[ -z ${CHAT:-}${DATA:-} ]]; then
        die "CHAT=FILE is missing: conversations to tune on (or DATA=DIR, prepared already)"
    fi
}
recipe "$@"
