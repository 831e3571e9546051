"""Hugging Face models in: a folder of theirs into a start, which the trainers take with --load.

A start has config.json, model.safetensors (one file, the trainers' names), options.txt (for
--config) and, where the source has a tokenizer, its files and tokenizer.bin. Which tensors there
must be, the trainer itself says (--list-tensors).
"""

import json
import os
import re
import shutil
import subprocess
import tempfile

from . import safe_tensors, shards
from .environment import ROOT, die, trainer
from .vocabulary import open_vocabulary

SUPPORTED = "gpt2 (GPT2LMHeadModel) and llama (LlamaForCausalLM: Llama 1, 2, 3, 3.1, 3.2, 3.3)"
# what files of these models hold besides weights
IGNORED = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
LONGEST_SEQUENCE = 8192  # by default; the model may take longer ones

# configuration keys that must have one of these values, where they are there at all
GPT2_FIXED = {"activation_function": ["gelu_new", "gelu_pytorch_tanh"],
              "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False],
              "add_cross_attention": [False]}
LLAMA_FIXED = {"hidden_act": ["silu", "swish"], "attention_bias": [False], "mlp_bias": [False],
               "partial_rotary_factor": [1, 1.0], "sliding_window": [None]}
ROPE_KINDS = {"default": "none", "linear": "linear", "llama3": "llama3"}


def read_config(folder):
    path = os.path.join(folder, "config.json")
    try:
        with open(path) as file:
            config = json.load(file)
    except OSError as error:
        die(f"{path}: {error.strerror}; give the folder of a Hugging Face model")
    except ValueError:
        die(f"{path}: not JSON; download it again")
    if config.get("model_type") not in ("gpt2", "llama"):
        die(f"{path}: architecture {config.get('model_type')} is not supported; supported are "
            f"{SUPPORTED}")
    if config.get("quantization_config"):
        die(f"{path}: a quantized model; give the original, in BF16, FP16 or FP32")
    fixed = GPT2_FIXED if config["model_type"] == "gpt2" else LLAMA_FIXED
    for key, allowed in fixed.items():
        if key in config and config[key] not in allowed:
            die(f"{path}: {key} {json.dumps(config[key])} is not supported; must be "
                f"{json.dumps(allowed[0])}")
    return config


def number(config, path, key, default=None):
    value = config.get(key, default)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        die(f"{path}/config.json: {key} is missing or no number")
    return value


def rope_options(config, path):
    """The --rope options of a configuration, as any version of transformers writes it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        die(f"{path}/config.json: rotary scaling '{kind}' is not supported; must be one of "
            f"{', '.join(ROPE_KINDS)}")
    theta = config.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    options = {"rope-theta": theta, "rope-scaling": ROPE_KINDS[kind]}
    if kind != "default":
        options["rope-scaling-factor"] = number(scaling, path, "factor")
    if kind == "llama3":
        options["rope-low-freq-factor"] = number(scaling, path, "low_freq_factor")
        options["rope-high-freq-factor"] = number(scaling, path, "high_freq_factor")
        options["rope-original-length"] = number(scaling, path, "original_max_position_embeddings")
    return options


def model_options(config, path):
    """The trainers' options that mean the same model."""
    gpt2 = config["model_type"] == "gpt2"

    def get(gpt2_key, llama_key, default=None):
        return number(config, path, gpt2_key if gpt2 else llama_key, default)

    heads, hidden = get("n_head", "num_attention_heads"), get("n_embd", "hidden_size")
    positions = get("n_positions", "max_position_embeddings", 2048)
    if hidden % heads or (not gpt2 and number(config, path, "head_dim", hidden // heads) * heads !=
                          hidden):
        die(f"{path}/config.json: head_dim {config.get('head_dim')} is not hidden_size / heads, "
            "which is not supported")
    tied = config.get("tie_word_embeddings")
    tied = gpt2 if tied is None else tied
    options = {
        "arch": config["model_type"], "num-layers": get("n_layer", "num_hidden_layers"),
        "hidden-size": hidden, "num-attention-heads": heads,
        "num-query-groups": heads if gpt2 else number(config, path, "num_key_value_heads", heads),
        "ffn-hidden-size": get("n_inner", "intermediate_size", 4 * hidden if gpt2 else None),
        "vocab-size": number(config, path, "vocab_size"),
        "seq-length": min(positions, LONGEST_SEQUENCE), "max-position-embeddings": positions,
        "norm-epsilon": get("layer_norm_epsilon", "rms_norm_eps", 1e-5 if gpt2 else 1e-6),
        "untie-embeddings-and-output-weights": "false" if tied else "true",
    }
    return options | ({} if gpt2 else rope_options(config, path))


def options_text(options):
    return "".join(f"{name} {value}\n" for name, value in options.items())


def expected_tensors(options):
    """{name: shape}, as the trainer of these options says."""
    program = trainer("train_gpt")
    if not os.path.exists(program):
        die(f"{program} is not built: run make in {ROOT}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(options_text(options))
        file.flush()
        done = subprocess.run([program, "--config", file.name, "--list-tensors"],
                              capture_output=True, text=True, check=False)
    if done.returncode != 0:
        die("config.json: the trainer refuses such a model: " +
            done.stderr.strip().removeprefix("error: "))
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


def match(folder, expected, held, tied):
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
               not (tied and name == "lm_head.weight")]
    if strange:
        die(f"{folder}: tensor '{strange[0]}' belongs to no supported architecture; supported are "
            f"{SUPPORTED}")
    return chosen


def write_config(config, options, output):
    """The source's config.json, with what it leaves unsaid said, and one name an activation."""
    tied = options["untie-embeddings-and-output-weights"] == "false"
    said = dict(config, tie_word_embeddings=tied)
    if config["model_type"] == "gpt2":
        said["activation_function"] = "gelu_new"
    else:
        said["hidden_act"] = "silu"
    text = json.dumps(said, indent=2) + "\n"
    shards.write_durably(os.path.join(output, "config.json"), [text.encode()])


def copy_tokenizer(folder, output):
    """The tokenizer's files and tokenizer.bin; returns the path of that, or None."""
    source = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(source):
        return None
    vocabulary = open_vocabulary({"tokenizer": source})
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                 "generation_config.json"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            shutil.copyfile(path, os.path.join(output, name))
    path = os.path.join(output, "tokenizer.bin")
    shards.write_durably(path, [vocabulary.tokenizer_bin()])
    return path


def import_model(folder, output):
    """Writes the start; returns its options and tensors."""
    if not os.path.isdir(folder):
        die(f"{folder}: no such folder; give the folder of a Hugging Face model, or its name on "
            "the Hub (OWNER/NAME)")
    if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
        die(f"--output {output}: is there already; give another, or remove it")
    config = read_config(folder)
    options = model_options(config, folder)
    tied = options["untie-embeddings-and-output-weights"] == "false"
    tensors = match(folder, expected_tensors(options), source_tensors(folder), tied)
    os.makedirs(output, exist_ok=True)
    safe_tensors.write_file(os.path.join(output, "model.safetensors"), tensors)
    write_config(config, options, output)
    tokenizer = copy_tokenizer(folder, output)
    options["load"] = os.path.abspath(output)
    if tokenizer:
        options["tokenizer"] = os.path.abspath(tokenizer)
    shards.write_durably(os.path.join(output, "options.txt"), [options_text(options).encode()])
    return options, tensors
