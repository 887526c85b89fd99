"""Chat templates in the styles of well-known models, and random chats to render with them."""

from __future__ import annotations

import json
import random
from typing import Any

TEMPLATES = {
    # ChatML with tools, and thoughts of earlier turns left out, which makes it non-local.
    "qwen": """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>' }}
    {%- endif %}
{%- endif %}""",
    # Headers around roles, trimmed texts, today's date, a token at the very beginning.
    "llama": """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|im_start|>system<|im_end|>\\n\\nToday: ' + date_string + '\\n\\n' }}
{%- for message in messages %}
    {%- if message.role not in ['ipython', 'tool'] %}
        {{- '<|im_start|>' + message['role'] + '<|im_end|>\\n\\n' + message['content'] | trim }}
    {%- else %}
        {{- '<|im_start|>ipython<|im_end|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- endif %}
    {{- '<|endoftext|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\\n\\n' }}{% endif %}""",
    # Strict alternation, as Mistral's and Gemma's.
    "strict": """
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}""",
    # Loops over parts of the content.
    "parts": """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}
{%- if part.cache_control is defined %}!{% endif %}{% endfor %}<|im_end|>
{% endfor -%}
{% generation %}<|im_start|>assistant{% endgeneration %}""",
    # A macro that is given the content; loop controls; a developer's own role.
    "macro": """
{% macro show(stuff) %}{% for item in stuff %}{{ item.text }};{% endfor %}{% endmacro %}
{% for m in messages %}{% if loop.index > 8 %}{% break %}{% endif %}
{{ '<|im_start|>' }}{{ 'dev' if m.role == "developer" else m.role }} {{ show(m.content) }}
{% endfor %}""",
    # Everything a template can see, as JSON: the order of keys shows.
    "all": """{{ messages | tojson }}|{{ tools | tojson(indent=2) }}|{{ documents | tojson }}|
{{- add_generation_prompt }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ custom }}|
{{- bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ messages[0].content }}""",
    "all_parts": """{{ messages | tojson(ensure_ascii=True) }}{% for m in messages %}
{% for p in m.content %}{{ p | tojson }}{% endfor %}{% endfor %}
{{- tools | tojson(sort_keys=True) }}""",
}

_WORDS = (
    *("the", "cat", "Hello,", "world!", "I'm", "x = 1;", '{"a": [1, 2.5]}', "<b>&amp;</b>", "\n"),
    *("\n\n", "  ", "\t", "na\u00efve", "caf\u0065\u0301", "\u4f60\u597d\uff0c\u4e16\u754c\u3002"),
    *("\u3053\u3093\u306b\u3061\u306f", "\U0001f600", "\U0001f468\u200d\U0001f469", "\u0645\u0631"),
    *(
        "<|im_start|>",
        "<|im_end|>\n",
        "<|im_start|>system\nlies<|im_end|>",
        "<|endoftext|>",
        "<|im_",
    ),
    *(
        "start|>",
        "<think>",
        "12345",
        "\u00bd",
        "https://a.b/c?d=e#f",
        "'",
        '"',
        "\\",
        "\u2028",
        "\x00",
    ),
)


def text(chance: random.Random, words_max: int = 12) -> str:
    """Returns a text of up to `words_max` odd words; sometimes an empty one."""
    words = [chance.choice(_WORDS) for _ in range(chance.randint(0, words_max))]
    return chance.choice(("", " ")).join(words)


def _parts(chance: random.Random) -> list[dict[str, Any]]:
    parts = []
    for _ in range(chance.randint(0, 3)):
        part: dict[str, Any] = {"type": "text", "text": text(chance)}
        if chance.random() < 0.3:
            part["cache_control"] = {"type": "ephemeral"}
        parts.append(dict(chance.sample(list(part.items()), len(part))))
    return parts


def _content(chance: random.Random) -> Any:
    return _parts(chance) if chance.random() < 0.25 else text(chance)


def _call(chance: random.Random) -> dict[str, Any]:
    arguments = chance.choice(
        (
            '{"b": 1, "a": {"z": null, "y": [true, 1.5e3]}}',
            "{}",
            "",
            "[1]",
            "no json",
            '{"t": "\u00e9"}',
        )
    )
    call: dict[str, Any] = {
        "type": "function",
        "id": f"call_{chance.randint(0, 99)}",
        "function": {"name": "f", "arguments": arguments},
    }
    if chance.random() < 0.2:
        call["index"] = 0
        call["function"]["more"] = "x"
    return dict(chance.sample(list(call.items()), len(call)))


def _message(chance: random.Random, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _content(chance)}
    if role == "assistant":
        if chance.random() < 0.3:
            message["tool_calls"] = [_call(chance) for _ in range(chance.randint(0, 2))]
            message["content"] = chance.choice((None, "", message["content"]))
        if chance.random() < 0.3:
            message[chance.choice(("reasoning", "reasoning_content"))] = text(chance)
        if chance.random() < 0.1:
            message["refusal"] = None
    if role == "tool":
        message["tool_call_id"] = "call_1"
    if role == "system" and chance.random() < 0.1:
        message["content"] = "x-anthropic-billing-header: cch=1\nrest"
    if chance.random() < 0.1:
        message["name"] = "bob"
    if chance.random() < 0.1:
        message["unknown"] = {"z": 1}
    return dict(chance.sample(list(message.items()), len(message)))


def messages(chance: random.Random, turns_max: int = 5) -> list[dict[str, Any]]:
    """Returns a chat that ends with a user's or a tool's message, mostly in good order."""
    chat = [_message(chance, "system")] if chance.random() < 0.5 else []
    for _ in range(chance.randint(0, turns_max)):
        chat += [_message(chance, "user"), _message(chance, "assistant")]
        if chance.random() < 0.2:
            chat.append(_message(chance, "tool"))
    if chance.random() < 0.1:
        chat.insert(chance.randint(0, len(chat)), _message(chance, "developer"))
    return [*chat, _message(chance, "user")]


def tools(chance: random.Random) -> list[dict[str, Any]]:
    """Returns tools with keys in any order, some left out, some unknown."""
    out = []
    for at in range(chance.randint(1, 3)):
        function: dict[str, Any] = {"name": f"f{at}"}
        if chance.random() < 0.7:
            function["description"] = text(chance, 4)
        if chance.random() < 0.7:
            function["parameters"] = {
                "type": "object",
                "properties": {"z": {"type": "string"}, "a": {"type": "integer", "minimum": 0.5}},
                "required": ["z"],
            }
        if chance.random() < 0.3:
            function["strict"] = chance.choice((True, False, None))
        if chance.random() < 0.2:
            function["more"] = 1
        tool = {"function": dict(chance.sample(list(function.items()), len(function)))}
        out.append(tool if chance.random() < 0.1 else {**tool, "type": "function", "other": 2})
    return out


def body(chance: random.Random) -> dict[str, Any]:
    """Returns a chat request's body."""
    out: dict[str, Any] = {"messages": messages(chance)}
    if chance.random() < 0.3:
        out["tools"] = tools(chance)
        if chance.random() < 0.5:
            out["tool_choice"] = chance.choice(("none", "auto"))
    if chance.random() < 0.2:
        out["chat_template_kwargs"] = chance.choice(
            (
                {"enable_thinking": False},
                {"custom": [1, {"k": None}], "enable_thinking": True, "unused": 3},
                {"custom": "auto", "bos_token": "B"},
                {"custom": None, "add_generation_prompt": False},
            )
        )
    if chance.random() < 0.15:
        out["reasoning_effort"] = chance.choice(("none", "low", "high"))
    if chance.random() < 0.15:
        out["documents"] = [{"text": text(chance), "title": "t"}]
    if chance.random() < 0.15:
        out["add_generation_prompt"] = False
        out["continue_final_message"] = chance.random() < 0.7
    if chance.random() < 0.1:
        out["add_special_tokens"] = True
    return out


def encoded(value: dict[str, Any]) -> bytes:
    """Returns a body as a client sends it."""
    return json.dumps(value, ensure_ascii=False).encode()
