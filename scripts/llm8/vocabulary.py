"""Opens tokenizers by name or file, with Hugging Face's library `tokenizers`: the tokenizer of
bytes, those on the Hub (GPT-2's, OpenAI's, Llama's), or any tokenizer.json.

A tokenizer is saved beside the shards: as tokenizer.bin, which the C programs read (its format is
in dataloader/tokenizer.h), and as tokenizer.json, which goes into checkpoints. Worker processes
open the tokenizer again by the same options."""

import functools
import glob
import json
import os
import struct
import unicodedata
import zlib

import numpy
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from . import downloads
from .environment import die, lfs_pointer
from .text import RepeatedKey, from_json, parse_json

CUT_UNKNOWN, CUT_BYTES, CUT_GPT2, CUT_LLAMA3, CUT_GPT2_DIGITS, CUT_LLAMA3_DIGITS = range(6)
CLASSES = [(1, r"\p{L}+"), (2, r"\p{N}+"), (3, r"\p{White_Space}+")]
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# what the pattern of a Split is -> how text is cut
LLAMA3_PATTERNS = {LLAMA3_PATTERN: CUT_LLAMA3,
                   LLAMA3_PATTERN.replace("{1,3}", ""): CUT_LLAMA3_DIGITS}  # Qwen's
CLASS_UNSTABLE = 4
NFC = {"type": "NFC"}
USUAL_NAMES = [f"{key}_token" for key in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
ENDS_OF_TEXT = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]"]
HUB_TOKENIZERS = {
    "gpt2": "openai-community/gpt2", "llama3": "meta-llama/Meta-Llama-3-8B",
    "llama2": "meta-llama/Llama-2-7b-hf", "r50k_base": "openai-community/gpt2",
    "p50k_base": "Xenova/text-davinci-003", "cl100k_base": "Xenova/gpt-4",
    "o200k_base": "Xenova/gpt-4o", "o200k_harmony": "openai/gpt-oss-20b"}
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
# classes with the sides on which they pad; of their tokenizer.json transformers 5 takes only the
# vocabulary and the merges, and cuts texts as the class does. Without a class it takes the model's
REBUILT = {"GPT2Tokenizer": "right", "LlamaTokenizer": "left", "Qwen2Tokenizer": "right",
           "": "right"}
AS_IT_STANDS = "PreTrainedTokenizerFast"  # the class that does all that a tokenizer.json says
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
# older files: of special tokens by name, and of added tokens
SPECIALS_FILES = ["special_tokens_map.json", "added_tokens.json"]
GENERATION_CONFIG = "generation_config.json"
MODEL_FILES = [GENERATION_CONFIG, "config.json"]
# most bytes of a complete token in tokenizer.bin; 255 bytes are the beginning of a token
LONGEST = 254


def encodable(text):
    """Replaces lone surrogates, which have no bytes."""
    return text.encode("utf-8", "replace").decode()


class Vocabulary:
    """name, size, end_of_text and document_end (ids; they differ if the end of text ends a turn),
    begin_of_text (what the tokenizer writes before a text, else document_end), cut, tokens (the
    bytes of each id), specials {text: id}, added (the texts of specials and of other added tokens),
    templates {name: chat template}, and json, the text of its tokenizer.json. knows_all: every text
    has tokens. is_bytes: a text's ids are its bytes. unknown: the id for what has none of its own;
    -1: there is no such id. lacking: texts of tokens that only other files list. configured: the
    object of a tokenizer_config.json with all that the folder's files say."""

    def __init__(self, name, tokenizer, end_of_text=None, text="", folder=""):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # a document that contains the text "<|endoftext|>" must not get the end-of-text token
        tokenizer.encode_special_tokens = True
        self.name, self.tokenizer = name, tokenizer
        self.dropout = getattr(tokenizer.model, "dropout", None)  # not used: it cuts at random
        if self.dropout:
            tokenizer.model.dropout = None
        self.json, held = text or tokenizer.to_str(), json.loads(tokenizer.to_str())
        self.folder = folder
        self.specials = {row["content"]: row["id"] for row in held["added_tokens"]
                         if row["special"]}
        self.added = [row["content"] for row in held["added_tokens"]]
        self.tokens = token_bytes(held)
        self.size = len(self.tokens)
        self.knows_all = {bytes([byte]) for byte in range(256)} <= set(self.tokens)
        self.cut = cut_of(held, self.tokens) if self.knows_all else CUT_UNKNOWN
        self.is_bytes = self.cut == CUT_BYTES and self.tokens[:256] == [
            bytes([byte]) for byte in range(256)]
        self.normalizes = held["normalizer"] is not None
        self.recognised = [row["id"] for row in held["added_tokens"] if not row["special"]]
        unknown = held["model"].get("unk_token")
        token = held["model"].get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)
        self.unknown = -1 if self.knows_all or token is None else token
        self.is_dropped = {}  # {character: whether it has no token}, of those that drops() has met
        said = read_object(os.path.join(folder, TOKENIZER_FILES[1])) if folder else None
        self.configured, listed = settings_of(folder, said or {}) if folder else ({}, [])
        if said is not None and list(self.specials) == ENDS_OF_TEXT[:1]:
            # GPT-2's folder names no special token; transformers knows them by the class
            self.configured = dict.fromkeys(("bos_token", "eos_token", "unk_token"),
                                            ENDS_OF_TEXT[0]) | self.configured
        self.lacking = [text for text in listed if tokenizer.token_to_id(text) is None]
        self.templates = self.template_files = read_templates(folder)
        if not self.templates:
            self.templates = named_templates(self.configured)
        elif list(self.templates) != ["default"]:  # several templates go into tokenizer_config.json
            self.configured["chat_template"] = [{"name": name, "template": template}
                                                for name, template in self.templates.items()]
            self.template_files = {}
        self.find_ends(end_of_text)
        if said is None:
            self.configured = {
                "tokenizer_class": AS_IT_STANDS, "bos_token": self.end_of_text_name,
                "eos_token": self.end_of_text_name, "model_max_length": 1 << 30,
                "add_bos_token": False, "clean_up_tokenization_spaces": False} | self.configured
        self.make_readable()
        # without this, transformers 4 may add token_type_ids: GPT-2 would add their embedding to
        # each token's, and other models refuse them
        self.configured = {"model_input_names": ["input_ids", "attention_mask"]} | self.configured

    def make_readable(self):
        """Changes what transformers 4 cannot read, or 5 reads without tokenizer.json."""
        held = self.configured
        side = REBUILT.get(str(held.get("tokenizer_class", "")).removesuffix("Fast"))
        if held.get("tokenizer_class") == "TokenizersBackend":  # the name of version 5
            held["tokenizer_class"] = AS_IT_STANDS
        elif side and "eos_token" in self.named_specials():  # else the class names it
            held = {"padding_side": side} | held | {"tokenizer_class": AS_IT_STANDS}
        if isinstance(held.get("extra_special_tokens"), list):  # version 4 has an object there
            tokens = held.pop("extra_special_tokens")
            listed = held.get("additional_special_tokens") or []
            held["additional_special_tokens"] = [
                *listed, *(token for token in tokens if token not in listed)]
        self.configured = held

    def find_ends(self, wanted):
        """Finds the tokens that end and begin a text. wanted: the text of the end that the user
        named, or None. In many tokenizers of chat models eos_token ends a turn. The base model has
        not seen this token between documents, but the usual end of text."""
        usual = [text for text in ENDS_OF_TEXT if text in self.specials]
        self.end_of_text_name = wanted or self.named_specials().get("eos_token") or \
            [*usual, "(none given)"][0]
        self.end_of_text = self.special(self.end_of_text_name, "--end-of-text" if wanted else
                                        "eos_token in tokenizer_config.json")
        ends_turns = not wanted and any(name in template for name in (
            self.end_of_text_name, "eos_token") for template in self.templates.values())
        self.document_end_name = usual[0] if ends_turns and usual and \
            self.end_of_text_name not in usual else self.end_of_text_name
        self.document_end = self.specials[self.document_end_name]
        self.begin_of_text = [*self.tokenizer.encode("").ids, self.document_end][0]

    def files(self):
        """Returns {name: text} of the tokenizer's files for Hugging Face's libraries."""
        config = json.dumps(self.configured, indent=2, ensure_ascii=False) + "\n"
        texts = self.json, config, self.template_files.get("default")
        return {name: text for name, text in zip(TOKENIZER_FILES, texts) if text}

    def chat_template(self):
        """Returns a text that identifies the tokenizer's chat templates; "": it has none."""
        return self.templates.get("default", "") if list(self.templates) in ([], ["default"]) \
            else json.dumps(self.templates)

    def named_specials(self):
        return named_specials(self.configured)

    def special(self, text, option):
        if text not in self.specials:
            shown = ", ".join(list(self.specials)[:8]) or "none"
            die(f"{option} {text}: no special token of {self.name} (it has {shown})")
        return self.specials[text]

    def encode(self, text):
        if self.is_bytes:
            return list(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        return self.tokenizer.encode(encodable(text), add_special_tokens=False).ids

    def drops(self, text):
        """Returns whether some characters of a text have no token, not even the unknown one."""
        if self.knows_all or self.unknown >= 0:
            return False
        letters = set(text)
        for letter in letters - self.is_dropped.keys():
            self.is_dropped[letter] = not letter.isspace() and not self.encode(letter)
        return any(self.is_dropped[letter] for letter in letters)

    def entries(self):
        """Returns the tokens of tokenizer.bin. A token longer than LONGEST is cut there, so it is
        printed shortened, and our encoder refuses such a tokenizer (cut_of)."""
        held = dict(enumerate(self.tokens)) | {self.end_of_text: self.end_of_text_name.encode()}
        parts = [held[token][:LONGEST + 1] for token in range(self.size)]
        return b"".join(bytes([len(part)]) + part for part in parts)

    def fingerprint(self):
        return zlib.crc32(self.entries())

    def tokenizer_bin(self, begin=None, end=None):
        """Returns tokenizer.bin. begin, end: the tokens with which documents begin and end in the
        data beside it [as the tokenizer says]."""
        begin = self.begin_of_text if begin is None else begin
        end = self.document_end if end is None else end
        ranges, added = (character_ranges(self.normalizes), self.recognised) \
            if self.cut >= CUT_GPT2 else ([], [])
        header = struct.pack("<9i", 20240328, 2, self.size, self.end_of_text, self.cut, len(ranges),
                             *(0 if token == self.end_of_text else token + 1
                               for token in (begin, end)), len(added))
        tail = b"".join(struct.pack("<3I", *row) for row in ranges) + \
            struct.pack(f"<{len(added)}i", *added)
        return header.ljust(1024, b"\0") + self.entries() + tail


def is_unstable(character, follows):
    """Whether Unicode's NFC may change this character or one before it. Of characters that this
    Python does not know, it is not known. follows: the characters that NFC may join to one before
    them."""
    return character in follows or unicodedata.combining(character) > 0 or \
        unicodedata.category(character) == "Cn" or \
        not unicodedata.is_normalized("NFC", character)


@functools.cache
def character_ranges(nfc=False):
    """Returns (first, last, class) for all ranges of letters, numbers and white space. nfc: also
    marks what NFC may change."""
    if nfc:
        classes, characters = numpy.zeros(0x110000, int), list(map(chr, range(0x110000)))
        for first, last, kind in character_ranges():
            classes[first:last + 1] = kind
        parts = [unicodedata.decomposition(character).split() for character in characters]
        follows = {chr(int(held[1], 16)) for held in parts if len(held) == 2 and held[0][0] != "<"}
        follows |= {*map(chr, range(0x1161, 0x1176)), *map(chr, range(0x11A8, 0x11C3))}  # Hangul's
        classes += CLASS_UNSTABLE * numpy.array([is_unstable(character, follows)
                                                 for character in characters])
        edges = [0, *(numpy.flatnonzero(numpy.diff(classes)) + 1), len(classes)]
        return [(begin, end - 1, int(classes[begin])) for begin, end in zip(edges, edges[1:])
                if classes[begin]]
    step, ranges = 0x800, []  # the surrogates begin and end at multiples of this step
    kinds = [(kind, pre_tokenizers.Split(Regex(pattern), "removed", invert=True))
             for kind, pattern in CLASSES]
    for start in [*range(0, 0xD800, step), *range(0xE000, 0x110000, step)]:
        text = "".join(map(chr, range(start, start + step)))
        ranges += [(start + begin, start + end - 1, kind) for kind, split in kinds
                   for _, (begin, end) in split.pre_tokenize_str(text)]
    return sorted(ranges)


# ---- what a tokenizer.json says ------------------------------------------------------------------


def byte_characters():
    """Returns for each byte the character that byte-level tokenizers' files have for it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | \
        {byte: chr(256 + index) for index, byte in enumerate(others)}


def steps_of(part):
    """Returns the list of steps of a pre-tokenizer or decoder, which is one step or a sequence."""
    if part is None:
        return []
    return part.get("pretokenizers") or part.get("decoders") or [part]


def token_bytes(tokenizer):
    """Returns the bytes of each id; special tokens have no bytes."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [[text, score], ...]
        vocab = {row[0]: token for token, row in enumerate(vocab)}
    tokens = [b""] * (1 + max([*vocab.values(), *[row["id"] for row in added]]))
    characters = {character: byte for byte, character in byte_characters().items()}
    steps = steps_of(tokenizer["pre_tokenizer"]) + steps_of(tokenizer["decoder"])
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
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


def merges_are_ours(model, added):
    """Whether our encoder makes the tokens of a word as the library does. Ours takes a word that is
    a token as it stands, and merges any two tokens whose joined text is a token."""
    vocab = model["vocab"]
    made = [vocab.get("".join(pair.split() if isinstance(pair, str) else pair))
            for pair in model["merges"]]
    if None in made or made != sorted(made):
        return False
    alone = set(vocab.values()) - set(made) - {row["id"] for row in added}  # no merge makes them
    return all(len(text) == 1 or model.get("ignore_merges") and not any(
        text[:at] in vocab and text[at:] in vocab for at in range(1, len(text)))
        for text, token in vocab.items() if token in alone)


def cut_of(tokenizer, tokens):
    """Returns how text is cut (Cut in dataloader/tokenizer.h) if our encoder can do what this
    tokenizer, which has a token for each byte, does; otherwise CUT_UNKNOWN."""
    model, steps = tokenizer["model"], steps_of(tokenizer["pre_tokenizer"])
    added, last = tokenizer["added_tokens"], steps[-1] if steps else {"type": "none"}
    if model["type"] != "BPE" or tokenizer["normalizer"] not in (None, NFC):
        return CUT_UNKNOWN
    # added tokens that are not special, such as Qwen's <tool_call>, are recognised in any text. One
    # that is searched for after normalization is the same text only if it is normalized itself
    recognised = [row for row in added if not row["special"]]
    if any(row["lstrip"] or row["rstrip"] for row in added) or any(
            row["single_word"] or "\n" in row["content"] or
            row["normalized"] != recognised[0]["normalized"] or
            not unicodedata.is_normalized("NFC", row["content"]) for row in recognised):
        return CUT_UNKNOWN
    if max(map(len, tokens)) > LONGEST:
        return CUT_UNKNOWN
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or not merges_are_ours(model, added):
        return CUT_UNKNOWN
    if len(steps) == 1:
        alone = not (model["merges"] or tokenizer["normalizer"] or recognised)
        return CUT_GPT2 if last["use_regex"] else CUT_BYTES if alone else CUT_UNKNOWN
    first = steps[0]
    if len(steps) == 2 and first == {"type": "Digits", "individual_digits": True}:
        return CUT_GPT2_DIGITS if last["use_regex"] else CUT_UNKNOWN
    pattern = (first.get("pattern") or {}).get("Regex") if len(steps) == 2 else None
    # the pattern matches all of a text, so nothing is lost if only the matches are kept
    whole = (first.get("behavior"), bool(first.get("invert"))) in (("Isolated", False),
                                                                   ("Removed", True))
    return LLAMA3_PATTERNS.get(pattern, CUT_UNKNOWN) if whole and not last["use_regex"] else \
        CUT_UNKNOWN


# ---- by name or file -----------------------------------------------------------------------------


def read_text(path):
    try:
        if pointer := lfs_pointer(path):
            die(pointer)
        with open(path, encoding="utf-8-sig") as file:  # with or without a byte-order mark
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        die(f"{path}: " + (getattr(error, "strerror", None) or "not a text file; give a "
                           "tokenizer.json, or a name such as byte or gpt2 (--help)"))


def token_text(value):
    """Returns the text of a token, which is given as a text or as an object with a text."""
    return "" + (value["content"] if isinstance(value, dict) else value)


def named_specials(configured):
    """Returns the special tokens that chat templates get, by name; None: no such token."""
    extra = configured.get("extra_special_tokens")
    extra = extra if isinstance(extra, dict) else {}
    held = configured | extra
    others = [key for key in held if key not in USUAL_NAMES and (
        key in extra or key.endswith("_token") and isinstance(held[key], str | dict))]
    return {key: None if held[key] is None else token_text(held[key])
            for key in [*USUAL_NAMES, *others] if key in held}


def named_templates(configured):
    """Returns the chat templates in tokenizer_config.json, {name: template}."""
    held = configured.get("chat_template") or {}
    if isinstance(held, list):
        return {"" + row["name"]: "" + row["template"] for row in held}
    return {"default": "" + held} if held else {}


def read_templates(folder):
    """Returns {name: template} of the chat templates that have files of their own in a folder."""
    paths = {"default": os.path.join(folder, TOKENIZER_FILES[2])} | {
        os.path.basename(path).removesuffix(".jinja"): path
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), NAMED_TEMPLATES)))}
    return {name: read_text(path) for name, path in paths.items() if os.path.exists(path)} \
        if folder else {}


def read_object(path):
    """Returns the object in a JSON file; None: there is no file."""
    if not os.path.exists(path):
        return None
    held = file_json(path, read_text(path))
    return held if isinstance(held, dict) else refuse_damage(path)


def file_json(path, text):
    """Returns what the JSON text of a file holds; None: it is no JSON."""
    try:
        return from_json(text, parse_json)
    except RepeatedKey as error:
        die(f"{path}: {error}")


def refuse_damage(path):
    die(f"{path}: damaged, or no {os.path.basename(path)}; download it again")


def settings_of(folder, said):
    """Returns the settings in a folder's files, combined as transformers 5.23 does
    (special_tokens_map.json overrides tokenizer_config.json, unless this lists its added tokens),
    and the texts of the tokens that it adds if tokenizer.json lacks them. said: the object of
    tokenizer_config.json."""
    path = os.path.join(folder, TOKENIZER_FILES[1])
    try: # fails if values do not have the right types
        named_specials(said), named_templates(said)
        if "added_tokens_decoder" in said:
            return said, [token_text(row) for row in said["added_tokens_decoder"].values()]
        path, added = (os.path.join(folder, name) for name in SPECIALS_FILES)
        mapped = {key: token_text(value) if isinstance(value, dict) and "content" in value else
                  value for key, value in (read_object(path) or {}).items()}
        named_specials(mapped)
    except (TypeError, KeyError, AttributeError):
        refuse_damage(path)
    return said | mapped, list(read_object(added) or {})


def open_bytes():
    vocab = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab | {ENDS_OF_TEXT[0]: 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(ENDS_OF_TEXT[0], special=True, normalized=False)])
    return Vocabulary("byte", tokenizer)


def open_json(path, end_of_text, name=None):
    text, folder = read_text(path), os.path.dirname(os.path.abspath(path))
    try:
        tokenizer = Tokenizer.from_str(text)
        file_json(path, text)
    except Exception as error:  # tokenizers raises plain Exception
        die(f"{path}: not a tokenizer.json ({str(error)[:80]})")
    return Vocabulary(name or os.path.basename(folder), tokenizer, end_of_text, text, folder)


def add_options(parser):
    """Adds the options that name the tokenizer."""
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME|FILE",
                        help=f"{', '.join(['byte', *HUB_TOKENIZERS])}, or a tokenizer.json [gpt2]")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="the special token that ends a "
                        "document [the tokenizer's own]")
    downloads.add_options(parser)


def open_vocabulary(words):
    """words: the options of add_options, by name."""
    name, end_of_text = words["tokenizer"], words.get("end_of_text")
    if name == "byte":
        return open_bytes()
    if os.path.exists(name):
        inside = os.path.join(name, TOKENIZER_FILES[0])
        return open_json(inside if os.path.isdir(name) else name, end_of_text)
    bare, at, revision = name.partition("@")
    if bare not in HUB_TOKENIZERS:
        die(f"--tokenizer {name}: no such file, and not one of "
            f"{', '.join(['byte', *HUB_TOKENIZERS])}; give one of these, or the path of a "
            "tokenizer.json, or of a folder with one")
    files, *_ = downloads.from_hub(f"--tokenizer {name}", HUB_TOKENIZERS[bare] + at + revision,
                                  "model", [*TOKENIZER_FILES, *SPECIALS_FILES, NAMED_TEMPLATES],
                                  words)
    if not files:
        die(f"--tokenizer {name}: no tokenizer.json in {HUB_TOKENIZERS[bare]}; give one")
    return open_json(files[0], end_of_text, bare)
