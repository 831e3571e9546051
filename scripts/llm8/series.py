"""Computes with the values of runs by step: smoothing, seeds side by side, steady throughput."""

import numpy

WARM_UP_STEPS = 3 # after each start, until caches, graphs and clocks have settled


def arrays(run, name, kind="steps"):
    steps, values = run.column(name, kind)
    return numpy.array(steps, dtype=numpy.int64), numpy.array(values, dtype=numpy.float64)


def finite(run, name, kind="steps"):
    """Returns the steps at which a field is a number, and its values there."""
    steps, values = arrays(run, name, kind)
    return steps[numpy.isfinite(values)], values[numpy.isfinite(values)]


def learned(run, name):
    """Returns the same as finite(), without skipped steps, whose loss may be finite (spikes)."""
    steps, values = finite(run, name)
    done = numpy.array([not run.steps[int(step)].get("skipped") for step in steps], bool)
    return steps[done], values[done]


def smooth(values, width):
    """Returns, for each value, the mean of the `width` values around it (at the ends, of fewer);
    NaN and infinity are left out."""
    if width == 1 or not len(values):
        return numpy.where(numpy.isfinite(values), values, numpy.nan)
    good = numpy.isfinite(values)
    sums, counts = (numpy.convolve(held, numpy.ones(width))[width // 2:][:len(values)]
                    for held in (numpy.where(good, values, 0), good))
    return numpy.divide(sums, counts, where=counts > 0, out=numpy.full(len(values), numpy.nan))


def width_of(runs, parts):
    """Returns the width for smoothing the curves of runs, as a part of their number of steps."""
    return max(1, round(max(len(run.steps) for run in runs) / parts))


def side_by_side(runs, name, kind, width):
    """Returns the steps that all runs have, and the smoothed values there, a row for each run."""
    columns = [arrays(run, name, kind) for run in runs]
    common = columns[0][0]
    for steps, _ in columns[1:]:
        common = numpy.intersect1d(common, steps)
    rows = [smooth(values, width)[numpy.isin(steps, common)] for steps, values in columns]
    return common, numpy.array(rows).reshape(len(runs), len(common))


UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
AXES = {"step": "step", "tokens": "tokens", **{unit: f"{unit} of training steps" for unit in UNITS}}


def positions(run, axis, steps):
    """Returns where steps lie on an axis: "step", "tokens", or a unit of the steps' time."""
    if axis == "step":
        return steps
    known, values = arrays(run, "tokens" if axis == "tokens" else "seconds")
    if axis != "tokens":
        values = numpy.cumsum(numpy.nan_to_num(values)) / UNITS[axis]
    return numpy.interp(steps, [0, *known], [0, *values])


def reach(run, loss, axis):
    """Returns the place on the axis where the validation loss falls to `loss`, interpolated between
    two evaluations; NaN if it never falls so far."""
    steps, values = finite(run, "valid_loss", "evals")
    places, low = positions(run, axis, steps), numpy.flatnonzero(values <= loss)
    if len(low) == 0:
        return float("nan")
    before, after = max(low[0] - 1, 0), low[0]
    share = (values[before] - loss) / (values[before] - values[after]) if after else 0
    return float(places[before] + share * (places[after] - places[before]))


def steady_throughput(run):
    """Returns the median tokens per second, without the steps just after a start."""
    warming = [int(start["step"]) + 1 + i for start in run.parts for i in range(WARM_UP_STEPS)]
    steps, values = finite(run, "tokens_per_s")
    steady = values[~numpy.isin(steps, warming)]
    steady = steady if len(steady) else values
    return float(numpy.median(steady)) if len(steady) else float("nan")


def window_mean(run, last, width):
    """Returns the mean loss of the `width` steps up to step `last`, without skipped ones."""
    steps, values = learned(run, "loss")
    inside = values[(steps > last - width) & (steps <= last)]
    return float(inside.mean()) if len(inside) else float("nan")
