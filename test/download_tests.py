"""Known sets and tokenizers by name, fetched from a local server in place of the Hub and
GitHub: listings by the page, interrupted downloads, damage, pins, refusals, no network at all.
"""

import io
import json
import os
import socket

import numpy
import pyarrow
import pyarrow.parquet
import tokenizers
from check import SHARED, Skip, call, done, main, read, refused, run, write
from hub import COMMITS, Server, serve
from huggingface_hub import constants
from llm8.convert_hf import main as convert_hf
from llm8.prepare_data import main as prepare_data
from shard_tools import byte_documents, manifest, sentences, stream


def parquet_of(texts):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


TRAIN = [sentences(10 + place, 30) for place in range(3)]
VALID = sentences(20, 10)
STORIES = "/datasets/roneneldan/TinyStories/resolve/" + COMMITS["main"] + "/"
TREE = "/api/datasets/roneneldan/TinyStories/tree/" + COMMITS["main"]
INFO = "/api/datasets/roneneldan/TinyStories/revision/main"
SHAKESPEARE = "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def serve_sets():
    for place, texts in enumerate(TRAIN):
        Server.files[f"{STORIES}data/train-0000{place}-of-00003-0abc.parquet"] = parquet_of(texts)
    Server.files[STORIES + "data/validation-00000-of-00001.parquet"] = parquet_of(VALID)
    Server.files[STORIES + "data/readme.md"] = b"x"
    Server.files[STORIES.replace("a" * 40, "b" * 40) + "data/train-0.parquet"] = \
        parquet_of(TRAIN[1])
    return serve()


HOST = serve_sets()


def into(output, *words):
    return (prepare_data, "--output", output, "--tokenizer", "byte", "--jobs", 1, "--mirror", HOST,
            *words)


def encoded(texts):
    return sorted(text.encode() for text in texts)


def test_a_set_comes_whole_over_a_bad_line():
    first = STORIES + "data/train-00000-of-00003-0abc.parquet"
    Server.faults = {first: ["cut", 503], TREE: [500]}
    refused(call(*into("stories", "tinystories", "--downloads", "kept")), "(status 503)")
    done(*into("stories", "tinystories", "--downloads", "kept"))
    assert sorted(byte_documents("stories", "train")) == encoded(sum(TRAIN, []))
    assert sorted(byte_documents("stories", "val")) == encoded(VALID)
    asked = [span for method, path, span, _ in Server.log if path == first and method == "GET"]
    assert any(span and span > "bytes=1" for span in asked), "the rest was not asked for"
    assert not any("readme" in path for method, path, *_ in Server.log), "more than the data"
    first_source = manifest("stories")["settings"]["sources"][0][0]
    assert COMMITS["main"] in first_source, "no revision is recorded"
    count = len(Server.log)
    done(*into("stories2", "tinystories", "--downloads", "kept"))
    fetched = [path for method, path, *_ in Server.log[count:] if method == "GET"]
    assert not [path for path in fetched if ".parquet" in path], fetched
    # and with no network at all
    offline = call(prepare_data, "--output", "stories3", "--tokenizer", "byte", "--jobs", 1,
                   "--mirror", "http://127.0.0.1:9", "--downloads", "kept", "tinystories")
    assert offline.status == 0, offline.err
    assert sorted(byte_documents("stories3", "train")) == encoded(sum(TRAIN, []))


def test_some_files_are_enough():
    done(*into("some", "tinystories", "--download-files", 1, "--downloads", "some_files"))
    assert sorted(byte_documents("some", "train")) == encoded(TRAIN[0])
    assert sorted(byte_documents("some", "val")) == encoded(VALID)


def test_revisions_are_pinned():
    done(*into("pinned", "tinystories@old", "--valid-fraction", 0))
    assert sorted(byte_documents("pinned", "train")) == encoded(TRAIN[1])
    refused(call(*into("x", "tinystories@none")), "TinyStories@none is not shown to you (404)")


def test_tokenizers_come_by_name():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, "a"))
    tokenizer.add_special_tokens(["<eos>"])
    at = "/openai-community/gpt2/resolve/" + COMMITS["old"]
    Server.files[at + "/tokenizer.json"] = tokenizer.to_str().encode()
    Server.files[at + "/tokenizer_config.json"] = b'{"eos_token": "<eos>"}'
    write("a.txt", "a")
    for name in ("gpt2@old", "gpt2@" + COMMITS["old"]):
        done(prepare_data, "--output", f"{name}.out", "--tokenizer", name, "--mirror", HOST,
             "--valid-fraction", 0, "a.txt")
        assert stream(f"{name}.out", "train") == [1, 0]
        assert manifest(f"{name}.out")["settings"]["tokenizer"] == "gpt2"
        assert json.loads(read(f"{name}.out/tokenizer_config.json")) == {
            "eos_token": "<eos>", "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "right", "tokenizer_class": "PreTrainedTokenizerFast"}


def test_damage_is_noticed():
    Server.files[SHAKESPEARE] = b"To be\n"
    refused(call(*into("d2", "tinyshakespeare")), "tinyshakespeare", "arrived damaged")


def test_the_village_needs_no_network():
    def made(output):
        return call(prepare_data, "village", "--output", output, "--tokenizer", "byte", "--jobs", 1,
                    "--mirror", "http://127.0.0.1:9", "--downloads", "kept")

    assert made("made").status == 0
    path = "kept/village/input.txt"
    text = read(path)
    assert 10_000_000 <= len(text) < 10_001_000
    kinds = [bytes(numpy.array(stream("made", kind)[1:], "u1")) for kind in ("train", "val")]
    assert b"".join(kinds) == text and len(kinds[1]) > 900_000
    assert "made already" in made("made").out
    write(path, "damaged")
    refused(made("made"), "already made, from other settings (other sources)")
    assert read(path) == text
    os.environ["LLM8_BIN"] = "nowhere"
    refused(made("none"), "nowhere/make_corpus is not built: run make")
    del os.environ["LLM8_BIN"]


def test_tinyshakespeare_is_what_it_was():
    path = os.path.join(SHARED, "tinyshakespeare.txt")
    if not os.path.exists(path):
        raise Skip("no tinyshakespeare.txt in ../shared/data")
    Server.files[SHAKESPEARE] = read(path)
    done(*into("shakespeare", "tinyshakespeare", "--valid-fraction", 0))
    assert byte_documents("shakespeare", "train") == [read(path)]


def test_refusals_say_what_to_do():
    # a name that is wrong, or has changed: the Hub answers 404, and 401 to those without a token
    refused(call(*into("x", "fineweb")), "fineweb: HuggingFaceFW/fineweb is not shown to you (404)",
            "renamed", "give files")
    Server.faults = {INFO: [401, 401]}
    refused(call(*into("x", "tinystories", "--downloads", "gated")), "not shown to you (401)",
            "renamed", "HF_TOKEN")
    Server.faults = {INFO: ["gated", "gated"]}
    refused(call(*into("x", "tinystories", "--downloads", "gated")), "gated (401)", "HF_TOKEN")
    refused(call(convert_hf, "import", "Qwen/Qwen9", "--output", "x", "--mirror", HOST),
            "Qwen/Qwen9: no such folder here, and on the Hub it is not shown to you (404)",
            "renamed")
    Server.files["/some/one/resolve/" + COMMITS["main"] + "/readme.md"] = b""
    refused(call(convert_hf, "import", "some/one", "--output", "x", "--mirror", HOST),
            "some/one: no config.json", "not a model's")
    refused(call(prepare_data, "--output", "x", "--tokenizer", "llama3", "--mirror", HOST, "."),
            "--tokenizer llama3", "not shown to you (404)")
    refused(call(prepare_data, "--output", "x", "--tokenizer", "byte", "village@old"),
            "village@old: village has no revisions")
    Server.faults = {"/api/models/meta-llama/Meta-Llama-3-8B/revision/main": [403, 403]}
    refused(call(prepare_data, "--output", "x", "--tokenizer", "llama3", "--mirror", HOST, "."),
            "--tokenizer llama3", "gated (403)", "accept its licence", "HF_TOKEN")
    os.environ["HF_TOKEN"] = "secret"
    Server.faults = {INFO: [401, 401]}
    call(*into("x", "tinystories", "--downloads", "gated"))
    del os.environ["HF_TOKEN"]
    assert Server.log[-1][3] == "Bearer secret"
    Server.files["/datasets/DKYoon/SlimPajama-6B/resolve/" + COMMITS["main"] + "/data/x"] = b""
    refused(call(*into("x", "slimpajama")), "slimpajama", "no data files", "DKYoon/SlimPajama-6B")


def test_without_a_network_it_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run("scripts/prepare_data", "--output", "x", "--tokenizer", "byte", "tinystories",
                 "--mirror", f"http://127.0.0.1:{port}", "--downloads", "none", check=False)
    refused(result, "tinystories", "cannot be reached ([Errno 111] Connection refused); this",
            "needs a network, or --mirror", "give their paths")
    assert not os.path.exists("x")


if __name__ == "__main__":
    constants.DOWNLOAD_CHUNK_SIZE = 1000  # as much as a torn line may lose
    main()
