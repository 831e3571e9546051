"""Token shards as the tests read them: straight from the bytes, not with the code under test."""

import glob
import json
import os
import random
import struct

import tokenizers
from check import SHARED, Skip, read, write


def tokens_of(path):
    """The tokens of a shard, and the fingerprint of its tokenizer."""
    content = read(path)
    magic, version, low, high, fingerprint = struct.unpack_from("<2i3I", content)
    assert magic == 20240520 and version in (1, 2), f"{path}: {magic} {version}"
    size = 2 * version
    count = (len(content) - 1024) // size
    assert count == low | high << 32, f"{path}: {count} tokens, the header says {low}"
    masked = os.path.exists(path + ".mask")
    assert content[20:24] == bytes([masked, 0, 0, 0]), f"{path}: {content[20:24]} of its mask"
    listed = masked and os.path.exists(path + ".starts")  # a text may lose its list
    assert content[24:28] == bytes([listed, 0, 0, 0]), f"{path}: {content[24:28]} of its list"
    assert not any(content[28:1024]), f"{path}: the rest of the header is not 0"
    tokens = list(struct.unpack_from(f"<{count}{'H' if size == 2 else 'I'}", content, 1024))
    return tokens, fingerprint


def bits_of(path, ending, kind):
    """The bits of the file beside a shard, one for each token, and its header's windows' length."""
    content = read(path + ending)
    magic, version, low, high = struct.unpack_from("<2i2I", content)
    assert (magic, version) == (kind, 1), f"{path}{ending}: {magic} {version}"
    numbers = struct.unpack_from(f"<{(len(content) - 1024) // 2}H", content, 1024)
    bits = [number >> bit & 1 for number in numbers for bit in range(16)]
    count = low | high << 32
    assert count == len(tokens_of(path)[0]) and not any(bits[count:])
    return bits[:count], struct.unpack_from("<i", content, 24)[0]


def listed_documents(path):
    """The documents of a shard by its list."""
    tokens, (starts, _) = tokens_of(path)[0], bits_of(path, ".starts", 20261128)
    begins = [place for place, begin in enumerate(starts) if begin] + [len(tokens)]
    assert begins[0] == 0, f"{path}: its first token begins no document"
    return [tokens[begin:end] for begin, end in zip(begins, begins[1:])]


def stream(folder, split):
    """All tokens of a split, in order."""
    tokens = []
    for path in sorted(glob.glob(os.path.join(folder, f"{split}_*.bin"))):
        tokens += tokens_of(path)[0]
    return tokens


def cut(tokens, separator):
    """The documents of a stream in which the separator stands before each."""
    assert not tokens or tokens[0] == separator, "no separator at the start"
    parts, part = [], []
    for token in tokens[1:]:
        if token == separator:
            parts.append(part)
            part = []
        else:
            part.append(token)
    return parts + [part] if tokens else []


def byte_documents(folder, split):
    return [bytes(part) for part in cut(stream(folder, split), 256)]


def manifest(folder):
    return json.loads(read(os.path.join(folder, "manifest.json")))


def sentences(seed, count):
    """Texts of some lines, the same for the same seed."""
    rng = random.Random(seed)
    words = "Anna Ben sees finds counts three red boats, houses. 12 345 it's  we'll\n".split(" ")
    words.append("“Ünïcode”")
    return ["".join(rng.choice(words) + rng.choice([" ", " ", "\n"])
                    for _ in range(rng.randrange(5, 60))) + f"#{place}" for place in range(count)]


def gpt2_tokenizer():
    """Writes gpt2/tokenizer.json of GPT-2's vocabulary and merges, and returns its path."""
    vocab, merges = (os.path.join(SHARED, name) for name in ("gpt2_vocab.json", "gpt2_merges.txt"))
    if not os.path.exists(vocab):
        raise Skip("no GPT-2 vocabulary in ../shared/data")
    held = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
    held.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.decoder = tokenizers.decoders.ByteLevel()
    held.add_special_tokens(["<|endoftext|>"])
    return write("gpt2/tokenizer.json", held.to_str())
