"""What a tokenizer is here, and what it leaves beside the shards: tokenizer.bin, which the C
programs read (dataloader/tokenizer.h says what is in it), and Hugging Face's tokenizer.json, which
goes into checkpoints. tokenizer_kinds.py has the kinds of it.
"""

import json
import struct
import sys
import zlib

from .environment import die

CUT_UNKNOWN, CUT_BYTES, CUT_GPT2, CUT_LLAMA3 = range(4)
CLASSES = [(1, r"\p{L}+"), (2, r"\p{N}+"), (3, r"\p{White_Space}+")]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_characters():
    """The character by which GPT-2's byte-level tokenizers write each byte in their files."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return table


class Vocabulary:
    """name, size, end_of_text (an id), cut, tokens (the bytes of each id), specials {text: id},
    encode(text) -> ids, and hugging_face(), the text of a tokenizer.json."""

    def __init__(self, name, tokens, specials, end_of_text, cut):
        self.name, self.tokens, self.specials, self.cut = name, tokens, specials, cut
        self.size = len(tokens)
        if end_of_text not in specials:
            shown = ", ".join(list(specials)[:8]) or "none"
            die(f"--end-of-text {end_of_text}: no special token of {name} (it has {shown})")
        self.end_of_text = specials[end_of_text]
        self.end_of_text_name = end_of_text

    def special(self, text, option):
        if text not in self.specials:
            shown = ", ".join(list(self.specials)[:8])
            die(f"{option} {text}: no special token of {self.name} (it has {shown})")
        return self.specials[text]

    def token_bytes(self, token):
        return self.end_of_text_name.encode() if token == self.end_of_text else self.tokens[token]

    def entries(self):
        """tokenizer.bin's tokens. A token longer than its one byte of length allows is cut; it then
        prints shortened, and is never encoded."""
        parts = [self.token_bytes(token)[:255] for token in range(self.size)]
        return b"".join(bytes([len(part)]) + part for part in parts)

    def mark(self):
        return zlib.crc32(self.entries())

    def tokenizer_bin(self):
        ranges = character_ranges() if self.cut in (CUT_GPT2, CUT_LLAMA3) else []
        header = struct.pack("<6i", 20240328, 2, self.size, self.end_of_text, self.cut, len(ranges))
        tail = b"".join(struct.pack("<3I", *row) for row in ranges)
        return header.ljust(1024, b"\0") + self.entries() + tail

    def tokenizer_config(self):
        return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast",
                           "bos_token": self.end_of_text_name, "eos_token": self.end_of_text_name,
                           "model_max_length": 1 << 30, "add_bos_token": False,
                           "clean_up_tokenization_spaces": False}, indent=2) + "\n"


def character_ranges():
    """(first, last, class) of all letters, numbers and white space, in order."""
    import regex  # knows newer characters than this Python's unicodedata may

    ranges = []
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    for kind, pattern in CLASSES:
        for run in regex.finditer(pattern, every):
            first, last = ord(run[0][0]), ord(run[0][-1])
            for part in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last)):
                if part[0] <= part[1] and (first < 0xD800) == (part[0] < 0xD800):
                    ranges.append((*part, kind))
    return sorted(set(ranges))


# ---- tokenizer.json ------------------------------------------------------------------------------


def merges_of(ranks):
    """The pair each token was merged from: what the tokens of lower rank make of it."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            lowest = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[lowest] >= rank:
                break
            parts[lowest:lowest + 2] = [parts[lowest] + parts[lowest + 1]]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges


def byte_level_json(ranks, merges, specials, pattern):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    table = byte_characters()

    def written(token):
        return "".join(table[byte] for byte in token)

    tokenizer = Tokenizer(models.BPE(
        vocab={written(token): rank for token, rank in ranks.items()} | specials,
        merges=[(written(a), written(b)) for a, b in merges], ignore_merges=True))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pattern == GPT2_PATTERN:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                  for text in sorted(specials, key=specials.get)])
    return tokenizer.to_str(pretty=False)
