"""A whole data plane on one loop for tests: client sockets, our server, our pool, fake engines."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Self

import msgspec
import uvloop

from router.http_exchange import Exchange
from router.http_proxy import Forwarder, Outcome
from router.http_server import HttpServer
from router.limits import ServerLimits, UpstreamLimits
from router.upstream import UpstreamPool
from tests.router.fake_engine import Behaviour, FakeEngine

DEADLINE_S = 10.0
PROBE = b"GET /local HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"

# Quick ticks, so that a test of a time limit waits for little more than the limit.
SERVER_LIMITS = ServerLimits(tick_s=0.02)
UPSTREAM_LIMITS = UpstreamLimits(tick_s=0.02)


def on_uvloop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on uvloop, with a deadline, and fail it if it leaves tasks behind."""

    async def checked(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(60):
            await test(*args, **kwargs)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(checked(*args, **kwargs))

    return run


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds; fail when it does not in time."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"still waiting for: {condition}"
        await asyncio.sleep(0.002)


class CutShort(AssertionError):
    """The connection ended in the middle of an answer."""


def _require(there: object) -> None:
    if not there:
        raise CutShort


class Answer(msgspec.Struct):
    """One response, taken apart by a parser as plain as can be."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object of an OpenAI-style error."""
        error: dict[str, Any] = msgspec.json.decode(self.body)["error"]
        return error


def parse_answers(raw: bytes, *methods: bytes) -> list[Answer]:
    """Take apart everything a connection has sent.

    Args:
        raw: all bytes up to the connection's end.
        methods: of the requests, in order; those left out are taken to be GET.
    """
    answers: list[Answer] = []
    while raw:
        head, blank, raw = raw.partition(b"\r\n\r\n")
        assert blank, f"a head without an end: {head!r}"
        lines = head.split(b"\r\n")
        version, status, _ = lines[0].split(b" ", 2)
        assert version == b"HTTP/1.1"
        pairs = [line.split(b": ", 1) for line in lines[1:]]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), f"a repeated header: {head!r}"
        if int(status) < 200:
            continue
        index = len(answers)
        method = methods[index] if index < len(methods) else b"GET"
        if method == b"HEAD" or int(status) in (204, 304):
            body = b""
        elif headers.get(b"transfer-encoding") == b"chunked":
            body, raw = _dechunk(raw)
        elif b"content-length" in headers:
            length = int(headers[b"content-length"])
            _require(len(raw) >= length)
            body, raw = raw[:length], raw[length:]
        else:
            body, raw = raw, b""
        answers.append(Answer(int(status), headers, body))
    return answers


def _dechunk(raw: bytes) -> tuple[bytes, bytes]:
    """Return a chunked body's content, and what follows it."""
    content = b""
    while True:
        line, blank, raw = raw.partition(b"\r\n")
        _require(blank)
        size = int(line, 16)
        if not size:
            _require(raw.startswith(b"\r\n"))
            return content, raw[2:]
        _require(len(raw) >= size + 2)
        assert raw[size : size + 2] == b"\r\n", "a chunk longer than it says"
        content, raw = content + raw[:size], raw[size + 2 :]


class Books:
    """An observer that writes everything down, and chooses from a list of keys.

    Attributes:
        events: what was told, in order: `first_byte`, (`attempt`, key, outcome, status), `end`.
        outcome, status, body_bytes, tail: of the end.
        asked: the attempts and reasons it was asked for another instance with.
        given: how often it had one.
    """

    def __init__(self, keys: list[Hashable]) -> None:
        self.keys = keys
        self.events: list[Any] = []
        self.asked: list[tuple[int, Outcome]] = []
        self.given = 0
        self.outcome: Outcome | None = None
        self.status = -1
        self.body_bytes = -1
        self.tail = b""

    def next_upstream(self, attempt: int, reason: Outcome) -> Hashable | None:
        """Return the next of the keys."""
        self.asked.append((attempt, reason))
        if not self.keys:
            return None
        self.given += 1
        return self.keys.pop(0)

    def on_first_byte(self, now_s: float) -> None:
        """Write it down."""
        self.events.append("first_byte")

    def on_attempt_end(self, key: Hashable, outcome: Outcome, status: int, now_s: float) -> None:
        """Write it down."""
        self.events.append(("attempt", key, outcome, status))

    def on_end(
        self, outcome: Outcome, status: int, body_bytes: int, now_s: float, usage_tail: bytes
    ) -> None:
        """Write it down, and insist on its being the only one."""
        assert self.outcome is None, "a request that ended twice"
        self.events.append("end")
        self.outcome, self.status = outcome, status
        self.body_bytes, self.tail = body_bytes, usage_tail


class RawClient:
    """A client that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, **options: Any) -> Self:
        """Connect to a local port."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, **options))

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def read_until(self, mark: bytes) -> bytes:
        """Read up to `mark`, and return all of it."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.readuntil(mark)

    async def read_all(self) -> bytes:
        """Read to the connection's end, or its reset."""
        parts = []
        async with asyncio.timeout(DEADLINE_S):
            try:
                while part := await self.reader.read(65536):
                    parts.append(part)
            except ConnectionError:
                parts.append(b"")
        return b"".join(parts)

    def close(self) -> None:
        """Close, politely."""
        self.writer.close()

    def abort(self) -> None:
        """Close at once."""
        self.writer.transport.abort()


class Rig:
    """A server, a pool and engines `e0`, `e1`, …, one for each behaviour given.

    `/local` is answered on the spot, `/boom` raises, `/hold` is kept in `held`, anything else is
    forwarded to `e0`, then, on failure, to the others in turn. `books` holds an observer for each.
    """

    def __init__(
        self,
        *behaviours: Behaviour,
        server: ServerLimits = SERVER_LIMITS,
        upstream: UpstreamLimits = UPSTREAM_LIMITS,
        **forwarder: Any,
    ) -> None:
        self.engines = [FakeEngine(behaviour) for behaviour in behaviours or (Behaviour(),)]
        self.books: list[Books] = []
        self.held: list[Exchange] = []
        self.forward_options: dict[str, Any] = {}
        self._limits = (server, upstream)
        self._forwarder_options = forwarder
        self._clients: list[RawClient] = []

    async def __aenter__(self) -> Self:
        """Start everything."""
        server, upstream = self._limits
        self.pool = UpstreamPool(upstream)
        for index, engine in enumerate(self.engines):
            self.pool.put(f"e{index}", "127.0.0.1", await engine.start())
        self.forwarder = Forwarder(self.pool, **self._forwarder_options)
        self.server = HttpServer(self, server)
        _, self.port = await self.server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop everything, and check that nothing is left."""
        for client in self._clients:
            client.abort()
        await self.server.stop(grace_s=0)
        await self.pool.close()
        for engine in self.engines:
            await engine.stop()
        assert self.server.connections_open == 0
        assert self.server.buffered_bytes == 0
        assert self.pool.calls_open == 0
        for books in self.books:
            assert books.events[-1:] == ["end"], f"a request that never ended: {books.events}"

    def handle(self, exchange: Exchange) -> None:
        """Answer as the class says."""
        match exchange.path:
            case b"/local":
                exchange.respond(200, [(b"content-type", b"text/plain")], b"local")
            case b"/big":
                exchange.respond(200, [], b"b" * 100_000)
            case b"/boom":
                raise LookupError("boom")
            case b"/hold":
                self.held.append(exchange)
            case _:
                self.forward(exchange)

    def forward(self, exchange: Exchange) -> None:
        """Forward to the engines in turn."""
        keys: list[Hashable] = [f"e{index}" for index in range(len(self.engines))]
        books = Books(keys[1:])
        self.books.append(books)
        self.forwarder.forward(
            exchange, keys[0], books.next_upstream, books, **self.forward_options
        )

    async def connect(self, port: int = 0, **options: Any) -> RawClient:
        """Open a client connection, to another port if one is given; it is closed with the rig."""
        client = await RawClient.connect(port or self.port, **options)
        self._clients.append(client)
        return client

    async def talk(self, *pieces: bytes) -> bytes:
        """Send pieces over a new connection, let each arrive by itself, and read to the end."""
        client = await self.connect()
        for piece in pieces:
            client.send(piece)
            await asyncio.sleep(0)
        return await client.read_all()


def request(target: str, body: bytes = b"", *lines: str, method: str = "POST") -> bytes:
    """Return a request as a well-behaved client sends it."""
    head = [f"{method} {target} HTTP/1.1", "Host: t", *lines]
    if body or method == "POST":
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body
