"""Talks to a model that was tuned on conversations, which is what scripts/chat does: the
tokenizer's own chat template writes the prompt, and the trainer writes the answer."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile

from .command_line import Parser, split_words
from .conversation import BadTemplate, ChatTemplate, Conversation, warnings_of
from .environment import built, die, warn
from .vocabulary import open_vocabulary

TOKENS = re.compile(r"(\d+ )+")


def listen(command, ends):
    """Runs the trainer until it writes a token of `ends`: its status, output, and if it did."""
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        for letter in iter(lambda: trainer.stdout.read(1), ""):
            said += letter
            line = said.rpartition("\n")[2] if letter == " " else ""
            if TOKENS.fullmatch(line) and int(line.split()[-1]) in ends:
                trainer.terminate()
                return 0, said, True
    return trainer.returncode, said, False


class Model:
    """A model and its chat template. The model is loaded anew for each answer."""

    def __init__(self, folder, program, options):
        self.folder, self.options = folder, options
        self.command = [program, "--load", folder, "--sample-only", "--quiet"]
        tokenizer = os.path.join(folder, "tokenizer.json")
        if not os.path.exists(tokenizer):
            missing = "without a tokenizer.json" if os.path.isdir(folder) else \
                "a file" if os.path.exists(folder) else "no such folder"
            near = [path for name in ("best", "latest")
                    if os.path.exists(os.path.join(path := os.path.join(folder, name),
                                                   "tokenizer.json"))]
            die(f"{folder}: {missing}; " + (
                f"did you mean {near[0]}?" if near else
                "give a checkpoint, such as RUN/best, of a run on conversations"))
        self.vocabulary = open_vocabulary({"tokenizer": tokenizer})
        if not self.vocabulary.templates:
            die(f"{folder}: no chat template, so its data were no conversations; {program} --load "
                f"{folder} --sample-only --sample-prompt TEXT continues a text")
        self.warned = set() # each turn repeats the doubts about earlier turns
        with self.faults():
            self.template = ChatTemplate(self.vocabulary)
        self.ends = {*self.vocabulary.specials.values(), *self.template.ends()}

    @contextlib.contextmanager
    def faults(self):
        try:
            yield
        except (BadTemplate, ValueError) as error:
            die(f"{self.folder}: {error}")

    def answer(self, messages):
        """Prints and returns the answer, or None, and the trainer's exit status."""
        with self.faults():
            prompt, doubts = self.template.prompt(Conversation({"messages": messages}))
        for warning in warnings_of(doubts):
            what = warning.partition(": ")[2] # without the counts
            if what not in self.warned:
                warn(warning)
            self.warned.add(what)
        with tempfile.NamedTemporaryFile("w") as file:  # the length of an option's text is limited
            file.write(" ".join(map(str, prompt)))
            file.flush()
            status, said, ended = listen([*self.command, "--sample-tokens", "@" + file.name,
                                          *self.options], self.ends)
        line = (said.splitlines() or [""])[-1]
        if status != 0 or not TOKENS.fullmatch(line):
            print(said, end="")  # such as the output of --help
            return None, status
        ids = list(map(int, line.split()))
        text = self.vocabulary.tokenizer.decode(ids[:-1] if ended else ids).strip()
        print(text, flush=True)
        if not ended:
            print(f"note: cut off after {len(ids)} tokens; -- --sample-length N sets another "
                  "number", file=sys.stderr)
        return text, status


def turns():
    """Yields the user's lines, until /exit or the end of the input."""
    sys.stdin.reconfigure(errors="replace")
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  makes the arrow keys work in the line
        print("a line is a message; /exit or Ctrl-D ends")
    with contextlib.suppress(EOFError):
        while (line := input("> " if asks else "")).strip() != "/exit":
            if line.strip():
                yield line


def main():
    ours, options = split_words(sys.argv[1:])
    p = Parser(prog="scripts/chat", unknown="; those of the trainer go behind --, and a "
               "message that begins with - through standard input (MESSAGE -)",
               description="Prints what a model answers to MESSAGE; without MESSAGE, answers each "
                           "input line in the context of the earlier turns, until /exit. Options "
                           "for the trainer go behind --.")
    p.add_argument("model", metavar="DIR", help="a checkpoint, or a start of convert_hf")
    p.add_argument("message", metavar="MESSAGE", nargs="?",
                   help="-: it is read from standard input, as it must be if it begins with -")
    p.add_argument("--system", metavar="TEXT", help="a message of the system's before it")
    p.add_argument("--gpu", action="store_true", help="by train_gptcu instead of train_gpt")
    o = p.parse_args(ours, intermixed=True)
    if o.message == "-":
        o.message = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    model = Model(o.model, built("train_gptcu" if o.gpu else "train_gpt"), options)
    messages = [{"role": "system", "content": o.system}] if o.system else []
    for message in turns() if o.message is None else [o.message]:
        messages.append({"role": "user", "content": message})
        answer, status = model.answer(messages)
        if answer is None:
            return status
        messages.append({"role": "assistant", "content": answer})
    return 0
