#!/usr/bin/env bash
# shellcheck disable=SC2086,SC2317 # options are words on purpose; check calls functions
# Training on several GPUs: the same as on one with accumulation, however weights travel, through
# checkpoints of other numbers of ranks, and through kills. Takes 2 GPUs, or 4 where there are as
# many. KILLS=20: so many random ranks are killed. Prints "N passed, N failed, N skipped" last.
# shellcheck source=test/gpu_runs.sh
source "$(dirname "$0")/gpu_runs.sh"
gpus=$(nvidia-smi -L | grep -c '^GPU')
if [[ $gpus -lt 2 ]]; then skip_all "one GPU"; fi
most=$((gpus < 4 ? 2 : 4))
RANDOM=5 # the delays below repeat, as far as delays can
COMMON="$DATA --global-batch-size 16 --train-iters 100 --lr 3e-4 --lr-warmup-iters 5
    --save-interval 50 --distributed-timeout 60"
LLAMA="--model llama-tiny --num-layers 3 --hidden-size 128 --num-attention-heads 4
    --num-query-groups 2 $COMMON"
GPT="--model gpt2-tiny --num-layers 3 $COMMON"

# How far an order of sums can take a run is measured: one rank with another micro-batch. So many
# times that is allowed. Another seed is seen as another run.
follows_one_rank() { # factor, options
    local factor=$1 noise
    shift
    train one "$@" --micro-batch-size 4 && train other "$@" --micro-batch-size 8 &&
        train many "$@" --micro-batch-size $((16 / most)) --gpus $most &&
        train seed "$@" --micro-batch-size $((16 / most)) --gpus $most --seed 5 || return 1
    noise=$(apart one other)
    echo "losses apart by $(apart one many); by another micro-batch: $noise; another seed:" \
        "$(apart one seed)"
    awk "BEGIN {exit !($(apart one many) <= $factor * $noise && $noise > 0 && $noise < 0.05 &&
        $(apart one seed) > $factor * $noise)}"
}
check "BF16, Llama: as one rank" follows_one_rank 3 $LLAMA
check "BF16, GPT-2: as one rank" follows_one_rank 3 $GPT
check "FP32 sums: as one rank" follows_one_rank 3 $LLAMA --grad-accum-dtype fp32
check "FP8: as one rank" follows_one_rank 3 $LLAMA --fp8-format hybrid
check "FP8 tensorwise with head: as one rank" follows_one_rank 3 $GPT --fp8-format hybrid \
    --fp8-recipe tensorwise --fp8-lm-head
check "Muon: as one rank" follows_one_rank 3 $LLAMA --optimizer muon
check "Muon, FP8: as one rank" follows_one_rank 3 $GPT --optimizer muon --fp8-format hybrid

variant() { # options: the same bits as the run "many"
    train variant "$@" && same_end many variant
}
for options in "$LLAMA" "$GPT --fp8-format hybrid --fp8-lm-head" \
    "$LLAMA --fp8-format hybrid --fp8-recipe tensorwise --grad-accum-dtype fp32"; do
    options+=" --train-iters 20 --save-interval 20 --gpus $most --micro-batch-size 2"
    name="${options:8:10} ${options##*--save-interval 50 --distributed-timeout 60}"
    check "$name" train many $options
    check "  repeated" variant $options
    check "  --no-cuda-graphs" variant $options --no-cuda-graphs
    check "  --recompute block" variant $options --recompute block
done

resumed_elsewhere() { # through checkpoints of other numbers of ranks
    local step=0 ranks
    rm -rf parts
    train straight "$@" --gpus $most --micro-batch-size 2 || return 1
    for ranks in $most 2 1 $most; do
        step=$((step + 25))
        "$BIN/train_gptcu" --save parts "$@" --micro-batch-size 2 --gpus $ranks --resume latest \
            --train-iters $step --lr-decay-iters 100 || return 1
    done
    train other "$@" --gpus $most --micro-batch-size 4 || return 1
    echo "apart by $(apart straight parts); another micro-batch: $(apart straight other)"
    awk "BEGIN {exit !($(apart straight parts) <= 3 * $(apart straight other))}"
}
check "$most to 2 to 1 to $most ranks" resumed_elsewhere $LLAMA
check "$most to 2 to 1 to $most ranks, FP8" resumed_elsewhere $LLAMA --fp8-format hybrid
check "$most to 2 to 1 to $most ranks, Muon" resumed_elsewhere $LLAMA --optimizer muon
resumed_exactly() {
    local options="$* --gpus $most --micro-batch-size 2 --lr-decay-iters 20 --save-interval 10"
    train many $options --train-iters 20 && train variant $options --train-iters 10 &&
        "$BIN/train_gptcu" --save variant $options --train-iters 20 --resume latest &&
        same_end many variant
}
check "resume equals straight" resumed_exactly $LLAMA --fp8-format hybrid
check "resume equals straight, tensorwise" resumed_exactly $GPT --fp8-format hybrid \
    --fp8-recipe tensorwise

# Evaluations, samples and saves between the steps leave no trace, nor do a stop and a resumption
# among them; with tuned products, by the same choices, too.
interrupted() {
    local options="$* --gpus 2 --micro-batch-size 2 --lr-decay-iters 20 --gemm-autotune"
    local between="--eval-interval 3 --eval-iters 2 --sample-interval 4 --sample-length 20"
    again() { # into a folder with the first run's choices
        rm -rf "$1" && mkdir "$1" && cp many/gemm_choices.bin "$1" &&
            "$BIN/train_gptcu" --save "$@"
    }
    train many $options --train-iters 20 --save-interval 100 --eval-interval 100 &&
        again variant $options $between --train-iters 11 --save-interval 5 &&
        "$BIN/train_gptcu" --save variant $options $between --train-iters 20 --save-interval 5 \
            --resume latest && [[ $(grep -c '"kind":"eval"' variant/metrics.jsonl) -ge 6 ]] &&
        same_end many variant || return 1
    again planted $options --train-iters 20 --save-interval 100 --lr 3.0001e-4 || return 1
    ! same_end many planted
}
check "evaluations, samples, saves between" interrupted $LLAMA
check "evaluations, samples, saves between, Muon" interrupted $LLAMA --optimizer muon \
    --fp8-format hybrid
check "evaluations, samples, saves between, FP8" interrupted $LLAMA --fp8-format hybrid
check "evaluations, samples, saves between, tensorwise" interrupted $GPT --fp8-format hybrid \
    --fp8-recipe tensorwise --fp8-lm-head

stopped_rank_is_named() {
    "$BIN/train_gptcu" $LLAMA --gpus 2 --train-iters 100000 --save stopped --save-interval 1000000 \
        --distributed-timeout 5 >out 2>err &
    local starter=$! begin=$SECONDS status=0
    until grep -q '^step .* 20/' out; do
        sleep 0.1
        [[ $((SECONDS - begin)) -lt 60 ]] || return 1
    done
    pkill -STOP -n -P $starter
    begin=$SECONDS
    wait $starter || status=$?
    cat err
    [[ $status -eq 4 && $((SECONDS - begin)) -le 10 ]] && grep -q "rank 1 .*silent for" err
}
check "a stopped rank ends the run" stopped_rank_is_named

# A run of which random ranks are killed at random moments ends as one that was left alone: at the
# start, and while it trains.
killed_and_resumed() { # kills, options
    local kills=$1 hit=0 starter status ranks
    shift
    rm -rf killed
    train alone "$@" || return 1
    while true; do
        status=0
        "$BIN/train_gptcu" "$@" --save killed --resume latest >out 2>&1 &
        starter=$!
        if [[ $hit -lt $kills ]]; then
            until [[ $((RANDOM % 100)) -eq 0 ]] || grep -q '^step ' out; do sleep 0.1; done
            sleep "$((RANDOM % 2)).$((RANDOM % 10))"
            mapfile -t ranks < <(pgrep -P $starter)
            if [[ ${#ranks[@]} -gt 0 ]]; then
                kill -9 "${ranks[RANDOM % ${#ranks[@]}]}" 2>/dev/null
            fi
        fi
        wait $starter || status=$?
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
check "killed ranks, resumed" killed_and_resumed "${KILLS:-2}" $LLAMA --fp8-format hybrid \
    --train-iters 3000 --gpus 2 --micro-batch-size 8
summary
