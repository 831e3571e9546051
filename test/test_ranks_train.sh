#!/usr/bin/env bash
# Every way of starting ranks makes the same run; ranks of several machines, as far as one machine
# can stand in for them; ranks of which one is another GPU.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"

test_only_rank_0_speaks() {
    train by_gpus --gpus 3 --train-iters 4 || return
    ! has log LLM8_SECRET || fail "the starter has a secret: $(cat log)"
    [[ $(grep -c '^step .*3/4 ' log) -eq 1 ]] || fail "not one line of step 3: $(cat log)"
    [[ $(grep -c '"kind":"step"' by_gpus/metrics.jsonl) -eq 4 ]] || fail "metrics.jsonl"
    [[ $(grep -c '"kind":"run"' by_gpus/metrics.jsonl) -eq 1 ]] || fail "runs in metrics.jsonl"
    [[ $(find by_gpus/latest/ -name 'optimizer-*' | wc -l) -eq 3 ]] || fail "not three files"
}

# start_rank NUMBER VARIABLES...: in the background, as mpirun and the like do
start_rank() {
    local number=$1
    shift
    env STANDIN_DEVICE="$number" "$@" "$trainer" "${common[@]}" --train-iters 4 --save started \
        >"out.$number" 2>"err.$number" &
    children[number]=$!
}

# All must have ended well, and have made what --gpus makes.
started_well() {
    local number
    for number in "${!children[@]}"; do
        wait "${children[number]}" || fail "$1: rank $number: $(cat "err.$number")"
        [[ $number -eq 0 || ! -s out.$number ]] || fail "$1: rank $number prints"
        [[ $number -ne 0 || $(grep -c '^note: LLM8_SECRET is not set' out.0) -eq ${2:-1} ]] ||
            fail "$1: rank 0 says $(grep SECRET out.0)"
    done
    same_end by_gpus started || fail "$1: another result"
    rm -rf started
    children=()
}

test_every_starter_starts() {
    local r port=$((20000 + RANDOM % 9000)) children=()
    for r in 2 1 0; do
        start_rank $r RANK=$r WORLD_SIZE=3 LOCAL_RANK=$r MASTER_ADDR=localhost MASTER_PORT=$port
    done
    started_well torchrun
    for r in 0 1 2; do
        start_rank $r OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=$r \
            OMPI_COMM_WORLD_LOCAL_SIZE=3 MASTER_PORT=$((port + 1)) \
            LLM8_SECRET=0123456789abcdef0123456789abcdef
    done
    started_well mpirun 0
    for r in 0 1 2; do
        start_rank $r SLURM_PROCID=$r SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=$r SLURM_NTASKS=3 \
            SLURM_JOB_ID=77 "SLURM_STEP_NODELIST=$(uname -n)" MASTER_PORT=$((port + 2))
    done
    started_well srun
    for r in 0 1 2; do # three machines, as far as the program can see
        start_rank $r NNODES=3 NODE_RANK=$r "MASTER_ADDR=[::1]" MASTER_PORT=$((port + 3))
    done
    started_well nodes
}

has_open() { # pid, a part of a file's name
    find "/proc/$1/fd" -lname "*$2*" | grep -q .
}

# The newest checkpoint comes after the start of rank 1 and before that of rank 0.
newest_comes() { # the rank that starts next
    if [[ $1 -eq 1 ]]; then mv moving/step_00000004 later; else mv later moving/step_00000004; fi
}

# A rank that came before the newest checkpoint takes the one that rank 0 has opened.
test_ranks_start_from_one_checkpoint() {
    local r words how iters port=$((20000 + RANDOM % 9000)) children=()
    train moving --gpus 2 --train-iters 4 --save-interval 2 || return
    for words in '--load 1' '--resume 5'; do
        read -r how iters <<<"$words"
        for r in 1 0; do
            newest_comes $r
            env RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
                "$trainer" "${common[@]}" "$how" moving/latest --train-iters "$iters" --save mixed \
                >out.$r 2>err.$r &
            children[r]=$!
            [[ $r -eq 0 ]] || wait_until has_open $! step_00000002/model.safetensors
        done
        for r in 0 1; do wait "${children[r]}" || fail "rank $r: $(cat err.$r)"; done
        grep -q '^[rs].* from .*moving/step_00000004' out.0 || fail "$(cat out.0)"
        train whole --gpus 2 "$how" moving/step_00000004 --train-iters "$iters" || return
        same_end whole mixed || fail "$how: not the state of one checkpoint"
        rm -r mixed whole
        port=$((port + 1))
    done
    # the same in their own --save
    for r in 1 0; do
        newest_comes $r
        env RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$trainer" \
            "${common[@]}" --resume latest --train-iters 5 --save moving >out.$r 2>err.$r &
        children[r]=$!
        [[ $r -eq 0 ]] || wait_until has_open $! step_00000002/model.safetensors
    done
    for r in 0 1; do wait "${children[r]}" || fail "rank $r: $(cat err.$r)"; done
    grep -q '^resuming from moving/step_00000004' out.0 || fail "$(cat out.0)"
    rm -r moving
    rm out.0
    # the first checkpoint of another run comes when rank 0 has resolved its options
    for r in 0 1; do
        env RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 1)) \
            "$trainer" "${common[@]}" --resume latest --train-iters 5 --save young \
            --tokenizer d/x_tokenizer.bin >out.$r 2>err.$r &
        children[r]=$!
        if [[ $r -eq 0 ]]; then
            wait_until grep -q 'LLM8_SECRET is not set' out.0
            train young --train-iters 5 || return
        fi
    done
    for r in 0 1; do ! wait "${children[r]}" || fail "rank $r: $(cat out.$r)"; done
    has err.0 '--save young: another run has changed its checkpoints while this one started' ||
        fail "$(cat err.0 err.1)"
}

# FP8 on all ranks or on none: they exchange weights in one form.
test_one_rank_lacks_fp8() {
    local r of_rank=('.' '. STANDIN_CAPABILITY=80')
    torchrun --train-iters 2 --fp8-format hybrid --save mixed
    for r in 0 1; do
        [[ ${statuses[r]} -eq 0 ]] || fail "rank $r: $(cat err.$r)"
        has err.$r "rank 1: compute capability 8.0 is below 8.9; the run continues in BF16" ||
            fail "rank $r says $(cat err.$r)"
    done
    train unmixed --train-iters 2 --gpus 2 || return
    same_end unmixed mixed || fail "not a run in BF16"
    rm -r unmixed mixed
}

# Network namespaces as machines, joined by a cable.
test_across_network_namespaces() {
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
    ip -n $name-b link set lo up
    local host r places=("$name-a" "$name-b" "$name-b")
    for host in 10.99.0.1 fd99::1 10.99.0.2 fd99::2; do # rank 0 has the address, or the others
        for r in 0 1 2; do
            start_rank $r RANK=$r WORLD_SIZE=3 LOCAL_RANK=0 MASTER_ADDR=$host \
                MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True ip netns exec "${places[r]}"
        done
        started_well "namespaces, $host"
    done
    cable_is_cut "$name"
    ip netns del $name-a
    ip netns del $name-b
}

# Without a cable, no connection closes: only silence tells. (The stand-in for NCCL needs none.)
cable_is_cut() {
    local r children=() status begin places=("$1-a" "$1-b")
    rm -f out.0 # so that what is waited for is this run's
    for r in 1 0; do
        env RANK=$r WORLD_SIZE=2 LOCAL_RANK=0 STANDIN_DEVICE=$r MASTER_ADDR=10.99.0.1 \
            ip netns exec "${places[r]}" "$trainer" "${common[@]}" --train-iters 1000000 \
            --distributed-timeout 2 >"out.$r" 2>"err.$r" &
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

# Threads beyond the cores must not slow a start down: it once took 40 times as long with 16.
test_a_start_does_not_grow_with_threads() {
    local threads begin took=()
    for threads in 1 16; do
        begin=$(date +%s%N)
        OMP_NUM_THREADS=$threads expect_status 0 "$trainer" "${common[@]}" --gpus 2 \
            --num-layers 32 --train-iters 0 || return
        took+=($((($(date +%s%N) - begin) / 1000000)))
    done
    echo "  measured: ${took[0]} ms with one thread, ${took[1]} ms with 16"
    [[ ${took[1]} -lt $((5 * took[0] + 500)) ]] || fail "${took[*]} ms"
}

run_tests
