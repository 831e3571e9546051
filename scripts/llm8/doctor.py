"""Checks a run from its metrics.jsonl: how it ended, its losses, where FP8 is on and what it
lost, its resumes, and what makes it slow.

  scripts/doctor run/fp8

Each line is `ok`, a `note` (it could be better), or `WRONG`, with what to do. The loss is a mean
over the last steps; the log prints that of one step. Exit status: 0 nothing is wrong, 1 something
is, 2 it could not be checked.
"""

import collections
import math
import os
import shlex
import shutil
import textwrap
from functools import partial
from typing import NamedTuple

import numpy

from . import metrics, series
from .command_line import Parser
from .text import counted, duration, fixed, many, printable, shown

OK, NOTE, WRONG = "ok", "note", "WRONG"
SILENT_SECONDS = 600 # after this, a run without an end is dead, or hangs
SKIPS_ALLOWED = 0.01 # share of the steps
ENOUGH_STEPS = 50    # losses are not judged in shorter runs
FIRST_STEPS = 5      # losses may jump in these
RISE_ALLOWED = 0.10  # rise of the loss above its lowest value, as a share of that value
# standard errors: even by chance, the lowest of 20 means is far below the last one
NOISE_ALLOWED = 5
USUAL_RISE = 0.5     # nats above the lowest loss so far, as is_usual() in train/save_folder.h
SPIKE = 1.5          # a spike is above the lowest loss so far times this,
SPIKE_NOISES = 12    # and by so many usual changes between steps (test/doctor_tests.py)
# times the loss of guessing: above this, nothing was learned
LEARNED = 0.98
GUESS_ALLOWED = 1.02 # while the learning rate warms up
FAR_ABOVE_GUESS = 1.5 # if there are few steps
STARTED = 0.95       # trained weights begin below this
LARGE_NORM = 100     # norms of healthy runs of all presets stay below 75 after the first steps
OVERFITTED = 1.05    # times the lowest validation loss, at the last two evaluations
IDLE_ALLOWED = 0.05  # share of the steps, at the end, that may have a learning rate of 0
FAR_TOO_SMALL = 30   # a learning rate so many times below the usual one is noted
LARGE_VOCABULARY = 1.1 # times the tokenizer's
SLOW_LINES = 20      # how many of the newest lines are read: if most of them name one rank as slow,
LEAST_SLOW = 5       # and at least so many do, it is slow; two lines of three may name it by chance


class Finding(NamedTuple):
    level: str
    about: str
    text: str
    remedy: str = "" # what the user can do


well, note, wrong = (partial(Finding, level) for level in (OK, NOTE, WRONG))


def finer(run, delayed):
    """Returns the remedy if an FP8 run loses too much. delayed: that for delayed scaling."""
    found = {"delayed": [delayed, "--fp8-recipe tensorwise or blockwise"],
             "tensorwise": ["--fp8-recipe blockwise"]}.get(run.option("fp8-recipe"), [])
    first_last, ends = "--first-last-layers-bf16", 2
    if run.option(first_last[2:]) == "true":
        first_last = "a larger --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16"
        ends = sum(metrics.option_number(run.start, f"num-layers-at-{end}-in-bf16")
                   for end in ("start", "end"))
    if metrics.option_number(run.start, "num-layers") > ends:  # else none would be in FP8
        found.append(first_last)
    *others, last = found or ["--bf16"]
    return ", ".join(others) + ", or " * bool(others) + last


def more_margin(run):
    return f"--fp8-margin {metrics.option_number(run.start, 'fp8-margin') + 1}"


def steadier(run):
    """Returns the remedy for a run whose losses or norms jump."""
    given = run.was_given("init-method-std")
    first = "" if run.option("load") or given is False else \
        "--init-method-std 0 (it follows from the width)" + " if another is given" * (not given)
    return first + ", " * bool(first) + "a lower --lr, or a longer --lr-warmup-iters"


def back(run, step):
    """Returns the remedy for a run that must go back to a checkpoint up to this step."""
    if not run.option("save"):
        return "start it anew"
    if path := run.checkpoint(step):
        return f"the same command with --resume {shlex.quote(path)}"
    return f"{run.folder} has no checkpoint from before that: start it anew, in another --save"


def last_good(run):
    """Returns the last step after which the weights were good, as a trainer judges a checkpoint: by
    the loss of the next step."""
    steps, values = series.learned(run, "loss")
    good = steps[values < numpy.minimum.accumulate(values) + USUAL_RISE]
    return int(good[-1]) - 1 if len(good) else 0


# ---- how it went -------------------------------------------------------------------------------


def state(run):
    where = f"step {run.last_step:,} of {run.train_iters:,}"
    again, go_on = "start it anew; without --save it saved nothing", ""
    if run.option("save") != "":
        again = "the same command with --resume latest; scripts/restart.sh does that automatically"
        go_on = "--resume latest continues it"
    if run.finished:
        return well("state", f"finished, {where}")
    if run.end is None:
        if run.died:
            return wrong("state", f"{where}; it has no record of its end, and no process "
                         "holds its folder: it was killed, or another rank was lost",
                         f"read the end of its standard error for the reason; then {again}")
        if silent := run.silent(SILENT_SECONDS):
            return wrong("state", f"{where}; it has written nothing for {duration(silent)}, and "
                         "has no record of its end: it was killed, or hangs",
                         f"end it if it still runs, then {again}")
        return well("state", f"running, {where}")
    status = metrics.number(run.end, "status")
    if status in (0, metrics.STOPPED_BY_SIGNAL):
        return note("state", f"{run.state}, {where}" if status else run.state,
                    go_on or again)
    if run.unsaved and run.unsaved["error"] in (run.end.get("error") or ""):
        return wrong("state", f"{where}, but the last save failed", f"mend that; then {again}")
    return wrong("state", f"{run.state}, {where}", {
        metrics.SKIPPED_TOO_OFTEN: f"{back(run, last_good(run))}, changed as for the steps below",
        metrics.WRONG_RESULTS: f"take that GPU out of use; {go_on or again}"}.get(
            status, f"mend that; then {again}" if run.end.get("error") else
            "read the end of its standard error for the reason"))


def saves(run):
    failed = [step for step, record in run.saves.items() if "error" in record]
    if not failed:
        return
    last = max(failed)
    text = (f"{len(failed):,} of {len(run.saves):,} failed, the last one after step {last:,}: "
            f"{run.saves[last]['error']}")
    if run.unsaved:
        yield wrong("checkpoints", f"{text}; what was learned since the one before it would be "
                    "lost", "make room on the disk; the run tries again at every --save-interval")
    else:
        yield note("checkpoints", text, "later ones are there")


def skips(run):
    skipped = [step for step, record in run.steps.items()
               if record.get("skipped") and record.get("reason") != "requested"]
    if not skipped:
        return well("steps", "none was skipped" if not run.skipped else "only those were skipped "
                    "that --iterations-to-skip names, "
                    f"{run.skipped:,} of {len(run.steps):,}")
    spikes = sum(run.steps[step].get("reason") == "spike" for step in skipped)
    others = len(skipped) - spikes
    why = [f"{others:,} for a NaN or infinite loss or norm"] * (others > 0)
    why += [f"{spikes:,} for a spike of loss or norm (--skip-spikes "
            f"{run.option('skip-spikes', '?')})"] * (spikes > 0)
    clips = 0 < metrics.option_number(run.start, "clip-grad") <= 1
    remedy = "a lower --lr" + " or a longer --lr-warmup-iters" * clips + \
        ", a longer --lr-warmup-iters, or --clip-grad 1" * (not clips)
    if metrics.number(run.start, "fp8_flops_share") > 0:
        remedy += f"; where --bf16 does not skip them, {finer(run, more_margin(run))}"
    remedy += "; or a larger --skip-spikes, if the data changed there" * (spikes > 0)
    level = wrong if len(skipped) > SKIPS_ALLOWED * len(run.steps) else note
    return level("steps", f"{len(skipped):,} of {len(run.steps):,} were skipped, "
                 f"{' and '.join(why)}, the last one step {max(skipped):,}", remedy)


def guessing(run):
    """Returns the loss of uniform guessing."""
    return math.log(metrics.option_number(run.start, "vocab-size") or 1)


def start(run):
    """Finds weights of --load that do no better than random ones."""
    steps, values = series.learned(run, "loss")
    guess, early = guessing(run), values[steps <= FIRST_STEPS][:1]
    if run.option("load") and (early > STARTED * guess).any():
        yield note("loss", f"it began at {early[0]:.4f}, no better than guessing, {guess:.4f}: the "
                   "weights of --load do not know these data",
                   "prepare --data with the tokenizer of these weights; if it has that one, they "
                   "are damaged, or were never trained")


def losses(run):
    steps, values = series.learned(run, "loss")
    if len(values) < 10:
        return well("loss", f"{many(len(values), 'step')}, too few to judge")
    width = max(10, len(values) // 20)
    means = numpy.convolve(values, numpy.full(width, 1 / width), "valid")
    last, lowest = float(means[-1]), float(means.min())
    few, so_far = len(values) < ENOUGH_STEPS, f"{last:.4f} over the last {width} steps"
    guess = guessing(run)
    warm = steps[-1] > metrics.option_number(run.start, "lr-warmup-iters")
    if last > (FAR_ABOVE_GUESS if few else LEARNED if warm else GUESS_ALLOWED) * guess > 0:
        no, nothing = ("no", "nothing") if last > guess else ("hardly", "little")
        return wrong("loss", f"{so_far}, {no} better than guessing, {guess:.4f}: it learns "
                     f"{nothing}", (steadier(run) if last > guess else "another --lr") +
                     "; is --data text, and whole (scripts/prepare_data --check)?")
    if few:
        return well("loss", f"{so_far}, too few to judge: {len(values)} of {ENOUGH_STEPS}")
    # the noise of a step follows from the changes between neighbours, on which a trend has little
    # effect; their median is used, because a few spikes do not change it
    noise = 1.4826 * float(numpy.median(numpy.abs(numpy.diff(values[FIRST_STEPS:]))))
    if last - lowest > max(RISE_ALLOWED * lowest, NOISE_ALLOWED * noise / math.sqrt(width)):
        at = int(steps[int(means.argmin()) + (width - 1) // 2])
        return wrong("loss", f"{so_far}; it was {lowest:.4f} at step {at:,}: it rises",
                     f"{back(run, at)}, with a lower --lr" +
                     " or --min-lr" * (metrics.option_number(run.start, "min-lr") > 0))
    low = numpy.minimum.accumulate(values)
    spikes = (values > SPIKE * low) & (values > low + SPIKE_NOISES * noise)
    spikes = FIRST_STEPS + numpy.flatnonzero(spikes[FIRST_STEPS:])
    if len(spikes):
        top = spikes[values[spikes].argmax()]
        return note("loss", f"{so_far}, but {many(len(spikes), 'step')} spiked, up to "
                    f"{values[top]:.4f} at step {int(steps[top]):,}, from {low[top]:.4f} before",
                    steadier(run))
    return well("loss", f"{so_far}, the lowest so far {lowest:.4f}")


def norms(run):
    steps, values = series.learned(run, "norm")
    late = steps > FIRST_STEPS
    steps, values = steps[late], values[late]
    large = numpy.flatnonzero(values > LARGE_NORM)
    if len(large):
        top = values.argmax()
        yield note("gradient norm", f"above {LARGE_NORM} in {many(len(large), 'step')}, up to "
                   f"{values[top]:,.0f} at step {int(steps[top]):,}; the median is "
                   f"{numpy.median(values):.3g}", steadier(run))


def validation(run):
    """Finds a validation loss that rises while the training loss falls."""
    steps, values = series.finite(run, "valid_loss", "evals")
    if len(values) < 3 or not min(values[-2:]) > OVERFITTED * values.min():
        return
    at, last, best = int(steps[values.argmin()]), run.last_step, os.path.join(run.folder, "best")
    width = max(10, last // 20)
    if series.window_mean(run, last, width) < series.window_mean(run, at, width):
        yield wrong("validation", f"{values[-1]:.4f} after step {int(steps[-1]):,}; it was "
                    f"{values.min():.4f} after step {at:,}, and only the training loss falls "
                    "since: it overfits",
                    f"take {best}; " * os.path.exists(best) + "more data, or fewer steps "
                    "(--train-iters, --epochs)")


def learning_rate(run):
    steps, rates = series.arrays(run, "lr")
    if len(steps) == 0:
        return []
    peak = max(metrics.option_number(part, "lr", math.nan) for part in run.parts)
    parameters = metrics.number(run.start, "parameters")
    # the peak that suits a model (Kaplan et al., 2020, appendix D.6)
    usual = max(1e-4, 0.003239 - 0.0001395 * math.log(parameters)) if parameters >= 1 else 0
    idle = int((rates == 0)[::-1].cumprod().sum()) # at the end of the run
    better = f"--lr {usual:.1g} is usual for so many parameters"
    if run.option("load"):
        better = "--lr 1e-5 is usual for fine-tuning"
    if idle == len(steps):
        return [wrong("learning rate", "it is 0: nothing is learned", better)]
    if idle > max(1, IDLE_ALLOWED * len(steps)):
        return [wrong("learning rate", f"it is 0 from step {int(steps[-idle]):,} on: {idle:,} "
                      "steps learn nothing", "--lr-decay-iters as long as the run, or --min-lr")]
    if peak < usual / FAR_TOO_SMALL and not run.option("load"):
        return [wrong("learning rate", f"its peak of {peak:g} is far too small to learn much from "
                      "the start", better)]
    return [well("learning rate", f"up to {shown(peak, 'g')}")]


def vocabulary(run):
    model = metrics.option_number(run.start, "vocab-size")
    tokens = metrics.number(run.start, "tokenizer_vocabulary")
    if model > LARGE_VOCABULARY * tokens:
        yield note("vocabulary", f"the model's has {model:,} tokens, the tokenizer's "
                   f"{tokens:,.0f}: the others are never seen, and cost memory and time",
                   "is that the tokenizer of --load's model? Else prepare --data with that one"
                   if run.option("load") else f"--vocab-size {tokens:.0f}, in a new run")


# ---- precision ---------------------------------------------------------------------------------


def fp8_layers(run):
    """Reports where FP8 is on, in what share of the operations, and why not elsewhere."""
    if run.option("fp8-format", "none") == "none":
        return [well("precision", f"{run.start.get('precision', '?')}; FP8 is not requested")]
    share, others = 100 * metrics.number(run.start, "fp8_flops_share"), {}
    for row in run.start.get("linear_layers", []):
        first, last = row["first_block"], row["first_block"] + row["blocks"] - 1
        blocks = f" of block {first}" if last == first else f" of blocks {first}-{last}"
        if not row["x"].startswith("E"):
            name = row["linear"] + blocks * (row["blocks"] > 0)
            others.setdefault(row["reason"] or "not requested", []).append(f"{name} in {row['x']}")
    sides = "make --seq-length, --hidden-size, --ffn-hidden-size and (for the head) " \
        "--make-vocab-size-divisible-by multiples of 16"
    if not share > 0:
        why = "; ".join(others) or "not known"
        return [wrong("precision", f"FP8 is requested (--fp8-format {run.option('fp8-format')}) "
                      f"and no layer is in FP8: {why}", sides if "multiple of 16" in why else
                      "a GPU of compute capability 8.9 or newer (train_gptcu --verify); "
                      "--fp8-required makes a run end instead")]
    found = [well("precision", f"FP8, {run.option('fp8-recipe', '?')} scaling, in {share:.1f}% of "
                  "the linear layers' operations")]
    for why, names in others.items():
        level, *remedy = (note, sides) if "multiple of 16" in why else (well,)
        found.append(level("precision", f"{', '.join(names)}: {why}", *remedy))
    return found


def fp8_ranges(run):
    if not metrics.number(run.start, "fp8_flops_share") > 0:
        return []
    step, shares = run.fp8_shares()
    if step is None:
        return [well("FP8 range", "what saturates or underflows is not counted",
                     "--fp8-stats-interval 100 counts it, at little cost")]
    found = []
    most_saturated, most_zero = run.fp8_limits()
    margin = metrics.option_number(run.start, "fp8-margin")
    for column, limit, what, remedy in (
            (1, most_saturated, "the largest", more_margin(run)),
            (2, most_zero, "zero", "--fp8-margin 0" if margin > 0 else
             "a shorter --fp8-amax-history-len (an old spike keeps the scale low)")):
        bad = sorted((row[column], row[0]) for row in shares if row[column] > limit)
        if bad:
            others = f", and too many of {many(len(bad) - 1, 'other tensor')}" * (len(bad) > 1)
            found.append(wrong("FP8 range", f"{bad[-1][1]}: {100 * bad[-1][0]:.3g}% of its codes "
                               f"are {what} at step {step:,}{others}", finer(run, remedy)))
    worst = (shares or [("", 0, 0)])[0]
    return found or [well("FP8 range", f"of {len(shares)} tensors at step {step:,}, the worst is "
                          f"{worst[0]}: {100 * worst[1]:.2g}% largest codes, {100 * worst[2]:.2g}% "
                          "zero")]


# ---- is a run that was resumed still one run? ---------------------------------------------------


def changed_options(before, after):
    """Returns {name: (old, new)} of the options that differ between two starts of one run."""
    old, new = before["options"], metrics.changing_options(after)
    return {name: (old[name], new[name]) for name in old
            if name in new and old[name] != new[name] and name != "gpus"} # "ranks" says how many


def changes(run, before, after):
    """Reports what a resume changed."""
    where, again = f"at step {int(after['step']):,}", back(run, after["step"])
    changed = changed_options(before, after)
    text = [f"--{name} {old or 'not set'} became {new or 'not set'}"
            for name, (old, new) in changed.items()]
    other_order = set(changed) & set(metrics.changing_options(after, "data"))
    sums = before.get("data_crc32"), after.get("data_crc32")
    if sums[0] == sums[1] is not None: # the same shards in another folder
        other_order -= {"data"}
    elif None not in sums:
        text.insert(0, "--data is of other shards or weights")
        other_order.add("data")
    if other_order:
        return wrong("resume", f"{where} the data come in another order from there on: "
                     f"{', '.join(text)}", f"{again}, without the changed options, over the same "
                     "shards; or treat it as a new run (--load)")
    old, new = map(metrics.ranks_of, (before, after))
    if old != new:
        where += f", on {many(new, 'rank')} instead of {old}"
    if changed:
        return note("resume", f"{where}: {', '.join(text)}",
                    f"if this was not meant, {again}, without them")
    return well("resume", f"{where}, with the same options and data")


def done_again(run):
    """Compares the losses of steps that were done again after a resume with the earlier ones."""
    losses = {step: [record.get("loss") for record in (*earlier, run.steps.get(step)) if record]
              for step, earlier in run.replaced.items()}
    losses = {step: row for step, row in losses.items() if len(row) > 1}
    if not losses:
        return []
    where = f"steps {min(losses):,} to {max(losses):,}"
    apart = {step: row for step, row in losses.items() if len(set(row)) > 1}
    if not apart:
        return [well("resume", f"{where} were done again, with the same losses to the last bit")]
    step = min(apart)
    one, other = ("-" if loss is None else fixed(loss, 6)
                  for loss in list(dict.fromkeys(apart[step]))[:2])
    text = (f"of {where}, which were done again, {len(apart):,} have another loss, first "
            f"step {step:,}: {one}, then {other}")
    alike = all(start.get(what) == run.starts[0].get(what) for start in run.starts
                for what in ("device", "program", "ranks"))
    changed = any(changed_options(a, b) for a, b in zip(run.starts, run.starts[1:]))
    if run.on_gpu and run.option("deterministic") == "false":
        return [note("resume", text + "; that is expected with --no-deterministic")]
    if alike and not changed:
        return [wrong("resume", text, "on one machine and build they should be equal: was the "
                      "program built anew? --verify checks the GPU")]
    return [note("resume", text + "; that is expected: device, program, ranks or options changed")]


def unreadable(run):
    if run.complaint:
        yield note("data", run.complaint, "did another program write there? Give each run its own "
                   "--save")


def counted_tokens(run):
    """Checks that each step's count of tokens includes those of all earlier steps."""
    order, missing = sorted(run.steps), 0
    for before, step in zip(order, order[1:]):
        if step != before + 1:
            missing += step - before - 1
            continue
        due = math.prod(metrics.option_number(run.part_of(step), name)
                        for name in ("global-batch-size", "seq-length"))
        got = (metrics.number(run.steps[step], "tokens") -
               metrics.number(run.steps[before], "tokens"))
        if got != due:
            return [wrong("data", f"step {step:,} went {counted(got)} tokens on, not {due:,}",
                          "this file holds records of two runs: give each its own --save")]
    if missing:
        return [note("data",
                     f"the records of {many(missing, 'step')} are missing from metrics.jsonl",
                     "was the disk full? The run itself goes on without them")]
    if run.complaint:
        return []
    sources = "".join(f"; {name}: {epochs:.2f} epochs" for name, _, epochs in run.sources())
    return [well("data", f"{counted(metrics.number(run.steps[order[-1]], 'tokens'))} tokens in "
                 f"{many(order[-1], 'step')}, none left out{sources}")] if order else []


# ---- what makes it slow -------------------------------------------------------------------------


def option_costs(run):
    """Reports options that cost speed on a GPU: a note, or ok where the losses must decide."""
    batch, micro, length = (metrics.option_number(run.start, name) for name in (
        "global-batch-size", "micro-batch-size", "seq-length"))
    steps = batch // (micro * run.ranks) if micro else 1
    kept = run.option("grad-accum-dtype", "auto")
    if run.option("fp8-format", "none") == "none":
        yield note("speed", "FP8 is not used", "--fp8-format hybrid")
    elif run.option("fp8-recipe") != "blockwise" and \
            run.option("fp8-fast-accumulation") == "none":
        yield note("speed", "--fp8-fast-accumulation none: exact accumulation is forced in the "
                   "forward pass too", "--fp8-fast-accumulation forward, the default")
    if steps > 1 and micro * length < 8192:
        yield note("speed", f"a step is {steps} micro-batches of {micro} x {length} tokens, small "
                   "ones for a GPU", "a larger --micro-batch-size: --plan says what fits")
    # auto means FP32 if a step sums over micro-batches, as in train/gpu/params.c
    if run.ranks > 1 and (kept == "fp32" or kept == "auto" and steps > 1):
        yield (note if kept == "fp32" else well)(
            "speed", "gradients are accumulated in FP32 and travel between the GPUs in FP32, twice "
            "the bytes of BF16", "--grad-accum-dtype bf16, where the losses allow it")


def slow_rank(run):
    """Finds a rank that most of the newest records name as the slowest."""
    newest = [run.ranks_at[step] for step in sorted(run.ranks_at)[-SLOW_LINES:]]
    named = [record for record in newest if record.get("slowest") is not None]
    often = [record for record in named if record["slowest"] == named[-1]["slowest"]]
    if len(often) >= LEAST_SLOW and 2 * len(often) > len(newest):
        yield wrong("speed", f"rank {often[-1]['slowest']:.0f} on {often[-1].get('host', '?')} "
                    f"computes more than 5% slower than the others, at {len(often)} of the last "
                    f"{len(newest)} lines: all wait for it",
                    "look at that GPU's clocks, temperature and neighbours (nvidia-smi -q), or "
                    "leave it out")


def speed(run):
    """Reports what the run's records say about its time."""
    rate = series.steady_throughput(run)
    flops = rate * metrics.number(run.start, "flops_per_token") / run.ranks
    mfu = 100 * flops / (metrics.number(run.start, "peak_flops") or math.nan)
    text = f"{counted(rate)} tok/s"
    text += f", {flops / 1e12:.0f} TFLOP/s a GPU" if run.on_gpu and math.isfinite(flops) else ""
    text += f", MFU {mfu:.1f}%" if math.isfinite(mfu) else ""
    text += "" if run.on_gpu else ", on a CPU, where FP8 and BF16 are emulated"
    yield well("speed", text)
    if run.on_gpu:
        yield from option_costs(run)
    yield from slow_rank(run)


# ---- the program --------------------------------------------------------------------------------


def show(finding, width):
    start = f"  {finding.level:6} {finding.about:13} "
    margin = " " * len(start)
    for text, first, rest in ((finding.text, start, margin),
                              (finding.remedy, margin + "-> ", margin + "   ")):
        if text:
            print(textwrap.fill(printable(text), width, initial_indent=first,
                                subsequent_indent=rest, break_on_hyphens=False,
                                break_long_words=False))


def main():
    p = Parser(prog="scripts/doctor", description=__doc__)
    p.add_argument("run", metavar="RUN", help="its --save folder, or its metrics.jsonl")
    p.add_argument("--brief", action="store_true", help="leave out what is ok")
    words = p.parse_args()
    run = metrics.open_started(words.run)
    width = max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
    print(textwrap.fill(printable(
        f"{words.run}: {run.option('arch', '?')}, {run.option('num-layers', '?')} layers x "
        f"{run.option('hidden-size', '?')}, {counted(metrics.number(run.start, 'parameters'))} "
        f"parameters, {run.start.get('device', '?')}, {run.start.get('program', '?')}"), width,
        break_on_hyphens=False, break_long_words=False))
    found = [state(run), *saves(run), skips(run), *start(run), losses(run), *norms(run),
             *validation(run), *learning_rate(run), *vocabulary(run), *fp8_layers(run),
             *fp8_ranges(run)]
    found += [*map(partial(changes, run), run.parts, run.parts[1:]), *done_again(run),
              *unreadable(run), *counted_tokens(run), *speed(run)]
    for finding in found:
        if finding.level != OK or not words.brief:
            show(finding, width)
    count = collections.Counter(finding.level for finding in found)
    print(f"{count[WRONG]} wrong, {count[NOTE]} to note, {count[OK]} ok")
    return 1 if count[WRONG] else 0
