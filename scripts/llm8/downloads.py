"""Fetches data sets, tokenizers and models by name. They come from Hugging Face's Hub, through
huggingface_hub and its cache. NAME@REVISION names a revision of the repository; HF_TOKEN opens
gated repositories. Tiny Shakespeare comes from GitHub. --mirror replaces both hosts. ./make_corpus
writes the set `village`, without a download. huggingface_hub is imported only where it is used,
because the import takes half a second.
"""

import contextlib
import fnmatch
import glob
import hashlib
import os
import subprocess
import sys
import urllib.request

from .environment import built, die, sha256_of, write_durably

RAW = "https://raw.githubusercontent.com"
SHAKESPEARE = RAW + "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


# what a set is; its repository on the Hub, and patterns of the files there to train and validate on
SPLITS = "data/train-*.parquet", "data/validation-*.parquet"
KNOWN_SETS = {
    "village": ["stories in simple English, 10 MB; written here, without a network"],
    "tinyshakespeare": ["Shakespeare's plays, 1.1 MB"],
    "tinystories": ["2.1 million simple stories, 1 GB", "roneneldan/TinyStories", *SPLITS],
    "fineweb-edu": ["10 billion tokens of educational web pages, 28 GB",
                    "HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet"],
    "fineweb-edu-100b": ["100 billion of them, 290 GB", "HuggingFaceFW/fineweb-edu",
                         "sample/100BT/*.parquet"],
    "fineweb": ["10 billion tokens of web pages, 30 GB", "HuggingFaceFW/fineweb",
                "sample/10BT/*.parquet"],
    "slimpajama": ["6 billion tokens of SlimPajama, 14 GB", "DKYoon/SlimPajama-6B", *SPLITS],
}


def add_options(parser):
    parser.add_argument("--downloads", default="", metavar="DIR",
                        help="where downloads are kept [the Hub's cache, as its HF_HOME says]")
    parser.add_argument("--mirror", default="", metavar="URL",
                        help="a host that has what the Hub and GitHub have")


def refuse(what, where, error):
    """Ends the program with a message that says why a request failed, and what to do."""
    while error.__cause__ is not None and type(error).__name__ != "GatedRepoError":
        error = error.__cause__
    code = getattr(getattr(error, "response", error), "status_code", getattr(error, "code", 0))
    if code == 403 or type(error).__name__ == "GatedRepoError":
        die(f"{what}: {where} is gated ({code}): accept its licence on huggingface.co, then set "
            "HF_TOKEN to a token of yours; or give files that you have")
    if code in (401, 404): # without a token, the Hub answers 401 for what does not exist
        die(f"{what}: {where} is not shown to you ({code}): it was renamed or removed, or it is "
            "private; look for it in a browser and give files that you have, or set HF_TOKEN")
    reason = f"status {code}" if code else (str(error) or type(error).__name__).splitlines()[0]
    die(f"{what}: {where} cannot be reached ({reason}); this machine needs a network, or --mirror "
        "URL, or download the files elsewhere and give their paths")


def from_hub(what, repository, kind, patterns, words, most=0):
    """Returns, for each pattern, the paths of a repository's files that match it; for the first
    pattern at most `most` paths (0: all). words: the options "downloads" and "mirror". Without a
    network, takes the files in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    name, _, revision = repository.partition("@")
    words = {"repo_type": kind, "cache_dir": words["downloads"] or None,
             "endpoint": words["mirror"] or None, "revision": revision or None}
    wanted = patterns
    try:
        if most:
            with contextlib.suppress(DryRunError): # without a network
                listed = snapshot_download(name, allow_patterns=patterns[:1], dry_run=True, **words)
                wanted = sorted(row.filename for row in listed)[:most] + patterns[1:]
        folder = snapshot_download(name, allow_patterns=wanted, **words)
    except (OSError, ValueError) as error: # the library raises both
        refuse(what, repository if what != repository else
               "no such folder here, and on the Hub it", error)
    held = glob.glob("**", root_dir=folder, recursive=True)
    found = [sorted(fnmatch.filter(held, pattern)) for pattern in patterns]
    found[0] = found[0][:most or None]
    return [[os.path.join(folder, path) for path in part] for part in found]


def fetch_known_set(name, words, most):
    """Downloads a set, at most `most` files to train on (0: all); returns (train, valid) paths."""
    bare, at, revision = name.partition("@")
    _, *source = KNOWN_SETS[bare]
    if not source:
        if at:
            die(f"{name}: {bare} has no revisions; leave out {at}{revision}")
        return [{"village": village, "tinyshakespeare": shakespeare}[bare](words)], []
    repository, *patterns = source
    train, *valid = from_hub(name, repository + at + revision, "dataset", patterns, words, most)
    if not train:
        die(f"{name}: no data files {patterns[0]} in {repository}; give files that you have")
    return train, sum(valid, [])


def village(words):
    path, program = place_of("village", words), built("make_corpus")
    done = subprocess.run([program, "--bytes", "10000000"], capture_output=True, check=False)
    if done.returncode != 0:
        die(f"village: {program}: {done.stderr.decode(errors='replace').strip()}")
    # an equal file is not written again, because shards remember the date of their source
    if not os.path.exists(path) or sha256_of(path) != hashlib.sha256(done.stdout).hexdigest():
        write_durably(path, [done.stdout])
    return path


def place_of(name, words):
    """Returns the path where a data set of one file is kept, and makes its folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    path = os.path.join(words["downloads"] or HF_HUB_CACHE, name, "input.txt")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def shakespeare(words):
    path = place_of("tinyshakespeare", words)
    if not os.path.exists(path):
        try:
            url = SHAKESPEARE.replace(RAW, words["mirror"].rstrip("/") or RAW)
            with urllib.request.urlopen(url, timeout=60) as answer:
                content = answer.read()
        except OSError as error:
            refuse("tinyshakespeare", SHAKESPEARE, error)
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            die(f"tinyshakespeare: {SHAKESPEARE} arrived damaged; run the same command again")
        write_durably(path, [content])
    return path
