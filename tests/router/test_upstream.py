"""The pool against an engine that misbehaves in every way: reuse, deadlines, errors, cancelling."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.http_head import ResponseHead
from router.limits import UpstreamLimits
from router.upstream import ErrorKind, Sink, UpstreamCall, UpstreamPool
from tests.router.fake_engine import DONE, Behaviour, FakeEngine, Mode, chunk
from tests.router.http_rig import on_uvloop, until

HEAD = b"POST /v1 HTTP/1.1\r\n"
LIMITS = UpstreamLimits(tick_s=0.01)


class Collector:
    """A sink that keeps everything, and checks that callbacks come in the promised order."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.data = bytearray()
        self.pieces = 0
        self.end: ErrorKind | str = ""
        self.then: Callable[[], None] | None = None  # called at each callback

    def on_response_head(self, head: ResponseHead) -> None:
        """Keep it."""
        assert self.head is None
        assert not self.end
        self.head = head
        self._then()

    def on_data(self, data: bytes) -> None:
        """Keep it."""
        assert data
        assert self.head is not None
        assert not self.end
        self.data += data
        self.pieces += 1
        self._then()

    def on_end(self) -> None:
        """Keep it."""
        assert self.head is not None
        assert not self.end
        self.end = "end"
        self._then()

    def on_error(self, kind: ErrorKind) -> None:
        """Keep it."""
        assert not self.end
        self.end = kind
        self._then()

    def _then(self) -> None:
        if self.then is not None:
            self.then()


class Bench:
    """A pool and one engine, `e`."""

    def __init__(self, pool: UpstreamPool, engine: FakeEngine) -> None:
        self.pool = pool
        self.engine = engine
        instance = pool.get("e")
        assert instance is not None
        self.instance = instance

    def send(self, key: str = "e", body: bytes = b"", **options: Any) -> tuple[UpstreamCall, Any]:
        """Send a request; return the call and its collector."""
        sink = Collector()
        head = HEAD + b"content-length: %d\r\n" % len(body)
        return self.pool.send(key, head, body, sink, **options), sink

    async def ask(self, **options: Any) -> Collector:
        """Send a request, and wait for its end."""
        _, sink = self.send(**options)
        await until(lambda: sink.end)
        collector: Collector = sink
        return collector


@asynccontextmanager
async def bench(
    behaviour: Behaviour | None = None, limits: UpstreamLimits = LIMITS, **engine_options: Any
) -> AsyncIterator[Bench]:
    """A pool and an engine, and the check that nothing is left of them."""
    engine = FakeEngine(behaviour, **engine_options)
    pool = UpstreamPool(limits)
    instance = pool.put("e", "127.0.0.1", await engine.start())
    yield Bench(pool, engine)
    await pool.close()
    await engine.stop()
    await until(lambda: instance.connections_open == 0)
    assert pool.calls_open == instance.connections_idle == 0


def is_a_sink(collector: Collector) -> Sink:
    """The type checker's proof that the collector is what the pool wants."""
    return collector


@pytest.mark.parametrize(
    ("behaviour", "body"),
    [
        (Behaviour(body=b"hello"), b"hello"),
        (Behaviour(body=b""), b""),
        (Behaviour(mode=Mode.CLOSE_DELIMITED, body=b"hello"), b"hello"),
        (Behaviour(mode=Mode.RAW, raw=b"HTTP/1.1 204 No\r\n\r\n"), b""),
        (Behaviour(mode=Mode.RAW, raw=b"HTTP/1.1 304 No\r\nContent-Length: 9\r\n\r\n"), b""),
        (
            Behaviour(
                mode=Mode.RAW,
                raw=b"HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"
                b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
            ),
            b"x",
        ),
    ],
    ids=["length", "empty", "until the end", "204", "304", "interim heads"],
)
@on_uvloop
async def test_ends_are_found(behaviour: Behaviour, body: bytes) -> None:
    """Every way of ending a body is understood, and its bytes come through untouched."""
    async with bench(behaviour) as b:
        sink = await b.ask()
        assert (sink.end, bytes(sink.data)) == ("end", body)


@on_uvloop
async def test_stream_passes_untouched_and_at_once() -> None:
    """A stream's bytes arrive as they were sent, chunk framing and all, not gathered up."""
    async with bench(Behaviour(mode=Mode.STREAM, chunks=5, gap_s=0.01)) as b:
        sink = await b.ask()
        assert sink.head is not None
        assert sink.head.chunked
        assert sink.data.startswith(chunk(b'data: {"choices":[{"index":0,"text":" token"}]}\n\n'))
        assert sink.data.endswith(chunk(DONE) + b"0\r\n\r\n")
        assert sink.pieces >= 5


@on_uvloop
async def test_head_request_has_no_body() -> None:
    """The answer to HEAD ends with its head; if a body is announced, it is not waited for."""
    async with bench() as b:
        sink = Collector()
        call = b.pool.send("e", b"HEAD /v1 HTTP/1.1\r\n", b"", sink, bodiless=True)
        await until(lambda: sink.end)
        assert sink.head is not None
        assert call.length
        assert (sink.end, sink.data, b.instance.connections_idle) == ("end", b"", 0)


@on_uvloop
async def test_request_arrives_as_sent() -> None:
    """The engine gets the head, the instance's own lines and the body, large ones too."""
    async with bench() as b:
        port = b.engine.port
        b.pool.put("e", "127.0.0.1", port, header_lines=b"x-data-parallel-rank: 3\r\n")
        for body in (b"small", b"x" * 200_000):
            await b.ask(body=body)
            received = b.engine.received[-1]
            assert received.body == body
            assert received.request_line == b"POST /v1 HTTP/1.1"
            assert received.headers[b"host"] == b"127.0.0.1:%d" % port
            assert received.headers[b"x-data-parallel-rank"] == b"3"


@on_uvloop
async def test_connections_are_kept_and_reused() -> None:
    """One after the other, calls share a connection; side by side, each has its own."""
    async with bench() as b:
        for _ in range(5):
            await b.ask()
        assert b.engine.connections == 1
        sinks = [b.send()[1] for _ in range(3)]
        await until(lambda: all(sink.end for sink in sinks))
        assert b.engine.connections == 3
        assert b.instance.connections_idle == b.instance.connections_open == 3


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxSURPLUS",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\nSURPLUS",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nSURPLUS",
    ],
)
@on_uvloop
async def test_doubtful_connections_are_not_reused(raw: bytes) -> None:
    """What the engine closes, or has sent too much on, is closed; the surplus goes nowhere."""
    async with bench(Behaviour(mode=Mode.RAW, raw=raw)) as b:
        sink = await b.ask()
        assert sink.end == "end"
        assert b"SURPLUS" not in sink.data
        assert b.instance.connections_idle == 0
        await until(lambda: not b.engine.open)


@on_uvloop
async def test_unasked_bytes_close_an_idle_connection() -> None:
    """An engine that speaks on an idle connection (say, 408) does not answer the next call."""
    async with bench() as b:
        await b.ask()
        next(iter(b.engine.open)).transport.write(b"HTTP/1.1 408 Late\r\n\r\n")
        await until(lambda: b.instance.connections_open == 0)
        sink = await b.ask()
        assert sink.head is not None
        assert sink.head.status == 200


@pytest.mark.slow
@on_uvloop
async def test_idle_connections_close_before_the_engine_would() -> None:
    """Unused connections go after the idle time, oldest first; the used stay."""
    async with bench(limits=UpstreamLimits(tick_s=0.01, idle_time_s=0.15)) as b:
        sinks = [b.send()[1] for _ in range(2)]
        await until(lambda: all(sink.end for sink in sinks))
        start_s = time.monotonic()
        while b.instance.connections_open > 1 and time.monotonic() - start_s < 5:
            await b.ask()
            await asyncio.sleep(0.01)
        assert 0.1 < time.monotonic() - start_s < 5
        await until(lambda: not b.engine.open)
        assert b.instance.connections_open == 0


@pytest.mark.slow
@on_uvloop
async def test_engine_that_closes_idle_connections_costs_no_request() -> None:
    """With an engine that drops idle connections early, as uvicorn may, no call is lost."""
    async with bench(idle_close_s=0.01) as b:
        for _ in range(30):
            sink = await b.ask()
            assert sink.end == "end"
            await asyncio.sleep(0.0095)


@on_uvloop
async def test_dead_kept_connection_is_replaced_once() -> None:
    """A reused connection that dies before an answer is made good by a fresh one, only once."""
    async with bench() as b:
        await b.ask()
        b.engine.behaviour = Behaviour(mode=Mode.DIE_BEFORE_HEAD)
        sink = await b.ask()
        assert sink.end == ErrorKind.RESET_BEFORE_FIRST_BYTE
        assert (b.engine.requests, b.pool.counts["resends"]) == (3, 1)
        sink = await b.ask()
        assert sink.end == ErrorKind.RESET_BEFORE_FIRST_BYTE
        assert (b.engine.requests, b.pool.counts["resends"]) == (4, 1)


GARBAGE = {
    "not HTTP": b"SSH-2.0-OpenSSH\r\n",
    "HTTP/2": b"\0\0\0\4\0\0\0\0\0",
    "bad head": b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
    "switching protocols": b"HTTP/1.1 101 Up\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "bare LFs": b"HTTP/1.1 200 OK\nContent-Length: 1\n\nx",
    "bad reason": b"HTTP/1.1 200 O\0K\r\nContent-Length: 0\r\n\r\n",
    "bad status": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "endless interim heads": b"HTTP/1.1 102 Go\r\n\r\n" * 4000,
    "endless head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "bad chunk, later": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n" + b"-" * 10
    ),
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE.keys())
@on_uvloop
async def test_garbage_is_an_error(raw: bytes) -> None:
    """An engine that does not speak HTTP fails the call at once, without waiting for a deadline."""
    async with bench(Behaviour(mode=Mode.RAW, raw=raw)) as b:
        sink = await b.ask()
        assert sink.end == ErrorKind.BAD_RESPONSE
        await until(lambda: not b.engine.open)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (Mode.DIE_BEFORE_HEAD, ErrorKind.RESET_BEFORE_FIRST_BYTE),
        (Mode.DIE_AFTER_HEAD, ErrorKind.RESET_BEFORE_FIRST_BYTE),
        (Mode.DIE_MID_STREAM, ErrorKind.RESET_MID_STREAM),
        (Mode.NEVER, ErrorKind.FIRST_BYTE_TIMEOUT),
        (Mode.HEAD_ONLY, ErrorKind.FIRST_BYTE_TIMEOUT),
        (Mode.STALL, ErrorKind.STALLED),
    ],
)
@on_uvloop
async def test_failures_have_names(mode: Mode, kind: ErrorKind) -> None:
    """Each way of failing is told apart, and leaves no connection."""
    limits = UpstreamLimits(tick_s=0.01, first_byte_s=0.1, stall_s=0.1)
    async with bench(Behaviour(mode=mode), limits) as b:
        sink = await b.ask()
        assert sink.end == kind
        assert b.pool.counts[kind] == 1
        await until(lambda: not b.engine.open)


@on_uvloop
async def test_first_byte_time_may_be_given_per_call() -> None:
    """A call's own bound replaces the pool's."""
    async with bench(Behaviour(mode=Mode.NEVER)) as b:
        sink = await b.ask(first_byte_s=0.05)
        assert sink.end == ErrorKind.FIRST_BYTE_TIMEOUT


@pytest.mark.slow
@on_uvloop
async def test_slow_stream_is_no_stall() -> None:
    """A stream may last for many times the stall time, as long as it moves."""
    limits = UpstreamLimits(tick_s=0.01, first_byte_s=0.1, stall_s=0.08)
    async with bench(Behaviour(mode=Mode.STREAM, chunks=12, gap_s=0.03), limits) as b:
        assert (await b.ask()).end == "end"


def closed_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@on_uvloop
async def test_connection_failures() -> None:
    """Nobody there, nobody of that name, nobody who answers: the same error, in time."""
    limits = UpstreamLimits(tick_s=0.01, connect_s=0.1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        crowd = [socket.socket() for _ in range(3)]
        for sock in crowd:  # Fills the backlog, so that further connections hang.
            sock.setblocking(False)
            sock.connect_ex(deaf.getsockname())
        async with bench(limits=limits) as b:
            b.pool.put("closed", "127.0.0.1", closed_port())
            b.pool.put("deaf", *deaf.getsockname())
            b.pool.put("nameless", "no-such-host.invalid", 80)
            for key in ("closed", "deaf", "nameless", "unknown"):
                sink = await b.ask(key=key)
                assert sink.end == ErrorKind.CONNECT_FAILED, key
                instance = b.pool.get(key)
                assert instance is None or instance.connections_open == 0
        for sock in crowd:
            sock.close()


@on_uvloop
async def test_connections_to_an_instance_are_bounded() -> None:
    """At the limit a call fails at once, though not inside `send`; then there is room again."""
    limits = UpstreamLimits(tick_s=0.01, connections_max=2)
    async with bench(Behaviour(mode=Mode.NEVER), limits) as b:
        calls = [b.send()[0] for _ in range(2)]
        _, sink = b.send()
        assert not sink.end
        await until(lambda: sink.end)
        assert sink.end == ErrorKind.POOL_FULL
        await until(lambda: b.engine.requests == 2)
        for call in calls:
            call.cancel()
        await until(lambda: b.instance.connections_open == 0)
        b.engine.behaviour = Behaviour()
        assert (await b.ask()).end == "end"


@pytest.mark.parametrize("mode", [Mode.NEVER, Mode.HEAD_ONLY, Mode.STALL])
@on_uvloop
async def test_cancel_closes_the_connection_at_once(mode: Mode) -> None:
    """Whatever a call is waiting for, cancelling ends it: the engine sees it, the sink does not."""
    async with bench(Behaviour(mode=mode)) as b:
        call, sink = b.send()
        await until(lambda: b.engine.requests and (mode == Mode.NEVER or sink.head))
        call.cancel()
        call.cancel()
        assert b.pool.calls_open == 0
        await until(lambda: b.engine.aborted == 1)
        assert not sink.end


@on_uvloop
async def test_cancel_while_connecting_keeps_the_connection() -> None:
    """A call cancelled before its connection stands sends nothing; the next one finds it ready."""
    async with bench() as b:
        call, sink = b.send()
        call.cancel()
        await until(lambda: b.instance.connections_idle == 1)
        assert (await b.ask()).end == "end"
        assert (b.engine.connections, b.engine.requests, sink.end) == (1, 1, "")


@pytest.mark.parametrize("at", ["head", "first data", "later data"])
@on_uvloop
async def test_sink_may_cancel_from_a_callback(at: str) -> None:
    """A sink that cancels in the middle of a callback hears nothing more."""
    async with bench(Behaviour(mode=Mode.STREAM, chunks=3)) as b:
        sink = Collector()

        def cancel() -> None:
            if at == "head" or (sink.data and at == "first data") or sink.pieces > 1:
                call.cancel()

        sink.then = cancel
        call = b.pool.send("e", HEAD, b"", sink)
        await until(lambda: call.ended)
        await until(lambda: not b.engine.open)
        assert sink.end == ""


@on_uvloop
async def test_sink_may_send_again_from_its_end() -> None:
    """The connection is free again when the sink hears of the end."""
    async with bench() as b:
        sink, second = Collector(), Collector()
        sink.then = lambda: b.pool.send("e", HEAD, b"", second) if sink.end else None
        b.pool.send("e", HEAD, b"", sink)
        await until(lambda: second.end)
        assert b.engine.connections == 1


@on_uvloop
async def test_pause_holds_the_engine_back() -> None:
    """A paused call takes no data and cannot stall; resumed, it gets all of it."""
    limits = UpstreamLimits(tick_s=0.01, stall_s=0.05)
    behaviour = Behaviour(mode=Mode.STREAM, chunks=200, chunk_bytes=50_000)
    async with bench(behaviour, limits) as b:
        call, sink = b.send()
        await until(lambda: sink.pieces > 3)
        call.pause()
        pieces = sink.pieces
        await asyncio.sleep(0.15)
        assert (sink.pieces, sink.end) == (pieces, "")
        call.resume()
        await until(lambda: sink.end)
        assert sink.end == "end"
        assert len(sink.data) > 200 * 50_000


@on_uvloop
async def test_pause_before_the_connection_stands() -> None:
    """Pausing may come first; a call that ends paused leaves a connection that can be used."""
    async with bench(Behaviour(mode=Mode.STREAM)) as b:
        call, sink = b.send()
        call.pause()
        await until(lambda: b.engine.requests)
        await asyncio.sleep(0.02)
        assert sink.head is None
        sink.then = call.pause
        call.resume()
        await until(lambda: sink.end or sink.pieces)
        call.resume()
        await until(lambda: sink.end)
        assert (await b.ask()).end == "end"


@on_uvloop
async def test_removed_instance_keeps_its_calls() -> None:
    """Removing an instance closes what is idle; a call in progress ends well and then closes."""
    async with bench(Behaviour(mode=Mode.STREAM, gap_s=0.01)) as b:
        sinks = [b.send()[1] for _ in range(2)]
        await until(lambda: all(sink.end for sink in sinks))
        _, sink = b.send()
        await until(lambda: sink.head)
        b.pool.remove("e")
        await until(lambda: b.instance.connections_open == 1)
        await until(lambda: sink.end == "end")
        await until(lambda: b.instance.connections_open == 0)
        assert (await b.ask()).end == ErrorKind.CONNECT_FAILED


@on_uvloop
async def test_tls_to_an_engine_that_has_none() -> None:
    """An engine that does not speak TLS cannot be connected to, and leaves nothing behind."""
    async with bench(limits=UpstreamLimits(tick_s=0.01, connect_s=0.1)) as b:
        instance = b.pool.put("tls", "127.0.0.1", b.engine.port, tls=ssl.create_default_context())
        assert (await b.ask(key="tls")).end == ErrorKind.CONNECT_FAILED
        await until(lambda: instance.connections_open == 0)


def test_limits_must_be_positive() -> None:
    """A limit that would refuse everything is refused by name."""
    with pytest.raises(ValueError, match=r"UpstreamLimits\.stall_s is 0"):
        UpstreamLimits(stall_s=0)
