"""Tenants' records on the bus: bounds, and what is wrong with what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from controlplane.bus import MemoryBroker
from controlplane.bus.protocol import BusError
from router import prefix_store
from router.prefix_records import register
from router.prefix_store import ATTEMPTS_MAX, BURST, RATE_S, WAITING_MAX, Busy, PrefixStore
from router.prefixes import PrefixRegistry
from schemas import subjects
from schemas.bus import RegisteredPrefix, TenantPrefixes, decode_prefixes
from schemas.codec import encode
from tests.router.gated_bucket import GatedBus
from tests.router.service_rig import until

PREFIX = RegisteredPrefix("p1", "m", 40, 2, 1)


def once_more(record: TenantPrefixes) -> TenantPrefixes:
    """Registers a prefix."""
    return register(record, PREFIX)


class Stores:
    """Two routers' stores on one broker; the first one's operations wait for the test."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.broker = MemoryBroker()
        self.changed: list[str] = []
        self.gated = GatedBus(self.broker.bus(), lambda key, value: None)
        self.bus = self.broker.bus()
        self.registries = PrefixRegistry(), PrefixRegistry()
        kinds: tuple[Any, Any] = (self.gated, self.bus)
        self.slow, self.quick = (
            PrefixStore(bus, registry, self.changed.append, pause_s=0.0, clock=clock)
            for bus, registry in zip(kinds, self.registries, strict=True)
        )

    async def start(self) -> Stores:
        """Starts both."""
        await self.slow.start()
        await self.quick.start()
        return self

    async def answer(self, verdict: str) -> None:
        """Lets the next operation of the first one go so."""
        await until(lambda: self.gated.gates)
        self.gated.gates.popleft().set_result(verdict)

    def stored(self, tenant: str = "a") -> TenantPrefixes:
        """Returns what stands on the bus."""
        entry = self.broker.shelves[subjects.PREFIXES].live(tenant)
        assert entry is not None
        assert entry.value is not None
        return decode_prefixes(entry.value)


async def test_a_change_whose_answer_is_lost_counts_once() -> None:
    """The next reading finds its mark; others have changed the record meanwhile."""
    stores = await Stores().start()
    change = asyncio.create_task(stores.slow.change("a", "mine", once_more))
    await stores.answer("done")
    await stores.answer("lost")
    await until(lambda: stores.gated.gates)
    await stores.quick.change("a", "theirs", once_more)
    await stores.answer("done")
    record = await change
    assert record.prefixes[0].references == stores.stored().prefixes[0].references == 2
    assert +stores.slow.counts == {"retried": 1, "done": 1}


async def test_attempts_are_bounded() -> None:
    """Who is always too late is told so in the end, and nothing has changed."""
    stores = await Stores().start()
    change = asyncio.create_task(stores.slow.change("a", "mine", once_more))
    for number in range(ATTEMPTS_MAX):
        await stores.answer("done")
        await until(lambda: stores.gated.gates)
        await stores.quick.change("a", f"other {number}", lambda record: record)
        await stores.answer("done")
    with pytest.raises(BusError, match="others change it all the time"):
        await change
    assert +stores.slow.counts == {"conflict": ATTEMPTS_MAX, "failed": 1}
    assert stores.stored().prefixes == []


async def test_a_change_takes_its_time_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus that does not answer is given up."""
    monkeypatch.setattr(prefix_store, "CHANGE_S_MAX", 0.01)
    stores = await Stores().start()
    with pytest.raises(BusError, match=r"within 0\.01 s"):
        await stores.slow.change("a", "mine", once_more)
    assert +stores.slow.counts == {"failed": 1}


async def test_callers_of_a_tenant_take_turns_and_are_bounded() -> None:
    """Another tenant's do not wait for them."""
    stores = await Stores().start()
    waiting = [
        asyncio.create_task(stores.slow.change("a", f"c{number}", once_more))
        for number in range(WAITING_MAX)
    ]
    await until(lambda: stores.gated.gates)
    with pytest.raises(Busy, match="32 requests about the prefixes of 'a'"):
        await stores.slow.read("a")
    other = asyncio.create_task(stores.slow.change("b", "c", once_more))
    await until(lambda: len(stores.gated.gates) == 2)
    while not all(task.done() for task in (*waiting, other)):
        await stores.answer("done")
        await asyncio.sleep(0)
    assert stores.stored().prefixes[0].references == WAITING_MAX
    assert stores.stored("b").prefixes[0].references == 1
    assert not stores.slow._locks


async def test_a_tenant_asks_so_often_at_the_most() -> None:
    """Others are not concerned, and with time there is room again."""
    now = [0.0]
    stores = await Stores(lambda: now[0]).start()
    for _ in range(int(BURST)):
        await stores.quick.read("a")
    for ask in (stores.quick.read("a"), stores.quick.change("a", "1", once_more)):
        with pytest.raises(Busy, match="50 times a second"):
            await ask
    await stores.quick.read("b")
    now[0] = 1.0 / RATE_S
    await stores.quick.change("a", "1", once_more)


async def test_what_others_have_done_meanwhile_is_not_done_again() -> None:
    """All routers find the same due at the same time; one writes it."""
    stores = await Stores().start()
    change = asyncio.create_task(
        stores.slow.change("a", "mine", once_more, lambda record, _: not record.prefixes)
    )
    await stores.answer("done")
    await until(lambda: stores.gated.gates)
    await stores.quick.change("a", "theirs", once_more)
    await stores.answer("done")
    await stores.answer("done")
    assert (await change).changes == ["theirs"]
    assert stores.stored().version == 1


async def test_ages_are_written_down_and_go_on_at_another_router() -> None:
    """Without a common clock: each adds what has passed since it learnt of the record."""
    now = [100.0]
    stores = await Stores(lambda: now[0]).start()
    await stores.quick.change("a", "1", once_more)
    await until(lambda: stores.registries[0].knows("a"))
    now[0] = 130.0
    record = await stores.quick.change("a", "2", lambda record: record)
    assert record.prefixes[0].idle_s == 30.0
    await until(lambda: stores.registries[0].record("a").version == 2)
    now[0] = 140.0
    reading = asyncio.create_task(stores.slow.read("a"))
    await stores.answer("done")
    assert (await reading).prefixes[0].idle_s == 40.0


async def test_time_without_the_bus_does_not_count() -> None:
    """And what may have been missed is read once it is back."""
    now = [0.0]
    stores = await Stores(lambda: now[0]).start()
    await stores.quick.change("a", "1", once_more)
    stores.bus.cut()
    now[0] = 1000.0
    with pytest.raises(BusError):
        await stores.quick.read("a")
    stores.bus.heal()
    assert stores.quick.stale == {"a"}
    now[0] = 1010.0
    assert (await stores.quick.read("a")).prefixes[0].idle_s == 10.0
    await stores.quick.refresh(0)
    assert not stores.quick.stale


@pytest.mark.parametrize(
    "value", [b"junk", encode(TenantPrefixes("b", 9, [PREFIX]))], ids=["junk", "another's"]
)
async def test_what_cannot_be_read_is_counted(value: bytes) -> None:
    """It changes nothing that is known, and the next change replaces it."""
    stores = await Stores().start()
    await stores.quick.change("a", "1", once_more)
    await (await stores.bus.bucket(subjects.PREFIXES)).put("a", value)
    await until(lambda: stores.quick.counts["unreadable"] == 1)
    assert stores.registries[1].record("a").version == 1
    assert (await stores.quick.change("a", "2", once_more)).prefixes[0].references == 2
    assert stores.stored().version == 2


async def test_a_tenant_that_cannot_be_known_here_is_read_and_changed_all_the_same() -> None:
    """It is only that nobody counts its uses at this router."""
    stores = await Stores().start()
    quick = PrefixStore(stores.bus, PrefixRegistry(tenants_max=0), stores.changed.append)
    await quick.start()
    await quick.change("a", "1", once_more)
    assert (await quick.change("a", "2", once_more)).prefixes[0].references == 2
    assert (await quick.read("a")).prefixes[0].references == 2
    await quick.stop()
    await until(lambda: stores.changed == ["a"] * 4)  # the other two hear of two changes


async def test_before_it_has_started_nothing_can_be_done() -> None:
    """A caller that is too early is told so."""
    with pytest.raises(BusError, match="starting"):
        await Stores().quick.read("a")
