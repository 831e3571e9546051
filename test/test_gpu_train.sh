#!/usr/bin/env bash
# shellcheck disable=SC2046,SC2086 # options are words on purpose
# Whole models by the GPU trainer, on the GPU or over the stand-ins: runs that must repeat, resume, and
# give the same bits with recomputation, chunked heads and graphs; the rest of a trainer. Prints
# "N passed, N failed, N skipped" last.
# shellcheck source=test/gpu_runs.sh
source "$(dirname "$0")/gpu_runs.sh"
sanitized=$root/build/asan/standin_trainer

# As large as the GPU needs, as small as the stand-ins need.
if [[ -n ${LLM8_BIN:-} ]]; then
    small_change=0.1
    steps=12 stop=6 run="$DATA --micro-batch-size 4 --lr 1e-3"
    llama="--model llama-tiny --num-layers 3 --hidden-size 128 --num-attention-heads 4
        --num-query-groups 2 --global-batch-size 8"
    qwen="--model llama-tiny --num-layers 3 --hidden-size 128 --kv-channels 48 $qwen3
        --global-batch-size 8"
    gpt2="--model gpt2-tiny --num-layers 3"
    large="--model llama-3-8b --micro-batch-size 32"
else
    small_change=0.01
    steps=4 stop=2 run="$DATA --micro-batch-size 2 --lr 1e-3 --lr-warmup-iters 2 --weight-decay 20"
    llama="$untied --num-layers 3 --global-batch-size 4"
    qwen="$llama --kv-channels 24 $qwen3"
    large="--model gpt2-124m --micro-batch-size 256"
fi
run="$run --lr-decay-iters $steps"

# ---- the same bits ----
states=("" "--adam-dtype bf16 --grad-accum-dtype bf16" "--fp8-format hybrid"
    "--fp8-format hybrid --fp8-recipe tensorwise"
    "--fp8-format e4m3 --fp8-recipe tensorwise --fp8-lm-head --first-last-layers-bf16"
    "--fp8-format hybrid --fp8-lm-head --fp8-amax-history-len 2 $documents"
    "--fp8-format hybrid --fp8-lm-head --first-last-layers-bf16"
    "--fp8-format hybrid --no-fp8-wgrad"
    "--optimizer muon --adam-dtype bf16 --fp8-format hybrid --fp8-recipe tensorwise $rates"
    "--adam-dtype 8bit --grad-accum-dtype bf16 --fp8-format hybrid --fp8-lm-head"
    "--optimizer muon --adam-dtype 8bit --fp8-format e4m3 --fp8-recipe blockwise $rates")
evaluates="--train-iters $steps --eval-interval 2"
leaves_no_trace="--recompute block --eval-precision bf16 --fp8-stats-interval 2 --check-interval 1"
whole() { # options: the run "whole"
    train whole "$@" $evaluates
}
variant() { # options: the same bits as the run "whole"
    train variant "$@" $evaluates && same_end whole variant
}
resumed() { # options
    ends_as whole same_run "$* $evaluates" "--train-iters $stop" ""
}
offloaded() { # options: begun with state in host memory, resumed without, and the other way
    local moved stops="--train-iters $stop"
    moved=$(offload whole)
    ends_as whole same_run "$* $evaluates" "$stops $moved" "" >out && is_offloaded_once &&
        ends_as whole same_run "$* $evaluates" "$stops" "$moved" >out && is_offloaded_once
}
is_offloaded_once() {
    [[ $(is_offloaded out | wc -l) -eq 1 ]]
}
seen_as_another() { # options
    train variant "$@" --train-iters $steps --lr 1.00001e-3 && ! same_end whole variant
}
for model in "$llama" "$gpt2" "$qwen"; do
    for state in "${states[@]}"; do
        name="${state:-BF16}, ${model:8:5}" options="$run $model $state"
        if [[ $model == "$qwen" ]]; then
            if [[ -n ${state%"--fp8-format hybrid"} && $state != *history-len* ]]; then continue; fi
            name+=", QK norm"
        fi
        # how moments are kept does not depend on the model
        if [[ $model == "$gpt2" && $state == *--adam-dtype* && $state != *blockwise* ]]; then continue; fi
        check "$name" whole $options
        # a checkpoint has the state, and it is moved, whatever the model
        if [[ $model == "$llama" || -z $state ]]; then
            check "$name, resumed" resumed $options
            check "$name, offloaded" offloaded $options
        fi
        check "$name, recompute, BF16 evaluations, counts, checks" variant $options $leaves_no_trace
        if [[ $model == "$gpt2" ]]; then continue; fi
        check "$name, recompute activations" variant $options --recompute activations
        if [[ $model != "$llama" ]]; then continue; fi
        if [[ -z $graphs ]]; then check "$name, no graphs" variant $options --no-cuda-graphs; fi
    done
    check "a learning rate 1e-5 larger is seen, ${model:8:5}" seen_as_another $options
done

# ---- checkpoints and precisions that change ----
# Each trainer resumes from the other's checkpoint as from its own, with or without FP8 on either
# side: that changes the losses little.
crosses() { # FP8 options before and after
    local n=$((3 * stop)) options after="--fp8-format none --fp8-recipe delayed $2"
    options="$run $llama --lr 3e-4 --lr-decay-iters $((3 * stop))"
    train plain $options --train-iters $n && ends_as plain little_apart "$options" \
        "$1 --train-iters $stop" "cpu --bf16 $after --train-iters $((2 * stop))" "$after --train-iters $n"
}
little_apart() { # folders
    echo "losses at most $(apart "$1" "$2") apart"
    awk "BEGIN { exit !($(apart "$1" "$2") < $small_change) }"
}
fp8="--fp8-format hybrid --fp8-amax-history-len 2"
for first in "" "$fp8" "--fp8-format hybrid --fp8-recipe tensorwise"; do
    for second in "" "$fp8"; do
        check "checkpoints cross, ${first:-BF16} to ${second:-BF16}" crosses "$first" "$second"
    done
done

# ---- the rest of a trainer ----
measures_its_memory() { # at least what was planned; over the stand-ins, which count theirs, little more
    local planned used
    train variant $run $llama --train-iters 3 || return
    planned=$(number_in run memory_bytes variant) used=$(number_in end memory_used_bytes variant)
    echo "$planned planned, ${used:-nothing} in use"
    [[ -n $used && $used -ge $planned ]] &&
        [[ -n ${LLM8_BIN:-} || $used -le $((planned + planned / 8)) ]]
}
check "the memory in use is measured" measures_its_memory

counts_and_profiles() { # recomputation and checks count nothing twice
    local options="$run $llama --fp8-format hybrid --train-iters 4 --fp8-stats-interval 2"
    rm -rf cpu
    $cpu $options --save cpu && train again $options --recompute block --check-interval 2 &&
        train variant $options --profile >out 2>&1 || return
    cat out
    grep -q 'profile of a step' out && [[ $(grep -c '"kind":"fp8"' variant/metrics.jsonl) -eq 2 ]] &&
        diff <(fp8_elements cpu) <(fp8_elements variant) &&
        diff <(grep '"kind":"fp8"' again/metrics.jsonl) <(grep '"kind":"fp8"' variant/metrics.jsonl)
}
check "counts and a profile" counts_and_profiles
fp8="--fp8-format hybrid --fp8-lm-head"
fallen_back() {
    local said="FP8 is not available: $1; the run continues in BF16"
    shift
    train plain $run $gpt2 --train-iters 3 &&
        train variant $run $gpt2 "$@" --train-iters 3 >out 2>&1 || return
    cat out
    [[ $(grep -c "$said" out) -eq 1 ]] && same_end plain variant
}
older="compute capability 8.0 is below 8.9"
LLM8_TEST_CAPABILITY=80 check "without FP8 on the device: one warning, then BF16" fallen_back "$older" $fp8
refused() { # what is said, options
    local said=$1
    shift
    ! $gpu "$@" >out 2>&1
    cat out
    grep -q "error: .*$said" out
}
required() {
    LLM8_TEST_CAPABILITY=80 refused "--fp8-required: FP8 is not available: $older" $run $gpt2 $fp8 --fp8-required
}
check "--fp8-required refuses instead" required
too_small() {
    local LLM8_TEST_SMALL_FP8=0 model
    for model in "$llama" "$gpt2"; do
        train plain $run $model --train-iters 6 &&
            train variant $run $model $fp8 --train-iters 6 >out 2>&1 || return
        cat out
        grep "too small to gain" out && same_end plain variant || return
    done
    grep 'warning: no linear layer is in FP8' out &&
        refused "--fp8-required: no linear layer" $run $gpt2 $fp8 --fp8-required
}
check "layers too small to gain stay in BF16" too_small
first_loss() {
    losses "$1" | head -n 1 | sed 's/.*"loss":\([^,]*\),.*/\1/'
}
head_in_chunks() { # options
    train whole $run "$@" --train-iters 1 &&
        LLM8_TEST_HEAD_ROWS=20 train variant $run "$@" --train-iters 1 || return
    [[ -n $(first_loss whole) && $(first_loss whole) == "$(first_loss variant)" ]]
}
for model in "$llama" "$qwen" "$qwen $fp8"; do
    check "the LM head in chunks: the same loss, ${model:(-14)}" head_in_chunks $model
done
too_large() {
    refused "of device memory, .* are free: --plan lists what fits" $large --data d/x_train.bin --vocab-size 257 &&
        refused "lists what fits, such as --micro-batch-size [1-9][0-9]*$" --model gpt2-124m \
            --micro-batch-size 2048 --data d/x_train.bin --vocab-size 257
}
check "a run too large is refused" too_large
# A deterministic backward pass takes memory with the square of the length: --plan says what fits
# without.
long="--model llama-tiny --data d/x_train.bin --seq-length 65536 --max-position-embeddings 65536"
order_costs_memory() {
    $gpu $long --plan --device-memory-gib 8 >out &&
        [[ $(grep -cE 'no micro-batch; [1-9][0-9]* with --no-deterministic' out) -eq 18 ]] &&
        $gpu $long --plan --device-memory-gib 8 --no-deterministic >out &&
        [[ $(grep -cE ' --micro-batch-size [1-9][0-9]*(; .* of host memory)?$' out) -eq 18 &&
            $(grep -c 'offload .* of host memory$' out) -eq 9 ]]
}
check "the plan says what the order of sums costs" order_costs_memory
plans_shorter_sequences() {
    local sample="$long --sample-only --device-memory-gib"
    $gpu $long --plan --device-memory-gib 2 >out &&
        grep '^  --micro-batch-size 1 --seq-length [1-9][0-9]*, and' out || return
    refused 'lists what fits, such as --seq-length 8192$' $sample 2 && $gpu $sample 2 --plan >out &&
        [[ $(sed -n '/^What fits/,$p' out | tail -n +2) == "  --seq-length 8192, and the other options as they are" ]] &&
        $gpu $sample 1 --plan >out && [[ $(tail -n 1 out) == "  no sequence length" ]]
}
check "the plan names a length that fits" plans_shorter_sequences
notes_in_a_plan() {
    $gpu $long --plan --fp8-margin 1 >out && grep 'note: --fp8-margin has no effect without --fp8-format' out
}
check "the plan says what has no effect" notes_in_a_plan
# Several micro-batches add to gradients in FP32. What fits counts these for each listed size, which
# is not the run's own. 840 has so many divisors that some of the listed sizes differ.
counts_wide_gradients() {
    fits() {
        $gpu --model gpt2-124m --data d/x_train.bin --global-batch-size 840 --device-memory-gib 8 \
            --plan --micro-batch-size "$@" | sed -n '/^What fits/,$p'
    }
    [[ -n $(fits 840) && $(fits 840) == "$(fits 840 --grad-accum-dtype fp32)" &&
        $(fits 840) == "$(fits 1)" && $(fits 840) != "$(fits 840 --grad-accum-dtype bf16)" ]]
}
check "what fits counts the gradients of several micro-batches" counts_wide_gradients
# The run would refuse any other size. If no global batch is given, any micro-batch is one.
lists_whole_batches() {
    local options="--model gpt2-124m --data d/x_train.bin --micro-batch-size 1 --device-memory-gib 8 --plan" size
    fitting() { sed -n '/^What fits/,$p' out | grep -oP 'micro-batch-size \K[0-9]+'; }
    $gpu $options --global-batch-size 510 >out && fitting >sizes && [[ $(wc -l <sizes) -eq 18 ]] || return
    while read -r size; do [[ $((510 % size)) -eq 0 ]] || return; done <sizes
    $gpu $options >out && fitting >any && ! cmp sizes any
}
check "what fits divides the global batch" lists_whole_batches
# What checkpoints take of the host's memory, of all ranks together: 14 bytes a parameter, 10 with
# BF16 moments, 8 with moments in 8 bits.
host_memory() {
    local options="$run --model gpt2-tiny --train-iters 1 --save host"
    mkdir -p root/proc && echo "MemAvailable: 1300 kB" >root/proc/meminfo
    export LLM8_TEST_ROOT=root
    refused 'needs 1.7. MiB of host memory.* 1.27 MiB are .*: try --adam-dtype 8bit' \
        $options &&
        { [[ -n ${LLM8_BIN:-} ]] || refused 'rank 0: the run needs 1.7' $options --gpus 2; } &&
        [[ ! -e host ]] &&
        $gpu $options --adam-dtype bf16 --plan >out && grep -A 2 '^Host memory' out &&
        $gpu $options --adam-dtype 8bit && $gpu ${options% --save*} &&
        echo "MemAvailable: 900 kB" >root/proc/meminfo &&
        refused 'try a machine with more memory' $options --adam-dtype 8bit &&
        ! $cpu $options >out 2>&1 && grep 'error: out of memory: the plan needs .*, 900.00 KiB are' out
}
check "host memory" host_memory
unset LLM8_TEST_ROOT
# What the kernels refuse, the plan does: sizes, and micro-batches of more values than they count.
plans_what_kernels_take() {
    local small="--num-layers 1 --seq-length 1024 --vocab-size 257 --plan" llama=--arch\ llama
    refused '--hidden-size 8256' $small --hidden-size 8256 --num-attention-heads 129 &&
        refused 'heads of up to 256' $small --hidden-size 1024 --num-attention-heads 2 &&
        refused 'multiples of 8' $small --hidden-size 100 --num-attention-heads 10 &&
        refused 'a smaller --micro-batch-size' $small --hidden-size 8192 --num-attention-heads 64 \
            --micro-batch-size 300 &&
        $gpu $small --hidden-size 8192 --num-attention-heads 64 --device-memory-gib 1e6 >out &&
        [[ $(grep -cE ' --micro-batch-size 255(; .* of host memory)?$' out) -eq 18 ]] && # x 1024 x 4 * 8192: below 2^33
        $gpu $small $llama --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 64 \
            --device-memory-gib 1e6 >out && # x 1024 x 3 * 8192: below 2^32
        [[ $(grep -cE ' --micro-batch-size 170(; .* of host memory)?$' out) -eq 18 ]]
}
check "the plan takes what kernels take" plans_what_kernels_take

# ---- what the stand-ins alone can do ----
if [[ -n ${LLM8_BIN:-} ]]; then
    summary
    exit
fi
# A kernel that leaves its scratch (STANDIN_OVERRUN: column sums, by a row) ends the run.
overruns_are_named() {
    STANDIN_OVERRUN=1 refused "LLM8_GUARD: buffer 'partial sums' (scratch" $run $gpt2 --train-iters 2 &&
        ! grep 'step     1/2' out && # it is not reported
        LLM8_GUARD=0 STANDIN_OVERRUN=1 $gpu $run $gpt2 --train-iters 2 &&
        $gpu $run $gpt2 --train-iters 2
}
check "overruns are named" overruns_are_named
another_run_is_seen() { # by what judges checkpoints that cross
    train plain $run $llama --train-iters 6 &&
        train variant $run $llama --train-iters 6 --seed 2 || return
    awk "BEGIN { exit !($(apart plain variant) > $small_change) }"
}
check "another run is no small change" another_run_is_seen
without_a_driver() {
    ! STANDIN_DRIVER=0 $trainer --verify >out && grep 'driver .* BAD  there is none; the program' out
}
check "no driver is said" without_a_driver
older_devices() {
    STANDIN_CAPABILITY=86 refused "--fp8-required" $run $gpt2 $fp8 --fp8-required &&
        STANDIN_CAPABILITY=75 refused 'BF16 training needs 8.0' $run $gpt2
}
check "older devices" older_devices
# Ada (8.9) and Blackwell (10.0) have FP8 matmuls by tensors alone.
no_blocks="no matmuls by blocks; try --fp8-recipe delayed" by_blocks="$fp8 --fp8-recipe blockwise"
other_devices() { # capability
    local STANDIN_CAPABILITY=90
    export STANDIN_CAPABILITY
    train whole $run $gpt2 $fp8 --train-iters 3 && STANDIN_CAPABILITY=$1 &&
        train variant $run $gpt2 $fp8 --fp8-required --train-iters 3 && same_end whole variant &&
        refused "--fp8-required: FP8 is not available: $no_blocks" $run $gpt2 $by_blocks --fp8-required &&
        grep 'the forward matmul of E4M3 and E4M3 by blocks: cuBLASLt has no algorithm' out &&
        fallen_back "$no_blocks" $by_blocks
}
for capability in 89 100; do check "a device of capability $capability" other_devices $capability; done
for fault in none wrong; do
    STANDIN_FP8=$fault check "FP8 matmuls: $fault" fallen_back "the FP8 self-check failed" $fp8
    STANDIN_FP8=$fault check "FP8 matmuls by blocks: $fault" fallen_back "$no_blocks" $by_blocks
done
# Which matmuls are our own (train/gpu/network.c): those that apply GELU or SwiGLU, in training
# steps whose scales are given; the head's, where the loss has no cap; Llama's QKV, where heads have
# no norm and no bias, and fit; and no other. The numbers must equal those of a device without such
# matmuls.
own_losses() { # kind of such matmuls, options
    rm -f m.jsonl
    STANDIN_OWN_MATMULS=$1 $gpu $DATA --micro-batch-size 2 \
        --seq-length 32 --train-iters 4 --eval-iters 2 --eval-interval 2 --metrics m.jsonl \
        "${@:2}" >out && grep -oE '"(loss|valid_loss|norm)":[^,}]*' m.jsonl
}
takes_own() { # options
    local without
    without=$(own_losses none "$@") && [[ $(own_losses good "$@") == "$without" ]] &&
        [[ $(own_losses wrong "$@") != "$without" ]]
}
leaves_own() { # options
    local without
    without=$(own_losses none "$@") && [[ $(own_losses wrong "$@") == "$without" ]]
}
hybrid="--model gpt2-tiny --fp8-format hybrid" llama8="--model llama-tiny --fp8-format hybrid"
head="$hybrid --fp8-recipe tensorwise --fp8-lm-head" # the head's alone
gated="$llama8 --qk-layernorm"                       # SwiGLU's alone
rotary="$llama8 --fp8-recipe tensorwise"             # QKV's alone
for kind in "$hybrid" "$hybrid --fp8-format e4m3 --gpus 2" "$hybrid --recompute activations" \
    "$hybrid --recompute block" "$hybrid --global-batch-size 4" \
    "$hybrid --fp8-stats-interval 1" "$gated" "$gated --recompute activations --gpus 2" \
    "$gated --recompute block --global-batch-size 4" "$gated --fp8-stats-interval 1" \
    "$head" "$head --z-loss-coeff 0.01 --global-batch-size 4" "$head --fp8-stats-interval 1" \
    "$hybrid --fp8-lm-head --gpus 2" "$gated --fp8-lm-head --fp8-format e4m3" \
    "$rotary" "$rotary --recompute block --global-batch-size 4" "$rotary --no-fp8-wgrad" \
    "$rotary --kv-channels 32 --fp8-stats-interval 1" "$rotary --recompute activations --gpus 2" \
    "$llama8 --recompute block" "$llama8 --fp8-lm-head --fp8-format e4m3"; do
    check "own matmuls, $kind" takes_own $kind
done
counting_leaves_no_trace() { # though counts are those of cuBLASLt's matmuls
    [[ $(own_losses wrong $hybrid) == "$(own_losses wrong $hybrid --fp8-stats-interval 2)" ]]
}
check "counting leaves no trace" counting_leaves_no_trace
own_losses none $hybrid --save gelu >log # for evaluations
own_losses none $rotary --save rope >log
for kind in "--model gpt2-tiny" "$gated --fp8-fast-accumulation none" "$gated --no-fp8-wgrad" \
    "$hybrid --fp8-recipe tensorwise" "$hybrid --fp8-format e5m2" \
    "--model llama-tiny --fp8-format e4m3 --fp8-recipe blockwise" \
    "--model gpt2-tiny --fp8-format e5m2 --fp8-recipe blockwise" \
    "$head --logit-softcap 5" "$head --fp8-fast-accumulation none" "$head --no-fp8-wgrad" \
    "$head --fp8-format e5m2" "$hybrid --fp8-lm-head --fp8-format e4m3 --fp8-recipe blockwise" \
    "$rotary --qk-layernorm" "$rotary --add-qkv-bias" "$rotary --kv-channels 192" \
    "$rotary --fp8-fast-accumulation none" "$rotary --fp8-format e5m2" \
    "$hybrid --save gelu --resume latest --eval-only" \
    "$rotary --save rope --resume latest --eval-only"; do
    check "no own matmuls, $kind" leaves_own $kind
done
# An update waits for the save that still reads its state in host memory: SLOW_SAVE is in seconds.
saves_what_is_there() {
    local options="$run $llama --train-iters 3 --save-interval 1" step
    train whole $options && SLOW_SAVE=0.3 train variant $options $(offload whole) >out || return
    grep -c 'the update waited 0\.[1-9] s for the save' out || return
    for step in 1 2 3; do same_checkpoint {whole,variant}/step_0000000$step || return; done
}
check "a save is of one step" saves_what_is_there
# Under AddressSanitizer and UBSan, with leaks.
sanitized_runs() { # options
    local trainer=$sanitized options="$run $llama $* --global-batch-size 4"
    train s $options --train-iters 3 --eval-interval 2 --recompute block --fp8-stats-interval 2 \
        --sample-interval 3 --sample-length 20 --save-interval 2 &&
        train_more s $options --train-iters 4 --resume latest $(offload s)
}
for state in "${states[@]:1:2}" "${states[4]}" "$qwen --fp8-format hybrid --fp8-lm-head" \
    "--add-qkv-bias --fp8-format hybrid"; do
    check "sanitized, $state" sanitized_runs $state
done
sanitized_profile() {
    $sanitized $graphs $run $gpt2 --train-iters 3 --profile
}
check "sanitized, profile" sanitized_profile
summary
