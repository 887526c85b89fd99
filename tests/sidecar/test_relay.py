"""The published block set: prefix-closed, deduplicated, coalesced, numbered."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.core.hashing import ROOT, pack_hashes, unpack_hashes
from schemas.bus import KvBatch, KvCleared, KvRemoved, KvStored
from sidecar.changes import Change, Cleared, Gone, Held
from sidecar.relay import Relay, RelayConfig
from tests.models.naive_relay import NaiveRelay, Receiver, snapshot_sets


def drain(relay: Relay, now_s: float = 0.0) -> list[KvBatch]:
    """Flush until nothing is left."""
    batches = []
    while (batch := relay.flush(now_s, 0.0)) is not None:
        batches.append(batch)
    return batches


def started(**config: int | float) -> Relay:
    """A relay whose first, clearing batch is out."""
    relay = Relay("i-1", 7, RelayConfig(**config))
    drain(relay)
    return relay


def test_an_epoch_begins_with_a_cleared_set_at_seq_0() -> None:
    """The first batch says that the set is empty, so that receivers can start from it."""
    (batch,) = drain(Relay("i-1", 7))
    assert (batch.instance_id, batch.epoch, batch.seq) == ("i-1", 7, 0)
    assert batch.ops == [KvCleared()]
    assert (batch.count, batch.digest) == (0, 0)


def test_a_chain_is_published_with_its_parent_count_and_digest() -> None:
    """A chain becomes one operation, parents first."""
    relay = started()
    relay.apply([Held(ROOT, [11, 22, 33])])
    (batch,) = drain(relay)
    assert batch.ops == [KvStored(pack_hashes([11, 22, 33]))]
    assert (batch.seq, batch.count, batch.digest) == (1, 3, 11 ^ 22 ^ 33)
    relay.apply([Held(22, [44])])
    assert drain(relay)[0].ops == [KvStored(pack_hashes([44]), parent=22)]


def test_a_block_behind_a_hole_is_withheld_until_the_parent_returns() -> None:
    """Removing a block withdraws what hangs from it; storing it again publishes all of it."""
    relay = started()
    relay.apply([Held(ROOT, [1, 2, 3, 4])])
    drain(relay)
    relay.apply([Gone([2])])
    (batch,) = drain(relay)
    assert sorted(unpack_hashes(batch.ops[0].hashes)) == [2, 3, 4]  # type: ignore[union-attr]
    assert batch.count == 1
    assert relay.withheld == 2
    relay.apply([Held(1, [2])])
    (batch,) = drain(relay)
    assert batch.ops == [KvStored(pack_hashes([2, 3, 4]), parent=1)]


def test_a_block_of_an_unknown_parent_waits_for_it() -> None:
    """A hole whose own parent is unknown is linked when it is stored."""
    relay = started()
    relay.apply([Held(2, [3, 4])])
    assert drain(relay) == []
    relay.apply([Held(ROOT, [1, 2])])
    assert drain(relay)[0].ops == [KvStored(pack_hashes([1, 2, 3, 4]))]
    relay.validate()


def test_what_came_and_went_within_a_window_is_never_sent() -> None:
    """Only the net effect of a window is published."""
    relay = started()
    relay.apply([Held(ROOT, [1, 2]), Gone([2, 1])])
    assert drain(relay) == []
    relay.apply([Held(ROOT, [1, 2])])
    drain(relay)
    relay.apply([Gone([2]), Gone([1]), Held(ROOT, [1, 2]), Held(ROOT, [1, 2])])
    assert drain(relay) == []
    relay.validate()


def test_an_idle_stream_has_a_heartbeat_with_count_and_digest() -> None:
    """A heartbeat is an empty batch with the next seq, no sooner than it is due."""
    relay = Relay("i-1", 7, RelayConfig(heartbeat_s=1.0))
    relay.apply([Held(ROOT, [5])])
    drain(relay, now_s=10.0)
    assert relay.flush(10.9, 0.0) is None
    batch = relay.flush(11.0, 123.0)
    assert batch == KvBatch("i-1", 7, 1, 123.0, [], 1, 5)
    assert relay.flush(11.5, 0.0) is None


def test_a_clear_replaces_the_pending_changes() -> None:
    """After a clear receivers hold nothing, whatever was pending, and new blocks follow it."""
    relay = started()
    relay.apply([Held(ROOT, [1, 2])])
    drain(relay)
    relay.apply([Gone([2]), Held(1, [3]), Cleared(), Held(ROOT, [9])])
    (batch,) = drain(relay)
    assert batch.ops == [KvCleared(), KvStored(pack_hashes([9]))]
    assert batch.count == 1


def test_batches_are_cut_at_their_bound_and_each_is_prefix_closed() -> None:
    """A change larger than a batch is sent as several, each with its own count and digest."""
    relay = started(batch_hashes_max=4)
    receiver = Receiver()
    receiver.epoch, receiver.seq = 7, 0
    relay.apply([Held(ROOT, [1, 2, 3, 4, 5, 6, 7]), Held(3, [10, 11, 12])])
    batches = drain(relay)
    assert len(batches) == 3
    for batch in batches:
        receiver.take(batch)
    relay.apply([Gone([1])])
    for batch in drain(relay):
        assert sum(len(unpack_hashes(op.hashes)) for op in batch.ops) <= 4  # type: ignore[union-attr]
        receiver.take(batch)
    assert receiver.sets == {0: set()}


def test_tiers_are_nested_and_published_only_once_used() -> None:
    """A block that moves to host memory leaves tier 0, and tier 1 holds what both serve."""
    relay = started()
    relay.apply([Held(ROOT, [1, 2, 3])])
    assert {op.tier for op in drain(relay)[0].ops} == {0}  # type: ignore[union-attr]
    relay.apply([Held(1, [2], tier=1)])
    (batch,) = drain(relay)
    removed, stored = batch.ops
    assert isinstance(removed, KvRemoved)
    assert (removed.tier, set(unpack_hashes(removed.hashes))) == (0, {2, 3})
    assert stored == KvStored(pack_hashes([1, 2, 3]), tier=1)
    assert batch.count == 1 + 3


def test_a_snapshot_is_cut_at_its_bound_and_belongs_to_the_last_batch() -> None:
    """Chunks hold parents before children and say whose state they are."""
    relay = started(chunk_hashes_max=2)
    relay.apply([Held(ROOT, [1, 2, 3, 4, 5])])
    chunks = relay.snapshot(0.0)
    (batch,) = drain(relay)
    assert [unpack_hashes(chunk.hashes) for chunk in chunks] == [[1, 2], [3, 4], [5]]
    assert {(chunk.epoch, chunk.seq) for chunk in chunks} == {(batch.epoch, batch.seq)}
    assert {(chunk.count, chunk.digest) for chunk in chunks} == {(batch.count, batch.digest)}


def test_the_snapshot_of_an_empty_set_is_one_empty_chunk() -> None:
    """There is an answer even before the first batch."""
    relay = Relay("i-1", 3)
    (chunk,) = relay.snapshot(0.0)
    assert (chunk.seq, chunk.chunks, chunk.hashes) == (0, 1, b"")
    assert [batch.seq for batch in drain(relay)] == [0]


def test_reset_begins_a_new_epoch_and_drops_what_was_not_sent() -> None:
    """Nothing of the old epoch is sent after a reset."""
    relay = started()
    relay.apply([Held(ROOT, [1])])
    relay.reset(8)
    relay.apply([Held(ROOT, [2])])
    (batch,) = drain(relay)
    assert (batch.epoch, batch.seq, batch.count) == (8, 0, 1)
    assert batch.ops == [KvCleared(), KvStored(pack_hashes([2]))]


def test_holes_are_forgotten_with_their_last_child() -> None:
    """Absent blocks leave no nodes behind."""
    relay = started()
    relay.apply([Held(ROOT, [1, 2, 3]), Held(2, [4])])
    drain(relay)
    for block in (1, 2, 4, 3):
        relay.apply([Gone([block])])
    drain(relay)
    assert len(relay._nodes) == 1
    relay.validate()


# A small forest: block n hangs from n // 3, so that there are branches and long paths.
BLOCKS = st.integers(min_value=1, max_value=60)
TIERS = st.sampled_from([0, 0, 0, 1, 2])


class RelayMachine(RuleBasedStateMachine):
    """The relay against its naive twin and a receiver that checks every batch."""

    @initialize(batch=st.integers(1, 12), chunk=st.integers(1, 7), tiered=st.booleans())
    def start(self, batch: int, chunk: int, tiered: bool) -> None:
        """Begin with small bounds, so that they are met."""
        config = RelayConfig(batch_hashes_max=batch, chunk_hashes_max=chunk)
        self.relay = Relay("i-1", 1, config)
        self.twin = NaiveRelay()
        self.receiver = Receiver()
        self.tiered = tiered

    def apply(self, change: Change) -> None:
        """Tell both."""
        self.relay.apply([change])
        self.twin.apply(change)

    @rule(start=BLOCKS, length=st.integers(1, 6), tier=TIERS)
    def store(self, start: int, length: int, tier: int) -> None:
        """Store a chain, in whatever order chains come."""
        chain = [start]
        while len(chain) < length and chain[-1] <= 60:
            chain.append(chain[-1] * 3)
        self.apply(Held(start // 3, chain, tier if self.tiered else 0))

    @rule(blocks=st.lists(BLOCKS, min_size=1, max_size=5))
    def remove(self, blocks: list[int]) -> None:
        """Remove blocks, present or not, in any order."""
        self.apply(Gone(blocks))

    @rule()
    def flush(self) -> None:
        """Send all that is pending."""
        for batch in drain(self.relay):
            self.receiver.take(batch)
        for tier in range(3):
            assert self.receiver.sets.get(tier, set()) == self.twin.published(tier)

    @rule(what=st.sampled_from(["clear", "reset", *["nothing"] * 8]))
    def upset(self, what: str) -> None:
        """Now and then all is lost."""
        if what == "clear":
            self.apply(Cleared())
        elif what == "reset":
            self.relay.reset(self.relay.epoch + 1)
            self.twin = NaiveRelay()

    @rule()
    def snapshot(self) -> None:
        """A snapshot equals what a receiver of all batches holds."""
        chunks = self.relay.snapshot(0.0)
        for batch in drain(self.relay):
            self.receiver.take(batch)
        held = {tier: blocks for tier, blocks in self.receiver.sets.items() if blocks}
        assert snapshot_sets(chunks) == held
        assert (chunks[0].epoch, chunks[0].seq) == (self.receiver.epoch, self.receiver.seq)

    @invariant()
    def agrees(self) -> None:
        """The published sets are the reachable blocks, at every step."""
        if not hasattr(self, "relay"):
            return
        self.relay.validate()
        for tier in range(3):
            assert self.relay.published(tier) == self.twin.published(tier)


RelayMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)


@pytest.mark.slow
class TestRelay(RelayMachine.TestCase):
    """Random stores, removals and clears."""
