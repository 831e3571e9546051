"""One message to a model that was tuned on conversations, which is what scripts/chat does: the
tokenizer's own chat template writes the prompt, the trainer the answer.
"""

import os
import re
import subprocess
import sys
import tempfile

from .command_line import Parser, split_words
from .conversation import BadTemplate, ChatTemplate, Conversation, warnings_of
from .environment import built, checkpoint, die, warn
from .vocabulary import open_vocabulary

TOKENS = re.compile(r"(\d+ )+")


def listen(command, ends):
    """Runs the trainer until it writes one of the tokens `ends`. Returns its exit status, what it
    has said, and whether such a token came."""
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        for letter in iter(lambda: trainer.stdout.read(1), ""):
            said += letter
            line = said.rpartition("\n")[2] if letter == " " else ""
            if TOKENS.fullmatch(line) and int(line.split()[-1]) in ends:
                trainer.terminate()
                return 0, said, True
    return trainer.returncode, said, False


def main():
    ours, options = split_words(sys.argv[1:])
    p = Parser(prog="scripts/chat", unknown="; those of the trainer go behind --, and a "
               "message that begins with - through standard input (MESSAGE -)",
               description="Prints what a model answers to a message. Options for the trainer go "
                           "behind --.")
    p.add_argument("model", metavar="DIR", help="a checkpoint, or a start of convert_hf")
    p.add_argument("message", metavar="MESSAGE", nargs="?",
                   help="-: it is read from standard input, as it must be if it begins with -")
    p.add_argument("--system", metavar="TEXT", help="a message of the system's before it")
    p.add_argument("--gpu", action="store_true", help="by train_gptcu instead of train_gpt")
    o = p.parse_args(ours)
    if o.message is None:
        p.error("MESSAGE is missing")
    if o.message == "-":
        o.message = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    folder, program = checkpoint(o.model), built("train_gptcu" if o.gpu else "train_gpt")
    tokenizer = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(tokenizer):
        die(f"{tokenizer}: missing; give a checkpoint of a run whose data have one")
    vocabulary = open_vocabulary({"tokenizer": tokenizer})
    system = [{"role": "system", "content": o.system}] if o.system else []
    messages = [*system, {"role": "user", "content": o.message}]
    try:
        template = ChatTemplate(vocabulary)
        prompt, doubts = template.prompt(Conversation({"messages": messages}))
    except (BadTemplate, ValueError) as error:
        die(f"{o.model}: {error}")
    for warning in warnings_of(doubts):
        warn(warning)
    with tempfile.NamedTemporaryFile("w") as file:  # an option of text has a limit
        file.write(" ".join(map(str, prompt)))
        file.flush()
        command = [program, "--load", o.model, "--sample-only", "--quiet", "--sample-tokens",
                   "@" + file.name, *options]
        status, said, ended = listen(command, {*vocabulary.specials.values(), *template.ends()})
    line = (said.splitlines() or [""])[-1]
    if status != 0 or not TOKENS.fullmatch(line):
        print(said, end="")  # of an option that asks for something else, as --help
        return status
    ids = list(map(int, line.split()))
    print(vocabulary.tokenizer.decode(ids[:-1] if ended else ids).strip())
    if not ended:
        print(f"note: cut off after {len(ids)} tokens; -- --sample-length N sets another number",
              file=sys.stderr)
