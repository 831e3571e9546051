"""Starts a trainer and waits for it, passes signals on, and shows its progress.

The trainer runs in a session of its own: Ctrl-C reaches only this program, which passes it on once,
so that the trainer finishes its step, saves and ends. A second Ctrl-C ends the trainer at once."""

import os
import shutil
import signal
import subprocess
import time

from . import environment
from .command_line import shell_words
from .metrics import Run, cells

POLL_SECONDS = 0.2


def trainer_command(text):
    """Returns the words that start the trainer: those of --trainer, which may be a launcher with
    arguments. Without --trainer: the GPU trainer if it is built and there is a GPU, else the CPU
    trainer."""
    command = shell_words(text or "", f"--trainer {text}")
    if not command:
        gpu = environment.trainer("train_gptcu")
        has_device = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")
        command = [gpu if has_device and os.path.exists(gpu) else environment.built("train_gpt")]
    if not shutil.which(command[0]):
        environment.die(f"--trainer {command[0]}: no such program")
    return command


class Signals:
    """While this context lasts, signals to stop are passed to the trainer, if one runs."""
    received = process = None

    def __enter__(self):
        self._old = environment.catch(self._handle, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1,
                                      signal.SIGUSR2, signal.SIGHUP)
        return self

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame):
        self.received = number
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def show_progress(label, run, last=False):
    """Prints the line of a run's progress: on a terminal each time, elsewhere once at the end. A
    run that never started leaves no line, because its error is enough."""
    live = environment.is_live()
    if live or last:
        run.poll()
        now = cells(run)
        line = f"{label} | step {now['step']} | loss {now['loss']} | {now['tok/s']} tok/s | " + (
            run.state + "\n" if last else f"ETA {now['ETA']}")
        print(("\r\033[K" if live else "") + (line if run.starts or not last else ""), end="",
              flush=True)


def last_words(lines):
    """Returns the trainer's last line of output, or its error if it has printed one."""
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines[-20:] if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")


def last_error(console):
    with open(console, errors="replace") as file:
        return last_words(file)


def run_trainer(command, folder, label, signals, keep_open):
    """Runs the trainer and returns its exit status. Its output is added to folder/console.log."""
    run = Run(folder)
    with open(os.path.join(folder, "console.log"), "ab") as console:
        process = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, start_new_session=True,
                                   pass_fds=keep_open)
        signals.process = process
        if signals.received: # a signal came before the trainer was started
            process.send_signal(signals.received)
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            show_progress(label, run)
    signals.process = None
    show_progress(label, run, last=True)
    return process.returncode


def plan_of(command):
    """Returns the trainer's --plan (None if that fails), and its last line of output or error."""
    with environment.named_by("--trainer"):
        done = subprocess.run([*command, "--plan"], capture_output=True, text=True,
                              errors="replace", stdin=subprocess.DEVNULL, check=False)
    said = done.stdout, last_words((done.stdout + done.stderr).splitlines())
    return said if done.returncode == 0 else (None, said[1])
