"""From what a request says to its prompt: at once, in steps, or by a thread.

What is short is read without suspending. What is long is read in turns with the other requests, and
what has many parts by a thread, since it is Python that runs then: nobody is held up.

A body that the reader fails at, by a fault of its own, is no reason to refuse what an engine may
well answer: it is logged, and the request goes by load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator
from typing import Any, Final

from controlplane.core.hashing import NO_EXTRAS, Extras
from router.directory import ServedModel
from router.prompt import Inexact, Prompt, Reason
from router.surface import Asked, Parsed, as_generation
from router.tokens import PromptReader
from schemas.openai import ChatRequest, CompletionRequest, ResponsesRequest

logger = logging.getLogger(__name__)

PARTS_MAX: Final = 16_384
"""Messages or items of a prompt that is read; what has more goes by load."""

Reading = Prompt | Inexact


def read(served: ServedModel, asked: Asked, lora: str | None) -> Reading | Rest:
    """Return a prompt's tokens, at once if that is quick, else as something to await or close.

    Args:
        served: the model.
        asked: what the request's body says.
        lora: the adapter that it asks for.
    """
    reader = served.reader
    tokens_max = served.max_model_len
    parts = max(_parts(asked.parsed), asked.ids_count)
    if reader is not None and asked.chars_cut and _is_one_prompt(asked.parsed):
        parts = max(parts, reader.tokens_min(asked.chars_cut))
    if tokens_max is not None and parts >= tokens_max and not _is_cut(asked.parsed):
        return Inexact(Reason.TOO_LONG, tokens_min=parts)
    if reader is None:
        return Inexact(Reason.NO_TOKENIZER)
    if parts > PARTS_MAX or asked.ids_count or asked.chars_cut:
        return Inexact(Reason.TOO_LONG)
    if asked.heavy or asked.altered:
        return _begin(_read_in_thread(served, reader, asked, lora))
    try:
        generation = as_generation(served, asked.parsed)
    except Exception:
        return _failed()
    if isinstance(generation, Inexact):
        return generation
    return _begin(_reading(reader, generation, lora, tokens_max, heavy=False))


def _parts(parsed: Parsed | None) -> int:
    """Return how many messages or items a request has: each is a token of the prompt at least."""
    items: Any = getattr(parsed, "messages", None)
    if items is None and isinstance(parsed, ResponsesRequest):
        items = parsed.input
    return len(items) if isinstance(items, list) else 0


def _is_one_prompt(parsed: Parsed | None) -> bool:
    """Whether all long texts of a request are in its one prompt, as far as that can be known.

    Reranking has a prompt for each text; and a template may leave documents out.
    """
    return parsed is not None and not getattr(parsed, "documents", None)


def _is_cut(parsed: Parsed | None) -> bool:
    """Whether the engine is asked to cut the prompt to a length."""
    return getattr(parsed, "truncate_prompt_tokens", None) is not None


async def _read_in_thread(
    served: ServedModel, reader: PromptReader, asked: Asked, lora: str | None
) -> Reading:
    try:
        generation = await asyncio.to_thread(as_generation, served, asked.parsed)
    except Exception:
        return _failed()
    if isinstance(generation, Inexact):
        return generation
    found = await _reading(reader, generation, lora, served.max_model_len, heavy=asked.heavy)
    if asked.altered and isinstance(found, Prompt):
        return Inexact(Reason.MULTIMODAL, "media in a text")
    return found


async def _reading(
    reader: PromptReader,
    asked: ChatRequest | CompletionRequest,
    lora: str | None,
    tokens_max: int | None,
    *,
    heavy: bool,
) -> Reading:
    if asked.kv_transfer_params and "prompt_token_ids" in asked.kv_transfer_params:
        return Inexact(Reason.UNSUPPORTED, "token ids from another engine")
    extras = NO_EXTRAS if lora is None else Extras(lora)
    try:
        if isinstance(asked, ChatRequest):
            return await reader.read_chat(asked, extras, tokens_max=tokens_max, heavy=heavy)
        return await reader.read_completion(asked, extras, tokens_max=tokens_max)
    except Exception:
        return _failed()


def _failed() -> Inexact:
    """Log the exception that is being handled, and let the request go by load."""
    logger.exception("a prompt could not be read: this is a bug, and its request goes by load")
    return Inexact(Reason.FAILED)


def _begin(reading: Coroutine[Any, Any, Reading]) -> Reading | Rest:
    """Run a coroutine up to its first suspension: a quick one needs no task of its own."""
    try:
        waiting_for = reading.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    return Rest(reading, waiting_for)


class Rest:
    """The rest of a coroutine that has begun: to be awaited once, or closed."""

    __slots__ = ("_reading", "_waiting_for")

    def __init__(self, reading: Coroutine[Any, Any, Reading], waiting_for: Any) -> None:
        self._reading = reading
        self._waiting_for = waiting_for

    def __await__(self) -> Generator[Any, Any, Reading]:
        try:
            yield self._waiting_for
        except BaseException as error:
            # A cancellation belongs to the coroutine that was waiting.
            try:
                self._waiting_for = self._reading.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            yield self._waiting_for
        return (yield from self._reading.__await__())

    def close(self) -> None:
        """Give up what the coroutine holds; nothing happens if it has ended."""
        self._reading.close()
