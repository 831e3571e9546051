"""Conversations as a tokenizer's own chat template writes them, and which of their tokens the
model is to learn.

The template is rendered as transformers' apply_chat_template does it, but without the day's date
(strftime_now): what is prepared shall not depend on it. A token counts if the template writes it
after what it gives the model to answer from (add_generation_prompt).
"""

import json
import re

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, processors

from .vocabulary import encodable


class Generation(Extension):
    """{% generation %}, by which some templates mark what the model writes: its content alone."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def refuse(message):
    raise TemplateError(message)


def as_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def text_of(message):
    """Returns the content of a message, whose parts may be texts; None beside calls of tools."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "".join(parts)
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise ValueError("the content of a message is no text")
    return content


def tools_of(row):
    """Returns the functions that a row describes; sets in .parquet often have them as JSON."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise ValueError(f"its tools are no JSON: {tools[:40]!r}") from None
    if not isinstance(tools, list | None):
        raise ValueError(f"its tools are no list: {str(tools)[:40]!r}")
    return tools


class Conversation:
    """A row's messages, the first whose answer counts, and the tools that the template is told
    of."""

    def __init__(self, row):
        """Raises ValueError for a row that holds none."""
        messages, self.counted = row.get("messages"), 0
        prompt, completion = row.get("prompt"), row.get("completion")
        if messages is None and isinstance(prompt, list) and isinstance(completion, list):
            messages, self.counted = prompt + completion, len(prompt)
        elif messages is None:
            messages = [{"role": "user", "content": prompt},
                        {"role": "assistant", "content": completion}]
        if not isinstance(messages, list) or not all(isinstance(message, dict) and isinstance(
                message.get("role"), str) for message in messages):
            raise ValueError("its messages are no list of objects with a role")
        texts = [{"content": text_of(message)} if "content" in message or
                 not message.get("tool_calls") else {} for message in messages]
        self.messages = [{key: value for key, value in message.items() if value is not None} | text
                         for message, text in zip(messages, texts)]
        self.tools = tools_of(row)

    def text(self):
        """Returns a text that is the same for the same conversation."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False, sort_keys=True,
                          default=str)


LIKE_SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>")  # as <|im_end|>


class BadTemplate(Exception):
    """Says why no conversation can be written."""


class ChatTemplate:
    """The chat template of a Vocabulary; BadTemplate where it has none."""

    def __init__(self, vocabulary):
        self.source = vocabulary.chat_template()
        if not self.source:
            raise BadTemplate(f"the tokenizer {vocabulary.name} has no chat template; put the "
                              "chat_template.jinja of a model that has one beside its "
                              "tokenizer.json, or take that model's tokenizer")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = as_json
        environment.globals["raise_exception"] = refuse
        try:
            self.template = environment.from_string(self.source)
        except TemplateError as error:
            raise BadTemplate(f"the chat template of {vocabulary.name}: {error}; mend "
                              "it") from None
        self.specials = vocabulary.named_specials()
        # special tokens are what a template writes; its text has all that stands before words
        self.tokenizer = Tokenizer.from_str(vocabulary.json)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.post_processor = processors.Sequence([])  # one that moves offsets

    def foreign(self):
        """Returns what it writes that looks like special tokens, and is not in the vocabulary."""
        named = [text for key, text in self.specials.items() if key in self.source]
        return [text for text in [*LIKE_SPECIAL.findall(self.source), *named]
                if self.tokenizer.token_to_id(text) is None]

    def render(self, conversation, end, answers):
        """Writes the messages before `end` and, with `answers`, what the model answers from."""
        try:
            return encodable(self.template.render(
                messages=conversation.messages[:end], tools=conversation.tools, documents=None,
                add_generation_prompt=answers, **self.specials))
        except Exception as error:  # a template is a program, and may raise any
            if "strftime_now" in str(error):
                raise ValueError("the chat template asks for today's date (strftime_now), which is "
                                 "left out so that data prepared again are the same; write a date "
                                 "into the template") from None
            why = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {why}") from None

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def texts(self, conversation):
        """[text, [(begin, end) of what the model writes]]: one, or where the template changes
        earlier turns once there are later ones, one for each text that an answer ends."""
        found = []
        for place, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or place < max(1, conversation.counted):
                continue
            prompt = self.render(conversation, place, True)
            text = self.render(conversation, place + 1, False)
            if not text.startswith(prompt):
                raise ValueError("the chat template does not write an answer after what it gives "
                                 "to answer from")
            turn = (len(prompt), len(text))
            if found and prompt.startswith(found[-1][0]):
                turn = found.pop()[1] + [turn]
            else:
                turn = [turn]
            found.append((text, turn))
        if not found:
            raise ValueError("no message of the assistant's that answers one")
        return found

    def samples(self, conversation):
        """Yields ids and whether each counts, once or more often."""
        for text, turns in self.texts(conversation):
            held = self.tokenizer.encode(text, add_special_tokens=False)
            if not held.ids:
                raise ValueError("the chat template writes nothing")
            counts = [any(begin <= at < end for begin, end in turns) for at, _ in held.offsets]
            counts[:1] = [False] * len(counts[:1])  # nothing stands before it
            yield held.ids, counts
