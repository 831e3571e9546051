"""A local server in place of the Hub and GitHub, for the tests that download."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


def entry(path, content):
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    return {"type": "file", "path": path, "size": len(content), "oid": "0" * 40, "lfs": lfs}


COMMITS = {"main": "a" * 40, "old": "b" * 40}


class Server(BaseHTTPRequestHandler):
    """The Hub's interface to its repositories. files: {path in a commit: content}; faults: {path:
    [what to do instead, each once]}; sums: {path: a checksum that is not the content's}."""

    files, faults, sums, log = {}, {}, {}, []

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
        page = f"http://{self.headers['Host']}{urlsplit(self.path).path}?page={place + 2}"
        more = {"Link": f'<{page}>; rel="next"'} if place + 2 < len(entries) else {}
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
            digest = self.sums.get(path) or hashlib.sha256(content).hexdigest()
            self.answer(200, content, ETag=f'"{digest}"', X_Repo_Commit=commit or "")


def serve():
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
