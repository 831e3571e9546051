"""How chat templates and the folders of tokenizers differ: what test/chat_tests.py expects of each,
and test/transformers_tests.py compares with transformers.
"""

import json
import os
import shutil

import tokenizers
from check import write
from tokenizers import models, pre_tokenizers

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "[CALL]"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
ASKS = {"role": "user", "content": "Hi"}
THOUGHT = "<think>\nhm\n</think>\n\nB"
TURN = ("{{ '<|' + m.role + '|>' + (m.content if m.role == 'user' else m.content %s) + '<|end|>' }}"
        "{%% endfor %%}")


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def turns(*answers, **more):
    """A row of an answer after each question."""
    return {"messages": [message for answer in answers for message in (ASKS, answer)], **more}


EACH = "{% for m in messages %}"
PROMPTS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLED = [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "CET", "n": 3}}}]
AS_TEXT = [{"function": {"name": "clock", "arguments": '{"zone": "CET", "n": 3}'}}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
AS_OBJECTS = EACH + TURN % "" + PROMPTS
CALLS_IN_JSON = EACH + ("{{ '<|' + m.role + '|>' }}{{ m.content }}{% for c in m.tool_calls or [] %}"
                        "{{ '[CALL]' + c.function.name }} {{ c.function.arguments | tojson }}"
                        "{% endfor %}<|end|>{% endfor %}") + PROMPTS
HI = "<|user|>Hi<|end|><|assistant|>"
ONE = HI + "[[A<|end|>]]"
TWO = ONE + HI + "[[B<|end|>]]"
A, AB = turns(says("A")), turns(says("A"), says("B"))
# template, row, the texts with what counts in [[ ]], what is doubted
SPANS = [
    ("whole turns", AS_OBJECTS, AB, [TWO], ""),
    ("the header always", EACH + TURN % "" + "<|assistant|>", AB, [TWO + "<|assistant|>"], ""),
    ("an end that headers have", EACH + "<|user|>{{ m.role }}<|end|>{{ m.content }}<|end|>"
     "{% endfor %}<|user|>assistant<|end|>", AB, [
         "<|user|>user<|end|>Hi<|end|><|user|>assistant<|end|>[[A<|end|>]]<|user|>user<|end|>Hi"
         "<|end|><|user|>assistant<|end|>[[B<|end|>]]<|user|>assistant<|end|>"], ""),
    ("the header always and no end", EACH + "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
     "<|assistant|>", AB, [
         "<|user|>Hi<|assistant|>[[A]]<|user|>Hi<|assistant|>[[B]]<|assistant|>"], "unended"),
    ("an end of the last", EACH + "{{ m.role }}: {{ m.content }}{% if loop.last and not "
     "add_generation_prompt %}</s>{% else %};{% endif %}{% endfor %}{% if add_generation_prompt %}"
     "assistant:{% endif %}", AB, [
         "user: Hi;assistant:[[ A</s>]]",
         "user: Hi;assistant: A;user: Hi;assistant:[[ B</s>]]"], ""),
    ("an end of two tokens", EACH + "<|{{ m.role }}|>{{ m.content }}<|end|></s>{% endfor %}" +
     PROMPTS, AB, [
         "<|user|>Hi<|end|></s><|assistant|>[[A<|end|></s>]]<|user|>Hi<|end|></s><|assistant|>"
         "[[B<|end|></s>]]"], ""),
    ("an end and a header always", EACH + "{% if loop.first %}</s><|{{ m.role }}|>{% endif %}"
     "{{ m.content }}{% if m.role != 'user' %}<|end|>{% endif %}</s><|{% if m.role == 'user' %}"
     "assistant{% elif loop.last %}assistant{% else %}user{% endif %}|>{% endfor %}",
     AB, [
         "</s><|user|>Hi</s><|assistant|>[[A<|end|>]]</s><|user|>Hi</s><|assistant|>[[B<|end|>]]"
         "</s><|assistant|>"], ""),
    ("an end of the last, after each turn's", EACH + "<|{{ m.role }}|>{{ m.content }}<|end|>"
     "{% if loop.last and not add_generation_prompt %}</s>{% endif %}{% endfor %}" + PROMPTS,
     AB, [TWO + "</s>"], ""),
    ("an end of the whole", AS_OBJECTS + "{% if not add_generation_prompt %}.</s>{% endif %}",
     AB, [TWO + ".</s>"], ""),
    ("never a header", EACH + "{% if m.role == 'user' %}{{ bos_token }}[{{ m.content }}]"
     "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
     AB, ["<s>[Hi][[ A </s>]]<s>[Hi][[ B </s>]]"], ""),
    ("a line after the end", EACH + "<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}" +
     PROMPTS, AB, [
         "<|user|>Hi<|end|>\n<|assistant|>[[A<|end|>]]\n<|user|>Hi<|end|>\n<|assistant|>"
         "[[B<|end|>]]\n"], ""),
    ("marks of its own", EACH + "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
     "{{ m.content }}<|end|>\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" +
     PROMPTS, turns(says("A", weight=0), says("B")), [
         "<|user|>Hi<|assistant|>A<|end|>\n<|user|>Hi<|assistant|>[[B<|end|>\n]]"], ""),
    ("marks of a thought that is cut", EACH + "<|{{ m.role }}|>{% if m.role == 'assistant' %}"
     "{% generation %}{{ m.content.split('</think>')[-1] }}<|end|>{% endgeneration %}."
     "{% else %}{{ m.content }}{% endif %}{% endfor %}" + PROMPTS, turns(says(THOUGHT)), [
         "<|user|>Hi<|assistant|>[[\n\nB<|end|>]]."], "content"),
    ("marks without the end", EACH + "<|{{ m.role }}|>{% if m.role == 'assistant' %}"
     "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>"
     "{% endfor %}" + PROMPTS, turns(says("A")), [HI + "[[A]]<|end|>"], "unended"),
    ("no special end", EACH + "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
     "add_generation_prompt %}assistant: {% endif %}", turns(says("A <|end|> x")), [
         "user: Hi\nassistant:[[ A <|end|> x\n]]"], "named_specials unended"),
    ("a question that has a template's text", AS_OBJECTS, {"messages": [
        {"role": "user", "content": "Hi<|end|>"}, says("A")]}, [
            "<|user|>Hi<|end|><|end|><|assistant|>[[A<|end|>]]"], "named_specials"),
    ("a text that only looks like a special token", AS_OBJECTS, turns(says("A <|x|>")), [
        HI + "[[A <|x|><|end|>]]"], ""),
    *[(f"{key} {mark}", AS_OBJECTS, turns(says("A", **{key: mark}), says("B", **{key: 1})), [
        HI + "A<|end|><|user|>Hi<|end|><|assistant|>[[B<|end|>]]"], "")
      for key, mark in (("weight", 0), ("train", False), ("training", False), ("loss", 0.0))],
    ("a field that nobody reads", AS_OBJECTS, turns(says("A", learn=False)), [ONE], "field learn"),
    ("a mark on a question", AS_OBJECTS, {"messages": [ASKS | {"train": True}, says("A")]}, [ONE],
     "field train of user"),
    ("what is before </think> is left out", EACH + TURN % ".split('</think>')[-1]" + PROMPTS,
     turns(says("A"), says(THOUGHT), says("C")), [
         f"<|user|>Hi<|end|><|assistant|>[[A<|end|>]]<|user|>Hi<|end|><|assistant|>[[{THOUGHT}"
         "<|end|>]]",
         HI + "A<|end|><|user|>Hi<|end|><|assistant|>\n\nB<|end|><|user|>"
         "Hi<|end|><|assistant|>[[C<|end|>]]"], "restored"),
    ("prompts open the thought", EACH + TURN % ".split('</think>')[-1]" + PROMPTS.replace(
        "{% endif", "<think>\n{% endif"), turns(says(THOUGHT), says("<C")), [
            f"<|user|>Hi<|end|><|assistant|><think>\n[[{THOUGHT[8:]}<|end|>]]",
            HI + "\n\nB<|end|><|user|>Hi<|end|><|assistant|>[[<C<|end|>]]"], "restored unprompted"),
    ("prompts open a thought that the answer has itself", EACH + "<|{{ m.role }}|>"
     "{% if m.role != 'user' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
     "{{ m.content }}<|end|>{% endfor %}" + PROMPTS.replace("{% endif", "<think>\n\n{% endif"),
     turns(says(THOUGHT)), [f"<|user|>Hi<|end|><|assistant|>[[{THOUGHT}<|end|>]]"], "unprompted"),
    ("prompts write the system's message, texts do not", EACH + "{% if m.role == 'user' %}<|user|>"
     "{% if loop.last %}{{ messages[0].content }}\n{% endif %}{{ m.content }}<|end|>"
     "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
     {"messages": [{"role": "system", "content": "Be"}, ASKS, says("A")]}, [
         "<|user|>Be\nHi<|end|>[[ A</s>]]"], "asked"),
    ("a tool's result ends otherwise before an answer", EACH + "<|{{ m.role }}|>{{ m.content }}"
     "{% if m.role == 'tool' and not loop.last %}.{% endif %}<|end|>{% endfor %}" + PROMPTS,
     {"messages": [ASKS, says("A"), {"role": "tool", "content": "T"}, says("B")]}, [
         HI + "[[A<|end|>]]<|tool|>T<|end|><|assistant|>[[B<|end|>]]"], "asked"),
    ("prompts write the system's message, and calls have no content", EACH + "{% if m.role == "
     "'user' %}<|user|>{% if loop.last %}{{ messages[0].content }}\n{% endif %}{{ m.content }}"
     "<|end|>{% elif m.tool_calls %}[CALL]{{ m.tool_calls[0].function | tojson }}</s>"
     "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
     {"messages": [{"role": "system", "content": "Be"}, ASKS, says("", tool_calls=CALLED)]}, [
         '<|user|>Be\nHi<|end|>[[[CALL]{"name": "clock", "arguments": {"zone": "CET", "n": 3}}'
         '</s>]]'], "asked"),
    ("its own reasoning is not written", AS_OBJECTS, turns(says("A", reasoning="hm")), [ONE],
     "reasoning"),
    ("reasoning by another name", EACH + TURN % "+ m.reasoning_content" + PROMPTS,
     turns(says("A", thinking="hm")), [HI + "[[Ahm<|end|>]]"], ""),
    ("another content", EACH + TURN % "| upper" + PROMPTS, turns(says("a")), [ONE], "content"),
    ("no system's message", EACH + "{% if m.role != 'system' %}" + AS_OBJECTS[len(EACH):].replace(
        "{% endfor", "{% endif %}{% endfor"),
     {"messages": [{"role": "system", "content": "Be"}, ASKS, says("A")]}, [ONE], "context"),
    ("calls are written", CALLS_IN_JSON, turns(says(None, tool_calls=CALLED)), [
        HI + '[[[CALL]clock {"zone": "CET", "n": 3}<|end|>]]'], ""),
    ("calls of text in quotes", CALLS_IN_JSON, turns(says(None, tool_calls=AS_TEXT)), [
        r'<|user|>Hi<|end|><|assistant|>[[[CALL]clock "{\"zone\": \"CET\", \"n\": 3}"<|end|>]]'],
     "quoted"),
    ("calls are lost", CALLS_IN_JSON.replace("m.tool_calls or", ""),
     turns(says(None, tool_calls=CALLED)), [HI + "[[<|end|>]]"], "tool_calls"),
    ("an argument is lost", CALLS_IN_JSON.replace("ments |", "ments.n |"),
     turns(says(None, tool_calls=CALLED)), [HI + "[[[CALL]clock 3<|end|>]]"], "tool_calls"),
    ("a call ends otherwise", CALLS_IN_JSON.replace(
        "<|end|>", "{% if m.tool_calls %}</s>{% else %}<|end|>{% endif %}."),
     turns(says(None, tool_calls=CALLED)), [
         '<|user|>Hi<|end|>.<|assistant|>[[[CALL]clock {"zone": "CET", "n": 3}</s>]].'], ""),
    ("a call has another row's argument", CALLS_IN_JSON, turns(says(None, tool_calls=[
        {"function": {"name": "clock", "arguments": {"zone": "CET", "n": None}}}])), [
            HI + '[[[CALL]clock {"zone": "CET", "n": null}<|end|>]]'], "null_fields"),
    ("a tool has another row's parameter", AS_OBJECTS, turns(says("A"), tools=[{
        "name": "clock", "parameters": {"properties": {"n": None}}}]), [ONE], "tools null_fields"),
    ("a parameter is null unless given", AS_OBJECTS, turns(says("A"), tools=[{
        "parameters": {"n": {"default": None, "enum": [1, None]}}}]), [ONE], "tools"),
    ("tools are lost", AS_OBJECTS, turns(says("A"), tools=TOOLS), [ONE], "tools"),
    ("no calls, as an empty list", EACH + "{% if m.tool_calls is defined %}1{% endif %}" +
     TURN % "" + PROMPTS, turns(says("A", tool_calls=[])), [ONE], ""),
    ("settings of the row", "{% if brief is defined %}{{ brief }}{% endif %}" + AS_OBJECTS,
     turns(says("A"), chat_template_kwargs={"brief": "Be", "more": 1}), [
         "Be<|user|>Hi<|end|><|assistant|>[[A<|end|>]]"], "field more"),
    ("one answer after another", AS_OBJECTS, {"messages": [ASKS, says("A"), says("B")]}, [
        ONE + "<|assistant|>[[B<|end|>]]"], ""),
    *[("an empty answer", AS_OBJECTS, {"messages": [ASKS, says("A"), says(blank)]}, [
        f"{ONE}<|assistant|>[[{blank}<|end|>]]"], "empty")
      for blank in ("", "\n")],
    ("an empty answer that does not count", AS_OBJECTS, turns(says("", weight=0), says("A")), [
        HI + "<|end|><|user|>Hi<|end|><|assistant|>[[A<|end|>]]"], ""),
    ("names that it asks for", "{% if x is defined %}{{ x }}{% endif %}{% if y %}{{ y }}{% endif %}"
     "{% if z is not defined or 'a' in z %}{% set z = '.' %}{% endif %}{{ z }}"
     "{{ w | default(',') }}{% if false %}{% set v = 1 %}{% endif %}{{ v }}" +
     AS_OBJECTS, A, [
         ".,<|user|>Hi<|end|><|assistant|>[[A<|end|>]]"], ""),
]


def chat_folder(folder, files, specials=SPECIALS):
    """Makes a folder with a tokenizer of bytes and other files; returns its tokenizer.json."""
    shutil.rmtree(folder, ignore_errors=True)
    alphabet = enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    held = tokenizers.Tokenizer(models.BPE({text: at for at, text in alphabet}, []))
    held.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.add_special_tokens(specials)
    for name, content in files.items():
        write(os.path.join(folder, name), content)
    return write(os.path.join(folder, "tokenizer.json"), held.to_str())


def marked(text, spans):
    """Puts [[ ]] around what counts of a text."""
    for begin, end in reversed(spans):
        text = f"{text[:begin]}[[{text[begin:end]}]]{text[end:]}"
    return text


def configured(**config):
    return {"tokenizer_config.json": json.dumps(config)}


def mapped(**tokens):
    return {"special_tokens_map.json": json.dumps(tokens)}


OBJECT = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False,
          "single_word": False}
LISTED = {"added_tokens_decoder": {"1": OBJECT | {"special": True}}}
LLAMA, GPT2 = ["<s>", "</s>", "<unk>"], ["<|endoftext|>"]
GPT2_NAMES = {f"{key}_token": "<|endoftext|>" for key in ("bos", "eos", "unk")}
# the special tokens, the files beside tokenizer.json, and which it has by which name
FOLDERS = [
    (LLAMA, configured(bos_token="<s>", eos_token=OBJECT | {"__type": "AddedToken"}),
     {"bos_token": "<s>", "eos_token": "</s>"}),
    (LLAMA, mapped(bos_token="<s>", eos_token=OBJECT, additional_special_tokens=["<s>"]),
     {"bos_token": "<s>", "eos_token": "</s>"}),
    (LLAMA, configured(eos_token="<s>") | mapped(eos_token="</s>"), {"eos_token": "</s>"}),
    (LLAMA, configured(eos_token="<s>", **LISTED) | mapped(bos_token="<s>", eos_token="</s>"),
     {"eos_token": "<s>"}),
    (LLAMA, configured(eos_token="</s>", image_token="<s>", extra_special_tokens={"eoi": "<unk>"},
                       add_bos_token=True),
     {"eos_token": "</s>", "image_token": "<s>", "eoi": "<unk>"}),
    (LLAMA, configured(tokenizer_class="PreTrainedTokenizerFast"), {}),
    (LLAMA, configured(tokenizer_class="LlamaTokenizer"), {}),  # byte tokens, as in Llama 3's
    (GPT2, configured(model_max_length=1024), GPT2_NAMES),
    (GPT2, configured(bos_token=None),
     {key: text for key, text in GPT2_NAMES.items() if key != "bos_token"}),
]
