"""Runs what scripts/compare compares: variants of one training run, each with every seed, one after
the other.

Under the folder of the comparison, VARIANT/seed-N/ is the --save folder of a run, with console.log
and command.json (the trainer's arguments) beside what the trainer writes; variants.json has the
order of the variants, the baseline first. A run that has ended is not run again; one that was
stopped goes on from its newest checkpoint.
"""

import contextlib
import glob
import itertools
import json
import os
import re
from dataclasses import dataclass

from . import environment, trainer
from .command_line import shell_words
from .metrics import SKIPPED_TOO_OFTEN, STOPPED_BY_SIGNAL, open_run
from .text import from_json

DEFAULT_VARIANTS = ["bf16: --bf16", "fp8: --bf16 --fp8-format hybrid"]
# the trainer's options that compare itself sets -> what to give instead
OURS = {"seed": "--seeds before --", "save": "--out before --",
        "metrics": "--no-checkpoints before --", "resume": None}
COMMAND, VARIANTS = "command.json", "variants.json"


@dataclass
class Task:
    variant: str
    seed: str
    folder: str
    command: list # all that the run depends on; the options of where it writes are not in it

    @property
    def name(self):
        return f"{self.variant} seed {self.seed}"


def options_of(words):
    """Splits a command into texts of one option with its values. Leaves out the words before the
    first option, which only start the program."""
    words = itertools.dropwhile(lambda word: not word.startswith("--"), words)
    return re.split(" (?=--[a-z])", " ".join(words))


def split_name(text, option, what):
    name, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"\w[\w.+-]*", name):
        environment.die(f"{option} {text}: must be NAME:{what}, the name of letters, digits and "
                        "._+-, the first no ., + or -")
    return name, rest.strip()


def parse_variant(text):
    """Reads "NAME: OPTIONS", where the options are the trainer's."""
    name, rest = split_name(text, "--variant", "OPTIONS")
    words = shell_words(rest, f"--variant {text}")
    if words and not words[0].startswith("--"):
        environment.die(f"--variant {text}: options begin with --, as for the trainer")
    return name, words


def refuse_ours(words, where, ours=OURS):
    """Ends the program at an option of the trainer that the script itself sets."""
    for word in words:
        name = word.split("=")[0].removeprefix("--")
        if word.startswith("--") and (held := {name, name.removeprefix("no-")} & ours.keys()):
            use = ours[held.pop()]
            how = f"; use {use}" if use else ": this script sets it itself (--help)"
            environment.die(f"{where}: --{name} is not for the trainer here{how}")


def parse_seeds(text):
    seeds = [seed.strip() for seed in text.split(",")]
    if not all(re.fullmatch(r"\d+", seed) for seed in seeds) or len(set(seeds)) < len(seeds):
        environment.die(f"--seeds {text}: must be different whole numbers with commas between, "
                        "such as 1,2,3")
    return seeds


def make_tasks(program, variants, seeds, common, folder):
    """Lists the tasks seed by seed: a comparison that is stopped early has complete pairs."""
    refuse_ours(common, "after --")
    if len({name for name, _ in variants}) < len(variants):
        environment.die("--variant: each needs a name of its own")
    stronger = names_in(common)  # options that a variant's --config cannot set
    if "bf16" in stronger:
        stronger.add("fp8-format")
    for name, words in variants:
        refuse_ours(words, f"--variant {name}")
        if hidden := sorted(names_in_configs(words) & stronger):
            environment.warn(f"--variant {name}: what follows -- overrides its --config's "
                             + ", ".join(f"--{option}" for option in hidden))
    return [Task(name, seed, os.path.join(folder, name, f"seed-{seed}"),
                 [*program, "--keep", "1", *common, *own_words(words, common), "--seed", seed])
            for seed in seeds for name, words in variants]


def names_in_configs(words):
    """Returns the names of the options in the files of --config."""
    names = set()
    for word, value in zip(words, [*words[1:], ""]):
        path = value if word == "--config" else word.removeprefix("--config=")
        if path != word and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                names |= set(re.findall(r"(?m)^[ \t]*(?:--)?(?:no-)?([a-z][\w-]*)", file.read()))
    return names


def names_in(words):
    """Returns the names of the options among the words."""
    return {word.split("=")[0].removeprefix("--").removeprefix("no-") for word in words
            if word.startswith("--")}


def own_words(words, common):
    """Returns a variant's options. Its --bf16 turns off the --fp8-format of all variants, which it
    would not do on the trainer's command line: there the two may stand together."""
    turns_off = "--bf16" in words and "fp8-format" in names_in(common) - names_in(words)
    return words + ["--fp8-format", "none"] * turns_off


def read_list(folder, name):
    """Returns the list of words in a .json file; an empty list if there is no file."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            words = from_json(file.read())
    except FileNotFoundError:
        return []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        remedy = "remove it" if name != COMMAND else \
            "remove it to report on the run, its folder to run it anew"
        environment.die(f"{path}: damaged: not a list of words, as compare writes it; {remedy}")
    return words


def write_list(folder, name, words):
    environment.write_durably(os.path.join(folder, name), [json.dumps(words).encode()])


def changed_options(task):
    """Returns the options in which the task differs from the run in its folder."""
    now, before = map(options_of, (task.command, read_list(task.folder, COMMAND)))
    return [] if now == before else [option for option in now if option not in before] or \
        [option for option in before if option not in now] or ["their order"]


def prepare(task):
    """Makes the folder ready for the task; returns whether there is anything left to do."""
    run = open_run(task.folder)
    if run.starts and not read_list(task.folder, COMMAND):
        environment.die(f"{task.folder} has a run that this script did not make: another --out")
    if run.starts and (changed := changed_options(task)):
        environment.die(f"{task.folder} was run with other options ({' '.join(changed)} differs): "
                        "another --out, or remove that folder to run it anew")
    os.makedirs(task.folder, exist_ok=True)
    write_list(task.folder, COMMAND, task.command)
    return not run.over # a run that gave up on NaN would give up again


def refuse_bad(tasks):
    """Ends the program if the trainer refuses the options of a variant."""
    for task in [task for task in tasks if task.seed == tasks[0].seed]:
        plan, complaint = trainer.plan_of(task.command)
        if plan is None:
            environment.die(f"{task.variant}: {complaint}")


def run_all(tasks, folder, checkpoints, held):
    """Runs all tasks. checkpoints: whether the runs write them. held: the folder's lock. Returns 0,
    or 75 if a signal ended a run."""
    # all tasks are prepared before the first one starts, so that no refusal comes after hours
    left = [prepare(task) for task in tasks]
    # this command's variants come first; those of earlier commands follow in their order
    names = [task.variant for task in tasks] + read_list(folder, VARIANTS)
    write_list(folder, VARIANTS, list(dict.fromkeys(names)))
    with trainer.Signals() as signals:
        for number, (task, to_do) in enumerate(zip(tasks, left), 1):
            label = f"[{number}/{len(tasks)}] {task.name}"
            if not to_do:
                print(f"{label} | has ended already ({open_run(task.folder).state})", flush=True)
                continue
            where = ["--save", task.folder, "--resume", "latest"]
            if not checkpoints: # no folder for them, even if --config names one
                metrics = os.path.join(task.folder, "metrics.jsonl")
                with contextlib.suppress(FileNotFoundError):
                    os.remove(metrics)  # of a run that was stopped, which begins anew
                where = ["--save", "", "--resume", "", "--metrics", metrics]
            status = trainer.run_trainer([*task.command, *where], task.folder, label, signals,
                                         (held,))
            if status == STOPPED_BY_SIGNAL:
                print("stopped; the same command resumes here")
                return STOPPED_BY_SIGNAL
            if status not in (0, SKIPPED_TOO_OFTEN):
                how = f"status {status}" if status > 0 else f"signal {-status}"
                console = os.path.join(task.folder, "console.log")
                environment.die(f"{task.name}: the trainer ended with {how}: "
                                f"{trainer.last_error(console)} ({console})")
    return 0


def runs_under(folder):
    """Returns {variant: folders of its runs that have begun} in a folder that make_tasks has laid
    out. The variants have the order of the commands that ran them; variants without a known order
    are sorted by name."""
    found, order = {}, read_list(folder, VARIANTS)
    runs = [match.groups() for name in glob.glob("*/seed-*", root_dir=folder)
            if (match := re.fullmatch(r"(.+)/seed-(\d+)", name))]
    for variant, seed in sorted(runs, key=lambda run: (
            (order + [run[0]]).index(run[0]), run[0], int(run[1]))):
        path = os.path.join(folder, variant, f"seed-{seed}")
        if open_run(path).starts:
            found.setdefault(variant, []).append(path)
    return found
