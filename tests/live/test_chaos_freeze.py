"""Whatever stands still for ten seconds, under traffic: nothing is lost, and all heals after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from controlplane.http_client import HttpClient
from lab.stack import LocalStack, StackOptions
from tests.live.chaos_rig import Traffic, eventually, steady

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

FROZEN_S = 10.0
ENGINE_FLAGS = ("--speed", "10", "--blocks", "1024", "--max-model-len", "2048")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """A plane that heals between the cases."""
    async with LocalStack(StackOptions(engines=2, routers=2, engine_flags=ENGINE_FLAGS)) as stack:
        yield stack


async def freeze(stack: LocalStack, pause: Callable[[bool], None]) -> Traffic:
    """Let something stand still under traffic; returns the traffic."""
    async with steady(stack, requests_per_s=50.0, before=40, after=60) as flow:
        pause(True)
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            pause(False)
    return flow


async def trust_of(stack: LocalStack, http: HttpClient, name: str) -> set[str]:
    """Return how the routers trust an instance."""
    states = [await http.get(f"{admin}/debug/state") for admin in stack.admin_urls]
    rows = [row for state in states for row in state["models"]["tiny"]["instances"]]
    return {row["trust"] for row in rows if row["instance"] == name}


async def test_a_router_stands_still(stack: LocalStack) -> None:
    """Its clients wait, the other router goes on without its bookings; then it blames nobody."""
    flow = await freeze(stack, lambda on: stack.routers[0].pause(on=on))
    waited_s = max(reply.ended_s - reply.began_s for reply in flow.replies)
    assert waited_s > FROZEN_S / 2, "some requests were dealt to the frozen router"
    said = stack.routers[0].log()
    assert "stood still" in said
    assert "stale" not in said.partition("stood still")[2]
    assert "its bookings no longer count" in stack.routers[1].log()


async def test_a_sidecar_stands_still(stack: LocalStack) -> None:
    """Its engine serves on by load alone; the sidecar then catches up with it."""
    async with HttpClient() as http:

        async def seen() -> set[str]:
            return await trust_of(stack, http, "engine-0")

        stale = asyncio.create_task(eventually(seen, {"stale"}, "its blocks do not count"))
        await freeze(stack, lambda on: stack.sidecars[0].pause(on=on))
        await stale
    assert "came by replay only" not in stack.sidecars[0].log()


async def test_an_engine_stands_still(stack: LocalStack) -> None:
    """What it has begun waits for it, and the rest goes elsewhere."""
    flow = await freeze(stack, lambda on: stack.fleet.instances[0].pause(on=on))
    slow = sum(reply.ended_s - reply.began_s > FROZEN_S / 2 for reply in flow.replies)
    assert 0 < slow < len(flow.replies) / 2


async def test_nats_stands_still(stack: LocalStack) -> None:
    """Nobody waits for it: the policy degrades, and everything resyncs afterwards."""
    assert stack.embedded is not None
    server = stack.embedded
    flow = await freeze(stack, lambda on: server.suspend() if on else server.resume())
    slow = sum(reply.ended_s - reply.began_s > FROZEN_S / 2 for reply in flow.replies)
    assert slow < len(flow.replies) / 20
    assert "the bus is lost" in stack.routers[0].log()
