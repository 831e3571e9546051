"""Runs on a terminal: a loss curve in characters, throughput, time left, skipped steps, saturation.

A chart is drawn in braille dots, two by four to a character, or with a letter a run where the
terminal has no braille. frame() gives lines of text; Screen puts them in the place of the last.
"""

import math
import os
import shutil
import sys
import time

from . import metrics
from .text import counted, duration, fixed, memory

COLORS = [39, 208, 42, 176, 220, 252] # of the terminal's 256, one a run; near the pictures'
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)) # braille: column, then row
LETTERS = "*ox+#@"
AXIS_WIDTH = 9


def has_braille():
    return "utf" in (sys.stdout.encoding or "").lower()


def paint(text, index):
    return f"\033[38;5;{COLORS[index % len(COLORS)]}m{text}\033[0m"


def binned(steps, values, first, last, columns):
    """Mean of what falls on each of the columns; NaN where nothing does."""
    sums, counts = [0.0] * columns, [0] * columns
    for step, value in zip(steps, values):
        if math.isfinite(value) and step >= first:
            column = min(columns - 1, int((step - first) / max(last - first, 1) * columns))
            sums[column] += value
            counts[column] += 1
    return [total / count if count else math.nan for total, count in zip(sums, counts)]


def chart_range(curves):
    """All that comes after the first twentieth: the start is far above the rest."""
    late = [v for curve in curves for v in curve[len(curve) // 20:] if math.isfinite(v)]
    if not late:
        return 0.0, 1.0
    low, high = min(late), max(late)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


class Canvas:
    """Cells of the chart: the dots set in each, and who set the last."""

    def __init__(self, width, height, braille):
        self.width, self.height, self.braille = width, height, braille
        self.columns, self.rows = (2 * width, 4 * height) if braille else (width, height)
        self.cells = {}

    def set(self, column, row, owner):
        if not (0 <= column < self.columns and 0 <= row < self.rows):
            return
        if self.braille:
            place = column // 2, row // 4
            dots = self.cells.get(place, (0, 0))[0]
            self.cells[place] = dots | DOTS[column % 2][row % 4], owner
        else:
            self.cells[column, row] = LETTERS[owner % len(LETTERS)], owner

    def curve(self, values, low, high, owner):
        before = None
        for column, value in enumerate(values):
            if not math.isfinite(value):
                continue
            row = round((high - value) / (high - low) * (self.rows - 1))
            begin = row if before is None else before
            for between in range(min(begin, row), max(begin, row) + 1):
                self.set(column, between, owner)
            before = row

    def text(self, colored):
        for row in range(self.height):
            line = ""
            for column in range(self.width):
                mark, owner = self.cells.get((column, row), (None, 0))
                letter = " " if mark is None else chr(0x2800 + mark) if self.braille else mark
                line += paint(letter, owner) if colored and mark is not None else letter
            yield line


def chart(runs, width, height, colored, braille):
    first = min(min(run.steps) for run in runs)
    last = max(run.last_step for run in runs)
    canvas = Canvas(max(10, width - AXIS_WIDTH), height, braille)
    # a dot more than one step wide would leave gaps; one less than a step wide, noise
    curves = [binned(*run.column("loss"), first, last, canvas.columns) for run in runs]
    low, high = chart_range(curves)
    for owner, curve in enumerate(curves):
        canvas.curve(curve, low, high, owner)
    lines = []
    for row, line in enumerate(canvas.text(colored)):
        value = high - (high - low) * row / max(height - 1, 1)
        label = f"{value:{AXIS_WIDTH - 2}.3f}" if row % 4 == 0 or row == height - 1 else ""
        lines.append(f"{label:>{AXIS_WIDTH - 2}} │{line}" if braille else
                     f"{label:>{AXIS_WIDTH - 2}} |{line}")
    ends = f"{first:,}", f"step {last:,}"
    lines.append(" " * AXIS_WIDTH + ends[0] + ends[1].rjust(canvas.width - len(ends[0])))
    return lines


def seconds_left(run):
    seconds = run.recent("seconds")
    return (run.train_iters - run.last_step) * seconds if math.isfinite(seconds) else math.nan


def valid_of(run):
    steps, values = run.column("valid_loss", "evals")
    return values[-1] if steps else math.nan


def age(run):
    """How long ago the file was written to, when that is long for this run."""
    try:
        quiet = time.time() - os.path.getmtime(run.path)
    except OSError:
        return ""
    usual = run.recent("seconds")
    usual = usual if math.isfinite(usual) else 0
    return f", silent for {duration(quiet)}" if quiet > max(60, 20 * usual) else ""


def state_of(run):
    if run.end is None and run.starts:
        return ("running" + age(run)) if run.steps else "starting" + age(run)
    return run.state


def table(runs, colored):
    """A row a run."""
    header = ["run", "step", "loss", "valid", "lr", "norm", "tok/s", "left", "skipped", "state"]
    rows = []
    for run in runs:
        newest = run.steps.get(run.last_step, {})
        rows.append([run.name, f"{run.last_step:,}/{run.train_iters:,}",
                     fixed(run.recent("loss")), fixed(valid_of(run)),
                     f"{metrics.number(newest, 'lr'):.2e}", fixed(run.recent("norm"), 3),
                     counted(run.recent("tokens_per_s")),
                     "-" if run.over else duration(seconds_left(run)), str(run.skipped),
                     state_of(run)])
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for number, row in enumerate([header, *rows]):
        cells = [text.ljust(width) if i in (0, 9) else text.rjust(width)
                 for i, (text, width) in enumerate(zip(row, widths))]
        if colored and number > 0:
            cells[0] = paint(cells[0], number - 1)
        lines.append("  ".join(cells).rstrip())
    return lines


def bar(run, width, braille):
    share = run.last_step / run.train_iters if run.train_iters else 0.0
    done = round(width * min(share, 1.0))
    full, empty = ("█", "░") if braille else ("#", ".")
    return full * done + empty * (width - done) + f" {100 * share:5.1f}%"


def speed_line(run):
    start, speed = run.start, run.recent("tokens_per_s")
    flops = speed * metrics.number(start, "flops_per_token")
    parts = [f"{counted(speed)} tok/s", f"{flops / 1e12:.3g} TFLOP/s"]
    if metrics.number(start, "peak_flops") > 0:
        peak = start["peak_flops"] * start.get("ranks", 1)
        parts.append(f"MFU {100 * flops / peak:.1f}% of the BF16 peak")
    if metrics.number(start, "memory_bytes") > 0:
        parts.append(memory(start["memory_bytes"]))
    share = 100 * (start.get("fp8_flops_share") or 0)
    parts.append(start.get("precision", "?") + (f" ({share:.0f}% of FLOPs)" if share else ""))
    return "  ".join(parts)


def saturation_lines(run, most=4):
    """The tensors with the largest share of saturated elements at the newest count."""
    step, shares = run.fp8_shares()
    if step is None:
        return []
    shares = sorted(((high, low, name) for name, high, low in shares), reverse=True)
    worst = [f"{name} {100 * high:.3g}% saturated, {100 * low:.3g}% vanished"
             for high, low, name in shares[:most] if high > 0 or low > 0]
    return [f"FP8 range at step {step:,}: " + ("; ".join(worst) or "nothing outside it")]


def details(run, width, braille):
    lines = [f"{run.start.get('device', '?')}  {run.start.get('program', '')}",
             bar(run, max(10, min(60, width - 10)), braille), speed_line(run)]
    if run.evals:
        best = min(run.evals, key=lambda step: metrics.number(run.evals[step], "valid_loss"))
        lines.append(f"validation {fixed(valid_of(run))} after step {max(run.evals):,}, best "
                     f"{fixed(metrics.number(run.evals[best], 'valid_loss'))} after {best:,}")
    return lines + saturation_lines(run)


def frame(runs, width, height, colored=True, braille=True):
    lines = table(runs, colored)
    if len(runs) == 1 and runs[0].starts:
        lines += [line[:width] for line in details(runs[0], width, braille)]
    bad = sum(run.bad_lines for run in runs)
    if bad:
        lines.append(f"{bad} line{'s' if bad > 1 else ''} of metrics.jsonl could not be read")
    room = height - len(lines) - 3
    if all(run.steps for run in runs) and room >= 4:
        lines += ["", *chart(runs, width, min(room, 24), colored, braille)]
    return lines


class Screen:
    """Takes the terminal over while it lasts; what was there comes back after."""

    def __enter__(self):
        sys.stdout.write("\033[?1049h\033[?25l")
        return self

    def __exit__(self, *_):
        sys.stdout.write("\033[?25h\033[?1049l")
        sys.stdout.flush()

    def show(self, runs, colored, braille):
        size = shutil.get_terminal_size()
        # a full line would lose its last letter to \033[K
        lines = frame(runs, size.columns - 1, size.lines - 1, colored, braille)[:size.lines - 1]
        # the terminal cuts no line by itself: wrapping is off while this is drawn
        sys.stdout.write("\033[?7l\033[H" + "".join(f"{line}\033[K\n" for line in lines) +
                         "\033[J\033[?7h")
        sys.stdout.flush()
