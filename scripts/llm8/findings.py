"""What the doctor finds: how bad it is, about what, in a sentence, and what to do."""

from dataclasses import dataclass

OK, NOTE, WRONG = "ok", "note", "WRONG"


@dataclass
class Finding:
    level: str
    about: str
    text: str
    remedy: str = ""


def well(about, text):
    return Finding(OK, about, text)


def note(about, text, remedy=""):
    return Finding(NOTE, about, text, remedy)


def wrong(about, text, remedy):
    return Finding(WRONG, about, text, remedy)
