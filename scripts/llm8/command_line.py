"""A command line whose faults are one line, as all errors are here."""

import argparse

from .environment import die


class Parser(argparse.ArgumentParser):
    def __init__(self, **words):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **words)

    def error(self, message):
        die(f"{message} ({self.prog} --help)")
