"""Minutes to a loss: GPT-2 124M by llm.c, and here by AdamW in BF16 and FP8, and by Muon, once with
half the steps.

  scripts/race --data train.bin --valid-data val.bin --llm-c ../llm.c/train_gpt2cu
  scripts/race --data ... --valid-data ... tune           short runs only; runs; report

All see the same shards, and as many tokens a step and steps. `tune` finds the learning rate of each
by short runs, and which of the tried styles of its decay is best; a pair of BF16 and FP8 has one.
One rate alone is taken without short runs. `runs` trains with them. `report` writes OUT/report (all
beside llm.c) and OUT/pairs (Muon in FP8 beside Muon in BF16, by seeds). What has ended is not run
again. Our runs resume after a stop and llm.c's begins anew, so it can be done in pieces. For two
GPUs, give each an OUT and an --only of its own; copy OUT/tune before `runs`, and the folders of
runs before `report`. `report` needs no GPU; the rest needs no Python packages.
Options after -- are our trainer's, in the place of --model gpt2-124m.
"""

import argparse
import glob
import math
import os
import re
import subprocess
import sys

from . import environment, experiment, llm_c, shard_header, trainer
from .command_line import Parser, number, one_of, several, split_words
from .estimate import PRECISIONS
from .metrics import open_run

BF16, FP8, MUON = PRECISIONS["bf16"], PRECISIONS["fp8-head"], ["--optimizer", "muon"]
HALF = "muon-half" # planned for half the steps
RUNS = {"llm.c": [], "bf16": BF16, "fp8": FP8, "muon": [*FP8, *MUON], "muon-bf16": [*BF16, *MUON],
        HALF: [*FP8, *MUON]}
PAIRS = (("bf16", "fp8"), ("muon-bf16", "muon"))
RATE_OF = {**dict(PAIRS), HALF: "muon"} # a pair has the rate of its FP8
# the trainer's that none may be given after --: what a race sets, and what would change what a run
# is named by or the tokens of a step
OURS = {**dict.fromkeys(experiment.OURS), "data": "--data", "valid-data": "--valid-data",
        "seq-length": "--seq-length", "micro-batch-size": "--batch", "global-batch-size": "--batch",
        "train-iters": "--train-iters", "lr": "--rates", "lr-decay-style": "--rates",
        "seed": "--seeds", "save": "--out",
        **dict.fromkeys(("lr-warmup-iters", "eval-interval", "eval-iters")),
        **{word.removeprefix("--"): "--only" for words in RUNS.values() for word in words
           if word.startswith("--")}}
PIECES = ("tune", "runs", "report")
EVALUATIONS, MOST_BATCHES = 16, 20
MOST_STEPS = 100                # between evaluations


def tokens_of(path, option):
    """Returns the count in a shard's header."""
    with environment.named_by(option), open(path, "rb") as file:
        count = shard_header.tokens_in(file.read(shard_header.BYTES))
    return environment.die(f"{option} {path}: not a token shard") if count is None else count


def learning_rate(text):
    """Reads RATE or RATE:STYLE, which goes on as it was given: folders are named by it."""
    value, colon, style = text.partition(":")
    try:
        known = 0 < float(value) < math.inf and (not colon or re.fullmatch(r"[\w-]+", style))
    except ValueError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text}: must be a learning rate above 0, such as 1e-3 "
                                         "or 1e-3:linear")
    return text


def parse(arguments):
    count, rates = number(int, 1, sys.maxsize, "a whole number, 1 or more"), several(learning_rate)
    p = Parser(prog="scripts/race", description=__doc__,
               unknown=": the trainer's own come after --")
    p.add_argument("pieces", metavar="PIECE", nargs="*", type=one_of(PIECES),
                   help=" ".join(PIECES) + " (all)")
    p.add_argument("--data", metavar="GLOB", required=True, help="training shards")
    p.add_argument("--valid-data", metavar="FILE", required=True, help="the validation shard")
    p.add_argument("--out", metavar="DIR", default="run/race", help="(run/race)")
    p.add_argument("--llm-c", metavar="PROGRAM", help="llm.c's train_gpt2cu (not run without)")
    p.add_argument("--llm-c-model", metavar="NAME", default="d12", help="its -e (d12)")
    p.add_argument("--trainer", metavar="PROGRAM", help="ours (the one for this machine)")
    p.add_argument("--train-iters", metavar="N", type=count, default=824, help="steps (824)")
    p.add_argument("--tune-iters", metavar="N", type=count, help="of a short run (half of them)")
    p.add_argument("--batch", metavar="N", type=count, default=64, help="sequences a step (64)")
    p.add_argument("--seq-length", metavar="N", type=count, default=1024, help="(1024)")
    p.add_argument("--seeds", metavar="LIST", default="1,2", help="of our runs (1,2)")
    p.add_argument("--only", metavar="LIST", type=several(one_of(RUNS)),
                   help=f"({','.join(RUNS)})")
    p.add_argument("--rates", metavar="LIST", type=rates, default="6e-4,1.2e-3,2.4e-3",
                   help="learning rates of AdamW to try, each with :STYLE of decay or the "
                   f"program's default, ours wsd, llm.c's {llm_c.DECAY} (6e-4,1.2e-3,2.4e-3); "
                   "llm.c: --llm-c-rates")
    p.add_argument("--llm-c-rates", metavar="LIST", type=rates,
                   help="and of llm.c (those of AdamW)")
    p.add_argument("--muon-rates", metavar="LIST", type=rates, default="2e-3,4e-3,8e-3",
                   help="and of Muon (2e-3,4e-3,8e-3)")
    ours, model = split_words(arguments)
    o = p.parse_args(ours)
    o.tune_iters = o.tune_iters or max(1, o.train_iters // 2)
    o.model = model or ["--model", "gpt2-124m"]
    experiment.refuse_ours(o.model, "after --", OURS)
    o.seeds = experiment.parse_seeds(o.seeds)
    if o.llm_c:
        trainer.refuse_missing(o.llm_c, "--llm-c")
    elif "llm.c" in (o.only or ()):
        environment.die("--only llm.c: --llm-c says where it is")
    o.names = [name for name in o.only or RUNS if name != "llm.c" or o.llm_c]
    # both evaluate on whole batches
    tokens = tokens_of(o.valid_data, "--valid-data")
    o.batches = min(MOST_BATCHES, tokens // (o.batch * o.seq_length))
    if o.batches == 0:
        environment.die(f"--valid-data {o.valid_data}: {tokens} tokens are less than a batch")
    return o


def order_of(tried):
    """Of "6e-4:linear": styles apart, each from its lowest rate on."""
    rate, _, style = tried.partition(":")
    return style, float(rate)


def task_of(o, name, tried, steps, every, folder, seed):
    """tried: the learning rate and, after a colon, the style of its decay, where it is not the
    program's default. every: steps between evaluations."""
    (rate, _, style), warm_up = tried.partition(":"), steps // 10
    if name == "llm.c":
        command = [o.llm_c, "-e", o.llm_c_model, "-i", o.data, "-j", o.valid_data, "-b", o.batch,
                   "-t", o.seq_length, "-d", o.batch * o.seq_length, "-x", steps, "-l", rate, "-k",
                   style or llm_c.DECAY, "-u", warm_up, "-q", 0, "-c", 0.1, "-v", every, "-m",
                   o.batches, "-s", 0, "-h", 0, "-r", 0]
    else:
        command = [*trainer.trainer_command(o.trainer), "--keep", 1, *o.model, "--data", o.data,
                   "--valid-data", o.valid_data, "--seq-length", o.seq_length, "--micro-batch-size",
                   o.batch, "--train-iters", steps, "--lr-warmup-iters", warm_up, "--eval-interval",
                   every, "--eval-iters", o.batches, *RUNS[name], "--lr", rate,
                   *(["--lr-decay-style", style] if style else []), "--seed", seed]
    return experiment.Task(f"{name} --lr {tried}", seed, os.path.join(o.out, folder),
                           list(map(str, command)), foreign=name == "llm.c")


# ---- tune ---------------------------------------------------------------------------------------


def short_task(o, name, tried):
    """A short run has one evaluation, at its end."""
    return task_of(o, name, tried, o.tune_iters, o.tune_iters,
                   os.path.join("tune", name, f"lr-{tried}"), "1")


def rates_of(o, name):
    of_llm_c = o.llm_c_rates if name == "llm.c" else None
    return of_llm_c or (o.muon_rates if name == "muon" else o.rates)


def tried(o, name):
    """Returns the rates whose short run has ended, and rate -> its last validation loss, of those
    that did not diverge. Runs with other options than theirs now are none."""
    ended, losses = [], {}
    for folder in sorted(glob.glob(os.path.join(glob.escape(o.out), "tune", name, "lr-*"))):
        rate = os.path.basename(folder).removeprefix("lr-")
        task = short_task(o, name, rate)
        run = open_run(task.record)
        effects = run.start.get("effects", {}) # the preset's name has none of its own
        if experiment.changed_options(task, {one for one, effect in effects.items()
                                             if effect == "nothing"} - {"model"}):
            continue
        ended += [rate] * run.over
        if run.finished and math.isfinite(loss := run.last("valid_loss", "evals")):
            losses[rate] = loss
    return ended, losses


def tune(o, name, held):
    """Does short runs, and where the best rate is the largest or the smallest of its style, one
    beyond it. One rate alone needs none."""
    rates = rates_of(o, name)
    if len(rates) == 1:
        return 0
    for _ in range(2):
        if status := experiment.run_all([short_task(o, name, rate) for rate in rates], o.out,
                                        "none", held):
            return status
        _, losses = tried(o, name)
        best, order = best_rate(o, name), sorted(losses, key=order_of)
        print(f"{name}: " + ", ".join(f"--lr {rate} {losses[rate]:.4f}" for rate in order),
              flush=True)
        style, rate = order_of(best)
        alike = [one for one in order if order_of(one)[0] == style]
        if best not in (alike[0], alike[-1]) or len(order) > len(rates):
            return 0
        beyond = f"{rate * (2 if best == alike[-1] else 0.5):g}"
        rates = [*rates, beyond + f":{style}" * bool(style)]
    return 0


def best_rate(o, name):
    of = RATE_OF.get(name, name)
    rates = rates_of(o, of)
    if len(rates) == 1:
        return rates[0]
    ended, losses = tried(o, of)
    if missing := [rate for rate in rates if rate not in ended]:
        environment.die(f"{name}: the short runs of {of} with --lr {', '.join(missing)} have not "
                        "ended with these options: the piece `tune` comes first")
    if not losses:
        environment.die(f"{name}: all short runs of {of} diverged: lower rates are needed")
    return min(losses, key=losses.get)


# ---- runs and report ----------------------------------------------------------------------------


def runs(o, held):
    wanted = [("llm.c", "llm.c", "")] * ("llm.c" in o.names)
    wanted += [(name, os.path.join(name, f"seed-{seed}"), seed)
               for seed in o.seeds for name in o.names if name != "llm.c"]
    every = min(MOST_STEPS, max(1, o.train_iters // EVALUATIONS))
    return experiment.run_all([
        task_of(o, name, best_rate(o, name), max(1, o.train_iters // (1 + (name == HALF))), every,
                folder, seed) for name, folder, seed in wanted], o.out, "drop", held)


def report(o):
    """Writes both reports; its exit status is that of scripts/compare on the pairs of Muon."""
    folders, status = experiment.runs_under(o.out), 0
    log = os.path.join(o.out, "llm.c", "console.log")
    if open_run(log).starts:
        folders["llm.c"] = [log]
    for name, among, limit in (("report", [name for name in RUNS if name != "muon-bf16"], "100"),
                               ("pairs", PAIRS[1], None)):
        words = [word for one in among for folder in folders.get(one, [])
                 for word in ("--run", f"{one}:{folder}")]
        words += ["--train-limit", limit, "--valid-limit", limit] if limit else []
        if sum(one in folders for one in among) > 1:
            status = subprocess.run([os.path.join(environment.ROOT, "scripts", "compare"),
                                     "--report-only", "--out", os.path.join(o.out, name), *words],
                                    check=False).returncode
    return status


def main():
    o = parse(sys.argv[1:])
    tokens = o.train_iters * o.batch * o.seq_length
    there = sum(tokens_of(name, "--data") for name in environment.matching(o.data)
                if not name.endswith((".mask", ".starts")))
    print(f"{tokens / 1e6:,.1f} million tokens in {o.train_iters:,} steps"
          + (f", {tokens / there:.2f} epochs" if there else ""), flush=True)
    pieces = o.pieces or PIECES
    held = experiment.lock(o.out) if set(pieces) - {"report"} else None
    tuned = dict.fromkeys(RATE_OF.get(name, name) for name in o.names)
    for piece in pieces:
        status = runs(o, held) if piece == "runs" else report(o) if piece == "report" else \
            next(filter(None, (tune(o, name, held) for name in tuned)), 0)
        if status:
            return status
    return 0
