"""Slots: the bits of the index's masks, and what each stands for.

A slot is one published block set: an instance × a tier, as the caller maps them. Its number is a
bit position in every mask of the index.

    state    stores and removals   counts in a match   its bits in the index
    ------   -------------------   -----------------   ----------------------------------
    shadow   yes                   no                  being filled, as from a snapshot
    live     yes                   yes                 the instance's set
    dead     no                    no                  masked at once, erased by a sweep
    free     no                    no                  none: the slot may be acquired

To replace a set in one step, fill a shadow slot, publish it and release the old one; so no
decision sees half a set.
"""

from __future__ import annotations

from enum import Enum, auto
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class SlotState(Enum):
    """Where a slot is in its life; see the module's table."""

    FREE = auto()
    SHADOW = auto()
    LIVE = auto()
    DEAD = auto()


class SlotTable:
    """States and masks of all slots.

    Attributes:
        bits: slot → `1 << slot`, always the same object, so that masks of one owner share it.
        live: mask of the slots that count in a match.
        dead: mask of the slots that await a sweep.
        hidden: mask of the slots that may have blocks but do not count: shadow and dead.
    """

    def __init__(self, slots_max: int) -> None:
        assert slots_max > 0
        self.slots_max = slots_max
        self.bits: list[int] = []
        self.live = self.dead = self.hidden = 0
        self._states: list[SlotState] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """How many slot numbers were ever handed out."""
        return len(self.bits)

    def acquire(self) -> int | None:
        """Return a shadow slot, the lowest there is; None at `slots_max`."""
        if self._free:
            slot = heappop(self._free)
        elif len(self.bits) < self.slots_max:
            slot = len(self.bits)
            self.bits.append(1 << slot)
            self._states.append(SlotState.FREE)
        else:
            return None
        self._states[slot] = SlotState.SHADOW
        self.hidden |= self.bits[slot]
        return slot

    def publish(self, slot: int) -> None:
        """Shadow → live."""
        assert self._states[slot] is SlotState.SHADOW
        self._states[slot] = SlotState.LIVE
        self.live |= self.bits[slot]
        self.hidden ^= self.bits[slot]

    def release(self, slot: int) -> None:
        """Shadow or live → dead."""
        assert self.writable(slot)
        self._states[slot] = SlotState.DEAD
        self.live &= ~self.bits[slot]
        self.hidden |= self.bits[slot]
        self.dead |= self.bits[slot]

    def free(self, mask: int) -> None:
        """Dead → free, for all slots in a mask of which the index has no bit left."""
        assert mask & ~self.dead == 0
        for slot in slots_in(mask).tolist():
            self._states[slot] = SlotState.FREE
            heappush(self._free, slot)
        self.dead ^= mask
        self.hidden ^= mask

    def state(self, slot: int) -> SlotState:
        """Return where a slot is in its life."""
        return self._states[slot]

    def writable(self, slot: int) -> bool:
        """True if blocks may be stored in and removed from the slot."""
        return self._states[slot] in (SlotState.SHADOW, SlotState.LIVE)

    def check(self) -> None:
        """Assert that the masks say what the states say; for tests."""
        masks = dict.fromkeys(SlotState, 0)
        for bit, state in zip(self.bits, self._states, strict=True):
            masks[state] |= bit
        assert masks[SlotState.LIVE] == self.live
        assert masks[SlotState.DEAD] == self.dead
        assert masks[SlotState.DEAD] | masks[SlotState.SHADOW] == self.hidden
        assert sum(self.bits[slot] for slot in self._free) == masks[SlotState.FREE]
        assert len(self.bits) <= self.slots_max


def slots_in(mask: int) -> IntArray:
    """Return the slot numbers in a mask, ascending."""
    data = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) >> 3, "little"), np.uint8)
    return np.unpackbits(data, bitorder="little").nonzero()[0]
