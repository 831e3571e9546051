"""Hugging Face models in: a folder of theirs into a start, which the trainers take with --load.

A start has config.json, model.safetensors (one file, the trainers' names) and, where the source has
a tokenizer, its files and tokenizer.bin. The trainer itself reads config.json and says which
tensors there must be (--list-tensors).
"""

import json
import os
import re
import shutil
import subprocess

from . import safe_tensors, shards
from .environment import ROOT, die, trainer
from .vocabulary import open_vocabulary

# what files of these models hold besides weights
IGNORED = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}


def read_config(folder):
    path = os.path.join(folder, "config.json")
    try:
        with open(path) as file:
            config = json.load(file)
    except OSError as error:
        die(f"{path}: {error.strerror}; give the folder of a Hugging Face model")
    except ValueError:
        die(f"{path}: not JSON; download it again")
    if config.get("quantization_config"):
        die(f"{path}: a quantized model; give the original, in BF16, FP16 or FP32")
    return config


def expected_tensors(folder):
    """{name: shape}, as the trainer reads config.json."""
    program = trainer("train_gpt")
    if not os.path.exists(program):
        die(f"{program} is not built: run make in {ROOT}")
    done = subprocess.run([program, "--load", folder, "--list-tensors"], capture_output=True,
                          text=True, check=False)
    if done.returncode != 0:
        die(done.stderr.strip().removeprefix("error: "))
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: [int(size) for size in row[1:]] for row in rows}


def source_tensors(folder):
    """{name: Tensor} of a folder's safetensors, in one file or several."""
    index = os.path.join(folder, "model.safetensors.index.json")
    single = os.path.join(folder, "model.safetensors")
    if os.path.exists(single):
        return safe_tensors.read_header(single)
    if not os.path.exists(index):
        pickled = any(name.endswith((".bin", ".pth", ".pt")) for name in os.listdir(folder))
        die(f"{folder}: no model.safetensors" + (
            "; its weights are pickled: save them with transformers' save_pretrained" if pickled
            else " nor model.safetensors.index.json; download them"))
    try:
        with open(index) as file:
            weight_map = json.load(file)["weight_map"]
    except (ValueError, KeyError, OSError):
        die(f"{index}: not an index of safetensors; download it again")
    tensors = {}
    for name in sorted(set(weight_map.values())):
        path = os.path.join(folder, os.path.basename(name))
        if not os.path.exists(path):
            die(f"{path}: missing, though {os.path.basename(index)} names it; download it")
        tensors |= safe_tensors.read_header(path)
    return tensors


def match(folder, expected, held):
    """The tensors to write, in the trainer's order, under its names."""
    left, chosen, missing = dict(held), {}, []
    for name, shape in expected.items():
        bare = name.split(".", 1)[1]
        found = next((key for key in (name, bare) if key in left), None)
        if found is None:
            missing.append(name)
            continue
        tensor = chosen[name] = left.pop(found)
        if tensor.shape != shape:
            die(f"{tensor.file}: tensor '{found}' has shape {tensor.shape}, config.json means "
                f"{shape}; they are not of one model")
        count = 1
        for size in shape:
            count *= size
        if tensor.dtype not in DTYPES or tensor.size != count * DTYPES[tensor.dtype]:
            die(f"{tensor.file}: tensor '{found}' is {tensor.dtype}; must be one of "
                f"{', '.join(DTYPES)}: give the original, unquantized model")
    if missing:
        die(f"{folder}: {len(missing)} of {len(expected)} tensors are missing, the first "
            f"'{missing[0]}'; the download is not complete")
    strange = [name for name in left if not IGNORED.search(name) and
               name != "lm_head.weight"]
    if strange:
        die(f"{folder}: tensor '{strange[0]}' is none of the model that config.json means; "
            "docs/fine_tune.md lists the architectures that are supported")
    return chosen


def copy_files(folder, output, *names):
    for name in names:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            shutil.copyfile(path, os.path.join(output, name))


def copy_tokenizer(folder, output):
    """The tokenizer's files and tokenizer.bin; returns whether there are any."""
    source = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(source):
        return False
    vocabulary = open_vocabulary({"tokenizer": source})
    copy_files(folder, output, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    shards.write_durably(os.path.join(output, "tokenizer.bin"), [vocabulary.tokenizer_bin()])
    return True


def import_model(folder, output):
    """Writes the start; returns its architecture, its tensors and whether it has a tokenizer."""
    if not os.path.isdir(folder):
        die(f"{folder}: no such folder; give the folder of a Hugging Face model, or its name on "
            "the Hub (OWNER/NAME)")
    if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
        die(f"--output {output}: is there already; give another, or remove it")
    config = read_config(folder)
    tensors = match(folder, expected_tensors(folder), source_tensors(folder))
    os.makedirs(output, exist_ok=True)
    safe_tensors.write_file(os.path.join(output, "model.safetensors"), tensors)
    copy_files(folder, output, "generation_config.json", "config.json")
    return config["model_type"], tensors, copy_tokenizer(folder, output)
