"""A model's own tokenizer, from the `tokenizer.json` on its card: text → exact token ids.

The only file that imports `tokenizers`. Token ids are u32 bytes throughout (`pack_tokens`), the
form in which they are hashed.

Two ways lead to the same ids: `router/words.py` for the common family of tokenizers, and the
library for all others and for whatever the first declines. Which cuts are safe, and whether the
first way agrees, is decided by analysis of the JSON and then tried on random texts at load.

`encode` is synchronous. `encode_long` keeps an event loop responsive: by words it pauses every few
thousand characters; where there is nowhere to cut, as in a word of a million letters, it leaves the
rest of the text to a thread, as a batch of one: for batches alone the library releases the GIL.
"""

from __future__ import annotations

import asyncio
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer as LibraryTokenizer

from router.segments import AddedToken, Cutter, safe_cuts
from router.words import WORDS_MAX_DEFAULT, Words, words_of

_TRIALS: Final = 150  # random texts at load: about 20 ms
_CHUNK_CHARS: Final = 8_192  # about 0.5 ms by words, and 3 ms if they are a single one
_CUT: Final = re.compile(r"(?<=\n)(?=[A-Za-z])|(?<=[A-Za-z])(?= [A-Za-z])")
"""Between a line's end and a letter, and between two words of such letters."""
_COMPOSED_CHARS_MAX: Final = 3
_HALF_A_PAIR: Final = "the text has half of a surrogate pair"
"""What it means that the library raises a TypeError: a str that is no UTF-8."""
_PIECES: Final = (
    *("the", " quick", "Brown", "fox's", "I'LL", " we've", "x_y", "camelCase", "\u00e9t\u00e9"),
    *(" na\u00efve", "e\u0301", "\u4f60\u597d", "\u3002", "\u6771\u4eac", "\uac00\ub098", "\u0639"),
    *("\u0416", "\u03bb", "\u00df", "\u2026", "\u201cq\u201d", "\U0001f600", "\u2764\ufe0f"),
    *("0", "42", "3.14", "1,000", "\u00bd", "\u2167", "\u0665", " ", "  ", "   ", "\n", "\n\n"),
    *("\r\n", "\t", " \n ", "\u00a0", "\u3000", "\x1c", "\x85", ".", "...", "!?", " (", ")", "{}"),
    *('"', "'", "''", "--", "/*", "*/", "<", "</", "<|", "|>", "\\", "$", "&&", "#", "@", "_", "~"),
)


class TokenizerError(ValueError):
    """A model card's tokenizer that cannot be read or cannot be followed exactly."""


class TextError(ValueError):
    """A text that no tokenizer takes: it has half of a surrogate pair."""


class _Config(msgspec.Struct):
    """What a tokenizer.json says besides its vocabulary."""

    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    model: _Model | None = None


class _Model(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None


def _pack(token_ids: Iterable[int]) -> bytes:
    return array("I", token_ids).tobytes()


class Tokenizer:
    """One model's tokenizer.

    Not thread-safe: one event loop owns it (`encode_long` shares with a thread only what may be).

    Attributes:
        safe: texts of the added tokens before which a text may be cut; empty if none is safe.
        by_words: whether the fast way is in use.
        chars_a_token_max: characters that a token stands for at most; None where that is not known.
        opening: token ids before every prompt that asks for special tokens (BOS).
        closing: token ids after it.
    """

    def __init__(self, data: bytes, words_max: int = WORDS_MAX_DEFAULT) -> None:
        """Load a tokenizer: about half a second for a large vocabulary, interpreter lock held.

        Args:
            data: bytes of a tokenizer.json.
            words_max: most words to remember on the fast way; 0 turns it off.

        Raises:
            TokenizerError: it is none, or its answers are random (BPE dropout).
        """
        try:
            config = msgspec.json.decode(data, type=_Config)
            self._library = LibraryTokenizer.from_buffer(data)
        except Exception as error:  # the library raises no class of its own
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        if config.model is not None and config.model.dropout:
            raise TokenizerError("the tokenizer drops merges at random")
        self._model = self._library.model  # shared, not a copy
        self._library.no_truncation()
        self._library.no_padding()
        self.added: dict[str, AddedToken] = {token.content: token for token in config.added_tokens}
        self._words = self._checked_words(config, words_max) if words_max else None
        self.by_words = self._words is not None
        self.safe = self._checked_cuts(safe_cuts(config.added_tokens))
        self._cuts_are_safe = self._words is not None and self._cuts_agree()
        self.chars_a_token_max = self._longest() if self._words is not None else None
        self.opening, self.closing = self._surroundings()

    def encode(self, text: str) -> bytes:
        """Return the token ids of a text, without special tokens around it.

        Raises:
            TextError: the text cannot be written as UTF-8.
        """
        if self._words is not None and (tokens := self._words.encode(text)) is not None:
            return tokens
        return self._encode_whole(text)

    def encode_if_quick(self, text: str, library_chars_max: int) -> bytes | None:
        """Return what `encode` returns, or None where only the library can, and it would take long.

        Args:
            text: of a length that words are quick with.
            library_chars_max: of a length that the library is quick with.
        """
        if self._words is not None and (tokens := self._words.encode(text)) is not None:
            return tokens
        return self._encode_whole(text) if len(text) <= library_chars_max else None

    async def encode_long(self, text: str, executor: Executor) -> bytes:
        """Return what `encode` returns, without holding up the event loop for long."""
        parts: list[bytes] = []
        start = 0
        if self._words is not None and self._cuts_are_safe:
            while (end := _end_of_chunk(text, start)) > start:
                tokens = self._words.encode(text[start:end])
                if tokens is None:
                    break
                parts.append(tokens)
                start = end
                await asyncio.sleep(0)
        if start < len(text):
            loop = asyncio.get_running_loop()
            rest = text[start:] if start else text
            parts.append(await loop.run_in_executor(executor, self._encode_aside, rest))
        return b"".join(parts)

    def explain_mismatch(
        self, special_tokens: Mapping[str, str], tokenizer_config: Mapping[str, Any]
    ) -> str | None:
        """Return how a tokenizer_config.json would change this tokenizer, None if it would not.

        transformers adds to a tokenizer the tokens that its tokenizer_config.json names; the ids of
        the two then differ from those of the tokenizer.json alone.
        """
        for name, text in special_tokens.items():
            if text and text not in self.added:
                return f"{name} {text!r} is no added token of the tokenizer.json"
        declared = tokenizer_config.get("added_tokens_decoder")
        for entry in declared.values() if isinstance(declared, dict) else ():
            content = entry.get("content") if isinstance(entry, dict) else None
            token = self.added.get(content) if isinstance(content, str) else None
            if token is None or any(
                bool(entry.get(flag, False)) != getattr(token, flag)
                for flag in ("single_word", "lstrip", "rstrip", "normalized")
            ):
                return f"added token {content!r} differs between tokenizer_config.json and this"
        return None

    def _encode_whole(self, text: str) -> bytes:
        try:
            return _pack(self._library.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            raise TextError(_HALF_A_PAIR) from error

    def _encode_aside(self, text: str) -> bytes:
        """Return what `_encode_whole` returns, in a thread that lets the others run meanwhile."""
        try:
            (found,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise TextError(_HALF_A_PAIR) from error
        return _pack(found.ids)

    def _checked_words(self, config: _Config, words_max: int) -> Words | None:
        if config.model is None:
            return None
        words = words_of(
            config.normalizer,
            config.pre_tokenizer,
            config.model.type or "",
            config.added_tokens,
            self._merge,
            words_max,
        )
        if words is None:
            return None
        for text in _random_texts(self.added):
            tokens = words.encode(text)
            if tokens is not None and tokens != self._encode_whole(text):
                return None
        return words

    def _longest(self) -> int:
        """Return how many characters a token stands for at most.

        Every token of the family stands for the bytes that it spells, and a character has at least
        one; composing (NFC), which engines do first, makes at most three characters one.
        """
        longest = max(map(len, self._library.get_vocab()), default=1)
        return longest * _COMPOSED_CHARS_MAX

    def _merge(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word)]

    def _checked_cuts(self, cuts: list[str]) -> list[str]:
        cutter = Cutter(cuts)
        for text in _random_texts(self.added):
            parts = cutter.cut(text)
            if b"".join(map(self._encode_whole, parts)) != self._encode_whole(text):
                return []
        return cuts

    def _cuts_agree(self) -> bool:
        """True if a text may also be cut where `_CUT` says: tried, not proved."""
        if any(_CUT.search(token) for token in self.added):
            return False
        for text in _random_texts(self.added):
            for tried in (text, text.replace(" ", "\n")):
                parts = _CUT.sub("\0", tried).split("\0")
                if b"".join(map(self.encode, parts)) != self.encode(tried):
                    return False
        return True

    def _surroundings(self) -> tuple[bytes, bytes]:
        bare = self._encode_whole("a")
        around = _pack(self._library.encode("a", add_special_tokens=True).ids)
        at = around.find(bare)
        while at % 4 and at >= 0:
            at = around.find(bare, at + 1)
        if at < 0:
            raise TokenizerError("the tokenizer's special tokens do not surround the prompt")
        return around[:at], around[at + len(bare) :]


def _random_texts(added: Iterable[str]) -> Iterator[str]:
    """Yield texts, the same every time, in which all kinds of letters meet the added tokens."""
    chance = random.Random(20260815)
    tokens = list(added)[:64]
    parts = [text[: len(text) // 2] for text in tokens] + [text[1:] for text in tokens]
    pools = [_PIECES, _PIECES, tokens or _PIECES, parts or _PIECES]
    for _ in range(_TRIALS):
        yield "".join(chance.choice(chance.choice(pools)) for _ in range(24))


def _end_of_chunk(text: str, start: int) -> int:
    """Return where a part of about `_CHUNK_CHARS` ends; `start` if there is nowhere to cut."""
    if len(text) - start <= 2 * _CHUNK_CHARS:
        return len(text)
    cut = _CUT.search(text, start + _CHUNK_CHARS, start + 2 * _CHUNK_CHARS)
    return cut.start() if cut else start
