"""Whatever clients and engines do, a router gives everything back.

A thousand requests of all kinds, most of them left by their clients at a random moment, over
engines that hang, die, stall and fail: afterwards nothing is booked, open, pinned or running.
`python -m bench.soak` does the same for a hundred thousand, with real processes.
"""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from controlplane.core.coalesce import CoalesceConfig
from controlplane.core.queue_lines import QueueConfig
from router.upstream import UpstreamPool
from schemas.bus import Finished, Routed
from tests.router.fake_engine import Behaviour, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow

REQUESTS = 1000
AT_ONCE = 40
BEHAVIOURS = (
    Behaviour(),
    Behaviour(mode=Mode.STREAM, chunks=6, gap_s=0.002),
    Behaviour(mode=Mode.STREAM, chunks=200),
    Behaviour(mode=Mode.NEVER),
    Behaviour(mode=Mode.HEAD_ONLY),
    Behaviour(mode=Mode.STALL, chunks=4),
    Behaviour(mode=Mode.DIE_BEFORE_HEAD),
    Behaviour(mode=Mode.DIE_AFTER_HEAD),
    Behaviour(mode=Mode.DIE_MID_STREAM),
    Behaviour(mode=Mode.CLOSE_DELIMITED),
    Behaviour(status=500),
    Behaviour(status=422),
    Behaviour(delay_s=0.01),
)
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/odd")


def body(chance: random.Random) -> bytes:
    """Return a body that fits most of the paths; some are long enough to be read elsewhere."""
    words = chance.choice((5, 40, 200, 4000))
    text = " ".join(chance.choice(("one", "two", "three")) for _ in range(words))
    request = {**chat(text), "prompt": text, "input": text, "max_tokens": 5}
    if chance.random() < 0.1:
        request["model"] = "nope"
    encoded = json.dumps(request).encode()
    return encoded[: len(encoded) // 2] if chance.random() < 0.05 else encoded


async def visit(port: int, chance: random.Random) -> None:
    """Send one request, and leave at a random moment: at once, in the middle, or at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = body(chance)
    head = f"POST {chance.choice(PATHS)} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    patience_s = chance.choice((0.0, 0.0, 0.001, 0.005, 0.02, 0.05))
    try:
        async with asyncio.timeout(patience_s):
            await writer.drain()
            while await reader.read(65536):
                pass
    except (TimeoutError, ConnectionError):
        pass
    if chance.random() < 0.5:
        writer.transport.abort()
    writer.close()


async def keep_changing(rig: ServiceRig, chance: random.Random) -> None:
    """Let every engine behave differently from moment to moment."""
    while True:
        for engine in rig.engines.values():
            engine.behaviour = chance.choice(BEHAVIOURS)
        await asyncio.sleep(0.005)


async def visits(rig: ServiceRig, chance: random.Random, count: int) -> None:
    """Make visits, some at a time."""
    port = rig.process.address[1]
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await visit(port, chance)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


def _is_at_rest(pool: UpstreamPool, name: str) -> bool:
    """Whether all connections to an engine are idle ones."""
    known = pool.get((MODEL, name))
    return known is not None and known.connections_open == known.connections_idle


WAITING = {"queue": QueueConfig(wait_s_max=0.2), "coalesce": CoalesceConfig(32, 0.1)}


@pytest.mark.parametrize(("seed", "waiting"), [(1, False), (2, True)])
async def test_a_thousand_random_aborts_leave_nothing(seed: int, waiting: bool) -> None:
    """Bookings, tickets, calls, connections, tasks, handles, tenants' places, queue: all zero."""
    chance = random.Random(seed)
    rig = ServiceRig(WAITING, batch_cap=2) if waiting else ServiceRig()
    async with rig:
        for name in "abc":
            await rig.instance(name)
        process = rig.process
        tasks = len(asyncio.all_tasks())
        changing = asyncio.create_task(keep_changing(rig, chance))
        await visits(rig, chance, REQUESTS)
        changing.cancel()
        for engine in rig.engines.values():
            engine.behaviour = Behaviour()
        plane = rig.served.plane
        await until(lambda: not plane.requests.tickets)
        await until(lambda: process._server.connections_open == 0)
        await until(lambda: process._pool.calls_open == 0)
        await until(lambda: not process.router._reading)
        plane.ledger.check([])
        if waiting:
            assert process.router.rooms is not None
            room = process.router.rooms.of(rig.served)
            assert room.queue is not None
            assert room.coalescer is not None
            await until(lambda: not room._places and not len(room.coalescer))
            room.queue.check()
            room.coalescer.check()
            assert sum(room.counts.values()) > 100, "many have waited"
        # One that was being opened for a client who left is kept once it is open.
        await until(lambda: all(_is_at_rest(process._pool, name) for name in rig.engines))
        assert [gate.running for gate in process._access.gates] == [0]
        assert process._cache.stats.handles == 0
        assert process._server.buffered_bytes == 0
        assert process._server.stats.handler_errors == 0
        await until(lambda: len(asyncio.all_tasks()) <= tasks + len(rig.engines) * 4)
        await until(lambda: len(rig.of_kind(Finished)) == len(rig.of_kind(Routed)))
        # Of those that wait, most of the clients leave before they are sent.
        assert len(rig.of_kind(Routed)) > REQUESTS // (8 if waiting else 4)
        assert (await rig.chat("still here"))["object"]


async def test_a_client_that_leaves_before_its_reading_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even a task that never got its first turn gives the tenant's place and the handle back."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        spawn = rig.process.router.spawn

        def spawn_and_leave(reading: object) -> asyncio.Task[None]:
            task = spawn(reading)  # type: ignore[arg-type]
            task.cancel()
            return task

        monkeypatch.setattr(rig.process.router, "spawn", spawn_and_leave)
        text = "one two three " * 20_000
        _, writer = await asyncio.open_connection("127.0.0.1", rig.process.address[1])
        data = json.dumps({"model": MODEL, "prompt": text}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        writer.write(data)
        await until(lambda: rig.process.metrics._requests)
        writer.close()
        (gate,) = rig.process._access.gates
        await until(lambda: gate.running == 0)
        assert rig.process._cache.stats.handles == 0
