"""The OpenAI surface: which paths there are, and what routing reads from their bodies.

Bodies are only read here; they go to the engine byte for byte. A path that is not listed is passed
through and routed by load, so that an engine's newer endpoints work, and count, from the first day.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import msgspec

from controlplane.core.hashing import NO_EXTRAS, Extras
from router.prompt import Inexact, Prompt, Reason
from router.tokens import PromptReader
from schemas.codec import RemoteError
from schemas.openai import ChatRequest, CompletionRequest, decode_chat, decode_completion

BYTES_PER_TOKEN = 4
"""For estimates only: English text in common tokenizers; nothing exact depends on it."""

Parsed = ChatRequest | CompletionRequest


class Endpoint(msgspec.Struct, frozen=True):
    """One path.

    Attributes:
        decode: reads its body; None where only the model's name is looked for.
    """

    decode: Callable[[bytes], Parsed] | None = None


class _Named(msgspec.Struct):
    model: str = ""


ENDPOINTS: dict[bytes, Endpoint] = {
    b"/v1/chat/completions": Endpoint(decode_chat),
    b"/v1/completions": Endpoint(decode_completion),
}
PASS_THROUGH = Endpoint()

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_NAMED = msgspec.json.Decoder(_Named)


def read_body(endpoint: Endpoint, body: bytes) -> tuple[Parsed | None, str]:
    """Return what a body says, and the model that it names.

    A JSON object whose fields are not of the types that are known here is not refused: engines
    differ in what they accept, and the engine will say. It is routed by load.

    Raises:
        RemoteError: the endpoint takes JSON, and this is no JSON object.
    """
    if endpoint.decode is None:
        return None, _model_of(body)
    try:
        parsed = endpoint.decode(body)
    except RemoteError:
        try:
            return None, _NAMED.decode(body).model
        except _MALFORMED as error:
            raise RemoteError(str(error)) from error
    return parsed, parsed.model


def _model_of(body: bytes) -> str:
    """Return the `model` of a body; empty if it is no JSON or names none: the engine will say."""
    try:
        return _NAMED.decode(body).model
    except _MALFORMED:
        return ""


def read(
    reader: PromptReader | None, parsed: Parsed | None, lora: str | None
) -> Prompt | Inexact | Awaitable[Prompt | Inexact]:
    """Return a prompt's tokens, at once if that is quick, else as something to await."""
    if reader is None:
        return Inexact(Reason.NO_TOKENIZER)
    extras = NO_EXTRAS if lora is None else Extras(lora)
    if isinstance(parsed, ChatRequest):
        return _begin(reader.read_chat(parsed, extras))
    if isinstance(parsed, CompletionRequest):
        return _begin(reader.read_completion(parsed, extras))
    return Inexact(Reason.UNSUPPORTED)


def _begin(
    reading: Coroutine[Any, Any, Prompt | Inexact],
) -> Prompt | Inexact | Awaitable[Prompt | Inexact]:
    """Run a coroutine up to its first suspension: a quick one needs no task of its own."""
    try:
        waiting_for = reading.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    return _Rest(reading, waiting_for)


class _Rest:
    """The rest of a coroutine that has begun, to be awaited once."""

    __slots__ = ("_reading", "_waiting_for")

    def __init__(self, reading: Coroutine[Any, Any, Prompt | Inexact], waiting_for: Any) -> None:
        self._reading = reading
        self._waiting_for = waiting_for

    def __await__(self) -> Generator[Any, Any, Prompt | Inexact]:
        try:
            yield self._waiting_for
        except BaseException as error:
            # A cancellation belongs to the coroutine that was waiting.
            self._waiting_for = self._reading.throw(error)
            yield self._waiting_for
        return (yield from self._reading.__await__())
