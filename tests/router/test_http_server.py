"""The server on real sockets: HTTP/1.1's manners, its limits, and how it stops."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from router.http_exchange import Exchange
from router.limits import ServerLimits
from tests.router.fake_engine import Behaviour, Mode
from tests.router.http_rig import (
    PROBE,
    SERVER_LIMITS,
    RawClient,
    Rig,
    on_uvloop,
    parse_answers,
    request,
    until,
)

CHUNKED = b"POST /v1 HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"

# What a client sends on one connection, and the statuses it gets. Where the connection must stay
# open the list ends with `open`; it is proved by the answer to one more request.
CONFORMANCE: dict[str, tuple[bytes, list[int | str]]] = {
    "keep-alive": (request("/local", method="GET"), [200, "open"]),
    "keep-alive after a forwarded answer": (request("/v1", b"{}"), [200, "open"]),
    "close asked for": (request("/local", b"", "Connection: close"), [200]),
    "close asked for, forwarded": (request("/v1", b"{}", "Connection: close"), [200]),
    "HTTP/1.0": (b"GET /local HTTP/1.0\r\n\r\n", [200]),
    "HTTP/1.0 forwarded": (b"GET /v1 HTTP/1.0\r\n\r\n", [200]),
    "HTTP/1.0 keep-alive": (
        b"GET /local HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        [200, "open"],
    ),
    "HTTP/1.0 keep-alive, forwarded": (
        b"GET /v1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        [200, "open"],
    ),
    "HTTP/1.0 stream": (b"GET /v1?mode=stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", [200]),
    "HEAD": (request("/local", method="HEAD"), [200, "open"]),
    "HEAD forwarded": (request("/v1", method="HEAD"), [200, "open"]),
    "pipelined": (
        request("/local", method="GET") * 3 + request("/v1", b"{}"),
        [200] * 4 + ["open"],
    ),
    "empty line before a request": (b"\r\n" + request("/local"), [200, "open"]),
    "chunked body": (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", [200, "open"]),
    "chunked body with trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nX: y\r\n\r\n", [200, "open"]),
    "declined upgrade": (
        request("/local", b"abc", "Connection: Upgrade", "Upgrade: h2c"),
        [200, "open"],
    ),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n", [200, "open"]),
    "handler fails": (request("/boom"), [500, "open"]),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [505]),
    "TLS hello on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", [400]),
    "absolute-form": (b"GET http://t/local HTTP/1.1\r\nHost: t\r\n\r\n", [400]),
    "no Host": (b"GET /local HTTP/1.1\r\n\r\n", [400]),
    "folded header": (b"GET /local HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\n\r\n", [400]),
    "bad chunk size": (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", [400]),
    "good request, then junk": (request("/local") + b"junk\r\n\r\n", [200, 400]),
    "CL.TE": (
        b"POST /v1 HTTP/1.1\r\nHost: t\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nG",
        [400],
    ),
    "TE.CL": (
        b"POST /v1 HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"
        b"12\r\nGPOST / HTTP/1.1\r\n\r\n0\r\n\r\n",
        [400],
    ),
    "TE.TE": (
        b"POST /v1 HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n"
        b"Transfer-Encoding: x\r\n\r\n0\r\n\r\n",
        [400],
    ),
    "CL.CL": (
        b"POST /v1 HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\nGET /local",
        [400],
    ),
    "space before the colon": (
        b"POST /v1 HTTP/1.1\r\nHost: t\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        [400],
    ),
    "LF hidden in a chunk extension": (CHUNKED + b"2;\nxx\r\nab\r\n0\r\n\r\n", [400]),
}


@pytest.mark.parametrize(("raw", "expected"), CONFORMANCE.values(), ids=CONFORMANCE.keys())
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "bytewise"])
@on_uvloop
async def test_conformance(raw: bytes, expected: list[int | str], whole: bool) -> None:
    """Raw bytes in, the right answers out in order, the connection open or closed as it must be."""
    stays_open = expected[-1] == "open"
    statuses = [*expected[:-1], 200] if stays_open else expected
    raw += PROBE if stays_open else b""
    methods = [line.split(b" ")[0] for line in raw.split(b"\r\n") if b" HTTP/1." in line]
    async with Rig() as rig:
        answers = parse_answers(await rig.talk(*([raw] if whole else _each(raw))), *methods)
        assert [answer.status for answer in answers] == statuses
        if stays_open:
            assert answers[-1].headers[b"connection"] == b"close"
        if statuses[-1] >= 400:
            assert answers[-1].error["message"]


def _each(raw: bytes) -> list[bytes]:
    return [raw[i : i + 1] for i in range(len(raw))]


@on_uvloop
async def test_local_answers_are_complete() -> None:
    """An answer of our own has its length, a date, a request id, and no body for HEAD or 204."""
    async with Rig() as rig:
        raw = request("/local", method="GET") + request("/local", method="HEAD") + PROBE
        full, head, _ = parse_answers(await rig.talk(raw), b"GET", b"HEAD")
        assert (full.body, full.headers[b"content-length"]) == (b"local", b"5")
        assert (head.body, head.headers[b"content-length"]) == (b"", b"5")
        assert full.headers[b"date"].endswith(b"GMT")
        assert full.headers[b"x-request-id"] != head.headers[b"x-request-id"]


@on_uvloop
async def test_exchange_shows_the_request() -> None:
    """The handler sees path, query, headers, the whole body and the client, as they were sent."""
    async with Rig() as rig:
        client = await rig.connect()
        client.send(CHUNKED.replace(b"/v1", b"/hold?a=%20b") + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
        await until(lambda: rig.held)
        exchange = rig.held[0]
        assert (exchange.method, exchange.path, exchange.query) == (b"POST", b"/hold", b"a=%20b")
        assert exchange.target == b"/hold?a=%20b"
        assert exchange.header(b"host") == b"t"
        assert exchange.header(b"absent") is None
        assert (exchange.body, exchange.client, exchange.closed) == (b"abc", "127.0.0.1", False)
        exchange.respond_error(429, "rate_limit_error", "slow down", "too_many", "model", 1.2)
        assert exchange.closed
        with pytest.raises(RuntimeError):
            exchange.respond(200)
        client.send(PROBE)
        answer = parse_answers(await client.read_all())[0]
        assert answer.headers[b"retry-after"] == b"2"
        assert answer.headers[b"content-type"] == b"application/json"
        assert answer.error == {
            "message": "slow down",
            "type": "rate_limit_error",
            "param": "model",
            "code": "too_many",
        }


@pytest.mark.parametrize(
    ("given", "kept"),
    [("my-id.7", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
@on_uvloop
async def test_request_id_is_kept_or_made(given: str, kept: bool) -> None:
    """A sane X-Request-Id goes through to the engine and back; any other is replaced."""
    async with Rig(Behaviour(mode=Mode.ECHO)) as rig:
        raw = request("/v1", b"", f"X-Request-Id: {given}", "Connection: close")
        (answer,) = parse_answers(await rig.talk(raw))
        assert (answer.headers[b"x-request-id"].decode() == given) is kept
        sent = rig.engines[0].received[0].headers[b"x-request-id"]
        assert sent == answer.headers[b"x-request-id"]


@on_uvloop
async def test_expect_continue() -> None:
    """A client that waits for 100 gets it once, before its body; a refusal comes instead of it."""
    async with Rig(server=ServerLimits(body_bytes_max=100)) as rig:
        for length, reply in ((5, b"HTTP/1.1 100 Continue"), (101, b"HTTP/1.1 413")):
            client = await rig.connect()
            client.send(request("/v1", b"a" * length, "Expect: 100-continue")[:-length])
            assert (await client.read_until(b"\r\n\r\n")).startswith(reply)
        client = await rig.connect()
        client.send(request("/v1", b"abcde", "Expect: 100-continue")[:-5])
        await client.read_until(b"\r\n\r\n")
        client.send(b"abcde" + PROBE)
        assert [answer.status for answer in parse_answers(await client.read_all())] == [200, 200]
        assert rig.engines[0].received[-1].body == b"abcde"


@on_uvloop
async def test_pipelined_answers_keep_their_order() -> None:
    """A slow answer first, quick ones behind it: they come in the order of the requests."""
    async with Rig(Behaviour(mode=Mode.ECHO)) as rig:
        client = await rig.connect()
        slow = request("/v1?mode=echo&delay_s=0.05", b"slow")
        client.send(slow + request("/local") + request("/v1", b"last", "Connection: close"))
        answers = parse_answers(await client.read_all())
        assert [answer.body[-5:] for answer in answers] == [b"\nslow", b"local", b"\nlast"]


@on_uvloop
async def test_pipelining_is_bounded() -> None:
    """A client may not pile up requests without end behind one that is not answered."""
    async with Rig(server=ServerLimits(pipeline_bytes_max=1000, tick_s=0.02)) as rig:
        client = await rig.connect(limit=2**20)
        client.send(request("/hold"))
        await until(lambda: rig.held)
        client.send(request("/local") * 400_000)
        connection = next(iter(rig.server._connections))
        await until(lambda: connection._reading_paused)
        held_bytes = connection._reader.held_bytes
        await asyncio.sleep(0.05)
        assert connection._reader.held_bytes == held_bytes < 2**20
        rig.held[0].respond(200)
        await client.read_until(b"local")


@on_uvloop
async def test_many_pipelined_requests_do_not_hold_up_others() -> None:
    """Requests answered on the spot are taken up in bursts, between which others are served."""
    async with Rig() as rig:
        greedy = await rig.connect()
        greedy.send(request("/local") * 2000 + PROBE)
        await until(lambda: rig.server.stats.requests)
        polite = await rig.connect()
        polite.send(PROBE)
        await polite.read_all()
        assert rig.server.stats.requests < 1500
        assert len(parse_answers(await greedy.read_all())) == 2001


@on_uvloop
async def test_client_that_leaves_is_noticed() -> None:
    """Closing or resetting runs the callbacks, once; answering later is harmless."""

    def close(client: RawClient) -> None:
        client.close()

    def reset(client: RawClient) -> None:
        client.abort()

    async with Rig() as rig:
        for leave in (close, reset):
            client = await rig.connect()
            client.send(request("/hold") + request("/local"))
            await until(lambda: rig.held)
            exchange = rig.held.pop()
            gone: list[int] = []
            exchange.on_client_gone(partial(gone.append, 1))
            leave(client)
            await until(gone.copy)
            assert exchange.closed
            exchange.respond(200)
            exchange.on_client_gone(partial(gone.append, 2))
            assert gone == [1, 2]
        await until(lambda: rig.server.connections_open == 0)
        assert rig.server.stats.clients_gone == 2


@pytest.mark.parametrize(
    ("limits", "sent", "status"),
    [
        (ServerLimits(idle_time_s=0.1, tick_s=0.02), b"", 0),
        (ServerLimits(idle_time_s=0.1, tick_s=0.02), request("/local"), 200),
        (ServerLimits(header_time_s=0.1, linger_s=0.05, tick_s=0.02), request("/local")[:-3], 408),
        (
            ServerLimits(body_time_s=0.1, linger_s=0.05, tick_s=0.02),
            request("/local", b"abc")[:-1],
            408,
        ),
    ],
    ids=["idle from the start", "idle after an answer", "slow head", "slow body"],
)
@on_uvloop
async def test_deadlines(limits: ServerLimits, sent: bytes, status: int) -> None:
    """Each stage of a connection has its time: past it, 408 and close, or just close."""
    async with Rig(server=limits) as rig:
        start_s = time.monotonic()
        answers = parse_answers(await rig.talk(sent))
        assert [answer.status for answer in answers] == ([status] if status else [])
        assert 0.07 < time.monotonic() - start_s < 5
        await until(lambda: rig.server.connections_open == 0)


@on_uvloop
async def test_time_of_a_head_is_not_stretched_by_dripping() -> None:
    """A head that comes byte by byte has the same time as one that does not come at all."""
    async with Rig(server=ServerLimits(header_time_s=0.15, tick_s=0.02)) as rig:
        client = await rig.connect()

        async def drip() -> None:
            for byte in _each(request("/local", b"", "X: " + "y" * 1000)):
                client.send(byte)
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert parse_answers(await client.read_all())[0].status == 408
        dripping.cancel()


@on_uvloop
async def test_total_of_request_bodies_is_bounded() -> None:
    """When all bodies together are too many bytes, the next is refused, and room comes back."""
    async with Rig(server=ServerLimits(buffered_bytes_max=1000, tick_s=0.02)) as rig:
        first = await rig.connect()
        first.send(request("/hold", b"a" * 600))
        await until(lambda: rig.held)
        assert rig.server.buffered_bytes == 600
        raw = request("/local", b"b" * 600)
        for pieces in ([raw], [raw[:-1], raw[-1:]]):
            (refusal,) = parse_answers(await rig.talk(*pieces))
            assert (refusal.status, refusal.headers[b"retry-after"]) == (503, b"1")
        rig.held[0].respond(200)
        await first.read_until(b"\r\n\r\n")
        assert rig.server.buffered_bytes == 0
        assert parse_answers(await rig.talk(raw, PROBE))[0].status == 200


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ServerLimits(connections_max=2, linger_s=0.05, tick_s=0.02), "too many connections"),
        (ServerLimits(connections_per_client_max=2, linger_s=0.05, tick_s=0.02), "this address"),
    ],
)
@on_uvloop
async def test_connections_are_bounded(limits: ServerLimits, message: str) -> None:
    """One connection too many is told so with 503; when another closes there is room again."""
    async with Rig(server=limits) as rig:
        kept = [await rig.connect() for _ in range(2)]
        (refusal,) = parse_answers(await rig.talk(b""))
        assert refusal.status == 503
        assert message in refusal.error["message"]
        assert refusal.headers[b"retry-after"] == b"1"
        assert rig.server.stats.connections_refused == 1
        kept[0].close()
        await until(lambda: rig.server.connections_open == 1)
        assert parse_answers(await rig.talk(PROBE))[0].status == 200


@on_uvloop
async def test_refusal_survives_what_the_client_still_sends() -> None:
    """A client in the middle of a huge body reads its 413 instead of a reset."""
    async with Rig(server=ServerLimits(body_bytes_max=1000, linger_s=5, tick_s=0.02)) as rig:
        client = await rig.connect()
        client.send(request("/v1", b"", "Content-Length: 50000000", method="PUT"))
        for _ in range(50):
            client.send(b"x" * 100_000)
            await asyncio.sleep(0)
        (answer,) = parse_answers(await client.read_all())
        assert answer.status == 413
        client.close()
        await until(lambda: rig.server.connections_open == 0)


@on_uvloop
async def test_client_that_does_not_read_is_dropped() -> None:
    """A client that takes none of its answers is cut off, and what it can pile up is bounded."""
    limits = ServerLimits(write_stall_s=0.2, tick_s=0.02, write_buffer_bytes=10_000)
    async with Rig(server=limits) as rig:
        client = await rig.connect(limit=1024)
        client.writer.transport.pause_reading()
        client.send(request("/big", method="GET") * 1000)
        await until(lambda: rig.server.connections_open)
        connection = next(iter(rig.server._connections))
        await until(lambda: connection._behind)
        assert connection._transport.get_write_buffer_size() < 300_000
        await until(lambda: rig.server.stats.write_stalls == 1)
        await until(lambda: rig.server.connections_open == 0)
        assert rig.server.stats.requests < 100


@pytest.mark.slow
@on_uvloop
async def test_slow_reader_is_not_dropped() -> None:
    """A client that keeps taking a little, however slowly, keeps its connection."""
    limits = ServerLimits(write_stall_s=0.1, tick_s=0.02, write_buffer_bytes=10_000)
    async with Rig(server=limits) as rig:
        client = await rig.connect(limit=1024)
        client.send(request("/big", method="GET") * 100 + PROBE)
        received = 0
        start_s = time.monotonic()
        while part := await client.reader.read(400_000):
            received += len(part)
            if time.monotonic() - start_s < 0.5:
                await asyncio.sleep(0.03)
        assert received > 100 * 100_000
        assert rig.server.stats.write_stalls == 0


@on_uvloop
async def test_graceful_stop_finishes_what_has_begun() -> None:
    """On a stop, answers in progress complete and say close; idle connections get one request."""
    async with Rig(Behaviour(mode=Mode.STREAM, chunks=10, gap_s=0.01)) as rig:
        idle, streaming, held = [await rig.connect() for _ in range(3)]
        streaming.send(request("/v1"))
        held.send(request("/hold"))
        await streaming.read_until(b"data: ")
        await until(lambda: rig.held)
        stopping = asyncio.create_task(rig.server.stop(grace_s=5))
        await until(lambda: rig.server.draining)
        idle.send(request("/local"))
        assert parse_answers(await idle.read_all())[0].headers[b"connection"] == b"close"
        assert b"connection: close" not in await streaming.read_until(b"\r\n0\r\n\r\n")
        streaming.send(request("/local"))  # as a client may that was told of no close
        assert parse_answers(await streaming.read_all())[0].headers[b"connection"] == b"close"
        rig.held[0].respond(200)
        assert parse_answers(await held.read_all())[0].headers[b"connection"] == b"close"
        await stopping
        with pytest.raises(OSError, match="refused"):
            await rig.connect()


@on_uvloop
async def test_graceful_stop_ends_in_time() -> None:
    """What has not finished when the grace is over is cut off."""
    limits = ServerLimits(drain_idle_s=0.05, tick_s=0.02)
    async with Rig(Behaviour(mode=Mode.NEVER), server=limits) as rig:
        idle, busy = await rig.connect(), await rig.connect()
        busy.send(request("/v1"))
        await until(lambda: rig.books)
        start_s = time.monotonic()
        await rig.server.stop(grace_s=0.2)
        assert 0.15 < time.monotonic() - start_s < 5
        assert await idle.read_all() == b""
        assert await busy.read_all() == b""
        await until(lambda: rig.engines[0].aborted == 1)


@on_uvloop
async def test_two_servers_share_a_port() -> None:
    """With `reuse_port` a second server takes over before the first one stops."""
    async with Rig() as rig, Rig() as other:
        _, port = await rig.server.start("127.0.0.1", 0, reuse_port=True)
        await other.server.start("127.0.0.1", port, reuse_port=True)
        await rig.server.stop(grace_s=1)
        client = await rig.connect(port)
        client.send(PROBE)
        assert parse_answers(await client.read_all())[0].status == 200


@on_uvloop
async def test_handler_that_fails_late_ends_the_connection() -> None:
    """A handler that raises after its answer has begun cannot leave half an answer behind."""

    class Broken:
        def handle(self, exchange: Exchange) -> None:
            exchange.start(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            raise LookupError

    async with Rig() as rig:
        rig.server._handler = Broken()
        raw = await rig.talk(request("/"))
        assert raw.endswith(b"half")
        assert rig.server.stats.handler_errors == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1."""
    path = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    options = ["-keyout", path / "key", "-out", path / "cert", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *options, *names], check=True, capture_output=True)
    (path / "both").write_text((path / "key").read_text() + (path / "cert").read_text())
    return path / "both"


def test_tls(certificate: Path) -> None:
    """With a TLS context the same server speaks HTTPS, refusals included."""
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=certificate)

    @on_uvloop
    async def check() -> None:
        async with Rig(Behaviour(mode=Mode.STREAM), server=SERVER_LIMITS) as rig:
            _, port = await rig.server.start("127.0.0.1", 0, tls=serving)
            for raw, status in ((request("/v1") + PROBE, 200), (b"junk\r\n\r\n", 400)):
                client = await rig.connect(port, ssl=trusting)
                client.send(raw)
                assert parse_answers(await client.read_all())[0].status == status
                client.close()
            await until(lambda: rig.server.connections_open == 0)

    check()
