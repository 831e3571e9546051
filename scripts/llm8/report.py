"""Writes the report of a comparison: Markdown, pictures, and the same numbers as JSON; and one HTML
page by the template page.html, which needs no other file."""

import base64
import html
import json
import math
import os
import re
from dataclasses import asdict
from string import Template

from markdown_it import MarkdownIt

from . import judge, plots, series, style
from .environment import write_durably
from .metrics import number, option_number
from .text import counted, duration, fixed, many, memory, table

TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
CLASSES = {"pass": "pass", "PASS": "pass", "FAIL": "fail", "cannot tell": "open",
           "CANNOT TELL": "open"}
VERDICTS = "|".join(CLASSES)
# functions that write the values of a judgement on a ratio; other judgements are on losses
RATIOS = {"speed-up": lambda speed: counted(speed) + " tok/s", "memory": memory,
          "time to loss": lambda seconds: fixed(seconds, 1, ",") + " s"}


def write_value(judgement, value):
    return RATIOS.get(judgement.what, fixed)(value) if math.isfinite(value) else "-"


def write_change(judgement):
    if not math.isfinite(judgement.change):
        return "-"
    if judgement.what in RATIOS:
        return f"{judgement.change:.3f}x"
    error = f" ± {judgement.error:.3f}%" if math.isfinite(judgement.error) else ""
    return f"{judgement.change:+.3f}%{error}"


def effect(judgement):
    """Returns a sentence on a variant's change of a loss, and whether that is more than noise."""
    if judgement.result != judge.PASS or judgement.what not in judge.LOSSES:
        return ""
    beside = "beyond" if abs(judgement.change) > judgement.noise else "within"
    return (f"{judgement.variant}'s {judgement.what} {judgement.change:+.2f}%, {beside} the noise "
            f"of {judgement.noise:.2f}%")


def shortfall(judgement):
    """Returns what keeps a judgement from passing."""
    change = write_change(judgement)
    if judgement.doubt:
        return f"{judgement.what} {change}, {judgement.doubt}"
    beside = "" if change == "-" else f" {change}"
    return f"{judgement.what}{beside}: not {judgement.limit or 'so'}"


def verdict_line(comparison):
    names = [variant.name for variant in comparison.variants[1:]]
    against = f"{', '.join(names)} against {comparison.baseline.name}"
    if comparison.verdict == judge.PASS:
        return "; ".join([f"PASS: {against}: every limit held",
                          *filter(None, map(effect, comparison.judgements))])
    what = []
    for name in names:
        found = [shortfall(j) for j in comparison.judgements
                 if j.result == comparison.verdict and j.variant == name]
        what += [(f"{name}: " if len(names) > 1 else "") + ", ".join(found)] if found else []
    return f"{comparison.verdict.upper()}: {against}: {'; '.join(what)}"


def advice(comparison):
    """Returns a sentence on which further runs would help, if the losses cannot be judged."""
    seeds = judge.more_seeds(comparison)
    if not seeds:
        return []
    runs = comparison.runs
    count = len(seeds.split(",")) * len(comparison.variants) - len(runs)
    seconds = sum(sum(run.column("seconds")[1]) for run in runs) / len(runs)
    return ["Speed, memory and curves hold as they are; whether the losses agree takes more seeds. "
            f"The command of these runs with --seeds {seeds} runs those that are missing: "
            f"{many(count, 'run')}, about {duration(count * seconds)}."]


def verdict_blocks(comparison):
    base = comparison.baseline.name
    only = comparison.variants[1].name if len(comparison.variants) == 2 else "variant's"
    rows = [[j.variant, j.what, write_value(j, j.baseline), write_value(j, j.value),
             write_change(j), str(j.pairs or "-"), j.limit or "-", j.result,
             "; ".join(filter(None, (j.doubt, j.note))) or "-"] for j in comparison.judgements]
    blocks = [f"**{verdict_line(comparison)}**", *advice(comparison),
              table(["variant", "what", base, only, "change", "pairs", "limit", "verdict", "note"],
                    rows, {0, 1, 6, 7, 8}),
              "The change of a loss is the mean over the pairs of equal seed, ± its standard "
              "error. The noise is half of its 95% confidence interval: the standard error times "
              "Student's t. If the limit is below the noise, or inside the interval (the change ± "
              "the noise), this says `cannot tell`."]
    lucky = [j for j in comparison.judgements if j.result == judge.FAIL and j.change < 0 and
             j.what.endswith("loss")]
    if lucky:
        blocks.append("A loss that is lower than the baseline's by more than the limit is no "
                      "success either: the runs are then not the same experiment.")
    return blocks


def spread_text(comparison):
    """Returns a sentence on how much the seeds alone change the final training loss."""
    runs, base = comparison.baseline.runs, comparison.baseline.name
    if len(runs) < 2:
        return (f"One seed of {base} does not show how much of a difference is chance: give "
                "several `--seeds`.")
    last = min(run.last_step for run in runs)
    width = judge.window_of(last)
    finals = [series.window_mean(run, last, width) for run in runs]
    apart = 100 * (max(finals) - min(finals)) / judge.mean(finals)
    return (f"Noise of the seeds: the {len(runs)} runs of {base} end between {min(finals):.4f} and "
            f"{max(finals):.4f}, {apart:.3f}% apart (training loss, mean of the last {width} "
            "steps). Runs of equal seed are compared, so that most of this noise cancels.")


def pictures(comparison):
    """Yields, for each section with a picture: its heading, the file, the text below it, the
    function of plots that draws it, its size, and the function's arguments."""
    runs, variants, limits = comparison.runs, comparison.variants, comparison.limits
    width, wide = series.width_of(runs, 100), series.width_of(runs, 30) # differences are small
    means = many(width, "step")
    bands = "" if len(runs) == len(variants) else \
        " Bands reach from the lowest to the highest seed."
    yield ("Training loss", "loss", f"Above, means over {means}; below, over {wide}.{bands} "
           "Differences are taken between runs of equal seed, which see equal data.",
           plots.loss_figure, plots.SIZE_PAIR, variants, "loss", "steps", (width, wide),
           limits.train, "Training loss")
    if all(len(run.evals) > 1 for run in runs):
        yield ("Validation loss", "validation", "Over the same samples each time." + bands,
               plots.loss_figure, plots.SIZE_PAIR, variants, "valid_loss", "evals", (1, 1),
               limits.valid, "Validation loss")
        yield ("Time to a loss", "time", f"Means over the seeds. Dashes: where {variants[0].name} "
               "ends. Evaluations and saves take no time here.", plots.time_figure,
               plots.SIZE_WIDE, variants)
    emulated = "" if all(run.on_gpu for run in runs) else (
        " On a CPU, BF16 and FP8 are emulated: the trainer rounds to them and multiplies in FP32. "
        "That shows what they do to the loss and takes longer; it says nothing of their speed or "
        "memory on a GPU.")
    yield ("Throughput and memory", "speed", "A dot is a run. Steps right after a start are left "
           "out; evaluations and saves do not count. Memory is what the run plans and allocates, "
           "once." + emulated, plots.speed_figure, plots.SIZE_WIDE, variants)
    skipped = ", ".join(f"{variant.name} {sum(run.skipped for run in variant.runs)}"
                        for variant in variants)
    yield ("Gradient norm and skipped steps", "norm", f"Means over {means}. Skipped steps "
           f"in all runs: {skipped}.", plots.norm_figure,
           plots.SIZE_WIDE, variants, width)


def precision_table(run):
    rows = []
    for row in run.start.get("linear_layers", []):
        first, blocks = int(row["first_block"]), int(row["blocks"])
        where = "-" if blocks == 0 else f"{first}-{first + blocks - 1}" if blocks > 1 else first
        rows.append([row["linear"], where, f"{row['outputs']} x {row['inputs']}", row["x"],
                     row["w"], row["dy"], row["wgrad"], row["reason"] or "-",
                     f"{100 * row['flops_share']:.1f}%"])
    return table(["linear layer", "blocks", "out x in", "X", "W", "dY", "weight gradient", "why",
                  "share of FLOPs"], rows, set(range(8)))


def precision_blocks(comparison):
    blocks = ["## Precision of the linear layers"]
    for variant in comparison.variants:
        run = variant.runs[0]
        share = 100 * float(run.start.get("fp8_flops_share") or 0)
        how = "" if share == 0 else (f"; `--fp8-format {run.option('fp8-format')}`, "
                                     f"`--fp8-recipe {run.option('fp8-recipe')}`")
        blocks += [f"### {variant.name}", f"{share:.1f}% of the linear layers' FLOPs in FP8{how}.",
                   precision_table(run) if "linear_layers" in run.start else
                   "The run has not recorded its layers."]
    return blocks


def option_rows(comparison):
    """Returns {name: the values in each variant's runs} for options that are not equal in all runs.
    The seed is left out if all variants have the same seeds."""
    rows = {}
    for name, values in judge.differing_options(comparison.runs).items():
        left = iter(values)
        cells = ["; ".join(sorted({next(left) for _ in variant.runs}))
                 for variant in comparison.variants]
        if name != "seed" or len(set(cells)) > 1:
            rows[name] = cells
    return rows


def setting_blocks(comparison, commands):
    run, seeds = comparison.baseline.runs[0], comparison.baseline.seeds()
    start, names = run.start, [variant.name for variant in comparison.variants]
    where = str(start.get("device")) + (f", {run.ranks} of them" if run.ranks > 1 else "")
    tokens = run.last_step * option_number(start, "global-batch-size") * \
        option_number(start, "seq-length")
    blocks = ["## What was run",
              f"{run.option('arch')}, {counted(number(start, 'parameters'))} parameters, "
              f"{run.last_step:,} steps of {run.option('global-batch-size')} x "
              f"{run.option('seq-length')} tokens ({tokens:,} in all), "
              f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}; on {where}; "
              f"{start.get('program')}; data `{run.option('data')}`.",
              "The options in which the variants differ; all the others are equal.",
              table(["option", *names],
                    [["--" + name, *cells] for name, cells in option_rows(comparison).items()],
                    set(range(1 + len(names))))]
    return blocks + (["\n".join(["```sh", *commands, "```"])] if commands else [])


def figures_of_runs(comparison):
    """Returns the numbers of each run that the reports show."""
    return [{"variant": variant.name, "seed": run.seed,
             "folder": os.path.dirname(run.path), "steps": run.last_step, "state": run.state,
             "loss": series.window_mean(run, run.last_step, judge.window_of(run.last_step)),
             "valid_loss": run.last("valid_loss", "evals"), "skipped": run.skipped,
             "tokens_per_s": series.steady_throughput(run), "memory_bytes": judge.memory_of(run),
             "resumes": max(len(run.starts) - 1, 0)}
            for variant in comparison.variants for run in variant.runs]


def run_table(comparison):
    writers = {"variant": str, "seed": str, "steps": "{:,}".format, "state": str, "loss": fixed,
               "valid_loss": fixed, "tokens_per_s": counted, "skipped": str, "resumes": str,
               "folder": str}
    return table(["variant", "seed", "steps", "state", "training loss", "validation loss", "tok/s",
                  "skipped", "resumes", "folder"],
                 [[write(row[name]) for name, write in writers.items()]
                  for row in figures_of_runs(comparison)], {0, 3, 9})


def build(comparison, commands=()):
    """Returns the report's texts in Markdown, and {file: SVG} of its pictures."""
    names, drawn = [variant.name for variant in comparison.variants], {}
    blocks = [f"# {', '.join(names[1:])} against {names[0]}", *verdict_blocks(comparison),
              spread_text(comparison), *setting_blocks(comparison, list(commands))]
    for heading, name, caption, function, size, *arguments in pictures(comparison):
        drawn[name + ".svg"] = style.draw(function, size, *arguments)
        blocks += [f"## {heading}", f"![{heading}]({name}.svg)", caption]
    return [*blocks, *precision_blocks(comparison), "## The runs", run_table(comparison)], drawn


def figures(comparison):
    run = comparison.runs[0]
    return {
        "verdict": comparison.verdict.lower(), "said": verdict_line(comparison),
        "arch": run.option("arch"), "optimizer": run.option("optimizer"),
        "parameters": run.start.get("parameters"),
        "steps": run.last_step, "device": run.start.get("device"),
        "batch": f"{run.option('global-batch-size')} x {run.option('seq-length')}",
        "limits": asdict(comparison.limits), "judgements": list(map(asdict, comparison.judgements)),
        "runs": figures_of_runs(comparison)}


def page(blocks, drawn):
    """Returns the page of what build() returns. The first text is the heading."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render("\n\n".join(blocks))
    for file, picture in drawn.items():
        data = base64.b64encode(picture).decode()
        body = body.replace(f'src="{file}"', f'src="data:image/svg+xml;base64,{data}"')

    # colours verdicts, which are cells or the first paragraph of a report
    body = re.sub(rf"<(td[^>]*|p)>((?:<strong>)?({VERDICTS})(?:: |</td>))",
                  lambda m: f'<{m[1]} class="{CLASSES[m[3]]}">{m[2]}', body)
    colours = {f"{name}{form}": colour for name, pair in style.THEME.items()
               for form, colour in zip(("", "_dark"), pair)}
    with open(TEMPLATE, encoding="utf-8") as file:
        return Template(file.read()).substitute(
            colours, title=html.escape(blocks[0].lstrip("# ")), body=body)


def write(comparison, folder, commands=()):
    blocks, drawn = build(comparison, commands)
    held = json.loads(json.dumps(figures(comparison)),
                      parse_constant=lambda _: None) # JSON has no NaN
    texts = {"report.md": "\n\n".join(blocks) + "\n", "report.html": page(blocks, drawn),
             "report.json": json.dumps(held, indent=1)}
    texts = {name: text.encode(errors="surrogateescape") # names of files may be no UTF-8
             for name, text in texts.items()}
    os.makedirs(folder, exist_ok=True)
    for name, data in (drawn | texts).items():
        write_durably(os.path.join(folder, name), [data])


def print_verdict(comparison, folder):
    print("\n".join([verdict_line(comparison), *advice(comparison)]))
    for j in comparison.judgements:
        limit = f" ({j.limit})" if j.limit else ""
        values = f"{write_value(j, j.baseline)} -> {write_value(j, j.value)} {write_change(j)}"
        pairs = many(j.pairs, "pair") if j.pairs else ""
        said = [values if math.isfinite(j.value) else "", pairs, j.doubt, j.note]
        print(f"  {j.result:<11} {j.variant}: {j.what}{limit}  {'; '.join(filter(None, said))}")
    print(f"report: {os.path.join(folder, 'report.html')}, report.md, report.json")
