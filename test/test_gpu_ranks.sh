#!/usr/bin/env bash
# shellcheck disable=SC2046,SC2086 # options are words on purpose
# Training on several ranks, on GPUs or over the stand-ins: the same as on one with accumulation,
# however weights travel, and evaluations of the newest of them; through checkpoints of other numbers
# of ranks; and on GPUs through kills (test_ranks_trouble.sh has those over the stand-ins). Takes 2
# GPUs, or 4 where there are as many. KILLS=20: so many random ranks are killed. Prints "N passed, N
# failed, N skipped" last.
# shellcheck source=test/gpu_runs.sh
source "$(dirname "$0")/gpu_runs.sh"
RANDOM=5 # the delays below repeat, as far as delays can
muon="--optimizer muon" hybrid="--fp8-format hybrid" tensorwise="--fp8-recipe tensorwise"
blockwise="--fp8-format e4m3 --fp8-recipe blockwise"

# as_one: kinds that are compared with one rank; exactly: that are resumed; crossing: that change
# the number of ranks, by these legs; between: that evaluate, sample and save meanwhile.
# A run of real size, on every GPU at once, as a user starts it. It took 132 s on a host of 32 cores
# when each rank had as many threads.
starts_in_time() {
    env -u OMP_NUM_THREADS -u LLM8_GUARD timeout 60 $gpu $DATA --model gpt2-124m --gpus "$gpus" \
        --vocab-size 50257 --micro-batch-size 4 --train-iters 5 >started ||
        { cat started; return 1; }
    grep -o 'start .*' started
}
if [[ -n ${LLM8_BIN:-} ]]; then
    gpus=$(tr , '\n' <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader)}" | wc -l)
    check "GPT-2 124M starts within 60 s on every GPU" starts_in_time
    if [[ $gpus -lt 2 ]]; then
        skip "one GPU"
        skipped=$((skipped + 1))
        summary
        exit
    fi
    most=$((gpus < 4 ? 2 : 4)) counts=("$most")
    run="$DATA --global-batch-size 16 --micro-batch-size 2 --lr 3e-4 --lr-warmup-iters 5
        --distributed-timeout 60"
    llama="--model llama-tiny --num-layers 3 --hidden-size 128 --num-attention-heads 4"
    llama+=" --num-query-groups 2"
    gpt2="--model gpt2-tiny --num-layers 3"
    as_one=("$llama" "$gpt2 $documents" "$llama --grad-accum-dtype fp32" "$llama $hybrid"
        "$gpt2 $hybrid $tensorwise --fp8-lm-head" "$llama $muon" "$gpt2 $muon $hybrid $rates")
    exactly=("$llama $hybrid" "$gpt2 $hybrid $tensorwise")
    crossing=("$llama" "$llama $hybrid" "$llama $muon") legs=("$most" 2 1 "$most")
    between=("$llama" "$llama $muon $hybrid" "$llama $hybrid"
        "$gpt2 $hybrid $tensorwise --fp8-lm-head")
    steps=20 end=20 alone="--micro-batch-size 4" shared="--micro-batch-size $((16 / most))"
    times=3 seen="--seed 5"
else
    most=3 counts=(2 3)
    run="$DATA --model llama-tiny --global-batch-size 12 --micro-batch-size 2 --seq-length 32
        --lr 1e-3 --weight-decay 20 --distributed-timeout 20"
    untied="--untie-embeddings-and-output-weights --num-layers 3 --vocab-size 301
        --make-vocab-size-divisible-by 16"
    ends="--first-last-layers-bf16 --num-layers 3" gpt2="--model gpt2-tiny"
    coarse="--fp8-format e4m3 $tensorwise --fp8-lm-head" head="--eval-precision bf16 --fp8-lm-head"
    as_one=("" "$gpt2 --adam-dtype bf16 $documents" "--grad-accum-dtype fp32"
        "$hybrid --fp8-lm-head --fp8-amax-history-len 4" "$coarse"
        "$muon --grad-accum-dtype fp32 $hybrid $ends $rates" "$gpt2 $hybrid" "$hybrid $ends"
        "$muon --adam-dtype 8bit" "$muon $blockwise" "$blockwise --fp8-lm-head $untied $rates"
        "$gpt2 $blockwise --fp8-lm-head" "$gpt2 --fp8-format e4m3 $head" "$coarse $untied"
        "--fp8-format e4m3 $head $untied")
    # each kind of the optimizer's state and of scales
    exactly=("${as_one[@]:0:6}" "$muon $blockwise" "$gpt2 --fp8-format e4m3 $head")
    crossing=("" "$hybrid --fp8-amax-history-len 4" "$muon") legs=(3 2 cpu 2) # the CPU trainer
    between=("$muon $hybrid")
    steps=8 end=6 alone="" shared="" times=1 seen="--lr 1.02e-3" # 2 % more
fi

# How far losses may be apart for another order of sums: on GPUs `times` the effect of another
# micro-batch in 20 steps (after 100 steps, two orders of one run differ by up to 5 times as much as
# two others); over the stand-ins the effect of the coarsest FP8.
noise_is() { # folders
    noise=$(apart "$1" "$2")
    awk "BEGIN { exit !($noise > 0 && $noise < 0.05) }"
}
near() { # folders
    echo "losses $(apart "$1" "$2") apart; allowed are $times times $noise"
    awk "BEGIN { exit !($(apart "$1" "$2") <= $times * $noise) }"
}
if [[ -z ${LLM8_BIN:-} ]]; then
    { train plain $run --train-iters 8 && train other $run $coarse --train-iters 8 &&
        noise_is plain other; } >log 2>&1 || fail "no noise: $(tail -n 2 log)"
fi

# Over the stand-ins: the evaluation after the last step, and one of its checkpoint alone, have the
# same loss, bit for bit.
evaluates_alone() { # checkpoint, ranks, options
    local loss
    if [[ -n ${LLM8_BIN:-} ]]; then return; fi
    rm -f alone.jsonl
    loss=$(valid_loss "${1%/*}/metrics.jsonl")
    $gpu "${@:3}" --gpus "$2" --resume "$1" --eval-only --metrics alone.jsonl &&
        [[ -n $loss && $loss == "$(valid_loss alone.jsonl)" ]]
}
follows_one_rank() { # options
    local options="$run $* --train-iters $steps --save-interval $((steps / 2))" ranks
    options+=" --eval-interval $((steps / 2))"
    train one $options $alone && evaluates_alone one/latest 1 $options || return
    if [[ -n ${LLM8_BIN:-} ]]; then
        train other $options --micro-batch-size 8 && noise_is one other || return
    fi
    for ranks in "${counts[@]}"; do
        train many $options $shared --gpus "$ranks" &&
            { [[ $ranks -ne $most ]] || evaluates_alone many/latest "$ranks" $options; } &&
            [[ $(grep -c '"kind":"eval"' many/metrics.jsonl) -eq 2 ]] && near one many || return
        [[ $* != *fp8* ]] || grep -q '"precision":"FP8"' many/metrics.jsonl || return
    done
    if [[ -z ${LLM8_BIN:-} ]]; then
        if [[ $* != "${as_one[-1]}" ]]; then return; fi
        ! evaluates_alone many/step_00000004 $most $options || return # older weights are seen
    fi
    train another $options $shared --gpus $most $seen && ! near one another # another run is seen
}
for kind in "${as_one[@]}"; do check "as one rank: $kind" follows_one_rank $kind; done

# More tensors than a step has partial sums of its norm; each rank's codes once.
counts_of_all_ranks() {
    local options="$run --model gpt2-tiny --num-layers 24 --fp8-format hybrid --train-iters 2
        --fp8-stats-interval 2"
    train one $options --micro-batch-size 4 && train many $options --gpus $most $shared &&
        [[ $(fp8_elements one | wc -l) -gt 200 ]] && diff <(fp8_elements one) <(fp8_elements many)
}
check "counts are those of one rank" counts_of_all_ranks

resumed_exactly() { # options
    local options="$run $* --gpus $most --lr-decay-iters $end --train-iters $end"
    local stop="--train-iters $((end / 3))"
    train whole $options && ends_as whole same_end "$options" "$stop" "" &&
        ends_as whole same_end "$options" "$stop $(offload whole $most)" "" >out && is_offloaded out
}
for kind in "${exactly[@]}"; do check "resume equals straight: $kind" resumed_exactly $kind; done

# Through checkpoints of other numbers of ranks.
resumed_elsewhere() { # options
    local step=0 leg options="$run $* --lr-decay-iters $steps" parts=()
    train straight $options --gpus $most --train-iters $steps || return
    for leg in "${legs[@]}"; do
        step=$((step + steps / 4))
        if [[ $leg == cpu ]]; then leg="cpu --bf16"; else leg="--gpus $leg"; fi
        parts+=("$leg --train-iters $step")
    done
    if [[ -n ${LLM8_BIN:-} ]]; then
        train other $options --gpus $most --train-iters $steps --micro-batch-size 4 &&
            noise_is straight other || return
    fi
    ends_as straight near "$options" "${parts[@]}"
}
for kind in "${crossing[@]}"; do check "${legs[*]} ranks: $kind" resumed_elsewhere $kind; done

# Evaluations, samples, saves and checks between the steps leave no trace, nor do a stop and a resumption
# among them.
interrupted() { # options
    local options="$run $* --gpus 2 --lr-decay-iters $end"
    local meanwhile="--eval-interval 3 --eval-iters 2 --sample-interval 4 --sample-length 20 --check-interval 2"
    train many $options --train-iters $end --eval-interval 100 &&
        ends_as many same_end "$options $meanwhile --save-interval 5" "--train-iters $((end / 2 + 1))" \
            "--train-iters $end" &&
        [[ $(grep -c '"kind":"eval"' parts/metrics.jsonl) -ge $((end / 3)) ]] || return
    train planted $options --train-iters $end --lr 3.0001e-4 && ! same_end many planted
}
for kind in "${between[@]}"; do check "evaluations, samples, saves between: $kind" interrupted $kind; done

if [[ -z ${LLM8_BIN:-} ]]; then
    gradients_add_up() {
        local ranks
        for ranks in 1 2 3; do
            $gpu $run --gpus $ranks --dump-gradients $ranks.st || return
        done
        $gpu $run --micro-batch-size 1 --dump-gradients half.st &&
            $gpu $run --seed 2 --dump-gradients other.st && "$COMPARE" 2.st 1.st half.st 8 &&
            "$COMPARE" 3.st 1.st half.st 8 && ! "$COMPARE" other.st 1.st half.st 8
    }
    check "gradients add up" gradients_add_up
    # llama-tiny: in each of 2 blocks q, o; k, v; gate, up, down of 64 channels, 32 and 192.
    plan_says_what_muon_costs() {
        local flops
        flops=$(awk 'BEGIN { q = 6 * 64 ^ 3; k = 4 * 32 ^ 2 * 64 + 2 * 32 ^ 3; f = 14 * 64 ^ 3
            printf "%.3g", 1e-12 * 2 * 5 * (2 * q + 2 * k + 3 * f) }')
        $gpu $run --plan --gpus 3 $muon >plan && has plan "matrices      14, $flops TFLOP a step, " &&
            has plan '  exchanged     at most ' && has plan 'matrices in BF16' &&
            $gpu $run --plan --gpus 3 >plan && has plan 'second moment' &&
            ! grep -E 'TFLOP|matrices in BF16' plan
    }
    check "the plan says what Muon costs" plan_says_what_muon_costs
    sanitized() { # options
        local options="$run $* --gpus 2 --eval-interval 2 --sample-interval 2 --sample-length 9"
        local program="$root/build/asan/standin_trainer --no-cuda-graphs --save s"
        rm -rf s
        $program $options --train-iters 2 &&
            $program $options --train-iters 3 --resume latest --profile
    }
    for kind in "${as_one[@]:2:4}"; do check "sanitized: $kind" sanitized $kind; done
    summary
    exit
fi

variant() { # options: the same bits as the run "many"
    train variant "$@" && same_end many variant
}
for kind in "$llama" "$gpt2 $hybrid --fp8-lm-head" "$llama $hybrid $tensorwise --grad-accum-dtype fp32"; do
    options="$run $kind --train-iters 20 --gpus $most"
    check "$kind" train many $options
    check "  repeated" variant $options
    check "  --no-cuda-graphs" variant $options --no-cuda-graphs
    check "  --recompute block" variant $options --recompute block
done

stopped_rank_is_named() {
    "$BIN/train_gptcu" $run $llama --gpus 2 --train-iters 100000 --save stopped --save-interval 1000000 \
        --distributed-timeout 5 >out 2>err &
    local parent=$! begin=$SECONDS status=0
    until grep -q '^step .* 20/' out; do
        sleep 0.1
        [[ $((SECONDS - begin)) -lt 60 ]] || return 1
    done
    pkill -STOP -n -P $parent
    begin=$SECONDS
    wait $parent || status=$?
    cat err
    [[ $status -eq 4 && $((SECONDS - begin)) -le 10 ]] && grep -q "rank 1 .*silent for" err
}
check "a stopped rank ends the run" stopped_rank_is_named

# A run of which random ranks are killed at random moments ends as one that was left alone: at the
# start, and while it trains.
killed_and_resumed() { # kills, options
    local kills=$1 hit=0 parent status ranks
    shift
    rm -rf killed
    train alone "$@" || return 1
    while true; do
        status=0
        "$BIN/train_gptcu" "$@" --save killed --resume latest >out 2>&1 &
        parent=$!
        if [[ $hit -lt $kills ]]; then
            until [[ $((RANDOM % 100)) -eq 0 ]] || grep -q '^step ' out; do sleep 0.1; done
            sleep "$((RANDOM % 2)).$((RANDOM % 10))"
            mapfile -t ranks < <(pgrep -P $parent)
            if [[ ${#ranks[@]} -gt 0 ]]; then
                kill -9 "${ranks[RANDOM % ${#ranks[@]}]}" 2>/dev/null
            fi
        fi
        wait $parent || status=$?
        case $status in
        0)
            cmp alone/latest/model.safetensors killed/latest/model.safetensors || return 1
            if [[ $hit -ge $kills ]]; then break; fi
            rm -rf killed
            ;;
        137) hit=$((hit + 1)) ;;
        *)
            tail -n 5 out
            return 1
            ;;
        esac
    done
    echo "$hit kills"
}
check "killed ranks, resumed" killed_and_resumed "${KILLS:-2}" $run $llama $hybrid \
    --save-interval 50 --train-iters 3000 --gpus 2 --micro-batch-size 8
summary
