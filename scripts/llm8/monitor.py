"""Watches runs: on the terminal (losses, throughput, ETA, the curve) and in TensorBoard.

  scripts/monitor run/gpt2
  scripts/monitor run/bf16 run/fp8 --once               one look
  scripts/monitor run/gpt2 --tensorboard run/tb         then: .venv/bin/tensorboard --logdir run/tb

A run is the folder that --save names, or a metrics.jsonl. The whole file is read, and then what is
added; a run that stops and is resumed is followed on, and steps that it does again take the place
of the earlier ones. Loss, norm and tokens/s are medians of the newest 20 steps; the log prints
those of one step. Ends when every run has finished; Ctrl-C ends it before. Without a terminal, or
on one that cannot be cleared (TERM=dumb), it prints the state once, at the end."""

import math
import shutil
import statistics
import textwrap
import time

from . import environment, metrics
from .command_line import Parser, number
from .text import counted, fixed, many, memory, printable

LETTERS = "*ox+#@" # the letters of the curves, one for each run
DROPPED = ["norm", "lr", "skipped", "valid", "ETA", "tok/s", "loss"] # columns dropped if narrow


def chart(runs, width, height):
    """Draws the losses as points: in each column of letters, one for the mean. The axis leaves out
    the first twentieth of the run."""
    steps = [step for run in runs for step in run.steps]
    first, last, curves = min(steps), max(steps), []
    for run in runs:
        columns = {}
        for step, loss in zip(*run.column("loss")):
            if math.isfinite(loss):
                column = round((step - first) / max(last - first, 1) * (width - 1))
                columns.setdefault(column, []).append(loss)
        curves.append([(column, statistics.fmean(held)) for column, held in columns.items()])
    late = [loss for curve in curves for _, loss in curve[len(curve) // 20:]]
    if not late:
        return []
    low = min(late)
    high = max(*late, low + 1e-6 * max(1, abs(low)))
    rows = [[" "] * width for _ in range(height)]
    for letter, curve in zip(LETTERS * len(runs), curves):
        for column, loss in curve:
            if loss <= high:
                rows[round((high - loss) / (high - low) * (height - 1))][column] = letter
    margins = [fixed(high), *[""] * (height - 2), fixed(low)]
    wide = max(map(len, margins))
    return [f"{margin:>{wide}} |{''.join(row).rstrip()}" for margin, row in zip(margins, rows)] + [
        " " * (wide + 2) + f"{first:,}" + f"{last:,}".rjust(width - len(f"{first:,}"))]


def table(runs, width):
    """Returns a line for each run, with as many columns as there is room for."""
    rows = list(map(metrics.cells, runs))
    rows.insert(0, {name: name for name in rows[0]})
    wide = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    for name in DROPPED:
        if sum(wide.values()) + 2 * len(wide) - 2 > width:
            del wide[name]
    return ["  ".join(row[name].ljust(size) if name in ("run", "state") else row[name].rjust(size)
                      for name, size in wide.items()).rstrip() for row in rows]


def details(run):
    """Yields more lines about a run, if it is the only one shown."""
    start, speed = run.start, run.recent("tokens_per_s")
    flops = speed * metrics.number(start, "flops_per_token")
    peak = metrics.number(start, "peak_flops") * run.ranks
    size = metrics.number(start, "memory_bytes")
    fp8 = metrics.number(start, "fp8_flops_share")
    yield f"{start.get('device', '?')}  {start.get('program', '')}"
    yield "  ".join(filter(None, (
        f"{min(100, 100 * run.last_step / run.train_iters):.1f}%" if run.train_iters else "",
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
    if losses := run.source_losses():
        yield "validation of " + "; ".join(f"{name} {fixed(loss)}" for name, loss in losses)
    if sources := run.sources():
        yield "read " + "; ".join(f"{name} {counted(tokens)} tokens, {fixed(epochs, 2)} epochs"
                                  for name, tokens, epochs in sources)
    step, shares = run.fp8_shares()
    if step is not None:
        worst = [f"{name} {100 * high:.3g}% at the largest code, {100 * low:.3g}% zero"
                 for name, high, low in shares[:4] if high > 0 or low > 0]
        yield f"FP8 range at step {step:,}: " + ("; ".join(worst) or "no such codes")


def legend(runs, width):
    """Returns the lines above the curves; none for a single curve without skipped steps."""
    skipped = [f", {many(run.skipped, 'step')} skipped" if run.skipped else "" for run in runs]
    shown = len(runs) > 1 or skipped[0]
    return textwrap.wrap("   ".join(f"{letter} {run.name}{more}" for letter, run, more in zip(
        LETTERS * len(runs), runs, skipped)), width, break_on_hyphens=False) if shown else []


def frame(runs, width, height):
    lines = table(runs, width)
    if len(runs) == 1 and runs[0].starts:
        lines += details(runs[0])
    lines += [run.complaint for run in runs if run.complaint]
    lines = [part for line in lines for part in textwrap.wrap(
        printable(line), width, subsequent_indent="  ", break_on_hyphens=False)]
    above = legend(runs, width)
    room = height - len(lines) - len(above) - 3
    if all(run.steps for run in runs) and room >= 6:
        lines += ["", *above, *chart(runs, width - 12, min(room, 24))]
    return "\n".join(printable(line)[:width] for line in lines)


def watch(options, runs, boards):
    live = environment.is_live() and not options.once
    while True:
        for run in runs:
            records = run.poll()
            if boards:
                boards[run].take(records)
        over = options.once or all(run.over for run in runs)
        if live or over:
            width, height = shutil.get_terminal_size((120, 30))
            # a live one moves to the terminal's top and clears it
            shown = frame(runs, max(20, min(width, 160)), height if live else 30)
            print("\033[H\033[J" * live + shown, flush=True)
        if over:
            return
        time.sleep(options.interval)


def main():
    p = Parser(prog="scripts/monitor", description=__doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="its folder, or its metrics.jsonl")
    p.add_argument("--once", action="store_true", help="print the present state and exit")
    p.add_argument("--interval", metavar="SECONDS", default=2.0,
                   type=number(float, 0.05, 86400, "seconds, 0.05 to 86400"),
                   help="time between two looks (2)")
    p.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard's event files, a folder "
                   "a run")
    options = p.parse_args()
    runs = metrics.named_runs(options.runs)
    boards = {}
    if options.tensorboard:
        from .boards import TensorBoard
        with environment.named_by("--tensorboard"):
            boards = {run: TensorBoard(options.tensorboard, run) for run in runs}
    try:
        watch(options, runs, boards)
    finally:
        for board in boards.values():
            board.writer.close()
