"""Who caches which block: one look-up answers for the whole fleet at once.

Theory of operation. The index maps a BlockHash to an int used as a bit set of slots (`slots.py`:
published block sets). What is published is prefix-closed (a set that holds a block holds all
blocks before it), so along a prompt's chain of hashes the sets only shrink, and `index[hash_d]`
is exactly who holds the first d blocks. The depths at which somebody drops out are found by
bisection: no step visits the prompt block by block or the fleet instance by instance. Prompts that
begin alike mostly part at the same depth, where a system prompt ends: that is looked at first.

Invariants, held between any two calls (`check` asserts them):
- no entry has an empty mask: a block that nobody holds costs nothing;
- an entry with a single owner stores that owner's own int, so that memory does not grow with the
  slot's number; equal masks of several owners are mostly one object as well (`_shared`, bounded);
- `count` and `digest` of a slot are those of the set of its bits.

The dict is split into 256 shards by the hash's highest byte. A dict that grows is rebuilt as a
whole, and at a million entries that pauses everything for tens of milliseconds; rebuilding a shard
of an index of millions takes two or three. A sweep goes shard by shard for the same reason, and
needs no list of who owns what: one pass over the index erases all slots that were dead when it
began.

Only ints and dicts of ints are kept per block, which the cyclic garbage collector does not track:
a router that calls `gc.freeze()` once its index is filled has collections that do not visit it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import reduce
from operator import xor

import msgspec
import numpy as np

from controlplane.core.hashing import BlockHash, unpack_hashes
from controlplane.core.slots import SlotState, SlotTable, slots_in

Packed = bytes | memoryview

SHARDS = 256
"""One for each value of a hash's highest byte, which is the last one on the bus."""

SHARD_SHIFT = 56
"""What takes a hash to its shard."""

SHARED_MASKS_MAX = 65_536
"""Masks of several owners that are remembered so that equal ones are one object."""

FORKS_MAX = 4_096
"""First blocks of which it is remembered where slots dropped out of a prompt that began with it."""

FORK_LOOKS_MAX = 32
"""Blocks that are remembered of each."""

FORK_SLOTS_MIN = 3
"""A depth that fewer slots reach is a conversation's: the next prompt forks elsewhere."""

KEY_BYTES = 48
"""An int of 64 bits as CPython allocates it: 36 bytes, in steps of 16."""


class Refusal(StrEnum):
    """Why the index did not take a set of blocks; nothing of it was stored."""

    INDEX_FULL = "index_full"
    SLOT_FULL = "slot_full"


class Match(msgspec.Struct, frozen=True, gc=False):
    """Who holds how much of one prompt.

    Attributes:
        levels: (depth in blocks, mask): exactly the slots in `mask` hold the first `depth`
            blocks, and not all of them hold one more. Depths grow, masks shrink.
    """

    levels: tuple[tuple[int, int], ...] = ()

    def holders(self, depth_blocks: int) -> int:
        """Return the mask of slots that hold at least the first `depth_blocks` (≥ 1) blocks."""
        for depth, mask in self.levels:
            if depth >= depth_blocks:
                return mask
        return 0


NO_MATCH = Match()


class PrefixIndex:
    """Block hashes of a fleet of prefix caches, for one model.

    Args:
        blocks_max: distinct blocks that are kept; `store` refuses what would exceed it.
        slot_blocks_max: blocks of one slot, likewise.
        slots_max: slots in any state but free.
    """

    def __init__(
        self,
        blocks_max: int = 8_000_000,
        slot_blocks_max: int = 2_000_000,
        slots_max: int = 8_192,
    ) -> None:
        assert blocks_max > 0
        assert slot_blocks_max > 0
        self.blocks_max = blocks_max
        self.slot_blocks_max = slot_blocks_max
        self._slots = SlotTable(slots_max)
        self._counts: list[int] = []
        self._digests: list[int] = []
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(SHARDS)]
        self._gets: list[Callable[[BlockHash, int], int]] = [s.get for s in self._shards]
        self._blocks = 0
        self._shared: dict[int, int] = {}
        self._forks: dict[BlockHash, tuple[int, ...]] = {}  # blocks to look at, deepest first
        # The pass in progress: which slots it erases, and the next shard.
        self._sweeping = 0
        self._sweep_shard = 0

    # --- slots ----------------------------------------------------------------------------------

    def acquire_slot(self) -> int | None:
        """Return an empty shadow slot, the lowest there is; None at `slots_max`."""
        slot = self._slots.acquire()
        if slot == len(self._counts):
            self._counts.append(0)
            self._digests.append(0)
        return slot

    def publish_slot(self, slot: int) -> None:
        """Let a shadow slot count in `match`: at once, with all that it holds."""
        self._slots.publish(slot)

    def release_slot(self, slot: int) -> None:
        """Let a slot vanish from `match` at once; `sweep` erases it and frees its number."""
        self._slots.release(slot)
        if self._counts[slot] == 0:
            self._free(self._slots.bits[slot])

    def state(self, slot: int) -> SlotState:
        """Return where a slot is in its life."""
        return self._slots.state(slot)

    @property
    def slots(self) -> int:
        """How many slot numbers were ever handed out."""
        return len(self._slots)

    @property
    def live(self) -> int:
        """Mask of the slots that count in `match`."""
        return self._slots.live

    # --- changes --------------------------------------------------------------------------------

    def store(self, slot: int, packed: Packed) -> Refusal | None:
        """Add blocks to a slot's set; those that it holds already change nothing.

        Args:
            slot: shadow or live.
            packed: block hashes as on the bus: u64, little endian.

        Returns:
            None, or why nothing was stored: the caller must stop trusting this slot's set.

        Raises:
            ValueError: `packed` is no whole number of hashes.

        Complexity: O(blocks); a call should carry at most some thousands where latency matters.
        """
        assert self._slots.writable(slot)
        hashes = unpack_hashes(packed)
        refusal = self._refusal(slot, hashes)
        if refusal is not None:
            return refusal
        shards, bit = self._shards, self._slots.bits[slot]
        known: list[BlockHash] = []
        shared = new = 0
        old: int | None = None
        for block, number in zip(hashes, packed[7::8], strict=True):
            shard = shards[number]
            mask = shard.get(block)
            if mask is None:
                shard[block] = bit
                continue
            # A chain's blocks mostly have one set of owners: look at it and unite it once.
            if mask is not old:
                if mask & bit:
                    known.append(block)
                    continue
                old, new = mask, self._share(mask | bit)
            shard[block] = new
            shared += 1
        self._blocks += len(hashes) - shared - len(known)
        self._counts[slot] += len(hashes) - len(known)
        self._digests[slot] ^= _xor(hashes, packed) ^ _xor(known)
        return None

    def remove(self, slot: int, packed: Packed) -> int:
        """Take blocks out of a slot's set; those that it does not hold change nothing.

        Args:
            slot: shadow or live.
            packed: block hashes as on the bus.

        Returns:
            How many of them the slot did not hold.

        Raises:
            ValueError: `packed` is no whole number of hashes.
        """
        assert self._slots.writable(slot)
        hashes = unpack_hashes(packed)
        shards, bit = self._shards, self._slots.bits[slot]
        absent: list[BlockHash] = []
        shared = new = 0
        old: int | None = None
        for block, number in zip(hashes, packed[7::8], strict=True):
            shard = shards[number]
            mask = shard.get(block, 0)
            if mask == bit:
                del shard[block]
                continue
            if mask is not old:
                if not mask & bit:
                    absent.append(block)
                    continue
                old, new = mask, self._share(mask ^ bit)
            shard[block] = new
            shared += 1
        self._blocks -= len(hashes) - shared - len(absent)
        self._counts[slot] -= len(hashes) - len(absent)
        self._digests[slot] ^= _xor(hashes, packed) ^ _xor(absent)
        return len(absent)

    def sweep(self, blocks_max: int) -> int:
        """Erase dead slots, a slice at a time; return how many blocks were visited: 0, all done.

        A pass over all shards erases the slots that were dead when it began and frees their
        numbers at its end. Shards are visited whole, so a slice exceeds `blocks_max` by less than
        a shard.

        Complexity: 0.15 µs a block visited, and up to 0.5 µs where a thousand slots are in use.
        """
        visited = 0
        while visited < blocks_max and (self._sweeping or self._begin_pass()):
            shard = self._shards[self._sweep_shard]
            visited += len(shard) + 1
            self._erase(shard)
            self._sweep_shard += 1
            if self._sweep_shard == len(self._shards):
                self._free(self._sweeping)
                self._sweeping = 0
        return visited

    def _begin_pass(self) -> bool:
        self._sweeping, self._sweep_shard = self._slots.dead, 0
        return self._sweeping != 0

    def _erase(self, shard: dict[BlockHash, int]) -> None:
        dead = self._sweeping
        for block, mask in [item for item in shard.items() if item[1] & dead]:
            rest = mask & ~dead
            if rest:
                shard[block] = self._share(rest)
            else:
                del shard[block]
                self._blocks -= 1

    def _free(self, mask: int) -> None:
        self._slots.free(mask)
        for slot in slots_in(mask).tolist():
            self._counts[slot] = self._digests[slot] = 0

    def _refusal(self, slot: int, hashes: list[BlockHash]) -> Refusal | None:
        """Whether the bounds forbid these blocks; exact, but counts only near a bound."""
        if self._counts[slot] + len(hashes) > self.slot_blocks_max:
            bit = self._slots.bits[slot]
            fresh = sum(not self._mask(block) & bit for block in set(hashes))
            if self._counts[slot] + fresh > self.slot_blocks_max:
                return Refusal.SLOT_FULL
        if self._blocks + len(hashes) > self.blocks_max:
            fresh = sum(not self._mask(block) for block in set(hashes))
            if self._blocks + fresh > self.blocks_max:
                return Refusal.INDEX_FULL
        return None

    def _share(self, mask: int) -> int:
        """Return the one object that stands for this non-empty mask."""
        if not mask & (mask - 1):
            return self._slots.bits[mask.bit_length() - 1]
        if len(self._shared) >= SHARED_MASKS_MAX:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)

    # --- questions ------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash], blocks: int | None = None) -> Match:
        """Return which live slots hold how much of a prompt.

        Args:
            hashes: the prompt's chain.
            blocks: how many of them may count, see `usable_blocks`; None for all. (A parameter,
                because to cut a long chain's list costs as much as to match it.)

        Complexity: about log2(blocks) look-ups for each depth at which a slot drops out, and
        never more than one a block.
        """
        count = len(hashes) if blocks is None else min(blocks, len(hashes))
        if not count:
            return NO_MATCH
        gets, shift = self._gets, SHARD_SHIFT
        live, hidden = self._slots.live, self._slots.hidden
        first = hashes[0]
        here = gets[first >> shift](first, 0)
        if hidden:
            here &= live
        if not here:
            return NO_MATCH
        # Known sets right of `at`, where the set is `here`: (from, to at least, set), nearest last.
        ahead: list[tuple[int, int, int]] = []
        nearest = count
        for known in (count - 1, *self._forks.get(first, ())):
            if 0 < known < nearest:
                nearest = known
                block = hashes[known]
                mask = gets[block >> shift](block, 0)
                ahead.append((known, known, mask & live if hidden else mask))
        levels: list[tuple[int, int]] = []
        at, moved = 0, False
        while ahead:
            right, far, there = ahead.pop()
            if there is here or there == here:
                at = far
                continue
            if right - at > 1:
                moved |= here.bit_count() >= FORK_SLOTS_MIN
            # A next turn is new only at its end: a first look there halves more than the middle.
            middle = (at + 3 * right) >> 2
            while right - at > 1:
                block = hashes[middle]
                mask = gets[block >> shift](block, 0)
                if hidden:
                    mask &= live
                # Equal sets are mostly one object: to see that, neither has to be read.
                if mask is here:
                    at = middle
                elif mask is there:
                    right = middle
                elif mask == here:
                    at = middle
                elif mask == there:
                    right = middle
                else:
                    ahead.append((right, far, there))
                    right, far, there = middle, middle, mask
                middle = (at + right) >> 1
            levels.append((right, here))
            at, here = far, there
            if not here:
                break
        else:
            levels.append((count, here))
        if moved:
            self._remember_forks(first, levels)
        return Match(tuple(levels))

    def _remember_forks(self, first: BlockHash, levels: list[tuple[int, int]]) -> None:
        """Remember the blocks between which slots drop out, for prompts that begin alike."""
        looks: set[int] = set()
        for depth, mask in levels:
            if mask.bit_count() >= FORK_SLOTS_MIN:
                looks |= {depth - 1, depth}
        # Several prompts that begin alike have their forks beside each other, while there is room.
        known = looks.union(self._forks.pop(first, ()))
        kept = known if len(known) <= FORK_LOOKS_MAX else looks
        if len(self._forks) >= FORKS_MAX:
            self._forks.clear()
        self._forks[first] = tuple(sorted(kept, reverse=True)[-FORK_LOOKS_MAX:])

    def holders(self, block: BlockHash) -> int:
        """Return the mask of live slots that hold a block, and with it all blocks before it."""
        return self._mask(block) & self._slots.live

    def holds(self, slot: int, block: BlockHash) -> bool:
        """True if a shadow or live slot's set has this block."""
        return bool(self._mask(block) & self._slots.bits[slot])

    def blocks(self, slot: int) -> list[BlockHash]:
        """Return the blocks of a slot's set, unordered; for audits: it visits all blocks."""
        bit = self._slots.bits[slot]
        return [block for shard in self._shards for block, mask in shard.items() if mask & bit]

    def count(self, slot: int) -> int:
        """Return how many blocks a shadow or live slot's set has; compare with `KvBatch.count`."""
        return self._counts[slot]

    def digest(self, slot: int) -> int:
        """Return the XOR of a shadow or live slot's hashes; compare with `KvBatch.digest`."""
        return self._digests[slot]

    def __len__(self) -> int:
        """Return the number of distinct blocks, those of slots yet unswept included."""
        return self._blocks

    def memory_bytes(self) -> int:
        """Return an estimate of the index's memory."""
        tables = sum(map(sys.getsizeof, self._shards))
        masks = sum(map(sys.getsizeof, self._shared)) + sys.getsizeof(self._shared)
        bits = sum(map(sys.getsizeof, self._slots.bits))
        return tables + self._blocks * KEY_BYTES + masks + bits

    def _mask(self, block: BlockHash) -> int:
        return self._shards[block >> SHARD_SHIFT].get(block, 0)

    def check(self) -> None:
        """Assert every invariant; for tests: it visits all blocks."""
        self._slots.check()
        counts, digests = [0] * self.slots, [0] * self.slots
        for number, shard in enumerate(self._shards):
            for block, mask in shard.items():
                assert block >> SHARD_SHIFT == number
                assert mask > 0
                for slot in slots_in(mask).tolist():
                    counts[slot] += 1
                    digests[slot] ^= block
                if mask.bit_count() == 1:
                    assert mask is self._slots.bits[mask.bit_length() - 1]
        assert self._blocks == sum(map(len, self._shards)) <= self.blocks_max
        for slot in range(self.slots):
            if self._slots.writable(slot):
                assert (counts[slot], digests[slot]) == (self._counts[slot], self._digests[slot])
                assert counts[slot] <= self.slot_blocks_max
            assert self._slots.state(slot) is not SlotState.FREE or counts[slot] == 0
        assert self._sweeping & ~self._slots.dead == 0
        assert len(self._shared) <= SHARED_MASKS_MAX
        assert len(self._forks) <= FORKS_MAX
        assert all(len(looks) <= FORK_LOOKS_MAX for looks in self._forks.values())


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return how many of a prompt's blocks may count as hits: vLLM computes the last token anew."""
    return max(prompt_tokens - 1, 0) // block_size


def _xor(blocks: list[BlockHash], packed: Packed | None = None) -> int:
    """Return the XOR of hashes; many are faster as the bytes they came in."""
    if packed is None or len(blocks) < 32:
        return reduce(xor, blocks, 0)
    return int(np.bitwise_xor.reduce(np.frombuffer(packed, "<u8")))
