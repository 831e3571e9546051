#!/usr/bin/env bash
# Llama 3 8B, from nothing or on from Meta's weights, on sequences of 8,192 tokens.
#   START=DIR DATA=DIR scripts/run_llama3_8b.sh           fine-tune: DIR is what
#       scripts/convert_hf import meta-llama/Meta-Llama-3-8B --output DIR   has made, the data what
#       scripts/prepare_data has made of your text with --tokenizer DIR/tokenizer.json
# shellcheck disable=SC2034 # recipe.sh uses what is set here
here=$(dirname "$(readlink -f "$0")")
if [ ! -e "$here/recipe.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts; fi # sbatch runs a copy
# shellcheck source=scripts/recipe.sh
. "$here/recipe.sh"

name=llama3_8b
data_set=fineweb-edu-100b
tokenizer=${TOKENIZER:-llama3}
model=(--model llama-3-8b)
training=(
    --micro-batch-size 1 --global-batch-size 512 --train-iters 24000 # 4,194,304 tokens a step
    --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 250 --eval-iters 4 --sample-interval 2000 --save-interval 500 --keep 2
)
if [[ -n ${START:-} ]]; then
    model=(--load "$START")
    if [[ -e $START/tokenizer.json ]]; then tokenizer=${TOKENIZER:-$START/tokenizer.json}; fi
    training=(
        --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 # 524,288 tokens a step
        --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 50 --weight-decay 0.1 --clip-grad 1.0
        --eval-interval 50 --eval-iters 4 --sample-interval 100 --save-interval 100 --keep 2
    )
fi

# What a GPU has no room for of the optimizer's state is in host memory: on one of 80 GB most of it.
training+=(--recompute activations --optimizer-cpu-offload)

# One GPU's host holds all of it; more of them share it.
adapt() {
    if [[ $gpus -eq 1 && $launch == self ]]; then training+=(--adam-dtype bf16); fi
}
recipe "$@"
