"""Is a run that was resumed still one run? The order of its data, its options, its losses across
each resume; and its checkpoints, whose bytes the CPU trainer checks."""

import os
import re
import subprocess

import numpy

from . import environment, metrics, series
from .diagnosis import note, well, wrong
from .text import fixed

JUMP_STEPS = 10
STALE_HISTORY = 64 # so far below the scale's amax may the newest one be


def changed_options(before, after):
    """name -> (old, new) between two starts of one run."""
    old, new = before["options"], metrics.changing_options(after)
    return {name: (old[name], new[name]) for name in old
            if name in new and old[name] != new[name] and name != "gpus"} # "ranks" says how many


def changes(run, before, after):
    """What a resume changed."""
    where = f"at step {int(after['step']):,}"
    changed = changed_options(before, after)
    text = ", ".join(f"--{name} {old or 'not set'} became {new or 'not set'}"
                     for name, (old, new) in changed.items())
    sequences = [metrics.number(start, "data_sequences") for start in (before, after)]
    other_order = set(changed) & set(metrics.changing_options(after, "data"))
    if after.get("data_crc32") and before.get("data_crc32") == after["data_crc32"]:
        other_order -= {"data"} # the same shards elsewhere
    if other_order or sequences[0] < sequences[1] or sequences[0] > sequences[1]:
        if not other_order:
            text = (f"--data had {sequences[0]:,.0f} sequences and has {sequences[1]:,.0f}" +
                    (f"; {text}" if text else ""))
        return wrong("resume", f"{where} the data come in another order from there on: {text}",
                     "resume with the options of config.txt, over the same shards; or see it as a "
                     "new run (--load)")
    ranks = [int(metrics.number(start, "ranks")) for start in (before, after)]
    if ranks[0] != ranks[1]:
        where += f", on {ranks[1]} ranks instead of {ranks[0]}"
    if changed:
        return note("resume", f"{where}: {text}",
                    "if this was not meant: --config RUN/config.txt has the options of a run")
    return well("resume", f"{where}, with the same options and data")


def jump(run, step):
    """A loss that leaps where the run was resumed. Skipped steps are left out."""
    steps, values = series.arrays(run, "loss")
    steps, values = steps[numpy.isfinite(values)], values[numpy.isfinite(values)]
    before, after = values[steps <= step][-JUMP_STEPS:], values[steps > step][:JUMP_STEPS]
    if min(len(before), len(after)) < JUMP_STEPS:
        return []
    old, new = before.mean(), after.mean()
    if new - old <= max(0.02 * old, 4 * before.std() * (2 / JUMP_STEPS) ** 0.5):
        return []
    return [wrong("resume", f"the loss leaps at step {step:,}, where the run was resumed: from "
                  f"{old:.4f} to {new:.4f} over {JUMP_STEPS} steps each",
                  "compare the lines `resume` above; --list-checkpoints says whether the "
                  "checkpoints are whole")]


def done_again(run):
    """Steps that resumes did again, beside all their earlier losses."""
    losses = {step: [record.get("loss") for record in (*earlier, run.steps.get(step)) if record]
              for step, earlier in run.replaced.items()}
    losses = {step: row for step, row in losses.items() if len(row) > 1}
    if not losses:
        return []
    first, last = min(losses), max(losses)
    apart = {step: row for step, row in losses.items() if len(set(row)) > 1}
    if not apart:
        return [well("resume", f"steps {first:,} to {last:,} were done again, with the same losses "
                     "to the last bit")]
    step = min(apart)
    one, other = ("-" if loss is None else fixed(loss, 6)
                  for loss in list(dict.fromkeys(apart[step]))[:2])
    text = (f"of steps {first:,} to {last:,}, which were done again, {len(apart)} have another "
            f"loss, first step {step:,}: {one}, then {other}")
    alike = all(start.get(what) == run.starts[0].get(what) for start in run.starts
                for what in ("device", "program", "ranks"))
    changed = any(changed_options(a, b) for a, b in zip(run.starts, run.starts[1:]))
    if alike and not changed:
        return [wrong("resume", text, "on one machine and build they should be equal: was the "
                      "program built anew, or --no-deterministic given? --verify checks the GPU")]
    return [note("resume", text + "; device, ranks or options changed as well")]


def counted_tokens(run):
    """Every step must add its tokens to those before it."""
    order, missing = sorted(run.steps), 0
    for before, step in zip(order, order[1:]):
        if step != before + 1:
            missing += step - before - 1
            continue
        done_by = [start for start in run.starts if int(start["step"]) < step] or run.starts
        options = done_by[-1]["options"]
        due = int(options["global-batch-size"]) * int(options["seq-length"])
        got = (metrics.number(run.steps[step], "tokens") -
               metrics.number(run.steps[before], "tokens"))
        if got != due:
            return [wrong("data", f"step {step:,} went {got:,.0f} tokens on, not {due:,}",
                          "this file holds records of two runs: give each its own --save")]
    if missing:
        return [note("data", f"the records of {missing:,} steps are missing from metrics.jsonl",
                     "was the disk full? The run itself goes on without them")]
    if run.bad_lines and not run.foreign: # their logs have others
        return [note("data", f"metrics.jsonl has {run.bad_lines} lines that are no records",
                     "give each run its own --save")]
    return [well("data", f"{metrics.number(run.steps[order[-1]], 'tokens'):,.0f} tokens in "
                 f"{len(order):,} steps, none left out")] if order else []


def resumes(run):
    found = []
    for before, after in zip(run.starts, run.starts[1:]):
        found += [changes(run, before, after), *jump(run, int(after["step"]))]
    return found + done_again(run) + counted_tokens(run)


# ---- checkpoints -------------------------------------------------------------------------------


def listed(folder):
    """[(step, what the trainer says of it)] of a --save folder; None where it cannot be asked."""
    program = environment.trainer("train_gpt")
    if not os.path.exists(program):
        return None
    done = subprocess.run([program, "--save", folder, "--list-checkpoints"], capture_output=True,
                          text=True, errors="replace", check=False)
    rows = (re.match(r" *(\d+) .*?(whole|damaged)(.*)$", line) for line in done.stdout.splitlines())
    return [(int(row[1]), row[2], row[2] + row[3]) for row in rows if row]


def checkpoints(run):
    # beside the metrics, wherever both lie now; with --metrics, where --save says
    folder = run.option("metrics") and run.option("save") or \
        os.path.dirname(os.path.abspath(run.path))
    rows = listed(folder)
    if rows is None:
        return [note("checkpoints", "they were not checked: train_gpt is not built", "make")]
    if not rows:
        if not any(start["options"].get("save") for start in run.starts):
            return [well("checkpoints", "none; the run has no --save")]
        return [note("checkpoints", f"none under {folder}", "a shorter --save-interval")]
    found = [wrong("checkpoints", f"that of step {step:,} is {text}",
                   "--resume latest passes over it; move it away") for step, what, text in rows
             if what == "damaged"]
    whole = [step for step, what, _ in rows if what == "whole"]
    if whole:
        behind = run.last_step - max(whole)
        found.append(well("checkpoints", f"{len(whole)} whole, the newest of step {max(whole):,}" +
                          (f"; {behind:,} steps since" if behind > 0 else "")))
        found += scaling(folder, max(whole))
    return found


def scaling(folder, step):
    """The state of delayed scaling in a checkpoint: the scales, and whether an old spike of a
    tensor holds its scale down."""
    path = os.path.join(folder, f"step_{step:08d}", "scaling.safetensors")
    if not os.path.exists(path):
        return []
    scale, count, history = (series.read_floats(path, name) for name in ("scale", "count",
                                                                  "amax_history"))
    if scale is None or count is None or history is None:
        return []
    used = count > 0
    if not numpy.isfinite(scale[used]).all() or not (scale[used] > 0).all():
        return [wrong("FP8 scales", f"of step {step:,}: one is not a positive number",
                      "resume from an earlier checkpoint")]
    length = history.shape[1]
    newest = history[numpy.arange(len(count)), (count - 1) % length]
    held = int((used & (history.max(axis=1) > STALE_HISTORY * newest)).sum())
    if held:
        return [note("FP8 scales", f"{held} of {int(used.sum())} are held down by an amax more "
                     f"than {STALE_HISTORY} times the newest one, of the last {length} steps",
                     "--fp8-amax-history-len 16")]
    return [well("FP8 scales", f"of {int(used.sum())} tensors, each with its history of up to "
                 f"{length} steps, as of step {step:,}")]
