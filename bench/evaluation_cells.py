"""The numbers of an evaluation: a cell is one policy on one kind of traffic at one load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lab.replay_metrics import Metrics, Range, over_seeds

DIGITS = 4


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's numbers: mean, least and most over seeds; times in seconds.

    Attributes:
        load: share of the load that saturates.
        requests: that counted, all seeds together.
        unfinished: that had not ended an hour after the last one came.
        variant: what else was different.
    """

    scenario: str
    load: float
    policy: str
    seeds: int
    requests: int
    unfinished: int
    offered_rps: Range
    served_rps: Range
    ttft_mean_s: Range
    ttft_p99_s: Range
    tpot_mean_s: Range
    tpot_p99_s: Range
    hit_rate: Range
    balance: Range
    busy: Range
    preemptions: Range
    variant: str = ""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """All cells.

    Attributes:
        main: every policy at half the load and at saturation.
        weights: the weights of linear scoring, one seed.
        swept: some policies at other loads, one seed.
        variants: routers, lags and so on, one seed.
        hotspots: planted hotspots, with the detector and without.
    """

    main: list[Cell] = []
    weights: list[Cell] = []
    swept: list[Cell] = []
    variants: list[Cell] = []
    hotspots: list[Cell] = []


def cell_of(scenario: str, load: float, policy: str, rows: Sequence[Metrics]) -> Cell:
    """Return the cell of some runs that differ in their seeds."""
    return Cell(
        scenario=scenario,
        load=load,
        policy=policy,
        seeds=len(rows),
        requests=sum(row.requests for row in rows),
        unfinished=sum(row.unfinished for row in rows),
        offered_rps=_range([row.offered_rps for row in rows]),
        served_rps=_range([row.served_rps for row in rows]),
        ttft_mean_s=_range([row.ttft_s[0] for row in rows]),
        ttft_p99_s=_range([row.ttft_s[3] for row in rows]),
        tpot_mean_s=_range([row.tpot_s[0] for row in rows]),
        tpot_p99_s=_range([row.tpot_s[3] for row in rows]),
        hit_rate=_range([row.hit_rate for row in rows]),
        balance=_range([row.balance for row in rows]),
        busy=_range([row.busy for row in rows]),
        preemptions=_range([float(row.preemptions) for row in rows]),
    )


def _range(values: Sequence[float]) -> Range:
    found = over_seeds(values)
    return Range(*(float(f"{value:.{DIGITS}g}") for value in msgspec.structs.astuple(found)))
