"""Where a script finds its packages: in .venv/scripts, which `make scripts` makes.

A script calls enter() before it imports anything else of ours, so that ./scripts/NAME works from
any shell: where the environment exists the script starts again under its Python. Without one, the
Python at hand serves, if it has the packages.
"""

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv", "scripts")


def die(message):
    """One line, as the trainers do it."""
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def need(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        die(f"Python lacks {', '.join(missing)} ({sys.executable}): run `make scripts` in {ROOT}")


def enter(*modules):
    """Goes on under .venv/scripts; the modules named must be there."""
    python = os.path.join(VENV, "bin", "python")
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV) and os.path.exists(python):
        os.execv(python, [python, *sys.argv])
    need(*modules)
