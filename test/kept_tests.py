"""What runs of a version have left in test/kept/VERSION (test/make_kept.py), the present program
reads, and computes from it what that version did."""

import glob
import json
import math
import os
import re
import shutil
import sys
import zlib

from check import ROOT, call, fails, main, read, records, run, write
from llm8 import compare, doctor, monitor, plot

# How far losses and norms may be apart, as parts of them. Threads changed nothing. Compilers' flags
# (AddressSanitizer's, no FMA, AVX2, AVX-512) changed them by 1e-6 at most. Where operands are
# rounded, such a difference may take one to the next code: this changed losses by up to 2e-5 and
# norms by 4e-4. A history of amax that is not read changes them by 4e-5 and 1e-3 at least.
FP32, ROUNDED = (2e-6, 2e-6), (3e-5, 8e-4)
FIELDS = {"step": ("step", "loss", "norm", "lr", "tokens", "skipped", "reason",
                   "targets"),
          "eval": ("step", "valid_loss"), "choices": ("step", "accuracy", "accuracy_norm")}
NORM = 3  # its place in numbers()
KEPT, HERE = os.path.join(ROOT, "test/kept"), os.getcwd()
VERSION = run("train_gpt", "--version").out.split()[-1]


def numbers(rows):
    return [[row["kind"], *map(row.get, FIELDS[row["kind"]])] for row in rows
            if row["kind"] in FIELDS]


def train(trainer, *words):
    run(trainer, *words, env={"LLM8_TEST_SMALL_FP8": "1"})


def resumed(trainer, name):
    """What four more steps of a run compute."""
    before = records(f"{name}/metrics.jsonl")
    train(trainer, "--config", f"{name}/config.txt", "--resume", "latest", "--train-iters",
          before[-1]["step"] + 4)
    after = records(f"{name}/metrics.jsonl")
    assert after[:len(before)] == before, f"{name}: its records are not continued"
    return numbers(after[len(before):])


def loaded(trainer, name):
    """What evaluations of a run's weights compute. 1.0 called the step of loaded weights 0."""
    train(trainer, "--config", f"{name}/config.txt", "--load", f"{name}/latest", "--eval-only",
          "--metrics", "loaded.jsonl")
    found = numbers(records("loaded.jsonl"))
    os.remove("loaded.jsonl")
    return [[kind, 0, *values] for kind, _, *values in found]


def options_of(trainer):
    """Every option, with its choices."""
    return {name: choices.strip("|").split("|") for name, choices in re.findall(
        r"--([a-z0-9-]+)\) COMPREPLY=\(\$\(compgen(?: -W '([^']*)')?",
        run(trainer, "--completion").out)}


def same(found, kept, apart):
    assert len(found) == len(kept), f"{found} instead of {kept}"
    for a, b in zip(found, kept):
        assert len(a) == len(b), f"{a} instead of {b}"
        for place, (x, y) in enumerate(zip(a, b)):
            limit = apart[a[0] == "step" and place == NORM]
            close = isinstance(y, float) and math.isclose(x, y, rel_tol=limit)
            assert close or x == y, f"{a} instead of {b}"


def check(reads, name, expected, apart):
    """A run is read, and gives the same; a wrong number, wherever it were, would be seen."""
    found, kept = reads(expected["trainer"], name), expected[reads.__name__]
    same(found, kept, apart)
    for row in found:
        for place, value in enumerate(row):
            if isinstance(value, (int, float)):
                row[place] = value * (1 + 2 * max(apart)) + (value == 0)
                assert fails(same, found, kept, apart), f"{row}, place {place}"
                row[place] = value


def all_kept(found, kept):
    for name, choices in kept.items():
        assert name in found, f"--{name} is gone"
        assert set(choices) <= set(found[name]), f"--{name}: {choices} were its choices"


def versions():
    """Goes into a copy of each version's folder; gives what is expected of it."""
    assert os.path.isdir(os.path.join(KEPT, VERSION)), f"no {VERSION}: test/make_kept.py makes it"
    for version in sorted(os.listdir(KEPT)):
        os.chdir(HERE)
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree(os.path.join(KEPT, version), "copy")
        os.chdir("copy")
        yield json.loads(read("expected.json"))
    os.chdir(HERE)


def runs():
    """Every version's runs whose trainer is here: name, what is expected, how far it may be off."""
    for expected in versions():
        for name, of_run in expected["runs"].items():
            precision = records(f"{name}/metrics.jsonl")[0]["precision"]
            if os.path.exists(os.path.join(ROOT, of_run["trainer"])):
                yield name, of_run, FP32 if precision == "FP32" else ROUNDED
            else:
                print(f"  skipped: {name}, as there is no {of_run['trainer']}")


def test_runs_are_read():
    for name, expected, apart in runs():
        check(loaded, name, expected, apart)
        check(resumed, name, expected, apart)


def test_options_are_taken():
    for expected in versions():
        all_kept(options_of("train_gpt"), expected["options"])
        for name in expected["runs"]:  # config.txt has them all, so that no later default counts
            start = records(f"{name}/metrics.jsonl")[0]
            given = re.findall(r"(?m)^([a-z0-9-]+) ", read(f"{name}/config.txt").decode())
            assert set(given) == {option for option, value in start["options"].items()
                                  if value and start["effects"][option] != "action"}, name
    fewer = options_of("train_gpt")
    fewer["arch"].pop()
    assert fails(all_kept, fewer, expected["options"]), "a choice that is gone is not seen"
    del fewer["arch"]
    assert fails(all_kept, fewer, expected["options"]), "an option that is gone is not seen"


def newest_step(folder):
    return max(glob.glob(f"{folder}/step_*"))


def test_changed_files_are_noticed():
    for expected in versions():
        step = newest_step("fp8")
        for path, place, reads in (
                ("data/train.bin", -1, resumed), ("data/val.bin", 1100, loaded),
                ("data/choices.bin", 16, loaded), ("data/tokenizer.bin", 1025, loaded),
                ("wide/train.bin.mask", 1030, resumed), ("wide/val.bin.mask", 1030, loaded),
                (f"{step}/model.safetensors", -1, loaded), (f"{step}/meta.json", 90, resumed),
                (f"{step}/optimizer-0-of-1.safetensors", -1, resumed),
                (f"{step}/scaling.safetensors", -1, resumed), ("fp8/metrics.jsonl", 2, resumed),
                ("fp8/config.txt", 0, resumed)):
            content = read(path)
            planted = bytearray(content)
            planted[place] ^= 1
            write(path, bytes(planted))
            name = "gpt2" if path.startswith("data/") else "fp8"
            assert fails(check, reads, name, expected["runs"][name], ROUNDED), f"{path}: not seen"
            write(path, content)
        check(resumed, "fp8", expected["runs"]["fp8"], ROUNDED)


def test_a_later_option_is_no_fault():
    """A model's option that came later is not in the checkpoint, and has its default."""
    for name, expected, apart in runs():
        path = os.path.join(newest_step(name), "meta.json")
        text, left_out = re.subn(rb'\t\t"logit-softcap":.*\n', b"", read(path))
        assert left_out == 1, name
        text = text[:-len(b'00000000"\n}')]
        write(path, text + b'%08x"\n}' % zlib.crc32(text + b'00000000"\n}'))
        check(loaded, name, expected, apart)
        said = run("train_gpt", "--load", f"{name}/latest", "--sample-only", "--sample-length",
                   1).err
        assert "does not set --logit-softcap: the default is used" in said, said


def scripts_read(folder):
    """Every script that reads metrics.jsonl must read this one."""
    report = call(lambda: sys.exit(doctor.main()), folder)
    assert report.status < 2 and "finished, step " in report.out, report.out + report.err
    for words in ((monitor.main, folder, "--once"), (plot.main, folder, "--out", "plot.svg")):
        found = call(*words)
        assert found.status == 0 and not found.err, f"{words}: {found.out}{found.err}"


def test_scripts_read_metrics():
    for expected in versions():
        for name in expected["runs"]:
            scripts_read(name)
        shutil.copytree("gpt2", "before")
        resumed("train_gpt", "gpt2")
        scripts_read("gpt2")
        pair = call(compare.main, "--report-only", "--out", "report", "--run", "a:before", "--run",
                    "b:gpt2")
        assert "time to loss" in pair.out and not pair.err, pair.out + pair.err
        for planted in read("before/metrics.jsonl").split(b"\n", 1):  # a start alone, or none
            write("before/metrics.jsonl", planted)
            assert fails(scripts_read, "before"), "a record that is missing is not seen"


if __name__ == "__main__":
    main()
