"""Rebuilt block sets: as of any recent position they are what was published, or say they cannot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controlplane.audit.sets import UNKNOWN, BlockSets, Position
from controlplane.core.hashing import pack_hashes
from controlplane.core.index import PrefixIndex
from schemas.bus import KvBatch, KvCleared, KvOp, KvRemoved, KvStored, SnapshotChunk

BLOCKS = tuple(range(1, 9))


class Instance:
    """A sidecar, and what its set was after each batch.

    Attributes:
        past: (epoch, applied) → what the set held then.
    """

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.epoch = 1
        self.seq = -1
        self.blocks: set[int] = set()
        self.past: dict[tuple[int, int], frozenset[int]] = {}

    def batch(self, *ops: KvOp) -> KvBatch:
        """Return the next batch with these ops, which were applied already."""
        self.seq += 1
        self.past[self.epoch, self.seq + 1] = frozenset(self.blocks)
        digest = 0
        for block in self.blocks:
            digest ^= block
        return KvBatch(self.name, self.epoch, self.seq, 0.0, list(ops), len(self.blocks), digest)

    def store(self, *blocks: int) -> KvBatch:
        """Store blocks that it does not have."""
        new = [block for block in blocks if block not in self.blocks]
        self.blocks.update(new)
        return self.batch(KvStored(pack_hashes(new)))

    def remove(self, *blocks: int) -> KvBatch:
        """Remove those that it has."""
        old = [block for block in blocks if block in self.blocks]
        self.blocks.difference_update(old)
        return self.batch(KvRemoved(pack_hashes(old)))

    def clear(self) -> KvBatch:
        """Lose all."""
        self.blocks.clear()
        return self.batch(KvCleared())

    def restart(self) -> None:
        """Begin a new epoch."""
        self.epoch += 1
        self.seq = -1
        self.blocks.clear()

    def at(self, applied: int, epoch: int | None = None) -> Position:
        """Return a position in its stream."""
        return Position(self.name, epoch or self.epoch, applied)

    def snapshot(self) -> SnapshotChunk:
        """Return its set as of its last batch."""
        digest = 0
        for block in self.blocks:
            digest ^= block
        packed = pack_hashes(sorted(self.blocks))
        return SnapshotChunk(
            self.name, self.epoch, self.seq, 0, 1, packed, 0, len(self.blocks), digest
        )


def _held(sets: BlockSets, asked: Position) -> dict[int, int]:
    column = sets.held(BLOCKS, [asked])[:, 0]
    return dict(zip(BLOCKS, column.tolist(), strict=True))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear", "restart", "lose"]),
        st.sets(st.sampled_from(BLOCKS), min_size=1, max_size=4),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_sets_are_what_was_published_wherever_that_can_be_said(
    steps: list[tuple[str, set[int]]], late: bool
) -> None:
    """Of every position: 1 and 0 are true; in a record without gaps nothing is unknown."""
    instance, sets = Instance(), BlockSets()
    if late:
        instance.store(1, 2, 3)
    lossy = late
    for verb, blocks in steps:
        if verb == "restart":
            instance.restart()
        elif verb == "lose":
            instance.store(*blocks)
            lossy = True
        elif verb == "clear":
            assert not sets.batch(instance.clear(), 0.0).startswith("digest")
        else:
            act = instance.store if verb == "store" else instance.remove
            assert not sets.batch(act(*blocks), 0.0).startswith("digest")
    for (epoch, applied), truth in instance.past.items():
        asked = instance.at(applied, epoch)
        if not sets.reached(asked):
            continue
        for block, held in _held(sets, asked).items():
            assert held in (UNKNOWN, int(block in truth))
            assert lossy or held != UNKNOWN


def test_a_set_of_a_record_that_begins_later_becomes_known() -> None:
    """What changed is known at once, the rest once count and digest agree."""
    instance, sets = Instance(), BlockSets()
    instance.store(1, 2)
    assert sets.batch(instance.store(3), 0.0) == ""
    assert _held(sets, instance.at(2)) == {1: -1, 2: -1, 3: 1, **dict.fromkeys(range(4, 9), -1)}
    assert sets.batch(instance.remove(1, 2), 0.0) == ""
    assert _held(sets, instance.at(3)) == {3: 1, **dict.fromkeys((1, 2, 4, 5, 6, 7, 8), 0)}


def test_a_change_says_what_was_before_it() -> None:
    """Even where the record begins later: what is removed was there, what is stored was not."""
    instance, sets = Instance(), BlockSets()
    instance.store(1, 2)
    for batch in (instance.store(3), instance.remove(1)):
        sets.batch(batch, 0.0)
    assert _held(sets, instance.at(2))[1] == 1
    assert _held(sets, instance.at(2))[3] == 1


def test_a_snapshot_makes_a_set_known() -> None:
    """From its position on; before that the record still does not say."""
    instance, sets = Instance(), BlockSets()
    instance.store(1, 2)
    assert sets.snapshot(instance.snapshot(), 0.0) == ""
    sets.batch(instance.store(3), 0.0)
    assert _held(sets, instance.at(2)) == {1: 1, 2: 1, 3: 1, **dict.fromkeys(range(4, 9), 0)}
    assert _held(sets, instance.at(1))[3] == 0
    assert "differs" in sets.snapshot(
        SnapshotChunk("a", 1, 9, 0, 1, pack_hashes([1]), count=2), 0.0
    )
    assert "missing" in sets.snapshot(SnapshotChunk("a", 1, 9, 1, 2, b""), 0.0)


def test_a_snapshot_older_than_the_stream_changes_nothing() -> None:
    """It was asked for before what is already known."""
    instance, sets = Instance(), BlockSets()
    sets.batch(instance.store(1), 0.0)
    old = instance.snapshot()
    sets.batch(instance.store(2), 0.0)
    assert sets.snapshot(old, 0.0) == ""
    assert _held(sets, instance.at(2))[2] == 1


def test_a_batch_that_does_not_fit_its_digest_is_named() -> None:
    """And from then on nothing is claimed of the set."""
    instance, sets = Instance(), BlockSets()
    sets.batch(instance.store(1, 2), 0.0)
    good = instance.store(3)
    bad = KvBatch("a", 1, 1, 0.0, [KvStored(pack_hashes([4]))], good.count, good.digest)
    assert sets.batch(bad, 0.0).startswith("digest: applied as recorded, seq 1 leaves 3 blocks")
    assert _held(sets, instance.at(2))[1] == UNKNOWN
    assert _held(sets, instance.at(1))[1] == 1


def test_a_gap_is_named_and_what_lies_in_it_is_unknown() -> None:
    """With the number of batches that are missing."""
    instance, sets = Instance(), BlockSets()
    sets.batch(instance.store(1), 0.0)
    instance.store(2)
    instance.store(3)
    assert sets.batch(instance.store(4), 0.0).startswith("gap: 2 batches before seq 3")
    assert _held(sets, instance.at(1))[1] == 1
    assert _held(sets, instance.at(2))[1] == UNKNOWN
    assert _held(sets, instance.at(4)) == {4: 1, **dict.fromkeys((1, 2, 3, 5, 6, 7, 8), -1)}


def test_the_log_of_changes_is_bounded() -> None:
    """At the bound nothing is lost; beyond it old positions become unknown, and it is counted."""
    instance, sets = Instance(), BlockSets(changes_max=3)
    for block in (1, 2, 3):
        sets.batch(instance.store(block), 0.0)
    sets.batch(instance.batch(), 0.0)
    assert sets.forgotten == 0
    assert _held(sets, instance.at(1)) == {1: 1, **dict.fromkeys(range(2, 9), 0)}
    sets.batch(instance.store(4), 0.0)
    sets.batch(instance.batch(), 0.0)
    assert sets.forgotten == 1
    assert _held(sets, instance.at(1))[1] == 1
    sets.batch(instance.store(5), 0.0)
    sets.batch(instance.batch(), 0.0)
    assert _held(sets, instance.at(1))[1] == UNKNOWN
    assert _held(sets, instance.at(2))[2] == 1


def test_lives_that_ended_are_forgotten_with_the_log() -> None:
    """Their slots are given back, so that restarts cost no memory."""
    index = PrefixIndex(slots_max=4)
    instance, sets = Instance(), BlockSets(window_s=10.0, index=index)
    for epoch in range(30):
        sets.batch(instance.store(1, 2), 6.0 * epoch)
        instance.restart()
    assert index.slots <= 4
    assert len(index) <= 2


def test_a_full_index_is_said_and_not_papered_over() -> None:
    """Sets that do not fit are unknown."""
    instance, sets = Instance(), BlockSets(index=PrefixIndex(blocks_max=2))
    assert "exceed the memory" in sets.batch(instance.store(1, 2, 3), 0.0)
    assert _held(sets, instance.at(1))[1] == UNKNOWN


def test_tiers_are_kept_apart() -> None:
    """A block in a slower tier is not in the engine's own memory."""
    sets = BlockSets()
    batch = KvBatch("a", 1, 0, 0.0, [KvStored(pack_hashes([7]), tier=1)], 1, 7)
    assert sets.batch(batch, 0.0) == ""
    asked = [Position("a", 1, 1)]
    assert sets.held([7], asked, tier=0).tolist() == [[0]]
    assert sets.held([7], asked, tier=1).tolist() == [[1]]


def test_an_instance_that_published_nothing_has_nothing() -> None:
    """As of no batch at all; anything else is not in the record."""
    sets = BlockSets()
    asked = [Position("x", 0, 0), Position("x", 1, 3)]
    assert sets.held([1], asked).tolist() == [[0, UNKNOWN]]
    assert [sets.reached(position) for position in asked] == [True, False]
    assert np.all(sets.held([], asked) == np.zeros((0, 2)))
