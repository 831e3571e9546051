"""The header of a token shard (dataloader/loader.h), for scripts that need no packages too."""

import struct

MAGIC, BYTES = 20240520, 1024


def header(token_bytes, count, mark=0, masked=0, listed=0):
    """mark: the vocabulary's, 0: none. masked, listed: whether it must have a mask, which says what
    counts, and a list of where documents begin."""
    return struct.pack("<7I", MAGIC, token_bytes // 2, count & 0xFFFFFFFF, count >> 32, mark,
                       masked, listed).ljust(BYTES, b"\0")
