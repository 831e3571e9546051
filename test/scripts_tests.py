"""The parts of scripts/llm8: reading a metrics.jsonl under way, smoothing, judging, writing pages,
drawing on a terminal, the boards, the limits of scripts/bench. test_scripts.sh and test_bench.sh
run the programs as a whole."""

import contextlib
import fcntl
import functools
import glob
import importlib
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from unittest import mock

import check
import matplotlib.figure
import numpy
from check import call, main, same, says, write
from llm8 import (
    bench,
    boards,
    doctor,
    environment,
    experiment,
    floor,
    judge,
    metrics,
    monitor,
    plots,
    report,
    series,
    shard_header,
    style,
    text,
)

OPTIONS = {"seed": "1", "train-iters": "10", "data": "/a/d.bin", "valid-data": "/a/v.bin",
           "eval-iters": "1", "num-layers": "2", "lr": "0.1", "save": "/s"}
EFFECTS = {"seed": "data", "train-iters": "results", "data": "data", "valid-data": "evaluation",
           "eval-iters": "evaluation", "num-layers": "shape", "lr": "results", "save": "nothing"}


def start(step=0, device="NVIDIA H200", memory=2**30, **options):
    options = {**OPTIONS, **options}
    return {"kind": "run", "step": step, "device": device, "time": 1e9, "memory_bytes": memory,
            "precision": "FP8", "parameters": 3, "data_sequences": 100, "options": options,
            "data_crc32": os.path.basename(options["data"]),
            "valid_data_crc32": os.path.basename(options["valid-data"]), "effects": EFFECTS}


def step_record(step, loss=2.0, speed=100.0, skipped=0):
    return {"kind": "step", "step": step, "loss": loss, "norm": 1.0, "lr": 0.1, "seconds": 0.5,
            "tokens": 64 * step, "tokens_per_s": speed, "skipped": skipped}


def lines(*records):
    return check.lines(records)


def append(content):
    with open("metrics.jsonl", "a") as file:
        file.write(content)


def run_of(name, *records):
    check.write(f"{name}/metrics.jsonl", lines(*records))
    return metrics.open_run(name)


def whole_run(name, losses, valid=2.0, speed=100.0, end=0, **options):
    steps = [step_record(i, loss, speed) for i, loss in enumerate(losses, 1)]
    evals = [{"kind": "eval", "step": len(losses), "valid_loss": valid, "seconds": 1.0}]
    return run_of(name, start(**options), *steps, *evals,
                  {"kind": "end", "step": len(losses), "status": end})


# ---- reading -------------------------------------------------------------------------------------


def test_torn_line_waits_until_it_is_whole():
    whole = lines(start(), step_record(1), step_record(2))
    run = metrics.Run(".")
    same(run.poll(), [])
    for cut in range(len(whole)):
        append(whole[cut])
        run.poll()
        same(len(run.starts) + len(run.steps), whole[:cut + 1].count("\n"))
    same(run.bad_lines, 0)


def test_torn_line_that_a_resume_cuts_off():
    append(lines(start(), step_record(1)) + '{"kind":"st')
    run = metrics.open_run(".")
    os.truncate("metrics.jsonl", os.path.getsize("metrics.jsonl") - len('{"kind":"st'))
    append(lines(start(1), step_record(2)))
    run.poll()
    same((sorted(run.steps), run.bad_lines, len(run.starts)), ([1, 2], 0, 2))


def test_resume_replaces_what_came_after():
    append(lines(start(), *(step_record(i, 5.0) for i in range(1, 7)),
                 {"kind": "eval", "step": 6, "valid_loss": 5.0}, start(3)))
    run = metrics.open_run(".")
    same(run.column("loss"), ([1, 2, 3], [5.0, 5.0, 5.0]))
    append(lines(*(step_record(i, 4.0) for i in (4, 5))))
    run.poll()
    same(run.column("loss"), ([1, 2, 3, 4, 5], [5.0, 5.0, 5.0, 4.0, 4.0]))
    same(run.evals, {})


def test_another_file_in_its_place():
    append(lines(start(), step_record(1), step_record(2)))
    run = metrics.open_run(".")
    os.replace(check.write("new", lines(start(), step_record(1, 7.0))), "metrics.jsonl")
    same(run.poll()[0]["kind"], "restart")
    same(run.column("loss"), ([1], [7.0]))


def test_lines_that_are_no_records():
    """They are counted; a path that is not UTF-8 is no fault."""
    one = lines(step_record(1)).encode()
    odd = (b'nonsense\n3\n{"kind":"step"}\n{"kind":"step","step":"x"}\n'
           b'{"kind":"run","step":1,"options":5}\n\x00\xff\n')
    for content, bad in ((lines(start()).encode() + odd + one, 6),
                         (lines(start(data="caf?.bin")).encode().replace(b"?", b"\xe9") + one, 0)):
        check.write("metrics.jsonl", content)
        run = metrics.open_run(".")
        same((run.bad_lines, sorted(run.steps), len(run.starts)), (bad, [1], 1))


def test_states():
    same(run_of("a").state, "nothing yet")
    same(run_of("b", start()).state, "running, or died")
    done = whole_run("c", [2.0] * 10)
    assert done.finished and done.over
    stopped = whole_run("d", [2.0] * 4, end=75)
    assert not (stopped.finished or stopped.over)
    assert not whole_run("e", [2.0] * 4).finished # an end before the last step
    gave_up = whole_run("f", [2.0] * 4, end=3)
    assert gave_up.over and not gave_up.finished


def test_a_look_takes_no_lock():
    """A run that starts meanwhile finds its folder free, after each call on the lock."""
    run, free = run_of("a", start()), []
    path = check.write("a/.lock", "")
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | 4)"

    def probed(call_on_it):
        def both(*words):
            result = call_on_it(*words)
            free.append(subprocess.run([sys.executable, "-c", take, path]).returncode == 0)
            return result
        return both
    with mock.patch.multiple(fcntl, lockf=probed(fcntl.lockf),
                                      fcntl=probed(fcntl.fcntl)):
        run.poll()
        same(run.state, "died")
    same(free, [True])


def test_a_run_that_ends_while_it_is_read_did_not_die():
    """It holds its lock as its file is read, and is gone before its state is asked for."""
    hold = "import fcntl, sys; file = open('.lock', 'w'); fcntl.lockf(file, 2); " \
        "print(flush=True); sys.stdin.read()"
    append(lines(start(), step_record(1)))
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        run = metrics.open_run(".")
    same(run.state, "running")
    run.poll()
    same(run.state, "died")


def test_names_tell_runs_apart():
    for name in ("run/a", "run/b/c"):
        os.makedirs(name)
    for paths, names in ((["run/a/", "run/b/c"], ["a", "b/c"]), (["run/a/"], ["a"]),
                         (["run/x", "run/x/x"], ["x", "x/x"]), # one inside the other
                         (["run/x/x/y", "run/x"], ["x/x/y", "x"])):
        same(metrics.short_names(paths), names)


def test_recent_leaves_out_what_is_no_number():
    for losses, median in (([3.0, None, 1.0], 2.0), ([None, 2.0], 2.0), ([None], math.nan),
                           ([], math.nan), ([1.0, None, 5.0, 3.0], 3.0)):
        run = run_of(f"r{losses}", start(), *(
            step_record(step, loss) for step, loss in enumerate(losses, 1)))
        numpy.testing.assert_equal(run.recent("loss"), median)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_smoothing_is_the_mean_around():
    values = numpy.random.default_rng(1).normal(size=37)
    values[[4, 20]] = numpy.nan, numpy.inf
    for width in (1, 2, 5, 8, 100):
        for i, found in enumerate(series.smooth(values, width)):
            around = values[max(0, i - (width - 1) // 2):i + width // 2 + 1]
            around = around[numpy.isfinite(around)]
            if len(around) == 0:
                assert math.isnan(found)
            else:
                assert abs(found - around.mean()) < 1e-12


def test_throughput_leaves_starts_out():
    slow = [step_record(i, speed=1.0) for i in (1, 2, 3)]
    run = run_of("a", start(), *slow, step_record(4, speed=90.0), step_record(5, speed=110.0),
                 start(5), *(step_record(i, speed=1.0) for i in (6, 7, 8)))
    same(series.steady_throughput(run), 100.0)


def test_window_leaves_skipped_steps_out():
    run = run_of("a", start(), *(step_record(i, float(i)) for i in (1, 2, 3)),
                 step_record(4, None, skipped=1), step_record(5, 5.0))
    same(series.window_mean(run, 5, 3), 4.0)
    assert math.isnan(series.window_mean(run, 4, 1))
    run.steps[3].update(loss=99.0, skipped=1) # a spike
    same(series.window_mean(run, 5, 4), 3.5)


def judged(*runs, **limits):
    """The judgements on the last group of runs, by what they are on, and whether all hold."""
    variants = [judge.Variant(f"v{i}", group) for i, group in enumerate(runs)]
    found = judge.judge(judge.Comparison(variants, judge.Limits(**limits)))
    return {j.what: j for j in found.judgements}, found.verdict == judge.PASS


# ---- judging -------------------------------------------------------------------------------------


def pair(loss, valid=2.0, speed=120.0, **options):
    """A baseline of loss 2 and 100 tok/s, and one beside it, of two equal seeds each."""
    number = len(os.listdir("."))
    return [[whole_run(f"{number}-{name}-{seed}", [2.0] * 5 + [end] * 5, *more,
                       **{"seed": seed, **changed}) for seed in "12"]
            for name, end, more, changed in (("a", 2.0, (), {}),
                                             ("b", loss, (valid, speed), options))]


def seeds(*changes):
    """Returns the verdict on pairs whose final losses differ by these percentages."""
    number = len(os.listdir("."))
    runs = [[whole_run(f"{number}-{name}-{seed}", [2.0] + [2 + factor * change / 50] * 10,
                       speed=100.0 + factor, seed=str(seed))
             for seed, change in enumerate(changes)] for name, factor in (("a", 0), ("b", 1))]
    found, passed = judged(*runs)
    return found["training loss"], passed


def test_losses_are_judged_beside_their_noise():
    for changes, result in (
            ((0.1, 0.2, 0.15, 0.1), judge.PASS), ((2.1, 2.2, 2.15, 2.1), judge.FAIL),
            ((-2.1, -2.2, -2.15, -2.1), judge.FAIL), ((3.0, -3.0, 1.0, -1.0), judge.UNSURE),
            ((0.7, 1.1, 0.6, 0.8), judge.UNSURE), # the noise reaches across the limit of 1%
            ((0.1,), judge.UNSURE), ((9.0,), judge.UNSURE), ((20.0, 2.0), judge.UNSURE),
            ((0.9, -0.9) * 20, judge.PASS)):
        found, passed = seeds(*changes)
        same((found.result, passed), (result, result == judge.PASS), changes)
        same((found.pairs, bool(found.doubt)), (len(changes), result == judge.UNSURE), changes)
        assert abs(found.change - numpy.mean(changes)) < 1e-9
        if len(changes) > 1:
            error = numpy.std(changes, ddof=1) / len(changes) ** 0.5
            assert abs(found.error - error) < 1e-9
    # half of the interval of 95%: for four pairs Student's t is 3.18
    found, _ = seeds(0.1, 0.2, 0.15, 0.1)
    assert abs(found.noise / found.error - 3.18) < 1e-7
    # beside a verdict stands what the variant does
    for change, beside in ((0.1, "beyond"), (0.0, "within")):
        found, _ = seeds(*(change + x for x in (-0.01, 0.01, 0.02, 0.0)))
        says(report.effect(found), f"%, {beside} the noise of 0.02%")
    same(report.effect(seeds(0.1)[0]), "")
    found, passed = seeds(0.1, math.nan, 0.1)
    assert found.result == judge.FAIL and not passed


def test_no_verdict_is_the_first_thing_said():
    base, other = pair(2.0)
    comparison = judge.judge(judge.Comparison(
        [judge.Variant("a", base[:1]), judge.Variant("b", other[:1])], judge.Limits()))
    assert report.verdict_line(comparison).startswith(
        "CANNOT TELL: b against a: training loss +0.000%, one pair of seeds")
    blocks = report.verdict_blocks(comparison)
    row, = [line.split(" | ") for line in blocks[2].splitlines() if "training loss" in line]
    same((row[5], row[7]), ("1", "cannot tell"))
    # what to add, and what that takes: 6 runs of 10 steps of half a second
    says(blocks[1], "--seeds 1,2,3,4 runs those that are missing: 6 runs, about 30 s.")
    for seeds, more in ((["1234"], "1234,1,2,3"), (["2", "5"], "2,5,1,3"), (["?"], ""),
                        (list("1234"), "1,2,3,4,5,6,7,8")):
        comparison.baseline.seeds = lambda seeds=seeds: seeds
        same(judge.more_seeds(comparison), more)
    comparison.judgements = []
    same(report.advice(comparison), [])


def test_report_says_what_was_judged():
    """Forty steps: the last ten are the final loss, the first three and the last are slow."""
    def run(name, seed, final, valid, speed, memory):
        steps = [step_record(i, 9.0 if i < 31 else final + (-1) ** i / 9,
                             speed if 3 < i < 40 else 1) for i in range(1, 41)]
        return run_of(name + seed, start(seed=seed, memory=memory << 20), *steps,
                      {"kind": "eval", "step": 20, "valid_loss": 7.0, "seconds": 1.0},
                      {"kind": "eval", "step": 40, "valid_loss": valid, "seconds": 1.0},
                      {"kind": "end", "step": 40, "status": 0})
    comparison = judge.judge(judge.Comparison([
        judge.Variant("a", [run("a", "1", 2.0, 3.0, 100, 512),
                            run("a", "2", 2.1, 3.1, 110, 512)]),
        judge.Variant("b", [run("b", "1", 2.02, 3.03, 120, 256),
                            run("b", "2", 2.142, 3.1, 132, 256)])], judge.Limits()))
    blocks = [*report.verdict_blocks(comparison), report.spread_text(comparison)]
    markdown = "\n".join(blocks)
    html = re.sub("</td>\\s*<td[^>]*>", " | ", report.page(blocks, {}))
    for row in ("training loss | 2.0500 | 2.0810 | +1.500% ± 0.500% | 2",
                "validation loss | 3.0500 | 3.0650 | +0.500% ± 0.500% | 2",
                "speed-up | 105 tok/s | 126 tok/s | 1.200x | -",
                "memory | 512 MiB | 256 MiB | 0.500x | -"):
        says(markdown, f"| b | {row} |")
        says(html, f">b | {row} |")
    says(html, "the 2 runs of a end between 2.0000 and 2.1000, 4.878% apart")
    says("\n".join(report.build(comparison)[0]), "means over 1 step; below, over 1.",
         "seeds 1, 2; on")
    same([round(j["change"], 9) for j in report.figures(comparison)["judgements"]
          if j["what"] in judge.LOSSES], [1.5, 0.5])


def test_limits():
    """What is judged, of a pair whose second run has other losses, speed, memory or options."""
    nan = math.nan
    for what, result, loss, changes, limits in (
            # the window is all ten steps: the last five are apart by twice the mean's change
            (None, judge.PASS, 2.03, {}, {}), ("training loss", judge.FAIL, 2.06, {}, {}),
            ("training loss", judge.FAIL, 1.94, {}, {}),
            (None, judge.PASS, 2.006, {}, {"train": 0.25}),
            ("training loss", judge.FAIL, 2.012, {}, {"train": 0.25}),
            (None, judge.PASS, nan, {}, {}), (None, judge.PASS, 2.0, {"valid": 2.03}, {}),
            ("validation loss", judge.FAIL, 2.0, {"valid": 2.05}, {}),
            ("validation loss", judge.FAIL, 2.0, {"valid": 2.006}, {"valid": 0.25}),
            ("validation loss", judge.FAIL, 2.0, {"valid": nan}, {}),
            ("validation loss", judge.FAIL, 2.0, {"eval-iters": "2"}, {}),
            ("speed-up", judge.PASS, 2.0, {"speed": 101.0}, {}),
            ("speed-up", judge.FAIL, 2.0, {"speed": 100.0}, {}),
            ("speed-up", judge.FAIL, 2.0, {}, {"speed": 1.3}),
            ("speed-up", judge.OPEN, 2.0, {"speed": 50.0, "device": "CPU, 2 threads"}, {}),
            ("speed-up", judge.OPEN, 2.0, {"speed": 50.0, "device": "NVIDIA H100"}, {}),
            ("memory", judge.OPEN, 2.0, {"memory": 2**30 + 2**26}, {}),
            ("same start", judge.FAIL, 2.0, {"num-layers": "3"}, {}),
            ("same start", judge.FAIL, 2.0, {"data": "/a/other.bin"}, {}),
            ("same start", judge.PASS, 2.0, {"data": "/b/d.bin"}, {}),
            ("same start", judge.PASS, 2.0, {"lr": "0.2"}, {}),
            ("same start", judge.PASS, 2.0, {"save": "/t"}, {}),
            ("every run finished", judge.FAIL, 2.0, {"end": 75, "seed": "1"}, {}),
            ("every run finished", judge.FAIL, 2.0, {"end": 3, "seed": "1"}, {}),
            ("every run finished", judge.FAIL, 2.0, {"end": 0, "seed": "2"}, {})):
        found, passed = judged(*pair(loss, **changes), **limits)
        same(passed, result != judge.FAIL, what, loss, changes, limits)
        if what:
            same(found[what].result, result, what, loss, changes, limits)
        if what == "same start" and result == judge.FAIL:
            says(found[what].note, f"--{list(changes)[0]}")
        if what == "speed-up" and limits:
            assert abs(found[what].change - 1.2) < 1e-7
    bad = [whole_run(f"nan-{seed}", [2.0] + [nan] * 19, seed=seed) for seed in "12"]
    found, passed = judged([whole_run(f"long-{seed}", [2.0] * 20, seed=seed)
                            for seed in "12"], bad) # none of the last ten is finite
    assert not passed and found["training loss"].result == judge.FAIL


def test_ratios_agree_with_the_values_shown():
    """One pair is twice as fast, and takes twice the memory, the other half: no gain at all."""
    size = {100.0: 2**30, 200.0: 2**31}
    runs = [[whole_run(f"{name}-{seed}", [2.0] * 10, speed=speed, memory=size[speed], seed=seed)
             for seed, speed in zip("12", speeds)]
            for name, speeds in (("a", (100.0, 200.0)), ("b", (200.0, 100.0)))]
    found, _ = judged(*runs)
    for what, result in (("speed-up", judge.FAIL), ("memory", judge.OPEN)):
        same((found[what].change, found[what].result), (1.0, result))


def test_shards_are_known_by_their_checksums():
    for other in ("aa", "bb"):
        runs = pair(2.0, **{"data": "/b/other.bin", "valid-data": "/b/w.bin"})
        for run in sum(runs, []):
            run.start.update(data_crc32="aa", valid_data_crc32="11")
        runs[1][0].start["data_crc32"] = other
        found, passed = judged(*runs)
        same(passed, other == "aa")
        same("(shards aa and shards bb)" in found["same start"].note, not passed)


def resumed(name, at=5, records=(), before=None, **after):
    """Ten steps, resumed after one of them with other options."""
    steps = [step_record(i) for i in range(1, 11)]
    evals = [{"kind": "eval", "step": i, "valid_loss": 2.0, "seconds": 1.0} for i in (5, 10)]
    return run_of(name, start(**(before or {})), *steps[:at], evals[0], *records,
                  start(at, **after), *steps[at:], evals[1],
                  {"kind": "end", "step": 10, "status": 0})


def test_all_parts_of_a_run_are_judged():
    plain = whole_run("plain", [2.0] * 10)
    for name, value, part in (
            ("num-layers", "3", "--num-layers (2 and 2, then 3 after step 5)"),
            ("seed", "2", "--seed (1 and 2, then 1 after step 5)"),
            ("data", "/a/x.bin", "--data (shards d.bin and shards d.bin, then shards x.bin after "
             "step 5)")):
        other = resumed(name, **({"before": {name: value}} if name == "seed" else {name: value}))
        found = judged([plain], [other])[0]["same start"]
        same((found.result, found.note), (judge.FAIL, "not the same: " + part))
    for name, at, shown in (("lr1", 5, "0.02, then 0.1 after step 5"),
                            ("lr2", 4, "0.02, then 0.1 after step 4")):
        slow = resumed(name, at, before={"lr": "0.02"})
        same(judge.differing_options([plain, slow]), {"lr": ["0.1", shown]})
        same(judged([plain], [slow])[0]["same start"].result, judge.PASS)
    two = whole_run("two", [2.0] * 10, seed="2")
    for runs, rows in (([two, slow], {"lr": ["0.1", f"{shown}; 0.1"]}), ([two, plain], {}),
                       ([slow], {"lr": ["0.1", shown], "seed": ["1; 2", "1"]})):
        same(report.option_rows(judge.Comparison(
            [judge.Variant("a", [plain, two]), judge.Variant("b", runs)], judge.Limits())), rows)
    # what a later start made void, and one that did nothing, are no parts of it
    void = resumed("void", records=[start(5, memory=2**40, seed="3"), step_record(6, 9.0)])
    idle = run_of("idle", start(), *plain.steps.values(), plain.end, start(10, lr="3"), plain.end)
    for run in (void, idle):
        same(judge.differing_options([plain, run]), {})
    same(judge.memory_of(void), 2**30)
    # the speeds of two GPUs are not one
    moved = run_of("moved", start(device="NVIDIA H100"), *list(plain.steps.values())[:5],
                   start(5), *list(plain.steps.values())[5:], plain.end)
    says(judged([plain], [moved])[0]["speed-up"].note, "NVIDIA H100")


def test_evaluations_see_the_same_samples():
    def run(name, iters, batch, length):
        return whole_run(name, [2.0] * 10, **{
            "eval-iters": iters, "global-batch-size": batch, "seq-length": length})
    base = run("base", "4", "8", "16")
    for place, (sizes, wrong) in enumerate((
            (("4", "16", "16"), "--global-batch-size"), (("8", "4", "16"), ""),
            (("0", "8", "16"), "--eval-iters"), (("8", "8", "8"), "--eval-iters --seq-length"),
            (("8", "4", "32"), "--seq-length"))):
        found, _ = judged([base], [run(f"r{place}", *sizes)], time=9)
        for what, result in (("validation loss", judge.FAIL), ("time to loss", judge.OPEN)):
            same((found[what].note == "not over the same samples: " + wrong,
                  found[what].result == result), (bool(wrong), bool(wrong)), found[what])
    all_of_them = [run(f"all{batch}", "0", batch, "16") for batch in "48"]
    same(judged(*([one] for one in all_of_them))[0]["validation loss"].result, judge.UNSURE)
    # where there are fewer than would be read, all are
    few = [run(f"few{batch}", "4", batch, "16") for batch in ("8", "16")]
    for one in few:
        one.start["valid_sequences"] = 30
    same(judged(*([one] for one in few))[0]["validation loss"].result, judge.UNSURE)
    few[1].start["valid_sequences"] = 31
    found, _ = judged(*([one] for one in few))
    says(found["validation loss"].note, "not over the same samples")
    # the last evaluation is what is judged; the time needs them all
    found, _ = judged([whole_run("two", [2.0] * 10, **{"eval-iters": "2"})],
                      [resumed("later", **{"eval-iters": "2"})])
    same(found["validation loss"].result, judge.UNSURE)
    says(found["time to loss"].note, "not over the same samples: --eval-iters")


def test_it_says_why_there_is_no_loss():
    steps = [step_record(i) for i in range(1, 11)]
    end = {"kind": "end", "step": 10, "status": 75}
    none = [run_of(f"none{given}", start(**{"valid-data": given}), *steps, end)
            for given in ("", "v.bin")]
    base = whole_run("base", [2.0] * 10)
    for run, why in zip(none, ("no evaluation (--valid-data)",
                               "no evaluation: a run ends before its first (--eval-interval)")):
        found, _ = judged([base], [run])
        for what in ("validation loss", "time to loss"):
            same((found[what].result, found[what].note), (judge.OPEN, why))
    nan = whole_run("nan", [2.0] + [math.nan] * 19, math.nan)
    found, _ = judged([whole_run("long", [2.0] * 20)], [nan])
    same(found["training loss"].note, "NaN or infinite, mean of the last 10 steps")
    same(found["validation loss"].note, "NaN or infinite, after step 20")
    for limit, result in ((None, judge.OPEN), (1.0, judge.FAIL)):
        found = judged([nan], [whole_run(f"l{limit}", [2.0] * 20)], time=limit)[0]["time to loss"]
        same((found.result, found.note),
             (result, "the baseline's last validation loss is NaN or infinite"))


def test_first_losses_must_agree():
    for case, (first, result) in enumerate((
            (2.0, judge.PASS), (2.009, judge.PASS), (1.991, judge.PASS), (2.011, judge.FAIL),
            (1.989, judge.FAIL), (None, judge.FAIL), (math.inf, judge.FAIL))):
        # one pair of the two is enough: their mean is not what is judged
        runs = [[whole_run(f"{case}-{name}-{seed}", [loss] + [2.0] * 19, seed=seed)
                 for seed, loss in zip("12", losses)]
                for name, losses in (("a", (2.0, 2.0)), ("b", (2.0, first)))]
        for group in (runs, runs[::-1]):
            found = judged(*group)[0]["same start"]
            same(found.result, result, first)
            says(found.note, "rounding" if first and first < 3 else "no loss")


def race(name, seed, seconds, evals):
    """Writes a run of ten steps of `seconds` each; evals: {step: loss}."""
    return run_of(f"{name}-{seed}", start(seed=seed),
                  *({**step_record(i), "seconds": seconds} for i in range(1, 11)),
                  *({"kind": "eval", "step": step, "valid_loss": loss}
                    for step, loss in evals.items()), {"kind": "end", "step": 10, "status": 0})


def test_an_axis_shows_spikes():
    fall = numpy.concatenate([numpy.linspace(5.5, 2.5, 20), numpy.linspace(2.5, 1, 380)])
    for place, high in ((None, 2.5), (12, 9.4), (200, 9.4)):
        curve = fall.copy()
        if place:
            curve[place] = 9.4
        axes = matplotlib.figure.Figure().subplots()
        plots.final_range(axes, [curve])
        low, top = axes.get_ylim()
        assert low < 1 and high <= top < 1.1 * high, (place, low, top)
    with warnings.catch_warnings(action="error"): # a run whose evaluations are all NaN
        plots.final_range(axes, [numpy.full(3, math.nan), curve])
    same(axes.get_ylim(), (low, top))


def test_time_to_a_loss():
    run = race("a", "1", 2.0, {2: 5.0, 4: 4.0, 6: 3.0, 8: 3.5})
    for loss, seconds in ((5.5, 4.0), (5.0, 4.0), (4.5, 6.0), (3.25, 11.0), (3.0, 12.0)):
        assert abs(series.reach(run, loss, "seconds") - seconds) < 1e-7
    assert abs(series.reach(run, 4.5, "tokens") - (3 * 64)) < 1e-7
    assert math.isnan(series.reach(run, 2.9, "seconds"))
    gaps = race("b", "1", 2.0, {1: math.nan, 2: 5.0, 4: math.nan, 6: 3.0, 8: None})
    assert abs(series.reach(gaps, 4.0, "seconds") - 8.0) < 1e-7 # between steps 2 and 6
    assert abs(series.reach(gaps, 5.5, "seconds") - 4.0) < 1e-7


def test_the_time_to_the_baselines_loss_is_judged():
    base = [race("base", seed, 1.0, {5: 3.5, 10: 3.0}) for seed in "123"] # after 10 s
    fast = [race("fast", seed, 0.5, {4: 4.0, 6: 3.2, 8: 2.8, 10: 2.5}) for seed in "12"]
    for ratio, result in ((0.35, judge.PASS), (0.34, judge.FAIL), (None, judge.OPEN)):
        found, _ = judged(base[:2], fast, time=ratio)
        same(found["time to loss"].result, result)
        assert abs(found["time to loss"].change - 0.35) < 1e-7 # 7 steps of 0.5 s
    slow = [race("slow", "1", 2.0, {5: 3.5, 10: 3.01})]
    found = judged(base[:1], slow, time=100)[0]["time to loss"]
    same((found.result, found.baseline), (judge.FAIL, 10))
    assert math.isnan(found.value) and math.isnan(found.change)
    says(found.note, "no pair gets there")
    # one seed that misses it counts with its whole time, and keeps no promise
    found = judged(base, [*fast, race("fast", "3", 2.0, {5: 3.5, 10: 3.01})],
                   time=100)[0]["time to loss"]
    same((found.result, found.pairs), (judge.FAIL, 3))
    assert abs(found.change - 0.9) < 1e-7 # 3.5, 3.5 and 20 s beside 10
    says(found.note, "1 of 3 pairs miss it, and count")
    assert not judged(fast, fast[:1])[1] # a run lacks its pair


# ---- pages ---------------------------------------------------------------------------------------


def test_log_axes_have_ticks():
    for low, high in itertools.product((1e-3, 0.9, 2.1, 7e6), (1.2, 2.3, 40, 1e4, 1e7, 1e14)):
        figure = matplotlib.figure.Figure((3, 2))
        axes = figure.subplots()
        axes.plot([1, 2], [low, low * high])
        style.log_axis(axes.yaxis)
        figure.draw_without_rendering()
        ends, ticks = axes.get_ylim(), axes.get_yticks()
        assert sum(ends[0] <= tick <= ends[1] for tick in ticks) in range(2, 12), (low, high)


def test_html_is_escaped_and_alone():
    blocks = ["# a <b> & c", "`x<y` **bold**", "**FAIL: x**", "```sh\na && b > c\n```",
              text.table(["h"], [["FAIL"], ["<script>"]]),
              '![a "title"](p.svg)', "words"]
    page = report.page(blocks, {"p.svg": b"drawn"})
    says(page.replace(' style="text-align:left"', ""), "<h1>a &lt;b&gt; &amp; c</h1>",
         "<title>a &lt;b&gt; &amp; c</title>", "<code>x&lt;y</code> <strong>bold</strong>",
         '<p class="fail"><strong>FAIL: x</strong></p>', '<td class="fail">FAIL</td>',
         "!<script>", "a &amp;&amp; b &gt; c",
         'src="data:image/svg+xml;base64,ZHJhd24=" alt="a &quot;title&quot;"')
    assert not re.search(r"(src|href|srcset)=\"(?!data:)", page)
    assert not re.search(r"https?://|url\(|@import", page)


def test_markdown_tables_keep_their_columns():
    rows = text.table(["a", "b"], [["x|y", "1"], ["two\nlines", "2"]]).splitlines()
    same([len(re.findall(r"(?<!\\)\|", row)) for row in rows], [3, 3, 3, 3])


def test_messages_are_one_printable_line():
    odd = "a\n\x1b[2J\x9b\u202e\u2028\udc80\\n é"
    shown = r"a\n\x1b[2J\x9b\u202e\u2028\udc80\n é"
    for say, tag in ((environment.warn, "warning"), (environment.die, "error")):
        same(call(functools.partial(say, odd)).err, f"{tag}: {shown}\n")


def test_errors_of_a_librarys_may_have_no_number():
    def write(error):
        with environment.named_by("--out"):
            raise error

    for error, said in ((OSError(28, "No space left", "a"), "--out a: No space left"),
                        (OSError("not all was written"), "--out: not all was written")):
        same(call(functools.partial(write, error)).err, f"error: {said}\n")


def test_what_exists_is_no_pattern():
    for name in ("a [1]/x_1", "a [1]/x_2", "a 1/y", "[b]"):
        check.write(name, "")
    for pattern, found in (("a [1]/x_*", ["a [1]/x_1", "a [1]/x_2"]), ("[b]", ["[b]"]),
                           ("a [1]/y", ["a 1/y"]), ("a [[]1]/x_1", ["a [1]/x_1"]),
                           ("a [2]/*", [])):
        same(environment.matching(pattern), found)


def test_numbers():
    same([text.duration(s) for s in (5, 59.6, 3599, 3600, 1e6, math.nan)],
         ["5 s", "60 s", "1 h 00", "1 h 00", "11 d 13 h", "-"])
    same([text.fixed(x) for x in (math.nan, 1.23456)], ["-", "1.2346"])
    same(text.counted(1234.5), "1,234")
    same([text.memory(x) for x in (2**20, 3 * 2**29)], ["1 MiB", "1.50 GiB"])
    same([text.many(count, "step") for count in (0, 1, 2, 1000)],
         ["0 steps", "1 step", "2 steps", "1,000 steps"])


# ---- terminal ------------------------------------------------------------------------------------


def test_curve_falls_from_left_to_right():
    runs = [whole_run("a", [10 - i / 10 for i in range(100)])]
    rows = monitor.chart(runs, 60, 12)
    same(len(rows), 13)
    places = [place for row in rows[:-1] for place, letter in enumerate(row) if letter == "*"]
    same(places, sorted(places))
    same((places[-1] - places[0] > 50, len(places) > 40), (True, True))
    same(rows[-1].split(), ["1", "100"])
    same(monitor.chart([whole_run("b", [None] * 5)], 60, 12), [])
    two = monitor.chart([*runs, whole_run("c", [2.0] * 100)], 60, 12)
    assert max(row.count("o") for row in two) > 40 # a flat line of its own


def test_frame_tells_what_matters():
    run = whole_run("a", [3.0, 2.5, 2.0, None, 2.0], valid=2.25)
    run.fp8[5] = {"tensors": {"blocks.0.qkv.x": {"elements": 100, "largest": 5, "zero": 1},
                              "head.w": {"elements": 100, "largest": 0, "zero": 0}}}
    shown = monitor.frame([run], 100, 30)
    says(shown, "5/10", "2.2500", "100 tok/s", "50.0%", "2.0000 |", "!head.w", "!\033",
         "blocks.0.qkv.x 5% at the largest code, 1% zero", "ended at step 5 of 10")
    assert len(shown.splitlines()) < 30
    narrow = monitor.frame([run], 60, 30).splitlines()
    assert max(map(len, narrow)) <= 60 and len(narrow) < 30
    says(" ".join(line.strip() for line in narrow), "5% at the largest code, 1% zero")


def test_the_worst_tensor_is_one():
    """The doctor and the monitor name the tensor that is nearest to a limit of the doctor's."""
    counts = {"a": (50, 0), "b": (0, 500), "c": (0, 400), "d": (5, 450)}
    for recipe, order in (("delayed", "abdc"), ("tensorwise", "bdca")):
        run = whole_run("worst", [3.0] * 4, **{"fp8-recipe": recipe})
        run.fp8[4] = {"tensors": {name: {"elements": 10000, "largest": largest, "zero": zero}
                                  for name, (largest, zero) in counts.items()}}
        same("".join(name for name, *_ in run.fp8_shares()[1]), order)


def test_names_and_texts_of_a_run_are_printable():
    """What a terminal would act on, in the name of a folder and in the texts of metrics.jsonl."""
    odd, shown = "\x1b[31mx\ny\r", r"\x1b[31mx\ny\r"
    runs = [run_of(name, start(device=odd), step_record(1), step_record(2),
                   {"kind": "end", "step": 2, "status": 1, "error": odd}) for name in (odd, "b")]
    for said in (monitor.frame(runs, 200, 30), monitor.frame(runs[:1], 200, 30),
                 call(doctor.main, odd).out):
        says(said, shown, "!\x1b", "!\r", "!x\ny")
    says(monitor.frame(runs, 200, 30), f"\n{shown} ", f"\n* {shown} ")


def test_legends_name_runs_and_skipped_steps():
    a, b = (whole_run(name, [3.0, 2.5, 2.0]) for name in "ab")
    says(monitor.frame([a], 100, 30), "!* a")
    b.steps[2]["skipped"] = 1
    says(monitor.frame([a, b], 100, 30), "\n* a   o b, 1 step skipped\n")
    says(monitor.frame([b], 100, 30), "\n* b, 1 step skipped\n")
    same(len(monitor.frame([a, b], 100, 24).splitlines()), 23)
    says(monitor.frame([a, b], 14, 30), "\n* a   o b, 1\nstep skipped\n")
    variants = [judge.Variant(run.name, [run]) for run in (a, b)]
    drawn = style.draw(plots.draw_runs, plots.SIZE_RUNS, variants, "step").decode()
    same(drawn.count(">b: 1 skipped step<"), 1)
    same(drawn.count(">a<"), 1)


def test_best_evaluation_is_a_number():
    evals = [{"kind": "eval", "step": step, "valid_loss": loss} for step, loss in
             ((1, None), (2, 2.5), (3, 2.75))]
    for count, best in ((3, "validation 2.7500 after step 3, best 2.5000 after 2"),
                        (1, "validation - after step 1\n")):
        run = run_of(f"r{count}", start(), step_record(3), *evals[:count])
        says(monitor.frame([run], 100, 30) + "\n", best)


def test_narrow_terminals_drop_columns_and_no_names():
    runs = [whole_run(name, [2.0] * 10) for name in ("a-long-name-of-a-run", "b")]
    for width in (100, 60, 44):
        shown = "\n".join(monitor.table(runs, width))
        assert max(map(len, shown.splitlines())) <= width
        says(shown, "a-long-name-of-a-run", "10/10", "finished")
        same("norm" in shown, width == 100)
    for columns in (1, 12, 20):
        with mock.patch.dict(os.environ, {"COLUMNS": str(columns)}):
            result = call(monitor.main, *(run.path for run in runs), "--once")
        same(result.status, 0, result.err)
        assert max(map(len, result.out.splitlines())) <= 20, result.out


def test_a_dumb_terminal_is_not_cleared():
    for term, live in (("xterm", True), ("dumb", False)):
        with mock.patch.dict(os.environ, {"TERM": term}), mock.patch.object(sys, "stdout") as out:
            out.isatty.return_value = True
            same(environment.is_live(), live)


def test_runs_without_a_step():
    for records in ((), (start(),)):
        run = run_of(f"r{len(records)}", *records)
        shown = monitor.frame([run], 80, 24)
        says(shown, "0/", "!nan")


def events_of(*steps):
    """TensorBoard's own reading of what a board wrote, given metrics.jsonl after each of the steps,
    which are called."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run = metrics.Run(".", "r")
    board = boards.TensorBoard("tb", run)
    for step in steps:
        step()
        board.take(run.poll())
    board.writer.close()
    found = EventAccumulator("tb/r", {"scalars": 0})
    found.Reload()
    return found


def losses_of(events):
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def test_tensorboard_begins_again_with_another_file():
    others = lines(start(), step_record(1, 7.0))
    found = events_of(
        lambda: append(lines(start(), step_record(1), step_record(2))),
        lambda: os.replace(check.write("new", others), "metrics.jsonl"))
    same(losses_of(found), [(1, 7.0)])


def test_tensorboard_forgets_what_is_done_again():
    first = lines(start(), *(step_record(i, 5.0) for i in range(1, 7)))
    again = lines(start(3), *(step_record(i, 4.0) for i in range(4, 9)),
                  {"kind": "eval", "step": 8, "valid_loss": 1.0, "seconds": 1.0})
    for parts in ((first, again), (first + again,)):
        if os.path.exists("metrics.jsonl"):
            os.unlink("metrics.jsonl")
        found = events_of(*(functools.partial(append, part) for part in parts))
        same(losses_of(found), [(i, 5.0 if i < 4 else 4.0) for i in range(1, 9)])
        assert abs(found.Scalars("valid/perplexity")[0].value - math.e) < 1e-6
        same(found.Scalars("train/loss")[1].wall_time, 1e9 + 1.0)
        same(len(glob.glob("tb/r/*")), 1)


def test_tensorboard_forgets_after_a_save():
    """A save is recorded when it has ended, after records of later steps; then the run died."""
    first = lines(start(), *(step_record(i, 5.0) for i in range(1, 5)), {"kind": "save", "step": 2})
    again = lines(start(2), *(step_record(i, 4.0) for i in range(3, 5)))
    found = events_of(lambda: append(first), lambda: append(again))
    same(losses_of(found), [(1, 5.0), (2, 5.0), (3, 4.0), (4, 4.0)])


def test_tensorboard_keeps_what_is_of_another_run():
    """Of another folder, where a run has the same name, and of another program."""
    check.write("tb/seed-1/events.out.tfevents.1", "")
    for group in ("bf16", "fp8"):
        run_of(f"{group}/seed-1", start(), step_record(1))
    for group in ("bf16", "fp8", "fp8", "bf16"):
        run, = metrics.named_runs([os.path.join(group, "seed-1")])
        board = boards.TensorBoard("tb", run)
        board.take(run.poll())
        board.writer.close()
    held = {name: os.listdir(f"tb/{name}") for name in sorted(os.listdir("tb"))}
    same(list(map(len, held.values())), [2, 1], held)
    assert re.fullmatch("seed-1 seed-1-[0-9a-f]{12}", " ".join(held)), held


def test_names_need_not_be_utf8():
    """As a folder's in Latin-1, which Python holds as halves of surrogate pairs."""
    latin = os.fsdecode(b"l\xe4tin")
    runs = [whole_run(f"{latin}/{name}", [2.0] * 5, data=f"{latin}/d.bin") for name in "ab"]
    comparison = judge.judge(judge.Comparison(
        [judge.Variant(run.name, [run]) for run in runs], judge.Limits()))
    report.write(comparison, latin)
    for name in ("report.md", "report.html"):
        assert b"l\xe4tin/d.bin" in check.read(f"{latin}/{name}"), name
    board = boards.TensorBoard("tb", metrics.Run(f"{latin}/a", "a"))
    board.writer.close()
    same(len(os.listdir("tb/a")), 1)


def test_what_is_passed_over_is_named():
    good = [{**start(), "ranks": 2}, step_record(1), step_record(2)]
    for record, expected in (
            ({**good[0], "options": {**OPTIONS, "lr": 1}}, "its options are no texts"),
            ({**good[0], "options": None}, "its options are no texts"),
            (start(**{"train-iters": "many"}), "its train-iters is no whole number"),
            (start(lr="fast"), "its lr is no number"),
            (step_record(0), "step is 0, not"),
            ({**step_record(3), "step": 2.5}, "step is 2.5"),
            ({**step_record(3), "step": None}, "step is null"),
            ({"kind": "step"}, "step is null"), ({"step": 3}, "no record"), (3, "no record")):
        check.write("metrics.jsonl", lines(*good, record, step_record(3)))
        run = metrics.open_run(".")
        same((run.bad_lines, sorted(run.steps)), (1, [1, 2, 3]), record)
        assert re.search(f"metrics.jsonl, line 4: .*{expected}", run.complaint), run.complaint
        for program, *words in ((monitor.main, "--once"), (doctor.main,)):
            says(" ".join(call(program, "metrics.jsonl", *words).out.split()), "line 4: ")
    check.write("metrics.jsonl", lines(*good, 3, step_record(0)))
    says(metrics.open_run(".").complaint, "line 4: no record; 2 lines could not be read")
    os.unlink("metrics.jsonl")
    odd = {**step_record(3), "loss": "2.5", "lr": 10**400, "norm": [1]}
    append(lines({**good[0], "ranks": math.nan}, *good[1:], odd) + '{"kind":"st')
    run = metrics.open_run(".")
    same((run.complaint, run.ranks, run.last_step), ("", 1, 3))
    assert all(math.isnan(run.last(name)) for name in ("loss", "lr", "norm"))


# ---- scripts/bench ------------------------------------------------------------------------------


class Columns:
    """The values of 25 steps: of step 2, of steps 6 to 25, and 1 elsewhere."""

    def __init__(self, **columns):
        self.columns = {name: [1, first, *[1] * 3, *[timed] * 20]
                        for name, (first, timed) in columns.items()}

    def column(self, name):
        return None, self.columns[name]


def test_limits_beside_bf16():
    """Each from both sides."""
    sound = Columns(norm=(1, 1), loss=(1, 1))
    for norm, loss, far in (
            ((1, 1), (1, 1), False), ((1.74, 1), (1.04, 1), False), ((0.58, 2.9), (1, 0.96), False),
            ((1.76, 1), (1, 1), True), ((0.56, 1), (1, 1), True), ((0, 1), (1, 1), True),
            ((1, 1), (1.06, 1), True), ((1, 1), (0.94, 1), True),
            ((1, 3.1), (1, 1), True), ((1, 0.3), (1, 1), True), ((1, 0), (1, 1), True),
            ((1, 1), (1, 1.06), True), ((1, 1), (1, 0.94), True)):
        ratios = bench.beside(Columns(norm=norm, loss=loss), sound)
        same(bench.judged({"beside_bf16": ratios})[1], far, norm, loss)
    wild = Columns(norm=(1, 1), loss=(1, 1))
    wild.columns["norm"][6:15], wild.columns["loss"][6:15] = [900] * 9, [3] * 9 # spikes of both
    same(bench.judged({"beside_bf16": bench.beside(wild, sound)})[1], False)


def near(milliseconds, seconds):
    assert abs(1e-3 * milliseconds / seconds - 1) < 1e-9, (milliseconds, seconds)


def test_floor_is_operations_and_bytes_over_rates():
    """At sizes where no matmul is bound by memory."""
    B, T, C, L, H, G, F, P = 8, 4096, 4096, 3, 32, 8, 14336, 128256
    M, D, N = B * T, C // H, (H + 2 * G) * (C // H)
    llama = {"arch": "llama", "micro-batch-size": B, "seq-length": T, "hidden-size": C,
             "num-layers": L, "num-attention-heads": H, "num-query-groups": G, "ffn-hidden-size": F,
             "vocab-size": P - 100, "make-vocab-size-divisible-by": 128,
             "grad-accum-dtype": "auto", "adam-dtype": "fp32", "fp8-format": "none",
             "fp8-recipe": "delayed", "fp8-lm-head": "false"}
    gpt2 = llama | {"arch": "gpt2", "num-query-groups": H, "ffn-hidden-size": 4 * C}
    delayed, head = {"fp8-format": "hybrid"}, {"fp8-lm-head": "true"}
    device, parameters = "NVIDIA H200", 10**9
    rates = floor.RATES[device]

    def floor_of(options, *others):
        return floor.floor_ms(device, functools.reduce(dict.__or__, others, options), parameters)

    bf16, fp8, fp8_head = floor_of(llama), floor_of(llama, delayed), floor_of(llama, delayed, head)
    weights = L * (C * N + C * C + 3 * C * F)
    near(bf16["matmuls"], 6 * M * weights / rates["bf16"])
    near(fp8["matmuls"], 6 * M * weights / rates["fp8"])
    both = 4 / rates["blocks"] + 2 / rates["blocks, weight gradient"]
    blockwise = floor_of(llama, delayed, {"fp8-recipe": "blockwise"}, head)
    near(blockwise["matmuls"], M * weights * both)
    near(blockwise["head matmuls"], M * P * C * both)
    near(fp8["head matmuls"], 6 * M * P * C / rates["bf16"])
    near(fp8_head["head matmuls"], 6 * M * P * C / rates["fp8"])
    near(bf16["attention"], L * 7 * B * H * T * T * D / rates["bf16"])
    for moments, size in (("fp32", 30), ("bf16", 22), ("8bit", 18.125)):
        near(floor_of(llama, {"adam-dtype": moments})["optimizer"],
             size * parameters / rates["bytes"])
    near(bf16["loss"], 4 * M * P / rates["bytes"])
    near(bf16["norms"], (24 * L + 10) * M * C / rates["bytes"])
    # narrow: a matmul's bytes take longer than its operations
    small = floor_of(gpt2, delayed, {"hidden-size": 512, "num-attention-heads": 8,
                                     "num-query-groups": 8, "ffn-hidden-size": 512})
    assert small["matmuls"] > 1e3 * 6 * M * L * 6 * 512 * 512 / rates["fp8"]
    wide = floor_of(llama, {"kv-channels": 2 * D})
    near(wide["attention"], 2 * L * 7 * B * H * T * T * D / rates["bf16"])
    near(wide["matmuls"], 6 * M * L * (2 * C * N + 2 * C * C + 3 * C * F) / rates["bf16"])
    assert floor.floor_ms("NVIDIA H100", llama, parameters) is None
    assert check.fails(near, 1.0001 * bf16["loss"], 4 * M * P / rates["bytes"])


# ---- words --------------------------------------------------------------------------------------


# script | what it says | words; C, AB, RUN: see below
REFUSED = """
compare | give them after -- | --out r
compare | --data is missing | --out r -- --model llama-tiny
compare | no such file | --out r -- --model llama-tiny --data none.bin
compare | did you mean --fp8-format | --out r --variant a: --variant 'b: --fp8-formt x' C
compare | must be NAME:OPTIONS | --out r --variant bf16 C
compare | name of its own | --out r --variant a: --variant a: C
compare | two at least | --out r --variant a: C
compare | use --seeds before -- | --out r C --seed 5
compare | use --out | --out r --variant 'a: --save=x' --variant b: C
compare | different whole numbers | --out r --seeds 1,1 C
compare | --trainer ./nothing: no such program | --out r --trainer ./nothing C
compare | --trainer a 'b: No closing quotation | --out r --trainer "a 'b" C
compare | --trainer nothing: no such program | --out r --trainer nothing C
compare | --out notes: File exists | --out notes C
compare | cut/b/seed-1234/command.json: damaged | --out cut --variant b: --variant c: C
compare | listed/variants.json: damaged: not a list of words | --report-only --out listed
compare | c/bf16/seed-2/command.json: damaged: not a list of words | --out c --seeds 2 C
compare | two variants at least | --report-only --out nowhere
compare | no such runs | --report-only --out c --variant bf16: --variant fp16:
compare | metrics.jsonl is not there | --report-only RUN --run b:d
compare | the same run twice | --report-only RUN --run b:c/../c/bf16/seed-2
compare | the same seed | --report-only RUN --run a:own/a/seed-1234 --run b:c/fp8/seed-2
compare | unstarted/metrics.jsonl has no step | --report-only RUN --run b:unstarted
doctor | pipe/metrics.jsonl: not a regular file | pipe
compare | must be a percentage | --out r --train-limit -1 C
compare | did not make | --out own AB C
compare | unknown option --model: the trainer's own come after -- | --model llama-tiny
compare | unknown option --seed; did you mean --seeds? | --seed 1
plot | no step in it | d
plot | c/bf16: no run (no metrics.jsonl); did you mean c/bf16/seed-2? | c/bf16
plot | did you mean c/bf16/seed-2? | c/bf16/seed-2/step_00000001
plot | notes: not a run's metrics.jsonl | notes
doctor | c/fp8: no run (no metrics.jsonl); did you mean | c/fp8
plot | .png or .svg | c/bf16/seed-2 --out x.pdf
plot | --out nosuch/x.png: No such file | c/bf16/seed-2 --out nosuch/x.png
plot | error: --out: expected one argument | c/bf16/seed-2 --out
plot | error: --x: invalid choice: 'foo' | c/bf16/seed-2 --x foo
plot | no such run | none
plot | the same run twice | c/bf16/seed-2 c/bf16/seed-2
monitor | --tensorboard notes/seed-2: Not a directory | c/bf16/seed-2 --once --tensorboard notes
monitor | no such run | none
"""

def test_bad_words_are_refused():
    for name in ("c/bf16/seed-2", "c/fp8/seed-2", "own/a/seed-1234", "cut/b/seed-1234"):
        whole_run(name, [2.0])
    os.mkdir("d")
    os.mkdir("c/bf16/seed-2/step_00000001")
    whole_run("unstarted", [])
    os.mkdir("pipe")
    os.mkfifo("pipe/metrics.jsonl")
    for path, content in (("notes", "two\nlines\n"), ("listed/variants.json", "{}"),
                          ("c/bf16/seed-2/command.json", '["a", 1]'),
                          ("shard.bin", shard_header.header(2, 100) + bytes(200)),
                          ("cut/b/seed-1234/command.json", '["a", ')):
        check.write(path, content)
    short = {"C": "-- --model llama-tiny --data shard.bin",
             "AB": "--variant a: --variant b:", "RUN": "--run a:c/bf16/seed-2"}
    for row in REFUSED.strip().splitlines():
        script, said, words = row.split(" | ")
        os.makedirs("r", exist_ok=True)
        for name, meant in short.items():
            words = re.sub(rf"\b{name}\b", meant, words)
        result = call(importlib.import_module("llm8." + script).main, *shlex.split(words))
        shutil.rmtree("r") # it holds a lock until the process ends
        same(result.status, 2, row, result.out)
        says(result.err, said)
        says(result.out, "!step 0/0")


def test_what_has_not_begun_is_no_run():
    """Of a comparison stopped half-way."""
    for name in ("bf16", "fp8"):
        whole_run(f"r/{name}/seed-1", [2.0] * 10, seed="1")
        check.write(f"r/{name}/seed-2/console.log", "")
    same(experiment.runs_under("r"), {"bf16": ["r/bf16/seed-1"], "fp8": ["r/fp8/seed-1"]})


def test_programs_of_another_folder_are_named_by_it():
    with mock.patch.dict(os.environ, {"LLM8_BIN": "elsewhere"}):
        says(call(functools.partial(environment.built, "train_gpt")).err,
             "elsewhere/train_gpt is not built", "LLM8_BIN")


def test_lists_are_whole_at_any_time():
    """A write that fails half-way, as on a full disk, leaves the list of before."""
    experiment.write_list(".", "x.json", ["a", "b"])
    with contextlib.suppress(TypeError):
        experiment.write_list(".", "x.json", ["c", {}, {1}])
    same(experiment.read_list(".", "x.json"), ["a", "b"])


def test_variants_and_seeds():
    for words in ("a: --x 1 --y=2", "a: '--x' 1 --y=2"):
        same(experiment.parse_variant(words), ("a", ["--x", "1", "--y=2"]))
    same(experiment.parse_variant("b:"), ("b", []))
    same(experiment.parse_seeds("1, 22,3"), ["1", "22", "3"])
    off = ["--bf16", "--fp8-format", "none"]
    for words, common, own in (
            (["--bf16"], ["--fp8-format", "hybrid"], off), (["--bf16"], ["--lr", "1"], ["--bf16"]),
            (["--bf16"], ["--fp8-format=hybrid"], off), ([], ["--fp8-format", "hybrid"], []),
            (["--bf16", "--fp8-format", "e4m3"], ["--fp8-format", "hybrid"],
             ["--bf16", "--fp8-format", "e4m3"])):
        task, = experiment.make_tasks(["p"], [("a", words)], ["1"], common, "out")
        same(task.command, ["p", "--keep", "1", *common, *own, "--seed", "1"])
    write("x.txt", "# --seed\nlr 2\n  --fp8-format = hybrid\nshuffle no\n")
    for common, overridden in (("--lr 1", "--lr\n"), ("--lr=1 --bf16", "--fp8-format, --lr\n"),
                               ("--no-shuffle --epochs 1", "--shuffle\n"), ("--epochs 1", "")):
        for words in (["--config=x.txt"], ["--bf16", "--config", "x.txt"]):
            said = call(functools.partial(experiment.make_tasks, ["p"], [("a", words)], ["1"],
                                          common.split(), "out")).err
            same(said, overridden and f"warning: --variant a: what follows -- overrides its "
                 f"--config's {overridden}")
    for read, wrong in (
            (experiment.parse_variant,
             ("--bf16", "a b: --x", "a: x", "a: --x '", "a/b: --x", ": --x")),
            (experiment.parse_seeds, ("", "1,1", "1,,2", "x", "-1"))):
        for words in wrong:
            same(call(functools.partial(read, words)).status, 2, words)


def test_cores_are_those_of_affinity_and_quotas():
    """Of 64 that the machine has; one file after another, as test_host.c has them."""
    with mock.patch("os.sched_getaffinity", return_value=set(range(64))):
        for path, content, cores in (
                ("none", "", 64), ("proc/self/cgroup", "0::/a/b\n", 64),
                ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n", 64),
                ("sys/fs/cgroup/a/cpu.max", "250000 100000\n", 3),
                ("sys/fs/cgroup/cpu.max", "50000 100000\n", 1),
                ("proc/self/cgroup", "5:cpuset:/c\n3:cpuacct,cpu:/c\n", 64),
                ("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n", 64),
                ("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "50000\n", 64),
                ("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "150000\n", 3)):
            check.write(f"root/{path}", content)
            same(environment.cores("root"), cores, path)


def test_noise_of_a_long_run_is_drawn():
    """More in one line than matplotlib's rasterizer takes at once."""
    noise = numpy.random.default_rng(1).random(300000)
    picture = style.draw(lambda figure: figure.subplots().plot(noise), (10, 20), form="png")
    assert picture.startswith(b"\x89PNG")


if __name__ == "__main__":
    main(apart=True)
