"""What the Python tests share, as test.h is for the C ones: functions that are tests, run by
main(), which fail by an assertion or skip by raising Skip. They run in an empty folder.
"""

import contextlib
import io
import os
import subprocess
import sys
import traceback

ROOT = os.environ.get("LLM8_ROOT") or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = os.path.join(ROOT, "..", "shared", "data")
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
            main()
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = before
    return Result(status, out.getvalue(), err.getvalue())


def run(*words, env=None, check=True, given=None):
    """A program of the repository, as a user runs it. given: its standard input."""
    command = [os.path.join(ROOT, words[0]), *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False,
                          input=given, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})
    assert not check or done.returncode == 0, f"{words}: {done.returncode} {done.stderr[-500:]}"
    return Result(done.returncode, done.stdout, done.stderr)


def refused(result, *parts):
    """It ended with an error of one line that has all these parts."""
    assert result.status != 0, f"it was accepted: {result.out}"
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), f"not one line: {result.err}"
    for part in parts:
        assert part in result.err, f"no {part!r} in {result.err!r}"


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


def main(tests):
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for test in tests:
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
