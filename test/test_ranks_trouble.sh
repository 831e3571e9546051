#!/usr/bin/env bash
# Several ranks in trouble: killed, stopped, hung, out of disk, with a NaN, with signals. Every rank
# ends, or goes on, within the time limit, says which rank at which step, and the last checkpoint
# is one to go on from.
# shellcheck source=test/ranks.sh
source "$(dirname "$0")/ranks.sh"

# plant NAME KIND RANK STEP OPTIONS...: a run with a fault into the folder NAME, in the background, once
# there is a checkpoint. While the data of step 3 are read, step 2 is the last that is complete.
plant() {
    mkdir -p "$1"
    (
        begin=$(date +%s%N) got=0
        FAULT=$2:$(($4 * 12 + $3 * 2)) FAULT_AFTER=$1/s/latest "$trainer" "${common[@]}" --gpus 3 \
            --train-iters 8 --save "$1/s" --save-interval 2 --distributed-timeout 4 \
            "${@:5}" >"$1/out" 2>"$1/err" || got=$?
        echo "$got" >"$1/status"
        [[ $(($(date +%s%N) - begin)) -lt 15000000000 ]] || echo "it took more than 15 s" >>"$1/status"
    ) &
}

# A fault, its rank and step, options; how the run ends, its newest checkpoint, what it says.
faults='kill 1 3|137 2|^error: rank 1 was killed by signal 9|^rank [02]: error: rank 1 on .* has exited unexpectedly .its connection closed..*this rank ends at step 2
kill 0 3|137 2|^error: rank 0 was killed by signal 9|^rank [12]: error: rank 0 on .* has exited
die 2 3|1 2|^rank 2: error: a planted fault$
stop 2 3|4 2|^rank [01]: error: rank 2 on .* has been silent for .*this rank ends at step 2
stop 0 3|4 2|^rank [12]: error: rank 0 on .* has been silent for .*this rank ends at step 2
hang 1 3|4 2|error: rank 1 on .* has made no progress for .* s, last heard at step 2 \(reading data\)
nan 1 3|0 8|^rank 1: warning: step 4 is skipped: the loss of this rank.s sequences is nan
term 1 3|75 4|stopped by a signal to another rank after step 4; saved
disk 1 3|1 2|warning: saving the checkpoint of step 4 failed: rank 1: .*optimizer-1-of-3|earlier checkpoints are as they were|of step 8 failed: rank 1:
disk 0 3|1 2|of step 4 failed: rank 0: .*could not be written
stall 1 2 --optimizer-cpu-offload --device-memory-gib 1.1725|4 2|error: rank [012] on .* waits, as all ranks do, for .* s: a GPU or the network hangs|with state of the optimizer
none 0 3|0 8|'

test_faults_end_every_rank() {
    local words ends texts text name planted=0
    while IFS='|' read -r words ends texts; do
        # shellcheck disable=SC2086 # words
        set -- $words
        plant "$1$2" "$@"
        planted=$((planted + 1))
        if ((planted % 4 == 0)); then wait; fi # more at once would starve each other while they start
    done <<<"$faults"
    wait
    while IFS='|' read -r words ends texts; do
        read -r words name _ <<<"$words"
        name=$words$name
        is "$name: $(<"$name/status") $(readlink "$name/s/latest")" "$name: ${ends% *} step_0000000${ends#* }"
        while IFS= read -r text; do
            cat "$name"/{err,out} | grep -qE -- "$text" || fail "$name: no '$text': $(cat "$name/err")"
        done < <(tr '|' '\n' <<<"$texts")
        [[ ${ends% *} -ne 0 || -z $(find "$name/s" -name '.tmp*') ]] || fail "$name: $(ls -a "$name/s")"
    done <<<"$faults"
    is "$(head -n 1 die2/err)" 'rank 2: error: a planted fault'
    is "$(grep -c '"skipped":1' nan1/s/metrics.jsonl)" 1
    no_one_is_left || fail "processes are left: $(pgrep -s 0 -ax standin_trainer)"
}

# From what each of them left, to the end that the sound run had.
test_every_checkpoint_goes_on() {
    local name
    for name in kill1 kill0 die2 stop2 stop0 hang1 stall1 term1 disk1 disk0; do
        expect_status 0 "$trainer" "${common[@]}" --gpus 3 --train-iters 8 --save "$name/s" \
            --resume latest || return
        same_checkpoint {none0,$name}/s/latest || fail "$name: another end"
    done
    ! same_checkpoint {none0,nan1}/s/latest || fail "a skipped step changes nothing"
}

# A signal that reaches one rank alone breaks its part of an evaluation off, and so the whole.
test_a_signal_to_one_rank_breaks_an_evaluation_off() {
    local rank
    make_text 5 40000 >valid
    expect_status 0 "$root/tokenize" --output-prefix e/v --valid-fraction 0 valid || return
    for rank in 1 3; do
        train_on alone$rank --gpus 3 --valid-data e/v_train.bin --eval-iters 0 --eval-interval 4
        wait_until grep -q '^step .* 4/' alone$rank.out
        kill -TERM "$(ranks_of "$started" | sed -n ${rank}p)"
        await_end "$started"
        is "$status" 75
        cp alone$rank.out log
        says "after step 4; saved; resume with" '!eval after'
        grep -qE '"eval_left":\s1,' alone$rank/latest/meta.json || fail "nothing is left"
    done
}

# What cannot start says so once, and at once.
test_bad_starts_are_refused() {
    local begin=$SECONDS
    check_rows <<'ROWS'
1|"$trainer" "${common[@]}" --gpus 3 --lr x|error: --lr x: must be a number from -1 to 100
1|train_gpt --data d/x_train.bin --gpus 2|is one process, and not one of 2 ranks (--gpus)
1|env RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 "$root/train_gpt" --data d/x_train.bin|not one of 2 ranks (WORLD_SIZE)
ROWS
    # each rank says these
    expect_message 1 'error: --data none.bin' "$trainer" "${common[@]}" --gpus 3 --data none.bin
    expect_message 1 '--global-batch-size 12: must be a multiple of --micro-batch-size 2 x 5 ranks' "$trainer" \
        "${common[@]}" --gpus 5
    [[ $((SECONDS - begin)) -le 8 ]] || fail "took $((SECONDS - begin)) s"
}

test_ranks_start_with_closed_streams() {
    train open --gpus 2 --train-iters 2 || return
    timeout 20 "$trainer" "${common[@]}" --gpus 2 --train-iters 2 --save closed <&- >&- ||
        fail "status $?"
    same_checkpoint {open,closed}/latest || fail "another end"
}

# What needs no other rank starts none.
test_one_process_answers() {
    train straight --gpus 3 --train-iters 1 || return
    expect_status 0 "$trainer" --gpus 3 --save straight --list-checkpoints || return
    is "$(grep -c whole log)" 1
    expect_status 0 "$trainer" "${common[@]}" --gpus 3 --plan || return
    is "$(grep -c '^Memory plan' log)" 1
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

# Each rank looks for the tokenizer beside its own shards.
test_ranks_know_the_same_end() {
    local words of_rank=(a b) disks=()
    rm -rf a b
    mkdir -p a/d b/d
    cp d/x_train.bin d/x_tokenizer.bin a/d && cp d/x_train.bin d/x_tokenizer.bin b/d
    poke b/d/x_tokenizer.bin 28 '\x0b' # 1 + the token that ends a document
    for words in --eod-mask-loss --reset-attention-mask; do
        torchrun --train-iters 2 "$words"
        [[ ${statuses[1]} -eq 1 ]] || fail "$words: ${statuses[*]}"
        has err.1 'rank 1: error: --data: documents end with token 10, on rank 0 with 256' ||
            fail "$words: $(cat err.1)"
    done
    torchrun --train-iters 2
    ! has err.1 'documents end' || fail "no token is needed"
}

# What options come to is worked out before the ranks connect, by each of them.
test_notes_on_options_are_rank_0s() {
    local says
    mkdir -p notes && cp d/x_train.bin notes/x.bin && echo damaged >notes/tokenizer.bin
    cp d/x_train.bin alone.bin # a checkpoint without a tokenizer, of another shape than the preset
    train start --data alone.bin --vocab-size 257 --num-layers 3 --train-iters 1 || return
    torchrun --data notes/x.bin --load start/latest --lr 1e-4 --train-iters 1 --save noted
    [[ "${statuses[*]}" == "0 0" ]] || fail "$(cat err.0 err.1)"
    for says in 'notes/tokenizer.bin: ' 'no tokenizer.bin beside notes/x.bin has its fingerprint' \
        '--model llama-tiny: the checkpoint start/step_00000001 has another shape, which is used instead'; do
        [[ $(grep -cF -- "$says" err.0) -eq 1 ]] || fail "rank 0, '$says': $(cat err.0)"
    done
    [[ ! -s err.1 ]] || fail "rank 1: $(cat err.1)"
}

test_restarts_give_up() {
    local restart=$root/scripts/restart.sh
    FAULT=kill:38 FAULT_AFTER=never/latest expect_status 137 "$restart" --pause 0 --failures 2 \
        "$trainer" "${common[@]}" --gpus 2 --train-iters 8 --save never --save-interval 2 || return
    says 'restart: status 137 at step_00000002, failure 1 of 2' \
        'restart: status 137; 2 runs in a row failed at step_00000002: giving up'
    FAULT=nan:12 expect_message 3 '!restart: status' "$restart" "$trainer" "${common[@]}" --max-skipped 1 \
        --train-iters 8 --save skipping || return
    check_rows <<'ROWS'
3|"$trainer" --config skipping/config.txt --resume latest|(--max-skipped)
0|"$trainer" --config skipping/config.txt --resume latest --sample-only --sample-length 4|
0|"$trainer" --config skipping/config.txt --resume latest --max-skipped 2|
1|"$restart" "$trainer"|the command has no --save DIR
ROWS
    launcher=("$restart")
    train_on stopped --gpus 2
    stop TERM 75
    has stopped.out '/config.txt --resume latest' || fail "$(tail -n 1 stopped.out)"
    no_one_is_left || fail "processes are left"
}

run_tests
