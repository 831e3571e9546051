"""Where a script finds its packages: in .venv, which `make scripts` makes from pyproject.toml.

scripts/NAME calls start(), so that it works from any shell: where the environment exists the script
starts again under its Python. Without one, the Python at hand serves, if it has the packages.
"""

import contextlib
import glob
import importlib
import os
import re
import signal
import sys
import traceback

from .text import printable

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 11)


def die(message):
    """Ends the program with an error of one line, as the trainers do it."""
    sys.stdout.flush()
    print(printable(f"error: {message}"), file=sys.stderr)
    sys.exit(2)


def warn(message):
    sys.stdout.flush()
    print(printable(f"warning: {message}"), file=sys.stderr, flush=True)


def trainer(name):
    """Returns where a program of ours in C is: at the top of the tree, or in LLM8_BIN."""
    return os.path.join(os.environ.get("LLM8_BIN") or ROOT, name)


def built(name):
    """Returns the same of a program that is needed, and ends where it is not built."""
    path = trainer(name)
    if not os.path.exists(path):
        elsewhere = " and unset LLM8_BIN, which names another folder"
        die(f"{path} is not built: run make {name} in {ROOT}" +
            (elsewhere if os.environ.get("LLM8_BIN") else ""))
    return path


@contextlib.contextmanager
def named_by(option):
    """An error of the file system in this block is one of what the option names."""
    try:
        yield
    except OSError as error:
        die(f"{option}{f' {error.filename}' if error.filename else ''}: {error.strerror}")


def matching(pattern):
    """Returns the path if it exists, or else those that match it as a glob pattern, in order.
    Folders at its beginning that exist under these names are no patterns (base/io.h)."""
    exact = pattern
    while exact and not os.path.lexists(exact):
        exact = os.path.dirname(exact)
    found = glob.glob(glob.escape(exact) + pattern[len(exact):], recursive=True) if exact else []
    return sorted(found or glob.glob(pattern, recursive=True))


def follow(path):
    """A run's `latest` and `best` may be files of one line, the name of a folder beside them: its
    disk has no links."""
    if not os.path.isfile(path):
        return path
    with open(path, errors="replace") as file:
        name = re.fullmatch(r"(step_\d+)\n?", file.read(100))
    return os.path.join(os.path.dirname(path), name[1]) if name else path


def checkpoint(path):
    """Returns the folder that a path to a checkpoint or a start leads to."""
    latest = os.path.join(path, "latest")
    if os.path.exists(latest):
        die(f"{path}: a run's folder; give one of its checkpoints, such as {latest}")
    return follow(path)


def start(module):
    """Runs main() of a module of ours, which returns an exit status, and leaves with it."""
    python = os.path.join(VENV, "bin", "python")
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV) and os.path.exists(python):
        os.execv(python, [python, *sys.argv])
    if sys.version_info < OLDEST:
        die(f"{sys.executable} is Python {sys.version.split()[0]}; "
            f"{'.'.join(map(str, OLDEST))} or newer is needed")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace") # a letter that the terminal lacks ends nothing
    try:
        status = importlib.import_module("llm8." + module).main() or 0
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        die(f"Python lacks {error.name} ({sys.executable}): run `make scripts` in {ROOT}")
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError: # as in scripts/monitor --once RUN | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error: # no room, no permission, a file where a folder should be
        die(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    except Exception: # a fault of ours: not the status of a verdict
        traceback.print_exc()
        status = 2
    sys.exit(status)
