"""Writes all that is generated: the tables of README.md, docs/benchmarks.md and docs/options.md
between <!-- NAME --> and <!-- /NAME -->, the front page's figure, docs/results.svg, and the lines
marked `# cost:` at the top of the recipes, scripts/run_*.sh.

  scripts/results [--check | --print] [--records FOLDER] [PAGE...]

The options are those of ./train_gpt --help. FOLDER (test/results) has the records:

  bench.jsonl      our steps, by make bench; scripts/bench says what is in a record
  peers.jsonl      other programs' steps, where there are some: date, machine {gpu}, commit (of
                   llm8.c, timed in the same call on the same card), program, precision (as shown),
                   model, seq_length, micro_batch, tokens_per_s, steps
  fp8_*/report.json  BF16 and FP8 side by side, by scripts/compare
  race/report.json   llm.c, and ours by AdamW and Muon, where it was measured (docs/benchmarks.md)

The front page shows, of each kind of GPU, one commit on one card: the newest that has GPT-2 124M
and Llama 1B in every precision, and what it has of the other models; beside them the newest record
of each other program, and whether it was timed in the same call. Of the other records the newest of
each kind is in docs/benchmarks.md, beside those of its commit that it is compared with.
--check changes nothing, and fails where a page is not what the records say; --print shows what is
generated of the pages, and changes nothing either.
"""

import collections
import functools
import glob
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess

from . import estimate, text
from .command_line import Parser
from .environment import ROOT, die, trainer
from .text import shown

PAGES = ("README.md", "docs/benchmarks.md", "docs/options.md", "docs/results.svg",
         "scripts/run_*.sh")
NEEDED = {
    "bench.jsonl": ("date", "machine", "commit", "model", "seq_length", "micro_batch", "gpus",
                    "precision", "recipe", "lm_head", "tokens_per_s", "steps", "tflops", "mfu",
                    "floor_share", "peak_memory_gib", "planned_memory_gib"),
    "peers.jsonl": ("date", "machine", "commit", "program", "precision", "model", "seq_length",
                    "micro_batch", "tokens_per_s", "steps"),
}
# the front page's rows: each model in each of FRONT; a commit without LEAST is not shown
LEAST = ("gpt2-124m", "llama-1b")
MODELS = {"gpt2-124m": "GPT-2 124M", "gpt2-1558m": "GPT-2 1558M", "llama-1b": "Llama 1B",
          "llama-3-8b": "Llama 3 8B"}
BF16, FP8, FP8_HEAD = (("bf16", None, "bf16"), ("fp8", "delayed", "bf16"),
                       ("fp8", "delayed", "fp8"))
FRONT = {BF16: "BF16", FP8: "FP8", FP8_HEAD: "FP8, FP8 head"}
VARIANTS = {"bf16": "BF16", "delayed": "FP8 delayed", "tensorwise": "FP8 tensorwise",
            "head": "FP8 delayed, FP8 head", "blockhead": "FP8 blockwise, FP8 head",
            "firstlast": "FP8 delayed, first and last block BF16"}

RACE = "race" # the folder of its report; the variants' names there, and how they are drawn
RACERS = {"llm.c": ("llm.c BF16", "other", "-"), "bf16": ("AdamW BF16", "bf16", "-"),
          "fp8": ("AdamW FP8", "fp8", "--"), "muon": ("Muon FP8", "muon", ":")}


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        die(f"{path}: {error.strerror}")


def read_records(path):
    """In the order of their dates."""
    records = [{"arguments": ""} | record
               for record in estimate.json_lines(path, NEEDED[os.path.basename(path)])]
    return sorted(records, key=lambda r: r["date"]) or die(f"{path}: no records; make bench")


def read_report(path):
    """report.json of scripts/compare."""
    try:
        held = json.loads(read(path))
        held["said"], held["curves"]
    except (ValueError, KeyError):
        die(f"{path}: not a report of this scripts/compare; --report-only writes it again")
    return held


class Records:
    """Those of a folder, each read where a page needs it."""

    def __init__(self, folder):
        self.folder, self.path = folder, os.path.join(folder, "bench.jsonl")

    @functools.cached_property
    def bench(self):
        return read_records(self.path)

    @functools.cached_property
    def by_place(self):
        """{place_of(): {kind_of(): the newest record}}"""
        found = {}
        for record in self.bench:
            found.setdefault(place_of(record), {})[kind_of(record)] = record
        return found

    @functools.cached_property
    def all_peers(self):
        path = os.path.join(self.folder, "peers.jsonl")
        return read_records(path) if os.path.exists(path) else []

    @functools.cached_property
    def reports(self):
        return [Report(path) for path in
                sorted(glob.glob(os.path.join(self.folder, "fp8_*", "report.json")))]

    @functools.cached_property
    def race(self):
        path = os.path.join(self.folder, RACE, "report.json")
        return read_report(path) if os.path.exists(path) else None

    @functools.cached_property
    def some_fronts(self):
        """front() of each kind of GPU that has one, that with the most records first."""
        return list(filter(None, map(self.front, estimate.gpus_of_records(self.bench))))

    @property
    def fronts(self):
        return self.some_fronts or die(
            f"{self.path}: no commit has all of {' and '.join(LEAST)} in BF16, FP8 and FP8 with an "
            "FP8 head; make bench")

    def front(self, gpu):
        """{model: {precision: record}} of the newest commit that has LEAST, and the newest of each
        peer on such a card: where is "" for the same call. None: no commit has."""
        found = {}
        for record in self.bench:
            kind = front_kind(record)
            if kind and record["machine"]["gpu"] == gpu and record["gpus"] == 1:
                rows = found.setdefault(record["commit"], {})
                rows.setdefault(record["model"], {})[kind] = record
        whole = [rows for rows in found.values()
                 if all(set(rows.get(model, ())) == set(FRONT) for model in LEAST)]
        if not whole:
            return None
        newest = max(whole, key=lambda rows: rows["gpt2-124m"][BF16]["date"])
        newest = {model: {kind: newest[model][kind] for kind in FRONT if kind in newest[model]}
                  for model in MODELS if model in newest}
        record, peers = newest["gpt2-124m"][BF16], {}
        for peer in self.all_peers:
            if peer["machine"]["gpu"] == gpu:
                apart = "" if peer["commit"] == record["commit"] else ", another card"
                peers[peer["program"], peer["precision"], peer["model"]] = peer | {"where": apart}
        return newest, list(peers.values())


class Report:
    """What a report of scripts/compare says."""

    def __init__(self, path):
        held = read_report(path)
        name = {"gpt2": "GPT-2", "llama": "Llama"}.get(held["arch"], held["arch"])
        self.size = f"{name} {held['parameters'] / 1e6:.0f}M"
        self.steps, self.batch = f"{held['steps']:,}", held["batch"]
        self.gpu = held["device"].split(",")[0]
        self.limit = f"{held['limits']['valid']:g}%"
        self.verdict = held["said"].split(":")[0]
        self.page = f"test/results/{os.path.basename(os.path.dirname(path))}/report.md"
        # {variant: [(step, validation loss)]}, {variant: {seed: the last validation loss}}
        self.losses = {name: list(zip(curve["steps"], curve["loss"]))
                       for name, curve in held["curves"].items()}
        self.last = {name: {run["seed"]: run["valid_loss"] for run in held["runs"]
                            if run["variant"] == name and run["state"] == "finished"}
                     for name in self.losses}
        self.seeds = len(self.last["bf16"])

    def spread(self):
        """How many there are of BF16, and how far apart they end."""
        losses = self.last["bf16"].values()
        apart = f", {max(losses) / min(losses) - 1:.2%} apart" if self.seeds > 1 else ""
        return f"{self.seeds}{apart}"

    def loss(self, variant):
        """The last validation loss, and its changes to BF16's, seed by seed, as words."""
        if variant not in self.losses:
            return "-"
        base, last = self.last["bf16"], self.last[variant]
        changes = [100 * (loss / base[seed] - 1) for seed, loss in last.items()]
        words = " and ".join(f"{change:+.2f}%" for change in changes)
        if len(changes) > 3:
            error = statistics.stdev(changes) / len(changes) ** 0.5
            words = f"{statistics.mean(changes):+.2f}% ± {error:.2f}"
        loss = f"{statistics.mean(last.values()):.4f}"
        return loss if variant == "bf16" else f"{loss} ({words})"


# ---- tables -------------------------------------------------------------------------------------


def table(head, rows, words=(0,)):
    return text.table(head, rows, words, str) + "\n"


def batch_of(record):
    return f"{record['micro_batch']} x {record['seq_length']}"


def memory(record):
    """What was in use at the run's end; in older records, which lack it, what was planned."""
    if record["peak_memory_gib"] is None:
        return shown(record["planned_memory_gib"], ".1f", 1, " GiB planned")
    return shown(record["peak_memory_gib"], ".1f", 1, " GiB")


def listed(values):
    return ", ".join(sorted(set(values)))


def sources(rows):
    """Where and when the rows were measured."""
    machines = listed(f"{r['machine']['gpu']} (driver {r['machine']['driver'] or 'not known'}, "
                      f"cuBLASLt {r['machine']['cublaslt']}, cuDNN {r['machine']['cudnn']})"
                      for r in rows)
    return (f"\nMedians of {listed(str(r['steps']) for r in rows)} steps on {machines}; "
            f"{listed(r['date'][:10] for r in rows)}; "
            f"commit {listed(r['commit'] for r in rows)}.\n")


def number(records):
    rows, peers = records.fronts[0]
    one = rows["gpt2-124m"]
    times = one[FP8_HEAD]["tokens_per_s"] / one[BF16]["tokens_per_s"]
    said = (f"**GPT-2 124M trains at {one[FP8_HEAD]['tokens_per_s']:,.0f} tokens/s on one "
            f"{one[BF16]['machine']['gpu']} in FP8, {times:.2f} times its BF16.**")
    peer = max((p for p in peers if p["model"] == "gpt2-124m"),
               key=lambda p: p["tokens_per_s"], default=None)
    if peer:
        times = one[FP8_HEAD]["tokens_per_s"] / peer["tokens_per_s"]
        where = "on another such card" if peer["where"] else "in the same call"
        said += (f" That is {times:.2f} times {peer['program']}, the fastest other program, "
                 f"{where}.")
    if records.race:
        best = min((j for j in times_of(records.race).values() if j["change"]),
                   key=lambda j: j["change"], default=None)
        if best:
            said += (f" By {RACERS[best['variant']][0].replace(' ', ' in ')} it comes to the "
                     f"validation loss at which llm.c ends in {best['change']:.0%} of its time.")
    return said + "\n"


def times_of(race):
    """{variant: the judgement on its time to the loss at which llm.c ends}"""
    return {j["variant"]: j for j in race["judgements"]
            if j["what"] == "time to loss" and j["variant"] in RACERS}


def race(records):
    if not records.race:
        return "Not measured yet.\n"
    times, curves = times_of(records.race), records.race["curves"]
    seeds = collections.Counter(run["variant"] for run in records.race["runs"])
    lines = []
    for name, (words, *_) in RACERS.items():
        if name in curves:
            j, curve = times.get(name), curves[name]
            seconds = j["value"] if j else curve["seconds"][-1]
            lines.append((words, str(seeds[name]), shown(curve["loss"][-1], ".4f"),
                          f"{curve['seconds'][-1]:,.1f} s", shown(seconds, ",.1f", 1, " s"),
                          shown(j["change"] if j else 1, ".2f")))
    head = ("run", "seeds", "last validation loss", "all steps", "to llm.c's last loss", "x llm.c")
    tokens = curves["llm.c"]["tokens"][-1] / 1e6
    return (table(head, lines) + f"\nGPT-2 124M, {tokens:.1f} million tokens "
            f"each, on one {records.race['device']}; seconds are those of training steps. [The "
            f"report](../test/results/{RACE}/report.md).\n")


def front_rows(front):
    """(model, program, record, colour) of the front page, peers first; no peer has TFLOP/s."""
    ours, peers = front
    return [row for model, own in ours.items() for row in (
        *((model, f"{peer['program']} {peer['precision']}{peer['where']}", peer, "other")
          for peer in peers if peer["model"] == model),
        *((model, f"llm8.c {FRONT[kind]}", record, kind[0]) for kind, record in own.items()))]


def results(records):
    peak = next(r["tflops"] / r["mfu"] for rows in records.fronts[0][0].values()
                for r in rows.values())
    return ("\n".join(map(front_table, records.fronts))
            + f"MFU is by NVIDIA's dense BF16 peak, {peak:.0f} TFLOP/s, in FP8 too.\n")


def front_table(front):
    lines, ours = [], []
    for model, program, record, _ in front_rows(front):
        cells = ["-", "-", "-"]
        if "tflops" in record:
            ours.append(record)
            cells = [f"{record['tflops']:.0f}", shown(record["mfu"], ".1f", 100, "%"),
                     memory(record)]
        lines.append([f"{MODELS[model]}, {batch_of(record)}", program,
                      f"{record['tokens_per_s']:,.0f}", *cells])
    head = ("model, batch", "program", "tokens/s", "TFLOP/s", "MFU", "memory")
    return table(head, lines, (0, 1)) + sources(ours)


def fp8(records):
    reports = records.reports
    ran = [variant for report in reports for variant in report.losses]
    lines = [[VARIANTS.get(variant, variant), *(report.loss(variant) for report in reports)]
             for variant in dict.fromkeys([*VARIANTS, *ran]) if variant in ran]
    lines += [["BF16's seeds", *(report.spread() for report in reports)],
              ["verdict", *(f"[{r.verdict}]({r.page}), limit {r.limit}" for r in reports)]]
    head = ["validation loss", *(f"{r.size}, {r.steps} steps of {r.batch} tokens" for r in reports)]
    return table(head, lines) + f"\nOn {listed(report.gpu for report in reports)}.\n"


def place_of(record):
    return record["commit"], record["machine"]["gpu"]


def front_kind(record):
    """Which of FRONT a record is; None: of none of them."""
    kind = tuple(record[name] for name in ("precision", "recipe", "lm_head"))
    return kind if kind in FRONT and not record["arguments"] else None


def kind_of(record):
    return (record["machine"]["gpu"], *(record[name] for name in (
        "model", "gpus", "precision", "recipe", "lm_head", "arguments")))


def precision_name(record):
    more = f", {record['arguments']}" if record["arguments"] else ""
    if record["precision"] == "bf16":
        return "BF16" + more
    return f"FP8 {record['recipe']}, {record['lm_head'].upper()} head{more}"


def bases(record):
    """The kinds that a record is compared with: its BF16, and one GPU's."""
    bf16 = record | {"precision": "bf16", "recipe": None, "lm_head": "bf16"}
    return kind_of(bf16), kind_of(record | {"gpus": 1})


def bench(records):
    """A table for each commit and kind of GPU that has the newest record of a kind, or what such a
    one is compared with, so that every ratio is one of two rows; the front page's have all."""
    newest = {kind_of(record): record for record in records.bench}
    front = {place_of(record) for rows, _ in records.some_fronts for kinds in rows.values()
             for record in kinds.values()}
    order = {}
    for record in records.bench:
        order.setdefault((record["model"], record["gpus"]), len(order))
    tables = []
    for place in sorted(set(map(place_of, newest.values())), reverse=True,
                        key=lambda p: max(r["date"] for r in records.by_place[p].values())):
        here = records.by_place[place]
        kept = {kind for kind, record in here.items() if place in front or newest[kind] is record}
        kept |= {base for kind in kept for base in bases(here[kind]) if base in here}
        rows = sorted((here[kind] for kind in kept), key=lambda r: (
            order[(r["model"], r["gpus"])], r["precision"], r["recipe"] or "", r["lm_head"],
            r["arguments"]))
        tables.append(bench_table(rows, here))
    return "\n".join(tables)


def bench_table(rows, here):
    many = any(record["gpus"] > 1 for record in rows)
    lines = []
    for record in rows:
        bf16, one = (here.get(kind) for kind in bases(record))
        gpus = f", {record['gpus']} GPUs" if record["gpus"] > 1 else ""
        cells = [f"{record['model']}{gpus}, {batch_of(record)}", precision_name(record),
                 f"{record['tokens_per_s']:,.0f}",
                 shown(bf16 and record["tokens_per_s"] / bf16["tokens_per_s"], ".2f"),
                 shown(one and record["tokens_per_s"] / one["tokens_per_s"], ".2f"),
                 f"{record['tflops']:.0f}", shown(record["mfu"], ".1f", 100, "%"),
                 shown(record["floor_share"], ".0f", 100, "%"), memory(record)]
        lines.append(cells if many else cells[:4] + cells[5:])
    head = ["model, batch", "precision", "tokens/s", "x BF16", "x 1 GPU", "TFLOP/s", "MFU",
            "of the floor", "memory"]
    head = head if many else head[:4] + head[5:]
    return table(head, lines, (0, 1)) + sources(rows)


def scaling(records):
    """What several GPUs gain over one, of the newest commit with records of both."""
    pairs = [(record, here[one]) for here in records.by_place.values() for record in here.values()
             for one in bases(record)[1:] if record["gpus"] > 1 and one in here]
    if not pairs:
        return ""
    last = max((record for record, _ in pairs), key=lambda record: record["date"])
    gains = {}
    for record, one in pairs:
        alike = record["gpus"] == last["gpus"] and place_of(record) == place_of(last)
        if alike and front_kind(record):
            model = MODELS.get(record["model"], record["model"])
            gain = record["tokens_per_s"] / one["tokens_per_s"]
            gains.setdefault(FRONT[front_kind(record)], {})[model] = f"{gain:.2f}"
    models = sorted({model for own in gains.values() for model in own})
    lines = [[model, *(own.get(model, "-") for own in gains.values())] for model in models]
    head = [f"tokens/s of {last['gpus']} GPUs over those of one", *gains]
    return table(head, lines) + sources([last])


# ---- the figure ---------------------------------------------------------------------------------


def draw_bars(axes, theme, rows):
    """Tokens a second, each model by its own fastest."""
    axes.set(title="Tokens/s, one " + rows[0][2]["machine"]["gpu"], xlim=(0, 1.35), xticks=[])
    axes.grid(False)
    place, names = 0, {}
    for model, own in itertools.groupby(rows, key=lambda row: row[0]):
        own = list(own)
        most = max(record["tokens_per_s"] for _, _, record, _ in own)
        axes.annotate(MODELS[model], (0, place), va="center_baseline", ha="right",
                      color=theme.quiet, xytext=(-7, 0), textcoords="offset points")
        for _, words, record, kind in own:
            place += 1
            share, names[place] = record["tokens_per_s"] / most, words
            axes.barh(place, share, height=0.8, color=theme.color_of(kind))
            axes.annotate(f"{record['tokens_per_s']:,.0f}", (share, place), va="center_baseline",
                          xytext=(5, 0), textcoords="offset points")
        place += 1.6 # as far as to the next model's name
    axes.set_yticks([*names], names.values(), color=theme.ink)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.5, -0.7)
    axes.spines[["left", "bottom"]].set_visible(False)


def draw_losses(axes, theme, title, axis, lines, high=None):
    """lines: (name, colour, dashes, [(place, loss)]), over each other. high: losses above are left
    out."""
    for name, kind, dashes, points in lines:
        shown = [(place, loss) for place, loss in points if not high or loss <= high]
        axes.plot(*zip(*shown), marker="o", markersize=2 if len(shown) > 8 else 4.5 - len(dashes),
                  color=theme.color_of(kind), linestyle=dashes,
                  label=f"{name}: {points[-1][1]:.4f}")
    axes.set(title=title, xlabel=axis)
    low, top = axes.get_ylim()
    axes.set_ylim(low, top + 0.09 * len(lines) * (top - low)) # the legend's place
    axes.legend(loc="upper right")


def heights(records):
    """In inches, of the figure's rows: a bar takes as much as its name."""
    rows = front_rows(records.fronts[0])
    bars = 0.8 + 0.18 * (len(rows) + 1.6 * len({model for model, *_ in rows}))
    return [max(bars, 3.7), *([3.1] if records.race else [])]


def draw_figure(figure, theme, records):
    # rows of their own: the bars' names make no room below
    rows = heights(records)
    row, *below = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    bars, beside = row.subplots(1, 2)
    draw_bars(bars, theme, front_rows(records.fronts[0]))
    beside.set_visible(bool(records.reports))
    if records.reports:
        report = records.reports[0]
        shown_fp8 = next(name for name in ("head", "delayed") if name in report.losses)
        seeds = "one seed" if report.seeds == 1 else f"mean of {report.seeds} seeds"
        draw_losses(beside, theme, f"Validation loss, {report.size}",
                    f"steps of {report.batch} tokens, {seeds}",
                    [(VARIANTS[name], kind, dashes, report.losses[name]) for name, kind, dashes in
                     (("bf16", "bf16", "-"), (shown_fp8, "fp8", "--"))])
    if records.race:
        every = records.race["curves"]
        high = max(loss for curve in every.values()
                   for loss in curve["loss"][1 + len(curve["loss"]) // 8:] if loss is not None)
        for axes, axis, title, scale in zip(below[0].subplots(1, 2), ("tokens", "seconds"),
                                            ("millions of tokens", "seconds of training steps"),
                                            (1e-6, 1)):
            lines = [(*RACERS[name], [(scale * place, loss) for place, loss in
                                      zip(curve[axis], curve["loss"]) if loss is not None])
                     for name, curve in every.items() if name in RACERS]
            draw_losses(axes, theme, f"Validation loss over {axis}, GPT-2 124M", title,
                        lines, high)


def figure(records):
    from . import style  # needs packages, which the other pages do not

    return style.draw_svg(draw_figure, (9.6, sum(heights(records))), records)


# ---- what the recipes cost ----------------------------------------------------------------------


def command_of(path, gpus):
    """The options that a recipe hands to the trainer on so many GPUs, without --gpus."""
    words_of = {**os.environ, "DRY": "1", "GPUS": str(gpus), "PRECISION": "bf16", "SMOKE": "0",
                "LAUNCH": "self", "DATA": "none"} # whose vocabulary is not the data set's
    done = subprocess.run([path], capture_output=True, text=True, check=False, env=words_of)
    words = shlex.split(done.stdout)
    program = [place for place, word in enumerate(words) if word.endswith("/train_gptcu")]
    if done.returncode != 0 or not program:
        die(f"{path}: prints no command with DRY=1: {done.stderr.strip()[:100]}")
    at = words.index("--gpus")
    return words[program[0] + 1:at] + words[at + 2:]


def hours_of(records, precision, gpus, options, plan, tokens):
    measured = estimate.speed_of(records, precision, gpus, options, plan)
    if measured is None:
        return ""
    rate, where, _, other = measured
    hours = tokens * estimate.size_of(plan)[1] / (rate * 1e12 * gpus) / 3600
    exact = re.fullmatch(r"\S+ measured \S+", where) and not other
    return f"{gpus} GPU{'s' if gpus > 1 else ''} {'' if exact else '~'}{estimate.duration(hours)}"


def recipe_costs(path, page, bench):
    """The lines at the top of a recipe, and it with them, after the last line of its comment. FLOPs
    are the trainer's own count; hours follow from the newest records of make bench."""
    commands = {gpus: command_of(os.path.abspath(path), gpus) for gpus in (1, 8)}
    plans = {gpus: estimate.planned(command) for gpus, command in commands.items()}
    plan = plans[1]
    records, (_, flops) = estimate.read_records(bench), estimate.size_of(plan)
    tokens = math.prod(int(estimate.option_of(plan, name))
                       for name in ("train-iters", "global-batch-size", "seq-length"))
    lines = [f"{tokens / 1e9:.1f} billion tokens, {tokens * flops:.2e} FLOPs"]
    for precision in ("bf16", "fp8"):
        hours = [hours_of(records, precision, gpus, commands[gpus], plans[gpus], tokens)
                 for gpus in plans]
        lines += [f"{precision.upper()}: {', '.join(hours)}"] if all(hours) else []
    lines.append(f"on {records[0]['machine']['gpu']}, by test/results/bench.jsonl; ~: by other "
                 "models, options or counts of GPUs" if len(lines) > 1 else
                 "no speed is recorded yet: make bench, then scripts/results")
    made = "".join(f"# cost: {line}\n" for line in lines)
    bare = re.sub(r"(?m)^# cost:.*\n", "", page)
    head = re.match(r"(#.*\n)+?(?=# shellcheck|[^#])", bare).end()
    return made, bare[:head] + made + bare[head:]


# ---- pages --------------------------------------------------------------------------------------


def options(_):
    """--help has a heading in column 1, then rows: an option in column 3, its text from column 37
    on, on the same line or below."""
    program, tables, rows = trainer("train_gpt"), {}, [["", ""]] # of what precedes a heading
    if not os.path.exists(program):
        die(f"{program} is not built: run make")
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    for line in said[:said.index("\nExit status")].splitlines():
        if line[:1].isupper():
            rows = tables[line] = []
        elif re.match("  [^ ]", line):
            beside = line[35:36] == " "
            rows.append([line[2:35].rstrip(), line[36:]] if beside else [line[2:].rstrip(), ""])
        elif line.strip():
            rows[-1][1] = f"{rows[-1][1]} {line.strip()}".strip()
    return "".join(map(option_table, tables, tables.values()))


def option_table(heading, rows):
    rows = [[f"`{name}`".replace("|", r"\|"), what.replace("|", r"\|")] for name, what in rows]
    head = ["preset", "what"]
    if not heading.startswith("Presets"):
        head = ["option", "what", "default"]
        rows = [[name, *re.fullmatch(r"(.*?)(?: \[([^][]*)\])?", what).groups("")]
                for name, what in rows]
        rows = [[name, what, default or ("on" if "[no-]" in name else "")]
                for name, what, default in rows]
    return f"\n**{heading}**\n\n" + table(head, rows, range(3)) if rows else ""


BLOCKS = {"number": number, "results": results, "fp8": fp8, "bench": bench, "race": race,
          "scaling": scaling, "options": options}


def fresh(path, page, records):
    """What is generated of a page, and the page with it."""
    if path.endswith(".svg"):
        return (figure(records),) * 2
    if path.endswith(".sh"):
        return recipe_costs(path, page, records.path)
    found = [name for name in BLOCKS if f"<!-- {name} -->" in page]
    if not found:
        die(f"{path}: has none of " + ", ".join(f"<!-- {name} -->" for name in BLOCKS))
    made = {name: BLOCKS[name](records) for name in found}
    for name, block in made.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
            die(f"{path}: needs one {begin} and, after it, one {end}")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{block}{end}{rest.split(end)[1]}"
    return "".join(made.values()), page


def main():
    p = Parser(prog="scripts/results", description=__doc__)
    p.add_argument("pages", metavar="PAGE", nargs="*",
                   default=[path for page in PAGES
                            for path in sorted(glob.glob(os.path.join(ROOT, page)))])
    p.add_argument("--check", action="store_true")
    p.add_argument("--print", action="store_true")
    p.add_argument("--records", metavar="FOLDER",
                   default=os.path.join(ROOT, "test", "results"))
    o = p.parse_args()
    records = Records(o.records)
    for path in o.pages:
        old = read(path) if os.path.exists(path) or not path.endswith(".svg") else ""
        made, new = fresh(path, old, records)
        if o.print:
            print(made, end="")
        elif new != old and o.check:
            die(f"{path}: not what the records in {o.records} say; run scripts/results")
        elif new != old:
            with open(path, "w", encoding="utf-8") as file:
                file.write(new)
