"""Clients that end their own side: who waits has its answer, and who has left costs nobody."""

from __future__ import annotations

import asyncio

import pytest

from router.limits import ServerLimits
from tests.router.fake_engine import DONE, Behaviour, Mode
from tests.router.http_rig import RawClient, Rig, on_uvloop, parse_answers, request, until

LONG = Behaviour(mode=Mode.STREAM, chunks=10_000, gap_s=0.005)
# Whoever ends its side later than this has left, where it cannot be asked.
HASTY = ServerLimits(half_close_s=0.001, tick_s=0.01)


def http10(data: bytes) -> bytes:
    """Return a request as an old client sends it."""
    return data.replace(b"HTTP/1.1", b"HTTP/1.0")


async def ended_side(rig: Rig, data: bytes) -> RawClient:
    """Send a request over a new connection, and end our side at once, as `nc -N` does."""
    client = await rig.connect()
    client.send(data)
    client.writer.write_eof()
    return client


async def passed(rig: Rig, ticks: int = 4) -> None:
    """Wait until the server has looked at its connections a few times."""
    for _ in range(ticks):
        seen_s = rig.server.now_s
        await until(lambda seen_s=seen_s: rig.server.now_s > seen_s)  # type: ignore[misc]


@pytest.mark.parametrize("old", [False, True])
@on_uvloop
async def test_whoever_only_has_nothing_more_to_say_is_answered(old: bool) -> None:
    """Whatever the answer is, and however long it takes; then the connection ends."""
    stream = Behaviour(mode=Mode.STREAM, chunks=50, gap_s=0.002)
    async with Rig(stream) as rig:
        change = http10 if old else bytes
        held = await ended_side(rig, change(request("/hold")))
        streaming = await ended_side(rig, change(request("/v1")))
        await until(lambda: rig.held)
        await passed(rig)
        assert not rig.held[0].closed
        rig.held[0].respond(200, [], b"late")
        (answer,) = parse_answers(await held.read_all())
        assert answer.body == b"late"
        (answer,) = parse_answers(await streaming.read_all())
        assert answer.body.endswith(DONE)
        await until(lambda: rig.server.connections_open == 0)
        assert rig.server.stats.clients_gone == 0
        assert rig.server.stats.clients_half_closed == 2
        assert rig.engines[0].aborted == 0


@on_uvloop
async def test_whoever_waits_may_say_so_late_before_an_answer_has_begun() -> None:
    """HTTP/1.1 lets us ask whether anybody is there, at any time."""
    async with Rig(server=HASTY) as rig:
        client = await rig.connect()
        client.send(request("/hold"))
        await until(lambda: rig.held)
        await passed(rig)
        client.writer.write_eof()
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await passed(rig)
        rig.held[0].respond(200, [], b"late")
        (answer,) = parse_answers(await client.read_all())
        assert answer.body == b"late"


@on_uvloop
async def test_all_that_was_sent_before_the_end_is_answered() -> None:
    """Pipelined requests that wait for their turn do, and a piece of one is not."""
    async with Rig() as rig:
        sent = request("/hold") + request("/local") * 40 + request("/hold")
        client = await ended_side(rig, sent + request("/local")[:-2])
        await until(lambda: rig.held)
        rig.held.pop().respond(200, [], b"first")
        await until(lambda: rig.held)
        await passed(rig)
        rig.held.pop().respond(200, [], b"last")
        answers = parse_answers(await client.read_all())
        assert [answer.body for answer in answers] == [b"first", *[b"local"] * 40, b"last"]
        await until(lambda: rig.server.connections_open == 0)


@on_uvloop
async def test_a_bad_request_behind_the_last_one_is_refused() -> None:
    """And the connection ends without waiting for more."""
    async with Rig() as rig:
        client = await ended_side(rig, request("/hold") + b"nonsense\r\n\r\n")
        await until(lambda: rig.held)
        rig.held[0].respond(200, [], b"good")
        answers = parse_answers(await client.read_all())
        assert [answer.status for answer in answers] == [200, 400]
        await until(lambda: rig.server.connections_open == 0)


@on_uvloop
async def test_whoever_leaves_while_waiting_is_noticed_at_once() -> None:
    """Before the answer has begun: the engine has not said anything yet, and stops."""
    async with Rig(Behaviour(mode=Mode.NEVER), server=ServerLimits(tick_s=5.0)) as rig:
        client = await rig.connect()
        client.send(request("/v1"))
        await until(lambda: rig.engines[0].requests)
        client.close()
        await until(lambda: rig.engines[0].aborted, deadline_s=1.0)
        assert rig.server.stats.clients_gone == 1


@on_uvloop
async def test_whoever_ends_its_side_and_then_leaves_is_noticed() -> None:
    """A client that waited for a while, and then no more: it is asked again and again."""
    async with Rig(Behaviour(mode=Mode.NEVER)) as rig:
        client = await ended_side(rig, request("/v1"))
        await client.read_until(b"100 Continue\r\n\r\n")
        await passed(rig)
        assert rig.engines[0].aborted == 0
        client.abort()
        await until(lambda: rig.engines[0].aborted)
        assert rig.server.stats.clients_gone == 1


@pytest.mark.parametrize("old", [False, True])
@on_uvloop
async def test_whoever_leaves_in_the_middle_of_an_answer_is_noticed_at_once(old: bool) -> None:
    """The end of its side alone says so, however soon: the engine need not say anything more."""
    async with Rig(Behaviour(mode=Mode.STALL)) as rig:
        client = await rig.connect()
        data = request("/v1")
        client.send(http10(data) if old else data)
        await client.read_until(b"token")
        client.close()
        await until(lambda: rig.engines[0].aborted, deadline_s=1.0)
        assert rig.server.stats.clients_gone == 1


@on_uvloop
async def test_whoever_ends_its_side_with_its_request_may_leave_later() -> None:
    """The tokens that nobody takes tell."""
    async with Rig(LONG) as rig:
        client = await ended_side(rig, request("/v1"))
        await client.read_until(b"token")
        await passed(rig)
        assert rig.engines[0].aborted == 0
        client.abort()
        await until(lambda: rig.engines[0].aborted, deadline_s=1.0)
        assert rig.server.stats.clients_gone == 1
        assert rig.server.stats.clients_half_closed == 1


@on_uvloop
async def test_an_old_client_that_leaves_late_is_noticed_at_once() -> None:
    """HTTP/1.0 cannot be asked whether anybody is there."""
    async with Rig(Behaviour(mode=Mode.NEVER), server=HASTY) as rig:
        client = await rig.connect()
        client.send(http10(request("/v1")))
        await until(lambda: rig.engines[0].requests)
        await passed(rig)
        client.close()
        await until(lambda: rig.engines[0].aborted, deadline_s=1.0)


@on_uvloop
async def test_an_end_without_a_request_ends_the_connection() -> None:
    """Idle, or in the middle of a request: there is nothing to wait for."""
    async with Rig() as rig:
        for sent in (b"", request("/local"), request("/local")[:-5]):
            client = await ended_side(rig, sent)
            raw = await client.read_all()
            assert raw.count(b"200 OK") == sent.count(b"\r\n\r\n")
        await until(lambda: rig.server.connections_open == 0)
        assert rig.server.stats.clients_half_closed == 0


@on_uvloop
async def test_many_that_end_their_side_leave_nothing() -> None:
    """Some wait, some leave; every one is counted out and every engine's work ends."""
    stream = Behaviour(mode=Mode.STREAM, chunks=20, gap_s=0.002)
    async with Rig(stream) as rig:
        clients = [await ended_side(rig, request("/v1")) for _ in range(40)]
        await until(lambda: rig.engines[0].requests == 40)
        for client in clients[::2]:
            client.close()
        answers = await asyncio.gather(*(client.read_all() for client in clients[1::2]))
        assert all(parse_answers(raw)[0].body.endswith(DONE) for raw in answers)
        await until(lambda: rig.server.connections_open == 0)
        assert rig.server._half_closed == set()


@on_uvloop
async def test_one_that_has_just_been_ended_is_asked_nothing_more() -> None:
    """Two timers may come at once: the second finds no socket, and must not fail over that."""
    async with Rig(Behaviour(mode=Mode.NEVER)) as rig:
        client = await rig.connect()
        client.send(request("/v1"))
        client.writer.write_eof()
        await until(lambda: rig.server._half_closed)
        (connection,) = rig.server._half_closed
        connection.abort()
        await asyncio.sleep(0)
        connection.look_for_reset(rig.server.now_s + 100.0)
        await until(lambda: not rig.server._half_closed)
