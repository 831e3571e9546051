"""What scripts/convert_hf does: imports a Hugging Face model, from a folder or the Hub, as a start:
a folder that the trainers take with --load.

A start has config.json, model.safetensors (one file) and, if the source has a tokenizer, the
tokenizer's files and tokenizer.bin. The trainer itself judges config.json and says which tensors
there must be (--list-tensors).
"""

import contextlib
import fnmatch
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import namedtuple

import numpy
import safetensors

from . import downloads
from .command_line import Parser
from .environment import built, die, lfs_pointer, named_by, warn, why, write_durably
from .vocabulary import (
    GENERATION_CONFIG,
    MODEL_FILES,
    NAMED_TEMPLATES,
    TOKENIZER_FILES,
    open_vocabulary,
    read_object,
    read_text,
)

# tensors in files of these models that are no weights
IGNORED = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
OTHER_WEIGHTS = {  # files that hold weights, and what they are
    "adapter_model.*": "an adapter: save the model after peft's merge_and_unload",
    "pytorch_model*.bin": "pickled: save them with transformers' save_pretrained",
    "*.pth": "pickled: save them with transformers' save_pretrained",
    "*.gguf": "llama.cpp's: give the Hugging Face model that they were made from"}
HEAD = "lm_head.weight"
TOKEN_IDS = ["bos_token_id", "eos_token_id", "pad_token_id"]
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
SCALES = "_scale_inv" # ends the names of FP8 weights' scales
# of a file, which is mapped into memory: a model may be larger than that
Tensor = namedtuple("Tensor", "file dtype shape bytes")


def expected_tensors(folder):
    """Returns {name: shape} of the tensors that the trainer expects by config.json. Ends the
    program if the trainer refuses the folder."""
    done = subprocess.run([built("train_gpt"), "--load", folder, "--list-tensors"],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        die(done.stderr.strip().removeprefix("error: ").removeprefix("--load "))
    sys.stderr.write(done.stderr)  # the trainer's warnings
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0]: [int(size) for size in row[1:]] for row in rows}


def tensors_of(path):
    """Returns {name: Tensor} of a file. safetensors checks it, but has no BF16 for numpy."""
    try:
        with safetensors.safe_open(path, "np"), open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            content = numpy.memmap(file, mode="r")[8 + length:]
    except safetensors.SafetensorError:
        die(lfs_pointer(path) or f"{path}: not a whole safetensors file; download it again")
    except OSError as error: # such as a file system without mmap
        die(f"{path}: {why(error)}")
    header.pop("__metadata__", None)
    return {name: Tensor(path, row["dtype"], row["shape"], content[slice(*row["data_offsets"])])
            for name, row in header.items()}


def other_weights(names):
    """Returns what to say of files, by their names, that are no model of transformers, or None."""
    return next((f"its weights are {what}" for pattern, what in OTHER_WEIGHTS.items()
                 if fnmatch.filter(names, pattern)), None)


def source_tensors(folder):
    """Returns {name: Tensor} of a folder's safetensors, in one file or several."""
    index = os.path.join(folder, "model.safetensors.index.json")
    single = os.path.join(folder, "model.safetensors")
    if os.path.isfile(single):
        return tensors_of(single)
    if not os.path.exists(index):
        for part in sorted(fnmatch.filter(os.listdir(folder), "model-*-of-*.safetensors")):
            die(f"{index}: missing, though there is {part}; download it")
        other = other_weights(os.listdir(folder))
        die(f"{folder}: no model.safetensors" + (
            f"; {other}" if other else " nor model.safetensors.index.json; download them"))
    try:
        names = sorted(map(os.path.basename, set(read_object(index)["weight_map"].values())))
    except (LookupError, TypeError, AttributeError):
        die(f"{index}: damaged, or no index; download it again")
    tensors = {}
    for name in names:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            die(f"{path}: missing, though {os.path.basename(index)} names it; download it")
        held = tensors_of(path)
        for tensor in tensors.keys() & held:
            die(f"{path}: tensor '{tensor}' is in {tensors[tensor].file} too; download them again")
        tensors |= held
    return tensors


def weights_of(folder, expected):
    """Returns the tensors to write, under their own names. Ends the program if one is missing, has
    another shape, or is none of the model; the trainer checks scales and values when it reads
    them."""
    held = {name: tensor for name, tensor in source_tensors(folder).items()
            if not IGNORED.search(name)}
    embedding = next(iter(expected))
    # a model may be saved from transformers' class without a head, whose names lack the first word;
    # an embedding that is also the head may have the head's name
    names = {name: {name, name.split(".", 1)[1]} for name in expected}
    if HEAD not in expected:
        names[embedding].add(HEAD)
    shapes = {name: expected[key] for key in names for name in names[key]}
    for name, tensor in held.items():
        if name.removesuffix(SCALES) not in shapes:
            die(f"{tensor.file}: tensor '{name}' is none of the model that config.json means")
    missing = [key for key in names if not held.keys() & names[key]]
    if missing in ([HEAD], [embedding]):
        die(f"{folder}: tensor '{missing[0]}' is missing, and config.json does not tie embedding "
            "and head; if they are one tensor, set tie_word_embeddings to true there")
    if missing:
        die(f"{folder}: {len(missing)} of {len(expected)} tensors are missing, the first "
            f"'{missing[0]}'; the download is not complete")
    for name, tensor in held.items():
        if tensor.dtype not in DTYPES:
            die(f"{tensor.file}: tensor '{name}' is {tensor.dtype}; must be one of "
                f"{', '.join(DTYPES)}: give the original, unquantized model")
        if tensor.shape != shapes.get(name, tensor.shape):
            die(f"{tensor.file}: tensor '{name}' is {tensor.dtype} {tensor.shape}, not a "
                f"floating-point {shapes[name]}")
    return held


def refuse_others(folder, output):
    """Ends the program if the folder is no model, or the output is taken."""
    if os.path.isfile(folder):
        die(f"{folder}: a file; " + (other_weights([os.path.basename(folder)]) or
                                     "give the folder that it is in"))
    if not os.path.isdir(folder):
        die(f"{folder}: no such folder; give the folder of a Hugging Face model, or its name on "
            "the Hub (OWNER/NAME)")
    if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
        die(f"--output {output} exists already; give another one, or remove it")
    if os.path.exists(os.path.join(folder, "meta.json")):
        die(f"{folder}: a checkpoint of ours, which --load takes as it is")
    config = os.path.join(folder, "config.json")
    if not os.path.exists(config):
        die(f"{config}: No such file; " +
            (other_weights(os.listdir(folder)) or "give the folder of a Hugging Face model"))


def write_weights(path, tensors):
    specs = {name: safetensors.TensorSpec(
        dtype=DTYPES[tensor.dtype], shape=tensor.shape, data_ptr=tensor.bytes.ctypes.data,
        data_len=tensor.bytes.nbytes) for name, tensor in tensors.items()}
    try:
        safetensors.serialize_file(specs, path, {"format": "pt"})
    except (OSError, safetensors.SafetensorError) as error:
        die(f"{path}: could not be written: {error}")
    os.umask(mask := os.umask(0))
    with contextlib.suppress(PermissionError):  # some file systems have no modes
        os.chmod(path, 0o666 & ~mask)  # the package makes the file readable for its owner alone


def warn_of_end(said, vocabulary):
    """Warns if transformers would not stop at the end of text of the tokenizer."""
    ids = [said.get(name, {}).get("eos_token_id") for name in (GENERATION_CONFIG, "config.json")]
    ids = {token for row in ids for token in (row if type(row) is list else [row])} - {None}
    name = vocabulary.named_specials().get("eos_token")
    if name and vocabulary.end_of_text not in ids:
        warn(f"eos_token_id {', '.join(map(str, sorted(ids))) or '(none)'}: lacks "
             f"{vocabulary.end_of_text}, {name}, which is the tokenizer's eos_token: transformers "
             f"will not stop there; add it to eos_token_id in {GENERATION_CONFIG}")


def import_model(folder, output):
    """Writes the start; returns its architecture, its tensors and whether it has a tokenizer."""
    refuse_others(folder, output)
    expected = expected_tensors(folder)
    tensors = weights_of(folder, expected)
    copied = {name: path for name in MODEL_FILES
              if os.path.exists(path := os.path.join(folder, name))}
    said = {name: read_object(path) for name, path in copied.items()}
    tokenizer = os.path.join(folder, "tokenizer.json")
    vocabulary = open_vocabulary({"tokenizer": tokenizer}) if os.path.exists(tokenizer) else None
    rows = next(iter(expected.values()))[0]  # rows of the embedding
    if vocabulary and vocabulary.size > rows:
        die(f"{tokenizer}: has {vocabulary.size:,} tokens, the model {rows:,}; give the model's "
            "own, or enlarge the model by transformers' resize_token_embeddings")
    if vocabulary:
        warn_of_end(said, vocabulary)
    with named_by("--output"):
        os.makedirs(output, exist_ok=True)
    write_weights(os.path.join(output, "model.safetensors"), tensors)
    config = said["config.json"]
    ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    texts = {GENERATION_CONFIG: json.dumps(ids, indent=2) + "\n"} if ids else {}
    texts |= {name: read_text(path) for name, path in copied.items()}
    if vocabulary:
        write_durably(os.path.join(output, "tokenizer.bin"), [vocabulary.tokenizer_bin()])
        texts |= vocabulary.files()
    for name, text in texts.items():
        write_durably(os.path.join(output, name), [text.encode()])
    return config["model_type"], tensors, vocabulary is not None


def main():
    p = Parser(
        prog="scripts/convert_hf",
        description="Makes a start for the trainers of a Hugging Face model.",
        epilog="docs/fine_tune.md lists the families of models that are supported; the trainer\n"
               "refuses others, and says what it lacks for them.\n\n"
               "The way back needs no conversion: every checkpoint folder has model.safetensors,\n"
               "config.json and, where it is known, tokenizer.json: give it to transformers.\n"
               "./train_gpt --load CHECKPOINT --export DIR makes a folder to serve, in BF16 or\n"
               "FP8 (docs/serve.md).")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("import", help="a model's folder, or OWNER/NAME on the Hub, into a "
                              "start for the trainers' --load")
    one.add_argument("model", metavar="DIR|OWNER/NAME[@REVISION]")
    one.add_argument("--output", required=True, metavar="DIR", help="where the start goes")
    downloads.add_options(one)
    o = p.parse_args()
    folder = o.model
    if not os.path.exists(folder) and folder.count("/") == 1 and not folder.startswith((".", "/")):
        _, files, *_ = downloads.from_hub(o.model, o.model, "model", [
            "model*.safetensors", "*.json", TOKENIZER_FILES[2], NAMED_TEMPLATES], vars(o))
        if not any(os.path.basename(path) == "config.json" for path in files):
            die(f"{o.model}: no config.json on the Hub: not a model's repository")
        folder = os.path.commonpath(map(os.path.dirname, files))
    arch, tensors, tokenizer = import_model(folder, o.output)
    tensors = {name: row for name, row in tensors.items() if not name.endswith(SCALES)}
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    kinds = sorted({tensor.dtype for tensor in tensors.values()})
    bare = "" if tokenizer else (
        "; no tokenizer.json beside it (of other files, transformers makes one: "
        f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({o.output!r}))")
    print(f"{o.output}: {arch}, {count:,} parameters in {len(tensors)} tensors, "
          f"{', '.join(kinds)}{bare}")
    print(f"start from it with --load {shlex.quote(o.output)} --data ...")
