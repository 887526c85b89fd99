"""What a decision tells of its request's classes, against the same told row by row."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.decision import Decision, RouteRequest
from controlplane.core.index import Match
from controlplane.core.scoring import Choice
from controlplane.core.stream import Trust

BLOCK_SIZE = 16
BLOCKS = 9

ROW = st.tuples(
    st.integers(0, BLOCKS),  # blocks it holds
    st.sampled_from([1.0, 2.0, 2.0, 7.0, inf]),  # its score
    st.booleans(),  # whether it is a candidate
)


def decision_over(rows: list[tuple[int, float, bool]], filtered: bool) -> Decision:
    """Return a decision for a prompt of `BLOCKS` whole blocks and a token over such instances."""
    held, scores, passed = (np.array(column) for column in zip(*rows, strict=True))
    candidates = passed if filtered and passed.any() else None
    ranked = scores if candidates is None else np.where(candidates, scores, inf)
    choice = Choice(
        int(ranked.argmin()), float(ranked.min()), "multiplicative", 1, scores, candidates
    )
    masks = [sum(1 << row for row, n in enumerate(held) if n >= d) for d in range(1, BLOCKS + 1)]
    levels = [
        (depth, mask)
        for depth, (mask, after) in enumerate(zip(masks, [*masks[1:], 0], strict=True), 1)
        if mask and mask != after
    ]
    request = RouteRequest("r", BLOCKS * BLOCK_SIZE + 1, list(range(100, 100 + BLOCKS)), BLOCK_SIZE)
    hits = held * BLOCK_SIZE if levels else None
    zeros = np.zeros(len(rows), np.int64)
    match = Match(tuple(levels))
    return Decision(request, (), choice, match, hits, None, zeros, zeros, None, "", Trust.EXACT, 0)


@given(st.lists(ROW, min_size=1, max_size=8), st.booleans())
def test_classes_tell_how_many_hold_them_and_the_best_on_either_side(
    rows: list[tuple[int, float, bool]], filtered: bool
):
    """At each depth: the holders, and the least scores of candidates among them and beside them."""
    filtered = filtered and any(passed for _, _, passed in rows)
    found = decision_over(rows, filtered).classes()
    assert [each.depth_blocks for each in found] == [1, 2, 4, 8]
    for each in found:
        inside, outside = [], []
        for held, score, passed in rows:
            if score < inf and (passed or not filtered):
                (inside if held >= each.depth_blocks else outside).append(score)
        assert each.holders == sum(held >= each.depth_blocks for held, _, _ in rows)
        assert (each.best_inside, each.best_outside) == (
            min(inside, default=None),
            min(outside, default=None),
        )
