#!/usr/bin/env bash
# Bad input: each case ends with status 1 and one line on stderr that names what, which value and
# the remedy; and what was there before is there after.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

common=(--model llama-tiny --micro-batch-size 2 --train-iters 3)
good=(--data d/x_train.bin)

# check "fragment|fragment" COMMAND...: how it must fail, and what its error must say.
check() {
    local fragments=$1 status=0 fragment
    shift
    "$@" >out 2>errors || status=$?
    problem=''
    if [[ $status -ne 1 ]]; then problem="exit status $status"; fi
    if [[ $(wc -l <errors) -ne 1 ]] || ! grep -q '^error: ' errors; then
        problem+=" not one line"
    fi
    if LC_ALL=C grep -q '[[:cntrl:]]' errors; then problem+=" not printable"; fi
    while IFS= read -r fragment; do
        if ! has errors "$fragment"; then problem+=" no '$fragment'"; fi
    done < <(tr '|' '\n' <<<"$fragments")
    [[ -z $problem ]]
}

refuses() {
    check "$@" || fail "$problem: ${*:2} | $(head -n 3 errors)"
}

prepare() {
    make_shards 1500
    expect_status 0 train_gpt "${common[@]}" "${good[@]}" --save s || return
    cp -r s/step_00000003 whole
}

test_the_checker_sees_faults() {
    local command=(train_gpt "${common[@]}" --data no.bin)
    check 'error: --data no.bin' "${command[@]}" || fail "a right error is refused: $problem"
    ! check 'error: --data yes.bin' "${command[@]}" || fail "a missing fragment passes"
    ! check 'error: ' train_gpt --help || fail "success passes"
    ! check 'error: ' bash -c 'echo error: x >&2; exit 2' || fail "another exit status passes"
    ! check 'error: ' bash -c 'echo error: x >&2; echo y >&2; exit 1' || fail "two lines pass"
    ! check 'error: ' bash -c 'printf "error: \033[2J\n" >&2; exit 1' || fail "an escape passes"
}

# What a file says, or is named, makes no second line and reaches no terminal.
test_messages_are_one_printable_line() {
    local odd=$'o\nd\e[2Jd' said='o\nd\x1b[2Jd' json='o\nd\u001b[2Jd' train=(train_gpt "${common[@]}")
    local gpt2='"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64'
    refuses "--data $said.bin: no such file" "${train[@]}" --data "$odd.bin"
    cp d/x_train.bin "$odd.bin"
    refuses "--data $said.bin: token " "${train[@]}" --data "$odd.bin" --vocab-size 100
    refuses "--tokenizer $said: No such file" "${train[@]}" "${good[@]}" --tokenizer "$odd"
    echo x >"$odd"
    refuses "--tokenizer $said: " "${train[@]}" "${good[@]}" --tokenizer "$odd"
    printf 'arch %s\n' $'x\e[2J' >c
    refuses 'c, line 1: --arch x\x1b[2J: must be' "${train[@]}" "${good[@]}" --config c
    printf 'data "o\\nd\e[2Jd_*.bin"\n' >c
    refuses "--data ${said}_*.bin: no such file" "${train[@]}" --config c
    refuses "unknown option --$said" "${train[@]}" "--$odd" 1
    mkdir -p hf
    echo "{\"model_type\": \"$json\"}" >hf/config.json
    refuses "$said" "${train[@]}" "${good[@]}" --load hf
    echo "{\"model_type\": \"gpt2\", $gpt2, \"vocab_size\": \"$json\"}" >hf/config.json
    refuses 'vocab_size' "${train[@]}" "${good[@]}" --load hf
}

# Of each library one file that is damaged: test_data.c and test_damage.c have the other ways.
test_shards() {
    local train=(train_gpt "${common[@]}" --data)
    refuses '--data missing_*.bin: no such file|make shards with ./tokenize' \
        "${train[@]}" 'missing_*.bin'
    refuses "--data d: a folder; give its files, such as 'd/*.bin'" "${train[@]}" d
    head -c 1500 d/x_train.bin >cut.bin
    refuses '--data cut.bin: the header says|the file holds 238|damaged or cut short' \
        "${train[@]}" cut.bin
    cp d/x_train.bin alone.bin # without a tokenizer beside it
    refuses '--data alone.bin: token |outside the vocabulary of 100|--vocab-size' \
        "${train[@]}" alone.bin --vocab-size 100
    refuses '--data d/x_train.bin: |sequences of 64 tokens, fewer than|--global-batch-size 500' \
        "${train[@]}" d/x_train.bin --global-batch-size 500
    refuses '--data d/x_val.bin: |tokens, fewer than one sequence of 512 (--seq-length)' \
        "${train[@]}" d/x_val.bin --seq-length 512
    refuses '--valid-data cut.bin: the header' "${train[@]}" d/x_train.bin --valid-data cut.bin
    refuses '--data is missing|--help' train_gpt "${common[@]}"
    refuses '--tokenizer text: not a tokenizer.bin|./tokenize' \
        "${train[@]}" d/x_train.bin --tokenizer text
    refuses "--tokenizer d/x_tokenizer.bin: vocabulary 257|the model's 250 (--vocab-size)" \
        "${train[@]}" d/x_train.bin --tokenizer d/x_tokenizer.bin --vocab-size 250
}

test_checkpoints() {
    local resume=(train_gpt "${common[@]}" "${good[@]}" --train-iters 4 --resume)
    local optimizer=bad/optimizer-0-of-1.safetensors shows='--list-checkpoints shows which'
    cp -r whole bad
    expect_status 0 "${resume[@]}" bad
    poke $optimizer 5000 '\252'
    refuses "--resume $optimizer: damaged: its checksum is|$shows" "${resume[@]}" bad --save other
    refuses '--hidden-size 32: it is 64 in the checkpoint whole|leave the option out' \
        "${resume[@]}" whole --hidden-size 32
    refuses "--resume nowhere: no such folder|$shows" "${resume[@]}" nowhere
    refuses '--resume latest: needs --save DIR' "${resume[@]}" latest
    refuses "--resume s: a run's folder; give one of its checkpoints, such as s/latest" \
        "${resume[@]}" s
    refuses "--load s: a run's folder; give one of its checkpoints, such as s/latest" \
        train_gpt --load s --sample-only
    refuses '--list-checkpoints: none under nowhere' train_gpt --save nowhere --list-checkpoints
}

test_nothing_is_lost() {
    local before says options save=(train_gpt "${common[@]}" --save s)
    before=$(cd s && find . -type f ! -name .lock -exec cksum {} + | sort)
    while IFS='!' read -r says options; do
        # shellcheck disable=SC2086 # words
        refuses "$says" "${save[@]}" $options
    done <<'ROWS'
it is 64 in the checkpoint s/step_00000003!--data d/x_train.bin --resume latest --hidden-size 32
no such file!--data no.bin
must divide!--data d/x_train.bin --num-attention-heads 3
a run has saved there up to step 3|--resume latest|another --save!--data d/x_train.bin
ROWS
    refuses '--save s: a run has saved there up to step 3' train_gpt --config s/config.txt
    [[ $before == "$(cd s && find . -type f ! -name .lock -exec cksum {} + | sort)" ]] || fail "s has changed"
}

test_save_folders() {
    local save=(train_gpt "${common[@]}" "${good[@]}" --save)
    refuses '--save text: the folder could not be made: a file of that name is in the way' \
        "${save[@]}" text
    mkdir -p taken/metrics.jsonl
    refuses '--save taken/metrics.jsonl: Is a directory' "${save[@]}" taken
    refuses '--metrics taken: Is a directory' train_gpt "${common[@]}" "${good[@]}" --metrics taken
    refuses '--dump-gradients nowhere/g: No such file or directory' train_gpt "${common[@]}" \
        "${good[@]}" --dump-gradients nowhere/g
}

# Without them, a program's own files would get the numbers 0 to 2, and be printed into.
test_closed_streams_are_no_files() {
    local closed step
    for closed in '<&-' '>&-' '2>&-' '<&- >&-' '<&- >&- 2>&-'; do
        rm -rf closed
        eval '"$root/tokenize" --output-prefix closed/x text' "$closed" || fail "$closed: tokenize"
        cmp -s d/x_train.bin closed/x_train.bin || fail "$closed: another shard"
        eval '"$root/train_gpt" "${common[@]}" "${good[@]}" --log-interval 1 --save closed/s' \
            '--save-interval 1' "$closed" || fail "$closed: train_gpt"
        for step in 1 2 3; do
            [[ -e closed/s/step_0000000$step/meta.json ]] || fail "$closed: no step $step"
        done
        ! "$root/train_gpt" --save closed/s --list-checkpoints 2>&1 | grep -q damaged ||
            fail "$closed: damaged"
        same_checkpoint whole closed/s/step_00000003 || fail "$closed: another end"
        ! grep -rqaE '^step +[0-9]+/' closed || fail "$closed: steps in a file"
    done
}

test_tokenize() {
    local program=$root/tokenize
    refuses '--output-prefix is missing|--help' "$program" text
    refuses 'no text files given|--help' "$program" --output-prefix e/x
    refuses 'nothing.txt: No such file' "$program" --output-prefix e/x nothing.txt
    : >empty.txt
    refuses 'empty.txt: an empty file' "$program" --output-prefix e/x text empty.txt
    [[ ! -e e ]] || fail "of texts that are missing or empty is left: $(ls e)"
    refuses '--valid-fraction 1: must be a number from 0 to below 1' \
        "$program" --output-prefix e/x --valid-fraction 1 text
    refuses '--prefix: no such option|--help' "$program" --prefix e/x text
    refuses '--output-prefix: |its value is missing|--help' "$program" --output-prefix
    refuses 'text: the folder could not be made' "$program" --output-prefix text/x text
    # a full disk: SIGXFSZ is ignored, so that a write beyond the limit fails
    head -c 3000000 /dev/zero >large
    (trap '' XFSZ && ulimit -f 1000 && "$program" --output-prefix e/x large) >log 2>&1
    has log 'error: e/x_train.bin.new: could not be written: File too large' || fail "$(cat log)"
    [[ -z $(find e -name '*.new') ]] || fail "left: $(ls e)"
}

# Whichever of several ends well has made the shards alone.
test_tokenize_at_once() {
    local i pids=() ended=0
    head -c 6000000 /dev/zero | tr '\0' 'a' >many
    for i in 1 2 3 4; do
        { cat many && echo "$i$i"; } >text$i
        "$root/tokenize" --output-prefix m/x text$i >log$i 2>&1 &
        pids+=($!)
    done
    for i in 1 2 3 4; do
        if wait "${pids[i - 1]}"; then
            ended=$((ended + 1))
        else
            grep -qE '^error: m/x_(train|val).bin.new: another ./tokenize' log$i || fail "$(cat log$i)"
        fi
    done
    [[ $ended -ge 1 && -z $(find m -name '*.new') ]] || fail "$ended ended: $(ls m)"
    tail -c 6 m/x_val.bin | od -An -tu2 | grep -qE '(49 +49|50 +50|51 +51|52 +52) +10$' ||
        fail "cut short: $(tail -c 6 m/x_val.bin | od -An -tu2)"
    [[ $(stat -c %s m/x_train.bin) -eq $((1024 + 2 * 5400004)) ]] || fail "$(ls -l m)"
    rm many text[1-4]
}

run_tests
