"""What a chat's next turn costs a router: rendering, tokenizing and hashing, cached and whole.

    python -m bench.tokens [--json] [--chats N] [--rounds N]

Chats of ten turns grow to 8k and to 64k tokens, with Qwen's own tokenizer and the packaged ChatML
template. Timed is the last turn: the request's messages go in, the prompt with all its block hashes
comes out. *Cached* is what a router does, its prefix cache holding the turns before; *whole* is the
same work from nothing by the `tokenizers` library, as routers without such a cache do it; *by
words* is from nothing too, by our own way of tokenizing. All three answers are compared.

Texts are pages of Python's own manual, so English and code; the mixed ones have Chinese, accents
and emoji among them. Before, the router has read chats of other pages, as one in service has.

Times are CPU time of the process, the median over the chats of a round; the round with the least
median counts, for each way. Exits with 1 if a bar is missed, with 2 if Qwen's vocabulary could not
be had.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data import topics
from statistics import median
from time import process_time_ns
from typing import Any, TypeVar

import msgspec

from controlplane.core.hashing import chain
from lab.tiny_model import tiny_model_dir, write_qwen_tokenizer
from router.chat_template import ChatTemplate
from router.prefix_cache import PrefixCache
from router.prompt import Inexact, Prompt
from router.tokenizer import Tokenizer
from router.tokens import PromptReader
from schemas.bus import ModelCard
from schemas.openai import ChatRequest

NEXT_TURN_US_MAX = 1_000.0
"""Bar at 8k tokens."""
RATIO_MIN = 10.0
"""Bar at every length: whole over cached."""

BLOCK_SIZE = 16
TURNS = 10
LENGTHS = (8_192, 65_536)
CHATS = 15
ROUNDS = 3
WARM_UP_CHATS = 20
_CHARS_PER_TOKEN = {"english": 4.4, "mixed": 3.4}
_T = TypeVar("_T")
_OTHER_SCRIPTS = (
    "你好，世界。今天天气很好",
    "déjà vu, naïve",
    "😀",
    "это просто текст",
    "“quoted”…",
)


class Cell(msgspec.Struct):
    """One kind of text and one length.

    Attributes:
        prompt_tokens: median length of the last turn's prompt.
        new_tokens: median number of its tokens that no earlier turn had.
        cached_us: the last turn, with the turns before in the cache.
        cached_worst_us: the slowest chat's.
        again_us: the same turn asked once more.
        words_us: from nothing, by words.
        whole_us: from nothing, by the library.
        ratio: whole over cached.
        missed: bars that were missed, in words.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    cached_us: float
    cached_worst_us: float
    again_us: float
    words_us: float
    whole_us: float
    ratio: float
    missed: list[str] = []


class Texts:
    """An endless supply of text; the same on every run with the same Python.

    Every second page of the manual is for warming up, the others are for what is timed.
    """

    def __init__(self, kind: str, seed: int, warming_up: bool) -> None:
        self._chance = random.Random(seed)
        self._manual = "\n\n".join(list(topics.topics.values())[warming_up::2])
        self._kind = kind

    def take(self, tokens: int) -> str:
        """Return a text of about so many tokens, from anywhere in the manual."""
        length = int(tokens * _CHARS_PER_TOKEN[self._kind])
        start = self._chance.randrange(len(self._manual) - length)
        text = self._manual[start : start + length]
        if self._kind == "english":
            return text
        words = text.split(" ")
        for at in range(0, len(words), 9):
            words[at] = self._chance.choice(_OTHER_SCRIPTS)
        return " ".join(words)


def conversation(texts: Texts, tokens: int) -> list[dict[str, Any]]:
    """Return a chat whose last turn, a user's message, makes `tokens` tokens of it."""
    turn = tokens // TURNS
    messages = [{"role": "system", "content": texts.take(turn // 3)}]
    for _ in range(TURNS - 1):
        messages.append({"role": "user", "content": texts.take(turn // 3)})
        messages.append({"role": "assistant", "content": texts.take(turn - turn // 3)})
    return [*messages, {"role": "user", "content": texts.take(turn // 3)}]


class Bench:
    """The production reader, and the two ways without a cache."""

    def __init__(self, tokenizer: bytes) -> None:
        source = (tiny_model_dir() / "chat_template.jinja").read_text(encoding="utf-8")
        card = ModelCard("qwen", tokenizer, source, block_size=BLOCK_SIZE)
        self._reader = PromptReader(card, PrefixCache(), ThreadPoolExecutor(1))
        self._template = ChatTemplate(source, {})
        self._words = Tokenizer(tokenizer)
        self._library = Tokenizer(tokenizer, words_max=0)

    def cached(self, request: ChatRequest) -> Prompt:
        """Read a request as a router does."""
        prompt = self._reader.read_chat_now(request)
        assert isinstance(prompt, Prompt)
        return prompt

    def by_words(self, request: ChatRequest) -> list[int]:
        """Return the hashes of a request read from nothing by words."""
        return self._whole(request, self._words)

    def whole(self, request: ChatRequest) -> list[int]:
        """Return the hashes of a request read from nothing by the library."""
        return self._whole(request, self._library)

    def _whole(self, request: ChatRequest, tokenizer: Tokenizer) -> list[int]:
        text = self._template.render(request)
        assert not isinstance(text, Inexact)
        return chain(tokenizer.encode(text), BLOCK_SIZE)


def timed_us(call: Callable[[ChatRequest], _T], request: ChatRequest) -> tuple[float, _T]:
    """Return the CPU time of a call, and its answer."""
    start = process_time_ns()
    answer = call(request)
    return (process_time_ns() - start) / 1e3, answer


class Round(msgspec.Struct):
    """What one round of chats cost, per chat: CPU times in µs by way, and the prompts."""

    times: dict[str, list[float]]
    prompts: list[Prompt]

    def median(self, way: str) -> float:
        """Return the median time of a way."""
        return median(self.times[way])


def play(bench: Bench, texts: Texts, tokens: int, chats: int) -> Round:
    """Play chats up to their last turn, and time that one in every way."""
    all_messages = [conversation(texts, tokens) for _ in range(chats)]
    # Turn by turn all chats, so that none finds the processor's caches full of its own text.
    for turn in range(2, 2 * TURNS, 2):
        for messages in all_messages:
            bench.cached(ChatRequest(messages=messages[:turn]))
    requests = [ChatRequest(messages=messages) for messages in all_messages]
    gc.collect()
    read = [timed_us(bench.cached, request) for request in requests]
    prompts = [prompt for _, prompt in read]
    times = {"cached": [us for us, _ in read]}
    times["again"] = [timed_us(bench.cached, request)[0] for request in requests]
    for name, way in (("words", bench.by_words), ("whole", bench.whole)):
        answers = [timed_us(way, request) for request in requests]
        times[name] = [us for us, _ in answers]
        assert [hashes for _, hashes in answers] == [prompt.hashes for prompt in prompts], name
    return Round(times, prompts)


def measure(bench: Bench, kind: str, tokens: int, chats: int, rounds: int) -> Cell:
    """Measure one kind of text and one length."""
    others = Texts(kind, seed=tokens, warming_up=True)
    for _ in range(WARM_UP_CHATS):
        request = ChatRequest(messages=conversation(others, LENGTHS[0]))
        bench.cached(request)
        bench.by_words(request)
    texts = Texts(kind, seed=tokens, warming_up=False)
    played = [play(bench, texts, tokens, chats) for _ in range(rounds)]
    best = min(played, key=lambda one: one.median("cached"))
    whole_us = min(one.median("whole") for one in played)
    cell = Cell(
        kind,
        int(median(prompt.tokens for prompt in best.prompts)),
        int(median(prompt.tokens - prompt.cached_tokens for prompt in best.prompts)),
        best.median("cached"),
        max(best.times["cached"]),
        best.median("again"),
        min(one.median("words") for one in played),
        whole_us,
        whole_us / best.median("cached"),
    )
    cell.missed = missed(cell, tokens)
    return cell


def missed(cell: Cell, tokens: int) -> list[str]:
    """Return which bars a cell misses."""
    found: list[str] = []
    if tokens == LENGTHS[0] and cell.cached_us > NEXT_TURN_US_MAX:
        found.append(f"next turn {cell.cached_us:.0f} µs > {NEXT_TURN_US_MAX:.0f}")
    if cell.ratio < RATIO_MIN:
        found.append(f"{cell.ratio:.1f} × less than whole < {RATIO_MIN:.0f}")
    return found


def table(cells: list[Cell]) -> str:
    """Return the results for people."""
    head = "text      tokens    new   cached µs   worst   again   by words     whole   ratio"
    lines = (
        f"{c.text:8} {c.prompt_tokens:7} {c.new_tokens:6} {c.cached_us:11.0f} "
        f"{c.cached_worst_us:7.0f} {c.again_us:7.0f} {c.words_us:10.0f} {c.whole_us:9.0f} "
        f"{c.ratio:7.1f}  {'; '.join(c.missed)}"
        for c in cells
    )
    return "\n".join([head, *lines])


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.tokens", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--chats", type=int, default=CHATS, help="chats of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = write_qwen_tokenizer(Path(folder) / "tokenizer.json").read_bytes()
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    bench = Bench(tokenizer)
    cells = [
        measure(bench, kind, tokens, options.chats, options.rounds)
        for tokens in LENGTHS
        for kind in ("english", "mixed")
    ]
    if options.json:
        about = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cells": msgspec.to_builtins(cells),
        }
        print(json.dumps(about, indent=2))
    else:
        print(table(cells))
    return 1 if any(cell.missed for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
