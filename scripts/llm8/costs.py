"""What makes a run slower than it could be: options, by what was recorded or by arithmetic; what
takes the time of a step; and its speed beside the records of make bench."""


import numpy

from . import estimate, metrics, series
from .diagnosis import note, well, wrong
from .text import counted

SLOW, VERY_SLOW = 0.90, 0.50 # of the recorded speed
EVALUATION_ALLOWED = 0.10    # of the time
UNEVEN = 1.5                 # a step of twenty over the median
LARGE_FAMILY = 1.5           # of its share in the record
LONG_RUN = 1000              # steps, from which on a minute or two pay

SLOWER = { # recipes than delayed scaling, and why
    "tensorwise": "measures each tensor before it is quantised",
    "blockwise": "has slower products, with a scale for each block and exact accumulation",
}


def precision_of(run):
    """As scripts/estimate names them."""
    layers = {row["linear"]: row["x"] for row in run.start.get("linear_layers", [])}
    if not metrics.number(run.start, "fp8_flops_share") > 0:
        return "bf16"
    return estimate.fp8_precision(run.option("fp8-recipe"), layers.get("head") in ("E4M3", "E5M2"))


def micro_batches(run):
    ranks = max(1, int(run.start.get("ranks", 1)))
    return int(run.option("global-batch-size")) // (int(run.option("micro-batch-size")) * ranks)


def recorded(records, slow, fast, flops, how):
    """What was measured of one precision beside another, on the nearest model that has both: by
    the newest commit that timed both."""
    pairs = [row for row in records if estimate.beside(records, row, fast, 1)]
    both = estimate.newest(pairs, slow, 1)
    if not both:
        return ""
    row = estimate.nearest(both, flops)
    ratio = estimate.beside(records, row, fast, 1)["tokens_per_s"] / row["tokens_per_s"]
    return f" ({row['model']} on {row['machine']['gpu']}: {ratio:.2f} times as fast {how})"


def gradient_type(run):
    """What --grad-accum-dtype auto comes to, as train/gpu/params.c has it."""
    chosen = run.option("grad-accum-dtype", "auto")
    return chosen if chosen != "auto" else "fp32" if micro_batches(run) > 1 else "bf16"


def option_costs(run, records):
    """What options cost: a row for each that does, where it does."""
    flops, ours, micro = metrics.number(run.start, "flops_per_token"), precision_of(run), \
        micro_batches(run)
    fp8, recipe = ours != "bf16", run.option("fp8-recipe")
    delayed = ours.replace(f"-{recipe}", "")
    tokens = int(run.option("micro-batch-size")) * int(run.option("seq-length"))
    head = next((row["flops_share"] for row in run.start.get("linear_layers", [])
                 if row["linear"] == "head"), 0)
    edge = int(run.option("num-layers-at-start-in-bf16", 1)) + \
        int(run.option("num-layers-at-end-in-bf16", 1))
    interval = int(run.option("fp8-stats-interval", 0))
    rows = [
        (run.option("fp8-format", "none") == "none",
         "FP8 is not used" + recorded(records, "bf16", "fp8", flops, "in FP8"),
         "--fp8-format hybrid"),
        (fp8 and recipe in SLOWER, f"--fp8-recipe {recipe} {SLOWER.get(recipe)}" +
         recorded(records, ours, delayed, flops, "without it"),
         "--fp8-recipe delayed, where the losses allow it"),
        (f"{ours}-head" in estimate.PRECISIONS,
         f"the LM head is in BF16, {100 * head:.0f}% of the linear layers' operations" +
         recorded(records, ours, f"{ours}-head", flops, "with it in FP8"),
         "--fp8-lm-head, where the losses allow it (scripts/compare)"),
        (fp8 and (run.option("fp8-wgrad") == "false" or run.option("fp8-format") == "e5m2"),
         "the weight gradients' products, a third of the operations, are in BF16",
         "--fp8-format hybrid, without --no-fp8-wgrad"),
        (fp8 and run.option("first-last-layers-bf16") == "true",
         f"{edge} of {run.option('num-layers')} blocks are in BF16 (--first-last-layers-bf16)",
         "leave it out, where the losses allow it"),
        (fp8 and recipe != "blockwise" and run.option("fp8-fast-accumulation") == "none",
         "--fp8-fast-accumulation none: exact accumulation is forced in the forward pass too",
         "leave it out: forward is the default"),
        (fp8 and 0 < interval < 10, f"--fp8-stats-interval {interval} counts in slower kernels, "
         f"every {interval} steps", "--fp8-stats-interval 100"),
        (run.option("recompute") == "block", "--recompute block does most of the blocks' "
         "forward pass twice, about a quarter more work in them",
         "--recompute activations or none: --plan says whether it fits"),
        (run.option("recompute") == "activations", "--recompute activations makes norms and "
         "activations twice", "--recompute none: --plan says whether it fits"),
        (run.option("cuda-graphs") == "false", "--no-cuda-graphs leaves gaps between the kernels",
         "leave it out"),
        (run.option("gemm-autotune") == "false" and int(run.option("train-iters", 0)) >= LONG_RUN,
         "the products' algorithms are cuBLASLt's own first choice; timed ones made steps of GPT-2 "
         "1558M 1% to 3% shorter, and of smaller models up to 1% longer",
         "try some steps with --gemm-autotune, which takes a minute or two once"),
        (run.option("grad-accum-dtype") == "fp32" and micro <= 1, "--grad-accum-dtype fp32, and "
         "nothing is accumulated: a step is one micro-batch, and its gradients take twice the "
         "memory traffic", "--grad-accum-dtype auto"),
        (micro > 1 and tokens < 8192, f"a step is {micro} micro-batches of "
         f"{run.option('micro-batch-size')} x {run.option('seq-length')} tokens, small ones for a "
         "GPU", "a larger --micro-batch-size: --plan says what fits")]
    found = [note("speed", text, remedy) for costs, text, remedy in rows if costs]
    if int(run.start.get("ranks", 1)) > 1 and gradient_type(run) != "bf16":
        found.append(note("communication", "gradients are accumulated in FP32 and travel between "
                          "the GPUs in FP32, twice the bytes of BF16",
                          "--grad-accum-dtype bf16, where the losses allow it"))
    return found


def time_in_steps(run):
    """What the run's own records say of its time."""
    found, seconds = [], series.arrays(run, "seconds")[1]
    seconds = seconds[numpy.isfinite(seconds)]
    evaluating = float(numpy.nansum(series.arrays(run, "seconds", "evals")[1]))
    if len(seconds) < 20:
        return found
    share = evaluating / (evaluating + float(seconds.sum()))
    if share > EVALUATION_ALLOWED:
        found.append(note("speed", f"{100 * share:.0f}% of the time went into evaluations",
                          "a longer --eval-interval, or fewer --eval-iters"))
    median, slow = (float(numpy.quantile(seconds, q)) for q in (0.5, 0.95))
    if run.on_gpu and slow > UNEVEN * median:
        found.append(note("speed", f"one step in twenty takes over {1e3 * slow:.0f} ms, where the "
                          f"median is {1e3 * median:.0f} ms",
                          "is another program on this GPU, or the --save disk slow?"))
    return found


def profile(run, path, record):
    """The families of kernels that take more of a step than they do in the record."""
    if run.profile is None or record is None:
        return []
    ours = {name: metrics.number(run.profile, name) for name in record["families_ms"]}
    all_ours, all_theirs = sum(ours.values()), sum(record["families_ms"].values())
    found = []
    for name, ms in ours.items():
        share, theirs = ms / all_ours, record["families_ms"][name] / all_theirs
        if share > 0.05 and share > LARGE_FAMILY * theirs:
            remedy = "attention without cuDNN is slow: --verify says whether cuDNN serves" \
                if name == "attention" else "compare the shapes with the record's"
            found.append(note("speed", f"{name}: {100 * share:.0f}% of the profiled step; "
                              f"{100 * theirs:.0f}% of {record['model']}'s in {path}", remedy))
    return found


def beside_the_record(run, records):
    """TFLOP/s of a GPU beside what make bench recorded on such a GPU."""
    flops = metrics.number(run.start, "flops_per_token")
    ranks = max(1, int(run.start.get("ranks", 1)))
    ours = series.steady_throughput(run) * flops / ranks / 1e12
    peak = metrics.number(run.start, "peak_flops")
    text = f"{ours:.0f} TFLOP/s a GPU" + (f", MFU {100e12 * ours / peak:.1f}%" if peak > 0 else "")
    measured = estimate.speed(records, precision_of(run), ranks, flops) if records else None
    if measured is None:
        return well("speed", f"{text}; there is no record of such a GPU to compare it with "
                    "(make bench)")
    due, where, record = measured
    text += f"; {100 * ours / due:.0f}% of the recorded {due:.0f} ({where})"
    if ours >= SLOW * due:
        return well("speed", text)
    remedy = (f"the record's micro-batch is {record['micro_batch']} sequences; the notes on speed "
              "here; --profile; nvidia-smi -q -d PERFORMANCE (power, heat, other programs)")
    return (note if ours >= VERY_SLOW * due else wrong)("speed", text, remedy)


def speed(run, path):
    device = run.start.get("device", "")
    if run.foreign: # its operations are not counted, and its options are others
        return [well("speed", f"{counted(series.steady_throughput(run))} tok/s, by "
                     f"{run.start['program']}: not judged"), *time_in_steps(run)]
    if not run.on_gpu:
        return [well("speed", "on a CPU, where FP8 and BF16 are emulated: not judged"),
                *time_in_steps(run)]
    records = estimate.read_records(path, device)
    found = [beside_the_record(run, records)] if run.steps else []
    found += option_costs(run, records)
    profiled = estimate.newest([record for record in records if record.get("families_ms")],
                               precision_of(run), 1)
    nearest = estimate.nearest(profiled, metrics.number(run.start, "flops_per_token")) \
        if profiled else None
    return found + time_in_steps(run) + profile(run, path, nearest)
