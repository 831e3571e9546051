"""Is a run what it should be? Its end, its losses, its precision, and its loss beside that of the
same training without FP8. What is judged is what the run has recorded."""

import math
import os
from dataclasses import dataclass
from functools import partial

import numpy

from . import judge, metrics, series
from .text import duration, fixed

OK, NOTE, WRONG = "ok", "note", "WRONG"
SILENT_SECONDS = 600 # and 20 steps: then a run that has not ended is dead, or hangs
SKIPS_ALLOWED = 0.01 # of the steps
RISE_ALLOWED = 0.10  # of the loss, above the lowest it had
NOISE_ALLOWED = 5    # standard errors; the lowest of 20 means is far below the last by chance
IDLE_ALLOWED = 0.05  # of the steps, at a learning rate of 0 at the end
FAR_TOO_SMALL = 30   # times below the usual learning rate
LARGE_VOCABULARY = 1.1 # times the tokenizer's
SATURATED = 0.01     # of a tensor's values
VANISHED = 0.25


@dataclass
class Finding:
    """How bad it is, about what, in a sentence, and what to do."""
    level: str
    about: str
    text: str
    remedy: str = ""


well, note, wrong = (partial(Finding, level) for level in (OK, NOTE, WRONG))


def is_fp8(run):
    return metrics.number(run.start, "fp8_flops_share") > 0


def finer(run, delayed=""):
    """What an FP8 run can do to lose less, as a remedy; delayed: what it can do with its scales."""
    recipes = {"delayed": f"{delayed}--fp8-recipe tensorwise or blockwise, ",
               "tensorwise": "--fp8-recipe blockwise, "}
    recipe = recipes.get(run.option("fp8-recipe"), "")
    return f"{recipe}{'or ' if recipe else ''}--first-last-layers-bf16"


# ---- how it went -------------------------------------------------------------------------------


def state(run):
    where = f"step {run.last_step:,} of {run.train_iters:,}"
    if run.finished:
        return well("state", f"finished, {where}")
    if run.end is None:
        quiet, allowed = run.silence, max(SILENT_SECONDS, 20 * (run.recent("seconds") or 0))
        if run.killed:
            return wrong("state", f"{where}; it did not say that it ended, and nobody holds its "
                         "folder: it was killed", "the same command with --resume latest; "
                         "scripts/restart.sh does that automatically")
        if quiet > allowed:
            return wrong("state", f"{where}; it has written nothing for {duration(quiet)}, and did "
                         "not say that it ended: it was killed, or hangs",
                         "end it if it still runs, then the same command with --resume latest; "
                         "scripts/restart.sh does that automatically")
        return well("state", f"running, {where}")
    if run.state == metrics.NAMES[metrics.STOPPED_BY_SIGNAL]:
        return note("state", f"stopped by a signal, {where}", "--resume latest goes on with it")
    if run.state == metrics.NAMES[metrics.SKIPPED_TOO_OFTEN]:
        return wrong("state", f"gave up, {where}: {run.recent_skips()} steps in a row had a NaN or "
                     "infinite loss or norm",
                     "resume from a checkpoint before that with a lower --lr or a longer "
                     "--lr-warmup-iters; in FP8, see whether --bf16 does the same")
    if int(metrics.number(run.end, "status")) == 0:
        return note("state", run.state, "--resume latest goes on with it")
    return wrong("state", f"{run.state}, {where}", "its last words on the standard error say why")


def skips(run):
    count, all_steps = run.skipped, len(run.steps)
    if count == 0:
        return well("steps", "none was skipped")
    text = (f"{count} of {all_steps} were skipped for a NaN or infinite loss or norm, the last one "
            f"step {max(step for step in run.steps if run.steps[step].get('skipped')):,}")
    remedy = "a lower --lr, a longer --lr-warmup-iters, or --clip-grad 1"
    if is_fp8(run):
        remedy += f"; where --bf16 does not skip them, {finer(run, '--fp8-margin 1, ')}"
    return (wrong if count > SKIPS_ALLOWED * all_steps else note)("steps", text, remedy)


def usual_rate(parameters):
    """The peak learning rate that suits a model (Kaplan et al., 2020, appendix D.6)."""
    return max(1e-4, 0.003239 - 0.0001395 * math.log(max(parameters, 1)))


def learning_rate(run):
    steps, rates = series.arrays(run, "lr")
    if len(steps) == 0:
        return []
    peak = float(run.option("lr", "nan"))
    usual = usual_rate(metrics.number(run.start, "parameters"))
    idle = int((rates == 0)[::-1].cumprod().sum()) # at the end of the run
    if idle == len(steps):
        return [wrong("learning rate", "it is 0: nothing is learned",
                      f"--lr {usual:.1g} is usual for so many parameters")]
    if idle > max(1, IDLE_ALLOWED * len(steps)):
        return [wrong("learning rate", f"it is 0 from step {int(steps[-idle]):,} on: {idle:,} "
                      "steps learn nothing", "--lr-decay-iters as long as the run, or --min-lr")]
    if peak < usual / FAR_TOO_SMALL and not run.option("load"):
        return [wrong("learning rate", f"its peak of {peak:g} is far too small to learn much from "
                      "the start", f"--lr {usual:.1g} is usual for so many parameters")]
    return [well("learning rate", f"up to {peak:g}")]


def vocabulary(run):
    model = int(run.option("vocab-size", 0))
    tokens = metrics.number(run.start, "tokenizer_vocabulary")
    if not model > LARGE_VOCABULARY * tokens:
        return []
    return [note("vocabulary", f"the model's has {model:,} tokens, the tokenizer's {tokens:,.0f}: "
                 "the others are never seen, and cost memory and time",
                 f"--vocab-size {tokens:.0f}")]


def losses(run):
    steps, values = series.arrays(run, "loss")
    steps, values = steps[numpy.isfinite(values)], values[numpy.isfinite(values)]
    if len(values) < 20:
        return well("loss", f"{len(values)} steps, too few to judge")
    width = max(10, len(values) // 20)
    means = numpy.convolve(values, numpy.full(width, 1 / width), "valid")
    last, lowest = float(means[-1]), float(means.min())
    # standard error of the difference of two such means, from that of neighbours, which a trend
    # hardly changes; by their median, which a few spikes do not change
    noise = 1.4826 * float(numpy.median(numpy.abs(numpy.diff(values)))) / math.sqrt(width)
    guess = math.log(float(run.option("vocab-size", 1)))
    if len(values) >= 50 and last > 1.02 * guess:
        return wrong("loss", f"{last:.4f} over the last {width} steps, above {guess:.4f}, which "
                     "guessing pays: it learns nothing",
                     "a lower --lr; is --data what it should be (scripts/prepare_data --check)?")
    if last - lowest > max(RISE_ALLOWED * lowest, NOISE_ALLOWED * noise):
        at = int(steps[int(means.argmin()) + (width - 1) // 2])
        return wrong("loss", f"{last:.4f} over the last {width} steps; it was {lowest:.4f} at step "
                     f"{at:,}: it rises",
                     "resume from a checkpoint before it rose (--resume DIR/step_...), with a "
                     "lower --lr or --min-lr")
    return well("loss", f"{last:.4f} over the last {width} steps, the lowest so far "
                f"{lowest:.4f}")


# ---- precision ---------------------------------------------------------------------------------


def place(row):
    if row["blocks"] == 0:
        return "LM head" if row["linear"] == "head" else row["linear"]
    first, last = row["first_block"], row["first_block"] + row["blocks"] - 1
    return f"{row['linear']} of block{'s' if last > first else ''} " + \
        (f"{first}-{last}" if last > first else f"{first}")


def by_reason(rows):
    """The rows that are not FP8, as text, by why."""
    found = {}
    for row in rows:
        if row["x"] not in ("E4M3", "E5M2"):
            found.setdefault(row["reason"] or "not asked for", []).append(
                f"{place(row)} in {row['x']}")
    return found


def by_formats(rows):
    """The rows that are FP8, as text, those of equal blocks and formats together."""
    found = {}
    for row in rows:
        if row["x"] in ("E4M3", "E5M2"):
            formats = f"X {row['x']}, W {row['w']}, dY {row['dy']}" + \
                ("" if row["wgrad"] == "FP8" else f", weight gradient in {row['wgrad']}")
            _, of, blocks = place(row).partition(" of ")
            found.setdefault((of + blocks, formats), []).append(row["linear"])
    return [f"{', '.join(names)}{blocks} ({formats})" for (blocks, formats), names in found.items()]


REMEDIES = {
    "a side is not a multiple of 16": "make --hidden-size, --ffn-hidden-size and (for the head) "
                                      "--make-vocab-size-divisible-by multiples of 16",
    "--seq-length is not a multiple of 16": "make --seq-length a multiple of 16",
    "--fp8-lm-head not given": "--fp8-lm-head puts it into FP8",
}


def fp8_layers(run):
    """Whether FP8 is on, where, and what share of the operations."""
    if run.option("fp8-format", "none") == "none":
        return [well("precision", f"{run.start.get('precision', '?')}; FP8 is not asked for")]
    rows = run.start.get("linear_layers", [])
    share, others = 100 * metrics.number(run.start, "fp8_flops_share"), by_reason(rows)
    if not share > 0:
        why = "; ".join(others) or "not known"
        known = [REMEDIES[one] for one in others if one in REMEDIES]
        return [wrong("precision", f"FP8 is asked for (--fp8-format {run.option('fp8-format')}) "
                      f"and no layer is in FP8: {why}",
                      known[0] if known else "a GPU of compute capability 8.9 or newer "
                      "(train_gptcu --verify); --fp8-required makes a run end instead")]
    found = [well("precision", f"FP8, {run.option('fp8-recipe')} scaling, in {share:.1f}% of the "
                  f"linear layers' operations: {'; '.join(by_formats(rows))}")]
    for why, places in others.items():
        make = note if why.startswith(("a side", "--seq")) else well
        one = make("precision", f"{', '.join(places)}: {why}")
        one.remedy = REMEDIES.get(why, "") if make is note else ""
        found.append(one)
    return found


def fp8_ranges(run):
    if not is_fp8(run):
        return []
    step, shares = run.fp8_shares()
    if step is None:
        return [note("FP8 range", "what saturates or vanishes is not counted",
                     "--fp8-stats-interval 100 counts it, at little cost")]
    found = []
    for name, high, low in shares:
        if high > SATURATED:
            found.append(wrong("FP8 range", f"{name}: {100 * high:.3g}% of its values are beyond "
                               f"the range at step {step:,}",
                               finer(run, "--fp8-margin 1, ")))
        if low > VANISHED:
            found.append(wrong("FP8 range", f"{name}: {100 * low:.3g}% of its values become zero "
                               f"at step {step:,}",
                               finer(run, "a shorter --fp8-amax-history-len (an old spike "
                                     "keeps the scale low), ")))
    worst = max(shares, key=lambda row: max(row[1:]), default=("", 0, 0))
    return found or [well("FP8 range", f"of {len(shares)} tensors at step {step:,}, the worst is "
                          f"{worst[0]}: {100 * worst[1]:.2g}% saturated, {100 * worst[2]:.2g}% "
                          "vanished")]


# ---- the same training without FP8 -------------------------------------------------------------


def other_options(run, twin):
    """In which two runs differ besides precision and execution."""
    return sorted(judge.differing_options([run, twin], "results", "shape", "start", "data",
                                          "evaluation"))


def inside(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def find_twin(run):
    """A run beside this one, or at the same place of a folder beside its parent, that is the same
    but for FP8; the longest."""
    folder = os.path.dirname(os.path.abspath(run.path))
    parent = os.path.dirname(folder)
    above, name = os.path.dirname(parent), os.path.basename(folder)
    near = [os.path.join(parent, other) for other in inside(parent)]
    near += [os.path.join(above, other, name) for other in inside(above)]
    found = []
    for path in near:
        if path == folder or not os.path.isfile(metrics.metrics_path(path)):
            continue
        twin = metrics.open_run(path)
        if twin.steps and not is_fp8(twin) and not other_options(run, twin):
            found.append(twin)
    return max(found, key=lambda twin: twin.last_step, default=None)


def judged(judgement, band, name, remedy):
    text = (f"{judgement.what} {fixed(judgement.value)}, {name}'s {fixed(judgement.baseline)} "
            f"({judgement.change:+.2f}%, {judgement.limit}; {judgement.note})")
    if judgement.result == judge.OPEN:
        return well("twin", f"{judgement.what}: {judgement.note}")
    if abs(judgement.change) <= band: # of one pair of runs, which tells no more
        return well("twin", text)
    if judgement.change < 0:
        return note("twin", text + ": lower, which is no harm, and shows how far noise goes",
                    "several seeds of both (scripts/compare --seeds 1,2,3) say more")
    return wrong("twin", text if math.isfinite(judgement.change) else
                 f"{judgement.what}: {judgement.note or 'not finite'}", remedy)


def beside_twin(run, twin, limits):
    """Its losses beside those of the twin."""
    if twin is None:
        return [note("twin", "there is no run without FP8 of the same options beside it to compare "
                     "its loss with",
                     "train one with --bf16 in the place of the FP8 options (--twin RUN), or "
                     "scripts/compare")] if is_fp8(run) else []
    name = metrics.short_names([run.path, twin.path])[1]
    differing = other_options(run, twin)
    if differing:
        return [wrong("twin", f"{name} is another training: --{' --'.join(differing)}",
                      "give --twin a run with the same options but for precision")]
    if not run.steps or not twin.steps:
        return [note("twin", f"{name} and this run have no step in common yet")]
    found = [judge.Pair(judge.seed_of(run), twin, run)]
    remedy = ("two seeds of --bf16 alone show what is noise; then the head in BF16, "
              f"{finer(run)}")
    results = [(judge.judge_train(found, limits, run.name), limits.train)]
    if run.evals or twin.evals:
        results.append((judge.judge_valid(found, limits, run.name), limits.valid))
    return [judged(result, band, name, remedy) for result, band in results]
