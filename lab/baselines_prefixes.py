"""What a router that hears nothing of engines believes to be cached: what it sent where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from controlplane.core.scoring import IntArray


class SeenPrefixes:
    """The blocks of the prompts that each instance got, the last ones of each.

    The least recently sent go beyond the bound, a prompt's tail before its head; so what is left of
    a prompt is always a prefix of it, and its length can be found by bisection.

    Args:
        blocks_max: of one instance.
    """

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max > 0
        self.blocks_max = blocks_max
        self._blocks: list[OrderedDict[int, int]] = []  # block → when it was last sent
        self._sendings = 0

    def add(self, row: int, hashes: Sequence[int]) -> None:
        """Note that a prompt went to an instance. O(blocks)."""
        self._grow(row + 1)
        self._sendings += 1
        blocks = self._blocks[row]
        for each in reversed(hashes):
            blocks[each] = self._sendings
            blocks.move_to_end(each)
        while len(blocks) > self.blocks_max:
            blocks.popitem(last=False)

    def depths(self, hashes: Sequence[int], rows: int) -> IntArray:
        """Return (rows,) how many of a prompt's first blocks each got. O(rows × log blocks)."""
        self._grow(rows)
        return np.array([_depth(self._blocks[row], hashes) for row in range(rows)], np.int64)

    def sizes(self, rows: int) -> IntArray:
        """Return (rows,) how many blocks each is believed to have."""
        self._grow(rows)
        return np.array([len(self._blocks[row]) for row in range(rows)], np.int64)

    def latest(self, rows: IntArray, block: int) -> int:
        """Return which of some instances that got a block got it last."""
        found: int = max(rows.tolist(), key=lambda row: self._blocks[row].get(block, 0))
        return found

    def _grow(self, rows: int) -> None:
        while len(self._blocks) < rows:
            self._blocks.append(OrderedDict())


def _depth(blocks: OrderedDict[int, int], hashes: Sequence[int]) -> int:
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) >> 1
        if hashes[middle - 1] in blocks:
            low = middle
        else:
            high = middle - 1
    return low
