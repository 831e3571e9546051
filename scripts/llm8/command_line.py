"""A command line whose faults are one line, as all errors are here."""

import argparse
import re

from .environment import die


class Parser(argparse.ArgumentParser):
    def __init__(self, **words):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **words)

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
