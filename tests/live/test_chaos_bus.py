"""Connections cut, black-holed and slow, of a router, a sidecar or an engine, under traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.http_client import HttpClient
from lab.stack import LocalStack, StackOptions
from lab.tiny_model import tiny_model_dir
from schemas import subjects
from tests.live.chaos_rig import Reply, eventually, steady
from tests.live.tcp_proxy import TcpProxy

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

ENGINE_FLAGS = ("--speed", "10", "--blocks", "1024", "--max-model-len", "2048")

# A consumer is slow sooner than by default, so that a test need not wait for 10 s.
NATS = """
jetstream {{ store_dir: "{folder}" }}
max_pending: 1MB
write_deadline: "500ms"
"""


class Wired:
    """A plane of which one router and one sidecar reach NATS, and routers an engine, by proxies.

    Attributes:
        router: the proxy of router 1.
        sidecar: the proxy of engine 1's sidecar.
        engine: the proxy of engine 1, between it and the routers.
    """

    def __init__(
        self,
        stack: LocalStack,
        server: EmbeddedNats,
        router: TcpProxy,
        sidecar: TcpProxy,
        engine: TcpProxy,
    ) -> None:
        self.stack = stack
        self.server = server
        self.router = router
        self.sidecar = sidecar
        self.engine = engine

    async def broken(self) -> set[str]:
        """The instances that some router finds out of reach."""
        found = set()
        async with HttpClient() as http:
            for admin in self.stack.admin_urls:
                state = await http.get(f"{admin}/debug/state")
                rows = state["models"]["tiny"]["instances"]
                found |= {row["instance"] for row in rows if row["breaker_open"]}
        return found

    async def connected(self) -> bool:
        """Whether router 1 believes that it is connected to the bus."""
        async with HttpClient() as http:
            state = await http.get(f"{self.stack.admin_urls[1]}/debug/state")
        connected: bool = state["models"]["tiny"]["bus_connected"]
        return connected

    async def trusts(self, router: int) -> dict[str, str]:
        """How a router trusts each instance."""
        async with HttpClient() as http:
            state = await http.get(f"{self.stack.admin_urls[router]}/debug/state")
        rows = state["models"]["tiny"]["instances"]
        return {row["instance"]: row["trust"] for row in rows}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wired(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wired]:
    """A plane that heals between the cases."""
    folder = tmp_path_factory.mktemp("nats")
    config = folder / "nats.conf"
    config.write_text(NATS.format(folder=folder / "jetstream"))
    options = StackOptions(engines=1, routers=1, engine_flags=ENGINE_FLAGS)
    async with (
        EmbeddedNats(config=config) as server,
        TcpProxy(server.port) as router,
        TcpProxy(server.port) as sidecar,
        LocalStack(msgspec.structs.replace(options, nats=server.url)) as stack,
    ):
        (engine,), _ = await asyncio.gather(
            stack.fleet.start(1), stack.start_router("--nats", router.url)
        )
        async with TcpProxy(int(engine.url.rpartition(":")[2])) as between:
            flags = ("--nats", sidecar.url, "--advertise-url", f"http://127.0.0.1:{between.port}")
            await stack.start_sidecar(engine.name, engine.url, tiny_model_dir(), *flags)
            await stack.ready(2)
            yield Wired(stack, server, router, sidecar, between)


async def test_a_routers_connection_is_cut(wired: Wired) -> None:
    """It routes on by what it knows, and resyncs once it is connected again."""
    async with steady(wired.stack) as flow:
        wired.router.cut()
        await eventually(wired.connected, False, "the loss is noticed")
        await flow.answered(150)
        await wired.router.heal()
        await eventually(wired.connected, True, "it is connected again")


async def test_a_sidecars_connection_is_cut(wired: Wired) -> None:
    """What its engine caches meanwhile is known soon after its return."""
    async with steady(wired.stack) as flow:
        wired.sidecar.cut()
        await flow.answered(200)
        await wired.sidecar.heal()


async def test_an_engine_is_cut_off_from_the_routers(wired: Wired) -> None:
    """Answers that it had begun break visibly; all else is answered by the other one."""
    cut_s = time.monotonic()

    def had_begun(reply: Reply) -> bool:
        return reply.broke and reply.status == 200 and reply.began_s <= cut_s

    async with steady(wired.stack, answer_tokens=64, may_fail=had_begun) as flow:
        wired.engine.cut()
        cut_s = time.monotonic()
        await eventually(wired.broken, {"engine-1"}, "routers find it out of reach")
        await flow.answered(100)
        assert set((await wired.trusts(0)).values()) == {"exact"}, "its sidecar speaks on"
        await wired.engine.heal()
        await eventually(wired.broken, set(), "requests get through again")


async def test_a_routers_connection_is_a_black_hole(wired: Wired) -> None:
    """No end of the connection is told, and it is noticed all the same; nobody is trusted."""
    async with steady(wired.stack):
        wired.router.black_hole()
        await eventually(wired.connected, False, "the loss is noticed")
        stale = dict.fromkeys(("engine-0", "engine-1"), "stale")
        await eventually(lambda: wired.trusts(1), stale, "nobody is trusted for ever")
        await wired.router.heal()


async def test_a_sidecars_connection_is_a_black_hole(wired: Wired) -> None:
    """Its instance alone is not trusted, and serves on."""
    async with steady(wired.stack):
        wired.sidecar.black_hole()
        stale = {"engine-0": "exact", "engine-1": "stale"}
        await eventually(lambda: wired.trusts(0), stale, "its blocks do not count")
        await wired.sidecar.heal()


async def test_a_router_is_too_slow_for_the_bus(wired: Wired) -> None:
    """NATS throws a slow consumer out; it comes back, and knows everything in the end."""
    bus = await NatsBus.connect(wired.server.url, name="flood")

    async def flood() -> None:
        while True:
            bus.publish(subjects.kv("another model", "i"), bytes(100_000))
            await asyncio.sleep(0.02)

    async def thrown_out() -> bool:
        return "Slow Consumer" in wired.server.log_tail(1000)

    async with steady(wired.stack):
        wired.router.slow_down(0.5)
        flooding = asyncio.create_task(flood())
        await eventually(thrown_out, True, "the server throws it out")
        flooding.cancel()
        await eventually(wired.connected, False, "the router notices")
        await wired.router.heal()
    await bus.close()
