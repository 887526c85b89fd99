"""Counts and distributions."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from router.tally import Spread, Tally

BOUNDS = [0.1, 0.5, 1.0, 5.0]


def test_a_tally_counts_by_label_values() -> None:
    """What was never counted is 0, and does not show."""
    tally = Tally("requests", "Requests.", "outcome", "status")
    tally["ok", "2xx"] += 1
    tally["ok", "2xx"] += 2
    assert tally["failed", "5xx"] == 0
    assert dict(tally) == {("ok", "2xx"): 3}
    assert dict(Tally("tokens", "Tokens.")) == {(): 0}


@given(st.lists(st.floats(0.0, 10.0) | st.sampled_from(BOUNDS)))
def test_a_spread_is_a_histogram(values: list[float]) -> None:
    """Each bucket counts the values up to its bound, that included."""
    spread = Spread("time_seconds", "Time.", BOUNDS)
    total = 0.0  # `sum` rounds otherwise from Python 3.12 on
    for value in values:
        spread.observe(value)
        total += value
    for bound, count in spread.cumulative():
        assert count == sum(value <= bound for value in values)
    assert spread.total == total
    assert sum(spread.counts) == len(values)
    assert all(0 <= bisect_left(BOUNDS, value) <= len(BOUNDS) for value in values)
