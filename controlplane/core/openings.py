"""Where a prompt's prefix is and who has room, as bit sets: what the queue picks pairs by.

A mask has a bit for each instance: its index slot. A prompt's *hits* are few change points, deepest
first, so how much of it the instances with room have is a matter of a few ANDs: no look-up is made
when a place becomes free.

Whoever would find less with those that have room than with one that is full may be better off
waiting for that one. It is while the next place there, counted behind those who wait for the same,
is expected sooner than the difference could be computed (`Openings.worth_waiting_s`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from controlplane.core.scoring import BoolArray, IntArray

Hits = tuple[tuple[int, int], ...]
"""(tokens, mask of those that have so many): tokens shrink, masks grow."""

EVERYBODY = -1
"""The mask of all instances, known or not."""

LEVELS_MAX = 8
"""Change points that are kept, the deepest ones: so much memory, and time, a request may take."""


FEW = 12
"""Up to so many bits are set one by one sooner than as an array."""


def mask_of(rows: BoolArray, slots: IntArray) -> int:
    """Return the mask of some rows.

    Args:
        rows: (n,) which.
        slots: (n,) index slot of each; -1 for none: it has no bit.
    """
    chosen = slots[rows]
    mask = 0
    if len(chosen) <= FEW:
        for slot in chosen.tolist():
            if slot >= 0:
                mask |= 1 << slot
        return mask
    flags = np.zeros(int(chosen.max()) + 2, np.bool_)  # the last one is for those without a slot
    flags[chosen] = True
    flags[-1] = False
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def hits_of(tokens: IntArray | None, slots: IntArray) -> Hits:
    """Return a prompt's hits.

    Args:
        tokens: (n,) what each instance has of it; None where nobody has anything.
        slots: (n,) index slot of each instance.
    """
    if tokens is None:
        return ()
    hits: list[tuple[int, int]] = []
    mask = 0
    for depth in np.unique(tokens)[: -LEVELS_MAX - 1 : -1].tolist():
        if depth > 0:
            mask |= mask_of(tokens == depth, slots)
            hits.append((depth, mask))
    return tuple(hits)


class Openings(msgspec.Struct, frozen=True):
    """Who has room for a request of some lane.

    Attributes:
        open: mask of those that have.
        full: mask of those that would get it if they had.
        place_s: how soon one full instance is expected to have a place; 0 if nobody knows.
        token_s: what computing one more prompt token takes; 0 if nobody knows.
    """

    open: int
    full: int = 0
    place_s: float = 0.0
    token_s: float = 0.0

    def worth_waiting_s(self, hits: Hits, here: int, ahead: dict[int, int]) -> float:
        """Return for how long it pays to wait for a full instance; 0 if it pays to go now.

        Args:
            hits: of the prompt.
            here: tokens of it that those with room have.
            ahead: how many wait for the same already, by mask; one more if this one does, too.
        """
        for tokens, holders in hits:
            if tokens <= here:
                break
            wanted = holders & self.full
            if wanted:
                lost_s = (tokens - here) * self.token_s
                place = ahead.get(wanted, 0) + 1
                if place * self.place_s < lost_s * wanted.bit_count():
                    ahead[wanted] = place
                    return lost_s
        return 0.0


ANYWHERE = Openings(EVERYBODY)
"""Nobody is full, or there is nobody to wait for."""
