"""Brings OpenAI messages and tools into the form that chat templates get from vLLM.

Follows vLLM 0.32 (renderers/chat_utils.py and the pydantic models before it), down to the order
of keys, which shows where a template prints a message or a tool as JSON. Only plain text is
followed; anything else is `Inexact`.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from router.prompt import Inexact, Reason

ContentFormat = Literal["string", "openai"]
Message = dict[str, Any]

# Keys of content parts that vLLM knows; templates see only the others beside type and text.
_PART_FIELDS: Final = frozenset(
    {
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil"),
        *("image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text"),
        *("thinking", "type", "uuid", "video_embeds", "video_url"),
    }
)
_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal", "thinking": "thinking"}
# vLLM drops this line of Claude Code's from system texts: it changes with every request.
_BILLING_HEADER: Final = "x-anthropic-billing-header"


class NameFirst(dict[str, Any]):
    """The function of a call that no model of the Chat API has put into its own order of keys."""


class _Unreadable(Exception):
    """Carries an Inexact outcome out of the nested readers."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Inexact(reason, detail)


def normalise_messages(
    messages: list[dict[str, Any]], content_format: ContentFormat
) -> list[Message] | Inexact:
    """Return the messages as a template sees them; the given ones stay as they are.

    Args:
        messages: as in the request.
        content_format: `string` joins text parts with new lines, `openai` makes every content a
            list of parts.
    """
    if not messages:
        return Inexact(Reason.INVALID, "messages is empty")
    try:
        return [_message(message, content_format) for message in messages]
    except _Unreadable as error:
        return error.outcome


def _message(message: Any, content_format: ContentFormat) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise _Unreadable(Reason.INVALID, "a message has no role")
    content = message.get("content")
    if isinstance(content, str) and role != "system":
        parts = [{"type": "text", "text": content}]
        out: Message = {"role": role, "content": content if content_format == "string" else parts}
    else:
        out = {"role": role, "content": _content(role, message, content_format)}
    if role == "assistant":
        _add_assistant_fields(out, message)
    elif role == "tool":
        if "tool_call_id" in message:
            out["tool_call_id"] = message["tool_call_id"]
        if isinstance(out["content"], list):
            out["content"] = "\n".join(part["text"] for part in out["content"])
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if role == "developer":
        if message.get("tools") is not None:
            raise _Unreadable(Reason.UNSUPPORTED, "tools of a developer message")
        out["tools"] = None
    return out


def _content(
    role: str, message: dict[str, Any], content_format: ContentFormat
) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if content is None:
        if "content" in message and role not in ("assistant", "function"):
            raise _Unreadable(Reason.INVALID, "the content of a message is null")
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list):
        raise _Unreadable(Reason.INVALID, "the content of a message is no text and no list")
    parts = [_text_part(part) for part in content]
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing_header(part)) is not None]
    if content_format == "openai":
        return parts
    return "\n".join(part["text"] for part in parts if part["text"])  # vLLM drops empty ones


def _text_part(part: Any) -> dict[str, Any]:
    """Return a text part with the keys that templates see."""
    if not isinstance(part, dict):
        raise _Unreadable(Reason.INVALID, "a content part is no object")
    kind = part.get("type", "")
    if not isinstance(kind, str):
        raise _Unreadable(Reason.INVALID, "a content part whose type is no text")
    if kind not in _TEXT_PARTS:
        raise _Unreadable(Reason.MULTIMODAL, f"a content part of type {kind[:32]}")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str) or part.get("uuid") is not None:
        raise _Unreadable(Reason.INVALID, "a text part without text")
    seen = {"type": "text", "text": text}
    if len(part) > 2:
        seen.update((key, value) for key, value in part.items() if key not in _PART_FIELDS)
    return seen


def _without_billing_header(part: dict[str, Any]) -> dict[str, Any] | None:
    if not part["text"].startswith(_BILLING_HEADER):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _add_assistant_fields(out: Message, message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _Unreadable(Reason.INVALID, "tool_calls is no list")
    if calls:
        out["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is None:
        return
    if not isinstance(reasoning, str):
        raise _Unreadable(Reason.UNSUPPORTED, "reasoning that is no text")
    out["reasoning"] = out["reasoning_content"] = reasoning


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        raise _Unreadable(Reason.INVALID, "a tool call that is no function call")
    name, arguments = function.get("name"), function.get("arguments")
    texts = (call.get("id"), name, arguments)
    if not all(isinstance(text, str) for text in texts):
        raise _Unreadable(Reason.INVALID, "a tool call without id, name or arguments")
    known = {"arguments": _object(str(arguments)), "name": name}
    if isinstance(function, NameFirst):
        known = {"name": name, "arguments": known["arguments"]}
    ordered = {"id": call["id"], "function": known | _others(function, known), "type": "function"}
    return ordered | _others(call, ordered)


def _others(given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in known}


def _object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; what is no JSON object becomes an empty one."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return {}
    except RecursionError as error:
        raise _Unreadable(Reason.INVALID, "arguments that are nested too deeply") from error
    return parsed if isinstance(parsed, dict) else {}


def normalise_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | Inexact:
    """Return tools as vLLM's own models print them: known keys only, in the models' order."""
    if not tools:
        return Inexact(Reason.INVALID, "tools is empty")
    try:
        return [_tool(tool) for tool in tools]
    except _Unreadable as error:
        return error.outcome


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise _Unreadable(Reason.INVALID, "a tool that is no function")
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise _Unreadable(Reason.UNSUPPORTED, "a tool with defer_loading")
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not (
        isinstance(name, str)
        and isinstance(description, str | None)
        and isinstance(parameters, dict | None)
        and isinstance(strict, bool | None)
    ):
        raise _Unreadable(Reason.INVALID, "a tool with a field of the wrong type")
    shown = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": shown if strict is None else {**shown, "strict": strict},
    }


def developers_as_system(messages: list[Message]) -> list[Message]:
    """Return messages for a template that knows no developer: its texts join the system's.

    Without a developer message the given list comes back as it is.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    turned = [_as_system(message) for message in messages]
    system = [message for message in turned if message["role"] == "system"]
    if len(system) == 1 and turned[0] is system[0]:
        return turned
    texts = [text for message in system if (text := _plain_text(message["content"]))]
    others = [message for message in turned if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    kept = {key: value for key, value in message.items() if key != "tools"}
    return kept | {"role": "system"}


def _plain_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
