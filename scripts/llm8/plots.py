"""The pictures of a comparison. Each function draws on a figure that style.draw hands it."""

import numpy

from . import judge, series, style

SIZE_PAIR = (8.6, 6.4) # curves above, their difference below
SIZE_WIDE = (8.6, 3.4)


def final_range(axes, curves):
    """The start of a run is far above all that follows: the axis keeps to what comes after its
    first twentieth."""
    late = numpy.concatenate([curve[len(curve) // 20:] for curve in curves])
    late = late[numpy.isfinite(late)]
    if len(late):
        room = 0.06 * (late.max() - late.min()) or 0.05
        axes.set_ylim(late.min() - room, late.max() + room)


def curves_of(variant, name, kind, width):
    """Steps, mean over the seeds, lowest and highest of them."""
    steps, rows = series.side_by_side(variant.runs, name, kind, width)
    return steps, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)


def band_strength(comparison):
    return 0.2 if len(comparison.variants) <= 2 else 0.11


def draw_curves(axes, theme, comparison, name, kind, width):
    marker = "o" if kind == "evals" else None
    means = []
    for i, variant in enumerate(comparison.variants):
        steps, mean, low, high = curves_of(variant, name, kind, width)
        axes.plot(steps, mean, label=variant.name, marker=marker, markersize=3.5, **theme.line(i))
        if len(variant.runs) > 1:
            axes.fill_between(steps, low, high, color=theme.color(i), linewidth=0,
                              alpha=band_strength(comparison))
        means.append(mean)
    return means


def draw_difference(axes, theme, comparison, name, kind, width, limit):
    marker = "o" if kind == "evals" else None
    base = comparison.baseline
    if len(base.runs) > 1:
        steps, mean, low, high = curves_of(base, name, kind, width)
        axes.fill_between(steps, 100 * (low / mean - 1), 100 * (high / mean - 1),
                          color=theme.quiet, alpha=0.22, linewidth=0,
                          label=f"{base.name}: lowest to highest seed")
    for i, variant in enumerate(comparison.variants[1:], 1):
        found = judge.pairs(base, variant)
        if not found:
            continue
        steps, rows = judge.differences(found, name, kind, width)
        axes.plot(steps, rows.mean(axis=0), marker=marker, markersize=3.5, **theme.line(i),
                  label=variant.name)
        if len(rows) > 1:
            axes.fill_between(steps, rows.min(axis=0), rows.max(axis=0), color=theme.color(i),
                              linewidth=0, alpha=band_strength(comparison))
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
    means = draw_curves(top, theme, comparison, name, kind, widths[0])
    if kind == "steps":
        final_range(top, means)
    top.margins(x=0.01)
    top.set_title(title)
    top.set_ylabel("loss (nats a token)")
    style.legend_above(top)
    draw_difference(bottom, theme, comparison, name, kind, widths[1], limit)
    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    bottom.set_title(f"Difference from {comparison.baseline.name}" +
                     (", mean over seeds" if several else ""))
    bottom.set_ylabel(f"% of {comparison.baseline.name}'s loss")
    bottom.set_xlabel("step")
    style.step_axis(bottom.xaxis)
    difference_range(bottom, limit)
    style.legend_above(bottom)


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
            axes.plot(places, mean, label=variant.name, **theme.line(i))
            axes.fill_between(places, low, high, color=theme.color(i), linewidth=0,
                              alpha=band_strength(comparison))
    for axes, title in zip(both, ("tokens", f"{unit} of training steps")):
        axes.axhline(means[0][-1], color=theme.quiet, linewidth=1, linestyle=(0, (2, 2)))
        axes.set_xlabel(title)
        style.short_axis(axes.xaxis)
        axes.margins(x=0.01)
    final_range(both[0], [mean[1 + len(mean) // 8:] for mean in means])
    both[0].set_ylabel("loss (nats a token)")
    both[0].set_title("Validation loss")
    style.legend_above(both[0])
    if both[0].get_legend(): # wider than its axes: it shall not make them narrow
        both[0].get_legend().set_in_layout(False)


def amax_figure(figure, theme, histories):
    """histories: a variant's place among all -> its name and its first run's amax_history."""
    axes = figure.subplots()
    for i, (name, (last, rows)) in histories.items():
        steps = numpy.arange(last - len(rows), last) + 1
        axes.plot(steps, rows.max(axis=1), label=f"{name}: the largest", **theme.line(i))
        axes.plot(steps, numpy.median(rows, axis=1), color=theme.color(i), alpha=0.5, linewidth=1,
                  label=f"{name}: median")
    axes.set_yscale("log")
    style.log_axis(axes.yaxis)
    axes.margins(x=0.01)
    axes.set_title("Largest magnitude (amax) of the inputs of FP8 layers")
    axes.set_xlabel("step")
    style.step_axis(axes.xaxis)
    style.legend_above(axes)


def norm_figure(figure, theme, comparison, width):
    axes = figure.subplots()
    draw_curves(axes, theme, comparison, "norm", "steps", width)
    axes.set_yscale("log")
    style.log_axis(axes.yaxis)
    for i, variant in enumerate(comparison.variants):
        skipped = [step for run in variant.runs for step, record in run.steps.items()
                   if record.get("skipped")]
        if skipped:
            axes.plot(skipped, [0.97 - 0.05 * i] * len(skipped), "x", color=theme.color(i),
                      transform=axes.get_xaxis_transform(), label=f"{variant.name}: skipped steps")
    axes.margins(x=0.01)
    axes.set_title("Gradient norm, before clipping")
    axes.set_ylabel("norm")
    axes.set_xlabel("step")
    style.step_axis(axes.xaxis)
    style.legend_above(axes)


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
    speeds = [[series.steady_throughput(run) for run in variant.runs]
              for variant in comparison.variants]
    memory = [[judge.memory_of(run) for run in variant.runs] for variant in comparison.variants]
    large = max(max(values) for values in memory) >= 2**30
    unit, size = ("GiB", 2**30) if large else ("MiB", 2**20)
    memory = [[value / size for value in values] for values in memory]
    bars(left, theme, names, speeds, "Throughput", lambda value: f"{value:,.0f} tok/s")
    left.set_xlabel("tokens a second, median over the steps")
    style.short_axis(left.xaxis)
    bars(right, theme, names, memory, "Memory", lambda value: f"{value:,.4g} {unit}")
    right.set_xlabel(f"{unit}, all that the run plans and allocates")
    right.set_yticklabels([])
