"""Detectors and pretended routers on one bus in memory, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from controlplane.bus.memory_bus import MemoryBroker, MemoryBus
from controlplane.bus.protocol import Bus, Entry
from controlplane.core.detector import DetectorConfig
from controlplane.core.verdicts import Verdicts
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.service import DetectorService
from router.standing import StandingVerdicts
from schemas import subjects
from schemas.bus import (
    ClassCoverage,
    HotspotCleared,
    HotspotRaised,
    PolicyOverride,
    RouteBatch,
    Routed,
    RouteEvent,
    decode_hotspot,
)
from schemas.codec import encode
from tests.detector.virtual import now

MODEL = "m"
HOT = 0xFEED_0000_0000_0007
CONFIG = DetectorServiceConfig(detector=DetectorConfig(requests_min=3))
"""Production's times."""


async def eventually(true: Callable[[], object], within_s: float = 60.0) -> None:
    """Return when a condition holds; fail when it does not in time."""
    deadline = now() + within_s
    while not true():
        assert now() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def steadily(
    true: Callable[[], object], until: Callable[[], object], within_s: float = 60.0
) -> None:
    """Look all the time that something holds, until something else does."""
    deadline = now() + within_s
    while not until():
        assert true(), "it ceased to hold"
        assert now() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def for_s(seconds: float, true: Callable[[], object]) -> None:
    """Look all the time that something holds, for some time."""
    until_s = now() + seconds
    await steadily(true, lambda: now() >= until_s, seconds + 1.0)


class PretendedRouter:
    """Says that requests were routed, and obeys the bucket as a router does.

    Attributes:
        verdicts: what it obeys.
        told: what the `hotspot` subject told, in order.
    """

    def __init__(self, bus: Bus, name: str = "router-a") -> None:
        self.verdicts = Verdicts()
        self.told: list[HotspotRaised | HotspotCleared] = []
        self._bus = bus
        self._name = name
        self._epoch = time.time_ns()
        self._seq = 0
        self._standing = StandingVerdicts()

    async def start(self) -> PretendedRouter:
        """Begin to listen."""
        bucket = await self._bus.bucket(subjects.VERDICTS)
        await bucket.watch(self._entry)
        await self._bus.subscribe(subjects.hotspot(MODEL), self._hotspot)
        return self

    def _entry(self, entry: Entry) -> None:
        now_s = now()
        found = self._standing.feed(entry.key, entry.value, now_s)
        if found is None:
            return
        statement = found[1]
        if isinstance(statement, HotspotRaised):
            self.verdicts.raised(statement, now_s)
        elif isinstance(statement, HotspotCleared):
            self.verdicts.cleared(statement)
        elif isinstance(statement, PolicyOverride):
            self.verdicts.override(statement, now_s)

    def _hotspot(self, subject: str, payload: bytes) -> None:
        self.told.append(decode_hotspot(payload))

    def barred(self) -> set[int]:
        """Return the classes that are barred now."""
        self.verdicts.expire(now())
        return {verdict.key for verdict in self.verdicts.hotspots}

    def say(self, *events: RouteEvent) -> None:
        """Publish a batch."""
        batch = RouteBatch(self._name, self._epoch, self._seq, time.time(), list(events))
        self._seq += 1
        self._bus.publish(subjects.route(MODEL, self._name), encode(batch))

    def ask(self, times: int = 1, key: int = HOT, **fields: Any) -> None:
        """Say that requests of a class were routed."""
        self.say(*[routed(key, **fields)] * times)


def routed(key: int = HOT, holders: int = 1, **fields: Any) -> Routed:
    """Return a request of a class that prefers its holders, in a fleet of eight."""
    inside = None if holders == 0 else fields.pop("inside", 100.0)
    coverage = ClassCoverage(key, 4, holders, inside, fields.pop("outside", 900.0))
    fields = {"fleet": 8, "classes": [coverage], **fields}
    return Routed("r", "i", 0.0, **fields)


class Rig:
    """A broker with detectors and a router; an async context manager."""

    def __init__(self, config: DetectorServiceConfig = CONFIG) -> None:
        self.config = config
        self.broker = MemoryBroker()
        self.buses: dict[str, MemoryBus] = {}
        self.detectors: dict[str, DetectorService] = {}
        self.router: PretendedRouter
        self._others: list[MemoryBus] = []

    async def __aenter__(self) -> Rig:
        self.router = await self.new_router("router-a")
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self.detectors):
            await self.kill(name)
        for bus in self._others:
            await bus.close()

    async def bus(self) -> MemoryBus:
        """Connect somebody else."""
        self._others.append(self.broker.bus())
        return self._others[-1]

    async def new_router(self, name: str) -> PretendedRouter:
        """Start another pretended router."""
        return await PretendedRouter(await self.bus(), name).start()

    async def start(self, name: str, **changes: Any) -> DetectorService:
        """Start a detector."""
        config = msgspec.structs.replace(self.config, detector_id=name, **changes)
        self.buses[name] = self.broker.bus()
        self.detectors[name] = DetectorService(self.buses[name], config, now)
        await self.detectors[name].start()
        return self.detectors[name]

    async def lead(self, name: str) -> DetectorService:
        """Start a detector and wait until it leads."""
        service = await self.start(name)
        await eventually(lambda: service.leading)
        return service

    async def kill(self, name: str) -> None:
        """End a detector as a crash would: its connection breaks, and nothing is released."""
        service = self.detectors.pop(name)
        self.buses[name].cut()
        await service.stop()
        await self.buses.pop(name).close()

    @property
    def leaders(self) -> list[str]:
        """Who believes to lead, and may."""
        return [
            name
            for name, service in self.detectors.items()
            if service.leading and service.lease.left_s > 0
        ]
