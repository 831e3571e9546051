#!/usr/bin/env bash
# GPT-2 124M from nothing, on 10 billion tokens of FineWeb, in llm.c's batches (there, by AdamW:
# validation loss 3.28, HellaSwag 29.9%). Optimizer, rate, decay and FP8 head are those that won
# a race of 200 million tokens at an eighth of this batch (docs/benchmarks.md). At this length they
# are not tried.
# shellcheck disable=SC2034 # recipe.sh uses what is set here
here=$(dirname "$(readlink -f "$0")")
if [ ! -e "$here/recipe.sh" ]; then here=${SLURM_SUBMIT_DIR:-.}/scripts; fi # sbatch runs a copy
# shellcheck source=scripts/recipe.sh
. "$here/recipe.sh"

name=gpt2_124m
data_set=fineweb
tokenizer=gpt2
model=(--model gpt2-124m)
training=(
    --micro-batch-size 64 --global-batch-size 512 --train-iters 19073 # 524,288 tokens a step
    --optimizer muon --lr 2.8e-3 --lr-warmup-iters 700 --weight-decay 0.1 --clip-grad 1.0
    --eval-interval 250 --eval-iters 20 --sample-interval 5000 --save-interval 1000 --keep 2
)
recipe "$@"
