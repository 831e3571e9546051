"""Data sets and tokenizers by name: where their files are, and fetching them so that an interrupted
download goes on where it stopped and a damaged one is noticed.

Everything comes from two hosts, which --mirror replaces by one: Hugging Face's Hub and GitHub's raw
files. Gated repositories need HF_TOKEN.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from . import shards
from .environment import die

HUB = "https://huggingface.co"
RAW = "https://raw.githubusercontent.com"
TRIES = 4
BLOCK = 1 << 20


@dataclass(frozen=True)
class KnownSet:
    """Files of a folder of a Hub repository, by the beginning of their names; or one file."""
    about: str
    repository: str = ""
    folder: str = ""
    train: str = ""
    valid: str = ""
    url: str = ""
    sha256: str = ""


KNOWN_SETS = {
    "tinyshakespeare": KnownSet(
        "Shakespeare's plays, 1.1 MB",
        url=RAW + "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "tinystories": KnownSet("2.1 million simple stories, 1 GB", "roneneldan/TinyStories", "data",
                            "train-", "validation-"),
    "fineweb-edu": KnownSet("10 billion tokens of educational web pages, 28 GB",
                            "HuggingFaceFW/fineweb-edu", "sample/10BT"),
    "fineweb-edu-100b": KnownSet("100 billion of them, 290 GB", "HuggingFaceFW/fineweb-edu",
                                 "sample/100BT"),
    "fineweb": KnownSet("10 billion tokens of web pages, 30 GB", "HuggingFaceFW/fineweb",
                        "sample/10BT"),
    "slimpajama": KnownSet("6 billion tokens of SlimPajama, 14 GB", "DKYoon/SlimPajama-6B", "data",
                           "train-", "validation-"),
}


def mirrored(url, mirror):
    for host in (HUB, RAW):
        if mirror and url.startswith(host):
            return mirror.rstrip("/") + url[len(host):]
    return url


def why(error):
    """The reason of a failed request, in few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__


def is_lasting(error):
    code = getattr(error, "code", 0)
    refused = isinstance(getattr(error, "reason", None), ConnectionRefusedError)
    return refused or (code and code not in (408, 429) and code < 500)


class Downloader:
    pause = 1.0  # seconds, before the first repetition

    def __init__(self, what, folder, mirror, progress=None):
        self.what, self.folder, self.mirror, self.progress = what, folder, mirror, progress

    def open(self, url, start=0):
        request = urllib.request.Request(mirrored(url, self.mirror))
        if start:
            request.add_header("Range", f"bytes={start}-")
        token = os.environ.get("HF_TOKEN")
        if token and url.startswith(HUB):
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        return urllib.request.urlopen(request, timeout=60)

    def give_up(self, url, error):
        if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
            die(f"{self.what}: {url} is gated ({error.code}): accept its licence on {HUB}, then "
                "set HF_TOKEN to a token of yours; or give files that you have")
        if isinstance(error, urllib.error.HTTPError) and error.code == 404:
            die(f"{self.what}: {url} is not there any more (404); give files that you have")
        die(f"{self.what}: {mirrored(url, self.mirror)} cannot be reached ({why(error)}); this "
            "machine needs a network, or --mirror URL, or download the files elsewhere and give "
            "their paths")

    def attempts(self, url, action):
        """action(), again after errors that may pass; what was fetched before is kept."""
        for left in reversed(range(TRIES)):
            try:
                return action()
            except (http.client.HTTPException, OSError) as error:
                if left == 0 or is_lasting(error):
                    self.give_up(url, error)
                time.sleep(self.pause * (TRIES - left))

    def json(self, url):
        """A page of a listing, and the address of the next one."""
        def fetch():
            with self.open(url) as answer:
                return json.load(answer), answer.headers.get("Link", "")

        content, link = self.attempts(url, fetch)
        following = link.split(">")[0].lstrip("<") if 'rel="next"' in link else None
        return content, following

    def receive(self, url, part, size):
        start = os.path.getsize(part) if os.path.exists(part) else 0
        if size and start >= size:
            return
        with self.open(url, start) as answer:
            resumed = start and answer.status == 206
            with open(part, "ab" if resumed else "wb") as file:
                while block := answer.read(BLOCK):
                    file.write(block)
                    if self.progress:
                        self.progress(len(block))
            expected = answer.headers.get("Content-Length")
            got = os.path.getsize(part) - (start if resumed else 0)
            if expected and got != int(expected):
                raise http.client.IncompleteRead(b"", int(expected) - got)

    def file(self, url, name, size=0, sha256=""):
        """Fetches one file, unless it is there; returns its path."""
        path = os.path.join(self.folder, name)
        if os.path.exists(path):
            return path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = path + ".part"
        self.attempts(url, lambda: self.receive(url, part, size))
        whole = not size or os.path.getsize(part) == size
        if not whole or (sha256 and shards.sha256_of(part) != sha256):
            os.remove(part)
            die(f"{self.what}: {url} arrived damaged (its size or checksum is not what it should "
                "be); run the same command again")
        os.replace(part, path)
        return path


def hub_files(downloader, known):
    """(url, name, size, sha256, is validation) of a Hub repository's files."""
    url = f"{HUB}/api/datasets/{known.repository}/tree/main/{known.folder}?recursive=true"
    entries = []
    while url:
        page, url = downloader.json(url)
        entries += page
    files = []
    for entry in entries:
        path = entry.get("path", "")
        name = os.path.basename(path)
        kind = name.endswith((".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"))
        valid = bool(known.valid) and name.startswith(known.valid)
        if entry.get("type") != "file" or not kind or not (valid or name.startswith(known.train)):
            continue
        address = f"{HUB}/datasets/{known.repository}/resolve/main/{urllib.parse.quote(path)}"
        digest = (entry.get("lfs") or {}).get("oid", "")
        files.append((address, name, entry.get("size", 0), digest, valid))
    if not files:
        die(f"{downloader.what}: no data files under {known.repository}/{known.folder}; give files "
            "that you have")
    return sorted(files, key=lambda row: row[1])


def fetch_known_set(name, folder, mirror, most, progress):
    """Downloads a set; returns the paths to train on and those to validate on. most: of the files
    to train on, 0 for all. progress: gets the number of bytes still to come, then each block's."""
    known = KNOWN_SETS[name]
    downloader = Downloader(name, os.path.join(folder, name), mirror, progress)
    if known.url:
        path = downloader.file(known.url, os.path.basename(known.url), 0, known.sha256)
        return [path], []
    files = hub_files(downloader, known)
    train = [row for row in files if not row[4]][:most or None]
    chosen = train + [row for row in files if row[4]]
    progress(0, sum(row[2] for row in chosen))
    paths = [(downloader.file(*row[:4]), row[4]) for row in chosen]
    return [path for path, valid in paths if not valid], [path for path, valid in paths if valid]


def fetch_model(repository, folder, mirror):
    """A model's safetensors, configuration and tokenizer from the Hub; returns its folder."""
    folder = os.path.join(folder, repository.replace("/", "--"))
    downloader = Downloader(repository, folder, mirror)
    entries, url = [], f"{HUB}/api/models/{repository}/tree/main"
    while url:
        page, url = downloader.json(url)
        entries += page
    for entry in entries:
        name = entry.get("path", "")
        weights = name.endswith(".safetensors") and name.startswith("model")
        if weights or name.endswith(".json"):
            digest = (entry.get("lfs") or {}).get("oid", "")
            address = f"{HUB}/{repository}/resolve/main/{urllib.parse.quote(name)}"
            downloader.file(address, name, entry.get("size", 0), digest)
    return folder


def hub_tokenizer(name, repository, folder, mirror):
    """A tokenizer.json of the Hub, with the tokenizer_config.json beside it; returns its path."""
    downloader = Downloader(f"--tokenizer {name}", os.path.join(folder, name), mirror)
    for file in ("tokenizer_config.json", "tokenizer.json"):
        path = downloader.file(f"{HUB}/{repository}/resolve/main/{file}", file)
    return path
