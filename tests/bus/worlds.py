"""Servers with their buses, real or in memory, behind one face: what the contract suite runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from controlplane.bus import Bus, MemoryBroker, NatsBus, NatsOptions
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.memory_bus import MemoryBus
from controlplane.bus.protocol import Record
from controlplane.bus.setup import ensure
from tests.bus.container_nats import ContainerNats

IN_MEMORY = layout(storage="memory", size=0.05)
ON_DISK = layout(size=0.05)


def fast(**options: Any) -> NatsOptions:
    """Return options with short pauses, so that a test's server is found again quickly."""
    return NatsOptions(retry_s_min=0.02, retry_s_max=0.1, return_s_max=0.02, **options)


async def eventually(true: Callable[[], object], within_s: float = 10.0) -> None:
    """Return when a condition holds; fail when it does not in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not true():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


class World(Protocol):
    """A server and its clients."""

    async def bus(self, **bounds: int) -> Bus:
        """Connect a new client."""

    async def cut(self) -> None:
        """Take the server away from everybody."""

    async def heal(self) -> None:
        """Bring it back, with what it had stored."""

    async def settle(self) -> None:
        """Return when everything published so far was delivered."""

    async def close(self) -> None:
        """End everything."""


async def two(world: World) -> tuple[Bus, Bus]:
    """Connect two clients."""
    return await world.bus(), await world.bus()


async def answers(
    bus: Bus, subject: str, payload: bytes = b"", timeout_s: float = 5.0
) -> list[bytes]:
    """Return all answers to a request."""
    return [answer async for answer in bus.request(subject, payload, timeout_s=timeout_s)]


async def collect(bus: Bus, stream: str, **where: Any) -> list[Record]:
    """Return what a stream recorded."""
    return [record async for record in bus.history(stream, **where)]


async def collect_into(into: list[bytes], bus: Bus, stream: str, **where: Any) -> None:
    """Append the payloads of a stream's records as they come."""
    async for record in bus.history(stream, **where):
        into.append(record.payload)  # noqa: PERF401 (seen as they come)


class MemoryWorld:
    """Everything in this process."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.buses: list[MemoryBus] = []

    async def bus(self, **bounds: int) -> Bus:
        """See `World`."""
        self.buses.append(self.broker.bus(**bounds))
        return self.buses[-1]

    async def cut(self) -> None:
        """See `World`."""
        for bus in self.buses:
            bus.cut()

    async def heal(self) -> None:
        """See `World`."""
        for bus in self.buses:
            bus.heal()

    async def settle(self) -> None:
        """See `World`."""
        for _ in range(3):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """See `World`."""
        for bus in self.buses:
            await bus.close()


class NatsWorld:
    """A real nats-server of this test's own, a child of ours or in a container."""

    def __init__(self, server: EmbeddedNats | ContainerNats, *, shared: bool) -> None:
        self.server = server
        self.buses: list[NatsBus] = []
        self._shared = shared

    async def bus(self, **bounds: int) -> Bus:
        """See `World`."""
        self.buses.append(await NatsBus.connect(self.server.url, options=fast(**bounds)))
        if len(self.buses) == 1:
            await ensure(self.buses[0], IN_MEMORY if self._shared else ON_DISK)
        return self.buses[-1]

    async def cut(self) -> None:
        """See `World`."""
        assert not self._shared
        await self.server.kill()
        await eventually(lambda: not any(bus.connected for bus in self.buses))

    async def heal(self) -> None:
        """See `World`."""
        await self.server.start()
        await eventually(lambda: all(bus.connected for bus in self.buses))

    async def settle(self) -> None:
        """See `World`."""
        for bus in self.buses:
            await bus.flush()
        for bus in self.buses:
            await bus.flush()

    async def close(self) -> None:
        """See `World`."""
        for bus in self.buses:
            await bus.close()
        if not self._shared:
            await self.server.stop()
