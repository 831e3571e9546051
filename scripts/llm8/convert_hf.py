"""The command line of scripts/convert_hf."""

import os

from . import downloads, hugging_face
from .command_line import Parser
from .environment import die


def parser():
    p = Parser(
        prog="scripts/convert_hf",
        description="Hugging Face models into this house.",
        epilog="docs/fine_tune.md lists the families of models that are supported; the trainer\n"
               "refuses others, and says what it lacks for them.\n\n"
               "The way back needs no conversion: every checkpoint folder has model.safetensors,\n"
               "config.json and, where it is known, tokenizer.json: give it to transformers.")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("import", help="a model's folder, or OWNER/NAME on the Hub, into a "
                              "start for the trainers' --load")
    one.add_argument("model", metavar="DIR|OWNER/NAME[@REVISION]")
    one.add_argument("--output", required=True, metavar="DIR", help="where the start goes")
    downloads.add_options(one)
    return p


def main():
    o = parser().parse_args()
    folder = o.model
    if not os.path.exists(folder) and folder.count("/") == 1 and not folder.startswith((".", "/")):
        _, files = downloads.from_hub(o.model, o.model, "model", ["model*.safetensors", "*.json"],
                                      vars(o))
        if not any(os.path.basename(path) == "config.json" for path in files):
            die(f"{o.model}: no config.json on the Hub: not a model's repository")
        folder = os.path.commonpath(map(os.path.dirname, files))
    arch, tensors, tokenizer = hugging_face.import_model(folder, o.output)
    count = 0
    for tensor in tensors.values():
        count += tensor.size // hugging_face.DTYPES[tensor.dtype]
    kinds = sorted({tensor.dtype for tensor in tensors.values()})
    bare = "" if tokenizer else "; no tokenizer.json beside it"
    print(f"{o.output}: {arch}, {count:,} parameters in {len(tensors)} tensors, "
          f"{', '.join(kinds)}{bare}")
    print(f"start from it with --load {o.output} --data ...")
