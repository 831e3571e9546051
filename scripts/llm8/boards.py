"""Writes runs as TensorBoard's event files, which other programs read too: `wandb sync
--sync-tensorboard DIR` sends them to Weights & Biases."""

import glob
import hashlib
import math
import os
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from . import metrics

SUFFIX = ".llm8" # ends our event files; other programs' files stay
TAGS = {"step": {"loss": "train/loss", "lr": "train/lr", "norm": "train/norm",
                 "skipped": "train/skipped", "tokens": "train/tokens",
                 "tokens_per_s": "speed/tokens_per_s", "seconds": "speed/step_seconds"},
        "eval": {"valid_loss": "valid/loss"}}


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


class TensorBoard:
    """One run's event files. After a resume TensorBoard forgets the steps that are done again."""

    def __init__(self, where, run):
        self.where, self.run = where, run
        self.begin()

    def begin(self):
        """Replaces what an earlier monitor wrote of this run, because all records are read again.
        If another run with this name has a folder, this run gets a folder with another name."""
        self.last, self.now = 0, 0.0
        key = hashlib.sha1(os.fsencode(os.path.abspath(self.run.path))).hexdigest()[:12]
        folder, suffix = os.path.join(self.where, self.run.name), f".{key}{SUFFIX}"
        if any(not path.endswith(suffix) for path in
               glob.glob(os.path.join(glob.escape(folder), "*" + SUFFIX))):
            folder += "-" + key
        for path in glob.glob(os.path.join(glob.escape(folder), "*" + suffix)):
            os.unlink(path)
        self.writer = EventFileWriter(folder, filename_suffix=suffix)

    def take(self, records):
        for record in records:
            if record["kind"] == "restart": # all records come again
                self.writer.close()
                self.begin()
                continue
            step = int(record["step"])
            if record["kind"] == "run":
                self.now = max(self.now, metrics.number(record, "time"))
                if step < self.last:
                    self.add(step + 1, session_log=SessionLog(status=SessionLog.START))
            else:
                seconds = metrics.number(record, "seconds")
                self.now += seconds if math.isfinite(seconds) else 0.0
                self.add(step, summary=Summary(value=[
                    Summary.Value(tag=tag, simple_value=value)
                    for tag, value in scalars(record).items()]))
            # a save is recorded when it has ended, after records of later steps
            self.last = step if record["kind"] == "run" else max(self.last, step)
        self.writer.flush()

    def add(self, step, **words):
        """Writes values with their time: the run's start plus the seconds of the steps so far."""
        self.writer.add_event(Event(wall_time=self.now or time.time(), step=step, **words))
