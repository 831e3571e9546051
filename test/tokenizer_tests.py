"""Tokenizers: what prepare_data and ./tokenize make of a text is what the tokenizer's own library
makes of it; samples and prompts are text; what does not fit together is refused.
"""

import io
import json
import os
import random
import struct
import unicodedata
import zlib

import tokenizers
from check import SHARED, call, done, fails, main, read, refused, run, says, write
from llm8.prepare_data import main as prepare_data
from llm8.vocabulary import (
    CLASS_UNSTABLE,
    CUT_LLAMA3_DIGITS,
    LLAMA3_PATTERN,
    character_ranges,
    open_vocabulary,
)
from shard_tools import cut, gpt2_tokenizer, sentences, stream, tokens_of
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
BEGIN = "<|begin_of_text|>"
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
TEXTS = sentences(3, 60)


def byte_level(pattern=None, words=(), digits=False):
    """A byte-pair encoding of some 700 tokens, or that learns these words too, trained here.
    digits: each is cut alone."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        step = pre_tokenizers.Sequence([split, step])
    if digits:
        step = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), step])
    tokenizer.pre_tokenizer = step
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000 if words else 700, special_tokens=[END],
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([*TEXTS * 2, *words], trainer)
    return tokenizer


def save(tokenizer, folder):
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(f"{folder}/tokenizer.json")
    return f"{folder}/tokenizer.json"


POOL = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "'s", "'S", "'ll", "'re", "a", "The", " 12",
        "345", "!", "?!...", "é", "漢字", "🙂", "\u00a0", "\u2003", "\u3000", "²", "Ⅷ",
        "\u0301", "x" * 300, " " * 50, END, "\x1c", "\x85", "_", "\x00", "0" * 7, "א"]


def hostile_texts(count, pool=POOL):
    """Texts of what tokenizers treat apart: quotes, white space of every kind, scripts, digits."""
    rng = random.Random(5)
    known = [chr(code) for code in range(0x20, 0x1F000)
             if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    return ["".join(rng.choice(pool) if rng.random() < 0.8 else rng.choice(known)
                    for _ in range(rng.randrange(1, 400))) for _ in range(count)]


def c_tokens(tokenizer_bin, texts):
    """Each text's tokens by the C encoder."""
    names = [write(f"hostile/{place}", text) for place, text in enumerate(texts)]
    run("tokenize", "--output-prefix", "hostile/out", "--valid-fraction", 0, "--tokenizer",
        tokenizer_bin, *names)
    end = struct.unpack_from("<4i", read(tokenizer_bin))[3]
    return cut(tokens_of("hostile/out_train.bin")[0], end)


def same_in_c(vocabulary, encode, name):
    texts = hostile_texts(60) + TEXTS[:10]
    write(f"{name}.bin", vocabulary.tokenizer_bin())
    ours, theirs = c_tokens(f"{name}.bin", texts), [encode(text) for text in texts]
    assert len(ours) == len(theirs)
    for text, a, b in zip(texts, ours, theirs):
        assert a == b, f"{name}: {text[:80]!r}"
    assert vocabulary.end_of_text not in sum(theirs, []), "a text that names the end has ended"


def test_the_c_encoder_is_the_librarys():
    for name, pattern, digits in (("gpt2-like", None, False), ("smollm-like", None, True),
                                  ("llama3-like", LLAMA3_PATTERN, False)):
        tokenizer = byte_level(pattern, digits=digits)
        path = save(tokenizer, name)
        vocabulary = open_vocabulary({"tokenizer": path})
        tokenizer.encode_special_tokens = True
        same_in_c(vocabulary, lambda text, t=tokenizer: t.encode(text).ids, name)
    assert fails(same_in_c, vocabulary, lambda text: tokenizer.encode(text + " ").ids, "fault")


def test_what_the_c_encoder_would_cut_otherwise_is_unknown():
    """Words that the library cuts out of a text, or makes of whole words alone."""
    def cut_with(tokenizer, words=(), ignored=False):
        """The tokenizer with entries of the vocabulary that no merge makes."""
        held = json.loads(tokenizer.to_str())
        held["model"]["ignore_merges"] = ignored
        for word in words:
            held["model"]["vocab"][word] = max(held["model"]["vocab"].values()) + 1
        write("odd/tokenizer.json", json.dumps(held))
        return open_vocabulary({"tokenizer": "odd/tokenizer.json"})

    plain, added, special = byte_level(), byte_level(), byte_level()
    added.add_tokens(["a", tokenizers.AddedToken("foo bar", lstrip=True)])
    special.add_special_tokens(["<|im_start|>"])
    assert cut_with(plain).cut == cut_with(special).cut == 2
    vocabulary = cut_with(added)
    assert vocabulary.cut == 0
    refused(run("tokenize", "--output-prefix", "x", "--tokenizer",
                write("odd.bin", vocabulary.tokenizer_bin()), write("odd.txt", "a foo bar"),
                check=False), "does not say how text is cut")
    # the library makes zq of the whole word at most, our encoder of any z and q that meet; zqz is
    # never two tokens, so that both take it for a whole word
    for ignored in (False, True):
        assert cut_with(plain, [], ignored).cut == 2 and cut_with(plain, ["zq"], ignored).cut == 0
        assert cut_with(plain, ["zqz"], ignored).cut == (2 if ignored else 0)
    whole = cut_with(plain, ["zqz"], True)
    assert c_tokens(write("whole.bin", whole.tokenizer_bin()), ["zqz zqzq"]) == \
        [whole.encode("zqz zqzq")]
    assert whole.encode("zqz") == [whole.size - 1]


def unstable_characters():
    return {chr(code) for first, last, kind in character_ranges(True) if kind >= CLASS_UNSTABLE
            for code in range(first, last + 1)}


def test_qwens_texts_are_the_librarys():
    """Its added tokens are recognised in any text, and it normalizes to NFC: texts that NFC leaves
    as they are have the library's tokens, others are refused."""
    tokenizer, unstable = byte_level(QWEN_PATTERN), unstable_characters()
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in (
        "<tool_call>", "<tool", "call>12", "    ")])
    tokenizer.normalizer = normalizers.NFC()
    vocabulary = open_vocabulary({"tokenizer": save(tokenizer, "qwen-like")})
    assert vocabulary.cut == CUT_LLAMA3_DIGITS
    path = write("qwen-like.bin", vocabulary.tokenizer_bin())
    texts = ["".join(letter for letter in text if letter not in unstable) for text in
             hostile_texts(60, POOL + ["<tool", "_call>", "<tool_call>", "call>", "     "])]
    assert any(vocabulary.size - 4 in vocabulary.encode(text) for text in texts)
    ours, theirs = c_tokens(path, texts), [vocabulary.encode(text) for text in texts]
    for text, a, b in zip(texts, ours, theirs):
        assert a == b, f"{text[:80]!r}"
    refused(run("tokenize", "--output-prefix", "nfc", "--tokenizer", path,
                write("nfc.txt", "plain\nthen e\u0301" + " and on" * 9), check=False),
            "nfc.txt: ", "may change '\u0301' at byte 12", "prepare_data")
    refused(run("tokenize", "--output-prefix", "nfc", "--tokenizer", path, "--valid-fraction", 0,
                write("nfc.txt", "ten bytes\n" * 200000 + "e\u0301"), check=False),
            "nfc.txt: ", "at byte 2000001;")
    write("qwen-like/tokenizer.bin", read(path))
    words = ("train_gpt", "--model", "llama-tiny", "--vocab-size", vocabulary.size, "--tokenizer",
             "qwen-like/tokenizer.bin", "--sample-only", "--sample-length", 1, "--sample-prompt")
    says(run(*words, "a <tool_call>é").out, "a <tool_call>é")
    refused(run(*words, "a <tool_call>e\u0301", "--quiet", check=False), "--sample-prompt: the "
            "tokenizer qwen-like/tokenizer.bin", "at byte 14", "scripts/chat")
    tokenizer.normalizer = None
    tokenizer.add_tokens([tokenizers.AddedToken("e\u0301", normalized=True)])
    assert open_vocabulary({"tokenizer": save(tokenizer, "two-kinds")}).cut == 0


def test_bytes_are_tokens_only_as_the_library_has_them():
    """Without merges a token is a byte, but its id may be another number, a text may be normalized,
    and other tokens may be added. The folder's name says nothing."""
    letters = {letter: index for index, letter in enumerate(sorted(
        pre_tokenizers.ByteLevel.alphabet()))}
    write("byte_texts/a.txt", "Caf\u00e9 <tool>\n" * 9)
    for normalizer, added, kind in ((None, [], 1), (normalizers.NFD(), [], 0),
                                   (normalizers.NFC(), [], 0), (None, ["<tool>"], 0)):
        tokenizer = tokenizers.Tokenizer(models.BPE(letters, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.normalizer = normalizer
        tokenizer.add_special_tokens([END])
        tokenizer.add_tokens(added)
        vocabulary = open_vocabulary({"tokenizer": save(tokenizer, "byte")})
        assert vocabulary.cut == kind
        expected = tokenizer.encode("Caf\u00e9 <tool>\n" * 9).ids
        output = f"byte_{kind}_{normalizer}_{len(added)}"
        prepared(output, "byte_texts", "--tokenizer", "byte/tokenizer.json", "--valid-fraction", 0)
        assert stream(output, "train") == [256, *expected]
        if kind:
            assert c_tokens(write("permuted.bin", vocabulary.tokenizer_bin()),
                            ["Caf\u00e9 <tool>\n" * 9]) == [expected]


def test_stable_characters_are_in_nfc_together():
    rng, unstable = random.Random(8), unstable_characters()
    stable = [letter for letter in map(chr, range(0x110000))
              if letter not in unstable and unicodedata.category(letter) != "Cs"]
    assert {*"\u0301\u0958\u2126\u1161\u0378"} <= unstable and not {*"aé漢한ñЖあ🙂²"} & unstable
    nfc = normalizers.NFC()
    for _ in range(300):
        text = "".join(rng.choice(stable) for _ in range(300))
        assert nfc.normalize_str(text) == text


def test_tokens_too_long_for_the_file_are_unknown():
    """A length is one byte in tokenizer.bin: of a longer token our encoder would take the head."""
    rng = random.Random(6)
    word = "".join(rng.choice("abcdefgh") for _ in range(300))
    for length in (254, 255, 256, 300):
        tokenizer = byte_level(words=[word[:length]] * 2000)
        vocabulary = open_vocabulary({"tokenizer": save(tokenizer, "long_token")})
        assert len(tokenizer.encode(word[:length]).ids) == 1, "the token is not learned"
        assert vocabulary.cut == (2 if length == 254 else 0), length
        texts = [word, word[:254], word[:255], f"a {word[:length]} b"]
        if length == 254:
            longest = write("longest.bin", vocabulary.tokenizer_bin())
            assert c_tokens(longest, texts) == [*map(vocabulary.encode, texts)]
    # tokenizers of before say how text is cut, all the same
    entries = bytearray(vocabulary.tokenizer_bin())
    entries[16] = 2
    refused(run("tokenize", "--output-prefix", "x", "--tokenizer",
                write("before.bin", bytes(entries)), "odd.txt", check=False), "before.bin: token ",
            "has 255 bytes or more", "scripts/prepare_data")


def checksum(vocabulary):
    """Returns a checksum of the ids of fixed texts, and how many they are."""
    rng = random.Random(9)
    texts = ["".join(rng.choice(POOL) for _ in range(200)) for _ in range(40)] + sentences(3, 60)
    ids = [token for text in texts for token in vocabulary.encode(text)]
    return len(ids), zlib.crc32(struct.pack(f"<{len(ids)}I", *ids))


def test_gpt2_is_tiktokens():
    """tiktoken 0.14.0 gave these with GPT-2's ranks, cut as GPT-2 does and as Llama 3 does."""
    vocabulary = open_vocabulary({"tokenizer": gpt2_tokenizer()})
    assert vocabulary.size == 50257 and vocabulary.end_of_text == 50256
    assert checksum(vocabulary) == (36492, 531232895)
    same_in_c(vocabulary, vocabulary.encode, "gpt2")
    # the same merges, of other words
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated")
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer.from_str(vocabulary.json)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, step])
    other = open_vocabulary({"tokenizer": save(tokenizer, "other")})
    assert checksum(other) == (37170, 845446713) and other.cut == 3
    same_in_c(other, other.encode, "other")
    # what goes into checkpoints is the same tokenizer
    for one in (vocabulary, other):
        exported = tokenizers.Tokenizer.from_str(one.json)
        exported.encode_special_tokens = True
        for text in hostile_texts(40):
            assert exported.encode(text).ids == one.encode(text)


def test_characters_are_the_librarys():
    """The classes in tokenizer.bin, character by character, newer ones than Python's included."""
    classes = {code: kind for first, last, kind in character_ranges()
               for code in range(first, last + 1)}
    for kind, pattern in ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s")):
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
        for code in [*range(0x20, 0x2000), *range(0xA640, 0xB000), 0x1F100, 0x1F10C, 0x323AF]:
            assert bool(split.pre_tokenize_str(chr(code))) == (classes.get(code) == kind), hex(code)


def test_long_texts_are_cut_where_words_end():
    words = {"tokenizer": gpt2_tokenizer()} if os.path.exists(SHARED) else None
    vocabulary = open_vocabulary(words or {"tokenizer": save(byte_level(), "long")})
    from llm8 import prepare_data as prepare

    text = "\n".join("".join(hostile_texts(20)) + "".join(TEXTS) for _ in range(3)) + " end.\nOf it"
    line = " ".join(map(" ".join, zip(hostile_texts(60), sentences(3, 60)))).replace("\n", " ")
    prepare.LONG_TEXT = 500
    blank = byte_level()
    blank.add_tokens(["a b"])
    known = [byte_level(), byte_level(LLAMA3_PATTERN), byte_level(digits=True)]
    unknown = [sentencepiece(), unigram(), blank]
    for held, at_spaces in ((vocabulary, True), *(
            (open_vocabulary({"tokenizer": save(tokenizer, f"long_{place}")}), place < len(known))
            for place, tokenizer in enumerate(known + unknown))):
        for whole in (text, line):
            parts = [part for part in prepare.tokens_of(held, whole) if part]
            assert sum(parts, []) == held.encode(whole), held.name
            assert (len(parts) > 5) == (at_spaces or whole is text), held.name


def prepared(output, *words):
    return done(prepare_data, "--output", output, "--jobs", 1, *words)


def decoded(tokenizer_bin, tokens):
    content = read(tokenizer_bin)
    _, _, size, end = struct.unpack_from("<4i", content)
    entries, at = [], 1024
    for _ in range(size):
        entries.append(content[at + 1:at + 1 + content[at]])
        at += 1 + content[at]
    return b"".join(entries[token] for token in tokens if token != end)


def sentencepiece():
    """As Llama 1 and 2's: it writes a space before a text, and no token crosses lines."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                                 normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator("".join(TEXTS).splitlines(), trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False))
    return tokenizer


def unigram():
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator("".join(TEXTS).splitlines(), trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False))
    return tokenizer


def test_every_kind_of_tokenizer_reads_back():
    text = "Anna counts 12 boats. Ben sees three"
    write("plain/a.txt", text)
    for name, tokenizer in (("bpe", byte_level()), ("sp", sentencepiece()),
                            ("unigram", unigram())):
        prepared(f"kind_{name}", "plain", "--tokenizer", save(tokenizer, name),
                 "--valid-fraction", 0)
        tokens = stream(f"kind_{name}", "train")[1:]
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids
        assert decoded(f"kind_{name}/tokenizer.bin", tokens).decode().strip() == text
        assert read(f"kind_{name}/tokenizer.json") == read(f"{name}/tokenizer.json")
    # our encoder does not know the last two, and reports that
    result = run("tokenize", "--output-prefix", "x", "--tokenizer", "kind_sp/tokenizer.bin",
                 "plain/a.txt", check=False)
    refused(result, "--tokenizer kind_sp/tokenizer.bin", "does not say how text is cut")


def test_other_rules_of_the_same_tokens_are_another_tokenizer():
    """Token bytes are the same with another normalizer: the folder is refused, and a stopped run
    tokenizes anew."""
    tokenizer = byte_level()
    path = save(tokenizer, "rules")
    write("rules_text/a.txt", "ANNA COUNTS")
    words = ("rules_text", "--tokenizer", path, "--valid-fraction", 0)
    prepared("rules_out", *words)
    before = stream("rules_out", "train")
    tokenizer.normalizer = normalizers.Lowercase()
    save(tokenizer, "rules")
    refused(call(prepare_data, "--output", "rules_out", *words), "already made",
            "other tokenizer_json)")
    # the cache of units in .work: stopped by a bad source, with the other rules, and then mended
    write("rules_text/b.jsonl", "{oops\n")
    tokenizer.normalizer = None
    save(tokenizer, "rules")
    refused(call(prepare_data, "--output", "rules_new", "--jobs", 1, *words), "b.jsonl")
    tokenizer.normalizer = normalizers.Lowercase()
    save(tokenizer, "rules")
    write("rules_text/b.jsonl", "")
    prepared("rules_new", *words)
    after = stream("rules_new", "train")
    assert after[1:] == tokenizer.encode("ANNA COUNTS").ids and after != before, (before, after)


def test_large_vocabularies_have_wide_shards():
    vocab = {f"w{place}": place for place in range(70000)} | {END: 70000}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    write("wide/a.txt", " ".join(f"w{place}" for place in range(69000, 70000)))
    prepared("wide_out", "wide", "--tokenizer", save(tokenizer, "wide_json"),
             "--valid-fraction", 0)
    assert stream("wide_out", "train") == [70000, *range(69000, 70000)]
    words = ("train_gpt", "--model", "gpt2-tiny", "--data", "wide_out/train_*.bin",
             "--micro-batch-size", 1, "--train-iters", 1)
    assert "--vocab-size 70001" in run(*words).out
    refused(run(*words, "--vocab-size", 257, check=False), "tokenizer.bin", "vocabulary 70001",
            "larger than the model's 257", "--vocab-size")


def test_what_a_tokenizer_does_not_know_is_counted():
    """Words without a token; letters whose bytes the tokenizer never saw; and no text at all."""
    write("odd/a.jsonl", "\n".join(json.dumps({"text": text}) for text in ("a é", "a a", "\0 a")))
    words = tokenizers.Tokenizer(models.WordLevel({END: 0, "?": 1, "a": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([END])
    few = tokenizers.Tokenizer(models.BPE())
    few.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    few.train_from_iterator(["a a"], trainers.BpeTrainer(special_tokens=[END], show_progress=False))
    random = byte_level()
    random.model.dropout = 0.5
    for name, tokenizer, *warned in (
            ("words", words, "2 of 9 tokens: they are the tokenizer's unknown token",
             "1 of 3 texts: they have NUL bytes"),
            ("few", few, "2 of 3 texts: the tokenizer has no token for some of their characters"),
            ("drops", random, "the tokenizer's dropout of 0.5 is not used"),
            ("all", byte_level(), "!unknown", "!no token for")):
        says(prepared(f"odd_{name}", "odd", "--tokenizer", save(tokenizer, f"odd_t_{name}"),
                      "--valid-fraction", 0).err, *warned)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    for name in ("odd.parquet", "odd.arrow", "odd.jsonl", "odd.jsonl.gz", "odd.jsonl.zst",
                 "odd.json", "odd.csv", "odd.txt"):
        write(name, pointer)
        refused(call(prepare_data, "--output", "odd_lfs", "--tokenizer", "byte", name),
                f"{name}: a pointer of Git LFS")
    for encoding in ("cp1252", "utf-16"):
        write("encoded.txt", "“é”".encode(encoding))
        refused(call(prepare_data, "--output", "encoded", "--tokenizer", "odd_t_all",
                     "encoded.txt"), f"not UTF-8 at byte 0; convert the file (iconv -f {encoding} ")
    write("odd_tokenizer.json", pointer)
    refused(call(prepare_data, "--output", "odd_lfs", "--tokenizer", "odd_tokenizer.json", "odd"),
            "odd_tokenizer.json: a pointer of Git LFS")


def test_documents_are_bounded_as_asked():
    path = save(byte_level(), "bounds")
    texts = [{"text": f"one {END} two"}, {"text": "b"}]
    write("named/a.jsonl", "\n".join(map(json.dumps, texts)))
    result = prepared("bounds_out", "named", "--tokenizer", path, "--valid-fraction", 0,
                      "--no-shuffle")
    assert "warning: 1 of 2 texts: they contain the end-of-text token's name" in result.err
    tokens = stream("bounds_out", "train")
    assert tokens[0] == 0 and tokens.count(0) == 2, "a document ended by naming the end"
    prepared("bounds_after", "named", "--tokenizer", path, "--valid-fraction", 0, "--no-shuffle",
             "--before", "none", "--after", END)
    assert stream("bounds_after", "train") == tokens[1:] + [0]
    refused(call(prepare_data, "--output", "o", "named", "--tokenizer", path, "--before", "<s>"),
            "--before <s>", "no special token", END)
    refused(call(prepare_data, "--output", "o", "named", "--tokenizer", path, "--end-of-text", "x"),
            "--end-of-text x", "no special token", END)


def test_texts_without_tokens_are_left_out():
    strips = byte_level()
    strips.normalizer = tokenizers.normalizers.Strip()
    path = save(strips, "strips")
    for place, text in enumerate((" ", "b", "  ")):  # each a part of its own
        write(f"blank/{place}.jsonl", json.dumps({"text": text}))
    words = ("--tokenizer", path, "--valid-fraction", 0, "--before", "none")
    prepared("blank_out", "blank", *words)
    assert stream("blank_out", "train") == strips.encode("b").ids
    refused(call(prepare_data, "--output", "blanks", "blank/0.jsonl", *words), "no text at all")


TINY = ("--model", "llama-tiny", "--micro-batch-size", 1, "--train-iters", 1, "--sample-length", 40,
        "--sample-only", "--quiet")


def test_samples_go_on_from_a_prompt():
    path = save(byte_level(), "prompt")
    write("prompt_text/a.txt", "".join(TEXTS))
    prepared("prompt_out", "prompt_text", "--tokenizer", path)
    data = ("--vocab-size", 700, "--data", "prompt_out/train_*.bin")
    prompt = "Anna sees “three” red  boats"
    result = run("train_gpt", *TINY, *data, "--sample-prompt", prompt)
    sample = result.out
    assert sample.startswith(prompt) and len(sample) > len(prompt) + 5, sample
    other = run("train_gpt", *TINY, *data, "--sample-prompt", prompt + "!")
    assert other.out[len(prompt) + 1:] != sample[len(prompt):]
    again = run("train_gpt", *TINY, *data, "--sample-prompt", prompt)
    assert again.out == sample
    refused(run("train_gpt", *TINY, "--data", "kind_sp/train_*.bin", "--vocab-size", 600,
                "--seq-length", 8, "--sample-prompt", "x", check=False),
            "--sample-prompt", "the tokenizer kind_sp/tokenizer.bin",
            "does not say how text is cut", "prepare_data")
    write("bare/x.bin", read("prompt_out/train_00000.bin"))
    refused(run("train_gpt", *TINY, "--data", "bare/x.bin", "--vocab-size", 700, "--sample-prompt",
                "x", check=False), "--sample-prompt", "no tokenizer.bin", "--tokenizer")


def decoded_output(content):
    """Bytes as run() returns them."""
    return io.TextIOWrapper(io.BytesIO(content), errors="replace").read()


def begins(folder):
    """The vocabulary of a tokenizer that writes a token before a text, that token, and its end."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([BEGIN])
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    assert open_vocabulary({"tokenizer": save(tokenizer, folder)}).begin_of_text == end
    tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, begin)])
    return open_vocabulary({"tokenizer": save(tokenizer, folder)}), begin, end


def end_of_sample(vocabulary, first, ends, *words):
    """The token among these that ends a sample, which its numbers go beyond, if there is one."""
    ids = [*map(int, run("train_gpt", *TINY, *words, "--sample-tokens", first).out.split())]
    at = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    text = b"".join(vocabulary.tokens[token] for token in ids[:at])
    assert run("train_gpt", *TINY, *words).out == decoded_output(text) + "\n"
    return ids[at:at + 1]


def test_samples_begin_as_texts_do():
    """With the token that the tokenizer itself writes before a text, or that prepare_data wrote."""
    vocabulary, begin, end = begins("begin")
    assert (vocabulary.begin_of_text, vocabulary.end_of_text) == (begin, end)
    text, tokens = TEXTS[0], vocabulary.encode(TEXTS[0])
    write("begin_text/a.txt", "".join(TEXTS))
    made = write("begin/tokenizer.bin", vocabulary.tokenizer_bin())
    run("tokenize", "--output-prefix", "begin_c/x", "--tokenizer", made, "begin_text/a.txt")
    for folder, first, last, words in (
            ("begin_c", begin, begin, ()), ("begin_0", end, begin, ("--after", BEGIN)),
            ("begin_1", begin, end, ("--before", BEGIN, "--after", END)),
            ("begin_2", begin, begin, ("--before", "none", "--after", BEGIN)),
            ("begin_3", end, end, ("--before", "none"))):
        if folder != "begin_c":
            said = prepared(folder, "begin_text", "--tokenizer", "begin/tokenizer.json", *words).out
            advice = f"--before '{BEGIN}' --after '{END}' trains on that"
            assert (advice in said) == (folder != "begin_1"), said
        data = ("--vocab-size", vocabulary.size, "--data", f"{folder}/*train*.bin")
        sample = run("train_gpt", *TINY, *data, "--sample-prompt", text).out

        def continued(before, ends=(end, last), data=data):
            numbers = run("train_gpt", *TINY, *data, "--sample-tokens",
                          " ".join(map(str, [before, *tokens]))).out.split()
            ids = [*map(int, numbers), end] # a text ends with its end; numbers go on
            parts = [vocabulary.tokens[token] for token in ids[:min(map(ids.index, {*ends} & {
                *ids}))]]
            return text + decoded_output(b"".join(parts)) + "\n"
        assert sample == continued(first) != continued(begin + end - first), folder
    assert tokens_of("begin_c/x_train.bin")[0][0] == begin
    run("train_gpt", *TINY[:6], *data[:2], "--data", "begin_c/x_train.bin", "--save", "begin_run")
    config = json.loads(read("begin_run/latest/config.json"))
    assert (config["bos_token_id"], config["eos_token_id"]) == (begin, [end, begin])


def test_documents_end_as_those_who_wrote_the_data_said():
    """The tokenizer beside the shards says what stands between texts, whatever the start's says."""
    vocabulary, begin, end = begins("ends")
    made = write("ends/tokenizer.bin", vocabulary.tokenizer_bin())
    names = [write(f"ends_texts/{place}.txt", text) for place, text in enumerate(TEXTS[:20])]
    run("tokenize", "--output-prefix", "ends_c/x", "--tokenizer", made, "--valid-fraction", 0,
        *names)
    tiny = ("train_gpt", "--model", "llama-tiny", "--micro-batch-size", 1, "--seq-length", 8,
            "--train-iters", 1, "--eod-mask-loss", "--reset-attention-mask")
    prepared("ends_d", "ends_texts", "--tokenizer", "ends/tokenizer.json")
    run(*tiny, "--data", "ends_d/train_*.bin", "--save", "ends_start")
    for place, (between, words) in enumerate((
            (begin, ()), (end, ()), (begin, ("--before", BEGIN)),
            (end, ("--before", BEGIN, "--after", END)),
            (begin, ("--before", "none", "--after", BEGIN)), (None, ("--before", "none")))):
        folder = f"ends_{place}" if place else "ends_c"
        if place:
            prepared(folder, "ends_texts", "--tokenizer", "ends/tokenizer.json",
                     "--valid-fraction", 0, *words)
        shard = f"{folder}/x_train.bin" if place == 0 else f"{folder}/train_00000.bin"
        tokens = tokens_of(shard)[0]
        seen = tokens[:len(tokens) // 8 * 8]
        counted = len(seen) - (seen == tokens) - seen[:len(tokens) - 1].count(between)
        for start in ((), ("--load", "ends_start/latest")):
            result = run(*tiny, *start, "--data", shard)
            says(result.out, f"shard, {counted:,} of them counted")
            says(result.err, ("" if between is None else "!") +
                 f"warning: --eod-mask-loss: --data {shard}: no token is {end}, which ends")
            if place == 0:
                says(result.out, f"they begin at token {begin}")
    # what a run that starts from a checkpoint saves says so too
    run(*tiny, "--load", "ends_start/latest", "--data", "ends_c/x_train.bin", "--save", "ends_run")
    header = struct.unpack_from("<9i", read("ends_run/latest/tokenizer.bin"))
    assert (header[3], header[7]) == (end, begin + 1)
    for seed in range(30):
        if end_of_sample(vocabulary, end, (begin, end), "--load", "ends_start/latest", "--data",
                         "ends_c/x_train.bin", "--seed", seed, "--sample-length", 300,
                         "--sample-temperature", 2) == [begin]:
            break
    else:
        raise AssertionError("no sample came to the end of a document")
    # a mixture has one such token
    write("ends/other.bin", patched(read(made), 6, 0))
    run("tokenize", "--output-prefix", "ends_o/x", "--tokenizer", "ends/other.bin",
        "--valid-fraction", 0, *names)
    c, o = "ends_c/x_train.bin", "ends_o/x_train.bin"
    plain = (*tiny[:-2], "--data", f"1 {c} 1 {o}")
    for words in (("--eod-mask-loss",), ("--reset-attention-mask",)):
        for first, second, ids in ((c, o, (begin, end)), (o, c, (end, begin))):
            says(run(*plain[:-1], f"1 {first} 1 {second}", *words).err,
                 f"warning: --data {second}: its documents end with token {ids[1]}, those of the "
                 f"first data with {ids[0]}")
        says(run(*plain[:-1], c, *words, "--valid-data", o).err,
             f"warning: --valid-data {o}: its documents end with token {end}")
        says(run(*plain, *words, "--tokenizer", made).err, "!its documents end")
    says(run(*plain).err, "!its documents end")


def patched(content, place, number):
    """A file's bytes with another int32 in its header."""
    return content[:4 * place] + struct.pack("<i", number) + content[4 * place + 4:]


def test_a_damaged_tokenizer_is_warned_of_once():
    write("once_texts/a.jsonl", "".join(json.dumps({"messages": [
        {"role": "user", "content": text}, {"role": "assistant", "content": text}]}) + "\n"
        for text in TEXTS[:20]))
    path = save(byte_level(), "once_made")
    write("once_made/tokenizer_config.json", json.dumps({"eos_token": END, "chat_template": (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>"
        "{% endif %}{% endfor %}")}))
    prepared("once", "once_texts", "--tokenizer", path, "--valid-fraction", 0)
    for name in "ab":
        write(f"once/{name}_tokenizer.bin", "damaged")
    tiny = ("train_gpt", "--model", "llama-tiny", "--micro-batch-size", 1, "--seq-length", 8,
            "--train-iters", 1, "--data", "once/train_*.bin")
    for start in ((), ("--load", "once_start/latest")):
        err = run(*tiny, *start, *(() if start else ("--save", "once_start"))).err
        for name in "ab":
            assert err.count(f"once/{name}_tokenizer.bin: not a tokenizer.bin") == 1, err


def test_samples_end_where_a_turn_or_a_document_ends():
    """In a chat model's tokenizer these are two tokens."""
    tokenizer, ended = byte_level(), set()
    tokenizer.add_special_tokens(["<|im_end|>"])
    path = save(tokenizer, "turns")
    write("turns/tokenizer_config.json", json.dumps({
        "eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}<|im_end|>"}))
    vocabulary = open_vocabulary({"tokenizer": path})
    write("turns/tokenizer.bin", vocabulary.tokenizer_bin())
    ends = {vocabulary.end_of_text, vocabulary.document_end}
    assert len(ends) == 2 and vocabulary.begin_of_text == vocabulary.document_end
    for seed in range(30):
        ended |= set(end_of_sample(vocabulary, vocabulary.begin_of_text, ends, "--tokenizer",
                                   "turns/tokenizer.bin", "--seed", seed, "--sample-length", 200))
        if ended == ends:
            return
    raise AssertionError(f"only {ended} of {ends} came")


def test_a_key_that_is_there_twice_is_refused():
    """Python and the library take the later one; other readers may take the first."""
    path = save(byte_level(), "doubled")
    text = read(path).decode()
    for key in ('"normalizer"', '"a"'):
        write(path, text.replace(f"{key}:", f"{key}: null,{key}:" if key != '"a"' else
                                 '"a": 0,"a":', 1))
        refused(call(prepare_data, "--output", "o", "named", "--tokenizer", path),
                f"{path}: the key {key} is there twice")
    write(path, text)
    write("doubled/tokenizer_config.json", f'{{"eos_token": "{END}", "eos_token": "{END}"}}')
    refused(call(prepare_data, "--output", "o", "named", "--tokenizer", path),
            'doubled/tokenizer_config.json: the key "eos_token" is there twice')


def test_the_class_is_one_that_does_as_tokenizer_json_says():
    path = save(byte_level(), "classes")
    for config, name, side in (
            ({"tokenizer_class": "LlamaTokenizerFast"}, "PreTrainedTokenizerFast", "left"),
            ({"tokenizer_class": "LlamaTokenizer", "padding_side": "right"},
             "PreTrainedTokenizerFast", "right"),
            ({"tokenizer_class": "Qwen2Tokenizer"}, "PreTrainedTokenizerFast", "right"),
            ({"tokenizer_class": "CodeLlamaTokenizer"}, "CodeLlamaTokenizer", None),
            ({"tokenizer_class": "TokenizersBackend"}, "PreTrainedTokenizerFast", None),
            ({}, "PreTrainedTokenizerFast", "right")):
        write("classes/tokenizer_config.json", json.dumps(
            {"eos_token": END, "extra_special_tokens": [END]} | config))
        held = open_vocabulary({"tokenizer": path}).configured
        assert (held.get("tokenizer_class"), held.get("padding_side")) == (name, side), held
        assert held["additional_special_tokens"] == [END] and "extra_special_tokens" not in held


def test_a_qwen2_with_another_tokenizer_is_warned_of():
    write("qwen2.txt", "Anna sees 2026 boats. " * 9)
    for pattern, *words, warns in (
            (QWEN_PATTERN, "--add-qkv-bias", False), (LLAMA3_PATTERN, "--add-qkv-bias", True),
            (None, "--add-qkv-bias", True), (None, "--qk-layernorm", False)):
        output = f"qwen2_{len(pattern or '')}{words[0]}"
        prepared(output, "qwen2.txt", "--tokenizer", save(byte_level(pattern), output + "_t"),
                 "--valid-fraction", 0)
        told = run("train_gpt", "--model", "llama-tiny", *words, "--data", f"{output}/train_*.bin",
                   "--micro-batch-size", 1, "--seq-length", 8, "--train-iters", 1, "--save",
                   output + "_run").err
        says(told, "!" * (not warns) + "transformers 5 opens the tokenizer of a Qwen2 model as")


def test_wrong_tokenizers_are_refused():
    def wrong(name, *parts, words=()):
        refused(call(prepare_data, "--output", "o", "plain", "--tokenizer", name, *words), *parts)

    wrong("kind_sp/tokenizer.bin", "kind_sp/tokenizer.bin: not a text file; give a tokenizer.json")
    wrong("gtp2", "--tokenizer gtp2", "byte, gpt2, llama3", "cl100k_base", "tokenizer.json")
    wrong(write("t.json", "{}"), "t.json: not a tokenizer.json")
    wrong(write("w/tokenizer.model", b"\x0a\x0b\x05<unk>\x95" + bytes(90)),
          "w/tokenizer.model: not a text file; give a tokenizer.json")
    config = "configured/tokenizer_config.json"
    path = save(byte_level(), "configured")
    for content in ("", '{"eos_', "[]", '{"eos_token": 5}', '{"bos_token": {"text": "x"}}',
                    '{"chat_template": [{"name": "default"}]}', '{"chat_template": 5}'):
        write(config, content)
        wrong(path, f"{config}: damaged, or no tokenizer_config.json")
        refused(run("scripts/chat", "configured", "x", check=False), f"{config}: damaged")
    write(config, '{"eos_token": "<none>"}')
    wrong(path, "eos_token in tokenizer_config.json <none>: no special token of configured")
    wrong("plain", "plain/tokenizer.json: No such file")
    result = run("scripts/prepare_data", "--output", "o", "plain", "--tokenizer", "cl100k_base",
                 "--mirror", "http://127.0.0.1:9", "--downloads", "no", check=False)
    refused(result, "--tokenizer cl100k_base", "cannot be reached", "--mirror")


if __name__ == "__main__":
    main()
