"""The lease: one holder at a time, whatever the bus and the clock do."""

from __future__ import annotations

import pytest

from controlplane.bus.memory_bus import MemoryBroker, MemoryBus
from controlplane.bus.protocol import BusError
from controlplane.detector.lease import Lease
from schemas import subjects
from schemas.bus import LeaderLease, decode_leader
from schemas.codec import encode

TTL_S, MARGIN_S = 3.0, 0.5


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class Party:
    """Somebody who wants the lease."""

    def __init__(self, broker: MemoryBroker, clock: Clock, name: str) -> None:
        self.bus: MemoryBus = broker.bus()
        self.lease = Lease(self.bus, "detector", name, ttl_s=TTL_S, margin_s=MARGIN_S, clock=clock)

    async def step(self) -> bool:
        """Take a step."""
        return await self.lease.step()


@pytest.fixture
def clock() -> Clock:
    """The clock of everybody."""
    return Clock()


@pytest.fixture
def broker() -> MemoryBroker:
    """The server."""
    return MemoryBroker()


@pytest.fixture
def a(broker: MemoryBroker, clock: Clock) -> Party:
    """The first."""
    return Party(broker, clock, "a")


@pytest.fixture
def b(broker: MemoryBroker, clock: Clock) -> Party:
    """The second."""
    return Party(broker, clock, "b")


async def test_the_first_gets_it_and_says_who_it_is(
    a: Party, b: Party, broker: MemoryBroker
) -> None:
    """The entry names the holder; the second does not lead."""
    assert await a.step()
    assert not await b.step()
    entry = broker.shelves[subjects.LEADERS].live("detector")
    assert entry is not None
    assert entry.value is not None
    lease = decode_leader(entry.value)
    assert (lease.holder, lease.ttl_s) == ("a", TTL_S)
    assert (a.lease.left_s, b.lease.left_s) == (TTL_S - MARGIN_S, float("-inf"))


async def test_a_holder_that_renews_keeps_it(a: Party, b: Party, clock: Clock) -> None:
    """However long it lasts."""
    for _ in range(20):
        clock.now_s += 1.0
        assert await a.step()
        assert not await b.step()
    assert (a.lease.taken, a.lease.lost, b.lease.taken) == (1, 0, 0)


async def test_a_silent_holder_loses_it_after_its_time(a: Party, b: Party, clock: Clock) -> None:
    """The standby waits for the whole time that the lease claims, counted from when it saw it."""
    await a.step()
    clock.now_s += 1.0
    assert not await b.step()
    clock.now_s += TTL_S - 0.01
    assert not await b.step()
    clock.now_s += 0.01
    assert await b.step()
    assert not await a.step()
    assert (a.lease.lost, b.lease.taken) == (1, 1)


async def test_the_holder_stops_before_anybody_can_begin(a: Party, b: Party, clock: Clock) -> None:
    """At no moment may both lead, whenever each of them looks."""
    await a.step()
    await b.step()
    a.bus.cut()
    for _ in range(400):
        clock.now_s += 0.01
        await b.step()
        assert not (a.lease.left_s > 0 and b.lease.left_s > 0)
    assert b.lease.left_s > 0


async def test_a_holder_that_was_cut_off_goes_on_if_nobody_took_over(
    a: Party, clock: Clock
) -> None:
    """It may not act in between."""
    await a.step()
    a.bus.cut()
    clock.now_s += 10.0
    with pytest.raises(BusError):
        await a.step()
    assert a.lease.left_s <= 0
    a.bus.heal()
    assert await a.step()
    assert (a.lease.taken, a.lease.lost) == (1, 0)


async def test_a_holder_that_was_cut_off_finds_its_successor(
    a: Party, b: Party, clock: Clock
) -> None:
    """It gives in, and may take over again later."""
    await a.step()
    await b.step()
    a.bus.cut()
    clock.now_s += TTL_S
    assert await b.step()
    a.bus.heal()
    assert not await a.step()
    assert not await a.step()
    clock.now_s += TTL_S
    assert await a.step()
    assert not await b.step()


async def test_releasing_it_lets_the_other_lead_at_once(a: Party, b: Party) -> None:
    """A planned stop costs no waiting."""
    await a.step()
    assert not await b.step()
    await a.lease.release()
    assert a.lease.left_s <= 0
    assert await b.step()
    await a.lease.release()  # it is nobody's any more: nothing happens
    assert await b.step()


async def test_a_renewal_whose_answer_was_lost_is_recognised(
    a: Party, broker: MemoryBroker, clock: Clock
) -> None:
    """The entry has a revision that the holder does not know, and the holder's own name."""
    await a.step()
    broker.shelves[subjects.LEADERS].write("detector", encode(LeaderLease("a", 0.0, TTL_S)))
    clock.now_s += 1.0
    assert await a.step()
    assert a.lease.lost == 0


async def test_an_acquisition_whose_answer_was_lost_is_recognised(
    a: Party, broker: MemoryBroker
) -> None:
    """Nobody else can have the name, so the lease need not run out first."""
    broker.shelves[subjects.LEADERS].write("detector", encode(LeaderLease("a", 0.0, TTL_S)))
    assert await a.step()


async def test_of_two_standbys_one_takes_over(
    a: Party, b: Party, broker: MemoryBroker, clock: Clock
) -> None:
    """The revision decides; the other sees a new lease and waits again."""
    c = Party(broker, clock, "c")
    await a.step()
    await b.step()
    await c.step()
    clock.now_s += TTL_S
    assert await b.step()
    assert not await c.step()
    clock.now_s += TTL_S - 0.01
    assert not await c.step()


@pytest.mark.parametrize("value", [b"nonsense", encode(LeaderLease("x", 0.0, 1e9))])
async def test_a_broken_lease_does_not_block_for_good(
    a: Party, broker: MemoryBroker, clock: Clock, value: bytes
) -> None:
    """What cannot be read, or claims to last for ever, is taken over in the end."""
    broker.shelves[subjects.LEADERS].write("detector", value)
    assert not await a.step()
    clock.now_s += 60.0
    assert await a.step()


async def test_a_bus_that_does_not_answer_is_an_error_in_time(
    a: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that hangs must not hang the process beyond its lease."""
    import asyncio

    lease = Lease(a.bus, "detector", "a", ttl_s=0.02, margin_s=0.0)

    async def never(name: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(a.bus, "bucket", never)
    with pytest.raises(BusError, match="in time"):
        await lease.step()
