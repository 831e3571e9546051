"""Reads text from .txt, .md, .jsonl, .json, .csv, .tsv (the last four also as .gz, .zst), .parquet
and .arrow files, and from folders and globs of such files. Files are cut into units, which workers
read one at a time."""

import contextlib
import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from dataclasses import dataclass
from functools import partial

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from .environment import LOST, die, lfs_pointer, matching
from .rows import columns_of
from .text import RepeatedKey, from_json, parse_json

try:
    from compression import zstd  # from Python 3.14 on
except ImportError:
    from backports import zstd

KINDS = {".txt": "text", ".md": "text",
         **{ending + packed: kind
            for ending, kind in ((".jsonl", "lines"), (".json", "json"), (".csv", "csv"),
                                 (".tsv", "csv"))
            for packed in ("", ".gz", ".zst")},
         ".parquet": "parquet", ".arrow": "arrow"}
# what is read in a folder; others there, such as config.json or metadata.csv, must be named
IN_FOLDERS = tuple(ending for ending, kind in KINDS.items() if kind not in ("json", "csv"))
PACKED = re.compile(r".*\.(zip|tar|tgz|7z|rar|gz|bz2|xz|zst|lz4)", re.IGNORECASE)
SEPARATORS = {",": ("commas", ".csv"), "\t": ("tabs", ".tsv"), ";": ("semicolons", "")}
CACHED = re.compile(r"cache-.*\.arrow")  # results of the package datasets, beside their rows
UNIT_BYTES = 16 << 20
MARK = b"\xef\xbb\xbf"  # a byte-order mark, which is no part of a text
BLANK = b" \t\r\n" + MARK  # the blank bytes of a line


class BadSource(Exception):
    """A source cannot be read. The text says what is wrong, and the remedy."""


@dataclass
class Unit:
    """A part of the input: text files, a range of a .jsonl's bytes, a .parquet's row groups, or
    another file."""
    kind: str
    files: list
    valid: bool = False  # the files were given for validation
    begin: int = 0
    end: int = 0
    field: str = ""  # the field with the text, if the user named one


def ending_of(path):
    """Returns which of KINDS' endings a path has, also in capitals; "": none of them."""
    return next((ending for ending in KINDS if path.lower().endswith(ending)), "")


def kind_of(path):
    return KINDS.get(ending_of(path))


def unreadable(what, error):
    die(f"{what} {error.filename}: {error.strerror}; make it readable")


def files_in(folder, what):
    """Returns the files in a folder and in the folders below it. Links are followed, and each
    folder is visited once. Hidden files and caches are left out."""
    files, seen = [], set()
    for parent, folders, names in os.walk(folder, onerror=partial(unreadable, what),
                                          followlinks=True):
        if os.path.realpath(parent) in seen:
            folders[:] = names = []
        seen.add(os.path.realpath(parent))
        folders[:] = sorted(name for name in folders if name[0] != "." and name != LOST)
        files += [os.path.join(parent, name) for name in names
                  if name[0] != "." and not CACHED.fullmatch(name)]
    return files


def expand(patterns, what):
    """Returns the files that the arguments name, each once; and how many others were in folders."""
    files, others = [], 0
    for pattern in patterns:
        if os.path.isdir(pattern):
            inside = files_in(pattern, what)
            found = sorted(path for path in inside if ending_of(path) in IN_FOLDERS)
            others += len(inside) - len(found)
        else:
            try:
                found = matching(pattern)
            except OSError as error:
                unreadable(f"{what} {pattern}:", error)
        for path in found:
            if not kind_of(path):
                do = "unpack it" if PACKED.fullmatch(path) else \
                    "give a text the ending .txt, and JSON with a row a line .jsonl"
                die(f"{what} {path}: of no kind that can be read ({' '.join(KINDS)}); {do}")
            if not os.path.exists(path):
                die(f"{what} {path}: a link that leads nowhere; mend or remove it")
            if not os.path.isfile(path):
                die(f"{what} {path}: not a regular file; copy what it holds into one")
        if not found:
            die(f"{what} {pattern}: " + (
                f"has no file that is read in a folder ({' '.join(IN_FOLDERS)}); name a .json, "
                ".csv or .tsv itself, and unpack what is packed" if os.path.isdir(pattern) else
                "no such file or folder"))
        files += found
    once = {}
    for path in files:
        once.setdefault(os.path.realpath(path), path)
    return list(once.values()), others


@contextlib.contextmanager
def reading(path):
    """Turns the errors that libraries raise for a damaged file into BadSource."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError, UnicodeError, csv.Error, zlib.error,
            zstd.ZstdError) as error:
        why = str(error).splitlines()[0][:90] if str(error) else type(error).__name__
        raise BadSource(f"{path}: damaged or cut short ({why}); download it again") from None


def refuse_pointer(path):
    if pointer := lfs_pointer(path):
        raise BadSource(pointer)


def columns_in(path, names, wanted):
    """Returns the names of the columns of a table to read."""
    try:
        return columns_of(names, wanted)
    except ValueError as error:
        raise BadSource(f"{path}: {error}") from None


def open_parquet(path, wanted):
    """Opens a .parquet; returns the file, and the names of the columns to read."""
    refuse_pointer(path)
    file = pyarrow.parquet.ParquetFile(path)
    return file, columns_in(path, file.schema_arrow.names, wanted)


def parts_of(path, wanted, skip_bad):
    """Returns [(begin, end)] of a file's units: of its bytes; of a .parquet, of its row groups."""
    end = os.path.getsize(path)
    cuts = max(1, -(-end // UNIT_BYTES))
    if kind_of(path) == "parquet":
        try:
            with reading(path):
                file, _ = open_parquet(path, wanted)
                end = file.metadata.num_row_groups
        except BadSource:
            if not skip_bad:
                raise
            end = 1  # the worker finds the same error, and reports it
        cuts = min(cuts, end)
    elif ending_of(path) != ".jsonl":  # what is packed, or an array, is read as a whole
        cuts = 1
    offsets = [end * cut // max(cuts, 1) for cut in range(cuts + 1)]
    return zip(offsets, offsets[1:])


def units_of(files, valid, wanted, skip_bad):
    """Cuts files into units of about UNIT_BYTES."""
    units, batch, batch_size = [], [], 0
    for path in files:
        if kind_of(path) != "text":
            units += [Unit(kind_of(path), [path], valid, begin, end, wanted)
                      for begin, end in parts_of(path, wanted, skip_bad)]
            continue
        batch.append(path)
        batch_size += os.path.getsize(path)
        if batch_size >= UNIT_BYTES:
            units.append(Unit("text", batch, valid))
            batch, batch_size = [], 0
    return units + [Unit("text", batch, valid)] * bool(batch)


# ---- documents -----------------------------------------------------------------------------------


def documents(unit, take, raw=False, skip=None):
    """Yields the texts of a unit's files, or what take(row) returns for each of its rows; take
    raises ValueError for a bad row. raw: yields text files as bytes, whatever they contain. If a
    text or row cannot be read, raises BadSource; or, if skip is not None, passes the error to skip
    and leaves this text or row out."""
    texts = read_texts(unit, raw) if unit.kind == "text" else \
        {"lines": read_lines, "json": read_json, "csv": read_csv,
         "parquet": read_parquet, "arrow": read_arrow}[unit.kind](unit, take)
    while True:
        try:
            with reading(unit.files[0]):
                text = next(texts, None)
        except BadSource as bad:
            text = bad
        if text is None:
            return
        if not isinstance(text, BadSource):
            yield text
        elif skip is None:
            raise text
        else:
            skip(text)


def read_texts(unit, raw):
    for path in unit.files:
        try:
            refuse_pointer(path)
            with open(path, "rb") as file:
                content = file.read()
            yield content.removeprefix(MARK) if raw else content.decode("utf-8-sig")
        except BadSource as bad:
            yield bad
        except OSError as error:
            yield BadSource(f"{path}: {error.strerror}; make it readable")
        except UnicodeDecodeError as error:
            yield not_utf8(path, content, f"at byte {error.start}")


def not_utf8(path, content, where):
    return BadSource(f"{path}: not UTF-8 {where}; {convert(content)}")


def convert(content):
    """Returns the remedy for a file that is not UTF-8."""
    # Windows' cp1252 has latin1's letters, and quotes where latin1 has control characters
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"
    return f"convert the file (iconv -f {encoding} -t utf-8)"


def open_lines(path):
    refuse_pointer(path)
    if ending_of(path).endswith(".gz"):
        if not os.path.getsize(path):  # gzip would accept an empty file as complete
            raise EOFError("the file is empty")
        return gzip.open(path, "rb")
    if ending_of(path).endswith(".zst"):
        # allows the largest window, which files packed with zstd --long=31 need
        largest = zstd.DecompressionParameter.window_log_max
        return zstd.open(path, options={largest: largest.bounds()[1]})
    return open(path, "rb")


def read_lines(unit, take):
    """Reads the lines that begin in [begin, end); a compressed file to its end."""
    path, offset, number, before = unit.files[0], unit.begin, 0, None
    whole = ending_of(path) != ".jsonl"
    with open_lines(path) as file:
        if unit.begin > 0:
            file.seek(unit.begin - 1)
            offset = unit.begin - 1 + len(file.readline())
        while (whole or offset < unit.end) and (line := file.readline()):
            number += 1
            offset += len(line)
            if not line.strip(BLANK):
                continue
            try:
                yield take(row_of(line))
            except ValueError as error:
                if before is None:
                    before = lines_before(path, offset) - number
                yield BadSource(f"{path}, line {before + number}: {error}")


def lines_before(path, offset):
    """Returns how many lines end before this byte of the unpacked file."""
    count = 0
    with open_lines(path) as file:
        while offset > 0 and (part := file.read(min(offset, 1 << 20))):
            count += part.count(b"\n")
            offset -= len(part)
        return count + (not part.endswith(b"\n"))


def row_of(line):
    row = from_json(line, parse_json)
    if not isinstance(row, dict):
        try:
            line.decode()
        except UnicodeDecodeError:
            raise ValueError(f"not UTF-8; {convert(line)}") from None
        array = line.lstrip(BLANK)[:1] == b"["
        raise no_object(row, line, "; a file that is one array is named .json" * array)
    return row


def no_object(row, text, more=""):
    do = 'write it as {"text": ...}' if isinstance(row, str) else "mend it"
    return ValueError(f"no JSON object: {text[:40]!r}; {do}{more}")


def parse_file(content):
    """Does as parse_json. Of objects in lines it raises json's error, also if a key is repeated:
    their repeated keys are refused line by line."""
    try:
        return parse_json(content)
    except RepeatedKey:
        json.loads(content)
        raise


def read_json(unit, take):
    """Reads a .json: an array of rows, one row, or one object per line."""
    path = unit.files[0]
    with open_lines(path) as file:
        content = file.read()
    try:
        held = parse_file(content)
    except RepeatedKey as error:
        raise BadSource(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            yield from read_lines(unit, take)
            return
        why = " ".join(str(error).split())[:90]
        raise BadSource(f"{path}: no JSON ({why}); mend it, or download it again") from None
    del content
    for index, row in enumerate(held if isinstance(held, list) else [held]):
        try:
            if not isinstance(row, dict):
                raise no_object(row, str(row))
            yield take(row)
        except ValueError as error:
            yield BadSource(f"{path}, row {index}: {error}")


def read_csv(unit, take):
    """Reads a .csv or .tsv, whose first line names the fields."""
    path, index = unit.files[0], 0
    csv.field_size_limit(sys.maxsize)
    with open_lines(path) as file:
        begin = file.read(2)
        file.seek(0)
        separator = "\t" if ending_of(path).startswith(".tsv") else ","
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True,
                              delimiter=separator)
        try:
            refuse_names(path, rows.fieldnames or [], separator)
            while (row := next_row(rows)) is not None:
                try:
                    yield take(row_of_cells(row))
                except ValueError as error:
                    yield BadSource(f"{path}, row {index}: {error}")
                index += 1
        except UnicodeDecodeError:
            raise not_utf8(path, begin, f"after row {index}") from None


def refuse_names(path, names, separator):
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadSource(f"{path}: the field {twice[0]!r} is there twice; remove one")
    for other, (what, ending) in SEPARATORS.items() if len(names) == 1 else ():
        if other in names[0] and other != separator:
            do = f"name it {ending}" if ending else f"save it with {SEPARATORS[separator][0]}"
            raise BadSource(f"{path}: the fields are separated by {what}; {do}")


def next_row(rows):
    """Returns the next row; None: there is none. Of one that is no CSV it returns the error."""
    try:
        return next(rows, None)
    except csv.Error as error:
        return error


def row_of_cells(row):
    """Returns a row of a .csv or .tsv; a cell that marks the row is a number or a truth value, as
    in rows of other kinds."""
    if isinstance(row, csv.Error):
        raise ValueError(f"no CSV ({row}); mend it")
    if None in row:
        raise ValueError("more fields than the first line names")
    marks = {name: json.loads(row[name].lower()) for name in ("weight", "label", "kto_tag")
             if (row.get(name) or "").lower() in ("0", "1", "true", "false")}
    return row | marks


def read_parquet(unit, take):
    path = unit.files[0]
    file, columns = open_parquet(path, unit.field)
    with file:
        before = sum(file.metadata.row_group(i).num_rows for i in range(unit.begin))
        batches = file.iter_batches(256, range(unit.begin, unit.end), columns)
        yield from rows_of(path, batches, before, take)


def read_arrow(unit, take):
    """Reads an .arrow: a stream, as the package datasets saves it, or a file (Feather)."""
    path = unit.files[0]
    refuse_pointer(path)
    with pyarrow.memory_map(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        held = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
        batches = map(held.get_batch, range(held.num_record_batches)) if is_file else held
        columns = columns_in(path, held.schema.names, unit.field)
        yield from rows_of(path, (batch.select(columns) for batch in batches), 0, take)


def rows_of(path, batches, index, take):
    """Reads the rows of a table's batches. index: the number of the first one."""
    for batch in batches:
        for row in batch.to_struct_array():
            try:
                held = row.as_py(maps_as_pydicts="strict")
                yield take({name: without_nulls(value) for name, value in held.items()})
            except ValueError as error:  # also bytes that are not UTF-8, and a map's key twice
                yield BadSource(f"{path}, row {index}: {error}")
            index += 1


def without_nulls(value):
    """Removes nulls from objects: in a column of structs, a field that a row lacks is null."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value
