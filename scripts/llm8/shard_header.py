"""The header of a token shard (dataloader/loader.h), also for scripts that use no packages."""

import struct

MAGIC, BYTES = 20240520, 1024


def header(token_bytes, count, fingerprint=0, masked=0, listed=0):
    """Returns the header of a shard. fingerprint: the vocabulary's; 0: none. masked, listed:
    whether a mask and a list of where documents begin must be beside the shard."""
    return struct.pack("<7I", MAGIC, token_bytes // 2, count & 0xFFFFFFFF, count >> 32, fingerprint,
                       masked, listed).ljust(BYTES, b"\0")
