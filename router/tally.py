"""Counts and histograms that cost next to nothing to keep; rendered by `router.metrics`.

A metric library takes a lock, looks labels up and checks types at every count, which is more than
the thing counted costs. One event loop owns these, so a dict and a list will do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence


class Tally(dict[tuple[str, ...], float]):
    """A count for each combination of label values: `tally["ok", "2xx"] += 1`.

    Whoever counts keeps the values bounded: outcomes, reasons, names from a configuration.

    Attributes:
        name: of the metric, without prefix and `_total`.
        help: one sentence.
        labels: their names.
    """

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__()
        self.name = name
        self.help = text
        self.labels = labels
        if not labels:
            self[()] = 0

    def __missing__(self, key: tuple[str, ...]) -> float:
        return 0


class Spread:
    """How values are distributed over buckets.

    Attributes:
        name: of the metric, without prefix.
        help: one sentence.
        bounds: (n,) upper bounds of the buckets, ascending; a value on a bound is inside.
        counts: (n + 1,) values by bucket, the last beyond all bounds.
        total: the sum of all values.
    """

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value. O(log n)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield (upper bound, values up to it) for each bucket, infinity last."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below
