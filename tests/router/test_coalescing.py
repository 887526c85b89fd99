"""Requests that share a new prefix: one computes it, the others wait and go where it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.coalesce import CoalesceConfig
from schemas.bus import Routed
from tests.router.fake_engine import Behaviour, FakeEngine, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow

BEGINNING = "You are a helpful assistant. " * 40
STREAM = Behaviour(mode=Mode.STREAM, chunks=3)
LATE = Behaviour(mode=Mode.STREAM, chunks=3, delay_s=0.4)
NEVER = Behaviour(mode=Mode.NEVER)


def rig(wait_s_max: float = 8.0, **plane: Any) -> ServiceRig:
    """Returns a router whose requests follow each other from 64 shared tokens on."""
    return ServiceRig({"coalesce": CoalesceConfig(64, wait_s_max)}, **plane)


def coalescer(plane: ServiceRig) -> Any:
    """Returns who leads and follows."""
    rooms = plane.process.router.rooms
    assert rooms is not None
    return rooms.of(plane.served).coalescer


async def lead(plane: ServiceRig, engines: list[FakeEngine]) -> tuple[asyncio.Task[Any], int]:
    """Sends a request that leads; returns it and which engine has it."""
    task = asyncio.create_task(plane.chat(BEGINNING + "first", stream=True))
    await until(lambda: sum(engine.requests for engine in engines) == 1)
    return task, next(n for n, engine in enumerate(engines) if engine.requests)


async def follow(plane: ServiceRig, text: str, **fields: Any) -> asyncio.Task[Any]:
    """Sends a request that follows, and waits until it does."""
    before = coalescer(plane).following
    task = asyncio.create_task(plane.chat(BEGINNING + text, stream=True, **fields))
    await until(lambda: coalescer(plane).following > before)
    return task


async def done(*tasks: asyncio.Task[Any]) -> None:
    """Waits for requests to end, however they do: answers that stream are no JSON."""
    await asyncio.gather(*tasks, return_exceptions=True)


async def two(plane: ServiceRig, behaviour: Behaviour) -> list[FakeEngine]:
    """Starts two instances."""
    return [await plane.instance(name, behaviour) for name in "ab"]


async def test_followers_go_where_the_leader_has_computed_the_prefix() -> None:
    """All at its first byte, to its instance, though the other one is idle."""
    async with rig() as plane:
        engines = await two(plane, LATE)
        first, where = await lead(plane, engines)
        others = [await follow(plane, str(number)) for number in range(3)]
        assert sum(engine.requests for engine in engines) == 1
        await done(first, *others)
        assert engines[where].requests == 4
        routed = plane.of_kind(Routed)
        assert {event.instance_id for event in routed} == {"ab"[where]}
        assert [event.queue_s > 0 for event in routed] == [False, True, True, True]
        assert (len(coalescer(plane)), coalescer(plane).following) == (0, 0)


async def test_blocks_that_appear_release_followers_before_the_answer_begins() -> None:
    """An answer that is not streamed begins late; the engine's block events say more."""
    async with rig() as plane:
        engines = await two(plane, NEVER)
        first, where = await lead(plane, engines)
        other = await follow(plane, "other")
        blocks = await plane.keys(BEGINNING + "other")
        await plane.publish(plane.publishers["ab"[where]].store(blocks[:-1]))
        await until(lambda: engines[where].requests == 2)
        first.cancel()
        other.cancel()
        await done(first, other)


async def test_a_leader_that_fails_releases_its_followers_at_once() -> None:
    """The first of them leads the others then, and all are answered."""
    async with rig() as plane:
        engines = await two(plane, NEVER)
        first, _ = await lead(plane, engines)
        others = [await follow(plane, str(number)) for number in range(2)]
        for engine in engines:
            engine.behaviour = STREAM
        first.cancel()
        await done(first, *others)
        assert sum(engine.requests for engine in engines) == 3
        assert coalescer(plane).following == 0


async def test_nobody_follows_beyond_the_time_limit() -> None:
    """A leader that takes too long is not waited for."""
    async with rig(wait_s_max=0.1) as plane:
        engines = await two(plane, NEVER)
        first, _ = await lead(plane, engines)
        other = await follow(plane, "other")
        await until(lambda: sum(engine.requests for engine in engines) == 2)
        first.cancel()
        other.cancel()
        await done(first, other)


async def test_a_follower_whose_client_leaves_is_forgotten() -> None:
    """It reaches no engine, and its place is free."""
    async with rig() as plane:
        engines = await two(plane, LATE)
        first, _ = await lead(plane, engines)
        other = await follow(plane, "other")
        other.cancel()
        await until(lambda: coalescer(plane).following == 0)
        await done(first)
        assert sum(engine.requests for engine in engines) == 1


@pytest.mark.parametrize("fields", [{"cache_salt": "mine"}, {"model": "adapter"}])
async def test_other_salts_and_adapters_wait_for_nobody(fields: dict[str, Any]) -> None:
    """Their blocks are others, so there is nothing to wait for."""
    async with rig() as plane:
        engines = [await plane.instance(name, NEVER, loras=["adapter"]) for name in "ab"]
        first, _ = await lead(plane, engines)
        other = asyncio.create_task(plane.chat(BEGINNING + "other", **fields))
        await until(lambda: sum(engine.requests for engine in engines) == 2)
        assert coalescer(plane).following == 0
        first.cancel()
        other.cancel()
        await done(first, other)


async def test_an_isolated_tenant_shares_nothing_with_others(tmp_path: Path) -> None:
    """The same prompt neither follows another tenant's nor is followed by it."""
    (tmp_path / "keys").write_text("a-key acme\nb-key other\n")
    (tmp_path / "tenants").write_text("[tenants.acme]\nisolated = true\n[tenants.other]\n")
    files = {"keys_path": str(tmp_path / "keys"), "tenants_path": str(tmp_path / "tenants")}
    async with ServiceRig({"coalesce": CoalesceConfig(64, 8.0), **files}) as plane:
        engines = [await plane.instance(name, NEVER) for name in "ab"]
        session = plane.http._session
        assert session is not None

        def send(key: str) -> asyncio.Task[Any]:
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{plane.url}/v1/chat/completions"
            return asyncio.create_task(_sent(session.post, url, headers))

        tasks = [send("a-key")]
        await until(lambda: sum(engine.requests for engine in engines) == 1)
        tasks.append(send("b-key"))
        await until(lambda: sum(engine.requests for engine in engines) == 2)
        assert coalescer(plane).following == 0
        for key, following in (("a-key", 1), ("b-key", 2)):
            tasks.append(send(key))
            await until(lambda count=following: coalescer(plane).following == count)
        led = coalescer(plane)._leaders.values()
        assert [len(each.followers) for each in led] == [1, 1]
        for task in tasks:
            task.cancel()
        await done(*tasks)


async def _sent(post: Any, url: str, headers: dict[str, str]) -> Any:
    async with post(url, json=chat(BEGINNING + "same"), headers=headers) as answer:
        return await answer.json()


async def test_a_short_shared_beginning_is_not_waited_for() -> None:
    """Below the bound two instances compute it at once."""
    async with rig() as plane:
        engines = await two(plane, NEVER)
        tasks = [asyncio.create_task(plane.chat(f"Hello {n}")) for n in range(2)]
        await until(lambda: sum(engine.requests for engine in engines) == 2)
        assert plane.process.router.rooms is not None
        page = plane.process.metrics.render().decode()
        assert f'multiplane_coalesce_followers{{model="{MODEL}"}} 0.0' in page
        for task in tasks:
            task.cancel()
        await done(*tasks)
