"""scripts/prepare_choices and --eval-choices: sets in the forms people publish, scored by a model
that has learned what they ask, during a run and alone.
"""

import gzip
import json
import os
import random
import shlex
import struct

import pyarrow
import pyarrow.parquet
from check import ROOT, STANDIN, call, done, lines, main, read, records, refused, run, write
from llm8 import sources
from llm8.prepare_choices import main as prepare_choices
from llm8.prepare_data import main as prepare_data
from shard_tools import gpt2_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

LIKES = {"Anna": "boats", "Ben": "apples", "Clara": "houses", "David": "kites"}
THINGS, NUMBERS = list(LIKES.values()), ["two", "three", "seven"]
BYTE = ("--tokenizer", "byte")


def sentence(rng):
    name, count = rng.choice(list(LIKES)), rng.choice(NUMBERS)
    return f"There are {count} days left, says {name}, who likes", LIKES[name]


def questions(count):
    """(context, answers, which is right)"""
    rng = random.Random(2)
    rows = []
    for _ in range(count):
        context, thing = sentence(rng)
        answers = rng.sample(THINGS, len(THINGS))
        rows.append((context, [f"{answer} now." for answer in answers], answers.index(thing)))
    return rows


def numbers_of(path):
    """The questions of a set: (label, context, answers), from the bytes alone."""
    content = read(path)
    magic, version, count, longest = struct.unpack_from("<4i", content)
    assert magic == 20240522
    size = 2 * version
    numbers = struct.unpack_from(f"<{(len(content) - 1024) // size}{'H' if size == 2 else 'I'}",
                                 content, 1024)
    at, found, most = 0, [], 0
    for place in range(count):
        start, bytes_held, index, label, answers = numbers[at:at + 5]
        assert start == 65535 and index == place
        most, end = max(most, bytes_held), at + bytes_held // size
        parts, at = [], at + 5
        for _ in range(1 + answers):
            parts.append(list(numbers[at + 1:at + 1 + numbers[at]]))
            at += 1 + numbers[at]
        assert at == end
        found.append((label, parts[0], parts[1:]))
    assert at == len(numbers) and most == longest
    return found


def expected(rows):
    return [(label, list(context.encode()), [list((" " + answer).encode()) for answer in answers])
            for context, answers, label in rows]


def prepared(output, source, *words):
    done(prepare_choices, source, "--output", output, *BYTE, *words)
    return numbers_of(output)


def test_every_form_is_read():
    rows = questions(7)
    want = expected(rows)
    plain = [{"ind": 1, "ctx": c, "endings": a, "label": i} for c, a, i in rows]
    arc = [{"id": "x", "question": c, "choices": {"text": a, "label": list("ABCD")},
            "answerKey": "ABCD"[i]} for c, a, i in rows]
    numbered = [row | {"choices": row["choices"] | {"label": list("1234")},
                       "answerKey": "1234"["ABCD".index(row["answerKey"])]} for row in arc]
    mmlu = [{"question": c, "choices": a, "answer": i} for c, a, i in rows]
    spaced = [{"ctx": c, "endings": [" " + a[0], *a[1:]], "label": i} for c, a, i in rows]
    fields = ("--context-field", "stem", "--choices-field", "list", "--label-field", "right")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(arc), "arc.parquet")
    assert prepared("sets/arc.parquet.bin", "arc.parquet") == want
    for name, held, *words in (
            ("plain.jsonl", lines(plain)), ("plain.json", json.dumps(plain, indent=1)),
            ("plain.jsonl.gz", gzip.compress(lines(plain).encode())),
            ("numbered.jsonl", lines(numbered)), ("mmlu.jsonl", lines(mmlu)),
            # a letter is not the answer's place
            ("mixed.jsonl", lines(row | {"answerKey": "ABCD"[int(row["answerKey"]) - 1]}
                                  for row in numbered)),
            ("openbook.jsonl", lines({"question_stem": row["question"], "choices": row["choices"],
                                      "answerKey": row["answerKey"]} for row in arc)),
            ("own.jsonl", lines({"stem": c, "list": a, "right": "ABCD"[i]} for c, a, i in rows),
             *fields),
            # one space before an answer; the one after a question stays there
            ("spaced.jsonl", lines(spaced)),
            ("ended.jsonl", lines(row | {"ctx": row["ctx"] + " "} for row in spaced)),
            ("asked.jsonl", lines(row | {"context": "a passage"} for row in mmlu),
             "--context-field", "question"),
            ("bare.jsonl", lines(row | {"context": empty}  # an empty passage is none
                                 for row, empty in zip(mmlu, ["", None] * 4)))):
        assert prepared(f"sets/{name}.bin", write(name, held), *words) == want, name
    said = call(prepare_choices, "own.jsonl", "--output", "it's own.bin", *BYTE, *fields).out
    assert "it's own.bin," in shlex.split(said.splitlines()[-1]), said
    write("line.jsonl", lines([{"ctx": "a:\n", "endings": ["b", "  c"], "label": 1}]))
    assert prepared("sets/l.bin", "line.jsonl") == [(1, [*b"a:"], [[*b"\nb"], [*b"\n  c"]])]
    before = prepared("sets/b.bin", "plain.jsonl", "--before", "<|endoftext|>")
    assert before == [(i, [256, *c], a) for i, c, a in want]
    assert want != expected(questions(8))[1:]
    write("lone.jsonl", lines([{"ctx": "a\ud800", "endings": ["b", "\udfffc"], "label": 1}]))
    assert prepared("sets/lone.bin", "lone.jsonl") == expected([("a?", ["b", "?c"], 1)])
    tokenizer = os.path.join(ROOT, "test", "golden", "chat", "tokenizer.json")
    call(prepare_choices, "lone.jsonl", "--output", "sets/lone2.bin", "--tokenizer", tokenizer)
    assert len(numbers_of("sets/lone2.bin")) == 1


def test_hellaswag_is_written_as_by_lm_eval():
    """The texts that lm-eval 0.4.13 itself makes of these rows."""
    context = "A woman sits on the quay. [title] Lay the net flat [step] Find the hole."
    rows = [{"activity_label": "Mending a net", "ctx_a": context, "ctx_b": "she IS",
             "ctx": context + " she IS", "label": "1",
             "endings": ["takes  a needle. [substeps] Tie a knot.", " [step] sings"]},
            {"activity_label": "Work", "ctx_a": "[header] How to row [title]", "ctx_b": "",
             "ctx": "[header] How to row [title]", "label": "0", "endings": ["Sit. ", "Stand."]}]
    write("hub.jsonl", lines(rows))
    words = ("hub.jsonl", "--output", "hub.bin", *BYTE)
    out = call(prepare_choices, *words).out
    assert "text: as lm-eval writes HellaSwag" in out and numbers_of("hub.bin") == [
        (1, list(b"Mending a net: A woman sits on the quay.. Lay the net flat Find the hole. "
                 b"She is"), [list(b" takes a needle. Tie a knot."), list(b"  sings")]),
        (0, list(b"Work: How to row."), [list(b"  Sit."), list(b"  Stand.")])], out
    assert struct.unpack_from("<i", read("hub.bin"), 20) == (1,)
    out = call(prepare_choices, *words, "--context-field", "ctx").out
    assert "text: the question's field" in out and numbers_of("hub.bin")[1] == \
        (0, list(b"[header] How to row [title]"), [list(b" Sit. "), list(b" Stand.")]), out
    assert struct.unpack_from("<i", read("hub.bin"), 20) == (0,)
    write("hub.jsonl", lines([*rows, {"ctx": "a", "endings": ["b", "c"], "label": 0}]))
    refused(call(prepare_choices, *words), "hub.jsonl: 2 of 3", "activity_label", "--context-field")
    write("hub.jsonl", lines(rows))
    call(prepare_choices, *words)


def sentencepiece(path):
    """Writes a tokenizer that writes a space of its own, and a token, before a text."""
    vocab = {character: place for place, character in enumerate(["<unk>", "<s>", *"▁abc:\n"])}
    merges = [("▁", "a"), ("▁", "b"), (":", "\n"), ("▁", ":"), ("▁a", "▁:")]
    model = models.BPE(vocab | {"".join(pair): len(vocab) + place
                                for place, pair in enumerate(merges)}, merges, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                  for text in ("<unk>", "<s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    tokenizer.save(path)
    return tokenizer.token_to_id


def test_answers_are_cut_from_the_whole_text():
    """As lm-eval does: the tokens after as many as the question alone has."""
    token = sentencepiece("piece/tokenizer.json")
    words = ("piece.jsonl", "--output", "piece.bin", "--tokenizer", "piece/tokenizer.json",
             "--end-of-text", "<s>")
    write("piece.jsonl", lines([{"ctx": "a b", "endings": ["a", "ca"], "label": 0}]))
    result = call(prepare_choices, *words)
    assert "each after <s>" in result.out and not result.err, result
    answers = [[token("▁a")], [token("▁"), token("c"), token("a")]]
    question = [token("▁a"), token("▁b")]
    assert numbers_of("piece.bin") == [(0, [token("<s>"), *question], answers)]
    call(prepare_choices, *words, "--before", "none")
    assert numbers_of("piece.bin") == [(0, question, answers)]
    write("piece.jsonl", lines([{"ctx": "a:\n", "endings": ["b", "c"], "label": 0}]))
    result = call(prepare_choices, *words)
    assert "warning: in 1 of 1 question a token belongs to both" in result.err, result.err
    assert numbers_of("piece.bin")[0][2] == [[token("b")], [token("c")]]
    write("piece.jsonl", lines([{"ctx": "a", "endings": [":", "c"], "label": 0}]))
    refused(call(prepare_choices, *words), "piece.jsonl, line 1: ", "no token of its own")


def test_labels_that_are_texts_are_doubted():
    def said(*rows):
        write("doubt.jsonl", lines([{"question": "a", "choices": choices, "answer": answer}
                                    for choices, answer in rows]))
        return done(prepare_choices, "doubt.jsonl", "--output", "doubt.bin", *BYTE).err

    warning = said((["1", "2", "3"], "2"), (["x", "y"], "1"), ([" B", " A"], "A"))
    assert warning.startswith("warning: in 2 of 3 questions the right answer's number"), warning
    assert "it was read as ' 3' in the first" in warning and len(warning.splitlines()) == 1
    assert [row[0] for row in numbers_of("doubt.bin")] == [2, 1, 0], "a warning changes nothing"
    assert not said((["0", "1"], "1"), (["1", "2", "3"], 1), (["x", "y"], "A"), (["1", "1"], "1"),
                    ({"text": ["4", "2", "1"], "label": ["1", "2", "4"]}, "1"))


def test_gpt2_numbers_are_gpt2s():
    write("g.jsonl", lines([{"ctx": "A man is sitting on a roof. he", "label": 1,
                             "endings": ["is using wrap.", "starts pulling up roofing."]}]))
    call(prepare_choices, "g.jsonl", "--output", "g.bin", "--tokenizer", gpt2_tokenizer())
    (label, context, answers), = numbers_of("g.bin")
    assert label == 1 and context == [32, 582, 318, 5586, 319, 257, 9753, 13, 339]
    assert answers[0] == [318, 1262, 14441, 13]


# of the GPU trainer: no model is too small for FP8; what is read before it is written is NaN
GUARDED = {"LLM8_TEST_SMALL_FP8": "1", "LLM8_GUARD": "1"}
TINY = ("--model", "llama-tiny", "--data", "learn/train_*.bin", "--valid-data", "learn/val_*.bin",
        "--micro-batch-size", 8)


def scores(out, name):
    rows = [line for line in out.splitlines() if line.startswith(f"{name} after step ")]
    return [float(row.split("| ")[1].split("%")[0]) for row in rows]


def test_a_model_learns_to_answer():
    rng = random.Random(1)
    text = "".join("{} {} now.\n".format(*sentence(rng)) for _ in range(4000))
    write("learn.txt", text)
    done(prepare_data, "--output", "learn", *BYTE, "--jobs", 1, "learn.txt")
    write("quiz.jsonl", lines([{"ctx": c, "endings": a, "label": i} for c, a, i in questions(80)]))
    prepared("quiz.bin", "quiz.jsonl")
    words = (*TINY, "--train-iters", 300, "--lr", "3e-3", "--lr-warmup-iters", 20, "--save", "run",
             "--eval-interval", 100, "--save-interval", 300, "--eval-choices", "quiz.bin",
             "--log-interval", 300)
    run_out = run("train_gpt", *words).out
    during = scores(run_out, "quiz")
    assert "choices     quiz, 80 questions\n" in run_out and "of 80 |" in run_out
    assert len(during) == 3 and during[-1] > 90, f"right: {during}"
    assert "perplexity" in run_out
    scored = records("run/metrics.jsonl", "choices")
    assert [row["step"] for row in scored] == [100, 200, 300]
    assert abs(100 * scored[-1]["accuracy"] - during[-1]) < 0.01
    assert scored[-1]["name"] == "quiz" and scored[-1]["questions"] == 80
    assert scored[-1]["text"] == "fields"
    run("test/metrics_tool.py", "run/metrics.jsonl")
    # alone: the same model, the same score; without any shards too
    before = sorted(os.listdir("run"))
    alone = run("train_gpt", *TINY, "--resume", "run/latest", "--eval-only", "--eval-choices",
                "quiz.bin").out
    assert scores(alone, "quiz") == during[-1:] and "eval after step 300" in alone
    bare = run("train_gpt", "--model", "llama-tiny", "--load", "run/latest", "--eval-only",
               "--eval-choices", "quiz.bin", "--micro-batch-size", 3).out
    assert scores(bare, "quiz") == during[-1:]
    hub = run("train_gpt", "--model", "llama-tiny", "--load", "run/latest", "--eval-only",
              "--eval-choices", "hub.bin").out
    assert "of 2, lm-eval's text |" in hub, hub
    for precision in ((), ("--fp8-format", "hybrid", "--fp8-lm-head")):
        if not os.path.exists(os.path.join(ROOT, STANDIN)):
            break  # there is no C++ compiler
        alone = run(STANDIN, *TINY, *precision, "--no-cuda-graphs", "--load", "run/latest",
                    "--eval-only", "--eval-choices", "quiz.bin", env=GUARDED).out
        assert abs(scores(alone, "quiz")[0] - during[-1]) < 4, (precision, alone)
    untrained = run("train_gpt", "--model", "llama-tiny", "--eval-only", "--eval-choices",
                    "quiz.bin")
    assert scores(untrained.out, "quiz")[0] < 60
    assert sorted(os.listdir("run")) == before


def test_bad_sets_are_refused():
    def bad(source, *parts, words=()):
        refused(call(prepare_choices, source, "--output", "bad.bin", *BYTE, *words), *parts)
        assert not os.path.exists("bad.bin")

    row = {"ctx": "a", "endings": ["b", "c"], "label": 0}
    bad("nothing.jsonl", "nothing.jsonl: no such file", "hellaswag")
    bad(write("x.md", "a"), "x.md: must be of .jsonl")
    bad(write("x.jsonl", lines([row, {**row, "label": 2}])), "x.jsonl, line 2: ",
        "the right answer is 2, none of 0, 1")
    bad(write("x.jsonl", lines([{**row, "label": "C"}])), "the right answer is C, none of 0, 1")
    bad(write("x.jsonl", "\n" + lines([{"text": "a"}])), "line 2", "no question under",
        "it has text",
        "--context-field")
    for name in ("context", "question", "passage", "article"):
        bad(write("x.jsonl", lines([row, {**row, name: "d"}])), "x.jsonl, line 2: ",
            f"both 'ctx' and '{name}'; write the whole question into one field", "--context-field")
    bad(write("x.jsonl", lines([{**row, "endings": ["b"]}])), "line 1", "no list of texts")
    bad(write("x.jsonl", lines([{**row, "ctx": " "}])), "line 1", "the question is no text")
    bad(write("x.jsonl", lines([row]) + "{oops\n"), "x.jsonl, line 2: no JSON object: b'{oops\\n'")
    bad(write("x.jsonl", "[1]\n"), "x.jsonl, line 1: no JSON object")
    bad(write("x.jsonl", "\n"), "x.jsonl: no questions")
    bad(write("x.parquet", "PAR1"), "x.parquet: damaged or cut short")
    bad(write("x.jsonl.zst", sources.zstd.compress(lines([row]).encode())[:-1]),
        "x.jsonl.zst: damaged or cut short")
    bad(write("x.jsonl", "[" * 100000), "x.jsonl, line 1: no JSON object")
    bad(write("x.jsonl", lines([{**row, "ctx": "a" * 40000}])), "x.jsonl: question 0 has",
        "more than 65535", "shorten")
    os.makedirs("folder", exist_ok=True)
    for place, said in (("x.jsonl/x.bin", "x.jsonl: File exists"),
                        ("folder", "folder: Is a directory")):
        refused(call(prepare_choices, write("y.jsonl", lines([row])), "--output", place, *BYTE),
                "error: --output ", said)
    bad("hellaswag", "hellaswag", "cannot be reached", words=("--mirror", "http://127.0.0.1:9"))


def test_wrong_sets_are_refused():
    tiny = ("train_gpt", *TINY, "--train-iters", 1)
    refused(run(*tiny, "--eval-choices", "none*.bin", check=False), "--eval-choices none*.bin",
            "prepare_choices")
    refused(run(*tiny, "--eval-choices", "quiz.bin", "--vocab-size", 90, check=False),
            "outside the vocabulary of 90")
    refused(run("train_gpt", "--load", "run/latest", "--eval-only", "--quiet", "--eval-choices",
                "quiz.bin", "--seq-length", 4, check=False), "quiz.bin: answer 0 of question 0",
            "--seq-length 4")
    content = bytearray(read("quiz.bin"))
    content[16] ^= 1  # the tokenizer's fingerprint
    refused(run(*tiny, "--eval-choices", write("other.bin", bytes(content)), check=False),
            "other.bin: made with another tokenizer than learn/tokenizer.bin")
    refused(run("train_gpt", "--eval-only", check=False), "--eval-only: needs --valid-data or "
            "--eval-choices")


if __name__ == "__main__":
    main()
