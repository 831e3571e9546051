"""Turns text or conversations into shuffled, tokenized shards, for scripts/prepare_data.

First the units of the input (sources.py) are tokenized into files in OUT/.work, whose names depend
on the input and the settings. Then the shards are put together from these files, in an order that
depends only on the seed. Each of the two stages runs in several processes. A unit's file gets its
name only when it is complete, so a run that was stopped resumes with the other units. The shards
move to OUT when all are complete; manifest.json is the last file to be written.

Beside a shard is a list of where its documents begin. Shards of conversations also have masks, and
their conversations are packed into windows, which no shard boundary cuts.
"""

import bisect
import contextlib
import ctypes
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

import numpy
from tqdm import tqdm

from . import downloads, shard_header, shards, sources
from .command_line import Parser, guess, number
from .conversation import BadTemplate, ChatTemplate, Conversation, is_learned, warnings_of
from .environment import LOCK, cores, die, lock, matching, named_by, sha256_of, warn, write_durably
from .rows import read_row
from .text import many, printable
from .vocabulary import (
    CUT_UNKNOWN,
    GENERATION_CONFIG,
    MODEL_FILES,
    add_options,
    encodable,
    open_vocabulary,
)

VERSION = 2
UNITS = 9  # increased when this script writes other content into units' files
OF_CONVERSATIONS = ("chat_template", "special_tokens")  # settings for conversations only
OF_TEXTS = ("before", "after")
COUNT = number(int, 1, sys.maxsize, "a whole number from 1 on")
LONG_TEXT = 1 << 20
VALID_BYTES = 1 << 20  # some 200,000 tokens; an evaluation takes 20 batches of 8 x 1024
FEW_TOKENS = 20 * 1024
CHAT_WINDOW = 2048
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ANEW = "remove the folder {}, then prepare the data again"
DOCUMENT = numpy.dtype([("unit", "<i4"), ("offset", "<i8"), ("length", "<i8"), ("hash", "<u8"),
                        ("valid", "?"), ("chat", "?"), ("padding", "<i8")])
# offset, length: in the unit's tokens; padding: how many tokens after the document fill its window
REST = re.compile(rb"[\x80-\xbf]{0,3}")  # of a character of UTF-8 that is cut
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
ROWS = re.compile(r'[\s[]*{\s*"')  # begins rows of JSON
TRAIN_SPLIT, TEST_SPLIT = (re.compile(rf"(?<![a-z])({names})(?![a-z])", re.IGNORECASE)
                           for names in ("train", "test|valid|validation|val|dev|eval"))
PART = re.compile(r"(.*?)(\d{1,6})(-of-\d+\.[^/]*)")
# no tokenizer here has a word across a line's end between two visible ASCII characters
BREAK = re.compile(r"(?<=[!-~]\n)(?=[!-~])")
# one whose words are known to our encoder has none across a space between two letters either
SPACE = re.compile(rf"{BREAK.pattern}|(?<=[a-z])(?= [a-z])")


# ---- tokenizing ----------------------------------------------------------------------------------


class Worker:
    """What a process of the pool keeps between its tasks."""

    vocabulary = settings = work = template = unread = None
    doubts = Counter()  # doubts about the unit's texts and conversations

    @classmethod
    def start(cls, words, settings, work):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cls.vocabulary, cls.settings, cls.work = open_vocabulary(words), settings, work
        cls.template, cls.unread = None, Counter()

    @classmethod
    def take(cls, row):
        """Returns a row's text; of a conversation, its text and [(ids, whether each counts)]."""
        held = read_row(row, cls.settings["text_field"], cls.unread)
        if isinstance(held, str):
            return held
        if not cls.template:
            cls.template = ChatTemplate(cls.vocabulary)
            cls.template.doubts = cls.doubts
        try:
            if not is_learned(held, "the row"):
                cls.doubts.update(["conversations", "left_out"])
                return "", []
            conversation = Conversation(held)
            return conversation.text(), list(cls.template.samples(conversation))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{error}; mend it") from None


def start_process(*what):
    # if the parent is killed, this process is killed too, or it would write into the files of a run
    # that resumes
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent_process().pid:  # the parent was killed before the call above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C causes no traceback
    Worker.start(*what)


def pieces(text, end):
    """Cuts a long text, where `end` matches, into parts that can be tokenized separately: the
    library takes 190 bytes of memory for each of a text (text8 has one line of 100 MB)."""
    cuts = [0]
    while isinstance(text, str) and (found := end.search(text, cuts[-1] + LONG_TEXT)):
        cuts.append(found.start())
    return [text[begin:end] for begin, end in itertools.pairwise([*cuts, None])]


def tokens_of(vocabulary, text):
    """Yields the tokens of a text, part by part. Each part but the first is encoded after a line
    "a", whose tokens are removed, because some tokenizers write a space before a text."""
    spaces = vocabulary.cut != CUT_UNKNOWN and " " not in "".join(vocabulary.added)
    first, *others = pieces(text, SPACE if spaces else BREAK)
    yield vocabulary.encode(first)
    lead = vocabulary.encode("a\n") if others else []
    for part in others:
        tokens = vocabulary.encode("a\n" + part)
        yield tokens[len(lead):] if tokens[:len(lead)] == lead else vocabulary.encode(part)


def split_tail(text, fraction):
    """Cuts a text into a part for training and a part for validation. The part for validation
    starts at the beginning of a line, unless that would make it less than half as long."""
    at = len(text) - int(len(text) * fraction)
    line = text.find(b"\n" if isinstance(text, bytes) else "\n", at, at + (len(text) - at) // 2)
    if line >= 0:
        at = line + 1
    elif isinstance(text, bytes):  # at a whole character of UTF-8
        at += len(REST.match(text, at)[0])
    return [(text[:at], False), (text[at:], True)]


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unit_name(settings, unit):
    """Returns a name for a unit's files, which depends on everything that its tokens depend on."""
    return "unit_" + short_hash(json.dumps([
        UNITS, unit.__dict__, stamps(unit.files),
        {key: settings[key] for key in settings if not key.endswith("sources")}]))


def stamps(paths):
    """Returns the sizes and times that distinguish files from earlier ones with the same names."""
    return [[path, (stat := os.stat(path)).st_size, stat.st_mtime_ns] for path in paths]


def samples_of(unit, skip):
    """Yields for each sample of a unit its text, whether it is for validation, its ids, and which
    of them count (None: it is no conversation). skip: as for sources.documents."""
    vocabulary, settings = Worker.vocabulary, Worker.settings
    dtype = shards.token_type(vocabulary.size)
    tails = settings["split"] == "tails" and not unit.valid
    raw = vocabulary.name == "byte" and vocabulary.is_bytes
    for held in sources.documents(unit, Worker.take, raw, skip):
        if isinstance(held, tuple):
            text, samples = held
            for ids, counts in samples:
                yield text, unit.valid, numpy.array(ids, dtype), numpy.array(counts, bool)
            continue
        end = vocabulary.document_end_name
        Worker.doubts["texts"] += 1
        for doubt, mark in (("named_ends", end), ("nuls", "\0")):
            Worker.doubts[doubt] += (mark.encode() if isinstance(held, bytes) else mark) in held
        Worker.doubts["halves"] += isinstance(held, str) and encodable(held) != held
        Worker.doubts["dropped"] += vocabulary.drops(held)
        begin = held[:64].decode(errors="replace") if isinstance(held, bytes) else held[:64]
        Worker.doubts["rows"] += unit.kind == "text" and bool(ROWS.match(begin))
        for text, valid in (split_tail(held, settings["valid_fraction"]) if tails
                            else [(held, unit.valid)]):
            ids = numpy.concatenate([numpy.array(part, dtype) for part in (
                settings["before"], *tokens_of(vocabulary, text), settings["after"])])
            if text and len(ids):
                yield text, valid, ids, None


def tokenize_unit(name, unit):
    """Writes a unit's tokens, then its documents. Runs in a worker."""
    found, skipped, counted = [], [], []
    Worker.unread.clear()
    Worker.doubts.clear()

    def parts():
        offset, skip = 0, skipped.append if Worker.settings["skip_bad"] else None
        for text, valid, ids, counts in samples_of(unit, skip):
            chat = counts is not None
            Worker.doubts["tokens"] += len(ids)
            Worker.doubts["unknown"] += int((ids == Worker.vocabulary.unknown).sum())
            found.append((0, offset, len(ids), shards.content_hash(text), valid, chat, 0))
            offset += len(ids)
            if chat:
                counted.append(counts.tobytes())
            yield ids.tobytes()

    base, content = os.path.join(Worker.work, name), io.BytesIO()
    write_durably(base + ".tokens", parts())
    write_durably(base + ".counted", counted)  # a byte a token, if a conversation
    numpy.savez(content, documents=numpy.array(found, DOCUMENT), notes=json.dumps(
        [list(map(str, skipped)), Worker.unread, Worker.doubts]))
    write_durably(base + ".npz", [content.getvalue()])


# ---- putting shards together ---------------------------------------------------------------------


def read_units(work, names):
    """Returns the documents of all units, what was left out, the numbers of rows by field that was
    not read, and of conversations by kind of doubt."""
    tables, skipped, unread, doubts = [numpy.zeros(0, DOCUMENT)], [], Counter(), Counter()
    for number_of, name in enumerate(names):
        with numpy.load(os.path.join(work, name + ".npz")) as held:
            tables.append(held["documents"])
            notes = json.loads(str(held["notes"]))
        tables[-1]["unit"] = number_of
        skipped += notes[0]
        unread.update(notes[1])
        doubts.update(notes[2])
    return numpy.concatenate(tables), skipped, dict(sorted(unread.items())), doubts


def choose_valid(documents, fraction, seed):
    """Chooses documents for validation, in the order of hashes of their texts, until they have this
    fraction of all tokens. Equal documents are all for validation or all for training. A document
    longer than that share is for training, unless there is no other."""
    _, key = numpy.unique(shards.mixed(documents["hash"] ^ seed), return_inverse=True)
    length = numpy.bincount(key, documents["length"])  # tokens of all documents with the same hash
    share = fraction * length.sum()
    short = numpy.flatnonzero(length <= max(share, length.min()))
    enough = numpy.searchsorted(numpy.cumsum(length[short]), share)
    valid = numpy.isin(key, short[:enough + 1])
    return valid & (not valid.all())


def split_documents(settings, documents):
    """Returns the documents of training and of validation, shuffled."""
    seed = shards.mixed(numpy.array([settings["seed"] + 1], dtype=numpy.uint64))[0]
    valid, index = documents["valid"], numpy.arange(len(documents), dtype=numpy.uint64)
    if settings["split"] == "documents" and settings["valid_fraction"]:
        valid = choose_valid(documents, settings["valid_fraction"], seed)
    order = numpy.argsort(shards.mixed(index ^ seed) if settings["shuffle"] else index)
    return {"train": documents[order[~valid[order]]], "val": documents[order[valid[order]]]}


def pack(documents, window):
    """Packs documents into windows of `window` tokens: the longest first, each into the window in
    which it leaves the least room. A document longer than a window begins at the start of a window
    and fills several. Windows, and the documents in each, keep their order; the last document of
    each window gets its `padding`."""
    length = documents["length"]
    last = (length - 1) % window + 1  # tokens in the last window that the document needs
    # with_room: the windows by the tokens they have room for; rooms: those numbers, in order
    bins, with_room, rooms = [], [[] for _ in range(window + 1)], []
    for index in numpy.lexsort((-last, length <= window)).tolist():
        size = int(last[index])
        least = bisect.bisect_left(rooms, size) if length[index] <= window else len(rooms)
        if least < len(rooms):
            room = rooms[least]
            held = with_room[room].pop()
            if not with_room[room]:
                del rooms[least]
        else:
            room, held = window, len(bins)
            bins.append([])
        bins[held].append(index)
        room -= size
        if not with_room[room]:
            bisect.insort(rooms, room)
        with_room[room].append(held)
    order, padding = [], numpy.zeros(len(documents), numpy.int64)
    for held in sorted((sorted(held, key=lambda index: (length[index] <= window, index))
                        for held in bins), key=min):
        order += held
        padding[held[-1]] = -length[held].sum() % window
    documents = documents[order]
    documents["padding"] = padding[order]
    return documents


def cut_shards(documents, most, window):
    """Yields the documents of each shard, about `most` tokens. A shard ends where a window ends."""
    documents = pack(documents, window) if window > 1 else documents
    ends, begin, base = numpy.cumsum(documents["length"] + documents["padding"]), 0, 0
    cuts = numpy.flatnonzero(ends % window == 0) + 1  # a shard may end before these documents
    while begin < len(documents):
        fitting = int(numpy.searchsorted(ends[cuts - 1], base + most, side="right"))
        least = int(numpy.searchsorted(cuts, begin, side="right"))
        end = int(cuts[max(least, fitting - 1)])
        yield documents[begin:end]
        begin, base = end, int(ends[end - 1])


def contents(documents, names, ending, dtype, padding):
    """Yields each document's part of its unit's file with this ending, and then its padding."""
    held = {unit: numpy.memmap(os.path.join(Worker.work, names[unit] + ending), dtype, "r")
            for unit in numpy.unique(documents["unit"])}
    for row in documents:
        yield held[row["unit"]][row["offset"]:row["offset"] + row["length"]]
        yield numpy.full(row["padding"], padding, dtype)


def write_shard(name, documents, names, window):
    """Writes one shard, the list of where its documents begin and, if it has windows, its mask.
    names: the units' names. Returns its row of the manifest. Runs in a worker."""
    vocabulary, path = Worker.vocabulary, os.path.join(Worker.work, name)
    dtype = shards.token_type(vocabulary.size)
    ends = numpy.cumsum(documents["length"] + documents["padding"])
    count = int(ends[-1])
    starts = numpy.zeros(count + 1, bool)  # whether a token begins a document, as padding does too
    starts[[0, *ends]] = starts[ends - documents["padding"]] = True

    def parts():
        yield shard_header.header(dtype.itemsize, count, vocabulary.fingerprint(), window > 1,
                                  window > 1)  # shards of texts do not need this list
        for part in contents(documents, names, ".tokens", dtype, vocabulary.end_of_text):
            yield part.tobytes()

    row = {"name": name, "tokens": count, "documents": len(documents),
           "bytes": shard_header.BYTES + count * dtype.itemsize,
           "sha256": write_durably(path, parts())}
    of_chats = (window, vocabulary.chat_template()) if window > 1 else ()

    def write_beside(ending, held):
        return write_durably(path + ending, shards.bits(
            ending, held, shards.checksum(path), *of_chats))

    row["starts_sha256"] = write_beside(shards.STARTS, starts[:count])
    if window > 1:
        counts = numpy.concatenate(list(contents(documents, names, ".counted", bool, False)))
        row |= {"counted": int(counts.sum()), "mask_sha256": write_beside(shards.MASK, counts)}
    return row


# ---- all of it -----------------------------------------------------------------------------------


def open_pool(jobs, *what):
    if jobs == 1:  # without a pool, which costs more time than it saves
        Worker.start(*what)
        return contextlib.nullcontext()
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"),
                               initializer=start_process, initargs=what)


def run_all(pool, function, tasks, what):
    """Returns the results of function(*task). After the first error no other task is begun."""
    results = pool.map(function, *zip(*tasks)) if pool else itertools.starmap(function, tasks)
    return list(tqdm(results, desc=what, total=len(tasks), unit="", disable=None))


OWN_SHARD = re.compile(r"(train|val)_\d{5,}\.bin(\.mask|\.starts)?")


def refuse_others_shards(output, resumes):
    own = ["tokenizer.bin", GENERATION_CONFIG]
    held = [name for name in os.listdir(output) if (
        name.endswith(".bin") or name in MODEL_FILES) and not (
            resumes and (OWN_SHARD.fullmatch(name) or name in own))]
    if held:
        die(f"--output {output}: holds {held[0]} from elsewhere; give an empty folder, so that "
            "files of two kinds are not mixed")


def warn_of_losses(unread, vocabulary, template):
    """Warns of fields that were not read, of a tokenizer's dropout, and of special tokens that are
    cut as text. template: the ChatTemplate; None: there are no conversations."""
    if unread:
        found = ", ".join(f"'{name}' in {many(count, 'row')}" for name, count in unread.items())
        warn(f"not read: {found}; write it into what is read, or name the one field that is "
             "meant (--text-field)")
    if vocabulary.dropout:
        warn(f"the tokenizer's dropout of {vocabulary.dropout:g} is not used: a text has the same "
             "tokens each time")
    for what, texts, do in (
            ("the chat template writes", template.foreign() if template else [],
             "give a template of the model's family"),
            ("the tokenizer's files list", vocabulary.lacking,
             "save the tokenizer again by transformers' save_pretrained")):
        if texts:
            warn(f"{what} {texts[0]}, which is no token of the tokenizer {vocabulary.name}: it "
                 f"is cut as text; {do}")


def prepare(o, settings, units, vocabulary):
    """Makes the shards, and returns the manifest. o: the user's options."""
    begin, work = time.time(), os.path.join(o.output, ".work")
    refuse_others_shards(o.output, os.path.isdir(work))
    os.makedirs(work, exist_ok=True)
    names = [unit_name(settings, unit) for unit in units]
    left = [(name, unit) for name, unit in zip(names, units)
            if not os.path.exists(os.path.join(work, name + ".npz"))]
    if len(left) < len(units):
        print(f"resuming: {len(units) - len(left)} of {len(units)} parts are tokenized already")
    with open_pool(max(1, min(o.jobs, len(units))), vars(o), settings, work) as pool:
        run_all(pool, tokenize_unit, left, "tokenize")
        documents, skipped, unread, doubts = read_units(work, names)
        if not len(documents):
            die("the sources hold no text at all" + (
                f": {len(skipped)} were left out (--skip-bad), the first: {skipped[0]}" if skipped
                else f": {doubts['left_out']:,} have a weight of 0" if doubts["left_out"] else ""))
        window = window_of(settings, documents, units, vocabulary)
        splits = split_documents(settings, documents)
        tasks = [(f"{split}_{index:05d}.bin", part, names, window)
                 for split, rows in splits.items()
                 for index, part in enumerate(cut_shards(rows, settings["shard_tokens"], window))]
        rows = run_all(pool, write_shard, tasks, "shards")
    warn_of_losses(unread, vocabulary, ChatTemplate(vocabulary) if window > 1 else None)
    train = splits["train"]
    copies = len(train) - len(numpy.unique(train["hash"] ^ shards.mixed(
        train["length"])))  # the texts of one conversation have one hash, and other lengths
    in_both = numpy.isin(splits["val"]["hash"], splits["train"]["hash"])
    manifest = {
        "format": "llm8.c prepared data", "vocabulary": vocabulary.size,
        "end_of_text": vocabulary.end_of_text, "window": window, "documents": len(documents),
        "tokens": int(documents["length"].sum()), "validation_in_training": int(in_both.sum()),
        "copies": copies,
        "skipped": len(skipped), "first_skipped": skipped[:20], "unread": unread,
        "warnings": list(warnings_of(doubts)),
        "longer_than_window": {split: int((held["length"] > window).sum()) if window > 1 else 0
                               for split, held in splits.items()},
        "seconds": round(time.time() - begin, 1),
        "shards": sorted(rows, key=lambda row: row["name"]), "settings": settings}
    publish(o.output, work, vocabulary, manifest)
    return manifest


def window_of(settings, documents, units, vocabulary):
    """Returns the length of the windows of conversations; 1: texts may be cut anywhere."""
    chat = documents["chat"]
    if chat.any() != chat.all():
        text, talk = (units[documents["unit"][numpy.argmax(one)]].files[0] for one in (~chat, chat))
        die(f"the sources hold texts ({text}) and conversations ({talk}); prepare each into a "
            "folder of its own, and train on both with --data 'DIR/{one,other}/train_*.bin'")
    if settings["seq_length"] and not chat.any():
        die("--seq-length: of conversations; the sources hold texts, which a run cuts itself")
    if chat.any():
        refuse_bounds(settings, vocabulary)
    return (settings["seq_length"] or CHAT_WINDOW) if chat.any() else 1


def refuse_bounds(settings, vocabulary):
    if (settings["before"], settings["after"]) != ([vocabulary.document_end], []):
        die("--before, --after: of texts; the sources hold conversations, whose chat template "
            "writes what stands around them")


def publish(output, work, vocabulary, manifest):
    for name in filter(OWN_SHARD.fullmatch, os.listdir(output)):
        # deletes files of a preparation that was stopped while it moved them
        os.remove(os.path.join(output, name))
    for name, _, _ in files_of(manifest):
        os.rename(os.path.join(work, name), os.path.join(output, name))
    before, after = (manifest["settings"][key] for key in OF_TEXTS)
    # the token at which a document begins: the last one of --before, else of --after; the token at
    # which it ends: the last one of --after, else of --before
    bounds = ([vocabulary.document_end, *held][-1] for held in (after + before, before + after)) \
        if manifest["window"] == 1 else ()
    files = [("tokenizer.bin", vocabulary.tokenizer_bin(*bounds)),
             *((name, text.encode()) for name, text in vocabulary.files().items())]
    if manifest["window"] > 1:
        files.append((GENERATION_CONFIG, generation_config(vocabulary)))
    manifest["tokenizer_files"] = []
    for name, content in files:
        add_file(output, manifest, name, content)
    write_manifest(output, manifest)
    shutil.rmtree(work)


def generation_config(vocabulary):
    """Returns what says where a model that is tuned on conversations must stop."""
    stops = {vocabulary.end_of_text, vocabulary.document_end, *ChatTemplate(vocabulary).ends()}
    ids = {"bos_token_id": vocabulary.begin_of_text, "eos_token_id": sorted(stops)}
    return (json.dumps(ids) + "\n").encode()


def add_file(output, manifest, name, content):
    checksum = write_durably(os.path.join(output, name), [content])
    manifest.setdefault("tokenizer_files", []).append(
        {"name": name, "bytes": len(content), "sha256": checksum})


def write_manifest(output, manifest):
    write_durably(os.path.join(output, "manifest.json"),
                  [(json.dumps(manifest, indent=1) + "\n").encode()])


def files_of(manifest):
    """Yields (name, bytes, SHA-256) of the manifest's files: each shard, after the files beside it;
    and the tokenizer's files, which manifests of older versions lack."""
    for row in manifest["shards"] + manifest.get("tokenizer_files", []):
        for ending in shards.BESIDE:
            if checksum := row.get(ending[1:] + "_sha256"):
                yield row["name"] + ending, shards.bits_bytes(row["tokens"]), checksum
        yield row["name"], row["bytes"], row["sha256"]


# ---- the command line ---------------------------------------------------------------------------


def parser():
    sets = "\n".join(f"  {name:18} {about}" for name, (about, *_) in downloads.KNOWN_SETS.items())
    p = Parser(
        prog="scripts/prepare_data",
        description="Turns text, or conversations, into token shards for the trainers: shuffled, "
                    "split, with\nthe tokenizer beside them. Run again after a stop, it resumes.\n"
                    "\n"
                    "Rows (of all files but .txt and .md) with \"messages\", \"conversations\" "
                    "(ShareGPT), or a question and\nits answer (\"prompt\" and \"completion\", "
                    "\"instruction\" and \"output\", ...), are conversations: the\ntokenizer's "
                    "chat template writes them, and the assistant's tokens count.",
        epilog=f"Known sets, by name (or NAME@REVISION) instead of a path\n{sets}\n\n"
               "Then train with --data 'DIR/train_*.bin' --valid-data 'DIR/val_*.bin'")
    p.add_argument("sources", nargs="*", metavar="SOURCE",
                   help=f"files ({' '.join(sources.KINDS)}), folders, globs, or known sets")
    p.add_argument("--output", metavar="DIR", help="where the shards go")
    add_options(p)
    p.add_argument("--before", metavar="TOKEN", help="put before each text; none: nothing "
                   "[the end of text, but no token that ends a turn of the chat template]")
    p.add_argument("--after", metavar="TOKEN", default="none",
                   help="put after each text [none]")
    p.add_argument("--valid", action="append", default=[], metavar="SOURCE",
                   help="validate on these, instead of on a part of the sources")
    p.add_argument("--valid-fraction", metavar="X",
                   type=number(float, 0, 1 - 1e-9, "a number from 0 to below 1"),
                   help="of the text, for validation [0.01; of less than 100 MB more, up to 0.1]: "
                   "whole documents, or, of fewer than 100 .txt and .md files, the end of each")
    p.add_argument("--shard-tokens", type=COUNT, default=100_000_000, metavar="N",
                   help="about this many tokens a shard [100000000]")
    p.add_argument("--seq-length", type=number(int, 2, 1 << 20, "a whole number from 2 on"),
                   default=0, metavar="N", help="of the run: pack conversations into sequences of "
                   f"N tokens, so that none is cut that fits [{CHAT_WINDOW}]")
    p.add_argument("--seed", default=1234, metavar="N",
                   type=number(int, 0, (1 << 53) - 1, "a whole number from 0 to 2^53"),
                   help="of the shuffle and the split")
    p.add_argument("--no-shuffle", action="store_true", help="keep the documents' order")
    p.add_argument("--text-field", default="", metavar="NAME",
                   help="the text of a row, and nothing else of it [text, or content]")
    p.add_argument("--skip-bad", action="store_true",
                   help="leave out lines and files that cannot be read; the manifest lists them")
    p.add_argument("--jobs", type=COUNT, default=cores(), metavar="N",
                   help="processes at a time [one a core that this process may use]")
    p.add_argument("--download-files", default=0, metavar="N",
                   type=number(int, 0, sys.maxsize, "a whole number from 0 on"),
                   help="only the first N files of a known set [0: all]")
    p.add_argument("--check", metavar="DIR",
                   help="check the shards there against their manifest, and exit")
    return p


def is_known(source):
    return source.partition("@")[0] in downloads.KNOWN_SETS and not os.path.exists(source)


def check_files(o):
    """Ends the program if a file is missing, before anything is downloaded."""
    paths = [source for source in o.sources if not is_known(source)]
    for path in paths:
        near = guess(path, downloads.KNOWN_SETS)
        is_name = HUB_NAME.fullmatch(path) and not sources.kind_of(path)
        if not near and is_name and not os.path.isdir(os.path.dirname(path)):
            near = f"; download a set of the Hub first (.venv/bin/hf download {path} --repo-type " \
                "dataset --local-dir DIR), and give its files"
        if near and not matching(path):
            die(f"SOURCE {path}: no such file, folder or known set{near}")
    sources.expand(paths, "SOURCE")
    sources.expand(o.valid, "--valid")


def warn_of_gaps(files):
    """Warns of files such as train-00001-of-00003.parquet that are missing between others."""
    parts = {}
    for match in filter(None, map(PART.fullmatch, files)):
        parts.setdefault((match[1], match[3], len(match[2])), set()).add(int(match[2]))
    gaps = [path for (before, after, width), numbers in parts.items()
            for path in (f"{before}{number:0{width}}{after}"
                         for number in range(min(numbers), max(numbers)) if number not in numbers)
            if not os.path.exists(path)]
    if gaps:
        warn(f"{many(len(gaps), 'file')} missing between others of a set, such as {gaps[0]}; "
             "download it again, if the set is meant to be whole")


def warn_of_splits(files):
    """Warns of what the folder of a data set has besides its split for training, by the names of
    the files: splits for tests or validation, and the README.md beside rows."""
    rows = [path for path in files if sources.kind_of(path) != "text"]
    paths = list(map(os.path.abspath, rows))
    base = os.path.commonpath(paths) if paths else ""
    names = [path[len(base):] for path in paths]
    held = [path for path, name in zip(rows, names)
            if TEST_SPLIT.search(name) and not TRAIN_SPLIT.search(name)]
    if held and any(map(TRAIN_SPLIT.search, names)):
        warn(f"{len(held):,} of {many(len(rows), 'file')} are for tests or validation by their "
             f"names, and are trained on ({held[0]}); name the others alone, and give --valid "
             "those to validate on")
    cards = [path for path in files if os.path.basename(path).lower() == "readme.md"]
    if cards and rows:
        warn(f"{cards[0]} is trained on as a text, beside files of rows; name these alone")


def find_files(o):
    """Returns the files to train on and the files to validate on. Known sets are downloaded."""
    train, valid = [], []
    for source in o.sources:
        paths, valid_paths = downloads.fetch_known_set(source, vars(o), o.download_files) \
            if is_known(source) else ([source], [])
        train += paths
        valid += valid_paths
    files, others = sources.expand(train, "SOURCE")
    warn_of_gaps(files)
    warn_of_splits(files)
    valid_files, valid_others = sources.expand(valid + o.valid, "--valid")
    if others + valid_others:
        print(f"left out: {many(others + valid_others, 'file')} of other kinds than "
              f"{' '.join(sources.IN_FOLDERS)}")
    return files, valid_files


def make_settings(o, vocabulary, files, valid_files):
    """Returns all settings on which the shards depend."""
    def special(text, option):
        return [] if text == "none" else [vocabulary.special(text, option)]

    few = len(files) < 100 and all(sources.kind_of(path) == "text" for path in files)
    fraction = o.valid_fraction
    if fraction is None:
        fraction = min(0.1, max(0.01, VALID_BYTES / max(1, sum(map(os.path.getsize, files)))))
    settings = {
        "version": VERSION, "tokenizer": vocabulary.name, "mark": f"{vocabulary.fingerprint():08x}",
        "tokenizer_json": short_hash(vocabulary.json),
        "before": special(o.before or vocabulary.document_end_name, "--before"),
        "after": special(o.after, "--after"),
        "split": "tails" if few else "documents",
        "valid_fraction": 0.0 if valid_files else fraction, "seed": o.seed,
        "shuffle": not o.no_shuffle, "shard_tokens": o.shard_tokens, "skip_bad": o.skip_bad,
        "text_field": o.text_field, "sources": stamps(files),
        "valid_sources": stamps(valid_files), "seq_length": o.seq_length}
    return settings | {"chat_template": short_hash(vocabulary.chat_template()),
                       "special_tokens": short_hash(json.dumps({
                           name: text for name, text in vocabulary.named_specials().items()
                           if text}))}


def read_manifest(folder):
    path = os.path.join(folder, "manifest.json")
    try:
        with open(path) as file:
            manifest = json.load(file)
        list(files_of(manifest)), manifest["format"], manifest.get("settings", {}).get("version")
    except FileNotFoundError:
        die(f"{path}: no such file; give a folder that prepare_data --output has made")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        die(f"{path}: not a manifest of prepare_data, or damaged; {ANEW.format(folder)}")
    return manifest


def check_files_made(folder, manifest, checksums):
    """Ends the program if a file of the manifest is missing or has another size; with checksums,
    also if its content differs."""
    for name, size, checksum in files_of(manifest):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            die(f"{path}: missing; {ANEW.format(folder)}")
        if os.path.getsize(path) != size or checksums and sha256_of(path) != checksum:
            die(f"{path}: damaged: not what the manifest says; {ANEW.format(folder)}")


def is_made(output, settings, vocabulary):
    """Returns whether the folder has the complete result of these settings. Ends the program if it
    has the result of other settings, or only a part of a result."""
    path = os.path.join(output, "manifest.json")
    if not os.path.exists(path):
        return False
    manifest = read_manifest(output)
    before, unused = manifest.get("settings", {}), OF_CONVERSATIONS
    if manifest.get("window", 1) > 1:
        refuse_bounds(settings, vocabulary)
        unused = OF_TEXTS
    different = [key for key in settings if before.get(key) != settings[key] and key not in unused]
    if different:
        ended = different == ["before"] and before["before"] == [vocabulary.end_of_text]
        die(f"{path}: already made, from other settings (other {', '.join(different)}); give "
            "another --output, or remove that folder" +
            f"; --before '{vocabulary.end_of_text_name}' keeps it" * ended)
    check_files_made(output, manifest, False)
    print(f"{output}: made already, from the same sources and settings")
    lacks = not os.path.exists(os.path.join(output, GENERATION_CONFIG)) # version 1.0 wrote none
    if manifest.get("window", 1) > 1 and lacks:
        add_file(output, manifest, GENERATION_CONFIG, generation_config(vocabulary))
        write_manifest(output, manifest)
    return True


def report(output, manifest, vocabulary):
    counts, documents = {}, {}
    for split in ("train", "val"):
        rows = [row for row in manifest["shards"] if row["name"].startswith(split)]
        counts[split] = sum(row["tokens"] for row in rows)
        documents[split] = sum(row["documents"] for row in rows)
        counted = [row["counted"] for row in rows if "counted" in row]
        share = f", of which {sum(counted):,} count" if counted else ""
        print(f"{split:5} {counts[split]:>15,} tokens{share} "
              f"{many(documents[split], 'document'):>22} "
              f"{many(len(rows), 'shard'):>13}")
    for warning in manifest["warnings"]:
        warn(warning)
    if manifest["skipped"]:
        print(printable(f"left out: {manifest['skipped']}, the first: "
                        f"{manifest['first_skipped'][0]}"))
    if manifest["validation_in_training"]:
        print(f"note: {manifest['validation_in_training']:,} of {documents['val']:,} documents for "
              "validation are trained on too: their loss says nothing of other text")
    if manifest["copies"]:
        print(f"note: {manifest['copies']:,} of {documents['train']:,} train documents are copies "
              "of others, each as good as one more epoch of it")
    cut = [f"{count:,} of {documents[split]:,} {split} documents"
           for split, count in manifest["longer_than_window"].items() if count]
    if cut:
        print(f"note: {' and '.join(cut)} are longer than a sequence of {manifest['window']:,} "
              "tokens and are cut: an answer after a cut is trained without its question; a larger "
              "--seq-length keeps them whole")
    settings = manifest["settings"]
    around = [f"{what} with {vocabulary.tokenizer.id_to_token(token)}"
              for what, key in (("begins", "before"), ("ends", "after")) for token in settings[key]]
    if manifest["window"] == 1 and around:
        turn = settings["before"] == [vocabulary.document_end] != [vocabulary.end_of_text]
        print(f"each text {' and '.join(around)}" + turn *
              f"; {vocabulary.end_of_text_name} (eos_token) ends a turn of the chat template")
    first, last = vocabulary.begin_of_text, vocabulary.document_end
    if manifest["window"] == 1 and first not in (last, *settings["before"]):
        first, last = map(vocabulary.tokenizer.id_to_token, (first, last))
        print(f"note: the tokenizer writes {first} before a text; before a prompt transformers and "
              f"vLLM do, too. --before '{first}' --after '{last}' trains on that")
    if counts["val"] < FEW_TOKENS and (settings["valid_fraction"] or settings["valid_sources"]):
        left = f"{counts['val']:,} tokens are few" if counts["val"] else "no tokens are left"
        print(f"note: {left} for a validation loss; a larger --valid-fraction takes more, --valid "
              "other text")
    print(f"tokenizer {settings['tokenizer']}, vocabulary {manifest['vocabulary']}; "
          f"{manifest['seconds']} s; {os.path.join(output, 'manifest.json')}")
    options = ["--data", f"{output}/train_*.bin"]
    if counts["val"]:
        options += ["--valid-data", f"{output}/val_*.bin"]
    print(f"train with {shlex.join(options)}")


def tidy(output, work):
    """Removes .work if it has no unit to resume with, and the lock."""
    with contextlib.suppress(FileNotFoundError):
        if not any(name.endswith(".npz") for name in os.listdir(work)):
            shutil.rmtree(work)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(output, LOCK))


def main():
    o = parser().parse_args()
    if o.check:
        with named_by("--check"):
            manifest = read_manifest(o.check)
            check_files_made(o.check, manifest, True)
        print(f"{o.check}: {many(len(manifest['shards']), 'shard')} as the manifest says, "
              f"{sum(row['tokens'] for row in manifest['shards']):,} tokens")
        return
    if not o.sources or not o.output:
        die("SOURCE and --output are needed (--help)" if not o.sources else
            "--output is missing: where the shards go (--help)")
    if os.path.exists(o.output) and not os.path.isdir(o.output):
        die(f"--output {o.output}: a file of that name is in the way")
    check_files(o)
    vocabulary = open_vocabulary(vars(o))
    files, valid_files = find_files(o)
    settings = make_settings(o, vocabulary, files, valid_files)
    try:
        units = [unit for paths, valid in ((files, False), (valid_files, True))
                 for unit in sources.units_of(paths, valid, o.text_field, o.skip_bad)]
        if o.text_field and all(unit.kind == "text" for unit in units):
            die(f"--text-field {o.text_field}: the sources are texts, which have no fields; leave "
                "the option out")
        with named_by("--output"):
            os.makedirs(o.output, exist_ok=True)
        work = os.path.join(o.output, ".work")
        if not os.path.isdir(work) and is_made(o.output, settings, vocabulary):
            return  # takes no lock: the folder may be another user's
        with os.fdopen(lock(o.output, "--output", waits=True)), contextlib.ExitStack() as at_end:
            at_end.callback(tidy, o.output, work)
            if is_made(o.output, settings, vocabulary):  # another process made it meanwhile
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(work)  # if a preparation was stopped after it wrote the manifest
            else:
                report(o.output, prepare(o, settings, units, vocabulary), vocabulary)
    except sources.BadSource as bad:
        die(f"{bad}, or give --skip-bad to leave it out")
    except BadTemplate as bad:
        die(str(bad))
    except (BrokenProcessPool, MemoryError):
        die("a process was killed, or memory ran out; the same command resumes where it stopped, "
            "with fewer at a time (--jobs); a .json is read as a whole: write a large one as "
            ".jsonl (jq -c .[])")
