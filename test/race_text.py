#!/usr/bin/env python3
"""Writes English prose and documentation from Debian's packages, for a race (docs/benchmarks.md).

  test/race_text.py DIR [CHARACTERS]    at most CHARACTERS of training text (240,000,000)

DIR/debs keeps what `apt-get download` brings; DIR/train.jsonl and DIR/valid.jsonl are for
scripts/prepare_data. Validation is by whole files.
"""

import gzip
import hashlib
import html
import json
import os
import random
import re
import subprocess
import sys
import tarfile

PACKAGES = """anarchism apache2-doc asymptote-doc autoconf-doc bash-doc bind9-doc
cinder-doc clang-14-doc cmake-doc debian-faq debian-handbook debian-history
debian-policy debian-reference-en designate-doc developers-reference dict-foldoc
dict-gcide erlang-doc exim4-doc-html fish-common fortunes fp-docs-3.2.2 gap-doc ghc-doc
ghostscript-doc gimp-help-en git-doc glance-doc gnome-user-docs gnu-standards grass-doc
heat-doc hledger imagemagick-6-doc installation-guide-amd64 ironic-doc jargon-text
jython-doc keystone-doc libboost1.74-doc lilypond-doc-html linux-doc-6.1 llvm-14-doc
lyx-common maint-guide manila-doc manpages manpages-dev maxima-doc mit-scheme-doc
neutron-doc nodejs-doc nova-doc octave-doc octavia-doc openafs-doc openjdk-17-doc
perl-doc petsc3.18-doc postfix-doc postgis-doc postgresql-doc-15 python-astropy-doc
python-django-doc python-pandas-doc python-pytest-doc python-scipy-doc
python-skimage-doc python-sklearn-doc python-sqlalchemy-doc python-statsmodels-doc
python-sympy-doc python3.11-doc qtbase5-doc-html qtcreator-doc qtdeclarative5-doc-html
racket-doc rust-doc sagemath-doc sbcl-doc sphinx-doc sqlite3-doc subversion swift-doc
twisted-doc vim-doc wireshark-doc yade-doc zsh-doc""".split()
MOST_OF_ONE = 16_000_000    # characters of a package
PIECE = 12_000              # characters of a document, about
LEAST = 400                 # characters of a file
VALID = 3                   # percent of the files
COMMON = set("the of and to a in is that for it as with be on by this are or from an at not you he "
             "his was which have but they if can will when one has we all no there".split())
DROPPED = re.compile(r"<(script|style|head|pre|nav|table|svg|form|footer)\b.*?</\1\s*>",
                     re.S | re.I)
BLOCK = re.compile(r"</?(?:p|div|li|dd|dt|h\d|br|tr|ul|ol|dl|blockquote|section|title)"
                   r"\b[^>]*>", re.I)
TAG = re.compile(r"<[^>]*>|\[\d+\]|¶")
# other languages, changes, licences and indexes
SKIPPED = re.compile(r"copyright|change|licen[cs]e|genindex|/(?!en)[a-z]{2}(_[A-Z]{2})?/|"
                     r"\.(?!en\b)[a-z]{2}(-[a-z]{2})?\.html?|/translations/|authors|-all\.html|"
                     r"/man/(?!man)|/src/|print\.html|README", re.I)


def from_html(text):
    text = BLOCK.sub("\n\n", DROPPED.sub("\n\n", re.sub(r"<!--.*?-->", "", text, flags=re.S)))
    return html.unescape(TAG.sub("", text))


def from_man(text):
    """Reads man's macros, the few that begin a paragraph or set a word apart."""
    text = re.sub(r"(?ms)^\.(nf|EX|TS)\b.*?^\.(fi|EE|TE)\b", "", text)
    text = re.sub(r'(?m)^[.\'](\\"|(TH|so|de|if|ie|el|ds|in|ft|nr|hy|ad|UR|UE|ne|RS|RE)\b).*$',
                  "", text)
    text = re.sub(r"(?m)^\.(SH|SS|PP|P|LP|TP|IP|sp)\b", "\n\n", text)
    text = re.sub(r'(?m)^\.(B|I|BR|RB|IR|RI|BI|IB|SM)\b(.*)$',
                  lambda m: re.sub(r'" ?"?|(?<=\S) (?=\S)' if len(m[1]) == 2 else '"', "", m[2]),
                  text)
    text = re.sub(r"(?m)^\..*$", "", text)
    for escape, character in (("-", "-"), ("(aq", "'"), ("(lq", '"'), ("(rq", '"')):
        text = text.replace("\\" + escape, character)
    return re.sub(r"\\f(\(..|\[.*?\]|.)|\\[&/,|:%]|\\s[-+]?\d", "", text).replace("\\e", "\\")


def from_info(text):
    return re.sub(r"(?m)^(\x1f|File:.*Node:.*|\* .*::.*|\*Note.*|[*=.-]{3,}\s*)$", "", text)


def reader(name):
    """Returns what makes text of a file of that name; None: it is not read."""
    name = name.removesuffix(".gz")
    if SKIPPED.search(name):
        return None
    if re.search(r"\.x?html?$", name):
        return from_html
    if re.search(r"/man/man\d/", name):
        return from_man
    if re.search(r"/info/[^/]*\.info(-\d+)?$", name):
        return from_info
    if re.search(r"\.(page|xml)$", name) and "/help/C/" in name:
        return from_html
    if re.search(r"\.(txt|rst|md|text|pod|dict\.dz)$", name) or re.search(
            r"/games/fortunes/[^.]*$|/doc/[^.]*/[^./]*$|/share/(dictd|bible|perl)/", name):
        return str
    return None


def paragraphs(text, seen):
    """Yields the paragraphs of prose that no earlier file had."""
    for part in re.split(r"\n\s*\n|\n%\n", text):
        part = " ".join(part.split())
        letters = sum(c.isalpha() for c in part)
        words = re.findall(r"[a-z]+", part.lower())
        if len(part) < 3 or letters < 0.72 * (len(part) - part.count(" ")) or \
                sum(map(len, words)) < 0.97 * letters or max(map(len, part.split())) > 60:
            continue
        # a heading may be short; a longer one has words that any sentence has
        if len(words) > 8 and sum(word in COMMON for word in words) < 0.15 * len(words):
            continue
        key = hashlib.blake2b("".join(words).encode(), digest_size=8).digest()
        if len(words) > 8 and key in seen:
            continue
        seen.add(key)
        yield part, len(words) > 8


def documents(paths, seen):
    """Yields (file, text): pieces of files, most of whose paragraphs are sentences."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", paths], stdout=subprocess.PIPE) as deb, \
            tarfile.open(fileobj=deb.stdout, mode="r|") as members:
        for member in members:
            read = reader(member.name) if member.isfile() and member.size < 60e6 else None
            if not read:
                continue
            data = members.extractfile(member).read()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            if b"\0" in data[:4096]:
                continue
            kept, sentences, size = [], 0, 0
            for part, is_sentence in paragraphs(read(data.decode(errors="ignore")), seen):
                kept.append(part)
                size += len(part)
                sentences += is_sentence * len(part)
                if size > PIECE:
                    if sentences > 0.7 * size:
                        yield member.name, "\n\n".join(kept)
                    kept, sentences, size = [], 0, 0
            if size > LEAST and sentences > 0.7 * size:
                yield member.name, "\n\n".join(kept)


def main():
    folder, most = sys.argv[1], int((sys.argv[2:] or ["240000000"])[0])
    debs = os.path.join(folder, "debs")
    os.makedirs(debs, exist_ok=True)
    held = {name.split("_")[0]: name for name in sorted(os.listdir(debs))}
    if missing := [name for name in PACKAGES if name not in held]:
        subprocess.run(["apt-get", "download", *missing], cwd=debs, check=True)
        held = {name.split("_")[0]: name for name in sorted(os.listdir(debs))}
    train, valid, seen = [], [], set()
    for package in PACKAGES:
        found, sizes = list(documents(os.path.join(debs, held[package]), seen)), [0, 0]
        random.Random(package).shuffle(found)
        for name, text in found:
            where = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < VALID
            if sizes[where] + len(text) < MOST_OF_ONE * (VALID / 100 if where else 1):
                sizes[where] += len(text)
                (valid if where else train).append((package, text))
        print(f"{package}: {sizes[0]:,} characters, validation {sizes[1]:,}", flush=True)
    for name, chosen in (("train", train), ("valid", valid)):
        random.Random(1).shuffle(chosen)
        left = most
        with open(os.path.join(folder, f"{name}.jsonl"), "w") as file:
            for package, text in chosen:
                left -= len(text)
                if left >= 0:
                    file.write(json.dumps({"text": text, "package": package}) + "\n")


if __name__ == "__main__":
    main()
