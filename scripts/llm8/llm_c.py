"""Turns the output of llm.c's trainer into records of metrics.jsonl, so that its runs are drawn and
compared as ours are. A script takes the path of such a log in place of a run's: scripts/plot
run/mine llmc.log."""

import re

PROGRAM = "llm.c"
DECAY = "cosine" # llm.c's default
ROW = re.compile(r"\| (\S.*?) +\| (.*?) *\|$")
STEP = re.compile(r"step +(\d+)/\d+ \| loss +(\S+) .*?\| norm +(\S+) .*?\| lr +(\S+) \| +(\S+) ms")


def number(text):
    """Returns a number; None for NaN and infinity, as in our trainers' records."""
    value = float(text)
    return value if abs(value) < float("inf") else None


class Log:
    """Turns the lines of an llm.c log, given in order, into records like those of our metrics."""

    def __init__(self):
        self.table, self.start, self.step = {}, None, 0

    def record(self, line):
        """Returns the record of a line; None if the line gives none. Raises ValueError if this is
        not a log of llm.c."""
        text = line.decode(errors="replace").rstrip()
        row, step = ROW.match(text), STEP.match(text)
        if row:
            self.table[row[1]] = row[2]
            if row[1] == "num_processes": # the table's last row but one
                self.start = self._start()
                return self.start
        elif self.start is None:
            if not self.table and not text.startswith("+--"):
                raise ValueError
        elif step:
            self.step, batch = int(step[1]), int(self.table["total batch size"])
            seconds = float(step[5]) / 1000
            return {"kind": "step", "step": self.step, "loss": number(step[2]),
                    "norm": number(step[3]), "lr": number(step[4]), "seconds": seconds,
                    "tokens": self.step * batch, "tokens_per_s": batch / seconds, "skipped": 0}
        elif text.startswith("val loss"):
            return {"kind": "eval", "step": self.step, "valid_loss": number(text.split()[2])}
        elif text.startswith("device memory usage:"):
            self.start["memory_bytes"] = int(text.split()[3]) << 20
        elif text.startswith("total average iteration time:"):
            return {"kind": "end", "step": self.step, "status": 0}
        return None

    def _start(self):
        table, length = self.table, int(self.table["sequence length T"])
        rate = float(table["learning rate (LR)"])
        options = {"arch": "gpt2", "seq-length": length, "num-layers": table["num_layers L"],
                   "hidden-size": table["channels C"], "vocab-size": table["vocab_size V"],
                   "micro-batch-size": table["micro batch size B"],
                   "global-batch-size": int(table["total batch size"]) // length,
                   "train-iters": table["train_num_batches"], "lr": f"{rate:g}",
                   # llm.c's wsd falls by 1 - sqrt over the last fifth, ours linearly
                   "lr-decay-style": table.get("LR scheduler", DECAY).replace(
                       "wsd", "wsd by a root"),
                   "lr-warmup-iters": table["warmup iterations"],
                   "min-lr": f"{rate * float(table['final LR fraction']):g}",
                   "weight-decay": f"{float(table['weight decay']):g}",
                   "data": table["train data pattern"], "valid-data": table["val data pattern"]}
        model = table.get("weight init method", table.get("load_filename")) # older versions
        if model and model != "intermediate checkpoint":
            options["model"] = model
        return {"kind": "run", "step": self.step, "program": PROGRAM, "device": table["device"],
                "parameters": int(table["num_parameters"]), "precision": table["precision"],
                "ranks": int(table["num_processes"]),
                "options": {name: str(value) for name, value in options.items()}}
