"""Watches runs: on the terminal, in TensorBoard, in Weights & Biases.

  scripts/monitor run/gpt2                              loss curve, throughput, time left
  scripts/monitor run/bf16 run/fp8 --tensorboard run/tb  then: .venv/bin/tensorboard
                                                         --logdir run/tb
  scripts/monitor run/gpt2 --once                       one look
  nohup scripts/monitor run/gpt2 --wandb my-project &   no terminal: a line now and then

A run is the folder that --save names, or a metrics.jsonl. All of it is read, then what comes; a run
that stops and is resumed is followed on, and steps that it does again take the place of the earlier
ones. Ends when every run has finished; Ctrl-C ends it before.
"""

import math
import sys
import time

import numpy
import plotext
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from . import environment, metrics, series
from .command_line import Parser, number
from .text import counted, duration, fixed, memory, shown

COLORS = [39, 208, 42, 176, 220, 252] # of the terminal's 256, one a run; near the pictures'
LETTERS = "*ox+#@"                    # instead of braille
PLAIN = str.maketrans("│┤├┬┴─┌┐└┘", "||||" + "+-++++")
COLUMNS = ["run", "step", "loss", "valid", "lr", "norm", "tok/s", "left", "skipped", "state"]


# ---- on the terminal ---------------------------------------------------------------------------


def chart(runs, width, height, braille):
    """The losses, a point a column; the axis keeps to what follows the first twentieth of them."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    late = []
    for index, run in enumerate(runs):
        points = numpy.column_stack(series.arrays(run, "loss"))
        points = points[numpy.isfinite(points[:, 1])]
        if len(points):
            parts = numpy.array_split(points, min(2 * width, len(points)))
            steps, losses = numpy.array([part.mean(axis=0) for part in parts]).T
            late.append(losses[len(losses) // 20:])
            plotext.plot(steps.tolist(), losses.tolist(), color=COLORS[index % len(COLORS)],
                         marker="braille" if braille else LETTERS[index % len(LETTERS)])
    if late:
        low, high = min(map(min, late)), max(map(max, late))
        plotext.ylim(low, high if high > low else low + 1)
    first, last = min(min(run.steps) for run in runs), max(run.last_step for run in runs)
    ticks = sorted({round(first + (last - first) * part / 4) for part in range(5)})
    plotext.xticks(ticks, [f"{tick:,}" for tick in ticks])
    drawn = plotext.build().rstrip("\n")
    return Text.from_ansi(drawn if braille else drawn.translate(PLAIN))


def seconds_left(run):
    seconds = run.recent("seconds")
    return (run.train_iters - run.last_step) * seconds if math.isfinite(seconds) else math.nan


def valid_of(run):
    steps, values = run.column("valid_loss", "evals")
    return values[-1] if steps else math.nan


def state_of(run):
    """And how long ago the file was written to, when that is long for a run that goes on."""
    if run.end is not None or not run.starts or run.killed:
        return run.state
    usual = run.recent("seconds")
    silent = run.silence > max(60, 20 * usual if math.isfinite(usual) else 0)
    return ("running" if run.steps else "starting") + \
        (f", silent for {duration(run.silence)}" if silent else "")


def table(runs):
    """A row a run."""
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        rows.add_column(name, justify="left" if name in ("run", "state") else "right",
                       no_wrap=True)
    for index, run in enumerate(runs):
        newest = run.steps.get(run.last_step, {})
        rows.add_row(Text(run.name, f"color({COLORS[index % len(COLORS)]})"),
                     f"{run.last_step:,}/{run.train_iters:,}", fixed(run.recent("loss")),
                     fixed(valid_of(run)), shown(newest.get("lr"), ".2e"),
                     fixed(run.recent("norm"), 3), counted(run.recent("tokens_per_s")),
                     "-" if run.over else duration(seconds_left(run)), str(run.skipped),
                     state_of(run))
    return rows


def speed_line(run):
    start, speed = run.start, run.recent("tokens_per_s")
    flops = speed * metrics.number(start, "flops_per_token")
    parts = [f"{counted(speed)} tok/s"]
    if math.isfinite(flops):
        parts.append(f"{flops / 1e12:.3g} TFLOP/s")
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


def details(run, width):
    share = run.last_step / run.train_iters if run.train_iters else 0.0
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(1.0, share, width=max(10, min(60, width - 10))), f"{100 * share:.1f}%")
    lines = [f"{run.start.get('device', '?')}  {run.start.get('program', '')}", bar,
             speed_line(run)]
    if run.evals:
        found = [(loss, step) for step, loss in zip(*run.column("valid_loss", "evals"))
                 if math.isfinite(loss)]
        lines.append(f"validation {fixed(valid_of(run))} after step {max(run.evals):,}" + "".join(
            f", best {fixed(loss)} after {step:,}" for loss, step in sorted(found)[:1]))
    return lines + saturation_lines(run)


def frame(runs, width, height, braille=True):
    parts = [table(runs)]
    if len(runs) == 1 and runs[0].starts:
        parts += details(runs[0], width)
    bad = sum(run.bad_lines for run in runs)
    if bad:
        parts.append(f"{bad} line{'s' if bad > 1 else ''} of metrics.jsonl could not be read")
    room = height - len(runs) - len(parts) - 1
    if all(run.steps for run in runs) and room >= 6:
        parts += ["", chart(runs, width, min(room, 24), braille)]
    return Group(*(Text(part, no_wrap=True, overflow="ellipsis") if isinstance(part, str) else part
                   for part in parts))


# ---- the program -------------------------------------------------------------------------------


def parse():
    p = Parser(prog="scripts/monitor", description=__doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="its folder, or its metrics.jsonl")
    p.add_argument("--once", action="store_true", help="what is there now, and leave")
    p.add_argument("--interval", metavar="SECONDS", default=2.0,
                   type=number(float, 0.05, 86400, "seconds, 0.05 to 86400"),
                   help="time between two looks (2)")
    p.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard's event files, a folder "
                   "a run")
    p.add_argument("--wandb", metavar="PROJECT", help="send to Weights & Biases (needs its "
                   "package)")
    p.add_argument("--ascii", action="store_true", help="no braille dots in the chart")
    p.add_argument("--no-color", action="store_true", help="no colours (NO_COLOR=1 does it too)")
    return p.parse_args()


def make_boards(options, run):
    made = []
    if options.tensorboard or options.wandb:
        from . import boards
    if options.tensorboard:
        try:
            made.append(boards.TensorBoard(options.tensorboard, run))
        except OSError as error:
            environment.die(f"--tensorboard {options.tensorboard}: {error.strerror}")
    if options.wandb:
        made.append(boards.Wandb(options.wandb, run))
    return made


def look(runs, boards):
    """Takes in what is new; returns runs and records that a log should mention."""
    notable = []
    for run in runs:
        records = run.poll()
        for board in boards[run.name]:
            for record in records:
                board.take(record)
            board.flush()
        notable += [(run, record) for record in records if record["kind"] in ("run", "eval", "end")]
    return notable


def log_line(run, record):
    step = f"step {int(record['step']):,}/{run.train_iters:,}"
    if record["kind"] == "run":
        return f"{run.name} | starts at {step}"
    if record["kind"] == "end":
        return f"{run.name} | {step} | {run.state} | {run.skipped} skipped"
    return (f"{run.name} | {step} | loss {fixed(run.recent('loss'))} | valid "
            f"{fixed(valid_of(run))} | {counted(run.recent('tokens_per_s'))} tok/s | "
            f"{duration(seconds_left(run))} left")


def follow(runs, boards, interval, show):
    """show(notable) after every look."""
    while True:
        show(look(runs, boards))
        if all(run.over for run in runs):
            return
        time.sleep(interval)


def watch(options, runs, boards):
    console = Console(no_color=options.no_color or None, highlight=False,
                      width=None if sys.stdout.isatty() else 120)
    braille = not options.ascii and "utf" in (sys.stdout.encoding or "").lower()

    def look_now(height):
        return frame(runs, min(console.width, 160), height, braille)

    if options.once:
        look(runs, boards)
        console.print(look_now(30))
    elif sys.stdout.isatty():
        with Live(screen=True, auto_refresh=False, console=console) as live:
            follow(runs, boards, options.interval,
                   lambda _: live.update(look_now(console.height), refresh=True))
    else:
        follow(runs, boards, options.interval, lambda notable: [
            print(log_line(*item), flush=True) for item in notable])


def main():
    options = parse()
    runs = metrics.named_runs(options.runs)
    boards = {run.name: make_boards(options, run) for run in runs}
    try:
        watch(options, runs, boards)
    finally:
        for board in sum(boards.values(), []):
            board.close()
