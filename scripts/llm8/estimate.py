"""Estimates what a training run would take, for scripts/estimate: parameters and FLOPs from the CPU
trainer's --plan, memory from the GPU trainer's --plan, speed from the recorded benchmarks. It needs
no packages.
"""

import collections
import itertools
import json
import math
import os
import re
import sys

from .command_line import Parser, guess, number, one_of, several
from .environment import ROOT, built, die, trainer
from .text import duration, many
from .trainer import plan_of

PRECISIONS = {
    "bf16": ["--bf16"], # the first, because scripts/bench compares the others with it
    "fp8": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "fp8-head": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-lm-head"],
    "fp8-tensorwise": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "fp8-blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "fp8-blockwise-head": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-lm-head"],
}
# a commit is on the front page if it has records of these models and precisions on one GPU
LEAST, FRONT = ("gpt2-124m", "llama-1b"), ("bf16", "fp8", "fp8-head")
KEYS = ("model", "gpus", "precision", "recipe", "lm_head", "tokens_per_s", "tflops", "date",
        "micro_batch", "seq_length", "machine")
# no speed is given for a model if a measured one has more than this many times its FLOPs a token
TOO_SMALL = 20
# the share of the blocks' work that is done twice. activations: a third of the time of norms and
# activations (1% to 9% by the records). block: most of the forward pass, a third of the work
RECOMPUTED = {"none": 0, "activations": 0.04, "block": 0.25}
UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def count(text):
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", text.strip().lower())
    return float(found[1]) * UNITS[found[2]] if found else 0


# ---- what the trainers say -----------------------------------------------------------------------


def size_of(plan):
    """Returns the parameters, and the FLOPs to train on a token."""
    parameters = re.search(r"^  parameters +([\d,]+)$", plan, re.MULTILINE)
    flops = re.search(r"^  FLOPs a token +(\S+)$", plan, re.MULTILINE)
    if not parameters or not flops:
        die(f"{trainer('train_gpt')} is older than this script: run make")
    return int(parameters[1].replace(",", "")), float(flops[1])


def option_of(plan, name):
    return re.search(rf"(?<!\S)--{name} (\S+)", plan)[1]


def more_work(plan):
    """Returns the share by which --recompute increases the FLOPs of a token."""
    rows, columns = re.search(r"^  head +(\d+) x (\d+)", plan, re.MULTILINE).groups()
    blocks = 1 - 6 * int(rows) * int(columns) / size_of(plan)[1]
    return RECOMPUTED[option_of(plan, "recompute")] * blocks


def memory_of(options, gpus):
    """Returns the memory that the GPU trainer plans, as it prints it; or "-" and the reason."""
    if not os.path.exists(trainer("train_gptcu")):
        return "-", "memory: build train_gptcu, which plans it (make train_gptcu)"
    text, refusal = plan_of([trainer("train_gptcu"), *options, "--gpus", str(gpus)])
    found = re.findall(r"^  all +(\S+ \S+)$", text or "", re.MULTILINE)
    return (found[-1], "") if found else ("-", f"memory on {gpus} GPUs: {refusal}")


# ---- what was measured ---------------------------------------------------------------------------


def json_lines(path, needed):
    """Yields the records of a .jsonl. Ends the program at a record that lacks a needed field."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                missing = [name for name in needed if name not in record]
            except (ValueError, TypeError):
                missing = ["a JSON object"]
            if missing:
                die(f"{path}, line {number}: not a record: without {', '.join(missing)}; remove "
                    "the line")
            yield record


def gpus_of_records(records):
    """Returns the kinds of GPU, those with the most records first."""
    counted = collections.Counter(record["machine"]["gpu"] for record in records)
    return sorted(counted, key=counted.get, reverse=True)


def read_records(path, device):
    """Returns the records of plain training on one kind of GPU: the kind whose name contains
    `device`, or the kind with the most records."""
    if not os.path.exists(path):
        return []
    records = [record for record in json_lines(path, KEYS) if not record.get("arguments")
               and record.get("recompute", "none") == "none"]
    known = gpus_of_records(records)
    kinds = [gpu for gpu in known if device.lower() in gpu.lower()]
    if known and not kinds:
        die(f"--device {device}: {path} has records of {', '.join(known)} only; "
            "make bench on that GPU adds some")
    records = [record for record in records if record["machine"]["gpu"] in kinds[:1]]
    front = front_commit(records)
    for record in records:
        record["front"] = front is not None and record.get("commit") == front
        record["flops_per_token"] = record["tflops"] * 1e12 * record["gpus"] / \
            record["tokens_per_s"]
    return records


def precision_of(record):
    """Returns a record's name in PRECISIONS."""
    if record["precision"] == "bf16":
        return "bf16"
    recipe = "" if record["recipe"] == "delayed" else f"-{record['recipe']}"
    return f"fp8{recipe}{'-head' if record['lm_head'] == 'fp8' else ''}"


def front_commit(records):
    """Returns the newest commit that has all the records that the front page shows."""
    held = collections.defaultdict(set)
    for r in records:
        held[r.get("commit")].add((r["model"], precision_of(r), r["gpus"]))
    least = set(itertools.product(LEAST, FRONT, [1]))
    return max(((r["date"], r.get("commit")) for r in records if least <= held[r.get("commit")]),
               default=(None, None))[1]


def measured(records, precision, gpus, flops):
    """Returns the record that tells most of a run: of the model whose FLOPs per token are nearest,
    on this number of GPUs or else on fewer; a record of the front page is preferred, then the
    newest. None: there is none, or only of far larger models, because the time of so small a model
    is that of its kernels' launches, not of its FLOPs."""
    found = [r for r in records if precision_of(r) == precision and r["gpus"] <= gpus]
    best = max(found, default=None, key=lambda r: (
        -round(abs(math.log(r["flops_per_token"] / flops)), 2), r["gpus"] == gpus, r["front"],
        r["date"], r["gpus"]))
    return best if best and best["flops_per_token"] <= TOO_SMALL * flops else None


def other_options(record, plan, names):
    """Returns a text for each of these options whose value differs in the record."""
    theirs = {"recompute": "none", "optimizer": "adamw", "seq-length": record["seq_length"],
              "micro-batch-size": record["micro_batch"]}
    counted = {"recompute": f"; its {100 * more_work(plan):.0f}% more work is counted"}
    return [f"--{name} {option_of(plan, name)} (measured: {theirs[name]}{counted.get(name, '')})"
            for name in names if option_of(plan, name) != str(theirs[name])]


# ---- the table -----------------------------------------------------------------------------------


def row_of(records, precision, gpus, options, plan, tokens):
    """Returns the cells of a row, the source of its speed, the GPU hours, and notes on the row."""
    _, flops = size_of(plan)
    record = measured(records, precision, gpus, flops)
    words, compared = [*options, *PRECISIONS[precision]], ["recompute", "optimizer", "seq-length"]
    if precision == "bf16" and option_of(plan, "fp8-format") != "none":
        words += ["--fp8-format", "none"]
    if "--micro-batch-size" in " ".join(options):
        compared.append("micro-batch-size")
    elif record: # if not given, the record's size
        words += ["--micro-batch-size", str(record["micro_batch"])]
    memory, note = memory_of(words, gpus)
    notes = [note] if note else []
    if not record:
        return [precision, str(gpus), *"----", memory], "no such record: make bench", 0, notes
    other = other_options(record, plan, compared)
    same = abs(record["flops_per_token"] / flops - 1) < 0.005
    source = f"{record['model']} measured" if same else f"by the TFLOP/s of {record['model']}"
    where = f"{source} {record['date'][:10]}" + f" on {record['gpus']}" * (record["gpus"] != gpus)
    mark = "" if same and record["gpus"] == gpus and not other else "~"
    each = record["tflops"] / (1 + more_work(plan))
    rate = each * 1e12 * gpus / flops
    hours = tokens / rate / 3600
    notes += [f"~: not as measured: {', '.join(other)}"] if other else []
    if record["gpus"] < gpus:
        notes.append("~: more GPUs than measured: linear scaling is assumed")
    return [precision, str(gpus), f"{mark}{rate:,.0f}", f"{each:.0f}",
            mark + duration(3600 * hours), f"{hours * gpus:,.{0 if hours * gpus >= 10 else 2}f}",
            memory], where, hours * gpus, notes


def main():
    p = Parser(
        prog="scripts/estimate",
        description="Parameters, FLOPs, memory, tokens/s and days of a training.",
        epilog="Everything else goes to the trainer, which knows the model:\n"
               "  scripts/estimate --model llama-1b --tokens 20B --gpus 1,8\n"
               "  scripts/estimate --model llama-3-8b --num-layers 16 --tokens 100B --gpus 8 "
               "--recompute block")
    p.add_argument("--tokens", metavar="N", type=number(
        count, 1, sys.float_info.max, "a number of them, like 300e6, 10B or 1.5T"),
                   help="to train on: 300e6, 10B, 1.5T [those of --train-iters steps]")
    p.add_argument("--gpus", default="1", metavar="LIST", help="how many, as in 1,4,8 [1]",
                   type=several(number(int, 1, 4096, "a whole number from 1 to 4096")))
    p.add_argument("--precision", metavar="LIST", type=several(one_of(PRECISIONS)),
                   help=f"of {', '.join(PRECISIONS)} [bf16 and fp8, with "
                        "--fp8-recipe and --fp8-lm-head as given]")
    p.add_argument("--price", default=0, metavar="X", help="of a GPU for an hour, in "
                   "any currency: the cost is in the same",
                   type=number(float, 0, sys.float_info.max, "a number from 0 on"))
    p.add_argument("--device", default="", metavar="NAME", help="the GPU, as H100 [the one that "
                   "has the most records]")
    p.add_argument("--bench", default=os.path.join(ROOT, "test", "results", "bench.jsonl"),
                   metavar="FILE", help="what make bench recorded [test/results/bench.jsonl]")
    o, options = p.parse_known_args()
    records = read_records(o.bench, o.device)
    plan, refusal = plan_of([built("train_gpt"), *options, "--gpus", "1"])
    if plan is None: # the trainer knows its own options only
        die(re.sub(r"(unknown option (\S+)) \(", lambda found: found[1] + guess(
            found[2], p._option_string_actions) + " (", refusal))
    recipe = option_of(plan, "fp8-recipe")
    fp8 = "fp8" + f"-{recipe}" * (recipe != "delayed")
    if "--no-fp8-lm-head" not in plan and f"{fp8}-head" in PRECISIONS:
        fp8 += "-head"
    size = size_of(plan)
    steps, batch, micro, length = (int(option_of(plan, name)) for name in (
        "train-iters", "global-batch-size", "micro-batch-size", "seq-length"))
    # a batch that is not given, or is left out of a config.txt, is a micro-batch for each rank
    given = batch != micro or "--global-batch-size" in " ".join(options)
    tokens = o.tokens or steps * batch * length
    print(f"model      {size[0]:,} parameters, {size[1]:.3g} FLOPs a token to train")
    by = "" if o.tokens else f" in {many(steps, 'step')} (--train-iters or --tokens sets it)"
    fixed = o.tokens or given or float(option_of(plan, "epochs")) > 0 # on any number of GPUs
    each = "" if fixed or o.gpus == [1] else " on each GPU"
    print(f"training   {tokens:,.0f} tokens{each}{by}, {tokens * size[1]:.3g} FLOPs, "
          f"{tokens / size[0]:.1f} tokens a parameter\n")
    head = ["precision", "GPUs", "tokens/s", "TFLOP/s each", "time", "GPU hours", "memory each"]
    form = "{:19}{:>5}{:>12}{:>14}{:>13}{:>11}{:>20}"
    print(form.format(*head) + ("       cost" if o.price else "") + "  speed from")
    notes = []
    for precision, gpus in itertools.product(o.precision or ["bf16", fp8], o.gpus):
        if given and batch % (micro * gpus):
            cells, source, hours, said = [precision, str(gpus), *"-----"], "refused", 0, [
                f"{gpus} GPUs: --global-batch-size {batch}: must be a multiple of "
                f"--micro-batch-size {micro} x {gpus} ranks"]
        else:
            cells, source, hours, said = row_of(records, precision, gpus, options, plan,
                                                tokens * (gpus if each else 1))
        cost = f"{hours * o.price:>11,.0f}" if o.price else ""
        print(form.format(*cells) + cost + "  " + source)
        notes += [note for note in said if note not in notes]
    if records:
        notes.insert(0, f"speeds are those of {records[0]['machine']['gpu']} in {o.bench}")
    if o.price:
        notes.append(f"cost: GPU hours x {o.price:g} (--price), in its currency")
    print("".join(f"\n{note}" for note in notes))
