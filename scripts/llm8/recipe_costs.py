"""The lines marked `# cost:` at the top of the training recipes, which scripts/results writes.

FLOPs are the trainer's own count of the tokens that the recipe trains on; hours follow from the
newest records of make bench.
"""

import os
import re
import shlex
import subprocess

from . import estimate
from .environment import die

PRECISIONS, COUNTS = ("bf16", "fp8"), (1, 8)


def command_of(path):
    """The options that a recipe hands to the trainer on eight GPUs."""
    words_of = {**os.environ, "DRY": "1", "GPUS": "8", "PRECISION": "bf16", "SMOKE": "0",
                "LAUNCH": "slurm", # without --gpus
                "DATA": "none"}    # whose vocabulary is not the data set's
    done = subprocess.run([path], capture_output=True, text=True, check=False, env=words_of)
    words = shlex.split(done.stdout)
    program = [place for place, word in enumerate(words) if word.endswith("/train_gptcu")]
    if done.returncode != 0 or not program:
        die(f"{path}: prints no command with DRY=1: {done.stderr.strip()[:100]}")
    return words[program[0] + 1:]


def hours_of(records, precision, gpus, flops, tokens):
    measured = estimate.speed(records, precision, gpus, flops)
    if measured is None:
        return None
    hours = tokens * flops / (measured[0] * 1e12 * gpus) / 3600
    exact = re.fullmatch(r"\S+ measured \S+", measured[1])
    return f"{gpus} GPU{'s' if gpus > 1 else ''} {'' if exact else '~'}{estimate.duration(hours)}"


def lines_of(path, bench):
    plan = estimate.planned(command_of(os.path.abspath(path)))
    records, (_, flops) = estimate.read_records(bench), estimate.size_of(plan)
    tokens = 1
    for name in ("train-iters", "global-batch-size", "seq-length"):
        tokens *= int(re.search(rf"--{name} (\d+)", plan)[1])
    lines = [f"# cost: {tokens / 1e9:.1f} billion tokens, {tokens * flops:.2e} FLOPs\n"]
    for precision in PRECISIONS:
        hours = [hours_of(records, precision, gpus, flops, tokens) for gpus in COUNTS]
        if None not in hours:
            lines.append(f"# cost: {precision.upper()}: {', '.join(hours)}\n")
    machines = ", ".join(sorted({record["machine"]["gpu"] for record in records}))
    lines.append(f"# cost: on {machines}, by test/results/bench.jsonl; ~: by other models or "
                 "counts of GPUs\n" if len(lines) > 1 else
                 "# cost: no speed is recorded yet: make bench, then scripts/results\n")
    return "".join(lines)


def with_lines(text, lines):
    """The recipe with its cost after the last line of the comment at its top."""
    bare = re.sub(r"(?m)^# cost:.*\n", "", text)
    head = re.match(r"(#.*\n)+?(?=# shellcheck|[^#])", bare)
    return bare[:head.end()] + lines + bare[head.end():]
