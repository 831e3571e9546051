"""Conversations: what their chat template writes, which tokens count, how they are packed, and what
the trainers make of it.
"""

import csv
import datetime
import glob
import hashlib
import io
import json
import os
import random
import re
import shutil
import struct
import zlib
from collections import Counter
from unittest import mock

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import tokenizers
from chat_cases import AS_OBJECTS, EACH, FOLDERS, NAMED, SPANS, chat_folder, marked
from check import (
    ROOT,
    STANDIN,
    Skip,
    call,
    done,
    fails,
    lines,
    main,
    read,
    records,
    refused,
    run,
    says,
    write,
)
from llm8 import chat, shard_header, shards
from llm8.conversation import ChatTemplate, Conversation, warnings_of
from llm8.convert_hf import main as convert_hf
from llm8.prepare_data import DOCUMENT, pack
from llm8.prepare_data import main as prepare_data
from llm8.rows import read_row
from llm8.vocabulary import open_vocabulary
from safetensors.numpy import load_file
from shard_tools import bits_of, listed_documents, manifest, tokens_of
from tokenizers import models, pre_tokenizers, trainers

PLAIN = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
         "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# the last turn alone has what the model thought, as Qwen3's
THINKS = PLAIN.replace("{{ m.content", "{% if loop.last and m.role == 'assistant' %}<think>\n"
                                       "</think>\n{% endif %}{{ m.content")
RNG = random.Random(5)


def words(least, most):
    return " ".join(RNG.choice(["Anna", "sees", "the", "sea", "é", "no?", "12"])
                    for _ in range(RNG.randrange(least, most)))


def talk(turns, place):
    return [{"role": role, "content": f"{words(1, 9)} {role[0]}{place}.{turn}"}
            for turn in range(turns) for role in ("user", "assistant")]


TALKS = [talk(1 + place % 3, place) for place in range(120)]


def make_tokenizer(folder, template, beside=False):
    """A small tokenizer.json with a chat template."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.train_from_iterator(
        [message["content"] for held in TALKS for message in held], trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    config = {"eos_token": {"content": "<|im_end|>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    if beside:
        write(f"{folder}/chat_template.jinja", template)
    else:
        config["chat_template"] = template
    write(f"{folder}/tokenizer_config.json", json.dumps(config))
    return write(f"{folder}/tokenizer.json", tokenizer.to_str())


def prepared(output, tokenizer, *words):
    return done(prepare_data, "--output", output, "--tokenizer", tokenizer, "--jobs", 1, *words)


def mask_of(path):
    """Whether each token of a shard counts, and the windows' length."""
    return bits_of(path, ".mask", 20261124)


def answers_in(folder, split, tokenizer):
    """The texts of the runs of tokens that count."""
    held, texts = tokenizers.Tokenizer.from_file(tokenizer), []
    held.decoder = tokenizers.decoders.ByteLevel()
    for path in sorted(glob.glob(f"{folder}/{split}_*.bin")):
        run_of = []
        for token, counts in zip(tokens_of(path)[0] + [0], mask_of(path)[0] + [0]):
            if counts:
                run_of.append(token)
            elif run_of:
                texts.append(held.decode(run_of, skip_special_tokens=False))
                run_of = []
    return sorted(texts)


def test_the_answers_count():
    tokenizer = make_tokenizer("plain", PLAIN)
    write("talks.jsonl", lines({"messages": held} for held in TALKS))
    prepared("d", tokenizer, "talks.jsonl", "--seq-length", 96, "--shard-tokens", 1000)
    expected = sorted(message["content"] + "<|im_end|>" for held in TALKS for message in held
                      if message["role"] == "assistant")
    found = sorted(answers_in("d", "train", tokenizer) + answers_in("d", "val", tokenizer))
    assert found == expected, f"{len(found)} answers, not {len(expected)}"
    assert found != expected[1:] and found != [text[:-1] for text in expected]
    held = manifest("d")
    counted = {row["name"]: sum(mask_of("d/" + row["name"])[0]) for row in held["shards"]}
    assert counted == {row["name"]: row["counted"] for row in held["shards"]} and len(counted) > 5
    assert held["documents"] == 120 and held["window"] == 96


def test_a_tokenizers_dropout_cuts_no_conversation_at_random():
    held = json.loads(read(make_tokenizer("drops", PLAIN)))
    held["model"]["dropout"] = 0.5
    write("drops/tokenizer.json", json.dumps(held))
    prepared("d_drops", "drops/tokenizer.json", "talks.jsonl", "--seq-length", 96,
             "--shard-tokens", 1000)
    assert read("d_drops/train_00000.bin") == read("d/train_00000.bin")


def test_the_template_may_lie_beside():
    tokenizer = make_tokenizer("beside", PLAIN, beside=True)
    prepared("e", tokenizer, "talks.jsonl", "--seq-length", 96, "--shard-tokens", 1000)
    for row in manifest("d")["shards"]:
        for ending in ("", ".mask", ".starts"):
            assert read(f"d/{row['name']}{ending}") == read(f"e/{row['name']}{ending}")
    assert read("e/chat_template.jinja") == PLAIN.encode()


def test_what_the_texts_depend_on_is_remembered():
    """A folder of conversations remembers the template and the tokens that it is given; a folder of
    texts remembers neither."""
    words, config = ("--valid-fraction", 0), "again/tokenizer_config.json"
    tokenizer = make_tokenizer("again", PLAIN, beside=True)
    write("again.txt", "a text\n" * 50)
    for source in ("talks.jsonl", "again.txt"):
        prepared("again_" + source, tokenizer, source, *words)
    manifests = {source: read(f"again_{source}/manifest.json") for source in ("talks.jsonl",
                                                                             "again.txt")}
    # as 1.0 wrote it
    assert json.loads(manifests["talks.jsonl"])["settings"]["special_tokens"] == hashlib.sha256(
        b'{"eos_token": "<|im_end|>"}').hexdigest()[:16]
    other = json.dumps(json.loads(read(config)) | {"bos_token": "<|im_start|>"})
    for path, content, key in (("again/chat_template.jinja", THINKS, "chat_template"),
                               (config, other, "special_tokens")):
        before = read(path)
        write(path, content)
        refused(call(prepare_data, "--output", "again_talks.jsonl", "--tokenizer", tokenizer,
                     "talks.jsonl", *words), "already made", f"other {key})")
        assert "made already" in prepared("again_again.txt", tokenizer, "again.txt", *words).out
        write(path, before)
    assert "made already" in prepared("again_talks.jsonl", tokenizer, "talks.jsonl", *words).out
    refused(call(prepare_data, "--output", "again_talks.jsonl", "--tokenizer", tokenizer,
                 "talks.jsonl", *words, "--before", "none"), "--before, --after: of texts")
    for source, made in (("talks.jsonl", True), ("again.txt", False)):
        old = json.loads(manifests[source])
        old["settings"]["before"] = [2]  # texts began with eos_token in older versions
        write(f"again_{source}/manifest.json", json.dumps(old))
        result = call(prepare_data, "--output", f"again_{source}", "--tokenizer", tokenizer, source,
                      *words)
        assert ("made already" in result.out) == made == ("(other before)" not in result.err)
        assert made or "; --before '<|im_end|>' keeps it" in result.err, result.err


def test_documents_do_not_begin_with_the_end_of_a_turn():
    """Beside a chat template whose turns end with eos_token, texts begin with the vocabulary's
    usual end of text, as in the pretraining of the base model."""
    def first_of(output, *words):
        result = prepared(output, tokenizer, "again.txt", "--valid-fraction", 0, *words)
        said = [line for line in result.out.splitlines() if line.startswith("each text ")]
        return tokens_of(f"{output}/train_00000.bin")[0][0], *said

    tokenizer, turn = make_tokenizer("turns", PLAIN), "<|im_end|>"
    write("again.txt", "a text\n" * 50)
    assert first_of("turns_0") == (0, "each text begins with <|endoftext|>; <|im_end|> "
                                      "(eos_token) ends a turn of the chat template")
    assert first_of("turns_1", "--before", turn, "--after", "<|im_start|>") == (
        2, "each text begins with <|im_end|> and ends with <|im_start|>")
    assert first_of("turns_2", "--end-of-text", turn) == (2, "each text begins with <|im_end|>")
    assert first_of("turns_3", "--before", "none")[1:] == ()
    held = json.loads(read("turns/tokenizer_config.json"))
    for place, (template, first) in enumerate((
            ("{{ eos_token }}", 0), ("<|im_start|>{{ messages }}", 2), (None, 2))):
        write("turns/tokenizer_config.json", json.dumps(held | {"chat_template": template}))
        assert first_of(f"turns_t{place}")[0] == first, template

    # the trainer finds the documents, and texts and conversations have the same tokenizer
    make_tokenizer("turns", PLAIN)
    prepared("turns_6", tokenizer, "talks.jsonl", "--seq-length", 96)
    write("named.jsonl", lines([{"text": "a <|endoftext|> b"}] * 3))
    says(prepared("turns_7", tokenizer, "named.jsonl", "--valid-fraction", 0).err,
         "3 of 3 texts: they contain the end-of-text token's name")
    both = ("--model", "llama-tiny", "--seq-length", 96, "--micro-batch-size", 1, "--data",
            "1 turns_0/train_*.bin 1 turns_6/train_*.bin")
    run("train_gpt", *both, "--train-iters", 1, "--save", "turns_run")
    held = json.loads(read("turns_run/latest/config.json"))
    assert (held["bos_token_id"], held["eos_token_id"]) == (0, [2, 0]), held
    run("tokenize", "--output-prefix", "turns_c/x", "--tokenizer", "turns_6/tokenizer.bin",
        "again.txt")
    assert tokens_of("turns_c/x_train.bin")[0][0] == 0
    says(run("train_gpt", *both[:-1], "turns_c/x_train.bin", "--reset-attention-mask",
             "--train-iters", 1).out, "they begin at token 0")


def test_tokens_that_are_none_are_named():
    make_tokenizer("strange", PLAIN.replace("im_start", "header"))
    write("few.jsonl", lines({"messages": held} for held in TALKS[:9]))
    assert "warning: the chat template writes <|header|>, which is no token" in prepared(
        "strange_out", "strange/tokenizer.json", "few.jsonl").err
    for name, template in (("unused", PLAIN), ("used", "{{ pad_token }}" + PLAIN)):
        tokenizer = make_tokenizer(name, template)
        config = json.loads(read(f"{name}/tokenizer_config.json")) | {"pad_token": "<pad>"}
        write(f"{name}/tokenizer_config.json", json.dumps(config))
        warned = "writes <pad>, which" in prepared(f"{name}_out", tokenizer, "few.jsonl").err
        assert warned == (name == "used"), name
    for place, (name, content) in enumerate((
            ("added_tokens.json", {"<call>": 300}), ("tokenizer_config.json", json.loads(read(
                "plain/tokenizer_config.json")) | {"added_tokens_decoder": {"300": {
                    "content": "<call>"}}}))):
        tokenizer = make_tokenizer(f"listed{place}", PLAIN)
        write(f"listed{place}/{name}", json.dumps(content))
        said = prepared(f"listed{place}_out", tokenizer, "few.jsonl").err
        assert "list <call>, which is no token" in said, said


def test_checkpoints_name_the_ends_of_answers():
    """A base model's tokenizer beside a chat template: transformers' generate must stop after
    answers, too. The other settings of the start's generation_config.json stay."""
    tokenizer = make_tokenizer("stops", PLAIN)
    held = json.loads(read("stops/tokenizer_config.json"))
    write("stops/tokenizer_config.json", json.dumps(held | {"eos_token": "<|endoftext|>"}))
    write("few.jsonl", lines({"messages": held} for held in TALKS[:9]))
    prepared("stops_out", tokenizer, "few.jsonl", "--seq-length", 96)
    ends = {"bos_token_id": 0, "eos_token_id": [0, 2]}
    assert json.loads(read("stops_out/generation_config.json")) == ends
    manifest = json.loads(read("stops_out/manifest.json"))
    del manifest["tokenizer_files"] # as version 1.0 left the folder
    write("stops_out/manifest.json", json.dumps(manifest))
    os.remove("stops_out/generation_config.json")
    prepared("stops_out", tokenizer, "few.jsonl", "--seq-length", 96)
    assert json.loads(read("stops_out/generation_config.json")) == ends
    done(prepare_data, "--check", "stops_out")
    trains = ("--seq-length", 96, "--micro-batch-size", 1, "--data", "stops_out/train_*.bin",
              "--train-iters", 1, "--save")
    run("train_gpt", "--model", "llama-tiny", *trains, "stops_run")
    assert json.loads(read("stops_run/latest/generation_config.json")) == ends
    config = json.loads(read("stops_run/latest/config.json"))
    for place, (ids, own, expected) in enumerate((
            (1, None, {"bos_token_id": 0, "pad_token_id": 9, "eos_token_id": [1, 0, 2]}),
            (None, None, ends | {"pad_token_id": 9}),
            (1, {"top_k": 5}, {"top_k": 5, "eos_token_id": [1, 0, 2]}),
            ([2, 0], {"top_k": 5}, {"top_k": 5, "eos_token_id": [2, 0]}),
            (1, {"eos_token_id": 2, "top_k": 5}, {"top_k": 5, "eos_token_id": [2, 0]}),
            (1, {"eos_token_id": [2, 1, 0], "top_k": 5}, None))):
        start = f"stops_{place}"
        write(f"{start}/config.json", json.dumps(
            config | {"eos_token_id": ids, "pad_token_id": 9}))
        shutil.copy("stops_run/latest/model.safetensors", start)
        shutil.copy("stops_out/tokenizer.bin", start)
        if own:
            write(f"{start}/generation_config.json", json.dumps(own))
        given = ("--tokenizer", f"{start}/tokenizer.bin") * (place == 0)
        run("train_gpt", "--load", start, *given, *trains, f"{start}_run")
        said = read(f"{start}_run/latest/generation_config.json")
        assert json.loads(said) == (expected or own), said
        assert expected or said == json.dumps(own).encode(), said
    # a base model has never seen a token that ends answers
    content = bytearray(read("stops_1/model.safetensors"))
    length, = struct.unpack_from("<Q", content)
    row = json.loads(content[8:8 + length])["model.embed_tokens.weight"]
    (begin, end), rows = row["data_offsets"], row["shape"][0]
    width, begin = (end - begin) // rows, begin + 8 + length
    for token, seen in ((1, True), (2, False), (0, False)):
        zeroed = content[:]
        zeroed[begin + token * width:begin + (token + 1) * width] = bytes(width)
        write("stops_1/model.safetensors", bytes(zeroed))
        for words in ([*trains, f"unseen_{token}"], trains[:-1]): # with --save, and without
            said = run("train_gpt", "--load", "stops_1", *words).err
            warning = f"warning: --load stops_1: the embedding of token {token}, which"
            says(said, "!" * seen + warning)
            assert len(said.splitlines()) == (not seen), said
    # a token that only the start's generation_config.json names says nothing of the template, but
    # one that both name does
    write("stops_1/generation_config.json", json.dumps({"eos_token_id": [1, 2]}))
    for token, unseen in ((1, False), (2, True)):
        zeroed = content[:]
        zeroed[begin + token * width:begin + (token + 1) * width] = bytes(width)
        write("stops_1/model.safetensors", bytes(zeroed))
        said = run("train_gpt", "--load", "stops_1", *trains, f"named_{token}").err
        assert ("warning" in said) == unseen, said
    # of the sources of a mixture all, and all that a pattern matches
    template = PLAIN.replace("<|im_end|>", "<|endoftext|>")
    other = make_tokenizer("stops_text", template)
    write("stops_text/tokenizer_config.json", json.dumps(
        held | {"eos_token": "<|endoftext|>", "chat_template": template}))
    prepared("stops_text_out", other, "few.jsonl", "--seq-length", 96)
    assert json.loads(read("stops_text_out/generation_config.json"))["eos_token_id"] == [0]
    for place, data in enumerate(("{stops_text_out,stops_out}/train_*.bin",
                                  "1 stops_text_out/train_*.bin 1 stops_out/train_*.bin")):
        run("train_gpt", "--model", "llama-tiny", *trains, f"stops_all{place}", "--data", data)
        assert json.loads(read(f"stops_all{place}/latest/generation_config.json")) == ends
    # what is no JSON is left out, and its warning names it
    prepared("alone_texts", tokenizer, write("a.txt", "a text\n" * 500))
    write("stops_1/generation_config.json", "<html>")
    write("stops_text_out/generation_config.json", "[]")
    for start, data, bad in (("stops_1", "alone_texts", "stops_1"),
                             ("stops_2", "stops_text_out", "stops_text_out")):
        result = run("train_gpt", "--load", start, *trains, f"{bad}_bad", "--data",
                     f"{data}/train_*.bin")
        assert f"warning: {bad}/generation_config.json: not JSON" in result.err, result.err
    assert not os.path.exists("stops_1_bad/latest/generation_config.json")
    assert json.loads(read("stops_text_out_bad/latest/generation_config.json")) == {"top_k": 5}


def windows_of(folder, split):
    """[window's tokens]."""
    found = []
    for path in sorted(glob.glob(f"{folder}/{split}_*.bin")):
        tokens, (_, window) = tokens_of(path)[0], mask_of(path)
        assert len(tokens) % window == 0
        found += [tokens[at:at + window] for at in range(0, len(tokens), window)]
    return found


def test_none_is_cut_that_fits():
    long = [*talk(1, 900), {"role": "user", "content": words(200, 201)},
            {"role": "assistant", "content": words(150, 151)}]
    write("long.jsonl", lines({"messages": held} for held in [*TALKS, long]))
    tokenizer, note = "plain/tokenizer.json", "are longer than a sequence of "
    said = prepared("long", tokenizer, "long.jsonl", "--seq-length", 128, "--valid-fraction", 0).out
    template = ChatTemplate(open_vocabulary({"tokenizer": "plain/tokenizer.json"}))
    held = [ids for messages in [*TALKS, long]
            for ids, _ in template.samples(Conversation({"messages": messages}))]
    begin = template.tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
    windows = windows_of("long", "train")
    starts, ids = [window[:len(begin)] == begin for window in windows], held[-1]
    assert len(ids) > 3 * 128 and starts.count(False) == sum((len(ids) - 1) // 128 for ids in held)
    assert ids[:128] in windows and ids[128:256] in windows
    lengths = [len(ids) for ids in held]
    cut = sum(length > 128 for length in lengths)
    assert f"note: {cut} of 121 train documents {note}128 tokens and are cut" in said, said
    documents = [ids for path in glob.glob("long/train_*.bin") for ids in listed_documents(path)]
    padding = [ids for ids in documents if ids not in held]
    assert sorted(ids for ids in documents if ids in held) == sorted(held), "not one a conversation"
    end = manifest("long")["end_of_text"]  # it also ends the turns of a conversation
    assert all(set(ids) == {end} and len(ids) < 128 for ids in padding) and padding
    for size, some in ((max(lengths), False), (max(lengths) - 1, True)):
        out = prepared(f"long{size}", tokenizer, "long.jsonl", "--seq-length", size).out
        assert (note in out) == some, out
    both = prepared("long_both", tokenizer, "long.jsonl", "--valid", "long.jsonl", "--seq-length",
                    128).out
    assert f"note: {cut} of 121 train documents and {cut} of 121 val documents {note}" in both, both
    assert sum(row["tokens"] for row in manifest("long")["shards"]) == 128 * len(windows)


def packed_as_it_should(lengths, window, order=None):
    rows = numpy.zeros(len(lengths), DOCUMENT)
    rows["length"], rows["offset"] = lengths, numpy.arange(len(lengths))
    packed = pack(rows, window) if order is None else order(rows)
    assert sorted(packed["offset"]) == list(range(len(lengths))), "not each once"
    at = 0
    for row in packed:
        length = int(row["length"])
        assert at % window + length <= window or (length > window and at % window == 0), "cut"
        at += length + int(row["padding"])
        assert row["padding"] < window
    assert at % window == 0
    return at


def test_packing_keeps_documents_whole():
    for seed in range(30):
        rng = numpy.random.default_rng(seed)
        window = int(rng.integers(2, 40))
        lengths = rng.integers(1, 3 * window if seed % 2 else window + 1, int(rng.integers(1, 80)))
        size = packed_as_it_should(lengths, window)
        assert size <= 2 * lengths.sum() + window
        assert fails(packed_as_it_should, [window - 1] * 9, window, lambda rows: rows)
    # what fills windows exactly leaves nothing
    assert packed_as_it_should([60, 10, 30, 40, 50, 10], 100) == 200


def write_rows(name, rows):
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name, row_group_size=7)
    elif name.endswith(".arrow"):
        table = pyarrow.Table.from_pylist(rows)
        with open(name, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, 7)
    else:
        write(name, lines(rows) if name.endswith(".jsonl") else json.dumps(rows, indent=1))
    return name


def test_files_of_every_kind_have_the_same_rows():
    """prepare_data_tests.py has the forms of a row. A content may be in parts."""
    rows = [{"messages": held, "text": "left out"} for held in TALKS[:20]]
    in_parts = [{"messages": [{**message, "content": [
        {"type": "text", "text": part} for part in (message["content"][:3], message["content"][3:])
    ]} for message in held]} for held in TALKS[:20]]
    made = []
    for name, held in (("rows.jsonl", rows), ("rows.json", rows), ("rows.parquet", rows),
                       ("rows.arrow", rows), ("parts.jsonl", in_parts)):
        prepared(f"of_{name}", "plain/tokenizer.json", write_rows(name, held), "--seq-length", 96)
        made.append([read(path) for path in sorted(glob.glob(f"of_{name}/*.bin*"))])
        assert len(made[-1]) == 7 and made[-1] == made[0], name
    prepared("field", "plain/tokenizer.json", "rows.parquet", "--text-field", "text")
    assert not glob.glob("field/*.mask"), "a text has a mask"


def test_messages_may_be_maps_or_json():
    """As Spark writes messages; and as a .csv holds them."""
    write_rows("rows.jsonl", [{"messages": held} for held in TALKS[:20]])
    kind = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    maps = [[list(message.items()) for message in held] for held in TALKS[:20]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array(maps, kind)}),
                                "maps.parquet")
    with open("json.csv", "w", newline="") as file:
        csv.writer(file).writerows([["messages"], *([json.dumps(held)] for held in TALKS[:20])])
    for name in ("rows.jsonl", "maps.parquet", "json.csv"):
        prepared(f"as_{name}", "plain/tokenizer.json", name, "--valid-fraction", 0)
        assert read(f"as_{name}/train_00000.bin") == read("as_rows.jsonl/train_00000.bin"), name
    twice = pyarrow.array([[[("role", "user"), ("role", "user")]]], kind)
    pyarrow.parquet.write_table(pyarrow.table({"messages": twice}), "twice.parquet")
    refused(call(prepare_data, "--output", "twice", "--tokenizer", "plain/tokenizer.json",
                 "--jobs", 1, "twice.parquet"), "twice.parquet, row 0: ", "duplicate")


def template(source):
    make_tokenizer("other", source)
    return ChatTemplate(open_vocabulary({"tokenizer": "other/tokenizer.json"}))


def test_answers_in_a_prompt_do_not_count():
    held = talk(3, 1)
    row = Conversation({"prompt": held[:-1], "completion": held[-1:]})
    (text, turns), = template(PLAIN).texts(row)
    assert [text[slice(*turn)] for turn in turns] == [held[-1]["content"] + "<|im_end|>"]


def test_earlier_turns_may_change():
    held = Conversation({"messages": talk(3, 1)})
    assert len(template(PLAIN).texts(held)) == 1
    texts = template(THINKS).texts(held)
    assert [text.count("<think>") for text, _ in texts] == [1, 1, 1]
    for text, turns in texts:
        assert len(turns) == 1 and text[slice(*turns[0])].startswith("<think>")
    write("three.jsonl", lines([{"messages": talk(3, 1)}] * 9 + [{"messages": talk(2, 2)}] * 9))
    prepared("three", "other/tokenizer.json", "three.jsonl")
    assert manifest("three")["documents"] == 9 * 3 + 9 * 2
    splits = [set(answers_in("three", split, "other/tokenizer.json")) for split in ("train", "val")]
    assert splits[0] and splits[1] and not splits[0] & splits[1], "one is on both sides"


def test_spaces_that_end_a_prompt_are_the_answers():
    """Tokenizers join them to the word behind them; the model is asked without them."""
    spaced = template("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:  {% else %}"
                      "{{ m.content }}<|im_end|>{% endif %}{% endfor %}")
    row = Conversation(read_row({"prompt": "the", "completion": "Anna sees"}, "", Counter()))
    [(ids, which)] = spaced.samples(row)
    counted = [spaced.tokenizer.id_to_token(token) for token, yes in zip(ids, which) if yes]
    assert "".join(counted) == "ĠĠAnnaĠsees<|im_end|>", counted
    asked, _ = spaced.prompt(Conversation({"messages": row.messages[:1]}))
    assert asked == ids[:which.index(True)], "the model is asked at another place"


def test_what_templates_use_is_there():
    uses = template("{{ eos_token }}{% generation %}a{% endgeneration %}{{ messages | tojson }}"
                    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
                    "{{ m.content }}{% endfor %}{{ tools is none }}")
    row = Conversation({"messages": [{"role": "user", "content": "<é>"}]})
    text, marks = uses.render(row, row.messages, False)
    assert marks == [(10, 11)], marks
    assert text == '<|im_end|>a[{"role": "user", "content": "<é>"}]<é>True', text


def opened(path):
    return ChatTemplate(open_vocabulary({"tokenizer": path}))


def test_what_counts_is_what_the_model_writes():
    """SPANS: for each way in which templates differ the texts, what counts of them, and what is
    warned of."""
    for name, source, row, texts, doubts in SPANS:
        used = opened(chat_folder("small", {
            "chat_template.jinja": source, "tokenizer_config.json": json.dumps(NAMED)}))
        found = [marked(*held) for held in used.texts(Conversation(row))]
        assert found == texts, f"{name}: {found} is not {texts}"
        seen = {key for key in used.doubts if key not in ("answers", "conversations")}
        assert seen == ({doubts} if doubts.startswith("field") else set(doubts.split())), \
            f"{name}: {seen}"
        assert len(list(warnings_of(used.doubts))) == len(seen), name


WRITES = EACH + "{{ m.content }}{{ eos_token }}{% endfor %}"
NAMELESS = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"


def test_special_tokens_are_transformers():
    """FOLDERS: whatever file names them; what is prepared, or imported, says it all in its
    tokenizer_config.json."""
    write("hi.jsonl", lines([{"prompt": "Hi", "completion": "A"}]))
    for place, (specials, files, names) in enumerate(FOLDERS):
        path = chat_folder("named", files | {"chat_template.jinja": WRITES}, specials)
        held = open_vocabulary({"tokenizer": path}).named_specials()
        assert {key: text for key, text in held.items() if text} == names, (place, held)
        if "eos_token" in names:
            prepared(f"named{place}", path, "hi.jsonl", "--valid-fraction", 0)
            again = open_vocabulary({"tokenizer": f"named{place}/tokenizer.json"})
            assert again.named_specials() == held, place
            assert answers_in(f"named{place}", "train", path) == ["A" + names["eos_token"]], place
        elif "eos_token" not in held:
            refused(call(prepare_data, "--output", "nameless", "--tokenizer", path, "hi.jsonl",
                         "--jobs", 1, "--skip-bad"), "eos_token, which nobody defines",
                    "tokenizer_config.json")
    for config, fine in (({}, False), ({"bos_token": None}, True)):
        path = chat_folder("null", {"tokenizer_config.json": json.dumps(
            {"eos_token": "</s>"} | config), "chat_template.jinja": NAMELESS})
        result = call(prepare_data, "--output", f"null{fine}", "--tokenizer", path, "hi.jsonl",
                      "--jobs", 1)
        assert fine == (result.status == 0) != ("bos_token, which nobody" in result.err), result.err


def of_others(checkpoint):
    """A copy of a checkpoint as another program's model, which has no meta.json."""
    shutil.rmtree("others", ignore_errors=True)
    shutil.copytree(checkpoint, "others")
    os.remove("others/meta.json")
    return "others"


def test_templates_have_names():
    """With tools the one named tool_use is taken, as by transformers, from tokenizer_config.json or
    from files; it goes along into what is prepared, imported and saved."""
    tools = "TOOLS {% for tool in tools %}{{ tool | tojson }}{% endfor %}" + AS_OBJECTS
    named = [{"name": "default", "template": AS_OBJECTS}, {"name": "tool_use", "template": tools}]
    without = {"messages": [{"role": "user", "content": "Hi"},
                            {"role": "assistant", "content": "A"}]}
    row = without | {"tools": [{"name": "clock"}]}
    write("tools.jsonl", lines([row, without]))
    for place, files in enumerate((
            {"tokenizer_config.json": json.dumps(NAMED | {"chat_template": named})},
            {"additional_chat_templates/tool_use.jinja": tools, "chat_template.jinja": AS_OBJECTS,
             "tokenizer_config.json": json.dumps(NAMED | {"chat_template": "old"})})):
        result = prepared(f"by_name{place}", chat_folder("by_name", files), "tools.jsonl",
                          "--seq-length", 96, "--valid-fraction", 0)
        assert not result.err, result.err
        run("train_gpt", *TINY[:2], "--data", f"by_name{place}/train_*.bin", "--seq-length", 96,
            "--train-iters", 1, "--micro-batch-size", 1, "--save", f"by_name{place}_run")
        call(convert_hf, "import", of_others(f"by_name{place}_run/latest"), "--output",
             f"by_name{place}_start")
        for folder in ("by_name", f"by_name{place}", f"by_name{place}_run/latest",
                       f"by_name{place}_start"):
            used = opened(f"{folder}/tokenizer.json")
            for given, has in ((row, True), (row | {"tools": []}, True), (without, False)):
                [(text, _)] = used.texts(Conversation(given))
                assert text.startswith("TOOLS ") == has, (folder, text)
    chat_folder("by_name", {"additional_chat_templates/rag.jinja": AS_OBJECTS} |
                {"tokenizer_config.json": json.dumps(NAMED)})
    refused(call(prepare_data, "--output", "no_default", "--tokenizer", "by_name/tokenizer.json",
                 "tools.jsonl", "--jobs", 1), "no chat template named default, only rag")


def test_what_is_lost_is_told():
    """With how many answers lose what; the manifest keeps it."""
    path = make_tokenizer("loses", PLAIN)
    asks = {"role": "user", "content": "Hi"}
    write("loses.jsonl", lines([{"prompt": "Hi", "completion": "A"}, {"messages": [
        asks, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [CALL]}]))
    for jobs in (1, 2):
        result = call(prepare_data, "--output", f"loses{jobs}", "--tokenizer", path, "loses.jsonl",
                      "--valid", "talks.jsonl", "--jobs", jobs)
        said = [line for line in result.err.splitlines() if line.startswith("warning: ")]
        assert result.status == 0 and len(said) == 2, result.err
        assert "warning: 1 of 242 answers: " in said[0] and "tool calls" in said[0], said
        assert "warning: 1 of 122 conversations: " in said[1] and "tools" in said[1], said
        assert [f"warning: {text}" for text in manifest(f"loses{jobs}")["warnings"]] == said
    for marks, part in ((["0"], "'weight' of a message is '0'"), ([0.5], "it must be 0 or 1"),
                        ([0, 0], "no message of the assistant's that answers one counts")):
        write("marks.jsonl", lines([{"messages": [message for mark in marks for message in (
            asks, {"role": "assistant", "content": "A", "weight": mark})]}]))
        refused(call(prepare_data, "--output", "marks", "--tokenizer", path, "marks.jsonl",
                     "--jobs", 1), "marks.jsonl, line 1", part)
    weighted = [{"prompt": "Hi", "response": "A", "weight": weight} for weight in (0, 1, 0.5)]
    write("marks.jsonl", lines(weighted))
    refused(call(prepare_data, "--output", "marks", "--tokenizer", path, "marks.jsonl",
                 "--jobs", 1), "marks.jsonl, line 3", "'weight' of the row is '0.5'; it must be 0")
    write("marks.jsonl", lines(weighted[:2]))
    result = call(prepare_data, "--output", "weighted", "--tokenizer", path, "marks.jsonl",
                  "--jobs", 1)
    assert "warning: 1 of 2 conversations: their rows have a weight of 0" in result.err, result.err
    assert manifest("weighted")["documents"] == 1
    write("marks.jsonl", lines(weighted[:1]))
    refused(call(prepare_data, "--output", "none", "--tokenizer", path, "marks.jsonl", "--jobs", 1),
            "no text at all: 1 have a weight of 0")
    write("marks.jsonl", lines([{"prompt": "\ufdd2", "completion": "A"}]))
    refused(call(prepare_data, "--output", "marks", "--tokenizer", path, "marks.jsonl",
                 "--jobs", 1), "marks.jsonl, line 1", "no characters")


NO_ROLES, NO_TEXT = "no list of objects with a role", "the content of a message is no text"
NO_ANSWER, PAIR = "no message of the assistant's that answers one", {"prompt": "x",
                                                                     "completion": "y"}
BAD_ROWS = (  # what the second line is, and what the error says
    ({"messages": "no"}, NO_ROLES), ({"messages": [{"content": "x"}]}, NO_ROLES),
    ({"messages": None}, NO_ROLES), ({"messages": TALKS[0][:1]}, NO_ANSWER),
    ({"messages": TALKS[0][1:]}, NO_ANSWER), ({"messages": []}, NO_ANSWER + " (roles: none)"),
    ({"messages": [{"role": role, "content": "x"} for role in ("human", "gpt", "human")]},
     NO_ANSWER + " (roles: human, gpt)"),
    *((row, NO_TEXT) for content in (None, True, 5, [1], [{"type": "image", "image": "x"}],
                                     {"text": "x"})
      for row in ({"messages": [TALKS[0][0], {"role": "assistant", "content": content}]},
                  {"prompt": "x", "completion": content})),
    *((PAIR | {"tools": tools}, "its tools are no ")
      for tools in ("no JSON", "5", 5, {"name": "x"}, "[" * 9000)))
REFUSES = PLAIN.replace("{% for", "{% if messages[0].content == 'x' %}"
                                  "{{ raise_exception('no x\n here') }}{% endif %}{% for", 1)
BAD_TEMPLATES = (  # the line, and what the error says
    (REFUSES, "line 2", "the chat template refuses it: no x here"),
    ("{% if add_generation_prompt %}a{% else %}b{% endif %}", "line 1",
     "does not write an answer after"),
    *((source, "line 1", "the chat template refuses it: ") for source in (
        "{{ 1 // 0 }}", "{{ 'x' * (2 ** 80) }}", "{{ range(10 ** 9) }}", "{{ 1 + 'x' }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}")),
    ("{{ strftime_now('%d') }}", "line 1", "(strftime_now)", "write a date into the template"),
    ("{% if false %}x{% endif %}", "line 1", "the chat template writes nothing"))


def test_bad_rows_are_refused():
    def bad(name, *parts, tokenizer="plain/tokenizer.json", words=()):
        refused(call(prepare_data, "--output", "bad", "--tokenizer", tokenizer, "--jobs", 1, name,
                     *words), *parts)

    for row, said in BAD_ROWS:
        write("bad.jsonl", lines([{"messages": TALKS[0]}, row]))
        bad("bad.jsonl", "bad.jsonl, line 2", said, "--skip-bad")
    write("bad.jsonl", lines([{"messages": TALKS[0]}, {"text": "a text"}]))
    bad("bad.jsonl", "the sources hold texts (bad.jsonl) and conversations (bad.jsonl)")
    for depth in range(300, 1000, 100):  # what json reads, but may not write
        deep = "[" * depth + "]" * depth
        write("deep.jsonl", f'{{"prompt": "x", "completion": "y", "tools": {deep}}}\n' +
              lines([{"messages": TALKS[0]}]))
        prepared(f"deep{depth}", "plain/tokenizer.json", "deep.jsonl", "--skip-bad")
    write("bad.jsonl", lines([{"messages": TALKS[0]}, PAIR]))
    for source, *parts in BAD_TEMPLATES:
        bad("bad.jsonl", *parts, tokenizer=make_tokenizer("faulty", source))
    bad("bad.jsonl", "no text at all: 2 were left out", "the first: bad.jsonl, line 1: ",
        tokenizer="faulty/tokenizer.json", words=("--skip-bad",))
    for name, source, part in (("none", "", "the tokenizer none has no chat template"),
                               ("broken", "{% for %}", "the chat template of broken")):
        make_tokenizer(name, source)
        for words in ((), ("--skip-bad",)):  # the fault of no row
            result = call(prepare_data, "--output", "bad", "--tokenizer", f"{name}/tokenizer.json",
                          "bad.jsonl", "--jobs", 2, *words)
            refused(result, part)
            assert "bad.jsonl" not in result.err and "--skip-bad" not in result.err, result.err
    write("bad.jsonl", lines([{"messages": TALKS[0]}, {"messages": 3}, {"messages": TALKS[1]}]))
    prepared("left", "plain/tokenizer.json", "bad.jsonl", "--skip-bad")
    assert manifest("left")["skipped"] == 1 and manifest("left")["documents"] == 2
    write("a.txt", "text\n" * 50)
    for name, words, said in (
            ("a.txt", ("--seq-length", 64), "--seq-length: of conversations"),
            ("talks.jsonl", ("--before", "none"), "--before, --after: of texts"),
            ("talks.jsonl", ("--after", "<|im_end|>"), "--before, --after: of texts")):
        bad(name, said, words=words)


CALLS = ("{% for t in tools or [] %}[{{ t.name }}]{% endfor %}" + PLAIN).replace(
    "{{ m.content | trim }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}"
    "{% endfor %}")
CALL = {"name": "look", "arguments": {"at": "x"}}


def texts_of(rows, name="rows.parquet"):
    """What the template CALLS makes of rows of a file, and the manifest."""
    write_rows(name, rows)
    make_tokenizer("calls", CALLS)
    output = f"of_{name}_{len(glob.glob(f'of_{name}_*'))}"
    prepared(output, "calls/tokenizer.json", name, "--valid-fraction", 0, "--no-shuffle",
             "--seq-length", 512)
    held, end = tokenizers.Tokenizer.from_file("calls/tokenizer.json"), "<|im_end|>\n"
    held.decoder = tokenizers.decoders.ByteLevel()
    text = held.decode(tokens_of(f"{output}/train_00000.bin")[0], skip_special_tokens=False)
    return text[:text.rindex(end)] + end


def test_calls_of_tools_are_written_as_they_are():
    """Tools may be JSON; nothing that a row lacks is written, as a column of structs has it."""
    asks = [{"role": "user", "content": "a"}]
    calls = {"messages": [*asks, {"role": "assistant", "tool_calls": [CALL]}],
             "tools": json.dumps([{"name": "look"}])}
    other = {"messages": [*asks, {"role": "assistant", "content": "b", "tool_calls": [
        {"name": "go", "arguments": {"to": "y"}}]}], "tools": None}
    start = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    first = f"[look]{start}{json.dumps(CALL)}<|im_end|>\n"
    for rows in ([calls], [calls, other]):  # in the second, arguments have null in a column
        assert texts_of(rows).startswith(first), texts_of(rows)
    assert texts_of([calls], "rows.jsonl") == first
    calls["tools"] = [{"name": "look"}]
    assert texts_of([calls], "rows.jsonl") == first
    empty = [*asks, {"role": "assistant", "content": "c", "tool_calls": [
        {"name": "go", "arguments": {"to": None}}], "more": None}]
    assert '"arguments": {"to": null}' in texts_of([{"messages": empty}], "rows.jsonl")


def test_odd_rows_are_one_fault_each():
    """What is not UTF-8 in a batch of rows; what is no JSON; surrogates, which have no bytes."""
    good = [{"prompt": held[0]["content"], "completion": held[1]["content"]} for held in TALKS]
    good[3]["completion"] = "~badbad~"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(good), "odd.parquet", compression="none",
                                use_dictionary=False)
    write("odd.parquet", read("odd.parquet").replace(b"~badbad~", b"~\xffadbad~"))
    prepared("odd", "plain/tokenizer.json", "odd.parquet", "--skip-bad")
    held = manifest("odd")
    assert (held["documents"], held["skipped"]) == (119, 1), held
    assert "row 3: " in held["first_skipped"][0]
    write("lone.jsonl", lines([{"prompt": "\ud800", "completion": "x\udfffy"}] * 2))
    says(prepared("lone", "plain/tokenizer.json", "lone.jsonl", "--valid-fraction", 0).err,
         "2 of 2 conversations: they have halves of surrogate pairs")
    assert answers_in("lone", "train", "plain/tokenizer.json") == ["x?y<|im_end|>"] * 2
    write("lone_texts.jsonl", lines([{"text": "x\udfffy"}]))
    for tokenizer in ("plain/tokenizer.json", "byte"):
        says(prepared(f"lone_{tokenizer[:4]}", tokenizer, "lone_texts.jsonl", "--valid-fraction",
                      0).err, "1 of 1 texts: they have halves of surrogate pairs")
    assert tokens_of("lone_byte/train_00000.bin")[0] == [256, *b"x?y"]
    when = [{"role": role, "content": "a", "at": datetime.datetime(2020, 1, 2), "raw": b"\xff"}
            for role in ("user", "assistant")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": when}]), "when.parquet")
    prepared("when", "plain/tokenizer.json", "when.parquet", "--valid-fraction", 0)
    assert manifest("when")["documents"] == 1
    make_tokenizer("dumps", PLAIN.replace("{{ m.content", "{{ m | tojson }}{{ m.content"))
    refused(call(prepare_data, "--output", "dumps_out", "--tokenizer", "dumps/tokenizer.json",
                 "--jobs", 1, "when.parquet"), "when.parquet", "row 0", "not JSON serializable")


def test_one_conversation_is_on_one_side():
    """Where its answers make texts of their own; one longer than the share is trained on."""
    rows = [{"messages": talk(12, place)} for place in range(12)]
    write("each.jsonl", lines([*rows, *[{"messages": talk(1, place)} for place in range(20, 60)]]))
    make_tokenizer("each", THINKS)
    for seed in range(6):
        prepared(f"each{seed}", "each/tokenizer.json", "each.jsonl", "--seed", seed,
                 "--valid-fraction", 0.008)
        train, valid = (set(re.findall(r"a(\d+)\.\d+<", " ".join(answers_in(
            f"each{seed}", split, "each/tokenizer.json")))) for split in ("train", "val"))
        assert train and valid and not train & valid, (train, valid)


def test_a_mask_that_is_missing_is_noticed():
    path = "d/train_00000.bin.mask"
    content = read(path)
    os.remove(path)
    refused(call(prepare_data, "--check", "d"), f"{path}: missing")
    write(path, content)
    assert "shards as the manifest says" in call(prepare_data, "--check", "d").out


TINY = ("--model", "llama-tiny", "--vocab-size", 300, "--seq-length", 96, "--global-batch-size", 4,
        "--lr", 1e-3, "--seed", 3)
DATA = ("--data", "d/train_*.bin", "--valid-data", "d/val_*.bin")


def steps_of(name, *words):
    """The steps' records of a run."""
    run("train_gpt", *TINY, *DATA, "--train-iters", 6, "--metrics", name, *words)
    return records(name, "step")


def test_the_trainer_reads_the_masks():
    result = run("train_gpt", *TINY, *DATA, "--train-iters", 6, "--micro-batch-size", 2,
                 "--eval-interval", 3, "--metrics", "m.jsonl", "--save", "saved")
    counted = {split: sum(row["counted"] for row in manifest("d")["shards"]
                          if row["name"].startswith(split)) for split in ("train", "val")}
    assert f", {counted['train']:,} of them counted, " in result.out, result.out
    assert f", {counted['val']:,} of them counted, " in result.out
    assert result.err == "warning: the weights are random: no checkpoint is loaded (--load, " \
        "--resume); --data with masks is for fine-tuning\n", result.err
    said = run("train_gpt", *TINY, *DATA, "--train-iters", 1, "--load", "saved/latest").err
    assert not said, said
    assert records("m.jsonl", "run")[0]["data_targets"] == counted["train"]
    one = records("m.jsonl", "step")
    assert all(0 < row["targets"] < 4 * 96 for row in one)
    assert len({row["targets"] for row in one}) > 1, "steps with as many targets show little"
    result = run("train_gpt", *TINY[:-6], "--seq-length", 50, *DATA, "--train-iters", 1,
                 "--micro-batch-size", 2)
    packed = "documents were packed into sequences of 96 tokens"
    for option in ("--data", "--valid-data"):
        assert f"warning: {option}: {packed}; --seq-length 50 cuts some" in result.err, result.err
    evaluates = ("train_gpt", "--load", "saved/latest", "--eval-only", "--valid-data")
    assert f"{packed}; --seq-length 48 cuts" in run(*evaluates, DATA[3], "--seq-length", 48).err
    # a shard of texts that sorts before them ends anywhere
    os.makedirs("both")
    for path in glob.glob("d/val_*"):
        write(f"both/{os.path.basename(path)}", read(path))
    write("both/a.bin", shard_header.header(2, 50) + bytes(100))
    result = run(*evaluates, "both/*.bin")
    assert f"{packed}; --seq-length 96, after a shard that ends within" in result.err, result.err
    os.rename("both/a.bin", "both/z.bin")
    assert not run(*evaluates, "both/*.bin").err


def test_dumped_gradients_are_of_the_mean():
    """Of both trainers: their norm is the step's."""
    [step] = steps_of("norm.jsonl", "--micro-batch-size", 2)[:1]
    words = (*TINY, *DATA, "--micro-batch-size", 2, "--train-iters", 6, "--dump-gradients")
    for program, near in (("train_gpt", 1e-5), (STANDIN, 0.05)):
        if not os.path.exists(os.path.join(ROOT, program)):
            continue  # there is no C++ compiler
        run(program, *words, "g.safetensors", *["--no-cuda-graphs"] * (program == STANDIN))
        held = load_file("g.safetensors")
        assert abs(held.pop("loss").item() - step["loss"]) < near * step["loss"]
        norm = sum(float((part.astype(float) ** 2).sum()) for part in held.values()) ** 0.5
        assert abs(norm - step["norm"]) < near * step["norm"], (program, norm, step)
    assert step["targets"] < 0.7 * 4 * 96, "without the targets' share the norm is hardly another"


def test_other_masks_are_other_data():
    """A resume refuses data whose masks have changed."""
    saved = ("train_gpt", *TINY, *DATA, "--micro-batch-size", 2, "--save", "saved", "--resume",
             "latest", "--train-iters", 8)
    path = sorted(glob.glob("d/train_*.bin"))[0]
    content, (bits, window) = read(path + ".mask"), mask_of(path)
    bits[bits.index(1)] = 0
    write(path + ".mask", b"".join(shards.bits(".mask", numpy.array(bits, bool),
                                               shards.checksum(path), window)))
    refused(run(*saved, check=False), "not the shard that the checkpoint's run read")
    os.remove(path + ".mask")
    for words in (saved, (*saved[:-6], "--train-iters", 1)):  # resumed, and a new run
        refused(run(*words, check=False), f"{path}.mask: missing")
    write(path + ".mask", content)
    run(*saved)


APART = "  documents   attention and positions begin anew at each\n"
TOGETHER = "  documents   not kept apart in a sequence"


def test_conversations_are_apart():
    """Where the data say where they begin; not in a run that began before they did."""
    words = ("train_gpt", *TINY, "--micro-batch-size", 2, "--eval-interval", 3)
    assert APART in run(*words, *DATA, "--train-iters", 1).out
    texts = prepared("apart_texts", "plain/tokenizer.json", write("texts.txt", "a text\n" * 500))
    assert TOGETHER + "\n" in run(*words, "--data", "apart_texts/train_*.bin", *DATA[2:],
                                  "--train-iters", 1).out, texts
    shutil.copytree("d", "old_d")
    for path in glob.glob("old_d/*_*.bin"):
        held, (counts, window) = bytearray(read(path)), mask_of(path)
        held[24:28] = bytes(4)
        write(path, bytes(held))
        write(path + ".mask", b"".join(shards.bits(
            ".mask", numpy.array(counts, bool), shards.checksum(path), window, PLAIN)))
        os.remove(path + ".starts")
    old = (*words, "--data", "old_d/train_*.bin", "--valid-data", "old_d/val_*.bin")
    said = run(*old, "--train-iters", 6, "--save", "straight").out
    assert TOGETHER + "; conversations that are prepared again are\n" in said, said
    result = run(*old, "--train-iters", 6, "--reset-attention-mask", "--reset-position-ids",
                 "--metrics", "one_each.jsonl")
    assert "begin, so each is one: prepare the data again" in result.err, result.err
    assert "without SHARD.starts" not in result.out  # that token also ends their turns

    def losses(path):
        return [row["loss"] for row in records(path, "step")]

    assert losses("one_each.jsonl") == losses("straight/metrics.jsonl"), "a window is one document"
    run(*words, *DATA, "--train-iters", 6, "--no-reset-attention-mask", "--no-reset-position-ids",
        "--save", "before", "--save-interval", 3)
    for step in (3, 6):
        path = f"before/step_0000000{step}/meta.json"
        lines_of_it = [line for line in read(path).decode().splitlines(True)
                       if not re.match(r'\s*"(reset-|eod-mask)', line)]
        text = "".join(lines_of_it).encode()
        assert text.count(b"reset-") == 2  # in the list of what was given
        text = re.sub(rb', *"reset-[a-z-]*"|"reset-[a-z-]*", *', b"", text)
        blank = text[:-11] + b'00000000"\n}'
        write(path, text[:-11] + b"%08x" % zlib.crc32(blank) + b'"\n}')
    said = run(*words, *DATA, "--train-iters", 6, "--save", "after", "--resume",
               "before/step_00000003").out
    assert TOGETHER in said and "--reset-attention-mask is false, was not set" in said, said
    assert losses("after/metrics.jsonl") == losses("before/metrics.jsonl")[3:]
    valid = records("before/metrics.jsonl", "eval")[-1]["valid_loss"]
    for option in ("--load", "--resume"):
        said = run("train_gpt", option, "before/step_00000006", "--eval-only").out
        assert abs(float(re.search("valid loss ([0-9.]+)", said)[1]) - valid) < 1e-4, said


def test_checkpoints_carry_the_template():
    """A checkpoint has the template of the data, which wrote them, whatever a start or another
    folder says; for texts, the template of the start."""
    def saved(name, data, *words):
        run("train_gpt", *words, "--data", data, "--train-iters", 1, "--micro-batch-size", 2,
            "--global-batch-size", 2, "--seq-length", 96, "--save", name)
        return read(f"{name}/latest/chat_template.jinja")

    start = ("--load", "carried")
    assert saved("carries", "e/train_*.bin", *TINY[:4]) == PLAIN.encode()
    call(convert_hf, "import", of_others("carries/latest"), "--output", "carried")
    os.rename("e", "elsewhere")
    assert saved("again", "elsewhere/train_*.bin", *start) == PLAIN.encode()
    os.rename("elsewhere", "e")
    prepared("texts", "plain/tokenizer.json", write("texts.txt", "a text\n" * 500))
    shutil.copytree("texts", "before_e")
    for folder in ("carried", "before_e"):
        write(f"{folder}/chat_template.jinja", THINKS)
    for place, (data, words, template) in enumerate((
            ("e/train_*.bin", start, PLAIN), ("texts/train_*.bin", start, THINKS),
            ("{texts,e}/train_*.bin", start, PLAIN),
            ("{before_e,e}/train_*.bin", TINY[:4], PLAIN))):
        assert saved(f"kept{place}", data, *words) == template.encode(), data
    os.rename("e/tokenizer.json", "aside.json")
    saved("lacking", "e/train_*.bin", *start)
    assert read("lacking/latest/tokenizer.json") == read("carried/tokenizer.json")
    os.rename("aside.json", "e/tokenizer.json")
    os.remove("carried/chat_template.jinja")  # a base model has none
    assert saved("based", "e/train_*.bin", *start) == PLAIN.encode()


def test_two_templates_are_noticed():
    """The run has one; data that do not say, and texts, have none."""
    prepared("thinks_d", make_tokenizer("thinks", THINKS), "talks.jsonl", "--seq-length", 96)
    shutil.copytree("d", "silent_d")
    for path in glob.glob("silent_d/*.mask"):
        content = read(path)
        # a shard made before masks were noted in headers
        write(path, content[:28] + bytes(4) + content[32:])
    words = ("train_gpt", *TINY[:4], "--seq-length", 96, "--train-iters", 1, "--micro-batch-size",
             2, "--eval-interval", 1)
    for option, others in (("data", ("--data", "{d,thinks_d}/train_*.bin")),
                           ("valid-data", ("--data", "d/train_*.bin", "--valid-data",
                                           "{d,thinks_d}/val_*.bin"))):
        said = run(*words, *others).err
        assert f"warning: --{option}: thinks_d/" in said and said.count("chat template") == 1, said
    for folders in ("{d,e}", "{silent_d,thinks_d}", "{texts,d}"):
        assert "chat template" not in run(*words, "--data", folders + "/train_*.bin").err, folders


GOLDEN = os.path.join(ROOT, "test", "golden", "chat")


def test_templates_write_what_transformers_says():
    """test/golden.py: its ids, and what {% generation %} marks."""
    with open(os.path.join(ROOT, "scripts", "chat.jsonl")) as file:
        rows = [Conversation(read_row(json.loads(line), "", Counter())) for line in file]
    vocabulary = open_vocabulary({"tokenizer": os.path.join(GOLDEN, "tokenizer.json")})
    for name, held in json.loads(read(f"{GOLDEN}/templates.json")).items():
        vocabulary.templates = {"default": held["template"]}
        template = ChatTemplate(vocabulary)
        for row, ids, counts in zip(rows, held["ids"], held["counts"], strict=True):
            [(ours, which)] = template.samples(row)
            assert ours == ids, f"{name}: {ours} is not {ids}"
            assert which == list(map(bool, counts)), f"{name}: {which} is not {counts}"
            assert 3 < sum(counts) < len(counts) - 3
    prepared("golden", f"{GOLDEN}/tokenizer.json", os.path.join(ROOT, "scripts", "chat.jsonl"),
             "--seq-length", 128, "--valid-fraction", 0.2)
    for name in ("train_00000.bin", "val_00000.bin"):
        for ending in ("", ".mask", ".starts"):
            assert read(f"golden/{name}{ending}") == read(f"{GOLDEN}/data/{name}{ending}"), name


def off_from_pytorch(expected, name, data, *words):
    """How far the losses of a fine-tuning are from PyTorch's at most."""
    run("train_gpt", "--load", GOLDEN, "--data", f"{data}/train_*.bin", "--valid-data",
        f"{data}/val_*.bin", "--seq-length", expected["seq_length"], "--global-batch-size",
        expected["global_batch_size"], "--lr", expected["lr"], "--no-shuffle", "--weight-decay", 0,
        "--lr-decay-style", "constant", "--lr-warmup-iters", 0, "--adam-beta2", 0.95,
        "--clip-grad", 1, "--eval-interval", 20, "--train-iters", 20,
        "--metrics", name, *words)
    steps, [valid] = records(name, "step"), records(name, "eval")
    expected = expected["together" if "--no-reset-attention-mask" in words else "apart"]
    assert len(steps) == len(expected["losses"])
    if "targets" in steps[0]:
        assert [row["targets"] for row in steps] == expected["targets"]
    return max(abs(a - b) for a, b in zip(
        [row["loss"] for row in steps] + [valid["valid_loss"]],
        expected["losses"] + [expected["valid_loss"]], strict=True))


def test_the_loss_is_pytorch_s():
    """Over the tokens that count, for 20 steps and an evaluation, to 4 decimals."""
    expected = json.loads(read(f"{GOLDEN}/losses.json"))
    for batch in (1, 2, 4):
        for words in ((), ("--no-reset-attention-mask",)):
            off = off_from_pytorch(expected, f"golden{batch}{len(words)}.jsonl", f"{GOLDEN}/data",
                                   "--micro-batch-size", batch, *words)
            assert off < 5e-5, f"micro-batches of {batch}, {words}: off by {off}"
    assert abs(expected["apart"]["losses"][0] - expected["together"]["losses"][0]) > 1e-3
    os.makedirs("bare")
    for path in glob.glob(f"{GOLDEN}/data/*.bin"):
        write("bare/" + os.path.basename(path), read(path) + bytes(2))  # windows have their targets
        content = bytearray(read("bare/" + os.path.basename(path)))
        struct.pack_into("<i", content, 8, (len(content) - 1024) // 2)
        struct.pack_into("<2i", content, 20, 0, 0)
        write("bare/" + os.path.basename(path), bytes(content))
    off = off_from_pytorch(expected, "bare.jsonl", "bare", "--micro-batch-size", 2,
                           "--no-reset-attention-mask")
    assert off > 0.1, f"without masks it is off by {off} alone"


def gpu_steps(name, *words):
    run(STANDIN, *TINY, *DATA, "--no-cuda-graphs", "--metrics", name, "--eval-interval", 3, *words)
    return records(name, "step") + records(name, "eval")


def test_ranks_count_together():
    """The GPU trainer over stand-ins: the same losses and gradient norms however a step is split;
    those of the CPU trainer as far as BF16 goes; a resumed run is bit for bit the same."""
    if not os.path.exists(os.path.join(ROOT, STANDIN)):
        raise Skip(f"{STANDIN} is not built")
    one = gpu_steps("g1.jsonl", "--train-iters", 6, "--micro-batch-size", 4)
    for name, *options in (("g2", "--micro-batch-size", 1),
                           ("g3", "--micro-batch-size", 2, "--gpus", 2),
                           ("g4", "--micro-batch-size", 1, "--gpus", 4)):
        other = gpu_steps(f"{name}.jsonl", "--train-iters", 6, *options)
        assert len(other) == len(one) == 8
        for a, b in zip(one, other):
            assert a.get("targets") == b.get("targets")
            for key in ("loss", "norm", "valid_loss"):
                assert abs(a.get(key, 0) - b.get(key, 0)) <= 0.01 * a.get(key, 0), (key, a, b)
    for a, b in zip(one, steps_of("cpu.jsonl", "--micro-batch-size", 4)):
        assert abs(a["loss"] - b["loss"]) < 0.01 * a["loss"], (a, b)
        assert abs(a["norm"] - b["norm"]) < 0.05 * a["norm"], (a, b)
    split = ("--micro-batch-size", 1, "--gpus", 2, "--save", "parts")
    gpu_steps("p1.jsonl", *split, "--train-iters", 6, "--save-interval", 4)
    whole = read("parts/step_00000006/model.safetensors")
    gpu_steps("p2.jsonl", *split, "--train-iters", 6, "--resume",
              "parts/step_00000004")
    assert read("parts/latest/model.safetensors") == whole, "resumed, it is another run"


def test_large_shards_have_the_same_checksum():
    """Above 4 MiB, parts of them."""
    tokens = numpy.random.default_rng(1).integers(0, 300, 5 << 20)
    path = write("large/x.bin", shard_header.header(2, len(tokens)) +
                 tokens.astype("<u2").tobytes())
    write(path + ".mask", b"".join(shards.bits(".mask", tokens < 100, shards.checksum(path), 0)))
    tiny = ("train_gpt", *TINY[:4], "--seq-length", 96, "--data", path, "--train-iters", 1,
            "--micro-batch-size", 1)
    counted = int((tokens[1:len(tokens) // 96 * 96 + 1] < 100).sum())
    assert f", {counted:,} of them counted" in run(*tiny).out
    write(path + ".mask",
          b"".join(shards.bits(".mask", tokens < 100, shards.checksum(path) ^ 1, 0)))
    refused(run(*tiny, check=False), "the mask of another shard")


def answer_of(*words, given=""):
    """What scripts/chat prints in this process, where no Python starts for each answer."""
    with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(os.fsencode(given)))):
        return done(chat.main, *words).out


def talk_takes_turns(ask, known, exact):
    """Each line is answered after those before it: the first as alone, the next as the talk so far
    demands; empty lines and what comes after /exit are nothing."""
    first, second = known[0][0]["content"], known[1][0]["content"]
    alone = answer_of(*ask, first, *exact)
    assert answer_of(*ask, *exact, given=f"{first}\n/exit\n{second}\n") == alone
    assert answer_of(*ask, *exact, given="\n  \n") == ""
    assert answer_of(*ask, *exact, given="\udce9t\n")  # a line that is no UTF-8
    said = run("scripts/chat", *ask, *exact, given=f"{first}\n\n{second}\n").out
    assert said.startswith(alone) and len(said) > len(alone)
    whole = [{"role": "user", "content": first}, {"role": "assistant", "content": alone.strip()},
             {"role": "user", "content": second}]
    vocabulary = open_vocabulary({"tokenizer": "heart/latest/tokenizer.json"})
    template = ChatTemplate(vocabulary)
    prompt, _ = template.prompt(Conversation({"messages": whole}))
    ids = run("train_gpt", "--load", "heart/latest", "--sample-only", "--sample-tokens",
              ",".join(map(str, prompt)), *exact[1:]).out.split()
    ids = list(map(int, ids))
    ends = {*template.ends(), *vocabulary.specials.values()}
    end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    assert said == alone + vocabulary.tokenizer.decode(ids[:end]).strip() + "\n"
    assert run("scripts/chat", *ask, "--", "--no-such-option", given=f"{first}\n",
               check=False).status == 1


def test_a_model_that_was_tuned_answers():
    """After it has learned the example by heart: wherever in a window a conversation stands."""
    run("train_gpt", "--load", GOLDEN, "--data", f"{GOLDEN}/data/*.bin", "--seq-length", 128,
        "--global-batch-size", 9, "--micro-batch-size", 9, "--lr", 1e-2, "--weight-decay", 0,
        "--train-iters", 150, "--lr-warmup-iters", 0, "--save", "heart", "--sample-length", 1)
    ask, program = ("heart/latest",), "scripts/chat"
    exact = ("--", "--sample-temperature", 0, "--sample-length", 60)
    with open(os.path.join(ROOT, "scripts", "chat.jsonl")) as file:
        known = [Conversation(read_row(json.loads(line), "", Counter())).messages[:2]
                 for line in file]
    right = [answer_of(*ask, question["content"], *exact) == answer["content"] + "\n"
             for question, answer in known if question["role"] == "user"]
    assert all(right) and len(right) > 20, f"{sum(right)} of {len(right)} answers"
    asked = known[0][0]["content"]
    answer = answer_of(*ask, asked, *exact)
    with_system = answer_of(*ask, asked, "--system", "No.", *exact)
    assert answer != with_system
    run(program, *ask, "\udce9t\udce9", *exact)  # an argument that is no UTF-8
    assert run(program, *ask, "-", *exact, given=f"{asked}\n").out == answer
    assert answer_of(*ask, "-", *exact, given=f"-{asked[::-1]}") != answer
    short = ("--", "--sample-length", 4)
    for word in ("-why", "--why"):
        refused(call(chat.main, *ask, word, *short), f"unknown option {word}; those of the "
                "trainer go behind --, and a message that begins with - through standard input")
    for words in ((*ask, "--system", "No.", asked), ("--system", "No.", *ask, asked)):
        assert answer_of(*words, *exact) == with_system, "its place matters"
    talk_takes_turns(ask, known, exact)
    # in ids more than an option's text may have
    long = run(program, *ask, asked + " no?" * 1000, *short)
    assert "tokens, more than a sequence of 128 (--seq-length, at most" in long.err
    assert call(chat.main, *ask, asked, *short).err == \
        "note: cut off after 4 tokens; -- --sample-length N sets another number\n"
    endless = run(program, *ask, asked, "--", "--sample-temperature", 0, "--sample-length", 10 ** 6)
    assert endless.out == answer and not endless.err, "it went on"
    for option, part in (("--help", "--sample-tokens"), ("--version", "1.0"), ("--plan", "--load")):
        assert part in answer_of(*ask, "x", "--", option), option
    refused(run(program, *ask, "x", "--", "--list-tensors", check=False),
            "--list-tensors: --sample-only is given too")
    refused(run(program, *ask, "x", "--no-such-option", check=False),
            "unknown option --no-such-option")
    if not os.path.exists(os.path.join(ROOT, "train_gptcu")):
        refused(call(chat.main, "d", "x", "--gpu"), "not built")
    for words, said in ((("nowhere", "x"), "nowhere: no such folder; give a checkpoint, such as "
                         "RUN/best, of a run on conversations"),
                        ((".", "x"), ".: without a tokenizer.json; give a checkpoint"),
                        (("saved", "x"), "saved: without a tokenizer.json; did you mean "
                         "saved/best?")):
        refused(call(chat.main, *words), said)


if __name__ == "__main__":
    main()
