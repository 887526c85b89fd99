"""The block sets of a model's instances, rebuilt from the `kv` stream, as of any recent position.

Theory of operation. A decision says of every instance which part of its block stream had been
applied: `(epoch, applied)`. Streams are read in the order in which they were stored, which is about
the order of events over all instances, but not the order in which a router took them in; so the
rebuilt sets are somewhat ahead of some positions and behind others. Who asks waits until they are
not behind (`reached`); what is ahead is undone by a log of recent changes.

A *life* is a stretch of an instance's stream over which its set is followed without a break:

    begins with                                      knows
    ----------------------------------------------   -------------------------------------------
    the first batch of an epoch, a cleared cache     everything: the set was empty
    a snapshot                                       everything, if its digest is right
    any other batch: the stream begins later, has    only blocks that changed since: a block that
      a gap, or a batch that does not fit its          was stored or removed; of all others it
      digest                                           cannot be said who holds them

Lives that ended are kept as long as the log. A set that is known in part becomes known when its
count and digest equal those that the batch states.

Bounds: `changes_max` logged changes, `window_s` seconds of log, the index's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.core.hashing import unpack_hashes
from controlplane.core.index import PrefixIndex
from controlplane.core.slots import slots_in
from schemas.bus import KvBatch, KvCleared, KvOp, KvStored, SnapshotChunk

Known = NDArray[np.int8]
"""1: holds it; 0: does not; UNKNOWN: the record does not say."""

UNKNOWN = -1
TIERS_MAX = 3


class Position(msgspec.Struct, frozen=True):
    """How much of an instance's block stream had been applied: `applied` batches of `epoch`."""

    instance_id: str
    epoch: int
    applied: int


class _Life:
    """One unbroken stretch of an instance's stream.

    Attributes:
        since: applied batches at its beginning.
        until: applied batches at its end, which came at `until_wall_s`; None while it lasts.
        floor: positions before this can no longer be asked for: their log is gone.
        held: index slot by tier: what is in the set.
        touched: index slot by tier: what changed; None where the whole set is known.
    """

    __slots__ = ("epoch", "floor", "held", "since", "touched", "until", "until_wall_s")

    def __init__(self, epoch: int, since: int, *, whole: bool) -> None:
        self.epoch = epoch
        self.since = self.floor = since
        self.until: int | None = None
        self.until_wall_s = 0.0
        self.held: dict[int, int] = {}
        self.touched: dict[int, int] | None = None if whole else {}


class _Stream:
    """What is known of one instance: its lives, oldest first, and how far its stream was read."""

    __slots__ = ("applied", "epoch", "lives", "shadow")

    def __init__(self) -> None:
        self.epoch = -1
        self.applied = 0
        self.lives: deque[_Life] = deque()
        self.shadow: _Life | None = None


class _Change(msgspec.Struct, frozen=True, gc=False):
    at_wall_s: float
    block: int
    life: _Life
    tier: int
    position: int
    held_before: bool


class BlockSets:
    """Rebuilt block sets of one model.

    Attributes:
        forgotten: logged changes that went before their time, for want of room.
    """

    def __init__(
        self, window_s: float = 60.0, changes_max: int = 1_000_000, index: PrefixIndex | None = None
    ) -> None:
        self.forgotten = 0
        self._window_s = window_s
        self._changes_max = changes_max
        self._index = PrefixIndex() if index is None else index
        self._streams: dict[str, _Stream] = {}
        self._looked_wall_s = 0.0
        self._log: deque[_Change] = deque()
        self._by_block: dict[int, list[_Change]] = {}

    # --- what is published

    def batch(self, batch: KvBatch, at_wall_s: float) -> str:
        """Apply a batch; return what is wrong with it, empty if nothing is."""
        self._expire(at_wall_s)
        stream = self._streams.setdefault(batch.instance_id, _Stream())
        position = batch.seq + 1
        if (batch.epoch, position) <= (stream.epoch, stream.applied):
            return ""  # stored twice, or the last words of an earlier epoch
        life = stream.lives[-1] if stream.lives else None
        wrong = ""
        if life is None or batch.epoch != stream.epoch or batch.seq != stream.applied:
            if life is not None and batch.epoch == stream.epoch:
                missing = batch.seq - stream.applied
                wrong = f"gap: {missing} batches before seq {batch.seq} were not recorded"
            life = self._begin(stream, batch.epoch, position, at_wall_s, whole=batch.seq == 0)
        stream.epoch, stream.applied = batch.epoch, position
        for op in batch.ops:
            if isinstance(op, KvCleared):
                life = self._begin(stream, batch.epoch, position, at_wall_s, whole=True)
            elif op.tier < TIERS_MAX and not self._apply(life, op, position, at_wall_s):
                self._begin(stream, batch.epoch, position, at_wall_s, whole=False)
                return "the sets of this record exceed the memory set aside for them"
        return self._judged(stream, life, batch, at_wall_s) or wrong

    def _judged(self, stream: _Stream, life: _Life, batch: KvBatch, at_wall_s: float) -> str:
        """Return how a set differs from what its batch states; what was unknown may be known."""
        sums = self._sums(life)
        if sums == (batch.count, batch.digest):
            self._drop(life.touched)
            life.touched = None
            return ""
        if life.touched is not None:
            return ""
        self._begin(stream, batch.epoch, batch.seq + 1, at_wall_s, whole=False)
        return (
            f"digest: applied as recorded, seq {batch.seq} leaves {sums[0]} blocks with digest "
            f"{sums[1]:016x}, but states {batch.count} with {batch.digest:016x}"
        )

    def _apply(self, life: _Life, op: KvOp, position: int, at_wall_s: float) -> bool:
        """Change a set; False if the index is full."""
        assert not isinstance(op, KvCleared)
        slot = self._slot(life.held, op.tier)
        stores = isinstance(op, KvStored)
        if slot is None or (stores and self._index.store(slot, op.hashes) is not None):
            return False
        if not stores:
            self._index.remove(slot, op.hashes)
        if life.touched is not None:
            touched = self._slot(life.touched, op.tier)
            if touched is None or self._index.store(touched, op.hashes) is not None:
                return False
        for block in unpack_hashes(op.hashes):
            change = _Change(at_wall_s, block, life, op.tier, position, not stores)
            self._log.append(change)
            self._by_block.setdefault(block, []).append(change)
        return True

    def snapshot(self, chunk: SnapshotChunk, at_wall_s: float) -> str:
        """Take a part of a snapshot, in order; return what is wrong, empty if nothing is."""
        stream = self._streams.setdefault(chunk.instance_id, _Stream())
        if chunk.index == 0:
            self._drop_life(stream.shadow)
            stream.shadow = _Life(chunk.epoch, chunk.seq + 1, whole=True)
        shadow = stream.shadow
        if shadow is None or (shadow.epoch, shadow.since) != (chunk.epoch, chunk.seq + 1):
            return "a part of a snapshot is missing"
        if chunk.hashes and chunk.tier < TIERS_MAX:
            slot = self._slot(shadow.held, chunk.tier)
            if slot is None or self._index.store(slot, chunk.hashes) is not None:
                return "the sets of this record exceed the memory set aside for them"
        if chunk.index + 1 < chunk.chunks:
            return ""
        stream.shadow = None
        if self._sums(shadow) != (chunk.count, chunk.digest):
            self._drop_life(shadow)
            return f"a snapshot as of seq {chunk.seq} differs from its own digest"
        if (chunk.epoch, chunk.seq + 1) < (stream.epoch, stream.applied):
            self._drop_life(shadow)
            return ""
        self._enter(stream, shadow, at_wall_s)
        stream.epoch, stream.applied = chunk.epoch, chunk.seq + 1
        return ""

    # --- questions

    def reached(self, asked: Position) -> bool:
        """Whether a stream was read up to a position, or is beyond its epoch."""
        stream = self._streams.get(asked.instance_id)
        return not asked.applied or (
            stream is not None and (stream.epoch, stream.applied) >= (asked.epoch, asked.applied)
        )

    def advanced(self, asked: Position) -> bool:
        """Whether anything of a stream was read beyond a position."""
        stream = self._streams.get(asked.instance_id)
        return stream is not None and (stream.epoch, stream.applied) > (asked.epoch, asked.applied)

    def held(self, blocks: Sequence[int], asked: Sequence[Position], tier: int = 0) -> Known:
        """Return (blocks, positions) who held which block, as of each position."""
        lives = [self._life(position) for position in asked]
        known: Known = np.zeros((len(blocks), len(asked)), np.int8)
        held = self._columns(blocks, [None if x is None else x.held.get(tier) for x in lives])
        partly = [None if x is None or x.touched is None else x.touched.get(tier) for x in lives]
        touched = self._columns(blocks, partly)
        whole = np.array([x is not None and x.touched is None for x in lives], np.bool_)
        known[:] = np.where(whole | touched, held, UNKNOWN)
        rows = {id(life): row for row, life in enumerate(lives) if life is not None}
        for number, block in enumerate(blocks):
            undone: set[int] = set()
            for change in self._by_block.get(block, ()):
                row = rows.get(id(change.life))
                if row is None or row in undone or change.tier != tier:
                    continue
                if change.position > asked[row].applied:
                    undone.add(row)
                    known[number, row] = change.held_before
        nothing = [x is None and not each.applied for x, each in zip(lives, asked, strict=True)]
        known[:, nothing] = 0
        return known

    def changed(self, block: int, asked: Position) -> tuple[bool, bool]:
        """Return whether a block was stored, and removed, at an instance since a position."""
        stored = removed = False
        life = self._life(asked)
        for change in self._by_block.get(block, ()):
            if change.life is life and change.position > asked.applied:
                stored = stored or not change.held_before
                removed = removed or change.held_before
        return stored, removed

    def ended(self, asked: Position) -> bool:
        """Whether the life that a position lies in is over, or not in the record."""
        stream = self._streams.get(asked.instance_id)
        return stream is None or not stream.lives or stream.lives[-1] is not self._life(asked)

    def _life(self, asked: Position) -> _Life | None:
        """Return the life that a position lies in; None if it is not in the record."""
        stream = self._streams.get(asked.instance_id)
        if stream is None or not asked.applied:
            return None
        for life in reversed(stream.lives):
            if life.epoch == asked.epoch and life.since <= asked.applied:
                ended = life.until is not None and asked.applied > life.until
                return None if ended or asked.applied < life.floor else life
        return None

    def _columns(self, blocks: Sequence[int], slots: list[int | None]) -> NDArray[np.bool_]:
        """Return (blocks, slots) which slots have which block."""
        numbers = np.array([-1 if slot is None else slot for slot in slots], np.int64)
        found = np.zeros((len(blocks), len(slots)), np.bool_)
        if (numbers < 0).all():
            return found
        every = np.zeros(self._index.slots + 1, np.bool_)
        for row, block in enumerate(blocks):
            holders = slots_in(self._index.holders(block))
            every[holders] = True
            found[row] = every[numbers]
            every[holders] = False
        return found

    # --- lives and their ends

    def _begin(
        self, stream: _Stream, epoch: int, since: int, at_wall_s: float, *, whole: bool
    ) -> _Life:
        life = _Life(epoch, since, whole=whole)
        self._enter(stream, life, at_wall_s)
        return life

    def _enter(self, stream: _Stream, life: _Life, at_wall_s: float) -> None:
        if stream.lives:
            stream.lives[-1].until = stream.applied
            stream.lives[-1].until_wall_s = at_wall_s
        stream.lives.append(life)

    def _slot(self, slots: dict[int, int], tier: int) -> int | None:
        slot = slots.get(tier)
        if slot is None:
            slot = self._index.acquire_slot()
            if slot is not None:
                self._index.publish_slot(slot)
                slots[tier] = slot
        return slot

    def _sums(self, life: _Life) -> tuple[int, int]:
        count = digest = 0
        for slot in life.held.values():
            count += self._index.count(slot)
            digest ^= self._index.digest(slot)
        return count, digest

    def _drop(self, slots: dict[int, int] | None) -> None:
        for slot in (slots or {}).values():
            self._index.release_slot(slot)

    def _drop_life(self, life: _Life | None) -> None:
        if life is not None:
            self._drop(life.held)
            self._drop(life.touched)

    def _expire(self, now_wall_s: float) -> None:
        """Forget changes and lives that are too old, and sweep what lives left behind."""
        oldest_s = now_wall_s - self._window_s
        log = self._log
        while log and (log[0].at_wall_s < oldest_s or len(log) > self._changes_max):
            change = log.popleft()
            self.forgotten += change.at_wall_s >= oldest_s
            change.life.floor = max(change.life.floor, change.position)
            others = self._by_block[change.block]
            assert others.pop(0) is change
            if not others:
                del self._by_block[change.block]
        if now_wall_s < self._looked_wall_s + 1.0:
            return
        self._looked_wall_s = now_wall_s
        for stream in self._streams.values():
            lives = stream.lives
            while len(lives) > 1 and lives[0].until_wall_s < oldest_s:
                self._drop_life(lives.popleft())
        self._index.sweep(20_000)
