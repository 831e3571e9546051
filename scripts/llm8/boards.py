"""Writes runs for the programs in which people look at them: TensorBoard's event files, Weights &
Biases.

A board takes the records of one run as they come. Both boards can follow a resume from an earlier
step: TensorBoard can forget the steps after it; W&B cannot, so the steps that are done again become
another W&B run, in the group of the first."""

import glob
import hashlib
import json
import math
import os
import shlex
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from . import environment, metrics

SUFFIX = ".llm8" # ends our event files; other programs' files stay
TAGS = {"step": {"loss": "train/loss", "lr": "train/lr", "norm": "train/norm",
                 "skipped": "train/skipped", "tokens": "train/tokens",
                 "tokens_per_s": "speed/tokens_per_s", "seconds": "speed/step_seconds"},
        "eval": {"valid_loss": "valid/loss"}}


def digest(*words):
    return hashlib.sha1(json.dumps(words).encode()).hexdigest()[:12]


def scalars(record):
    """Returns {name: value} of a record: a step, an evaluation or counts of FP8 codes."""
    values = {tag: metrics.number(record, name)
              for name, tag in TAGS.get(record["kind"], {}).items()}
    if "valid/loss" in values:
        values["valid/perplexity"] = math.exp(min(values["valid/loss"], 700.0))
    if record["kind"] == "fp8":
        values = {f"fp8_{what}/{name}": metrics.number(counts, what)
                  for name, counts in record.get("tensors", {}).items()
                  for what in ("largest", "zero", "subnormal")}
    return values


def hyper_parameters(start):
    """Returns a description of the run and its options; numbers stay numbers."""
    values = metrics.changing_options(start)
    for name, text in values.items():
        try:
            values[name] = float(text)
        except ValueError:
            continue
    return {**values, "precision": str(start.get("precision")),
            "parameters": metrics.number(start, "parameters")}


class Board:
    """What both boards do: start(record) begins a run or goes back to an earlier step,
    write(record, step) adds a record, close() ends the run."""

    def __init__(self, where, run):
        self.where, self.run, self.last = where, run, 0
        self.open()

    def take(self, records):
        for record in records:
            if record["kind"] == "restart": # all records come again
                self.close()
                self.__init__(self.where, self.run)
                continue
            step = int(record["step"])
            (self.start if record["kind"] == "run" else self.write)(record, step)
            self.last = step
        self.flush()

    def flush(self):
        """Does nothing, because W&B sends its records by itself."""


class TensorBoard(Board):
    def open(self):
        """Replaces what an earlier monitor wrote of this run, because all records are read again.
        If another run with this name has a folder, this run gets a folder with another name."""
        key = digest(os.path.abspath(self.run.path))
        folder, suffix = os.path.join(self.where, self.run.name), f".{key}{SUFFIX}"
        if any(not path.endswith(suffix) for path in
               glob.glob(os.path.join(glob.escape(folder), "*" + SUFFIX))):
            folder += "-" + key
        for path in glob.glob(os.path.join(glob.escape(folder), "*" + suffix)):
            os.unlink(path)
        self.writer, self.now = EventFileWriter(folder, filename_suffix=suffix), 0.0
        self.flush, self.close = self.writer.flush, self.writer.close

    def add(self, step, **words):
        """Writes values with their time: the run's start plus the seconds of the steps so far."""
        self.writer.add_event(Event(wall_time=self.now or time.time(), step=step, **words))

    def start(self, record, step):
        self.now = max(self.now, metrics.number(record, "time"))
        if step < self.last:
            self.add(step + 1, session_log=SessionLog(status=SessionLog.START))
        self.add(step, summary=summary_v2.hparams_pb(
            hyper_parameters(record), trial_id=self.run.name, start_time_secs=self.now))

    def write(self, record, step):
        seconds = metrics.number(record, "seconds")
        self.now += seconds if math.isfinite(seconds) else 0.0
        self.add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)
                                              for tag, value in scalars(record).items()]))


class Wandb(Board):
    def open(self):
        try:
            import wandb
        except ImportError:
            pip = shlex.quote(os.path.join(environment.VENV, "bin", "pip"))
            environment.die(f"--wandb {self.where}: the package wandb is not installed here: "
                            f"{pip} install wandb, then wandb login")
        self.init, self.session, self.part = wandb.init, None, 0

    def start(self, record, step):
        """Starts a W&B run whose identity follows from the path of the metrics, so that a second
        monitor continues the same W&B run."""
        if self.session is not None and step < self.last:
            self.close()
            self.part += 1
        if self.session is None:
            key = digest(os.path.abspath(self.run.path), self.run.starts[0].get("time"))
            identity = f"{key}-{self.part}"
            self.session = self.init(
                project=self.where, id=identity, resume="allow", group=self.run.name,
                name=self.run.name + (f" from step {step}" if self.part else ""),
                config=hyper_parameters(record))

    def write(self, record, step):
        values = {tag: value for tag, value in scalars(record).items() if math.isfinite(value)}
        if values and self.session is not None:
            self.session.log(values, step=step)

    def close(self):
        if self.session is not None:
            self.session.finish()
        self.session = None


def open_boards(run, tensorboard, wandb):
    boards = []
    for option, board, where in (("--tensorboard", TensorBoard, tensorboard),
                                 ("--wandb", Wandb, wandb)):
        if where:
            with environment.named_by(option):
                boards.append(board(where, run))
    return boards
