#!/usr/bin/env python3
"""Kills training runs at random moments, resumes them, and checks that each ends bit for bit as the
uninterrupted run does. Needs the programs alone: no compiler, no packages.

    kills.py [--kills 1000] [--jobs CORES] [--steps 40] [--seed N] [--bin FOLDER]
             [--kinds cpu,cpu-fp8,elsewhere,rank,launcher] [--plant order|damage]

--bin: where train_gpt and standin_trainer are; otherwise those of this tree. --plant: a fault that
must be found: one resume with another order of the data, or one bit of a checkpoint flipped.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACES = ["starting", "training", "saving", "pruning"]
COMMON = ["--data", "train.bin", "--valid-data", "valid.bin", "--eval-interval", "3",
          "--eval-iters", "2", "--lr", "3e-3", "--log-interval", "1"]
CPU = "train_gpt --model llama-tiny --micro-batch-size 2"
RANKS = ("standin_trainer --model llama-tiny --micro-batch-size 2 --global-batch-size 12 "
         "--seq-length 32 --no-cuda-graphs --distributed-timeout 60")
FP8 = "--fp8-format hybrid --fp8-amax-history-len 7"
KINDS = {
    "cpu": f"{CPU} --save-interval 1 --keep 2 --reset-attention-mask --eod-mask-loss",
    "cpu-fp8": f"{CPU} {FP8} --save-interval 3 --keep 1",
    "elsewhere": f"{CPU} --save-interval 15 --keep 1",  # begins at another run's checkpoint
    "rank": f"{RANKS} --gpus 3 --save-interval 1 --keep 1",
    "launcher": f"{RANKS} {FP8} --gpus 2 --save-interval 2 --keep 0",
}
NOT_COMPARED = ["created", "options", "files", "crc32"]  # fields of meta.json with times and paths


def write_shard(path, tokens, seed):
    numbers = random.Random(seed)
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        texts = [numbers.choice([*b"aeinorst .\n", 256]) for _ in range(tokens)]
        file.write(struct.pack(f"<{tokens}H", *texts))


def program(name, folder):
    places = [folder] if folder else [ROOT, ROOT / "build" / "plain"]
    found = [place / name for place in places if (place / name).exists()]
    return str(found[0]) if found else None


def processes():
    """Returns (id, parent's id, session's id) of each process; zombies are left out."""
    for entry in os.listdir("/proc"):
        try:
            fields = open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if entry.isdigit() and fields[0] != "Z":
            yield int(entry), int(fields[1]), int(fields[3])


class Kind:
    def __init__(self, name, command, folder):
        self.name, self.command, self.folder = name, command, folder
        self.counts = dict.fromkeys(PLACES, 0)
        self.runs = 0
        self.origin = None
        if name == "elsewhere":
            leg = self.start(folder / "origin", ["--train-iters", "5"])
            leg.wait()
            self.origin = leg.save.name + "/step_00000005"
        begin = time.monotonic()
        leg = self.start(folder / (name + ".whole"), [])
        while b"\nstep " not in leg.log.read_bytes() and leg.poll() is None:
            time.sleep(0.001)
        self.start_seconds = time.monotonic() - begin
        leg.wait()
        self.seconds = time.monotonic() - begin
        if leg.returncode != 0:
            sys.exit(f"error: {name}: {leg.log.read_text()[-400:]}")
        self.end = self.result(leg.save)

    def start(self, save, options):
        log = save.with_name(save.name + ".log")
        begun = self.origin is None or (save / "config.txt").exists()
        with open(log, "wb") as out:
            leg = subprocess.Popen(
                [*self.command, *COMMON, "--save", save.name, "--resume",
                 "latest" if begun else self.origin, *options],
                cwd=self.folder, stdout=out, stderr=out, start_new_session=True)
        leg.log, leg.save = log, save
        return leg

    def result(self, save):
        """All that must not depend on interruptions."""
        result = {}
        for path in sorted(save.rglob("*")):
            name = str(path.relative_to(save))
            if path.is_symlink():
                result[name] = os.readlink(path)
            elif path.name == "meta.json":
                meta = json.loads(path.read_text())
                result[name] = {f: meta[f] for f in meta if f not in NOT_COMPARED}
            elif path.is_file() and path.name not in ("metrics.jsonl", "config.txt", ".lock"):
                result[name] = path.read_bytes()
        for line in (save / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["kind"] in ("step", "eval"):
                name = f"metrics.jsonl, {record['kind']} {record['step']}"
                values = [record.get(field) for field in ("loss", "norm", "lr", "valid_loss")]
                if result.setdefault(name, values) != values:
                    raise ValueError(f"{name}: {values}, and before {result[name]}")
        return result

    def await_moment(self, leg, numbers):
        """Sleeps until a random moment, mostly one of a random place."""
        place = numbers.choice(PLACES)
        starting = place == "starting"
        until = time.monotonic() + numbers.uniform(
            0, self.start_seconds if starting else self.seconds / 3)
        while time.monotonic() < until and leg.poll() is None:
            time.sleep(0.001)
        sign = {"saving": ".tmp-step", "pruning": ".old-step"}.get(place)
        until = time.monotonic() + self.seconds / 2
        while sign and leg.poll() is None and time.monotonic() < until:
            if leg.save.exists() and any(n.startswith(sign) for n in os.listdir(leg.save)):
                time.sleep(numbers.choice([0, 0, numbers.uniform(0, 0.005)]))
                break

    def kill(self, leg, numbers):
        """Returns where the kill hit, or None: the run had ended."""
        victim = leg.pid
        if self.name == "rank":
            ranks = [pid for pid, parent, _ in processes() if parent == leg.pid]
            if not ranks:
                return None
            victim = numbers.choice(ranks)
        if leg.poll() is None:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass
        leg.wait()
        if leg.returncode not in (-9, 137):
            return None
        names = " ".join(os.listdir(leg.save)) if leg.save.exists() else ""
        if ".old-step" in names:
            return "pruning"
        if ".tmp-step" in names:
            return "saving"
        return "training" if b"\nstep " in leg.log.read_bytes() else "starting"

    def run(self, number, seed, plant, on_kill):
        """One run, to its end. Returns what is wrong with it, or None."""
        numbers = random.Random(f"{seed} {self.name} {number}")
        save = self.folder / f"{self.name}.{number}"
        legs = 0
        while True:
            other_order = plant == "order" and legs == 2
            leg = self.start(save, ["--seed", "7"] if other_order else [])
            legs += 1
            self.await_moment(leg, numbers)
            place = self.kill(leg, numbers) if legs < 30 else None
            status = leg.wait()
            until = time.monotonic() + 10
            while any(session == leg.pid for _, _, session in processes()):
                if time.monotonic() > until:
                    return f"{save}: processes are left"
                time.sleep(0.005)
            said = [line for line in leg.log.read_text(errors="replace").splitlines()
                    if "warning:" in line and "in use by another run" not in line
                    and "the learning rate rises" not in line]  # its origin was planned shorter
            if said:
                return f"{save}: {said[0]}"
            if place is None and status == 0:
                break
            if place is None:
                return f"{save}: status {status}: {leg.log.read_text(errors='replace')[-400:]}"
            on_kill(self, place)
            if plant == "damage" and (save / "latest").exists():
                path = save / "latest" / "model.safetensors"
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        try:
            end = self.result(save)
        except ValueError as error:
            return f"{save}: {error}"
        # a kill between the last save and its pruning leaves one checkpoint more
        differing = [n for n in sorted({*end, *self.end}) if end.get(n) != self.end.get(n)
                     and (n in self.end or not n.startswith("step_"))]
        if differing:
            return f"{save}: another end: {', '.join(differing[:4])} ({len(differing)} differ)"
        self.runs += 1
        shutil.rmtree(save)
        leg.log.unlink()
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bin", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--plant", choices=["order", "damage"])
    options = parser.parse_args()
    libraries = [ROOT / "build" / "standin", options.bin or ROOT, os.environ.get("LD_LIBRARY_PATH")]
    os.environ.update(OMP_NUM_THREADS="1", LLM8_TEST_SMALL_FP8="1",
                      LD_LIBRARY_PATH=":".join(str(p) for p in libraries if p))
    COMMON.extend(["--train-iters", str(options.steps)])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kills."))
    write_shard(folder / "train.bin", 1500, 1)
    write_shard(folder / "valid.bin", 700, 2)
    kinds = []
    for name in options.kinds.split(","):
        words = KINDS[name].split()
        path = program(words[0], options.bin)
        if path is None:
            print(f"skipped: {name}: no {words[0]}")
        else:
            kinds.append(Kind(name, [path, *words[1:]], folder))
    begin, wrong, lock = time.monotonic(), [], threading.Lock()
    started = dict.fromkeys(kinds, 0)

    def killed(kind, place):
        with lock:
            kind.counts[place] += 1

    def work():
        while True:
            with lock:  # the kind with the fewest kills
                kind = min(kinds, key=lambda k: (sum(k.counts.values()), started[k]))
                done = sum(sum(k.counts.values()) for k in kinds)
                if done >= options.kills or wrong:
                    return
                started[kind] += 1
                number = started[kind]
            error = kind.run(number, options.seed, options.plant, killed)
            if error:
                wrong.append(error)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for job in [pool.submit(work) for _ in range(options.jobs)]:
            job.result()
    print(f"{'kills':10}", *(f"{place:>9}" for place in PLACES), f"{'runs':>9}")
    for kind in kinds:
        print(f"{kind.name:10}", *(f"{kind.counts[place]:9}" for place in PLACES), f"{kind.runs:9}")
    for error in wrong:
        print("wrong:", error)
    total = sum(sum(k.counts.values()) for k in kinds)
    print(f"{total} kills, {sum(k.runs for k in kinds)} runs as if uninterrupted, {len(wrong)} "
          f"wrong, {time.monotonic() - begin:.0f} s")
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong or total < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
