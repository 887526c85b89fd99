"""Random requests in the form of Anthropic's messages and of OpenAI's responses."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

from tests.router.chat_samples import text

_HEADER = "x-anthropic-billing-header: cch=1"
_INPUTS = ({}, {"b": 1, "a": {"z": None, "y": [True, 1.5e3]}}, {"t": 'é "q" \\'}, None)


def _text_block(chance: random.Random) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": text(chance)}
    if chance.random() < 0.2:
        block["cache_control"] = {"type": "ephemeral"}
    return block


def _system_blocks(chance: random.Random) -> list[dict[str, Any]]:
    blocks = [_text_block(chance) for _ in range(chance.randint(0, 3))]
    if chance.random() < 0.3:
        blocks.insert(0, {"type": "text", "text": _HEADER})
    return blocks


def _result(chance: random.Random) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": f"toolu_{chance.randint(0, 9)}"}
    if chance.random() < 0.8:
        parts = [{"type": "text", "text": text(chance)} for _ in range(chance.randint(0, 3))]
        block["content"] = chance.choice((text(chance), parts))
    return block


def _user_blocks(chance: random.Random) -> list[dict[str, Any]]:
    blocks = [_result(chance) for _ in range(chance.randint(0, 2))]
    return blocks + [_text_block(chance) for _ in range(chance.randint(0, 3))]


def _assistant_blocks(chance: random.Random) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if chance.random() < 0.3:
        blocks.append({"type": "thinking", "thinking": text(chance), "signature": "s"})
    if chance.random() < 0.1:
        blocks.append({"type": "redacted_thinking", "data": "AAAA"})
    blocks += [_text_block(chance) for _ in range(chance.randint(0, 2))]
    for _ in range(chance.randint(0, 2)):
        call = {"type": "tool_use", "id": f"toolu_{chance.randint(0, 9)}", "name": "f"}
        blocks.append({**call, "input": deepcopy(chance.choice(_INPUTS))})
    if chance.random() < 0.1:
        blocks.append(_result(chance))
    return blocks


def _turn(chance: random.Random, role: str) -> dict[str, Any]:
    blocks = _user_blocks if role == "user" else _assistant_blocks
    content = text(chance) if chance.random() < 0.5 else blocks(chance)
    return {"role": role, "content": content}


def messages_body(chance: random.Random) -> dict[str, Any]:
    """Returns the body of a request for a message."""
    messages: list[dict[str, Any]] = []
    for _ in range(chance.randint(0, 4)):
        messages += [_turn(chance, "user"), _turn(chance, "assistant")]
        if chance.random() < 0.15:
            content = chance.choice((text(chance), f"{_HEADER} x", _system_blocks(chance)))
            messages.append({"role": "system", "content": content})
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 2048,
        "messages": [*messages, _turn(chance, "user")],
    }
    if chance.random() < 0.5:
        body["system"] = chance.choice((text(chance), f"{_HEADER}\nrest", _system_blocks(chance)))
    if chance.random() < 0.3:
        body["tools"] = _anthropic_tools(chance)
        if chance.random() < 0.4:
            body["tool_choice"] = {"type": chance.choice(("auto", "any", "none"))}
    if chance.random() < 0.3:
        body["thinking"] = chance.choice(
            ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"})
        )
    if chance.random() < 0.2:
        body["output_config"] = {"effort": chance.choice(("low", "max"))}
    if chance.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": False, "custom": [1]}
    return body


def _anthropic_tools(chance: random.Random) -> list[dict[str, Any]]:
    tools = []
    for at in range(chance.randint(1, 3)):
        tool: dict[str, Any] = {"name": f"f{at}"}
        if chance.random() < 0.7:
            tool["description"] = text(chance, 4)
        tool["input_schema"] = chance.choice(
            ({}, {"properties": {"z": {"type": "string"}}}, {"type": "object", "required": ["z"]})
        )
        if chance.random() < 0.2:
            tool["strict"] = chance.choice((True, False))
        tools.append(dict(chance.sample(list(tool.items()), len(tool))))
    return tools


def _item(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(("user", "user", "assistant", "answer", "call", "output", "thought"))
    if kind == "user":
        parts = [{"type": "input_text", "text": text(chance)} for _ in range(chance.randint(1, 2))]
        role = chance.choice(("user", "user", "system", "developer"))
        item = {"role": role, "content": chance.choice((text(chance), parts))}
        return item if chance.random() < 0.5 else {"type": "message", **item}
    if kind == "assistant":
        return {"role": "assistant", "content": text(chance)}
    if kind == "answer":
        parts = [
            {"type": "output_text", "text": text(chance), "annotations": []}
            for _ in range(chance.randint(1, 2))
        ]
        status = chance.choice(("completed", "incomplete"))
        item = {"type": "message", "role": "assistant", "id": "msg_1", "status": status}
        return {**item, "content": parts}
    if kind == "call":
        call = {"type": "function_call", "call_id": "call_1", "name": "f"}
        return {**call, "arguments": chance.choice(('{"a": 1}', "{}", "no json"))}
    if kind == "output":
        parts = [{"type": "input_text", "text": text(chance)}]
        output = chance.choice((text(chance), parts))
        return {"type": "function_call_output", "call_id": "call_1", "output": output}
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    if chance.random() < 0.3:
        return {**thought, "summary": [{"type": "summary_text", "text": text(chance)}]}
    return {**thought, "content": [{"type": "reasoning_text", "text": text(chance)}]}


def responses_body(chance: random.Random) -> dict[str, Any]:
    """Returns the body of a request for a response."""
    items = [_item(chance) for _ in range(chance.randint(1, 7))]
    body: dict[str, Any] = {"input": text(chance) if chance.random() < 0.2 else items}
    if chance.random() < 0.4:
        body["instructions"] = text(chance)
    if chance.random() < 0.3:
        body["tools"] = _functions(chance)
        if chance.random() < 0.4:
            body["tool_choice"] = chance.choice(("none", "auto", "required"))
    if chance.random() < 0.2:
        body["reasoning"] = {"effort": chance.choice(("low", "high"))}
    if chance.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": False, "custom": "C"}
    return body


def _functions(chance: random.Random) -> list[dict[str, Any]]:
    tools = []
    for at in range(chance.randint(1, 2)):
        tool: dict[str, Any] = {"type": "function", "name": f"f{at}"}
        if chance.random() < 0.7:
            tool["description"] = text(chance, 4)
        if chance.random() < 0.7:
            tool["parameters"] = {"type": "object", "properties": {"z": {"type": "string"}}}
        if chance.random() < 0.4:
            tool["strict"] = chance.choice((True, False))
        tools.append(dict(chance.sample(list(tool.items()), len(tool))))
    return tools
