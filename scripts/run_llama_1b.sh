#!/usr/bin/env bash
# A Llama of 1.06 billion parameters from nothing, on 21 billion tokens of FineWeb-Edu (20 tokens a
# parameter), with Llama 3's tokenizer: its files are gated, so set HF_TOKEN, or TOKENIZER to a
# tokenizer.json.
# shellcheck disable=SC2034 # recipe.sh uses what is set here
here=$(dirname "$(readlink -f "$0")")
if [ ! -e "$here/recipe.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts; fi # sbatch runs a copy
# shellcheck source=scripts/recipe.sh
. "$here/recipe.sh"

name=llama_1b
data_set=fineweb-edu-100b
data_files=36 # of 140
tokenizer=${TOKENIZER:-llama3}
model=(--model llama-1b)
training=(
    --micro-batch-size 16 --global-batch-size 512 --train-iters 20000 # 1,048,576 tokens a step
    --lr 4e-4 --min-lr 4e-5 --lr-warmup-iters 1000 --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 250 --eval-iters 20 --sample-interval 5000 --save-interval 1000 --keep 2
)
recipe "$@"
