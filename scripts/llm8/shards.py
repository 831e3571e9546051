"""Token shards (dataloader/loader.h has the format), and the numbers that decide their order."""

import hashlib
import os
import zlib

import numpy

from . import shard_header

MASK, STARTS = ".mask", ".starts"
# magic numbers of the files that have a bit for each token
BESIDE = {MASK: 20261124, STARTS: 20261128}
BITS = 16  # tokens for which one number of the file has bits


def token_type(vocabulary_size):
    return numpy.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


def bits_bytes(count):
    return shard_header.BYTES + -(-count // BITS) * (BITS // 8)


def bits(ending, held, of_shard, window=0, template=""):
    """Returns the parts of a file beside a shard. The file's name ends in `ending`. It has a bit
    for each token: whether the token counts, or begins a document. window: the length of packed
    windows. template: the chat template that wrote the documents."""
    numbers = numpy.packbits(held, bitorder="little").tobytes()
    numbers = numbers.ljust(bits_bytes(len(held)) - shard_header.BYTES, b"\0")
    words = numpy.zeros(shard_header.BYTES // 4, dtype="<u4")
    words[:8] = (BESIDE[ending], 1, len(held) & 0xFFFFFFFF, len(held) >> 32, of_shard,
                 zlib.crc32(numbers), window, zlib.crc32(template.encode()))
    return [words.tobytes(), numbers]


def checksum(path):
    """Returns dataloader/loader.c's CRC-32: of 64 parts, for a shard above 4 MiB."""
    parts, part, size, total = 64, 1 << 16, os.path.getsize(path), 0
    with open(path, "rb") as file:
        for at in range(0, size, max(part, size // parts)):
            file.seek(at)
            total = zlib.crc32(file.read(part), total)
    return total


def mixed(values):
    """Applies splitmix64's finalizer to an array."""
    values = values.astype(numpy.uint64)
    with numpy.errstate(over="ignore"):
        values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))


def content_hash(text):
    """Returns 64 bits that depend only on a document's text."""
    content = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
