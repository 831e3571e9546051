#!/usr/bin/env python3
"""Trains the first steps of presets with their default options, by AdamW and by Muon, and judges
how the loss begins.

  test/presets.py --results presets.jsonl -- --data 'data/docs_train.bin' --micro-batch-size 16
  test/presets.py --trainer ./train_gpt --models gpt2-tiny --optimizers adamw -- \\
      --data d_train.bin --lr 2e-3 --train-iters 20 --lr-decay-iters 200

What follows -- goes to the trainer after --train-iters 100 --lr-decay-iters 1000: the first tenth
of a run, which is its default warm-up. Of the steps after the fifth it prints the largest rise of
the loss above its lowest so far, and the largest norm. A preset fails if there its loss rises by
more than 1 nat or above that of the first step, if its norm exceeds --norm, or if any step is
skipped. Batches differ too, those of 4 x 1024 tokens by 0.9 nats, so give larger ones. One JSON
record a run goes to --results. Exit status: 0 if no preset fails, 1 if one does or does not run.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))

from llm8.metrics import open_run  # noqa: E402
from llm8.trainer import last_error  # noqa: E402

MODELS = ("gpt2-124m gpt2-350m gpt2-774m gpt2-1558m llama-1b qwen3-0.6b qwen2.5-0.5b "
          "smollm2-135m")
FIRST = 5 # steps that are not judged


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trainer", default=os.path.join(ROOT, "train_gptcu"))
    parser.add_argument("--models", default=MODELS, help="with spaces between [%(default)s]")
    parser.add_argument("--optimizers", default="adamw muon", help="[%(default)s]")
    parser.add_argument("--norm", type=float, default=math.inf, help="the largest norm [no limit]")
    parser.add_argument("--results", help="file to append a JSON record a run to")
    parser.add_argument("options", nargs="*", help="for the trainer, after --")
    return parser.parse_args()


def train(command, folder):
    """Runs the trainer; returns its Run. Ends the program if the trainer fails."""
    metrics, log = (os.path.join(folder, name) for name in ("metrics.jsonl", "log"))
    with open(log, "w", encoding="utf-8") as file:
        try:
            status = subprocess.run([*command, "--metrics", metrics], stdout=file, check=False,
                                    stderr=subprocess.STDOUT).returncode
        except OSError as error:
            sys.exit(f"{command[0]}: {error.strerror}")
    if status != 0:
        sys.exit(f"{shlex.join(command)}: exit status {status}: {last_error(log)}")
    return open_run(metrics)


def judge(losses, norms, skipped, most_norm):
    """Returns (step, largest rise above the lowest loss before, largest norm, what is wrong)."""
    # the loss of a step that was skipped is infinite or no number
    losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
    step = max(range(FIRST, len(losses)), key=lambda i: losses[i] - min(losses[:i]))
    rise, norm = losses[step] - min(losses[:step]), max(norms[FIRST:])
    wrong = [what for what, is_so in (
        ("rises by more than 1", rise > 1),
        ("above the first loss", max(losses[FIRST:]) > losses[0]),
        (f"norm above {most_norm:g}", norm > most_norm),
        ("skipped steps", skipped)) if is_so]
    return step + 1, rise, norm, wrong


def main():
    given, failed = arguments(), 0
    print(f"{'model':17} {'optimizer':9}     rise  at step     norm  first loss  last loss")
    for model, optimizer in itertools.product(given.models.split(), given.optimizers.split()):
        command = [given.trainer, "--model", model, "--optimizer", optimizer,
                   "--train-iters", "100", "--lr-decay-iters", "1000", *given.options]
        with tempfile.TemporaryDirectory() as folder:
            run = train(command, folder)
        losses, norms = run.column("loss")[1], run.column("norm")[1]
        skipped = sum(step["skipped"] for step in run.steps.values())
        step, rise, norm, wrong = judge(losses, norms, skipped, given.norm)
        print(f"{model:17} {optimizer:9} {rise:8.2f} {step:8} {norm:8.1f} {losses[0]:11.3f} "
              f"{losses[-1]:10.3f}  {', '.join(wrong) or 'ok'}", flush=True)
        failed += bool(wrong)
        if given.results:
            record = {"date": datetime.date.today().isoformat(),
                      "machine": {"gpu": run.start["device"].split(",")[0]},
                      "commit": os.environ.get("COMMIT"),
                      "command": shlex.join([os.path.basename(given.trainer), *command[1:]]),
                      "lr": round(float(run.option("lr")), 9), "skipped": skipped,
                      "losses": [round(loss, 4) for loss in losses],
                      "norms": [round(norm, 2) for norm in norms]}
            with open(given.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
