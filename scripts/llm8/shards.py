"""Token shards (dataloader/loader.h has the format), and the numbers that decide their order."""

import hashlib
import os

import numpy

MAGIC, HEADER_BYTES = 20240520, 1024


def token_type(vocabulary_size):
    return numpy.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


def header(dtype, count, mark):
    words = numpy.zeros(HEADER_BYTES // 4, dtype="<u4")
    words[:5] = MAGIC, 1 if dtype.itemsize == 2 else 2, count & 0xFFFFFFFF, count >> 32, mark
    return words.tobytes()


def write_durably(path, parts):
    """Writes a file beside its name, syncs it, then gives it the name."""
    fresh = path + ".new"
    with open(fresh, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mixed(values):
    """splitmix64's finalizer, of an array."""
    values = values.astype(numpy.uint64)
    with numpy.errstate(over="ignore"):
        values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return values ^ (values >> numpy.uint64(31))


def content_hash(text):
    """64 bits that depend on a document's text alone."""
    content = text if isinstance(text, bytes) else text.encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
