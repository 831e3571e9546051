"""What scripts/doctor does: finds what is wrong with a run, and says what to do."""

import os
import sys
import textwrap

from . import continuity, costs, diagnosis, judge, metrics
from .command_line import Parser, number
from .diagnosis import NOTE, OK, WRONG
from .environment import ROOT, die
from .text import counted


def parser():
    p = Parser(
        prog="scripts/doctor",
        description="Looks a run over: how it ended, its losses, where FP8 is on and what it lost, "
                    "its loss beside\nthe same training in BF16, its resumes and checkpoints, and "
                    "what makes it slow.",
        epilog="Each line is `ok`, a `note` (it could be better), or `WRONG`, with what to do.\n"
               "Exit status: 0 nothing is wrong, 1 something is, 2 it could not be looked at.\n\n"
               "  scripts/doctor run/fp8\n"
               "  scripts/doctor run/fp8 --twin run/bf16 --band 0.5")
    p.add_argument("run", metavar="RUN", help="its --save folder, or its metrics.jsonl")
    p.add_argument("--twin", metavar="RUN", help="the same training in BF16 or FP32 [one beside it "
                   "with the same options]")
    p.add_argument("--band", metavar="PERCENT", help="how far its loss may be from the twin's "
                   "[training 1, validation 2]",
                   type=number(float, 1e-9, 100, "above 0 and at most 100", "%"))
    p.add_argument("--bench", default=os.path.join(ROOT, "test", "results", "bench.jsonl"),
                   metavar="FILE", help="what make bench recorded [test/results/bench.jsonl]")
    p.add_argument("--no-checkpoints", action="store_true", help="do not read the checkpoints, "
                   "which takes long where they are large")
    p.add_argument("--brief", action="store_true", help="leave out what is ok")
    return p


def opened(path, option=""):
    metrics.refuse_others(path, option)
    run = metrics.open_run(path)
    if not run.starts:
        die(f"{option}{path}: metrics.jsonl has no record of a run's start; give the folder that "
            "--save names")
    return run


def examine(run, twin, words):
    found = [diagnosis.state(run), diagnosis.skips(run), diagnosis.losses(run)]
    found += diagnosis.learning_rate(run) + diagnosis.vocabulary(run)
    found += diagnosis.fp8_layers(run) + diagnosis.fp8_ranges(run)
    limits = {} if words.band is None else {"train": words.band, "valid": words.band}
    found += diagnosis.beside_twin(run, twin, judge.Limits(**limits))
    found += continuity.resumes(run)
    if not words.no_checkpoints:
        found += continuity.checkpoints(run)
    return found + costs.speed(run, words.bench)


def show(found, width=100):
    for finding in found:
        start = f"  {finding.level:6} {finding.about:13} "
        print(textwrap.fill(finding.text, width, initial_indent=start, break_on_hyphens=False,
                            subsequent_indent=" " * len(start), break_long_words=False))
        if finding.remedy:
            print(textwrap.fill("-> " + finding.remedy, width, initial_indent=" " * len(start),
                                subsequent_indent=" " * (len(start) + 3), break_on_hyphens=False,
                                break_long_words=False))


def main():
    words = parser().parse_args()
    run = opened(words.run)
    twin = opened(words.twin, "--twin ") if words.twin else \
        diagnosis.find_twin(run) if diagnosis.is_fp8(run) else None
    print(f"{words.run}: {run.option('arch')}, {run.option('num-layers')} layers x "
          f"{run.option('hidden-size')}, {counted(metrics.number(run.start, 'parameters'))} "
          f"parameters, {run.start.get('device', '?')}, {run.start.get('program', '?')}")
    found = examine(run, twin, words)
    show([one for one in found if one.level != OK or not words.brief])
    count = {level: sum(one.level == level for one in found) for level in (WRONG, NOTE, OK)}
    print(f"{count[WRONG]} wrong, {count[NOTE]} to note, {count[OK]} ok")
    sys.stdout.flush()
    return 1 if count[WRONG] else 0
