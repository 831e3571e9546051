"""Writes numbers and tables for people to read; reads JSON."""

import json
import math
import re
from collections import Counter


class RepeatedKey(ValueError):
    """An object in a JSON text has a key twice. Readers differ in which of the two counts."""


def object_of(pairs):
    held = dict(pairs)
    if len(held) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RepeatedKey(f"the key {json.dumps(key)[:40]} is there twice; remove one")
    return held


def parse_json(text):
    """Does as json.loads, but raises RepeatedKey."""
    return json.loads(text, object_pairs_hook=object_of)


def from_json(text, parse=json.loads):
    """Returns what a JSON text holds; None if it holds null, or is no JSON. parse_json also raises
    RepeatedKey."""
    try:
        return parse(text)
    except RepeatedKey:
        raise
    except (TypeError, ValueError, RecursionError):
        return None


def printable(text):
    """Returns a text, which may come from a file, as one line that a terminal can print, as in
    base/common.c: characters that cannot be printed become escapes such as \\n or \\x1b."""
    return "".join(letter if letter.isprintable() else
                   letter.encode("unicode_escape").decode() for letter in str(text))


def fixed(value, digits=4, group=""):
    """Returns a number with these decimals; "1.23e+20" if it has more than fifteen digits."""
    if not math.isfinite(value):
        return "-"
    return f"{value:{group}.{digits}f}" if abs(value) < 1e15 else f"{value:.3g}"


def counted(value):
    return fixed(value, 0, ",")


def many(count, word):
    """Returns a count with its noun, as "1 step" or "1,000 steps"."""
    return f"{count:,} {word}" + "s" * (count != 1)


def memory(value):
    return f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"


def duration(seconds):
    if not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def shown(value, form, scale=1, unit=""):
    return "-" if value is None or value != value else format(scale * value, form) + unit


def escaped(text):
    return re.sub(r"([|*<])", r"\\\1", str(text)).replace("\n", " ")


def table(header, rows, words=(0,), written=escaped):
    """Returns a table in Markdown. words: the columns of words; the other columns have numbers."""
    rule = ["---" if i in words else "---:" for i in range(len(header))]
    rows = [[written(value) for value in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])
