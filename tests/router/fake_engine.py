"""A raw engine for tests: answers as told, down to the bytes, and counts what it sees.

In process, on the test's own loop:

    engine = FakeEngine(Behaviour(mode=Mode.STREAM, chunks=50))
    port = await engine.start()
    engine.behaviour = Behaviour(mode=Mode.NEVER)       # from the next request on
    await engine.stop()

A request may carry its own behaviour in the query: `?mode=stream&chunks=3&status=200`.

As a process (prints its port): `python tests/router/fake_engine.py --port 0 --mode stream`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from enum import StrEnum
from urllib.parse import parse_qsl

import msgspec

HEAD_JSON = b"HTTP/1.1 %d Fake\r\nserver: fake\r\ncontent-type: application/json\r\n"
HEAD_SSE = b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":%d,"text":" token"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


class Mode(StrEnum):
    """How an engine answers."""

    JSON = "json"  # one body with Content-Length
    STREAM = "stream"  # server-sent events, one a chunk
    CLOSE_DELIMITED = "close_delimited"  # a body that the connection's end ends
    ECHO = "echo"  # the request's own head and body as the answer's body
    RAW = "raw"  # `raw`, whatever it is
    NEVER = "never"  # nothing, ever
    HEAD_ONLY = "head_only"  # a stream's head, and then nothing
    DIE_BEFORE_HEAD = "die_before_head"
    DIE_AFTER_HEAD = "die_after_head"
    DIE_MID_STREAM = "die_mid_stream"  # after half the chunks
    STALL = "stall"  # after half the chunks, but the connection stays


class Behaviour(msgspec.Struct, frozen=True):
    """What the next answers look like.

    Fields:
        mode: see `Mode`.
        status: of JSON answers.
        chunks: events of a stream.
        chunk_bytes: padding in each event.
        usage: whether a stream ends with it, as for clients that ask.
        gap_s: between events; 0 sends a stream as fast as the client reads.
        delay_s: before the answer.
        body: of JSON and close-delimited answers.
        raw, raw_later: of RAW answers, the second part a moment after the first.
        close: end the connection after the answer, unannounced.
    """

    mode: Mode = Mode.JSON
    status: int = 200
    chunks: int = 4
    chunk_bytes: int = 0
    usage: bool = True
    gap_s: float = 0.0
    delay_s: float = 0.0
    body: bytes = b'{"object":"text_completion","usage":{"prompt_tokens":7}}'
    raw: bytes = b""
    raw_later: bytes = b""
    close: bool = False


class Received(msgspec.Struct, frozen=True):
    """A request as it arrived."""

    head: bytes
    body: bytes

    @property
    def request_line(self) -> bytes:
        """The first line."""
        return self.head.partition(b"\r\n")[0]

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The header lines, names in lower case."""
        lines = self.head.split(b"\r\n")[1:]
        pairs = (line.partition(b": ") for line in lines if line)
        return {name.lower(): value for name, _, value in pairs}


class FakeEngine:
    """An engine that answers as told.

    Attributes:
        behaviour: how the next requests are answered.
        received: the last requests.
        requests: how many requests have come.
        connections: how many connections have been opened.
        aborted: answers that the peer cut short.
        open: connections open now.
        idle_close_s: close a kept connection that is unused for so long, as uvicorn does.
    """

    def __init__(self, behaviour: Behaviour | None = None, idle_close_s: float = 0.0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.idle_close_s = idle_close_s
        self.received: deque[Received] = deque(maxlen=64)
        self.requests = 0
        self.connections = 0
        self.aborted = 0
        self.open: set[_EngineConnection] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> int:
        """Listen, and return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _EngineConnection(self), "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.open):
            connection.transport.abort()
        await asyncio.sleep(0)


class _EngineConnection(asyncio.Protocol):
    """One connection to the fake engine."""

    transport: asyncio.Transport

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._held = b""
        self._answer: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._idle_handle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._engine.connections += 1
        self._engine.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.open.discard(self)
        if self._answer is not None:
            self._engine.aborted += 1
            self._answer.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._answer is None:
            self._next_request()

    def _next_request(self) -> None:
        if self._idle_handle is not None:
            self._idle_handle.cancel()
        head, blank, rest = self._held.partition(b"\r\n\r\n")
        if not blank:
            return
        if head.startswith(b"PRI "):
            self._write(b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\n\r\n")
            self.transport.close()
            return
        request = Received(head=head, body=b"")
        length = int(request.headers.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self._held = rest[length:]
        request = Received(head=head, body=rest[:length])
        self._engine.requests += 1
        self._engine.received.append(request)
        self._answer = asyncio.get_running_loop().create_task(self._respond(request))

    async def _respond(self, request: Received) -> None:
        behaviour = _behaviour_of(request, self._engine.behaviour)
        await asyncio.sleep(behaviour.delay_s)
        await _ANSWERS[behaviour.mode](self, request, behaviour)
        self._answer = None
        if behaviour.close:
            self.transport.close()
            return
        if self._engine.idle_close_s:
            self._idle_handle = asyncio.get_running_loop().call_later(
                self._engine.idle_close_s, self.transport.close
            )
        self._next_request()

    def _write(self, data: bytes) -> None:
        self.transport.write(data)

    async def _json(self, request: Received, behaviour: Behaviour) -> None:
        body = behaviour.body
        head = HEAD_JSON % behaviour.status + b"content-length: %d\r\n\r\n" % len(body)
        self._write(head if request.head.startswith(b"HEAD ") else head + body)

    async def _echo(self, request: Received, behaviour: Behaviour) -> None:
        await self._json(request, Behaviour(body=request.head + b"\r\n\r\n" + request.body))

    async def _raw(self, request: Received, behaviour: Behaviour) -> None:
        self._write(behaviour.raw)
        if behaviour.raw_later:
            await asyncio.sleep(0.02)
            self._write(behaviour.raw_later)

    async def _close_delimited(self, request: Received, behaviour: Behaviour) -> None:
        self._write(HEAD_JSON % behaviour.status + b"\r\n" + behaviour.body)
        self.transport.close()

    async def _never(self, request: Received, behaviour: Behaviour) -> None:
        await asyncio.get_running_loop().create_future()

    async def _head_only(self, request: Received, behaviour: Behaviour) -> None:
        self._write(HEAD_SSE + CHUNKED)
        await asyncio.get_running_loop().create_future()

    async def _die_before_head(self, request: Received, behaviour: Behaviour) -> None:
        self.transport.abort()

    async def _die_after_head(self, request: Received, behaviour: Behaviour) -> None:
        self._write(HEAD_SSE + CHUNKED)
        self.transport.close()

    async def _stream(self, request: Received, behaviour: Behaviour) -> None:
        await self._events(behaviour, behaviour.chunks)
        usage = chunk(USAGE % behaviour.chunks) if behaviour.usage else b""
        self._write(usage + chunk(DONE) + b"0\r\n\r\n")

    async def _die_mid_stream(self, request: Received, behaviour: Behaviour) -> None:
        await self._events(behaviour, behaviour.chunks // 2)
        self.transport.close()

    async def _stall(self, request: Received, behaviour: Behaviour) -> None:
        await self._events(behaviour, behaviour.chunks // 2)
        await asyncio.get_running_loop().create_future()

    async def _events(self, behaviour: Behaviour, count: int) -> None:
        self._write(HEAD_SSE + CHUNKED)
        padding = b"x" * behaviour.chunk_bytes
        for index in range(count):
            await asyncio.sleep(behaviour.gap_s)
            await self._writable.wait()
            self._write(chunk(EVENT % index + padding))


_ANSWERS = {
    Mode.JSON: _EngineConnection._json,
    Mode.STREAM: _EngineConnection._stream,
    Mode.CLOSE_DELIMITED: _EngineConnection._close_delimited,
    Mode.ECHO: _EngineConnection._echo,
    Mode.RAW: _EngineConnection._raw,
    Mode.NEVER: _EngineConnection._never,
    Mode.HEAD_ONLY: _EngineConnection._head_only,
    Mode.DIE_BEFORE_HEAD: _EngineConnection._die_before_head,
    Mode.DIE_AFTER_HEAD: _EngineConnection._die_after_head,
    Mode.DIE_MID_STREAM: _EngineConnection._die_mid_stream,
    Mode.STALL: _EngineConnection._stall,
}


def chunk(data: bytes) -> bytes:
    """Return `data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _behaviour_of(request: Received, default: Behaviour) -> Behaviour:
    """Return how to answer this request: the engine's way, changed by the request's query."""
    query = request.request_line.split(b" ")[1].partition(b"?")[2].decode("latin-1")
    try:
        changes = msgspec.convert(dict(parse_qsl(query)), _Changes, strict=False)
    except msgspec.ValidationError:  # Meant for somebody else.
        return default
    return msgspec.structs.replace(default, **msgspec.structs.asdict(changes))


class _Changes(msgspec.Struct, frozen=True):
    """What a query may say."""

    mode: Mode
    status: int = 200
    chunks: int = 4
    chunk_bytes: int = 0
    gap_s: float = 0.0
    delay_s: float = 0.0


async def _serve(port: int, behaviour: Behaviour) -> None:
    engine = FakeEngine(behaviour)
    print(await engine.start(port), flush=True)
    await asyncio.get_running_loop().create_future()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--mode", type=Mode, default=Mode.JSON)
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--gap-s", type=float, default=0.0)
    options = parser.parse_args()
    behaviour = Behaviour(mode=options.mode, chunks=options.chunks, gap_s=options.gap_s)
    asyncio.run(_serve(options.port, behaviour))


if __name__ == "__main__":
    main()
