"""Drains and rolling restarts under traffic: no request fails, not one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from controlplane.bus import NatsBus
from controlplane.operator import Operator
from lab.stack import LocalStack, StackOptions
from lab.view import BusView
from tests.live.chaos_rig import eventually, logs, steady

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

ENGINE_FLAGS = (
    *("--speed", "5", "--blocks", "1024", "--max-model-len", "2048"),
    *("--stream-interval", "10"),  # few chunks: it is the time that counts here
)
LONG = 100
"""Answer tokens: some answers always run, whatever is restarted."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """A plane that is whole again after each case."""
    async with LocalStack(StackOptions(engines=2, routers=2, engine_flags=ENGINE_FLAGS)) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def view(stack: LocalStack) -> AsyncIterator[BusView]:
    """What the routers decide."""
    bus = await NatsBus.connect(stack.nats_url, name="view")
    view = BusView()
    await view.follow(bus)
    yield view
    await bus.close()


async def multiplane(*arguments: str) -> None:
    """Run a command of the command line, and require that it succeeds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0


async def busy_with(view: BusView, name: str) -> bool:
    """Whether an instance gets requests."""
    before = view.routed_by_instance().get(name, 0)
    await asyncio.sleep(0.5)
    return view.routed_by_instance().get(name, 0) > before


async def test_an_operator_drains_an_instance(stack: LocalStack, view: BusView) -> None:
    """It gets no new request until it is taken back."""
    bus = await NatsBus.connect(stack.nats_url, name="operator")
    operator = Operator(bus)
    async with steady(stack, requests_per_s=50.0, answer_tokens=LONG, before=40, after=40):
        await multiplane("drain", "engine-1", "--nats", stack.nats_url)
        await eventually(lambda: busy_with(view, "engine-1"), False, "it is drained")
        await operator.drain("engine-1", on=False)
        await eventually(lambda: busy_with(view, "engine-1"), True, "it is taken back")
    await bus.close()


async def test_a_sidecar_that_is_stopped_drains_its_instance(stack: LocalStack) -> None:
    """SIGTERM ends it once its instance is idle; the engine could be stopped now."""
    sidecar = stack.sidecars[1]
    async with steady(stack, requests_per_s=50.0, answer_tokens=LONG) as flow:
        await sidecar.stop()
        assert await sidecar.wait() == 0
        await flow.answered(80)
        await sidecar.start()
        await stack.ready(2)
    assert "drained" in sidecar.log()


async def test_engines_and_sidecars_are_restarted_one_after_the_other(stack: LocalStack) -> None:
    """Each is drained, stopped, and serves again before the next one's turn comes."""
    async with steady(stack, requests_per_s=50.0, answer_tokens=LONG) as flow:
        for engine, sidecar in zip(stack.fleet.instances, stack.sidecars, strict=True):
            await sidecar.stop()
            await engine.restart()
            await sidecar.start()
            await stack.ready(2)
            await flow.answered(40)
    assert "requests still ran" not in logs(stack)


async def test_routers_are_replaced_one_after_the_other(stack: LocalStack) -> None:
    """Each new one knows everything before the old one stops, and no connection is reset."""
    async with steady(stack, requests_per_s=50.0, answer_tokens=LONG) as flow:
        for old in tuple(stack.routers):
            await stack.start_router()
            await flow.answered(80)
            stack.routers.remove(old)
            await old.stop()
            assert await old.wait() == 0
            old.close()
    bus = await NatsBus.connect(stack.nats_url, name="operator")
    found = {entry.lease.router_id for entry in await Operator(bus).routers()}
    assert found == {router.ready["router"] for router in stack.routers}
    await bus.close()
