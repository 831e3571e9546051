"""The command line of scripts/prepare_data."""

import dataclasses
import json
import os
import sys

from . import downloads, prepare, shards, sources
from .command_line import Parser, number
from .environment import die
from .vocabulary import add_options, open_vocabulary, words_of

COUNT = number(int, 1, sys.maxsize, "a whole number from 1 on")


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
        else:
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
    return {"version": prepare.VERSION, "output": output, "work": os.path.join(output, ".work"),
            "tokenizer": vocabulary.name, "mark": vocabulary.mark(),
            "dtype": shards.token_type(vocabulary.size).str,
            "before": special(o.before or vocabulary.end_of_text_name, "--before"),
            "after": special(o.after, "--after"),
            "fraction": 0.0 if valid_files else o.valid_fraction, "split": split, "seed": o.seed,
            "shuffle": not o.no_shuffle, "shard_tokens": o.shard_tokens, "skip_bad": o.skip_bad,
            "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "units": [dataclasses.asdict(unit) for unit in units]}


def check_output(plan):
    """Whether it is all there already; refuses a folder that holds another preparation."""
    path = os.path.join(plan["output"], "manifest.json")
    if os.path.exists(path):
        with open(path) as file:
            before = json.load(file).get("plan", {})
        different = [key for key in plan if key != "units" and before.get(key) != plan[key]]
        if different:
            die(f"{path}: already made, from other settings (other {', '.join(different)}); give "
                "another --output, or remove that folder")
        return True
    if os.path.isdir(plan["output"]) and not os.path.isdir(plan["work"]):
        held = [name for name in os.listdir(plan["output"]) if name.endswith(".bin")]
        if held:
            die(f"--output {plan['output']}: holds {held[0]} from elsewhere; give an empty folder, "
                "so that shards of two kinds are not mixed")
    return False


def check_shards(folder):
    """--check: every shard against the manifest."""
    path = os.path.join(folder, "manifest.json")
    try:
        with open(path) as file:
            manifest = json.load(file)
    except (OSError, ValueError) as error:
        die(f"--check {path}: {getattr(error, 'strerror', None) or 'not JSON; it is damaged'}")
    for row in manifest["shards"]:
        shard = os.path.join(folder, row["name"])
        if not os.path.exists(shard):
            die(f"{shard}: missing; prepare the data again")
        if os.path.getsize(shard) != row["bytes"] or shards.sha256_of(shard) != row["sha256"]:
            die(f"{shard}: damaged: not what the manifest says; prepare the data again")
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
    os.makedirs(plan["output"], exist_ok=True)
    if check_output(plan):
        print(f"{o.output}: made already, from the same sources and settings")
        return
    sys.stdout.flush()
    report(o, prepare.prepare(plan, words, vocabulary, o.jobs))
