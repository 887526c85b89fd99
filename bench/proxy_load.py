"""The load of `bench.proxy`: a closed loop of raw clients, each with one kept connection.

Clients find the end of an answer by its Content-Length or last chunk and do nothing else with it,
so that on a shared machine the load costs little beside what is measured.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import msgspec

from bench.proxy_engine import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROMPT_WORDS: Final = 400  # about 2 KiB: a short chat


class Sample(msgspec.Struct, frozen=True):
    """What one run of load saw.

    Fields:
        requests: answered in full.
        errors: answered otherwise than with 200, or not in full.
        wall_s: from first to last.
        first_byte_s: request sent to first byte of the answer, sorted.
        total_s: request sent to last byte, sorted.
    """

    requests: int
    errors: int
    wall_s: float
    first_byte_s: list[float]
    total_s: list[float]

    def quantile_s(self, times_s: list[float], q: float) -> float:
        """Return a quantile of sorted times."""
        return times_s[min(len(times_s) - 1, int(q * len(times_s)))] if times_s else float("nan")


def request_bytes(authority: str, *, stream: bool, chunks: int = 50, gap_ms: int = 5) -> bytes:
    """Return a completion request as the openai client would send it."""
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "prompt": "lorem " * _PROMPT_WORDS,
            "max_tokens": chunks,
            "seed": gap_ms,
            "stream": stream,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {authority}\r\nAccept: application/json\r\n"
        "Accept-Encoding: identity\r\nContent-Type: application/json\r\n"
        "User-Agent: OpenAI/Python 2.0.0\r\nAuthorization: Bearer sk-bench\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection that asks one thing at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._answer: asyncio.Future[bool] | None = None
        self._head = b""
        self._left: int | None = None  # body bytes still to come; None when chunked
        self._in_body = False
        self._tail = b""
        self.first_byte_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        """Send a request; the future tells whether it was answered with 200, in full."""
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self._tail, self._in_body, self.first_byte_s = b"", b"", False, 0.0
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if not self.first_byte_s:
            self.first_byte_s = time.perf_counter()
        if not self._in_body:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._head, self._in_body = head, True
            lower = head.lower()
            _, found, length = lower.partition(b"content-length:")
            self._left = int(length.split(b"\r\n")[0]) if found else None
        if self._left is None:
            self._tail = (self._tail + data)[-5:]
            if self._tail == b"0\r\n\r\n":
                self._done()
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._done()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(False)

    def _done(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._head[9:12] == b"200")


async def connect(port: int) -> Client:
    """Open a client connection."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def run_load(port: int, request: bytes, *, requests: int, concurrency: int) -> Sample:
    """Send `requests` requests over `concurrency` connections, each as soon as it can."""
    first_byte_s: list[float] = []
    total_s: list[float] = []
    turns = iter(range(requests))
    clients = [await connect(port) for _ in range(concurrency)]
    start_s = time.perf_counter()
    await asyncio.gather(*(_ask_on(c, request, turns, first_byte_s, total_s) for c in clients))
    wall_s = time.perf_counter() - start_s
    for client in clients:
        client.transport.abort()
    errors = requests - len(total_s)
    return Sample(len(total_s), errors, wall_s, sorted(first_byte_s), sorted(total_s))


async def _ask_on(
    client: Client,
    request: bytes,
    turns: Iterator[int],
    first_byte_s: list[float],
    total_s: list[float],
) -> None:
    """Take turns until there are none left."""
    for _ in turns:
        sent_s = time.perf_counter()
        if not await client.ask(request):
            if client.transport.is_closing():
                return
            continue
        total_s.append(time.perf_counter() - sent_s)
        first_byte_s.append(client.first_byte_s - sent_s)
