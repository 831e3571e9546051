"""scripts/estimate: figures worked out again from the records, memory as the trainer plans it."""

import json
import os
import re

from check import ROOT, call, fails, lines, main, refused, run, same, write
from llm8.estimate import main as estimate

PLAN = """#!/bin/sh
case "$*" in *--refuse*) echo 'error: --refuse: no such thing' >&2; exit 1;; esac
echo "  all                      99.00 GiB of another table" >&2
echo "Memory plan"
case "$*" in
*--fp8-format*--fp8-format' 'none*) echo "  all                                  11.00 GiB";;
*--fp8-format*--micro-batch-size' '16*) echo "  all                                  38.25 GiB";;
*--micro-batch-size' '16*--gpus' '2*) echo "  all                                  22.00 GiB";;
*--gpus' '4*) echo "  all                                  12.50 GiB";;
*) echo "  all                                  42.00 GiB";;
esac
"""


def record(model, gpus, rate, tflops, precision="bf16", **more):
    fp8 = precision != "bf16"
    return {"date": "2026-11-20T10:00:00Z", "machine": {"gpu": "NVIDIA H200"}, "model": model,
            "micro_batch": 16, "seq_length": 2048, "gpus": gpus, "precision": precision,
            "tokens_per_s": rate, "recipe": "delayed" if fp8 else None, "lm_head": "bf16",
            "tflops": tflops, **more}


def sizes(options):
    out = run("train_gpt", *options, "--plan").out
    return (int(re.search(r"parameters +([\d,]+)", out)[1].replace(",", "")),
            float(re.search(r"FLOPs a token +(\S+)", out)[1]))


LLAMA = ("--model", "llama-1b")
PARAMETERS, FLOPS = sizes(LLAMA)


def at(rate, gpus=1):
    return rate * FLOPS / 1e12 / gpus


RECORDS = [
    record("llama-1b", 1, 90000, at(90000), date="2026-11-01T00:00:00Z"),
    record("llama-1b", 1, 120000, at(120000)),
    record("llama-1b", 1, 130000, at(130000), arguments="--gemm-autotune"),
    record("gpt2-124m", 1, 640000, 550.0, seq_length=1024),
    record("llama-1b", 4, 456000, at(456000, 4)),
    record("llama-1b", 1, 160000, at(160000), "fp8"),
]


def rows(result):
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("precision"))
    found = {}
    for line in lines[start + 1:]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) < 7:
            break
        found[(cells[0], int(cells[1]))] = cells
    return found


def number(text):
    return float(text.replace(",", "").lstrip("~").split()[0])


def close(value, expected, digits=0.006):
    assert abs(value / expected - 1) <= digits, f"{value}, not {expected}"


def prepare():
    os.makedirs("bin")
    os.symlink(os.path.join(ROOT, "train_gpt"), "bin/train_gpt")
    write("bin/train_gptcu", PLAN)
    os.chmod("bin/train_gptcu", 0o755)
    os.environ["LLM8_BIN"] = "bin"
    write("bench.jsonl", lines(RECORDS))


def test_measured_models_are_as_measured():
    result = call(estimate, *LLAMA, "--tokens", "20B", "--bench", "bench.jsonl", "--price", 3)
    found = rows(result)
    assert f"{PARAMETERS:,} parameters" in result.out and "20,000,000,000 tokens" in result.out
    row = found["bf16", 1]
    close(number(row[2]), 120000)  # the newest
    assert row[4] == "46 h 18" # of 20e9 / 120000 seconds
    close(number(row[5]), 20e9 / 120000 / 3600, 0.02)
    close(number(row[7]), 3 * 20e9 / 120000 / 3600, 0.02)
    assert result.out.endswith("cost: GPU hours x 3 (--price), in its currency\n"), result.out
    assert row[6] == "42.00 GiB" and "llama-1b measured 2026-11-20" in row[8]
    close(number(found["fp8", 1][2]), 160000)
    assert found["fp8", 1][6] == "38.25 GiB", "not the micro-batch of the record"
    assert fails(close, number(row[2]), 160000)
    # where a commit has all that the front page shows, its records
    whole = [record(model, 1, rate, times * at(rate), precision, lm_head=head, commit="whole")
             for model, times in (("llama-1b", 1), ("gpt2-124m", 0.1))
             for rate, precision, head in ((110000, "bf16", "bf16"), (1, "fp8", "bf16"),
                                           (2, "fp8", "fp8"))]
    for left_out, rate in ((0, 110000), (1, 120000)):
        write("front.jsonl", lines([*whole[left_out:], RECORDS[1] | {"date": "2026-11-21"}]))
        found = rows(call(estimate, *LLAMA, "--tokens", "20B", "--bench", "front.jsonl"))
        close(number(found["bf16", 1][2]), rate)


def test_a_head_in_fp8_is_estimated_so():
    words = (*LLAMA, "--tokens", "1e9", "--bench", "bench.jsonl")
    same(list(rows(call(estimate, *words))), [("bf16", 1), ("fp8", 1)])
    same(list(rows(call(estimate, *words, "--fp8-lm-head"))), [("bf16", 1), ("fp8-head", 1)])
    same(list(rows(call(estimate, *words, "--fp8-lm-head", "--no-fp8-lm-head"))),
         [("bf16", 1), ("fp8", 1)])
    same(list(rows(call(estimate, *words, "--fp8-lm-head", "--precision", "fp8"))), [("fp8", 1)])
    same(list(rows(call(estimate, *words, "--fp8-lm-head", "--fp8-recipe", "blockwise"))),
         [("bf16", 1), ("fp8-blockwise-head", 1)])
    same(list(rows(call(estimate, *words, "--fp8-lm-head", "--fp8-recipe", "tensorwise"))),
         [("bf16", 1), ("fp8-tensorwise", 1)])
    found = rows(call(estimate, *words, "--fp8-format", "hybrid", "--micro-batch-size", "16"))
    same([found["bf16", 1][6], found["fp8", 1][6]], ["11.00 GiB", "38.25 GiB"])


def test_a_config_of_several_gpus():
    """Its --gpus is not that of the rows."""
    write("config.txt", "model llama-1b\ngpus 4\n")
    words = "--config", "config.txt", "--bench", "bench.jsonl", "--gpus", "1,4"
    found = rows(call(estimate, *words))
    same([found["bf16", gpus][6] for gpus in (1, 4)], ["42.00 GiB", "12.50 GiB"])


def test_other_counts_scale_as_measured():
    scaling = "~: more GPUs than measured: linear scaling is assumed"
    said = call(estimate, *LLAMA, "--tokens", "1e9", "--bench", "bench.jsonl", "--gpus", "4,8")
    same(said.out.count(scaling), 1)
    assert scaling not in call(estimate, *LLAMA, "--bench", "bench.jsonl", "--gpus", "4",
                               "--precision", "bf16").out
    found = rows(said)
    close(number(found["bf16", 4][2]), 456000)
    assert found["bf16", 4][6] == "12.50 GiB" and "measured" in found["bf16", 4][7]
    close(number(found["bf16", 8][2]), 2 * 456000)
    assert found["bf16", 8][2][0] == "~" and "2026-11-20 on 4" in found["bf16", 8][7]
    # the model's own speed, and not another's on as many GPUs
    write("others.jsonl", lines([record("llama-1b", 1, 120000, at(120000)),
                                 record("gpt2-1558m", 2, 99000, 486.0, micro_batch=32)]))
    row = rows(call(estimate, *LLAMA, "--tokens", "1e9", "--bench", "others.jsonl", "--gpus", "2",
                    "--precision", "bf16"))["bf16", 2]
    assert row[2] == "~240,000" and "llama-1b measured" in row[7], row
    assert row[6] == "22.00 GiB", "not the micro-batch of the model's record"


def test_other_models_go_by_the_nearest():
    for options, name in ((("--model", "gpt2-124m", "--num-layers", "6"), "gpt2-124m"),
                          (("--model", "llama-3-8b"), "llama-1b")):
        _, flops = sizes(options)
        by = {"gpt2-124m": 550.0, "llama-1b": at(120000)}[name]
        row = rows(call(estimate, *options, "--tokens", "1B", "--bench", "bench.jsonl"))["bf16", 1]
        assert f"by the TFLOP/s of {name}" in row[7], row
        close(number(row[2]), by * 1e12 / flops)


def test_other_options_than_the_records_are_marked():
    def rate_of(*options):
        result = call(estimate, *LLAMA, "--tokens", "1B", "--bench", "bench.jsonl", "--precision",
                      "bf16", *options)
        row = rows(result)["bf16", 1]
        return row[2], row[4], result.out

    plain = rate_of("--micro-batch-size", 16, "--recompute", "none", "--optimizer=adamw")
    assert plain[0] == "120,000" and "~" not in plain[2], plain
    # a quarter of the blocks' work besides; the head is 128256 x 2048
    rate, time, out = rate_of("--recompute", "block")
    again = 1 + 0.25 * (1 - 6 * 128256 * 2048 / FLOPS)
    assert rate[0] == time[0] == "~", out
    close(number(rate), 120000 / again)
    assert (f"~: not as measured: --recompute block (measured: none; its {100 * again - 100:.0f}% "
            "more work is counted)\n") in out, out
    rate, _, out = rate_of("--optimizer", "muon", "--micro-batch-size", 4)
    assert rate == "~120,000", out
    assert "--optimizer muon (measured: adamw), --micro-batch-size 4 (measured: 16)" in out, out
    longer = rate_of("--seq-length", 4096)
    assert longer[0][0] == "~" and "--seq-length 4096 (measured: 2048)\n" in longer[2], longer


def test_tokens_are_those_of_the_steps():
    for words, steps in (((), 1000), (("--train-iters", 3000), 3000), (("--tokens", "1B"), None)):
        out = call(estimate, *LLAMA, "--bench", "bench.jsonl", "--global-batch-size", 512,
                   *words).out
        assert (f"training   {steps * 512 * 2048:,} tokens in {steps:,} steps (--train-iters or"
                if steps else "training   1,000,000,000 tokens, ") in out, out


def test_a_batch_that_the_ranks_cannot_share_has_no_price():
    words = (*LLAMA, "--bench", "bench.jsonl", "--precision", "bf16", "--gpus", "3,4")
    said = "3 GPUs: --global-batch-size 64: must be a multiple of --micro-batch-size 16 x 3 ranks\n"
    result = call(estimate, *words, "--micro-batch-size", 16, "--global-batch-size", 64)
    assert said in result.out and rows(result)["bf16", 3][2:7] == ["-"] * 5, result.out
    assert rows(result)["bf16", 4][2] == "456,000", result.out
    write("batch.txt", "global-batch-size 64\nmicro-batch-size 16\n")
    assert said in call(estimate, *words, "--config", "batch.txt").out
    # if it is not given, each rank has a micro-batch, and a step has the tokens of all
    result = call(estimate, *words, "--micro-batch-size", 16)
    steps = 1000 * 16 * 2048
    assert f"training   {steps:,} tokens on each GPU in 1,000 steps" in result.out, result.out
    close(number(rows(result)["bf16", 4][5]), 4 * 4 * steps / 456000 / 3600, 0.02)
    assert "must be" not in result.out, result.out


def test_tiny_models_have_no_speed():
    row = rows(call(estimate, "--model", "llama-tiny", "--tokens", "1B", "--bench", "bench.jsonl"))
    assert row["bf16", 1][2:6] == ["-"] * 4 and "no such record" in row["bf16", 1][7], row
    short = rows(call(estimate, *LLAMA, "--tokens", "10M", "--bench", "bench.jsonl"))["bf16", 1]
    assert short[4] == "1 min" and short[5] == "0.02", short


def test_without_records_it_says_so():
    result = call(estimate, *LLAMA, "--tokens", "1B", "--bench", "none.jsonl")
    row = rows(result)["bf16", 1]
    assert row[2:6] == ["-"] * 4 and row[6] == "42.00 GiB" and "make bench" in row[7]
    os.rename("bin/train_gptcu", "bin/away")
    assert "make train_gptcu" in call(estimate, *LLAMA, "--tokens", "1B").out
    os.rename("bin/away", "bin/train_gptcu")


def test_faults_are_named():
    good = (*LLAMA, "--bench", "bench.jsonl", "--tokens", "1B")
    write("bad.jsonl", json.dumps(RECORDS[0]) + "\n{}\n")
    for words, *parts in (
            (("--tokens", "20Q"), "--tokens 20Q", "10B"), (("--tokens", "0"), "--tokens 0"),
            (("--gpus", "1,x"), "--gpus x", "1 to 4096"),
            (("--gpus", "²"), "--gpus ²", "1 to 4096"),
            *((("--price", price), f"--price {price}: must be a number from 0 on")
              for price in ("-3", "nan", "inf")),
            (("--precision", "fp4"), "--precision fp4", "bf16, fp8"),
            (("--model", "gpt5"), "--model gpt5: must be one of"),
            (("--token", "20B"), "unknown option --token; did you mean --tokens? (--help"),
            (("--lrr", "1"), "unknown option --lrr; did you mean --lr? (--help"),
            (("--no-such-thing", "1"), "unknown option --no-such-thing (--help"),
            (("--device", "A100"), "--device A100: bench.jsonl has records of NVIDIA H200 only"),
            (("--bench", "bad.jsonl"), "bad.jsonl, line 2", "not a record: without model, gpus")):
        refused(call(estimate, *good, *words), *parts)
    assert rows(call(estimate, *good, "--device", "h200"))["bf16", 1][3] != "-"
    os.environ["LLM8_BIN"] = "nowhere"
    refused(call(estimate, *good), "nowhere/train_gpt is not built: run make")


if __name__ == "__main__":
    prepare()
    main()
