"""What decisions look like in numbers."""

from __future__ import annotations

import pytest

from controlplane.core.detector_stats import Histogram, RouteStats
from schemas.bus import Candidate, Finished, Routed


def _decision(*scores: float, **fields: object) -> Routed:
    candidates = [Candidate(f"i{n}", 0, 0, 0, score) for n, score in enumerate(scores)]
    return Routed("r", "i0", 0.0, candidates=candidates, **fields)  # type: ignore[arg-type]


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
    event = _decision(2.0, 4.0, 6.0, float("inf"))
    barred = [*event.candidates, Candidate("x", 0, 0, 0, 1e9, False)]
    stats.routed(Routed("r", "i", 0.0, candidates=barred), 0.0)
    assert stats.variance == pytest.approx(8 / 3)
    assert stats.variation == pytest.approx((8 / 3) ** 0.5 / 4)


def test_recent_decisions_weigh_most() -> None:
    """After ten memories the old spread is forgotten; soon after it is not."""
    stats = RouteStats()
    stats.routed(_decision(1.0, 3.0), 0.0)
    stats.routed(_decision(1.0, 1.0), 1.0)
    assert stats.variance == pytest.approx(0.905, abs=1e-3)
    stats.routed(_decision(1.0, 1.0), 101.0)
    assert stats.variance == pytest.approx(0.0, abs=1e-3)


def test_the_spread_is_sampled_in_time() -> None:
    """It visits every instance, so it is not computed for every request of a burst."""
    stats = RouteStats()
    stats.routed(_decision(1.0, 3.0), 0.0)
    stats.routed(_decision(1.0, 1.0), 0.049)
    assert stats.variance == 1.0


@pytest.mark.parametrize(
    "event",
    [
        _decision(0.0, 0.0),
        _decision(float("inf")),
        _decision(1.0, 3.0, policy="round_robin"),
        Routed("r", "i", 0.0),
    ],
)
def test_decisions_without_scores_leave_the_spread_alone(event: Routed) -> None:
    """Nothing is made of no numbers."""
    stats = RouteStats()
    stats.routed(event, 0.0)
    assert stats.variance is None
    assert stats.variation is None
