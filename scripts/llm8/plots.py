"""Draws the pictures of runs. A variant is a name and its runs: one for each seed in a comparison,
a single one in scripts/plot. Each function draws variants on a figure, which style.draw makes."""

import numpy

from . import judge, series, style, text

SIZE_RUNS = (9.6, 6.4)
SIZE_PAIR = (8.6, 6.4) # two curves, and their difference below them
SIZE_WIDE = (8.6, 3.4)


def final_range(axes, curves):
    """Limits the axis to the values after the first twentieth of the run, because losses at the
    start are far higher. Earlier spikes stay visible: rises by more than a tenth of the curve's
    fall."""
    shown = [curve[len(curve) // 20:] for curve in curves]
    for curve in filter(len, curves):
        lowest = numpy.fmin.accumulate(curve)
        shown.append(curve[curve - lowest > 0.1 * (curve[0] - lowest[-1])])
    late = numpy.concatenate([[], *shown])
    late = late[numpy.isfinite(late)]
    if len(late):
        room = 0.06 * (late.max() - late.min()) or 0.05
        axes.set_ylim(late.min() - room, late.max() + room)


def draw_band(axes, variants, index, places, rows, **words):
    """Draws the mean of a variant's rows, one of each seed, and a band from lowest to highest."""
    axes.plot(places, rows.mean(axis=0), label=variants[index].name,
              **{"markersize": 3.5, **style.line(index), **words})
    if len(variants[index].runs) > 1:
        axes.fill_between(places, rows.min(axis=0), rows.max(axis=0), color=style.color(index),
                          linewidth=0, alpha=0.2 if len(variants) <= 2 else 0.11)


def draw_curves(axes, variants, name, kind="steps", width=1, axis="step", **words):
    """Draws the curve of each variant; returns the means."""
    means = []
    for i, variant in enumerate(variants):
        steps, rows = series.side_by_side(variant.runs, name, kind, width)
        places = numpy.mean([series.positions(run, axis, steps) for run in variant.runs], axis=0)
        draw_band(axes, variants, i, places, rows,
                  **{"marker": "o" if kind == "evals" else None, **words})
        means.append(rows.mean(axis=0))
    return means


def draw_norms(axes, variants, width, axis="step"):
    """Draws the gradient norms, and marks the steps that were skipped."""
    draw_curves(axes, variants, "norm", width=width, axis=axis)
    for i, variant in enumerate(variants):
        places = []
        for run in variant.runs:
            steps = [step for step, record in sorted(run.steps.items()) if record.get("skipped")]
            places += list(series.positions(run, axis, numpy.array(steps, int)))
        if places:
            axes.plot(places, [0.96 - 0.06 * i] * len(places), "x", color=style.color(i),
                      transform=axes.get_xaxis_transform(),
                      label=f"{variant.name}: {text.many(len(places), 'skipped step')}")
    style.log_axis(axes.yaxis)


# ---- a comparison -------------------------------------------------------------------------------


def draw_difference(axes, variants, name, kind, width, limit):
    base = variants[0]
    if len(base.runs) > 1:
        steps, rows = series.side_by_side(base.runs, name, kind, width)
        apart = 100 * (rows / rows.mean(axis=0) - 1)
        axes.fill_between(steps, apart.min(axis=0), apart.max(axis=0), color=style.QUIET,
                          alpha=0.22, linewidth=0,
                          label=f"{base.name}: lowest to highest seed")
    for i, variant in enumerate(variants[1:], 1):
        found = judge.pairs(base, variant)
        if found:
            steps, rows = judge.differences(found, name, kind, width)
            draw_band(axes, variants, i, steps, rows, marker="o" if kind == "evals" else None)
    axes.axhline(0, color=style.INK, linewidth=0.8)
    for side in (-limit, limit):
        axes.axhline(side, color=style.QUIET, linewidth=1, linestyle=(0, (2, 2)),
                     label=f"limit {limit:g}%" if side > 0 else None)
    style.written(axes.yaxis, lambda value: f"{value:+.3g}%" if value else "0")
    # bands count too, but not those at the start of the run, where losses vary widely
    edges = [line.get_ydata() for line in axes.get_lines() if len(line.get_ydata()) > 2]
    edges += [path.vertices[:, 1] for band in axes.collections for path in band.get_paths()]
    finite = [numpy.abs(values[numpy.isfinite(values)]) for values in map(numpy.asarray, edges)]
    high = [numpy.percentile(values, 97) for values in finite if len(values)]
    axes.set_ylim(*(side * 1.1 * max([limit, *high]) for side in (-1, 1)))


def loss_figure(figure, variants, name, kind, widths, limit, title):
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    base, several = variants[0].name, any(len(variant.runs) > 1 for variant in variants)
    means = draw_curves(top, variants, name, kind, widths[0])
    if kind == "steps":
        final_range(top, means)
    top.set(title=title, ylabel="loss (nats/token)")
    bottom.set(title=f"Difference from {base}" + (", mean over seeds" if several else ""),
               ylabel=f"% of {base}'s loss", xlabel="step")
    draw_difference(bottom, variants, name, kind, widths[1], limit)
    style.step_axis(bottom.xaxis)
    for axes in (top, bottom):
        style.legend_above(axes)


def time_figure(figure, variants):
    """Draws validation losses over tokens and over time; a line marks the baseline's last loss."""
    ends = [series.positions(run, "minutes", run.last_step) for variant in variants
            for run in variant.runs]
    both = figure.subplots(1, 2, sharey=True)
    for axes, axis in zip(both, ("tokens", "minutes" if max(ends) >= 10 else "seconds")):
        means = draw_curves(axes, variants, "valid_loss", "evals", axis=axis)
        axes.axhline(means[0][-1], color=style.QUIET, linewidth=1, linestyle=(0, (2, 2)))
        axes.set_xlabel(series.AXES[axis])
        style.written(axes.xaxis)
    final_range(both[0], [mean[len(mean) // 8:] for mean in means])
    both[0].set(ylabel="loss (nats/token)", title="Validation loss")
    style.legend_above(both[0])
    both[0].get_legend().set_in_layout(False) # or a wide legend would narrow the axes


def norm_figure(figure, variants, width):
    axes = figure.subplots()
    draw_norms(axes, variants, width)
    axes.set(title="Gradient norm, before clipping", ylabel="norm", xlabel="step")
    style.step_axis(axes.xaxis)
    style.legend_above(axes)


def draw_bars(axes, names, groups, title, label, write, colors=style.LINES):
    """Draws a bar for each variant, its runs' mean, and a dot for each of several runs."""
    axes.grid(False)
    for i, values in enumerate(groups):
        mean = judge.mean(values)
        axes.barh(i, mean, height=0.42, color=colors[i % len(colors)], alpha=0.85)
        if len(values) > 1:
            axes.plot(values, [i] * len(values), "o", markersize=4, color=style.INK,
                      markerfacecolor=style.PAPER, markeredgewidth=1, clip_on=False)
        axes.annotate(write(mean), (max([mean, *values]), i), xytext=(7, 0), va="center",
                      textcoords="offset points", annotation_clip=False)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=style.INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max((max(values) for values in groups), default=1) or 1)
    axes.set(title=title, xlabel=label, xticks=[]) # each bar says its value
    axes.spines["bottom"].set_visible(False)


def speed_figure(figure, variants):
    left, right = figure.subplots(1, 2)
    speeds, memory = ([[of(run) for run in variant.runs] for variant in variants]
                      for of in (series.steady_throughput, judge.memory_of))
    names = [variant.name for variant in variants]
    draw_bars(left, names, speeds, "Throughput", "tokens a second, median over the steps",
              lambda speed: text.counted(speed) + " tok/s")
    draw_bars(right, [""] * len(names), memory, "Memory", "all that the run plans and allocates",
              text.memory)


# ---- runs, each by itself -----------------------------------------------------------------------


def draw_runs(figure, variants, axis):
    width = series.width_of([variant.runs[0] for variant in variants], 100)
    grid = figure.add_gridspec(2, 3, height_ratios=[1.6, 1])
    loss = figure.add_subplot(grid[0, :])
    rate, norm, speed = (figure.add_subplot(grid[1, i]) for i in range(3))
    if width > 1:
        draw_curves(loss, variants, "loss", axis=axis, alpha=0.16, linewidth=0.7, linestyle="-")
        for faint in loss.get_lines():
            faint.set_label(None)
    drawn = draw_curves(loss, variants, "loss", width=width, axis=axis)
    for i, variant in enumerate(variants):
        run = variant.runs[0]
        steps, values = series.arrays(run, "valid_loss", "evals")
        loss.plot(series.positions(run, axis, steps), values, "o", color=style.color(i),
                  markersize=5, markerfacecolor=style.PAPER, markeredgewidth=1.4, zorder=5,
                  label=None if i else "validation")
        drawn.append(values)
    final_range(loss, drawn)
    loss.set(title="Loss", ylabel="nats/token", xlabel=series.AXES[axis])
    draw_curves(rate, variants, "lr", axis=axis)
    draw_norms(norm, variants, width, axis)
    style.legend_above(loss, norm)
    draw_curves(speed, variants, "tokens_per_s", width=3 * width, axis=axis)
    for axes, title in ((rate, "Learning rate"), (norm, "Gradient norm"),
                        (speed, "Tokens a second")):
        axes.set_title(title)
        style.written(axes.yaxis)
    speed.set_ylim(bottom=0)
    for axes in (loss, rate, norm, speed):
        axes.xaxis.get_major_locator().set_params(nbins=5 if axes is not loss else 9)
        style.written(axes.xaxis)
