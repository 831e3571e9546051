"""A command line whose faults are one line, as all errors are here."""

import argparse
import difflib
import re

from .environment import die


def guess(word, known):
    """What a word that is not known may have meant, as the end of a message."""
    near = difflib.get_close_matches(word, known, 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """unknown: what is said of an option that is none of ours, nor like one."""

    def __init__(self, unknown="", **words):
        self.unknown = unknown
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **words)

    def parse_args(self, arguments=None):
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].split("=")[0]
            what = f"unknown option {word}" if word[:1] == "-" else f"unexpected argument {word}"
            ours = guess(word, self._option_string_actions) if word[:1] == "-" else ""
            self.error(what + (ours or self.unknown))
        return found

    def error(self, message):
        message = re.sub(r"^argument (--\S+): (.*: must be)", r"\1 \2", message)
        die(f"{message} ({self.prog} --help)")


def number(kind, low, high, what, unit=""):
    """For add_argument's type: an int or float from low to high, after which the unit may stand."""
    def read(text):
        try:
            value = kind(text.removesuffix(unit))
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be {what}")
        return value

    return read
