"""The load of `bench.proxy`: raw clients, in a closed loop or at a steady rate.

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

# A chat of some two thousand tokens, and the headers of OpenAI's Python client.
_PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 190
_HEADERS: Final = (
    "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\n"
    "Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.0\r\n"
    "X-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.8.0\r\nX-Stainless-OS: Linux\r\n"
    "X-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
    "X-Stainless-Runtime-Version: 3.11.7\r\nAuthorization: Bearer sk-bench\r\n"
    "X-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\n"
    "x-stainless-read-timeout: 600\r\n"
)


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
    """Return a completion request as OpenAI's Python client sends it."""
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "prompt": _PROMPT,
            "max_tokens": chunks,
            "seed": gap_ms,
            "stream": stream,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {authority}\r\n{_HEADERS}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection that asks one thing at a time.

    Attributes:
        transport: the connection.
        first_byte_s: when the present answer began, 0 if it has not.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._answer: asyncio.Future[bool] | None = None
        self._head = b""
        self._left: int | None = None  # body bytes still to come; None when chunked
        self._in_body = False
        self._tail = b""
        self.first_byte_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        """Send a request; the future tells whether it was answered with 200, in full."""
        self._answer = asyncio.get_running_loop().create_future()
        self._head, self._tail, self._in_body, self.first_byte_s = b"", b"", False, 0.0
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        """Look for the end of the answer."""
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
        """Give up the answer."""
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


async def run_steadily(port: int, request: bytes, *, requests: int, per_s: float) -> Sample:
    """Send requests at a steady rate, whatever becomes of the earlier ones."""
    sample = Sample(0, 0, 0.0, [], [])
    free: list[Client] = []
    asking: set[asyncio.Task[bool]] = set()
    start_s = time.perf_counter()
    for number in range(requests):
        wait_s = start_s + number / per_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        client = free.pop() if free else await connect(port)
        task = asyncio.create_task(_ask_once(client, request, sample, free))
        asking.add(task)
    answered = sum(await asyncio.gather(*asking))
    wall_s = time.perf_counter() - start_s
    for client in free:
        client.transport.abort()
    times_s = sorted(sample.total_s)
    return Sample(answered, requests - answered, wall_s, sorted(sample.first_byte_s), times_s)


async def _ask_once(client: Client, request: bytes, sample: Sample, free: list[Client]) -> bool:
    """Ask once, note the times, and put the client back; say whether it was answered."""
    sent_s = time.perf_counter()
    if not await client.ask(request):
        client.transport.abort()
        return False
    sample.total_s.append(time.perf_counter() - sent_s)
    sample.first_byte_s.append(client.first_byte_s - sent_s)
    free.append(client)
    return True
