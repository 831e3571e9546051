"""Checks a report of scripts/compare against the runs' metrics.jsonl, by arithmetic of its own.

  check_report.py FOLDER BASELINE VARIANT

Imports nothing of ours: the report's figures are worked out again from the files, and must stand in
report.md, report.html and report.json.
"""

import glob
import html
import json
import os
import re
import statistics
import sys


def read(path):
    """seed, steps and evaluations that hold, steps just after a start, the run's record."""
    steps, evals, warming, start = {}, {}, set(), None
    for line in open(path):
        record = json.loads(line)
        if record["kind"] == "run":
            start = record
            warming |= {record["step"] + i for i in (1, 2, 3)}
            steps = {k: v for k, v in steps.items() if k <= record["step"]}
            evals = {k: v for k, v in evals.items() if k <= record["step"]}
        elif record["kind"] == "step":
            steps[record["step"]] = record
        elif record["kind"] == "eval":
            evals[record["step"]] = record["valid_loss"]
    return start["options"]["seed"], steps, evals, warming, start


def runs_of(folder, variant):
    paths = glob.glob(os.path.join(folder, variant, "seed-*", "metrics.jsonl"))
    return {seed: rest for seed, *rest in map(read, paths)}


def mean(values):
    return sum(values) / len(values)


def expected(folder, baseline, variant):
    """what -> its cells in the report: baseline, variant, change."""
    base, other = runs_of(folder, baseline), runs_of(folder, variant)
    assert set(base) == set(other) and base, "seeds are not in pairs"
    finals, valids, speeds, memory = [], [], [], []
    for seed in base:
        (a, eval_a, warm_a, start_a), (b, eval_b, warm_b, start_b) = base[seed], other[seed]
        last = max(a)
        window = range(last - max(10, last // 20) + 1, last + 1)
        finals.append([mean([steps[i]["loss"] for i in window]) for steps in (a, b)])
        valids.append([evals[max(evals)] for evals in (eval_a, eval_b)])
        speeds.append([statistics.median(steps[i]["tokens_per_s"] for i in set(steps) - warming)
                       for steps, warming in ((a, warm_a), (b, warm_b))])
        memory.append([start_a["memory_bytes"] / 2**20, start_b["memory_bytes"] / 2**20])

    def row(pairs, write, change):
        return [write(mean([a for a, _ in pairs])), write(mean([b for _, b in pairs])),
                change([b / a for a, b in pairs])]

    def percent(ratios):
        spread = sum((ratio - mean(ratios)) ** 2 for ratio in ratios)
        error = 100 * (spread / max(1, len(ratios) - 1) / len(ratios)) ** 0.5
        return f"{100 * (mean(ratios) - 1):+.3f}%" + \
            (f" ± {error:.3f}%" if len(ratios) > 1 else "")

    def ratio(ratios):
        return f"{mean(ratios):.3f}x"
    loss = "{:.4f}".format
    return {"training loss": row(finals, loss, percent),
            "validation loss": row(valids, loss, percent),
            "speed-up": row(speeds, "{:,.0f} tok/s".format, ratio),
            "memory": row(memory, "{:,.0f} MiB".format, ratio)}, finals


def markdown_rows(text):
    return [[cell.strip() for cell in line.strip("|").split(" | ")]
            for line in text.splitlines() if line.startswith("|")]


def html_rows(text):
    return [[html.unescape(re.sub("<[^>]*>", "", cell))
             for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]


def main(folder, baseline, variant):
    wrong = []
    cells, finals = expected(folder, baseline, variant)
    change, seeds = 100 * (mean([b / a for a, b in finals]) - 1), [a for a, _ in finals]
    spread = f"end between {min(seeds):.4f} and {max(seeds):.4f}"
    for name, rows_of in (("report.md", markdown_rows), ("report.html", html_rows)):
        text = open(os.path.join(folder, name)).read()
        rows = rows_of(text)
        if len(seeds) > 1 and spread not in text:
            wrong.append(f"{name}: does not say that seeds {spread}")
        for what, wanted in cells.items():
            found = [row[2:5] for row in rows if row[:2] == [variant, what]]
            if found != [wanted]:
                wrong.append(f"{name}, {what}: {found}, not {wanted}")
    figures = json.load(open(os.path.join(folder, "report.json")))
    changes = [j["change"] for j in figures["judgements"]
               if (j["variant"], j["what"]) == (variant, "training loss")]
    if not (len(changes) == 1 and abs(changes[0] - change) <= 1e-9):
        wrong.append(f"report.json, training loss: {changes}")
    print("\n".join(wrong) or "the report agrees with the runs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
