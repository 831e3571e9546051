"""Where a script finds its packages: in .venv/scripts, which `make scripts` makes.

A script calls start(), which calls enter(), before it imports anything else of ours, so that
scripts/NAME works from any shell: where the environment exists the script starts again under its
Python. Without one, the Python at hand serves, if it has the packages.
"""

import importlib.util
import os
import signal
import sys
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv", "scripts")


def die(message):
    """One line, as the trainers do it."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def trainer(name):
    """Where train_gpt or train_gptcu is: at the top of the tree, or in LLM8_BIN."""
    return os.path.join(os.environ.get("LLM8_BIN") or ROOT, name)


def need(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        die(f"Python lacks {', '.join(missing)} ({sys.executable}): run `make scripts` in {ROOT}")


def interrupt(*_):
    raise KeyboardInterrupt


def start(main, *modules):
    """Runs main, which returns an exit status, and leaves with it."""
    enter(*modules)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        status = main() or 0
        sys.stdout.flush()
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


def enter(*modules):
    """Goes on under .venv/scripts; the modules named must be there."""
    python = os.path.join(VENV, "bin", "python")
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV) and os.path.exists(python):
        os.execv(python, [python, *sys.argv])
    need(*modules)
