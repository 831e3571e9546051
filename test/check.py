"""What the Python tests share, as lib.sh is for the shell ones: functions that are tests, called
test_..., run by main(), which fail by an assertion or skip by raising Skip. They run in an empty
folder.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback

ROOT = os.environ.get("LLM8_ROOT") or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = os.path.join(ROOT, "..", "shared", "data")
STANDIN = "build/plain/standin_trainer"  # the GPU trainer, without a GPU
sys.path.insert(0, os.path.join(ROOT, "scripts"))
os.environ["HF_HOME"] = os.path.abspath("hf_home")  # what is downloaded stays in the test's folder


class Skip(Exception):
    """Why a test cannot run here."""


class Result:
    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err


def call(main, *words):
    """A script's main() in this process."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["script", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main() or 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = before
    return Result(status, out.getvalue(), err.getvalue())


def done(main, *words):
    """call() of what must succeed."""
    result = call(main, *words)
    assert result.status == 0, f"{words}: {result.status} {result.err}"
    return result


def run(*words, env=None, check=True, given=None):
    """A program of the repository, as a user runs it. given: its standard input."""
    command = [os.path.join(ROOT, words[0]), *map(str, words[1:])]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    if words[0] == STANDIN:
        env["LD_LIBRARY_PATH"] = os.path.join(ROOT, "build", "standin")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False,
                          input=given, env=env)
    assert not check or done.returncode == 0, f"{words}: {done.returncode} {done.stderr[-500:]}"
    return Result(done.returncode, done.stdout, done.stderr)


def same(found, expected, *about):
    assert found == expected, f"{found!r}, not {expected!r}; {about}"


def says(text, *parts):
    """It has all of these parts; a part after a `!` must not be there."""
    for part in parts:
        wanted = part.removeprefix("!")
        assert (wanted in text) == (wanted == part), f"{part!r}: {text!r}"


def refused(result, *parts):
    """It ended with an error of one line that has all these parts."""
    assert result.status != 0, f"it was accepted: {result.out}"
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), f"not one line: {result.err}"
    says(result.err, *parts)


def fails(function, *words):
    """Whether a check sees a fault that was planted for it."""
    try:
        function(*words)
    except AssertionError:
        return True
    return False


def write(path, content):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return path


def read(path):
    with open(path, "rb") as file:
        return file.read()


def lines(rows):
    """A .jsonl of these rows, as the trainers write it."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def records(path, kind=None):
    """The rows of a .jsonl, or those of a kind."""
    rows = [json.loads(line) for line in read(path).splitlines()]
    return [row for row in rows if kind in (None, row.get("kind"))]


def main(tests=None, apart=False):
    """Runs the program's functions test_..., in the order in which they stand, or these tests.
    apart: each in an empty folder of its own."""
    counts, top = {"passed": 0, "failed": 0, "skipped": 0}, os.getcwd()
    tests = tests or [held for name, held in vars(sys.modules["__main__"]).items()
                      if name.startswith("test_")]
    assert tests, "no tests"
    for test in tests:
        if apart:
            os.mkdir(os.path.join(top, test.__name__))
            os.chdir(os.path.join(top, test.__name__))
        try:
            test()
            counts["passed"] += 1
        except Skip as why:
            print(f"  skipped: {why}")
            counts["skipped"] += 1
        except Exception:  # a test may fail in any way
            traceback.print_exc()
            print(f"  FAILED {test.__name__}", file=sys.stderr)
            counts["failed"] += 1
        sys.stdout.flush()
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    sys.exit(counts["failed"] > 0)
