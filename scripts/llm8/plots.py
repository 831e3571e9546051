"""The pictures of a comparison, and of runs each by itself. Each function draws on a figure that
style.draw hands it."""

import numpy

from . import judge, series, style

SIZE_RUNS = (9.6, 6.4)
SIZE_PAIR = (8.6, 6.4) # curves above, their difference below
SIZE_WIDE = (8.6, 3.4)
AXES = {"step": "step", "tokens": "tokens", "minutes": "minutes of training steps",
        "hours": "hours of training steps"}


def final_range(axes, curves):
    """The start of a run is far above all that follows: the axis keeps to what comes after its
    first twentieth."""
    late = numpy.concatenate([[], *(curve[len(curve) // 20:] for curve in curves)])
    late = late[numpy.isfinite(late)]
    if len(late):
        room = 0.06 * (late.max() - late.min()) or 0.05
        axes.set_ylim(late.min() - room, late.max() + room)


def mark_skipped(axes, theme, index, places, label):
    if len(places):
        axes.plot(places, [0.96 - 0.06 * index] * len(places), "x", color=theme.color(index),
                  transform=axes.get_xaxis_transform(), label=label)


def skipped_steps(run):
    return sorted(step for step, record in run.steps.items() if record.get("skipped"))


# ---- a comparison -------------------------------------------------------------------------------


def curves_of(variant, name, kind, width):
    """Steps, mean over the seeds, lowest and highest of them."""
    steps, rows = series.side_by_side(variant.runs, name, kind, width)
    return steps, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)


def draw_band(axes, theme, comparison, index, places, mean, low, high, **words):
    """The curve of a variant in its band, from the lowest to the highest seed."""
    axes.plot(places, mean, label=comparison.variants[index].name, markersize=3.5,
              **theme.line(index), **words)
    axes.fill_between(places, low, high, color=theme.color(index), linewidth=0,
                      alpha=0.2 if len(comparison.variants) <= 2 else 0.11)


def draw_curves(axes, theme, comparison, name, kind, width):
    means = []
    for i, variant in enumerate(comparison.variants):
        steps, mean, low, high = curves_of(variant, name, kind, width)
        draw_band(axes, theme, comparison, i, steps, mean, low, high,
                  marker="o" if kind == "evals" else None)
        means.append(mean)
    return means


def draw_difference(axes, theme, comparison, name, kind, width, limit):
    base = comparison.baseline
    if len(base.runs) > 1:
        steps, mean, low, high = curves_of(base, name, kind, width)
        axes.fill_between(steps, 100 * (low / mean - 1), 100 * (high / mean - 1),
                          color=theme.quiet, alpha=0.22, linewidth=0,
                          label=f"{base.name}: lowest to highest seed")
    for i, variant in enumerate(comparison.variants[1:], 1):
        found = judge.pairs(base, variant)
        if found:
            steps, rows = judge.differences(found, name, kind, width)
            draw_band(axes, theme, comparison, i, steps, rows.mean(axis=0), rows.min(axis=0),
                      rows.max(axis=0), marker="o" if kind == "evals" else None)
    axes.axhline(0, color=theme.ink, linewidth=0.8)
    for side in (-limit, limit):
        axes.axhline(side, color=theme.quiet, linewidth=1, linestyle=(0, (2, 2)),
                     label=f"limit {limit:g}%" if side > 0 else None)
    style.percent_axis(axes.yaxis)


def difference_range(axes, limit):
    """The bands too, but for the start of the run, where all is wild."""
    edges = [line.get_ydata() for line in axes.get_lines() if len(line.get_ydata()) > 2]
    edges += [path.vertices[:, 1] for band in axes.collections for path in band.get_paths()]
    high = [numpy.nanpercentile(numpy.abs(values), 97) for values in edges if len(values)]
    axes.set_ylim(*(side * 1.1 * max([limit, *high]) for side in (-1, 1)))


def loss_figure(figure, theme, comparison, name, kind, widths, limit, title):
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    base, several = comparison.baseline.name, len(comparison.runs) > len(comparison.variants)
    means = draw_curves(top, theme, comparison, name, kind, widths[0])
    if kind == "steps":
        final_range(top, means)
    top.set(title=title, ylabel="loss (nats a token)")
    draw_difference(bottom, theme, comparison, name, kind, widths[1], limit)
    bottom.set(title=f"Difference from {base}" + (", mean over seeds" if several else ""),
               ylabel=f"% of {base}'s loss", xlabel="step")
    style.step_axis(bottom.xaxis)
    difference_range(bottom, limit)
    for axes in (top, bottom):
        style.legend_above(axes)


def time_figure(figure, theme, comparison):
    """Validation losses over tokens and over time; the line is where the baseline ends."""
    ends = [series.positions(run, "minutes", run.last_step) for run in comparison.runs]
    unit = "minutes" if max(ends) >= 10 else "seconds"
    both, means = figure.subplots(1, 2, sharey=True), []
    for i, variant in enumerate(comparison.variants):
        steps, mean, low, high = curves_of(variant, "valid_loss", "evals", 1)
        means.append(mean)
        for axes, axis in zip(both, ("tokens", unit)):
            places = series.mean_positions(variant.runs, axis, steps)
            draw_band(axes, theme, comparison, i, places, mean, low, high)
    for axes, title in zip(both, ("tokens", f"{unit} of training steps")):
        axes.axhline(means[0][-1], color=theme.quiet, linewidth=1, linestyle=(0, (2, 2)))
        axes.set_xlabel(title)
        style.short_axis(axes.xaxis)
    final_range(both[0], [mean[1 + len(mean) // 8:] for mean in means])
    both[0].set(ylabel="loss (nats a token)", title="Validation loss")
    style.legend_above(both[0])
    if both[0].get_legend(): # wider than its axes: it shall not make them narrow
        both[0].get_legend().set_in_layout(False)


def over_steps(axes, **words):
    """Magnitudes on a logarithmic axis."""
    axes.set(xlabel="step", **words)
    style.log_axis(axes.yaxis)
    style.step_axis(axes.xaxis)
    style.legend_above(axes)


def amax_figure(figure, theme, histories):
    """histories: a variant's place among all -> its name and its first run's amax_history."""
    axes = figure.subplots()
    for i, (name, (last, rows)) in histories.items():
        steps = numpy.arange(last - len(rows), last) + 1
        axes.plot(steps, rows.max(axis=1), label=f"{name}: the largest", **theme.line(i))
        axes.plot(steps, numpy.median(rows, axis=1), color=theme.color(i), alpha=0.5, linewidth=1,
                  label=f"{name}: median")
    over_steps(axes, title="Largest magnitude (amax) of the inputs of FP8 layers")


def norm_figure(figure, theme, comparison, width):
    axes = figure.subplots()
    draw_curves(axes, theme, comparison, "norm", "steps", width)
    for i, variant in enumerate(comparison.variants):
        mark_skipped(axes, theme, i, [step for run in variant.runs for step in skipped_steps(run)],
                     f"{variant.name}: skipped steps")
    over_steps(axes, title="Gradient norm, before clipping", ylabel="norm")


def bars(axes, theme, names, groups, title, write):
    """A bar a variant, from its runs' mean; a dot a run."""
    axes.grid(False, axis="y")
    for i, values in enumerate(groups):
        mean = judge.mean(values)
        axes.barh(i, mean, height=0.42, color=theme.color(i), alpha=0.85)
        axes.plot(values, [i] * len(values), "o", markersize=4, color=theme.ink,
                  markerfacecolor=theme.paper, markeredgewidth=1)
        axes.annotate(write(mean), (max([mean, *values]), i), xytext=(7, 0), va="center",
                      textcoords="offset points")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=theme.ink)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * max((max(values) for values in groups), default=1) or 1)
    axes.set_title(title)
    axes.spines["left"].set_visible(False)


def speed_figure(figure, theme, comparison):
    left, right = figure.subplots(1, 2)
    names = [variant.name for variant in comparison.variants]
    speeds, memory = ([[of(run) for run in variant.runs] for variant in comparison.variants]
                      for of in (series.steady_throughput, judge.memory_of))
    large = max(max(values) for values in memory) >= 2**30
    unit, size = ("GiB", 2**30) if large else ("MiB", 2**20)
    memory = [[value / size for value in values] for values in memory]
    bars(left, theme, names, speeds, "Throughput", lambda value: f"{value:,.0f} tok/s")
    left.set_xlabel("tokens a second, median over the steps")
    style.short_axis(left.xaxis)
    bars(right, theme, names, memory, "Memory", lambda value: f"{value:,.4g} {unit}")
    right.set_xlabel(f"{unit}, all that the run plans and allocates")
    right.set_yticklabels([])


# ---- runs, each by itself -----------------------------------------------------------------------


def draw_loss(axes, theme, runs, axis, width):
    drawn = []
    for i, run in enumerate(runs):
        steps, values = series.arrays(run, "loss")
        places, smoothed = series.positions(run, axis, steps), series.smooth(values, width)
        if width > 1:
            axes.plot(places, values, color=theme.color(i), alpha=0.16, linewidth=0.7)
        axes.plot(places, smoothed, label=run.name, **theme.line(i))
        steps, values = series.arrays(run, "valid_loss", "evals")
        axes.plot(series.positions(run, axis, steps), values, "o", color=theme.color(i),
                  markersize=5, markerfacecolor=theme.paper, markeredgewidth=1.4, zorder=5)
        drawn += [smoothed, values]
    final_range(axes, drawn)
    if any(run.evals for run in runs):
        axes.plot([], [], "o", color=theme.ink, markerfacecolor=theme.paper, markersize=5,
                  label="validation")
    axes.set(title="Loss", ylabel="nats a token", xlabel=AXES[axis])
    style.legend_above(axes)


def draw_column(axes, theme, runs, axis, name, width, title):
    for i, run in enumerate(runs):
        steps, values = series.arrays(run, name)
        axes.plot(series.positions(run, axis, steps), series.smooth(values, width),
                  **theme.line(i))
    axes.set_title(title)
    style.short_axis(axes.yaxis)


def draw_runs(figure, theme, runs, axis="step", width=None):
    """width: of the smoothing, in steps; None: by the length of the runs."""
    width = width or series.smoothing_width(max(run.last_step for run in runs))
    grid = figure.add_gridspec(2, 3, height_ratios=[1.6, 1])
    loss = figure.add_subplot(grid[0, :])
    rate, norm, speed = (figure.add_subplot(grid[1, i]) for i in range(3))
    draw_loss(loss, theme, runs, axis, width)
    draw_column(rate, theme, runs, axis, "lr", 1, "Learning rate")
    draw_column(norm, theme, runs, axis, "norm", width, "Gradient norm")
    style.log_axis(norm.yaxis)
    for i, run in enumerate(runs):
        steps = skipped_steps(run)
        mark_skipped(norm, theme, i, series.positions(run, axis, numpy.array(steps)),
                     f"{len(steps)} skipped")
    style.legend_above(norm)
    draw_column(speed, theme, runs, axis, "tokens_per_s", 3 * width, "Tokens a second")
    speed.set_ylim(bottom=0)
    for axes in (loss, rate, norm, speed):
        axes.xaxis.get_major_locator().set_params(nbins=5 if axes is not loss else 9)
        style.short_axis(axes.xaxis)
