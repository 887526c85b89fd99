"""NATS that is not there at the start, and a cluster of it that loses a node, under traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from controlplane.bus import BusError, NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.setup import describe, ensure
from controlplane.http_client import HttpClient, HttpError
from controlplane.ports import free_port, free_ports
from lab.stack import LocalStack, StackOptions
from tests.live.chaos_rig import eventually, steady

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "127.0.0.1"
ENGINE_FLAGS = ("--speed", "10", "--blocks", "1024", "--max-model-len", "2048")
PLAN = layout(replicas=3, storage="memory", size=0.05)


async def test_nats_is_down_from_the_start() -> None:
    """Everything starts and says what it waits for; once NATS is there, it all comes together."""
    options = StackOptions(engines=0, routers=0, port=free_port(HOST), engine_flags=ENGINE_FLAGS)
    async with AsyncExitStack() as context:
        server = await context.enter_async_context(EmbeddedNats())
        await server.kill()
        stack = LocalStack(msgspec.structs.replace(options, nats=server.url))
        context.push_async_callback(stack.close)
        http = await context.enter_async_context(HttpClient())
        await stack.fleet.start(2)
        await stack.start_sidecars(stack.fleet.instances)
        admin_port = free_port(HOST)
        routers = [
            asyncio.create_task(stack.start_router("--admin-port", str(admin_port))),
            asyncio.create_task(stack.start_router()),
        ]

        async def answers(url: str) -> bool:
            with suppress(HttpError):
                await http.get(url)
                return True
            return False

        await eventually(
            lambda: answers(f"http://127.0.0.1:{admin_port}/health"), True, "operators are served"
        )
        assert not await answers(f"{stack.url}/health"), "clients are left to other routers"
        assert "no connection to" in stack.sidecars[0].log()
        await server.start()
        bus = await NatsBus.connect(server.url)
        await ensure(bus, layout(size=0.25))
        await bus.close()
        await asyncio.gather(*routers)
        await stack.ready(2)
        async with steady(stack):
            pass


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[list[EmbeddedNats]]:
    """Three servers that hold everything thrice."""
    ports = free_ports(HOST, 3)
    routes = ",".join(f"nats-route://127.0.0.1:{port}" for port in ports)
    async with AsyncExitStack() as context:
        servers = []
        for number, port in enumerate(ports):
            arguments = ("--name", f"n{number}", "--cluster_name", "plane", "--routes", routes)
            server = EmbeddedNats(
                store_dir=tmp_path / str(number),
                args=(*arguments, "--cluster", f"nats://127.0.0.1:{port}"),
            )
            servers.append(await context.enter_async_context(server))
        yield servers


async def test_a_cluster_of_three_loses_any_node(cluster: list[EmbeddedNats]) -> None:
    """Whatever was connected to the dead node goes on at another one, with everything there."""
    bus = await NatsBus.connect([server.url for server in cluster])

    async def copies() -> int:
        with suppress(BusError):
            await ensure(bus, PLAN)
            return min(holding.current for holding in await describe(bus, PLAN))
        return 0

    await eventually(copies, 3, "every copy is there", within_s=60.0)
    urls = ",".join(server.url for server in cluster)
    options = StackOptions(engines=2, routers=2, engine_flags=ENGINE_FLAGS, nats=urls)
    async with LocalStack(options) as stack:
        for server in cluster:  # one of them leads each stream, and has each client
            async with steady(stack) as flow:
                await server.kill()
                await flow.answered(100)
                await server.start()
            await eventually(copies, 3, "every copy is there again", within_s=60.0)
        assert "the bus is connected" in stack.routers[0].log()
    await bus.close()
