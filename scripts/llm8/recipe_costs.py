"""Writes the lines marked `# cost:` at the top of the training recipes.

  scripts/recipe_costs [--check | --print] [RECIPE...]

FLOPs are the trainer's own count of the tokens that the recipe trains on; hours follow from the
newest records of make bench (test/results/bench.jsonl, or BENCH). --check changes nothing, and
fails where a recipe's lines are not what the records say; --print shows them.
"""

import os
import re
import shlex
import subprocess
import sys

from . import estimate
from .environment import ROOT, die, trainer

PRECISIONS, COUNTS = ("bf16", "fp8"), (1, 8)


def command_of(path, gpus):
    """The options that a recipe hands to the trainer on so many GPUs."""
    words_of = {**os.environ, "DRY": "1", "GPUS": str(gpus), "PRECISION": "bf16",
                "LAUNCH": "self", "SMOKE": "0",
                "DATA": "none"}  # whose vocabulary is not the data set's
    done = subprocess.run([path], capture_output=True, text=True, check=False, env=words_of)
    words = shlex.split(done.stdout)
    program = [place for place, word in enumerate(words) if word.endswith("/train_gptcu")]
    if done.returncode != 0 or not program:
        die(f"{path}: prints no command with DRY=1: {done.stderr.strip()[:100]}")
    options = words[program[0] + 1:]
    if "--gpus" in options:
        place = options.index("--gpus")
        del options[place:place + 2]
    return options


def tokens_of(options):
    """What the trainer makes of the schedule."""
    text, refusal = estimate.plan_of([trainer("train_gpt"), *options])
    if text is None:
        die(refusal)
    counts = [int(re.search(rf"--{name} (\d+)", text)[1])
              for name in ("train-iters", "global-batch-size", "seq-length")]
    return counts[0] * counts[1] * counts[2]


def hours_of(records, precision, gpus, flops, tokens):
    measured = estimate.speed(records, precision, gpus, flops)
    if measured is None:
        return None
    hours = tokens * flops / (measured[0] * 1e12 * gpus) / 3600
    exact = re.fullmatch(r"\S+ measured \S+", measured[1])
    return f"{gpus} GPU{'s' if gpus > 1 else ''} {'' if exact else '~'}{estimate.duration(hours)}"


def lines_of(path, records):
    options = command_of(path, 8)
    _, flops = estimate.size_of(options)
    tokens = tokens_of(options)
    parts = []
    for precision in PRECISIONS:
        hours = [hours_of(records, precision, gpus, flops, tokens) for gpus in COUNTS]
        if None not in hours:
            parts.append(f"# cost: {precision.upper()}: {', '.join(hours)}\n")
    if parts:
        machines = sorted({record["machine"]["gpu"] for record in records})
        parts.append(f"# cost: on {', '.join(machines)}, by test/results/bench.jsonl; ~: by "
                     "other models or counts of GPUs\n")
    else:
        parts.append("# cost: no speed is recorded yet: make bench, then scripts/recipe_costs\n")
    parts.insert(0, f"# cost: {tokens / 1e9:.1f} billion tokens, {tokens * flops:.2e} FLOPs\n")
    return "".join(parts)


def with_lines(text, lines):
    """The recipe with its cost after the last line of the comment at its top."""
    bare = re.sub(r"(?m)^# cost:.*\n", "", text)
    head = re.match(r"(#.*\n)+?(?=# shellcheck|[^#])", bare)
    return bare[:head.end()] + lines + bare[head.end():]


def main():
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        print(__doc__.strip())
        return
    check, show = "--check" in sys.argv[1:], "--print" in sys.argv[1:]
    paths = [word for word in sys.argv[1:] if word not in ("--check", "--print")]
    for word in paths:
        if not os.path.exists(word):
            die(f"{word}: no such recipe (--help)")
    folder = os.path.join(ROOT, "scripts")
    every = sorted(name for name in os.listdir(folder) if re.fullmatch(r"run_\w+\.sh", name))
    records = estimate.read_records(os.environ.get("BENCH") or
                                    os.path.join(ROOT, "test", "results", "bench.jsonl"))
    for path in [os.path.abspath(p) for p in paths] or [os.path.join(folder, n) for n in every]:
        lines = lines_of(path, records)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if show:
            print(lines, end="")
        elif with_lines(text, lines) != text and check:
            die(f"{path}: its costs are not what the records say; run scripts/recipe_costs")
        elif with_lines(text, lines) != text:
            with open(path, "w", encoding="utf-8") as file:
                file.write(with_lines(text, lines))
