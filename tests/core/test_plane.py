from __future__ import annotations

import pytest

from controlplane.core.dispatch import RouteRequest
from controlplane.core.effects import Alarm, FetchSnapshot, Note
from controlplane.core.events import (
    BreakerState,
    BusState,
    InstanceGone,
    SnapshotFailed,
    Tick,
)
from controlplane.core.load import Ledger
from controlplane.core.plane import Plane, PlaneConfig
from controlplane.core.stream import Trust
from schemas.bus import (
    Finished,
    FleetRows,
    KvStored,
    LoadReport,
    Prefilled,
    RouteBatch,
    Routed,
    RouterTotals,
)
from tests.core.plane_helpers import BLOCK, Publisher, plane, prompt, record, request


def _go(made: Plane, hashes: list[int], now_s: float = 1.0, **fields: object) -> str:
    """Decide and book; returns the chosen instance."""
    decision = made.requests.decide(request(hashes, **fields), now_s)
    assert decision is not None
    made.requests.book(decision, now_s, 0.0)
    return decision.instance.record.instance_id


def _pick(made: Plane, hashes: list[int], now_s: float = 1.0, **fields: object) -> str:
    """Decide only."""
    decision = made.requests.decide(request(hashes, **fields), now_s)
    assert decision is not None
    return decision.instance.record.instance_id


def test_a_plane_without_instances_decides_nothing() -> None:
    """With nobody to choose there is no decision, not an error."""
    assert plane().requests.decide(request(prompt(1)), 0.0) is None


def test_a_request_goes_where_its_prefix_is() -> None:
    """The instance that caches the prompt wins over idle ones that do not."""
    made, b = plane("a", "b", "c"), Publisher("b")
    b.batch()
    made.handle(b.store(prompt(1, 2, 3)), 0.5)
    assert _pick(made, prompt(1, 2, 3, 4)) == "b"


def test_a_busy_holder_loses_to_an_idle_instance() -> None:
    """P × (B + 1) weighs the hit against the batch: four requests outweigh a half hit."""
    made, a = plane("a", "b"), Publisher("a")
    a.batch()
    made.handle(a.store(prompt(1, 2)), 0.5)
    chosen = [_go(made, prompt(1, 2, 3, 4)) for _ in range(6)]
    assert chosen[0] == "a"
    assert "b" in chosen


def test_ties_rotate_over_idle_instances() -> None:
    """A burst of unknown prompts spreads evenly."""
    made = plane("a", "b", "c", "d")
    chosen = [_go(made, prompt(100 + number)) for number in range(8)]
    assert sorted(chosen) == sorted(["a", "b", "c", "d"] * 2)


def test_hits_never_cover_the_whole_prompt() -> None:
    """A prompt that is cached whole still has its last block computed by vLLM."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    hashes = prompt(1, 2, 3)
    made.handle(a.store(hashes), 0.5)
    decision = made.requests.decide(RouteRequest("r", 3 * BLOCK, hashes, BLOCK), 1.0)
    assert decision is not None
    assert decision.hit == 2 * BLOCK


def test_booking_and_finish_leave_the_ledger_empty_and_tell_the_others() -> None:
    """A request is told as routed, prefilled and finished, and finishing twice counts once."""
    made = plane("a")
    decision = made.requests.decide(request(prompt(1, 2)), 1.0)
    assert decision is not None
    ticket = made.requests.book(decision, 1.0, 10.0)
    assert (made.ledger.batch[0], made.ledger.queued[0]) == (1, 37)
    made.requests.first_byte(ticket, 0.2)
    assert (made.ledger.batch[0], made.ledger.queued[0]) == (1, 0)
    assert made.requests.finish(ticket, "ok", 200, 2.0, 11.0, cached_tokens=0)
    assert not made.requests.finish(ticket, "ok", 200, 2.0, 11.0)
    assert (made.ledger.batch[0], made.ledger.queued[0]) == (0, 0)
    assert not made.requests.tickets
    batch = made.outbox.take(0.0)
    assert batch is not None
    kinds = [type(event) for event in batch.events]
    assert kinds == [FleetRows, Routed, Prefilled, Finished]
    made.ledger.check([])


def test_prefill_progress_follows_the_block_stream() -> None:
    """An answer that is not streamed releases its queued tokens as its blocks appear."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    hashes = prompt(*range(1, 11))
    decision = made.requests.decide(request(hashes), 1.0)
    assert decision is not None
    made.requests.book(decision, 1.0, 0.0)
    assert made.ledger.queued[0] == 10 * BLOCK + 5
    made.handle(a.store(hashes[:4]), 1.1)
    assert made.ledger.queued[0] == 6 * BLOCK + 5
    made.handle(a.store(hashes), 1.2)
    assert made.ledger.queued[0] == 0
    assert made.ledger.batch[0] == 1


def test_progress_reaches_every_request_however_many_wait() -> None:
    """Requests whose blocks do not come do not keep others from being looked at."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    prompts = [prompt(*range(100 * number, 100 * number + 4)) for number in range(1, 81)]
    for hashes in prompts:
        _go(made, hashes)
    queued = made.ledger.queued[0]
    made.handle(a.store(prompts[-1]), 1.1)
    for _ in range(3):
        made.handle(a.store(prompt(7)[:1]), 1.2)
    assert made.ledger.queued[0] == queued - (4 * BLOCK + 5)


def test_a_snapshot_is_progress_too() -> None:
    """What was computed while batches were lost is released once the set is known again."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    made.handle(SnapshotFailed("a", "settle the join"), 1.0)
    hashes = prompt(1, 2, 3, 4)
    _go(made, hashes)
    a.store(hashes)
    made.handle(a.batch(), 1.1)
    for chunk in a.snapshot(chunks=2):
        made.handle(chunk, 1.2)
    assert made.ledger.queued[0] == 0


def test_totals_contain_the_progress_that_was_not_told() -> None:
    """What the totals have taken into account is not subtracted once more afterwards."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    hashes = prompt(*range(1, 11))
    decision = made.requests.decide(request(hashes), 1.0)
    assert decision is not None
    ticket = made.requests.book(decision, 1.0, 0.0)
    unlike = made.requests.decide(request(prompt(*range(50, 60))), 1.0)
    assert unlike is not None
    made.requests.book(unlike, 1.0, 0.0)
    other = Ledger("router-b")
    made.handle(a.store(hashes[:4]), 1.1)
    made.handle(Tick(), 1.2)
    _tell(made, other)
    assert other.of("a")["peer_queued"] == made.ledger.of("a")["own_queued"] == 16 * BLOCK + 10
    made.requests.finish(ticket, "ok", 200, 2.0, 0.0)
    _tell(made, other)
    assert other.of("a")["peer_queued"] == made.ledger.of("a")["own_queued"] == 10 * BLOCK + 5


def _tell(made: Plane, other: Ledger) -> None:
    batch = made.outbox.take(0.0)
    assert batch is not None
    other.peer_message(batch, 0.0)


def test_a_gap_leads_to_a_snapshot_and_back_to_exact() -> None:
    """A lost batch makes the set resyncing; the snapshot and what came meanwhile restore it."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    made.handle(a.store(prompt(1, 2)), 0.5)
    a.store(prompt(7, 8))
    made.handle(SnapshotFailed("a", "settle the one that joining asked for"), 0.5)
    effects = made.handle(a.store(prompt(3, 4)), 0.6)
    assert [e.reason for e in effects if isinstance(e, FetchSnapshot)] == [
        "gap: 1 batches before 3"
    ]
    instance = made.fleet.get("a")
    assert instance is not None
    assert instance.trust is Trust.RESYNCING
    for chunk in a.snapshot(chunks=3):
        made.handle(chunk, 0.7)
    made.handle(a.remove(prompt(3, 4)[1:]), 0.8)
    assert instance.trust is Trust.EXACT
    assert set(made.index.blocks(instance.slots[0])) == a.blocks
    made.index.check()


def test_a_wrong_digest_is_found_at_once() -> None:
    """A set that differs from the sidecar's in one block is resynced."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    a.blocks.update(prompt(5))
    lying = a.batch(KvStored(b""))
    made.handle(lying, 0.5)
    assert made.intake.counts["digest_mismatch"] == 1
    instance = made.fleet.get("a")
    assert instance is not None
    assert instance.trust is Trust.RESYNCING


def test_a_failed_snapshot_is_asked_for_again_later_each_time() -> None:
    """Retries back off, so that a dead sidecar is not stormed."""
    made = Plane("m", "router-a", 1, PlaneConfig())
    effects = made.handle(record("a"), 0.0)
    now_s = 0.0
    delays, alarms = [], []
    for _ in range(12):
        (asked,) = [effect for effect in effects if isinstance(effect, FetchSnapshot)]
        delays.append(asked.after_s)
        now_s += asked.after_s
        effects = made.handle(SnapshotFailed("a", "nobody"), now_s)
        alarms.append(any(isinstance(effect, Alarm) for effect in effects))
    assert alarms == [False] * 2 + [True] * 10, "an operator hears of it if it goes on"
    assert delays[-1] > 20.0 > 0.11 > delays[0]
    assert max(delays) <= 60.0


def test_a_missing_chunk_fails_the_snapshot() -> None:
    """A snapshot with a hole never becomes the set."""
    made, a = Plane("m", "router-a", 1), Publisher("a")
    a.batch()
    a.store(prompt(1, 2, 3, 4))
    made.handle(record("a"), 0.0)
    first, _, third = a.snapshot(chunks=3)
    made.handle(first, 0.1)
    effects = made.handle(third, 0.2)
    assert any(isinstance(effect, FetchSnapshot) for effect in effects)
    assert made.index.live == 0


def test_a_new_epoch_at_zero_starts_from_empty() -> None:
    """An engine that restarted has nothing cached, whatever it had before."""
    made, a = plane("a"), Publisher("a")
    a.batch()
    made.handle(a.store(prompt(1, 2)), 0.5)
    again = Publisher("a", epoch=2)
    made.handle(again.store(prompt(9)), 0.6)
    instance = made.fleet.get("a")
    assert instance is not None
    assert set(made.index.blocks(instance.slots[0])) == set(prompt(9))
    assert instance.trust is Trust.EXACT
    made.handle(a.store(prompt(3)), 0.7)
    assert set(made.index.blocks(instance.slots[0])) == set(prompt(9))


def test_silence_makes_stale_and_then_departed() -> None:
    """A silent instance's blocks stop counting first; later it is gone."""
    made, a = plane("a", "b", stale_s=5.0, departed_s=30.0), Publisher("a")
    a.batch()
    made.handle(a.store(prompt(1, 2, 3)), 0.0)
    made.handle(Tick(), 6.0)
    decision = made.requests.decide(request(prompt(1, 2, 3)), 6.0)
    assert decision is not None
    assert decision.choice.policy == "least_requests"
    assert decision.reason == "stale"
    notes = made.handle(Tick(), 31.0)
    assert [n.kind for n in notes if isinstance(n, Note)] == ["left", "left"]
    assert made.requests.decide(request(prompt(1)), 31.0) is None
    assert made.index.live == 0


def test_a_fleet_may_become_empty_and_full_again() -> None:
    """Time goes on without instances, whatever is told every few seconds."""
    made = plane("a")
    made.handle(record("a", state="stopped"), 1.0)
    for now_s in range(2, 40):
        made.handle(Tick(), float(now_s))
    made.handle(record("a"), 40.0)
    made.handle(Tick(), 41.0)
    assert _pick(made, prompt(1), 41.0) == "a"


def test_without_the_bus_nobody_departs_and_load_alone_decides() -> None:
    """The bus being down says nothing about instances: they stay, the policy degrades."""
    made = plane("a", "b", stale_s=5.0, departed_s=30.0, blind_s=60.0)
    made.handle(BusState(False), 1.0)
    made.handle(Tick(), 100.0)
    first = made.requests.decide(request(prompt(1)), 100.0)
    assert first is not None
    assert (first.choice.policy, first.reason) == ("least_requests", "stale")
    later = made.requests.decide(request(prompt(1)), 161.0)
    assert later is not None
    assert (later.choice.policy, later.reason) == ("round_robin", "blind")


def test_the_return_of_the_bus_resyncs_everybody_with_jitter() -> None:
    """After an outage each set is fetched anew, at different times."""
    names = [f"i{number}" for number in range(8)]
    made = plane(*names)
    for name in names:
        made.handle(SnapshotFailed(name, "settle the joins"), 0.1)
    made.handle(BusState(False), 1.0)
    effects = made.handle(BusState(True), 2.0)
    delays = {e.after_s for e in effects if isinstance(e, FetchSnapshot)}
    assert len(delays) == len(names)


def test_an_open_breaker_keeps_requests_away() -> None:
    """The data plane's own evidence counts like a drain."""
    made = plane("a", "b")
    made.handle(BreakerState("b", True), 0.0)
    assert {_pick(made, prompt(n)) for n in range(4)} == {"a"}
    made.handle(BreakerState("b", False), 0.0)
    assert {_pick(made, prompt(n)) for n in range(4)} == {"a", "b"}


def test_a_retry_avoids_what_was_tried() -> None:
    """An instance that failed the request is not chosen again while another is left."""
    made = plane("a", "b")
    assert {_pick(made, prompt(n), tried=("a",)) for n in range(4)} == {"b"}


def test_a_request_without_exact_tokens_goes_by_load() -> None:
    """Unknown tokens never pretend to be a hit."""
    made, a = plane("a", "b"), Publisher("a")
    a.batch()
    made.handle(a.store(prompt(1)), 0.1)
    decision = made.requests.decide(request([], exact=False, by_load="inexact:batch"), 1.0)
    assert decision is not None
    assert (decision.choice.policy, decision.reason) == ("least_requests", "inexact:batch")


def test_adapters_only_go_where_they_are_loaded() -> None:
    """A LoRA request is sent to an instance that lists the adapter."""
    made = plane("a", "b")
    made.handle(record("b", loras=["fr"]), 0.0)
    assert {_pick(made, prompt(n), lora="fr") for n in range(4)} == {"b"}


def test_the_engines_own_count_shows_foreign_load() -> None:
    """Requests that no router sent make an instance less attractive."""
    made = plane("a", "b")
    made.handle(LoadReport("a", 1, 0, 0.0, running=6, waiting=2), 0.0)
    assert made.ledger.of("a")["foreign"] == 8
    assert {_pick(made, prompt(n)) for n in range(4)} == {"b"}
    made.handle(LoadReport("a", 1, 1, 0.0, running=0, waiting=0), 0.1)
    assert made.ledger.of("a")["foreign"] == 0


def test_peers_bookings_count_and_vanish_with_their_lease() -> None:
    """Another router's requests weigh until it falls silent."""
    made = plane("a", "b")
    told = RouteBatch("router-b", 1, 0, 0.0, [RouterTotals({"a": (5, 100, 500)})])
    made.handle(told, 0.0)
    assert {_pick(made, prompt(n)) for n in range(4)} == {"b"}
    notes = made.handle(Tick(), 4.0)
    assert any(isinstance(n, Note) and n.kind == "router_silent" for n in notes)
    assert made.ledger.of("a")["peer_batch"] == 0


def test_totals_are_told_a_few_times_a_second() -> None:
    """Ticks publish this router's bookings, so that others heal."""
    made = plane("a")
    _go(made, prompt(1))
    made.outbox.take(0.0)
    for now_s in (10.0, 10.1, 10.2, 10.3):
        made.handle(Tick(), now_s)
    batch = made.outbox.take(0.0)
    assert batch is not None
    totals = [event for event in batch.events if isinstance(event, RouterTotals)]
    assert totals == [RouterTotals({"a": (1, 21, 21)})] * 2


def test_a_departed_instance_frees_its_row_for_the_last_one() -> None:
    """Rows stay dense, and load moves with its instance."""
    made = plane("a", "b", "c")
    c = Publisher("c")
    c.batch()
    made.handle(c.store(prompt(1, 2, 3)), 0.1)
    decision = made.requests.decide(request(prompt(1, 2, 3)), 0.2)
    assert decision is not None
    ticket = made.requests.book(decision, 0.2, 0.0)
    made.handle(InstanceGone("a"), 0.3)
    assert [i.record.instance_id for i in made.fleet] == ["c", "b"]
    assert made.ledger.batch[:2].tolist() == [1, 0]
    again = made.requests.decide(request(prompt(1, 2, 3)), 0.4)
    assert again is not None
    assert again.hit == 3 * BLOCK
    made.requests.finish(ticket, "ok", 200, 0.5, 0.0)
    made.ledger.check([])


def test_a_booking_outlives_its_instance() -> None:
    """A request whose instance left still ends once, and leaves nothing behind."""
    made = plane("a", "b")
    decision = made.requests.decide(request(prompt(1)), 0.2)
    assert decision is not None
    ticket = made.requests.book(decision, 0.2, 0.0)
    gone = decision.instance.record.instance_id
    made.handle(InstanceGone(gone), 0.3)
    assert made.requests.finish(ticket, "upstream_error", 502, 0.5, 0.0)
    made.ledger.check([])


def test_records_beyond_the_bound_are_refused_and_counted() -> None:
    """A fleet at its bound says so instead of growing."""
    made = plane("a", "b", instances_max=2)
    effects = made.handle(record("c"), 0.0)
    assert [e.kind for e in effects if isinstance(e, Alarm)] == ["fleet_full"]
    assert (len(made.fleet), made.fleet.refused) == (2, 1)


def test_a_full_outbox_drops_its_oldest() -> None:
    """A router that cannot publish keeps the newest events and counts the rest."""
    made = plane("a", route_events_max=3, audit_candidates=0.0)
    for number in range(5):
        _go(made, prompt(number))
    assert (len(made.outbox), made.outbox.dropped) == (3, 2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_candidates_are_recorded_as_the_audit_asks(share: float) -> None:
    """All candidates, or none of them, are in the event."""
    made = plane("a", "b", audit_candidates=share)
    _go(made, prompt(1))
    batch = made.outbox.take(0.0)
    assert batch is not None
    routed = batch.events[-1]
    assert isinstance(routed, Routed)
    assert (routed.candidates is not None) == bool(share)
    assert [type(event) for event in batch.events[:-1]] == [FleetRows] * bool(share)
    assert [c.depth_blocks for c in routed.classes] == [1]
