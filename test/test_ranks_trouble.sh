#!/usr/bin/env bash
# Several ranks in trouble: killed, stopped, hung, out of disk, with a NaN, with signals. Every rank
# ends, or goes on, within the time limit, says which rank at which step, and the last checkpoint
# is one to go on from.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"
RANDOM=5 # the delays below repeat, as far as delays can

# plant KIND RANK STEP FOLDER: a run with a fault, in the background, once there is a checkpoint.
# While the data of step 3 are read, step 2 is the last that is complete.
plant() {
    local fault=$1:$(($3 * 12 + $2 * 2)) folder=$4
    shift 4
    mkdir -p "$folder"
    (
        begin=$(date +%s%N) status=0
        FAULT=$fault FAULT_AFTER=$folder/s/latest "$trainer" "${common[@]}" --gpus 3 \
            --train-iters 8 --save "$folder/s" --save-interval 2 --distributed-timeout 4 \
            "$@" >"$folder/out" 2>"$folder/err" || status=$?
        echo "$status $((($(date +%s%N) - begin) / 1000000))" >"$folder/status"
    ) &
}

# What became of it: expect FOLDER STATUS LATEST TEXT...
expect() {
    local folder=$1 status=$2 latest=$3 got ms text
    shift 3
    read -r got ms <"$folder/status"
    [[ $got -eq $status ]] || fail "$folder: status $got, not $status: $(cat "$folder/err")"
    [[ $ms -lt 15000 ]] || fail "$folder: took $ms ms"
    [[ $(readlink "$folder/s/latest") == "step_0000000$latest" ]] ||
        fail "$folder: the newest checkpoint is $(readlink "$folder/s/latest")"
    for text in "$@"; do
        grep -qE -- "$text" "$folder/err" || fail "$folder: no '$text': $(cat "$folder/err")"
    done
    local left
    left=$(find "$folder/s" -name '.tmp*' | head -n 1)
    [[ -z $left || $status -ne 0 ]] || fail "$folder: left over: $left"
}

test_faults_end_every_rank() {
    plant kill 1 3 kill
    plant kill 0 3 kill0
    plant die 2 3 die
    plant stop 2 3 stop
    wait # more at once would starve each other while they start
    plant stop 0 3 stop0
    plant hang 1 3 hang
    plant nan 1 3 nan
    plant term 1 3 term
    wait
    plant disk 1 3 disk
    plant disk 0 3 disk0
    # in the step after a save, which waited for it
    plant stall 1 2 stall --optimizer-cpu-offload --device-memory-gib 1.19
    plant none 0 3 sound
    wait
    expect sound 0 8
    expect kill 137 2 '^error: rank 1 was killed by signal 9' \
        '^rank [02]: error: rank 1 on .* has ended without a goodbye.*this rank ends at step 2'
    expect kill0 137 2 '^error: rank 0 was killed by signal 9' '^rank [12]: error: rank 0 on .* has ended'
    expect die 1 2 '^rank 2: error: a planted fault$'
    [[ $(head -n 1 die/err) == 'rank 2: error: a planted fault' ]] || fail "$(head -n 1 die/err)"
    expect stop 4 2 '^rank [01]: error: rank 2 on .* has been silent for .*this rank ends at step 2'
    expect stop0 4 2 '^rank [12]: error: rank 0 on .* has been silent for .*this rank ends at step 2'
    expect hang 4 2 'error: rank 1 on .* has made no progress for .* s, last heard at step 2 \(reading data\)'
    expect stall 4 2 'error: rank [012] on .* waits, as all ranks do, for .* s: a GPU or the network hangs'
    has stall/out "with state of the optimizer" || fail "stall: $(cat stall/out)"
    expect nan 0 8 "^rank 1: warning: step 4 is skipped: the loss of this rank's sequences is nan"
    [[ $(grep -c '"skipped":1' nan/s/metrics.jsonl) -eq 1 ]] || fail "nan: not one step skipped"
    expect term 75 4
    has term/out 'stopped by a signal to another rank after step 4; saved' ||
        fail "$(tail -n 1 term/out)"
    expect disk 1 2 'warning: saving the checkpoint of step 4 failed: rank 1: .*optimizer-1-of-3' \
        'earlier checkpoints are as they were' 'of step 8 failed: rank 1:'
    expect disk0 1 2 'of step 4 failed: rank 0: .*could not be written'
    no_one_is_left || fail "processes are left: $(pgrep -s 0 -ax standin_trainer)"
}

# From what each of them left, to the end that the sound run had.
test_every_checkpoint_goes_on() {
    local folder
    for folder in kill kill0 die stop stop0 hang stall term disk disk0; do
        expect_status 0 "$trainer" "${common[@]}" --gpus 3 --train-iters 8 --save "$folder/s" \
            --resume latest || return
        cmp -s sound/s/latest/model.safetensors "$folder/s/latest/model.safetensors" ||
            fail "$folder: another end"
    done
    ! cmp -s sound/s/latest/model.safetensors nan/s/latest/model.safetensors ||
        fail "a skipped step changes nothing"
}

# A signal to the starter reaches every rank; the run saves, and says so.
test_signals_save() {
    local signal status starter step
    for signal in TERM INT USR1 HUP; do
        train_on $signal --gpus 3
        kill "-$signal" "$starter"
        status=0
        wait "$starter" || status=$?
        [[ $status -eq 75 ]] || fail "$signal: status $status: $(cat $signal.err)"
        step=$(newest_step $signal)
        has $signal.out "stopped by signal $(kill -l $signal) after step $step; saved" ||
            fail "$signal: $(tail -n 1 $signal.out)"
        [[ ! -s $signal.err ]] || fail "$signal: $(cat $signal.err)"
    done
}

# A signal that reaches one rank alone breaks its part of an evaluation off, and so the whole.
test_a_signal_to_one_rank_breaks_an_evaluation_off() {
    local status=0 starter rank
    make_text 5 40000 >valid
    expect_status 0 "$root/tokenize" --output-prefix e/v --valid-fraction 0 valid || return
    for rank in 1 3; do
        status=0
        train_on alone$rank --gpus 3 --valid-data e/v_train.bin --eval-iters 0 --eval-interval 4
        wait_until grep -q '^step .* 4/' alone$rank.out
        kill -TERM "$(ranks_of "$starter" | sed -n ${rank}p)"
        wait "$starter" || status=$?
        [[ $status -eq 75 ]] || fail "status $status: $(cat alone$rank.err)"
        has alone$rank.out "after step 4; saved; resume with" ||
            fail "$(tail -n 1 alone$rank.out)"
        ! has alone$rank.out 'eval after' || fail "$(tail -n 2 alone$rank.out)"
        grep -qE '"eval_left":\s1,' alone$rank/latest/meta.json || fail "nothing is left"
    done
}

test_no_rank_outlives_its_starter() {
    local starter ranks rank
    train_on orphans --gpus 3
    mapfile -t ranks < <(ranks_of "$starter")
    [[ ${#ranks[@]} -eq 3 ]] || fail "${#ranks[@]} ranks"
    expect_status 1 "$trainer" "${common[@]}" --save orphans --lock-timeout 0 || return
    has log 'in use by another run' || fail "the folder is not locked: $(cat log)"
    kill -9 "$starter"
    wait "$starter" 2>/dev/null
    for rank in "${ranks[@]}"; do wait_until is_gone "$rank"; done
}

# What cannot start says so once, and at once.
test_bad_starts_are_refused() {
    local begin=$SECONDS
    expect_status 1 "$trainer" "${common[@]}" --gpus 3 --lr x || return
    [[ $(cat log) == 'error: --lr x: must be a number from 0 to 100' ]] || fail "$(cat log)"
    expect_status 1 "$trainer" "${common[@]}" --gpus 3 --data none.bin || return
    [[ $(grep -c 'error: --data none.bin' log) -ge 1 ]] || fail "$(cat log)"
    expect_status 1 "$trainer" "${common[@]}" --gpus 5 || return
    has log '--global-batch-size 12: must be a multiple of --micro-batch-size 2 x 5 ranks' ||
        fail "$(cat log)"
    expect_status 1 train_gpt --data d/x_train.bin --gpus 2 || return
    has log 'is one process, and not one of 2 ranks (--gpus)' || fail "$(cat log)"
    expect_status 1 env RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 "$root/train_gpt" --data d/x_train.bin ||
        return
    has log 'not one of 2 ranks (WORLD_SIZE)' || fail "$(cat log)"
    [[ $((SECONDS - begin)) -le 8 ]] || fail "took $((SECONDS - begin)) s"
}

test_ranks_start_with_closed_streams() {
    train open --gpus 2 --train-iters 2 || return
    timeout 20 "$trainer" "${common[@]}" --gpus 2 --train-iters 2 --save closed <&- >&- ||
        fail "status $?"
    cmp -s open/latest/model.safetensors closed/latest/model.safetensors || fail "another end"
}

# What needs no other rank starts none.
test_one_process_answers() {
    train straight --gpus 3 --train-iters 40 || return
    expect_status 0 "$trainer" --gpus 3 --save straight --list-checkpoints || return
    [[ $(grep -c whole log) -eq 1 ]] || fail "the list: $(cat log)"
    expect_status 0 "$trainer" "${common[@]}" --gpus 3 --plan || return
    [[ $(grep -c '^Memory plan' log) -eq 1 ]] || fail "the plan: $(cat log)"
}

# Ranks that see another disk, other data or other options than rank 0.
test_ranks_must_see_the_same() {
    local expected options r of_rank disks=()
    rm -rf a b
    mkdir -p a/d b/d
    cp d/x_train.bin a/d && cp d/x_train.bin b/d
    head -c 3000 text >text.less
    "$root/tokenize" --output-prefix less/x text.less >log
    while IFS='|' read -r expected options; do
        cp d/x_train.bin b/d
        if [[ $expected == *data* ]]; then cp less/x_train.bin b/d; fi
        of_rank=(a "b $options")
        torchrun --train-iters 2 --save s
        for r in 0 1; do
            [[ ${statuses[r]} -ne 0 ]] || fail "$expected: rank $r succeeds"
        done
        grep -qE -- "$expected" err.1 || fail "no '$expected': $(cat err.0 err.1)"
    done <<'ROWS'
rank 1: error: rank 1: on .*, it runs something else: 'lr 0.5', where rank 0 has 'lr 0.001'|--lr 0.5
rank 1: error: --data d/x_train.bin: not the shard that rank 0 read in its place|
rank 1: error: --save s: this rank does not see what rank 0 writes there|
ROWS
    of_rank=() disks=(a b)
    mkdir -p b/s && touch b/s/.lock # of an earlier run: the first save is what fails
    torchrun --train-iters 2 --save /dev/fd/9/s
    [[ "${statuses[*]}" == "1 1" ]] || fail "two disks: ${statuses[*]}"
    has err.0 'rank 1: /dev/fd/9/s/.tmp-step_00000002 is not here: the folder must be on a file' ||
        fail "two disks: $(cat err.0)"
}

# What options come to is worked out before the ranks meet, by each of them.
test_notes_on_options_are_rank_0s() {
    local says
    mkdir -p notes && cp d/x_train.bin notes/x.bin && echo damaged >notes/tokenizer.bin
    cp d/x_train.bin alone.bin # a checkpoint without a tokenizer, of another shape than the preset
    train start --data alone.bin --vocab-size 257 --num-layers 3 --train-iters 1 || return
    torchrun --data notes/x.bin --load start/latest --lr 1e-4 --train-iters 1 --save noted
    [[ "${statuses[*]}" == "0 0" ]] || fail "$(cat err.0 err.1)"
    for says in 'notes/tokenizer.bin: ' 'no tokenizer.bin beside notes/x.bin has its mark' \
        '--model llama-tiny: the checkpoint start/latest has another shape, which is used instead'; do
        [[ $(grep -cF -- "$says" err.0) -eq 1 ]] || fail "rank 0, '$says': $(cat err.0)"
    done
    [[ ! -s err.1 ]] || fail "rank 1: $(cat err.1)"
}

# scripts/restart.sh goes on until the run is done, and knows when not to.
test_restarts_resume() {
    local restart=$root/scripts/restart.sh loop status=0 kills=0 newest='' starter ranks
    rm -rf again
    "$restart" --pause 0 "$trainer" "${common[@]}" --gpus 3 --train-iters 40 --save again \
        --save-interval 1 >out 2>err &
    loop=$!
    while [[ $kills -lt 5 ]] && kill -0 $loop 2>/dev/null; do
        if [[ $(readlink again/latest) == "$newest" ]]; then continue; fi # no new checkpoint yet
        newest=$(readlink again/latest)
        sleep "0.0$((RANDOM % 10))"
        starter=$(pgrep -P $loop -x standin_trainer | head -n 1)
        if [[ -z $starter ]]; then continue; fi
        mapfile -t ranks < <(ranks_of "$starter")
        if [[ ${#ranks[@]} -eq 3 ]] && kill -9 "${ranks[RANDOM % 3]}" 2>/dev/null; then
            kills=$((kills + 1))
        fi
    done
    wait $loop || status=$?
    [[ $status -eq 0 ]] || fail "status $status: $(cat err)"
    [[ $(grep -c '^restart: status 137 at' err) -ge 1 ]] || fail "no restart: $(cat err)"
    cmp -s straight/latest/model.safetensors again/latest/model.safetensors || fail "another end"
}

test_restarts_give_up() {
    local restart=$root/scripts/restart.sh starter status=0
    rm -rf never
    FAULT=kill:38 FAULT_AFTER=never/latest expect_status 137 "$restart" --pause 0 --failures 2 \
        "$trainer" "${common[@]}" --gpus 2 --train-iters 8 --save never --save-interval 2 || return
    has log 'restart: status 137 at step_00000002, failure 1 of 2' || fail "$(cat log)"
    has log 'restart: status 137; 2 runs in a row failed at step_00000002: giving up' ||
        fail "$(cat log)"
    FAULT=nan:12 expect_status 3 "$restart" "$trainer" "${common[@]}" --max-skipped 1 \
        --train-iters 8 --save skipping || return
    ! has log 'restart: status' || fail "too many skipped steps are tried again"
    local resume=("$trainer" --config skipping/config.txt --resume latest)
    expect_said 3 '(--max-skipped)' "${resume[@]}"
    expect_status 0 "${resume[@]}" --sample-only --sample-length 4
    expect_status 0 "${resume[@]}" --max-skipped 2
    expect_status 1 "$restart" "$trainer" || return
    has log 'the command has no --save DIR' || fail "$(cat log)"
    launcher=("$restart")
    train_on stopped --gpus 2
    kill -TERM "$starter"
    wait "$starter" || status=$?
    [[ $status -eq 75 ]] || fail "status $status after a signal: $(cat stopped.err)"
    has stopped.out '/config.txt --resume latest' || fail "$(tail -n 1 stopped.out)"
    no_one_is_left || fail "processes are left"
}

run_tests
