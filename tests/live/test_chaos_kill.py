"""Whatever is killed, under traffic: nothing is lost or answered twice, and all heals by itself."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from controlplane.bus import BusError, NatsBus
from controlplane.http_client import HttpClient
from controlplane.operator import Operator
from lab.stack import LocalStack, StackOptions
from tests.live.chaos_rig import Reply, eventually, steady

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

ENGINE_FLAGS = ("--speed", "10", "--blocks", "1024", "--max-model-len", "2048")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """A plane that heals between the cases."""
    async with LocalStack(StackOptions(engines=3, routers=2, engine_flags=ENGINE_FLAGS)) as stack:
        yield stack


async def test_a_router_dies(stack: LocalStack) -> None:
    """Only connections to it break; the other router forgets its bookings; a new one takes over."""
    router = stack.routers[0]
    killed_s = time.monotonic()

    def was_there(reply: Reply) -> bool:
        return reply.broke and reply.began_s <= killed_s

    async with steady(stack, may_fail=was_there) as flow:
        await router.kill()
        killed_s = time.monotonic()
        await flow.answered(150)
        await router.start()


async def test_a_sidecar_dies(stack: LocalStack) -> None:
    """Its engine goes on serving; a new sidecar rebuilds the block set from the engine's replay."""
    sidecar = stack.sidecars[0]
    async with steady(stack) as flow:
        await sidecar.kill()
        await flow.answered(150)
        await sidecar.start()
    assert "all blocks are known" in sidecar.log()


async def test_an_engine_dies(stack: LocalStack) -> None:
    """Answers that it had begun break visibly; everything else is answered by the others."""
    engine = stack.fleet.instances[0]
    killed_s = time.monotonic()

    def had_begun(reply: Reply) -> bool:
        return reply.broke and reply.status == 200 and reply.began_s <= killed_s

    async with steady(stack, answer_tokens=64, may_fail=had_begun) as flow:
        await engine.kill()
        killed_s = time.monotonic()
        await flow.answered(150)
        await engine.restart()
        await stack.ready(3)
    assert "the engine restarted" in stack.sidecars[0].log()


async def test_nats_dies(stack: LocalStack) -> None:
    """Requests are routed by what is known; with its return everything resyncs."""
    assert stack.embedded is not None
    async with steady(stack) as flow:
        await stack.embedded.kill()
        await flow.answered(150)
        await stack.embedded.start()
        await stack.ready(3)


@asynccontextmanager
async def keeper(nats_url: str) -> AsyncIterator[None]:
    """Have a process create what the server lacks, whenever it does."""
    command = ("-m", "controlplane.cli.main", "bus", "init", "--watch", "--size", "0.25")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--nats", nats_url, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        status = await process.wait()
    assert status == 0


async def test_nats_dies_and_loses_its_files(stack: LocalStack) -> None:
    """`bus init --watch` creates everything anew, sidecars fill it, and operators are obeyed."""
    server = stack.embedded
    assert server is not None
    bus = await NatsBus.connect(stack.nats_url, name="operator")
    operator = Operator(bus, by="test")
    await operator.drain("engine-1", on=True)
    async with keeper(stack.nats_url), HttpClient() as http, steady(stack) as flow:

        async def drained() -> set[bool]:
            states = [await http.get(f"{admin}/debug/state") for admin in stack.admin_urls]
            rows = [row for state in states for row in state["models"]["tiny"]["instances"]]
            return {row["drained"] for row in rows if row["instance"] == "engine-1"}

        async def registered() -> bool:
            try:
                return "engine-1" in {each.instance_id for each in await operator.instances()}
            except BusError:
                return False

        await eventually(drained, {True}, "the drain is obeyed")
        await server.kill()
        server.wipe()
        await flow.answered(100)
        await server.start()
        await eventually(drained, {False}, "what the server forgot does not stand")
        await eventually(registered, True, "sidecars register anew")
        await operator.drain("engine-1", on=True)
        await eventually(drained, {True}, "a new drain is obeyed")
        await operator.drain("engine-1", on=False)
        await eventually(drained, {False}, "and lifted")
    await bus.close()
