"""Where text comes from: .txt, .md, .jsonl (also .gz, .zst) and .parquet files, folders and globs
of them. Files are cut into units, which workers read one at a time.
"""

import glob
import gzip
import io
import json
import os
import zlib
from dataclasses import dataclass

from .environment import die

KINDS = {".txt": "text", ".md": "text", ".jsonl": "lines", ".jsonl.gz": "lines",
         ".jsonl.zst": "lines", ".parquet": "parquet"}
UNIT_BYTES = 16 << 20
TEXT_FIELDS = ["text", "content"]


class BadSource(Exception):
    """A file that cannot be read, with the remedy; die() says it."""


@dataclass
class Unit:
    """A part of the input: some text files, a range of bytes of a .jsonl, or some row groups."""
    kind: str
    files: list
    valid: bool = False  # of the files given for validation
    begin: int = 0
    end: int = 0
    size: int = 0
    field: str = ""


def kind_of(path):
    for ending, kind in KINDS.items():
        if path.endswith(ending):
            return kind
    return None


def expand(patterns, what):
    """The files that the arguments mean, each once, in order; and how many of other kinds a folder
    held."""
    files, others = [], 0
    for pattern in patterns:
        if os.path.isdir(pattern):
            inside = [os.path.join(folder, name) for folder, _, names in os.walk(pattern)
                      for name in names if not name.startswith(".")]
            found = sorted(path for path in inside if kind_of(path))
            others += len(inside) - len(found)
        else:
            whole = os.path.exists(pattern)
            found = [pattern] if whole else sorted(glob.glob(pattern, recursive=True))
            for path in found:
                if not kind_of(path):
                    die(f"{what} {path}: of no kind that can be read ({' '.join(KINDS)})")
        if not found:
            die(f"{what} {pattern}: no such file, nor a folder with any ({' '.join(KINDS)})")
        files += found
    real = {os.path.realpath(path): path for path in reversed(files)}
    return [path for path in dict.fromkeys(files) if real[os.path.realpath(path)] == path], others


def parquet_file(path):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadSource(f"{path}: not a whole parquet file ({first_line(error)}); download it "
                        "again or leave it out") from None


def first_line(error):
    return str(error).splitlines()[0][:90] if str(error) else type(error).__name__


def units_of(files, valid, wanted):
    units, batch, batch_size = [], [], 0
    for path in files:
        kind, size = kind_of(path), os.path.getsize(path)
        if kind == "text":
            batch.append(path)
            batch_size += size
            if batch_size >= UNIT_BYTES:
                units.append(Unit("text", batch, valid, size=batch_size))
                batch, batch_size = [], 0
        elif kind == "lines" and path.endswith(".jsonl"):
            for begin in range(0, max(size, 1), UNIT_BYTES):
                end = min(begin + UNIT_BYTES, size)
                units.append(Unit("lines", [path], valid, begin, end, end - begin, wanted))
        elif kind == "lines":
            units.append(Unit("lines", [path], valid, 0, 0, size, wanted))
        else:
            units += parquet_units(path, valid, wanted)
    if batch:
        units.append(Unit("text", batch, valid, size=batch_size))
    return units


def parquet_units(path, valid, wanted):
    """Row groups, as many together as make a unit."""
    with parquet_file(path) as file:
        columns = file.schema_arrow.names
        name = next((name for name in ([wanted] if wanted else TEXT_FIELDS) if name in columns), "")
        groups = file.metadata.num_row_groups
        share = os.path.getsize(path) / max(groups, 1)
    if not name:
        raise BadSource(f"{path}: no column '{wanted or TEXT_FIELDS[0]}'; it has "
                        f"{', '.join(columns[:10])} (--text-field)")
    step = max(1, int(UNIT_BYTES / max(share, 1)))
    return [Unit("parquet", [path], valid, begin, min(begin + step, groups),
                 int(share * (min(begin + step, groups) - begin)), name)
            for begin in range(0, groups, step)]


# ---- documents -----------------------------------------------------------------------------------


def documents(unit, raw, skip):
    """The texts of a unit. raw: text files as bytes, whatever they hold. What cannot be read raises
    BadSource, or is handed to skip, where that is not None, and left out."""
    reader = {"text": read_texts, "lines": read_lines, "parquet": read_parquet}[unit.kind]
    for text in reader(unit, raw):
        if not isinstance(text, BadSource):
            yield text
        elif skip is None:
            raise text
        else:
            skip(text)


def read_texts(unit, raw):
    for path in unit.files:
        try:
            with open(path, "rb") as file:
                content = file.read()
            yield content if raw else content.decode("utf-8-sig")
        except OSError as error:
            yield BadSource(f"{path}: {error.strerror}")
        except UnicodeDecodeError as error:
            yield BadSource(f"{path}: not UTF-8 at byte {error.start}; convert it (iconv -f latin1 "
                            "-t utf-8), or give --skip-bad to leave it out")


def open_lines(path):
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(open(path, "rb"), closefd=True,
                                                            read_across_frames=True)
        return io.BufferedReader(stream, 1 << 20)
    return open(path, "rb")


def read_lines(unit, raw):
    """Lines that begin in [begin, end); a compressed file is one unit, to its end."""
    import zstandard

    path, place, number, before = unit.files[0], unit.begin, 0, None
    try:
        with open_lines(path) as file:
            if unit.begin > 0:
                file.seek(unit.begin - 1)
                place = unit.begin - 1 + len(file.readline())
            while unit.end == 0 or place < unit.end:
                line = file.readline()
                if not line:
                    break
                number += 1
                place += len(line)
                if not line.strip():
                    continue
                text = text_of_line(line, unit.field)
                if isinstance(text, BadSource):
                    if before is None:
                        before = lines_before(path, place) - number
                    text = BadSource(f"{path}, line {before + number}: {text}")
                yield text
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        yield BadSource(f"{path}: damaged or cut short ({first_line(error)}); download it again, "
                        "or give --skip-bad to leave its end out")


def lines_before(path, place):
    """How many lines end before this byte of a file, unpacked."""
    count = 0
    with open_lines(path) as file:
        while place > 0 and (part := file.read(min(place, 1 << 20))):
            count += part.count(b"\n")
            place -= len(part)
        return count + (not part.endswith(b"\n"))


def object_of(line):
    """A line's JSON object; None where it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def text_of_line(line, wanted):
    row = object_of(line)
    if row is None:
        return BadSource(f"no JSON object: {line[:40]!r}; mend the line, or give --skip-bad to "
                         "leave such lines out")
    names = [wanted] if wanted else TEXT_FIELDS
    text = next((row[name] for name in names if name in row), None)
    if not isinstance(text, str):
        shown = ", ".join(list(row)[:10])
        return BadSource(f"no text under '{names[0]}', only {shown}; name the field "
                         "(--text-field), or give --skip-bad to leave such lines out")
    return text.encode("utf-8", "replace").decode()  # a lone surrogate has no bytes


def read_parquet(unit, raw):
    import pyarrow

    path = unit.files[0]
    try:
        with parquet_file(path) as file:
            for batch in file.iter_batches(256, range(unit.begin, unit.end), [unit.field]):
                for text in batch.column(0).to_pylist():
                    bad = BadSource(f"{path}: a row of '{unit.field}' holds no text; name the "
                                    "column (--text-field), or give --skip-bad to leave it out")
                    yield text if isinstance(text, str) else bad
    except BadSource as bad:
        yield bad
    except (pyarrow.ArrowException, OSError) as error:
        yield BadSource(f"{path}: damaged ({first_line(error)}); download it again, or give "
                        "--skip-bad to leave its end out")
