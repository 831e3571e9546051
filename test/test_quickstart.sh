#!/usr/bin/env bash
# scripts/quickstart.sh in a tree of links to this one, with a smaller model than its own, and with
# stand-ins for make, nvidia-smi, nvcc and the GPU trainer where there is to be a GPU.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

small=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 64
    --max-position-embeddings 64 --sample-length 60 --eval-iters 4)

# A program that runs train_gpt on a small model, with the options that FEWER has.
small_trainer() {
    printf '#!/bin/sh\n%s\nexec %s "$@" %s $FEWER\n' "$2" "$root/train_gpt" "${small[*]}" >"$1"
    chmod +x "$1"
}

prepare() {
    local file
    mkdir -p tree/scripts bin
    for file in Makefile build base kernels model ranks dataloader checkpoints train train_gpt.c \
        tokenize make_corpus; do
        ln -s "$root/$file" "tree/$file"
    done
    ln -s "$root"/scripts/*.[ch] tree/scripts
    cp "$root"/scripts/{quickstart,packages}.sh tree/scripts
    small_trainer tree/train_gpt ''
    make_text 1 30000 >"tree/my text.txt"
    head -c 7000 /dev/urandom >tree/noise
}

quickstart() {
    env "$@" tree/scripts/quickstart.sh
}

test_arguments_are_checked() {
    local steps
    head -c 6143 "tree/my text.txt" >tree/short
    for steps in 0 29 030 -1 1e3 9999999999 x; do
        check_rows <<<"1|quickstart STEPS=$steps|error: STEPS=$steps: must be a whole number from 30"
    done
    check_rows <<'ROWS'
1|quickstart DATA=no.txt|error: DATA=no.txt: no such file
1|quickstart DATA=scripts|error: DATA=scripts: not a file that can be read
1|quickstart DATA=short|error: DATA=short: 6143 bytes, too small to learn from; give at least 6144
1|quickstart GPU=1|error: GPU=1: must be yes or no
1|tree/scripts/quickstart.sh --stepts|--stepts: takes no arguments
ROWS
    [[ ! -e tree/run ]] || fail "something was written"
}

test_trains_on_a_text() {
    expect_status 0 quickstart DATA="my text.txt" STEPS=45 || return
    local losses
    says '== training: steps 1 to 30 of 45' 'resuming from run/quickstart/step_00000030' 'step    45/45 ' \
        '== what the model writes' '== done in '
    losses=$(sed -n 's/^ *\(unigram baseline\|the model\): .* \([0-9.]*\)$/\2/p' log | tr '\n' ' ')
    awk -v losses="$losses" 'BEGIN {
        exit !(split(losses, l, " ") == 2 && l[1] > l[2] && l[2] > 0)
    }' || fail "losses: $losses"
    has tree/run/quickstart/metrics.jsonl '"kind":"end","step":45,"status":0' || fail "no end"
    [[ -d tree/run/quickstart/latest/ ]] || fail "no checkpoint"
    cp log trained
}

# Every command under `Try next` except make's, with fewer steps.
test_suggestions_work() {
    local command count=0 steps
    sed '1,/^Try next/d' trained | grep '^    \./' >commands
    while IFS= read -r command; do
        steps=3
        if [[ $command == *--resume* ]]; then steps=17; fi # from step 15 on
        FEWER="--train-iters $steps" expect_status 0 bash -c "cd tree && $command"
        ! has log 'warning: ' || fail "$command: $(grep 'warning: ' log)"
        count=$((count + 1))
    done <commands
    is $count 5
    [[ -d tree/run/fp8/latest/ && -d tree/run/wide/latest/ && -d tree/run/longer/latest/ ]] ||
        fail "$(ls tree/run)"
    # in any order: the first run's folder and options stay, so that another has as many steps
    is "$(grep -c 'train-iters 45' tree/run/quickstart/config.txt)" 1
    is "$(readlink tree/run/quickstart/latest)" step_00000045
}

test_noise_is_not_learned() {
    expect_message 1 'the earlier run is now run/quickstart.1' quickstart DATA=noise STEPS=30
    has tree/run/quickstart.1/metrics.jsonl '"step":45' || fail "the earlier run is gone"
    says 'error: the validation loss is not clearly below the unigram entropy'
}

test_an_interrupted_run_goes_on() {
    rm -f log # so that what is waited for is this run's
    setsid env DATA="my text.txt" STEPS=100000 tree/scripts/quickstart.sh >log 2>&1 &
    local group=$! metrics=tree/run/quickstart/metrics.jsonl i
    for ((i = 0; i < 600; i++)); do
        if has $metrics '"kind":"step","step":3' 2>/dev/null && has log 'steps 1 to'; then break; fi
        sleep 0.1
    done
    kill -INT -- "-$group"
    wait "$group"
    says 'train_gpt --config run/quickstart/config.txt --resume latest' \
        'error: stopped; --train-iters 100000 added to that command trains to the end'
    (cd tree && $(sed -n 's/^stopped by signal.*; resume with //p' ../log) --train-iters 5) >log2 2>&1 ||
        fail "the command: $(tail -n 1 log2)"
}

# Stand-ins for what a machine with a GPU has.
make_a_gpu() {
    local real
    real=$(command -v make)
    # shellcheck disable=SC2028 # the script's own escapes
    {
        echo '#!/bin/sh'
        echo "case \"\$*\" in *train_gptcu*) echo \"\$*\" >>'$PWD/made'; exit \$GPU_BUILD ;; esac"
        echo 'if [ -n "$STOP_HERE" ]; then exit 1; fi'
        echo "exec $real \"\$@\""
    } >bin/make
    printf '#!/bin/sh\nif [ $# -gt 0 ]; then printf "9.0\\n9.0\\n"; fi\n' >bin/nvidia-smi
    printf '#!/bin/sh\n' >bin/nvcc
    chmod +x bin/*
    small_trainer tree/train_gptcu \
        'case "$*" in --verify) exit $VERIFIED ;; esac; echo "on the GPU"'
}

gpu() {
    rm -f made
    quickstart PATH="$PWD/bin:$PATH" NVCC=nvcc GPU_BUILD=0 VERIFIED=0 DATA="my text.txt" \
        STEPS=30 "$@"
}

test_a_gpu_is_used() {
    make_a_gpu
    expect_status 0 gpu || return
    has made 'train_gptcu' || fail "made: $(cat made)"
    is "$(grep -c '^on the GPU' log)" 2
    says './train_gptcu --config run/quickstart/config.txt --save run/fp8'
    expect_status 1 gpu GPU=no STOP_HERE=1 # which ends before the training
    [[ ! -e made ]] || fail "GPU=no: $(cat made)"
}

test_a_gpu_that_fails_is_not_used() {
    expect_message 1 'warning: no GPU trainer: it could not be built' gpu GPU_BUILD=1 STOP_HERE=1
    expect_message 1 'warning: no GPU trainer: --verify failed' gpu VERIFIED=1 STOP_HERE=1
    expect_message 1 'a GPU, but no nvcc under no-nvcc' gpu NVCC=no-nvcc STOP_HERE=1
    [[ ! -e made ]] || fail "made: $(cat made)"
    printf '#!/bin/sh\nexit 9\n' >bin/nvidia-smi
    expect_status 1 gpu STOP_HERE=1
    [[ ! -e made ]] || fail "without a driver: $(cat made)"
}

run_tests
