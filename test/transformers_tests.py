"""Our models against transformers' with random weights, both ways: imported ones give transformers'
logits here, and what the trainer saves gives ours there. Both compute in FP32, so ours may be off
by twice what theirs are, judged by transformers in FP64. And a fine-tuning on conversations has
their losses. Needs `make golden`'s Python.
"""

import copy
import json
import os
import shutil
import sys

import compare_torch
import numpy
import tokenizers
import torch
import transformers
from chat_cases import FOLDERS, NAMED, SPANS, chat_folder
from check import ROOT, fails, main, run, write
from safetensors.numpy import load_file
from tokenizers import models, normalizers, pre_tokenizers, trainers

B, T, V = 2, 48, 97
LLAMA = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": V,
         "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": None,
         "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": V,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
# a short original length, so that scaling matters within T
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2_wide": transformers.GPT2Config(**{**GPT2, "n_inner": 112, "layer_norm_epsilon": 1e-3}),
    "gpt2_untied": transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
    "llama_plain": transformers.LlamaConfig(**LLAMA, num_attention_heads=4),
    "llama_grouped": transformers.LlamaConfig(**LLAMA, num_attention_heads=6,
                                              num_key_value_heads=2, tie_word_embeddings=True),
    "llama_theta": transformers.LlamaConfig(
        **LLAMA, num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama_linear": transformers.LlamaConfig(
        **LLAMA, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}),
    "llama_3_1": transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2,
                                          rope_parameters=LLAMA3),
    "llama_heads": transformers.LlamaConfig(**LLAMA, num_attention_heads=3, num_key_value_heads=1,
                                            head_dim=20),
    "mistral": transformers.MistralConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2,
                                          sliding_window=None),
    "mistral_heads": transformers.MistralConfig(**LLAMA, num_attention_heads=2, head_dim=32,
                                                num_key_value_heads=2, sliding_window=None,
                                                tie_word_embeddings=True),
    "mistral_window": transformers.MistralConfig(**LLAMA, num_attention_heads=4,
                                                 num_key_value_heads=2, sliding_window=T),
    "qwen2": transformers.Qwen2Config(**LLAMA, num_attention_heads=6, num_key_value_heads=2,
                                      tie_word_embeddings=True),
    "qwen2_untied": transformers.Qwen2Config(**LLAMA, num_attention_heads=4, head_dim=16,
                                             num_key_value_heads=4),
    "qwen2_window": transformers.Qwen2Config(**LLAMA, num_attention_heads=4, num_key_value_heads=2,
                                             use_sliding_window=True, sliding_window=T,
                                             max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**LLAMA, num_attention_heads=4, num_key_value_heads=2,
                                      head_dim=24, tie_word_embeddings=True),
    "qwen3_untied": transformers.Qwen3Config(
        **LLAMA, num_attention_heads=3, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}),
}
FAMILIES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2",
            "qwen3": "qwen3"} # and as what our checkpoints are of
TUNED = ("gpt2", "llama_3_1", "qwen2", "qwen3_untied")


def new_model(config, seed, spread=0.1):
    """Random weights, biases and norms included, so that every term matters."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def write_tokens():
    compare_torch.write_shard("tokens.bin", numpy.random.default_rng(3).integers(0, V, 40 * T + 1))


def our_logits(*options, program="build/plain/logits_tool"):
    run(program, "logits.safetensors", "--data", "tokens.bin",
        "--micro-batch-size", B, "--seq-length", T, *options)
    held = load_file("logits.safetensors")
    return torch.tensor(held["tokens"]).long(), torch.tensor(held["logits"])


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.double()


def error_of(logits, exact):
    return ((logits.double() - exact).norm() / exact.norm()).item()


def same(ours, model, tokens):
    """Whether our logits equal those of their FP32 model."""
    exact = logits_of(copy.deepcopy(model).double(), tokens)
    error, theirs = error_of(ours, exact), error_of(logits_of(model, tokens), exact)
    assert error <= 2 * theirs, f"the logits are off by {error:.3g}, transformers' by {theirs:.3g}"


def imported_logits_are_theirs(name, *words):
    model = new_model(MODELS[name], 1)
    model.save_pretrained(f"{name}_hf")
    run("scripts/convert_hf", "import", f"{name}_hf", "--output", f"{name}_start")
    tokens, ours = our_logits("--load", f"{name}_start", *words)
    same(ours, model, tokens)
    with torch.no_grad():
        next(model.parameters())[5] *= 1.001
    assert fails(same, ours, model, tokens), f"{name}: another weight is not seen"


def saved_logits_are_ours(name):
    """Trains from the import, saves, and opens the checkpoint there."""
    train = ("--load", f"{name}_start", "--data", "tokens.bin", "--seq-length", T,
             "--micro-batch-size", B, "--save", f"{name}_run", "--lr", "1e-3")
    run("train_gpt", *train, "--train-iters", 3)
    result = run("train_gpt", *train, "--train-iters", 6, "--resume", "latest")
    assert "resuming from" in result.out and "starting from the weights" not in result.out
    checkpoint = f"{name}_run/step_00000006"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32,
                                                              attn_implementation="eager")
    window = getattr(MODELS[name], "sliding_window", None)
    assert model.config.model_type == (MODELS[name].model_type if window else
                                       FAMILIES[name.split("_")[0]])
    assert getattr(model.config, "sliding_window", None) == window
    assert model.config.max_position_embeddings == MODELS[name].max_position_embeddings
    tokens, ours = our_logits("--load", f"{name}_start", "--resume", checkpoint)
    same(ours, model, tokens)
    tokens, before = our_logits("--load", f"{name}_start")
    assert fails(same, before, model, tokens), "six steps have changed nothing"


def both_ways(name):
    imported_logits_are_theirs(name)
    saved_logits_are_ours(name)


def test_of(function, name):
    def of_model():
        function(name)

    of_model.__name__ = f"{function.__name__}: {name}"
    return of_model


def prepare_chat():
    """The conversations of scripts/chat.jsonl in several shards: some are cut by the windows, and
    some windows have two."""
    run("scripts/prepare_data", os.path.join(ROOT, "scripts/chat.jsonl"), "--output", "chat",
        "--tokenizer", os.path.join(ROOT, "test/golden/chat/tokenizer.json"), "--seq-length", 96,
        "--valid-fraction", 0.2, "--shard-tokens", 500)


def ignored(path, count):
    return numpy.ones(count, dtype=bool)


def each_by_itself(counted):
    return [targets * len(counted) for targets in counted]


# what is planted on PyTorch's side: other functions of compare_torch, and other options
FAULTS = {
    "the mask": ({"read_mask": ignored}, {}),
    "the mean over a step": ({"divisors": each_by_itself}, {}),
    "the order": ({}, {"seed": "1"}),
    "weight decay": ({}, {"weight-decay": "0"}),
    "clipping": ({}, {"clip-grad": "0"}),
    # both: by positions that begin anew, transformers finds the conversations without a mask
    "conversations apart": ({}, {"reset-attention-mask": "false", "reset-position-ids": "false"}),
}


def tuned_losses_are_theirs(name):
    """Over the targets that count, of every step and of an evaluation after the last, to four
    decimals. Micro-batches of a step differ in their number of targets; weight decay, clipping and
    the order are as by default."""
    config = copy.deepcopy(MODELS[name])
    # With larger weights both sides' gradients are exact to 1e-5 only. Then the sign of a tiny one
    # may differ, and with it a whole update of AdamW's.
    config.vocab_size, config.initializer_range = 400, 0.1
    config.max_position_embeddings = 96
    start = new_model(config, 4, 0.02)
    start.save_pretrained(f"{name}_chat_hf")
    run("scripts/convert_hf", "import", f"{name}_chat_hf", "--output", f"{name}_chat")
    run("train_gpt", "--load", f"{name}_chat", "--data", "chat/train_*.bin", "--valid-data",
        "chat/val_*.bin", "--seq-length", 96, "--micro-batch-size", 2, "--global-batch-size", 8,
        "--train-iters", 20, "--lr", 1e-3, "--lr-warmup-iters", 5, "--metrics", f"{name}.jsonl")
    head, ours = compare_torch.read_metrics(f"{name}.jsonl")

    def compared(changes):
        options = {**head["options"], **changes}
        theirs = compare_torch.train_torch(copy.deepcopy(start), options, 20, "cpu", False)
        return compare_torch.compare(ours, theirs, 5e-5)

    figures, wrong = compared({})
    print(f"  measured: {name}: losses off by {figures['max_difference']:.2g}, that of the "
          f"evaluation by {figures['valid_difference']:.2g}")
    assert not wrong, wrong
    for fault, (functions, options) in FAULTS.items():
        held = {function: getattr(compare_torch, function) for function in functions}
        vars(compare_torch).update(functions)
        figures, _ = compared(options)
        vars(compare_torch).update(held)
        off = max(figures["max_difference"], figures["valid_difference"])
        assert off > 5e-5, f"without {fault} it is off by {off} alone"


def split_and_half_width_files_are_read():
    name = "llama_grouped_bf16"
    model = new_model(MODELS["llama_grouped"], 2).bfloat16()
    model.save_pretrained(f"{name}_hf", max_shard_size="50KB")
    assert os.path.exists(f"{name}_hf/model.safetensors.index.json")
    run("scripts/convert_hf", "import", f"{name}_hf", "--output", f"{name}_start")
    tokens, ours = our_logits("--load", f"{name}_start")
    # opened again: the conversion has rounded the rotary frequencies as well
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{name}_hf", dtype=torch.float32)
    same(ours, model, tokens)
    # without the class around it, the names lack their first word
    bare = transformers.GPT2Model(MODELS["gpt2"]).eval().half()
    bare.save_pretrained("bare_hf")
    run("scripts/convert_hf", "import", "bare_hf", "--output", "bare_start")
    tokens, ours = our_logits("--load", "bare_start")
    whole = transformers.GPT2LMHeadModel(MODELS["gpt2"]).eval()
    whole.transformer.load_state_dict(bare.float().state_dict())
    whole.tie_weights()
    same(ours, whole, tokens)


def the_tokenizer_goes_along():
    """A checkpoint opens there with its tokenizer: of scripts/prepare_data, and of ./tokenize, of
    which the trainer writes tokenizer.json."""
    with open("text.txt", "w") as file:
        file.write("Anna sees three red boats. Ben counts seven blue apples.\n" * 40)
    run("scripts/prepare_data", "--output", "prepared", "--tokenizer", "byte", "text.txt")
    run("tokenize", "--output-prefix", "plain/x", "text.txt")
    for data in ("prepared/train_*.bin", "plain/x_train.bin"):
        run("train_gpt", "--model", "llama-tiny", "--data", data, "--micro-batch-size", 1,
            "--train-iters", 1, "--save", data[:5])
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{data[:5]}/latest")
        assert tokenizer("Anna é")["input_ids"] == list("Anna é".encode())
        assert tokenizer.decode([66, 101, 110, 32, 195, 169]) == "Ben é"
        assert tokenizer.eos_token_id == 256
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{data[:5]}/latest")
        assert model.config.eos_token_id == 256


def texts_have_the_tokens_of_the_data():
    """Also where the tokenizer's class in transformers cuts otherwise than its tokenizer.json."""
    text = "  Anna<|end|> sees\n\n 2026 boats.\n"
    llama = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    llama.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    other = tokenizers.Tokenizer(models.BPE())
    other.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,2}|\s+|[^\p{N}\s]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for held, name, kind in ((llama, "LlamaTokenizer", "llama"), (other, "GPT2Tokenizer", "gpt2"),
                             (other, "GPT2TokenizerFast", "llama"),
                             (other, "Qwen2Tokenizer", "qwen3"), (other, None, "qwen3")):
        held.train_from_iterator([text], trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", "</s>", "<|end|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        for folder in ("source", "data"):
            shutil.rmtree(folder, ignore_errors=True)
        write("source/tokenizer.json", held.to_str())
        config = {"eos_token": "</s>", "unk_token": "<unk>"} | (
            {"tokenizer_class": name} if name else {})
        write("source/tokenizer_config.json", json.dumps(config))
        write("text.txt", text)
        run("scripts/prepare_data", "--output", "data", "--tokenizer", "source/tokenizer.json",
            "--before", "none", "--valid-fraction", 0, "text.txt")
        write("data/config.json", json.dumps({"model_type": kind}))
        theirs = transformers.AutoTokenizer.from_pretrained("data")
        ours = numpy.fromfile("data/train_00000.bin", dtype="<u2", offset=1024).tolist()
        ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == ours, f"{name}: {theirs.convert_ids_to_tokens(ids)}"
        assert theirs.padding_side == ("left" if kind == "llama" and held is llama else "right")


def conversations_are_theirs():
    """Their special tokens of FOLDERS, their texts of SPANS; ours have more where theirs have left
    out a part of an answer, or of what stands before it."""
    for specials, files, names in FOLDERS:
        # GPT-2's names come from the class that config.json names
        model = {} if len(specials) > 1 else {"config.json": '{"model_type": "gpt2"}'}
        folder = os.path.dirname(chat_folder("named", files | model, specials))
        held = transformers.AutoTokenizer.from_pretrained(f"./{folder}").special_tokens_map
        assert held == {key: text for key, text in names.items() if text in specials}, held
    same = 0
    for name, source, row, texts, doubts in SPANS:
        folder = os.path.dirname(chat_folder("small", {
            "chat_template.jinja": source, "tokenizer_config.json": json.dumps(NAMED)}))
        text = transformers.AutoTokenizer.from_pretrained(f"./{folder}").apply_chat_template(
            [{key: value for key, value in message.items() if value != []}
             for message in row["messages"]], tools=row.get("tools"), tokenize=False,
            **row.get("chat_template_kwargs", {}))
        differs = text != texts[-1].replace("[[[", "@[").replace("[[", "").replace(
            "]]", "").replace("@[", "[")
        assert differs == (doubts == "asked"), f"{name}: {text} is not {texts[-1]}"
        same += not differs
    assert same > 30


def a_tuned_checkpoint_answers_there():
    """By its chat template there: the same prompt as here, and the same answer."""
    golden = os.path.join(ROOT, "test", "golden", "chat")
    run("train_gpt", "--load", golden, "--data", f"{golden}/data/train_*.bin", "--seq-length", 128,
        "--global-batch-size", 7, "--lr", 1e-2, "--micro-batch-size", 7, "--train-iters", 40,
        "--save", "tuned")
    folder, length = "tuned/latest", 24
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = "What is for supper?"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=True,
        return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=length, do_sample=False, eos_token_id=None,
                            pad_token_id=0)[0, prompt["input_ids"].shape[1]:].tolist()
    ids = " ".join(map(str, prompt["input_ids"][0].tolist()))
    exact = ("--sample-temperature", 0, "--sample-length", length)
    ours = run("train_gpt", "--load", folder, "--sample-only", "--quiet", "--sample-tokens", ids,
               *exact).out.splitlines()[-1]
    assert list(map(int, ours.split())) == theirs, f"{ours} is not {theirs}"
    end = theirs.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in theirs else length
    answer = run("scripts/chat", folder, asked, "--", *exact).out
    assert answer.strip() == tokenizer.decode(theirs[:end]).strip(), answer
    assert len(set(theirs)) > 2, "it has learned nothing to say"


WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
        "initializer_range": 0.05}
FP8_MODELS = {
    "llama": transformers.LlamaConfig(**WIDE, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**WIDE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**WIDE, num_key_value_heads=2, head_dim=64),
}


def fp8_exports_open_there(name):
    """Trained, exported in FP8, and opened there on the CPU: our logits and our loss."""
    new_model(FP8_MODELS[name], 5, 0.02).save_pretrained(f"{name}_wide")
    data = ("--seq-length", T, "--micro-batch-size", B)
    run("train_gpt", "--load", f"{name}_wide", "--data", "tokens.bin", *data, "--train-iters", 5,
        "--lr", 1e-3, "--save", f"{name}_wide_run")
    run("train_gpt", "--load", f"{name}_wide_run/latest", "--export", f"{name}_fp8", "--export-fp8")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{name}_fp8", dtype=torch.float32, attn_implementation="eager").float()
    tokens, ours = our_logits("--load", f"{name}_fp8")
    same(ours, model, tokens)
    trained = our_logits("--load", f"{name}_wide_run/latest")[1]
    assert fails(same, trained, model, tokens), "FP8 has changed nothing"
    run("train_gpt", "--load", f"{name}_fp8", "--eval-only", "--valid-data", "tokens.bin", *data,
        "--global-batch-size", B, "--eval-iters", 4, "--metrics", f"{name}_fp8.jsonl")
    with open(f"{name}_fp8.jsonl") as file:
        loss = next(row["valid_loss"] for row in map(json.loads, file) if "valid_loss" in row)
    held = torch.tensor(numpy.fromfile("tokens.bin", dtype="<u2", offset=1024).astype(int))
    rows = held[:4 * B * T].reshape(-1, T), held[1:4 * B * T + 1].reshape(-1, T)
    theirs = torch.nn.functional.cross_entropy(
        logits_of(model, rows[0]).flatten(0, 1), rows[1].flatten()).item()
    print(f"  measured: {name}: loss {loss:.6f}, there {theirs:.6f}")
    assert abs(loss - theirs) < 5e-5, f"{loss} is not {theirs}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    write_tokens()
    prepare_chat()
    sys.exit(main([*[test_of(both_ways, name) for name in MODELS],
                   *[test_of(tuned_losses_are_theirs, name) for name in TUNED],
                   *[test_of(fp8_exports_open_there, name) for name in FP8_MODELS],
                   conversations_are_theirs, split_and_half_width_files_are_read,
                   the_tokenizer_goes_along, texts_have_the_tokens_of_the_data,
                   a_tuned_checkpoint_answers_there]))
