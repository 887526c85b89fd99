"""The fields of OpenAI-style requests that routing looks at, and errors in OpenAI's form.

Bodies go to the engine byte for byte; these classes only read them. Fields that matter to nobody
here are skipped by the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from schemas.codec import RemoteError

T = TypeVar("T")


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
    kv_transfer_params: dict[str, Any] | None = None


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
    suffix: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, frozen=True):
    """`POST /v1/responses` (vLLM: entrypoints/openai/responses/protocol.py)."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    previous_input_messages: list[Any] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class EmbeddingsRequest(msgspec.Struct, frozen=True):
    """`POST /v1/embeddings` (vLLM: entrypoints/pooling/embed/protocol.py).

    Attributes:
        input: a text, the token ids of one, a list of either, or a chat.
        messages: a chat, in place of `input`.
    """

    input: str | list[str | int | list[Any] | dict[str, Any]] | None = None
    messages: list[Any] | None = None
    model: str = ""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    padding: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True):
    """`POST /inference/v1/generate` (vLLM: entrypoints/scale_out/token_in_token_out/protocol.py).

    Attributes:
        features: multimodal items among the tokens.
    """

    token_ids: list[int]
    model: str = ""
    features: Any = None
    cache_salt: str | None = None


class Error(msgspec.Struct, frozen=True):
    """The inner object of an error answer."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {...}}`."""

    error: Error


MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def body_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a function that reads a JSON body of one kind.

    It raises RemoteError with a message fit for the caller's eyes.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> T:
        try:
            return decode(body)
        except MALFORMED as error:
            raise RemoteError(str(error)) from error

    return read


decode_chat: Callable[[bytes], ChatRequest] = body_decoder(ChatRequest)
decode_completion: Callable[[bytes], CompletionRequest] = body_decoder(CompletionRequest)
decode_responses: Callable[[bytes], ResponsesRequest] = body_decoder(ResponsesRequest)
decode_embeddings: Callable[[bytes], EmbeddingsRequest] = body_decoder(EmbeddingsRequest)
decode_generate: Callable[[bytes], GenerateRequest] = body_decoder(GenerateRequest)


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | int | None = None
) -> bytes:
    """Return an OpenAI error as JSON bytes."""
    return msgspec.json.encode(ErrorBody(Error(message, kind, param, code)))
