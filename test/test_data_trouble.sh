#!/usr/bin/env bash
# Data that are not what they were: replaced or renamed between a stop and a resume, damaged in the
# middle of a shard, cut short while a run reads them; and what ./tokenize finds beside its shards.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
standin=$root/build/plain/standin_trainer
export LD_LIBRARY_PATH=$root/build/standin

common=(--model llama-tiny --micro-batch-size 2 --seq-length 32 --lr 3e-3 --log-interval 1
    --embedding-lr-mult 1 --vector-lr-mult 1 --lr-decay-style cosine)
ranks=(--gpus 2 --global-batch-size 8 --no-cuda-graphs --distributed-timeout 20)
unordered=("${common[@]}" --no-shuffle)

tokenize() {
    expect_status 0 "$root/tokenize" --output-prefix "$@"
}

# Two shards of one size, and a longer one of other text.
prepare() {
    local i
    for i in 1 2; do make_text $i 3000 | head -c 3000 >text$i; done
    make_text 3 4000 >text3
    tokenize d/a text1 --valid-fraction 0 && tokenize d/b text2 --valid-fraction 0 &&
        tokenize one/c text3
    size=$(stat -c %s d/a_train.bin)
    [[ $(stat -c %s d/b_train.bin) -eq $size ]] || fail "the shards have two sizes"
}

# ---- between a stop and a resume ----------------------------------------------------------------

resume() {
    train_gpt "${common[@]}" --data "$1" --train-iters 8 --save s --resume latest "${@:2}"
}

# What $1 says must be refused with --resume, without a trace in the folder, and pass with the
# option for it.
refused_unless_accepted() {
    local pattern=$1 says=$2
    rm -rf s && cp -r whole s
    expect_said 1 "error: --data $says" resume "$pattern" || return
    has log '--accept-data-change' || fail "no remedy: $(tail -n 1 log)"
    diff -r -x .lock whole s >changed || fail "a refused resume changed $(cat changed)"
    expect_said 0 "--data changed: $says" resume "$pattern" --accept-data-change || return
    expect_status 0 resume "$pattern" --train-iters 9 || return # which has become the run's data
    has s/config.txt accept && fail "config.txt accepts for ever"
    return 0
}

test_changed_data_are_refused() {
    expect_status 0 train_gpt "${common[@]}" --data 'd/*_train.bin' --train-iters 4 --save whole \
        --lr-decay-iters 8 || return
    cp -r d other && cp -r d swapped && cp -r d fewer && cp -r d more && cp -r d edited
    rm fewer/b_train.bin && cp d/a_train.bin more/c_train.bin
    { head -c 1024 d/b_train.bin && tail -c +1025 one/c_train.bin; } | head -c "$size" \
        >other/b_train.bin
    mv swapped/a_train.bin t && mv swapped/b_train.bin swapped/a_train.bin && mv t swapped/b_train.bin
    poke edited/a_train.bin 2000 'X'
    refused_unless_accepted 'other/*_train.bin' 'other/b_train.bin: not the shard that the '
    refused_unless_accepted 'swapped/*_train.bin' 'swapped/a_train.bin: not the shard that the '
    refused_unless_accepted 'edited/*_train.bin' 'edited/a_train.bin: not the shard that the '
    refused_unless_accepted 'fewer/*_train.bin' "1 shard, and the checkpoint's run read more"
    refused_unless_accepted 'more/*_train.bin' 'more/c_train.bin: not the shard that '
    # the same data, elsewhere and under other names, are the same
    mkdir moved && cp d/a_train.bin moved/1.bin && cp d/b_train.bin moved/2.bin
    rm -rf s && cp -r whole s
    expect_status 0 resume 'moved/*.bin' || return
    rm -rf straight
    expect_status 0 train_gpt "${common[@]}" --data 'd/*_train.bin' --train-iters 8 \
        --save straight || return
    same_checkpoint s/latest straight/latest || fail "moved data: another end"
}

# A shard too large to be read whole is sampled.
test_large_shards_are_sampled() {
    mkdir -p large && cp d/a_train.bin large/a.bin
    local tokens=40000000
    truncate -s $((1024 + 2 * tokens)) large/a.bin
    poke large/a.bin 8 "$(printf '\\%03o' $((tokens & 255)) $((tokens >> 8 & 255)) \
        $((tokens >> 16 & 255)) $((tokens >> 24)))"
    rm -rf s
    expect_status 0 train_gpt "${common[@]}" --data large/a.bin --train-iters 2 --save s || return
    mv large again
    expect_status 0 resume again/a.bin --train-iters 3 || return
    head -c 3000000 /dev/zero | tr '\0' '\1' | dd of=again/a.bin bs=1000 seek=30000 \
        conv=notrunc status=none
    expect_said 1 'again/a.bin: not the shard that ' resume again/a.bin
    rm -rf again
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
    local -A best
    local data
    for data in d swapped; do
        rm -rf s && cp -r whole s
        edit_meta s/step_00000004 '"best_level":\t[0-9.]*' '"best_level":\t0.25' || return
        expect_status 0 resume "$data/*_train.bin" --accept-data-change || return
        best[$data]=$(grep -o '"best_level":[^,]*' s/latest/meta.json | tr -d '\t')
    done
    [[ ${best[d]} == '"best_level":0.25' ]] || fail "the same data: ${best[d]}"
    [[ ${best[swapped]} == '"best_level":'[3-6].* ]] || fail "other data: ${best[swapped]}"
}

# A checkpoint of a program that had an option less: the default is used, and said.
test_newer_options_are_said() {
    local given
    for given in 1 2; do
        rm -rf s && cp -r whole s
        edit_meta s/step_00000004 '"head-lr-mult":\t"1",' '' || return
        # shellcheck disable=SC2046 # words
        expect_said 0 "--head-lr-mult is $given, was not set in the checkpoint" \
            resume 'd/*_train.bin' $([[ $given -eq 1 ]] || echo "--head-lr-mult $given")
    done
}

test_ranks_read_the_same_data() {
    if [[ ! -x $standin ]]; then
        skip "no C++ compiler, so no stand-in trainer"
        return
    fi
    # rank 1 is in a folder of its own, as on another machine
    local rank ids=() folders=(. node)
    mkdir node && cp -r d node && cp d/b_train.bin node/d/a_train.bin
    for rank in 0 1; do
        (cd "${folders[rank]}" && RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
            MASTER_PORT=29777 exec "$standin" "${common[@]}" "${ranks[@]:2}" \
            --data 'd/*_train.bin' --train-iters 2) >out.$rank 2>&1 &
        ids+=($!)
    done
    wait "${ids[@]}"
    has out.1 'd/a_train.bin: not the shard that rank 0 read in its place (' ||
        fail "$(tail -n 2 out.1)"
    rm -rf s
    expect_status 0 "$standin" "${common[@]}" "${ranks[@]}" --data 'd/*_train.bin' --train-iters 4 \
        --save s || return
    expect_said 1 'error: --data swapped/a_train.bin: not the shard that ' "$standin" \
        "${common[@]}" "${ranks[@]}" --data 'swapped/*_train.bin' --train-iters 8 --save s \
        --resume latest
    expect_status 0 "$standin" "${common[@]}" "${ranks[@]}" --data 'swapped/*_train.bin' \
        --train-iters 8 --save s --resume latest --accept-data-change
}

# ---- while a run reads --------------------------------------------------------------------------

# ends_saved NAME SAYS COMMAND...: the command ends with status 1 and says so; it has saved its last
# step, as an undisturbed run has it after as many.
ends_saved() {
    local says=$1 step
    shift
    rm -rf s
    expect_said 1 "$says" "$@" --save s || return
    step=$(newest_step s)
    [[ $step -gt 0 ]] || fail "nothing is saved: $(tail -n 3 log)"
    has log "stopped after step $step: " || fail "$(tail -n 3 log)"
    has log ' --config s/config.txt --resume latest' || fail "$(tail -n 3 log)"
}

# Token 2000 is first read by step 32, or by step 8 of two ranks that accumulate, and is not in the
# vocabulary.
test_bad_tokens_are_named_and_the_run_saved() {
    local options=(--data d/a_train.bin --train-iters 40 --lr-decay-iters 40) data=(--data bad.bin)
    local trainer="$root/train_gpt" several=()
    cp d/a_train.bin bad.bin && poke bad.bin $((1024 + 2 * 2000)) '\377\377'
    while true; do
        ends_saved 'error: --data bad.bin: token 2000 is 65535, outside the vocabulary of 257' \
            "$trainer" "${unordered[@]}" "${options[@]}" "${several[@]}" "${data[@]}" || return
        mv s bad_run
        local step
        step=$(newest_step bad_run)
        [[ $step -ge 2 ]] || fail "only $step steps"
        # a restart says it at once, and what is saved stays
        expect_said 1 'error: --data bad.bin: token 2000 is 65535' "$trainer" "${unordered[@]}" \
            "${options[@]}" "${several[@]}" "${data[@]}" --save bad_run --resume latest || return
        # what is saved is what a run of whole data has
        expect_status 0 "$trainer" "${unordered[@]}" "${options[@]}" "${several[@]}" \
            --train-iters "$step" --save "straight.$step.${#several[@]}" || return
        cmp -s bad_run/latest/model.safetensors \
            "straight.$step.${#several[@]}/latest/model.safetensors" || fail "another state is saved"
        # with the data mended, the run continues
        cp d/a_train.bin bad.bin
        expect_status 0 "$trainer" "${unordered[@]}" "${options[@]}" "${several[@]}" "${data[@]}" \
            --save bad_run --resume latest --accept-data-change || return
        rm -rf bad_run
        if [[ ${#several[@]} -gt 0 || ! -x $standin ]]; then return; fi
        trainer=$standin several=("${ranks[@]}")
        poke bad.bin $((1024 + 2 * 2000)) '\377\377'
    done
}

# Cuts $2 short once the run has trained some steps. The rest are the trainer and its options.
cut_in_use() {
    local says=$1 shard=$2 status
    shift 2
    rm -rf s
    start cut.log "$@" --save s --train-iters 1000000 --save-interval 1000000
    wait_until grep -q '^step .* 20/' cut.log
    truncate -s 1100 "$shard"
    await_end "$started"
    [[ $status -eq 1 ]] || fail "status $status: $(tail -n 3 cut.log)"
    has cut.log "$says" || fail "$(tail -n 3 cut.log)"
    [[ -L s/latest ]] || fail "nothing is saved: $(tail -n 3 cut.log)"
    # what could not be evaluated is not the best
    [[ ! -L s/best ]] || fail "best is $(readlink s/best): $(tail -n 3 cut.log)"
    tail -n 1 s/metrics.jsonl | grep -qE "\"status\":1,\"error\":\"(rank [01]: )?${says#error: }" ||
        fail "$(tail -n 1 s/metrics.jsonl)"
    expect_status 0 train_gpt --save s --list-checkpoints || return
    ! has log damaged || fail "$(cat log)"
}

# With the data mended, the resume makes the evaluation that could not be made, also if no step is
# left to train.
evaluated_later() {
    local step
    step=$(newest_step s)
    cp one/c_val.bin cut.bin
    expect_said 0 "eval after step $step |" "$@" --save s --resume latest --train-iters "$step"
    grep -q "\"kind\":\"eval\",\"step\":$step," s/metrics.jsonl || fail "no record"
    grep -qE '"valid_loss":\s*[0-9]' s/best/meta.json || fail "$(grep valid_loss s/*/meta.json)"
    expect_said 0 'whole, latest, best' train_gpt --save s --list-checkpoints
    # once
    expect_said 0 'nothing to train' "$@" --save s --resume latest --train-iters "$step"
    ! has log 'eval after' || fail "$(cat log)"
}

test_shards_cut_in_use_are_named_and_the_run_saved() {
    cp d/a_train.bin cut.bin
    cut_in_use 'error: --data cut.bin: cut short while it was read' cut.bin "$root/train_gpt" \
        "${common[@]}" --data cut.bin
    cp one/c_val.bin cut.bin
    cut_in_use 'error: --valid-data cut.bin: cut short while it was read' cut.bin \
        "$root/train_gpt" "${common[@]}" --data d/a_train.bin --valid-data cut.bin --eval-interval 5
    evaluated_later "$root/train_gpt" "${common[@]}" --data d/a_train.bin --valid-data cut.bin \
        --eval-interval 5
    if [[ ! -x $standin ]]; then return; fi
    cp d/a_train.bin cut.bin
    cut_in_use 'error: --data cut.bin: cut short while it was read' cut.bin "$standin" \
        "${common[@]}" "${ranks[@]}" --data cut.bin
    cp one/c_val.bin cut.bin
    cut_in_use 'error: --valid-data cut.bin: cut short while it was read' cut.bin "$standin" \
        "${common[@]}" "${ranks[@]}" --data d/a_train.bin --valid-data cut.bin --eval-interval 5
    evaluated_later "$standin" "${common[@]}" "${ranks[@]}" --data d/a_train.bin \
        --valid-data cut.bin --eval-interval 5
}

# As many shards as a process may have files open by default, and more.
test_many_shards_are_read() {
    local i
    mkdir many
    for i in {1..80}; do cp one/c_val.bin "many/$i.bin"; done
    (ulimit -S -n 40 && train_gpt "${common[@]}" --data 'many/*.bin' --train-iters 1) >log 2>&1 ||
        fail "$(tail -n 1 log)"
}

# ---- beside the shards --------------------------------------------------------------------------

test_tokenize_leaves_other_tokenizers_alone() {
    mkdir -p shared
    tokenize shared/a text1 || return
    # a tokenizer of other tokens, with the same ids: bytes 65 and 66 change places
    cp shared/a_tokenizer.bin other.bin && poke other.bin $((1024 + 2 * 65)) '\1\102\1\101'
    cp -r shared before
    tokenize shared/b --tokenizer other.bin text2 || return
    diff -r before shared | grep -v '^Only in shared: b_' >changed && fail "$(cat changed)"
    local part
    for part in a b; do
        expect_status 0 train_gpt "${common[@]}" --data "shared/${part}_train.bin" --sample-only \
            --sample-prompt 'AB' || return
        grep -qa '^AB' log || fail "$part: no prompt"
    done
    # shards of older versions, with tokenizer.bin beside them
    mkdir older && cp shared/a_train.bin older/x.bin && cp shared/a_tokenizer.bin \
        older/tokenizer.bin && cp other.bin older/y_tokenizer.bin
    expect_status 0 train_gpt "${common[@]}" --data older/x.bin --sample-only --sample-prompt AB
    poke older/x.bin 16 '\0\0\0\0' # shards that do not say which
    expect_status 0 train_gpt "${common[@]}" --data older/x.bin --sample-only --sample-prompt AB
    rm older/tokenizer.bin
    expect_said 1 'no tokenizer.bin beside' train_gpt "${common[@]}" --data older/x.bin \
        --sample-only --sample-prompt AB
    expect_status 0 train_gpt "${common[@]}" --data older/x.bin --sample-only --sample-prompt AB \
        --tokenizer shared/a_tokenizer.bin --sample-length 8
    [[ $(grep -a warning log) == 'warning: the weights are random: '* &&
        $(grep -ac warning log) -eq 1 ]] ||
        fail "--tokenizer is named: $(cat log)"
}

# The one of the shards' own name comes before others of the same tokens.
test_shards_take_the_tokenizer_of_their_name() {
    tokenize same/mine text1 || return
    tokenize same/again --tokenizer same/mine_tokenizer.bin text2 || return
    local part
    for part in mine again; do
        expect_said 0 "--tokenizer same/${part}_tokenizer.bin" train_gpt "${common[@]}" \
            --data "same/${part}_tr*.bin" --plan
    done
}

# Shards without a mark, as llm.c's: only the tokenizers beside them tell them apart.
test_unmarked_shards_of_two_tokenizers_are_noticed() {
    local folder
    for folder in p q r; do
        mkdir -p unmarked/$folder && cp d/a_train.bin unmarked/$folder &&
            cp d/a_tokenizer.bin unmarked/$folder/tokenizer.bin
        poke unmarked/$folder/a_train.bin 16 '\0\0\0\0'
    done
    poke unmarked/q/tokenizer.bin $((1024 + 2 * 65)) '\1\102\1\101'
    expect_said 0 'warning: unmarked/q/tokenizer.bin: other tokens than unmarked/p/tokenizer.bin' \
        train_gpt "${common[@]}" --data 'unmarked/*/*train.bin' --plan
    has log '--tokenizer unmarked/p/tokenizer.bin' || fail "$(cat log)"
    expect_status 0 train_gpt "${common[@]}" --data 'unmarked/[pr]/*train.bin' --plan
    ! has log warning || fail "$(cat log)"
}

# A run with sequences of another length continues at the same token. At this rate nothing is
# learned, so that a step's loss is its data's.
test_another_length_continues_at_the_same_token() {
    local still=(--model llama-tiny --micro-batch-size 2 --log-interval 1 --no-shuffle --lr 1e-30
        --data one/c_train.bin --train-iters) length wanted
    expect_status 0 train_gpt "${still[@]}" 8 --seq-length 32 --save length/32 || return
    wanted=$(grep -o '^step  *5/8 | loss [0-9.]*' log | grep -o '[0-9.]*$')
    for length in 64 16; do # 256 tokens
        expect_status 0 train_gpt "${still[@]}" $((128 / length)) --seq-length $length \
            --save length/$length || return
        expect_status 0 train_gpt "${still[@]}" $((128 / length + 1)) --seq-length 32 \
            --save length/$length --resume latest || return
        ! has log 'another order' || fail "$length: $(grep order log)"
        grep -q "^step .* | loss $wanted" log || fail "$length: not $wanted: $(grep ^step log)"
    done
}

# The best validation loss so far is that of the data and the sequences that are evaluated now.
test_other_validation_data_have_their_own_best() {
    local words=("${common[@]}" --data d/a_train.bin --eval-interval 2 --save-interval 2 --save best)
    expect_status 0 train_gpt "${words[@]}" --valid-data d/b_train.bin --train-iters 4 || return
    cp d/b_train.bin renamed.bin
    expect_status 0 train_gpt "${words[@]}" --valid-data renamed.bin --train-iters 6 --lr 1e-30 \
        --resume latest || return
    ! has log 'valid-data changed' || fail "$(grep changed log)"
    python3 -c 'import random; print(random.Random(1).randbytes(3000).hex())' >noise
    tokenize harder/x noise --valid-fraction 0 || return
    expect_said 0 '--valid-data changed' train_gpt "${words[@]}" --valid-data harder/x_train.bin \
        --train-iters 8 --resume latest || return
    has log '(best)' || fail "$(grep eval log)"
    [[ $(readlink best/best) == step_00000008 ]] || fail "best is $(readlink best/best)"
    expect_said 0 'an evaluation has 64 tokens, had ' train_gpt "${words[@]}" \
        --valid-data harder/x_train.bin --train-iters 10 --resume latest --eval-iters 1
    ! has log 'valid-data changed' || fail "$(grep changed log)"
}

# Files that are given one by one become a pattern, with braces where others are beside them.
test_validation_data_in_the_training_data_are_said() {
    mkdir -p both && cp d/a_train.bin both/a.bin && cp d/b_train.bin both/b.bin
    expect_said 0 'warning: --valid-data: d/b_train.bin is also in --data' train_gpt \
        "${common[@]}" --data "both/*.bin" --valid-data d/b_train.bin --train-iters 1 || return
    expect_status 0 train_gpt "${common[@]}" --data both/a.bin --valid-data d/b_train.bin \
        --train-iters 1 || return
    ! has log 'is also in' || fail "$(cat log)"
}

test_patterns_of_every_kind_find_the_tokenizer() {
    local folder data
    for folder in w 'x[1]' y z; do
        mkdir -p "kinds/$folder" && cp d/a_tokenizer.bin "kinds/$folder" &&
            cp d/a_train.bin "kinds/$folder" && cp d/b_train.bin "kinds/$folder/a_2.bin"
    done
    for data in 'kinds/w/a_train.bin kinds/y/a_train.bin' 'kinds/y/a_train.bin kinds/w/a_2.bin' \
        'kinds/x\[1\]/a_2.bin' 'kinds/?/*in.bin' '{kinds/w/a_tr,d/a_tr,kinds/y/a_2}*.bin'; do
        set -f # words, not files
        # shellcheck disable=SC2086
        set -- $data
        set +f
        expect_status 0 train_gpt "${common[@]}" --data "$@" --sample-only --sample-prompt AB
        grep -qa '^AB' log || fail "$data: $(tail -n 1 log)"
    done
}

test_shards_are_read_in_the_order_of_their_names() {
    local data first=''
    for data in 'd/[ab]_train.bin' 'd/{b,a}_train.bin' '{d/b,d/a}_train.bin'; do
        expect_status 0 train_gpt "${unordered[@]}" --data "$data" --train-iters 1 || return
        : "${first:=$(grep '^step' log | cut -d '|' -f 2)}"
        if [[ -z $first ]] || ! grep -qF "$first" log; then fail "$data: $(cat log), not $first"; fi
    done
}

test_tokenize_leaves_no_older_validation_shard() {
    tokenize stale/x text1 || return
    [[ -e stale/x_val.bin ]] || fail "no validation shard"
    tokenize stale/x --valid-fraction 0 text2 || return
    [[ ! -e stale/x_val.bin ]] || fail "the validation shard of other text is still there"
    has log 'stale/x_val.bin' || fail "it is not said: $(cat log)"
    compgen -G 'stale/*.new' >found && fail "left over: $(cat found)"
    return 0
}

test_odd_surroundings_are_taken() {
    printf '\357\273\277model llama-tiny\r\ndata d/a_train.bin\r\nmicro-batch-size 2\r\n' >bom.txt
    expect_status 0 train_gpt --config bom.txt --train-iters 1
    OMP_NUM_THREADS=99999999 expect_said 0 'OMP_NUM_THREADS' train_gpt "${common[@]}" \
        --data d/a_train.bin --train-iters 1
}

run_tests
