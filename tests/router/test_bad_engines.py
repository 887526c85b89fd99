"""Engines that break HTTP, and a machine that has nothing left for them: nobody else pays."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.http_proxy import Outcome
from router.limits import (
    CONNECTIONS_LEAST,
    FILES_RESERVED,
    ServerLimits,
    UpstreamLimits,
    within_files,
)
from router.upstream import ErrorKind, UpstreamPool
from tests.router.fake_engine import Behaviour, FakeEngine, Mode
from tests.router.http_rig import UPSTREAM_LIMITS, Rig, on_uvloop, parse_answers, request, until
from tests.router.test_upstream import HEAD, Collector, closed_port

LENGTH_9 = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
OTHERS = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", LENGTH_9),
        ("HEAD", LENGTH_9.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")),
        ("POST", LENGTH_9.replace(b"200 OK", b"304 Not Modified")),
    ],
)
@on_uvloop
async def test_a_body_that_must_not_be_answers_nobody_else(method: str, head: bytes) -> None:
    """What an engine sends after an answer without a body is not the next request's answer."""
    bad = Behaviour(mode=Mode.RAW, raw=head, raw_later=OTHERS)
    async with Rig(bad) as rig:
        client = await rig.connect()
        client.send(request("/v1", method=method))
        await client.read_until(b"\r\n\r\n")
        rig.engines[0].behaviour = Behaviour(body=b"mine")
        client.send(request("/v1", b"", "Connection: close"))
        (answer,) = parse_answers(await client.read_all())
        assert answer.body == b"mine"


@pytest.mark.parametrize("status", [204, 304])
@on_uvloop
async def test_an_answer_without_a_body_announces_no_chunks(status: int) -> None:
    """A client that believes the header more than the status would wait for ever."""
    raw = b"HTTP/1.1 %d No\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % status
    async with Rig(Behaviour(mode=Mode.RAW, raw=raw)) as rig:
        (answer,) = parse_answers(await rig.talk(request("/v1", b"", "Connection: close")))
        assert answer.status == status
        assert b"transfer-encoding" not in answer.headers


@on_uvloop
async def test_a_few_interim_heads_are_no_flood() -> None:
    """An engine that says 102 now and then, in its own time, is waited for."""
    raw = b"HTTP/1.1 102 Processing\r\n\r\n" * 40
    good = Behaviour(mode=Mode.RAW, raw=raw, raw_later=raw + LENGTH_9 + b"nine byte")
    async with Rig(good) as rig:
        (answer,) = parse_answers(await rig.talk(request("/v1", b"", "Connection: close")))
        assert (answer.status, answer.body) == (200, b"nine byte")


@on_uvloop
async def test_a_name_that_cannot_be_one_fails_the_call() -> None:
    """The resolver's own errors end a call like any other failure to connect."""
    pool = UpstreamPool(UPSTREAM_LIMITS)
    pool.put("e", "a..b", 80)
    sink = Collector()
    pool.send("e", HEAD, b"", sink)
    await until(lambda: sink.end)
    assert sink.end == ErrorKind.CONNECT_FAILED
    await pool.close()


@on_uvloop
async def _fail_in_two_ways(limits: UpstreamLimits) -> None:
    """Call an engine that speaks no HTTP, twice, and one that is not there."""
    pool, engine = UpstreamPool(limits), FakeEngine(Behaviour(mode=Mode.RAW, raw=b"SSH-2.0\r\n"))
    pool.put("strange", "127.0.0.1", await engine.start())
    pool.put("absent", "127.0.0.1", closed_port())
    for key in ("strange", "strange", "absent"):
        sink = Collector()
        pool.send(key, HEAD, b"", sink)
        await until(lambda sink=sink: sink.end)  # type: ignore[misc]
    await pool.close()
    await engine.stop()


def test_what_is_wrong_with_an_engine_is_told_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Why it cannot be reached, or what it sent, is in the log, not once for each request."""
    _fail_in_two_ways(UPSTREAM_LIMITS)
    said = [record.message for record in caplog.records if record.name == "router.upstream"]
    strange, absent = said
    assert strange.endswith("its answer cannot be passed on: no HTTP/1.x")
    assert "cannot be reached: " in absent
    assert "Connection refused" in absent


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no further file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@on_uvloop
async def test_a_router_out_of_files_does_not_blame_engines() -> None:
    """Without a descriptor for a new connection the client gets a 503; kept ones still serve."""
    async with Rig() as rig:
        first, second = await rig.connect(), await rig.connect()
        first.send(request("/v1?mode=json&delay_s=0.2"))
        await until(lambda: rig.engines[0].requests)
        with no_more_files():
            second.send(request("/v1", b"", "Connection: close"))
            (answer,) = parse_answers(await second.read_all())
            await first.read_until(b"}}")
            first.send(request("/v1", b"", "Connection: close"))
            (kept,) = parse_answers(await first.read_all())
        assert (answer.status, answer.error["code"]) == (503, "no_socket")
        assert kept.status == 200
        assert rig.books[1].outcome == Outcome.NO_SOCKET


def test_clients_leave_descriptors_for_engines() -> None:
    """Of few files half are kept for engines; where there are enough nothing changes."""
    limits = ServerLimits(connections_max=1000)
    assert within_files(limits, 2 * 1000 + FILES_RESERVED) is limits
    assert within_files(limits, 1024).connections_max == (1024 - FILES_RESERVED) // 2
    assert within_files(limits, 10).connections_max == CONNECTIONS_LEAST
