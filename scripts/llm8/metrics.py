"""Reads metrics.jsonl, also while it is being written. train/metrics.c says what the trainers
write.

A Run has the valid records: after a resume at step N, the earlier records of steps after N are
forgotten, and the steps done again take their place. The file may end in a torn line (a run in
progress, or a killed one): that line is not read until it is complete. Lines that are not records
are counted and passed over.
"""

import fcntl
import json
import math
import os
import re
import statistics
import struct
import time

from . import environment
from .text import counted, duration, fixed, printable, shown

KEPT = ("step", "eval", "fp8", "ranks", "save") # the kinds of records that a Run keeps by step
# the options that option_number() reads
OPTION_NUMBERS = dict.fromkeys(("train-iters", "global-batch-size", "micro-batch-size",
                                "seq-length", "vocab-size", "eval-iters", "fp8-margin",
                                "num-layers", "num-layers-at-start-in-bf16",
                                "num-layers-at-end-in-bf16", "lr-warmup-iters"), int) | {
    "lr": float, "min-lr": float, "clip-grad": float}
FLOCK = "hhqqi0q" # struct flock: l_type, l_whence, l_start, l_len, l_pid
# FP8 is at fault if a larger share of a tensor's codes has the largest magnitude, or is zero
SATURATED, VANISHED = 0.01, 0.25
LARGEST = 1e100 # larger values count as infinite
SKIPPED_TOO_OFTEN = 3
WRONG_RESULTS = 5
STOPPED_BY_SIGNAL = 75
NAMES = {0: "finished", SKIPPED_TOO_OFTEN: "gave up: step after step was skipped",
         STOPPED_BY_SIGNAL: "stopped by a signal"}


def metrics_path(path):
    """Returns the path of a run's metrics.jsonl; the run is named by its folder or by that file."""
    return os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path


def short_names(paths):
    """Returns a name for each run: the part of its path in which it differs from the others."""
    parts = [os.path.abspath(metrics_path(path)).removesuffix("/metrics.jsonl").split(os.sep)
             for path in paths]
    # the last part is always kept: run/x may contain run/x/x
    shared = min(len(os.path.commonprefix(parts)), *(len(part) - 1 for part in parts))
    return [os.sep.join(part[shared:]) or os.sep for part in parts]


def refuse_others(path, option=""):
    """Ends the program if the path is not a run, and names the runs near it. An empty folder is
    accepted, because it may become a run."""
    if not os.path.exists(path):
        environment.die(f"{option}{path}: no such run; give the folder that --save names")
    if os.path.exists(file := metrics_path(path)) and not os.path.isfile(file):
        environment.die(f"{option}{file}: not a regular file; give the folder that --save names")
    if os.path.isdir(path) and not os.path.exists(metrics_path(path)):
        near = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        if re.search(r"/(latest|best|step_\d+)$", os.path.abspath(path)): # a checkpoint
            near = [os.path.dirname(os.path.abspath(path))]
        near = [os.path.relpath(one) for one in near if os.path.exists(metrics_path(one))
                and os.path.isdir(one)]
        if near:
            environment.die(f"{option}{path}: no run (no metrics.jsonl); did you mean "
                            f"{' or '.join(near[:3])}?")
    elif (run := open_run(path)).bad_lines > 1 and not run.starts:
        environment.die(f"{option}{path}: not a run's metrics.jsonl ({run.complaint})")


def named_runs(paths):
    """Returns the runs of these paths, not yet read."""
    for path in paths:
        refuse_others(path)
    names = short_names(paths)
    if len(set(names)) < len(names):
        environment.die("the same run twice: " + ", ".join(paths))
    return [Run(path, name) for path, name in zip(paths, names)]


def number(record, name):
    """Returns a number; NaN for null (the trainers' NaN and infinity) and what is no number."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else math.nan


def fault_of(record):
    """Returns what keeps a record from being read; "" if nothing does."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "no record"
    step, options = record.get("step"), record.get("options")
    if record["kind"] == "profile": # it belongs to no step
        return ""
    if type(step) is not int or step < (record["kind"] == "step"):
        return f"step is {json.dumps(step)[:40]}, not a whole number"
    if record["kind"] != "run":
        return ""
    if not isinstance(options, dict) or not all(isinstance(text, str)
                                                for text in options.values()):
        return "its options are no texts"
    for name, kind in OPTION_NUMBERS.items():
        try:
            option_number(record, name)
        except ValueError:
            return f"its {name} is no {'whole ' * (kind is int)}number"
    return ""


def option_number(start, name, fallback=0):
    """Returns the number that an option had at a start of a run; the fallback if it is missing."""
    return OPTION_NUMBERS[name](start.get("options", {}).get(name) or fallback)


def ranks_of(start):
    return int(max(1, number(start, "ranks")))  # NaN, if not known, gives 1


def changing_options(start, *effects):
    """Returns {name: value} of a start's options with these effects (model/options.h); without
    effects, of all options that change anything. Older records name no effects."""
    known = start.get("effects", {})
    return {name: value for name, value in start.get("options", {}).items()
            if known.get(name, "results") in effects or
            not effects and known.get(name) not in ("nothing", "action")}


class Run:
    def __init__(self, path, name=None):
        self.path = metrics_path(path)
        self.name = printable(name or short_names([path])[0])
        self._unlocked = None
        self._forget()

    def _forget(self):
        self._kept = {kind: {} for kind in KEPT}
        # saves: failed ones too; ranks_at: how long each rank computes
        self.steps, self.evals, self.fp8, self.ranks_at, self.saves = self._kept.values()
        self.starts, self.end, self.profile = [], None, None
        self.parts = [] # the starts that no later start has replaced
        self.replaced = {} # step -> its earlier records, if it was done again
        self.bad_lines = self._lines = 0
        self._first_bad = "" # the first bad line's number, and what is wrong with it
        self._offset, self._inode = 0, None

    def poll(self):
        """Takes in what was written since the last call, and returns the new records. If the file
        has been replaced, the first record has the kind "restart", and the records of the old file
        are forgotten."""
        self._unlocked = self._is_unlocked() # asked first: a run unlocks after its end
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            restarted = self._offset > 0 and (found.st_ino != self._inode or
                                              found.st_size < self._offset)
            if restarted:
                self._forget()
            self._inode = found.st_ino
            file.seek(self._offset)
            text = file.read()
        text = text[:text.rfind(b"\n") + 1]
        self._offset += len(text)
        records = [{"kind": "restart"}] * restarted
        for line in text.split(b"\n")[:-1]:
            self._lines += 1
            records += filter(None, [self._take(line)])
        return records

    def _take(self, line):
        try: # paths in a record may not be UTF-8; other programs write NaN for null
            record = json.loads(line.decode("utf-8", "replace"), parse_constant=lambda _: None)
            fault = fault_of(record)
        except (json.JSONDecodeError, RecursionError) as error: # the latter: nested too deeply
            fault = f"not JSON from column {getattr(error, 'colno', 1)} on"
        if fault:
            self.bad_lines += 1
            self._first_bad = self._first_bad or f"line {self._lines}: {printable(fault)}"
            return None
        kind, step = record["kind"], record.get("step")
        if kind == "profile":
            self.profile = record
            return None
        if kind == "run":
            self._start(record, step)
        elif kind in KEPT:
            self._kept[kind][step] = record
            self.end = None
        elif kind == "end":
            self.end = record
        return record

    def _start(self, record, step):
        for later in (other for other in self.steps if other > step):
            self.replaced.setdefault(later, []).append(self.steps[later])
        for held in self._kept.values():
            for later in [other for other in held if other > step]:
                del held[later]
        self.starts.append(record)
        self.parts = [part for part in self.parts if part["step"] < step] + [record]
        self.end = None

    @property
    def start(self):
        return self.starts[-1] if self.starts else {}

    def part_of(self, step):
        """Returns the start of the part of the run that did this step."""
        return ([part for part in self.parts if part["step"] < step] or self.parts)[-1]

    def option(self, name, fallback=None):
        return self.start.get("options", {}).get(name, fallback)

    def was_given(self, name):
        """Whether the run was given this option, by the config.txt beside its metrics.jsonl; None:
        there is no such file."""
        try:
            with open(os.path.join(self.folder, "config.txt"), errors="replace") as file:
                return any(line.split(maxsplit=1)[:1] == [name] for line in file)
        except OSError:
            return None

    @property
    def folder(self):
        """Returns the folder of the run's checkpoints."""
        return self.option("metrics") and self.option("save") or os.path.dirname(self.path) or "."

    def checkpoint(self, step):
        """Returns the path of the newest checkpoint up to this step; "": there is none."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        steps = [int(name[5:]) for name in names if re.fullmatch(r"step_\d{8,}", name)]
        newest = max((held for held in steps if held <= step), default=None)
        return "" if newest is None else os.path.join(self.folder, f"step_{newest:08}")

    @property
    def complaint(self):
        """Returns a text that says what could not be read; "" if everything could."""
        more = f"; {self.bad_lines:,} lines could not be read" if self.bad_lines > 1 else ""
        return self._first_bad and f"{self.path}, {self._first_bad}{more}"

    @property
    def last_step(self):
        return max(self.steps, default=0)

    @property
    def train_iters(self):
        return option_number(self.start, "train-iters")

    @property
    def skipped(self):
        return sum(bool(record.get("skipped")) for record in self.steps.values())

    @property
    def unsaved(self):
        """Returns the record of the newest save, if that save failed; else None."""
        newest = self.saves.get(max(self.saves, default=0), {})
        return newest if "error" in newest else None

    @property
    def on_gpu(self):
        """Whether the run was on a GPU. The speed of emulated FP8 is not judged."""
        return bool(self.starts) and not self.start.get("device", "CPU").startswith("CPU")

    @property
    def ranks(self):
        return ranks_of(self.start)

    @property
    def seed(self):
        return str(self.option("seed", "?"))

    def _is_unlocked(self):
        """Whether nobody holds the lock of the run's folder; None if that is not known. This only
        tests the lock; if it took the lock, a run that starts meanwhile would find its folder in
        use."""
        asked = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        try:
            with open(os.path.join(os.path.dirname(self.path), ".lock"), "rb") as file:
                found = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        except OSError: # no .lock, or a file system without locks
            return None
        return struct.unpack(FLOCK, found)[0] == fcntl.F_UNLCK

    @property
    def died(self):
        """Whether a signal or an error ended the run: it has no record of its end, and nobody held
        its lock when its records were last read. None if that is not known."""
        return self.end is None if self._unlocked else self._unlocked

    def silent(self, seconds):
        """Returns for how many seconds nothing was written; 0: at most `seconds`, or 20 steps."""
        try:
            silence = time.time() - os.path.getmtime(self.path)
        except OSError:
            return 0.0
        usual = self.recent("seconds")
        return silence if silence > max(seconds, 20 * usual if usual > 0 else 0) else 0.0

    @property
    def state(self):
        if self.end is None:
            died = {True: "died", False: "running", None: "running, or died"}[self.died]
            return died if self.starts else "nothing yet"
        status = number(self.end, "status")
        if status == 0 and self.last_step < self.train_iters:
            return f"ended at step {self.last_step:,} of {self.train_iters:,}"
        error = self.end.get("error")
        return NAMES.get(status, f"error: {printable(error)}" if error else
                         f"failed with status {shown(status, 'g')}")

    @property
    def finished(self):
        return self.state == NAMES[0]

    @property
    def over(self):
        """Whether no more records will come. A stopped run may be resumed, so it is not over."""
        return self.state in (NAMES[0], NAMES[SKIPPED_TOO_OFTEN])

    def recent(self, name):
        """Returns the median over the newest 20 steps; NaN and infinity are left out."""
        values = [number(self.steps[step], name) for step in sorted(self.steps)[-20:]]
        values = list(filter(math.isfinite, values))
        return statistics.median(values) if values else math.nan

    def sources(self):
        """Returns for each source of a mixture its pattern, tokens read and epochs read."""
        newest = self.steps.get(self.last_step, {})
        lists = [row.get("data", "?") for row in self.start.get("sources", [])], \
            newest.get("source_tokens", []), newest.get("source_epochs", [])
        return [(name, *(math.nan if one is None else float(one) for one in read))
                for name, *read in zip(*lists)]

    def source_losses(self):
        """Returns for each source of a mixture's validation data its pattern and newest loss."""
        newest = self.evals.get(max(self.evals, default=0), {}).get("source_losses", [])
        return [(row.get("data", "?"), math.nan if loss is None else float(loss))
                for row, loss in zip(self.start.get("valid_sources", []), newest)]

    def fp8_limits(self):
        """Returns the limits of a tensor's share of codes with the largest magnitude, and of its
        share of zeros. Only delayed scaling lets values saturate: other recipes take the scales
        from the tensor itself."""
        return SATURATED if self.option("fp8-recipe") == "delayed" else 1, VANISHED

    def fp8_shares(self):
        """Returns the step of the newest count of FP8 codes and, for each tensor, its name, its
        share of codes with the largest magnitude, and its share of zeros; the tensor that is
        nearest to a limit, or above it, comes first."""
        step = max(self.fp8, default=None)
        tensors = self.fp8.get(step, {}).get("tensors", {})
        shares = [(name, *(number(counts, what) / elements for what in ("largest", "zero")))
                  for name, counts in tensors.items()
                  if (elements := number(counts, "elements")) > 0]
        largest, zero = self.fp8_limits()
        return step, sorted(shares, key=lambda row: max(row[1] / largest, row[2] / zero),
                            reverse=True)

    def column(self, name, kind="steps"):
        """Returns the steps and the values of one field, in the order of the steps."""
        held = getattr(self, kind)
        order = sorted(held)
        return order, [number(held[step], name) for step in order]

    def last(self, name, kind="steps"):
        return ([math.nan] + self.column(name, kind)[1])[-1]


def open_run(path):
    run = Run(path)
    run.poll()
    return run


def open_started(path, option=""):
    refuse_others(path, option)
    run = open_run(path)
    lacks = "has no record of a run's start" if os.path.exists(run.path) else "is not there"
    return run if run.starts else environment.die(
        f"{option}{path}: metrics.jsonl {lacks}; give the folder that --save names" +
        (run.complaint and f" ({run.complaint})"))


def warn_of_bad_lines(runs):
    for run in runs:
        if run.complaint:
            environment.warn(f"{run.complaint}; passed over")


def state_of(run):
    """Returns the state of a run as a text. If the run goes on, the text also says whether its last
    save failed, and for how long it has written nothing, if that is unusually long."""
    if run.end is not None or not run.starts or run.died:
        return run.state
    silent = run.silent(60)
    return ("running" if run.steps else "starting") + \
        (f", the save of step {int(run.unsaved['step']):,} failed" if run.unsaved else "") + \
        (f", silent for {duration(silent)}" if silent else "")


def cells(run):
    """Returns a run's line of the table: {column: text}."""
    left = max(0, run.train_iters - run.last_step) * run.recent("seconds")
    return {"run": run.name, "step": f"{run.last_step:,}/{run.train_iters:,}",
            "loss": fixed(run.recent("loss")), "valid": fixed(run.last("valid_loss", "evals")),
            "lr": shown(run.last("lr"), ".2e"), "norm": fixed(run.recent("norm"), 3),
            "tok/s": counted(run.recent("tokens_per_s")),
            "ETA": "-" if run.over else duration(left), "skipped": f"{run.skipped:,}",
            "state": state_of(run)}
