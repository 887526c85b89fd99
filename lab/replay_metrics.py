"""Numbers from results: one row a run, and rows over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from lab.replay_result import Floats, Result


class Metrics(msgspec.Struct, frozen=True):
    """One run in numbers; times in seconds.

    Attributes:
        offered_rps: requests a second that came.
        served_rps: requests a second that ended, from the first arrival to the last end.
        ttft_s: mean, p50, p90, p99.
        tpot_s: likewise, seconds a token.
        hit_rate: cached prompt tokens over all, as the engines had it.
        promised_rate: the same, as routers believed.
        balance: largest batch over the mean batch, averaged over time; 1 is even.
        busy: share of time that engines were stepping, mean of all.
        preemptions: requests sent back to an engine's queue.
        wait_s: mean, p50, p90, p99 of the time in routers' queues; None where nobody queues.
        shed_rate: refused requests over all; None likewise.
        in_time_rate: answers that began within their budgets, over all requests; None where no
            request has a budget.
        goodput_rps: such answers a second, over the same time as `served_rps`; None likewise.
    """

    policy: str
    trace: str
    seed: int
    requests: int
    unfinished: int
    offered_rps: float
    served_rps: float
    ttft_s: tuple[float, float, float, float]
    tpot_s: tuple[float, float, float, float]
    hit_rate: float
    promised_rate: float
    balance: float
    busy: float
    preemptions: int
    cpu_s: float
    wait_s: tuple[float, float, float, float] | None = None
    shed_rate: float | None = None
    in_time_rate: float | None = None
    goodput_rps: float | None = None


def measure(result: Result, warm_up_s: float = 0.0) -> Metrics:
    """Return the numbers of a run.

    Args:
        warm_up_s: requests that came before this do not count in latencies and hits.
    """
    counted = result.at_s >= warm_up_s
    prompt = max(int(result.prompt_tokens[counted].sum()), 1)
    arrived = len(result.at_s) + len(result.shed_at_s) + result.unfinished
    shed = int((result.shed_at_s >= warm_up_s).sum())
    asked = max(int(counted.sum()) + shed + result.unfinished, 1)
    in_time = result.ttft_s <= result.budget_s
    queued = bool(result.queue or result.wait_s.any())
    budgeted = bool(np.isfinite(result.budget_s).any())
    end_s = result.lasted_s
    busy_s = max(end_s, result.span_s)
    return Metrics(
        policy=result.policy,
        trace=result.trace,
        seed=result.seed,
        requests=int(counted.sum()),
        unfinished=result.unfinished,
        offered_rps=arrived / result.span_s if result.span_s else 0.0,
        served_rps=len(result.at_s) / end_s if end_s else 0.0,
        ttft_s=spread(result.ttft_s[counted]),
        tpot_s=spread(result.tpot_s[counted]),
        hit_rate=float(result.cached_tokens[counted].sum()) / prompt,
        promised_rate=float(result.promised_tokens[counted].sum()) / prompt,
        balance=_balance(result),
        busy=float(result.busy_s.mean()) / busy_s if busy_s else 0.0,
        preemptions=result.preemptions,
        cpu_s=result.cpu_s,
        wait_s=spread(result.wait_s[counted]) if queued else None,
        shed_rate=shed / asked if queued else None,
        in_time_rate=int((in_time & counted).sum()) / asked if budgeted else None,
        goodput_rps=(int(in_time.sum()) / end_s if end_s else 0.0) if budgeted else None,
    )


def spread(values: Floats) -> tuple[float, float, float, float]:
    """Return mean, p50, p90 and p99 of the values that are numbers; NaN where there are none."""
    values = values[np.isfinite(values)]
    if not len(values):
        return (float("nan"),) * 4
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return float(values.mean()), p50, p90, p99


def _balance(result: Result) -> float:
    """Return max over mean of the instances' batches, where there is a request for each."""
    batch = result.batch[result.sample_s <= result.span_s]
    busy = batch[batch.sum(axis=1) >= batch.shape[1]]
    if not len(busy):
        return 1.0
    return float((busy.max(axis=1) / busy.mean(axis=1)).mean())


class Range(msgspec.Struct, frozen=True):
    """A number over seeds: mean, least and most."""

    mean: float
    least: float
    most: float


def over_seeds(values: Sequence[float]) -> Range:
    """Return the range of a number over seeds."""
    return Range(float(np.mean(values)), min(values), max(values))
