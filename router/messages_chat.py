"""Anthropic's messages as the chat that vLLM makes of them.

Follows vLLM 0.32 (entrypoints/anthropic/serving.py): system blocks joined without a break, thoughts
as reasoning, tool results as messages of their own before the user's text. Two things depend on the
chat template, and are found out once a model (`router.template_habits`): where a system message in
the middle of a chat goes, and how thinking is switched off.

What is not followed is `Inexact`: images, tools that come and go within a chat, and calls without
an id, to which the engine gives one of its own.
"""

from __future__ import annotations

import json
from typing import Any, Final

from router.prompt import Inexact, Reason
from router.template_habits import Habits
from router.unreadable import Unreadable
from schemas.anthropic import MessagesRequest
from schemas.openai import ChatRequest

# vLLM drops this block of Claude Code's: it changes with every request.
_BILLING_HEADER: Final = "x-anthropic-billing-header"


def chat_of_messages(request: MessagesRequest, habits: Habits) -> ChatRequest | Inexact:
    """Return the chat request that vLLM handles in place of this one."""
    try:
        return ChatRequest(
            messages=_messages(request, habits.merges_system),
            model=request.model,
            tools=_tools(request.tools),
            tool_choice="none" if _field(request.tool_choice, "type") == "none" else None,
            chat_template_kwargs=request.chat_template_kwargs,
            reasoning_effort=_effort(request, habits.effort_without_thinking),
            cache_salt=request.cache_salt,
            kv_transfer_params=request.kv_transfer_params,
        )
    except Unreadable as error:
        return error.outcome


def _effort(request: MessagesRequest, without_thinking: str) -> str | None:
    if _field(request.thinking, "type") == "disabled":
        return without_thinking
    return _field(request.output_config, "effort")


def _field(given: dict[str, Any] | None, name: str) -> str | None:
    value = None if given is None else given.get(name)
    return value if isinstance(value, str) else None


def _messages(request: MessagesRequest, merges_system: bool) -> list[dict[str, Any]]:
    system = _system_text(request.system)
    out: list[dict[str, Any]] = []
    for message in request.messages:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            text = _inline_system_text(content)
            if merges_system:
                system += text
            elif text:
                out.append({"role": "system", "content": text})
        elif role in ("user", "assistant"):
            out += _turn(role, content)
        else:
            raise Unreadable(Reason.INVALID, "a message of an unknown role")
    return [{"role": "system", "content": system}, *out] if system else out


def _system_text(system: str | list[dict[str, Any]] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return _joined_texts(system)


def _inline_system_text(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(_BILLING_HEADER) else content
    if not isinstance(content, list):
        raise Unreadable(Reason.INVALID, "the content of a message is no text and no list")
    return _joined_texts(content)


def _joined_texts(blocks: list[dict[str, Any]]) -> str:
    texts = []
    for block in blocks:
        kind, text = _block(block)
        if kind in ("tool_addition", "tool_removal"):
            raise Unreadable(Reason.UNSUPPORTED, "a change of tools")
        if kind == "text" and text and not text.startswith(_BILLING_HEADER):
            texts.append(text)
    return "".join(texts)


def _block(block: Any) -> tuple[str, str | None]:
    """Return a block's type and text."""
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise Unreadable(Reason.INVALID, "a content block without a type")
    text = block.get("text")
    if not isinstance(text, str | None):
        raise Unreadable(Reason.INVALID, "a text that is none")
    return block["type"], text


def _turn(role: str, content: Any) -> list[dict[str, Any]]:
    """Return the messages that one of the user's or the assistant's becomes."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise Unreadable(Reason.INVALID, "the content of a message is no text and no list")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        kind, text = _block(block)
        if kind == "text":
            texts += [text] if text else []
        elif kind == "thinking":
            thoughts += [block["thinking"]] if isinstance(block.get("thinking"), str) else []
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block))
        elif kind == "tool_result":
            result = block.get("content")
            texts.append(f"Tool result: {result if result else ''}")
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise Unreadable(Reason.MULTIMODAL, f"a content block of type {kind[:32]}")
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if len(texts) == 1:
        message["content"] = texts[0]
    elif texts:
        message["content"] = [{"type": "text", "text": text} for text in texts]
    return results if role == "user" and not texts else [*results, message]


def _call(block: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call of the assistant's."""
    if not isinstance(block.get("id"), str) or not block["id"]:
        raise Unreadable(Reason.CLOCK, "a tool call without id")
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    """Return the tool message of a result."""
    content = block.get("content")
    if isinstance(content, list):
        texts = []
        for item in content:
            kind, text = _block(item)
            if kind != "text":
                raise Unreadable(Reason.MULTIMODAL, f"a tool result of type {kind[:32]}")
            texts.append(text or "")
        content = "\n".join(texts)
    if not isinstance(content, str | None):
        raise Unreadable(Reason.INVALID, "a tool result that is no text and no list")
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id") or "",
        "content": content or "",
    }


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's form."""
    if tools is None:
        return None
    return [_tool(tool) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise Unreadable(Reason.UNSUPPORTED, "a tool of the API's own")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return {
        "type": "function",
        "function": {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": parameters,
            "strict": tool.get("strict"),
            "defer_loading": tool.get("defer_loading"),
        },
    }
