"""The authoritative mirror of one engine's prefix cache (one data-parallel rank).

Theory of operation. vLLM names blocks by its own hashes (`EngineBlockHash`), which are opaque here:
they link removals and parents to earlier stores, no more. From a store's token ids and extras the
mirror computes our `BlockHash` of each block, and keeps

    names      engine's name → (our hash, parent's hash), for blocks that some memory holds,
    departed   the same for blocks lately lost, bounded: they can still be parents,
    memories   place → copies of each block (`memories.Holding`),
    orphans    blocks whose parent is unknown (`orphans.Orphans`),

and reports every change of the fastest tier that serves a block. Two engine names may mean the same
block of ours (the engine also hashes things that no request shows, such as the path of an adapter);
then their copies add up.

Only whole blocks of full-attention groups can be reused block by block, so only those are mirrored:
stores of sliding-window, Mamba and similar groups, of other block sizes, or with another number of
tokens than their blocks have room for, are counted and skipped. A store without tokens (as
offloading tiers send it) is taken if the block is known by name.

Every event has one `Outcome`, and nothing an engine sends raises. `silent_batches` counts batches
since the last one of which anything applied: a mirror that takes in events and applies none is
blind, whatever the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec

from controlplane.core.hashing import ROOT, BlockHash, chain, event_extras, hash_block, pack_tokens
from schemas.vllm_events import (
    BlockRemoved,
    BlockStored,
    EngineBlockHash,
    Event,
    EventBatch,
)
from sidecar.changes import ABSENT, Change, Cleared, Gone, Held
from sidecar.memories import GPU, Holding, Memories, Place
from sidecar.orphans import Orphans

_REUSABLE_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_STALE_NAMES_MAX = 4096
_PLACES_MAX = 256


class Outcome(StrEnum):
    """What became of one event."""

    STORED = "stored"
    REPEATED = "repeated"  # a store of what the place holds already
    REMOVED = "removed"
    CLEARED = "cleared"
    UNKNOWN_PARENT = "unknown_parent"
    UNKNOWN_REMOVAL = "unknown_removal"
    SPARSE = "sparse"  # not a full-attention group, or tokens that do not fill the blocks
    ODD_SIZE = "odd_size"  # another block size than the first store had
    PLACEHOLDER = "placeholder"  # no tokens, and not known by name
    MALFORMED = "malformed"
    REJECTED = "rejected"  # not even decoded
    OVER_BOUND = "over_bound"


APPLIED = frozenset({Outcome.STORED, Outcome.REPEATED, Outcome.REMOVED, Outcome.CLEARED})


class MirrorConfig(msgspec.Struct, frozen=True):
    """Bounds of a mirror.

    Attributes:
        blocks_max: blocks held; more are not taken in (an engine has far fewer).
        departed_max: names of lost blocks remembered, up to twice as many for a while, for
            children and tiers that come later.
        orphans_max: blocks kept whose parent is unknown.
        silent_batches_max: batches in a row of which nothing applies before that is an alarm.
    """

    blocks_max: int = 8_000_000
    departed_max: int = 65_536
    orphans_max: int = 65_536
    silent_batches_max: int = 50


class Mirror:
    """One engine's blocks.

    Attributes:
        block_size: tokens a block, as the engine's events have it; None before the first store.
        capacity_blocks: what the engine's own memory has room for, None if not known.
        complete: whether no block can be held that the mirror does not know of.
        outcomes: events by what became of them.
        silent_batches: batches since the last one of which anything applied.
        unknown_removals: blocks removed that were not known.
        doubts_trimmed: copies given up for want of room.
    """

    def __init__(self, config: MirrorConfig | None = None) -> None:
        self.config = config or MirrorConfig()
        self.block_size: int | None = None
        self.capacity_blocks: int | None = None
        self.complete = True
        self.outcomes: Counter[Outcome] = Counter()
        self.silent_batches = 0
        self.unknown_removals = 0
        self.doubts_trimmed = 0
        self.orphans = Orphans(self.config.orphans_max)
        self._skipped_groups: set[int | None] = set()
        self._places: dict[tuple[str | None, int | None, str | None], Place] = {}
        self._forget()

    def _forget(self) -> None:
        self._names: dict[EngineBlockHash, tuple[BlockHash, BlockHash]] = {}
        self._departed: dict[EngineBlockHash, tuple[BlockHash, BlockHash]] = {}
        self._memories = Memories()
        self.orphans.clear()

    def reset(self, *, complete: bool) -> list[Change]:
        """Forget everything: another engine process begins, or what is known cannot be trusted.

        Args:
            complete: whether every event of the engine from now on back to its start will come.
        """
        self._forget()
        self._skipped_groups.clear()
        self.block_size = None
        self.complete = complete
        self.silent_batches = 0
        return [Cleared()]

    @property
    def blind(self) -> bool:
        """Whether events arrive and none applies."""
        return self.silent_batches >= self.config.silent_batches_max

    def __len__(self) -> int:
        """Return how many blocks are known by name."""
        return len(self._names)

    # --- events in, changes out

    def apply(self, batch: EventBatch) -> list[Change]:
        """Take one decoded batch; returns what it changes, in order."""
        changes: list[Change] = []
        applied = False
        for event in batch.events:
            outcome = self._apply(event, changes)
            self.outcomes[outcome] += 1
            applied = applied or outcome in APPLIED
        self.outcomes[Outcome.REJECTED] += batch.rejected
        if applied:
            self.silent_batches = 0
        elif batch.events or batch.rejected:
            self.silent_batches += 1
        self._trim(changes)
        self._sweep_names()
        return changes

    def _apply(self, event: Event, changes: list[Change]) -> Outcome:
        if isinstance(event, BlockStored):
            return self._store(event, changes)
        if isinstance(event, BlockRemoved):
            return self._remove(event, changes)
        self._forget()
        self.complete = True
        changes.append(Cleared())
        return Outcome.CLEARED

    def _place_of(self, event: BlockStored | BlockRemoved) -> Place:
        raw = (event.medium, event.group_idx, event.ownership)
        place = self._places.get(raw)
        if place is None:
            place = Place((event.medium or GPU).upper(), event.group_idx, event.ownership)
            if len(self._places) < _PLACES_MAX:
                self._places[raw] = place
        return place

    # --- stores

    def _store(self, event: BlockStored, changes: list[Change]) -> Outcome:
        place = self._place_of(event)
        if event.kv_cache_spec_kind not in _REUSABLE_KINDS:
            if place.group is not None and len(self._skipped_groups) < _PLACES_MAX:
                self._skipped_groups.add(place.group)
            return Outcome.SPARSE
        if place.group in self._skipped_groups:
            return Outcome.SPARSE
        if self._memories.at(place) is None and len(self._memories.holdings) >= _PLACES_MAX:
            return Outcome.OVER_BOUND
        if not event.token_ids and event.block_hashes:
            return self._store_by_name(event, place, changes)
        blocks = len(event.block_hashes)
        if not blocks or len(event.token_ids) != blocks * event.block_size:
            return Outcome.SPARSE
        if self.block_size is None:
            self.block_size = event.block_size
        elif event.block_size != self.block_size:
            return Outcome.ODD_SIZE
        if len(self._names) + blocks > self.config.blocks_max:
            return Outcome.OVER_BOUND
        try:
            parent = self._parent_of(event)
            if parent is None:
                self._keep_orphans(event, place)
                return Outcome.UNKNOWN_PARENT
            hashes = self._hashes_of(event, parent)
        except (OverflowError, TypeError, ValueError, RecursionError):
            return Outcome.MALFORMED
        self._learn(event.block_hashes, parent, hashes)
        from_root = parent == ROOT
        changed = self._add(place, parent, hashes, changes, from_root=from_root)
        if len(self.orphans):
            self._adopt(event.block_hashes, changes, from_root=from_root)
        return Outcome.STORED if changed else Outcome.REPEATED

    def _parent_of(self, event: BlockStored) -> BlockHash | None:
        """Return the hash that a store hangs from, None if it is not known."""
        if event.parent_block_hash is None:
            return ROOT
        known = self._find(event.parent_block_hash)
        return known[0] if known else None

    def _find(self, name: EngineBlockHash) -> tuple[BlockHash, BlockHash] | None:
        return self._names.get(name) or self._departed.get(name)

    def _hashes_of(self, event: BlockStored, parent: BlockHash) -> list[BlockHash]:
        """Return our hashes of a store's blocks. Raises what hashing raises for odd values."""
        names = self._names
        known = [names.get(name) for name in event.block_hashes]
        tokens = pack_tokens(event.token_ids)
        plain = event.lora_name is None and not any(event.extra_keys or ())
        if plain and not any(known):
            return chain(tokens, event.block_size, parent)
        keys = _keys_of(event)
        step = 4 * event.block_size
        hashes: list[BlockHash] = []
        for at, entry in enumerate(known):
            if entry is None:
                extras = event_extras(event.lora_name, keys[at])
                parent = hash_block(tokens[at * step : (at + 1) * step], extras, parent)
            else:
                parent = entry[0]
            hashes.append(parent)
        return hashes

    def _learn(
        self, names: Sequence[EngineBlockHash], parent: BlockHash, hashes: Sequence[BlockHash]
    ) -> None:
        """Remember the engine's names of a chain of blocks."""
        known = self._names
        for name, block in zip(names, hashes, strict=True):
            if name not in known:
                known[name] = (block, parent)
            parent = block

    def _store_by_name(self, event: BlockStored, place: Place, changes: list[Change]) -> Outcome:
        """Take a store without tokens: of the blocks that are known by name."""
        stored = known_blocks = 0
        for name in event.block_hashes:
            known = self._find(name)
            if known is None:
                continue
            known_blocks += 1
            self._names.setdefault(name, known)
            stored += self._add(place, known[1], [known[0]], changes, from_root=False)
        if not known_blocks:
            return Outcome.PLACEHOLDER
        return Outcome.STORED if stored else Outcome.REPEATED

    def _add(
        self,
        place: Place,
        parent: BlockHash,
        hashes: list[BlockHash],
        changes: list[Change],
        *,
        from_root: bool,
    ) -> bool:
        """Add a copy of each block of a chain; returns whether any was not there before."""
        holding = self._memories.at(place)
        if holding is None:
            holding = self._open(place, changes)
        fresh = holding.add(hashes, from_root=from_root)
        if not fresh:
            return False
        if self._memories.plain:
            changes.append(Held(parent, hashes, place.tier))
            return True
        joined = set(fresh)
        for block in hashes:
            if block in joined:
                tier = self._memories.tier_of(block)
                if tier != ABSENT:
                    changes.append(Held(parent, [block], tier))
            parent = block
        return True

    def _open(self, place: Place, changes: list[Change]) -> Holding:
        """Begin to mirror a place; what its medium cannot serve without it changes its tier."""
        grows = any(
            known.medium == place.medium and known.group != place.group
            for known in self._memories.holdings
        )
        holding = self._memories.open(place)
        if grows:  # once for each further group: what was stored so far lacks its part there
            for block, parent in self._names.values():
                tier = self._memories.tier_of(block)
                changes.append(Gone([block]) if tier == ABSENT else Held(parent, [block], tier))
        return holding

    # --- orphans

    def _keep_orphans(self, event: BlockStored, place: Place) -> None:
        parent = event.parent_block_hash
        assert parent is not None
        tokens = pack_tokens(event.token_ids)
        keys = _keys_of(event)
        step = 4 * event.block_size
        for at, name in enumerate(event.block_hashes):
            extras = event_extras(event.lora_name, keys[at])
            self.orphans.keep(name, parent, tokens[at * step : (at + 1) * step], extras, place)
            parent = name

    def _adopt(
        self, names: Sequence[EngineBlockHash], changes: list[Change], *, from_root: bool
    ) -> None:
        """Give the blocks that waited for any of `names`, and their descendants, their hashes.

        Args:
            names: what was just stored.
            from_root: whether that may have been a report of hits (see `memories`). Then blocks in
                it that were known as orphans may have no copy beside the one they had.
        """
        waiting = list(names)
        reported = frozenset(names if from_root else ())
        while waiting:
            name = waiting.pop()
            for orphan in self.orphans.adopt(name):
                parent = self._names[name][0]
                block = hash_block(orphan.tokens, orphan.extras, parent)
                self._learn([orphan.name], parent, [block])
                for place, copies in orphan.copies.items():
                    for copy in range(copies):
                        doubtful = copy == 0 and orphan.name in reported
                        self._add(place, parent, [block], changes, from_root=doubtful)
                waiting.append(orphan.name)

    # --- removals

    def _remove(self, event: BlockRemoved, changes: list[Change]) -> Outcome:
        place = self._place_of(event)
        if place.group in self._skipped_groups:
            return Outcome.SPARSE
        names = self._names
        holding = self._memories.at(place)
        removed = 0
        gone: list[BlockHash] = []
        for name in event.block_hashes:
            known = names.get(name)
            last = holding.drop(known[0]) if holding is not None and known is not None else None
            if last is not None and known is not None:
                removed += 1
                if last:
                    self._lose(name, known, gone, changes)
            elif self.orphans.release(name, place):
                removed += 1
            else:
                self.unknown_removals += 1
        if gone:
            _append_gone(gone, changes)
        return Outcome.REMOVED if removed else Outcome.UNKNOWN_REMOVAL

    def _lose(
        self,
        name: EngineBlockHash,
        known: tuple[BlockHash, BlockHash],
        gone: list[BlockHash],
        changes: list[Change],
    ) -> None:
        """Note that a place has lost its last copy of a block."""
        block, parent = known
        memories = self._memories
        if not memories.plain:
            tier = memories.tier_of(block)
            if tier != ABSENT:
                changes.append(Held(parent, [block], tier))
                return
            if memories.anywhere(block):
                gone.append(block)
                return
        gone.append(block)
        del self._names[name]
        self._departed[name] = known
        if len(self._departed) > 2 * self.config.departed_max:
            latest = islice(self._departed.items(), self.config.departed_max, None)
            self._departed = dict(latest)

    # --- keeping within bounds

    def _trim(self, changes: list[Change]) -> None:
        """Give up doubtful copies on the GPU that it cannot have room for."""
        room = self.capacity_blocks
        if room is None:
            return
        for place, holding in self._memories.holdings.items():
            if holding.copies > room and place.medium == GPU:
                trimmed, lost = holding.trim(room)
                self.doubts_trimmed += trimmed
                gone = [block for block in lost if self._memories.tier_of(block) == ABSENT]
                if gone:
                    changes.append(Gone(gone))

    def _sweep_names(self) -> None:
        """Drop names of blocks that no memory holds, once there are many.

        A block's second name, and the names of blocks that were trimmed, outlive the block.
        """
        memories = self._memories
        blocks = sum(len(holding.counts) for holding in memories.holdings.values())
        if len(self._names) > blocks + _STALE_NAMES_MAX:
            self._names = {
                name: known for name, known in self._names.items() if memories.anywhere(known[0])
            }

    # --- looking

    def held(self, tier: int = 0) -> set[BlockHash]:
        """Return the blocks that tiers up to `tier` serve; linear time."""
        blocks = {block for each in self._memories.holdings.values() for block in each.counts}
        return {block for block in blocks if self._memories.tier_of(block) <= tier}

    def hash_of(self, name: EngineBlockHash) -> BlockHash | None:
        """Return our hash of a block that the engine names, None if it is not known."""
        known = self._find(name)
        return known[0] if known is not None else None

    @property
    def copies(self) -> int:
        """Copies of blocks, doubtful ones included, in all memories."""
        return sum(holding.copies for holding in self._memories.holdings.values())

    @property
    def doubtful(self) -> int:
        """Blocks with copies that may not exist."""
        return sum(len(holding.doubts) for holding in self._memories.holdings.values())

    def validate(self) -> None:
        """Assert that the parts agree."""
        hashes = {known[0] for known in self._names.values()}
        for holding in self._memories.holdings.values():
            assert holding.copies == sum(holding.counts.values())
            assert all(count > 0 for count in holding.counts.values())
            assert all(0 < n <= holding.counts[block] for block, n in holding.doubts.items())
            assert hashes.issuperset(holding.counts)
        assert len(self._departed) <= 2 * self.config.departed_max
        assert not any(name in self.orphans for name in self._names)


def _append_gone(gone: list[BlockHash], changes: list[Change]) -> None:
    """Append a removal, to the last change if that is one: vLLM sends one event a block."""
    if changes and isinstance(changes[-1], Gone):
        changes[-1].hashes.extend(gone)
    else:
        changes.append(Gone(gone))


def _keys_of(event: BlockStored) -> Sequence[list[Any] | None]:
    """Return the extra keys of each block of a store. Raises ValueError if some are missing."""
    if event.extra_keys is None:
        return [None] * len(event.block_hashes)
    if len(event.extra_keys) != len(event.block_hashes):
        raise ValueError("extra_keys must name each block")
    return event.extra_keys
