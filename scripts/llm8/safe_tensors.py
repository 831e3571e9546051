"""Safetensors files without any package: headers read, tensors copied byte for byte, whatever their
type (checkpoints/safetensors.h has the layout)."""

import itertools
import json
import os
from dataclasses import dataclass

from .environment import die
from .shards import write_durably

BLOCK = 16 << 20


@dataclass
class Tensor:
    file: str
    dtype: str
    shape: list
    begin: int  # in the file
    size: int


def read_header(path):
    """{name: Tensor} of one file."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < min(size, 100 << 20) else None
        tensors = {}
        for name, row in header.items():
            if name != "__metadata__":
                begin, end = row["data_offsets"]
                if not 0 <= begin <= end <= size - 8 - length:
                    raise ValueError
                tensors[name] = Tensor(path, row["dtype"], row["shape"], 8 + length + begin,
                                       end - begin)
        return tensors
    except OSError as error:
        die(f"{path}: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError):
        die(f"{path}: not a whole safetensors file; download it again")


def write_file(path, tensors):
    """Copies the tensors {name: Tensor} into one file, in their order."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape,
                        "data_offsets": [at, at + tensor.size]}
        at += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = itertools.chain.from_iterable(map(blocks_of, tensors.values()))
    write_durably(path, itertools.chain([len(text).to_bytes(8, "little") + text], parts))


def blocks_of(tensor):
    with open(tensor.file, "rb") as file:
        file.seek(tensor.begin)
        left = tensor.size
        while left:
            block = file.read(min(left, BLOCK))
            if not block:
                die(f"{tensor.file}: cut short while it was read; download it again")
            yield block
            left -= len(block)


def equal(a, b):
    return (a.dtype, a.shape, a.size) == (b.dtype, b.shape, b.size) and \
        all(ours == theirs for ours, theirs in zip(blocks_of(a), blocks_of(b)))
