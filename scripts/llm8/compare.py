"""Runs one training with BF16 and FP8, or any other variants, and reports how they differ.

Every variant starts from the same weights and sees the same data in the same order; the first one
is the baseline of the others. Options after -- are the trainer's own, for all variants:

  scripts/compare --out run/compare --seeds 1,2 -- --model gpt2-124m --data 'data/train_*.bin' \\
      --valid-data data/val.bin --train-iters 2000
  scripts/compare --out run/recipes --variant 'bf16: --bf16' \\
      --variant 'delayed: --fp8-format hybrid' \\
      --variant 'tensorwise: --fp8-format hybrid --fp8-recipe tensorwise' -- --model ...
  scripts/compare --report-only --out run/compare                  (runs made elsewhere)
  scripts/compare --report-only --out report --run bf16:run/a --run fp8:run/b

Runs one after the other, so that each has the machine to itself. The same command again goes on
where it stopped, and runs nothing that has ended. In the folder: report.html (one page that needs
nothing else), report.md with its pictures, report.json, and VARIANT/seed-N/ with each run.

Losses are judged by the differences of equal seeds beside their noise: one seed, the default, is a
first look at speed, memory and curves, and a verdict needs several (--seeds 1234,1,2,3 after it
runs the three that are missing).

Exit status: 0 every limit held, 1 one did not, 2 it could not be done, 3 the seeds cannot tell, 75
stopped by a signal (the same command goes on).
"""

import os
import shlex
import sys

from . import environment, experiment, metrics, trainer
from .command_line import Parser, number, split_words

CANNOT_TELL = 3
PERCENT = number(float, 0, sys.float_info.max, "a percentage, such as 0.25%", "%")
RATIO = number(float, 0, sys.float_info.max, "a ratio, such as 1.3", "x")


def run(options, common):
    if options.run:
        environment.die("--run goes with --report-only; --variant says what to run")
    if not common:
        environment.die("no options for the trainer: give them after --, --data at least (--help)")
    variants = [experiment.parse_variant(text)
                for text in options.variant or experiment.DEFAULT_VARIANTS]
    if len(variants) < 2:
        environment.die("--variant: give two at least, the baseline first")
    program = trainer.trainer_command(options.trainer)
    seeds = experiment.parse_seeds(options.seeds or "1234")
    tasks = experiment.make_tasks(program, variants, seeds, common, options.out)
    experiment.refuse_bad(tasks)
    if len(seeds) == 1:
        print("one seed: a first look at speed, memory and curves; the same command with more "
              "(--seeds) later adds what a verdict on the losses takes", flush=True)
    with environment.named_by("--out"):
        os.makedirs(options.out, exist_ok=True)
    held = environment.lock(options.out, "--out")
    status = experiment.run_all(tasks, options.out, options.checkpoints, held)
    os.close(held)
    folders = {name: [task.folder for task in tasks if task.variant == name]
               for name, _ in variants}
    return status, folders


def named_runs(options):
    folders = {}
    for text in options.run:
        name, folder = experiment.split_name(text, "--run", "FOLDER")
        folders.setdefault(name, []).append(folder)
    if not folders:
        folders = experiment.runs_under(options.out)
        order = [experiment.parse_variant(text)[0] for text in options.variant]
        for name in order:
            if name not in folders:
                environment.die(f"--variant {name}: no such runs under {options.out} (there: "
                                f"{', '.join(folders) or 'none'})")
        folders = {name: folders[name] for name in order or folders}
    if len(folders) < 2:
        environment.die(f"--report-only: two variants at least are needed; under {options.out}: "
                        f"{', '.join(folders) or 'none'} (--run NAME:FOLDER names others)")
    paths = [os.path.realpath(metrics.metrics_path(path)) for path in sum(folders.values(), [])]
    if len(set(paths)) < len(paths):
        environment.die("--run: the same run twice; give each folder once")
    return folders


def report_on(options, folders):
    from . import judge, report

    variants = [judge.Variant(name, [metrics.open_started(path, "--run ") for path in paths])
                for name, paths in folders.items()]
    comparison = judge.Comparison(variants, judge.Limits(
        options.train_limit, options.valid_limit, options.speed_limit, options.time_limit))
    for variant in variants:
        seeds = variant.seeds()
        if len(set(seeds)) < len(seeds):
            environment.die(f"{variant.name}: two of its runs have the same seed "
                            f"({', '.join(seeds)})")
    if waiting := [run.path for run in comparison.runs if not run.steps]:
        environment.die(f"nothing to report yet: {waiting[0]} has no step")
    metrics.warn_of_bad_lines(comparison.runs)
    judge.judge(comparison)
    commands = [["scripts/compare", *sys.argv[1:]]]
    commands += [experiment.read_list(os.path.dirname(variant.runs[0].path), experiment.COMMAND)
                 for variant in variants]
    with environment.named_by("--out"):
        report.write(comparison, options.out, map(shlex.join, filter(None, commands)))
    report.print_verdict(comparison, options.out)
    return {judge.PASS: 0, judge.FAIL: 1, judge.UNSURE: CANNOT_TELL}[comparison.verdict]


def main():
    p = Parser(prog="scripts/compare", description=__doc__,
               unknown=": the trainer's own come after --",
               usage="%(prog)s [options] -- TRAINER OPTIONS")
    p.add_argument("--out", metavar="DIR", default="run/compare",
                   help="where runs and report go (run/compare)")
    p.add_argument("--variant", metavar="'NAME: OPTIONS'", action="append", default=[],
                   help="a variant: its name and its options for the trainer; once for each, the "
                   "baseline first ('bf16: --bf16' and 'fp8: --bf16 --fp8-format hybrid')")
    p.add_argument("--seeds", metavar="LIST", help="seeds of weights and data order, such as "
                   "1,2,3 (1234: a first look, which cannot tell)")
    p.add_argument("--trainer", metavar="PROGRAM", help="train_gpt, train_gptcu, or a command "
                   "that starts them (the one for this machine)")
    p.add_argument("--no-checkpoints", dest="checkpoints", action="store_false",
                   help="write none: a run that is cut off starts from its first step")
    p.add_argument("--run-only", action="store_true",
                   help="no report (needs no Python packages); --report-only makes it later")
    p.add_argument("--report-only", action="store_true", help="run nothing; report on what is "
                   "under --out, or on the runs that --run names")
    p.add_argument("--run", metavar="NAME:FOLDER", action="append", default=[],
                   help="with --report-only: a run of a variant; any number, the baseline "
                   "first")
    p.add_argument("--train-limit", metavar="PERCENT", type=PERCENT, default=1.0,
                   help="how far the final training loss, the mean of the last twentieth of the "
                   "run's steps and of 10 at least, may be from the baseline's (1%%)")
    p.add_argument("--valid-limit", metavar="PERCENT", type=PERCENT, default=2.0,
                   help="how far the last validation loss may be (2%%)")
    p.add_argument("--speed-limit", metavar="RATIO", type=RATIO, default=1.0,
                   help="what the speed-up must be above, on GPUs (1)")
    p.add_argument("--time-limit", metavar="RATIO", type=RATIO,
                   help="what the time to the baseline's last validation loss may be at most, "
                   "beside the baseline's (not judged)")
    ours, common = split_words(sys.argv[1:])
    options = p.parse_args(ours)
    if options.report_only and (common or options.run_only):
        environment.die("--report-only runs nothing: it takes no options for the trainer, nor "
                        "--run-only")
    if not options.run_only:
        from . import report  # noqa: F401  missing packages are reported before hours of training
    if options.report_only:
        folders = named_runs(options)
    else:
        status, folders = run(options, common)
        if status != 0 or options.run_only:
            return status
    return report_on(options, folders)
