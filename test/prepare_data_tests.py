"""scripts/prepare_data: every kind of source, order, split, resuming, refusals."""

import contextlib
import csv
import errno
import glob
import gzip
import io
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from unittest import mock

import check
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from check import call, done, fails, lines, main, read, records, refused, run, says, write
from llm8 import environment, sources
from llm8.prepare_data import main as prepare_data
from llm8.rows import read_row
from shard_tools import byte_documents, listed_documents, manifest, sentences, stream, tokens_of

PROGRAM = os.path.join(check.ROOT, "scripts", "prepare_data")
BYTE = ("--tokenizer", "byte", "--jobs", "1")
TEXTS = sentences(1, 300)


def prepared(output, *words):
    return done(prepare_data, "--output", output, *BYTE, *words)


def bad(source, *parts):
    refused(call(prepare_data, "--output", "bad", *BYTE, source), source, *parts)


def lines_of(texts, key="text"):
    return lines({"id": 1, key: text} for text in texts)


def write_parquet(path, texts, key="text"):
    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=40)


def write_arrow(path, texts, key="text", new=pyarrow.ipc.new_stream):
    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    with pyarrow.OSFile(path, "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, 9)


def csv_of(rows, **words):
    held = io.StringIO(newline="")
    csv.writer(held, **words).writerows(rows)
    return held.getvalue().encode()


def write_sources():
    for place, text in enumerate(TEXTS[:20]):
        write(f"texts/{'deep/' if place % 2 else ''}{place}.{'md' if place % 3 else 'txt'}", text)
    write("a.jsonl", lines_of(TEXTS[20:60]))
    write("b.jsonl.gz", gzip.compress(lines_of(TEXTS[60:100], "content").encode()))
    write("c.jsonl.zst", sources.zstd.compress(lines_of(TEXTS[100:140]).encode()))
    write_parquet("d.parquet", TEXTS[140:220])
    os.makedirs("saved", exist_ok=True)
    write_arrow("saved/data-00000-of-00001.arrow", TEXTS[220:240])
    write_arrow("saved/cache-0a.arrow", TEXTS[220:240])
    write_arrow("feather.arrow", TEXTS[240:260], "content", pyarrow.ipc.new_file)
    rows = [[place, text] for place, text in enumerate(TEXTS[260:])]
    write("e.csv", b"\xef\xbb\xbf" + csv_of([["id", "text"], *rows[:20]]))
    write("f.csv.gz", gzip.compress(csv_of([["id", "text"], *rows[20:30]])))
    write("g.tsv", csv_of([["id", "text"], *rows[30:35]], delimiter="\t"))
    write("h.tsv.gz", gzip.compress(csv_of([["id", "text"], *rows[35:]], delimiter="\t")))


def same_documents(folder, texts):
    held = byte_documents(folder, "train") + byte_documents(folder, "val")
    assert sorted(held) == sorted(text.encode() for text in texts)


def test_every_kind_is_read():
    write_sources()
    prepared("all", "texts", "[ab].jsonl*", "c.jsonl.zst", "d.parquet", "saved", "feather.arrow",
             "e.csv", "f.csv.gz", "g.tsv", "h.tsv.gz", "--valid-fraction", 0.2)
    same_documents("all", TEXTS)
    assert fails(same_documents, "all", TEXTS[1:]), "a document too many is not seen"
    assert fails(same_documents, "all", [*TEXTS[1:], TEXTS[0] + "x"]), "another text is not seen"
    held = manifest("all")
    assert held["documents"] == len(TEXTS) and held["settings"]["split"] == "documents"
    assert held["tokens"] == len(stream("all", "train")) + len(stream("all", "val"))
    assert len(held["settings"]["sources"]) == 30


def test_endings_may_be_in_capitals():
    """As of files from Windows; those in a folder were left out."""
    write("capitals/A.TXT", TEXTS[0])
    write("capitals/B.Jsonl", lines_of(TEXTS[1:3]))
    write("capitals/C.JSONL.GZ", gzip.compress(lines_of(TEXTS[3:5]).encode()))
    write_parquet("capitals/D.PARQUET", TEXTS[5:7])
    write("rows.JSON", json.dumps([{"text": text} for text in TEXTS[7:9]]))
    prepared("capital", "capitals", "rows.JSON", "--valid-fraction", 0.2)
    same_documents("capital", TEXTS[:9])


def test_documents_are_listed():
    """Whatever stands around them. A run that is to keep them apart takes the list, and where it is
    missing the end-of-text token, which stands before each."""
    for name, around, before, after in (
            ("all", (), [256], []), ("after", ("--before", "none", "--after", "<|endoftext|>"), [],
                                     [256]),
            ("bare", ("--before", "none"), [], [])):
        if around:
            prepared(name, "a.jsonl", "--valid-fraction", 0, "--shard-tokens", 1000, *around)
        paths = sorted(glob.glob(f"{name}/*_*.bin"))
        held = [ids for path in paths for ids in listed_documents(path)]
        texts = TEXTS if name == "all" else TEXTS[20:60]
        assert sorted(held) == sorted([*before, *text.encode(), *after] for text in texts)
        assert len(paths) > 1 and len(held) == manifest(name)["documents"]
    steps, lists = [], glob.glob("all/*.starts")
    for words in (("--reset-attention-mask",), (), ("--reset-attention-mask",)):
        run("train_gpt", "--model", "llama-tiny", "--data", "all/train_*.bin", "--valid-data",
            "all/val_*.bin", "--eval-iters", 1, "--train-iters", 3, "--metrics", "steps.jsonl",
            *words)
        steps.append([(row.get("loss"), row.get("valid_loss")) for row in records("steps.jsonl")
                      if row["kind"] in ("step", "eval")])
        os.remove("steps.jsonl")
        if not words:
            for path in lists:
                os.rename(path, path + ".aside")
    assert steps[0] == steps[2] != steps[1]
    for path in lists:
        os.rename(path + ".aside", path)


def test_rows_of_json_are_read():
    """An array, an object, or an object a line; packed, with a byte-order mark, in UTF-16. In
    folders they are left out, because many are no rows."""
    texts = TEXTS[:30]
    held = [{"text": text} for text in texts]
    array, mark = json.dumps(held, indent=1), b"\xef\xbb\xbf"
    spaced = lines_of(texts).replace("\n", "\r\n\r\n").encode()
    for place, (name, content) in enumerate((
            ("a.json", array), ("a.json", json.dumps(held)), ("a.json", mark + array.encode()),
            ("a.json", array.encode("utf-16")), ("a.json", lines_of(texts)),
            ("a.json", mark + b"\r\n" + spaced), ("a.jsonl", mark + b"\n" + mark + spaced),
            ("a.json.gz", gzip.compress(array.encode())),
            ("a.json.gz", gzip.compress(lines_of(texts).encode())),
            ("a.json.zst", sources.zstd.compress(array.encode())))):
        prepared(f"json{place}", write(f"of{place}/{name}", content))
        same_documents(f"json{place}", texts)
    prepared("json_one", write("one.json", json.dumps(held[0], indent=1)), "--valid-fraction", 0)
    same_documents("json_one", texts[:1])
    write("of6/config.json", '{\n "text": "no row"\n}')
    out = prepared("json_rows", "of6").out
    assert "left out: 1 file of other kinds" in out, out
    same_documents("json_rows", texts)
    for content, parts in ((array[:-9], ("no JSON", )), ("[5]", ("row 0", "no JSON object: '5'")),
                           (json.dumps([held[0], {"text": 5}]), ("row 1", "'text' holds 5")),
                           (json.dumps({"train": held, "test": held}), ("train, test",)),
                           ("", ("no JSON",)), ("[" * 100000, ("no JSON",))):
        bad(write("bad.json", content), *parts)
    bad(write("array.jsonl", json.dumps(held)), "array.jsonl, line 1", "named .json")
    prepared("json_skip", write("skip.json", json.dumps([*held, 5, {"text": None}])), "--skip-bad")
    assert manifest("json_skip")["skipped"] == 2


def said(*words):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, words)]


def test_rows_are_read_in_every_form():
    asked, told = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
    alpaca, system = {"instruction": "a", "output": "b"}, {"role": "system", "content": "s"}
    call_of = {"name": "f", "arguments": {"x": 1}}
    messages = {"messages": said("a", "b")}
    pair = {"prompt": said("a"), "completion": said("a", "b")[1:]}
    for row, expected in (
            (messages, messages), ({"conversations": said("a", "b")}, messages),
            ({"messages": json.dumps(said("a", "b"))}, messages),
            (messages | {"prompt": "a", "answer": "b"}, messages),
            ({"conversations": json.dumps([asked, told])}, messages),
            ({"prompt": json.dumps([asked]), "completion": "b"},
             pair | {"prompt": said(json.dumps([asked]))}),
            ({"conversations": [asked, told], "id": 5}, messages),
            ({"conversation": [{"from": "user", "value": "a"}, {"from": "chatgpt", "value": "b"}],
              "system": ""}, messages),
            ({"messages": [asked, told], "text": None}, messages),
            (alpaca | {"input": "", "history": [], "tools": ""}, messages),
            (alpaca | {"input": "i", "history": [["c", "d"]], "system": "s"},
             {"messages": [system, *said("c", "d", "a\ni", "b")]}),
            ({"prompt": "a", "completion": "b"}, pair), (pair, pair),
            ({"prompt": said("a"), "response": "b", "answer": None}, pair),
            *(({ask: "a", answer: "b", "input": ""}, messages)
              for ask in ("instruction", "question", "query", "problem", "inputs")
              for answer in ("response", "answer", "solution", "target", "targets", "output")),
            ({"input": "a", "output": "b", "weight": 1}, messages | {"weight": 1}),
            ({"question": "a", "context": "i", "answer": "b", "system": "s"},
             {"messages": [system, *said("a\ni", "b")]}),
            (alpaca | {"context": "i"}, {"messages": said("a\ni", "b")}),
            ({"query": "a", "response": "b", "history": [["c", "d"]]},
             {"messages": said("c", "d", "a", "b")}),
            ({"prompt": [asked], "completion": [told], "system": "s", "tools": [5]},
             pair | {"prompt": [system, *said("a")], "tools": [5]}),
            (messages | {"system": "s", "documents": []}, {"messages": [system, *said("a", "b")]}),
            ({"messages": [system, *said("a")], "system": "s"}, {"messages": [system, *said("a")]}),
            ({"conversations": [told | {"weight": 0}, {"from": "observation", "value": "c"},
                                {"from": "function_call", "value": json.dumps(call_of)}]},
             {"messages": [{"role": "assistant", "content": "b", "weight": 0},
                           {"role": "tool", "content": "c"},
                           {"role": "assistant", "tool_calls": [
                               {"type": "function", "function": call_of}]}]}),
            ({"text": "a", "label": True, "title": "t", "rejected": False}, "a"),
            ({"text": None, "content": "a"}, "a"), ({"text": "a", "content": ""}, "a"),
            ({"text": "", "content": "a"}, "a"),
            *((row | {"system_prompt": "s", "id": 1}, {"messages": [system, *said("a", "b")]})
              for row in ({"question": "a", "response": "b"}, alpaca)),
            (alpaca | {"system_prompt": ""}, messages),
            ({"prompt": "a", "response": "b", "system_prompt": "s"},
             pair | {"prompt": [system, *said("a")]})):
        unread = Counter()
        assert read_row(row, "", unread) == expected and not unread, (row, unread)
    unread = Counter()
    for row in (messages | {"prompt": "c", "text": "t"}, {"text": "a", "system": "s"},
                messages | {"conversations": [asked]}, messages | {"images": ["x"]},
                messages | {"documents": [{"text": "x"}]}, messages | {"system_prompt": "s"},
                alpaca | {"text": "t", "response": "r"},
                {"question": "a", "answer": "b", "content": "c"},
                {"text": "a", "weight": 0}, {"prompt": "a", "response": "b", "choices": ["b"]}):
        read_row(row, "", unread)
        assert read_row(row | {"text": "t"}, "text", Counter()) == "t"
    assert unread == {"prompt": 1, "text": 2, "system": 1, "conversations": 1, "images": 1,
                      "documents": 1, "system_prompt": 1, "response": 1, "question": 1, "answer": 1,
                      "weight": 1, "choices": 1}, unread
    for row, *parts in (
            ({"text": "a", "content": "b"}, "'text' and 'content'", "--text-field"),
            (messages | {"messages": [system, *said("a")], "system": "other"}, "'system'"),
            (alpaca | {"system": "s", "system_prompt": "other"}, "'system_prompt'"),
            ({"conversations": [asked, {"from": "narrator", "value": "x"}]}, "'narrator'", "human"),
            ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "function_call"),
            ({"conversations": "a"}, "its messages"), ({"conversations": ["a"]}, "its messages"),
            ({"messages": "{}"}, "its messages"),
            ({"messages": '[{"role": "user", "role": "user"}]'}, "the key \"role\" is there twice"),
            (alpaca | {"history": ["a"]}, "history"), (alpaca | {"input": 5}, "input"),
            ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen, rejected"),
            (messages | {"rejected_response": "c"}, "rejected_response"),
            ({"prompt": "a", "completion": "b", "label": False}, "label"),
            ({"conversations": [asked, told], "kto_tag": True}, "kto_tag"),
            ({"prompt": "a", "response": "b", "label": False}, "label"),
            ({"problem": "a", "solution": "b", "answer": "c"}, "'answer' and 'solution'"),
            ({"question": "a", "query": "b", "answer": "c"}, "'question' and 'query'"),
            ({"question": "a", "context": ["i"], "answer": "b"}, "context is no text"),
            ({"question": None, "answer": "b", "response": None}, "its question or input"),
            ({"title": "a", "answer": "b"}, "'text'", "question", "title, answer")):
        try:
            read = read_row(row, "", Counter())
        except ValueError as error:
            read = None
            assert all(part in str(error) for part in parts), (row, error)
        assert read is None, (row, read)
    rows = lines_of(TEXTS[:20]) + json.dumps({"text": TEXTS[20], "prompt": "a"}) + "\n"
    result = prepared("unread", write("unread.jsonl", rows))
    assert result.err.startswith("warning: not read: 'prompt' in 1 row;"), result.err
    assert manifest("unread")["unread"] == {"prompt": 1}
    pyarrow.parquet.write_table(pyarrow.table({
        "text": TEXTS[:20], "system": ["s"] * 10 + [None] * 10, "url": TEXTS[:20]}), "two.parquet")
    assert "'system' in 10 rows" in prepared("two_columns", "two.parquet").err
    assert not prepared("named", "two.parquet", "--text-field", "text").err


def test_folders_are_read_whole():
    """Linked folders too, each once; nothing that is hidden; none is passed over in silence."""
    for path, text in (("far/f.txt", "far"), ("walk/sub/s.md", "sub"), ("walk/.git/g.txt", "git"),
                       ("walk/.h.txt", "hidden"), ("walk/lost+found/l.txt", "lost"),
                       ("walk/sub/.x/y/z.txt", "deep"),
                       ("walk/x.csv", "other"), (".own/o.txt", "own")):
        write(path, text)
    os.symlink("../far", "walk/linked")
    os.symlink("../../far", "walk/sub/again")
    os.symlink("..", "walk/sub/loop")
    os.symlink(".", "walk/self")
    os.symlink("../far", "walk/.gone")
    files, others = sources.expand(["walk"], "SOURCE")
    assert files == ["walk/linked/f.txt", "walk/sub/s.md"] and others == 1, (files, others)
    assert sources.expand([".own"], "SOURCE") == ([".own/o.txt"], 0)
    out = prepared("walked", "walk", "--valid", "walk").out
    assert "left out: 2 files of other kinds than" in out, out
    assert sorted(byte_documents("walked", "train")) == [b"far", b"sub"]
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("sub"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    os.scandir = closed  # root may read any folder
    try:
        bad("walk", "SOURCE walk/sub: Permission denied; make it readable")
        for source in "walk/*/s.*", "walk/*/f.txt", "wal[k]/**/f.txt", "w*/s*/*.md":
            bad(source, f"SOURCE {source}: walk/", "sub: Permission denied; make it readable")
        os.mkdir("w[a]lk")  # nothing matches in it
        bad("w[a]lk/*/s.*", "SOURCE w[a]lk/*/s.*: walk/sub: Permission denied; make it readable")
        assert sources.expand(["walk/l*/f.txt"], "SOURCE")[0] == ["walk/linked/f.txt"]
    finally:
        os.scandir = scandir


def test_the_c_tokenizer_agrees():
    text = "".join(sentences(2, 200)) + "\x00\xff end"
    write("one.txt", text.encode("latin-1", "replace"))  # not UTF-8, which bytes need not be
    write("two.txt", "x" * 4990 + "\n123456789")  # a line too far away to begin with it
    mark = "\ufeff"  # no part of a text
    write("three.txt", mark + "one" + mark + "\n" + "two\n" * 99)
    texts = ("one.txt", "two.txt", "three.txt")
    run("tokenize", "--output-prefix", "c/one", "--valid-fraction", 0.1, *texts)
    prepared("p", *texts, "--valid-fraction", 0.1, "--no-shuffle")
    assert byte_documents("p", "train")[2].decode()[:5] == "one" + mark + "\n"
    assert manifest("p")["settings"]["split"] == "tails"
    assert read("p/train_00000.bin") == read("c/one_train.bin")
    assert read("p/val_00000.bin") == read("c/one_val.bin")
    assert read("p/tokenizer.bin") == read("c/one_tokenizer.bin")
    for cut in range(4):  # in one line, a part begins with a whole character
        write("line.txt", "€" * 99 + "x" * cut)
        run("tokenize", "--output-prefix", "c/line", "--valid-fraction", 0.1, "line.txt")
        prepared(f"p_line{cut}", "line.txt", "--valid-fraction", 0.1)
        assert read(f"p_line{cut}/val_00000.bin") == read("c/line_val.bin")
        valid, = byte_documents(f"p_line{cut}", "val")
        assert valid.decode() and not valid.decode().strip("€x"), valid


def test_rows_in_text_files_are_warned_of():
    write("rows.txt", " \n" + lines_of(TEXTS[:2]))
    write("array.md", "\ufeff[\n" + lines_of(TEXTS[:2]))
    write("code.jsonl", lines_of(['{"a": 1}']))  # a text that is JSON
    err = prepared("as_text", "rows.txt", "array.md", "code.jsonl").err
    says(err, "warning: 2 of 3 texts: they are rows of JSON")


def test_the_order_is_the_seeds():
    small = ("--shard-tokens", 2000, "--valid-fraction", 0.1)
    prepared("s1", "d.parquet", "a.jsonl", *small)
    prepared("s2", "d.parquet", "a.jsonl", *small, "--seed", 2)
    prepared("s0", "d.parquet", "a.jsonl", *small, "--no-shuffle")
    result = run("scripts/prepare_data", "--output", "s3", "--tokenizer", "byte", "--jobs", 3,
                 "d.parquet", "a.jsonl", *small)
    assert "train" in result.out
    shards = sorted(os.path.basename(path) for path in glob.glob("s1/*_*.bin"))
    assert len(shards) > 10
    for name in shards:
        assert read(f"s1/{name}") == read(f"s3/{name}"), f"{name} depends on --jobs"
    one, two, zero = (byte_documents(folder, "train") for folder in ("s1", "s2", "s0"))
    assert one != two and one != zero
    texts = [text.encode() for text in TEXTS[140:] + TEXTS[20:60]]
    assert zero == [text for text in texts if text in set(zero)]
    for folder in ("s1", "s2", "s0"):
        same_documents(folder, TEXTS[140:220] + TEXTS[20:60])
    long = max(len(text.encode()) for text in TEXTS) + 1
    sizes = [len(tokens_of(f"s1/{name}")[0]) for name in shards if name.startswith("train")]
    assert max(sizes) <= 2000 and min(sizes[:-1]) > 2000 - long


def test_the_split_follows_the_text():
    write("all.jsonl", lines_of(TEXTS))
    write("twice.jsonl", lines_of(TEXTS + TEXTS))
    said = "note: 210 of 420 train documents are copies of others"
    says(prepared("twice", "twice.jsonl", "--valid-fraction", 0.3).out, said)
    says(prepared("once", "all.jsonl", "--valid-fraction", 0.3).out, "!are copies")
    train, valid = byte_documents("twice", "train"), byte_documents("twice", "val")
    assert not set(train) & set(valid), "the same text is on both sides"
    assert 0.2 < len(valid) / 600 < 0.4
    prepared("own", "a.jsonl", "--valid", "b.jsonl.gz")
    assert sorted(byte_documents("own", "val")) == sorted(text.encode() for text in TEXTS[60:100])
    for folder, said in (("n", "train with --data 'n/train_*.bin'"),
                         ("it's", "train with --data 'it'\"'\"'s/train_*.bin'")):
        out = prepared(folder, "a.jsonl", "--valid-fraction", 0).out
        assert out.splitlines()[-1] == said, out
    out = prepared("n v", "a.jsonl", "--valid-fraction", 0.3).out
    assert out.endswith("train with --data 'n v/train_*.bin' --valid-data 'n v/val_*.bin'\n"), out
    prepared("none", "a.jsonl", "--valid-fraction", 0)
    assert not glob.glob("none/val*")


def test_what_is_printed_can_be_typed():
    train = ["train_gpt", "--model", "llama-tiny", "--seq-length", 8, "--train-iters", 1]
    for folder in ("run [v2]/d", "{a,b} *?", "-x", "q'\"\\#$x"):
        made = call(prepare_data, "a.jsonl", *BYTE, "--output=" + folder)
        said = made.out.split("train with ")[1]
        assert " tokens in 1 shard," in run(*train, *shlex.split(said)).out, said


def test_a_run_warns_of_missing_shards():
    """As after a copy that did not end; not of shards that its pattern leaves out."""
    train = ["train_gpt", "--model", "llama-tiny", "--seq-length", 8, "--train-iters", 1, "--data"]
    prepared("part", "a.jsonl", "--shard-tokens", 1000, "--valid-fraction", 0.3)
    *others, last = sorted(glob.glob("part/train_*.bin"))
    assert len(others) > 3
    for pattern in "part/train_*.bin", others[0]:
        assert not run(*train, pattern, "--valid-data", "part/val_*.bin").err
    os.remove(last)
    os.remove(others[2])
    said = (f"warning: --data part/train_*.bin: 2 of {len(others) + 1} shards are missing, such as "
            f"{others[2]};")
    says(run(*train, "part/train_*.bin", "--valid-data", "part/val_*.bin").err, said)
    says(run(*train, "part/train_*.bin", "--plan").err, said)
    says(run(*train, "1 part/train_*.bin 2 part/val_*.bin").err, said)
    shutil.copytree("part", "part[2]")
    for pattern in ("{part,none}/train_*.bin", "{part/train,part/val}_*.bin",
                    "part[2]/{train,val}_*.bin"):
        says(run(*train, pattern).err, ": 2 of ")
    says(run(*train, "part/train_0000{0,1,2}.bin").err, "1 of 3", others[2])
    assert not run(*train, "{part/train_0000{0,1},part*/val_*}.bin").err
    os.chdir("part")
    says(run(*train, "tr*.bin").err, "tr*.bin: 2 of", f"such as {others[2][5:]};")
    for pattern in os.path.basename(others[0]), "train_0000[01].bin":
        assert not run(*train, pattern).err
    os.remove("manifest.json")
    assert not run(*train, "train_*.bin").err
    os.chdir("..")


def test_text_on_both_sides_is_noted():
    os.symlink("a.jsonl", "same.jsonl")
    write("half.jsonl", lines_of(TEXTS[50:80]))
    write("own.txt", TEXTS[0])
    for name, valid, said in (("a.jsonl", "same.jsonl", "40 of 40"),
                              ("a.jsonl", "half.jsonl", "10 of 30"), ("own.txt", "own.txt", "1 of"),
                              ("a.jsonl", "b.jsonl.gz", None)):
        out = prepared(f"both_{name}_{valid}", name, "--valid", valid).out
        assert ("are trained on too" in out) == bool(said), out
        assert not said or f"note: {said}" in out, out
    for name in ("own.txt", "twice.jsonl"):
        assert "trained on" not in prepared(f"both_{name}", name, "--valid-fraction", 0.3).out


def test_other_splits_in_a_folder_are_named():
    """A data set's folder has its test and validation splits beside the one for training."""
    for path, text in (("set/data/train-00000-of-00001.jsonl", "train"), ("set/README.md", "set"),
                       ("set/data/test-00000-of-00001.jsonl", "test"),
                       ("set/validation/0.jsonl", "valid"), ("latest/trained_eval.jsonl", "one"),
                       ("latest/contest.jsonl", "two"), ("my_test/set.train.jsonl", "three"),
                       ("my_test/set.txt", "four")):
        write(path, text if path.endswith("t") else lines([{"text": text}]))
    for path in ("notes/train_gpt2.md", "notes/dev/a.md"): # texts are no splits
        write(path, "a text")
    said = "2 of 3 files are for tests or validation by their names, and are trained on"
    for name, words, expected in (
            ("all", ["set"], f"warning: {said} (set/data/test-00000-of-00001.jsonl)"),
            ("glob", ["set/*/*.jsonl"], said),
            ("valid", ["set/data/train*", "--valid", "set/data/test*"], ""),
            ("two", ["set/data"], "1 of 2 files are"), ("none", ["set/validation"], ""),
            ("words", ["latest"], ""), ("outside", ["my_test"], ""), ("texts", ["notes"], "")):
        err = prepared(f"splits_{name}", *words).err
        assert expected in err and bool(err) == bool(expected), (name, err)


def test_a_data_sets_card_is_named():
    """The README.md in the folder of rows is a text as any other."""
    write("card/README.md", "about the set")
    write("card/0.jsonl", lines_of(TEXTS[:9]))
    for words, expected in ((["card"], True), (["card/0.jsonl"], False), (["texts"], False),
                            (["card/README.md"], False)):
        err = prepared(f"card_{len(words[0])}", *words).err
        assert ("warning: card/README.md is trained on as a text" in err) == expected, err


def test_missing_parts_of_a_set_are_named():
    """Of -of- files, those between others, as a broken download leaves them; the first ones alone
    are a choice."""
    for number in (0, 1, 3, 6, 7):
        write(f"gaps/train-{number:05}-of-00009.jsonl", lines([{"text": f"part {number}"}]))
    write("gaps/2-of-3.jsonl", lines([{"text": "another set"}]))
    said = "missing between others of a set, such as gaps/train-00002-of-00009.jsonl;"
    for name, words, expected in (
            ("all", ["gaps"], f"warning: 3 files {said}"),
            ("some", ["gaps/*[03]-*"], f"1 file {said}"), ("first", ["gaps/*0[01]-*"], ""),
            ("apart", ["gaps/*1-*", "gaps/2-of-3.jsonl"], ""),
            ("valid", ["gaps/*0-*", "--valid", "gaps/*[67]-*"], "")):
        err = prepared(f"gaps_{name}", *words).err
        assert expected in err and bool(err) == bool(expected), (name, err)


def test_small_sets_are_validated_too():
    """A tenth of a small set, by whole documents; a document that is most of it is trained on."""
    texts = sentences(7, 183)
    write_parquet("rows20.parquet", texts[:20])
    write("lines50.jsonl", lines_of(texts[:50]))
    write("lines183.jsonl", lines_of([text * 40 for text in texts]))
    write("long.jsonl", lines_of(["x" * 500000, *texts[:9]]))
    write("one.jsonl", lines_of(texts[:1]))
    write("line.txt", "x" * 99990 + "\n" + "y" * 9)
    for name, least, most in (("rows20.parquet", .05, .2), ("lines50.jsonl", .1, .15),
                              ("lines183.jsonl", .1, .12), ("long.jsonl", .0001, .01),
                              ("one.jsonl", 0, 0), ("line.txt", .1, .1)):
        out = prepared(f"small_{name}", name).out
        train, valid = (len(stream(f"small_{name}", split)) for split in ("train", "val"))
        assert least <= round(valid / (train + valid), 4) <= most, (name, train, valid)
        few = "tokens are few" if valid else "note: no tokens are left"
        said = f"{few} for a validation loss; a larger --valid-fraction takes more" in out
        assert said == (valid < 20 * 1024), out


def test_lines_are_read_once_in_any_cut():
    unit = sources.UNIT_BYTES
    write("cut.jsonl.gz", gzip.compress(read("a.jsonl")))  # a packed file is one unit
    write("cut.json", read("a.jsonl"))
    for name, size in itertools.product(("a.jsonl", "cut.jsonl.gz", "cut.json"),
                                        (1, 7, 100, 997, 5000)):
        sources.UNIT_BYTES = size
        units = sources.units_of([name], False, "", False)
        texts = [row["text"] for part in units for row in sources.documents(part, dict)]
        assert texts == TEXTS[20:60], f"{name} in units of {size} bytes"
    sources.UNIT_BYTES = unit


def wait_for(condition, process):
    end = time.time() + 60
    while not condition() and process.poll() is None and time.time() < end:
        time.sleep(0.002)


def workers_of(group):
    """The processes of a group that have not ended, zombies aside."""
    count = 0
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            state, _, held = read(path).rpartition(b") ")[2].split()[:3]
            count += held == b"%d" % group and state != b"Z"
    return count


def kill_when(condition, kill, command):
    """Kills a run when the condition holds, which ends its workers. Whether it had not ended, and
    what it printed."""
    with open("killed.log", "w") as log:
        process = subprocess.Popen(command, start_new_session=True, stdout=log)
    wait_for(condition, process)
    killed = process.poll() is None
    if killed:
        assert workers_of(process.pid) > 1
        kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.time() + 20
    while workers_of(process.pid) and time.time() < end:
        time.sleep(0.05)
    assert not workers_of(process.pid), "workers outlive their parent"
    return killed, read("killed.log").decode()


def test_a_killed_run_resumes():
    """However often, and wherever: also its parent process alone."""
    for place in range(12):
        content = lines_of(sentences(100 + place, 2000)).encode()
        write(f"many/{place:02}.jsonl.gz", gzip.compress(content, 1))
    words = ["many", "--tokenizer", "byte", "--jobs", "2", "--shard-tokens", "30000"]
    run("scripts/prepare_data", "--output", "straight", *words)

    def made(most, pattern):
        return lambda: len(glob.glob(f"often/.work/{pattern}")) > most

    command, kills = [PROGRAM, "--output", "often", *words], 0
    for condition, kill in ((made(1, "*.npz"), os.kill), (made(5, "*.npz"), os.killpg),
                            (made(2, "train_*"), os.killpg)):
        killed, out = kill_when(condition, kill, command)
        assert not kills or "resuming: " in out, out
        kills += killed
        if not killed:
            break
    else:
        assert "resuming: " in run("scripts/prepare_data", *command[1:]).out
    assert kills, "the run was not going on when it was to be killed"
    assert sorted(os.listdir("often")) == sorted(os.listdir("straight"))
    for path in glob.glob("straight/*.bin"):
        assert read(path) == read(path.replace("straight", "often")), path
    assert call(prepare_data, "--check", "often").status == 0


def test_a_lock_has_one_holder():
    """Each holder removes the lock's file at its end, at any moment of those who wait for it."""
    os.makedirs("locked")
    children = []
    for _ in range(4):
        children.append(os.fork())
        if children[-1]:
            continue
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # that it waits
                for _ in range(500):
                    held = environment.lock("locked", "--output", waits=True)
                    os.close(os.open("locked/one", os.O_CREAT | os.O_EXCL))
                    os.remove("locked/one")
                    os.remove("locked/.lock")
                    os.close(held)
            os._exit(0)
        finally:
            os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4


def test_a_file_system_without_locks_is_taken():
    """Such as Lustre, mounted without flock."""
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "Function not implemented")):
        result = prepared("no_locks", "texts")
    assert "warning: --output no_locks: no lock (Function not implemented)" in result.err


def test_a_full_disk_is_named():
    """What is written is below this many bytes; the largest file is beyond it."""
    write("full.txt", TEXTS[0] * 3000)
    command, limit = [PROGRAM, "full.txt", "--output", "full", *BYTE], (100000, 100000)
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    refused(check.Result(done.returncode, done.stdout, done.stderr), "full/.work/unit_",
            "File too large")
    assert os.listdir("full") == []


def test_files_of_others_stay():
    os.makedirs("mixed/.work")  # as a run that was stopped leaves
    for folder, name in (("mixed", "corpus_2_train.bin"), ("start", "config.json"),
                         ("start2", "generation_config.json")):
        write(f"{folder}/{name}", "x")
        refused(call(prepare_data, "--output", folder, *BYTE, "b.jsonl.gz"), name,
                "from elsewhere")
        assert read(f"{folder}/{name}") == b"x"


def test_a_finished_run_is_left_alone():
    before = os.stat("straight/train_00000.bin").st_mtime_ns
    words = ("many", "--tokenizer", "byte", "--shard-tokens", 30000)
    again = call(prepare_data, "--output", "straight", *words)
    assert "made already" in again.out and os.stat("straight/train_00000.bin").st_mtime_ns == before
    refused(call(prepare_data, "--output", "straight", *words, "--seed", 5), "manifest.json",
            "already made", "other seed", "another --output")
    os.makedirs("straight/.work")  # it was stopped after the manifest
    assert "made already" in call(prepare_data, "--output", "straight", *words).out
    assert not os.path.exists("straight/.work")
    # another text of the same files, or the same file on the other side, is another preparation
    write("two.jsonl", lines({"text": text, "title": text[:9]} for text in TEXTS[:20]))
    two = ("two.jsonl", "a.jsonl", "--valid-fraction", 0)
    prepared("two", *two)
    assert "made already" in prepared("two", *two).out
    for changed, what in (((*two, "--text-field", "title"), "text_field"),
                          (("two.jsonl", "--valid", "a.jsonl"), "sources, valid_sources")):
        refused(call(prepare_data, "--output", "two", *BYTE, *changed), "already made",
                f"other {what})")
    write("foreign/x_train.bin", "x")
    refused(call(prepare_data, "--output", "foreign", *words), "--output", "x_train.bin", "empty")
    assert os.listdir("foreign") == ["x_train.bin"]
    refused(call(prepare_data, "--output", "foreign/x_train.bin/x", *words),
            "--output foreign/x_train.bin/x: Not a directory")


def test_a_finished_run_that_lacks_a_file_is_not_taken_for_whole():
    words = ("--output", "lacks", *BYTE, "a.jsonl")
    prepared("lacks", "a.jsonl")
    names = {"train_00000.bin", "train_00000.bin.starts", "val_00000.bin", "val_00000.bin.starts",
             "tokenizer.bin", "tokenizer.json", "tokenizer_config.json"}
    assert names | {"manifest.json"} == set(os.listdir("lacks"))
    for name in sorted(names):
        path, content = f"lacks/{name}", read(f"lacks/{name}")
        os.remove(path)
        refused(call(prepare_data, *words), f"{path}: missing; remove the folder lacks, then")
        refused(call(prepare_data, "--check", "lacks"), f"{path}: missing")
        assert not os.path.exists(path)
        write(path, content[:-1])
        refused(call(prepare_data, *words), f"{path}: damaged: not what the manifest says")
        write(path, content[:-1] + bytes([content[-1] ^ 1]))
        refused(call(prepare_data, "--check", "lacks"),
                f"{path}: damaged: not what the manifest says; remove the folder lacks, then")
        write(path, content)
    assert "made already" in call(prepare_data, *words).out
    held = manifest("lacks")
    del held["tokenizer_files"]  # a manifest made before they were named
    for row in held["shards"]:  # and of before there were lists
        os.remove(f"lacks/{row['name']}.starts")
        del row["starts_sha256"]
    write("lacks/manifest.json", json.dumps(held))
    assert "made already" in call(prepare_data, *words).out


def test_a_mended_source_is_enough():
    """After a fault, what was tokenized before it is kept, and no older shard is left."""
    write("m/a.jsonl", lines_of(TEXTS[:50]))
    write("m/b.jsonl", "{oops}\n")
    refused(call(prepare_data, "--output", "mend", *BYTE, "m"), "m/b.jsonl")
    assert os.listdir("mend") == [".work"]
    refused(call(prepare_data, "--output", "unmade", *BYTE, "m/b.jsonl"), "m/b.jsonl")
    assert os.listdir("unmade") == [], "what does not help to resume is left"
    write("m/b.jsonl", lines_of(TEXTS[50:60]))
    write("mend/train_00009.bin", "of another end")
    result = prepared("mend", "m")
    assert "resuming: 1 of 2 parts" in result.out, result.out
    same_documents("mend", TEXTS[:60])
    assert not os.path.exists("mend/train_00009.bin")


def test_damaged_manifests_are_found():
    assert "as the manifest says" in call(prepare_data, "--check", "s1").out
    whole = read("s2/manifest.json")
    other = json.loads(whole)
    for damaged in (whole[:-40], b"[]", b"{}", b"[" * 100000, *(
            json.dumps(other | changes).encode() for changes in (
                {"shards": 5}, {"shards": [5]}, {"shards": [{"name": "x"}]}, {"settings": []},
                {"tokenizer_files": {"name": "x"}}))):
        write("s2/manifest.json", damaged)
        for words in (("--check", "s2"), ("--output", "s2", *BYTE, "a.jsonl")):
            refused(call(prepare_data, *words), "s2/manifest.json: not a manifest of prepare_data",
                    "remove the folder")
    refused(run("scripts/prepare_data", "--check", "texts", check=False),
            "texts/manifest.json: no such file; give a folder that prepare_data --output")


def test_bad_sources_are_refused():
    content = read("d.parquet")
    bad(write("cut.parquet", content[:-100]), "damaged or cut short", "download it again")
    damaged = bytearray(content)
    damaged[300:900] = bytes(600)
    bad(write("hole.parquet", bytes(damaged)), "damaged", "--skip-bad")
    bad(write("cut.jsonl.gz", read("b.jsonl.gz")[:-200]), "damaged or cut short", "--skip-bad")
    bad(write("cut.jsonl.zst", b"not zst"), "damaged or cut short")
    bad(write("odd.jsonl", lines_of(["a"]) + "\n{oops}\n"), "odd.jsonl, line 3: no JSON object",
        "{oops}", "--skip-bad")
    bad(write("list.jsonl", "[1]\n"), "list.jsonl, line 1: no JSON object")
    row = '{"text": "a", "x": {"y": 1, "text": 2}}\n'  # Arrow refuses a repeated key, too
    bad(write("two.jsonl", row + row.replace('"y"', '"text"')),
        'two.jsonl, line 2: the key "text" is there twice; remove one', "--skip-bad")
    bad(write("two.json", '[{"text": "a", "text": "b"}]'),
        'two.json: the key "text" is there twice')
    bad(write("two_lines.json", row.replace('"y"', '"text"') + row),
        'two_lines.json, line 1: the key "text" is there twice')
    bad(write("field.jsonl", lines_of(["a"], "body")), "field.jsonl, line 1: no text under 'text'",
        "id, body", "--text-field")
    for value, held in ((None, "null"), (5, "5"), (["a"], "['a']")):
        said = f"'text' holds {held}, which is no text; mend it, or name another field (--text-fie"
        write("null.jsonl", lines_of(["a", value]))
        bad("null.jsonl", "null.jsonl, line 2: " + said)
        write_parquet("null.parquet", [value])
        bad("null.parquet", "null.parquet, row 0: " + said)
    write_arrow("null.arrow", ["a"] * 20 + [None])
    bad("null.arrow", "null.arrow, row 20: 'text' holds null, which is no text")
    write_parquet("far.parquet", ["a"] * 100 + [None])
    with mock.patch.object(sources, "UNIT_BYTES", 100):
        bad("far.parquet", "far.parquet, row 100: 'text' holds null, which is no text")
    bad(write("cut.arrow", read("null.arrow")[:-200]), "cut.arrow: damaged or cut short")
    bad(write("text.arrow", "text"), "text.arrow: damaged or cut short")
    bad(write("field.csv", "id,body\n1,a\n"), "field.csv, row 0: no text under 'text'", "id, body")
    bad(write("short.csv", "id,text\n1,a\n2\n"), "short.csv, row 1: 'text' holds null")
    bad(write("semicolons.csv", "id;text\n1;a\n"), "separated by semicolons; save it with commas")
    bad(write("more.csv", "id,text\n1,a,b\n"), "row 0: more fields than the first line names")
    bad(write("two.csv", "text,text\na,b\n"), "two.csv: the field 'text' is there twice")
    bad(write("open.csv", 'id,text\n1,a\n2,"b\n'),
        "open.csv, row 1: no CSV (unexpected end of data); mend it")
    bad(write("latin.csv", b"id,text\n1,caf\xe9\n"),
        "latin.csv: not UTF-8 after row 0; convert the file (iconv -f cp1252")
    bad(write("tabs.csv", "id\ttext\n1\ta\n"), "separated by tabs; name it .tsv")
    bad(write("commas.tsv", "id,text\n1,a\n"), "separated by commas; name it .csv")
    bad(write("half.tsv", 'text\n"Hi," she said\n'), "half.tsv, row 0: no CSV (", "; mend it")
    for encoding, named in (("utf-16", "utf-16"), ("cp1252", "cp1252")):
        bad(write("other.jsonl", '{"text": "café"}\n'.encode(encoding)),
            f"other.jsonl, line 1: not UTF-8; convert the file (iconv -f {named} -t utf-8)")
    bad(write("strings.json", '["a", "b"]'), "row 0: no JSON object: 'a'; write it as {")
    bad(write("strings.jsonl", '"a"\n'), "line 1: no JSON object: ", "; write it as {")
    # in a later unit than the first, and in a compressed file
    many = lines_of(["x" * 1000] * 200) + "{oops}\n"
    with mock.patch.object(sources, "UNIT_BYTES", 1 << 16):
        bad(write("far.jsonl", many), "far.jsonl, line 201: ")
        bad(write("far.jsonl.gz", gzip.compress(many.encode(), 1)), "far.jsonl.gz, line 201: ")
    write_parquet("field.parquet", ["a"], "body")
    bad("field.parquet", "no text under 'text'", "id, body", "--text-field")
    bad(write("picture.png", "x"), "no kind that can be read", ".jsonl.zst", "the ending .txt")
    for name in ("a.zip", "a.tar.gz", "a.jsonl.XZ", "a.txt.gz"):
        bad(write(name, "x"), "no kind that can be read", "; unpack it")
    bad("folder/set.txt", "folder/set.txt: no such file")
    bad("owner/set", "owner/set: no such file, folder or known set; download a set of the Hub")
    bad("nothing*.txt", "no such file")
    for kind in (".txt", ".jsonl", ".parquet"):
        os.mkfifo("pipe" + kind)
        bad("pipe" + kind, "not a regular file")
    os.makedirs("piped/of", exist_ok=True)
    os.symlink("../../nothing", "piped/of/a.txt")
    bad("piped", "piped/of/a.txt: a link that leads nowhere; mend or remove it")
    with mock.patch.object(sources, "parse_file", side_effect=MemoryError):
        write("large.json", "[]")
        refused(call(prepare_data, "--output", "bad", *BYTE, "large.json"), "memory ran out",
                "; a .json is read as a whole")
    write("plain.txt", "a")
    refused(call(prepare_data, "--output", "bad", *BYTE, "plain.txt", "--text-field", "body"),
            "--text-field body: the sources are texts, which have no fields")
    prepared("body", "field.jsonl", "--text-field", "body", "--valid-fraction", 0)
    assert byte_documents("body", "train") == [b"a"]


def test_cells_of_a_csv():
    """A bad row is left out alone. Marks are read as in rows of other kinds."""
    write("quotes.csv", 'id,text\n1,a\n2,"b" c\n3,d\n4,\n5,"e\nf"\n')
    prepared("quotes", "quotes.csv", "--skip-bad", "--valid-fraction", 0)
    assert sorted(byte_documents("quotes", "train")) == [b"a", b"d", b"e\nf"]
    assert manifest("quotes")["skipped"] == 1
    bad(write("kto.csv", "prompt,completion,label\na,b,True\n"), "preferences")
    rows = [row for unit in sources.units_of([write("marks.csv", "weight,kto_tag,n\n0,FALSE,1\n")],
                                             False, "", False)
            for row in sources.documents(unit, lambda row: row)]
    assert rows == [{"weight": 0, "kto_tag": False, "n": "1"}]


def read_unpacked(path):
    with sources.open_lines(path) as file:
        return file.read()


def test_a_cut_zst_is_seen():
    """Wherever it is cut; what was read before the cut stays with --skip-bad. One with the largest
    window, as of zstd --long=31, is read."""
    texts = sentences(11, 4000)
    wide = sources.zstd.ZstdCompressor(options={
        sources.zstd.CompressionParameter.window_log: 31})
    packed = wide.compress(b"wide") + wide.flush()  # not at once: that window would be the text's
    assert read_unpacked(write("wide.jsonl.zst", packed)) == b"wide"
    parts = [lines_of(texts[at:at + 1000]).encode() for at in range(0, 4000, 1000)]
    checked = sources.zstd.CompressionParameter.checksum_flag
    frames = [sources.zstd.compress(part, options={checked: place % 2})
              for place, part in enumerate(parts)]
    note = b"\x50\x2a\x4d\x18\x05\0\0\0hello"  # a frame that is to be skipped, as of pzstd
    whole, ends = b"", {0: b""}
    for place, frame in enumerate([note, *frames, note]):
        whole += frame
        ends[len(whole)] = b"".join(parts[:place])
    assert len(ends) == 7, "an end for each frame, and the beginning"
    assert read_unpacked(write("whole.jsonl.zst", whole)) == b"".join(parts)
    near = [end + by for end in ends for by in range(-9, 10)]
    for size in [*near, *range(0, len(whole), 7001)]:
        if not 0 < size < len(whole):
            continue
        write("some.jsonl.zst", whole[:size])
        try:
            held = read_unpacked("some.jsonl.zst")
        except EOFError:
            held = None
        assert held == ends.get(size), f"cut after {size} bytes"
    write("small.jsonl.zst", frames[0] * 2 + frames[1][:-2])
    bad("small.jsonl.zst", "small.jsonl.zst: damaged or cut short", "Compressed file ended")
    out = prepared("small", "small.jsonl.zst", "--skip-bad", "--valid-fraction", 0).out
    assert "left out: 1, the first: small.jsonl.zst: damaged or cut short" in out, out
    same_documents("small", texts[:1000] * 2 + texts[1000:2000])
    for name in ("nil.jsonl.zst", "nil.jsonl.gz"):
        bad(write(name, b""), ": damaged or cut short")


def test_empty_sources_are_refused():
    write("empty.jsonl", "\n\n")
    refused(call(prepare_data, "--output", "empty", *BYTE, "empty.jsonl"), "no text at all")
    os.makedirs("bare", exist_ok=True)
    refused(call(prepare_data, "--output", "empty", *BYTE, "bare"),
            "bare: has no file that is read in a folder", "unpack what is packed")


def test_missing_files_are_named_before_the_network_is_needed():
    words = ("--output", "o", "--mirror", "http://127.0.0.1:9", "--downloads", "none")
    refused(call(prepare_data, *words, "typo.txt"), "SOURCE typo.txt: no such file")
    refused(call(prepare_data, *words, "tinystory"), "did you mean tinystories?")
    refused(call(prepare_data, *words, "tinystories", "--valid", "typo.txt"),
            "--valid typo.txt: no such file")
    refused(call(prepare_data, *words, "a.jsonl"), "--tokenizer gpt2", "needs a network")


def test_bad_parts_can_be_left_out():
    nested = '{"text": ' + "[" * 100000 + "\n"
    write("mixed.jsonl", lines_of(TEXTS[:5]) + "{oops}\n" + lines_of(TEXTS[5:9]) + "[]\n" + nested)
    write_parquet("odd.parquet", [*TEXTS[9:12], "~badbad~"])
    write("odd.parquet", read("odd.parquet").replace(b"~badbad~", b"~\xffadbad~"))
    sources_of = ("mixed.jsonl", "cut.jsonl.gz", "cut.parquet", "odd.parquet")
    result = prepared("skip", *sources_of, "--skip-bad", "--valid-fraction", 0)
    assert "left out: 6, the first: mixed.jsonl, line 6: " in result.out, result.out
    assert "--skip-bad" not in result.out
    held = manifest("skip")
    assert [what.split(",")[0].split(":")[0] for what in held["first_skipped"]] == \
        ["mixed.jsonl"] * 3 + ["cut.jsonl.gz", "cut.parquet", "odd.parquet"]
    documents = byte_documents("skip", "train")
    assert {text.encode() for text in TEXTS[:12]} <= set(documents) and len(documents) > 20
    for name in sources_of:
        bad(name, "--skip-bad to leave it")


def test_bad_options_are_refused():
    good = ("--output", "o", *BYTE, "a.jsonl")
    refused(call(prepare_data, *good, "--valid-fraction", 1), "--valid-fraction 1: must", "below 1")
    refused(call(prepare_data, *good, "--shard-tokens", 0), "--shard-tokens 0", "from 1 on")
    refused(call(prepare_data, *good, "--jobs", 0), "--jobs 0")
    refused(call(prepare_data, *good, "--seed", -1), "--seed -1")
    refused(call(prepare_data, *BYTE, "a.jsonl"), "--output is missing", "--help")
    refused(call(prepare_data, *BYTE), "SOURCE", "--help")
    refused(call(prepare_data, *good, "--jbos", 3), "--jbos", "did you mean --jobs?",
            "scripts/prepare_data --help")
    refused(call(prepare_data, *good, "--nonsense=3"), "unknown option --nonsense (scripts")
    refused(call(prepare_data, "--output", "a.jsonl", *BYTE, "a.jsonl"), "--output a.jsonl: a file")
    refused(call(prepare_data, *good, "--jobs", "x"), "--jobs x: must be", "--help")
    assert not os.path.exists("o")


if __name__ == "__main__":
    main()
