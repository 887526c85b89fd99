"""What decisions look like in numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controlplane.core.candidates import Candidates
from controlplane.core.detector_stats import Histogram, RouteStats
from schemas.bus import Finished, Routed
from tests.core.candidate_helpers import candidates

ROUTED = Routed("r", "i0", 0.0)


def _seen(*scores: float, barred: int = 0) -> Callable[[], Candidates]:
    """Return what lets a decision be read; of these scores the last `barred` are not eligible."""
    names = [f"i{number}" for number in range(len(scores))]
    eligible = [True] * (len(scores) - barred) + [False] * barred
    return lambda: candidates(names, scores=scores, eligible=eligible)


def test_a_histogram_counts_by_inclusive_upper_bound() -> None:
    """A value on a bound belongs to it; one beyond the last counts in the total only."""
    histogram = Histogram((0.0, 0.5, 1.0))
    for value in (0.0, 0.2, 0.5, 0.6, 1.5):
        histogram.observe(value)
    assert histogram.cumulative() == [(0.0, 1), (0.5, 3), (1.0, 4)]
    assert (histogram.count, round(histogram.sum, 9)) == (5, 2.8)


def test_hits_are_told_apart_into_promised_and_actual() -> None:
    """What a router promised and what the engine reported are two distributions."""
    stats = RouteStats()
    stats.routed(Routed("r", "i", 0.0, prompt_tokens=100, hit_tokens=80), 0.0)
    stats.routed(Routed("r", "i", 0.0, prompt_tokens=100, hit_tokens=80, attempt=1), 0.0)
    stats.routed(Routed("r", "i", 0.0, prompt_tokens=100, exact=False), 0.0)
    stats.routed(Routed("r", "i", 0.0), 0.0)
    stats.finished(Finished("r", "i", "ok", 200, 0.0, prompt_tokens=100, cached_tokens=48))
    stats.finished(Finished("r", "i", "ok", 200, 0.0, prompt_tokens=100))
    assert stats.requests == 4
    assert (stats.promised.count, stats.promised.sum) == (1, 0.8)
    assert (stats.actual.count, stats.actual.sum) == (1, 0.48)


def test_the_spread_is_that_of_the_scores_that_could_be_chosen() -> None:
    """Variance and variation over the eligible instances; infinities say nothing."""
    stats = RouteStats()
    stats.routed(ROUTED, 0.0, _seen(2.0, 4.0, 6.0, float("inf"), 1e9, barred=1))
    assert stats.variance == pytest.approx(8 / 3)
    assert stats.variation == pytest.approx((8 / 3) ** 0.5 / 4)


def test_recent_decisions_weigh_most() -> None:
    """After ten memories the old spread is forgotten; soon after it is not."""
    stats = RouteStats()
    stats.routed(ROUTED, 0.0, _seen(1.0, 3.0))
    stats.routed(ROUTED, 1.0, _seen(1.0, 1.0))
    assert stats.variance == pytest.approx(0.905, abs=1e-3)
    stats.routed(ROUTED, 101.0, _seen(1.0, 1.0))
    assert stats.variance == pytest.approx(0.0, abs=1e-3)


def test_the_spread_is_sampled_in_time() -> None:
    """It visits every instance, so it is not computed for every request of a burst."""
    stats = RouteStats()
    stats.routed(ROUTED, 0.0, _seen(1.0, 3.0))
    stats.routed(ROUTED, 0.049, _seen(1.0, 1.0))
    assert stats.variance == 1.0


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        ("multiplicative", _seen(0.0, 0.0)),
        ("multiplicative", _seen(float("inf"))),
        ("round_robin", _seen(1.0, 3.0)),
        ("multiplicative", lambda: candidates("ab")),
        ("multiplicative", lambda: None),
    ],
)
def test_decisions_without_scores_leave_the_spread_alone(
    policy: str, seen: Callable[[], Candidates | None]
) -> None:
    """Nothing is made of no numbers."""
    stats = RouteStats()
    stats.routed(Routed("r", "i", 0.0, policy=policy), 0.0, seen)
    assert stats.variance is None
    assert stats.variation is None
