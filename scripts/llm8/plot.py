"""Draws runs: loss (training and validation), learning rate, gradient norm, tokens a second.

  scripts/plot run/gpt2                                   writes run/gpt2/plot.png
  scripts/plot run/bf16 run/fp8 --out both.html --follow  a page that keeps itself up to date

A run is the folder that --save names, a metrics.jsonl, or the log of llm.c's trainer. Steps
that a resumed run does again take the place of the earlier ones.
"""

import os
import sys
import time

from . import document, environment, judge, metrics, plots, series, style
from .command_line import Parser, number
from .shards import write_durably
from .text import counted, fixed, table

COUNT = number(int, 1, sys.maxsize, "a whole number, 1 or more")


def parse():
    p = Parser(prog="scripts/plot", description=__doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="its folder, or its metrics.jsonl")
    p.add_argument("--out", metavar="FILE", help=".png, .svg or .html (plot.png in the first run's "
                   "folder)")
    p.add_argument("--x", choices=list(plots.AXES), default="step",
                   help="the horizontal axis (step)")
    p.add_argument("--smooth", metavar="STEPS", type=COUNT,
                   help="means over so many steps; 1: none (a hundredth of the run)")
    p.add_argument("--follow", metavar="SECONDS", type=COUNT, nargs="?", const=10,
                   help="draw again as the runs go on, every 10 s or as given, until they have "
                   "finished; Ctrl-C ends it")
    return p.parse_args()


def summary(runs):
    rows = [[run.name, run.state, f"{run.last_step:,} of {run.train_iters:,}",
             fixed(run.last("loss")), fixed(run.last("valid_loss", "evals")),
             counted(series.steady_throughput(run)), str(run.skipped)] for run in runs]
    return table(["run", "state", "steps", "loss", "validation loss", "tok/s", "skipped"], rows,
                 {0, 1})


def write(runs, options, refresh):
    form = options.out.rpartition(".")[2]
    data = style.draw(plots.draw_runs, plots.SIZE_RUNS, [judge.Variant(run.name, [run])
                      for run in runs], options.x, options.smooth,
                      form="png" if form == "png" else "svg")
    if form == "html":
        data = document.page([
            "# " + ", ".join(run.name for run in runs),
            document.Picture("plot.svg", data, "Loss, learning rate, norm, throughput"),
            "Circles: validation. Faint: each step; the others are means.", summary(runs)],
            refresh).encode()
    try:
        write_durably(options.out, [data])
    except OSError as error:
        environment.die(f"--out {options.out}: {error.strerror}")


def main():
    options = parse()
    runs = metrics.named_runs(options.runs)
    if options.out is None:
        options.out = os.path.join(os.path.dirname(runs[0].path), "plot.png")
    if not options.out.endswith((".png", ".svg", ".html")):
        environment.die(f"--out {options.out}: must end in .png, .svg or .html")
    drawn = False
    while True:
        news = [run.poll() for run in runs]
        over = not options.follow or all(run.over for run in runs)
        empty = next((run.path for run in runs if not run.steps), None)
        if over and empty:
            environment.die(f"{empty}: no step in it yet")
        if not empty and (any(news) or over or not drawn):
            write(runs, options, None if over else options.follow)
            drawn = True
        if over:
            print(f"{options.out}: {', '.join(f'{run.name} {run.state}' for run in runs)}")
            return 0
        time.sleep(options.follow)
