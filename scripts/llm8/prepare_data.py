"""From text to shuffled, tokenized shards, which is what scripts/prepare_data does.

First the units of the input are tokenized, each into two files in OUT/.work, named by what they are
made from; then the shards are put together from those, in an order that the seed alone decides.
Either part runs in parallel, and a file that has its name is whole, so a run that was stopped goes
on where it was, and one with a source more or mended tokenizes only that.
"""

import contextlib
import dataclasses
import glob
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

from . import downloads, shards, sources
from .command_line import Parser, guess, number
from .environment import die
from .vocabulary import add_options, open_vocabulary, words_of

VERSION = 1
COUNT = number(int, 1, sys.maxsize, "a whole number from 1 on")
LONG_TEXT = 1 << 20
# one row a document: its tokens, its hash, 1 where it is for validation
INDEX = numpy.dtype([("length", "<i8"), ("hash", "<u8"), ("valid", "?")])
TOKENS_DEPEND_ON = ["mark", "tokenizer", "tokenizer_json", "dtype", "before", "after", "skip_bad"]
NEWER = ["tokenizer_json", "text_field", "valid_files"] # than the first manifests
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
    indexes = [numpy.fromfile(os.path.join(plan["work"], name + ".index"), dtype=INDEX)
               for name in names]
    counts, rows = [len(index) for index in indexes], numpy.concatenate(indexes)
    unit = numpy.repeat(numpy.arange(len(names), dtype=numpy.int32), counts)
    offset = numpy.concatenate([numpy.cumsum(index["length"]) - index["length"]
                                for index in indexes])
    place = numpy.concatenate([numpy.arange(count, dtype=numpy.uint64) for count in counts])
    place |= unit.astype(numpy.uint64) << numpy.uint64(40)
    seed = shards.mixed(numpy.array([plan["seed"] + 1], dtype=numpy.uint64))[0]
    valid = rows["valid"]
    if plan["split"] == "documents":
        valid = valid | (shards.mixed(rows["hash"] ^ seed) <
                         numpy.uint64(int(plan["fraction"] * (1 << 64))))
    order = numpy.argsort(shards.mixed(place ^ seed) if plan["shuffle"] else place, kind="stable")
    chosen = {"train": order[~valid[order]], "val": order[valid[order]]}
    return {name: Order(unit[rows_of], offset[rows_of], rows["length"][rows_of])
            for name, rows_of in chosen.items()}


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
    units = {unit: numpy.memmap(os.path.join(plan["work"], held + ".tokens"), dtype=dtype,
                                mode="r") for unit, held in names.items()}

    def parts():
        yield shards.header(dtype, count, plan["mark"])
        for unit, offset, length in zip(order.unit, order.offset, order.length):
            yield units[unit][offset:offset + length].tobytes()

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
            used = {unit: names[unit] for unit in numpy.unique(part.unit)}
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


# ---- the command line ---------------------------------------------------------------------------


def parser():
    sets = "\n".join(f"  {name:18} {known.about}" for name, known in downloads.KNOWN_SETS.items())
    p = Parser(
        prog="scripts/prepare_data",
        description="Turns text into token shards for the trainers: shuffled, split, with the "
                    "tokenizer\nbeside them. Run again after a stop, it goes on where it was.",
        epilog=f"Known sets, by name (or NAME@REVISION) instead of a path\n{sets}\n\n"
               "Then train with --data 'DIR/train_*.bin' --valid-data 'DIR/val_*.bin'")
    p.add_argument("sources", nargs="*", metavar="SOURCE",
                   help=f"files ({' '.join(sources.KINDS)}), folders, globs, or known sets")
    p.add_argument("--output", metavar="DIR", help="where the shards go")
    add_options(p)
    p.add_argument("--before", metavar="TOKEN", help="put before each document; none: nothing "
                   "[the end of text]")
    p.add_argument("--after", metavar="TOKEN", default="none",
                   help="put after each document [none]")
    p.add_argument("--valid", action="append", default=[], metavar="SOURCE",
                   help="validate on these, instead of on a part of the sources")
    p.add_argument("--valid-fraction", default=0.01, metavar="X",
                   type=number(float, 0, 1 - 1e-9, "a number from 0 to below 1"),
                   help="of the text, for validation [0.01]")
    p.add_argument("--split", choices=["auto", "documents", "tails"], default="auto",
                   help="validate on whole documents, or on the end of each; auto: on ends where "
                        "there are fewer than 100 documents, all .txt or .md [auto]")
    p.add_argument("--shard-tokens", type=COUNT, default=100_000_000, metavar="N",
                   help="about this many tokens a shard [100000000]")
    p.add_argument("--seed", default=1234, metavar="N",
                   type=number(int, 0, (1 << 53) - 1, "a whole number from 0 to 2^53"),
                   help="of the shuffle and the split")
    p.add_argument("--no-shuffle", action="store_true", help="keep the documents' order")
    p.add_argument("--text-field", default="", metavar="NAME",
                   help="of .jsonl and .parquet [text, or content]")
    p.add_argument("--skip-bad", action="store_true",
                   help="leave out lines and files that cannot be read; the manifest lists them")
    p.add_argument("--jobs", type=COUNT, default=os.cpu_count(), metavar="N",
                   help="processes at a time [one a core]")
    p.add_argument("--download-files", default=0, metavar="N",
                   type=number(int, 0, sys.maxsize, "a whole number from 0 on"),
                   help="only the first N files of a known set [0: all]")
    p.add_argument("--check", metavar="DIR",
                   help="check the shards there against their manifest, and leave")
    return p


def fetch(o):
    """Sources with a known set's files in place of its name: to train on, and to validate on."""
    train, valid = [], []
    for source in o.sources:
        if source.partition("@")[0] in downloads.KNOWN_SETS and not os.path.exists(source):
            paths, valid_paths = downloads.fetch_known_set(source, vars(o), o.download_files)
            train += paths
            valid += valid_paths
            continue
        near = guess(source, downloads.KNOWN_SETS)
        if near and not glob.glob(source):
            die(f"SOURCE {source}: no such file, folder or known set{near}")
        train.append(source)
    return train, valid


def make_plan(o, vocabulary):
    train, valid = fetch(o)
    files, others = sources.expand(train, "SOURCE")
    valid_files, _ = sources.expand(valid + o.valid, "--valid") if valid + o.valid else ([], 0)
    if others:
        print(f"left out: {others} files of other kinds than {' '.join(sources.KINDS)}")
    few = len(files) < 100 and all(sources.kind_of(path) == "text" for path in files)
    split = ("tails" if few else "documents") if o.split == "auto" else o.split
    try:
        units = (sources.units_of(files, False, o.text_field) +
                 sources.units_of(valid_files, True, o.text_field))
    except sources.BadSource as bad:
        die(str(bad))

    def special(text, option):
        return [] if text == "none" else [vocabulary.special(text, option)]

    output = os.path.abspath(o.output)
    stats = [(path, os.stat(path)) for path in files + valid_files]
    return {"version": VERSION, "output": output, "work": os.path.join(output, ".work"),
            "tokenizer": vocabulary.name, "mark": vocabulary.mark(),
            "tokenizer_json": hashlib.sha256(vocabulary.json.encode()).hexdigest()[:16],
            "dtype": shards.token_type(vocabulary.size).str,
            "before": special(o.before or vocabulary.end_of_text_name, "--before"),
            "after": special(o.after, "--after"),
            "fraction": 0.0 if valid_files else o.valid_fraction, "split": split, "seed": o.seed,
            "shuffle": not o.no_shuffle, "shard_tokens": o.shard_tokens, "skip_bad": o.skip_bad,
            "text_field": o.text_field, "valid_files": len(valid_files), # the last of files
            "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "units": [dataclasses.asdict(unit) for unit in units]}


def read_manifest(path):
    try:
        with open(path) as file:
            manifest = json.load(file)
        manifest["shards"], manifest["plan"]
    except OSError as error:
        die(f"{path}: {error.strerror}")
    except (ValueError, TypeError, KeyError):
        die(f"{path}: not a manifest of prepare_data, or damaged; {anew(path)}")
    return manifest


def anew(path):
    return f"remove the folder {os.path.dirname(path)}, then prepare the data again"


def check_output(plan):
    """Whether it is all there already, in words; refuses a folder that holds another preparation.
    Units follow from the files, how many of them are for validation, and the text's field."""
    path = os.path.join(plan["output"], "manifest.json")
    if os.path.exists(path):
        before = read_manifest(path)["plan"]
        unknown = [key for key in NEWER if key not in before]
        different = [key for key in plan
                     if key not in ("units", *unknown) and before.get(key) != plan[key]]
        if different:
            die(f"{path}: already made, from other settings (other {', '.join(different)}); give "
                "another --output, or remove that folder")
        return "made already, from the same sources and settings" + (
            f"; its older manifest does not record {', '.join(unknown)}" if unknown else "")
    if os.path.isdir(plan["output"]) and not os.path.isdir(plan["work"]):
        held = [name for name in os.listdir(plan["output"]) if name.endswith(".bin")]
        if held:
            die(f"--output {plan['output']}: holds {held[0]} from elsewhere; give an empty folder, "
                "so that shards of two kinds are not mixed")
    return ""


def check_shards(folder):
    """--check: every shard against the manifest."""
    manifest = read_manifest(os.path.join(folder, "manifest.json"))
    for row in manifest["shards"]:
        shard = os.path.join(folder, row["name"])
        if not os.path.exists(shard):
            die(f"{shard}: missing; {anew(shard)}")
        if os.path.getsize(shard) != row["bytes"] or shards.sha256_of(shard) != row["sha256"]:
            die(f"{shard}: damaged: not what the manifest says; {anew(shard)}")
    print(f"{folder}: {len(manifest['shards'])} shards as the manifest says, "
          f"{sum(row['tokens'] for row in manifest['shards']):,} tokens")


def report(o, manifest):
    splits = {"train": [], "val": []}
    for row in manifest["shards"]:
        splits[row["name"].split("_")[0]].append(row)
    for name, rows in splits.items():
        print(f"{name:5} {sum(row['tokens'] for row in rows):>15,} tokens "
              f"{sum(row['documents'] for row in rows):>12,} documents {len(rows):>6} shards")
    if manifest["skipped"]:
        print(f"left out: {manifest['skipped']}, the first: {manifest['first_skipped'][0]}")
    tokenizer = manifest["tokenizer"]
    print(f"tokenizer {tokenizer['name']}, vocabulary {tokenizer['vocabulary']}; "
          f"{manifest['seconds']} s; {os.path.join(o.output, 'manifest.json')}")
    valid = f" --valid-data '{o.output}/val_*.bin'" if splits["val"] else ""
    print(f"train with --data '{o.output}/train_*.bin'{valid}")


def main():
    o = parser().parse_args()
    if o.check:
        return check_shards(o.check)
    if not o.sources or not o.output:
        die("SOURCE and --output are needed (--help)" if not o.sources else
            "--output is missing: where the shards go (--help)")
    words = words_of(o)
    vocabulary = open_vocabulary(words)
    plan = make_plan(o, vocabulary)
    if os.path.exists(plan["output"]) and not os.path.isdir(plan["output"]):
        die(f"--output {o.output}: a file of that name is in the way")
    os.makedirs(plan["output"], exist_ok=True)
    made = check_output(plan)
    if made:
        print(f"{o.output}: {made}")
        return
    sys.stdout.flush()
    report(o, prepare(plan, words, vocabulary, o.jobs))
