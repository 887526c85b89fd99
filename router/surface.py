"""The API surface: which paths there are, and what routing reads from their bodies.

Bodies are only read here; they go to the engine byte for byte. Each kind of body ends up as a chat
or a completion, as in vLLM itself, whose prompt the model's `PromptReader` knows how to tokenize.
A path under /v1/ that is not listed is passed through and routed by load, so that an engine's newer
endpoints work, and count, from the first day. Nothing else is: engines have paths that change them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import msgspec

from router.directory import ServedModel
from router.messages_chat import chat_of_messages
from router.prompt import Inexact, Reason
from router.refusals import Form
from router.responses_chat import chat_of_responses
from schemas.anthropic import MessagesRequest, decode_messages
from schemas.codec import RemoteError
from schemas.openai import (
    MALFORMED,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    GenerateRequest,
    ResponsesRequest,
    decode_chat,
    decode_completion,
    decode_embeddings,
    decode_generate,
    decode_responses,
)

BYTES_PER_TOKEN: Final = 4
"""For estimates only: English text in common tokenizers; nothing exact depends on it."""
MEDIA_TOKENS: Final = 1000
"""For estimates only: an image of about a megapixel in common models."""
_LIGHT_BYTES: Final = 4_096
_LIGHT_OBJECTS: Final = 512
_LIGHT_VALUES: Final = 4_096
"""Reading an object takes about 1 µs, a number or a text in a list less."""

Parsed = (
    ChatRequest
    | CompletionRequest
    | EmbeddingsRequest
    | GenerateRequest
    | MessagesRequest
    | ResponsesRequest
)


class Endpoint(msgspec.Struct, frozen=True):
    """One path.

    Attributes:
        name: for metrics and logs.
        decode: reads its body; None where only the model's name is looked for.
        computes: whether the engine computes a prompt for it; if not, it is no prefill load.
        opens_early: its streams begin before the prompt is computed.
        param: the field that holds the prompt.
        form: how errors look to its clients.
    """

    name: str
    decode: Callable[[bytes], Parsed] | None = None
    computes: bool = True
    opens_early: bool = False
    param: str = "prompt"
    form: Form = Form.OPENAI


_SCORE = Endpoint("score")
_RERANK = Endpoint("rerank")
_RENDER = Endpoint("render", computes=False)

ENDPOINTS: Final[dict[bytes, Endpoint]] = {
    b"/v1/chat/completions": Endpoint("chat", decode_chat, param="messages"),
    b"/v1/completions": Endpoint("completions", decode_completion),
    b"/v1/responses": Endpoint("responses", decode_responses, opens_early=True, param="input"),
    b"/v1/messages": Endpoint("messages", decode_messages, param="messages", form=Form.ANTHROPIC),
    b"/v1/messages/count_tokens": Endpoint("count_tokens", computes=False, form=Form.ANTHROPIC),
    b"/v1/embeddings": Endpoint("embeddings", decode_embeddings, param="input"),
    b"/inference/v1/generate": Endpoint("generate", decode_generate, param="token_ids"),
    b"/score": _SCORE,
    b"/v1/score": _SCORE,
    b"/rerank": _RERANK,
    b"/v1/rerank": _RERANK,
    b"/v2/rerank": _RERANK,
    b"/tokenize": Endpoint("tokenize", computes=False),
    b"/detokenize": Endpoint("detokenize", computes=False),
    b"/v1/chat/completions/render": _RENDER,
    b"/v1/completions/render": _RENDER,
    b"/v1/messages/render": _RENDER,
    b"/v1/responses/render": _RENDER,
}
PASS_THROUGH: Final = Endpoint("other")

ENGINE_ONLY: Final = frozenset(
    {
        *(b"/metrics", b"/load", b"/server_info", b"/kv_event_sources", b"/is_sleeping"),
        *(b"/sleep", b"/wake_up", b"/pause", b"/resume", b"/abort_requests", b"/collective_rpc"),
        *(b"/reset_prefix_cache", b"/reset_mm_cache", b"/reset_encoder_cache"),
        *(b"/start_profile", b"/stop_profile", b"/scale_elastic_ep", b"/release_kv_cache_memory"),
        *(b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/update_weights"),
    }
)
"""Paths that concern the one engine asked, and mean nothing for a fleet: never passed through."""

_INFERENCE: Final = frozenset(
    {
        *(b"/pooling", b"/classify", b"/invocations", b"/generative_scoring"),
        *(b"/inference/v1/generate",),
    }
)
_V1: Final = re.compile(rb"/v1(?:/[A-Za-z0-9_~:-][A-Za-z0-9._~:-]*)+")
"""Plain names only: nothing that another parser might take for a way out, such as `..` or `%2e`."""


def is_inference(path: bytes) -> bool:
    """Whether a path may be passed on to whichever engine is chosen."""
    if path in ENGINE_ONLY:
        return False
    return path in ENDPOINTS or path in _INFERENCE or _V1.fullmatch(path) is not None


class Asked(msgspec.Struct, frozen=True):
    """What a body says, and how it is to be read on.

    Attributes:
        parsed: None if only its model could be read.
        text_bytes: its length, without media that are known to be some.
        heavy: its parts are so many that threads are to read them (`is_heavy`).
        altered: its texts may lack something, so that they are no prompt known exactly.
        ids_count: token ids of its one prompt, which are not in `parsed`, as they are too many.
        chars_cut: characters, at the least, of its texts that are not in `parsed`, likewise.
    """

    parsed: Parsed | None
    text_bytes: int
    heavy: bool = False
    altered: bool = False
    ids_count: int = 0
    chars_cut: int = 0


class _Named(msgspec.Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode
_MULTIPART: Final = b"multipart/form-data"
_FORM_BYTES: Final = 65_536
"""A form's small fields stand before or after its files; so much is searched at either end."""
_FORM_MODEL: Final = re.compile(rb'[; \t]name="model"', re.IGNORECASE)
_FORM_FIELDS_MAX: Final = 16
"""So many fields of this name are looked at: nobody needs more than one."""
_FORM_HEADER_BYTES: Final = 512
_FORM_VALUE_BYTES: Final = 256
_DISPOSITION: Final = b"content-disposition:"


def read_body(
    endpoint: Endpoint, body: bytes, content_type: bytes = b""
) -> tuple[Parsed | None, str]:
    """Return what a body says, and the model that it names.

    A JSON object whose fields are not of the types that are known here is not refused: engines
    differ in what they accept, and the engine will say. It is routed by load.

    Raises:
        RemoteError: the endpoint takes JSON, and this is no JSON object.
    """
    if endpoint.decode is None:
        return None, _model_of(body, content_type)
    try:
        parsed = endpoint.decode(body)
    except RemoteError:
        try:
            return None, _decode_named(body).model or ""
        except MALFORMED as error:
            raise RemoteError(str(error)) from error
    return parsed, parsed.model


def _model_of(body: bytes, content_type: bytes) -> str:
    """Return the `model` of a body; empty if it names none: the engine will say."""
    if not body:
        return ""
    if content_type.startswith(_MULTIPART):
        return _form_model(body, 0) or _form_model(body, max(0, len(body) - _FORM_BYTES))
    try:
        return _decode_named(body).model or ""
    except MALFORMED:
        return ""


def _form_model(body: bytes, start: int) -> str:
    """Return the value of a form's field `model` near `start`, empty if it is not there.

    Every step looks at a bounded part of the body: one pattern for all would go over what a client
    has made up for it again and again, for minutes.
    """
    fields = _FORM_MODEL.finditer(body, start, start + _FORM_BYTES)
    for field in islice(fields, _FORM_FIELDS_MAX):
        name_at, name_end = field.span()
        line = body.rfind(b"\r\n", max(0, name_at - _FORM_HEADER_BYTES), name_at) + 2
        if body[line : line + len(_DISPOSITION)].lower() != _DISPOSITION:
            continue
        blank = body.find(b"\r\n\r\n", name_end, name_end + _FORM_HEADER_BYTES)
        value = blank + 4
        end = body.find(b"\r\n", value, value + _FORM_VALUE_BYTES + 2)
        if blank >= 0 and end >= 0:
            return body[value:end].decode("utf-8", "replace")
    return ""


def is_heavy(parsed: Parsed | None, body: bytes) -> bool:
    """Whether a body may have so many parts that reading them takes more than a millisecond."""
    if len(body) <= _LIGHT_BYTES or isinstance(getattr(parsed, "prompt", None), str):
        return False  # short, or one text
    values = body.count(b",")
    # Objects side by side have commas between them, and what is nested deeply is refused.
    return values > _LIGHT_OBJECTS and are_many(body.count(b"{"), values)


def are_many(objects: int, values: int) -> bool:
    """Whether a body of so many objects and values is heavy."""
    return objects > _LIGHT_OBJECTS or values > _LIGHT_VALUES


def as_generation(
    served: ServedModel, parsed: Parsed | None
) -> ChatRequest | CompletionRequest | Inexact:
    """Return the chat or the completion that an engine makes of a request."""
    if isinstance(parsed, ChatRequest):
        return parsed
    if isinstance(parsed, CompletionRequest):
        return parsed if parsed.suffix is None else Inexact(Reason.UNSUPPORTED, "suffix")
    if isinstance(parsed, MessagesRequest):
        return chat_of_messages(parsed, served.habits)
    if isinstance(parsed, ResponsesRequest):
        return chat_of_responses(parsed)
    if isinstance(parsed, EmbeddingsRequest):
        return _of_embeddings(parsed)
    if isinstance(parsed, GenerateRequest):
        if parsed.features is not None:
            return Inexact(Reason.MULTIMODAL, "features")
        ids: list[Any] = parsed.token_ids
        return CompletionRequest(prompt=ids, cache_salt=parsed.cache_salt)
    return Inexact(Reason.UNSUPPORTED)


def _of_embeddings(asked: EmbeddingsRequest) -> ChatRequest | CompletionRequest | Inexact:
    """Return what an embedding is computed of: a text, or a chat."""
    if asked.padding not in (None, "do_not_pad"):
        return Inexact(Reason.TRUNCATION, "padding")
    chat: Any = asked.messages if asked.messages is not None else asked.input
    if not isinstance(chat, list) or not chat or not isinstance(chat[0], dict):
        if asked.messages is not None:
            return Inexact(Reason.BATCH)
        return CompletionRequest(
            prompt=chat,
            add_special_tokens=asked.add_special_tokens is not False,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            cache_salt=asked.cache_salt,
        )
    return ChatRequest(
        messages=chat,
        chat_template=asked.chat_template,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=asked.add_special_tokens is True,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        mm_processor_kwargs=asked.mm_processor_kwargs,
        cache_salt=asked.cache_salt,
    )


def estimate_tokens(endpoint: Endpoint, parsed: Parsed | None, body_bytes: int) -> int:
    """Return about how many tokens an engine will compute for a prompt that is not known exactly.

    The text of media in a chat (base64) is no prompt: each item counts as `MEDIA_TOKENS`.
    """
    if not endpoint.computes:
        return 1
    messages = getattr(parsed, "messages", None)
    if not isinstance(messages, list):
        return max(1, body_bytes // BYTES_PER_TOKEN)
    chars, media = 0, 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [{"text": content}]:
            text = part.get("text") if isinstance(part, dict) else None
            chars += len(text) if isinstance(text, str) else 0
            media += not isinstance(text, str)
    return max(1, chars // BYTES_PER_TOKEN + media * MEDIA_TOKENS)
