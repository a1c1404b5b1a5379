#!/usr/bin/env python3
"""Writes conversations with chat templates of every style, and the text, ids and masks that transformers gives.

Rerun (a second; needs transformers and jinja2, printed at the end):

    .venv-peers/bin/python scripts/golden/make_chats.py

It writes, replacing what is there:

    crates/data/tests/golden/chats/tokenizer.json, tokenizer_config.json
    crates/data/tests/golden/chats/expected.json   one object a case: the template, the record, the text, the text that
                                                   asks for an answer, the ids, and, where the template marks answers,
                                                   which ids are the assistant's

The templates are written for this script. Each uses what the templates of some models use.
"""

import json
import shutil
from pathlib import Path

import jinja2
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

GOLDEN = Path(__file__).resolve().parents[2] / "crates/data/tests/golden/chats"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """\
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {% generation %}
        {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {% else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

BRACKETS = """\
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'].strip() + '\\n\\n' %}\
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (first if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].rstrip() + eos_token }}
    {%- endif %}
{%- endfor %}"""

TOOLS = """\
{%- set ns = namespace(calls=0, last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools is defined and tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
        {{- tool.function | tojson(indent=2) + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string and message.content.startswith('skip') %}{% continue %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ ('*' if loop.index0 == ns.last else '') ~ '\\n' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- 'call ' ~ ns.calls ~ ': ' ~ call.function.name }}
            {%- for key, value in call.function.arguments.items() %}{{ ' ' ~ key ~ '=' ~ value | tojson }}{% endfor %}
        {%- endfor %}
    {%- else %}
        {%- macro part(p) %}{{ p.text if p is mapping else p }}{% endmacro %}
        {%- if message.content is string %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- else %}{% for p in message.content %}{{ part(p) }}{% endfor %}{% endif %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def say(*turns):
    return [{"role": role, "content": content} for role, content in turns]


PLAIN = say(("system", "Be brief. "), ("user", "Wie heißt du? <s>"), ("assistant", "Ada ≈ 1.\n"), ("user", "Why?"),
            ("assistant", "  Because."))
CALLED = say(("user", "skip me"), ("user", "the weather in 'Köln' & <Bonn>?")) + [
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {
        "city": "Köln & <Bonn>", "days": [1, 2], "exact": True, "at": None, "x": 1.5}}}]},
    {"role": "tool", "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "!"}]},
    {"role": "assistant", "content": "<think>hm</think>\n\nIt rains."},
]
A_TOOL = [{"type": "function", "function": {"name": "weather", "description": "It's <weather>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {}}}, "required": []}}}]

CASES = [
    ("chatml", CHATML, {"messages": PLAIN}),
    ("marked", MARKED, {"messages": PLAIN}),
    ("brackets", BRACKETS, {"messages": PLAIN}),
    ("brackets without system", BRACKETS, {"messages": PLAIN[1:]}),
    ("tools", TOOLS, {"messages": CALLED, "tools": A_TOOL}),
    ("no tools", TOOLS, {"messages": PLAIN}),
]


def main():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("a", "s"), ("er", "s")]
    vocabulary = {c: i for i, c in enumerate(alphabet + [a + b for a, b in merges])}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    inner.save(str(GOLDEN / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (GOLDEN / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    expected = []
    for name, template, record in CASES:
        def write(**options):
            return tokenizer.apply_chat_template(
                record["messages"], tools=record.get("tools"), chat_template=template, **options)
        case = {"name": name, "template": template, "record": record, "text": write(tokenize=False),
                "asks": write(tokenize=False, add_generation_prompt=True),
                "ids": list(write(tokenize=True, return_dict=True)["input_ids"])}
        if "generation" in template.replace("add_generation_prompt", ""):
            masked = write(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            case["mask"] = list(masked["assistant_masks"])
        expected.append(case)
    (GOLDEN / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n")
    print(f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}, {len(expected)} cases")


main()
