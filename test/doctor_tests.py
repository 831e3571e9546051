"""scripts/doctor: what it says of runs that are well, and that it names each fault planted in
one."""

import json
import os
import shutil
import subprocess
import sys
import time
from unittest import mock

import numpy
from check import ROOT, STANDIN, call, lines, main, read, records, refused, run, says, write
from llm8 import doctor, metrics

COMMON = ("--model", "llama-tiny", "--data", "d/x_train.bin", "--valid-data", "d/x_val.bin",
          "--eval-interval", 20, "--eval-iters", 1, "--micro-batch-size", 2, "--lr-warmup-iters", 5,
          "--save-interval", 20)
FP8 = ("--bf16", "--fp8-format", "hybrid", "--fp8-stats-interval", 20)
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def train(folder, *options, steps=60, check=True):
    return run("train_gpt", *COMMON, "--train-iters", steps, *options, "--save", folder,
               check=check)


def planted(name, change, of="r/fp8"):
    """A copy of a run whose every record went through change(), which drops those it returns None
    for."""
    folder = f"planted/{name}/{name}"  # with nothing beside it
    shutil.rmtree(f"planted/{name}", ignore_errors=True)
    shutil.copytree(of, folder, symlinks=True)
    rows = map(change, records(f"{of}/metrics.jsonl"))
    write(f"{folder}/metrics.jsonl", lines(filter(None, rows)))
    return folder


def without(kind):
    return lambda record: None if record["kind"] == kind else record


def changed(kind, *changes, after=-1, before=10**9, **values):
    """What gives the records of a kind other values, of the steps after .. before - 1; a function
    among the changes is called with the record."""
    def change(record):
        if record["kind"] == kind and after < record["step"] < before:
            record = {**record, **values}
            for edit in changes:
                edit(record)
        return record
    return change


def more(name, amount):
    return lambda record: record.update({name: record[name] + amount})


def options(**changes):
    return lambda record: record["options"].update(
        {key.replace("_", "-"): text for key, text in changes.items()})


def in_bf16(record):
    for row in record["linear_layers"]:
        row.update(x="BF16", w="BF16", dy="BF16", wgrad="BF16", reason="no FP8 before 9.0")


def half_lost(what, recipe="delayed", layers="6"):
    """Half of a tensor's codes are of that kind."""
    def change(record):
        if record["kind"] == "fp8":
            counts = record["tensors"]["blocks.1.fc1.dy"]
            counts[what] = counts["elements"] // 2
        return changed("run", options(fp8_recipe=recipe, num_layers=layers))(record)
    return change


def on_gpu(rate=None, **changes):
    """A record as a run on an H200 has it; flops_per_token x rate are its FLOP/s."""
    def change(record):
        if record["kind"] == "run":
            record.update(device="NVIDIA H200, 132 multiprocessors", peak_flops=989e12,
                          ranks=int(changes.get("gpus", 1)))
            options(**changes)(record)
        if record["kind"] == "step":
            record["tokens_per_s"] = rate / 786432 if rate else record["tokens_per_s"]
            record["seconds"] = 0.1
        if record["kind"] == "eval":
            record["seconds"] = 0.01
        return record
    return change


def said(folder, *words):
    """Exit status and report, without its line breaks."""
    result = call(lambda: sys.exit(doctor.main()), folder, *words)
    assert not result.err, result.err
    return result.status, " ".join(result.out.split())


def expect(folder, status, *parts, words=()):
    got, text = said(folder, *words)
    assert got == status, f"{folder}: status {got}, not {status}\n{text}"
    says(text, *parts)
    return text


def prepare():
    rng = numpy.random.default_rng(1)
    words = "Anna Ben Clara David sees finds draws counts three seven red blue apples".split()
    write("text", "\n".join(" ".join(rng.choice(words, 8)) for _ in range(1500)))
    run("tokenize", "--output-prefix", "d/x", "text")
    train("r/fp8", *FP8)
    train("r/bf16", "--bf16")


# ---- runs that are well ------------------------------------------------------------------------


def test_a_run_that_is_well():
    text = expect("r/fp8", 0, "finished, step 60 of 60", "none was skipped",
                  "FP8, delayed scaling, in 80.0% of the linear layers' operations",
                  "head in BF16: --fp8-lm-head not given", "of 24 tensors at step 60",
                  "7,680 tokens in 60 steps, none left out",
                  "0 wrong")
    assert "WRONG" not in text
    expect("r/bf16", 0, "BF16; FP8 is not requested", "0 wrong")
    brief = expect("r/bf16", 0, "0 wrong, 0 to note", words=("--brief",))
    assert "finished" not in brief
    for columns in 60, 40:
        as_program = run("scripts/doctor", "r/fp8", env={"COLUMNS": str(columns)})
        assert "0 wrong" in as_program.out
        long = [line for line in as_program.out.splitlines() if len(line) > columns]
        assert all(len(line.split()) == 1 for line in long), as_program.out # only words are longer


def test_resumed_runs_are_one_run():
    shutil.copytree("r/fp8", "r/again/x", symlinks=True)
    train("r/again/x", *FP8, "--resume", "r/again/x/step_00000040")
    expect("r/again/x", 0, "at step 40, with the same options and data",
           "steps 41 to 60 were done again, with the same losses to the last bit")


def test_ranks_may_change():
    """The GPU trainer as ranks, over the stand-ins."""
    words = (*COMMON, "--global-batch-size", 12, "--train-iters", 30, "--save", "r/ranks/x",
             "--seq-length", 32, "--no-cuda-graphs")
    run(STANDIN, *words, "--gpus", 2)
    run(STANDIN, *words, "--gpus", 3, "--resume", "r/ranks/x/step_00000020")
    expect("r/ranks/x", 0, "at step 20, on 3 ranks instead of 2, with the same options and data",
           "0 wrong, ")


def test_slow_ranks_are_named():
    """By the clock of the stand-ins; and a rank that is slow at half of the lines alone, or at few
    lines, is not."""
    for slow in (1, 7):
        run(STANDIN, *COMMON, "--global-batch-size", 12, "--train-iters", 40,
            "--save", f"r/slow{slow}/x", "--seq-length", 32, "--no-cuda-graphs", "--gpus", 3,
            "--log-interval", 4, env={"SLOW_RANK": str(slow)})
    expect("r/slow1/x", 1, "WRONG speed", "rank 1 on ", "at 10 of the last 10 lines",
           "-> look at that GPU's clocks")
    assert "rank 1" not in expect("r/slow7/x", 0, "0 wrong")
    half = changed("ranks", lambda record: record.pop("slowest"), before=21)
    four_lines = changed("ranks", dict.clear, after=16)
    for name, change in (("half", half), ("four", four_lines)):
        assert "rank 1" not in expect(planted(name, change, "r/slow1/x"), 0, "0 wrong")


# ---- faults in how it went ---------------------------------------------------------------------


# the run, its fault, the exit status, what the doctor prints
PLANTED = (
    ("r/fp8", changed("end", status=1), 1, "failed with status 1"),
    ("r/fp8", changed("end", status=5, error="step 4: x computes wrongly"), 1,
     "error: step 4: x computes wrongly, step 60", "-> take that GPU out of use"),
    ("r/fp8", changed("end", status=1, error="no room"), 1, "error: no room, step"),
    ("r/fp8", changed("end", status=75), 0, "note state", "stopped by a signal"),
    # saves
    ("r/bf16", changed("save", after=59, error="no room"), 1, "WRONG checkpoints 1 of 3 failed, "
     "the last one after step 60: no room; what was learned since", "-> make room on the disk"),
    ("r/bf16", changed("save", before=21, error="no room"), 0, "note checkpoints 1 of 3 failed, "
     "the last one after step 20: no room", "0 wrong, 1 to note"),
    # skips
    ("r/bf16", changed("step", before=2, skipped=1, loss=None, nonfinite=True), 1,
     "1 of 60 were skipped, 1 for a NaN or infinite loss or norm, the last one step 1",
     "-> a lower --lr or a longer --lr-warmup-iters"),
    ("r/bf16", lambda record: changed("run", options(clip_grad="0"))(record) and changed(
        "step", before=2, skipped=1, loss=None)(record), 1, "-> a lower --lr, a longer "
     "--lr-warmup-iters, or --clip-grad 1"),
    ("r/bf16", changed("step", before=2, skipped=1, reason="spike"), 1,
     "1 of 60 were skipped, 1 for a spike of loss or norm (--skip-spikes 0), the last one step 1",
     "-> a lower --lr or a longer --lr-warmup-iters; or a larger --skip-spikes"),
    ("r/bf16", changed("step", lambda record: record.update(
        skipped=1, reason="spike" if record["step"] % 2 else "nonfinite"), before=5), 1,
     "4 of 60 were skipped, 2 for a NaN or infinite loss or norm and 2 for a spike"),
    ("r/bf16", changed("step", before=5, skipped=1, reason="requested"), 0,
     "only those were skipped that --iterations-to-skip names, 4 of 60"),
    # losses and learning rates
    ("r/fp8", changed("step", more("loss", 1), after=40), 1, "WRONG loss", "it rises",
     "-> the same command with --resume planted/fault/fault/step_00000020, with a lower --lr ok"),
    ("r/fp8", lambda record: changed("step", more("loss", 1), after=40)(changed(
        "run", options(min_lr="1e-5"))(record)), 1, "with a lower --lr or --min-lr ok"),
    ("r/fp8", changed("step", loss=6.0), 1, "no better than guessing, 5.5491",
     "-> a lower --lr, or a longer --lr-warmup-iters; is --data text"),
    ("r/fp8", changed("run", options(load="/start")), 0, "note loss it began at 5.",
     "the weights of --load do not know these data", "-> prepare --data with the tokenizer"),
    ("r/fp8", changed("step", lr=0), 1, "WRONG learning rate it is 0: nothing is learned",
     "--lr 0.002"),
    ("r/fp8", changed("step", lr=0, after=40), 1, "it is 0 from step 41 on: 20 steps",
     "--lr-decay-iters"),
    ("r/fp8", changed("step", lr=0, after=59), 0, "ok learning rate"),
    ("r/fp8", changed("run", options(lr="1e-06")), 1, "its peak of 1e-06 is far too small",
     "--lr 0.002"),
    ("r/fp8", lambda record: changed("run", options(load="/start"))(record) and changed(
        "step", lr=0)(record), 1, "-> --lr 1e-5 is usual for fine-tuning"),
    ("r/fp8", changed("run", options(lr="1e-06", load="/start")), 0,
     "ok learning rate up to 1e-06"),
    # precision
    ("r/fp8", changed("run", in_bf16, fp8_flops_share=0), 1,
     "no layer is in FP8: no FP8 before 9.0", "--fp8-required"),
    ("r/fp8", half_lost("largest"), 1, "blocks.1.fc1.dy: 50% of its codes are the largest at "
     "step 60", "--fp8-margin 1"),
    ("r/fp8", lambda record: half_lost("largest")(record) and changed("run", options(**{
        "fp8-margin": "1", "first-last-layers-bf16": "true"}))(record), 1,
     "-> --fp8-margin 2, --fp8-recipe tensorwise or blockwise, or a larger --num-layers-at-start"),
    ("r/fp8", half_lost("zero"), 1, "blocks.1.fc1.dy: 50% of its codes are zero",
     "--fp8-amax-history-len", "--fp8-recipe tensorwise or blockwise, or --first"),
    ("r/fp8", half_lost("zero", "tensorwise"), 1, "are zero",
     "-> --fp8-recipe blockwise, or --first-last-layers-bf16"),
    ("r/fp8", half_lost("zero", "blockwise"), 1, "are zero", "-> --first-last-layers-bf16"),
    ("r/fp8", half_lost("zero", "blockwise", "2"), 1, "are zero", "-> --bf16"),
    ("r/fp8", lambda record: half_lost("zero")(record) and changed("run", options(**{
        "fp8-margin": "20"}))(record), 1, "-> --fp8-margin 0, --fp8-recipe tensorwise or"),
    ("r/fp8", without("fp8"), 0, "ok FP8 range", "--fp8-stats-interval 100"),
    # config.txt says which options were given
    ("r/fp8", changed("step", norm=200), 0, "note gradient norm", "-> a lower --lr"),
    # records
    ("r/fp8", changed("step", dict.clear, after=29, before=33), 0,
     "the records of 3 steps are missing", "disk full"),
    ("r/fp8", changed("step", more("tokens", 64), after=30), 1, "step 31 went 192 tokens on, not "
     "128"),
)


def test_each_fault_is_named():
    for of, fault, status, *parts in PLANTED:
        expect(planted("fault", fault, of), status, *parts)


def test_given_options_are_known():
    folder = planted("given", changed("step", norm=200))
    write(f"{folder}/config.txt", b"init-method-std 0.5\n")
    expect(folder, 0, "-> --init-method-std 0 (it follows from the width), a lower")
    os.remove(f"{folder}/config.txt")
    expect(folder, 0, "-> --init-method-std 0 (it follows from the width) if another is given, a")


def test_ends_are_named():
    folder = planted("killed", without("end"))
    expect(folder, 1, "WRONG state", "no process holds its folder: it was killed, or another "
           "rank was lost", "-> read the end of its standard error", "--resume latest")
    for fault in without("end"), changed("end", status=75, step=40), changed("end", status=3):
        text = said(planted("unsaved", lambda record, fault=fault: changed("run", options(save=""))(
            record) and fault(record)), "--brief")[1]
        assert "start it anew" in text and "--resume" not in text, text
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, f"{folder}/.lock"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    expect(folder, 0, "running, step 60 of 60")
    long_ago = time.time() - 3600
    os.utime(f"{folder}/metrics.jsonl", (long_ago, long_ago))
    expect(folder, 1, "WRONG state", "has written nothing for 1 h 00", "--resume latest")
    holder.communicate()
    train("r/nan/x", "--bf16", "--lr", 100, "--clip-grad", 0, "--max-skipped", 5, check=False)
    expect("r/nan/x", 1, "gave up: step after step was skipped", "-> r/nan/x has no checkpoint "
           "from before that: start it anew, in another --save, changed as for the steps below")
    late = planted("late", lambda record: changed("end", status=3)(changed(
        "step", after=50, skipped=1, reason="nonfinite")(record)), "r/bf16")
    os.mkdir(f"{late}/step_45") # no checkpoint has this name
    expect(late, 1, "-> the same command with --resume planted/late/late/step_00000040, changed as",
           "-> a lower --lr or a longer")
    # it diverged before the first NaN
    shutil.copytree(late, "r/diverged/x", symlinks=True)
    early = planted("early", changed("step", more("loss", 9), after=30, before=51), "r/diverged/x")
    expect(early, 1, "-> the same command with --resume planted/early/early/step_00000020, changed")
    going_on = planted("unended", lambda record: record["kind"] != "end" and changed(
        "save", after=59, error="no room")(record), "r/bf16")
    os.remove(f"{going_on}/.lock") # else nobody holds it: it died
    state = metrics.state_of(metrics.open_run(going_on))
    assert state == "running, the save of step 60 failed", state


def run_of(losses, skipped=()):
    """A run with these losses, some of whose steps were skipped."""
    run = metrics.Run("nowhere")
    run.starts = [{"step": 0, "options": {"vocab-size": "50257"}}]
    run.steps = {step: {"loss": loss, "skipped": step in skipped}
                 for step, loss in enumerate(losses, 1)}
    return run


CALM = [3.0, 3.1] * 40
JUMPS = CALM[:2] + [30.0] + CALM[3:29] + [9.0] + CALM[30:]
LATE_SPIKES = [2.0] * 41 + [9.0] * 4 + [2.0] * 10 + [9.0] * 5
# losses, the steps that were skipped, the level of what the doctor says, and a part of it
LOSSES = (
    # the mean of steps 31 to 40 is the one of step 35, also where steps were skipped
    ([5.0] * 30 + [2.0] * 10 + [5.0] * 40, (), "WRONG", "it was 2.0000 at step 35: it rises"),
    ([None] * 5 + [5.0] * 25 + [2.0] * 10 + [5.0] * 40, (), "WRONG", "2.0000 at step 35: it rises"),
    (LATE_SPIKES, (*range(42, 46), *range(56, 61)), "ok", "the lowest so far 2.0000"),
    (LATE_SPIKES, (), "WRONG", "it rises"),
    # a note where the loss came back; at first any loss may jump
    (JUMPS, (), "note", "1 step spiked, up to 9.0000 at step 30, from 3.0000"),
    (CALM[:30] + [9.0] * 50, (), "WRONG", "it rises"),
    # guessing pays 10.8
    ([30.0] * 20, (), "WRONG", "no better than guessing, 10.8249"),
    ([10.8] * 60, (), "WRONG", "hardly better than guessing"), # random tokens
    ([10.5] * 60, (), "ok", "the lowest so far"),
    ([12.0] * 20, (), "ok", "too few to judge"),
    ([9.0] * 20, (), "ok", "too few to judge: 20 of 50"),
)


def test_losses_are_judged():
    for losses, skipped, level, text in LOSSES:
        found = doctor.losses(run_of(losses, skipped))
        assert found.level == level and text in found.text, (losses, skipped, found)
    run = run_of(JUMPS)
    assert doctor.losses(run).remedy.startswith("--init-method-std 0 "), doctor.losses(run)
    run.start["options"]["load"] = "/start"
    assert doctor.losses(run).remedy.startswith("a lower --lr"), doctor.losses(run)
    run = run_of([10.8] * 60)
    assert doctor.losses(run).remedy.startswith("another --lr; "), doctor.losses(run)
    run.start["options"]["lr-warmup-iters"] = "100" # the rate is still small
    assert doctor.losses(run).level == "ok", doctor.losses(run)
    assert not list(doctor.start(run))
    run.start["options"]["load"] = "/start"
    found, = doctor.start(run)
    assert found.level == "note" and "it began at 10.8" in found.text, found
    assert not list(doctor.start(run_of(CALM)))
    run = run_of([10.8] * 60, range(1, 6))
    run.start["options"]["load"] = "/start"
    assert not list(doctor.start(run)) # its first losses are missing
    # step 4 is the last good one, and its loss is that of the weights after step 3
    assert doctor.last_good(run_of([5.0, 4.0, 3.0, 3.4, 3.6, 9.0])) == 3


def recorded():
    """Yields for each run in doctor_runs.jsonl: its kind, its options, and the findings.

    They are runs of the CPU trainer over the corpus of make_corpus (c), this repository's Python
    (py) or pages (prose), or 6 kB of that corpus (small). Sick are those of too narrow initial
    weights, too large rates or no warm-up whose loss went above that of guessing after step 5, or
    whose norm went above 100. Losses are in hundredths of a nat; of the norms the largest is there.
    """
    for line in read(f"{ROOT}/test/doctor_runs.jsonl").splitlines():
        row = json.loads(line)
        run = run_of([int(loss) / 100 for loss in row["losses"].split()])
        run.starts[0]["options"]["vocab-size"] = "257"
        for step, record in run.steps.items():
            record["norm"] = row["norm"][1] if step == row["norm"][0] else 1.0
        run.evals = {step: {"valid_loss": loss} for step, loss in row["valid"]}
        found = [doctor.losses(run), *doctor.norms(run), *doctor.validation(run)]
        # its folder, nowhere, has no checkpoint to take
        assert not any(one.remedy.startswith("take") for one in found if one.remedy), found
        yield row["kind"], row["options"], {one.about for one in found if one.level != "ok"}


def test_recorded_runs_are_told_apart():
    """No healthy one is called sick. One that is sick is missed: it spikes by less than noise."""
    rows, missed = list(recorded()), []
    for kind, words, found in rows:
        if kind == "sick" and not found:
            missed.append(words)
        expected = {"healthy": set(), "overfitted": {"validation"}}.get(kind, found)
        assert found == expected, (kind, words, found)
    count = {kind: sum(row[0] == kind for row in rows) for kind in ("sick", "healthy")}
    assert count == {"sick": 28, "healthy": 76}, count
    assert len(missed) == 1 and "--clip-grad 0 --lr 0.1" in missed[0], missed
    with mock.patch.multiple(doctor, SPIKE=1.2, SPIKE_NOISES=3):
        assert any(found for kind, _, found in recorded() if kind == "healthy")


def test_noise_is_no_rise():
    """Losses that fall, or have fallen, over few steps of little data; and rises in losses with as
    much noise, which are found if they are large compared with it, also after a spike."""
    rng = numpy.random.default_rng(1)
    place = numpy.arange(150) / 150
    for noise in (0.03, 0.1, 0.3, 0.6):
        for shape in (3 - 2 * place, 1 + 2 * numpy.exp(-5 * place), 2 + 0 * place):
            found = [doctor.losses(run_of(shape + rng.normal(0, noise, 150)))
                     for _ in range(40)]
            assert all(one.level == "ok" for one in found), (noise, found)
        rise = numpy.where(place < 0.6, 3 - 3 * place, 1.2 + 0.3 + 4 * noise)
        rise[80] = 30
        found = [doctor.losses(run_of(rise + rng.normal(0, noise, 150))) for _ in range(40)]
        assert all("it rises" in one.text for one in found), (noise, found)


def test_models_are_named_by_their_shape():
    run("train_gpt", *COMMON, "--num-layers", 1, "--vocab-size", 5000, "--train-iters", 2, "--save",
        "r/large/x")
    expect("r/large/x", 0, "llama, 1 layers x 64,", "note vocabulary the model's has 5,000 tokens, "
           "the tokenizer's 257", "-> --vocab-size 257, in a new run")
    loaded = planted("loaded", changed("run", options(load="/start")), "r/large/x")
    assert "else prepare --data with" in said(loaded)[1].lower(), said(loaded)
    assert "vocabulary" not in said("r/fp8")[1]


# ---- faults in precision -----------------------------------------------------------------------


def test_fp8_that_is_not_on():
    train("r/odd/x", *FP8, "--seq-length", 40, "--max-position-embeddings", 40, steps=3)
    expect("r/odd/x", 1, "WRONG precision", "no layer is in FP8: --seq-length is not a multiple "
           "of 16", "-> make --seq-length, --hidden-size,")
    train("r/part/x", *FP8, "--ffn-hidden-size", 100, steps=3)
    expect("r/part/x", 0, "note precision", "fc1 of blocks 0-1 in BF16, fc2 of blocks 0-1 in BF16: "
           "a side is not a multiple of 16", "--ffn-hidden-size")


# ---- faults in resumes -------------------------------------------------------------------------


def test_resumes_that_change_the_run():
    def resumed(name, *options):
        folder = planted(name, lambda r: r)
        train(folder, *FP8, *options, "--resume", f"{folder}/step_00000040")
        return folder
    expect(resumed("reseeded", "--seed", 5), 1, "WRONG resume at step 40 the data come in another "
           "order", "--seed 1234 became 5")
    # what was to be done: once more from that step without them
    train("planted/reseeded/reseeded", *FP8, "--resume", "planted/reseeded/reseeded/step_00000040")
    text = expect("planted/reseeded/reseeded", 0, "ok resume at step 40, with the same options",
                  "of steps 41 to 60, which were done again, 20 have another loss")
    assert text.count("at step 40") == 1, text
    expect(resumed("relearned", "--lr", "1e-3", "--lock-timeout", 5, "--sample-prompt", "A",
                   "--clip-grad", 2), 0,
           "note resume at step 40: --lr 0.0006 became 0.001, --clip-grad 1 became 2 -> if this "
           "was not meant, the same command with --resume planted/relearned/relearned/step_00000040"
           ", without them",
           "of steps 41 to 60, which were done again", "that is expected: device, program, ranks "
           "or options changed")

    expect(resumed("slower", "--lr", "1e-4"), 0, "ok learning rate up to 0.0006")

    shutil.copytree("d", "moved", dirs_exist_ok=True)
    expect(resumed("elsewhere", "--data", "moved/x_train.bin"), 0,
           "note resume at step 40: --data d/x_train.bin became moved/x_train.bin")
    expect(resumed("replaced", "--data", "moved/x_val.bin", "--accept-data-change"), 1,
           "WRONG resume at step 40 the data come in another order", "became moved/x_val.bin")

    fewer = changed("run", data_crc32="0", after=39)
    expect(planted("fewer", fewer, "r/again/x"), 1, "come in another order from there on: "
           "--data is of other shards")
    leap = changed("step", more("loss", 1), after=40)
    expect(planted("leap", leap, "r/again/x"), 1, "WRONG loss", "the same losses to the last bit")
    folder = planted("differ", changed("end", time=1, step=40), "r/again/x")
    rows = records(f"{folder}/metrics.jsonl")
    [row for row in rows if row["kind"] == "step" and row["step"] == 50][-1]["loss"] += 1e-6
    write(f"{folder}/metrics.jsonl", lines(rows))
    expect(folder, 1, "1 have another loss, first step 50", "--verify")
    loose = options(deterministic="false")
    expect(planted("loose", changed("run", loose), folder), 1, "first step 50", "--verify")
    loose_gpu = planted("loose_gpu", lambda record: changed("run", loose)(on_gpu()(record)), folder)
    assert "that is expected with --no-deterministic" in said(loose_gpu)[1], said(loose_gpu)


def test_every_repeat_is_compared():
    """Steps 1 to 3; steps 2 and 3 again, with another loss; once more with that one, or killed
    before it."""
    head = {**records("r/bf16/metrics.jsonl")[0], "step": 0}

    def rows(*losses):
        return [{"kind": "step", "step": step, "loss": loss} for step, loss in losses]
    parts = [[head, *rows((1, 4.0), (2, 3.0), (3, 2.0))]]
    parts += 2 * [[{**head, "step": 1}, *rows((2, 3.0), (3, 2.5))]]
    repeats = sum(parts, [])
    for held in (repeats, repeats[:-1]):
        write("thrice/metrics.jsonl", lines(held))
        found, = doctor.done_again(metrics.open_run("thrice"))
        assert found.level == "WRONG" and found.text == (
            "of steps 2 to 3, which were done again, 1 have another loss, first step 3: 2.000000, "
            "then 2.500000"), found


# ---- what costs speed --------------------------------------------------------------------------


def test_options_that_cost_are_named():
    def costs(of="r/fp8", **changes):
        return expect(planted("costs", on_gpu(7e14, **changes), of),
                      int("global_batch_size" in changes)) # the tokens do not fit another batch
    assert "0 to note" in costs() # a healthy FP8 run by default options
    text = costs()
    assert "ok speed" in text and "700 TFLOP/s a GPU, MFU 70.8%" in text, text
    assert all(part not in text for part in ("travel", "micro-batch")), text
    assert "FP8 is not used" in costs("r/bf16")
    for changes, part in (
            ({"global_batch_size": "64"}, "a step is 32 micro-batches of 2 x 64 tokens"),
            ({"fp8_fast_accumulation": "none"}, "exact accumulation is forced"),
            ({"gpus": "2", "global_batch_size": "8"}, "travel between the GPUs in FP32")):
        assert part in costs(**changes), f"{changes}: no {part}"
    assert "-> --fp8-fast-accumulation forward" in costs(fp8_fast_accumulation="none")
    blockwise = costs(fp8_recipe="blockwise", fp8_fast_accumulation="none")
    assert "is forced" not in blockwise, blockwise


def test_bad_words_are_refused():
    refused(call(doctor.main, "nowhere"), "nowhere: no such run", "--save")
    refused(call(doctor.main, "r/fp8", "--loud"), "--loud", "scripts/doctor --help")
    write("empty/metrics.jsonl", "")
    refused(call(doctor.main, "empty"), "no record of a run's start")


if __name__ == "__main__":
    prepare()
    main()
