"""Detectors as processes, on a real NATS server."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.setup import ensure
from lab.children import Child
from schemas import subjects
from schemas.bus import HotspotCleared, HotspotRaised, decode_leader
from tests.detector.rig import HOT, PretendedRouter, eventually, steadily
from tests.detector.virtual import now

pytestmark = [pytest.mark.live, pytest.mark.slow]

MULTIPLANE = (sys.executable, "-m", "controlplane.cli.main")


class Plane:
    """A NATS server, a pretended router, and detector processes."""

    def __init__(self, nats_url: str, bus: NatsBus, router: PretendedRouter) -> None:
        self.nats_url = nats_url
        self.bus = bus
        self.router = router
        self.children: list[Child] = []

    async def detector(self, name: str) -> Child:
        """Start a detector process."""
        flags = ("--nats", self.nats_url, "--detector-id", name, "--metrics-port", "0")
        child = Child(
            name, [*MULTIPLANE, "detector", *flags, "--requests-min", "3", "--ttl-s", "10"]
        )
        self.children.append(child)
        await child.start()
        return child

    async def leader(self) -> str:
        """Return who holds the lease; empty if nobody does."""
        entry = await (await self.bus.bucket(subjects.LEADERS)).get("detector")
        if entry is None or entry.value is None:
            return ""
        return decode_leader(entry.value).holder.partition("/")[0]

    async def led_by(self, name: str, within_s: float = 10.0) -> float:
        """Wait until a detector leads; return how long that took."""
        began_s = now()
        while await self.leader() != name:
            assert now() - began_s < within_s, self.logs()
            await asyncio.sleep(0.05)
        return now() - began_s

    def logs(self) -> str:
        """Return what the processes wrote."""
        return "\n".join(f"{child.name}:\n{child.log()}" for child in self.children)


@asynccontextmanager
async def _plane() -> AsyncIterator[Plane]:
    server = await EmbeddedNats().start()
    bus = await NatsBus.connect(server.url, name="test")
    await ensure(bus, layout(storage="memory", size=0.05))
    plane = Plane(server.url, bus, await PretendedRouter(bus).start())
    try:
        yield plane
    finally:
        for child in plane.children:
            child.signal(signal.SIGCONT)
            await child.stop()
            child.close()
        await bus.close()
        await server.stop()


async def test_a_detector_process_says_where_it_stands_and_ends_in_order() -> None:
    """One line of JSON, a metrics page, and exit status 0 on SIGTERM."""
    async with _plane() as plane:
        child = await plane.detector("a")
        assert child.ready["detector"] == "a"
        await plane.led_by("a")
        plane.router.ask(4)
        await eventually(lambda: plane.router.barred() == {HOT})
        address = child.ready["metrics"]

        def page() -> str:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5.0) as answer:
                text: str = answer.read().decode()
            return text

        deadline_s = now() + 10.0
        standing = 'multiplane_detector_standing{depth="4",model="m"} 1.0'
        while standing not in await asyncio.to_thread(page):
            assert now() < deadline_s
            await asyncio.sleep(0.1)
        assert "multiplane_detector_leading 1.0" in await asyncio.to_thread(page)
        child.signal(signal.SIGTERM)
        assert await child.wait() == 0, child.log()
        assert await plane.leader() == "", "the lease is released"


async def test_a_killed_leader_is_replaced_within_five_seconds() -> None:
    """Its verdict stands throughout, is renewed by the standby, and lifted by it."""
    async with _plane() as plane:
        first = await plane.detector("a")
        await plane.led_by("a")
        standby = await plane.detector("b")
        plane.router.ask(4)
        await eventually(lambda: plane.router.barred() == {HOT})
        await first.kill()
        assert await plane.led_by("b") < 5.0
        await steadily(
            lambda: plane.router.barred() == {HOT}, _after(11.0), within_s=30.0
        )  # longer than the verdict lasts without renewal
        plane.router.ask(1, holders=8)
        await eventually(lambda: plane.router.barred() == set())
        assert standby.running
        assert [type(each) for each in plane.router.told] == [HotspotRaised, HotspotCleared]


async def test_a_stopped_leader_says_nothing_when_it_goes_on() -> None:
    """SIGSTOP, longer than its lease; its successor's verdict is left alone."""
    async with _plane() as plane:
        first = await plane.detector("a")
        await plane.led_by("a")
        await plane.detector("b")
        plane.router.ask(4)
        await eventually(lambda: plane.router.barred() == {HOT})
        first.signal(signal.SIGSTOP)
        assert await plane.led_by("b") < 5.0
        plane.router.ask(1, holders=8)
        await eventually(lambda: plane.router.barred() == set())
        first.signal(signal.SIGCONT)
        await steadily(lambda: plane.router.barred() == set(), _after(5.0))
        assert await plane.leader() == "b"
        assert [type(each) for each in plane.router.told] == [HotspotRaised, HotspotCleared]
        assert first.running
        assert "leads no more" in first.log()


async def test_verdicts_expire_when_every_detector_is_gone_and_the_bus_goes_on() -> None:
    """After their time to live, at every router, the late one included."""
    async with _plane() as plane:
        child = await plane.detector("a")
        await plane.led_by("a")
        plane.router.ask(4)
        await eventually(lambda: plane.router.barred() == {HOT})
        await child.kill()
        late = await PretendedRouter(plane.bus, "router-b").start()
        await eventually(lambda: late.barred() == {HOT})
        await eventually(lambda: not plane.router.barred() and not late.barred(), 20.0)


async def test_a_wrong_setting_is_explained_in_a_line() -> None:
    """No traceback; exit status 2, as for any wrong usage."""
    process = await asyncio.create_subprocess_exec(
        *MULTIPLANE, "detector", "--ttl-s", "10", "--lease-ttl-s", "8",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode().startswith("multiplane: these settings do not go together: ttl_s=10.0")
    assert said.count(b"\n") == 1


def _after(seconds: float) -> Callable[[], bool]:
    """Return what is true once some time has passed."""
    until_s = now() + seconds
    return lambda: now() >= until_s
