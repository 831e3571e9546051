"""Damages a real metrics.jsonl at random, and calls every script that reads one: each must say what
it can, or end with an error of one line. test_scripts.py does it with a few files; by hand:

    .venv/bin/python test/metrics_fuzz.py COUNT [SEED]    in an empty folder
"""

import copy
import importlib
import itertools
import json
import math
import os
import random
import re
import sys
import traceback
import warnings
from unittest import mock

from check import ROOT, call, read, write

ODD = (None, True, False, 0, -1, 1, 2, 0.5, 1e308, 1e300, -1e308, 1e15, 2**53 + 1, 10**30, -10**30,
       math.nan, math.inf, -math.inf, "", "0", "1", "x", "1e400", "a\nb\x1b[2J", [], [1], ["x"],
       {}, {"a": 1}, [None], [[]], {"elements": None})
DRAWN = 8 # of so many files the figures of one are drawn, which takes most of the time
NUMBERS = ("step", "loss", "norm", "lr", "seconds", "tokens", "tokens_per_s", "valid_loss",
           "skipped", "ranks", "status")


def real_runs():
    """Returns the records of runs of 1.0, one of them made one of a GPU, so that more is judged."""
    runs = [list(map(json.loads, read(f"{ROOT}/test/kept/1.0/{name}/metrics.jsonl").splitlines()))
            for name in ("fp8", "ranks", "gpt2", "muon_ranks")]
    runs[0][0].update(device="NVIDIA H100", peak_flops=1e15, memory_bytes=3e9)
    for record in runs[1]: # as of a mixture
        if record["kind"] == "run":
            record["sources"] = record["valid_sources"] = [
                {"data": name, "share": 0.5, "tokens": 9, "sequences": 2} for name in "ab"]
        record.update(source_tokens=[1, 2], source_epochs=[0.5, 1.5], source_losses=[3, None])
    return runs


def places(value, place=()):
    """Yields the keys that lead to each value inside another one."""
    inside = value.items() if isinstance(value, dict) else \
        enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*place, key)
        yield from places(one, (*place, key))


def damage_value(rng, record):
    found = list(places(record))
    if rng.random() < 0.5:
        found = [place for place in found if len(place) == 1]
    if not found:
        return
    *way, last = rng.choice(found)
    for key in way:
        record = record[key]
    if rng.random() < 0.25:
        del record[last]
    else:
        record[last] = copy.deepcopy(rng.choice(ODD))


def damage_column(rng, rows):
    """One value in every record of a kind."""
    name, value = rng.choice(NUMBERS), rng.choice(ODD)
    kind = rng.choice(("step", "eval", "run", "end", "ranks", "save", "fp8"))
    for row in rows:
        if isinstance(row, dict) and row.get("kind") == kind:
            row[name] = copy.deepcopy(value)


def damaged(rng, rows):
    """Returns the bytes of a file."""
    rows = copy.deepcopy(rows)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        starts = [i for i, row in enumerate(rows) if isinstance(row, dict) and
                  row.get("kind") == "run"]
        at = rng.choice(starts) if starts and rng.random() < 0.4 else rng.randrange(len(rows))
        how = rng.randrange(10)
        if how < 5:
            damage_value(rng, rows[at])
        elif how == 5 and len(rows) > 1:
            del rows[at]
        elif how == 6:
            rows.insert(rng.randrange(len(rows) + 1), copy.deepcopy(rows[at]))
        elif how == 7:
            del rows[at + 1:]
        elif how == 8:
            rows[at] = copy.deepcopy(rng.choice(ODD))
        else:
            damage_column(rng, rows)
    content = bytearray("".join(json.dumps(row) + "\n" for row in rows).encode())
    if rng.random() < 0.15:
        for _ in range(rng.randrange(1, 6)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content[:rng.randrange(len(content) + 1)] if rng.random() < 0.15 else content)


def fault_of(name, words):
    """Returns what is wrong with how a script ends; "" for nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            done = call(importlib.import_module("llm8." + name).main, *words)
        except Exception:  # whatever it may be: a traceback
            return traceback.format_exc()
    errors = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    if [line[:7] for line in errors] != ["error: "] * (done.status == 2):
        return f"status {done.status}, and {done.err!r}"
    if not all(letter.isprintable() or letter == "\n" for letter in done.out + done.err):
        return f"not printable: {done.out + done.err!r}"
    return f"not finite: {done.out}" if re.search(r"\b(nan|inf)\b", done.out) else ""


def fuzz(count, seed, more=()):
    """Yields the faults; each with the file that shows it, in the present folder. more: other files
    that are tried first."""
    from llm8 import style  # imports matplotlib, after main() has named its folder

    def laid_out(function, size, *arguments, form="svg"):
        function(style.Figure(figsize=size), *arguments)
        return b"<svg></svg>"
    rng, runs, draw = random.Random(seed), real_runs(), style.draw
    more = [*more, b"", b"\n\n", b"\0" * 4096, b"step 1/2 | loss 3\n" * 3,
            b'{"kind":' + b"[" * 10**5 + b"\n", b"{\0\xff\n" * 3]
    for number in range(count):
        rows = rng.choice(runs)
        content = more[number] if number < len(more) else damaged(rng, rows)
        write("a/metrics.jsonl", content)
        write("b/metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        pair = rng.choice((("x:a", "y:b"), ("x:b", "y:a")))
        for name, *words in (
                ("monitor", "a", "--once", "--tensorboard", "tb"), ("monitor", "a", "b", "--once"),
                ("doctor", "a"), ("plot", "a", "--out", "p.svg"),
                ("plot", "a", "b", "--out", "p.html", "--x", rng.choice(("minutes", "tokens"))),
                ("compare", "--report-only", "--out", "c",
                 *itertools.chain(*(("--run", run) for run in pair)))):
            with mock.patch.object(style, "draw", laid_out if number % DRAWN else draw):
                fault = fault_of(name, words)
            if fault:
                shown = write(f"fault_{number}.jsonl", content)
                yield f"{name} {' '.join(words)}, seed {seed}, {shown}: {fault}"


def main():
    found = 0
    for fault in fuzz(int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])):
        found += 1
        print(fault, flush=True)
    print(f"{found} faults")
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("MPLCONFIGDIR", os.path.abspath("matplotlib"))
    sys.exit(main())
