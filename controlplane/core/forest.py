"""Decision trees evaluated for many rows at once, with numpy alone.

Theory of operation. Every tree is perfect, `depth` levels deep: inner node i has the children
2i + 1 (its value is below the threshold) and 2i + 2, and the leaves follow in order. A row reaches
the first leaf, from the left, that no comparison rules out: a node whose value is *not* below its
threshold rules out the leaves under its left child. So each comparison is a mask over the leaves,
and a row's leaf in a tree is the lowest bit of the AND of its masks.

All comparisons on one feature are sorted by threshold. Those that rule something out for a value
are a beginning of that order, whose masks are ANDed beforehand for all trees at once; so a
row costs one look-up a feature and tree, whatever the depth.

Source: QuickScorer (Lucchese et al., SIGIR 2015), here with one word a tree and rows in parallel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.records import TreeSet

DEPTH_MAX = 4
"""Sixteen leaves: a mask is 16 bits, and the lowest bit comes out of a table."""

VALUE_MAX = 1e9
"""Largest leaf, base or factor: seconds and their logarithms are smaller, and sums stay finite."""

_LEAVES = 1 << DEPTH_MAX
_FIRST_BIT: NDArray[np.int32] = np.array(
    [0] + [(word & -word).bit_length() - 1 for word in range(1, 1 << _LEAVES)], np.int32
)

_ROWS_AT_ONCE = 128
"""What is made of so many rows stays in the processor's cache."""


def _left_leaves(node: int, depth: int) -> int:
    """Return the mask without the leaves under a node's left child."""
    level = (node + 1).bit_length() - 1
    width = 1 << (depth - level)  # leaves under the node
    first = (node + 1 - (1 << level)) * width
    return ~(((1 << (width // 2)) - 1) << first) & 0xFFFF


class Forest:
    """Several sums of trees over the same features.

    Args:
        sets: one for each output; all of one depth.
        features: how many there are.

    Raises:
        ValueError: the trees are too deep, their arrays do not fit together, or they hold what is
            no time.
    """

    def __init__(self, sets: list[TreeSet], features: int) -> None:
        self._features = features
        chosen, thresholds, leaves, owners = _joined(sets, features)
        self._bases = np.array([each.base for each in sets], np.float32)
        trees, inner = chosen.shape
        depth = (inner + 1).bit_length() - 1
        self._starts = np.searchsorted(owners, np.arange(len(sets)))
        self._counts = np.bincount(owners, minlength=len(sets))
        self._leaves = np.zeros(trees * _LEAVES, np.float32)
        self._leaves.reshape(trees, _LEAVES)[:, : inner + 1] = leaves
        self._at = np.arange(trees, dtype=np.int32) * _LEAVES
        ruled_out = np.array([_left_leaves(node, depth) for node in range(inner)], np.uint16)
        self._bounds: list[NDArray[np.float32]] = []
        self._masks: list[NDArray[np.uint16]] = []
        for feature in range(features):
            tree, node = np.nonzero(chosen == feature)
            bounds, rank = np.unique(thresholds[tree, node], return_inverse=True)
            masks = np.full((len(bounds) + 1, trees), 0xFFFF, np.uint16)
            np.bitwise_and.at(masks, (rank + 1, tree), ruled_out[node])
            self._bounds.append(bounds)
            self._masks.append(np.bitwise_and.accumulate(masks, axis=0))

    def sums(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (n, outputs) sums of leaves for (n, features) values, none of them NaN."""
        assert rows.shape[1] == self._features
        sums = np.zeros((len(rows), len(self._bases)), np.float32)
        used = self._counts > 0
        if used.any():
            for first in range(0, len(rows), _ROWS_AT_ONCE):
                part = slice(first, first + _ROWS_AT_ONCE)
                values = self._leaf_values(rows[part])
                sums[part, used] = np.add.reduceat(values, self._starts[used], axis=1)
        return sums + self._bases

    def _leaf_values(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (n, trees) the leaf that each row reaches in each tree."""
        found = np.full((len(rows), len(self._at)), 0xFFFF, np.uint16)
        for feature, (bounds, masks) in enumerate(zip(self._bounds, self._masks, strict=True)):
            if len(bounds):
                below = np.searchsorted(bounds, rows[:, feature], side="right")
                found &= masks.take(below, axis=0)
        places = _FIRST_BIT.take(found)
        places += self._at
        return self._leaves.take(places)


def _joined(
    sets: list[TreeSet], features: int
) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return all trees' features and thresholds by inner node, their leaves, and their outputs."""
    depths = {each.depth for each in sets}
    if len(depths) != 1 or not 1 <= min(depths) <= DEPTH_MAX:
        raise ValueError(f"trees must have one depth from 1 to {DEPTH_MAX}, not {sorted(depths)}")
    inner = (1 << depths.pop()) - 1
    chosen = np.concatenate([np.frombuffer(each.features, "<i2") for each in sets])
    thresholds = np.concatenate([np.frombuffer(each.thresholds, "<f4") for each in sets])
    leaves = np.concatenate([np.frombuffer(each.leaves, "<f4") for each in sets])
    trees = sum(each.trees for each in sets)
    if not len(chosen) == len(thresholds) == trees * inner or len(leaves) != trees * (inner + 1):
        raise ValueError(f"{trees} trees do not fit their {len(chosen)} nodes")
    owners = np.repeat(np.arange(len(sets)), [each.trees for each in sets])
    if len(chosen) and not -1 <= chosen.min() <= chosen.max() < features:
        raise ValueError(f"a node looks at a feature beyond {features}")
    if not (np.isfinite(thresholds).all() and np.isfinite(leaves).all()):
        raise ValueError("a threshold or a leaf is no finite number")
    bases = [each.base for each in sets]
    if not ((np.abs(leaves) <= VALUE_MAX).all() and all(abs(base) <= VALUE_MAX for base in bases)):
        raise ValueError("a leaf or a base is beyond any time")
    return (
        chosen.reshape(trees, inner),
        thresholds.reshape(trees, inner),
        leaves.reshape(trees, inner + 1),
        owners,
    )
