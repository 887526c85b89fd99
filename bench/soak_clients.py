"""The traffic of `bench.soak`: requests of every kind, and clients that often do not wait.

Prompts come from a bounded set, so that caches fill up once and then stay as they are.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

PATIENCE_S: Final = 5.0
"""How long a client waits at most: some engines hang on purpose."""

_WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_PROMPTS: Final = 200


class Traffic:
    """Makes requests; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._prompts = [self._prompt(n) for n in range(_PROMPTS)]

    def _prompt(self, number: int) -> str:
        """Return one of the prompts: a shared opening, and a length of its own."""
        chance = random.Random(number)
        opening = " ".join(chance.choice(_WORDS) for _ in range(20 + 40 * (number % 4)))
        length = 2000 if number % 50 == 0 else 10 + 5 * (number % 20)
        return f"{opening} {number} " + " ".join(chance.choice(_WORDS) for _ in range(length))

    def request(self) -> tuple[bytes, bool]:
        """Return a request as bytes, and whether its answer is a stream."""
        chance = self._chance
        text = chance.choice(self._prompts)
        stream = chance.random() < 0.4
        messages = [{"role": "user", "content": text}]
        limit = chance.choice((1, 4, 16))
        kind, body = chance.choices(_KINDS, _WEIGHTS)[0](text, messages, limit)
        if stream and kind in _STREAMED:
            body["stream"] = True
        data = json.dumps(body).encode()
        if chance.random() < 0.01:
            data = data[: len(data) // 2]
        head = f"POST {kind} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data, stream and kind in _STREAMED

    def patience_s(self) -> float:
        """Return how long the next client waits: mostly to the end, often hardly at all."""
        if self._chance.random() < 0.7:
            return PATIENCE_S
        return self._chance.choice((0.0, 0.001, 0.005, 0.02, 0.1))


_Body = Callable[[str, list[dict[str, str]], int], tuple[str, dict[str, Any]]]
_M: Final = {"model": "tiny"}
_KINDS: Final[tuple[_Body, ...]] = (
    lambda _, messages, n: ("/v1/chat/completions", {**_M, "messages": messages, "max_tokens": n}),
    lambda text, _, n: ("/v1/completions", {**_M, "prompt": text, "max_tokens": n}),
    lambda text, _, n: (
        "/v1/completions",
        {**_M, "prompt": [5 + len(word) for word in text.split()], "max_tokens": n},
    ),
    lambda _, messages, n: ("/v1/messages", {**_M, "messages": messages, "max_tokens": n}),
    lambda text, _, n: ("/v1/responses", {**_M, "input": text, "max_output_tokens": n}),
    lambda text, _, n: ("/v1/embeddings", {**_M, "input": text}),
    lambda text, _, n: ("/tokenize", {**_M, "prompt": text}),
    lambda text, _, n: ("/v1/completions", {"model": "nope", "prompt": text}),
)
_WEIGHTS: Final = (40, 15, 10, 10, 8, 6, 6, 5)
_STREAMED: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
)


async def visit(port: int, traffic: Traffic, counts: Counter[str]) -> None:
    """Make one request over a connection of its own, and leave when patience ends."""
    request, stream = traffic.request()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        counts["not connected"] += 1
        return
    try:
        async with asyncio.timeout(traffic.patience_s()):
            writer.write(request)
            counts[await _answer(reader, stream)] += 1
    except TimeoutError:
        counts["left"] += 1
    except (OSError, asyncio.IncompleteReadError):
        counts["cut off"] += 1
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, stream: bool) -> str:
    """Read an answer to its end; returns its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, found, rest = head.partition(b"content-length:")
    if found:
        await reader.readexactly(int(rest.partition(b"\r\n")[0]))
    else:
        await reader.readuntil(b"0\r\n\r\n")
    return head[9:12].decode()
