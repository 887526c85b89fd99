"""A request to the Responses API as the chat that vLLM makes of it.

Follows vLLM 0.32 (entrypoints/openai/responses/utils.py): items that belong to one turn of the
assistant's (thoughts, text, calls) are joined in one message where they follow each other. Unlike a
chat's, the prompt gets the tokenizer's special tokens.

What is not followed is `Inexact`: what refers to an earlier answer, which only one engine has, and
items and tools beyond messages, functions and thoughts.
"""

from __future__ import annotations

from typing import Any, Final

from router.chat_messages import NameFirst
from router.prompt import Inexact, Reason
from router.unreadable import Unreadable
from schemas.openai import ChatRequest, ResponsesRequest

_UNFINISHED: Final = ("in_progress", "incomplete")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


def chat_of_responses(request: ResponsesRequest) -> ChatRequest | Inexact:
    """Return the chat request that renders to the same prompt."""
    if request.previous_response_id is not None or request.previous_input_messages:
        return Inexact(Reason.UNSUPPORTED, "an earlier answer")
    if request.truncation not in (None, "disabled"):
        return Inexact(Reason.TRUNCATION)
    items = request.input
    try:
        messages: list[dict[str, Any]] = []
        if request.instructions:
            messages.append({"role": "system", "content": request.instructions})
        if isinstance(items, str):
            messages.append({"role": "user", "content": items})
        else:
            first = len(messages)
            for item in items:
                _add(messages, first, item)
        resume = isinstance(items, list) and bool(items) and _is_unfinished(items[-1])
        effort = None if request.reasoning is None else request.reasoning.get("effort")
        return ChatRequest(
            messages=messages,
            model=request.model,
            tools=[_tool(tool) for tool in request.tools] if request.tools else None,
            tool_choice=request.tool_choice,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=not resume,
            continue_final_message=resume,
            add_special_tokens=True,
            mm_processor_kwargs=request.mm_processor_kwargs,
            reasoning_effort=effort,
            cache_salt=request.cache_salt,
            kv_transfer_params=request.kv_transfer_params,
        )
    except Unreadable as error:
        return error.outcome


def _add(messages: list[dict[str, Any]], first: int, item: dict[str, Any]) -> None:
    """Append an item of the input, or complete the assistant's last message with it.

    Args:
        messages: made so far; changed.
        first: index of the first one that the input made: instructions are never completed.
        item: the next item.
    """
    kind = item.get("type", "message")
    if kind == "function_call":
        _complete(messages, first, "tool_calls", _call(item))
    elif kind == "function_call_output":
        output = _output(item.get("output"))
        messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _complete(messages, first, "reasoning", _reasoning(item))
    elif kind != "message" or not isinstance(item.get("role"), str):
        raise Unreadable(Reason.UNSUPPORTED, f"an item of type {str(kind)[:32]}")
    elif item["role"] == "assistant":
        _complete(messages, first, "content", _first_text(item.get("content")))
    else:
        content = item.get("content")
        parts = [_part(part) for part in content] if isinstance(content, list) else content
        messages.append({"role": item["role"], "content": parts})


def _complete(messages: list[dict[str, Any]], first: int, field: str, value: Any) -> None:
    """Give the assistant's last message a field that it lacks, or begin another message."""
    last = messages[-1] if len(messages) > first else None
    if last is None or last["role"] != "assistant":
        last = None
    if field == "tool_calls":
        if last is not None and "tool_calls" in last:
            last["tool_calls"].append(value)
            return
        value = [value]
    if last is not None and last.get(field) is None:
        last[field] = value
    else:
        messages.append({"role": "assistant", field: value})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("namespace"):
        raise Unreadable(Reason.UNSUPPORTED, "a tool with a namespace")
    function = NameFirst(name=item.get("name"), arguments=item.get("arguments"))
    return {"id": item.get("call_id"), "function": function, "type": "function"}


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Unreadable(Reason.INVALID, "encrypted thoughts")
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            return _text(parts[0])
    return ""


def _first_text(content: Any) -> str:
    """Return what vLLM keeps of an assistant's content: the text, or that of the first part."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return _text(content[0])
    raise Unreadable(Reason.UNSUPPORTED, "an assistant's message without content")


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise Unreadable(Reason.UNSUPPORTED, "a part without text")
    return text


def _part(part: Any) -> dict[str, Any]:
    """Return a content part as a chat has it."""
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        return {"type": "text", "text": _text(part)}
    raise Unreadable(Reason.MULTIMODAL, "a content part that is no text")


def _output(output: Any) -> Any:
    if isinstance(output, str):
        return output
    if isinstance(output, list):
        return [_part(part) for part in output]
    raise Unreadable(Reason.UNSUPPORTED, "a function's output that is no text and no list")


def _is_unfinished(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in ("message", "reasoning") and item.get("status") in _UNFINISHED


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function in a chat's form."""
    if tool.get("type") != "function":
        raise Unreadable(Reason.UNSUPPORTED, "a tool that is no function")
    names = ("name", "description", "parameters", "strict", "defer_loading")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}
