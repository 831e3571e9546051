#!/usr/bin/env bash
# Llama 3 8B tuned on conversations, all its weights: in BF16 and in FP8 from the same weights over
# the same data, and what scripts/compare finds between them.
#   START=DIR CHAT=FILE scripts/run_llama3_8b_finetune.sh
#       START: what   scripts/convert_hf import meta-llama/Llama-3.1-8B-Instruct --output DIR   made
#       CHAT: conversations in .jsonl, .json or .parquet, in any form of docs/data.md, "Rows"
# On one GPU of 80 GB: 32,768 tokens a step, in sequences of 2,048, with the part of the optimizer's
# state that does not fit in host memory. On several, 524,288 tokens a step in sequences of 4,096,
# with ZeRO-1; of four each takes 4 sequences at a time, 8 times a step, in 64 GiB by --plan.
# Either sees 34 million tokens. It is not known how well they tune a model: only steps were timed.
# shellcheck disable=SC2034 # recipe.sh uses what is set here
here=$(dirname "$(readlink -f "$0")")
if [ ! -e "$here/recipe.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts; fi # sbatch runs a copy
# shellcheck source=scripts/recipe.sh
. "$here/recipe.sh"

name=llama3_8b_finetune
data_set=${CHAT:-}
tokenizer=${START:-}/tokenizer.json
default_precision=both
model=(--model llama-3-8b)
if [[ -n ${START:-} ]]; then model=(--load "$START"); fi
training=(
    --lr 1e-5 --min-lr 1e-6 --weight-decay 0 --clip-grad 1.0 --optimizer-cpu-offload --keep 1
)

adapt() {
    local sequence
    if [[ $gpus -le 1 && $launch == self ]]; then
        sequence=2048
        training+=(
            --micro-batch-size 2 --global-batch-size 16 --train-iters 1024 --lr-warmup-iters 50
            --adam-dtype 8bit --eval-interval 128 --eval-iters 16 --save-interval 512
        )
    else
        sequence=4096
        training+=( # scripts/bench times these steps, as llama-3-8b-finetune
            --micro-batch-size 4 --global-batch-size 128 --train-iters 64 --lr-warmup-iters 6
            --recompute block --grad-accum-dtype bf16
            --eval-interval 8 --eval-iters 1 --save-interval 32
        )
    fi
    training+=(--seq-length "$sequence")
    data_options=(--seq-length "$sequence")
    if [[ $smoke == 1 || ${DRY:-0} == 1 ]]; then return; fi
    if [[ -z ${START:-} ]]; then
        die "START=DIR is missing: what scripts/convert_hf import has made"
    fi
    if [[ -z ${CHAT:-}${DATA:-} ]]; then
        die "CHAT=FILE is missing: conversations to tune on (or DATA=DIR, prepared already)"
    fi
}
recipe "$@"
