"""Finds a script's packages: they are in .venv, which `make scripts` makes from pyproject.toml.

scripts/NAME calls start(), so that it works from any shell: if .venv exists, the script starts
again under the Python in it. Otherwise the script stays with the Python that runs it, which must
have the packages.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib
import itertools
import os
import signal
import socket
import sys
import traceback

from .text import printable

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
OLDEST = (3, 11)
LOCK = ".lock"  # the file that lock() makes in a folder
LOST = "lost+found"  # a folder at the root of a disk, which only root can read
LFS = b"version https://git-lfs.github.com/spec/"


def die(message):
    """Ends the program with an error of one line, as the trainers do."""
    sys.stdout.flush()
    print(printable(f"error: {message}"), file=sys.stderr)
    sys.exit(2)


def warn(message):
    sys.stdout.flush()
    print(printable(f"warning: {message}"), file=sys.stderr, flush=True)


def is_live():
    """Whether standard output is a terminal, on which lines may be cleared."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def trainer(name):
    """Returns the path of one of our C programs: at the top of the tree, or in LLM8_BIN."""
    return os.path.join(os.environ.get("LLM8_BIN") or ROOT, name)


def built(name):
    """Returns the path of one of our C programs. Ends the program if it is not built."""
    path = trainer(name)
    if not os.path.exists(path):
        elsewhere = " and unset LLM8_BIN, which names another folder"
        die(f"{path} is not built: run make {name} in {ROOT}" +
            (elsewhere if os.environ.get("LLM8_BIN") else ""))
    return path


def why(error):
    """Returns what an error of the file system says; libraries raise some with a text alone."""
    return error.strerror or str(error)


def lfs_pointer(path):
    """Returns what to say of a file that is the pointer which a clone without git-lfs has in place
    of a large file; "" if it is none."""
    with open(path, "rb") as file:
        begin = file.read(len(LFS))
    return f"{path}: a pointer of Git LFS, not the file; fetch it (git lfs pull)" \
        if begin == LFS else ""


@contextlib.contextmanager
def named_by(option):
    """Reports an error of the file system in the `with` block as an error of the option's value."""
    try:
        yield
    except OSError as error:
        die(f"{option}{f' {error.filename}' if error.filename else ''}: {why(error)}")


def listed(folder, pattern):
    """Returns the paths in the folder that match, in order. Raises the error of a folder that
    cannot be read; glob() passes over such a folder."""
    folder = glob.escape(folder)
    found = sorted(glob.glob(folder + pattern, recursive=True))
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
        for path in glob.glob(os.path.join(folder + pattern, "") or "./", recursive=True):
            path = os.path.dirname(path)
            if os.path.basename(path) != LOST:
                os.scandir(path).close()
    return found


def matching(pattern):
    """Returns the path if it exists, or else the paths that match it as a glob pattern, in order.
    Leading folders that exist by their literal names are not read as patterns (base/io.h). Raises
    the error of a folder that cannot be read."""
    exact = pattern
    while exact and not os.path.lexists(exact):
        exact = os.path.dirname(exact)
    return exact and listed(exact, pattern[len(exact):]) or listed("", pattern)


def write_durably(path, parts):
    """Writes a file under a temporary name, syncs it, and renames it. Returns its SHA-256."""
    fresh, digest = f"{path}.{socket.gethostname()}.{os.getpid()}.new", hashlib.sha256()
    try:
        with open(fresh, "wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise OSError(error.errno, why(error), path) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(fresh)
    return digest.hexdigest()


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock(folder, option, waits=False):
    """Locks a folder for as long as this program, or one that inherits the file, lives; returns the
    file. If another program holds the lock, waits or ends this program. If the file system has no
    locks, such as some mounts of Lustre, warns."""
    path = os.path.join(folder, LOCK)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not waits:
            die(f"{option} {folder}: another one is at work there, or a trainer that one has left "
                f"behind: wait for it, end it, or give another {option}")
        print(f"{option} {folder}: another one works there; waiting for its end", file=sys.stderr,
              flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        warn(f"{option} {folder}: no lock ({error.strerror}): a second one could write here, too")
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    os.close(file)  # the program that held the lock has removed the file
    return lock(folder, option, waits)


def words_in(*paths):
    """Returns the words in these files, in order; a file that cannot be read has none."""
    words = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            words += file.read().split()
    return words


def cores(root=""):
    """Returns how many cores this process may use, by its affinity and by the quotas of its control
    groups and those above them, as the trainers do (base/host.c)."""
    most = len(os.sched_getaffinity(0))
    for line in words_in(f"{root}/proc/self/cgroup"):  # ID:controllers:/group; version 2 names none
        _, controllers, group = (line + "::").split(":")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for folder in itertools.accumulate(group.split("/"), "{}/{}".format):
            folder = f"{root}/sys/fs/cgroup{'/cpu' * bool(controllers)}{folder}"
            quota = words_in(f"{folder}/cpu.max") or \
                words_in(f"{folder}/cpu.cfs_quota_us", f"{folder}/cpu.cfs_period_us")
            if len(quota) == 2 and quota[0].isdigit():
                most = min(most, -(-int(quota[0]) // int(quota[1])))
    return most


def catch(handler, *numbers):
    """Sets the handler of these signals; returns {number: the handler before}. If nohup has made
    this process ignore SIGHUP, which a closed terminal sends, SIGHUP stays ignored."""
    return {number: signal.signal(number, handler) for number in numbers
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}


def start(module):
    """Runs main() of one of our modules, and exits with the status that it returns."""
    if None in (sys.stdin, sys.stdout, sys.stderr):  # closed: the next file would get its number
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(file, True)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    python = os.path.join(VENV, "bin", "python")
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV) and os.path.exists(python):
        os.execv(python, [python, *sys.argv])
    if sys.version_info < OLDEST:
        die(f"{sys.executable} is Python {sys.version.split()[0]}; "
            f"{'.'.join(map(str, OLDEST))} or newer is needed")
    if os.path.exists(python):  # its packages, and not those that a cluster's modules name
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = {path for path in map(os.path.abspath, others)
                  if not path.startswith(os.path.join(sys.prefix, ""))}
        sys.path[1:] = [path for path in sys.path[1:] if path not in others]
    os.environ["MPLBACKEND"] = "agg"  # a notebook names one that .venv lacks
    catch(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP)
    sys.stdout.reconfigure(errors="replace") # so that a letter that the terminal lacks is no error
    try:
        status = importlib.import_module("llm8." + module).main() or 0
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        anew = "rm -r .venv; " * os.path.exists(os.path.join(VENV, "ready"))  # of another Python
        die(f"Python lacks {error.name} ({sys.executable}): run `{anew}make scripts` in {ROOT}")
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError: # as in scripts/monitor --once RUN | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error: # no room, no permission, a file where a folder should be
        die(f"{error.filename}: {why(error)}" if error.filename else why(error))
    except Exception: # a bug of ours; 1 would be a verdict
        traceback.print_exc()
        status = 2
    sys.exit(status)
