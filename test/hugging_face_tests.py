"""scripts/convert_hf and --load without transformers: what our trainer saved comes back bit for
bit, in one file or several; what is not ours is refused. transformers_tests.py compares logits.
"""

import json
import os
import shlex
import shutil
import struct
from unittest import mock

import numpy
import tokenizers
from check import call, done, fails, main, read, refused, run, says, write
from hub import COMMITS, Server, serve
from llm8 import convert_hf as conversion
from llm8.convert_hf import main as convert_hf

SHAPES = {
    "gpt2": ("--model", "gpt2-tiny"),
    "llama": ("--model", "llama-tiny", "--untie-embeddings-and-output-weights", "--rope-scaling",
              "llama3", "--rope-scaling-factor", 4, "--rope-original-length", 16, "--rope-theta",
              500, "--norm-epsilon", "1e-6"),
    "qwen2": ("--model", "llama-tiny", "--add-qkv-bias", "--logit-softcap", 3),
    "qwen3": ("--model", "llama-tiny", "--qk-layernorm", "--kv-channels", 24),
}
DATA = ("--data", "d/x_train.bin", "--micro-batch-size", 2)


def prepare():
    """Two models, trained some steps, so that no tensor is what another seed would make it."""
    write("text", "Anna sees three red boats. Ben counts seven blue apples.\n" * 200)
    run("tokenize", "--output-prefix", "d/x", "text")
    for name, shape in SHAPES.items():
        run("train_gpt", *shape, *DATA, "--train-iters", 4, "--lr", "1e-2", "--save", f"{name}_run")


def gradients(path, *options):
    run("train_gpt", *DATA, *options, "--dump-gradients", path)
    return read(path)


def header_of(content):
    length = struct.unpack_from("<Q", content)[0]
    return json.loads(content[8:8 + length]), 8 + length


def pack(tensors):
    """A safetensors file of {name: (dtype, shape, bytes)}."""
    header, at = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(row[2] for row in tensors.values())


def unpack(path):
    content = read(path)
    header, begin = header_of(content)
    return {name: (row["dtype"], row["shape"], content[begin + row["data_offsets"][0]:
                                                       begin + row["data_offsets"][1]])
            for name, row in header.items() if name != "__metadata__"}


def model_folder(folder, name="llama", tensors=None, **changes):
    """A Hugging Face folder of our model, with some of its configuration changed."""
    shutil.rmtree(folder, ignore_errors=True)
    config = json.loads(read(f"{name}_run/latest/config.json"))
    config.update(changes)
    write(f"{folder}/config.json", json.dumps({k: v for k, v in config.items() if v != "drop"}))
    held = unpack(f"{name}_run/latest/model.safetensors") if tensors is None else tensors
    write(f"{folder}/model.safetensors", pack(held))
    return folder


def split(folder, parts):
    tensors = unpack(f"{folder}/model.safetensors")
    names, weight_map = sorted(tensors), {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        chosen = names[part::parts]
        write(f"{folder}/{file}", pack({name: tensors[name] for name in chosen}))
        weight_map.update(dict.fromkeys(chosen, file))
    os.remove(f"{folder}/model.safetensors")
    write(f"{folder}/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def imported(folder, start, *words):
    return done(convert_hf, "import", folder, "--output", start, *words)


def test_what_was_saved_comes_back():
    for name, shape in SHAPES.items():
        straight = gradients(f"{name}.g", *shape, "--resume", f"{name}_run/latest",
                             "--train-iters", 9)
        fresh = gradients(f"{name}.f", *shape)
        assert straight != fresh
        folder = model_folder(f"{name}_hf", name)
        if name == "llama":
            split(folder, 3)
        says(imported(folder, f"{name}_start").out, f"--load {name}_start")
        # the same data: a new run begins at the first batch, the resumed one went on from there
        refused(call(convert_hf, "import", f"{name}_run/latest/", "--output", "no"),
                f"{name}_run/latest/: a checkpoint of ours, which --load takes")
        again = gradients(f"{name}.a", "--load", f"{name}_start")
        direct = gradients(f"{name}.b", *shape, "--load", f"{name}_run/latest")
        assert again == direct and again != fresh, f"{name}: other weights"
        held = unpack(f"{name}_start/model.safetensors")
        assert held == unpack(f"{name}_run/latest/model.safetensors")
        file = f"{name}_start/model.safetensors"
        refused(call(convert_hf, "import", file, "--output", "no"),
                f"{file}: a file; give the folder that it is in")


def ids_of(path):
    config = json.loads(read(path))
    return {key: config[key] for key in conversion.TOKEN_IDS if key in config}


def test_ends_of_an_answer_go_along():
    """Several, and the padding, into a run's checkpoints, whether the model was imported or not,
    and though its tokenizer names others; but not over a generation_config.json."""
    tokenizer = read("llama_run/latest/tokenizer.json")
    for place, (ids, own) in enumerate((
            ({"bos_token_id": 0, "eos_token_id": [2, 3], "pad_token_id": 4}, None),
            ({"bos_token_id": 0, "eos_token_id": 2}, {"temperature": 0.6}),
            ({"bos_token_id": None, "eos_token_id": 0}, None),
            ({}, None))):
        model_folder("ends", **{key: ids.get(key, "drop") for key in conversion.TOKEN_IDS})
        write("ends/tokenizer.json", tokenizer)
        if own:
            write("ends/generation_config.json", json.dumps(own))
        imported("ends", f"ends_{place}")
        known = {key: value for key, value in ids.items() if value is not None}
        for folder in (f"ends_{place}", "ends"):
            save = f"{folder}_run_{place}"
            for steps in (1, 2):
                run("train_gpt", "--load", folder, *DATA, "--train-iters", steps, "--save", save,
                    "--resume", "latest")
                assert ids_of(f"{save}/latest/config.json") == ids, (folder, steps)
        for folder in (f"ends_{place}", f"ends_{place}_run_{place}/latest"):
            path = f"{folder}/generation_config.json"
            assert (json.loads(read(path)) if os.path.exists(path) else {}) == (own or known), path
    for at, (ids, said) in enumerate((
            (7, "warning: eos_token_id 7: lacks 256, <|endoftext|>, which is the "),
            ([7, 256], ""))):
        model_folder("ends", eos_token_id=ids)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            write(f"ends/{name}", read(f"llama_run/latest/{name}"))
        warned = imported("ends", f"ends_named_{at}").err
        assert said in warned if said else not warned, warned


def test_matrices_of_zeros_are_warned_of():
    """As a download that was cut short leaves them; an embedding under the head's name, too.
    Vectors may be zeros."""
    for name, last in (("llama", "model.layers.1.mlp.down_proj.weight"),
                       ("gpt2", "transformer.h.1.mlp.c_proj.weight")):
        tensors = unpack(f"{name}_run/latest/model.safetensors")
        matrices = [key for key, (_, shape, _) in tensors.items() if len(shape) == 2]
        for zeros, words in ((tensors.keys() - matrices, None), ([last], f"{last}' is all zeros"),
                             (tensors, f"' and {len(matrices) - 1} other matrices are all zeros")):
            held = {key: (dtype, shape, bytes(len(data)) if key in zeros else data)
                    for key, (dtype, shape, data) in tensors.items()}
            said = run("train_gpt", "--load", model_folder("m", name, held), *DATA,
                       "--train-iters", 1).err
            assert words in said if words else "zeros" not in said, said


def test_a_byte_order_mark_is_read():
    """One answer from both readers; and no file of a start or a checkpoint has it."""
    mark = b"\xef\xbb\xbf"
    split(model_folder("mark", rope_theta=600.0), 2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write(f"mark/{name}", read(f"llama_run/latest/{name}"))
    write("mark/generation_config.json", '{"temperature": 0.6}')
    for name in filter(lambda name: name.endswith(".json"), os.listdir("mark")):
        write(f"mark/{name}", mark + read(f"mark/{name}"))
    imported("mark", "mark_start")
    assert "--rope-theta 600" in run("train_gpt", "--load", "mark", "--rope-theta", 5,
                                     "--plan").err.replace("trained with", "--rope-theta")
    assert options_of("mark") == options_of("mark_start")
    write("mark_start/generation_config.json", read("mark/generation_config.json"))
    run("train_gpt", "--load", "mark_start", *DATA, "--train-iters", 1, "--save", "mark_run")
    files = [f"{folder}/{name}" for folder in ("mark_start", "mark_run/latest")
             for name in os.listdir(folder) if folder != "mark_start" or "generation" not in name]
    assert sum(name.endswith("config.json") for name in files) >= 5, files
    assert not [path for path in files if read(path).startswith(mark)]
    for encoding in ("utf-16", "utf-16-le"):
        model_folder("m")
        write("m/config.json", read("llama_run/latest/config.json").decode().encode(encoding))
        bad("m", "m/config.json: not JSON in UTF-8")
        refused(run("train_gpt", "--load", "m", "--plan", check=False), "not JSON in UTF-8")


def test_a_start_is_readable_by_whom_the_umask_lets():
    for mask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        imported("llama_hf", f"start_{mode}")
        os.umask(before)
        modes = {name: os.stat(f"start_{mode}/{name}").st_mode & 0o777
                 for name in os.listdir(f"start_{mode}")}
        assert "model.safetensors" in modes and set(modes.values()) == {mode}, modes
    # gcsfuse, Azure's files and others have no modes
    with mock.patch("os.chmod", side_effect=PermissionError(1, "Operation not permitted")):
        assert "start_modeless" in imported("llama_hf", "start_modeless").out


def test_what_is_said_can_be_pasted():
    out = imported("llama_hf", "it's a start").out
    assert shlex.split(out.splitlines()[-1])[-4:] == ["--load", "it's a start", "--data", "..."]


def options_of(folder):
    """The model's options, as the trainer reads them."""
    return run("train_gpt", "--load", folder, "--plan").out.split("\nData\n")[0]


def test_older_names_mean_the_same():
    """transformers 4's and 5's ways to write the rotary embedding; buffers and tied heads."""
    scaling = json.loads(read("llama_run/latest/config.json"))["rope_scaling"]
    tensors = unpack("llama_run/latest/model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", [8], bytes(32))
    five = {**scaling, "rope_theta": 500.0}
    four = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    want = options_of("llama_start")
    for place, changes in enumerate([
            {"rope_parameters": five, "rope_theta": "drop", "rope_scaling": "drop"},
            {"rope_scaling": four, "hidden_act": "swish", "head_dim": "drop"}]):
        model_folder("old_hf", "llama", tensors, **changes)
        imported("old_hf", f"old_{place}")
        assert options_of(f"old_{place}") == want
        run("train_gpt", *DATA, "--load", f"old_{place}", "--train-iters", 1)
    # what contradicts the values that are read, by import and by a run
    model_folder("twice", rope_theta=600.0, rope_scaling={**scaling, "rope_theta": 500.0})
    for told in (imported("twice", "twice_start"), run("train_gpt", "--load", "twice", "--plan")):
        says(told.err, "warning: config.json: rope_theta 600", "!dropout")
    assert options_of("twice") == want
    tensors = unpack("gpt2_run/latest/model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    tensors["transformer.h.0.attn.bias"] = ("U8", [1, 1, 64, 64], bytes(4096))
    model_folder("old_hf", "gpt2", tensors, n_inner=None, tie_word_embeddings="drop",
                 activation_function="gelu_pytorch_tanh", embd_pdrop=0.2, attn_pdrop=0.1)
    told = ("warning: config.json: embd_pdrop 0.2, attn_pdrop 0.1: not used: training here is "
            "without dropout\n")
    says(imported("old_hf", "old_gpt2").err, told)
    says(run("train_gpt", "--load", "old_gpt2", "--plan").err, told)
    for words in ("--sample-only", "--sample-length", 1), ("--eval-only", "--valid-data", DATA[1]):
        says(run("train_gpt", "--load", "old_gpt2", *words).err, "!dropout")
    assert gradients("old.g", "--load", "old_gpt2") == read("gpt2.a")


def test_tied_weights_may_have_the_heads_name():
    """As safetensors' save_model leaves them: of two names it keeps the first one."""
    for name in ("qwen2", "gpt2"):
        held = unpack(f"{name}_run/latest/model.safetensors")
        embedding = next(key for key in held if ".embed_tokens." in key or ".wte." in key)
        tensors = {"lm_head.weight" if key == embedding else key: row for key, row in held.items()}
        bare = {key.removeprefix("transformer.").removeprefix("model."): row
                for key, row in tensors.items()}
        for changes in (tensors, bare):
            model_folder("m", name, changes, tie_word_embeddings=True if name != "gpt2" else "drop")
            expected = gradients("tied.e", "--load", f"{name}_run/latest")
            assert gradients("tied.g", "--load", "m") == expected, name
            shutil.rmtree("tied_start", ignore_errors=True)
            split("m", 2)
            imported("m", "tied_start")
            assert unpack("tied_start/model.safetensors") == changes, name
            assert gradients("tied.g", "--load", "tied_start") == expected, name
        for absent, there in ((embedding, "lm_head.weight"), ("lm_head.weight", embedding)):
            untied = {there: held[embedding]} | held
            if absent == embedding:
                untied.pop(embedding)
            model_folder("m", name, untied, tie_word_embeddings=False)
            bad("m", f"'{absent}' is missing", "set tie_word_embeddings to true")
            refused(run("train_gpt", "--load", "m", *DATA, check=False), f"'{absent}' is missing",
                    "set tie_word_embeddings to true")


def test_a_sliding_window_that_is_not_exceeded_stays():
    """In checkpoints and exports, also after a resume. Longer sequences are refused; a run from a
    checkpoint may have them, and then the model has no window."""
    says(imported(model_folder("m", model_type="mistral", sliding_window=32), "slides").err,
         "warning: config.json: sliding_window 32: attention has no window here, so --seq-length")
    unfit("slides", "slides/config.json: sliding_window 32 is not supported: what is missing is",
          "; with --seq-length 32 or less it changes nothing", words=("--seq-length", 33))
    for steps in 1, 2:
        run("train_gpt", *DATA, "--load", "slides", "--train-iters", steps, "--save", "slides_run",
            "--resume", "latest")
    run("train_gpt", "--load", "slides_run/latest", "--export", "slides_out")
    run("train_gpt", *DATA, "--load", "slides_run/latest", "--train-iters", 1, "--seq-length", 33,
        "--save", "longer_run")
    for folder, kept in (("slides_run/latest", True), ("slides_out", True),
                         ("longer_run/latest", False)):
        config = json.loads(read(f"{folder}/config.json"))
        assert (config.get("sliding_window"), config["model_type"], config["architectures"][0],
                config["max_position_embeddings"]) == (
            (32, "mistral", "MistralForCausalLM", 64) if kept else
            (None, "llama", "LlamaForCausalLM", 33)), folder


def test_another_head_than_the_tied_embedding_is_refused():
    """config.json ties the two, and the file has both: as transformers saves models of before."""
    tensors = unpack("qwen2_run/latest/model.safetensors")
    dtype, shape, embedding = tensors["model.embed_tokens.weight"]
    for head, bytes_of in (("F32", 4), ("BF16", 2), ("I8", 1)):
        tensors["lm_head.weight"] = (head, shape, bytes(len(embedding) // 4 * bytes_of))
        unfit(model_folder("m", "qwen2", tensors=tensors), "model.safetensors",
              "its lm_head.weight is not the embedding", "set tie_word_embeddings to false")
    # one bit of a number in the last place
    tensors["lm_head.weight"] = (dtype, shape, embedding[:-1] + bytes([embedding[-1] ^ 1]))
    unfit(model_folder("m", "qwen2", tensors=tensors), "lm_head.weight is not the embedding")
    tensors["lm_head.weight"] = (dtype, shape, embedding)
    split(model_folder("m", "qwen2", tensors=tensors), 2)
    imported("m", "same_head")
    gradients("same_head.g", "--load", "same_head")


def bad(folder, *parts, words=()):
    refused(call(convert_hf, "import", folder, "--output", "bad_start", *words), *parts)
    assert not os.path.exists("bad_start"), "half a start is left"


def unfit(folder, *parts, words=()):
    """What the trainer refuses when it reads the weights."""
    refused(run("train_gpt", "--load", folder, *DATA, *words, check=False), *parts)


def unfit_both(folder, *parts):
    """What both refuse in the same words."""
    bad(folder, *parts)
    unfit(folder, *parts)


def test_other_models_are_refused():
    all_of_them = "supported are gpt2, llama (Llama 1 to 3.3, SmolLM), mistral, qwen2 ("
    for family, changes, lacks in (
            ("gemma2", {}, ": what is missing is norms that multiply by 1 + weight, GeGLU"),
            ("mixtral", {"num_local_experts": 8}, ": what is missing is mixture of experts"),
            ("qwen3_moe", {"num_experts": 8}, ": what is missing is mixture of experts"),
            ("deepseek_v3", {"n_routed_experts": 8}, "multi-head latent attention, mixture of"),
            ("nobody", {}, "is not supported; ")):
        bad(model_folder("m", model_type=family, **changes), "m/config.json",
            f"architecture {family}", lacks, all_of_them)
    # test_safetensors.c has what else of a config.json is refused
    for changes, *parts in (
            ({"model_type": None}, "m/config.json: model_type is missing or no name", all_of_them),
            ({"quantization_config": {"bits": 4}}, "a quantized model", "the original"),
            ({"attention_bias": True}, "attention_bias true", "must be false"),
            ({"head_dim": 15}, "--kv-channels 15"),
            ({"hidden_size": "drop"}, "m/config.json: hidden_size is missing"),
            ({"num_key_value_heads": 3}, "--num-query-groups 3", "must divide"),
            ({"model_type": "qwen2"}, "6 of 27 tensors", "q_proj.bias"),
            ({"model_type": "qwen3"}, "q_norm.weight")):
        bad(model_folder("m", **changes), *parts)
    unfit_both(model_folder("m", head_dim=32), "[64, 64], not a floating-point [128, 64]")
    tensors = unpack("llama_run/latest/model.safetensors")
    extra = {**tensors, "model.layers.0.self_attn.q_norm.weight": ("F32", [4], bytes(16))}
    unfit_both(model_folder("m", tensors=extra),
               "q_norm.weight' is none of the model that config.json")
    compiled = {f"_orig_mod.{name}": row for name, row in tensors.items()}  # by torch.compile
    bad(model_folder("m", tensors=compiled), "tensor '_orig_mod.", "' is none of the model that")


def test_incomplete_models_are_refused():
    tensors = unpack("llama_run/latest/model.safetensors")
    some = {name: row for name, row in tensors.items() if "layers.1.mlp" not in name}
    bad(model_folder("m", tensors=some), "m: 3 of 21 tensors are missing", "layers.1.mlp.gate_proj")
    unfit_both(model_folder("m", intermediate_size=200), "model.safetensors: tensor 'model.layers",
               "[192, 64], not a floating-point [200, 64]")
    eighth = {name: ("I8", row[1], row[2][::4]) for name, row in tensors.items()}
    bad(model_folder("m", tensors=eighth), "is I8; must be one of F32, BF16, F16", "unquantized")
    whole, tokenizer = (read(f"llama_run/latest/{name}")
                        for name in ("model.safetensors", "tokenizer.json"))
    larger = tokenizers.Tokenizer.from_str(tokenizer.decode())
    larger.add_special_tokens(["<|more|>"])
    index, deep = "model.safetensors.index.json", "[" * 100000
    for name, contents, *parts in ( # what a file holds
            ("model.safetensors", (whole[:500], whole[:-9], b"", b"\xff" * 40),
             "m/model.safetensors: not a whole safetensors file", "download it again"),
            ("model.safetensors", ("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n",),
             "m/model.safetensors: a pointer of Git LFS", "git lfs pull"),
            (index, ("{}", "[]", "5", deep, '{"weight_map": []}', '{"weight_map": {"a": 5}}',
                     '{"weight_map": {"a": []}}', '{"weight_map": {"a": "x", "b": 5}}'),
             "index.json: damaged, or no "), (index, (b"\xff",), "index.json: not a text"),
            (index, ('{"weight_map": {"a": "."}}',), f"m/.: missing, though {index} names it"),
            ("config.json", (deep, b"\xff", "", '{"model_type": NaN}', "{}{}", "{}5"),
             "m/config.json: not JSON"),
            ("tokenizer.json", ("{}",), "tokenizer.json: not a tokenizer.json"),
            ("tokenizer.json", (larger.to_str(),), "m/tokenizer.json: has 258 tokens, the model "
             "257; give the model's own"),
            ("tokenizer_config.json", ("{",), "tokenizer_config.json: damaged, or no"),
            ("tokenizer_config.json", ('{"eos_token": "x"}',), "no special token")):
        for content in contents:
            write(model_folder("m") + "/tokenizer.json", tokenizer)
            if name == index:
                os.remove("m/model.safetensors")
            write(f"m/{name}", content)
            bad("m", *parts)
    none = "m: no model.safetensors nor model.safetensors.index.json; download them"
    for there, *parts in ( # which files there are
            ([], none), (["tokenizer.bin", "training_args.bin", "optimizer.pt"], none),
            (["x.bin", "pytorch_model.bin"], "its weights are pickled", "save_pretrained"),
            (["pytorch_model.bin", "adapter_model.safetensors"],
             "m: no model.safetensors; its weights are an adapter", "merge_and_unload"),
            (["model-00001-of-00002.safetensors"], f"m/{index}: missing, though there is "
             "model-00001-of-00002.safetensors; download it")):
        os.remove(model_folder("m") + "/model.safetensors")
        for name in there:
            write(f"m/{name}", "x")
        bad("m", *parts)
    os.symlink("/proc/self/status", "m/model.safetensors") # cannot be mapped
    bad("m", "m/model.safetensors: No such device")
    os.remove("m/config.json")
    bad("m", "error: m/config.json: No such file")
    write("adapter/adapter_model.safetensors", "x")
    bad("adapter", "adapter/config.json: No such file; its weights are an adapter")
    bad("adapter/adapter_model.safetensors", "adapter_model.safetensors: a file; its weights are")
    write("quantized/x.gguf", "x")
    for path in "quantized", "quantized/x.gguf":
        bad(path, "its weights are llama.cpp's: give the Hugging Face model that they were made")
    split(model_folder("m"), 2)
    second = unpack("m/model-00002-of-00002.safetensors")
    write("m/model-00002-of-00002.safetensors",
          pack(second | {"model.norm.weight": tensors["model.norm.weight"]} |
               {name: row for name, row in tensors.items() if name not in second}))
    bad("m", "model-00002-of-00002.safetensors: tensor '", "is in ", "too; download")
    os.remove("m/model-00002-of-00002.safetensors")
    bad("m", "model-00002-of-00002.safetensors: missing", "names it")
    bad("nowhere", "nowhere: no such folder", "OWNER/NAME")
    bad("owner/name", "owner/name: no such folder here", "cannot be reached", "network",
        words=("--mirror", "http://127.0.0.1:9"))
    os.environ["LLM8_BIN"] = "nowhere"
    bad(model_folder("m"), "nowhere/train_gpt is not built: run make")
    del os.environ["LLM8_BIN"]
    refused(call(convert_hf, "import", "gpt2_hf"), "--output", "scripts/convert_hf import --help")
    refused(call(convert_hf, "export", "x"), "export", "import", "--help")
    refused(call(convert_hf, "import", "gpt2_hf", "--output", "gpt2_start"), "--output gpt2_start",
            "exists already")
    write("a_file", "")
    refused(call(convert_hf, "import", "gpt2_hf", "--output", "a_file/start"),
            "--output a_file/start: Not a directory")


def test_loads_that_do_not_fit_are_refused():
    tiny = ("train_gpt", *DATA, *SHAPES["llama"])

    def load(folder, *parts, words=()):
        refused(run(*tiny, "--load", folder, *words, check=False), f"--load {folder}", *parts)

    load("nowhere", "no such folder")
    load("d", "d/config.json: No such file")
    for name, option, was, now in (("llama", "--rope-theta", 500, 600),
                                   ("llama", "--rope-scaling-factor", 4, 2),
                                   ("llama", "--rope-scaling", "llama3", "none"),
                                   ("llama", "--norm-epsilon", "1e-06", 0.1),
                                   ("qwen2", "--logit-softcap", 3, 4)):
        said = run("train_gpt", "--load", f"{name}_start", option, now, "--plan").err
        assert (f"warning: {option} {now}: the weights of the checkpoint {name}_start were trained "
                f"with {was}\n") in said, said
    split(model_folder("m"), 2)
    load("m", "in several files", "scripts/convert_hf import m --output DIR makes them one")
    assert not run(*tiny, "--load", "m", check=False).out, "it is said after the run's start"
    assert "parameters" in run("train_gpt", "--load", "m", "--plan").out
    write("m/config.json", "{")
    load("m", "m/config.json: not JSON")
    tensors = unpack("llama_run/latest/model.safetensors")
    tensors.pop("model.norm.weight")
    load(model_folder("m", tensors=tensors), "tensor 'model.norm.weight' is missing")


def cuts_into_bytes(path):
    """Every byte is the token of its number, back and forth; 256 is the end of text."""
    tokenizer = tokenizers.Tokenizer.from_file(path)
    text = "".join(map(chr, range(0x800))) + "漢字 🙂\u2028\ufeff  \r\n it's <|end|>"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|endoftext|>b").ids == [97, 256, 98]
    assert tokenizer.decode([97, 256, 98]) == "ab" and tokenizer.get_vocab_size() == 257
    assert sorted(tokenizer.get_vocab().values()) == list(range(257))


def test_byte_checkpoints_have_a_tokenizer_json():
    """The trainer writes it where ./tokenize has made the data."""
    cuts_into_bytes("llama_run/latest/tokenizer.json")
    config = json.loads(read("llama_run/latest/tokenizer_config.json"))
    assert config["eos_token"] == config["bos_token"] == "<|endoftext|>"
    # transformers 4 would give a GPT-2 token_type_ids, whose embedding it adds
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    other = read("llama_run/latest/tokenizer.json").replace(b":195,", b":0,", 1)
    assert fails(cuts_into_bytes, write("other.json", other.replace(b":0,", b":195,", 1)))


def test_a_model_comes_from_the_hub():
    split(model_folder("hub"), 2)
    write("hub/readme.md", "x")
    for name in os.listdir("hub"):
        Server.files[f"/some/model/resolve/{COMMITS['main']}/{name}"] = read(f"hub/{name}")
    imported("some/model", "hub_start", "--downloads", "got", "--mirror", serve())
    assert unpack("hub_start/model.safetensors") == unpack("llama_start/model.safetensors")
    got = os.listdir(f"got/models--some--model/snapshots/{COMMITS['main']}")
    assert sorted(got) == sorted(set(os.listdir("hub")) - {"readme.md"})


# ---- --export -----------------------------------------------------------------------------------

SCALES = "_scale_inv"
WIDE = ("--model", "llama-tiny", "--hidden-size", 192, "--num-attention-heads", 3,
        "--num-query-groups", 1, "--ffn-hidden-size", 320)  # weights of 1, 1.5 and 2.5 blocks


def e4m3():
    """The values of the codes 0 to 126, by their definition."""
    code = numpy.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return numpy.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0 ** -9)


def quantized(weight):
    """Codes and scales: of two values as near the one with the even code."""
    grid = [-(-size // 128) for size in weight.shape]
    codes, scales = numpy.empty(weight.shape, numpy.uint8), numpy.ones(grid, numpy.float32)
    values = e4m3()
    for row, column in numpy.ndindex(*grid):
        place = numpy.s_[row * 128:row * 128 + 128, column * 128:column * 128 + 128]
        amax = numpy.abs(weight[place]).max()
        scales[row, column] = amax / numpy.float32(448)
        size = numpy.abs(weight[place] * (numpy.float32(448) / amax)).astype(float).clip(0, 448)
        low = numpy.searchsorted(values, size, "right") - 1
        high = numpy.minimum(low + 1, 126)
        below, above = size - values[low], values[high] - size
        up = (above < below) | ((above == below) & (high % 2 == 0))
        codes[place] = numpy.where(up, high, low) | numpy.signbit(weight[place]) * 128
    return codes, scales


def bf16(values):
    bits = values.view(numpy.uint32).astype(numpy.uint64)
    half, odd = numpy.uint64(0x7fff), bits >> numpy.uint64(16) & numpy.uint64(1)
    return ((bits + half + odd) >> numpy.uint64(16)).astype(numpy.uint16)


def weights_of(folder):
    return {name: numpy.frombuffer(content, numpy.float32).reshape(shape)
            for name, (_, shape, content) in unpack(f"{folder}/model.safetensors").items()}


def export(folder, output, *words):
    shutil.rmtree(output, ignore_errors=True)
    return run("train_gpt", "--load", folder, "--export", output, *words)


def test_exported_weights_are_the_trained_ones():
    """Codes and scales by their definition, also where a block is not whole; all else in BF16."""
    run("train_gpt", *WIDE, *DATA, "--train-iters", 4, "--lr", "1e-2", "--save", "wide_run")
    said = export("wide_run/latest", "wide_fp8", "--export-fp8")
    assert said.err.startswith("warning: --export-fp8: weights such as 'model.layers.1.mlp.down_"
                               "proj.weight' [192, 320] are no multiples of 128 x 128"), said.err
    export("wide_run/latest", "wide_bf16")
    held, plain = unpack("wide_fp8/model.safetensors"), unpack("wide_bf16/model.safetensors")
    trained = weights_of("wide_run/latest")
    assert set(plain) == set(trained)
    for name, weight in trained.items():
        dtype, shape, content = held.pop(name)
        assert shape == list(weight.shape)
        assert plain[name] == ("BF16", shape, bf16(weight).tobytes()), name
        if not name.endswith("_proj.weight"):
            assert plain[name] == (dtype, shape, content), name
            continue
        codes, scales = quantized(weight)
        assert dtype == "F8_E4M3" and content == codes.tobytes(), name
        assert held.pop(name + SCALES) == ("F32", list(scales.shape), scales.tobytes()), name
        weight = weight.copy()
        weight[-1, -1] += numpy.abs(weight).max() / 8
        assert quantized(weight)[0].tobytes() != content, f"{name}: another weight is not seen"
    assert not held, held.keys()
    config = json.loads(read("wide_fp8/config.json"))
    assert config.pop("quantization_config") == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    assert config == json.loads(read("wide_bf16/config.json"))
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.bin"):
        assert read(f"wide_fp8/{name}") == read(f"wide_run/latest/{name}")


def test_damaged_files_are_not_exported():
    """Nor saved; and the others are without a byte-order mark."""
    model_folder("beside")
    for name in ("tokenizer.bin", "tokenizer.json", "tokenizer_config.json"):
        write(f"beside/{name}", b"\xef\xbb\xbf" * name.endswith("json") +
              read(f"llama_run/latest/{name}"))
    for name, content in (("generation_config.json", "<html>"), ("tokenizer_config.json", "[]")):
        write(f"beside/{name}", content)
        bad = f"warning: beside/{name}: not JSON in UTF-8 with an object, so it is left out"
        says(export("beside", "beside_out").err, bad)
        says(run("train_gpt", "--load", "beside", "--tokenizer", "beside/tokenizer.bin", *DATA,
                 "--train-iters", 1, "--save", f"beside_{name}").err, bad)
        for folder in ("beside_out", f"beside_{name}/latest"):
            assert not os.path.exists(f"{folder}/{name}"), folder
            assert read(f"{folder}/tokenizer.json") == read("llama_run/latest/tokenizer.json")
    says(export(model_folder("beside"), "bare_out").err, "warning: beside has no tokenizer.json")


def test_what_was_exported_comes_back():
    """Codes times scales are the weights, of --load and of an import; exported again they give the
    same bytes, in one file and in several."""
    for name in ("llama", "qwen2", "qwen3"):
        cap = ("--logit-softcap", 0) if name == "qwen2" else ()
        export(f"{name}_run/latest", "one", "--export-fp8", *cap)
        said = export(f"{name}_run/latest", "parts", "--export-fp8", "--export-shard-gb", 5e-5,
                      *cap)
        index = json.loads(read("parts/model.safetensors.index.json"))
        files = sorted(set(index["weight_map"].values()))
        whole, sizes = unpack("one/model.safetensors"), {}
        assert len(files) > 2 and f"in {len(files)} files" in said.out
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        for file in files:
            held = unpack(f"parts/{file}")
            assert all(index["weight_map"][key] == file for key in held)
            sizes[file] = sum(len(row[2]) for row in held.values())
            assert sizes[file] <= 5e-5 * 1e9 or len(held) == 1, (file, sizes[file])
            assert all(whole.pop(key) == row for key, row in held.items())
        assert not whole and index["metadata"]["total_size"] == sum(sizes.values())
        refused(run("train_gpt", "--load", "parts", *DATA, check=False),
                "scripts/convert_hf import parts --output DIR")
        shutil.rmtree("again_start", ignore_errors=True)
        says(imported("parts", "again_start").out, "BF16, F8_E4M3")
        for folder in ("one", "again_start"):
            export(folder, "again", "--export-fp8")
            for file in ("model.safetensors", "config.json"):
                assert read(f"again/{file}") == read(f"one/{file}"), (name, folder, file)
        held = unpack("one/model.safetensors")
        for key in [key for key in held if key.endswith(SCALES)]:
            scales = numpy.frombuffer(held.pop(key)[2], numpy.float32)
            weight = key.removesuffix(SCALES)
            _, shape, codes = held[weight]
            code = numpy.frombuffer(codes, numpy.uint8).reshape(shape)
            value = e4m3()[code & 127] * numpy.where(code > 127, -1, 1)
            grid = scales.reshape([-(-size // 128) for size in shape])
            value *= numpy.kron(grid, numpy.ones((128, 128)))[:shape[0], :shape[1]]
            held[weight] = "F32", shape, value.astype(numpy.float32).tobytes()
        model_folder("decoded", name, held, final_logit_softcapping="drop")
        want = gradients("fp8.d", "--load", "decoded")
        for folder in ("one", "again_start"):
            assert gradients("fp8.g", "--load", folder) == want, (name, folder)
        assert want != gradients("fp8.h", "--load", f"{name}_run/latest", *cap)


def test_fp8_without_its_scales_is_refused():
    export("llama_run/latest", "one", "--export-fp8")
    held = unpack("one/model.safetensors")
    weight = "model.layers.1.mlp.down_proj.weight"
    _, shape, scales = held[weight + SCALES]
    assert shape == [1, 2]
    for row in (None, ("F32", [2, 1], scales), ("F32", [2], scales), ("I32", [1, 2], scales)):
        changed = {**held, weight + SCALES: row}
        if row is None:
            del changed[weight + SCALES]
        model_folder("m", tensors=changed)
        said = "missing" if row is None else "another"
        refused(run("train_gpt", "--load", "m", *DATA, check=False), "--load m/model.safetensors: ",
                f"tensor '{weight}' is in FP8, and '{weight}{SCALES}' is {said}", "[1, 2]")
    model_folder("m", tensors={**held, "model.norm.weight" + SCALES: ("F32", [1], bytes(4))})
    refused(run("train_gpt", "--load", "m", *DATA, check=False), "model.norm.weight_scale_inv")
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for other in ({"quant_method": "gptq"}, {"weight_block_size": [64, 128]},
                  {"weight_block_size": None}):
        bad(model_folder("m", quantization_config=how | other), "quantization_config", "128 x 128")


def test_models_that_are_not_served_are_refused():
    def export_of(folder, *words):
        return run("train_gpt", "--load", folder, "--export", "no", *words, check=False)

    refused(export_of("qwen2_run/latest"), "--logit-softcap 3", "vLLM, llama.cpp",
            "--logit-softcap 0 exports without it")
    refused(export_of("gpt2_run/latest", "--export-fp8"), "--export-fp8: not for GPT-2",
            "--quantization fp8")
    run("train_gpt", "--model", "llama-tiny", "--kv-channels", 20, *DATA, "--train-iters", 1,
        "--save", "twenty_run")
    refused(export_of("twenty_run/latest"), "heads of 20 channels", "multiples of 8")
    refused(run("train_gpt", "--export", "no", check=False), "--export: give the weights by --load")
    refused(run("train_gpt", "--resume", "llama_run/latest", "--export", "no", check=False),
            "by --load")
    refused(export_of("nowhere"), "--load nowhere: no such folder")
    damaged = bytearray(read("llama_run/latest/model.safetensors"))
    damaged[-1] ^= 1
    shutil.copytree("llama_run/latest", "flipped")
    write("flipped/model.safetensors", bytes(damaged))
    refused(export_of("flipped"), "flipped/model.safetensors: damaged")
    assert not os.path.exists("no")
    export("gpt2_run/latest", "gpt2_bf16")
    turned = "transformer.h.0.attn.c_attn.weight"
    assert unpack("gpt2_bf16/model.safetensors")[turned] == (
        "BF16", [64, 192], bf16(weights_of("gpt2_run/latest")[turned]).tobytes())
    os.makedirs("no")
    refused(export_of("gpt2_run/latest"), "--export no exists already")
    os.rmdir("no")


if __name__ == "__main__":
    prepare()
    main()
