"""Reads a row of a data set: a text, or a conversation in one of the published forms, which is
converted to OpenAI's messages.

Other content is never dropped silently: fields that belong to the row's form are used,
contradictory fields are refused, and other fields that look like content are counted."""

from .text import from_json, parse_json

# what a row with a conversation may have in each form
OPTIONAL = ("system", "weight", "tools", "chat_template_kwargs")
# the fields of a single question, of what is asked about, and of the answer
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "inputs", "input")
CONTEXT = ("input", "context")
ANSWERS = ("completion", "output", "response", "answer", "solution", "target", "targets")
TURNS = {(question, answer): ("system_prompt", *OPTIONAL) if question == "prompt" else
         (*CONTEXT, "history", "system_prompt", *OPTIONAL)
         for question in QUESTIONS for answer in ANSWERS}
ALPACA = ("instruction", "output")
PUBLISHED = {needed: TURNS[needed] for needed in (("prompt", "completion"), ALPACA)}
# {fields that a form needs: fields that it may have}. A row has the first form whose needed fields
# it has.
FORMS = {
    ("messages",): OPTIONAL,
    ("conversations",): OPTIONAL,  # ShareGPT
    ("conversation",): OPTIONAL,
    **PUBLISHED,
    ("text",): (),
    ("content",): ()} | TURNS
TEXT_FIELDS = ["text", "content"]
PREFERENCES = ("chosen", "rejected", "rejected_response")
# other fields that look like content
OTHERS = tuple("""choices options summary rationale reasoning reasoning_content thinking
    system_message functions documents image images audio audios video
    videos""".split())
FIELDS = {*PREFERENCES, *OTHERS, "label", "kto_tag",
          *(name for needed, optional in FORMS.items() for name in needed + optional)}
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant",
         "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "bard": "assistant", "function_call": "assistant", "tool": "tool", "observation": "tool"}


def form_of(names):
    """Returns the fields that the form of a row or table needs; None: these names fit no form."""
    return next((needed for needed in FORMS if set(needed) <= set(names)), None)


def columns_of(names, wanted):
    """Returns which columns of a table are read; raises ValueError if none of them has text.
    wanted: the field that the user named; None: all columns."""
    if wanted is None:
        return names
    if wanted in names:
        return [wanted]
    if wanted or not form_of(names):
        raise ValueError(no_text(names, wanted))
    return [name for name in names if name in FIELDS]


def no_text(names, wanted):
    """Returns a text that says why a row or file with these fields has no text."""
    talks = "" if wanted else ", nor a conversation (messages, conversations, or one of " \
        f"{', '.join(QUESTIONS)} with one of {', '.join(ANSWERS)})"
    return (f"no text under '{wanted or TEXT_FIELDS[0]}'{talks}, only {', '.join(names[:10])}; "
            "name the text's field (--text-field), or rename a conversation's")


def text_of(row, name):
    if not isinstance(row[name], str):
        held = "null" if row[name] is None else repr(row[name])[:40]
        raise ValueError(f"'{name}' holds {held}, which is no text; mend it, or name another field "
                         "(--text-field)")
    return row[name]


def read_row(row, wanted, unread):
    """Returns the text of a row, or its conversation: an object with 'messages', or with 'prompt'
    and 'completion', all lists of messages, and with 'weight' and the values that the template
    gets. Raises ValueError if the row has neither text nor conversation. wanted: the text field
    that the user named, or "". unread: counts the fields that were not read, but those that repeat
    a message, as ultrachat's prompt."""
    if wanted:
        if wanted not in row:
            raise ValueError(no_text(list(row), wanted))
        return text_of(row, wanted)
    held = {name: value for name, value in row.items() if value not in (None, "", [], {})}
    refuse_preferences([name for name in PREFERENCES if not isinstance(held.get(name, 0), int)])
    needed = form_of([name for name, value in row.items() if value is not None]) or form_of(row)
    if not needed:
        raise ValueError(no_text(list(row), wanted))
    if needed == ("text",) and "content" in held:
        if "text" in held:
            raise ValueError("both 'text' and 'content'; name the field to read (--text-field)")
        needed = ("content",)
    for group in (QUESTIONS, ANSWERS) if needed in TURNS and needed not in PUBLISHED else ():
        found = [name for name in group if row.get(name) is not None and
                 (name in needed or name in held and name not in FORMS[needed])]
        if len(found) > 1:
            raise ValueError(f"{' and '.join(map(repr, found))}: it is not clear which to read; "
                             "leave out the others")
    others = held.keys() & FIELDS - {*needed, *FORMS[needed], *PREFERENCES, "label", "kto_tag"}
    if needed[0] in TEXT_FIELDS:
        unread.update(others)
        return text_of(row, needed[0])
    refuse_preferences([name for name in ("kto_tag", "label") if isinstance(held.get(name), bool)
                        and (name == "kto_tag" or needed in TURNS and needed != ALPACA)])
    conversation = {name: row[name] for name in OPTIONAL[1:]
                    if row.get(name) not in (None, "")}
    if needed[0] == "prompt":
        conversation |= {"prompt": as_messages(row["prompt"], "user"),
                         "completion": as_messages(row[needed[1]], "assistant")}
    else:
        conversation["messages"] = of_turn(row, held, *needed) if needed in TURNS else \
            as_messages(row[needed[0]], None)
    first = "prompt" if "prompt" in conversation else "messages"
    for name in ("system", "system_prompt"):
        if name in held and name in FORMS[needed]:
            conversation[first] = after_system(name, held[name], conversation[first])
    contents = [message.get("content") for message in
                conversation[first] + conversation.get("completion", [])]
    unread.update(name for name in others if held[name] not in contents)
    return conversation


def refuse_preferences(found):
    """Raises ValueError for a row whose fields say which answers are preferred."""
    if found:
        raise ValueError(f"preferences ({', '.join(found)}), which no loss here takes; write the "
                         "conversation to train on as 'messages'")


def as_messages(held, role):
    """Returns a list of messages. held: such a list; with a role, also one message's content;
    without one, also the list as a JSON text."""
    if isinstance(held, str) and not role:
        held = from_json(held, parse_json)
    if not isinstance(held, list) or not all(
            isinstance(message, dict) and message.keys() & {"role", "from"} for message in held):
        if role:
            return [{"role": role, "content": held}]
        raise ValueError("its messages are no list of objects with a role")
    return [of_sharegpt(message) if "from" in message else message for message in held]


def of_sharegpt(message):
    """Converts ShareGPT's {from, value} to {role, content}; other fields stay."""
    teller = message["from"]
    if not isinstance(teller, str) or teller not in ROLES:
        raise ValueError(f"a message is from {teller!r}, no known role ({', '.join(ROLES)})")
    value = message["value"] if "value" in message else message.get("content")
    others = {key: message[key] for key in message if key not in ("from", "value", "content")}
    said = {"tool_calls": calls_of(value)} if teller == "function_call" else {"content": value}
    return {"role": ROLES[teller]} | said | {
        key: value for key, value in others.items() if key != "role"}


def calls_of(value):
    """Converts a function_call, which is JSON of one call or of a list of calls, to tool_calls."""
    calls = from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f"a function_call is no JSON with a name: {str(value)[:40]!r}")
    return [{"type": "function", "function": call} for call in calls]


def of_turn(row, held, question, answer):
    """Converts Alpaca's fields, or others of one question, to messages: earlier pairs; the
    question, with its context on the next line, as other loaders do; and the answer."""
    history, names = held.get("history", []), dict.fromkeys((question, *CONTEXT))
    if not isinstance(history, list) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise ValueError("its history is no list of pairs of texts")
    parts = [held[name] for name in names if name in held] or [row[question]]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"its {' or '.join(names)} is no text")
    pairs = [*history, ["\n".join(parts), row[answer]]]
    return [{"role": role, "content": content} for pair in pairs
            for role, content in zip(("user", "assistant"), pair)]


def after_system(name, system, messages):
    """Returns the messages with the row's system message, from the field `name`, in front."""
    first = messages[0] if messages else {}
    if first.get("role") == "system" and first.get("content") == system:
        return messages
    if first.get("role") in ("system", "developer"):
        raise ValueError(f"both a '{name}' and a system message that says something else; leave "
                         "one of them out")
    return [{"role": "system", "content": system}, *messages]
