"""A report as a list of blocks, written as Markdown or as one HTML page that needs nothing else.

In texts, `code` and **bold** mean what they mean in Markdown; nothing else does.
"""

import base64
import html
import re
from dataclasses import dataclass


@dataclass
class Heading:
    text: str
    level: int = 2


@dataclass
class Text:
    text: str


@dataclass
class Verdict:
    text: str
    result: str # pass, FAIL or cannot tell


@dataclass
class Listing:
    lines: list


@dataclass
class Table:
    header: list
    rows: list      # of texts
    words: set = frozenset((0,)) # columns that hold words; the others hold numbers


@dataclass
class Picture:
    file: str      # beside the Markdown
    light: bytes   # PNG
    dark: bytes
    title: str
    caption: str


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def markdown_table(table):
    columns = len(table.header)
    rule = ["---" if i in table.words else "---:" for i in range(columns)]
    rows = [table.header, rule, *table.rows]
    return "\n".join("| " + " | ".join(cell(value) for value in row) + " |" for row in rows)


def markdown(blocks):
    out = []
    for block in blocks:
        if isinstance(block, Heading):
            out.append("#" * block.level + " " + block.text)
        elif isinstance(block, Verdict):
            out.append(f"**{block.text}**")
        elif isinstance(block, Listing):
            out.append("\n".join(["```sh", *block.lines, "```"]))
        elif isinstance(block, Table):
            out.append(markdown_table(block))
        elif isinstance(block, Picture):
            out.append(f"![{block.title}]({block.file})\n\n{block.caption}")
        else:
            out.append(block.text)
    return "\n\n".join(out) + "\n"


STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --quiet: #59636e;
  --line: #d9dee3; --wash: #f6f8fa; --good: #00654a; --good-wash: #e2f4ed; --bad: #a33c00;
  --bad-wash: #fdebe0; }
@media (prefers-color-scheme: dark) { :root { --paper: #0f1419; --ink: #e6edf3; --quiet: #9aa7b4;
  --line: #2f3842; --wash: #171e26; --good: #4fd1a5; --good-wash: #10291f; --bad: #ff9550;
  --bad-wash: #33200f; } }
body { background: var(--paper); color: var(--ink); max-width: 62rem; margin: 2rem auto 4rem;
  padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
h3 { font-size: 1rem; margin-top: 1.6rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .32rem .8rem .32rem 0; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; } .words { text-align: left; }
th, td:not(.words), td.still { white-space: nowrap; }
td.fail { color: var(--bad); font-weight: 700; } td.pass { color: var(--good); }
.verdict { padding: .7rem 1rem; border-left: .35rem solid; font-weight: 600; }
.verdict.pass { color: var(--good); background: var(--good-wash); }
.verdict.fail { color: var(--bad); background: var(--bad-wash); }
.verdict.cannot { color: var(--quiet); background: var(--wash); }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; }
figcaption { color: var(--quiet); font-size: .9rem; }
pre { background: var(--wash); padding: .7rem 1rem; overflow-x: auto; font-size: .85rem; }
code { background: var(--wash); padding: .1em .3em; border-radius: 3px; font-size: .9em; }
pre code { padding: 0; }
"""


SHORT_CELL = 16 # letters, that stay on one line


def inline(text):
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(text), quote=False))
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)


def html_row(values, tag, words):
    values = [str(value) for value in values]
    def one(i, value):
        names = ["words"] * (i in words)
        if tag == "td" and value in ("pass", "FAIL"):
            names.append(value.lower())
        if tag == "td" and len(value) < SHORT_CELL:
            names.append("still")
        kind = f' class="{" ".join(names)}"' if names else ""
        return f"<{tag}{kind}>{inline(value)}</{tag}>"
    return "<tr>" + "".join(one(i, value) for i, value in enumerate(values)) + "</tr>"


def html_table(table):
    rows = [html_row(table.header, "th", table.words)]
    rows += [html_row(row, "td", table.words) for row in table.rows]
    return '<div class="table"><table>' + "\n".join(rows) + "</table></div>"


def data_uri(png):
    return "data:image/png;base64," + base64.b64encode(png).decode()


def html_picture(picture):
    caption = inline(picture.caption)
    return (f'<figure><picture><source srcset="{data_uri(picture.dark)}" '
            'media="(prefers-color-scheme: dark)">'
            f'<img src="{data_uri(picture.light)}" '
            f'alt="{html.escape(picture.title)}"></picture>'
            f"<figcaption>{caption}</figcaption></figure>")


def html_block(block):
    if isinstance(block, Heading):
        return f"<h{block.level}>{inline(block.text)}</h{block.level}>"
    if isinstance(block, Verdict):
        kind = block.result.lower().split()[0]
        return f'<p class="verdict {kind}">{inline(block.text)}</p>'
    if isinstance(block, Listing):
        return "<pre><code>" + html.escape("\n".join(block.lines), quote=False) + "</code></pre>"
    if isinstance(block, Table):
        return html_table(block)
    if isinstance(block, Picture):
        return html_picture(block)
    return f"<p>{inline(block.text)}</p>"


def page(blocks, refresh=None):
    """refresh: seconds after which the page loads itself again, for a run in progress."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "llm8.c")
    again = f'<meta http-equiv="refresh" content="{refresh:g}">\n' if refresh else ""
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"{again}<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(html_block(block) for block in blocks) + "\n</body>\n</html>\n")
