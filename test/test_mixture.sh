#!/usr/bin/env bash
# Mixtures of data: three sources over two epochs, killed and resumed; what is refused; what the run and
# its records say of each source.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

mixture='0.5 d1/x_train.bin 0.3 d2/x_train.bin 0.2 d3/x_train.bin'
common=(--model llama-tiny --micro-batch-size 2 --global-batch-size 12 --seq-length 32 --lr 3e-3
    --log-interval 1 --data "$mixture")
valid=(--valid-data '1 d1/x_val.bin 1 d2/x_val.bin 2 d3/x_val.bin' --eval-interval 5 --eval-iters 1)

run() {
    train_gpt "${common[@]}" "$@"
}

# Sources of 63, 125 and 188 sequences; two epochs of the mixture are 63 steps.
prepare() {
    local i
    for i in 1 2 3; do
        make_text $i $((2500 * i)) | head -c $((2500 * i)) >text$i
        expect_status 0 "$root/tokenize" --output-prefix d$i/x text$i --valid-fraction 0.2
    done
}

test_a_mixture_says_its_sources() {
    local steps
    expect_status 0 run "${valid[@]}" --epochs 2 --save whole || return
    says ' tokens in 3 shards, 376 sequences an epoch' 'source      d1/x_train.bin: 50% of the sequences, ' ' 63 steps of 384 tokens' \
        ' 2.01 epochs' 'source      d3/x_val.bin: 50% of the loss, ' '  valid loss ' ' of d2/x_val.bin' \
        'source d1/x_train.bin: 12,096 tokens, 6.00 epochs' 'source d2/x_train.bin: 7,264 tokens, ' \
        'source d3/x_train.bin: 4,832 tokens, '
    steps=$(tail -n 1 whole/metrics.jsonl)
    [[ $steps == *'"source_tokens":[12096,7264,4832],"source_epochs":[6,1.8'* ]] || fail "$steps"
    has whole/config.txt 'epochs 2' || fail "$(<whole/config.txt)"
    ! has whole/config.txt train-iters || fail "$(<whole/config.txt)"
    python3 - <<'END' || fail "records"
import json
records = [json.loads(line) for line in open("whole/metrics.jsonl")]
start, steps = records[0], [r for r in records if r["kind"] == "step"]
assert [s["data"] for s in start["sources"]] == [f"d{i}/x_train.bin" for i in (1, 2, 3)]
assert [s["share"] for s in start["valid_sources"]] == [0.25, 0.25, 0.5]
assert start["options"]["train-iters"] == start["options"]["lr-decay-iters"] == "63"
for r in steps:  # never a sequence away from their shares
    assert sum(r["source_tokens"]) == r["tokens"]
    for n, share in zip(r["source_tokens"], (0.5, 0.3, 0.2)):
        assert abs(n / 32 - share * r["tokens"] / 32) < 1
for r in records:
    if r["kind"] == "eval":
        mean = sum(w * l for w, l in zip((0.25, 0.25, 0.5), r["source_losses"]))
        assert abs(mean - r["valid_loss"]) < 1e-9
END
}

# An evaluation of the sources alone has the same losses as one of the mixture.
test_sources_are_evaluated_as_alone() {
    local i
    expect_status 0 run --load whole/latest --eval-only "${valid[@]}" --eval-iters 0 || return
    cp log all
    for i in 1 2 3; do
        expect_status 0 run --load whole/latest --eval-only --valid-data d$i/x_val.bin --eval-iters 0 || return
        is "$(grep -oE 'valid loss [0-9.]+' log)" "$(grep -oE "valid loss [0-9.]+ of d$i/" all | cut -d' ' -f1-3)"
    done
}

test_a_killed_run_goes_on() {
    local i
    for i in 1 2; do
        stopped KILL "^step +$((20 * i))/63 " "$root/train_gpt" "${common[@]}" --epochs 2 \
            --save parts --resume latest --save-interval 7 "${valid[@]}" || return
    done
    expect_status 0 train_gpt --config parts/config.txt --resume latest || return
    says ' 63 steps of 384 tokens'
    same_checkpoint {whole,parts}/latest || fail "another end: $(<difference)"
    cmp <(grep -o '"source_tokens.*' <(tail -n 1 whole/metrics.jsonl)) \
        <(grep -o '"source_tokens.*' <(tail -n 1 parts/metrics.jsonl)) || fail "other sources"
    # without --config too; 672 of the 752 sequences are read, the others come in smaller batches
    cp -r parts again && expect_status 0 train_gpt --save again --resume again/step_00000056 \
        --global-batch-size 6 || return
    says ' 70 steps of 192 tokens'
    expect_status 0 train_gpt --save again --resume again/step_00000056 --epochs 3 || return
    says ' 94 steps of 384 tokens'
}

# test_mixture.c has which samples ranks read.
test_ranks_evaluate_the_same() {
    [[ -x $standin ]] || { skip "no C++ compiler, so no stand-in trainer"; return; }
    local ranks
    for ranks in 1 3; do
        expect_status 0 "$standin" "${common[@]}" "${valid[@]}" --no-cuda-graphs --distributed-timeout 20 \
            --gpus $ranks --load whole/latest --eval-only --eval-iters 0 || return
        grep -oE 'valid loss [0-9.]+' log >losses.$ranks
    done
    is "$(wc -l <losses.1)" 4
    is "$(<losses.3)" "$(<losses.1)"
}

# A changed weight is refused as changed data are, and accepted by the same option.
test_changed_weights_are_refused() {
    local data
    data=${mixture/0.5/0.6}
    rm -rf s && cp -r whole s
    expect_message 1 "error: --data d1/x_train.bin: 6/11 of the samples, and not what the checkpoint's run read in its \
place (362da0cf 5/10 of the samples); --accept-data-change" run --data "$data" --train-iters 65 --save s --resume latest
    expect_message 0 '--data changed: d1/x_train.bin: 6/11' run --data "$data" --train-iters 65 --save s --resume latest \
        --accept-data-change
    rm -rf s && cp -r whole s # the same weights, written otherwise
    expect_message 0 '!changed' train_gpt "${common[@]}" --data '5e1 ./d1/x_train.bin 30 d2/x_train.bin 20 d3/x_train.bin' \
        --train-iters 65 --save s --resume latest
}

test_wrong_mixtures_are_refused() {
    mkdir -p '2024 data' && cp d1/x_train.bin '2024 data/x.bin'
    cp -r d2 other && poke other/x_train.bin 16 '\1\2\3\4'
    cp -r d2 $'of a\ttab'
    check_rows <<'ROWS'
1|run --data "0.5 d1/x_train.bin 0.5"|error: --data 0.5: a weight without a path after it
1|run --data "1 d1/x_train.bin 1 no/*.bin"|error: --data no/*.bin: no such file; make shards
1|run --data "1 d1/x_train.bin 1 other/x_train.bin"|error: --data other/x_train.bin: made with another tokenizer than
1|run --valid-data "1 d1/x_val.bin 2"|error: --valid-data 2: a weight without a path after it
0|run --epochs 0.01 --data "2024 data/*.bin"| 1 step of
0|run --epochs 2 --plan|--train-iters 63 --epochs 2|--lr-decay-iters 63
1|train_gpt --epochs 2 --plan|error: --data is missing
0|train_gpt --epochs 2 --list-tensors|transformer.ln_f.weight 768
0|train_gpt "${common[@]}" --data $'1 d1/x_train.bin 1 of a\ttab/x_train.bin' --train-iters 1|tab/x_train.bin: 50% of
0|run --valid-data d1/x_val.bin --train-iters 1 --eval-iters 1 --micro-batch-size 1 --global-batch-size 1|, 1 sequence an eval
ROWS
}

run_tests
