"""A relay too simple to be wrong: it recomputes the published sets from scratch, every time."""

from __future__ import annotations

from functools import reduce
from operator import xor

from controlplane.core.hashing import ROOT, BlockHash, unpack_hashes
from schemas.bus import KvBatch, KvCleared, KvStored, SnapshotChunk
from sidecar.changes import ABSENT, Change, Cleared, Gone, Held


class NaiveRelay:
    """What is in memory, and which of it is reachable from the root."""

    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash] = {}
        self.tiers: dict[BlockHash, int] = {}
        self.used_tiers = {0}

    def apply(self, change: Change) -> None:
        """Take one change."""
        if isinstance(change, Cleared):
            self.tiers.clear()
            self.used_tiers = {0}
        elif isinstance(change, Gone):
            for block in change.hashes:
                self.tiers.pop(block, None)
        else:
            assert isinstance(change, Held)
            self.used_tiers.add(change.tier)
            parent = change.parent
            for block in change.hashes:
                self.parents[block] = parent
                self.tiers[block] = change.tier
                parent = block

    def published(self, tier: int) -> set[BlockHash]:
        """Blocks that are held, with all their ancestors, in tiers up to `tier`."""
        if tier not in self.used_tiers:
            return set()
        return {block for block in self.tiers if self._reachable(block, tier)}

    def _reachable(self, block: BlockHash, tier: int) -> bool:
        while block != ROOT:
            if self.tiers.get(block, ABSENT) > tier:
                return False
            block = self.parents[block]
        return True


class Receiver:
    """A consumer of one block stream that checks every promise of `schemas.bus`."""

    def __init__(self) -> None:
        self.epoch = -1
        self.seq = -1
        self.sets: dict[int, set[BlockHash]] = {}
        self.parents: dict[BlockHash, BlockHash] = {}

    def take(self, batch: KvBatch) -> None:
        """Apply a batch that must be the next one."""
        if batch.epoch != self.epoch:
            assert batch.epoch > self.epoch
            assert batch.seq == 0
            self.epoch, self.seq, self.sets = batch.epoch, -1, {}
        assert batch.seq == self.seq + 1
        self.seq = batch.seq
        for op in batch.ops:
            if isinstance(op, KvCleared):
                self.sets = {}
                continue
            held = self.sets.setdefault(op.tier, set())
            hashes = unpack_hashes(op.hashes)
            assert hashes
            if isinstance(op, KvStored):
                self._store(held, op.parent, hashes)
            else:
                assert held.issuperset(hashes), "only what was stored is removed"
                held.difference_update(hashes)
            assert all(self.parents[b] == ROOT or self.parents[b] in held for b in held)
        assert (batch.count, batch.digest) == self.sums()

    def _store(self, held: set[BlockHash], parent: int | None, hashes: list[BlockHash]) -> None:
        assert parent is None or parent in held
        above = ROOT if parent is None else parent
        for block in hashes:
            assert block not in held, "nothing is stored twice"
            held.add(block)
            self.parents[block] = above
            above = block

    def sums(self) -> tuple[int, int]:
        """Return (count, digest) over all tiers."""
        blocks = [block for held in self.sets.values() for block in held]
        return len(blocks), reduce(xor, blocks, 0)


def snapshot_sets(chunks: list[SnapshotChunk]) -> dict[int, set[BlockHash]]:
    """Return what a snapshot says, by tier; asserts that its chunks agree."""
    sets: dict[int, set[BlockHash]] = {}
    for index, chunk in enumerate(chunks):
        assert (chunk.index, chunk.chunks) == (index, len(chunks))
        hashes = unpack_hashes(chunk.hashes)
        held = sets.setdefault(chunk.tier, set())
        assert held.isdisjoint(hashes)
        held.update(hashes)
    blocks = [block for held in sets.values() for block in held]
    assert all((c.count, c.digest) == (len(blocks), reduce(xor, blocks, 0)) for c in chunks)
    return {tier: held for tier, held in sets.items() if held}
