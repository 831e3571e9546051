"""Draws runs: loss (training and validation), learning rate, gradient norm, tokens a second.

  scripts/plot run/gpt2                                   writes run/gpt2/plot.png
  scripts/plot run/bf16 run/fp8 --out both.html --follow  a page that keeps itself up to date

A run is the folder that --save names, or a metrics.jsonl. Steps that a resumed run does again take
the place of the earlier ones.
"""

import os
import sys

from . import environment, metrics
from .command_line import Parser, number
from .series import AXES
from .shards import write_durably
from .text import table


def write(runs, options, refresh):
    from . import document, judge, plots, style  # matplotlib takes a second to start

    form = options.out.rpartition(".")[2]
    data = style.draw(plots.draw_runs, plots.SIZE_RUNS, [judge.Variant(run.name, [run])
                      for run in runs], options.x, form="png" if form == "png" else "svg")
    if form == "html":
        rows = list(map(metrics.cells, runs))
        data = document.page([
            "# " + ", ".join(run.name for run in runs),
            document.Picture("plot.svg", data, "Loss, learning rate, norm, throughput"),
            "Circles: validation. Faint: each step; the others are means.",
            table(list(rows[0]), [row.values() for row in rows], {0, 9})], refresh).encode()
    write_durably(options.out, [data])


def main():
    p = Parser(prog="scripts/plot", description=__doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="its folder, or its metrics.jsonl")
    p.add_argument("--out", metavar="FILE", help=".png, .svg or .html (plot.png in the first run's "
                   "folder)")
    p.add_argument("--x", choices=list(AXES), default="step",
                   help="the horizontal axis (step)")
    p.add_argument("--follow", metavar="SECONDS", nargs="?", const=10,
                   type=number(int, 1, sys.maxsize, "a whole number, 1 or more"),
                   help="draw again as the runs go on, every 10 s or as given, until they have "
                   "finished; Ctrl-C ends it")
    options = p.parse_args()
    runs = metrics.named_runs(options.runs)
    if options.out is None:
        options.out = os.path.join(os.path.dirname(runs[0].path), "plot.png")
    if not options.out.endswith((".png", ".svg", ".html")):
        environment.die(f"--out {options.out}: must end in .png, .svg or .html")
    drawn = False
    for news in metrics.follow(runs, options.follow, not options.follow):
        over = not options.follow or all(run.over for run in runs)
        empty = next((run for run in runs if not run.steps), None)
        if over and empty:
            environment.die(f"{empty.path}: no step in it yet" +
                            (empty.complaint and f" ({empty.complaint})"))
        if not empty and (any(news.values()) or over or not drawn):
            with environment.named_by("--out"):
                write(runs, options, None if over else options.follow)
            drawn = True
    metrics.warn_of_bad_lines(runs)
    print(f"{options.out}: {', '.join(f'{run.name} {run.state}' for run in runs)}")
