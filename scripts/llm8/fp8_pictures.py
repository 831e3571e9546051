"""The pictures of docs/fp8.md, from the trainers' own rounding: build/plain/fp8_values, which is
kernels/fp8_format.h. `make pictures` builds that and calls this.

  scripts/fp8_pictures docs/pictures
"""

import os
import subprocess
import sys
from statistics import NormalDist

import numpy

from . import environment, style

VALUES = os.path.join(environment.ROOT, "build", "plain", "fp8_values")
FORMATS = ("E4M3", "E5M2")


def values(*words, numbers=()):
    """What fp8_values prints for the numbers, a row a line."""
    text = "".join(f"{number:.9g}\n" for number in numbers)
    done = subprocess.run([VALUES, *map(str, words)], input=text, capture_output=True, text=True,
                          check=True)
    return numpy.array([[float(word) for word in line.split()] for line in done.stdout.split("\n")
                        if line])


def normal_numbers(count):
    """Normally distributed numbers: quantiles, the same on every machine."""
    normal = NormalDist()
    return numpy.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])


def rms(error, of):
    """Root mean square, in percent."""
    return 100 * numpy.sqrt(numpy.mean(error ** 2) / numpy.mean(of ** 2))


def finish(axes, title, magnitude, percents=(1, 2, 5, 10, 20, 50, 100)):
    """Errors over magnitudes, both on logarithmic axes."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks(percents, [f"{percent:g}%" for percent in percents])
    axes.minorticks_off()
    axes.set(title=title, xlabel=magnitude)
    if percents[0] == 1:
        axes.set_ylabel("error, root mean square")
    style.legend_above(axes)


def draw_formats(figure, theme):
    """The values that there are, and how far the nearest one is."""
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    grid = 2.0 ** numpy.arange(-18, 17, 1 / 64)
    for index, name in enumerate(FORMATS):
        codes = values("codes", name)[1:, 0]
        top.vlines(codes, index - 0.35, index + 0.35, color=theme.color(index), linewidth=0.7)
        rounded = values("round", name, 1, numbers=grid)
        inside = (rounded[:, 1] == 0) & (rounded[:, 2] == 0)
        error = 100 * numpy.abs(rounded[:, 0] / grid - 1)
        peaks = numpy.array([error[max(0, i - 64):i + 64][inside[max(0, i - 64):i + 64]].max()
                             if inside[i] else numpy.nan for i in range(len(grid))])
        bottom.plot(grid, peaks, label=name, **theme.line(index))
    top.set_yticks(range(len(FORMATS)), FORMATS)
    top.set_ylim(len(FORMATS) - 0.4, -0.6)
    top.grid(False)
    top.set_title("Every positive value of the two formats")
    finish(bottom, "Largest rounding error near a magnitude", "magnitude",
           [3, 6.25, 12.5, 25, 50, 100])
    bottom.set_xticks([2.0 ** n for n in range(-16, 17, 4)])


def draw_scale(figure, theme):
    """What a scale does to normally distributed numbers with a few outliers."""
    numbers = normal_numbers(4000)
    numbers[::400] *= 16 # as activations have them
    scales = 2.0 ** numpy.arange(-14, 14.01, 0.25)
    axes = figure.subplots()
    for index, name in enumerate(FORMATS):
        error = []
        for scale in scales:
            rounded = values("round", name, f"{scale:.9g}", numbers=numbers)[:, 0]
            error.append(rms(rounded - numbers, numbers))
        rule = max(values("codes", name)[:, 0]) / numpy.abs(numbers).max()
        axes.plot(scales, error, label=name, **theme.line(index))
        axes.axvline(rule, color=theme.color(index), linewidth=0.9, linestyle=":")
        axes.annotate(f"largest value / amax\n({name})", (rule, (60, 15)[index]), fontsize=8,
                      ha="right", xytext=(-4, 0), textcoords="offset points",
                      color=theme.color(index))
    finish(axes, "4,000 numbers with 10 outliers, rounded at every scale", "scale")


def draw_outlier(figure, theme):
    """What is left of small values beside a channel that is a thousand times as large."""
    tokens, channels, block, outlier = 128, 512, 128, 200
    count = tokens * channels
    order = numpy.arange(count) * 40503 % count # every number once, for the factor is odd
    numbers = normal_numbers(count)[order].reshape(tokens, channels)
    numbers[:, outlier] *= 1000
    flat = numbers.reshape(-1)
    scale = max(values("codes", "E4M3")[:, 0]) / numpy.abs(numbers).max()
    one = values("round", "E4M3", f"{scale:.9g}", numbers=flat)[:, 0].reshape(numbers.shape)
    blocks = values("blocks", "E4M3", block, numbers=flat)[:, 0].reshape(numbers.shape)
    rest = numpy.arange(channels) != outlier
    beside = rest & (numpy.arange(channels) // block == outlier // block)
    bins = 2.0 ** numpy.arange(-12, 3)
    axes = figure.subplots()
    rows = (("one scale for the tensor", one, rest),
            ("a scale for each 1 x 128", blocks, rest & ~beside),
            ("... in the outlier's block", blocks, beside))
    for index, (label, rounded, where) in enumerate(rows):
        x, back = numbers[:, where].reshape(-1), rounded[:, where].reshape(-1)
        place = numpy.digitize(numpy.abs(x), bins)
        error = [rms(back[place == i] / x[place == i] - 1, numpy.ones(1))
                 if (place == i).sum() > 1 else numpy.nan for i in range(1, len(bins))]
        axes.plot(numpy.sqrt(bins[1:] * bins[:-1]), error, label=label, **theme.line(index))
    finish(axes, "512 channels in E4M3, one of them a thousand times the rest",
           "magnitude of a value, where its channel's standard deviation is 1")
    axes.set_xticks([2.0 ** n for n in range(-12, 3, 2)])


def draw_delayed(figure, theme):
    """The range that a scale leaves room for, beside the amax of each step."""
    steps = numpy.arange(1, 121)
    amax = 4 + 2 * numpy.sin(steps / 9) + 0.6 * numpy.sin(steps * 2.4)
    amax[69] = 30 # a spike
    axes = figure.subplots()
    axes.plot(steps, amax, color=theme.quiet, linewidth=1.0, label="amax of the step (tensorwise)")
    rows = ((32, "delayed, max of 32 steps"), (1, "delayed, most recent"))
    for index, (length, label) in enumerate(rows):
        scale = values("delayed", "E4M3", length, numbers=amax)[:, 0]
        axes.plot(steps, 448 / scale, label=label, drawstyle="steps-mid", **theme.line(index))
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set(xlabel="optimizer step", ylabel="largest magnitude that fits",
             title="A tensor with a spike at step 70: what fits its format")
    style.legend_above(axes)


def box(axes, theme, place, text, color):
    axes.annotate(text, place, ha="center", va="center", fontsize=9,
                  bbox={"boxstyle": "round,pad=0.5", "facecolor": theme.paper, "edgecolor": color,
                        "linewidth": 1.3})


def draw_products(figure, theme):
    """The three products of a linear layer, hybrid: what is in which format."""
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(0, 10), ylim=(0, 6.4),
             title="The three products of a linear layer, --fp8-format hybrid")
    e4, e5, plain = theme.color(0), theme.color(1), theme.quiet
    rows = ((5.4, "forward", ("X  E4M3", e4), ("W  E4M3", e4), "Y  BF16"),
            (3.2, "input gradient", ("dY  E5M2", e5), ("W  E4M3", e4), "dX  BF16"),
            (1.0, "weight gradient", ("dY  E5M2", e5), ("X  E4M3", e4), "dW  FP32 or BF16"))
    for height, name, left, right, result in rows:
        axes.text(0.1, height, name, fontsize=10, fontweight="bold", va="center")
        box(axes, theme, (3.3, height), left[0], left[1])
        axes.text(4.35, height, "x", ha="center", va="center")
        box(axes, theme, (5.4, height), right[0], right[1])
        axes.annotate("", (7.5, height), (6.4, height),
                      arrowprops={"arrowstyle": "->", "color": theme.ink})
        box(axes, theme, (8.7, height), result, plain)
    axes.text(6.95, 6.1, "sums in FP32", ha="center", fontsize=8, color=theme.quiet)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        environment.die("usage: scripts/fp8_pictures FOLDER")
    if not os.path.exists(VALUES):
        environment.die(f"{VALUES} is not built: make pictures builds it")
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for function, name, height in ((draw_products, "products", 2.9),
                                   (draw_formats, "formats", 4.4), (draw_scale, "scale", 3.6),
                                   (draw_outlier, "outlier", 3.6), (draw_delayed, "delayed", 3.6)):
        path = os.path.join(folder, f"{name}.svg")
        with open(path, "w", encoding="utf-8") as file:
            file.write(style.draw_svg(function, (7.6, height), **{"axes.xmargin": 0.05}))
        print(path)
