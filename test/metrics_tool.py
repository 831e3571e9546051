#!/usr/bin/env python3
"""Reads a metrics.jsonl as train/metrics.c specifies it, and prints the steps and evaluations that
hold, without their timing: two runs that did the same print the same. Exits with 1 at the first
line that is not as specified.

    metrics_tool.py FILE
"""
import json
import math
import sys

# kind: fields, fields that hold times, whether the record is printed
KINDS = {
    "run": ("parameters flops_per_token fp8_flops_share memory_bytes ranks step", "time", False),
    "step": ("step tokens loss norm lr skipped", "seconds tokens_per_s", True),
    "eval": ("step valid_loss perplexity", "seconds", True),
    "choices": ("step questions accuracy accuracy_norm", "seconds", True),
    "save": ("step", "", False),
    "ranks": ("step", "", False),
    "fp8": ("step", "", False),
    "profile": ("step", "", False),
    "end": ("step status", "", False),
}


def not_json(text):
    raise ValueError(text)


def number(record, name):
    value = record[name]
    if value is None and record.get("nonfinite"):
        return math.nan
    if type(value) not in (int, float):
        raise ValueError(name)
    return value


def line_of(record):
    """The line of a step, an evaluation or a scored set; None for other records."""
    fields, timing, shown = KINDS[record["kind"]]
    values = {name: number(record, name) for name in fields.split()}
    for name in timing.split():
        number(record, name)
    if ("nonfinite" in record) != any(map(math.isnan, values.values())):
        raise ValueError("nonfinite")
    if record["kind"] == "run":
        texts = [record[name] for name in ("program", "device", "precision")]
        texts += [record["effects"][name] for name in record["options"]]
        share = sum(number(row, "flops_share") for row in record["linear_layers"])
        if not all(isinstance(text, str) for text in texts) or not abs(share - 1) < 1e-9:
            raise ValueError("run")
    words = [record["kind"], *(f"{name} {value:.17g}" for name, value in values.items())]
    return " ".join(words) if shown else None


def main():
    held, number_of_line, last = [], 0, None
    with open(sys.argv[1], encoding="utf-8") as file:
        for number_of_line, line in enumerate(file, 1):
            try:
                record = json.loads(line, parse_constant=not_json)
                text = line_of(record)
                if line[-1] != "\n":
                    raise ValueError("it is torn")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                sys.exit(f"error: line {number_of_line}: not as specified: {error!r}")
            # what came after where this run starts
            while record["kind"] == "run" and held and held[-1][0]["step"] > record["step"]:
                held.pop()
            if text is not None:
                held.append((record, text))
    # a run that resumes another one's checkpoint begins in the middle; no step may be missing after
    for record, text in held:
        if record["kind"] == "step":
            if last is not None and record["step"] != last + 1:
                sys.exit(f"error: step {record['step']} follows step {last}")
            last = record["step"]
        print(text)
    return 0 if number_of_line else 1


if __name__ == "__main__":
    sys.exit(main())
