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

import sys
import time

from rich.console import Console
from rich.live import Live

from . import environment, metrics, terminal
from .command_line import Parser, number
from .text import counted, duration, fixed


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
            f"{fixed(terminal.valid_of(run))} | {counted(run.recent('tokens_per_s'))} tok/s | "
            f"{duration(terminal.seconds_left(run))} left")


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

    def frame(height):
        return terminal.frame(runs, min(console.width, 160), height, braille)

    if options.once:
        look(runs, boards)
        console.print(frame(30))
    elif sys.stdout.isatty():
        with Live(screen=True, auto_refresh=False, console=console) as live:
            follow(runs, boards, options.interval,
                   lambda _: live.update(frame(console.height), refresh=True))
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
