"""Writes conversations by a tokenizer's own chat template, and finds which of their tokens the
model is to learn.

The template is rendered as transformers' apply_chat_template (5.23) does it, but without today's
date (strftime_now), so that prepared data do not depend on the date. An answer's tokens count from
the end of the prompt, which is the text that the template gives the model to answer from
(add_generation_prompt), to the token that ends the answer, unless {% generation %} in the template
marks the tokens that count. Spaces that end a prompt belong to the answer, because tokenizers join
them to the next word.

What a template leaves out of a conversation is counted, for warnings.
"""

import contextlib
import copy
import itertools
import json
import os
import re
from collections import Counter

import numpy
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from tokenizers import Tokenizer

from .text import from_json
from .vocabulary import encodable

# code points that are no characters, so that no text contains them
BEGIN, END, CONTENT = "\ufdd0", "\ufdd1", "\ufdd2"
# fields that say whether a message counts: OpenAI's, axolotl's, ms-swift's
MARKS = ("weight", "train", "training", "train_on_turn", "loss")
REASONING = ("reasoning_content", "thinking", "reasoning")  # different names of one field
READ = {"role", "content", "tool_calls", "tool_call_id", "id", *MARKS, *REASONING}
HALVES = "they have halves of surrogate pairs, which are no characters and become ?"
DOUBTS = {  # key: (what is counted, its description)
    "restored": ("answers", "the chat template leaves out a part of them, such as what is before "
                 "</think>; they are trained whole, as the rows have them"),
    "content": ("answers", "the chat template does not write their content as it is; what it "
                "writes is trained"),
    "reasoning": ("answers", "the chat template does not write their reasoning, which is not "
                  "trained; write it into their content as the model does"),
    "tool_calls": ("answers", "the chat template does not write all of their tool calls, which "
                   "are not trained whole; take a template that knows tools"),
    "quoted": ("answers", "the arguments of their tool calls are JSON texts, which the chat "
               "template writes in quotes; give objects"),
    "unended": ("answers", "no special token that counts ends them, so the model does not learn "
                "where to end"),
    "unprompted": ("answers", "they do not begin with what the chat template's prompt ends in, "
                   "such as <think>; the model is asked with it, and has never seen it"),
    "asked": ("answers", "the chat template writes otherwise what is before them once they are "
              "there; they are trained behind what the model is asked with"),
    "joined": ("answers", "they begin within a token of the prompt's, which counts; the model is "
               "asked with the prompt alone"),
    "empty": ("answers", "they are empty, so the model learns to answer nothing; leave them out, "
              "or mark them with a weight of 0"),
    "named_specials": ("conversations", "their messages have special tokens' names, which become "
                       "these tokens; leave out what a template writes"),
    "named_ends": ("texts", "they contain the end-of-text token's name, which is cut as any text: "
                   "each is one document; give its parts as rows, or as files"),
    "nuls": ("texts", "they have NUL bytes, as packed files and UTF-16 have; unpack, convert or "
             "clean them"),
    "rows": ("texts", "they are rows of JSON, and are trained on with their names and quotes; "
             "name the files .jsonl or .json"),
    "halves": ("texts", HALVES),
    "halved": ("conversations", HALVES),
    "dropped": ("texts", "the tokenizer has no token for some of their characters, and leaves them "
                "out; take one that has all 256 bytes"),
    "unknown": ("tokens", "they are the tokenizer's unknown token, in place of words or characters "
                "that it does not know; take a tokenizer that knows them"),
    "left_out": ("conversations", "their rows have a weight of 0, so they are left out"),
    "null_fields": ("conversations", "their tools or calls have nulls, which rows written by the "
                    "package datasets have for other rows' fields; the chat template gets them: "
                    "leave them out, or give .parquet files"),
    "context": ("conversations", "the chat template does not write all messages before the answer"),
    "tools": ("conversations", "the chat template writes nothing of their tools; take one that "
              "knows tools")}


class Generation(Extension):
    """The tag {% generation %}, by which some templates mark what the model writes."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


class BadTemplate(Exception):
    """The template can write no conversation; the exception's text says why."""


class UndefinedName(Exception):
    """A template writes an undefined name, for which transformers would write an empty text."""


class Unknown(Undefined):
    """The value of an undefined name. A template may test it. Printing it gives an empty text if it
    is a field that a message lacks, or a name in `own`, which the template sets in some cases;
    otherwise it raises UndefinedName."""
    __slots__ = ()
    own = frozenset()

    def __str__(self):
        if self._undefined_obj is missing and self._undefined_name not in self.own:
            raise UndefinedName(self._undefined_name)
        return ""

    def __contains__(self, _):
        return False

    def __iter__(self):
        return iter(str(self))

    def __len__(self):
        return len(str(self))


def refuse(message):
    raise TemplateError(message)


def as_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


# ---- what a row holds ----------------------------------------------------------------------------


def text_of(message):
    """Returns a message's content as one text (it may be a list); None: only tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "".join(parts)
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise ValueError("the content of a message is no text")
    return content


def message_of(held):
    """Returns a message as templates get it: without nulls and an empty list of calls, with a text
    as its content, and with the reasoning under each name that templates read."""
    held = {key: value for key, value in (held | {"content": text_of(held)}).items()
            if value is not None and (key, value) != ("tool_calls", [])}
    reasoning = next((held[key] for key in REASONING if key in held), None)
    return held if reasoning is None else \
        {"thinking": reasoning} | held | {"reasoning_content": reasoning}


def is_learned(held, what="a message"):
    """Returns whether an answer or a row is to be learned; raises ValueError if that is not
    clear."""
    marks = {key: held[key] for key in MARKS if key in held}
    for key, mark in marks.items():
        if mark not in (0, 1):
            raise ValueError(f"'{key}' of {what} is {str(mark)[:40]!r}; it must be 0 or 1")
    return all(marks.values())


def tools_of(row):
    """Returns a row's tools, a list of objects, which .parquet files often have as a JSON text."""
    held = row.get("tools")
    if isinstance(held, str):
        try:
            held = json.loads(held)
        except (ValueError, RecursionError):
            raise ValueError(f"its tools are no JSON: {held[:40]!r}") from None
    if held is not None and not (isinstance(held, list) and
                                 all(isinstance(one, dict) for one in held)):
        raise ValueError(f"its tools are no list of objects: {str(held)[:40]!r}")
    return held


class Conversation:
    """The messages of a row as rows.py returns it, the index of the first answer that counts, and
    what the template gets besides the messages: tools and settings by name."""

    def __init__(self, row):
        """Raises ValueError if the row holds no conversation."""
        messages, self.counted = row.get("messages"), 0
        if messages is None:
            messages, self.counted = row["prompt"] + row["completion"], len(row["prompt"])
        if not isinstance(messages, list) or not all(isinstance(message, dict) and isinstance(
                message.get("role"), str) for message in messages):
            raise ValueError("its messages are no list of objects with a role")
        self.messages = list(map(message_of, messages))
        self.tools = tools_of(row)
        self.settings = row.get("chat_template_kwargs") or {}
        if not isinstance(self.settings, dict):
            raise ValueError("its chat_template_kwargs are no object")
        if re.search(f"[{BEGIN}-{CONTENT}]", self.text()):
            raise ValueError(f"it has U+{ord(BEGIN):X} to U+{ord(CONTENT):X}, which are no "
                             "characters")

    def text(self):
        """Returns a text that identifies the conversation."""
        more = [self.settings] if self.settings else []
        return json.dumps([self.messages, self.tools, *more], ensure_ascii=False, sort_keys=True,
                          default=str)


# ---- whether a text has what it should have ------------------------------------------------------


def common(one, other):
    """Returns the common beginning of two texts."""
    return one if other.startswith(one) else os.path.commonprefix([one, other])


def squeezed(text):
    """Returns a text without white space, which templates may change."""
    return "".join(text.split())


def written(value, text, least=0):
    """Returns whether a text contains a value, plainly or as JSON, so that the value ends after at
    least `least` letters other than white space."""
    forms = [value, *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True))] \
        if isinstance(value, str) else [json.dumps(value), str(value)]
    for form in set(map(squeezed, forms)):
        at = text.rfind(form)
        if not form or (at >= 0 and at + len(form) > least):
            return True
    return False


def leaves(value):
    """Yields the texts, numbers and truth values in a JSON value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    elif value is not None:
        yield value


def has_null_fields(value):
    """Returns whether an object in a JSON value has a null where tools and calls have none."""
    if isinstance(value, dict):
        return any(part is None and key not in ("default", "const") or has_null_fields(part)
                   for key, part in value.items())
    return isinstance(value, list) and any(map(has_null_fields, value))


def doubts_of_calls(message, text, least):
    """Yields the doubts about how a text shows a message's tool calls. All texts are squeezed."""
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        held = call.get("function", call) if isinstance(call, dict) else call
        held = held if isinstance(held, dict) else {"name": held}
        given = held.get("arguments")
        arguments = from_json(given)
        if arguments is None: # no text, or a text that is no JSON
            arguments = given
        # the arguments appear as a JSON string, in quotes; empty arguments need no quotes
        elif any(squeezed(json.dumps(given, ensure_ascii=ascii)) in text
                 for ascii in (False, True)):
            yield "quoted"
        if not all(written(leaf, text, least) for leaf in leaves([held.get("name"), arguments])):
            yield "tool_calls"


def warnings_of(doubts):
    """Yields a warning for each kind of doubt about the conversations."""
    for key, (whole, what) in DOUBTS.items():
        if doubts.get(key):
            yield f"{doubts[key]:,} of {doubts[whole]:,} {whole}: {what}"
    fields = [key.partition(" ")[2] for key in doubts if key.startswith("field ") and doubts[key]]
    if fields:
        yield (f"messages have {', '.join(map(repr, sorted(fields)[:8]))}, which neither the chat "
               "template nor prepare_data reads: nothing of it is trained")


# ---- the template --------------------------------------------------------------------------------


TOOLS = [{"type": "function", "function": {
    "name": "x", "description": "x", "parameters": {"type": "object", "properties": {}}}}]
LIKE_SPECIAL = re.compile(r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>")  # texts such as <|im_end|>
GENERATES = re.compile(r"{%[-+]?\s*generation\b")


# templates are rendered in this environment, as in transformers
ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
ENVIRONMENT.filters["tojson"] = as_json
ENVIRONMENT.globals["raise_exception"] = refuse


class Form:
    """One of a tokenizer's templates. end: the token that ends an answer, or several in a row;
    None: the template writes none. after: the text that the template writes after the end."""

    def __init__(self, source):
        names = ENVIRONMENT.parse(source).find_all(nodes.Name)
        own = frozenset(name.name for name in names if name.ctx != "load")
        unknown = type("Unknown", (Unknown,), {"__slots__": (), "own": own})
        self.source = source
        self.template = ENVIRONMENT.overlay(undefined=unknown).from_string(source)
        self.generates = bool(GENERATES.search(source))
        self.end, self.after = None, ""


class ChatTemplate:
    """The chat templates of a Vocabulary; raises BadTemplate if it has none. doubts: {key of
    DOUBTS: count} for the samples made so far."""

    def __init__(self, vocabulary):
        self.name, self.doubts = vocabulary.name, Counter()
        if not vocabulary.templates:
            raise BadTemplate("there are conversations in the data, but the tokenizer "
                              f"{vocabulary.name} has no chat template; put the "
                              "chat_template.jinja of a model that has one beside its "
                              "tokenizer.json, or take that model's tokenizer")
        self.named = vocabulary.named_specials()
        self.specials = {name: text for name, text in self.named.items() if text is not None}
        # a copy, which recognises the names of special tokens
        self.tokenizer = Tokenizer.from_str(vocabulary.tokenizer.to_str())
        texts = [*vocabulary.specials, *self.specials.values()]
        self.special, self.added = (re.compile("|".join(
            [*map(re.escape, sorted(filter(None, held), key=len, reverse=True)),
             LIKE_SPECIAL.pattern])) for held in (texts, [*texts, *vocabulary.added]))
        self.named_special = re.compile("|".join(map(re.escape, filter(None, vocabulary.specials))))
        self.forms = {}
        for name, source in vocabulary.templates.items():
            try:
                self.forms[name] = Form(source)
                self.look(self.forms[name], name == "default")
            except TemplateError as error:
                raise BadTemplate(f"the chat template of {vocabulary.name}: {error}; mend "
                                  "it") from None

    def undefined(self, name):
        return BadTemplate(f"the chat template of {self.name} writes {name}, which nobody defines; "
                           "give it in tokenizer_config.json beside tokenizer.json, as a text or, "
                           "so that nothing is written, as null")

    def look(self, form, is_default):
        """Finds by an example how a template writes an answer and its end."""
        ask, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": CONTENT}
        for first, tools in itertools.product(
                ([], [{"role": "system", "content": "x"}]), (None, TOOLS)):
            try:
                prompt, text = (re.sub(f"[{BEGIN}{END}]", "", self.write(
                    form, [*first, *messages], asks, tools)) for messages, asks in (
                        ([ask], True), ([ask, answer], False)))
                tail = text.rpartition(CONTENT)[2]
                # if the prompt ends with the text after an answer, that text may be an answer's
                # header
                header = tail.strip() and prompt.endswith(tail)
                try:
                    more = self.write(form, [*first, ask, answer, ask], False, tools)
                except Exception:
                    if header:
                        raise
                    more = ""
            except UndefinedName as name:
                if is_default:
                    raise self.undefined(name) from None
                continue
            except Exception:  # a template may refuse this conversation
                continue
            if CONTENT in text:
                more = re.sub(f"[{BEGIN}{END}]", "", more.rpartition(CONTENT)[2])
                ended = self.special.search(tail) or self.added.search(tail)
                if ended and (not header or ended.end() <= len(common(tail, more))):
                    end = ended.end()
                    every = not header and more.startswith(tail) # the tail is of every answer
                    while every and (another := self.special.match(tail, end)):
                        end = another.end()
                    form.end, form.after = tail[ended.start():end], tail[end:]
                elif header:
                    form.after = tail
                return

    def foreign(self):
        """Returns texts in the templates that look like special tokens but are no tokens."""
        source = "\n".join(form.source for form in self.forms.values())
        named = [text for key, text in self.specials.items() if key in source]
        return [text for text in [*LIKE_SPECIAL.findall(source), *named]
                if self.tokenizer.token_to_id(text) is None]

    def ends(self):
        """Returns the tokens that end answers, of several in a row the last."""
        found = [self.tokenizer.token_to_id(text) for form in self.forms.values()
                 for text in self.added.findall(form.end or "")[-1:]]
        return {token for token in found if token is not None}

    def form_of(self, conversation):
        """Returns the template that transformers uses for a conversation."""
        for name in (["tool_use"] if conversation.tools is not None else []) + ["default"]:
            if name in self.forms:
                return self.forms[name]
        raise ValueError(f"the tokenizer has no chat template named default, only "
                         f"{', '.join(self.forms)}")

    def write(self, form, messages, asks, tools=None, settings=None):
        nulls = {name: Undefined(name=name) for name, text in self.named.items() if text is None}
        return encodable(form.template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=asks,
            **(self.specials | nulls | (settings or {}))))

    def render(self, conversation, messages, asks):
        """Renders messages and, with `asks`, the text after them from which the model answers.
        Returns the text, and [(begin, end)] of the parts that the template marks as the model's."""
        try:
            parts = re.split(f"([{BEGIN}{END}])", self.write(
                self.form_of(conversation), messages, asks, conversation.tools,
                conversation.settings))
        except UndefinedName as name:
            raise self.undefined(name) from None
        except Exception as error:  # a template is a program, which may raise any exception
            if "strftime_now" in str(error):
                raise ValueError("the chat template asks for today's date (strftime_now), which is "
                                 "left out so that data prepared again are the same; write a date "
                                 "into the template") from None
            why = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {why}") from None
        text, begins, marks = "", [], []
        for part in parts:
            if part == BEGIN:
                begins.append(len(text))
            elif part == END and begins:
                marks.append((begins.pop(), len(text)))
            elif part != END:
                text += part
        return text, marks

    def prompt(self, conversation):
        """Returns the tokens of a prompt, and the doubts about them."""
        text, _ = self.render(conversation, conversation.messages, True)
        held = self.tokenizer.encode(text.rstrip(" "), add_special_tokens=False)
        return held.ids, self.doubts_of_context(conversation, conversation.messages, text)

    def answered(self, conversation, index, doubts):
        """Returns the text up to an answer's end, and [(begin, end)] of the parts that count."""
        messages, form = conversation.messages[:index + 1], self.form_of(conversation)
        answer, content = messages[-1], messages[-1].get("content", "")
        prompt, _ = self.render(conversation, messages[:-1], True)
        text, marks = self.render(conversation, messages, False)
        shared = common(prompt, text)
        if form.generates:
            spans = [(len(text[:at].rstrip(" ")), end) for at, end in marks
                     if end > len(shared.rstrip(" "))]
            counted, least = "".join(text[at:end] for at, end in spans), 0
            self.end_of(form, counted, 0, content.strip(), doubts) # counts answers without an end
        else:
            text, begin = self.behind(conversation, messages, prompt, text, doubts)
            spans = [(begin, self.end_of(form, text, begin, content.strip(), doubts))]
            counted = text[:spans[0][1]]  # the prompt may open the answer, with <think>
            least = len(squeezed(common(shared, text)))
        counted = squeezed(counted)
        doubts["answers"] += 1
        doubts["empty"] += not (content.strip() or answer.get("reasoning_content") or
                                answer.get("tool_calls"))
        doubts["content"] += not written(content, counted, least)
        doubts["reasoning"] += not written(answer.get("reasoning_content", ""), counted, least)
        for doubt in set(doubts_of_calls(answer, counted, least)):
            doubts[doubt] += 1
        return text, spans

    def behind(self, conversation, messages, prompt, text, doubts):
        """Returns the text with all of the last message's content, behind the prompt if that can
        be, and where the answer begins in it."""
        content = messages[-1].get("content", "")
        kept = written(content, squeezed(text), len(squeezed(common(prompt, text))))
        if not (kept and text.startswith(prompt)):
            # what stands around the content, if its place is clear; a template may write no content
            # beside calls
            for answer in (messages[-1], {"role": "assistant"}):
                parts = self.render(conversation, [*messages[:-1], answer | {"content": CONTENT}],
                                    False)[0].split(CONTENT)
                if len(parts) == 2:
                    break
            before, after = parts if len(parts) == 2 else (None, "")
            middle = text[len(before or ""):len(text) - len(after)]
            if before is not None and not kept and before + middle + after == text and \
                    squeezed(middle) in squeezed(content):
                text = before + content + after
                doubts["restored"] += 1
        if text.startswith(prompt):
            return text, len(prompt.rstrip(" "))
        if kept and content and content in text and not (before and text.startswith(before)):
            before = text[:text.rindex(content)] # what stands there depends on the content
        before = before and before.rstrip(" ")
        if before is not None and text.startswith(before):
            opening = common(prompt, before)
            history, _ = self.render(conversation, messages[:-1], False)
            if opening == before or opening.startswith(history):
                # they differ by a text that opens an answer in prompts only, such as <think>
                doubts["unprompted"] += 1
                return text, len(opening.rstrip(" "))
            # the prompt takes the place of what the template writes otherwise before the answer: up
            # to the answer's header; if there is none, up to the end of the last message
            header = prompt[len(history):] if prompt.startswith(history) else ""
            last = messages[-2].get("content", "").strip()
            ending = header if header.strip() else \
                prompt[prompt.rindex(last):] if last and last in prompt else None
            if ending and ending in before:
                doubts["asked"] += 1
                at = before.rindex(ending) + len(ending)
                return prompt + text[at:], len(prompt.rstrip(" "))
        raise ValueError("the chat template does not write an answer after what it gives to answer "
                         "from")

    def end_of(self, form, text, begin, content, doubts):
        """Returns where an answer ends: after the token that ends answers, and before the header of
        the next message. If there is no such token, as after some tool calls, the answer ends after
        the last special token."""
        body = text.removesuffix(form.after) if form.after else text
        at = body.rfind(form.end, begin) if form.end else -1
        if at >= 0:
            return at + len(form.end)
        least = max(begin, body.rfind(content) + len(content) if content else 0)
        found = [match.end() for match in self.special.finditer(body, least)]
        doubts["unended"] += not found
        return found[-1] if found else max(begin, len(body))

    def doubts_of_context(self, conversation, messages, text):
        doubts, text = Counter(conversations=1), squeezed(text)
        doubts["context"] += not all(written(message.get("content", ""), text)
                                     for message in messages if message["role"] != "assistant")
        contents = [message.get("content", "") for message in messages]
        doubts["halved"] += any(encodable(held) != held for held in contents)
        doubts["null_fields"] += has_null_fields([conversation.tools, *(
            message.get("tool_calls") for message in messages)])
        doubts["named_specials"] += any(map(self.named_special.search, contents))
        fields = set().union(*messages) - READ | conversation.settings.keys() | {
            f"{mark} of {message['role']}" for message in messages for mark in MARKS
            if message.get(mark) and message["role"] != "assistant"}
        source = self.form_of(conversation).source
        for field in fields:
            doubts[f"field {field}"] += not re.search(rf"\b{re.escape(field)}\b", source)
        if conversation.tools:
            without = copy.copy(conversation)
            without.tools = None
            with contextlib.suppress(ValueError):  # some templates need the tools
                doubts["tools"] += squeezed(self.render(without, messages, False)[0]) == \
                    squeezed(self.render(conversation, messages, False)[0])
        return doubts

    def texts(self, conversation):
        """Returns a list of [text, [(begin, end) of what the model writes]]. It has one entry for
        the conversation; or, if the template writes a turn differently when later turns follow, one
        entry for each answer, whose text ends with the answer."""
        found, doubts = [], Counter()
        answers = [index for index, message in enumerate(conversation.messages)
                   if message["role"] == "assistant" and index >= max(1, conversation.counted)]
        indices = [index for index in answers if is_learned(conversation.messages[index])]
        for index in indices:
            text, spans = self.answered(conversation, index, doubts)
            if found and text.startswith(found[-1][0][:max(
                    [end for _, end in found[-1][1]], default=0)]):
                spans = found.pop()[1] + spans
            found.append((text, spans))
        if not found:
            roles = dict.fromkeys(message["role"] for message in conversation.messages)
            raise ValueError("no message of the assistant's that answers one" + (
                " counts: each is marked as 0" if answers else
                f" (roles: {', '.join(roles) or 'none'})"))
        self.doubts += doubts + self.doubts_of_context(
            conversation, conversation.messages[:indices[-1] + 1], found[-1][0])
        return found

    def samples(self, conversation):
        """Yields (ids, whether each id counts) for each text of the conversation."""
        for text, spans in self.texts(conversation):
            held = self.tokenizer.encode(text, add_special_tokens=False)
            if not held.ids:
                raise ValueError("the chat template writes nothing")
            first, behind = numpy.array(held.offsets).T
            which = numpy.zeros(len(first), bool)
            for begin, end in spans:
                which |= (first < end) & (behind > begin)  # also if only a part is in the span
                self.doubts["joined"] += bool(((first < begin) & (behind > begin)).any())
            which[0] = False  # no token precedes the first one, so nothing predicts it
            yield held.ids, which.tolist()
