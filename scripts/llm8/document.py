"""Makes a report, which is Markdown, into one HTML page by the template page.html. The page needs
no other file."""

import base64
import html
import os
import re
from dataclasses import dataclass
from string import Template

from markdown_it import MarkdownIt

from . import style

TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
CLASSES = {"pass": "pass", "PASS": "pass", "FAIL": "fail", "cannot tell": "open",
           "CANNOT TELL": "open"}
VERDICTS = "|".join(CLASSES)


@dataclass
class Picture:
    file: str      # the picture's file, beside the Markdown
    data: bytes    # SVG
    title: str

    def __str__(self):
        return f"![{self.title}]({self.file})"


def page(blocks):
    """Returns the page. blocks: texts in Markdown, the first is the heading, and pictures."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(
        "\n\n".join(map(str, blocks)))
    for picture in blocks:
        if isinstance(picture, Picture):
            data = base64.b64encode(picture.data).decode()
            body = body.replace(f'src="{picture.file}"', f'src="data:image/svg+xml;base64,{data}"')

    # colours verdicts, which are cells or the first paragraph of a report
    body = re.sub(rf"<(td[^>]*|p)>((?:<strong>)?({VERDICTS})(?:: |</td>))",
                  lambda m: f'<{m[1]} class="{CLASSES[m[3]]}">{m[2]}', body)
    colours = {f"{name}{form}": colour for name, pair in style.THEME.items()
               for form, colour in zip(("", "_dark"), pair)}
    with open(TEMPLATE, encoding="utf-8") as file:
        return Template(file.read()).substitute(
            colours, title=html.escape(str(blocks[0]).lstrip("# ")), body=body)
