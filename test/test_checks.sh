#!/usr/bin/env bash
# Checked steps (--check-interval) over the stand-ins: a rank that computes wrongly is named with its
# step, and every rank ends before the update. test_gpu_train.sh and test_gpu_ranks.sh check sound runs,
# which stay the same bits.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"

# plant KIND RANK STEP RANKS: a run with a fault, saving at every second step; RANKS are 1 to 3.
plant() {
    local sample=$((($3 - 1) * 12 + $2 * 2)) folder=$1.$2.$3.$4
    FAULT=$1:$sample expect_status 5 "$trainer" "${common[@]}" --gpus "$4" --train-iters 8 \
        --save-interval 2 --check-interval 2 --save "$folder" || return
    has "$folder/metrics.jsonl" "\"kind\":\"end\",\"step\":$(($3 - 1)),\"status\":5,\"error\":" ||
        fail "$folder: no record of its end, or not every step before it is reported"
    is "$(newest_step "$folder") $(grep -c 'error: ' log)" "$(($3 - 2)) 1"
    says "!step $(printf %5d "$3")/8"
}

# names RANK STEP TEXT...: what was printed names the rank and the step. A rank has the GPU of its number.
names() {
    local tag="rank $1: "
    if [[ $ranks -eq 1 ]]; then tag=; fi
    grep -qE "error: ${tag}step $2: $(hostname), GPU-1234[-0]*0$1 computes wrongly: " log ||
        fail "not rank $1, step $2: $(cat log)"
    says "${@:3}"
}

test_a_rank_that_computes_wrongly_is_named() {
    local rank step ranks
    for ranks in 1 3; do
        for rank in 0 1 2; do
            step=$((rank == 0 ? 8 : 4))
            if [[ $rank -ge $ranks ]]; then continue; fi
            plant flip $rank $step $ranks || return
            names $rank $step 'the loss differs between two passes over the same data' \
                'the first was wrong, a third gave what the second did'
            plant flips $rank $step $ranks || return
            names $rank $step 'a third differs again'
        done
    done
}

test_a_rank_with_other_weights_is_named() {
    local rank
    for rank in 0 2; do
        plant weight $rank 6 3 || return
        grep -qE "error: rank 0: step 6: rank $rank on $(hostname), GPU-.*0$rank has other values \
than most ranks in the weights of token_embedding" log || fail "$rank: $(cat log)"
    done
    FAULT=weight:62 expect_status 5 "$trainer" "${common[@]}" --gpus 2 --train-iters 8 \
        --check-interval 2 || return
    says 'has other values than the other half of the ranks'
}

# Step 5 is not checked: the check after it finds that the state is not step 4's, before anything is
# saved.
test_state_that_changes_in_memory_is_found() {
    local row ranks fp8=(--fp8-format hybrid --global-batch-size 6)
    for row in 'master:master weights' 'moment:first moments' 'scales:FP8 scales'; do
        for ranks in 1 3; do
            FAULT=${row%%:*}:$((4 * 6 + 4)) expect_status 5 "$trainer" "${common[@]}" "${fp8[@]}" \
                --gpus $ranks --train-iters 8 --save-interval 5 --check-interval 4 || return
            grep -qE "error: (rank 2: )?step 5: $(hostname), GPU-.*: the ${row#*:} " log || fail "$row: $(cat log)"
            says '!step     5/8'
        done
    done
}

# A fault in the sum over the ranks, not in a gradient: the rank that keeps it is named.
test_sums_over_ranks_are_checked() {
    STANDIN_WRONG_SUM=7 expect_status 5 "$trainer" "${common[@]}" --gpus 2 --global-batch-size 4 \
        --train-iters 8 --check-interval 2 || return
    says 'the sum over the ranks of the gradient of'
}

# What was saved before is sound, and a fault in a step that is not checked is not looked for.
test_the_run_goes_on_from_its_checkpoint() {
    train sound --gpus 3 --train-iters 8 --check-interval 2 || return
    train flips.1.4.3 --gpus 3 --train-iters 8 --check-interval 2 --resume latest || return
    same_checkpoint {sound,flips.1.4.3}/latest || fail "another end"
    FAULT=flip:26 train unseen --gpus 3 --train-iters 8 --check-interval 2 || return
}

# A check waits for the other ranks, so that its step says nothing of a rank's own speed.
test_checked_steps_are_not_timed() {
    local interval
    for interval in 0 2; do
        train timed --gpus 2 --train-iters 5 --log-interval 1 --check-interval $interval || return
        [[ $(grep '"kind":"ranks"' timed/metrics.jsonl | grep -oE '"step":[0-9]+' | cut -d : -f 2 |
            xargs) == "$([[ $interval -eq 0 ]] && echo 2 3 4 5 || echo 3 5)" ]] ||
            fail "$interval: $(grep '"kind":"ranks"' timed/metrics.jsonl)"
        rm -rf timed
    done
}

# The ranks' times are gathered whatever they are.
test_a_clock_that_stands_still_stops_no_rank() {
    STILL_RANK=1 train still --gpus 2 --train-iters 3 || return
    grep -qE '"kind":"ranks","step":3,"compute_seconds":\[[0-9.e-]+,0\],"slowest":0' still/metrics.jsonl ||
        fail "$(grep '"kind":"ranks"' still/metrics.jsonl)"
}

# Parameters whose sizes are no whole words of the hash: the weights of norms of heads.
test_any_model_is_checked() {
    train any --gpus 2 --train-iters 2 --check-interval 1 --kv-channels 6 --qk-layernorm
}

test_results_that_differ_are_not_checked() {
    check_rows <<'ROWS'
1|"$trainer" "${common[@]}" --no-deterministic --check-interval 5|--check-interval 5: must be 0 with --no-deterministic
0|"$trainer" "${common[@]}" --no-deterministic --plan|--check-interval 0
ROWS
}

run_tests
