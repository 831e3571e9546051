"""Makes multiple-choice sets for the trainers' --eval-choices, for scripts/prepare_choices.
dataloader/choices.h has the format."""

import itertools
import os
import re
import shlex
import struct

import numpy

from . import downloads, shards, sources
from .command_line import Parser
from .environment import die, named_by, warn, write_durably
from .text import many
from .vocabulary import add_options, open_vocabulary

MAGIC, START = 20240522, 65535
HELLASWAG = "Rowan/hellaswag", "dataset", ["data/validation-*.parquet"]
# field names in published sets: of the question, of its answers, and of the right answer
CONTEXTS = ["ctx", "context", "question", "question_stem", "query", "prompt", "goal", "sentence",
            "passage", "article"]
ANSWERS = ["endings", "choices", "options", "answers"]
LABELS = ["label", "answerKey", "gold", "answer", "target"]


def find(row, wanted, usual, what):
    names = [name for name in ([wanted] if wanted else usual) if name in row]
    names = [name for name in names if row[name] not in (None, "")] or names
    if not names:
        raise ValueError(f"no {what} under {wanted or ', '.join(usual)}; it has {', '.join(row)} "
                         "(--context-field, --choices-field, --label-field)")
    if usual is CONTEXTS and len(names) > 1:  # perhaps a passage and the question about it
        raise ValueError(f"both '{names[0]}' and '{names[1]}'; write the whole question into one "
                         "field, and name that one (--context-field)")
    return row[names[0]]


def cleaned(text):
    """Returns a text of HellaSwag in lm-eval's wording, without WikiHow's marks."""
    marked = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", marked).replace("  ", " ")


def lm_evals_text(row, o):
    """Returns a HellaSwag question in lm-eval's wording; None for rows of other sets."""
    parts = [row.get(name) for name in ("activity_label", "ctx_a", "ctx_b")]
    if o.context_field or not all(isinstance(part, str) for part in parts):
        return None
    label, first, second = parts
    return cleaned(f"{label}: {first} {second.capitalize()}")


def read_row(row, o):
    """Returns (context, answers, which answer is right) from a row in any usual form; whether the
    wording is lm-eval's; and whether the right answer's number or letter is a text that is also
    another answer's. White space between context and answer belongs to the answer. Raises
    ValueError if the row is not a question."""
    context = lm_evals_text(row, o)
    of_lm_eval = context is not None
    if not of_lm_eval:
        context = find(row, o.context_field, CONTEXTS, "question")
    answers = find(row, o.choices_field, ANSWERS, "list of answers")
    given = label = find(row, o.label_field, LABELS, "right answer")
    names = None
    if isinstance(answers, dict):  # ARC: {"text": [...], "label": ["A", ...]}
        names, answers = answers.get("label"), answers.get("text")
    if not isinstance(context, str) or not context.strip():
        raise ValueError("the question is no text")
    if not isinstance(answers, list) or len(answers) < 2 or not all(
            isinstance(answer, str) and answer.strip() for answer in answers):
        raise ValueError("the answers are no list of texts")
    numbers = [str(name) for name in names or range(len(answers))]
    label = str(label).strip()
    letter = ord(label) - ord("A") if len(label) == 1 and "A" <= label <= "Z" else len(answers)
    right = numbers.index(label) if label in numbers else letter
    if right >= len(answers):
        raise ValueError(f"the right answer is {label}, none of {', '.join(numbers)}")
    texts = [answer.strip() for answer in answers]
    doubtful = names is None and given in texts and texts[right] != given
    bare = context.rstrip()
    end = context[len(bare):]
    answers = [f"{end} {cleaned(answer)}" for answer in answers] if of_lm_eval else \
        [spaced(end, answer) for answer in answers]
    return (bare, answers, right), of_lm_eval, doubtful


def spaced(end, answer):
    """Returns an answer with a space before it: its own, else the question's last, or " "."""
    return answer if answer[0].isspace() and not end.strip(" ") else (end or " ") + answer


def encode_row(vocabulary, context, answers, label, before):
    """Returns a question's record (dataloader/choices.h) from its label on, and whether some token
    spans the end of the context and the begin of an answer. As in lm-eval, context and answer are
    encoded together, because some tokenizers write a space before a text. If the context alone has
    n tokens, the answer's tokens are those after the first n."""
    head, crosses = vocabulary.encode(context), False
    numbers = [label, len(answers), len(before) + len(head), *before, *head]
    for answer in answers:
        whole = vocabulary.encode(context + answer)
        tokens = whole[len(head):]
        if not tokens:
            raise ValueError(f"the answer {answer!r} has no token of its own after the question")
        crosses |= whole[:len(head)] != head
        numbers += [len(tokens), *tokens]
    return numbers, crosses


def begin_of(vocabulary):
    """Returns the tokens that the tokenizer itself writes before a text."""
    held = vocabulary.tokenizer.encode("a")
    count = len(list(itertools.takewhile(bool, held.special_tokens_mask)))
    return held.ids[:count]


def write_set(path, source, questions, dtype, fingerprint, of_lm_eval):
    """Writes a set. questions: lists of numbers by encode_row. source: the file they come from."""
    parts, longest = [], 0
    for index, numbers in enumerate(questions):
        size = (3 + len(numbers)) * dtype.itemsize
        longest = max(longest, size)
        if dtype.itemsize == 2 and size > 65535:
            die(f"{source}: question {index} has {size} bytes of tokens, more than 65535; "
                "shorten it")
        row = [START, size, index & 65535 if dtype.itemsize == 2 else index, *numbers]
        parts.append(numpy.array(row, dtype=dtype).tobytes())
    header = struct.pack("<4iIi", MAGIC, dtype.itemsize // 2, len(parts), longest, fingerprint,
                         of_lm_eval)
    write_durably(path, [header.ljust(1024, b"\0"), *parts])


def read_questions(path, vocabulary, before, o):
    """Returns the questions of a file, as encode_row writes them, the contexts whose end is within
    a token, and whether the wording is lm-eval's."""
    crossed, of_lm_eval, doubts = [], [], []

    def take(row):
        question, lm_evals, doubtful = read_row(row, o)
        doubts.extend([question] * doubtful)
        numbers, crosses = encode_row(vocabulary, *question, before)
        crossed.extend([question[0]] * crosses)
        of_lm_eval.append(lm_evals)
        return numbers

    try:
        questions = [numbers for unit in sources.units_of([path], False, None, False)
                     for numbers in sources.documents(unit, take)]
    except sources.BadSource as bad:
        die(str(bad))
    if not questions:
        die(f"{path}: no questions in it")
    if len(set(of_lm_eval)) > 1:
        die(f"{path}: {sum(of_lm_eval):,} of {many(len(questions), 'question')} have HellaSwag's "
            "activity_label, ctx_a and ctx_b, of which lm-eval makes its text, and the others do "
            "not; name one field (--context-field ctx)")
    if doubts:
        _, answers, right = doubts[0]
        warn(f"in {len(doubts):,} of {many(len(questions), 'question')} the right answer's number "
             f"or letter is also the text of another answer; it was read as {answers[right]!r} in "
             "the first; if a text is meant, write its number from 0")
    return questions, crossed, of_lm_eval[0]


def main():
    p = Parser(
        prog="scripts/prepare_choices",
        description="Turns a multiple-choice set into the file that the trainers score with "
                    "--eval-choices.",
        epilog="A row is a question (ctx, question, ...), a list of answers (endings, choices, ...)"
               "\nand which is right (label, answerKey, ...: its number from 0, or its letter),\n"
               "as HellaSwag, ARC and others publish them. Give --tokenizer the tokenizer.json\n"
               "that prepare_data left beside the shards, so that the tokens are the same.")
    p.add_argument("source", metavar="SOURCE", help="a file of rows, or hellaswag")
    p.add_argument("--output", required=True, metavar="FILE", help="as data/hellaswag.bin")
    add_options(p)
    p.add_argument("--before", metavar="TOKEN", help="put before each question; none: nothing "
                   "[what the tokenizer writes before a text, as lm-eval does]")
    p.add_argument("--context-field", default="", metavar="NAME", help="where the question stands "
                   "[the usual names; for HellaSwag lm-eval's text, of several fields]")
    p.add_argument("--choices-field", default="", metavar="NAME", help="where the answers stand")
    p.add_argument("--label-field", default="", metavar="NAME", help="where the right one stands")
    o = p.parse_args()
    path = o.source
    if path == "hellaswag" and not os.path.exists(path):
        [[path]] = downloads.from_hub(path, *HELLASWAG, vars(o))
    if not os.path.isfile(path):
        die(f"{path}: no such file; give one, or hellaswag")
    # in a .csv there are no lists of answers
    kinds = [ending for ending, kind in sources.KINDS.items() if kind not in ("text", "csv")]
    if sources.ending_of(path) not in kinds:
        die(f"{path}: must be of {' '.join(kinds)}")
    vocabulary = open_vocabulary(vars(o))
    before = begin_of(vocabulary) if o.before is None else \
        [] if o.before == "none" else [vocabulary.special(o.before, "--before")]
    questions, crossed, of_lm_eval = read_questions(path, vocabulary, before, o)
    if crossed:
        warn(f"in {len(crossed):,} of {many(len(questions), 'question')} a token belongs to both "
             "the question and an answer; it is not scored, as in lm-eval; the first: "
             f"...{crossed[0][-40:]!r}; end the question elsewhere")
    with named_by("--output"):
        os.makedirs(os.path.dirname(os.path.abspath(o.output)), exist_ok=True)
        write_set(o.output, path, questions, shards.token_type(vocabulary.size),
                  vocabulary.fingerprint(), of_lm_eval)
    begin = " ".join(map(vocabulary.tokenizer.id_to_token, before))
    print(f"{o.output}: {many(len(questions), 'question')}, tokenizer {vocabulary.name}"
          f"{', each after ' + begin if begin else ''}")
    print("text: as lm-eval writes HellaSwag; --context-field ctx takes llm.c's" if of_lm_eval
          else "text: the question's field as it stands")
    print(f"score them with --eval-choices {shlex.quote(o.output)}, during a run or with "
          "--eval-only")
