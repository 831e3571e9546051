#!/usr/bin/env bash
# Spikes, in both trainers and over two ranks: a stretch of other data, which --skip-spikes skips, and
# which docs/resume.md's recipe leaves out afterwards.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
export LLM8_TEST_SMALL_FP8=1
common=(--model llama-tiny --data d/x_train.bin --no-shuffle --micro-batch-size 1
    --global-batch-size 2 --lr 3e-3 --lr-warmup-iters 10 --log-interval 1 --train-iters 150
    --save-interval 47 --keep 0 --fp8-format hybrid --fp8-recipe delayed)
# steps of 128 bytes: those from 141 to 143 meet noise
bad='141 142 143'

prepare() {
    {
        make_text 1 17900 | head -c $((128 * 140))
        awk 'BEGIN { for (srand(1); n < 128 * 3; n++) printf "%c", 33 + int(94 * rand()) }'
        make_text 2 8000
    } >text
    expect_status 0 "$root/tokenize" --output-prefix d/x text
}

# The steps of a run that were skipped for this reason.
skipped_for() {
    grep -F "\"reason\":\"$2\"" "$1/metrics.jsonl" | grep -oE '"step":[0-9]+' | sort -u |
        cut -d : -f 2 | xargs
}

test_spikes_are_skipped() {
    local name words
    while read -ra words; do
        name=${words[0]##*/}
        expect_status 0 "${words[@]}" "${common[@]}" --skip-spikes 5 --save "$name" || return
        is "$(skipped_for "$name" spike)" "$bad"
        is "$(grep -c '^step .*SKIPPED: spike$' log)" 3
        has "$name/latest/meta.json" '"skipped":	3' || fail "$name: not counted"
        expect_message 0 '!SKIPPED' "${words[@]}" "${common[@]}" --save "$name.all" || return
        ! same_checkpoint {"$name","$name.all"}/latest || fail "$name: spikes change nothing"
    done < <(trainers)
}

# docs/resume.md: back to a checkpoint before the spike, without the data of the spike.
test_a_run_goes_back_and_leaves_data_out() {
    local name words
    while read -ra words; do
        name=${words[0]##*/}
        expect_status 0 "${words[@]}" --config "$name.all/config.txt" --resume "$name.all/step_00000094" \
            --iterations-to-skip 141-143 || return
        is "$(grep -c '^step .*SKIPPED: requested$' log)" 3
        is "$(skipped_for "$name.all" requested)" "$bad"
        same_checkpoint {"$name","$name.all"}/latest || fail "$name: the data were not left out"
        # what has been left out once stays so
        expect_status 0 "${words[@]}" --config "$name.all/config.txt" --resume "$name.all/step_00000141" \
            || return
        same_checkpoint {"$name","$name.all"}/latest || fail "$name: config.txt does not say it"
    done < <(trainers)
}

test_too_many_end_the_run() {
    check_rows <<'ROWS'
3|train_gpt "${common[@]}" --skip-spikes 5 --max-skipped 3 --save most|stopped: 3 steps in a row were skipped (--max-skipped)
0|train_gpt "${common[@]}" --iterations-to-skip 3-9 --train-iters 12 --max-skipped 3|
ROWS
}

run_tests
