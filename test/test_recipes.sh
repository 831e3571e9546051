#!/usr/bin/env bash
# The training recipes: each runs, small and on the CPU; what they would start on GPUs.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
recipes=(gpt2_124m gpt2_1558m llama_1b llama3_8b llama3_8b_finetune)
export DATA=$PWD/data

recipe() {
    "$root/scripts/run_$1.sh" "${@:2}"
}

# $1 recipe, $2 precision as the run's start names it
runs() {
    OUT=$PWD/$1.$2 SMOKE=1 PRECISION=${2,,} expect_message 0 " parameters, $2, " recipe "$1" || return
    says "sample after step 3:" 'eval after step 6 | valid loss '
    is "$(grep -cE '^step +[0-9]+/6 ' log)" 6
    [[ -e $1.$2/step_00000006/model.safetensors ]] || fail "$1: no checkpoint"
}

test_each_recipe_runs_small() {
    local name
    for name in "${recipes[@]}"; do
        runs "$name" FP8
        runs "$name" BF16
    done
    [[ -e data/train_00000.bin && -e data/tokenizer.bin ]] || fail "no data"
}

# As on several nodes over one file system.
test_several_at_once_prepare_once() {
    local i pids=()
    for i in 1 2 3; do
        DATA=$PWD/once SMOKE=1 PREPARE=1 recipe gpt2_124m >log$i 2>&1 &
        pids+=($!)
    done
    for i in 1 2 3; do wait "${pids[i - 1]}" || fail "$(cat log$i)"; done
    is "$(cd once && echo *)" 'corpus.txt tokenizer.bin train_00000.bin val_00000.bin'
}

# compare splits the words of --trainer as a shell does.
test_a_folder_may_have_any_name() {
    local tree="$PWD/it's a \$tree" words split='import shlex, sys; print(*shlex.split(sys.argv[1]), sep="|")'
    mkdir "$tree" && cp -r "$root/scripts" "$tree"
    GPUS=1 PRECISION=both DRY=1 expect_status 0 "$tree/scripts/run_llama_1b.sh" || return
    eval "words=($(<log))"
    is "${words[3]}" --trainer
    is "$(python3 -c "$split" "${words[4]}")" "$tree/train_gptcu"
}

test_other_shells_run_recipes() {
    local name
    for name in "${recipes[@]}"; do
        GPUS=8 DRY=1 expect_status 0 recipe "$name" && mv log expected
        GPUS=8 DRY=1 expect_status 0 dash "$root/scripts/run_$name.sh"
        cmp log expected || fail "$name"
    done
}

test_the_check_sees_faults() {
    ! passes runs gpt2_124m FP16 || fail "a run that cannot be passes"
}

test_it_goes_on_when_it_is_called_again() {
    OUT=$PWD/again SMOKE=1 expect_status 0 recipe llama_1b --train-iters 3 || return
    OUT=$PWD/again SMOKE=1 expect_message 0 'resuming from' recipe llama_1b
    is "$(grep -oE '^step +[0-9]+' log | xargs)" 'step 4 step 5 step 6'
    OUT=$PWD/again SMOKE=1 expect_message 0 '--fp8-lm-head is false' recipe llama_1b --no-fp8-lm-head --train-iters 7
}

# From a start as scripts/convert_hf import leaves it, with a tokenizer of its own or without.
test_it_tunes_a_start() {
    START=$root/test/golden/chat OUT=$PWD/own SMOKE=1 PRECISION=fp8 expect_status 0 \
        recipe llama3_8b_finetune || fail "with a tokenizer: $(tail -n 1 log)"
    expect_status 0 train_gpt --model llama-tiny --data data/train_00000.bin --train-iters 1 \
        --micro-batch-size 1 --save base || return
    mkdir start
    cp base/latest/model.safetensors base/latest/config.json start
    START=$PWD/start OUT=$PWD/tuned SMOKE=1 expect_status 0 recipe llama3_8b || return
    says "starting from the weights of $PWD/start" '--lr 1e-05' # the options for tuning
    [[ -e tuned/step_00000006/model.safetensors ]] || fail "no checkpoint"
}

# scripts/compare runs them one after the other. With so few steps it may come to no verdict, which
# is its status 3.
test_both_precisions_are_compared() {
    local base=(train_gpt --model llama-tiny --data data/train_00000.bin --train-iters 1
        --micro-batch-size 1)
    expect_status 0 "${base[@]}" --save base2 || return
    local status=0
    START=$PWD/base2/latest OUT=$PWD/both SMOKE=1 SEEDS=1,2 PRECISION='' \
        recipe llama3_8b_finetune >log 2>&1 || status=$?
    [[ $status -eq 0 || $status -eq 3 ]] || { fail "status $status: $(tail -n 3 log)"; return; }
    [[ -e both/report.html && $(echo both/*/seed-*) == *bf16/seed-2*fp8/seed-2* ]] ||
        fail "no report: $(find both)"
    cp both/fp8/seed-1/console.log log
    says 'starting from the weights of' '--weight-decay 0'
}

# They have the same size and time, so that only their names differ.
test_other_conversations_are_not_taken_for_these() {
    local chats=(env PREPARE=1 START="$root/test/golden/chat" DATA="$PWD/chats" HF_HUB_OFFLINE=1
        "$root/scripts/run_llama3_8b_finetune.sh")
    cp "$root/scripts/chat.jsonl" one.jsonl
    cp -p one.jsonl other.jsonl
    CHAT=one.jsonl expect_status 0 "${chats[@]}" || return
    CHAT=one.jsonl expect_message 0 'chats: made already' "${chats[@]}"
    CHAT=other.jsonl expect_message 1 'already made, from other settings (other sources)' \
        "${chats[@]}"
    expect_status 0 "${chats[@]}" # without CHAT those that are there are used
}

# Data that are there are used as they are: a TOKENIZER that did not make them is not ignored silently.
test_a_tokenizer_for_data_that_are_there() {
    local theirs=$root/test/golden/chat/tokenizer.json word says='are used as they are; TOKENIZER='
    mkdir made && touch made/{train_0.bin,hellaswag.bin} && cp "$theirs" made
    printf '{\n "settings": {\n  "tokenizer": "llama3",\n  "mark": "0"\n }\n}\n' >made/manifest.json
    for word in llama3 "$theirs" "${theirs%/*}" ""; do
        DATA=made PREPARE=1 TOKENIZER=$word expect_status 0 recipe llama3_8b || return
        says '!TOKENIZER'
    done
    echo '{}' >other.json
    for word in llama2 other.json; do
        DATA=made PREPARE=1 TOKENIZER=$word expect_message 0 "made $says$word is ignored" recipe llama3_8b
    done
    DATA=made PREPARE=1 TOKENIZER=llama2 expect_status 0 recipe gpt2_124m # which reads none
    says '!TOKENIZER'
}

# A start's own tokenizer makes its data, unless TOKENIZER names another.
test_data_are_made_with_the_tokenizer_of_the_start() {
    local tune=(env PREPARE=1 HF_HUB_OFFLINE=1 DATA="$PWD/fresh" "$root/scripts/run_llama3_8b.sh")
    START=$root/test/golden/chat expect_message 1 'error: fineweb-edu-100b: ' "${tune[@]}"
    START=$root/test/golden/chat TOKENIZER=llama2 expect_message 1 'error: --tokenizer llama2: ' \
        "${tune[@]}"
    START=$PWD expect_message 1 'error: --tokenizer llama3: ' "${tune[@]}" # which has none
}

# env VARIABLES recipe: what it would start with 8 GPUs
dry() {
    env DRY=1 OUT=/o GPUS=8 "${@:1:$#-1}" "$root/scripts/run_${*: -1}.sh"
}

# What the user gives comes once after the variant's own words, and once for both variants.
test_two_precisions_have_the_users_fp8() {
    OUT=$PWD/two SMOKE=1 PRECISION=both expect_status 3 recipe llama_1b --fp8-recipe tensorwise || return
    is "$(grep -o -- '"--fp8-recipe", "[a-z]*"' two/fp8/seed-1234/command.json | cut -d'"' -f4 | xargs)" \
        'tensorwise delayed tensorwise'
}

# A job's script is a copy elsewhere.
copied() {
    cp "$root/scripts/run_llama_1b.sh" slurm_script
    cd "$root" && env DRY=1 GPUS=8 SLURM_JOB_ID=7 SLURM_SUBMIT_DIR=. bash "$OLDPWD/slurm_script"
}

test_launchers_start_the_same_training() {
    check_rows <<'ROWS'
0|dry llama_1b|/train_gptcu --model llama-1b |--gpus 8 |--fp8-format hybrid|--fp8-lm-head|--save /o
0|dry GPUS=0 llama_1b|--gpus 1 |!--gpus 0
0|dry PRECISION=bf16 llama_1b| --bf16 |!fp8
0|dry LAUNCH=torchrun llama_1b|torchrun --standalone --nproc-per-node 8 --no-python |/train_gptcu |!--gpus
0|dry LAUNCH=torchrun TORCHRUN='--nnodes 2 --rdzv-endpoint a:29500' llama_1b|torchrun --nnodes 2 --rdzv-endpoint a:29500 --nproc
0|copied|llama-1b
0|dry SLURM_JOB_ID=7 llama_1b|srun --ntasks-per-node 8 |/restart.sh |/train_gptcu 
0|dry GPUS=1 llama3_8b|--recompute activations --optimizer-cpu-offload --adam-dtype bf16
0|dry llama3_8b|--recompute activations --optimizer-cpu-offload|!adam-dtype
0|dry GPUS=1 START=s llama3_8b_finetune|compare --out /o --trainer|--micro-batch-size 2 --global-batch-size 16|--load s|--optimizer-cpu-offload|--adam-dtype 8bit|bf16:\ --bf16|fp8:\ --fp8-format|--fp8-lm-head|--gpus 1|!--save 
0|dry GPUS=4 START=s llama3_8b_finetune|--micro-batch-size 4 --global-batch-size 128 |--recompute block|--seq-length 4096|--gpus 4|!adam-dtype
0|env DRY=1 GPUS=1 "$root/scripts/run_llama_1b.sh" --data=a --eval-choices b|--data=a --eval-choices b |val_|!--data /
0|env DRY=1 GPUS=1 "$root/scripts/run_llama_1b.sh" --sample-prompt 'a --data b --valid-data=c d'|--data /|--valid-data /
0|env DRY=1 GPUS=1 "$root/scripts/run_llama_1b.sh" --config=a|note: the recipe's own options override those of --config|--config=a
0|env DRY=1 GPUS=1 "$root/scripts/run_llama_1b.sh" --bf16|!note|--bf16|!--fp8
0|env DRY=1 GPUS=1 "$root/scripts/run_llama_1b.sh" --bf16 --fp8-format e4m3|--fp8-format hybrid|--fp8-format e4m3
0|env DRY=1 GPUS=1 PRECISION=both "$root/scripts/run_llama_1b.sh" --fp8-recipe=blockwise --no-fp8-lm-head|--fp8-recipe\ delayed\ --fp8-lm-head\ --fp8-recipe\ blockwise\ --no-fp8-lm-head -- 
0|env DRY=1 GPUS=1 "$root/scripts/run_llama_1b.sh" --epochs 2|--lr 4e-4|--epochs 2|!--train-iters
0|env SMOKE=1 OUT=epochs "$root/scripts/run_llama_1b.sh" --epochs 0.05|step |, 0.05 epochs
0|env DRY=1 GPUS=3 "$root/scripts/run_gpt2_124m.sh" --global-batch-size 9 --sample-prompt 'a --global-batch-size 8 b'|note: --micro-batch-size 3,
0|env SMOKE=1 OUT=mine "$root/scripts/run_llama_1b.sh" --data data/tr*.bin --valid-data=data/v*.bin|step     6/6|!twice
0|recipe llama_1b --help|PREPARE=1      prepare the data and exit|sbatch --nodes 2|!model=()|!recipe.sh
ROWS
    env DRY=1 GPUS=8 SLURM_JOB_ID=7 "$root/scripts/run_llama_1b.sh" --lr 1 >log 2>&1
    grep -qE '^srun .*/train_gptcu .* --lr 1 ' log || fail "options are not handed on: $(<log)"
}

# A recipe's micro-batch becomes smaller where the GPUs of all machines need it; a user's own stays, and
# GPUs that cannot share the batch are refused.
test_any_launcher_shares_the_batch() {
    check_rows <<'ROWS'
0|dry gpt2_124m|--micro-batch-size 64 --global-batch-size 512 |!note:
0|dry SLURM_JOB_ID=7 SLURM_NNODES=2 gpt2_124m|note: --micro-batch-size 32|--micro-batch-size 32 --global-batch-size 512 |!--micro-batch-size 64
0|dry LAUNCH=torchrun TORCHRUN='--nnodes 4 --rdzv-endpoint a:1' gpt2_124m|--micro-batch-size 16 --global
0|dry LAUNCH=torchrun TORCHRUN=--nnodes=1:2 gpt2_124m|--micro-batch-size 32 --global
0|dry NNODES=16 gpt2_1558m|--micro-batch-size 8 --global-batch-size 1024
0|env DRY=1 GPUS=12 "$root/scripts/run_gpt2_124m.sh" --global-batch-size 600|--micro-batch-size 50 --global
0|dry GPUS=64 START=s llama3_8b_finetune|--micro-batch-size 2 --global-batch-size 128
1|dry GPUS=3 gpt2_124m|error: --global-batch-size 512: 3 GPUs cannot share it evenly; 2 or 4 can
1|dry SLURM_JOB_ID=7 SLURM_NNODES=3 gpt2_124m|24 GPUs cannot share it evenly; 16 or 32 can
1|dry GPUS=1024 gpt2_124m|1024 GPUs cannot share it evenly; 512 can
0|env DRY=1 GPUS=16 "$root/scripts/run_gpt2_124m.sh" --micro-batch-size=64|--micro-batch-size 64 --global|--micro-batch-size=64|!note:
1|env GPUS=3 DATA=unmade "$root/scripts/run_gpt2_124m.sh"|3 GPUs cannot share
ROWS
    [[ ! -e unmade ]] || fail "$(ls unmade)"
}

# One letter too many, too few, another, two swapped, or the case; not if the right one is set too, and
# not a short word with another letter, which is a word of its own.
test_mistyped_variables_are_named() {
    check_rows <<'ROWS'
0|dry PRECISON=bf16 llama_1b|warning: PRECISON is not read; did you mean PRECISION?
0|dry precision=bf16 PRECISOIN=bf16 llama_1b|precision is not read|PRECISOIN is not read
0|dry GPU=1 TOKENISER=a OUTS=b DRYS=1 SMOKEY=1 llama_1b|TOKENISER is not read|SMOKEY is not read|!GPU is|!OUTS|!DRYS
0|env -u GPUS DRY=1 GPU=1 "$root/scripts/run_llama_1b.sh"|GPU is not read; did you mean GPUS?
0|dry CHATS=a llama3_8b_finetune|did you mean CHAT?
0|dry PRECISION=bf16 llama_1b|!not read
0|env -u DATA GPUS=1 DRY=1 DATE=a DAY=b CPUS=2 CHAR=c PUT=d "$root/scripts/run_llama3_8b_finetune.sh"|!not read
0|env -u DATA GPUS=1 DRY=1 DATAS=a Data=b ADTA=c "$root/scripts/run_llama_1b.sh"|DATAS is not|Data is not|ADTA is not
ROWS
}

# A tree whose programs print how they are called: the estimate is of the run's own precision. Options
# that the trainer refuses are refused before data are prepared.
test_the_estimate_has_the_head_of_the_run() {
    local name
    mkdir -p tree/scripts && cp "$root"/scripts/{recipe,run_*}.sh tree/scripts
    ln -s tree/scripts/run_llama_1b.sh linked
    printf 'train_gpt train_gptcu:\n' >tree/Makefile
    for name in train_gptcu scripts/{prepare_data,prepare_choices,estimate,compare,restart.sh}; do
        printf '#!/bin/sh\necho "${0##*/} $*"\n' >"tree/$name" && chmod +x "tree/$name"
    done
    echo 'case "$NNODES $*" in " "*" --gpus 4 "*"--lr 1 "*"--plan" | "2 "*" --gpus 4 "*--plan)' \
        'echo "error: no" >&2; exit 1;; *"$PWD"/tree/data/*--plan | *"--epochs=2 --plan")' \
        'echo "error: these data are not there yet" >&2; exit 1; esac' >>tree/train_gptcu
    check_rows <<'ROWS'
0|env GPUS=2 tree/scripts/run_gpt2_124m.sh --lr 1|estimate --gpus 2 --model gpt2-124m | --fp8-lm-head --lr 1|restart.sh 
0|env GPUS=2 tree/scripts/run_llama_1b.sh|estimate --gpus 2 --model llama-1b | --fp8-lm-head
0|env GPUS=2 tree/scripts/run_llama_1b.sh --epochs 2|.bin --fp8-lm-head --epochs 2
0|env GPUS=2 ./linked|estimate --gpus 2 --model llama-1b | --fp8-lm-head
1|env GPUS=4 tree/scripts/run_llama_1b.sh --lr 1|error: no|!prepare_data
1|env GPUS=4 SLURM_JOB_ID=7 SLURM_NNODES=2 tree/scripts/run_llama_1b.sh|error: no|!prepare_data
0|env GPUS=2 LAUNCH=torchrun TORCHRUN=--nnodes=2 tree/scripts/run_llama_1b.sh|estimate --gpus 4 --model llama-1b
0|env -u DATA GPUS=2 tree/scripts/run_llama_1b.sh --epochs=2|prepare_data fineweb-edu|.bin --fp8-lm-head --epochs=2
0|env -u DATA GPUS=2 tree/scripts/run_llama_1b.sh --data mine|prepare_data fineweb-edu|prepare_choices
0|env -u DATA GPUS=2 tree/scripts/run_llama_1b.sh --data mine --valid-data=v|--data mine --valid-data=v|!prepare_
ROWS
}

# Once, and before anything is prepared.
test_wrong_settings_are_refused() {
    check_rows <<'ROWS'
1|env SMOKE=1 PRECISION=fp4 "$root/scripts/run_gpt2_124m.sh"|error: PRECISION=fp4: must be fp8, bf16 or both
1|env LAUNCH=mpi "$root/scripts/run_gpt2_124m.sh"|LAUNCH=mpi: must be self, slurm or torchrun
1|env GPUS=all "$root/scripts/run_gpt2_124m.sh"|GPUS=all: must be a whole number
1|env GPUS=0 "$root/scripts/run_gpt2_124m.sh"|no GPU here|SMOKE=1
1|env DATA=unmade SMOKE=1 "$root/scripts/run_gpt2_124m.sh" --lrr 1|error: unknown option --lrr
1|env DATA=unmade SMOKE=1 "$root/scripts/run_gpt2_124m.sh" --lr x|error: --lr x: must be
1|env SMOKE=1 "$root/scripts/run_gpt2_124m.sh" --micro-batch-size 3|error: --global-batch-size 4: must be|!restart
1|env GPUS=1 "$root/scripts/run_llama3_8b_finetune.sh"|START=DIR is missing
1|env -u DATA GPUS=1 START=s "$root/scripts/run_llama3_8b_finetune.sh"|CHAT=FILE is missing
1|env LAUNCH=torchrun GPUS=1 START=s CHAT=c "$root/scripts/run_llama3_8b_finetune.sh"|LAUNCH=torchrun: not with PRECISION=both
ROWS
    [[ ! -e unmade ]] || fail "$(ls unmade)"
}

run_tests
