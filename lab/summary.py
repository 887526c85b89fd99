"""What a run came to: one row a policy, in numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
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
    """Return the runs side by side, a column each; where there are two, their ratio as well."""
    heads, rows = _cells(summaries)
    shown = Table(*heads, box=SIMPLE_HEAD)
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(summaries: Sequence[Summary]) -> str:
    """Return what `table` shows, as a table in Markdown."""
    heads, rows = _cells(summaries)
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Return the heads of the columns, and the rows."""
    numbers: list[tuple[str, list[float], str]] = [
        ("requests", [run.requests for run in summaries], ",.0f"),
        ("failed", [run.failed for run in summaries], ",.0f"),
        *(
            (f"TTFT {name}, s", [run.ttft_s[place] for run in summaries], ".3f")
            for place, name in enumerate(("mean", "p50", "p95", "p99"))
        ),
        ("TPOT mean, ms", [run.tpot_s[0] * 1e3 for run in summaries], ".1f"),
        ("TPOT p99, ms", [run.tpot_s[1] * 1e3 for run in summaries], ".1f"),
        ("hit rate", [run.hit_rate for run in summaries], ".1%"),
        ("most loaded / mean", [run.balance for run in summaries], ".2f"),
    ]
    two = len(summaries) == 2
    heads = ["", *(run.name for run in summaries), *(["ratio"] if two else [])]
    rows = []
    for name, values, form in numbers:
        row = [name, *(format(value, form) for value in values)]
        if two:
            comparable = values[1] and name not in ("requests", "failed")
            row.append(f"{values[0] / values[1]:.2f}" if comparable else "")
        rows.append(row)
    return heads, rows
