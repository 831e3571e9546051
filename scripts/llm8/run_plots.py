"""The picture of one run or several, each by itself: loss, learning rate, norm, throughput."""

import numpy

from . import series, style

SIZE = (9.6, 6.4)
AXES = {"step": "step", "tokens": "tokens", "minutes": "minutes of training steps",
        "hours": "hours of training steps"}


def draw_loss(axes, theme, runs, axis, width):
    late = []
    for i, run in enumerate(runs):
        steps, values = series.arrays(run, "loss")
        if len(steps) == 0:
            continue
        places, smoothed = series.positions(run, axis, steps), series.smooth(values, width)
        late.append(smoothed[len(smoothed) // 20:])
        if width > 1:
            axes.plot(places, values, color=theme.color(i), alpha=0.16, linewidth=0.7)
        axes.plot(places, smoothed, label=run.name, **theme.line(i))
        steps, values = series.arrays(run, "valid_loss", "evals")
        if len(steps):
            axes.plot(series.positions(run, axis, steps), values, "o", color=theme.color(i),
                      markersize=5, markerfacecolor=theme.paper, markeredgewidth=1.4, zorder=5)
            late.append(values)
    finite = numpy.concatenate(late) if late else numpy.zeros(0)
    finite = finite[numpy.isfinite(finite)]
    if len(finite):
        room = 0.08 * (finite.max() - finite.min()) or 0.05
        axes.set_ylim(finite.min() - room, finite.max() + room)
    if any(run.evals for run in runs):
        axes.plot([], [], "o", color=theme.ink, markerfacecolor=theme.paper, markersize=5,
                  label="validation")
    axes.set_title("Loss")
    axes.set_ylabel("nats a token")
    style.legend_above(axes)


def draw_column(axes, theme, runs, axis, name, width, title):
    for i, run in enumerate(runs):
        steps, values = series.arrays(run, name)
        if len(steps):
            axes.plot(series.positions(run, axis, steps), series.smooth(values, width),
                      **theme.line(i))
    axes.set_title(title)
    style.short_axis(axes.yaxis)


def mark_skipped(axes, theme, runs, axis):
    for i, run in enumerate(runs):
        skipped = sorted(step for step, record in run.steps.items() if record.get("skipped"))
        if skipped:
            axes.plot(series.positions(run, axis, numpy.array(skipped)),
                      [0.96 - 0.07 * i] * len(skipped), "x", color=theme.color(i),
                      transform=axes.get_xaxis_transform(), label=f"{len(skipped)} skipped")
    if axes.get_legend_handles_labels()[0]:
        style.legend_above(axes)


def draw_runs(figure, theme, runs, axis="step", width=None):
    """width: of the smoothing, in steps; None: by the length of the runs."""
    width = width or series.smoothing_width(max(run.last_step for run in runs))
    grid = figure.add_gridspec(2, 3, height_ratios=[1.6, 1])
    loss = figure.add_subplot(grid[0, :])
    rate, norm, speed = (figure.add_subplot(grid[1, i]) for i in range(3))
    draw_loss(loss, theme, runs, axis, width)
    draw_column(rate, theme, runs, axis, "lr", 1, "Learning rate")
    draw_column(norm, theme, runs, axis, "norm", width, "Gradient norm")
    norm.set_yscale("log")
    style.log_axis(norm.yaxis)
    mark_skipped(norm, theme, runs, axis)
    draw_column(speed, theme, runs, axis, "tokens_per_s", 3 * width, "Tokens a second")
    speed.set_ylim(bottom=0)
    loss.set_xlabel(AXES[axis])
    for axes in (loss, rate, norm, speed):
        axes.margins(x=0.01)
        axes.xaxis.get_major_locator().set_params(nbins=5 if axes is not loss else 9)
        style.short_axis(axes.xaxis)
