#!/usr/bin/env bash
# Training as several ranks: the same as one rank with accumulation, whatever the ZeRO stage, and
# through checkpoints of other numbers of ranks; by every way of starting ranks.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"

# train NAME OPTIONS...: into the folder NAME
train() {
    local name=$1
    shift
    expect_status 0 "$trainer" "${common[@]}" --save "$name" "$@"
}

# Ranks add up in another order than one rank does. How much an order can matter is measured: one
# rank with its micro-batch split in two. Eight times that is allowed; in FP8, whose first scales
# come from the first micro-batch, what FP8 itself changes.
ranks_equal_accumulation() {
    local name ranks noise
    local -A models=([fp32]='--micro-batch-size 2'
        [bf16]='--model gpt2-tiny --micro-batch-size 2 --bf16'
        [fp8]='--micro-batch-size 2 --fp8-format hybrid --fp8-lm-head --fp8-amax-history-len 4')
    for name in fp32 bf16 fp8; do
        local options factor=8
        read -ra options <<<"${models[$name]} --train-iters 12"
        train "$name.1" "${options[@]}" || return
        if [[ $name == fp8 ]]; then
            noise=$(loss_difference fp32.1 fp8.1) factor=1
        else
            train "$name.half" "${options[@]}" --micro-batch-size 1 || return
            noise=$(loss_difference "$name.1" "$name.half")
        fi
        for ranks in 2 3; do
            train "$name.$ranks" "${options[@]}" --gpus "$ranks" || return
            near "$name.1" "$name.$ranks" "$noise" $factor
        done
    done
    # what is really another run is seen as one
    train seed --micro-batch-size 2 --train-iters 12 --gpus 2 --seed 5 || return
    (near fp32.1 seed "$(loss_difference fp32.1 fp32.half)" 8 && exit "$failing") 2>/dev/null &&
        fail "another seed is not seen"
}

runs_repeat() {
    local options=(--gpus 3 --micro-batch-size 2 --train-iters 6 --fp8-format hybrid
        --valid-data d/x_val.bin --eval-interval 3)
    train shards "${options[@]}" || return
    train again "${options[@]}" || return
    same_end shards again || fail "a run does not repeat"
    train slower "${options[@]}" --lr 0.00300001 || return
    ! same_end shards slower || fail "a difference is not seen"
    local sizes
    sizes=$(stat -c %s shards/latest/optimizer-*)
    [[ $(wc -l <<<"$sizes") -eq 3 ]] || fail "not three optimizer files"
}

only_rank_0_speaks() {
    [[ $(grep -c '^step .*3/6 ' log) -eq 1 ]] || fail "not one line of step 3: $(cat log)"
    [[ $(grep -c '"kind":"step"' shards/metrics.jsonl) -eq 6 ]] || fail "metrics.jsonl"
    [[ $(grep -c '"kind":"run"' shards/metrics.jsonl) -eq 1 ]] || fail "runs in metrics.jsonl"
}

# resumes_on_other_numbers NAME NOISE K OPTIONS...
resumes_on_other_numbers() {
    local name=$1 noise=$2 factor=$3 step=0 ranks
    shift 3
    for ranks in '4' '2' '1' '4' '6'; do
        step=$((step + 4))
        # shellcheck disable=SC2086 # a number of ranks and a stage
        train "$name.parts" "$@" --resume latest --train-iters $step --gpus $ranks || return
        [[ $step -eq 4 ]] || has log "step $((step - 4)), $(((step - 4) * 12 * 64)) tokens" ||
            fail "does not go on at $((step - 4))"
    done
    near "$name.straight" "$name.parts" "$noise" "$factor"
    # what one rank goes on to from such a checkpoint, the CPU trainer, or three ranks, is the same
    expect_status 0 train_gpt "${common[@]}" "$@" --save "$name.cpu" --train-iters 13 \
        --resume "$name.parts/step_00000012" || return
    train "$name.three" "$@" --resume "$name.parts/step_00000012" --gpus 3 --train-iters 13 ||
        return
    near "$name.cpu" "$name.three" "$noise" "$factor"
}

numbers_of_ranks_change() {
    local options=(--micro-batch-size 1 --lr-decay-iters 40 --lr-wsd-decay-iters 8 --keep 0
        --lr 5e-4)
    local fp8=(--fp8-format hybrid --fp8-amax-history-len 4)
    train fp32.straight "${options[@]}" --gpus 4 --train-iters 20 || return
    train fp32.other "${options[@]}" --micro-batch-size 2 --gpus 3 --train-iters 20 || return
    train fp8.straight "${options[@]}" "${fp8[@]}" --gpus 4 --train-iters 20 || return
    resumes_on_other_numbers fp32 "$(loss_difference fp32.straight fp32.other)" 8 "${options[@]}"
    resumes_on_other_numbers fp8 "$(loss_difference fp32.straight fp8.straight)" 1 "${options[@]}" \
        "${fp8[@]}"
}

# On the same number of ranks, to the last bit.
resumes_exactly() {
    local options=(--gpus 3 --micro-batch-size 2 --lr-decay-iters 8 --lr-wsd-decay-iters 1)
    train whole "${options[@]}" --train-iters 8 || return
    train cut "${options[@]}" --train-iters 3 || return
    train cut "${options[@]}" --train-iters 8 --resume latest || return
    same_end whole cut || fail "a resumed run differs"
    local r
    for r in 0 1 2; do
        cmp -s {whole,cut}/latest/optimizer-$r-of-3.safetensors || fail "rank $r's state differs"
    done
}

# The gradients that ranks have added up are those of one rank.
gradients_add_up() {
    local ranks
    for ranks in 1 2 3; do
        expect_status 0 "$trainer" "${common[@]}" --micro-batch-size 2 --gpus $ranks \
            --dump-gradients "gradients.$ranks" || return
        [[ $ranks -eq 1 || $(stat -c %s "gradients.$ranks") -eq $(stat -c %s gradients.1) ]] ||
            fail "$ranks ranks: another size"
    done
    "$root/build/plain/compare_tensors" gradients.2 gradients.1 gradients.3 8 >log ||
        fail "gradients: $(tail -n 1 log)"
}

# start_rank NUMBER VARIABLES...: in the background, as mpirun and the like do
start_rank() {
    local number=$1
    shift
    env STANDIN_DEVICE="$number" "$@" "$trainer" "${common[@]}" --micro-batch-size 2 \
        --train-iters 4 --save started \
        >"out.$number" 2>"err.$number" &
    children[number]=$!
}

# Every rank by itself; then all must have ended well, and have made what --gpus makes.
started_well() {
    local number
    for number in "${!children[@]}"; do
        wait "${children[number]}" || fail "$1: rank $number: $(cat "err.$number")"
        [[ $number -eq 0 || ! -s out.$number ]] || fail "$1: rank $number prints"
    done
    same_end by_gpus started || fail "$1: another result"
    rm -rf started
    children=()
}

every_starter_starts() {
    local r port=$((20000 + RANDOM % 9000)) children=()
    train by_gpus --gpus 2 --micro-batch-size 2 --train-iters 4 || return
    for r in 1 0; do
        start_rank $r RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=localhost MASTER_PORT=$port
    done
    started_well torchrun
    for r in 0 1; do
        start_rank $r OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$r \
            OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=$((port + 1))
    done
    started_well mpirun
    for r in 0 1; do
        start_rank $r SLURM_PROCID=$r SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$r SLURM_NTASKS=2 \
            SLURM_JOB_ID=77 "SLURM_STEP_NODELIST=$(uname -n)" MASTER_PORT=$((port + 2))
    done
    started_well srun
    for r in 0 1; do # two machines, as far as the program can see
        start_rank $r NNODES=2 NODE_RANK=$r MASTER_ADDR=::1 MASTER_PORT=$((port + 3))
    done
    started_well nodes
}

# Two network namespaces as two machines, joined by a cable.
across_network_namespaces() {
    local children=() name=llm8-$$
    if ! { ip netns add $name-a && ip netns add $name-b && ip link add $name-x netns $name-a \
        type veth peer name $name-y netns $name-b; } 2>/dev/null; then
        ip netns del $name-a 2>/dev/null
        ip netns del $name-b 2>/dev/null
        skip "no network namespaces can be made here"
        return
    fi
    ip -n $name-a addr add 10.99.0.1/24 dev $name-x
    ip -n $name-b addr add 10.99.0.2/24 dev $name-y
    ip -n $name-a addr add fd99::1/64 dev $name-x nodad
    ip -n $name-b addr add fd99::2/64 dev $name-y nodad
    ip -n $name-a link set $name-x up
    ip -n $name-b link set $name-y up
    local host r
    for host in 10.99.0.1 fd99::1; do
        for r in 0 1; do
            local where=$name-a
            if [[ $r -eq 1 ]]; then where=$name-b; fi
            start_rank $r RANK=$r WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=$host \
                MASTER_PORT=29500 ip netns exec $where
        done
        started_well "namespaces, $host"
    done
    cable_is_cut "$name"
    ip netns del $name-a
    ip netns del $name-b
}

# Without a cable, no connection closes: only silence tells. (The stand-in for NCCL needs none.)
cable_is_cut() {
    local r where children=() status begin
    rm -f out.0
    for r in 0 1; do
        where=$1-a
        if [[ $r -eq 1 ]]; then where=$1-b; fi
        env RANK=$r WORLD_SIZE=2 LOCAL_RANK=0 STANDIN_DEVICE=$r MASTER_ADDR=10.99.0.1 \
            ip netns exec "$where" "$trainer" "${common[@]}" --micro-batch-size 2 \
            --train-iters 1000000 --distributed-timeout 2 >"out.$r" 2>"err.$r" &
        children[r]=$!
    done
    wait_until grep -q '^step .* 3/' out.0
    begin=$SECONDS
    ip -n "$1-a" link set "$1-x" down
    for r in 0 1; do
        status=0
        wait "${children[r]}" || status=$?
        [[ $status -eq 4 ]] || fail "rank $r: status $status: $(cat "err.$r")"
        grep -qE "rank $((1 - r)).* has been silent for" "err.$r" || fail "rank $r: $(cat "err.$r")"
    done
    [[ $((SECONDS - begin)) -le 5 ]] || fail "took $((SECONDS - begin)) s"
}

sanitized_ranks_train() {
    expect_status 0 "$sanitized" "${common[@]}" --micro-batch-size 2 --gpus 3 --train-iters 3 \
        --fp8-format hybrid --save sanitized || return
    expect_status 0 "$sanitized" "${common[@]}" --micro-batch-size 2 --gpus 2 --train-iters 4 \
        --fp8-format hybrid --save sanitized --resume latest || return
}

for test in prepare ranks_equal_accumulation runs_repeat only_rank_0_speaks \
    numbers_of_ranks_change resumes_exactly gradients_add_up every_starter_starts \
    across_network_namespaces sanitized_ranks_train; do
    run $test
done
summary
