"""Draws runs: loss (training and validation), learning rate, gradient norm, tokens a second.

  scripts/plot run/gpt2                           writes run/gpt2/plot.png
  scripts/plot run/bf16 run/fp8 --out both.svg

A run is the folder that --save names, or a metrics.jsonl. Steps that a resumed run does again take
the place of the earlier ones.
"""

import os

from . import environment, metrics
from .command_line import Parser
from .series import AXES


def main():
    p = Parser(prog="scripts/plot", description=__doc__)
    p.add_argument("runs", metavar="RUN", nargs="+", help="its folder, or its metrics.jsonl")
    p.add_argument("--out", metavar="FILE", help=".png or .svg (plot.png in the first run's "
                   "folder)")
    p.add_argument("--x", choices=list(AXES), default="step", help="the horizontal axis (step)")
    options = p.parse_args()
    runs = metrics.named_runs(options.runs)
    out = options.out or os.path.join(os.path.dirname(runs[0].path), "plot.png")
    if not out.endswith((".png", ".svg")):
        environment.die(f"--out {out}: must end in .png or .svg")
    for run in runs:
        run.poll()
        if not run.steps:
            environment.die(f"{run.path}: no step in it yet" + (run.complaint and
                                                                f" ({run.complaint})"))
    from . import judge, plots, style  # matplotlib takes a second to start

    variants = [judge.Variant(run.name, [run]) for run in runs]
    drawn = style.draw(plots.draw_runs, plots.SIZE_RUNS, variants, options.x,
                       form=out.rpartition(".")[2])
    with environment.named_by("--out"):
        environment.write_durably(out, [drawn])
    metrics.warn_of_bad_lines(runs)
    print(f"{out}: {', '.join(f'{run.name} {run.state}' for run in runs)}")
