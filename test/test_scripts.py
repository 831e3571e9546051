"""The parts of scripts/llm8: reading a metrics.jsonl under way, smoothing, judging, writing pages,
drawing on a terminal, the boards. test_scripts.sh runs it, and the programs as a whole."""

import fcntl
import functools
import glob
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import check
import matplotlib.figure
import numpy
from check import call
from llm8 import (
    boards,
    doctor,
    environment,
    experiment,
    judge,
    metrics,
    monitor,
    plots,
    report,
    series,
    style,
    text,
)

OPTIONS = {"seed": "1", "train-iters": "10", "data": "/a/d.bin", "valid-data": "/a/v.bin",
           "eval-iters": "1", "num-layers": "2", "lr": "0.1", "save": "/s"}
EFFECTS = {"seed": "data", "train-iters": "results", "data": "data", "valid-data": "evaluation",
           "eval-iters": "evaluation", "num-layers": "shape", "lr": "results", "save": "nothing"}


def start(step=0, device="NVIDIA H200", memory=2**30, **options):
    return {"kind": "run", "step": step, "device": device, "time": 1e9, "memory_bytes": memory,
            "precision": "FP8", "parameters": 3, "data_sequences": 100,
            "options": {**OPTIONS, **options}, "effects": EFFECTS}


def step_record(step, loss=2.0, speed=100.0, skipped=0):
    return {"kind": "step", "step": step, "loss": loss, "norm": 1.0, "lr": 0.1, "seconds": 0.5,
            "tokens": 64 * step, "tokens_per_s": speed, "skipped": skipped}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


class Folder(unittest.TestCase):
    def setUp(self):
        self.addCleanup(os.chdir, os.getcwd())
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        self.path = os.path.join(self.folder, "metrics.jsonl")

    def tearDown(self):
        self._folder.cleanup()

    def append(self, content):
        with open(self.path, "a") as file:
            file.write(content)

    def run_of(self, name, *records):
        os.makedirs(os.path.join(self.folder, name))
        with open(os.path.join(self.folder, name, "metrics.jsonl"), "w") as file:
            file.write(lines(*records))
        return metrics.open_run(os.path.join(self.folder, name))

    def whole_run(self, name, losses, valid=2.0, speed=100.0, end=0, **options):
        steps = [step_record(i, loss, speed) for i, loss in enumerate(losses, 1)]
        evals = [{"kind": "eval", "step": len(losses), "valid_loss": valid, "seconds": 1.0}]
        return self.run_of(name, start(**options), *steps, *evals,
                           {"kind": "end", "step": len(losses), "status": end})


class Reading(Folder):
    def test_torn_line_waits_until_it_is_whole(self):
        whole = lines(start(), step_record(1), step_record(2))
        run = metrics.Run(self.folder)
        self.assertEqual(run.poll(), [])
        for cut in range(len(whole)):
            self.append(whole[cut])
            run.poll()
            self.assertEqual(len(run.starts) + len(run.steps), whole[:cut + 1].count("\n"))
        self.assertEqual(run.bad_lines, 0)

    def test_torn_line_that_a_resume_cuts_off(self):
        self.append(lines(start(), step_record(1)) + '{"kind":"st')
        run = metrics.open_run(self.folder)
        os.truncate(self.path, os.path.getsize(self.path) - len('{"kind":"st'))
        self.append(lines(start(1), step_record(2)))
        run.poll()
        self.assertEqual((sorted(run.steps), run.bad_lines, len(run.starts)), ([1, 2], 0, 2))

    def test_resume_replaces_what_came_after(self):
        self.append(lines(start(), *(step_record(i, 5.0) for i in range(1, 7)),
                          {"kind": "eval", "step": 6, "valid_loss": 5.0}, start(3)))
        run = metrics.open_run(self.folder)
        self.assertEqual(run.column("loss"), ([1, 2, 3], [5.0, 5.0, 5.0]))
        self.append(lines(*(step_record(i, 4.0) for i in (4, 5))))
        run.poll()
        self.assertEqual(run.column("loss"), ([1, 2, 3, 4, 5], [5.0, 5.0, 5.0, 4.0, 4.0]))
        self.assertEqual(run.evals, {})

    def test_another_file_in_its_place(self):
        self.append(lines(start(), step_record(1), step_record(2)))
        run = metrics.open_run(self.folder)
        with open(self.path + ".new", "w") as file:
            file.write(lines(start(), step_record(1, 7.0)))
        os.replace(self.path + ".new", self.path)
        self.assertEqual(run.poll()[0]["kind"], "restart")
        self.assertEqual(run.column("loss"), ([1], [7.0]))

    def test_lines_that_are_no_records(self):
        self.append(lines(start()) + 'nonsense\n3\n{"kind":"step"}\n{"kind":"step","step":"x"}\n'
                    '{"kind":"run","step":1,"options":5}\n\x00\xff\n' + lines(step_record(1)))
        run = metrics.open_run(self.folder)
        self.assertEqual((run.bad_lines, sorted(run.steps), len(run.starts)), (6, [1], 1))

    def test_paths_need_not_be_utf8(self):
        text = lines(start(data="caf?.bin"), step_record(1))
        with open(self.path, "wb") as file:
            file.write(text.encode().replace(b"?", b"\xe9"))
        run = metrics.open_run(self.folder)
        self.assertEqual((run.bad_lines, sorted(run.steps), len(run.starts)), (0, [1], 1))

    def test_null_is_not_a_number(self):
        self.append(lines(start()) + '{"kind":"step","step":1,"loss":null,"nonfinite":true}\n')
        self.assertTrue(math.isnan(metrics.open_run(self.folder).column("loss")[1][0]))

    def test_states(self):
        self.assertEqual(self.run_of("a").state, "nothing yet")
        self.assertEqual(self.run_of("b", start()).state, "running, or died")
        done = self.whole_run("c", [2.0] * 10)
        self.assertTrue(done.finished and done.over)
        stopped = self.whole_run("d", [2.0] * 4, end=75)
        self.assertFalse(stopped.finished or stopped.over)
        self.assertFalse(self.whole_run("e", [2.0] * 4).finished) # an end before the last step
        gave_up = self.whole_run("f", [2.0] * 4, end=3)
        self.assertTrue(gave_up.over and not gave_up.finished)

    def test_a_look_takes_no_lock(self):
        """A run that starts meanwhile finds its folder free, after each call on the lock."""
        run, free = self.run_of("a", start()), []
        path = os.path.join(self.folder, "a", ".lock")
        open(path, "w").close()
        take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | 4)"

        def probed(call_on_it):
            def both(*words):
                result = call_on_it(*words)
                free.append(subprocess.run([sys.executable, "-c", take, path]).returncode == 0)
                return result
            return both
        with unittest.mock.patch.multiple(fcntl, lockf=probed(fcntl.lockf),
                                          fcntl=probed(fcntl.fcntl)):
            run.poll()
            self.assertEqual(run.state, "died")
        self.assertEqual(free, [True])

    def test_a_run_that_ends_while_it_is_read_did_not_die(self):
        """It holds its lock as its file is read, and is gone before its state is asked for."""
        path = os.path.join(self.folder, ".lock")
        hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, 2); " \
            "print(flush=True); sys.stdin.read()"
        self.append(lines(start(), step_record(1)))
        with subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as holder:
            holder.stdout.readline()
            run = metrics.open_run(self.folder)
        self.assertEqual(run.state, "running")
        run.poll()
        self.assertEqual(run.state, "died")

    def test_names_tell_runs_apart(self):
        for name in ("run/a", "run/b/c"):
            os.makedirs(os.path.join(self.folder, name))
        paths = [os.path.join(self.folder, "run/a/"), os.path.join(self.folder, "run/b/c")]
        self.assertEqual(metrics.short_names(paths), ["a", "b/c"])
        self.assertEqual(metrics.short_names(paths[:1]), ["a"])
        # one inside the other
        self.assertEqual(metrics.short_names(["run/x", "run/x/x"]), ["x", "x/x"])
        self.assertEqual(metrics.short_names(["run/x/x/y", "run/x"]), ["x/x/y", "x"])

    def test_recent_leaves_out_what_is_no_number(self):
        for losses, median in (([3.0, None, 1.0], 2.0), ([None, 2.0], 2.0), ([None], math.nan),
                               ([], math.nan), ([1.0, None, 5.0, 3.0], 3.0)):
            run = self.run_of(f"r{losses}", start(), *(
                step_record(step, loss) for step, loss in enumerate(losses, 1)))
            numpy.testing.assert_equal(run.recent("loss"), median)


class Arithmetic(Folder):
    def test_smoothing_is_the_mean_around(self):
        values = numpy.random.default_rng(1).normal(size=37)
        values[[4, 20]] = numpy.nan, numpy.inf
        for width in (1, 2, 5, 8, 100):
            for i, found in enumerate(series.smooth(values, width)):
                around = values[max(0, i - (width - 1) // 2):i + width // 2 + 1]
                around = around[numpy.isfinite(around)]
                if len(around) == 0:
                    self.assertTrue(math.isnan(found))
                else:
                    self.assertAlmostEqual(found, around.mean(), places=12)

    def test_throughput_leaves_starts_out(self):
        slow = [step_record(i, speed=1.0) for i in (1, 2, 3)]
        run = self.run_of("a", start(), *slow, step_record(4, speed=90.0),
                          step_record(5, speed=110.0), start(5), step_record(6, speed=1.0),
                          step_record(7, speed=1.0), step_record(8, speed=1.0))
        self.assertEqual(series.steady_throughput(run), 100.0)

    def test_window_leaves_skipped_steps_out(self):
        run = self.run_of("a", start(), *(step_record(i, float(i)) for i in (1, 2, 3)),
                          {**step_record(4, None), "skipped": 1}, step_record(5, 5.0))
        self.assertEqual(series.window_mean(run, 5, 3), 4.0)
        self.assertTrue(math.isnan(series.window_mean(run, 4, 1)))
        run.steps[3].update(loss=99.0, skipped=1) # a spike
        self.assertEqual(series.window_mean(run, 5, 4), 3.5)


def judged(*runs, **limits):
    """The judgements on the last group of runs, by what they are on, and whether all hold."""
    variants = [judge.Variant(f"v{i}", group) for i, group in enumerate(runs)]
    found = judge.judge(judge.Comparison(variants, judge.Limits(**limits)))
    return {j.what: j for j in found.judgements}, found.verdict == judge.PASS


class Judging(Folder):
    def pair(self, loss, valid=2.0, speed=120.0, **options):
        """A baseline of loss 2 and 100 tok/s, and one beside it, of two equal seeds each."""
        number = len(os.listdir(self.folder))
        return [[self.whole_run(f"{number}-{name}-{seed}", [2.0] * 5 + [end] * 5, *more,
                                **{"seed": seed, **changed}) for seed in "12"]
                for name, end, more, changed in (("a", 2.0, (), {}),
                                                 ("b", loss, (valid, speed), options))]

    def seeds(self, *changes):
        """Returns the verdict on pairs whose final losses differ by these percentages."""
        number = len(os.listdir(self.folder))
        runs = [[self.whole_run(f"{number}-{name}-{seed}", [2.0] + [2 + factor * change / 50] * 10,
                                speed=100.0 + factor, seed=str(seed))
                         for seed, change in enumerate(changes)]
                for name, factor in (("a", 0), ("b", 1))]
        found, passed = judged(*runs)
        return found["training loss"], passed

    def test_losses_are_judged_beside_their_noise(self):
        for changes, result in (
                ((0.1, 0.2, 0.15, 0.1), judge.PASS), ((2.1, 2.2, 2.15, 2.1), judge.FAIL),
                ((-2.1, -2.2, -2.15, -2.1), judge.FAIL), ((3.0, -3.0, 1.0, -1.0), judge.UNSURE),
                ((0.7, 1.1, 0.6, 0.8), judge.UNSURE), # the noise reaches across the limit of 1%
                ((0.1,), judge.UNSURE), ((9.0,), judge.UNSURE), ((20.0, 2.0), judge.UNSURE),
                ((0.9, -0.9) * 20, judge.PASS)):
            with self.subTest(changes=changes):
                found, passed = self.seeds(*changes)
                self.assertEqual(found.result, result)
                self.assertEqual(passed, result == judge.PASS)
                self.assertEqual((found.pairs, bool(found.doubt)),
                                 (len(changes), result == judge.UNSURE))
                self.assertAlmostEqual(found.change, numpy.mean(changes), places=9)
                if len(changes) > 1:
                    error = numpy.std(changes, ddof=1) / len(changes) ** 0.5
                    self.assertAlmostEqual(found.error, error, places=9)
        # half of the interval of 95%: for four pairs Student's t is 3.18
        found, _ = self.seeds(0.1, 0.2, 0.15, 0.1)
        self.assertAlmostEqual(found.noise / found.error, 3.18)
        # beside a verdict stands what the variant does
        for change, beside in ((0.1, "beyond"), (0.0, "within")):
            found, _ = self.seeds(*(change + x for x in (-0.01, 0.01, 0.02, 0.0)))
            self.assertIn(f"%, {beside} the noise of 0.02%", report.effect(found))
        self.assertEqual(report.effect(self.seeds(0.1)[0]), "")
        found, passed = self.seeds(0.1, math.nan, 0.1)
        self.assertTrue(found.result == judge.FAIL and not passed)

    def test_no_verdict_is_the_first_thing_said(self):
        base, other = self.pair(2.0)
        comparison = judge.judge(judge.Comparison(
            [judge.Variant("a", base[:1]), judge.Variant("b", other[:1])], judge.Limits()))
        self.assertRegex(report.verdict_line(comparison),
                         r"^CANNOT TELL: b against a: training loss \+0.000%, one pair of seeds")
        blocks = report.verdict_blocks(comparison)
        row, = [line.split(" | ") for line in blocks[2].splitlines() if "training loss" in line]
        self.assertEqual((row[5], row[7]), ("1", "cannot tell"))
        # what to add, and what that takes: 6 runs of 10 steps of half a second
        self.assertIn("--seeds 1,2,3,4 runs those that are missing: 6 runs, about 30 s.", blocks[1])
        for seeds, more in ((["1234"], "1234,1,2,3"), (["2", "5"], "2,5,1,3"), (["?"], ""),
                            (list("1234"), "1,2,3,4,5,6,7,8")):
            comparison.baseline.seeds = lambda seeds=seeds: seeds
            self.assertEqual(judge.more_seeds(comparison), more)
        comparison.judgements = []
        self.assertEqual(report.advice(comparison), [])

    def test_report_says_what_was_judged(self):
        """Forty steps: the last ten are the final loss, the first three and the last are slow."""
        def run(name, seed, final, valid, speed, memory):
            steps = [step_record(i, 9.0 if i < 31 else final + (-1) ** i / 9,
                                 speed if 3 < i < 40 else 1) for i in range(1, 41)]
            return self.run_of(name + seed, start(seed=seed, memory=memory << 20), *steps,
                               {"kind": "eval", "step": 20, "valid_loss": 7.0, "seconds": 1.0},
                               {"kind": "eval", "step": 40, "valid_loss": valid, "seconds": 1.0},
                               {"kind": "end", "step": 40, "status": 0})
        comparison = judge.judge(judge.Comparison([
            judge.Variant("a", [run("a", "1", 2.0, 3.0, 100, 512),
                                run("a", "2", 2.1, 3.1, 110, 512)]),
            judge.Variant("b", [run("b", "1", 2.02, 3.03, 120, 256),
                                run("b", "2", 2.142, 3.1, 132, 256)])], judge.Limits()))
        blocks = [*report.verdict_blocks(comparison), report.spread_text(comparison)]
        html = re.sub("</td>\\s*<td[^>]*>", " | ", report.page(blocks))
        for row in ("training loss | 2.0500 | 2.0810 | +1.500% ± 0.500% | 2",
                    "validation loss | 3.0500 | 3.0650 | +0.500% ± 0.500% | 2",
                    "speed-up | 105 tok/s | 126 tok/s | 1.200x | -",
                    "memory | 512 MiB | 256 MiB | 0.500x | -"):
            self.assertIn(f"| b | {row} |", "\n".join(map(str, blocks)))
            self.assertIn(f">b | {row} |", html)
        self.assertIn("the 2 runs of a end between 2.0000 and 2.1000, 4.878% apart", html)
        whole = "\n".join(map(str, report.build(comparison)))
        self.assertIn("means over 1 step; below, over 1.", whole)
        self.assertIn("seeds 1, 2; on", whole)
        self.assertEqual([round(j["change"], 9) for j in report.figures(comparison)["judgements"]
                          if j["what"] in judge.LOSSES], [1.5, 0.5])

    def test_limits(self):
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
            with self.subTest(what=what, loss=loss, changes=changes, limits=limits):
                found, passed = judged(*self.pair(loss, **changes), **limits)
                self.assertEqual(passed, result != judge.FAIL)
                if what:
                    self.assertEqual(found[what].result, result)
                if what == "same start" and result == judge.FAIL:
                    self.assertIn(f"--{list(changes)[0]}", found[what].note)
                if what == "speed-up" and limits:
                    self.assertAlmostEqual(found[what].change, 1.2)
        bad = [self.whole_run(f"nan-{seed}", [2.0] + [nan] * 19, seed=seed) for seed in "12"]
        found, passed = judged([self.whole_run(f"long-{seed}", [2.0] * 20, seed=seed)
                                for seed in "12"], bad) # none of the last ten is finite
        self.assertFalse(passed or found["training loss"].result != judge.FAIL)

    def test_ratios_agree_with_the_values_shown(self):
        """One pair is twice as fast, and takes twice the memory, the other half: no gain at all."""
        size = {100.0: 2**30, 200.0: 2**31}
        runs = [[self.whole_run(f"{name}-{seed}", [2.0] * 10, speed=speed, memory=size[speed],
                                seed=seed) for seed, speed in zip("12", speeds)]
                for name, speeds in (("a", (100.0, 200.0)), ("b", (200.0, 100.0)))]
        found, _ = judged(*runs)
        for what, result in (("speed-up", judge.FAIL), ("memory", judge.OPEN)):
            self.assertEqual((found[what].change, found[what].result), (1.0, result))

    def test_shards_are_known_by_their_checksums(self):
        for one, other, same in (("aa", "aa", True), ("aa", "bb", False)):
            runs = self.pair(2.0, **{"data": "/b/other.bin", "valid-data": "/b/w.bin"})
            for run, crc in zip((row[0] for row in runs), (one, other)):
                run.start.update(data_crc32=crc, valid_data_crc32="11")
            for run in (run for row in runs for run in row[1:]):
                run.start.update(data_crc32="aa", valid_data_crc32="11")
            found, passed = judged(*runs)
            self.assertEqual(passed, same)

            self.assertEqual("(shards aa and shards bb)" in found["same start"].note, not same)

    def resumed(self, name, at=5, records=(), before=None, **after):
        """Ten steps, resumed after one of them with other options."""
        steps = [step_record(i) for i in range(1, 11)]
        evals = [{"kind": "eval", "step": i, "valid_loss": 2.0, "seconds": 1.0} for i in (5, 10)]
        return self.run_of(name, start(**(before or {})), *steps[:at], evals[0], *records,
                           start(at, **after), *steps[at:], evals[1],
                           {"kind": "end", "step": 10, "status": 0})

    def test_all_parts_of_a_run_are_judged(self):
        plain = self.whole_run("plain", [2.0] * 10)
        for name, value, part in (
                ("num-layers", "3", "--num-layers (2 and 2, then 3 after step 5)"),
                ("seed", "2", "--seed (1 and 2, then 1 after step 5)"),
                ("data", "/a/other.bin", "--data (d.bin and d.bin, then other.bin after step 5)")):
            other = self.resumed(name, **({"before": {name: value}} if name == "seed" else
                                          {name: value}))
            found, _ = judged([plain], [other])
            self.assertEqual((found["same start"].result, found["same start"].note),
                             (judge.FAIL, "not the same: " + part))
        sums = self.resumed("sums")
        for run, crcs in ((plain, "a"), (sums, "ab")):
            for part, crc in zip(run.parts, crcs):
                part["data_crc32"] = crc
        self.assertIn("(shards a and shards a, then shards b after step 5)",
                      judged([plain], [sums])[0]["same start"].note)
        for name, at, shown in (("lr1", 5, "0.02, then 0.1 after step 5"),
                                ("lr2", 4, "0.02, then 0.1 after step 4")):
            slow = self.resumed(name, at, before={"lr": "0.02"})
            self.assertEqual(judge.differing_options([plain, slow]), {"lr": ["0.1", shown]})
            self.assertEqual(judged([plain], [slow])[0]["same start"].result, judge.PASS)
        two = self.whole_run("two", [2.0] * 10, seed="2")
        for runs, rows in (([two, slow], {"lr": ["0.1", f"{shown}; 0.1"]}), ([two, plain], {}),
                           ([slow], {"lr": ["0.1", shown], "seed": ["1; 2", "1"]})):
            self.assertEqual(report.option_rows(judge.Comparison([
                judge.Variant("a", [plain, two]), judge.Variant("b", runs)], judge.Limits())), rows)
        # what a later start made void, and one that did nothing, are no parts of it
        void = self.resumed("void", records=[start(5, memory=2**40, seed="3"), step_record(6, 9.0)])
        idle = self.run_of("idle", start(), *plain.steps.values(), plain.end,
                           start(10, lr="3"), plain.end)
        for run in (void, idle):
            self.assertEqual(judge.differing_options([plain, run]), {})
        self.assertEqual(judge.memory_of(void), 2**30)
        # the speeds of two GPUs are not one
        moved = self.run_of("moved", start(device="NVIDIA H100"), *list(plain.steps.values())[:5],
                            start(5), *list(plain.steps.values())[5:], plain.end)
        self.assertIn("NVIDIA H100", judged([plain], [moved])[0]["speed-up"].note)

    def test_evaluations_see_the_same_samples(self):
        def run(name, iters, batch, length):
            return self.whole_run(name, [2.0] * 10, **{
                "eval-iters": iters, "global-batch-size": batch, "seq-length": length})
        base = run("base", "4", "8", "16")
        for place, (sizes, wrong) in enumerate((
                (("4", "16", "16"), "--global-batch-size"), (("8", "4", "16"), ""),
                (("0", "8", "16"), "--eval-iters"), (("8", "8", "8"), "--eval-iters --seq-length"),
                (("8", "4", "32"), "--seq-length"))):
            found, _ = judged([base], [run(f"r{place}", *sizes)], time=9)
            for what, result in (("validation loss", judge.FAIL), ("time to loss", judge.OPEN)):
                self.assertEqual(found[what].note == "not over the same samples: " + wrong,
                                 bool(wrong), found[what])
                self.assertEqual(found[what].result == result, bool(wrong), found[what])
        all_of_them = [run(f"all{batch}", "0", batch, "16") for batch in "48"]
        self.assertEqual(judged(*([one] for one in all_of_them))[0]["validation loss"].result,
                         judge.UNSURE)
        # where there are fewer than would be read, all are
        few = [run(f"few{batch}", "4", batch, "16") for batch in ("8", "16")]
        for one in few:
            one.start["valid_sequences"] = 30
        self.assertEqual(judged(*([one] for one in few))[0]["validation loss"].result, judge.UNSURE)
        few[1].start["valid_sequences"] = 31
        found, _ = judged(*([one] for one in few))
        self.assertIn("not over the same samples", found["validation loss"].note)
        # the last evaluation is what is judged; the time needs them all
        found, _ = judged([self.whole_run("two", [2.0] * 10, **{"eval-iters": "2"})],
                          [self.resumed("later", **{"eval-iters": "2"})])
        self.assertEqual(found["validation loss"].result, judge.UNSURE)
        self.assertIn("not over the same samples: --eval-iters", found["time to loss"].note)

    def test_it_says_why_there_is_no_loss(self):
        steps = [step_record(i) for i in range(1, 11)]
        end = {"kind": "end", "step": 10, "status": 75}
        none = [self.run_of(f"none{given}", start(**{"valid-data": given}), *steps, end)
                for given in ("", "v.bin")]
        base = self.whole_run("base", [2.0] * 10)
        for run, why in zip(none, ("no evaluation (--valid-data)",
                                   "no evaluation: a run ends before its first (--eval-interval)")):
            found, _ = judged([base], [run])
            for what in ("validation loss", "time to loss"):
                self.assertEqual((found[what].result, found[what].note), (judge.OPEN, why))
        nan = self.whole_run("nan", [2.0] + [math.nan] * 19, math.nan)
        found, _ = judged([self.whole_run("long", [2.0] * 20)], [nan])
        self.assertEqual(found["training loss"].note, "NaN or infinite, mean of the last 10 steps")
        self.assertEqual(found["validation loss"].note, "NaN or infinite, after step 20")
        for limit, result in ((None, judge.OPEN), (1.0, judge.FAIL)):
            found, _ = judged([nan], [self.whole_run(f"l{limit}", [2.0] * 20)], time=limit)
            self.assertEqual((found["time to loss"].result, found["time to loss"].note),
                             (result, "the baseline's last validation loss is NaN or infinite"))

    def test_first_losses_must_agree(self):
        for case, (first, result) in enumerate((
                (2.0, judge.PASS), (2.009, judge.PASS), (1.991, judge.PASS), (2.011, judge.FAIL),
                (1.989, judge.FAIL), (None, judge.FAIL), (math.inf, judge.FAIL))):
            with self.subTest(first=first):
                # one pair of the two is enough: their mean is not what is judged
                runs = [[self.whole_run(f"{case}-{name}-{seed}", [loss] + [2.0] * 19, seed=seed)
                         for seed, loss in zip("12", losses)]
                        for name, losses in (("a", (2.0, 2.0)), ("b", (2.0, first)))]
                for group in (runs, runs[::-1]):
                    found, _ = judged(*group)
                    self.assertEqual(found["same start"].result, result)
                    self.assertIn("rounding" if first and first < 3 else "no loss",
                                  found["same start"].note)


class Races(Folder):
    def race(self, name, seed, seconds, evals):
        """Writes a run of ten steps of `seconds` each; evals: {step: loss}."""
        return self.run_of(f"{name}-{seed}", start(seed=seed),
                           *({**step_record(i), "seconds": seconds} for i in range(1, 11)),
                           *({"kind": "eval", "step": step, "valid_loss": loss}
                             for step, loss in evals.items()), {"kind": "end", "step": 10,
                                                                "status": 0})

    def test_an_axis_shows_spikes(self):
        fall = numpy.concatenate([numpy.linspace(5.5, 2.5, 20), numpy.linspace(2.5, 1, 380)])
        for place, high in ((None, 2.5), (12, 9.4), (200, 9.4)):
            curve = fall.copy()
            if place:
                curve[place] = 9.4
            axes = matplotlib.figure.Figure().subplots()
            plots.final_range(axes, [curve])
            low, top = axes.get_ylim()
            self.assertTrue(low < 1 and high <= top < 1.1 * high, (place, low, top))

    def test_time_to_a_loss(self):
        run = self.race("a", "1", 2.0, {2: 5.0, 4: 4.0, 6: 3.0, 8: 3.5})
        for loss, seconds in ((5.5, 4.0), (5.0, 4.0), (4.5, 6.0), (3.25, 11.0), (3.0, 12.0)):
            self.assertAlmostEqual(series.reach(run, loss, "seconds"), seconds)
        self.assertAlmostEqual(series.reach(run, 4.5, "tokens"), 3 * 64)
        self.assertTrue(math.isnan(series.reach(run, 2.9, "seconds")))
        gaps = self.race("b", "1", 2.0, {1: math.nan, 2: 5.0, 4: math.nan, 6: 3.0, 8: None})
        self.assertAlmostEqual(series.reach(gaps, 4.0, "seconds"), 8.0) # between steps 2 and 6
        self.assertAlmostEqual(series.reach(gaps, 5.5, "seconds"), 4.0)

    def test_the_time_to_the_baselines_loss_is_judged(self):
        base = [self.race("base", seed, 1.0, {5: 3.5, 10: 3.0}) for seed in "123"] # after 10 s
        fast = [self.race("fast", seed, 0.5, {4: 4.0, 6: 3.2, 8: 2.8, 10: 2.5}) for seed in "12"]
        for ratio, result in ((0.35, judge.PASS), (0.34, judge.FAIL), (None, judge.OPEN)):
            found, _ = judged(base[:2], fast, time=ratio)
            self.assertEqual(found["time to loss"].result, result)
            self.assertAlmostEqual(found["time to loss"].change, 0.35) # 7 steps of 0.5 s
        slow = [self.race("slow", "1", 2.0, {5: 3.5, 10: 3.01})]
        found, _ = judged(base[:1], slow, time=100)
        self.assertTrue(found["time to loss"].result == judge.FAIL and
                        "1 of 1 pairs miss it" in found["time to loss"].note)
        # one seed that misses it counts with its whole time, and keeps no promise
        found, _ = judged(base, [*fast, self.race("fast", "3", 2.0, {5: 3.5, 10: 3.01})], time=100)
        self.assertEqual(found["time to loss"].result, judge.FAIL)
        self.assertAlmostEqual(found["time to loss"].change, 0.9) # 3.5, 3.5 and 20 s beside 10
        self.assertIn("1 of 3 pairs miss it, and count", found["time to loss"].note)
        self.assertEqual(found["time to loss"].pairs, 3)
        self.assertFalse(judged(fast, fast[:1])[1]) # a run lacks its pair
        # an older record names no effects, so it is not known which options change nothing
        old = self.run_of("old", {**start(save="/other"), "effects": {}})
        for runs in ([old, fast[0]], [fast[0], old]):
            self.assertNotIn("save", judge.differing_options(runs))


class Pages(Folder):
    def test_one_is_no_plural(self):
        self.assertEqual([text.many(count, "step") for count in (0, 1, 2, 1000)],
                         ["0 steps", "1 step", "2 steps", "1,000 steps"])

    def test_log_axes_have_ticks(self):
        for low, high in itertools.product((1e-3, 0.9, 2.1, 7e6), (1.2, 2.3, 40, 1e4, 1e7, 1e14)):
            figure = matplotlib.figure.Figure((3, 2))
            axes = figure.subplots()
            axes.plot([1, 2], [low, low * high])
            style.log_axis(axes.yaxis)
            figure.draw_without_rendering()
            ends, ticks = axes.get_ylim(), axes.get_yticks()
            self.assertIn(sum(ends[0] <= tick <= ends[1] for tick in ticks), range(2, 12),
                          (low, high))

    def test_html_is_escaped_and_alone(self):
        blocks = ["# a <b> & c", "`x<y` **bold**", "**FAIL: x**", "```sh\na && b > c\n```",
                  text.table(["h"], [["FAIL"], ["<script>"]]),
                  report.Picture("p.svg", b"drawn", 'a "title"'), "words"]
        page = report.page(blocks)
        self.assertIn("<h1>a &lt;b&gt; &amp; c</h1>", page)
        self.assertIn("<title>a &lt;b&gt; &amp; c</title>", page)
        self.assertIn("<code>x&lt;y</code> <strong>bold</strong>", page)
        self.assertIn('<p class="fail"><strong>FAIL: x</strong></p>', page)
        self.assertIn('<td class="fail">FAIL</td>', page.replace(' style="text-align:left"', ""))
        self.assertNotIn("<script>", page)
        self.assertIn("a &amp;&amp; b &gt; c", page)
        self.assertIn('src="data:image/svg+xml;base64,ZHJhd24=" alt="a &quot;title&quot;"', page)
        self.assertNotRegex(page, r"(src|href|srcset)=\"(?!data:)")
        self.assertNotRegex(page, r"https?://|url\(|@import")

    def test_markdown_tables_keep_their_columns(self):
        rows = text.table(["a", "b"], [["x|y", "1"], ["two\nlines", "2"]]).splitlines()
        self.assertEqual([len(re.findall(r"(?<!\\)\|", row)) for row in rows], [3, 3, 3, 3])

    def test_messages_are_one_printable_line(self):
        odd = "a\n\x1b[2J\x9b\u202e\u2028\udc80\\n é"
        shown = r"a\n\x1b[2J\x9b\u202e\u2028\udc80\n é"
        for say, tag in ((environment.warn, "warning"), (environment.die, "error")):
            self.assertEqual(call(functools.partial(say, odd)).err, f"{tag}: {shown}\n")

    def test_what_exists_is_no_pattern(self):
        os.chdir(self.folder)
        for name in ("a [1]/x_1", "a [1]/x_2", "a 1/y", "[b]"):
            check.write(name, "")
        for pattern, found in (("a [1]/x_*", ["a [1]/x_1", "a [1]/x_2"]), ("[b]", ["[b]"]),
                               ("a [1]/y", ["a 1/y"]), ("a [[]1]/x_1", ["a [1]/x_1"]),
                               ("a [2]/*", [])):
            self.assertEqual(environment.matching(pattern), found)

    def test_numbers(self):
        self.assertEqual([text.duration(s) for s in (5, 59.6, 3599, 3600, 1e6, math.nan)],
                         ["5 s", "60 s", "1 h 00", "1 h 00", "11 d 13 h", "-"])
        self.assertEqual((text.fixed(math.nan), text.fixed(1.23456), text.counted(1234.5)),
                         ("-", "1.2346", "1,234"))
        self.assertEqual((text.memory(2**20), text.memory(3 * 2**29)), ("1 MiB", "1.50 GiB"))


class Terminal(Folder):
    def test_curve_falls_from_left_to_right(self):
        runs = [self.whole_run("a", [10 - i / 10 for i in range(100)])]
        rows = monitor.chart(runs, 60, 12)
        self.assertEqual(len(rows), 13)
        places = [place for row in rows[:-1] for place, letter in enumerate(row) if letter == "*"]
        self.assertEqual(places, sorted(places))
        self.assertEqual((places[-1] - places[0] > 50, len(places) > 40), (True, True))
        self.assertEqual(rows[-1].split(), ["1", "100"])
        self.assertEqual(monitor.chart([self.whole_run("b", [None] * 5)], 60, 12), [])
        two = monitor.chart([*runs, self.whole_run("c", [2.0] * 100)], 60, 12)
        self.assertGreater(max(row.count("o") for row in two), 40) # a flat line of its own

    def test_frame_tells_what_matters(self):
        run = self.whole_run("a", [3.0, 2.5, 2.0, None, 2.0], valid=2.25)
        run.fp8[5] = {"tensors": {"blocks.0.qkv.x": {"elements": 100, "largest": 5,
                                                     "zero": 1},
                                  "head.w": {"elements": 100, "largest": 0, "zero": 0}}}
        shown = monitor.frame([run], 100, 30)
        for part in ("5/10", "2.2500", "100 tok/s", "50.0%", "2.0000 |",
                     "blocks.0.qkv.x 5% at the largest code, 1% zero", "ended at step 5 of 10"):
            self.assertIn(part, shown)
        self.assertNotIn("head.w", shown)
        self.assertLess(len(shown.splitlines()), 30)
        self.assertNotIn("\033", shown)

    def test_legends_name_runs_and_skipped_steps(self):
        a, b = (self.whole_run(name, [3.0, 2.5, 2.0]) for name in "ab")
        self.assertNotIn("* a", monitor.frame([a], 100, 30))
        b.steps[2]["skipped"] = 1
        self.assertIn("\n* a   o b, 1 step skipped\n", monitor.frame([a, b], 100, 30))
        self.assertIn("\n* b, 1 step skipped\n", monitor.frame([b], 100, 30))
        self.assertEqual(len(monitor.frame([a, b], 100, 24).splitlines()), 23)
        self.assertIn("\n* a   o b, 1\nstep skipped\n", monitor.frame([a, b], 14, 30))
        variants = [judge.Variant(run.name, [run]) for run in (a, b)]
        drawn = style.draw(plots.draw_runs, plots.SIZE_RUNS, variants, "step").decode()
        self.assertEqual(drawn.count(">b: 1 skipped step<"), 1)
        self.assertEqual(drawn.count(">a<"), 1)

    def test_best_evaluation_is_a_number(self):
        evals = [{"kind": "eval", "step": step, "valid_loss": loss} for step, loss in
                 ((1, None), (2, 2.5), (3, 2.75))]
        for count, best in ((3, "validation 2.7500 after step 3, best 2.5000 after 2"),
                            (1, "validation - after step 1\n")):
            run = self.run_of(f"r{count}", start(), step_record(3), *evals[:count])
            self.assertIn(best, monitor.frame([run], 100, 30) + "\n")

    def test_narrow_terminals_drop_columns_and_no_names(self):
        runs = [self.whole_run(name, [2.0] * 10) for name in ("a-long-name-of-a-run", "b")]
        for width in (100, 60, 44):
            shown = "\n".join(monitor.table(runs, width))
            self.assertLessEqual(max(map(len, shown.splitlines())), width)
            for part in ("a-long-name-of-a-run", "10/10", "finished"):
                self.assertIn(part, shown)
            self.assertEqual("norm" in shown, width == 100)

    def test_runs_without_a_step(self):
        for records in ((), (start(),)):
            run = self.run_of(f"r{len(records)}", *records)
            shown = monitor.frame([run], 80, 24)
            self.assertTrue("0/" in shown and "nan" not in shown, shown)


class Boards(Folder):
    def board_of(self, *parts):
        """TensorBoard's own reading of what a board wrote, given the file in parts."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        run = metrics.Run(self.folder, "r")
        board = boards.TensorBoard(os.path.join(self.folder, "tb"), run)
        for part in parts:
            self.append(part)
            board.take(run.poll())
        board.close()
        found = EventAccumulator(os.path.join(self.folder, "tb", "r"), {"scalars": 0})
        found.Reload()
        return found

    def test_tensorboard_forgets_what_is_done_again(self):
        first = lines(start(), *(step_record(i, 5.0) for i in range(1, 7)))
        again = lines(start(3), *(step_record(i, 4.0) for i in range(4, 9)),
                      {"kind": "eval", "step": 8, "valid_loss": 1.0, "seconds": 1.0})
        for parts in ((first, again), (first + again,)):
            if os.path.exists(self.path):
                os.unlink(self.path)
            found = self.board_of(*parts)
            self.assertEqual([(e.step, e.value) for e in found.Scalars("train/loss")],
                             [(i, 5.0 if i < 4 else 4.0) for i in range(1, 9)])
            self.assertAlmostEqual(found.Scalars("valid/perplexity")[0].value, math.e, places=6)
            self.assertEqual(found.Scalars("train/loss")[1].wall_time, 1e9 + 1.0)
            self.assertEqual(len(glob.glob(os.path.join(self.folder, "tb", "r", "*"))), 1)

    def test_tensorboard_keeps_what_is_of_another_run(self):
        """Of another folder, where a run has the same name, and of another program."""
        where = os.path.join(self.folder, "tb")
        os.makedirs(os.path.join(where, "seed-1"))
        open(os.path.join(where, "seed-1", "events.out.tfevents.1"), "w").close()
        for group in ("bf16", "fp8"):
            self.run_of(f"{group}/seed-1", start(), step_record(1))
        for group in ("bf16", "fp8", "fp8", "bf16"):
            run, = metrics.named_runs([os.path.join(self.folder, group, "seed-1")])
            board = boards.TensorBoard(where, run)
            board.take(run.poll())
            board.close()
        held = {name: os.listdir(os.path.join(where, name)) for name in sorted(os.listdir(where))}
        self.assertEqual(list(map(len, held.values())), [2, 1], held)
        self.assertRegex(" ".join(held), "^seed-1 seed-1-[0-9a-f]{12}$")


class Odd(Folder):
    def test_what_is_passed_over_is_named(self):
        good = [{**start(), "ranks": 2}, step_record(1), step_record(2)]
        for record, expected in (
                ({**good[0], "options": {**OPTIONS, "lr": 1}}, "its options are no texts"),
                ({**good[0], "options": None}, "its options are no texts"),
                (step_record(0), "step is 0, not"),
                ({**step_record(3), "step": 2.5}, "step is 2.5"),
                ({**step_record(3), "step": None}, "step is null"),
                ({"kind": "step"}, "step is null"), ({"step": 3}, "no record"), (3, "no record")):
            with self.subTest(record=str(record)[:60]):
                self.append(lines(*good, record, step_record(3)))
                run = metrics.open_run(self.folder)
                self.assertEqual((run.bad_lines, sorted(run.steps)), (1, [1, 2, 3]))
                self.assertRegex(run.complaint, f"{self.path}, line 4: .*{expected}")
                for main, *words in ((monitor.main, "--once"), (doctor.main,)):
                    out = " ".join(call(main, self.path, *words).out.split())
                    self.assertIn("line 4: ", out)
                os.unlink(self.path)
        odd = {**step_record(3), "loss": "2.5", "lr": 10**400, "norm": [1]}
        self.append(lines({**good[0], "ranks": math.nan}, *good[1:], odd) + '{"kind":"st')
        run = metrics.open_run(self.folder)
        self.assertEqual((run.complaint, run.ranks, run.last_step), ("", 1, 3))
        self.assertTrue(all(math.isnan(run.last(name)) for name in ("loss", "lr", "norm")))


# script | what it says | words; C, AB, RUN: see below
REFUSED = """
compare | give them after -- | --out r
compare | --data is missing | --out r -- --model llama-tiny
compare | no such file | --out r -- --model llama-tiny --data none.bin
compare | did you mean --fp8-format | --out r --variant a: --variant 'b: --fp8-formt x' C
compare | must be NAME:OPTIONS | --out r --variant bf16 C
compare | name of its own | --out r --variant a: --variant a: C
compare | two at least | --out r --variant a: C
compare | use --seeds | --out r C --seed 5
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
compare | no record of a run's start | --report-only RUN --run b:d
compare | the same seed | --report-only RUN RUN --run b:c/fp8/seed-2
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


class Words(Folder):
    def test_bad_words_are_refused(self):
        self.whole_run("c/bf16/seed-2", [2.0])
        self.whole_run("c/fp8/seed-2", [2.0])
        self.whole_run("own/a/seed-1234", [2.0])
        self.whole_run("cut/b/seed-1234", [2.0])
        os.chdir(self.folder)
        self.append("")
        os.mkdir("d")
        os.mkdir("c/bf16/seed-2/step_00000001")
        os.mkdir("listed")
        for path, content in (("notes", "two\nlines\n"), ("listed/variants.json", "{}"),
                              ("c/bf16/seed-2/command.json", '["a", 1]'),
                              ("cut/b/seed-1234/command.json", '["a", ')):
            with open(path, "w") as file:
                file.write(content)
        short = {"C": "-- --model llama-tiny --data metrics.jsonl",
                 "AB": "--variant a: --variant b:", "RUN": "--run a:c/bf16/seed-2"}
        rows = [row.split(" | ") for row in REFUSED.strip().splitlines()]
        for script, says, words in rows:
            with self.subTest(script=script, says=says):
                os.makedirs("r", exist_ok=True)
                for name, meant in short.items():
                    words = re.sub(rf"\b{name}\b", meant, words)
                result = call(importlib.import_module("llm8." + script).main, *shlex.split(words))
                shutil.rmtree("r") # it holds a lock until the process ends
                self.assertEqual(result.status, 2, result.out)
                self.assertIn(says, result.err)
                self.assertNotIn("step 0/0", result.out)

    def test_what_has_not_begun_is_no_run(self):
        """Of a comparison stopped half-way."""
        for name in ("bf16", "fp8"):
            self.whole_run(f"r/{name}/seed-1", [2.0] * 10, seed="1")
        os.chdir(self.folder)
        for name in ("r/bf16/seed-2", "r/fp8/seed-2"):
            os.mkdir(name)
            open(os.path.join(name, "console.log"), "w").close()
        self.assertEqual(experiment.runs_under("r"), {"bf16": ["r/bf16/seed-1"],
                                                      "fp8": ["r/fp8/seed-1"]})

    def test_programs_of_another_folder_are_named_by_it(self):
        with unittest.mock.patch.dict(os.environ, {"LLM8_BIN": self.folder}):
            said = call(functools.partial(environment.built, "train_gpt")).err
        self.assertIn(f"{self.folder}/train_gpt is not built", said)
        self.assertIn("LLM8_BIN", said)

    def test_lists_are_whole_at_any_time(self):
        """A write that fails half-way, as on a full disk, leaves the list of before."""
        experiment.write_list(self.folder, "x.json", ["a", "b"])
        with self.assertRaises(TypeError):
            experiment.write_list(self.folder, "x.json", ["c", {}, {1}])
        self.assertEqual(experiment.read_list(self.folder, "x.json"), ["a", "b"])

    def test_variants_and_seeds(self):
        for words in ("a: --x 1 --y=2", "a: '--x' 1 --y=2"):
            self.assertEqual(experiment.parse_variant(words), ("a", ["--x", "1", "--y=2"]))
        self.assertEqual(experiment.parse_variant("b:"), ("b", []))
        self.assertEqual(experiment.parse_seeds("1, 22,3"), ["1", "22", "3"])
        for read, wrong in (
                (experiment.parse_variant,
                 ("--bf16", "a b: --x", "a: x", "a: --x '", "a/b: --x", ": --x")),
                (experiment.parse_seeds, ("", "1,1", "1,,2", "x", "-1"))):
            for words in wrong:
                self.assertEqual(call(functools.partial(read, words)).status, 2, words)


if __name__ == "__main__":
    unittest.main()
