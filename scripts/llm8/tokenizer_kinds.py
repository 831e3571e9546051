"""Tokenizers by name or file: bytes, tiktoken's encodings (GPT-2's among them, also from its own
two files), Llama 3's, and any Hugging Face tokenizer.json. open_vocabulary finds out which; workers
of other processes open it again by the same words.
"""

import base64
import json
import os

from .environment import die
from .vocabulary import (
    CUT_BYTES,
    CUT_GPT2,
    CUT_LLAMA3,
    CUT_UNKNOWN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    Vocabulary,
    byte_characters,
    byte_level_json,
    merges_of,
)

TIKTOKEN_CUTS = {"gpt2": CUT_GPT2, "r50k_base": CUT_GPT2, "p50k_base": CUT_GPT2,
                 "cl100k_base": CUT_LLAMA3, "llama3": CUT_LLAMA3}
ENDS_OF_TEXT = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]"]
HUB_TOKENIZERS = {"llama3": "meta-llama/Meta-Llama-3-8B", "llama2": "meta-llama/Llama-2-7b-hf"}


# ---- bytes ---------------------------------------------------------------------------------------


class Bytes(Vocabulary):
    def __init__(self):
        tokens = [bytes([byte]) for byte in range(256)] + [b""]
        super().__init__("byte", tokens, {"<|endoftext|>": 256}, "<|endoftext|>", CUT_BYTES)

    def encode(self, text):
        return list(text if isinstance(text, bytes) else text.encode())

    def hugging_face(self):
        return byte_level_json({token: rank for rank, token in enumerate(self.tokens[:256])}, [],
                               self.specials, None)


# ---- tiktoken ------------------------------------------------------------------------------------


class Tiktoken(Vocabulary):
    def __init__(self, name, encoding, end_of_text, cut):
        self.encoding = encoding
        specials = dict(encoding._special_tokens)
        tokens = [b""] * encoding.n_vocab
        for token, rank in encoding._mergeable_ranks.items():
            tokens[rank] = token
        super().__init__(name, tokens, specials, end_of_text or first_end_of_text(specials), cut)

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def hugging_face(self):
        pattern = {CUT_GPT2: GPT2_PATTERN, CUT_LLAMA3: LLAMA3_PATTERN}.get(
            self.cut, self.encoding._pat_str)
        ranks = self.encoding._mergeable_ranks
        return byte_level_json(ranks, merges_of(ranks), self.specials, pattern)


def open_tiktoken(name, end_of_text):
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # its network errors are many, and of other packages
        die(f"--tokenizer {name}: tiktoken could not download it ({type(error).__name__}); set "
            "TIKTOKEN_CACHE_DIR to a folder that holds it, or give a tokenizer.json"
            + (" or --vocab-file and --merge-file" if name == "gpt2" else ""))
    return Tiktoken(name, encoding, end_of_text, TIKTOKEN_CUTS.get(name, CUT_UNKNOWN))


def open_gpt2_files(vocab_file, merge_file, end_of_text):
    """GPT-2's encoder.json (vocab.json) and vocab.bpe (merges.txt)."""
    import tiktoken

    characters = {character: byte for byte, character in byte_characters().items()}
    written = read_json(vocab_file, "--vocab-file")
    merges = [line.split() for line in read_text(merge_file, "--merge-file").splitlines()
              if line and not line.startswith("#version")]
    specials = {text: rank for text, rank in written.items() if text in ENDS_OF_TEXT}
    ranks = {}
    for text, rank in written.items():
        if text not in specials and all(character in characters for character in text):
            ranks[bytes(characters[character] for character in text)] = rank
    in_order = [written.get("".join(pair)) for pair in merges if len(pair) == 2]
    if len(in_order) != len(merges) or None in in_order or in_order != sorted(in_order):
        die(f"--merge-file {merge_file}: not the merges of --vocab-file {vocab_file}, in its order")
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                 special_tokens=specials)
    return Tiktoken("gpt2", encoding, end_of_text, CUT_GPT2)


def open_llama3_model(path, end_of_text):
    """Meta's tokenizer.model of Llama 3: a line for each token, in base64, and its rank."""
    import tiktoken

    ranks = {}
    for line in read_text(path, "--tokenizer").splitlines():
        token, _, rank = line.partition(" ")
        ranks[base64.b64decode(token)] = int(rank)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
             "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
             "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
             "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    names += [f"<|reserved_special_token_{i}|>" for i in range(3, 256 - len(names) + 3)]
    specials = {name: len(ranks) + place for place, name in enumerate(names)}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks,
                                 special_tokens=specials)
    return Tiktoken("llama3", encoding, end_of_text or "<|end_of_text|>", CUT_LLAMA3)


# ---- Hugging Face --------------------------------------------------------------------------------


class HuggingFace(Vocabulary):
    def __init__(self, path, end_of_text):
        from tokenizers import Tokenizer

        self.path = path
        try:
            self.tokenizer = Tokenizer.from_file(path)
            self.json = json.loads(self.tokenizer.to_str())
        except Exception as error:  # tokenizers raises plain Exception
            die(f"--tokenizer {path}: not a tokenizer.json ({str(error)[:80]})")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # a document cannot end itself by naming one
        added = self.json["added_tokens"]
        specials = {row["content"]: row["id"] for row in added if row["special"]}
        tokens = hugging_face_tokens(self.json)
        name = os.path.basename(os.path.dirname(os.path.abspath(path)))
        chosen = end_of_text or configured_end_of_text(path) or first_end_of_text(specials)
        super().__init__(name, tokens, specials, chosen, cut_of(self.json, tokens))

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def hugging_face(self):
        return read_text(self.path, "--tokenizer")

    def tokenizer_config(self):
        path = os.path.join(os.path.dirname(self.path), "tokenizer_config.json")
        if os.path.exists(path):
            return read_text(path, "--tokenizer")
        return super().tokenizer_config()


def configured_end_of_text(path):
    path = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    if not os.path.exists(path):
        return None
    token = read_json(path, "--tokenizer").get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def first_end_of_text(specials):
    found = [text for text in ENDS_OF_TEXT if text in specials]
    return found[0] if found else "(none given)"


def steps_of(part):
    """A pre-tokenizer's or decoder's steps, whether it is one or a sequence."""
    if part is None:
        return []
    return part.get("pretokenizers") or part.get("decoders") or [part]


def is_byte_level(tokenizer):
    steps = steps_of(tokenizer["pre_tokenizer"]) + steps_of(tokenizer["decoder"])
    return any(step["type"] == "ByteLevel" for step in steps)


def hugging_face_tokens(tokenizer):
    """The bytes of each id; special tokens stand for none."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [[text, score], ...]
        vocab = {row[0]: token for token, row in enumerate(vocab)}
    size = 1 + max([*vocab.values(), *[row["id"] for row in added]])
    tokens = [b""] * size
    characters = {character: byte for byte, character in byte_characters().items()}
    byte_level = is_byte_level(tokenizer)
    prefix = model.get("continuing_subword_prefix") if model["type"] == "WordPiece" else None
    for text, token in vocab.items():
        if byte_level:
            tokens[token] = bytes(characters[c] for c in text if c in characters)
        elif model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            tokens[token] = bytes([int(text[3:5], 16)])
        elif prefix:
            whole = not text.startswith(prefix)
            tokens[token] = (" " + text if whole else text[len(prefix):]).encode()
        else:
            tokens[token] = text.replace("\u2581", " ").encode()
    for row in added:
        tokens[row["id"]] = b"" if row["special"] else row["content"].encode()
    return tokens


def cut_of(tokenizer, tokens):
    """Whether our encoder does what this tokenizer does: see dataloader/tokenizer.h."""
    model, pre = tokenizer["model"], steps_of(tokenizer["pre_tokenizer"])
    plain = (model["type"] == "BPE" and tokenizer["normalizer"] is None and
             not model.get("dropout") and not any(row.get("lstrip") or row.get("rstrip")
                                                  for row in tokenizer["added_tokens"]))
    if not plain or any(bytes([byte]) not in tokens for byte in range(256)):
        return CUT_UNKNOWN
    vocab = model["vocab"]
    made = [vocab.get("".join(pair.split() if isinstance(pair, str) else pair))
            for pair in model["merges"]]
    if None in made or made != sorted(made) or not pre or pre[-1]["type"] != "ByteLevel":
        return CUT_UNKNOWN
    if pre[-1]["add_prefix_space"]:
        return CUT_UNKNOWN
    if len(pre) == 1:
        return CUT_GPT2 if pre[0]["use_regex"] else CUT_UNKNOWN if made else CUT_BYTES
    split = pre[0].get("pattern") == {"Regex": LLAMA3_PATTERN} and len(pre) == 2
    isolated = pre[0].get("behavior") == "Isolated" and not pre[0].get("invert")
    return CUT_LLAMA3 if split and isolated and not pre[1]["use_regex"] else CUT_UNKNOWN


# ---- by name or file -----------------------------------------------------------------------------


def read_text(path, option):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        die(f"{option} {path}: {getattr(error, 'strerror', None) or 'not a text file'}")


def read_json(path, option):
    try:
        return json.loads(read_text(path, option))
    except json.JSONDecodeError:
        die(f"{option} {path}: not JSON; it is damaged or another kind of file")


def open_file(path, end_of_text):
    if os.path.isdir(path):
        inside = {name: os.path.join(path, name) for name in os.listdir(path)}
        if "tokenizer.json" in inside:
            return HuggingFace(inside["tokenizer.json"], end_of_text)
        if "vocab.json" in inside and "merges.txt" in inside:
            return open_gpt2_files(inside["vocab.json"], inside["merges.txt"], end_of_text)
        if "tokenizer.model" in inside:
            return open_file(inside["tokenizer.model"], end_of_text)
        die(f"--tokenizer {path}: a folder without tokenizer.json, tokenizer.model, or vocab.json "
            "with merges.txt")
    if os.path.basename(path) == "tokenizer.model":
        with open(path, "rb") as file:
            if b" " not in file.read(64):
                die(f"--tokenizer {path}: a SentencePiece model; give the tokenizer.json of the "
                    "same model (transformers' save_pretrained writes it)")
        return open_llama3_model(path, end_of_text)
    return HuggingFace(path, end_of_text)


def open_vocabulary(words):
    """words: tokenizer, vocab_file, merge_file, end_of_text, downloads, mirror, as options say."""
    name, end_of_text = words["tokenizer"], words["end_of_text"]
    if name == "byte":
        return Bytes()
    if words["vocab_file"] or words["merge_file"]:
        if name != "gpt2" or not (words["vocab_file"] and words["merge_file"]):
            die("--vocab-file and --merge-file: go together, with --tokenizer gpt2")
        return open_gpt2_files(words["vocab_file"], words["merge_file"], end_of_text)
    if os.path.exists(name):
        return open_file(name, end_of_text)
    import tiktoken

    if name in tiktoken.list_encoding_names():
        return open_tiktoken(name, end_of_text)
    if name in HUB_TOKENIZERS:
        from .downloads import hub_tokenizer

        path = hub_tokenizer(name, HUB_TOKENIZERS[name], words["downloads"], words["mirror"])
        return HuggingFace(path, end_of_text)
    names = ", ".join(["byte", *HUB_TOKENIZERS, *tiktoken.list_encoding_names()])
    die(f"--tokenizer {name}: must be one of {names}, or the path of a tokenizer.json, of Llama "
        "3's tokenizer.model, or of a folder with one")
