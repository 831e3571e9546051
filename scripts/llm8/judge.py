"""Judges whether variants of one training run agree: pairs their runs by seed, and judges each
quantity that has a limit.

A loss is judged by the mean of the pairs' differences and its standard error. Its noise is half of
the 95% confidence interval: the standard error times Student's t. There is a verdict only if the
noise is at most the limit, and the interval lies on one side of the limit.
"""

import itertools
import math
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy

from . import series
from .metrics import changing_options, number, option_number

LOSSES = ("training loss", "validation loss")
PASS, FAIL, UNSURE, OPEN = "pass", "FAIL", "cannot tell", "not judged"
# If the first losses of two runs differ by more than this, in percent, their weights or data
# differ. Rounding explains less: BF16 and FP8 differ by at most 0.04% when training starts from
# random weights (llama-tiny on 128 tokens; GPT-2 124M: 0.013%), and by more from trained ones.
ROUNDING = 0.5
# option -> the field of the run record that has the checksum of its shards
DATA = {"data": "data_crc32", "valid-data": "valid_data_crc32"}
# Student's t at 97.5%, for 2, 3, ... pairs; for more pairs, 1.96 + 2.6 / (pairs - 1)
T = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23]


@dataclass
class Limits:
    train: float = 1.0     # percent
    valid: float = 2.0     # percent
    speed: float = 1.0     # the ratio to the baseline's speed must be above this
    time: float = None     # most time to the baseline's last validation loss, as a ratio


@dataclass
class Variant:
    name: str
    runs: list

    def seeds(self):
        return [run.seed for run in self.runs]


@dataclass
class Judgement:
    what: str
    result: str
    baseline: float = math.nan
    value: float = math.nan
    change: float = math.nan # percent for losses, ratio for speed and memory
    limit: str = ""
    note: str = ""
    pairs: int = 0
    error: float = math.nan  # standard error of the change of a loss
    doubt: str = ""          # why there is no verdict
    variant: str = ""

    @property
    def noise(self):
        """Half of the 95% confidence interval of a loss's change."""
        return self.error * students_t(self.pairs)


class Pair(NamedTuple):
    run: object
    baseline: object

    @property
    def last(self):
        return min(self.baseline.last_step, self.run.last_step)


@dataclass
class Comparison:
    variants: list # the first is the baseline
    limits: Limits
    judgements: list = field(default_factory=list)

    @property
    def baseline(self):
        return self.variants[0]

    @property
    def runs(self):
        return [run for variant in self.variants for run in variant.runs]

    @property
    def verdict(self):
        found = {j.result for j in self.judgements}
        return next((result for result in (FAIL, UNSURE) if result in found), PASS)


def more_seeds(comparison):
    """Returns the value of --seeds that would allow a judgement of the losses: at least four seeds,
    or twice as many as now."""
    have = [seed for seed in comparison.baseline.seeds() if seed.isdigit()]
    if comparison.verdict != UNSURE or not have:
        return ""
    fresh = (str(n) for n in itertools.count(1) if str(n) not in have)
    return ",".join(have + list(itertools.islice(fresh, max(4 - len(have), len(have)))))


def pairs(baseline, variant):
    """Returns the pairs of runs with equal seeds."""
    return [Pair(run, base) for run in variant.runs for base in baseline.runs
            if run.seed == base.seed]


def differences(found, name, kind, width):
    """Returns the steps, and the variant's losses above the baseline's in percent, a row a seed."""
    runs = [pair.baseline for pair in found] + [pair.run for pair in found]
    steps, rows = series.side_by_side(runs, name, kind, width)
    ours, base = rows[len(found):], rows[:len(found)]
    return steps, 100 * (ours / numpy.where(base == 0, numpy.nan, base) - 1)


def window_of(last):
    """Returns over how many steps the final training loss is a mean: a twentieth, at least 10."""
    return min(last, max(10, last // 20))


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def percent(value, baseline):
    return 100 * (value / baseline - 1) if baseline else math.nan


def parts_of(run):
    """Returns the starts (of the run and its resumes) after which the run's steps were made."""
    return [part for part in run.parts if part["step"] < run.last_step] or run.parts[-1:]


def parts_at(runs, at):
    """Returns parts_of() each run; or, if `at` has a step for each, only the start before it."""
    return [[run.part_of(step)] for run, step in zip(runs, at)] if at else list(map(parts_of, runs))


def in_turn(parts, values):
    """Returns a text with the value in each part of a run, if a resume changed the value."""
    found = [values[0]]
    found += [f"{value} after step {int(part['step']):,}"
              for before, value, part in zip(values, values[1:], parts[1:]) if value != before]
    return ", then ".join(found)


def values_of(rows, name):
    """Returns an option's value in each run. rows: its parts. Equal data may have other paths, so
    data are compared by their checksum."""
    def value(part):
        checksum = part.get(DATA.get(name))
        return f"shards {checksum}" if checksum else str(part["options"].get(name))

    return [in_turn(parts, list(map(value, parts))) for parts in rows]


def differing_options(runs, *effects, at=None):
    """Returns {name: the runs' values} for the options with these effects that differ."""
    rows = parts_at(runs, at)
    values = {name: values_of(rows, name) for name in changing_options(runs[0].start, *effects)}
    return {name: row for name, row in values.items() if len({*row}) > 1}


def other_samples(runs, at=None):
    """Returns a text that names the options by which the runs' evaluations see different samples;
    "": there are none. at: for each run, the step after which the evaluation was made."""
    wrong = {*differing_options(runs, "evaluation", at=at)} - {"eval-iters"}
    parts = sum(parts_at(runs, at), [])
    options = [part["options"] for part in parts]
    # older records lack the number of sequences; 0: all
    counts = {int(part.get("valid_sequences") or option_number(part, "eval-iters") *
                  option_number(part, "global-batch-size", 1))
              for part, one in zip(parts, options) if "eval-iters" in one}
    sizes = ("eval-iters", "global-batch-size") * (len(counts) > 1) + ("seq-length",)
    wrong |= {name for name in sizes if len({one[name] for one in options if name in one}) > 1}
    return "not over the same samples: --" + " --".join(sorted(wrong)) if wrong else ""


def students_t(count):
    return math.nan if count < 2 else T[count - 2] if count - 2 < len(T) else \
        1.96 + 2.6 / (count - 1)


def error_of(changes):
    """Returns the standard error of the mean."""
    count = len(changes)
    return statistics.stdev(changes) / math.sqrt(count) if count > 1 else math.nan


def judge_loss(what, finals, limit, note):
    """Judges a loss. finals: for each pair, the final losses of the variant and of the baseline."""
    ours, theirs = zip(*finals)
    changes = [percent(a, b) for a, b in zip(ours, theirs)]
    change, doubt = mean(changes), ""
    error = error_of(changes) if math.isfinite(change) else math.nan
    noise = error * students_t(len(changes))
    if not math.isfinite(change):
        result, note = FAIL, f"NaN or infinite, {note}"
    elif len(changes) < 2:
        doubt = "one pair of seeds does not show the noise"
    elif noise > limit:
        doubt = f"the limit of {limit:g}% is below the noise of {noise:.2g}%"
    elif abs(change) - noise < limit < abs(change) + noise:
        doubt = f"the noise of {noise:.2g}% reaches across the limit of {limit:g}%"
    else:
        result = PASS if abs(change) <= limit else FAIL
    return Judgement(what, UNSURE if doubt else result, mean(theirs), mean(ours), change,
                     f"within {limit:g}%", note, len(changes), error, doubt)


def judge_train(found, limits):
    finals = [[series.window_mean(run, pair.last, window_of(pair.last)) for run in pair]
              for pair in found]
    window = window_of(min(pair.last for pair in found))
    return judge_loss("training loss", finals, limits.train, f"mean of the last {window} steps")


def runs_of(found):
    return [run for pair in found for run in pair]


def no_evaluation(found):
    """Returns a text that says why some run has no evaluation; "": all have one."""
    lacking = [run for run in runs_of(found) if not run.evals]
    if not lacking:
        return ""
    return "no evaluation (--valid-data)" if not all(run.option("valid-data") for run in lacking) \
        else "no evaluation: a run ends before its first (--eval-interval)"


def judge_valid(found, limits):
    what, limit = "validation loss", f"within {limits.valid:g}%"
    common = [set(pair.baseline.evals) & set(pair.run.evals) for pair in found]
    if not all(common):
        return Judgement(what, OPEN, limit=limit,
                         note=no_evaluation(found) or "no evaluation after the same step")
    last = [max(steps) for steps in common]
    wrong = other_samples(runs_of(found), [step for step in last for _ in range(2)])
    if wrong:
        return Judgement(what, FAIL, limit=limit, note=wrong)
    finals = [[number(run.evals[step], "valid_loss") for run in pair]
              for pair, step in zip(found, last)]
    return judge_loss(what, finals, limits.valid,
                      "after step " + " and ".join(map(str, sorted(set(last)))))


def judge_ratio(what, values, good, limit, note="", why_not=""):
    """Judges a ratio. values: for each pair, the two runs' values; 0: not known. The ratio is that
    of the two means, which the report shows; a mean of the pairs' ratios would be too high, because
    of noise. why_not: why there is no verdict."""
    ours, theirs = map(mean, zip(*values))
    ratio = ours / theirs if all(map(all, values)) else math.nan
    result = OPEN if why_not or not limit else PASS if good(ratio) else FAIL
    return Judgement(what, result, theirs, ours, ratio, limit, why_not or note)


def judge_speed(found, limits):
    runs, why_not = runs_of(found), ""
    devices = {str(part.get("device")) for run in runs for part in parts_of(run)}
    if not all(run.on_gpu for run in runs):
        why_not = "on a CPU the rounding is emulated, which costs time by its nature"
    elif len(devices) > 1:
        why_not = "not on the same device: " + "; ".join(sorted(devices))
    speeds = [list(map(series.steady_throughput, pair)) for pair in found]
    return judge_ratio("speed-up", speeds, lambda ratio: ratio > limits.speed,
                       f"above {limits.speed:g}", "median over steps", why_not)


def memory_of(run):
    return max((float(part.get("memory_bytes") or 0) for part in run.parts), default=0.0)


def judge_memory(found, _):
    return judge_ratio("memory", [list(map(memory_of, pair)) for pair in found], None, "")


def judge_time(found, limits):
    """Judges how soon the variant reaches the loss at which the baseline ends."""
    what, limit = "time to loss", "" if limits.time is None else f"at most {limits.time:g}"
    if why := no_evaluation(found) or other_samples(runs_of(found)):
        return Judgement(what, OPEN, note=why)
    targets = [pair.baseline.last("valid_loss", "evals") for pair in found]
    if not all(map(math.isfinite, targets)):
        return Judgement(what, FAIL if limit else OPEN, limit=limit,
                         note="the baseline's last validation loss is NaN or infinite")
    times, missed = [], 0
    for pair, target in zip(found, targets):
        reached = [series.reach(run, target, "seconds") for run in pair]
        missed += not all(map(math.isfinite, reached))
        times.append([time if math.isfinite(time) else
                      float(series.positions(run, "seconds", run.last_step))
                      for run, time in zip(pair, reached)])
    note = f"seconds of steps to {mean(targets):.4f}, the baseline's last validation loss"
    if missed == len(times):
        return Judgement(what, FAIL if limit else OPEN, mean([theirs for _, theirs in times]),
                         limit=limit, note=f"{note}; no pair gets there", pairs=len(times))
    if missed:
        note += (f"; {missed} of {len(times)} pairs miss it, and count with the whole time of "
                 "their runs: it takes longer than shown")
    judged = judge_ratio(what, times, lambda ratio: ratio <= limits.time and not missed, limit,
                         note)
    judged.pairs = len(times)
    return judged


def judge_start(found, _):
    """Judges whether weights and data are equal, by the options and the first step's loss."""
    what, limit, result = "same start", "equal weights and data", FAIL
    wrong = set()
    for pair in found:
        differing = differing_options(pair[::-1], "shape", "start", "data")
        wrong |= {f"--{option} ({' and '.join(row)})" for option, row in differing.items()}
    if wrong:
        return Judgement(what, FAIL, limit=limit, note="not the same: " + " ".join(sorted(wrong)))
    if any(min(pair.run.steps) != min(pair.baseline.steps) for pair in found):
        return Judgement(what, FAIL, limit=limit, note="not the same first step")
    ours, theirs = zip(*([run.column("loss")[1][0] for run in pair] for pair in found))
    apart = [abs(percent(a, b)) for a, b in zip(ours, theirs)]
    if not all(map(math.isfinite, ours + theirs)):
        note = "no loss of the first step, or NaN or infinite"
    elif max(apart) > ROUNDING:
        note = (f"the first step's losses are {max(apart):.2g}% apart, more than rounding explains "
                f"({ROUNDING:g}%): other weights or data")
    else:
        result, note = PASS, "loss of the first step: apart by rounding only"
    return Judgement(what, result, mean(theirs), mean(ours), percent(mean(ours), mean(theirs)),
                     limit, note)


def judge_end(baseline, variant):
    bad = [f"{group.name} seed {run.seed}: {run.state}" for group in (baseline, variant)
           for run in group.runs if not run.finished]
    bad += [f"seed {run.seed} has no run of {other.name}"
            for group, other in ((baseline, variant), (variant, baseline)) for run in group.runs
            if run.seed not in other.seeds()]
    return Judgement("every run finished", FAIL if bad else PASS, note="; ".join(bad))


def judge(comparison):
    for variant in comparison.variants[1:]:
        found = [judge_end(comparison.baseline, variant)]
        if begun := [pair for pair in pairs(comparison.baseline, variant) if pair.last > 0]:
            found += [one(begun, comparison.limits) for one in (
                judge_start, judge_train, judge_valid, judge_speed, judge_memory, judge_time)]
        for judgement in found:
            judgement.variant = variant.name
        comparison.judgements += found
    return comparison
