"""The fields of OpenAI-style requests that routing looks at, and errors in OpenAI's form.

Bodies go to the engine byte for byte; these classes only read them. Fields that matter to nobody
here are skipped by the decoder.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.codec import RemoteError


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatRequest(msgspec.Struct, frozen=True):
    """`POST /v1/chat/completions` (vLLM: entrypoints/openai/chat_completion/protocol.py)."""

    messages: list[dict[str, Any]]
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    cache_salt: str | None = None
    user: str | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """`POST /v1/completions` (vLLM: entrypoints/openai/completion/protocol.py).

    Attributes:
        prompt: a text, the token ids of a prompt, or a list of either. A list that mixes them is
            decoded too: the engine refuses it, in its own words.
    """

    prompt: str | list[str | int | list[int]] | None = None
    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = 16
    n: int | None = 1
    prompt_embeds: Any = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    user: str | None = None


class Error(msgspec.Struct, frozen=True):
    """The inner object of an error answer."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {...}}`."""

    error: Error


_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_chat(body: bytes) -> ChatRequest:
    """Read a chat request. Raises RemoteError with a message fit for the caller's eyes."""
    try:
        return _CHAT.decode(body)
    except _MALFORMED as error:
        raise RemoteError(str(error)) from error


def decode_completion(body: bytes) -> CompletionRequest:
    """Read a completion request. Raises RemoteError with a message fit for the caller's eyes."""
    try:
        return _COMPLETION.decode(body)
    except _MALFORMED as error:
        raise RemoteError(str(error)) from error


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | int | None = None
) -> bytes:
    """Return an OpenAI error as JSON bytes."""
    return msgspec.json.encode(ErrorBody(Error(message, kind, param, code)))
