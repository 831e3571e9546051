"""Writes test/golden/: what ml_dtypes, PyTorch and transformers say about FP8 and about our models.

`make golden` runs it; the tests read the files and need no Python. The models' start checkpoints
come from our own ./train_gpt, so opening them here also tests that transformers can.
"""

import json
import os
import platform
import shutil
import subprocess
import tempfile

import compare_torch
import ml_dtypes
import numpy
import safetensors
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOLDEN = os.path.join(ROOT, "test", "golden")
MODELS = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM,
          "qwen2": transformers.Qwen2ForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}
STEADY = {"qwen2": (2.0, 0.05)} # --logit-softcap and --z-loss-coeff, where a model has them


def write_fp8():
    """All 256 codes decoded, and all 65,536 BF16 values encoded, as ml_dtypes does both."""
    bf16 = numpy.arange(65536, dtype=numpy.uint16).view(ml_dtypes.bfloat16).astype(numpy.float32)
    tensors = {}
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        codes = numpy.arange(256, dtype=numpy.uint8).view(dtype)
        tensors[name + ".values"] = codes.astype(numpy.float32)
        with numpy.errstate(invalid="ignore"):
            tensors[name + ".codes"] = bf16.astype(dtype).view(numpy.uint8)
    save_file(tensors, os.path.join(GOLDEN, "fp8.safetensors"))


def block_values(rows, columns):
    """BF16 values whose magnitudes differ by row and column, and blocks of every odd kind."""
    chance = numpy.random.default_rng(rows * 1000 + columns)
    x = chance.standard_normal((rows, columns)).astype(numpy.float32)
    x *= 2.0 ** (numpy.arange(rows)[:, None] % 23 - 11) * 2.0 ** (numpy.arange(columns) % 7 - 3)
    if min(rows, columns) > 128:
        x[4, 9] = 0
        x[5, :128] = x[:128, 7] = 0
        x[6, :128] = -0.0
        x[8, :128] = 7 * 2.0 ** -3 # 448 / 2^9: the scale is a power of two before it is rounded
        x[9, :128] *= 1e-3
        x[9, 77] = -1e3
        x[20, 128], x[21, 129], x[22, 130] = numpy.inf, -numpy.inf, numpy.nan
        x[130, 3] = -numpy.inf
        x[128:, 128:] = chance.standard_normal((rows - 128, columns - 128)) * 1e-39
    return x.astype(ml_dtypes.bfloat16)


def quantised_blocks(x, height, width, dtype, power_of_two):
    """The codes of x, and each block's inverse scale."""
    rows, columns = x.shape
    top = numpy.float32(ml_dtypes.finfo(dtype).max)
    limits = numpy.finfo(numpy.float32)
    codes = numpy.empty(x.shape, numpy.uint8)
    inverse = numpy.empty((-(-rows // height), -(-columns // width)), numpy.float32)
    for i, j in numpy.ndindex(inverse.shape):
        place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        block = x[place].astype(numpy.float32)
        amax, scale = numpy.abs(block).max(), numpy.float32(1)
        if 0 < amax < numpy.inf:
            scale = numpy.clip(top / amax, limits.tiny, limits.max)
        if power_of_two:
            scale = numpy.ldexp(numpy.float32(0.5), numpy.frexp(scale)[1])
        code = numpy.clip(block * scale, -top, top).astype(dtype).view(numpy.uint8)
        codes[place] = numpy.where(numpy.isfinite(block), code, 0x7f)
        inverse[i, j] = numpy.float32(1) / scale
    return codes, inverse


def padded(array):
    """To a multiple of 4 columns."""
    return numpy.ascontiguousarray(numpy.pad(array, ((0, 0), (0, -array.shape[1] % 4))))


# name -> format, and whether scales are powers of two
BLOCKS = {"e4m3": (ml_dtypes.float8_e4m3fn, True), "e5m2": (ml_dtypes.float8_e5m2, True),
          "e4m3_fp32_scales": (ml_dtypes.float8_e4m3fn, False)}


def write_blocks():
    """Tensors quantised by blocks: as the input of a matmul, as its transpose, and as a weight."""
    tensors = {}
    for rows, columns in ((144, 144), (3, 129), (130, 5), (1, 1)):
        name, x = f"{rows}x{columns}", block_values(rows, columns)
        tensors[f"{name}.x"] = x.astype(numpy.float32)
        for kind, (dtype, power_of_two) in BLOCKS.items():
            with numpy.errstate(all="ignore"):
                row = quantised_blocks(x, 1, 128, dtype, power_of_two)
                column = quantised_blocks(x.T, 1, 128, dtype, power_of_two)
                square = quantised_blocks(x, 128, 128, dtype, power_of_two)
            for form, (codes, inverse) in (("rows", row), ("columns", column), ("squares", square)):
                grid = inverse if form == "squares" else inverse.T
                tensors[f"{name}.{kind}.{form}.codes"] = codes
                tensors[f"{name}.{kind}.{form}.scales"] = padded(grid)
    save_file(tensors, os.path.join(GOLDEN, "blocks.safetensors"))


# transformers' name of a scaling, and its parameters
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large_theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3_1": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                 "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192},
    "llama3_2": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
                 "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192},
    "llama3_odd": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 3.0,
                   "low_freq_factor": 0.5, "high_freq_factor": 7.0,
                   "original_max_position_embeddings": 1000},
}


def write_rope():
    """The rotary frequencies of a head of 64 elements, under each scaling."""
    tensors = {}
    for name, parameters in ROPES.items():
        config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4,
                                          max_position_embeddings=131072,
                                          rope_parameters=parameters)
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        tensors[name] = rotary.inv_freq.numpy()
    save_file(tensors, os.path.join(GOLDEN, "rope.safetensors"))


def orthogonalised(x, scale):
    """x with its singular values z changed by Muon's polynomial, five times, and scaled."""
    u, z, v = numpy.linalg.svd(x, full_matrices=False)
    z = z / (numpy.linalg.norm(x) + 1e-7)
    for _ in range(5):
        z = 3.4445 * z - 4.7750 * z ** 3 + 2.0315 * z ** 5
    return scale * (u * z) @ v


def write_muon():
    """Two steps of Muon in double precision, from random weights, on matrices of several shapes."""
    momentum, lr, decay, factor = 0.95, 0.02, 0.1, 0.2
    tensors = {}
    for rows, columns in ((24, 40), (40, 24), (16, 16), (1, 7), (33, 5)):
        chance = numpy.random.default_rng(rows * 1000 + columns)
        # singular values that fall by a factor of 20
        width = 1 + 19 * numpy.arange(columns) / max(columns - 1, 1)
        w, *gradients = (chance.standard_normal((3, rows, columns)) / width).astype(numpy.float32)
        name, m = f"{rows}x{columns}", numpy.zeros((rows, columns))
        tensors[f"{name}.start"] = w
        w = w.astype(numpy.float64)
        for step, g in enumerate(gradients):
            m = momentum * m + g
            update = orthogonalised(g + momentum * m, factor * max(rows, columns) ** 0.5)
            w -= lr * (update + decay * w)
            tensors[f"{name}.gradient{step}"] = g
            tensors[f"{name}.update{step}"] = update.astype(numpy.float32)
        tensors[f"{name}.end"] = w.astype(numpy.float32)
    save_file(tensors, os.path.join(GOLDEN, "muon.safetensors"))


def export_start(config, folder):
    """The model before its first step, saved by our trainer; returns its checkpoint's folder."""
    shard = os.path.join(folder, "tokens.bin")
    compare_torch.write_shard(shard, numpy.zeros(1024, dtype=numpy.int64))
    subprocess.run([os.path.join(ROOT, "train_gpt"), "--config", config, "--data", shard,
                    "--train-iters", "0", "--save", folder], check=True, stdout=subprocess.DEVNULL)
    return os.path.join(folder, "latest")


def start_of(name):
    """The model before its first step, opened there."""
    with tempfile.TemporaryDirectory() as folder:
        path = export_start(os.path.join(GOLDEN, name + ".config"), folder)
        return MODELS[name].from_pretrained(path, dtype=torch.float32,
                                            attn_implementation="eager").eval()


def write_outputs(name, kind, model, logits, targets, **more):
    """The logits, the loss, and the gradients of a model."""
    cap, z_loss = STEADY.get(name, (None, 0.0))
    rows = (logits if cap is None else cap * torch.tanh(logits / cap)).flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(rows, targets.flatten())
    log_z = rows.logsumexp(-1)[targets.flatten() >= 0]
    (loss + z_loss * (log_z ** 2).mean()).backward() # what is reported stays the cross-entropy
    outputs = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    gradients = {key: value.grad for key, value in model.named_parameters()}
    save_torch(more | outputs | gradients, os.path.join(GOLDEN, f"{name}_{kind}.safetensors"))


def write_model(name):
    """One model's inputs (weights, tokens, targets) and outputs."""
    model = start_of(name)
    generator = torch.Generator().manual_seed(1)
    # away from the start, where biases are 0, norms 1 and logits near 0: every term shall matter
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    batch, length, vocab = 3, 13, model.config.vocab_size
    tokens = torch.randint(vocab, (batch, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[1, 4] = targets[2, 9:] = -100  # left out of the loss, on both sides
    inputs = {"tokens": tokens[:, :-1].int().contiguous(), "targets": targets.int()}
    weights = {key: value.detach() for key, value in model.named_parameters()}
    save_torch(inputs | weights, os.path.join(GOLDEN, name + "_inputs.safetensors"))
    write_outputs(name, "outputs", model, model(tokens[:, :-1]).logits, targets)


# Where the documents of each of the three sequences begin.
DOCUMENTS = ((0, 1, 6, 7), (0,), (0, 9, 11))


def write_documents(name):
    """The outputs for the same inputs if the sequences are packed documents: of each document, as a
    sequence of its own."""
    inputs = load_torch(os.path.join(GOLDEN, name + "_inputs.safetensors"))
    model = start_of(name)
    tokens, targets = inputs.pop("tokens").long(), inputs.pop("targets").long()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(inputs[key])
    starts, logits, length = torch.zeros_like(tokens), [], tokens.shape[1]
    for row, begins in enumerate(DOCUMENTS):
        for begin, end in zip(begins, [*begins[1:], length]):
            starts[row, begin:end] = begin
            logits.append(model(tokens[row:row + 1, begin:end]).logits[0])
    write_outputs(name, "documents", model, torch.cat(logits), targets, starts=starts.int())


# How chat models' templates differ: what is trimmed, whether there is a prompt to answer from,
# where tokens of the start and the end stand. {% generation %} marks what transformers counts.
CHATS = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
              "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
              "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "headers": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n"
               "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] | trim }}"
               "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] | trim }}"
               "{{ eos_token }}{% endif %}{% endfor %}"
               "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}",
    "no_prompt": "{{ bos_token }}{% set held = namespace(system='') %}{% for m in messages %}"
                 "{% if m.role == 'system' %}{% set held.system = m.content + '\n' %}"
                 "{% elif m.role == 'user' %}[Q] {{ held.system }}{{ m.content }} [/Q]"
                 "{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}"
                 "{% endif %}{% endfor %}",
}
CHAT_FILE = os.path.join(ROOT, "scripts", "chat.jsonl")
CHAT_STEPS, CHAT_BATCH, CHAT_LENGTH, CHAT_LR = 20, 4, 128, 3e-3
CHAT_MODEL = ["--arch", "llama", "--num-layers", "2", "--hidden-size", "32",
              "--num-attention-heads", "4", "--num-query-groups", "2", "--ffn-hidden-size", "64",
              "--seq-length", str(CHAT_LENGTH), "--init-method-std", "0.1"]


def chat_rows():
    with open(CHAT_FILE) as file:
        rows = [json.loads(line) for line in file]
    return [row.get("messages") or [{"role": "user", "content": row["prompt"]},
                                    {"role": "assistant", "content": row["completion"]}]
            for row in rows]


def write_chat_tokenizer(folder):
    """One with special tokens of its own, of which transformers' class is the plain one."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # else transformers finds no token where an answer begins with a space, and counts none
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        [m["content"] for messages in chat_rows() for m in messages],
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<|begin|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False))
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>",
                   "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False,
                   "chat_template": CHATS["chatml"]}, file, indent=1)


def write_templates(folder):
    """What transformers makes of the conversations by each template: ids, and which count."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = {}
    for name, template in CHATS.items():
        made = [tokenizer.apply_chat_template(messages, chat_template=template, tokenize=True,
                                              return_dict=True, return_assistant_tokens_mask=True)
                for messages in chat_rows()]
        found[name] = {"template": template, "ids": [row["input_ids"] for row in made],
                       "counts": [row["assistant_masks"] for row in made]}
    with open(os.path.join(folder, "templates.json"), "w") as file:
        json.dump(found, file)


def write_chat():
    """Fine-tuning on conversations: a start, its data as prepare_data makes them, and the losses of
    PyTorch's steps on the same tokens and masks."""
    folder = os.path.join(GOLDEN, "chat")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    write_chat_tokenizer(folder)
    write_templates(folder)
    subprocess.run([os.path.join(ROOT, "scripts", "prepare_data"), CHAT_FILE, "--output",
                    os.path.join(folder, "data"), "--tokenizer",
                    os.path.join(folder, "tokenizer.json"), "--seq-length", str(CHAT_LENGTH),
                    "--valid-fraction", "0.2"], check=True, stdout=subprocess.DEVNULL)
    data = os.path.join(folder, "data")
    with tempfile.TemporaryDirectory() as saved:
        subprocess.run([os.path.join(ROOT, "train_gpt"), *CHAT_MODEL, "--data",
                        os.path.join(data, "train_*.bin"), "--train-iters", "0", "--save", saved,
                        "--global-batch-size", str(CHAT_BATCH)], check=True,
                       stdout=subprocess.DEVNULL)
        for name in ("model.safetensors", "config.json", "tokenizer.bin"):
            shutil.copyfile(os.path.join(saved, "latest", name), os.path.join(folder, name))
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.bin", "manifest.json"):
        os.remove(os.path.join(data, name))
    found = {name: fine_tuned(folder, apart) for name, apart in (("together", "false"),
                                                                 ("apart", "true"))}
    with open(os.path.join(folder, "losses.json"), "w") as file:
        json.dump({"seq_length": CHAT_LENGTH, "global_batch_size": CHAT_BATCH, "lr": CHAT_LR} |
                  found, file, indent=1)


def fine_tuned(folder, apart):
    """The losses of PyTorch's steps, by options as of our trainer's records."""
    data = os.path.join(folder, "data")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                          attn_implementation="eager")
    options = dict(word.split("=") for word in f"""shuffle=false seed=0 seq-length={CHAT_LENGTH}
        micro-batch-size={CHAT_BATCH} global-batch-size={CHAT_BATCH} lr={CHAT_LR} min-lr=0
        lr-decay-style=constant lr-warmup-iters=0 lr-decay-iters=0 weight-decay=0 adam-beta1=0.9
        adam-beta2=0.95 adam-eps=1e-8 clip-grad=1 embedding-lr-mult=1 head-lr-mult=1
        vector-lr-mult=1 eval-iters=0 data={data}/train_*.bin valid-data={data}/val_*.bin
        reset-attention-mask={apart} reset-position-ids={apart}""".split())
    found = compare_torch.train_torch(model, options, CHAT_STEPS, "cpu", False)
    return {"losses": [step["loss"] for step in found["steps"]],
            "targets": [step["targets"] for step in found["steps"]], "valid_loss": found["valid"]}


def write_versions():
    modules = (torch, transformers, numpy, ml_dtypes, safetensors)
    lines = ["# Golden values", "",
             "`make golden` (test/golden.py) makes all of this but the configurations.", "",
             "| made with | version |", "| --- | --- |",
             f"| Python | {platform.python_version()} |"]
    lines += [f"| {module.__name__} | {module.__version__.split('+')[0]} |" for module in modules]
    with open(os.path.join(GOLDEN, "README.md"), "w") as file:
        file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    write_fp8()
    write_blocks()
    write_rope()
    write_muon()
    for model_name in MODELS:
        write_model(model_name)
        write_documents(model_name)
    write_chat()
    write_versions()
