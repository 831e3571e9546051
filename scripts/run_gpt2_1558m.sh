#!/usr/bin/env bash
# GPT-2 1558M (XL) from nothing, on 33.6 billion tokens of FineWeb-Edu, as llm.c reproduced it.
# shellcheck disable=SC2034 # recipe.sh uses what is set here
here=$(dirname "$(readlink -f "$0")")
if [ ! -e "$here/recipe.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts; fi # sbatch runs a copy
# shellcheck source=scripts/recipe.sh
. "$here/recipe.sh"

name=gpt2_1558m
data_set=fineweb-edu-100b
data_files=55 # of 140
tokenizer=gpt2
model=(--model gpt2-1558m)
training=(
    --micro-batch-size 16 --global-batch-size 1024 --train-iters 32000 # 1,048,576 tokens a step
    --lr 6e-4 --min-lr 6e-5 --lr-warmup-iters 700 --weight-decay 0.1 --clip-grad 1.0
    --lr-decay-style cosine --embedding-lr-mult 1 --vector-lr-mult 1 # as llm.c has them
    --eval-interval 250 --eval-iters 20 --sample-interval 5000 --save-interval 1000 --keep 2
)
recipe "$@"
