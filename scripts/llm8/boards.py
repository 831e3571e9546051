"""Where others look at runs: TensorBoard's event files, Weights & Biases.

A board takes the records of one run as they come. Both survive a resume: TensorBoard is told from
which step on it is to forget; W&B cannot forget, so what is done again becomes a run of its own
beside the first, in the same group.
"""

import glob
import hashlib
import json
import math
import os
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from . import environment, metrics

SUFFIX = ".llm8" # of our event files: what another program wrote there stays


def scalars(record):
    """name -> value, of a step, an evaluation or FP8's counts."""
    if record["kind"] == "step":
        names = {"loss": "train/loss", "lr": "train/lr", "norm": "train/norm",
                 "skipped": "train/skipped", "tokens": "train/tokens",
                 "tokens_per_s": "speed/tokens_per_s", "seconds": "speed/step_seconds"}
        return {tag: metrics.number(record, name) for name, tag in names.items()}
    if record["kind"] == "eval":
        loss = metrics.number(record, "valid_loss")
        return {"valid/loss": loss, "valid/perplexity": math.exp(min(loss, 700.0))}
    if record["kind"] == "fp8":
        return {f"fp8_{what}/{name}": metrics.number(counts, what)
                for name, counts in record.get("tensors", {}).items()
                for what in ("saturated", "vanished")}
    return {}


def hyper_parameters(start):
    """The options, as numbers where they are; and what the run is."""
    values = metrics.changing_options(start)
    for name, text in values.items():
        try:
            values[name] = float(text)
        except ValueError:
            continue
    values["precision"] = str(start.get("precision"))
    values["parameters"] = float(start.get("parameters") or 0)
    return values


class TensorBoard:
    def __init__(self, folder, run):
        self.folder, self.name = os.path.join(folder, run.name), run.name
        self.writer = None
        self._begin()

    def _begin(self):
        """Everything is in metrics.jsonl: what an earlier monitor wrote is written again."""
        self.close()
        for path in glob.glob(os.path.join(glob.escape(self.folder), "*" + SUFFIX)):
            os.unlink(path)
        self.now, self.last = 0.0, 0
        self.writer = EventFileWriter(self.folder, filename_suffix=SUFFIX)

    def _time(self, record):
        """When a record was written: the run's start and the seconds of its steps tell."""
        if record["kind"] == "run":
            self.now = max(self.now, float(record.get("time") or 0))
        elif record["kind"] in ("step", "eval"):
            seconds = metrics.number(record, "seconds")
            self.now += seconds if math.isfinite(seconds) else 0.0
        return self.now or time.time()

    def take(self, record):
        if record["kind"] == "restart":
            self._begin()
            return
        when, step = self._time(record), int(record["step"])
        if record["kind"] == "run":
            if step < self.last:
                log = SessionLog(status=SessionLog.START)
                self.writer.add_event(Event(wall_time=when, step=step + 1, session_log=log))
            summary = summary_v2.hparams_pb(hyper_parameters(record), trial_id=self.name,
                                            start_time_secs=when)
        else:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)
                                     for tag, value in scalars(record).items()])
        self.writer.add_event(Event(wall_time=when, step=step, summary=summary))
        self.last = step

    def flush(self):
        self.writer.flush()

    def close(self):
        if self.writer is not None:
            self.writer.close()


class Wandb:
    def __init__(self, project, run):
        try:
            import wandb
        except ImportError:
            python = os.path.join(environment.VENV, "bin", "pip")
            environment.die(f"--wandb {project}: the package wandb is not installed here: "
                            f"{python} install wandb, then wandb login")
        self.wandb, self.project, self.run = wandb, project, run
        self.session, self.part, self.last = None, 0, 0

    def _open(self, record):
        """The same file gives the same identity, so that a second monitor goes on with it."""
        key = json.dumps([os.path.abspath(self.run.path), self.run.starts[0].get("time")])
        identity = hashlib.sha1(key.encode()).hexdigest()[:12] + f"-{self.part}"
        name = self.run.name + (f" from step {int(record['step'])}" if self.part else "")
        self.session = self.wandb.init(project=self.project, id=identity, resume="allow",
                                       name=name, group=self.run.name,
                                       config=hyper_parameters(record))

    def take(self, record):
        if record["kind"] == "restart":
            self.close()
            self.part = self.last = 0
            return
        step = int(record["step"])
        if record["kind"] == "run":
            if self.session is not None and step < self.last:
                self.close()
                self.part += 1
            if self.session is None:
                self._open(record)
        elif self.session is not None:
            values = {tag: value for tag, value in scalars(record).items() if math.isfinite(value)}
            if values:
                self.session.log(values, step=step)
        self.last = step

    def flush(self):
        """W&B sends by itself."""

    def close(self):
        if self.session is not None:
            self.session.finish()
        self.session = None
