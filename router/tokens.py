"""Turns a request into the engine's exact token ids, as block hashes, or says why it cannot.

A chat is rendered whole: its template is a program, so nothing may be assumed of what an earlier
turn rendered to. The text is then cut into segments, and only those that no earlier prompt had are
tokenized and hashed.

A `PromptReader` belongs to one event loop. `read_chat` and `read_completion` are for request
handlers: they do not suspend unless new text is long, which is then tokenized in steps or in a
thread, a bounded number of texts at a time. The `_now` variants never suspend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, Final

import msgspec

from controlplane.core.hashing import NO_EXTRAS, ROOT, BlockHash, Extras, chain, pack_tokens
from router.card_check import mismatch, options_of, template_of, tokenizer_of
from router.chat_template import ChatTemplate, Clock, RenderOptions
from router.prefix_cache import Handle, PrefixCache, Space
from router.prompt import HEAD_TOKENS, Inexact, Prompt, Reason, single
from router.segments import PROBES, Cutter, choose_cuts
from router.tokenizer import TextError, Tokenizer
from schemas.bus import ModelCard
from schemas.openai import ChatRequest, CompletionRequest

_Steps = Generator[str, bytes, Prompt]

# A last segment as short as a generation prompt is never worth a node: it is tokenized each time.
_TAIL_CHARS: Final = 256
# Tokens of models whose chats vLLM renders by code of its own (OpenAI's Harmony), not by template.
_HARMONY: Final = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|call|>"})


class ReadLimits(msgspec.Struct, frozen=True):
    """Bounds on tokenizing.

    Attributes:
        chars_max: longest text that is tokenized at all (a million tokens or so at the default);
            a longer one is `Inexact` (too_long).
        chars_now_max: most new characters of a request that are tokenized at once, by words
            (about 1 ms at the default).
        chars_library_now_max: likewise by the library (about 1 ms).
        long_texts_max: most long texts that are being tokenized at a time; a request beyond them
            is `Inexact` (busy).
        long_text_s_max: how long a request waits for one; then it is `Inexact` (busy) too.
        tokens_now_max: most token ids that are hashed at once (about 1 ms).
    """

    chars_max: int = 4_000_000
    chars_now_max: int = 16_384
    chars_library_now_max: int = 2_048
    long_texts_max: int = 64
    long_text_s_max: float = 5.0
    tokens_now_max: int = 65_536


DEFAULT_LIMITS: Final = ReadLimits()


class ReadStats(msgspec.Struct):
    """Counters since the reader was made.

    Attributes:
        prompts: prompts read exactly.
        whole: of these, prompts that could not be cut, since no cut is safe for the tokenizer.
        long_texts: texts that were tokenized off the fast path.
        inexact: outcomes by reason.
    """

    prompts: int = 0
    whole: int = 0
    long_texts: int = 0
    inexact: dict[Reason, int] = {}


class PromptReader:
    """Reads the requests of one model card."""

    def __init__(
        self,
        card: ModelCard,
        cache: PrefixCache,
        executor: Executor,
        *,
        options: RenderOptions | None = None,
        limits: ReadLimits = DEFAULT_LIMITS,
        now: Clock = datetime.now,
    ) -> None:
        """Load a model's tokenizer and template.

        A large vocabulary takes half a second, during which the library holds the interpreter's
        lock: best before the router is ready. A card whose tokenizer or template cannot be used
        gives a reader all the same: its requests are `Inexact`, and `problem` says why.

        Args:
            card: the model card; `block_size` 0 gives prompts without hashes.
            cache: shared by all readers of a router.
            executor: threads for long texts, where the library must tokenize them.
            options: how the engine was started, if not as the card says.
            limits: bounds.
            now: the engine's local time, for templates that print the date.
        """
        self.stats = ReadStats()
        self._card = card
        self._cache = cache
        self._executor = executor
        self._limits = limits
        self._space: Space = cache.space(card.block_size)
        self._long_texts = 0
        self._tokenizer, self.problem = tokenizer_of(card)
        self._template: ChatTemplate | None = None
        if self._tokenizer is not None:
            self._template, self.problem = template_of(card, options or options_of(card), now)
        self._differs = {chats: self._compare(card, chats=chats) for chats in (True, False)}
        self._cutter = Cutter(self._choose_cuts())

    @property
    def cuts(self) -> tuple[str, ...]:
        """The tokens before which prompts are cut; none means that prompts are tokenized whole."""
        return self._cutter.cuts

    def close(self) -> None:
        """Forget the model's prompts."""
        self._cache.drop(self._space)

    async def read_chat(
        self,
        request: ChatRequest,
        extras: Extras = NO_EXTRAS,
        *,
        tokens_max: int | None = None,
        heavy: bool = False,
    ) -> Prompt | Inexact:
        """Read a chat request.

        Args:
            request: as decoded from the body.
            extras: the adapter, where the model named is one; the request's salt is added here.
            tokens_max: the model's context: what is longer for certain is not read at all.
            heavy: the chat has so many parts that a thread is to render it.
        """
        template = self._unrendered(request)
        if isinstance(template, Inexact):
            return self._count(template)
        render = template.render
        text = await asyncio.to_thread(render, request) if heavy else render(request)
        return await self._finish(self._chat_steps(text, request, extras, tokens_max))

    def read_chat_now(self, request: ChatRequest, extras: Extras = NO_EXTRAS) -> Prompt | Inexact:
        """Read a chat request without suspending, however long it is."""
        template = self._unrendered(request)
        if isinstance(template, Inexact):
            return self._count(template)
        return self._finish_now(self._chat_steps(template.render(request), request, extras, None))

    async def read_completion(
        self,
        request: CompletionRequest,
        extras: Extras = NO_EXTRAS,
        *,
        tokens_max: int | None = None,
    ) -> Prompt | Inexact:
        """Read a completion request; arguments as of `read_chat`."""
        prompt = self._unread(request, tokens_max)
        if isinstance(prompt, Inexact):
            return self._count(prompt)
        if not isinstance(prompt, str):
            salted = _salted(extras, request.cache_salt)
            return self._count(await self._from_ids(prompt, salted))
        return await self._finish(self._completion_steps(prompt, request, extras, tokens_max))

    def read_completion_now(
        self, request: CompletionRequest, extras: Extras = NO_EXTRAS
    ) -> Prompt | Inexact:
        """Read a completion request without suspending, however long it is."""
        prompt = self._unread(request, None)
        if isinstance(prompt, Inexact):
            return self._count(prompt)
        if not isinstance(prompt, str):
            salted = _salted(extras, request.cache_salt)
            return self._count(self._from_ids_now(prompt, salted))
        return self._finish_now(self._completion_steps(prompt, request, extras, None))

    def pin(
        self, request: ChatRequest | CompletionRequest, extras: Extras, blocks: int
    ) -> Handle | None:
        """Keep what is cached of a prompt's first blocks, until the handle is released.

        Args:
            request: whose prompt has been read.
            extras: the adapter; the request's salt is added here.
            blocks: how many of its whole blocks to keep.

        Returns:
            A handle to as many or fewer; None where nothing is cached: of token ids nothing is.
        """
        text: str | Sequence[int] | Inexact
        if isinstance(request, ChatRequest):
            template = self._unrendered(request)
            text = template if isinstance(template, Inexact) else template.render(request)
        else:
            text = self._unread(request, None)
        if not isinstance(text, str) or self._tokenizer is None:
            return None
        surround = request.add_special_tokens and self._card.adds_special_tokens
        opening = self._tokenizer.opening if surround else b""
        salted = _salted(extras, request.cache_salt)
        found = self._cache.register(self._space, salted, self._cutter.cut(text), opening)
        if found is None:
            return None
        handle = found[0]
        self._cache.shorten(handle, blocks)
        if handle.blocks:
            return handle
        self._cache.release(handle)
        return None

    def tokens_min(self, chars: int) -> int:
        """Return how many tokens a text of so many characters has at the least; 0 if unknown."""
        each = None if self._tokenizer is None else self._tokenizer.chars_a_token_max
        return 0 if each is None else -(-chars // each)

    # --- what is to be tokenized ---

    def _unrendered(self, request: ChatRequest) -> ChatTemplate | Inexact:
        """Return what renders a chat, or why that is not known."""
        if self._tokenizer is None:
            return Inexact(Reason.NO_TOKENIZER)
        if not _HARMONY - self._tokenizer.added.keys():
            return Inexact(Reason.CHAT_RULES)
        if self._template is None:
            return Inexact(Reason.NO_TEMPLATE)
        if self._differs[True]:
            return Inexact(Reason.CARD_DIFFERS)
        if request.truncate_prompt_tokens is not None:
            return Inexact(Reason.TRUNCATION)
        if request.tools and isinstance(self._card.tokenizer_config.get("chat_template"), list):
            return Inexact(Reason.UNSUPPORTED, "a chat template of its own for tools")
        if request.mm_processor_kwargs:
            return Inexact(Reason.MULTIMODAL, "mm_processor_kwargs")
        return self._template

    def _chat_steps(
        self, text: str | Inexact, request: ChatRequest, extras: Extras, tokens_max: int | None
    ) -> _Steps | Inexact:
        if isinstance(text, Inexact):
            return text
        salted = _salted(extras, request.cache_salt)
        return self._text_steps(text, request.add_special_tokens, salted, tokens_max)

    def _unread(
        self, request: CompletionRequest, tokens_max: int | None
    ) -> str | Sequence[int] | Inexact:
        """Return the one prompt of a completion request, or why it has none that can be read."""
        if request.prompt_embeds is not None:
            return Inexact(Reason.MULTIMODAL, "prompt_embeds")
        if request.truncate_prompt_tokens is not None:
            return Inexact(Reason.TRUNCATION)
        prompt = single(request.prompt)
        if isinstance(prompt, str | Inexact) or tokens_max is None or len(prompt) < tokens_max:
            return prompt
        return Inexact(Reason.TOO_LONG, tokens_min=len(prompt))

    def _completion_steps(
        self, text: str, request: CompletionRequest, extras: Extras, tokens_max: int | None
    ) -> _Steps | Inexact:
        if self._tokenizer is None:
            return Inexact(Reason.NO_TOKENIZER)
        if self._differs[False]:
            return Inexact(Reason.CARD_DIFFERS)
        salted = _salted(extras, request.cache_salt)
        return self._text_steps(text, request.add_special_tokens, salted, tokens_max)

    def _text_steps(
        self, text: str, surround: bool, extras: Extras, tokens_max: int | None
    ) -> _Steps | Inexact:
        """Return the steps that read a text.

        Args:
            surround: whether the tokenizer's special tokens are to stand around it.
            extras: with the request's salt.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if extras.salt == "":
            return Inexact(Reason.INVALID, "cache_salt is empty")
        tokens_min = self.tokens_min(len(text))
        if tokens_max is not None and tokens_min > tokens_max:
            return Inexact(Reason.TOO_LONG, tokens_min=tokens_min)
        if len(text) > self._limits.chars_max:
            return Inexact(Reason.TOO_LONG)
        surround = surround and self._card.adds_special_tokens
        opening, closing = (tokenizer.opening, tokenizer.closing) if surround else (b"", b"")
        return self._steps(self._cutter.cut(text), opening, closing, extras)

    def _steps(self, texts: list[str], opening: bytes, closing: bytes, extras: Extras) -> _Steps:
        """Yield the texts to tokenize, receive their ids, return the prompt."""
        tail = texts.pop() if texts and len(texts[-1]) < _TAIL_CHARS else ""
        registered = self._cache.register(self._space, extras, texts, opening)
        if registered is None:
            return self._uncached((yield "".join(texts) + tail), opening, closing, extras)
        handle, depth = registered
        try:
            cached = handle.tokens if depth else 0
            for text in texts[depth:]:
                tokens = self._cache.tokens_of(self._space, text)
                if tokens is None:
                    tokens = yield text
                self._cache.extend(handle, text, tokens)
            rest = ((yield tail) if tail else b"") + closing
            head = handle.head(HEAD_TOKENS) + rest
            return Prompt(
                handle.tokens + len(rest) // 4,
                handle.hashes_with(rest),
                extras,
                cached,
                _head(head),
            )
        finally:
            self._cache.release(handle)

    def _uncached(self, tokens: bytes, opening: bytes, closing: bytes, extras: Extras) -> Prompt:
        whole = opening + tokens + closing
        return Prompt(len(whole) // 4, self._hashes(whole, extras), extras, 0, _head(whole))

    async def _from_ids(self, ids: Sequence[int], extras: Extras) -> Prompt | Inexact:
        """Read a prompt that is token ids; a long one in steps."""
        now_max = self._limits.tokens_now_max
        if len(ids) <= now_max or not self._card.block_size:
            return self._from_ids_now(ids, extras)
        size = self._card.block_size
        step = -(-now_max // size) * size
        hashes: list[BlockHash] = []
        for start in range(0, len(ids), step):
            tokens = _packed(ids[start : start + step])
            if tokens is None:
                return Inexact(Reason.INVALID, "a token id out of range")
            parent = hashes[-1] if hashes else ROOT
            hashes += chain(tokens, size, parent, extras, start // size)
            await asyncio.sleep(0)
        return Prompt(len(ids), hashes, extras, 0, tuple(ids[:HEAD_TOKENS]))

    def _from_ids_now(self, ids: Sequence[int], extras: Extras) -> Prompt | Inexact:
        tokens = _packed(ids)
        if tokens is None:
            return Inexact(Reason.INVALID, "a token id out of range")
        return self._uncached(tokens, b"", b"", extras)

    def _hashes(self, tokens: bytes, extras: Extras) -> list[BlockHash]:
        size = self._card.block_size
        return chain(tokens, size, extras=extras) if size else []

    # --- driving the steps ---

    async def _finish(self, steps: _Steps | Inexact) -> Prompt | Inexact:
        if isinstance(steps, Inexact):
            return self._count(steps)
        tokenizer = self._tokenizer
        assert tokenizer is not None
        limits = self._limits
        now_max = limits.chars_now_max if tokenizer.by_words else limits.chars_library_now_max
        left = now_max
        tokens: bytes | None = None
        try:
            while True:
                text = steps.send(tokens)  # type: ignore[arg-type]
                left -= len(text)
                tokens = None
                if left >= 0:
                    tokens = tokenizer.encode_if_quick(text, limits.chars_library_now_max)
                if tokens is not None:
                    continue
                if self._long_texts >= limits.long_texts_max:
                    return self._count(Inexact(Reason.BUSY))
                tokens = await self._encode_long(tokenizer, text)
                left = now_max
        except StopIteration as stop:
            return self._count(stop.value)
        except TextError as error:
            return self._count(Inexact(Reason.INVALID, str(error)))
        except TimeoutError:
            return self._count(Inexact(Reason.BUSY))
        finally:
            steps.close()

    def _finish_now(self, steps: _Steps | Inexact) -> Prompt | Inexact:
        if isinstance(steps, Inexact):
            return self._count(steps)
        assert self._tokenizer is not None
        encode: Callable[[str], bytes] = self._tokenizer.encode
        tokens: bytes | None = None
        try:
            while True:
                tokens = encode(steps.send(tokens))  # type: ignore[arg-type]
        except StopIteration as stop:
            return self._count(stop.value)
        except TextError as error:
            return self._count(Inexact(Reason.INVALID, str(error)))
        finally:
            steps.close()

    async def _encode_long(self, tokenizer: Tokenizer, text: str) -> bytes:
        self._long_texts += 1
        self.stats.long_texts += 1
        try:
            await asyncio.sleep(0)  # from here on there is a task, which a timeout needs
            async with asyncio.timeout(self._limits.long_text_s_max):
                return await tokenizer.encode_long(text, self._executor)
        finally:
            self._long_texts -= 1

    def _count(self, outcome: Prompt | Inexact) -> Prompt | Inexact:
        stats = self.stats
        if isinstance(outcome, Inexact):
            stats.inexact[outcome.reason] = stats.inexact.get(outcome.reason, 0) + 1
        else:
            stats.prompts += 1
            stats.whole += not self._cutter.cuts
        return outcome

    # --- loading ---

    def _compare(self, card: ModelCard, *, chats: bool) -> bool:
        """Whether the engine is known to read chats, or plain prompts, otherwise than the card."""
        if self._tokenizer is None:
            return False
        found = mismatch(card, self._tokenizer, self._template, chats=chats)
        self.problem = self.problem or found
        return bool(found)

    def _choose_cuts(self) -> list[str]:
        """Return the cuts that let prompts share a system message, and turns their chat."""
        if self._tokenizer is None:
            return []
        texts: list[tuple[str, str]] = []
        for first, second in PROBES:
            pair = [self._rendered(first), self._rendered(second)]
            if pair[0] and pair[1]:
                texts.append((pair[0], pair[1]))
        return choose_cuts(self._tokenizer.safe, texts)

    def _rendered(self, messages: list[dict[str, Any]]) -> str | None:
        if self._template is None:
            return None
        text = self._template.render(ChatRequest(messages=messages))
        return text if isinstance(text, str) else None


def _packed(ids: Sequence[int]) -> bytes | None:
    """Return token ids as they are hashed; None if one is no 32-bit number."""
    try:
        return pack_tokens(ids)
    except (OverflowError, TypeError):
        return None


def _salted(extras: Extras, salt: str | None) -> Extras:
    return extras if salt is None else Extras(extras.lora, salt)


def _head(tokens: bytes) -> tuple[int, ...]:
    return tuple(memoryview(tokens[: 4 * HEAD_TOKENS]).cast("I"))
