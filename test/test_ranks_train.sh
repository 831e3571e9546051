#!/usr/bin/env bash
# Every way of starting ranks makes the same run; ranks of several machines, as far as one machine
# can stand in for them; ranks of which one is another GPU.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"

children=() # by their ranks

test_one_of_several_gpus_is_named() {
    train alone --train-iters 1 || return
    says 'GPUs        1 of the 64 here (--gpus 64 takes all)'
}

test_only_rank_0_speaks() {
    train by_gpus --gpus 3 --train-iters 4 || return
    is "$(grep -c '^step .*3/4 ' log) $(grep -c 'GPUs   ' log)" '1 0'
    is "$(grep -oE '"kind":"(step|run)"' by_gpus/metrics.jsonl | sort | uniq -c | xargs)" '1 kind:run 4 kind:step'
    is "$(find by_gpus/latest/ -name 'optimizer-*' | wc -l)" 3
}

# start_rank NUMBER WORD...: in the background, with variables, or as a program like `ip` starts it;
# `of` has the options of all.
start_rank() {
    env STANDIN_DEVICE="$1" "${@:2}" "$trainer" "${common[@]}" "${of[@]}" >"out.$1" 2>"err.$1" &
    children[$1]=$!
}

# All must have ended well.
ended_well() {
    local number
    for number in "${!children[@]}"; do
        wait "${children[number]}" || fail "$1: rank $number: $(cat "err.$number")"
        [[ $number -eq 0 || ! -s out.$number ]] || fail "$1: rank $number prints"
    done
    children=()
}

# And have made what --gpus makes.
started_well() {
    ended_well "$1"
    same_end by_gpus started || fail "$1: another result"
    rm -rf started
}

# The variables of rank % by each launcher; nodes: three machines, as far as the program can see.
test_every_launcher_starts() {
    local r name words port=$((20000 + RANDOM % 9000)) of=(--train-iters 4 --save started)
    while read -r name words; do
        for r in 2 1 0; do
            # shellcheck disable=SC2086 # words
            start_rank $r MASTER_PORT=$port ${words//%/$r}
        done
        started_well "$name"
        port=$((port + 1))
    done <<ROWS
torchrun RANK=% WORLD_SIZE=3 LOCAL_RANK=% MASTER_ADDR=localhost
mpirun OMPI_COMM_WORLD_RANK=% OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=% OMPI_COMM_WORLD_LOCAL_SIZE=3 LLM8_SECRET=0123456789abcdef0123456789abcdef
srun SLURM_PROCID=% SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=% SLURM_NTASKS=3 SLURM_JOB_ID=77 SLURM_STEP_NODELIST=$(uname -n)
nodes NNODES=3 NODE_RANK=% MASTER_ADDR=[::1]
ROWS
}

listens() { # port
    grep -qi ":$(printf %04x "$1") 0*:0000 0A" /proc/net/tcp /proc/net/tcp6
}

# start_pair: ranks 1 and 0, where the newest checkpoint comes between their starts
start_pair() {
    local r
    for r in 1 0; do
        if [[ $r -eq 1 ]]; then mv moving/step_00000004 later; else mv later moving/step_00000004; fi
        start_rank $r RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT="$port"
        [[ $r -eq 0 ]] || sleep 0.5 # in which it finds the older one
    done
    ended_well "${of[*]}"
    grep -q '^[rs].* from .*moving/step_00000004' out.0 || fail "$(cat out.0)"
    port=$((port + 1))
}

# A rank that came before the newest checkpoint takes the one that rank 0 has opened.
test_ranks_start_from_one_checkpoint() {
    local r how iters port=$((20000 + RANDOM % 9000)) of
    train moving --gpus 2 --train-iters 4 --save-interval 2 || return
    while read -r how iters; do
        of=("$how" moving/latest --train-iters "$iters" --save mixed)
        start_pair
        train whole --gpus 2 "$how" moving/step_00000004 --train-iters "$iters" || return
        same_end whole mixed || fail "$how: not the state of one checkpoint"
        rm -r mixed whole
    done <<<$'--load 1\n--resume 5'
    of=(--resume latest --train-iters 5 --save moving) # the same in their own --save
    start_pair
    rm -r moving out.0
    # the first checkpoint of another run comes when rank 0 has resolved its options
    of=(--resume latest --train-iters 5 --save young --tokenizer d/x_tokenizer.bin)
    for r in 0 1; do
        start_rank $r RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
        if [[ $r -eq 0 ]]; then
            wait_until listens $port
            train young --train-iters 5 || return
        fi
    done
    for r in 0 1; do ! wait "${children[r]}" || fail "rank $r: $(cat out.$r)"; done
    children=()
    has err.0 '--save young: another run has changed its checkpoints while this one started' ||
        fail "$(cat err.0 err.1)"
}

# FP8 on all ranks or on none: they exchange weights in one form.
test_one_rank_lacks_fp8() {
    local r of_rank=('.' '. STANDIN_CAPABILITY=80')
    torchrun --train-iters 2 --fp8-format hybrid --save mixed
    is "${statuses[*]}" '0 0'
    for r in 0 1; do
        has err.$r "rank 1: compute capability 8.0 is below 8.9; the run continues in BF16" ||
            fail "rank $r says $(cat err.$r)"
    done
    train unmixed --train-iters 2 --gpus 2 || return
    same_end unmixed mixed || fail "not a run in BF16"
    rm -r unmixed mixed
}

# Network namespaces as machines, joined by a cable.
test_across_network_namespaces() {
    local name=llm8-$$ of=(--train-iters 4 --save started)
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

# Without a cable, no connection closes: only silence shows it. (The stand-in for NCCL needs none.)
cable_is_cut() {
    local r begin places=("$1-a" "$1-b") of=(--train-iters 1000000 --distributed-timeout 2)
    rm -f out.0 # so that what is waited for is this run's
    for r in 1 0; do
        start_rank $r RANK=$r WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=10.99.0.1 ip netns exec "${places[r]}"
    done
    wait_until grep -q '^step .* 3/' out.0
    begin=$SECONDS
    ip -n "$1-a" link set "$1-x" down
    for r in 0 1; do
        await_end "${children[r]}"
        is "$status" 4
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
