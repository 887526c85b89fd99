"""Hit tokens by row: what a match says of slots, as the array that scores are made of.

Theory of operation. A match is a few (depth, mask) pairs, and only its first masks, of those who
hold the system prompt, have many bits. The array of each of those is kept, so a prompt that begins
alike costs a copy of it; whoever holds more is written one by one.

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
        hits: IntArray | None = None
        for level, (depth, mask) in enumerate(levels):
            tokens = depth * block_tokens
            if mask.bit_count() > SCATTER_BITS_MAX:
                if hits is None:
                    hits = self._all_of(mask, tokens)
                    if len(levels) == 1:
                        return hits
                    hits = hits.copy()
                    continue
                # Deeper slots are written again below, so writing those that leave is enough.
                leaving = mask ^ levels[level + 1][1] if level + 1 < len(levels) else mask
                if leaving.bit_count() > SCATTER_BITS_MAX:
                    np.maximum(hits, self._all_of(mask, tokens), out=hits)
                    continue
                mask = leaving
            if hits is None:
                hits = np.zeros(len(self._slots), np.int64)
            while mask:
                slot = mask.bit_length() - 1
                mask ^= 1 << slot
                if slot < len(row_of) and (row := row_of[slot]) >= 0:
                    hits[row] = tokens
        return np.zeros(len(self._slots), np.int64) if hits is None else hits

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
