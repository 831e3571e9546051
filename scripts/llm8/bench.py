"""Times whole training steps of the benchmark models, BF16 and FP8 in one call.

  make bench                                   every model, every precision
  make bench MODELS="gpt2-124m llama-1b" PRECISIONS="bf16 fp8"
  scripts/bench --no-deterministic             arguments go on to the trainer

ITERS (25)          steps of a run; the median is of those after the first 5, at least 20
RESULTS             the file to append to (test/results/bench.jsonl)
LLM8_BIN            the folder of train_gptcu (the top of the tree)
COMMIT              what to record as the commit, where there is no git

A run is plain training: the real optimizer step, no accumulation, on tokens that this script makes
up. llama-3-8b-finetune is the recipe's job on four GPUs, with accumulation and recomputation; it is
left out where there are fewer, unless MODELS names it. After its last step the trainer times one
more by kernel family (--profile), outside the median. Each run appends one JSON object, a line;
scripts/results writes the pages from them.

A run in FP8 is compared with the call's run of the same model in BF16, which has the same weights
and tokens; the learning rate is small, so that they stay near each other. The run is FAILED,
and not recorded, where the gradient norm is 1.75 times as large (or as small) in the first two
steps, or 3 times in the median of the timed ones, or the loss is 5% away in either. Without a run
in BF16 it is not judged.

  date, machine {gpu, driver, cublaslt, cudnn}, commit, command
  arguments: those that went on to the trainer, without --gpus; "" for plain training
  model, seq_length, micro_batch, global_batch, gpus, recompute none|activations|block,
    precision bf16|fp8, recipe (null in BF16), lm_head bf16|fp8
  fp8_flops_share: of the linear layers' operations
  tokens_per_s, step_ms, steps: the median step and the tokens it trained on, over how many steps
  start_seconds: from the trainer's start to the end of its first step
  tflops, mfu: by flops_per_token and the BF16 peak of the trainer's run record; both a GPU
  floor_share: llm8/floor.py's floor over step_ms; null on a device without measured rates
  peak_memory_gib: in use on the (first) GPU at the run's end, by the trainer, nothing freed yet
  planned_memory_gib: what the trainer allocated
  families_ms, floors_ms: the profiled step and its floor, by kernel family
  loss: the last step's
  beside_bf16: {first, timed}: [ratio of the gradient norms, of the losses] to those of BF16, of the
    first two steps the one further away, of the others the median; null where there are none
"""

import collections
import contextlib
import datetime
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile

from . import floor, shard_header
from .environment import ROOT, built, die
from .estimate import PRECISIONS
from .experiment import refuse_ours
from .metrics import open_run, option_number
from .text import many, shown
from .trainer import last_error

WARM_UP, LEAST_TIMED = 5, 20
NO_GPU = 77  # exit status if nothing was measured

MODELS = {
    "gpt2-124m": "--model gpt2-124m --micro-batch-size 64",
    "gpt2-1558m": "--model gpt2-1558m --micro-batch-size 32",
    "llama-1b": "--model llama-1b --micro-batch-size 16",
    "llama-3-8b-8-layers": "--model llama-3-8b --num-layers 8 --micro-batch-size 2",
    "llama-3-8b": "--model llama-3-8b --micro-batch-size 1 --adam-dtype bf16",
    # the options of GPUS=4 scripts/run_llama3_8b_finetune.sh
    "llama-3-8b-finetune": "--model llama-3-8b --seq-length 4096 --micro-batch-size 4 "
                           "--global-batch-size 128 --recompute block --grad-accum-dtype bf16 "
                           "--gpus 4",
}


# the trainer's options that this script itself sets -> what to give instead
OURS = {word.removeprefix("--"): "PRECISIONS=" for words in PRECISIONS.values() for word in words
        if word.startswith("--")} | {"model": "MODELS=", "train-iters": "ITERS=", "metrics": None}


def chosen(name, choices):
    """Returns the values that an environment variable lists; all of `choices` if the variable is
    not set. Ends the program at a value that is none of these."""
    wanted = os.environ.get(name, "").replace(",", " ").split()
    for item in wanted:
        if item not in choices:
            die(f"{name}={item}: must be of {' '.join(choices)}")
    return [choice for choice in choices if choice in wanted or not wanted]


# ---- the machine --------------------------------------------------------------------------------


def output_of(command):
    """Returns what a command prints; None if it cannot run or fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True,
                                       cwd=ROOT).strip()


def library_version(code):
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def machine_of(trainer):
    """Checks the machine by the trainer's --verify, and returns its description."""
    done = subprocess.run([trainer, "--verify"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, end="")
        if "no GPU" in done.stdout:
            print("no GPU can be used here: nothing was measured")
            sys.exit(NO_GPU)
        die(f"{trainer} --verify finds this machine not fit")
    def reads(pattern):
        found = re.search(pattern, done.stdout, re.MULTILINE)
        if not found:
            die(f"{trainer} --verify prints no line that matches {pattern}")
        return found.group(1)

    return {
        "gpu": reads(r"^ *device +ok +(.*), compute capability"),
        "driver": output_of(["nvidia-smi", "--query-gpu=driver_version",
                             "--format=csv,noheader,nounits", "-i0"]),
        "cublaslt": library_version(int(reads(r"^ *cuBLASLt +ok .*running (\d+)"))),
        "cudnn": library_version(int(reads(r"^ *cuDNN +ok .*running (\d+)"))),
    }


def fitting(models):
    """Returns the models for which there are enough GPUs, and names the others."""
    here, found = len((output_of(["nvidia-smi", "-L"]) or "").splitlines()), []
    for model in models:
        gpus = int((re.search(r"--gpus (\d+)", MODELS[model]) or [0, 1])[1])
        if gpus <= max(here, 1):
            found.append(model)
        else:
            print(f"{model}: left out: it takes {gpus} GPUs, and nvidia-smi lists {here}")
    return found


def commit_of_tree():
    name = output_of(["git", "rev-parse", "--short=12", "HEAD"]) or "unknown"
    changes = output_of(["git", "status", "--porcelain", "--untracked-files=no", "--",
                         ":!test/results"])
    return os.environ.get("COMMIT") or name + ("-changed" if changes else "")


# ---- a run --------------------------------------------------------------------------------------


class Failed(Exception):
    """Why a run leaves no record."""


def shard_for(model, folder):
    """Writes a token shard that fits a model's vocabulary. The tokens' frequencies fall as those
    of words do (Zipf's law), so that the embedding's gradient takes as long as it does on text."""
    vocabulary = 50257 if model.startswith("gpt2") else 128256
    path = os.path.join(folder, f"tokens_{vocabulary}.bin")
    if not os.path.exists(path):
        count, chance, wide = 1 << 20, random.Random(1), vocabulary > 65536
        tokens = [int(math.exp(chance.random() * math.log(vocabulary))) - 1 for _ in range(count)]
        with open(path, "wb") as file:
            file.write(shard_header.header(4 if wide else 2, count))
            file.write(struct.pack(f"<{count}{'I' if wide else 'H'}", *tokens))
    return path


def measure(command, folder):
    """Runs the trainer and returns its Run."""
    metrics, log = (os.path.join(folder, name) for name in ("metrics.jsonl", "log"))
    if os.path.exists(metrics):
        os.remove(metrics)
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run([*command, "--metrics", metrics], stdout=file, check=False,
                                stderr=subprocess.STDOUT).returncode
    if status != 0:
        raise Failed(f"exit status {status}: {last_error(log)}")
    run = open_run(metrics)
    if run.option("fp8-format") != "none" and not run.start["fp8_flops_share"] > 0:
        raise Failed("FP8 was requested, but no layer was in FP8")
    bad = [str(step) for step, record in run.steps.items()
           if record["skipped"] or record["loss"] is None]
    if bad:
        raise Failed(f"the loss or norm of step {', '.join(bad)} is not finite")
    return run


def distance(ratio):
    """How far a ratio is from 1, in either direction."""
    return max(ratio, 1 / ratio) - 1 if ratio > 0 else math.inf


def beside(run, bf16):
    """Returns the ratios of the gradient norms and of the losses. In the first two steps both runs
    have almost the same weights, so that a wrong matmul shows; step 2 is the first one whose
    scales come from delayed scaling. In later steps a spike may drive the runs apart; a median is
    not affected."""
    def ratios(name):
        return [a / b if b > 0 else math.inf
                for a, b in zip(run.column(name)[1], bf16.column(name)[1])]

    norms, losses = ratios("norm"), ratios("loss")
    return {"first": [max(norms[:2], key=distance), max(losses[:2], key=distance)],
            "timed": [statistics.median(norms[WARM_UP:]), statistics.median(losses[WARM_UP:])]}


def judged(record):
    """Returns in words whether the run trained as BF16 does, and whether to refuse it. Measured on
    an H200 (2026-11-29): GPT-2 124M and Llama 3 8B in sound FP8 had norms within 2% and losses
    within 0.06%. (With ten times the learning rate the loss of Llama 3 8B rose in both precisions,
    and then differed by up to 9%.) A matmul that read spoilt activations made norms 2.0 and 2.1
    times as large in step 2. Later steps hardly show it (emulated on the CPU)."""
    ratios = record["beside_bf16"]
    if ratios is None:
        return "-" if record["precision"] == "bf16" else "not judged", False
    (norm, loss), (median_norm, median_loss) = (map(distance, ratios[part])
                                                for part in ("first", "timed"))
    far = norm >= 0.75 or median_norm >= 2 or max(loss, median_loss) >= 0.05
    said = "; ".join(f"{what} norm x{ratios[part][0]:.2f}, loss {100 * ratios[part][1] - 100:+.2f}%"
                     for part, what in (("first", "steps 1-2"), ("timed", "median")))
    return said, far


def gib(number_of_bytes):
    return number_of_bytes / 2**30 if number_of_bytes else None


def record_of(place, model, command, measured, bf16):
    """Returns a run's record. place: the machine and the commit. bf16: this program's run of the
    model in BF16, or None."""
    run, options, device = measured.start, measured.start["options"], place["machine"]["gpu"]
    gpus, seconds = int(run["ranks"]), statistics.median(measured.column("seconds")[1][WARM_UP:])
    families = measured.profile and {name: value for name, value in measured.profile.items()
                                     if isinstance(value, (float, int))}
    tokens = option_number(run, "global-batch-size") * option_number(run, "seq-length")
    rate, fp8 = tokens / seconds, options["fp8-format"] != "none"
    flops = rate * run["flops_per_token"] / gpus
    floors = floor.floor_ms(device, options, run["parameters"]) if gpus == 1 else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **place,
        "command": shlex.join([os.path.basename(command[0]), *command[1:]]),
        "arguments": re.sub(r" *--gpus[ =]\d+", "", shlex.join(sys.argv[1:])).strip(),
        "model": model,
        "seq_length": option_number(run, "seq-length"),
        "micro_batch": option_number(run, "micro-batch-size"),
        "global_batch": option_number(run, "global-batch-size"),
        "gpus": gpus,
        "recompute": options["recompute"],
        "fp8_flops_share": run["fp8_flops_share"],
        "precision": "fp8" if fp8 else "bf16",
        "recipe": options["fp8-recipe"] if fp8 else None,
        "lm_head": "fp8" if fp8 and options["fp8-lm-head"] == "true" else "bf16",
        "tokens_per_s": rate,
        "step_ms": 1e3 * seconds,
        "steps": len(measured.steps) - WARM_UP,
        "start_seconds": measured.steps[1]["start_seconds"],
        "tflops": flops / 1e12,
        "mfu": flops / run["peak_flops"] if run.get("peak_flops") else None,
        "floor_share": sum(floors.values()) / (1e3 * seconds) if floors else None,
        "peak_memory_gib": gib(measured.end.get("memory_used_bytes")),
        "planned_memory_gib": gib(run.get("memory_bytes")),
        "families_ms": families,
        "floors_ms": floors,
        "loss": measured.column("loss")[1][-1],
        "beside_bf16": beside(measured, bf16) if fp8 and bf16 else None,
    }


# ---- what it prints -----------------------------------------------------------------------------


def print_cells(model, precision, cells):
    print(f"{model:20} {precision:19}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def print_record(precision, record, base, said):
    """Prints a run, and its profiled step beside its floor. base: the record in BF16, or None."""
    rate = record["tokens_per_s"]
    print_cells(record["model"], precision, (
        f"{rate:,.0f}", f"{rate / base['tokens_per_s']:.2f}" if base else "-",
        f"{record['tflops']:.0f}", shown(record["mfu"], ".1f", 100, "%"),
        shown(record["floor_share"], ".1f", 100, "%"), shown(record["peak_memory_gib"], ".1f"),
        f"{record['start_seconds']:.1f} s", f"{record['loss']:.4f}", "  " + said))
    floors = record["floors_ms"] or {}
    parts = [f"{family} {took:.2f} / {shown(floors.get(family), '.2f')}"
             for family, took in (record["families_ms"] or {}).items()]
    if parts:
        print(f"  ms by kernel family, measured / floor: {'; '.join(parts)}", flush=True)


# ---- the call -----------------------------------------------------------------------------------


def main():
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        print(__doc__.strip())
        return 0
    refuse_ours(sys.argv[1:], "scripts/bench", OURS)
    models, precisions = chosen("MODELS", MODELS), chosen("PRECISIONS", PRECISIONS)
    steps, least = os.environ.get("ITERS") or "25", WARM_UP + LEAST_TIMED
    if not steps.isdigit() or int(steps) < least:
        die(f"ITERS={steps}: must be a whole number, {least} or more: {WARM_UP} to warm up, at "
            f"least {LEAST_TIMED} to take the median of")
    results = os.environ.get("RESULTS") or os.path.join(ROOT, "test", "results", "bench.jsonl")
    os.makedirs(os.path.dirname(os.path.abspath(results)), exist_ok=True)
    trainer = os.path.abspath(built("train_gptcu"))
    machine, commit = machine_of(trainer), commit_of_tree()
    print(f"{machine['gpu']}, driver {machine['driver']}, cuBLASLt {machine['cublaslt']}, cuDNN "
          f"{machine['cudnn']}; commit {commit}; the median of {int(steps) - WARM_UP} steps")
    if not os.environ.get("MODELS"):
        models = fitting(models)
    print_cells("model", "precision", ("tokens/s", "x BF16", "TFLOP/s", "MFU", "floor", "GiB",
                                       "start", "loss", "  beside BF16"))
    count, failed, bf16 = 0, [], collections.defaultdict(lambda: (None, None)) # Run, record
    with tempfile.TemporaryDirectory() as folder:
        for model, precision in itertools.product(models, precisions):
            command = [trainer, *MODELS[model].split(), *PRECISIONS[precision],
                       "--data", shard_for(model, folder), "--train-iters", steps,
                       "--lr", "1e-5", "--lr-warmup-iters", steps,
                       "--log-interval", "5", "--profile", *sys.argv[1:]]
            try:
                run = measure(command, folder)
                record = record_of({"machine": machine, "commit": commit}, model, command, run,
                                   bf16[model][0])
                said, far = judged(record)
                if far:
                    raise Failed(f"it does not train as BF16 does: {said}, last loss "
                                 f"{record['loss']:.4f}")
            except Failed as why:
                print(f"{model:20} {precision:19} FAILED: {why}", flush=True)
                failed.append(f"{model} {precision}")
                continue
            if precision == "bf16":
                bf16[model] = run, record
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print_record(precision, record, bf16[model][1], said)
            count += 1
    print(f"\n{many(count, 'record')} appended to {results}"
          + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0
