#!/usr/bin/env bash
# What the shell tests of several ranks over the stand-ins share, besides gpu_runs.sh.
# shellcheck disable=SC2034 # what is defined here is used there
# shellcheck source=test/gpu_runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_runs.sh"

# An epoch ends in the middle of a step.
common=(--model llama-tiny --data d/x_train.bin --global-batch-size 12 --micro-batch-size 2
    --seq-length 32 --lr 1e-3 --log-interval 1 --no-cuda-graphs --distributed-timeout 20)

# train NAME OPTIONS...: into the folder NAME
train() {
    local name=$1
    shift
    expect_status 0 "$trainer" "${common[@]}" --save "$name" "$@"
}

# As `train`, in the background, its output in $name.out and $name.err; and until its third step.
# nohup leaves HUP ignored, which a run would keep.
train_on() {
    local name=$1
    shift
    rm -f "$name.out" # so that what is waited for is this run's
    env --default-signal=HUP "${launcher[@]}" "$trainer" "${common[@]}" --save "$name" \
        --train-iters 1000000 --save-interval 1000000 "$@" >"$name.out" 2>"$name.err" &
    started=$!
    wait_until grep -q '^step .* 3/' "$name.out"
}
launcher=()

# Two ranks as torchrun starts them: rank R says out.R and err.R, and its status goes to statuses[R].
# of_rank[R]: the folder it runs in, variables and options of its own; disks[R]: its /dev/fd/9.
torchrun() { # options
    local r port=$((20000 + RANDOM % 9000)) children=() folder words
    statuses=()
    for r in 0 1; do
        read -r folder words <<<"${of_rank[r]:-.}"
        # shellcheck disable=SC2046,SC2086 # words
        (cd "$folder" && exec env RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_PORT=$port \
            MASTER_ADDR=127.0.0.1 ${words%%--*} "$trainer" "${common[@]}" "$@" \
            $(grep -oe '--.*' <<<"$words")) >out.$r 2>err.$r 9<"${disks[r]:-.}" &
        children[r]=$!
    done
    for r in 0 1; do
        wait "${children[r]}"
        statuses[r]=$?
    done
}
of_rank=() disks=()

# The processes of the ranks that a launcher has started.
ranks_of() {
    pgrep -P "$1"
}

# In the folder of this test: others may run at the same time.
no_one_is_left() {
    local pid
    for pid in $(pgrep -x standin_trainer); do
        [[ $(readlink "/proc/$pid/cwd") != "$PWD"* ]] || return 1
    done
}
