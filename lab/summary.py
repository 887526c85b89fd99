"""What a run came to: one row a policy, in numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lab.load import Answered


class Summary(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        ttft_s: mean, p50, p95 and p99, seconds.
        tpot_s: mean and p99, seconds a token.
        hit_rate: cached prompt tokens over all prompt tokens, as the engines reported them.
        balance: largest number of requests on an instance over the mean; 1 is even.
    """

    name: str
    requests: int
    failed: int
    ttft_s: tuple[float, float, float, float]
    tpot_s: tuple[float, float]
    hit_rate: float
    balance: float
    seconds: float


def summarize(
    name: str,
    results: Sequence[Answered],
    by_instance: Mapping[str, int],
    *,
    seconds: float,
    clock: float = 1.0,
) -> Summary:
    """Return the numbers of a run.

    Args:
        by_instance: requests that each instance got.
        seconds: how long the run took.
        clock: how many seconds of the engines a second of this run stands for.
    """
    good = [result for result in results if result.ok]
    ttft = np.array([r.ttft_s for r in good if r.ttft_s is not None] or [np.nan]) * clock
    tpot = np.array([t for r in good if (t := r.tpot_s) is not None] or [np.nan]) * clock
    prompt = sum(result.planned.prompt_tokens for result in good)
    cached = sum(result.cached_tokens or 0 for result in good)
    counts = list(by_instance.values())
    return Summary(
        name,
        len(results),
        len(results) - len(good),
        (float(ttft.mean()), *_percentiles(ttft)),
        (float(tpot.mean()), float(np.percentile(tpot, 99))),
        cached / prompt if prompt else 0.0,
        max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0,
        seconds,
    )


def _percentiles(values: NDArray[np.float64]) -> tuple[float, float, float]:
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return float(p50), float(p95), float(p99)


def table(summaries: Sequence[Summary]) -> Table:
    """Return the runs side by side."""
    shown = Table(
        "policy",
        *("requests", "failed", "TTFT mean", "p50", "p95", "p99", "TPOT mean", "p99"),
        *("hit rate", "max/mean load"),
        title="times in ms",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for run in summaries:
        shown.add_row(
            run.name,
            f"{run.requests:,}",
            str(run.failed),
            *(f"{value * 1e3:,.0f}" for value in run.ttft_s),
            *(f"{value * 1e3:,.1f}" for value in run.tpot_s),
            f"{run.hit_rate:.1%}",
            f"{run.balance:.2f}",
        )
    return shown
