"""What the doctor finds: how bad it is, about what, in a sentence, and what to do."""

from dataclasses import dataclass
from functools import partial

OK, NOTE, WRONG = "ok", "note", "WRONG"


@dataclass
class Finding:
    level: str
    about: str
    text: str
    remedy: str = ""


well, note, wrong = (partial(Finding, level) for level in (OK, NOTE, WRONG))
