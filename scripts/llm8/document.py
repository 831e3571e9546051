"""A report is Markdown; page() makes one HTML page of it, page.html, that needs nothing else."""

import base64
import html
import os
import re
from dataclasses import dataclass
from string import Template

from markdown_it import MarkdownIt

TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
CLASSES = {"pass": "pass", "PASS": "pass", "FAIL": "fail", "cannot tell": "open",
           "CANNOT TELL": "open"}
VERDICTS = "|".join(CLASSES)


@dataclass
class Picture:
    file: str      # beside the Markdown
    light: bytes   # PNG
    dark: bytes
    title: str

    def __str__(self):
        return f"![{self.title}]({self.file})"


def data_uri(png):
    return "data:image/png;base64," + base64.b64encode(png).decode()


def page(blocks, refresh=None):
    """blocks: texts in Markdown, the first its heading, and pictures. refresh: seconds after which
    the page loads itself again, for a run in progress."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(
        "\n\n".join(map(str, blocks)))
    for picture in blocks:
        if isinstance(picture, Picture):
            body = body.replace(f'<img src="{picture.file}"', '<picture><source media="(prefers-'
                                f'color-scheme: dark)" srcset="{data_uri(picture.dark)}">'
                                f'<img src="{data_uri(picture.light)}"')
            body = body.replace(f'alt="{html.escape(picture.title)}" />',
                                f'alt="{html.escape(picture.title)}"></picture>')
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>",
                                                                         "</table></div>")
    body = re.sub(rf"<td([^>]*)>({VERDICTS})</td>",
                  lambda m: f'<td{m[1]} class="{CLASSES[m[2]]}">{m[2]}</td>', body)
    # the verdict of a report is its first paragraph
    body = re.sub(rf"<p>(<strong>({VERDICTS}): )", lambda m: f'<p class="{CLASSES[m[2]]}">{m[1]}',
                  body, count=1)
    again = f'<meta http-equiv="refresh" content="{refresh:g}">\n' if refresh else ""
    with open(TEMPLATE, encoding="utf-8") as file:
        return Template(file.read()).substitute(
            title=html.escape(str(blocks[0]).lstrip("# ")), refresh=again, body=body)
