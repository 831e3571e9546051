"""Known sets and tokenizers by name, fetched from a local server in place of the Hub and
GitHub: listings by the page, interrupted downloads, damage, pins, refusals, no network at all.
"""

import hashlib
import io
import json
import os
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pyarrow
import pyarrow.parquet
import tokenizers
from check import SHARED, Skip, call, main, read, refused, run, write
from huggingface_hub import constants
from llm8.convert_hf import main as convert_hf
from llm8.prepare_data import main as prepare_data
from shard_tools import byte_documents, manifest, sentences, stream

COMMITS = {"main": "a" * 40, "old": "b" * 40}


class Server(BaseHTTPRequestHandler):
    """The Hub's interface to its repositories. files: {path in a commit: content}; faults: {path:
    [what to do instead, each once]}."""

    files, faults, log = {}, {}, []

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", length=None, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET()

    def listing(self, repository, commit):
        """A page, and the address of the next one: two entries a page."""
        place = int(parse_qs(urlsplit(self.path).query).get("page", ["0"])[0])
        begin = f"{repository}/resolve/{commit}/"
        names = sorted(path for path in self.files if path.startswith(begin))
        entries = [entry(name[len(begin):], self.files[name]) for name in names]
        more = {"Link": f'<{HOST}{urlsplit(self.path).path}?page={place + 2}>; rel="next"'} \
            if place + 2 < len(entries) else {}
        self.answer(200, json.dumps(entries[place:place + 2]).encode(), **more)

    def do_GET(self):
        path, span = urlsplit(self.path).path, self.headers.get("Range")
        self.log.append((self.command, path, span, self.headers.get("Authorization")))
        planted = self.command == "GET" and self.faults.get(path)
        fault = planted.pop(0) if planted else None
        asked = path.replace("/api/models/", "/api/")
        info = re.fullmatch(r"/api(/(?:datasets/)?[^/]+/[^/]+)/revision/([^/]+)", asked)
        tree = re.fullmatch(r"/api(/(?:datasets/)?[^/]+/[^/]+)/tree/([^/]+)/?", asked)
        file = re.fullmatch(r"(.*/resolve/)([^/]+)(/.*)", path)
        content = self.files.get(path)
        if file and content is None:
            content = self.files.get(file[1] + COMMITS.get(file[2], "") + file[3])
        commit = file and COMMITS.get(file[2], file[2])
        if isinstance(fault, int):
            self.answer(fault)
        elif fault == "gated": # as the Hub says it to those without a token
            self.answer(401, X_Error_Code="GatedRepo")
        elif info and any(name.startswith(info[1] + "/") for name in self.files):
            sha = COMMITS.get(info[2])
            self.answer(200 if sha else 404, json.dumps({"id": "x/y", "sha": sha}).encode(),
                        X_Error_Code="" if sha else "RevisionNotFound")
        elif tree:
            self.listing(*tree.groups())
        elif content is None:
            self.answer(404, X_Error_Code="EntryNotFound" if file else "RepoNotFound")
        elif fault == "cut":
            self.answer(200, content[:len(content) // 2], len(content))
            self.close_connection = True
        elif span:
            start = int(re.match(r"bytes=(\d+)-", span)[1])
            self.answer(206, content[start:])
        else:
            digest = SUMS.get(path) or hashlib.sha256(content).hexdigest()
            self.answer(200, content, ETag=f'"{digest}"', X_Repo_Commit=commit or "")


def parquet_of(texts):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


def entry(path, content):
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    return {"type": "file", "path": path, "size": len(content), "oid": "0" * 40, "lfs": lfs}


SUMS = {}  # {path: a checksum that is not the content's}
TRAIN = [sentences(10 + place, 30) for place in range(3)]
VALID = sentences(20, 10)
STORIES = "/datasets/roneneldan/TinyStories/resolve/" + COMMITS["main"] + "/"
TREE = "/api/datasets/roneneldan/TinyStories/tree/" + COMMITS["main"]
INFO = "/api/datasets/roneneldan/TinyStories/revision/main"
SHAKESPEARE = "/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def serve():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for place, texts in enumerate(TRAIN):
        Server.files[f"{STORIES}data/train-0000{place}-of-00003-0abc.parquet"] = parquet_of(texts)
    Server.files[STORIES + "data/validation-00000-of-00001.parquet"] = parquet_of(VALID)
    Server.files[STORIES + "data/readme.md"] = b"x"
    Server.files[STORIES.replace("a" * 40, "b" * 40) + "data/train-0.parquet"] = \
        parquet_of(TRAIN[1])
    return f"http://127.0.0.1:{server.server_port}"


HOST = serve()


def prepared(output, *words):
    return call(prepare_data, "--output", output, "--tokenizer", "byte", "--jobs", 1, "--mirror",
                HOST, *words)


def encoded(texts):
    return sorted(text.encode() for text in texts)


def a_set_comes_whole_over_a_bad_line():
    first = STORIES + "data/train-00000-of-00003-0abc.parquet"
    Server.faults = {first: ["cut", 503], TREE: [500]}
    result = prepared("stories", "tinystories", "--downloads", "kept")
    assert result.status == 0, result.err
    assert sorted(byte_documents("stories", "train")) == encoded(sum(TRAIN, []))
    assert sorted(byte_documents("stories", "val")) == encoded(VALID)
    asked = [span for method, path, span, _ in Server.log if path == first and method == "GET"]
    assert any(span and span > "bytes=1" for span in asked), "the rest was not asked for"
    assert not any("readme" in path for method, path, *_ in Server.log), "more than the data"
    assert COMMITS["main"] in manifest("stories")["sources"][0]["path"], "no revision is recorded"
    count = len(Server.log)
    again = prepared("stories2", "tinystories", "--downloads", "kept")
    fetched = [path for method, path, *_ in Server.log[count:] if method == "GET"]
    assert again.status == 0 and not [path for path in fetched if ".parquet" in path], fetched
    # and with no network at all
    offline = call(prepare_data, "--output", "stories3", "--tokenizer", "byte", "--jobs", 1,
                   "--mirror", "http://127.0.0.1:9", "--downloads", "kept", "tinystories")
    assert offline.status == 0, offline.err
    assert sorted(byte_documents("stories3", "train")) == encoded(sum(TRAIN, []))


def some_files_are_enough():
    result = prepared("some", "tinystories", "--download-files", 1, "--downloads", "some_files")
    assert result.status == 0, result.err
    assert sorted(byte_documents("some", "train")) == encoded(TRAIN[0])
    assert sorted(byte_documents("some", "val")) == encoded(VALID)


def revisions_are_pinned():
    result = prepared("pinned", "tinystories@old", "--valid-fraction", 0)
    assert result.status == 0, result.err
    assert sorted(byte_documents("pinned", "train")) == encoded(TRAIN[1])
    refused(prepared("x", "tinystories@none"), "TinyStories@none is not shown to you (404)")


def tokenizers_come_by_name():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, "a"))
    tokenizer.add_special_tokens(["<eos>"])
    at = "/openai-community/gpt2/resolve/" + COMMITS["old"]
    Server.files[at + "/tokenizer.json"] = tokenizer.to_str().encode()
    Server.files[at + "/tokenizer_config.json"] = b'{"eos_token": "<eos>"}'
    write("a.txt", "a")
    for name in ("gpt2@old", "gpt2@" + COMMITS["old"]):
        result = call(prepare_data, "--output", f"{name}.out", "--tokenizer", name, "--mirror",
                      HOST, "--valid-fraction", 0, "a.txt")
        assert result.status == 0, result.err
        assert stream(f"{name}.out", "train") == [1, 0]
        assert manifest(f"{name}.out")["tokenizer"]["name"] == "gpt2"
        assert json.loads(read(f"{name}.out/tokenizer_config.json")) == {"eos_token": "<eos>"}


def damage_is_noticed():
    name = STORIES + "data/train-00001-of-00003-0abc.parquet"
    SUMS[name] = hashlib.sha256(b"other").hexdigest()
    refused(prepared("d", "tinystories", "--downloads", "damaged"), "tinystories",
            os.path.basename(name), "arrived damaged", "run the same command again")
    SUMS.clear()
    assert prepared("d", "tinystories", "--downloads", "damaged").status == 0
    Server.files[SHAKESPEARE] = b"To be\n"
    refused(prepared("d2", "tinyshakespeare"), "tinyshakespeare", "arrived damaged")


def tinyshakespeare_is_what_it_was():
    path = os.path.join(SHARED, "tinyshakespeare.txt")
    if not os.path.exists(path):
        raise Skip("no tinyshakespeare.txt in ../shared/data")
    Server.files[SHAKESPEARE] = read(path)
    result = prepared("shakespeare", "tinyshakespeare", "--valid-fraction", 0)
    assert result.status == 0, result.err
    assert byte_documents("shakespeare", "train") == [read(path)]


def refusals_say_what_to_do():
    # a name that is wrong, or has changed: the Hub answers 404, and 401 to those without a token
    refused(prepared("x", "fineweb"), "fineweb: HuggingFaceFW/fineweb is not shown to you (404)",
            "renamed", "give files")
    Server.faults = {INFO: [401, 401]}
    refused(prepared("x", "tinystories", "--downloads", "gated"), "not shown to you (401)",
            "renamed", "HF_TOKEN")
    Server.faults = {INFO: ["gated", "gated"]}
    refused(prepared("x", "tinystories", "--downloads", "gated"), "gated (401)", "HF_TOKEN")
    refused(call(convert_hf, "import", "Qwen/Qwen9", "--output", "x", "--mirror", HOST),
            "Qwen/Qwen9 is not shown to you (404)", "renamed")
    Server.files["/some/one/resolve/" + COMMITS["main"] + "/readme.md"] = b""
    refused(call(convert_hf, "import", "some/one", "--output", "x", "--mirror", HOST),
            "some/one: no config.json", "not a model's")
    refused(call(prepare_data, "--output", "x", "--tokenizer", "llama3", "--mirror", HOST, "."),
            "--tokenizer llama3", "not shown to you (404)")
    Server.faults = {"/api/models/meta-llama/Meta-Llama-3-8B/revision/main": [403, 403]}
    refused(call(prepare_data, "--output", "x", "--tokenizer", "llama3", "--mirror", HOST, "."),
            "--tokenizer llama3", "gated (403)", "accept its licence", "HF_TOKEN")
    os.environ["HF_TOKEN"] = "secret"
    Server.faults = {INFO: [401, 401]}
    prepared("x", "tinystories", "--downloads", "gated")
    del os.environ["HF_TOKEN"]
    assert Server.log[-1][3] == "Bearer secret"
    Server.files["/datasets/DKYoon/SlimPajama-6B/resolve/" + COMMITS["main"] + "/data/x"] = b""
    refused(prepared("x", "slimpajama"), "slimpajama", "no data files", "DKYoon/SlimPajama-6B")


def without_a_network_it_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run("scripts/prepare_data", "--output", "x", "--tokenizer", "byte", "tinystories",
                 "--mirror", f"http://127.0.0.1:{port}", "--downloads", "none", check=False)
    refused(result, "tinystories", "cannot be reached", "needs a network, or --mirror",
            "give their paths")
    assert not os.path.exists("x")


if __name__ == "__main__":
    constants.DOWNLOAD_CHUNK_SIZE = 1000  # as much as a torn line may lose
    sys.exit(main([a_set_comes_whole_over_a_bad_line, some_files_are_enough, revisions_are_pinned,
                   tokenizers_come_by_name, damage_is_noticed, tinyshakespeare_is_what_it_was,
                   refusals_say_what_to_do, without_a_network_it_says_so]))
