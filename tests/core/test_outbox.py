"""What a router tells the others: in order, numbered, bounded in every way."""

from __future__ import annotations

from controlplane.bus.protocol import PAYLOAD_BYTES_MAX
from controlplane.core.outbox import BATCH_BYTES_MAX, Outbox
from schemas.bus import (
    CandidateColumns,
    Finished,
    FleetRows,
    Prefilled,
    PrefixLevel,
    Routed,
    RouterTotals,
)
from schemas.codec import encode


def test_events_leave_in_order_and_batches_are_numbered() -> None:
    """Nothing is skipped between two batches, and nothing is said where there is nothing."""
    outbox = Outbox("r", 7, 100)
    events = [Prefilled(f"q{number}", "i", number) for number in range(5)]
    for event in events:
        outbox.add(event)
    first, second = outbox.take(1.0, batch_max=3), outbox.take(2.0, batch_max=3)
    assert first is not None
    assert second is not None
    assert (first.epoch, first.seq, second.seq) == (7, 0, 1)
    assert [*first.events, *second.events] == events
    assert outbox.take(3.0) is None


def test_a_full_outbox_drops_its_oldest_events() -> None:
    """At the bound nothing is lost; beyond it the oldest go, and are counted."""
    outbox = Outbox("r", 7, 3)
    for number in range(4):
        outbox.add(Prefilled(f"q{number}", "i", number))
    assert (len(outbox), outbox.dropped) == (3, 1)
    batch = outbox.take(0.0)
    assert batch is not None
    assert [event.request_id for event in batch.events] == ["q1", "q2", "q3"]


def test_a_batch_stays_within_what_the_bus_takes() -> None:
    """Decisions over a large fleet are split over batches by their size, not only their number."""
    outbox = Outbox("r", 7, 1000)
    name = "instance-with-quite-a-long-name-0001"
    outbox.add(FleetRows(1, [name] * 1024, bytes(8192), bytes(4096)))
    numbers = bytes(4096)
    candidates = CandidateColumns(
        1,
        numbers,
        numbers,
        numbers,
        numbers,
        numbers,
        numbers,
        inexact=bytes(128),
        excluded={"health": bytes(128), "draining": bytes(128)},
        levels=[PrefixLevel(1 << 20, 1 << 63, 1 << 63)] * 40,
    )
    for number in range(60):
        outbox.add(Routed(f"q{number}", name, 1.0, candidates=candidates))
    outbox.add(Finished("q", name, "ok", 200, 1.0))
    outbox.add(RouterTotals({f"{name}-{number}": (9, 1 << 40, 1 << 40) for number in range(4096)}))
    taken = 0
    sizes = []
    while (batch := outbox.take(0.0)) is not None:
        taken += len(batch.events)
        sizes.append(len(encode(batch)))
    assert taken == 63
    assert max(sizes) <= BATCH_BYTES_MAX < PAYLOAD_BYTES_MAX


def test_an_event_that_is_too_large_still_leaves() -> None:
    """A single one is never held back, whatever its size."""
    outbox = Outbox("r", 7, 10)
    outbox.add(RouterTotals({f"instance-{number:06d}": (1, 1, 1) for number in range(20_000)}))
    outbox.add(RouterTotals())
    batch = outbox.take(0.0)
    assert batch is not None
    assert len(batch.events) == 1
