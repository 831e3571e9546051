"""Writes all that is generated: the tables of README.md, docs/benchmarks.md and docs/options.md
between <!-- NAME --> and <!-- /NAME -->, and the front page's figure, docs/results.svg.

  scripts/results [--check] [--records FOLDER] [PAGE...]

The options are those of ./train_gpt --help. FOLDER (test/results) has the records:

  bench.jsonl      our steps, by make bench; scripts/bench says what is in a record
  peers.jsonl      other programs' steps, where there are some: as in bench.jsonl, with program,
                   precision as shown, and the commit of llm8.c that was timed in the same call
  offload.jsonl    steps with --optimizer-cpu-offload, and the same without, written by hand: as in
                   bench.jsonl, with precision as shown, global_batch, adam_dtype, recompute,
                   offload, device_memory_gib (the limit), host_memory_gib, start_seconds,
                   and grad_accum_dtype where it is known
  fp8_*/report.json  BF16 and FP8 side by side, by scripts/compare

The front page shows, of the first kind of GPU, the newest commit that has GPT-2 124M and Llama 1B
in BF16, FP8 and FP8 with an FP8 head, the newest record of each other program, and the FP8 reports.
docs/benchmarks.md has the same for other kinds of GPU, and the newest record of every other kind.
--check changes nothing, and fails if a page differs from the records."""

import collections
import functools
import json
import math
import os
import re
import subprocess
from pathlib import Path

from . import estimate, text
from .command_line import Parser
from .environment import ROOT, built, die
from .text import shown

PAGES = ("README.md", "docs/benchmarks.md", "docs/options.md", "docs/results.svg")
EVERY = ("date", "machine", "commit", "precision", "model", "seq_length", "micro_batch",
         "tokens_per_s", "steps")
FIELDS = {"bench.jsonl": (*EVERY, "gpus", "recipe", "lm_head", "tflops", "mfu", "floor_share",
                          "peak_memory_gib", "planned_memory_gib"),
          "peers.jsonl": (*EVERY, "program"), "offload.jsonl": (*EVERY, "global_batch")}
JOB = "llama-3-8b-finetune" # a model of scripts/bench: the recipe's job on four GPUs
MODELS = {"gpt2-124m": "GPT-2 124M", "gpt2-1558m": "GPT-2 1558M", "llama-1b": "Llama 1B",
          "llama-3-8b": "Llama 3 8B", JOB: "Llama 3 8B fine-tuning", "qwen2.5-7b": "Qwen2.5 7B",
          "qwen2.5-14b": "Qwen2.5 14B"}
NAMES = {"fp32": "FP32", "bf16": "BF16", "8bit": "8-bit", "gpt2": "GPT-2", "llama": "Llama",
         "adamw": "AdamW", "muon": "Muon"}
VARIANTS = {"head": "FP8, FP8 head", "ends": "the same, first and last block in BF16",
            "blockhead": "FP8 blockwise, FP8 head"}


# ---- records ------------------------------------------------------------------------------------


def read_report(path):
    """Reads the report.json of a comparison."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        next(j["pairs"] for j in held["judgements"] if j["what"] == "validation loss")
    except (ValueError, LookupError, TypeError, StopIteration):
        die(f"{path}: not a report of this scripts/compare; --report-only writes it again")
    return held


def words_of(precision):
    """Returns a name in estimate.PRECISIONS as the tables show it, such as "FP8, FP8 head"."""
    name = precision.replace("-head", ", FP8 head").replace("-", " ")
    return name[:4].upper() + name[4:]


def name_of(r):
    """Returns a record's precision as the tables show it, with recipe and unusual options."""
    if "lm_head" not in r:
        return r["precision"]
    return words_of(estimate.precision_of(r)) + (r["arguments"] and f", {r['arguments']}")


LEAST, FRONT = estimate.LEAST, tuple(map(words_of, estimate.FRONT))


def kind_of(r):
    """Returns what two records of the same kind of run have in common, besides the commit."""
    state = ("seq_length", "global_batch", "adam_dtype", "offload") if "offload" in r else ()
    return r["gpu"], r.get("program"), r["model"], r["gpus"], r["name"], *map(r.get, state)


class Records:
    """The records of a folder, in the order of their dates."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "bench.jsonl")
        self.bench, self.peers, self.offload = (
            sorted(estimate.json_lines(path, fields), key=lambda r: r["date"])
            if os.path.exists(path := os.path.join(folder, name)) or path == self.path else []
            for name, fields in FIELDS.items())
        for r in self.bench + self.peers + self.offload:
            r.update({"arguments": "", "gpus": 1, **r, "gpu": r["machine"]["gpu"]})
            r["name"] = name_of(r)
        if not self.bench:
            die(f"{self.path}: no records; make bench")
        self.reports = {path.parent.name: read_report(path)
                        for path in sorted(Path(folder).glob("fp8_*/report.json"))}
        self.of_place = {(r["commit"], kind_of(r)): r
                         for r in [*self.bench, *reversed(self.offload)]}

    def gain(self, r, **other):
        """Returns how many times as fast a run is as the run of the same commit and kind of GPU
        that differs from it only in the fields of `other`; None if that was not measured."""
        like = self.of_place.get((r.get("beside", r["commit"]), kind_of({**r, **other})))
        return like and r["tokens_per_s"] / like["tokens_per_s"]

    def beside_bf16(self, r):
        return self.gain(r, program=None, name="BF16")

    @functools.cached_property
    def fronts(self):
        """Returns, for each kind of GPU, the front page's records, sorted by model; other programs'
        records come first, with FLOP/s computed from our FLOPs and peak."""
        found = []
        for gpu in estimate.gpus_of_records(self.bench):
            here = [r for r in self.bench if r["gpu"] == gpu]
            commit = estimate.front_commit([r for r in here if not r["arguments"]])
            ours = {(r["model"], r["name"]): r for r in here
                    if (r["gpus"], r["commit"]) == (1, commit)}
            newest = {kind_of(r): r for r in self.peers if r["gpu"] == gpu}
            rows = []
            for model in MODELS:
                held = [ours[model, name] for name in FRONT if (model, name) in ours]
                for r in newest.values():
                    if held and r["model"] == model:
                        faster = r["tokens_per_s"] / held[0]["tokens_per_s"]
                        rows.append({**r, "beside": commit, **{
                            key: held[0][key] and held[0][key] * faster
                            for key in ("tflops", "mfu")}})
                rows += held
            found += [rows] if rows else []
        return found or die(f"{self.path}: no commit has all of {' and '.join(LEAST)} in BF16, FP8 "
                            "and FP8 with an FP8 head; make bench")


# ---- tables -------------------------------------------------------------------------------------


def table(head, rows, words=(0,)):
    """Returns a table in Markdown, without the columns in which no row has a value."""
    kept = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    head, *rows = [[row[i] for i in kept] for row in (head, *rows)]
    return text.table(head, rows, [kept.index(i) for i in words if i in kept], str) + "\n"


def listed(values):
    return ", ".join(sorted(set(values)))


def label_of(r):
    """Returns the model, its GPUs and batch, of a record."""
    passes = r.get("global_batch", 0) // (r["gpus"] * r["micro_batch"])
    again = " recomputed" if r.get("recompute", "none") != "none" else ""
    return ", ".join([MODELS.get(r["model"], r["model"])] + [f"{r['gpus']} GPUs"] *
                     (r["gpus"] > 1) + [(f"{passes} x " if passes > 1 else "") +
                                        f"{r['micro_batch']} x {r['seq_length']}{again}"])


def program_of(r):
    moments = f", {NAMES[r['adam_dtype']]} moments" if "adam_dtype" in r else ""
    moments += " and gradients" if r.get("grad_accum_dtype") == "bf16" else ""
    apart = ", another card" if r["commit"] != r.get("beside", r["commit"]) else ""
    return f"{r.get('program', 'llm8.c')} {r['name']}{moments}{apart}"


def memory(r):
    """Returns the memory in use at the run's end; older records have only the planned memory."""
    used = shown(r.get("peak_memory_gib"), ".1f", 1, " GiB")
    return shown(r.get("planned_memory_gib"), ".1f", 1, " GiB planned") if used == "-" else used


COLUMNS = { # what a table shows of a record r among the records a
    "model, batch": lambda r, a: label_of(r),
    "program": lambda r, a: program_of(r),
    "tokens/s": lambda r, a: f"{r['tokens_per_s']:,.0f}",
    "x BF16": lambda r, a: shown(a.beside_bf16(r), ".2f"),
    "x 1 GPU": lambda r, a: shown(a.gain(r, gpus=1), ".2f"),
    "TFLOP/s": lambda r, a: shown(r.get("tflops"), ".0f"),
    "MFU": lambda r, a: shown(r.get("mfu"), ".1f", 100, "%"),
    "of the roofline": lambda r, a: shown(r.get("floor_share"), ".0f", 100, "%"),
    "memory": lambda r, a: memory(r),
    "of the host": lambda r, a: shown(r.get("host_memory_gib") or None, ".1f", 1, " GiB"),
    "start": lambda r, a: shown(r.get("start_seconds"), ".0f", 1, " s")}
OF_STATE = ("of the host", "start")


def steps(records, rows, without=OF_STATE):
    """Returns a table of records, but for the columns `without`, and where ours were measured."""
    if all(r["gpus"] == 1 for r in rows):
        without = (*without, "x 1 GPU")
    head = [title for title in COLUMNS if title not in without]
    ours = [r for r in rows if "program" not in r]
    versions = {"driver": "driver", "cublaslt": "cuBLASLt", "cudnn": "cuDNN"}
    machines = listed(f"{r['gpu']} (" + ", ".join(
        f"{name} {r['machine'][key]}" for key, name in versions.items() if r["machine"][key]) + ")"
        for r in ours)
    counts = sorted({r["steps"] for r in ours})
    return table(head, [[COLUMNS[title](r, records) for title in head] for r in rows], (0, 1)) + (
        f"\nMedians of {' to '.join(map(str, counts[:1] + counts[1:][-1:]))} steps on {machines}; "
        f"{listed(r['date'][:10] for r in ours)}; commit {listed(r['commit'] for r in ours)}.\n")


def results(records):
    rows = records.fronts[0]
    peak = next(r["tflops"] / r["mfu"] for r in rows)
    return steps(records, rows, (*OF_STATE, "of the roofline", "memory")) + (
        f"MFU is by NVIDIA's dense BF16 peak, {peak:.0f} TFLOP/s, in FP8 too.\n")


def bench(records):
    """Writes a table for each GPU as on the front page; then the newest of all other runs."""
    newest = {(r["gpu"], r["model"], r["gpus"], r["name"]): r for r in records.bench}
    shown_there = [r for rows in records.fronts for r in rows]
    rows = [r for _, r in sorted(newest.items()) if r not in shown_there]
    places = collections.defaultdict(list)
    for r in sorted(rows, key=lambda r: r["date"][:10], reverse=True):
        places[r["commit"], r["gpu"]].append(r)
    return "\n".join(steps(records, group) for group in [*records.fronts, *places.values()])


def scaling(records):
    """Writes what several GPUs gain, by the newest commit with one and more; the job on four."""
    both = [r for r in records.bench if r["gpus"] > 1 and records.gain(r, gpus=1)]
    tables = [[r for r in rows if (r["commit"], r["machine"]) == (rows[-1]["commit"],
                                                                  rows[-1]["machine"])]
              for rows in (both, jobs(records))]
    return "\n".join(steps(records, rows) for rows in tables if rows)


def jobs(records):
    return [r for r in records.bench if r["model"] == JOB and r["name"] in FRONT]


def offload(records):
    """Writes a table for each kind of GPU."""
    return "\n".join(steps(records, [r for r in records.offload if r["gpu"] == gpu], ())
                     for gpu in dict.fromkeys(r["gpu"] for r in records.offload))


def fp8(records):
    """Writes the mean of the differences between runs of equal seeds, and its standard error."""
    cells, head = collections.defaultdict(dict), ["validation loss beside BF16's"]
    for name, r in records.reports.items():
        judged = [j for j in r["judgements"] if j["what"] == "validation loss"]
        head.append(f"[{NAMES[r['arch']]} {r['parameters'] / 1e6:.0f}M by "
                    f"{NAMES[r['optimizer']]}](test/results/{name}/report.md), {r['steps']:,} "
                    f"steps of {r['batch']} tokens, {max(j['pairs'] for j in judged)} seeds")
        for j in judged:
            cells[j["variant"]][name] = (f"{shown(j['change'], '+.2f', 1, '%')} ± "
                                         f"{shown(j['error'], '.2f')}")
    rows = [[VARIANTS.get(variant, variant),
             *(cells[variant].get(name, "-") for name in records.reports)]
            for variant in {**VARIANTS, **cells} if variant in cells]
    return table(head, rows) if rows else "Not measured yet.\n"


def options(_):
    """Writes tables from --help, which has headings in column 1 and under each some rows: an option
    in column 3, and its text from column 37 on, in the same line or below."""
    said = subprocess.run([built("train_gpt"), "--help"], capture_output=True, text=True,
                          check=True).stdout
    tables, rows = {}, []
    for line in said[:said.index("\nExit status")].splitlines():
        if line[:1].isupper():
            rows = tables[line] = []
        elif re.match("  [^ ]", line):
            at = 35 if line[35:36] == " " else len(line)
            rows.append([f"`{line[2:at].rstrip()}`", line[at:].strip()])
        elif line.strip() and rows:
            rows[-1][1] = f"{rows[-1][1]} {line.strip()}".strip()
    out = ""
    for heading, rows in tables.items():
        rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
        head = ["preset", "what"]
        if not heading.startswith("Presets"):
            head = ["option", "what", "default"]
            rows = [[name, *re.fullmatch(r"(.*?)(?: \[([^][]*)\])?", what).groups("")]
                    for name, what in rows]
            rows = [[name, what, default or ("on" if "[no-]" in name else "")]
                    for name, what, default in rows]
        out += f"\n**{heading}**\n\n" + table(head, rows, range(3)) if rows else ""
    return out


# ---- the front page -----------------------------------------------------------------------------


def number(records):
    rows = [r for r in records.fronts[0] if r["model"] == LEAST[0]]
    rates = {name_of(r): r["tokens_per_s"] for r in rows if "program" not in r}
    peer = max((r for r in rows if "program" in r), key=lambda r: r["tokens_per_s"], default=None)
    best = rates[FRONT[-1]]
    said = (f"**{MODELS[LEAST[0]]} trains at {best:,.0f} tokens/s on one {rows[-1]['gpu']} in FP8 "
            f"with an FP8 head, {best / rates['BF16']:.2f} times as fast as in BF16.**")
    if peer:
        where = "timed right beside it" if peer["commit"] == rows[-1]["commit"] else \
            "timed on another such card"
        said += (f" That is {best / peer['tokens_per_s']:.2f} times as fast as {peer['program']}, "
                 f"the fastest other program, {where}.")
    return said + "\n"


def job(records):
    """Writes the newest record of the recipe's job on four GPUs."""
    r = max((r for r in jobs(records) if r["precision"] == "fp8" and records.beside_bf16(r)),
            key=lambda r: (r["date"][:10], r["tokens_per_s"]), default=None)
    return r and (
        f"**Llama 3 8B trains at {r['tokens_per_s']:,.0f} tokens/s on {r['gpus']} {r['gpu']}s in "
        f"FP8 with an FP8 head, {records.beside_bf16(r):.2f} times as fast as in BF16**: "
        f"{r['micro_batch']} x {r['seq_length']:,} tokens a GPU, accumulated to "
        f"{r['global_batch'] * r['seq_length']:,} a step, with recomputation and ZeRO-1, in "
        f"{math.ceil(r['peak_memory_gib'])} GiB a GPU.\n") or ""


def card(records):
    """Writes a sentence on the fastest of Llama 3 8B on a card of 80 GB."""
    r = max((r for r in records.offload if r.get("offload") and r["precision"] != "BF16"
             and r["model"] == "llama-3-8b" and records.beside_bf16(r)),
            key=lambda r: r["tokens_per_s"], default=None)
    return r and (
        f"Llama 3 8B can be fully fine-tuned on one 80 GB GPU, in "
        f"{math.ceil(r['peak_memory_gib'])} GiB, with {r['host_memory_gib']:.0f} GiB of "
        f"optimizer state in host memory: {r['tokens_per_s']:,.0f} tokens/s in FP8 with an "
        f"FP8 head, {records.beside_bf16(r):.2f} times as fast as in BF16, at "
        f"{r['global_batch'] * r['seq_length']:,} tokens a step (measured on one {r['gpu']}).\n"
    ) or ""


def figure(records):
    """Draws tokens a second: other programs in grey, ours in BF16 in blue, in FP8 in orange."""
    from . import plots, style

    def draw(figure):
        for axes, model in zip(figure.subplots(1, 2), LEAST):
            rows = [r for r in records.fronts[0] if r["model"] == model]
            names = [f"{r.get('program', 'llm8.c')} {r['name']}" for r in rows]
            colors = [style.QUIET if "program" in r else style.color("FP8" in r["name"])
                      for r in rows]
            plots.draw_bars(axes, names, [[r["tokens_per_s"]] for r in rows],
                            f"{MODELS[model]}, tokens/s", f"one {rows[0]['gpu']}",
                            "{:,.0f}".format, colors)

    return style.draw(draw, (9.6, 2.9)).decode()


# ---- pages --------------------------------------------------------------------------------------


BLOCKS = {made.__name__: made for made in (job, number, card, results, fp8, bench, offload,
                                           scaling, options)}


def fresh(path, page, records):
    """Returns the page with its generated parts as they are now."""
    if path.endswith(".svg"):
        return figure(records)
    found = [name for name in BLOCKS if f"<!-- {name} -->" in page] or \
        die(f"{path}: has none of <!-- {' -->, <!-- '.join(BLOCKS)} -->")
    for name in found:
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, *after = re.split(f"{begin}|{end}", page)
        if len(after) != 2 or page.index(begin) > page.index(end):
            die(f"{path}: needs one {begin} and, after it, one {end}")
        page = f"{before}{begin}\n{BLOCKS[name](records)}{end}{after[1]}"
    return page


def main():
    p = Parser(prog="scripts/results", description=__doc__)
    p.add_argument("pages", metavar="PAGE", nargs="*",
                   default=[os.path.join(ROOT, page) for page in PAGES])
    p.add_argument("--check", action="store_true")
    p.add_argument("--records", metavar="FOLDER",
                   default=os.path.join(ROOT, "test", "results"))
    o = p.parse_args()
    records = Records(o.records)
    for page in map(Path, o.pages):
        old = page.read_text(encoding="utf-8") if page.exists() or page.suffix != ".svg" else ""
        new = fresh(str(page), old, records)
        if new != old and o.check:
            die(f"{page}: not what the records in {o.records} say; run scripts/results")
        if new != old:
            page.write_text(new, encoding="utf-8")
