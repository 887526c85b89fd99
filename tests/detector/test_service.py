"""Detector processes on one bus: verdicts reach routers, and survive what happens to a leader."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from controlplane.bus.memory_bus import MemoryBus
from controlplane.core.detector_writes import slot_of
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.service import DetectorService
from controlplane.operator import Operator
from schemas import subjects
from schemas.bus import HotspotCleared, HotspotRaised, RouteBatch, RouterTotals
from schemas.codec import encode
from tests.detector.rig import CONFIG, HOT, MODEL, Rig, eventually, for_s, routed, steadily
from tests.detector.virtual import in_virtual_time, now

KEY = subjects.key(MODEL, slot_of(HOT))


@in_virtual_time
async def test_a_verdict_reaches_routers_and_the_audit_log_and_is_lifted() -> None:
    """The bucket says what to obey; the subject tells both ends, with the bucket's revision."""
    async with Rig() as rig:
        await rig.lead("a")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        rig.router.ask(1, holders=8)
        await eventually(lambda: rig.router.barred() == set())
        await eventually(lambda: len(rig.router.told) == 2)
        raised, cleared = rig.router.told
        assert isinstance(raised, HotspotRaised)
        assert isinstance(cleared, HotspotCleared)
        assert raised.revision == cleared.revision == 1
        assert (raised.share[1], raised.holders, raised.fleet) == (4, 1, 8)
        assert "8 of 8 instances hold it" in cleared.reason


@in_virtual_time
async def test_a_verdict_is_renewed_while_it_stands_and_expires_when_nobody_does() -> None:
    """Far beyond its time to live with a detector; not for long without one."""
    async with Rig() as rig:
        await rig.lead("a")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        await for_s(3 * CONFIG.detector.ttl_s, rig.router.barred)
        assert len(rig.router.told) == 1, "renewals are no news"
        await rig.kill("a")
        died_s = now()
        await eventually(lambda: not rig.router.barred())
        assert now() - died_s <= CONFIG.detector.ttl_s + 0.1


@in_virtual_time
async def test_a_late_router_finds_what_stands() -> None:
    """And routers agree on it."""
    async with Rig() as rig:
        await rig.lead("a")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        late = await rig.new_router("router-b")
        await eventually(lambda: late.barred() == {HOT})
        rig.router.ask(1, holders=8)
        await eventually(lambda: not late.barred() and not rig.router.barred())


@in_virtual_time
async def test_killing_the_leader_in_the_middle_of_an_alarm_loses_no_streak() -> None:
    """The standby has counted along: the next request of the class completes the row."""
    async with Rig() as rig:
        await rig.lead("a")
        standby = await rig.start("b")
        rig.router.ask(3, holders=2)
        await eventually(lambda: MODEL in standby.models)
        watched = standby.models[MODEL].detector
        rig.router.ask(2, holders=2)
        await eventually(lambda: watched.alarms and watched.alarms[HOT].streak == 3)
        await rig.kill("a")
        await eventually(lambda: standby.leading)
        rig.router.ask(1, holders=2)
        await eventually(lambda: rig.router.barred() == {HOT})
        (raised,) = rig.router.told
        assert isinstance(raised, HotspotRaised)
        assert raised.streak == 4


@pytest.mark.slow
@in_virtual_time
async def test_killing_the_leader_leaves_no_gap_in_a_standing_verdict() -> None:
    """Routers see it as barred throughout; the successor renews it, and lifts it."""
    async with Rig() as rig:
        await rig.lead("a")
        other = await rig.new_router("router-b")
        standby = await rig.start("b")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == other.barred() == {HOT})
        await rig.kill("a")
        died_s = now()

        def barred() -> bool:
            return rig.router.barred() == other.barred() == {HOT}

        await steadily(barred, lambda: standby.leading)
        assert now() - died_s < 5.0
        await eventually(lambda: standby.registrar.counts["written"] == 1, 0.5)  # renewed at once
        await for_s(3 * CONFIG.detector.ttl_s, barred)
        rig.router.ask(1, holders=8)
        await eventually(lambda: not rig.router.barred() and not other.barred())
        assert [type(each) for each in rig.router.told] == [HotspotRaised, HotspotCleared]


@in_virtual_time
async def test_a_leader_that_is_cut_off_says_nothing_more() -> None:
    """Its successor decides alone; back again, it follows, and there are never two leaders."""
    async with Rig() as rig:
        await rig.lead("a")
        standby = await rig.start("b")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        cut_off = rig.detectors["a"]
        rig.buses["a"].cut()
        for _ in range(4):
            cut_off.models[MODEL].detector.routed(routed(HOT + 1), now(), 0.0)
        assert cut_off.models[MODEL].waiting == 1, "it decides, and nobody hears of it"
        await steadily(lambda: len(rig.leaders) <= 1, lambda: standby.leading)
        rig.router.ask(1, holders=8)
        await eventually(lambda: not rig.router.barred())
        assert HOT in cut_off.models[MODEL].detector.standing, "it has not heard of it"
        rig.buses["a"].heal()
        await for_s(30.0, lambda: rig.leaders == ["b"] and not rig.router.barred())
        assert not cut_off.leading
        assert not cut_off.models[MODEL].detector.standing
        assert [type(each) for each in rig.router.told] == [HotspotRaised, HotspotCleared]


@in_virtual_time
async def test_the_only_detector_is_restarted() -> None:
    """Its new life adopts what stands, knows nothing of the window, and lifts it when it may."""
    async with Rig() as rig:
        await rig.lead("a")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        await rig.kill("a")
        again = await rig.start("a")
        await steadily(lambda: rig.router.barred() == {HOT}, lambda: again.leading)
        await for_s(3 * CONFIG.detector.ttl_s, lambda: rig.router.barred() == {HOT})
        rig.router.ask(3, holders=8)
        await eventually(lambda: not rig.router.barred())


@in_virtual_time
async def test_a_planned_stop_hands_over_at_once() -> None:
    """The lease is released, so nobody waits for it to run out."""
    async with Rig() as rig:
        first = await rig.lead("a")
        standby = await rig.start("b")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        stopped_s = now()
        await first.stop()
        await steadily(lambda: rig.router.barred() == {HOT}, lambda: standby.leading)
        assert now() - stopped_s < 0.5


async def _stopped_leader(rig: Rig) -> tuple[DetectorService, DetectorService]:
    """Return a leader that was stopped while HOT stood, and its successor, which renewed it.

    The stopped one believes that it leads still and that no time has passed.
    """
    stopped = await rig.lead("a")
    rig.router.ask(4)
    await eventually(lambda: rig.router.barred() == {HOT})
    for subscription in stopped._subscriptions:
        await subscription.stop()
    for task in stopped._tasks:
        task.cancel()
    await asyncio.gather(*stopped._tasks, return_exceptions=True)
    stopped.lease._until_s = float("inf")
    successor = await rig.lead("b")
    await eventually(lambda: successor.registrar.counts["written"] >= 1)
    return stopped, successor


@in_virtual_time
async def test_a_stopped_process_that_goes_on_cannot_change_what_stands() -> None:
    """Its write names a revision that is gone; it then has to prove its lease, and cannot."""
    async with Rig() as rig:
        stopped, _ = await _stopped_leader(rig)
        model = stopped.models[MODEL]
        model.detector.standing.clear()  # it was about to lift the verdict
        for _ in range(3):
            await stopped.registrar.settle([model])
        assert stopped.registrar.counts == {"written": 1, "fenced": 1, "too_late": 2}
        assert rig.router.barred() == {HOT}
        assert not await stopped.lease.step()


@in_virtual_time
async def test_a_verdict_of_a_stopped_process_that_goes_on_is_removed() -> None:
    """Nobody else had written that entry, so nothing fences it; the leader finds and lifts it."""
    async with Rig() as rig:
        stopped, successor = await _stopped_leader(rig)
        model, other = stopped.models[MODEL], HOT + 1
        model.seen.clear()
        model.detector.standing.clear()
        for _ in range(4):
            model.detector.routed(routed(other), now(), 0.0)
        await stopped.registrar.settle([model])
        assert stopped.registrar.counts == {"written": 2}, "HOT before, and now the other"
        await eventually(lambda: successor.models[MODEL].counts["foreign"] == 1)
        await eventually(lambda: rig.router.barred() == {HOT})
        lifted = rig.router.told[-1]
        assert isinstance(lifted, HotspotCleared)
        assert (lifted.key, "no longer leads" in lifted.reason) == (other, True)


@in_virtual_time
async def test_what_could_not_be_written_is_written_later() -> None:
    """A verdict that is decided while the bus is away stands once it is back."""
    async with Rig() as rig:
        leader = await rig.lead("a")
        rig.router.ask(3)
        await eventually(lambda: MODEL in leader.models and leader.models[MODEL].detector.alarms)
        rig.buses["a"].cut()
        changes = leader.models[MODEL].detector.routed(routed(), now(), 0.0)
        assert len(changes) == 1
        assert leader.models[MODEL].waiting == 1
        rig.buses["a"].heal()
        await eventually(lambda: rig.router.barred() == {HOT})
        assert leader.models[MODEL].waiting == 0


@in_virtual_time
async def test_what_the_server_lost_is_written_again() -> None:
    """A server that lost its files counts revisions anew; the leader does not mind."""
    async with Rig() as rig:
        leader = await rig.lead("a")
        standby = await rig.start("b")
        shelf = rig.broker.shelves[subjects.VERDICTS]
        operator = Operator(await rig.bus(), by="op")
        await operator.policy(MODEL, "linear")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        shelf.entries.clear()
        shelf._revision = 0
        for bus in rig.buses.values():
            bus.cut()
            bus.heal()
        await eventually(lambda: shelf.live(KEY) is not None)
        await eventually(lambda: HOT in standby.models[MODEL].detector.standing)
        assert HOT in leader.models[MODEL].detector.standing
        assert "policy" not in leader.models[MODEL].seen
        shelf._revision = 0
        await operator.policy(MODEL, "least_requests")
        await eventually(lambda: "policy" in leader.models[MODEL].seen)
        await eventually(lambda: "policy" in standby.models[MODEL].seen)
        rig.router.ask(1, holders=8)
        await eventually(lambda: not rig.router.barred())
        assert leader.registrar.counts["fenced"] == 0


@in_virtual_time
async def test_a_leader_that_was_overtaken_learns_what_was_written() -> None:
    """Somebody wrote its entry unseen: it is fenced once, reads, and goes on renewing."""
    async with Rig() as rig:
        leader = await rig.lead("a")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        await leader._subscriptions[1].stop()
        shelf = rig.broker.shelves[subjects.VERDICTS]
        entry = shelf.live(KEY)
        assert entry is not None
        shelf.write(KEY, entry.value)
        await for_s(3 * CONFIG.detector.ttl_s, lambda: rig.router.barred() == {HOT})
        assert leader.registrar.counts["fenced"] == 1
        assert leader.leading


@in_virtual_time
async def test_a_row_does_not_outlast_a_loss_of_the_bus() -> None:
    """What was missed meanwhile may have broken it."""
    async with Rig() as rig:
        leader = await rig.lead("a")
        rig.router.ask(3)
        await eventually(lambda: MODEL in leader.models)
        alarms = leader.models[MODEL].detector.alarms
        await eventually(lambda: alarms and alarms[HOT].streak == 1)
        rig.buses["a"].cut()
        rig.buses["a"].heal()
        assert alarms[HOT].streak == 0


@in_virtual_time
async def test_a_verdict_that_somebody_deletes_is_gone() -> None:
    """The leader does not insist; the class would have to make a longer row."""
    async with Rig() as rig:
        leader = await rig.lead("a")
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})
        bucket = await (await rig.bus()).bucket(subjects.VERDICTS)
        await bucket.delete(KEY)
        await eventually(lambda: not rig.router.barred())
        await eventually(lambda: not leader.models[MODEL].detector.standing)
        rig.router.ask(3)
        alarms = leader.models[MODEL].detector.alarms
        await eventually(lambda: HOT in alarms and alarms[HOT].streak == 3)
        assert not rig.router.barred()


@in_virtual_time
async def test_many_verdicts_stand_at_once() -> None:
    """Each class has its own entry."""
    async with Rig() as rig:
        await rig.lead("a")
        keys = {HOT + number for number in range(5)}
        for key in sorted(keys):
            rig.router.ask(6, key)
        await eventually(lambda: rig.router.barred() == keys)
        for key in sorted(keys):
            rig.router.ask(1, key, holders=8)
        await eventually(lambda: rig.router.barred() == set())


# --- bounds and nonsense


@in_virtual_time
async def test_messages_beyond_the_bound_are_dropped_oldest_first() -> None:
    """What fell out is counted, and shows as a loss in the router's stream."""
    async with Rig(msgspec.structs.replace(CONFIG, messages_max=10)) as rig:
        service = await rig.start("a")
        rig.router.ask(1)
        await eventually(lambda: MODEL in service.models)
        for _ in range(30):
            rig.router.say(RouterTotals())  # delivered in one turn of the loop
        await eventually(lambda: service.counts["messages"] == 11)
        assert service.counts["overflow"] == 20
        assert service.models[MODEL].streams.lost == 20
        assert service.waiting == 0


@in_virtual_time
async def test_models_beyond_the_bound_are_refused() -> None:
    """And counted; the others are watched."""
    async with Rig(msgspec.structs.replace(CONFIG, models_max=1)) as rig:
        service = await rig.start("a")
        rig.router.ask(1)
        await eventually(lambda: MODEL in service.models)
        bus = await rig.bus()
        batch = RouteBatch("x", 1, 0, 0.0, [routed()])
        bus.publish(subjects.route("another", "x"), encode(batch))
        await eventually(lambda: service.counts["models_refused"] == 1)
        assert list(service.models) == [MODEL]


@in_virtual_time
async def test_nonsense_on_the_bus_is_counted_and_harmless() -> None:
    """Unreadable messages, entries and keys stop nobody from leading."""
    async with Rig() as rig:
        bus: MemoryBus = await rig.bus()
        bucket = await bus.bucket(subjects.VERDICTS)
        await bucket.put("nonsense", b"x")
        await bucket.put(subjects.key(MODEL, "hotspot-001"), b"x")
        await bucket.put(subjects.key(MODEL, "policy"), b"x")
        service = await rig.lead("a")
        bus.publish(subjects.route(MODEL, "x"), b"x")
        bus.publish("mp.v1.route.m", b"x")
        await eventually(lambda: service.counts["undecodable"] == 5)
        assert service.models[MODEL].counts["unreadable"] == 2
        rig.router.ask(4)
        await eventually(lambda: rig.router.barred() == {HOT})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lease_renew_s": 2.6}, "lease_renew_s"),
        ({"tick_s": 0.0}, "tick_s"),
        ({"renew_s": 12.5}, "lapse at a takeover"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, float], named: str) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=named):
        DetectorServiceConfig(**fields)  # type: ignore[arg-type]
