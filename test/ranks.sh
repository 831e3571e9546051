#!/usr/bin/env bash
# What the shell tests of several ranks share: the GPU trainer as ranks on a machine without a GPU,
# over the stand-ins of test/standin for CUDA, its libraries, NCCL and our kernels.
# shellcheck disable=SC2034 # what is defined here is used there
# shellcheck source=test/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
export LD_LIBRARY_PATH=$root/build/standin
export LLM8_GUARD=1 # an overrun of a planned buffer ends a run (model/plan.h)
metrics_tool=$root/build/plain/metrics_tool
trainer=$root/build/plain/standin_trainer
sanitized=$root/build/asan/standin_trainer
export MALLOC_PERTURB_=128 # what is read before it is written is about 3.4e38, never by luck 0
if [[ ! -x $trainer ]]; then
    echo "  skipped: no C++ compiler, so no stand-in trainer"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

# An epoch ends in the middle of a step.
common=(--model llama-tiny --data d/x_train.bin --global-batch-size 12 --micro-batch-size 2
    --seq-length 32 --lr 1e-3 --log-interval 1 --no-cuda-graphs --distributed-timeout 20)

prepare() {
    make_text 1 4000 >text
    "$root/tokenize" --output-prefix d/x text >log || fail "tokenize: $(cat log)"
}

# train NAME OPTIONS...: into the folder NAME
train() {
    local name=$1
    shift
    expect_status 0 "$trainer" "${common[@]}" --save "$name" "$@"
}

# As `train`, in the background, its output in $name.out and $name.err; and until its third step.
train_on() {
    local name=$1
    shift
    rm -f "$name.out" # so that what is waited for is this run's
    "${launcher[@]}" "$trainer" "${common[@]}" --save "$name" --train-iters 1000000 \
        --save-interval 1000000 "$@" >"$name.out" 2>"$name.err" &
    starter=$!
    wait_until grep -q '^step .* 3/' "$name.out"
}
launcher=()

# Two ranks as torchrun starts them: rank R says out.R and err.R, and its status goes to statuses[R].
# of_rank[R]: the folder it runs in, variables and options of its own.
torchrun() { # options
    local r port=$((20000 + RANDOM % 9000)) children=() folder words
    statuses=()
    for r in 0 1; do
        read -r folder words <<<"${of_rank[r]:-.}"
        # shellcheck disable=SC2046,SC2086 # words
        (cd "$folder" && exec env RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_PORT=$port \
            MASTER_ADDR=127.0.0.1 ${words%%--*} "$trainer" "${common[@]}" "$@" \
            $(grep -oe '--.*' <<<"$words")) >out.$r 2>err.$r &
        children[r]=$!
    done
    for r in 0 1; do
        wait "${children[r]}"
        statuses[r]=$?
    done
}
of_rank=()

steps_of() {
    "$metrics_tool" "$1/metrics.jsonl" | grep '^step'
}

# The largest difference between the losses of two runs' steps; 99 where the steps differ.
loss_difference() {
    paste <(steps_of "$1") <(steps_of "$2") | awk '
        {
            n = 0
            for (i = 1; i < NF; i++) if ($i == "loss") x[++n] = $(i + 1)
            if (n != 2) bad = 1
            d = x[1] - x[2]
            if (d < 0) d = -d
            if (!(d <= most)) most = d
        }
        END { print (bad || NR == 0) ? 99 : most + 0 }'
}

# near A B NOISE K: the losses of A and B differ by at most K times NOISE, which is some, and small.
near() {
    local difference
    difference=$(loss_difference "$1" "$2")
    awk "BEGIN { exit !($difference <= $4 * $3 && $3 > 0 && $3 < 0.05) }" ||
        fail "$1 and $2: losses differ by $difference, allowed are $4 times $3"
}

# Bit for bit, in every step and at the end.
same_end() {
    cmp -s "$1/latest/model.safetensors" "$2/latest/model.safetensors" &&
        cmp -s <(steps_of "$1") <(steps_of "$2")
}

# The processes of the ranks that a starter has started.
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
