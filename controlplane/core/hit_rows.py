"""Hit tokens by row: what a match says of slots, as the array that scores are made of.

Theory of operation. A match is a few (depth, mask) pairs, and only its first masks, of those who
hold the system prompt, have many bits. Where many of them end, the array of all of them is kept, so
a prompt that begins alike costs a copy of it; whoever holds more is written one by one.

Rows are those of one `SlotRows`, which never changes: where slots or rows do, a new one is made.
"""

from __future__ import annotations

import numpy as np

from controlplane.core.index import Match
from controlplane.core.slots import IntArray, slots_in

SCATTER_BITS_MAX = 6
"""Up to this many slots are cheaper to write one by one than as an array."""

MASKS_MAX = 256
"""Masks that are remembered as arrays."""


class SlotRows:
    """Which row each slot's hits go to.

    Args:
        slots: (rows,) the slot of each row, none of them twice; -1 where there is none.
    """

    def __init__(self, slots: IntArray) -> None:
        placed = (slots >= 0).nonzero()[0]
        row_of = np.full(int(slots.max(initial=-1)) + 1, -1, np.int64)
        row_of[slots[placed]] = placed
        self._slots = slots.copy()
        self._row_of: list[int] = row_of.tolist()
        self._indicators: dict[int, IntArray] = {}
        self._filled: dict[tuple[int, int], IntArray] = {}

    def hits(self, match: Match, block_tokens: int = 1) -> IntArray:
        """Return (rows,) how deep each row's slot holds the prompt, in units of `block_tokens`.

        The array is not to be written to: others may be given the same one.
        """
        levels, row_of = match.levels, self._row_of
        deepest = len(levels) - 1
        hits: IntArray | None = None
        few: list[tuple[int, int, int]] = []
        for level, (depth, mask) in enumerate(levels):
            tokens = depth * block_tokens
            # Who goes deeper is written there.
            leaving = mask ^ levels[level + 1][1] if level < deepest else mask
            left = leaving.bit_count()
            if left <= SCATTER_BITS_MAX:
                few.append((tokens, leaving, left))
                continue
            all_of = self._all_of(mask, tokens)
            if not deepest:
                return all_of
            hits = all_of.copy() if hits is None else np.maximum(hits, all_of, out=hits)
        if hits is None:
            hits = np.zeros(len(self._slots), np.int64)
        for tokens, leaving, left in few:
            while left:
                slot = leaving.bit_length() - 1
                if slot < len(row_of) and (row := row_of[slot]) >= 0:
                    hits[row] = tokens
                left -= 1
                if left:
                    leaving ^= 1 << slot
        return hits

    def _all_of(self, mask: int, tokens: int) -> IntArray:
        """Return (rows,) `tokens` for rows whose slot is in a mask, 0 for others; read only."""
        filled = self._filled.get((mask, tokens))
        if filled is None:
            filled = self._indicator(mask) * tokens
            filled.flags.writeable = False
            if len(self._filled) >= MASKS_MAX:
                self._filled.clear()
            self._filled[mask, tokens] = filled
        return filled

    def _indicator(self, mask: int) -> IntArray:
        """Return (rows,) 1 for rows whose slot is in a mask, 0 for others."""
        indicator = self._indicators.get(mask)
        if indicator is None:
            inside = np.zeros(max(len(self._row_of), mask.bit_length()) + 1, np.int64)
            inside[slots_in(mask)] = 1
            if len(self._indicators) >= MASKS_MAX:
                self._indicators.clear()
            indicator = self._indicators[mask] = inside[self._slots]
        return indicator
