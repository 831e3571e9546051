"""Imported models' logits on the GPU against transformers' with random weights, in BF16 and every
FP8 recipe.

BF16: ours may be off by 1.5 times what transformers' are in BF16, judged by transformers in FP64;
both round every activation. FP8: our emulation on the CPU rounds the matmuls' operands to the same
formats, with three or two bits behind the point, and nothing else: ours may be off by 1.5 times
what that is and BF16 loses besides, and 1.2 times from it what it is from FP64 (what BF16 changes
is rounded to other codes).
"""

import copy
import os
import sys

import torch
import transformers
from check import ROOT, fails, main, run
from transformers_tests import GPT2, LLAMA, error_of, logits_of, new_model, our_logits, write_tokens

TESTS = os.environ.get("LLM8_TESTS", os.path.join(ROOT, "build/plain"))
GPU, CPU = os.path.join(TESTS, "gpu_logits"), os.path.join(TESTS, "logits_tool")
WIDE = {"initializer_range": 0.05}
MODELS = {
    "gpt2": transformers.GPT2Config(**{**GPT2, **WIDE, "n_embd": 256}),
    "llama": transformers.LlamaConfig(
        **{**LLAMA, **WIDE, "hidden_size": 256, "intermediate_size": 352},
        num_attention_heads=4, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(
        **{**LLAMA, **WIDE, "hidden_size": 256, "intermediate_size": 352},
        num_attention_heads=4, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(
        **{**LLAMA, **WIDE, "hidden_size": 256, "intermediate_size": 352},
        num_attention_heads=4, num_key_value_heads=2, head_dim=96),
}


def recipes():
    """The options of every FP8 recipe."""
    with open(os.path.join(ROOT, "test/recipes.txt")) as file:
        rows = [line.split() for line in file if not line.startswith("#")]
    return [row[2:] for row in rows if row[2:]]


def imported(name):
    """The model, and the options that our programs take it with."""
    model = new_model(MODELS[name], 1, 0.02)
    model.save_pretrained(f"{name}_hf")
    run("scripts/convert_hf", "import", f"{name}_hf", "--output", f"{name}_start")
    return model, ("--load", f"{name}_start")


def of(model, tokens):
    """Logits in FP64, and how far from them BF16 is."""
    exact = logits_of(copy.deepcopy(model).double(), tokens)
    return exact, error_of(logits_of(copy.deepcopy(model).bfloat16(), tokens), exact)


def near(name, ours, exact, allowed):
    error = error_of(ours, exact)
    print(f"  measured: {name}: off by {error:.3g} of {allowed:.3g}")
    assert error <= allowed, f"{name}: the logits are off by {error:.3g}, more than {allowed:.3g}"


def layers_exchanged(model):
    """Another model: the weights of two layers change places."""
    other = copy.deepcopy(model)
    body = other.transformer if hasattr(other, "transformer") else other.model
    layers = body.h if hasattr(body, "h") else body.layers
    first, second = layers[0].state_dict(), copy.deepcopy(layers[1].state_dict())
    layers[1].load_state_dict(copy.deepcopy(first))
    layers[0].load_state_dict(second)
    return other


def test_of(name):
    def logits_are_theirs():
        model, options = imported(name)
        tokens, ours = our_logits(*options, program=GPU)
        exact, bf16 = of(model, tokens)
        wrong, _ = of(layers_exchanged(model), tokens)
        near(f"{name} BF16", ours, exact, 1.5 * bf16)
        assert fails(near, f"{name} BF16, planted", ours, wrong, 1.5 * bf16)
        for words in recipes():
            recipe = " ".join(words)
            tokens, ours = our_logits(*options, *words, program=GPU)
            _, emulated = our_logits(*options, *words, program=CPU)
            loss = error_of(emulated, exact)
            assert loss > 2 * bf16, f"{recipe}: the emulation is off by {loss:.3g} alone: no FP8"
            near(f"{name} {recipe}", ours, exact, 1.5 * (loss + bf16))
            near(f"{name} {recipe}, from the emulation", ours, emulated.double(), 1.2 * loss)
            assert fails(near, f"{name} {recipe}, planted", ours, wrong, 1.5 * (loss + bf16))

    logits_are_theirs.__name__ = name
    return logits_are_theirs


if __name__ == "__main__":
    os.environ["LLM8_TEST_SMALL_FP8"] = "1" # train/gpu/support.c: however small the model
    torch.set_num_threads(4)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    write_tokens()
    sys.exit(main([test_of(name) for name in MODELS]))
