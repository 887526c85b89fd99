"""How many instances a service level needs: the smallest fleet that meets it, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from lab.replay_metrics import Metrics

Run = Callable[[int], Metrics]
"""Replays on so many instances."""


class Slo(msgspec.Struct, frozen=True):
    """A service level; what is infinite is not asked for.

    Attributes:
        ttft_p99_s: 99 of 100 requests have their first token by then.
        tpot_p99_s: 99 of 100 answers take no longer a token.
    """

    ttft_p99_s: float = math.inf
    tpot_p99_s: float = math.inf

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: nothing is asked for, or a time is not positive.
        """
        if math.isinf(self.ttft_p99_s) and math.isinf(self.tpot_p99_s):
            raise ValueError("ask for a TTFT, a TPOT or both")
        if not (self.ttft_p99_s > 0 and self.tpot_p99_s > 0):
            raise ValueError("times must be positive")

    def met(self, row: Metrics) -> bool:
        """Whether a run was good enough: every request ended, in time."""
        tpot_s = row.tpot_s[3]  # NaN where every answer has one token
        return (
            not row.unfinished and row.ttft_s[3] <= self.ttft_p99_s and not tpot_s > self.tpot_p99_s
        )


class Answer(msgspec.Struct, frozen=True):
    """The smallest fleet that was found good enough.

    Attributes:
        instances: None if not even the largest one was.
        at: its run, or the largest fleet's.
        tried: every size that was run, and whether it was good enough.
    """

    instances: int | None
    at: Metrics
    tried: dict[int, bool]


def instances_needed(run: Run, slo: Slo, instances_max: int) -> Answer:
    """Return the smallest fleet that meets a service level.

    More instances are taken never to be worse, so sizes double until one is good enough, and the
    gap below it is halved.
    """
    assert instances_max >= 1
    runs: dict[int, Metrics] = {}

    def good(size: int) -> bool:
        if size not in runs:
            runs[size] = run(size)
        return slo.met(runs[size])

    bad, size = 0, 1
    while not good(size):
        if size == instances_max:
            return Answer(None, runs[size], _tried(slo, runs))
        bad, size = size, min(2 * size, instances_max)
    while size - bad > 1:
        middle = (bad + size) // 2
        if good(middle):
            size = middle
        else:
            bad = middle
    return Answer(size, runs[size], _tried(slo, runs))


def _tried(slo: Slo, runs: dict[int, Metrics]) -> dict[int, bool]:
    return {size: slo.met(row) for size, row in sorted(runs.items())}
