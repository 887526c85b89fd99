"""One training: from the samples of late to a model, if it is no worse than the one in use.

The samples, by age:   learn from these | set the margins by these | judge by these
                                                                    (the newest, at most 1,000)

XGBoost's own 99th percentile is too low for requests that it has not seen, so the p99 is widened by
a margin: the factor under which 99 % of samples stay that the trees were not learnt from (split
conformal prediction). A model is judged by the newest samples, which neither it nor the one in use
has seen: by how far the share within the p99 is from 0.99, then by the p99s' pinball loss.
Whichever stays, its margins are then set anew by everything that its trees were not learnt from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.core.latency import FEATURES, Learnt, Rows, rows_of
from controlplane.predictor.samples import Sample
from controlplane.predictor.trees import TREES, learn_mean, learn_quantile
from schemas.bus import LatencyModel, TreeSet

SHARE = 0.99
HELD_BACK = 0.15
HELD_BACK_MAX = 1000
LEARN_SAMPLES_MIN = 200
_SHORTEST_S = 1e-4
_NEAR = 0.005
"""Shares that differ by less are equally good."""

Times = NDArray[np.float32]


class Outcome(msgspec.Struct, frozen=True):
    """What a training came to.

    Attributes:
        model: to be published: the new one, or the old one with margins for what is so now.
        replaced: whether it is the new one.
    """

    model: LatencyModel
    replaced: bool


class _Table:
    """Samples as arrays: `times` is (n, 2), NaN where a time is not known."""

    def __init__(self, rows: Rows, times: Times) -> None:
        self.rows = rows
        self.times = times

    def part(self, begin: int, end: int) -> _Table:
        return _Table(self.rows[begin:end], self.times[begin:end])


def learn(
    model: str,
    samples: Sequence[Sample],
    known: LatencyModel | None,
    now_wall_s: float,
    trees: int = TREES,
) -> Outcome | None:
    """Return the model to publish; None if there are too few samples. Takes about a second.

    Args:
        model: whose.
        samples: the oldest first.
        known: the model in use.
        now_wall_s: for people.
        trees: in each of the four sums.
    """
    count = len(samples)
    held = min(int(count * HELD_BACK), HELD_BACK_MAX)
    if count - 2 * held < LEARN_SAMPLES_MIN:
        return None
    table = _Table(
        rows_of([each.known for each in samples], {}),
        np.array([(_or_nan(each.ttft_s), each.total_s) for each in samples], np.float32),
    )
    new = _learnt(model, table.part(0, count - 2 * held), known, now_wall_s, trees)
    new = with_margins(new, table.part(count - 2 * held, count - held))
    judged = table.part(count - held, count)
    replaced = known is None or known.features != new.features
    if known is not None and not replaced:
        replaced = score(new, judged) <= score(known, judged)
    kept = new if replaced or known is None else known
    kept = with_margins(kept, table.part(count - 2 * held, count))
    within, error_s = _measured(kept, judged)
    confirmed = 0 if known is None else known.confirmed + 1
    kept = msgspec.structs.replace(kept, confirmed=confirmed, within=within, error_s=error_s)
    return Outcome(kept, replaced)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _learnt(
    model: str, table: _Table, known: LatencyModel | None, now_wall_s: float, trees: int
) -> LatencyModel:
    sets: list[TreeSet] = []
    for column in range(2):
        times = table.times[:, column]
        there = np.isfinite(times)
        if not there.any():  # no answer was streamed: the first byte is as late as the end
            times = table.times[:, 1]
            there = np.isfinite(times)
        rows, seconds = table.rows[there], times[there]
        sets.append(learn_mean(rows, seconds, trees))
        logs = np.log(np.maximum(seconds, _SHORTEST_S))
        sets.append(learn_quantile(rows, logs, SHARE, trees))
    return LatencyModel(
        model,
        1 if known is None else known.version + 1,
        0,
        now_wall_s,
        list(FEATURES),
        len(table.rows),
        sets[0],
        sets[1],
        sets[2],
        sets[3],
    )


def with_margins(model: LatencyModel, table: _Table) -> LatencyModel:
    """Return a model whose p99s hold for that share of some samples, if there are enough."""
    plain = Learnt(msgspec.structs.replace(model, margins=(1.0, 1.0))).predict(table.rows)
    margins = []
    for column in range(2):
        times = table.times[:, column]
        there = np.isfinite(times)
        ratios = times[there] / np.maximum(plain[there, 2 * column + 1], _SHORTEST_S)
        count = len(ratios)
        if count < LEARN_SAMPLES_MIN // 4:
            margins.append(model.margins[column])
            continue
        rank = min(int(np.ceil(SHARE * (count + 1))), count)
        margins.append(float(np.sort(ratios)[rank - 1]))
    return msgspec.structs.replace(model, margins=(margins[0], margins[1]))


def score(model: LatencyModel, table: _Table) -> tuple[float, float]:
    """Return how bad a model is for some samples: how far from 99 %, then the pinball loss."""
    found = Learnt(model).predict(table.rows)
    off, loss = 0.0, 0.0
    for column in range(2):
        times = table.times[:, column]
        there = np.isfinite(times)
        if not there.any():
            continue
        over = times[there] - found[there, 2 * column + 1]
        off += max(abs(float((over <= 0).mean()) - SHARE) - _NEAR, 0.0)
        loss += float(np.maximum(SHARE * over, (SHARE - 1) * over).mean())
    return off, loss


def _measured(
    model: LatencyModel, table: _Table
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the shares within the p99s, and the mean absolute errors of the means."""
    found = Learnt(model).predict(table.rows)
    within, errors = [], []
    for column in range(2):
        times = table.times[:, column]
        there = np.isfinite(times)
        some = bool(there.any())
        kept = times[there] <= found[there, 2 * column + 1]
        within.append(float(kept.mean()) if some else 0.0)
        error = np.abs(times[there] - found[there, 2 * column])
        errors.append(float(error.mean()) if some else 0.0)
    return (within[0], within[1]), (errors[0], errors[1])
