#!/usr/bin/env python3
"""Trains with our trainer and with PyTorch from the same weights over the same data, and compares.

  test/compare_torch.py --data 'data/docs_train.bin' -- --model gpt2-124m --train-iters 300 \\
      --micro-batch-size 16 --lr-warmup-iters 30
  test/compare_torch.py --trainer ./train_gpt --device cpu --limit 1e-5 --data d_train.bin -- \\
      --model gpt2-tiny --train-iters 30
  test/compare_torch.py --trainer ./train_gpt --device cpu --limit 5e-5 \\
      --data 'data/chat/train_*.bin' -- --load start --valid-data 'data/chat/val_*.bin' \\
      --seq-length 256 --train-iters 30

What follows -- is for the trainer; PyTorch's side takes everything from the options that the run
records: shape, batch, AdamW, schedule, clipping, seed. The start is a checkpoint of step 0 that
train_gpt writes, opened by transformers; the data order and the targets that count are those of
dataloader/loader.h, computed here again. PyTorch runs plain: FP32, or BF16 autocast where the run
is not FP32, and scaled-dot-product attention. Needs torch, transformers and numpy.

The loss of every step, and with --valid-data that of an evaluation after the last, may differ by
--limit at most; so that this can fail, the losses must differ by more than it when one side is
moved by a step. One JSON record a call goes to --results, with what was wrong. Exit status: 0
within the limit, 1 beyond it or an error.
"""

import argparse
import datetime
import glob
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORD = 2**64 - 1
LEFT_OUT = -100 # a target that does not count, as cross_entropy takes it


# ---- the data order: dataloader/loader.h and base/rng.h -----------------------------------------


def rng_mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def rng_bits(key, counter):
    golden = 0x9E3779B97F4A7C15
    return rng_mix(rng_mix(key + golden & WORD) ^ (counter * golden + 1 & WORD))


def shuffled(key, count, index):
    """Where a permutation of 0..count-1 puts an index: a Feistel network, until it falls inside."""
    half = 1
    while half < 32 and 1 << 2 * half < count:
        half += 1
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (rng_bits(key + turn & WORD, right) & mask)
        index = left << half | right
        if index < count:
            return index


def write_shard(path, tokens):
    header = numpy.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.astype("<u2").tobytes())


def read_shard(path):
    header = numpy.fromfile(path, dtype="<i4", count=256)
    if header[0] != 20240520 or header[1] not in (1, 2):
        sys.exit(f"error: {path}: not a token shard")
    return numpy.memmap(path, dtype="<u2" if header[1] == 1 else "<u4", mode="r", offset=1024)


def read_bits(path, ending, count):
    """Returns for each token of a shard whether it counts (.mask) or begins a document (.starts);
    None: there is no such file."""
    if not os.path.exists(path + ending):
        return None
    bits = numpy.fromfile(path + ending, dtype="u1", offset=1024)
    return numpy.unpackbits(bits, count=count, bitorder="little").astype(bool)


def read_mask(path, count):
    """None: all tokens count."""
    return read_bits(path, ".mask", count)


RESETS = ("reset-attention-mask", "reset-position-ids")


def seen_of(options, begins):
    """What the model is given so that documents are apart, where the options say so."""
    length, apart = begins.shape[1], {}
    positions = numpy.arange(length)
    starts = numpy.maximum.accumulate(numpy.where(begins, positions, 0), axis=1)[:, None, :, None]
    if options.get(RESETS[0]) == "true":
        apart["attention_mask"] = (positions >= starts) & (positions <= positions[:, None])
    if options.get(RESETS[1]) == "true":
        apart["position_ids"] = positions - starts[:, 0, :, 0]
    return apart


class Data:
    """The samples of a run, one after the other, whatever the batch."""

    def __init__(self, pattern, options, shuffle):
        paths = sorted(path for path in glob.glob(pattern)
                       if not path.endswith((".mask", ".starts")))
        tokens = [read_shard(path) for path in paths]
        masks = [read_mask(path, len(part)) for path, part in zip(paths, tokens)]
        counts = [numpy.ones(len(part), dtype=bool) if mask is None else mask
                  for part, mask in zip(tokens, masks)]
        begins = [read_bits(path, ".starts", len(part)) for path, part in zip(paths, tokens)]
        if any(options.get(name) == "true" for name in RESETS) and any(
                one is None for one in begins):
            sys.exit(f"error: {pattern}: a shard without .starts; prepare the data again")
        begins = [numpy.zeros(len(part), bool) if one is None else one
                  for part, one in zip(tokens, begins)]
        if any(mask is not None for mask in masks): # the last window may lack its last target
            tokens.append(numpy.zeros(1, dtype=tokens[0].dtype))
            counts.append(numpy.zeros(1, dtype=bool))
        self.tokens, self.counts = numpy.concatenate(tokens), numpy.concatenate(counts)
        self.begins, self.options = numpy.concatenate(begins), options
        self.length = int(options["seq-length"])
        self.starts = [at for at in range(0, len(self.tokens) - self.length, self.length)
                       if self.counts[at + 1:at + self.length + 1].any()]
        self.seed, self.shuffle = int(options["seed"]), shuffle

    def start(self, sample):
        epoch, index = divmod(sample, len(self.starts))
        if self.shuffle:
            index = shuffled(rng_bits(self.seed, epoch), len(self.starts), index)
        return self.starts[index]

    def batch(self, first, count, device):
        """Tokens and targets of the samples from `first` on, and what of them is apart."""
        rows = [slice(at, at + self.length + 1)
                for at in map(self.start, range(first, first + count))]
        tokens = numpy.stack([self.tokens[row] for row in rows]).astype(numpy.int64)
        counts = numpy.stack([self.counts[row] for row in rows])
        targets = numpy.where(counts, tokens, LEFT_OUT)
        begins = numpy.stack([self.begins[row.start:row.stop - 1] for row in rows])
        apart = seen_of(self.options, begins)
        return (torch.from_numpy(tokens[:, :-1]).to(device),
                torch.from_numpy(targets[:, 1:]).to(device),
                {name: torch.from_numpy(held).to(device) for name, held in apart.items()})


# ---- our side -----------------------------------------------------------------------------------


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or ["no reason given"]
        sys.exit(f"error: {shlex.join(command)}\n{said[-1]}")


def read_metrics(path):
    """A run's record, its steps, and the loss of its last evaluation, if it has one."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line.replace(":null", ":NaN")) for line in file]
    steps = [record for record in records if record["kind"] == "step"]
    valid = [record["valid_loss"] for record in records if record["kind"] == "eval"]
    return records[0], {"steps": steps, "valid": valid[-1] if valid else None}


def train_ours(arguments, folder):
    """Writes the start, trains from it; the run's metrics."""
    start, metrics = os.path.join(folder, "start"), os.path.join(folder, "metrics.jsonl")
    common = [*arguments.options, "--data", arguments.data]
    run([arguments.cpu_trainer, *common, "--train-iters", "0", "--micro-batch-size", "1",
         "--global-batch-size", "1", "--save", start])
    run([arguments.trainer, "--global-batch-size", "0", *common, "--resume",
         os.path.join(start, "latest"), "--metrics", metrics])
    return read_metrics(metrics)


# ---- PyTorch's side -----------------------------------------------------------------------------


def learning_rate(options, step):
    """The same rule as in train/run.h."""
    peak, least = float(options["lr"]), float(options["min-lr"])
    warmup, end = int(options["lr-warmup-iters"]), int(options["lr-decay-iters"])
    style = options["lr-decay-style"]
    if step < warmup:
        return peak * (step + 1) / warmup
    begin = max(warmup, end - int(options["lr-wsd-decay-iters"])) if style == "wsd" else warmup
    if style == "constant" or step < begin:
        return peak
    done = min(1.0, (step - begin) / (end - begin)) if step < end else 1.0
    left = (1 + math.cos(math.pi * done)) / 2 if style == "cosine" else 1 - done
    return least + left * (peak - least)


def lr_mult(name, parameter, options):
    """The same rule as in model/model.h."""
    if parameter.dim() < 2:
        return float(options["vector-lr-mult"])
    if name.split(".")[-2] in ("wte", "wpe", "embed_tokens"):
        return float(options["embedding-lr-mult"])
    return float(options["head-lr-mult"]) if name.startswith("lm_head.") else 1.0


def optimizer_for(model, options):
    groups = [{"params": [p], "lr_mult": lr_mult(name, p, options),
               "weight_decay": float(options["weight-decay"]) if p.dim() >= 2 else 0.0}
              for name, p in model.named_parameters()]
    return torch.optim.AdamW(groups, betas=(float(options["adam-beta1"]),
                                            float(options["adam-beta2"])),
                             eps=float(options["adam-eps"]))


def divisors(counted):
    """By what the sum of the losses of each micro-batch is divided: by all targets of the step."""
    return [sum(counted)] * len(counted)


def train_torch(model, options, steps, device, autocast):
    """Loss and norm of every step, and the loss of an evaluation after the last."""
    shuffle = options["shuffle"] == "true"
    optimizer, data = optimizer_for(model, options), Data(options["data"], options, shuffle)
    micro, whole = int(options["micro-batch-size"]), int(options["global-batch-size"])
    clip, results, valid = float(options["clip-grad"]), [], None

    def loss_of(tokens, targets, apart):
        """The sum over the targets that count."""
        if "attention_mask" in apart and model.config._attn_implementation == "eager": # it adds it
            apart = apart | {"attention_mask": torch.where(apart["attention_mask"], 0.0, -1e30)}
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(tokens, use_cache=False, **apart).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(),
                                                 ignore_index=LEFT_OUT, reduction="sum")

    def counted(batches):
        return [int((targets != LEFT_OUT).sum()) for _, targets, _ in batches]

    for step in range(steps):
        total, batches = 0.0, [data.batch(first, micro, device)
                               for first in range(step * whole, (step + 1) * whole, micro)]
        for batch, divisor in zip(batches, divisors(counted(batches))):
            loss = loss_of(*batch) / divisor
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step) * group["lr_mult"]
        optimizer.step()
        optimizer.zero_grad()
        results.append({"loss": total, "norm": norm, "lr": learning_rate(options, step),
                        "targets": sum(counted(batches))})
    if options["valid-data"]:
        data = Data(options["valid-data"], options, False)
        samples = min(int(options["eval-iters"]) * whole or len(data.starts), len(data.starts))
        batches = [data.batch(sample, 1, device) for sample in range(samples)]
        with torch.no_grad():
            valid = sum(loss_of(*batch).item() for batch in batches) / sum(counted(batches))
    return {"steps": results, "valid": valid}


# ---- the comparison -----------------------------------------------------------------------------


def compare(ours, theirs, limit):
    """Figures, and what is wrong with them, if anything."""
    pairs = list(zip(ours["steps"], theirs["steps"], strict=True))
    a, b = numpy.array([(x["loss"], y["loss"]) for x, y in pairs], dtype=float).T
    norms = numpy.array([x["norm"] / y["norm"] - 1 for x, y in pairs], dtype=float)
    rates = numpy.array([x["lr"] - y["lr"] for x, y in pairs], dtype=float)
    difference, wrong = numpy.abs(a - b), []
    figures = {
        "max_difference": float(difference.max()),
        "at_step": int(difference.argmax()) + 1,
        "mean_difference": float(difference.mean()),
        "mean_signed_difference": float((a - b).mean()),
        "max_norm_difference": float(numpy.abs(norms).max()),
        "max_difference_one_step_off": float(numpy.abs(a[1:] - b[:-1]).max()),
    }
    if not numpy.all(difference <= limit):
        wrong.append(f"the losses differ by {difference.max():.3g}, more than {limit:g}")
    if not numpy.all(numpy.abs(rates) <= 1e-12):
        wrong.append("the learning rates differ")
    if any(x.get("targets", y["targets"]) != y["targets"] for x, y in pairs): # said of masked data
        wrong.append("other targets count")
    if theirs["valid"] is not None:
        figures["valid_difference"] = abs(ours["valid"] - theirs["valid"])
        if not figures["valid_difference"] <= limit:
            wrong.append(f"the validation losses differ by {figures['valid_difference']:.3g}")
    if not figures["max_difference_one_step_off"] > limit:
        wrong.append(f"the limit {limit:g} would not see losses that are a step off")
    return figures, wrong


def print_table(ours, theirs, figures):
    print("  step      ours   PyTorch  difference  norm ours   PyTorch")
    steps = len(ours["steps"])
    shown = sorted({*range(0, steps, max(1, steps // 15)), steps - 1})
    for i in shown:
        x, y = ours["steps"][i], theirs["steps"][i]
        print(f"{i + 1:6} {x['loss']:9.5f} {y['loss']:9.5f} {x['loss'] - y['loss']:+11.2e} "
              f"{x['norm']:10.4f} {y['norm']:9.4f}")
    print(f"largest difference {figures['max_difference']:.2e} at step {figures['at_step']}, mean "
          f"{figures['mean_difference']:.2e} (signed {figures['mean_signed_difference']:+.2e}); a "
          f"step off it would be {figures['max_difference_one_step_off']:.2e}")
    if theirs["valid"] is not None:
        print(f"validation {ours['valid']:.5f} {theirs['valid']:.5f}, difference "
              f"{figures['valid_difference']:.2e}")


def commit():
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, cwd=ROOT, text=True, check=False)
    return done.stdout.strip() or "unknown"


def record_of(arguments, head, ours, theirs, figures, wrong):
    options = head["options"]
    validation = {} if theirs["valid"] is None else {"valid_loss": round(ours["valid"], 6),
                                                     "torch_valid_loss": round(theirs["valid"], 6)}
    targets = [step["targets"] for step in ours["steps"] if "targets" in step]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"device": head["device"], "python": platform.python_version(),
                    "torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
        "command": shlex.join(["test/compare_torch.py", *sys.argv[1:]]),
        "model": options["model"],
        "parameters": head["parameters"],
        "steps": len(ours["steps"]),
        "tokens_per_step": int(options["global-batch-size"]) * int(options["seq-length"]),
        "precision": head["precision"],
        "torch_precision": "FP32" if head["precision"] == "FP32" else "BF16 autocast",
        "torch_device": arguments.device,
        "limit": arguments.limit,
        **figures,
        "wrong": wrong,
        **({"targets": targets} if targets else {}),
        **validation,
        "losses": [round(step["loss"], 6) for step in ours["steps"]],
        "torch_losses": [round(step["loss"], 6) for step in theirs["steps"]],
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("LLM8_BIN") or ROOT
    parser.add_argument("--data", required=True, help="token shards, a glob")
    parser.add_argument("--trainer", default=os.path.join(folder, "train_gptcu"))
    parser.add_argument("--cpu-trainer", default=os.path.join(folder, "train_gpt"),
                        help="writes the start")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="PyTorch's")
    parser.add_argument("--limit", type=float, default=0.01)
    parser.add_argument("--results",
                        default=os.path.join(ROOT, "test", "results", "compare_torch.jsonl"))
    parser.add_argument("options", nargs="*", help="after --: the trainer's options")
    arguments = parser.parse_args()
    for program in (arguments.trainer, arguments.cpu_trainer):
        if not os.access(program, os.X_OK):
            parser.error(f"{program}: no such program")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    return arguments


def main():
    arguments = parse()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        head, ours = train_ours(arguments, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            os.path.join(folder, "start", "latest"), attn_implementation="sdpa")
        theirs = train_torch(model.float().to(arguments.device).train(), head["options"],
                             len(ours["steps"]), arguments.device, head["precision"] != "FP32")
    figures, wrong = compare(ours, theirs, arguments.limit)
    print_table(ours, theirs, figures)
    os.makedirs(os.path.dirname(os.path.abspath(arguments.results)), exist_ok=True)
    with open(arguments.results, "a", encoding="utf-8") as file:
        file.write(json.dumps(record_of(arguments, head, ours, theirs, figures, wrong)) + "\n")
    print(f"recorded in {arguments.results}")
    if wrong:
        sys.exit("error: " + "; ".join(wrong))
    print(f"{len(ours['steps'])} steps within {arguments.limit:g}")


if __name__ == "__main__":
    main()
