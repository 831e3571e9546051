"""Parses command lines. An error is one line, as in all our programs."""

import argparse
import difflib
import re
import shlex

from .environment import die


def guess(word, known):
    """Returns the end of an error message: the known word that may have been meant."""
    near = difflib.get_close_matches(word, known, 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """unknown: what an error adds for an unknown option that resembles none of this parser's."""

    def __init__(self, unknown="", **words):
        self.unknown = unknown
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **words)

    def parse_args(self, arguments=None, intermixed=False):
        """intermixed: whether arguments may stand between options."""
        found, unknown = (self.parse_known_intermixed_args if intermixed
                          else self.parse_known_args)(arguments)
        if unknown:
            word = unknown[0].split("=")[0]
            what = f"unknown option {word}" if word[:1] == "-" else f"unexpected argument {word}"
            ours = guess(word, self._option_string_actions) if word[:1] == "-" else ""
            self.error(what + (ours or self.unknown))
        return found

    def error(self, message):
        message = re.sub(r"^argument (--\S+): (.*: must be)", r"\1 \2", message)
        message = message.removeprefix("argument ")
        die(f"{message} ({self.prog} --help)")


def split_words(arguments):
    """Returns the words before --, for this program, and the words after it, for the trainer."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1:]


def shell_words(text, said):
    """Splits a text into words as a shell does. said: the beginning of the error message."""
    try:
        return shlex.split(text)
    except ValueError as error:
        die(f"{said}: {error}")


def several(read):
    """Returns a type for add_argument: values separated by commas, each of the type `read`."""
    return lambda text: [read(part.strip()) for part in text.split(",")]


def one_of(known):
    """Returns a type for add_argument: one of the words in `known`."""
    def read(text):
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text}: must be of {', '.join(known)}")
        return text

    return read


def number(kind, low, high, what, unit=""):
    """Returns a type for add_argument: a number from low to high; a unit may follow it."""
    def read(text):
        try:
            value = kind(text.removesuffix(unit))
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be {what}")
        return value

    return read
