"""Known sets and tokenizers by name, fetched from a local server in place of the Hub and
GitHub: listings by the page, interrupted downloads, damage, refusals, no network at all.
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

import pyarrow
import pyarrow.parquet
from check import SHARED, Skip, call, main, read, refused, run
from llm8 import downloads
from llm8.prepare_data import main as prepare_data
from shard_tools import byte_documents, sentences


class Server(BaseHTTPRequestHandler):
    """files: {path: content}; faults: {path: [what to do instead, each once]}."""

    files, faults, log = {}, {}, []

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", length=None, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        path = self.path
        content = self.files.get(path)
        span = self.headers.get("Range")
        self.log.append((path, span, self.headers.get("Authorization")))
        fault = self.faults[path].pop(0) if self.faults.get(path) else None
        if isinstance(fault, int):
            self.answer(fault)
        elif content is None:
            self.answer(404)
        elif fault == "cut":
            self.answer(200, content[:len(content) // 2], len(content))
            self.close_connection = True
        elif isinstance(content, tuple):  # a page of a listing, and the next one's address
            self.answer(200, content[0], Link=f'<{content[1]}>; rel="next"')
        elif span:
            start = int(re.fullmatch(r"bytes=(\d+)-", span)[1])
            self.answer(206, content[start:])
        else:
            self.answer(200, content)


def parquet_of(texts):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer)
    return buffer.getvalue()


def entry(path, content, **more):
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
    return {"type": "file", "path": path, "size": len(content), "lfs": lfs, **more}


TRAIN = [sentences(10 + place, 30) for place in range(3)]
VALID = sentences(20, 10)
STORIES = "/datasets/roneneldan/TinyStories/resolve/main/data/"
TREE = "/api/datasets/roneneldan/TinyStories/tree/main/data?recursive=true"


def serve():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    names = [f"train-0000{place}-of-00003-0abc.parquet" for place in range(3)]
    contents = dict(zip(names, map(parquet_of, TRAIN)))
    contents["validation-00000-of-00001.parquet"] = parquet_of(VALID)
    for name, content in contents.items():
        Server.files[STORIES + name] = content
    entries = [entry(f"data/{name}", content) for name, content in contents.items()]
    entries.append({"type": "directory", "path": "data/old"})
    entries.append(entry("data/readme.md", b"x"))
    Server.files[TREE] = (json.dumps(entries[:2]).encode(), f"{host}/second")
    Server.files["/second"] = json.dumps(entries[2:]).encode()
    return host


HOST = serve()


def prepared(output, *words):
    return call(prepare_data, "--output", output, "--tokenizer", "byte", "--jobs", 1, "--mirror",
                HOST, *words)


def encoded(texts):
    return sorted(text.encode() for text in texts)


def a_set_comes_whole_over_a_bad_line():
    first = STORIES + "train-00000-of-00003-0abc.parquet"
    Server.faults = {first: ["cut", 503], TREE: [500]}
    downloads.Downloader.pause = 0.01
    result = prepared("stories", "tinystories")
    assert result.status == 0, result.err
    assert sorted(byte_documents("stories", "train")) == encoded(sum(TRAIN, []))
    assert sorted(byte_documents("stories", "val")) == encoded(VALID)
    half = len(Server.files[first]) // 2
    assert (first, f"bytes={half}-", None) in Server.log, "the rest was not asked for"
    count = len(Server.log)
    again = prepared("stories2", "tinystories")
    fresh = {path for path, _, _ in Server.log[count:]}
    assert again.status == 0 and fresh == {TREE, "/second"}, "files were fetched twice"


def some_files_are_enough():
    result = prepared("some", "tinystories", "--download-files", 1, "--downloads", "some_files")
    assert result.status == 0, result.err
    assert sorted(byte_documents("some", "train")) == encoded(TRAIN[0])
    assert len(os.listdir("some_files/tinystories")) == 2


def damage_is_noticed():
    name = STORIES + "train-00001-of-00003-0abc.parquet"
    content = Server.files[name]
    Server.files[name] = content[:-1] + b"?"
    refused(prepared("d", "tinystories", "--downloads", "damaged"), "tinystories", name,
            "arrived damaged", "run the same command again")
    Server.files[name] = content
    assert prepared("d", "tinystories", "--downloads", "damaged").status == 0
    Server.files["/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"] = b"To be\n"
    refused(prepared("d2", "tinyshakespeare"), "tinyshakespeare", "arrived damaged")


def tinyshakespeare_is_what_it_was():
    path = os.path.join(SHARED, "tinyshakespeare.txt")
    if not os.path.exists(path):
        raise Skip("no tinyshakespeare.txt in ../shared/data")
    Server.files["/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"] = read(path)
    result = prepared("shakespeare", "tinyshakespeare", "--valid-fraction", 0)
    assert result.status == 0, result.err
    assert byte_documents("shakespeare", "train") == [read(path)]


def refusals_say_what_to_do():
    Server.files.pop("/api/datasets/HuggingFaceFW/fineweb/tree/main/sample/10BT?recursive=true", 0)
    refused(prepared("x", "fineweb"), "fineweb", "not there any more (404)", "give files")
    Server.faults = {TREE: [401]}
    refused(prepared("x", "tinystories"), "gated (401)", "HF_TOKEN")
    config = "/meta-llama/Meta-Llama-3-8B/resolve/main/tokenizer_config.json"
    Server.faults = {config: [403]}
    refused(call(prepare_data, "--output", "x", "--tokenizer", "llama3", "--mirror", HOST, "."),
            "--tokenizer llama3", "gated (403)", "accept its licence", "HF_TOKEN")
    os.environ["HF_TOKEN"] = "secret"
    Server.faults = {TREE: [401]}
    prepared("x", "tinystories")
    del os.environ["HF_TOKEN"]
    assert Server.log[-1][2] == "Bearer secret"
    empty = "/api/datasets/DKYoon/SlimPajama-6B/tree/main/data?recursive=true"
    Server.files[empty] = b"[]"
    refused(prepared("x", "slimpajama"), "slimpajama", "no data files under DKYoon/SlimPajama-6B")


def without_a_network_it_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run("scripts/prepare_data", "--output", "x", "--tokenizer", "byte", "tinystories",
                 "--mirror", f"http://127.0.0.1:{port}", check=False)
    refused(result, "tinystories", "cannot be reached", "needs a network, or --mirror",
            "give their paths")
    assert not os.path.exists("x")


if __name__ == "__main__":
    sys.exit(main([a_set_comes_whole_over_a_bad_line, some_files_are_enough, damage_is_noticed,
                   tinyshakespeare_is_what_it_was, refusals_say_what_to_do,
                   without_a_network_it_says_so]))
