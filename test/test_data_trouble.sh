#!/usr/bin/env bash
# Data that are not what they were: replaced or renamed between a stop and a resume, damaged in the
# middle of a shard, cut short while a run reads them; and what ./tokenize finds beside its shards.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

common=(--model llama-tiny --micro-batch-size 2 --seq-length 32 --lr 3e-3 --log-interval 1
    --embedding-lr-mult 1 --vector-lr-mult 1 --lr-decay-style cosine)

run() {
    train_gpt "${common[@]}" "$@"
}

tokenize() {
    expect_status 0 "$root/tokenize" --output-prefix "$@"
}

# A tokenizer of other tokens, with the same ids: bytes 65 and 66 change places.
change_tokens() {
    poke "$1" $((1024 + 2 * 65)) '\1\102\1\101'
}

# Two shards of one size, and a longer one of other text.
prepare() {
    local i
    for i in 1 2; do make_text $i 3000 | head -c 3000 >text$i; done
    make_text 3 4000 >text3
    tokenize d/a text1 --valid-fraction 0 && tokenize d/b text2 --valid-fraction 0 &&
        tokenize one/c text3
    size=$(stat -c %s d/a_train.bin)
    is "$(stat -c %s d/b_train.bin)" "$size"
}

# ---- between a stop and a resume ----------------------------------------------------------------

# resume DATA OPTIONS...: the run `s`
resume() {
    run --data "$1" --train-iters 8 --save s --resume latest "${@:2}"
}

# Changed data are refused, without a trace in the folder, and pass with the option for it.
test_changed_data_are_refused() {
    local folder says
    expect_status 0 run --data 'd/*_train.bin' --train-iters 4 --save whole --lr-decay-iters 8 || return
    for folder in other swapped fewer more edited; do cp -r d $folder; done
    rm fewer/b_train.bin && cp d/a_train.bin more/c_train.bin
    { head -c 1024 d/b_train.bin && tail -c +1025 one/c_train.bin; } | head -c "$size" >other/b_train.bin
    cp d/b_train.bin swapped/a_train.bin && cp d/a_train.bin swapped/b_train.bin
    poke edited/a_train.bin 2000 'X'
    while IFS='|' read -r folder says; do
        rm -rf s && cp -r whole s
        expect_message 1 "error: --data $says" resume "$folder/*_train.bin" || return
        says --accept-data-change
        diff -r -x .lock whole s >difference || fail "a refused resume changed $(<difference)"
        expect_message 0 "--data changed: $says" resume "$folder/*_train.bin" --accept-data-change || return
        expect_status 0 resume "$folder/*_train.bin" --train-iters 9 || return # which has become the run's data
        ! has s/config.txt accept || fail "config.txt accepts for ever"
    done <<'ROWS'
other|other/b_train.bin: not the shard that the 
swapped|swapped/a_train.bin: not the shard that the 
edited|edited/a_train.bin: not the shard that the 
fewer|1 shard, and the checkpoint's run read more
more|more/c_train.bin: not the shard that 
ROWS
    # the same data, elsewhere and under other names, are the same
    mkdir moved && cp d/a_train.bin moved/1.bin && cp d/b_train.bin moved/2.bin
    rm -rf s && cp -r whole s
    expect_status 0 resume 'moved/*.bin' || return
    expect_status 0 run --data 'd/*_train.bin' --train-iters 8 --save straight || return
    same_checkpoint {s,straight}/latest || fail "moved data: another end"
}

# edit_meta CHECKPOINT PATTERN REPLACEMENT...: in its meta.json, which gets the checksum of that.
edit_meta() {
    python3 - "$@" <<'END'
import re, sys, zlib
text = open(sys.argv[1] + "/meta.json").read()
for pattern, replacement in zip(sys.argv[2::2], sys.argv[3::2]):
    assert re.search(pattern, text), pattern
    text = re.sub(pattern, replacement, text)
text = re.sub(r'"crc32":\t"[0-9a-f]{8}"\n}$', '"crc32":\t"00000000"\n}', text)
open(sys.argv[1] + "/meta.json", "w").write(
    text.replace('"00000000"', f'"{zlib.crc32(text.encode()):08x}"'))
END
}

# What is usual of other data is another loss: else no checkpoint would pass for a good one.
test_other_data_have_other_losses() {
    local data pattern
    while read -r data pattern; do
        rm -rf s && cp -r whole s
        edit_meta s/step_00000004 '"best_level":\t[0-9.]*' '"best_level":\t0.25' || return
        expect_status 0 resume "$data/*_train.bin" --accept-data-change || return
        grep -qE "\"best_level\":\s*$pattern," s/latest/meta.json || fail "$data: $(grep best_level s/latest/meta.json)"
    done <<<$'d 0.25\nswapped [3-6]\\.[0-9]*'
}

# ---- while a run reads --------------------------------------------------------------------------

# Token 2000 is first read by step 8, and is not in the vocabulary: the run ends and has saved what a
# run of whole data has; a restart says it at once, and goes on once the data are mended.
test_bad_tokens_are_named_and_the_run_saved() {
    local trainer step says='error: --data bad.bin: token 2000 is 65535, outside the vocabulary of 257'
    while read -ra trainer; do
        trainer+=("${common[@]}" --no-shuffle --global-batch-size 8 --train-iters 40 --lr-decay-iters 40)
        rm -rf s straight
        cp d/a_train.bin bad.bin && poke bad.bin $((1024 + 2 * 2000)) '\377\377'
        expect_message 1 "$says" "${trainer[@]}" --data bad.bin --save s || return
        step=$(newest_step s)
        [[ $step -ge 2 ]] || fail "only $step steps"
        says "stopped after step $step: " ' --config s/config.txt --resume latest'
        expect_message 1 "$says" "${trainer[@]}" --data bad.bin --save s --resume latest || return
        expect_status 0 "${trainer[@]}" --data d/a_train.bin --train-iters "$step" --save straight || return
        cmp -s {s,straight}/latest/model.safetensors || fail "another state is saved"
        cp d/a_train.bin bad.bin
        expect_status 0 "${trainer[@]}" --data bad.bin --save s --resume latest --accept-data-change || return
    done < <(trainers)
}

# Shards that are cut short once the run has trained some steps; with the validation data mended, the
# resume makes the evaluation that could not be made, also if no step is left to train, and once.
test_shards_cut_in_use_are_named_and_the_run_saved() {
    local trainer option step
    while read -ra trainer; do
        trainer+=("${common[@]}" --global-batch-size 8 --data d/a_train.bin --save s)
        for option in --data --valid-data; do
            rm -rf s
            cp d/a_train.bin cut.bin
            if [[ $option == --valid-data ]]; then cp one/c_val.bin cut.bin && trainer+=(--eval-interval 5); fi
            start log "${trainer[@]}" --train-iters 1000000 --save-interval 1000000 $option cut.bin
            wait_until grep -q '^step .* 20/' log
            truncate -s 1100 cut.bin
            await_end "$started"
            is "$status" 1
            says "error: $option cut.bin: cut short while it was read"
            [[ -L s/latest && ! -L s/best ]] || fail "what could not be evaluated is not the best: $(ls s)"
            tail -n 1 s/metrics.jsonl | grep -qE "\"status\":1,\"error\":\"(rank [01]: )?$option cut.bin: cut" ||
                fail "$(tail -n 1 s/metrics.jsonl)"
            expect_message 0 '!damaged' train_gpt --save s --list-checkpoints
        done
        step=$(newest_step s)
        cp one/c_val.bin cut.bin
        trainer+=(--valid-data cut.bin --resume latest --train-iters "$step")
        expect_message 0 "eval after step $step |" "${trainer[@]}"
        grep -q "\"kind\":\"eval\",\"step\":$step," s/metrics.jsonl || fail "no record"
    done < <(trainers)
}

# A shard's time alone (touch, as against the purge of a scratch disk) is no change; other bytes are.
test_shards_overwritten_in_use_are_named_and_the_run_saved() {
    local step
    rm -rf s
    cp d/a_train.bin over.bin
    start log run --data over.bin --train-iters 1000000 --save-interval 1000000 --save s
    wait_until grep -q '^step .* 20/' log
    touch over.bin
    step=$(grep -c ^step log)
    wait_until eval '[[ $(grep -c ^step log) -gt $((step + 20)) ]]'
    cat d/b_train.bin 1<>over.bin
    await_end "$started"
    is "$status" 1
    says 'error: --data over.bin: overwritten while it was read' 'stopped after step'
    expect_message 1 'error: --data over.bin: not the shard that ' resume over.bin
    expect_message 0 '!damaged' train_gpt --save s --list-checkpoints
}

# As many shards as a process may have files open by default, and more.
test_many_shards_are_read() {
    local i
    mkdir many
    for i in {1..80}; do cp one/c_val.bin "many/$i.bin"; done
    (ulimit -S -n 40 && run --data 'many/*.bin' --train-iters 1) >log 2>&1 || fail
}

# ---- beside the shards --------------------------------------------------------------------------

test_tokenize_leaves_other_tokenizers_alone() {
    local rows
    mkdir -p older unnamed
    tokenize beside/a text1 || return
    cp beside/a_tokenizer.bin other.bin && change_tokens other.bin
    cp -r beside before
    tokenize beside/b --tokenizer other.bin text2 || return
    diff -r before beside | grep -v '^Only in beside: b_' >changed && fail "$(cat changed)"
    # shards of older versions, with tokenizer.bin beside them; and those that do not say which
    cp beside/a_train.bin older/x.bin && cp beside/a_tokenizer.bin older/tokenizer.bin &&
        cp other.bin older/y_tokenizer.bin && cp older/x.bin older/unmarked.bin &&
        poke older/unmarked.bin 16 '\0\0\0\0' && cp older/unmarked.bin unnamed
    for rows in beside/a_train.bin beside/b_train.bin older/x.bin older/unmarked.bin; do
        expect_message 0 'AB' run --data $rows --sample-only --sample-prompt AB --sample-length 8
    done
    expect_message 1 'no tokenizer.bin beside' run --data unnamed/unmarked.bin --sample-only --sample-prompt AB
    expect_message 0 'warning: the weights are random: ' run --data unnamed/unmarked.bin --sample-only \
        --sample-prompt AB --tokenizer beside/a_tokenizer.bin --sample-length 8
    is "$(grep -ac warning log)" 1 # --tokenizer is named
}

# The one of the shards' own name comes before others of the same tokens; shards without a
# fingerprint, as llm.c's, are distinguished only by the tokenizers beside them.
test_shards_take_the_tokenizer_of_their_name() {
    local folder
    tokenize same/mine text1 && tokenize same/again --tokenizer same/mine_tokenizer.bin text2 || return
    for folder in p q r; do
        mkdir -p unmarked/$folder && cp d/a_train.bin unmarked/$folder &&
            cp d/a_tokenizer.bin unmarked/$folder/tokenizer.bin
        poke unmarked/$folder/a_train.bin 16 '\0\0\0\0'
    done
    change_tokens unmarked/q/tokenizer.bin
    check_rows <<'ROWS'
0|run --data 'same/mine_tr*.bin' --plan|--tokenizer same/mine_tokenizer.bin
0|run --data 'same/again_tr*.bin' --plan|--tokenizer same/again_tokenizer.bin
0|run --data 'unmarked/*/*train.bin' --plan|warning: unmarked/q/tokenizer.bin: other tokens than unmarked/p/tokenizer.bin|--tokenizer unmarked/p/tokenizer.bin
0|run --data 'unmarked/[pr]/*train.bin' --plan|!warning
ROWS
}

# A run with sequences of another length continues at the same token. At this rate nothing is
# learned, so that a step's loss is its data's.
test_another_length_continues_at_the_same_token() {
    local still=(run --no-shuffle --lr 1e-30 --data one/c_train.bin --train-iters) length wanted
    expect_status 0 "${still[@]}" 8 || return
    wanted=$(grep -o '^step  *5/8 | loss [0-9.]*' log | grep -o '[0-9.]*$')
    for length in 64 16; do # 256 tokens
        expect_status 0 "${still[@]}" $((128 / length)) --seq-length $length --save length/$length || return
        expect_message 0 '!another order' "${still[@]}" $((128 / length + 1)) --save length/$length --resume latest
        grep -q "^step .* | loss $wanted" log || fail "$length: not $wanted: $(grep ^step log)"
    done
}

# The epochs of a resumed run include those before it, which may have had other batches and lengths.
test_epochs_are_of_all_steps() {
    local epochs words
    while read -r epochs words; do
        # shellcheck disable=SC2086 # words
        expect_status 0 run --data d/a_train.bin --save epochs --resume latest $words || return
        grep -q "^  schedule .*, ${epochs}[0-9] epochs$" log || fail "$words: $(grep schedule log)"
    done <<'ROWS'
1.0 --epochs 1
2.0 --epochs 2 --global-batch-size 8
3.0 --epochs 3 --seq-length 16
3.0 --epochs 1
ROWS
}

# The best validation loss so far counts only for the data and the sequences that are evaluated now.
test_other_validation_data_have_their_own_best() {
    local words=(run --data d/a_train.bin --eval-interval 2 --save-interval 2 --save best)
    expect_status 0 "${words[@]}" --valid-data d/b_train.bin --train-iters 4 || return
    cp d/b_train.bin renamed.bin
    expect_message 0 '!valid-data changed' "${words[@]}" --valid-data renamed.bin --train-iters 6 --lr 1e-30 \
        --resume latest || return
    head -c 3000 /dev/urandom | od -An -tx1 >noise
    tokenize harder/x noise --valid-fraction 0 || return
    words+=(--valid-data harder/x_train.bin --resume latest)
    expect_message 0 '--valid-data changed' "${words[@]}" --train-iters 8 || return
    says '(best)'
    is "$(readlink best/best)" step_00000008
    expect_message 0 'an evaluation has 64 tokens, had ' "${words[@]}" --train-iters 10 --eval-iters 1
    says '!valid-data changed'
}

# test_data.c has the patterns: their shards are read in the order of names, and the tokenizer is found.
test_patterns_are_read_in_order() {
    local data first=''
    mkdir 'x[1]' && cp d/a_tokenizer.bin d/a_train.bin 'x[1]'
    check_rows <<'ROWS'
0|run --data 'x\[1\]/*in.bin' --sample-only --sample-prompt AB|AB
1|run --data 'x[1]/a_train.bin' d/a_train.bin --sample-only|error: --data x[1]/a_train.bin d/a_train.bin: must be one word; quote the pattern
ROWS
    for data in 'd/[ab]_train.bin' 'd/{b,a}_train.bin' '{d/b,d/a}_train.bin'; do
        expect_status 0 run --no-shuffle --data "$data" --train-iters 1 || return
        : "${first:=$(grep '^step' log | cut -d '|' -f 2)}"
        says "${first:-nothing}"
    done
}

test_tokenize_leaves_no_older_validation_shard() {
    tokenize stale/x text1 || return
    [[ -e stale/x_val.bin ]] || fail "no validation shard"
    tokenize stale/x --valid-fraction 0 text2 || return
    [[ ! -e stale/x_val.bin ]] || fail "the validation shard of other text is still there"
    says 'stale/x_val.bin'
    ! compgen -G 'stale/*.new' >found || fail "left over: $(cat found)"
}

test_odd_surroundings_are_taken() {
    printf '\357\273\277model llama-tiny\r\ndata d/a_train.bin\r\nmicro-batch-size 2\r\n' >bom.txt
    expect_status 0 train_gpt --config bom.txt --train-iters 1
}

run_tests
