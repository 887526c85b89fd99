"""Which blocks an engine's memories hold, and in how many copies.

Theory of operation. vLLM keeps blocks in *media* (GPU, CPU, STORAGE), in each of them per cache
*group* of layers, and on storage per owner. A medium serves a block only if all of its
full-attention groups hold it (any owner will do).

On the GPU, copies are counted: vLLM computes a block anew where it may not reuse it, caches both
copies, and reports each one's store and removal; the block is lost with the last copy. A request
may however ask for its *hits* to be reported as stores (`kv_cache_report_mode=full`), and nothing
in the event tells. Such a report always begins at the root of a prompt, and so does hardly any
store of what is held already (a prompt of exactly one block; a request that may not read the
cache). So a store from the root of a block that is held counts as a *doubt*: a copy that may not
exist. A block with only doubts left still counts as held, because the opposite mistake would never
heal: hits on a block that is wrongly thought lost make no event. A wrong doubt heals by itself: at
the next store of a longer chain with the block (which settles that there is one copy), or when the
copies exceed what the memory has room for (the oldest doubts go).

Other media keep one copy of a block, named by its key, so there stores are idempotent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from controlplane.core.hashing import BlockHash
from sidecar.changes import ABSENT

GPU = "GPU"
_TIERS = {GPU: 0, "CPU": 1}
_OTHER_TIER = 2


class Place(NamedTuple):
    """Where copies are: a medium, a cache group, and on shared storage who owns them."""

    medium: str
    group: int | None
    owner: str | None

    @property
    def tier(self) -> int:
        """The tier that the medium counts as."""
        return _TIERS.get(self.medium, _OTHER_TIER)


class Holding:
    """The copies in one place.

    Attributes:
        counts: block → copies, doubts included; blocks without copies are absent.
        doubts: block → how many of its copies may not exist, oldest doubt first.
        copies: sum of `counts`.
    """

    def __init__(self, *, counted: bool) -> None:
        self.counts: dict[BlockHash, int] = {}
        self.doubts: OrderedDict[BlockHash, int] = OrderedDict()
        self.copies = 0
        self._counted = counted

    def add(self, blocks: Sequence[BlockHash], *, from_root: bool) -> list[BlockHash]:
        """Add a copy of each block of a chain; returns those that were not here, in order.

        Args:
            from_root: whether the chain begins a prompt, as reports of hits do.
        """
        counts = self.counts
        fresh: list[BlockHash] = []
        for block in blocks:
            held = counts.get(block)
            if held is None:
                counts[block] = 1
                fresh.append(block)
            elif self._counted:
                self._add_again(block, held, from_root=from_root, alone=len(blocks) == 1)
        self.copies += len(fresh)
        return fresh

    def _add_again(self, block: BlockHash, held: int, *, from_root: bool, alone: bool) -> None:
        doubts = self.doubts.get(block, 0)
        sure = held - doubts
        if sure == 0 and not (from_root and alone):
            del self.doubts[block]  # a miss or a hit, now there is one copy
            self.counts[block] = 1
            self.copies += 1 - held
            return
        self.counts[block] = held + 1
        self.copies += 1
        if from_root and sure:
            self.doubts[block] = doubts + 1

    def drop(self, block: BlockHash) -> bool | None:
        """Remove a copy of a block: True if it was the last one, None if there was none."""
        held = self.counts.get(block)
        if held is None:
            return None
        self.copies -= 1
        if held == 1:
            del self.counts[block]
            self.doubts.pop(block, None)
            return True
        self.counts[block] = held - 1
        if self.doubts.get(block, 0) == held:
            self.doubts[block] = held - 1
        return False

    def trim(self, room: int) -> tuple[int, list[BlockHash]]:
        """Give up the oldest doubts while there are more copies than `room`.

        Returns:
            (doubts given up, blocks of which that was the last copy).
        """
        trimmed = 0
        lost: list[BlockHash] = []
        while self.copies > room and self.doubts:
            block, doubts = self.doubts.popitem(last=False)
            surplus = min(doubts, self.copies - room)
            trimmed += surplus
            self.copies -= surplus
            left = self.counts[block] - surplus
            if surplus < doubts:
                self.doubts[block] = doubts - surplus
                self.doubts.move_to_end(block, last=False)
            if left:
                self.counts[block] = left
            else:
                del self.counts[block]
                lost.append(block)
        return trimmed, lost


class Memories:
    """Every place of one engine.

    Attributes:
        plain: whether there is a single place, so that what is held there decides alone.
    """

    def __init__(self) -> None:
        self.holdings: dict[Place, Holding] = {}
        self.plain = True
        self._media: list[tuple[int, list[list[Holding]]]] = []

    def at(self, place: Place) -> Holding | None:
        """Return what a place holds, None if nothing ever was there."""
        return self.holdings.get(place)

    def open(self, place: Place) -> Holding:
        """Return what a place holds; a new place changes what its medium can serve."""
        holding = self.holdings[place] = Holding(counted=place.medium == GPU)
        media: dict[str, dict[int | None, list[Holding]]] = {}
        for known, held in self.holdings.items():
            media.setdefault(known.medium, {}).setdefault(known.group, []).append(held)
        tier_of = {known.medium: known.tier for known in self.holdings}
        self._media = sorted(
            ((tier_of[medium], list(groups.values())) for medium, groups in media.items()),
            key=lambda each: each[0],
        )
        self.plain = len(self.holdings) == 1
        return holding

    def tier_of(self, block: BlockHash) -> int:
        """Return the fastest tier that serves a block, `ABSENT` if none does."""
        for tier, groups in self._media:
            if all(any(block in owned.counts for owned in group) for group in groups):
                return tier
        return ABSENT

    def anywhere(self, block: BlockHash) -> bool:
        """Whether any place holds a copy, even if no medium can serve the block."""
        return any(block in holding.counts for holding in self.holdings.values())
