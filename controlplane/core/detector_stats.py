"""What decisions look like, for people: how evenly scores are spread, and how often caches hit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import exp, isfinite

from controlplane.core.candidates import Candidates
from schemas.bus import Finished, Routed

HIT_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Upper bounds of the shares of a prompt that were cached; the first is for none at all."""

SPREAD_EVERY_S = 0.05
"""The spread of scores is computed at most this often: it visits every instance."""

SPREAD_MEMORY_S = 10.0
"""By how much time the weight of a spread falls to 1/e."""

_SCORED = "multiplicative"


class Histogram:
    """Counts of values by upper bound, as Prometheus has them.

    Attributes:
        bounds: upper bounds, inclusive, ascending; what is beyond the last counts in `count` only.
        counts: values in each, not cumulated.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * len(self.bounds)
        self.count = 0
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self.sum += value
        position = bisect_left(self.bounds, value)
        if position < len(self.bounds):
            self.counts[position] += 1

    def cumulative(self) -> list[tuple[float, int]]:
        """Return how many values are at most each bound."""
        total, found = 0, []
        for bound, count in zip(self.bounds, self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class RouteStats:
    """Statistics over the decisions on one model.

    Attributes:
        requests: routed, retries included.
        promised: share of each prompt that the chosen instance was believed to cache.
        actual: share that engines reported, where they do.
        variance: of P × (B + 1) over the instances that a decision could choose, recent decisions
            weighing most; None before there was one. Engines and requests of one model only.
        variation: likewise the standard deviation over the mean: 0 is even.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.promised = Histogram(HIT_BOUNDS)
        self.actual = Histogram(HIT_BOUNDS)
        self.variance: float | None = None
        self.variation: float | None = None
        self._spread_s = float("-inf")

    def routed(
        self, event: Routed, now_s: float, seen: Callable[[], Candidates | None] = lambda: None
    ) -> None:
        """Take a decision.

        Args:
            seen: returns what the decision saw of all instances, where that is known.
        """
        self.requests += 1
        if event.prompt_tokens and event.exact and not event.attempt:
            self.promised.observe(min(event.hit_tokens / event.prompt_tokens, 1.0))
        if event.policy != _SCORED or now_s - self._spread_s < SPREAD_EVERY_S:
            return
        candidates = seen()
        if candidates is not None and candidates.scores is not None:
            self._spread(candidates.scores[candidates.eligible].tolist(), now_s)

    def finished(self, event: Finished) -> None:
        """Take the end of a request."""
        if event.prompt_tokens and event.cached_tokens is not None:
            self.actual.observe(min(event.cached_tokens / event.prompt_tokens, 1.0))

    def _spread(self, scores: list[float], now_s: float) -> None:
        """Let the spread of one decision's scores count."""
        scores = [score for score in scores if isfinite(score)]
        mean = sum(scores) / len(scores) if scores else 0.0
        if not mean > 0.0:
            return
        variance = sum((score - mean) ** 2 for score in scores) / len(scores)
        weight = exp(-max(now_s - self._spread_s, 0.0) / SPREAD_MEMORY_S)
        self.variance = _mixed(self.variance, variance, weight)
        self.variation = _mixed(self.variation, variance**0.5 / mean, weight)
        self._spread_s = now_s


def _mixed(old: float | None, new: float, weight: float) -> float:
    """Return the mean of an old and a new value; the weight is the old one's."""
    return new if old is None else weight * old + (1.0 - weight) * new
