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
from rich.table import Table
from rich.text import Text

from . import metrics, series
from .command_line import Parser, number
from .text import counted, duration, fixed, memory, shown

COLORS = [39, 208, 42, 176, 220, 252] # of the terminal's 256, one a run; near the pictures'
LETTERS = "*ox+#@"                    # instead of braille
PLAIN = str.maketrans("│┤├┬┴─┌┐└┘", "||||" + "+-++++")
DROPPED = ["norm", "lr", "skipped", "valid", "left", "tok/s", "loss"] # where it is narrow, in order


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


def time_left(run):
    return "-" if run.over else duration(
        max(0, run.train_iters - run.last_step) * run.recent("seconds"))


def state_of(run):
    """And how long ago the file was written to, when that is long for a run that goes on."""
    if run.end is not None or not run.starts or run.died:
        return run.state
    usual = run.recent("seconds")
    silent = run.silence > max(60, 20 * usual if math.isfinite(usual) else 0)
    return ("running" if run.steps else "starting") + \
        (f", silent for {duration(run.silence)}" if silent else "")


def table(runs, width):
    """A row a run, in as many columns as there is room for."""
    rows = [{"run": run.name, "step": f"{run.last_step:,}/{run.train_iters:,}",
             "loss": fixed(run.recent("loss")), "valid": fixed(run.last("valid_loss", "evals")),
             "lr": shown(run.last("lr"), ".2e"), "norm": fixed(run.recent("norm"), 3),
             "tok/s": counted(run.recent("tokens_per_s")), "left": time_left(run),
             "skipped": str(run.skipped), "state": state_of(run)} for run in runs]
    wide = {name: 2 + max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for name in DROPPED:
        if sum(wide.values()) - 2 > width:
            del wide[name]
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in wide:
        drawn.add_column(name, justify="left" if name in ("run", "state") else "right",
                         no_wrap=True)
    for index, row in enumerate(rows):
        drawn.add_row(Text(row["run"], f"color({COLORS[index % len(COLORS)]})"),
                      *(row[name] for name in list(wide)[1:]))
    return drawn


def details(run):
    """Lines on a run that is shown alone."""
    start, speed = run.start, run.recent("tokens_per_s")
    flops = speed * metrics.number(start, "flops_per_token")
    peak = metrics.number(start, "peak_flops") * run.ranks
    size = metrics.number(start, "memory_bytes")
    fp8 = metrics.number(start, "fp8_flops_share")
    yield f"{start.get('device', '?')}  {start.get('program', '')}"
    yield "  ".join(filter(None, (
        f"{100 * run.last_step / run.train_iters:.1f}%" if run.train_iters else "",
        f"{counted(speed)} tok/s", f"{flops / 1e12:.3g} TFLOP/s" if flops > 0 else "",
        f"MFU {100 * flops / peak:.1f}% of the BF16 peak" if peak * flops > 0 else "",
        memory(size) if size > 0 else "",
        start.get("precision", "?") + (f" ({100 * fp8:.0f}% of FLOPs)" if fp8 > 0 else ""))))
    if run.evals:
        found = [(loss, step) for step, loss in zip(*run.column("valid_loss", "evals"))
                 if math.isfinite(loss)]
        yield (f"validation {fixed(run.last('valid_loss', 'evals'))} after step "
               f"{max(run.evals):,}" +
               "".join(f", best {fixed(loss)} after {step:,}" for loss, step in sorted(found)[:1]))
    step, shares = run.fp8_shares()
    if step is not None:
        worst = [f"{name} {100 * high:.3g}% saturated, {100 * low:.3g}% vanished"
                 for name, high, low in sorted(shares, key=lambda row: row[1:], reverse=True)[:4]
                 if high > 0 or low > 0]
        yield f"FP8 range at step {step:,}: " + ("; ".join(worst) or "nothing outside it")


def frame(runs, width, height, braille=True):
    parts = list(details(runs[0])) if len(runs) == 1 and runs[0].starts else []
    bad = sum(run.bad_lines for run in runs)
    if bad:
        parts.append(f"{bad} line{'s' if bad > 1 else ''} of metrics.jsonl could not be read")
    lines = [Text(part, no_wrap=True, overflow="ellipsis") for part in parts]
    room = height - len(runs) - len(parts) - 2
    if all(run.steps for run in runs) and room >= 6:
        lines += ["", chart(runs, width, min(room, 24), braille)]
    return Group(table(runs, width), *lines)


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


def look(runs, boards):
    """Takes in what is new; returns runs and records that a log should mention."""
    notable = []
    for run in runs:
        records = run.poll()
        for board in boards[run.name]:
            board.take(records)
        notable += [(run, record) for record in records if record["kind"] in ("run", "eval", "end")]
    return notable


def log_line(run, record):
    step = f"step {int(record['step']):,}/{run.train_iters:,}"
    if record["kind"] == "run":
        return f"{run.name} | starts at {step}"
    if record["kind"] == "end":
        return f"{run.name} | {step} | {run.state} | {run.skipped} skipped"
    return (f"{run.name} | {step} | loss {fixed(run.recent('loss'))} | valid "
            f"{fixed(run.last('valid_loss', 'evals'))} | {counted(run.recent('tokens_per_s'))} "
            f"tok/s | {time_left(run)} left")


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
    boards = {run.name: [] for run in runs}
    if options.tensorboard or options.wandb:
        from .boards import open_boards
        boards = {run.name: open_boards(run, options.tensorboard, options.wandb) for run in runs}
    try:
        watch(options, runs, boards)
    finally:
        for board in sum(boards.values(), []):
            board.close()
