from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.forest import DEPTH_MAX, Forest
from schemas.bus import TreeSet

FEATURES = 3


def tree_set(rng: np.random.Generator, depth: int, trees: int) -> TreeSet:
    """Returns random trees; some of their nodes compare nothing."""
    inner = (1 << depth) - 1
    return TreeSet(
        depth,
        trees,
        rng.integers(-1, FEATURES, trees * inner).astype("<i2").tobytes(),
        rng.integers(0, 6, trees * inner).astype("<f4").tobytes(),
        rng.normal(size=trees * (inner + 1)).astype("<f4").tobytes(),
        float(rng.integers(0, 5)),
    )


def walked(trees: TreeSet, row: list[float]) -> float:
    """Returns a set's sum by going down every tree."""
    inner = (1 << trees.depth) - 1
    features = np.frombuffer(trees.features, "<i2")
    thresholds = np.frombuffer(trees.thresholds, "<f4")
    leaves = np.frombuffer(trees.leaves, "<f4")
    total = trees.base
    for tree in range(trees.trees):
        node = 0
        while node < inner:
            at = tree * inner + node
            left = features[at] < 0 or row[features[at]] < thresholds[at]
            node = 2 * node + (1 if left else 2)
        total += leaves[tree * (inner + 1) + node - inner]
    return total


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, DEPTH_MAX),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_rows_reach_the_leaves_that_going_down_the_trees_reaches(
    seed: int, depth: int, counts: list[int]
) -> None:
    """For any trees, empty sets of them included, and values on their thresholds."""
    rng = np.random.default_rng(seed)
    sets = [tree_set(rng, depth, count) for count in counts]
    rows = rng.integers(-1, 7, (150, FEATURES)).astype(np.float32)
    expected = [[walked(each, row) for each in sets] for row in rows[::30].tolist()]
    np.testing.assert_allclose(
        Forest(sets, FEATURES).sums(rows)[::30], expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"depth": 5}, "one depth"),
        ({"trees": 2}, "do not fit"),
        ({"features": np.array([9], "<i2").tobytes()}, "feature beyond"),
        ({"leaves": np.array([np.nan, 1], "<f4").tobytes()}, "no finite number"),
        ({"leaves": np.array([3e38, 1], "<f4").tobytes()}, "beyond any time"),
        ({"base": float("nan")}, "beyond any time"),
        ({"base": float("-inf")}, "beyond any time"),
        ({"base": 1e300}, "beyond any time"),
        ({"trees": 2**60}, "do not fit"),
    ],
)
def test_trees_that_make_no_sense_are_refused(fields: dict[str, Any], complaint: str) -> None:
    """What comes from the bus is checked before it is used."""
    good: dict[str, Any] = {
        "depth": 1,
        "trees": 1,
        "features": np.array([0], "<i2").tobytes(),
        "thresholds": np.array([1.0], "<f4").tobytes(),
        "leaves": np.array([1, 2], "<f4").tobytes(),
    }
    Forest([TreeSet(**good)], FEATURES)
    with pytest.raises(ValueError, match=complaint):
        Forest([TreeSet(**(good | fields))], FEATURES)
