"""From text to shuffled, tokenized shards: what scripts/prepare_data does.

First the units of the input are tokenized, each into two files in OUT/.work, named by what they are
made from; then the shards are put together from those, in an order that the seed alone decides.
Either part runs in parallel, and a file that has its name is whole, so a run that was stopped goes
on where it was, and one with a source more or mended tokenizes only that.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy
from tqdm import tqdm

from . import shards, sources
from .environment import die
from .vocabulary import open_vocabulary

VERSION = 1
LONG_TEXT = 1 << 20
# one row a document: its tokens, its hash, 1 where it is for validation
INDEX = numpy.dtype([("length", "<i8"), ("hash", "<u8"), ("valid", "?")])
TOKENS_DEPEND_ON = ["mark", "tokenizer", "dtype", "before", "after", "skip_bad"]
# where a line ends between two visible ASCII characters, no word of any tokenizer here goes on
BREAK = re.compile(r"(?<=[!-~]\n)(?=[!-~])")


# ---- tokenizing ----------------------------------------------------------------------------------


class Worker:
    """What a process of the pool keeps between its tasks."""

    vocabulary = None

    @classmethod
    def start(cls, words):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cls.vocabulary = open_vocabulary(words)


def pieces(text):
    """A long text in parts that can be tokenized by themselves."""
    if isinstance(text, bytes) or len(text) <= LONG_TEXT:
        return [text]
    parts, begin = [], 0
    while begin < len(text):
        found = BREAK.search(text, begin + LONG_TEXT)
        end = found.start() if found else len(text)
        parts.append(text[begin:end])
        begin = end
    return parts


def split_tail(text, fraction):
    """A text's part for training and, starting a line where it can, the one for validation."""
    at = len(text) - int(len(text) * fraction)
    line = text.find(b"\n" if isinstance(text, bytes) else "\n", at)
    at = line + 1 if 0 <= line < len(text) - 1 else at
    return [(text[:at], False), (text[at:], True)] if at < len(text) else [(text, False)]


def unit_name(plan, unit):
    """A name that changes with what the unit's tokens depend on."""
    stats = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in unit["files"]]
    tails = plan["fraction"] if plan["split"] == "tails" else None
    words = [VERSION, unit, stats, tails, *(plan[key] for key in TOKENS_DEPEND_ON)]
    return "unit_" + hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def tokenize_unit(plan, name, unit):
    """Writes a unit's tokens and index; returns what it held. Runs in a worker."""
    unit = sources.Unit(**unit)
    vocabulary, dtype = Worker.vocabulary, numpy.dtype(plan["dtype"])
    before, after = (numpy.array(plan[key], dtype=dtype).tobytes() for key in ("before", "after"))
    rows, skipped, total = [], [], 0
    base = os.path.join(plan["work"], name)
    with open(base + ".tokens", "wb") as file:
        for text in sources.documents(unit, vocabulary.name == "byte",
                                      skipped.append if plan["skip_bad"] else None):
            tails = plan["split"] == "tails" and not unit.valid
            parts = split_tail(text, plan["fraction"]) if tails else [(text, unit.valid)]
            for part, valid in parts:
                if not part:
                    continue
                tokens = [numpy.array(vocabulary.encode(piece), dtype=dtype).tobytes()
                          for piece in pieces(part)]
                size = file.write(before + b"".join(tokens) + after)
                rows.append((size // dtype.itemsize, shards.content_hash(part), valid))
                total += size // dtype.itemsize
    index = numpy.array(rows, dtype=INDEX)
    shards.write_durably(base + ".index", [index.tobytes()])
    return {"size": unit.size, "documents": len(rows), "tokens": total,
            "skipped": len(skipped), "first_skipped": [str(bad) for bad in skipped[:1]]}


# ---- putting shards together ---------------------------------------------------------------------


@dataclasses.dataclass
class Order:
    """Documents in the order in which a split has them: unit, place in its tokens, length."""
    unit: numpy.ndarray
    offset: numpy.ndarray
    length: numpy.ndarray


def load_orders(plan, names):
    """The documents of training and of validation, shuffled."""
    columns = {"unit": [], "offset": [], "length": [], "valid": [], "key": []}
    seed = shards.mixed(numpy.array([plan["seed"] + 1], dtype=numpy.uint64))[0]
    threshold = numpy.uint64(int(plan["fraction"] * (1 << 64)))
    for number, unit in enumerate(plan["units"]):
        index = numpy.fromfile(os.path.join(plan["work"], names[number] + ".index"), dtype=INDEX)
        valid = index["valid"]
        if plan["split"] == "documents" and not unit["valid"]:
            valid = shards.mixed(index["hash"] ^ seed) < threshold
        place = numpy.arange(len(index), dtype=numpy.uint64) | numpy.uint64(number << 40)
        columns["unit"].append(numpy.full(len(index), number, dtype=numpy.int32))
        columns["offset"].append(numpy.cumsum(index["length"]) - index["length"])
        columns["length"].append(index["length"])
        columns["valid"].append(valid)
        columns["key"].append(shards.mixed(place ^ seed) if plan["shuffle"] else place)
    joined = {name: numpy.concatenate(parts) for name, parts in columns.items()}
    order = numpy.argsort(joined["key"], kind="stable")
    orders = {}
    for name, wanted in (("train", False), ("val", True)):
        chosen = order[joined["valid"][order] == wanted]
        orders[name] = Order(*(joined[key][chosen] for key in ("unit", "offset", "length")))
    return orders


def cut_shards(order, most):
    """(first, last) documents of each shard of about `most` tokens."""
    ends = numpy.cumsum(order.length)
    cuts, begin = [], 0
    while begin < len(ends):
        base = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(numpy.searchsorted(ends, base + most, side="right")))
        cuts.append((begin, end))
        begin = end
    return cuts


def write_shard(plan, name, order, names):
    """One shard, from its documents; returns its row of the manifest. Runs in a worker. names: of
    the units that it is made from."""
    dtype, count = numpy.dtype(plan["dtype"]), int(order.length.sum())
    path = os.path.join(plan["output"], name)
    row = {"name": name, "tokens": count, "documents": len(order.length),
           "bytes": shards.HEADER_BYTES + count * dtype.itemsize}
    units = {number: numpy.memmap(os.path.join(plan["work"], unit + ".tokens"), dtype=dtype,
                                  mode="r") for number, unit in names.items()}

    def parts():
        yield shards.header(dtype, count, plan["mark"])
        for number, offset, length in zip(order.unit, order.offset, order.length):
            yield units[number][offset:offset + length].tobytes()

    if not os.path.exists(path):  # from before a stop
        shards.write_durably(path, parts())
    return row | {"sha256": shards.sha256_of(path)}


# ---- the pool ------------------------------------------------------------------------------------


def open_pool(jobs, words):
    if jobs == 1:  # no pool is quicker where there is little to do
        Worker.vocabulary = open_vocabulary(words)
        return contextlib.nullcontext()
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=Worker.start,
                               initargs=(words,))


def failed(future):
    return future.exception() is not None


def run_tasks(pool, jobs, tasks, function, done):
    """function(*task) for every task, some ahead of what is running; done(task, result) as they
    end. The first fault ends it all."""
    pending, tasks = {}, iter(tasks)
    try:
        if not pool:
            for task in tasks:
                done(task, function(*task))
            return
        while True:
            while len(pending) < jobs + 2 and (task := next(tasks, None)) is not None:
                pending[pool.submit(function, *task)] = task
            if not pending:
                return
            ended = wait(pending, return_when=FIRST_COMPLETED).done
            for future in sorted(ended, key=failed):  # what is done before a fault is kept
                done(pending.pop(future), future.result())
    except sources.BadSource as bad:
        stop(pool)
        die(str(bad))
    except BrokenProcessPool:
        die("a worker was killed (out of memory?); the same command goes on where it stopped, with "
            "fewer at a time (--jobs)")
    except KeyboardInterrupt:
        stop(pool)
        print("stopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)


def stop(pool):
    if pool:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)


def settings_of(plan):
    """What a worker needs of the plan: the lists may be long."""
    return {key: plan[key] for key in plan if key not in ("units", "files")}


def clear_other_shards(plan):
    """Shards of a run that was stopped, unless it was this very one."""
    path, now = os.path.join(plan["work"], "plan.json"), json.dumps(plan)
    os.makedirs(plan["work"], exist_ok=True)
    if os.path.exists(path):
        with open(path) as file:
            if file.read() == now:
                return
    for name in os.listdir(plan["output"]):
        if re.fullmatch(r"(train|val)_\d+\.bin", name):
            os.remove(os.path.join(plan["output"], name))
    shards.write_durably(path, [now.encode()])


def read_done(path, names):
    """What earlier runs said of the units that are of use now."""
    results = {}
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # cut short by a kill
                if row["unit"] in names:
                    results[row.pop("unit")] = row
    return results


def tokenize(plan, pool, jobs, names):
    """Every unit that is not done yet; returns the sums of all."""
    done_path = os.path.join(plan["work"], "done.jsonl")
    results = read_done(done_path, set(names))
    left = [n for n, name in enumerate(names) if name not in results]
    if len(left) < len(names):
        print(f"going on: {len(names) - len(left)} of {len(names)} parts are tokenized already")
    total = sum(unit["size"] for unit in plan["units"])
    bar = tqdm(total=total, initial=sum(row["size"] for row in results.values()), unit="B",
               unit_scale=True, desc="tokenize", disable=None)
    with open(done_path, "a") as log:
        def done(task, row):
            results[task[1]] = row
            log.write(json.dumps({"unit": task[1], **row}) + "\n")
            log.flush()
            bar.update(row["size"])

        tasks = ((settings_of(plan), names[n], plan["units"][n]) for n in left)
        run_tasks(pool, jobs, tasks, tokenize_unit, done)
    bar.close()
    return results


def assemble(plan, pool, jobs, names):
    """The shards; returns their rows of the manifest."""
    orders = load_orders(plan, names)
    tasks = []
    for split, order in orders.items():
        for place, (begin, end) in enumerate(cut_shards(order, plan["shard_tokens"])):
            part = Order(*(column[begin:end] for column in dataclasses.astuple(order)))
            used = {number: names[number] for number in numpy.unique(part.unit)}
            tasks.append((settings_of(plan), f"{split}_{place:05d}.bin", part, used))
    bar = tqdm(total=sum(int(task[2].length.sum()) for task in tasks), unit=" tokens",
               unit_scale=True, desc="shards", disable=None)
    rows = []

    def done(task, row):
        rows.append(row)
        bar.update(row["tokens"])

    run_tasks(pool, jobs, tasks, write_shard, done)
    bar.close()
    return sorted(rows, key=lambda row: row["name"])


def prepare(plan, words, vocabulary, jobs):
    """All of it; returns the manifest."""
    output, work = plan["output"], plan["work"]
    begin = time.time()
    clear_other_shards(plan)
    names = [unit_name(plan, unit) for unit in plan["units"]]
    jobs = min(jobs, len(names))
    with open_pool(jobs, words) as pool:
        results = tokenize(plan, pool, jobs, names)
        if not any(row["tokens"] for row in results.values()):
            die("the sources hold no text at all")
        rows = assemble(plan, pool, jobs, names)
    for name, content in (("tokenizer.bin", vocabulary.tokenizer_bin()),
                          ("tokenizer.json", vocabulary.json.encode()),
                          ("tokenizer_config.json", vocabulary.config.encode())):
        shards.write_durably(os.path.join(output, name), [content])
    manifest = {
        "format": "llm8.c prepared data", "version": VERSION,
        "tokenizer": {"name": vocabulary.name, "vocabulary": vocabulary.size,
                      "end_of_text": vocabulary.end_of_text, "mark": f"{plan['mark']:08x}"},
        "documents": sum(row["documents"] for row in results.values()),
        "tokens": sum(row["tokens"] for row in results.values()),
        "skipped": sum(row["skipped"] for row in results.values()),
        "first_skipped": [text for name in names for text in results[name]["first_skipped"]][:20],
        "seed": plan["seed"], "shuffle": plan["shuffle"], "split": plan["split"],
        "valid_fraction": plan["fraction"], "seconds": round(time.time() - begin, 1),
        "shards": rows,
        "sources": [{"path": path, "bytes": size} for path, size, _ in plan["files"]],
        "plan": {key: plan[key] for key in plan if key != "units"},
    }
    shards.write_durably(os.path.join(output, "manifest.json"),
                         [(json.dumps(manifest, indent=1) + "\n").encode()])
    shutil.rmtree(work)
    return manifest
