"""Abuse: any bytes, from clients or engines, end in an answer or a close, and cost little."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.limits import MIB, ServerLimits, UpstreamLimits
from tests.router.fake_engine import Behaviour, FakeEngine, Mode, chunk
from tests.router.http_rig import (
    PROBE,
    CutShort,
    RawClient,
    Rig,
    on_uvloop,
    parse_answers,
    request,
    until,
)

# Short times, so that a connection which waits for more is soon told so.
IMPATIENT = ServerLimits(
    header_time_s=0.05, body_time_s=0.05, idle_time_s=0.05, linger_s=0.02, tick_s=0.01
)
QUICK = UpstreamLimits(first_byte_s=0.05, stall_s=0.05, tick_s=0.01)
CHUNKED = b"POST /v1 HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
SEEDS = [
    request("/v1", b'{"prompt":"x"}'),
    request("/local", method="GET") * 2,
    request("/v1", b"ab", "Connection: keep-alive", "Expect: 100-continue", "X-Request-Id: 7"),
    CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: v\r\n\r\n",
    b"GET /v1?mode=stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]
TOKENS = [b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\r\n\r\n", b"0\r\n\r\n", b"chunked", b"-1"]
TOKENS += [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1", b"\xff" * 9]


@st.composite
def mutants(draw: st.DrawFn, seeds: list[bytes]) -> list[bytes]:
    """Return almost valid bytes, in pieces: some taken out, put in, repeated, or cut apart."""
    raw = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(raw)))
        stop = min(len(raw), start + draw(st.integers(0, 12)))
        new = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(raw)))
        raw = raw[:start] + new + raw[stop:]
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    return [raw[a:b] for a, b in pairwise([0, *cuts, len(raw)])]


class Faults:
    """Collects what the event loop or a log would otherwise only mention."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: self.found.append(what))


def check_answers(raw: bytes) -> None:
    """Check that what a client got is whole answers, but perhaps for a last one cut short."""
    try:
        answers = parse_answers(raw)
    except CutShort:
        return
    for answer in answers:
        assert 200 <= answer.status < 600


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.one_of(mutants(SEEDS), st.lists(st.binary(), max_size=3)), max_size=24))
def test_any_client_bytes_end_in_answers_or_a_close(inputs: list[list[bytes]]) -> None:
    """Whatever clients send, in any split, each gets answers and a close, and nothing is left."""

    @on_uvloop
    async def check() -> None:
        async with Rig(server=IMPATIENT, upstream=QUICK) as rig:
            faults = Faults()
            received = await asyncio.gather(*(rig.talk(*pieces) for pieces in inputs))
            for raw in received:
                check_answers(raw.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))
            await until(lambda: rig.server.connections_open == 0)
            assert rig.server.stats.handler_errors == 0
            assert not faults.found

    check()


ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"data: x\n\n") + b"0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 500 No\r\n\r\nbody",
    b"HTTP/1.1 204 No\r\nConnection: close\r\n\r\n",
]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.one_of(mutants(ANSWERS), st.lists(st.binary(), max_size=3)), max_size=8))
def test_any_engine_bytes_end_every_request_once(answers: list[list[bytes]]) -> None:
    """Whatever engines send, each request ends once, and its client gets an answer or a close."""

    @on_uvloop
    async def check() -> None:
        async with Rig(Behaviour(), Behaviour(), upstream=QUICK) as rig:
            faults = Faults()
            for pieces in answers:
                for engine in rig.engines:
                    engine.behaviour = Behaviour(
                        mode=Mode.RAW,
                        raw=b"".join(pieces[:1]),
                        raw_later=b"".join(pieces[1:]),
                        close=len(pieces) % 2 == 0,
                    )
                check_answers(await rig.talk(request("/v1", b"", "Connection: close")))
            await until(lambda: rig.pool.calls_open == 0)
            assert not faults.found

    check()


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        request("/v1", SMUGGLED, "Connection: close"),
        request("/v1", b"0\r\n\r\n" + SMUGGLED, "Connection: close"),
        CHUNKED.replace(b"Host", b"Connection: close\r\nHost")
        + chunk(SMUGGLED)
        + b"0\r\nX: y\r\n\r\n",
    ],
)
@on_uvloop
async def test_request_inside_a_body_stays_inside(raw: bytes) -> None:
    """What looks like a request within a body reaches the engine as a body, and only as that."""
    async with Rig(Behaviour(mode=Mode.ECHO)) as rig:
        await rig.talk(raw)
        (received,) = rig.engines[0].received
        assert SMUGGLED in received.body
        assert rig.engines[0].requests == 1


@on_uvloop
async def test_refused_request_reaches_no_engine() -> None:
    """After a refusal nothing of what follows on the connection is taken for a request."""
    async with Rig() as rig:
        raw = b"POST /v1 HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
        (refusal,) = parse_answers(await rig.talk(raw + b"xx" + SMUGGLED * 20))
        assert refusal.status == 400
        assert rig.engines[0].connections == rig.server.stats.requests == 0


@pytest.mark.slow
@on_uvloop
async def test_slow_loris_holds_nobody_up() -> None:
    """Hundreds of clients that drip their heads are turned away in time; others never notice."""
    limits = ServerLimits(header_time_s=0.5, linger_s=0.1, tick_s=0.02)
    async with Rig(server=limits) as rig:
        lorises = [await rig.connect() for _ in range(300)]
        deadline_s = time.monotonic() + 1.0
        slowest_s = 0.0
        while time.monotonic() < deadline_s:
            for loris in lorises:
                if not loris.writer.is_closing():
                    loris.send(b"X")
            start_s = time.monotonic()
            assert parse_answers(await rig.talk(PROBE))[0].status == 200
            slowest_s = max(slowest_s, time.monotonic() - start_s)
        await until(lambda: rig.server.connections_open == 0)
        assert rig.server.stats.refused == 300
        assert slowest_s < 0.5


@on_uvloop
async def test_huge_heads_are_refused_early() -> None:
    """A head without end is refused at the limit, whether it is one line or many."""
    async with Rig() as rig:
        for raw in (b"GET /" + b"a" * MIB, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200_000):
            client = await rig.connect()
            client.send(raw)
            (answer,) = parse_answers(await client.read_all())
            assert answer.status == 431
            client.close()
        await until(lambda: rig.server.connections_open == 0)


@pytest.mark.slow
@pytest.mark.parametrize("piece", [chunk(b"a" * 10_000), chunk(b"a") * 2000])
@on_uvloop
async def test_endless_chunked_body_is_refused(piece: bytes) -> None:
    """A body that never ends is refused at the limit, in large chunks or in tiny ones."""
    async with Rig(server=ServerLimits(body_bytes_max=MIB, tick_s=0.02)) as rig:
        client = await rig.connect()
        client.send(CHUNKED)

        async def pour() -> None:
            while not client.writer.is_closing():
                client.send(piece)
                await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        raw = await client.read_until(b"}}")
        pouring.cancel()
        assert parse_answers(raw)[0].status == 413
        assert rig.server.buffered_bytes == 0


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip("this process may not open 8,192 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
@on_uvloop
async def test_two_thousand_idle_connections_cost_little() -> None:
    """Two thousand kept connections take bounded memory each, and no time from others."""
    async with Rig() as rig:
        process = psutil.Process()
        before = process.memory_info().rss
        idle = [await _Idle.connect(rig.port) for _ in range(2000)]
        await until(lambda: all(each.answered for each in idle))
        assert rig.server.connections_open == 2000
        # Both ends of each connection live in this process.
        assert (process.memory_info().rss - before) / 2000 < 20_000
        start_s = time.monotonic()
        for _ in range(20):
            assert parse_answers(await rig.talk(PROBE))[0].status == 200
        assert (time.monotonic() - start_s) / 20 < 0.1
        for each in idle:
            each.transport.abort()
        await until(lambda: rig.server.connections_open == 0)


@pytest.mark.slow
@on_uvloop
async def test_clients_that_never_read_cost_a_little_memory_and_nobody_else_time() -> None:
    """Back-pressure stops each one's engine connection; when they are cut off nothing is left."""
    streams = 24
    endless = Behaviour(mode=Mode.STREAM, chunks=100_000, chunk_bytes=50_000)
    limits = ServerLimits(write_stall_s=3.0, tick_s=0.02)
    async with Rig(endless, server=limits) as rig:
        before = psutil.Process().memory_info().rss
        for _ in range(streams):
            lazy = await rig.connect(limit=1024)
            lazy.writer.transport.pause_reading()
            lazy.send(request("/v1"))
        await until(lambda: sum(call.paused for call in rig.pool._calls) == streams)
        for connection in rig.server._connections:
            assert connection._transport.get_write_buffer_size() < 400_000
        # Clients, router and engine live in this process.
        assert (psutil.Process().memory_info().rss - before) / streams < 2 * MIB
        slowest_s = 0.0
        for _ in range(20):
            start_s = time.monotonic()
            assert parse_answers(await rig.talk(PROBE))[0].status == 200
            slowest_s = max(slowest_s, time.monotonic() - start_s)
        assert slowest_s < 0.5
        await until(lambda: rig.server.stats.write_stalls == streams)
        await until(lambda: rig.engines[0].aborted == streams)
        await until(lambda: rig.server.connections_open == rig.pool.calls_open == 0)


class _Idle(asyncio.Protocol):
    """A client that asks once, and then does nothing."""

    transport: asyncio.Transport
    answered = False

    @classmethod
    async def connect(cls, port: int) -> _Idle:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(cls, "127.0.0.1", port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.write(request("/local"))

    def data_received(self, data: bytes) -> None:
        self.answered = True


MIXED = ["json", "stream", "never", "head_only", "stall", "die_mid_stream", "die_before_head"]


async def _abort_at_random(rig: Rig, seed: int) -> None:
    """Ask for something, and leave at a random moment in a random way."""
    chance = random.Random(seed)
    client = await RawClient.connect(rig.port)
    raw = request(f"/v1?mode={chance.choice(MIXED)}&delay_s={chance.random() / 500}", b"x" * 100)
    client.send(raw[: chance.choice([len(raw), chance.randrange(len(raw))])])
    await asyncio.sleep(chance.random() / 100)
    if chance.random() < 0.5:
        client.close()
    else:
        client.abort()


@pytest.mark.slow
@pytest.mark.parametrize("requests", [10_000])
def test_random_aborts_leave_nothing(requests: int) -> None:
    """After thousands of clients that left at random moments: no call, socket, task or booking."""

    @on_uvloop
    async def check() -> None:
        upstream = UpstreamLimits(tick_s=0.02, first_byte_s=5, stall_s=5)
        async with Rig(Behaviour(), Behaviour(), upstream=upstream) as rig:
            faults = Faults()
            for start in range(0, requests, 100):
                seeds = range(start, start + 100)
                await asyncio.gather(*(_abort_at_random(rig, seed) for seed in seeds))
            await until(lambda: rig.server.connections_open == 0)
            await until(lambda: rig.pool.calls_open == 0)
            await until(lambda: all(books.outcome for books in rig.books))
            for key in ("e0", "e1"):
                instance = rig.pool.get(key)
                assert instance is not None
                await until(lambda i=instance: i.connections_open == i.connections_idle)  # type: ignore[misc]
            for books in rig.books:
                booked = [event for event in books.events if event[0] == "attempt"]
                assert len(booked) == books.given + 1
            assert len(rig.books) > requests / 4
            assert not faults.found

    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    check()
    gc.collect()
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files + 2


@on_uvloop
async def test_fake_engine_survives_the_preface_of_http2() -> None:
    """A router that tries HTTP/2 first is told no, and the engine serves the next one."""
    engine = FakeEngine()
    port = await engine.start()
    client = await RawClient.connect(port)
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert parse_answers(await client.read_all())[0].status == 505
    client.close()
    client = await RawClient.connect(port)
    client.send(request("/v1", b"x"))
    assert (await client.read_until(b"}}")).startswith(b"HTTP/1.1 200")
    client.close()
    await engine.stop()
