"""Makes test/kept/VERSION for test/kept_tests.py: the smallest files of every kind that a run of
this version leaves. They are the same each time, but for what tells the time.

    make train_gpt tokenize build/plain/standin_trainer build/standin/libnccl.so.2
    .venv/bin/python test/make_kept.py
"""

import json
import os
import shutil
import sys
import tempfile

import numpy
from check import STANDIN, call, records, run, write
from kept_tests import KEPT, VERSION, loaded, options_of, resumed, train
from llm8 import environment, prepare_choices, shard_header, shards
from shard_tools import sentences, tokens_of

COMMON = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32
    --make-vocab-size-divisible-by 8 --seq-length 16 --micro-batch-size 2 --global-batch-size 4
    --lr 3e-3 --eval-iters 0 --log-interval 1 --no-cuda-graphs"""
NARROW = """--data data/train.bin --valid-data data/val.bin --tokenizer data/tokenizer.bin
    --eval-choices data/choices.bin"""
WIDE = NARROW.replace("data/", "wide/")
GPT2, LLAMA = "--model gpt2-tiny", "--model llama-tiny --num-query-groups 1"
FOLDER = os.path.join(KEPT, VERSION)
DELAYED = "--fp8-format hybrid --fp8-amax-history-len 4"
# name: the trainer, its options, and the last step, which no epoch ends at
RUNS = {
    "gpt2": ("train_gpt", f"{GPT2} {NARROW} --hidden-size 8", 40),
    # the 128 losses and norms that it saves decide that step 132 is skipped
    "fp8": ("train_gpt", f"{LLAMA} {WIDE} {DELAYED} --seed 37 --skip-spikes 1.5 "
            "--iterations-to-skip 3,134", 130),
    "muon": ("train_gpt", f"{LLAMA} {NARROW} --hidden-size 8 --bf16 --optimizer muon "
             "--qk-layernorm --untie-embeddings-and-output-weights --lr-decay-style wsd", 9),
    "ranks": (STANDIN, f"{GPT2} {WIDE} {DELAYED} --adam-dtype bf16 --gpus 2", 9),
    "muon_ranks": (STANDIN, f"{LLAMA} {NARROW} --add-qkv-bias --optimizer muon "
                   "--adam-dtype bf16 --gpus 2", 9),
}


def make_data():
    write("text", "\n".join(sentences(1, 9)))
    write("rows.jsonl", "".join(json.dumps(
        {"question": text[:9], "choices": [text[9:15], text[2:5], "boats"], "answer": place % 3}
    ) + "\n" for place, text in enumerate(sentences(2, 12))))
    run("tokenize", "--output-prefix", "data/x", "--valid-fraction", 0.1, "text")
    for name in ("train.bin", "val.bin", "tokenizer.bin"):
        os.rename(f"data/x_{name}", f"data/{name}")
    # the same in uint32, as with a vocabulary beyond 65536, and with masks
    narrow, wide = numpy.dtype("<u2"), numpy.dtype("<u4")
    for folder, dtype in (("data", narrow), ("wide", wide)):
        shards.token_type = lambda size, dtype=dtype: dtype
        call(prepare_choices.main, "rows.jsonl", "--output", f"{folder}/choices.bin",
             "--tokenizer", "byte")
    shutil.copy("data/tokenizer.bin", "wide")
    for name in ("train.bin", "val.bin"):
        tokens, fingerprint = tokens_of(f"data/{name}")
        header = shard_header.header(4, len(tokens), fingerprint, True)
        environment.write_durably(f"wide/{name}", [header, numpy.array(tokens, wide).tobytes()])
        environment.write_durably(f"wide/{name}{shards.MASK}", shards.bits(
            shards.MASK, numpy.arange(len(tokens)) % 50 < 20, shards.checksum(f"wide/{name}"), 0))


def make_run(name, trainer, options, steps):
    """A run that was given every option, so that no later default counts; what comes of it."""
    probe, half = f"probe_{name}", steps // 2
    train(trainer, *COMMON.split(), *options.split(), "--train-iters", steps, "--lr-decay-iters",
          2 * steps, "--save-interval", steps, "--eval-interval", half, "--fp8-stats-interval",
          half, "--save", probe)
    start = records(f"{probe}/metrics.jsonl")[0]
    write("config", "".join(
        f"{option} {value}\n" for option, value in (start["options"] | {"save": name}).items()
        if value and start["effects"][option] != "action"))
    train(trainer, "--config", "config")
    shutil.copytree(name, f"{FOLDER}/{name}",
                    ignore=shutil.ignore_patterns(".lock", "latest", "best"))
    return {"trainer": trainer, "loaded": loaded(trainer, name), "resumed": resumed(trainer, name)}


def main():
    if os.path.exists(FOLDER):
        sys.exit(f"error: {FOLDER} is there already, and what is kept stays as it is")
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        make_data()
        expected = {"options": options_of("train_gpt"),
                    "runs": {name: make_run(name, *words) for name, words in RUNS.items()}}
        for data in ("data", "wide"):
            shutil.copytree(data, f"{FOLDER}/{data}")
        write(f"{FOLDER}/expected.json", json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
