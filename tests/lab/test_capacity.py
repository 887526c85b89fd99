from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.capacity import Answer, Slo, instances_needed
from lab.replay_metrics import Metrics, measure
from tests.lab.replay_helpers import chats, run

ROW = Metrics(
    policy="p",
    trace="t",
    seed=0,
    requests=1,
    unfinished=0,
    offered_rps=1.0,
    served_rps=1.0,
    ttft_s=(1.0, 1.0, 1.0, 1.0),
    tpot_s=(0.01, 0.01, 0.01, 0.01),
    hit_rate=0.0,
    promised_rate=0.0,
    balance=1.0,
    busy=0.5,
    preemptions=0,
    cpu_s=0.0,
)


def ask(needed: int, most: int) -> Answer:
    """What is answered where fleets from `needed` on are good enough."""

    def fleet(size: int) -> Metrics:
        p99_s = 1.0 if size >= needed else 3.0
        return msgspec.structs.replace(ROW, ttft_s=(1.0, 1.0, 1.0, p99_s))

    return instances_needed(fleet, Slo(ttft_p99_s=2.0), most)


@given(st.integers(1, 70), st.integers(1, 64))
def test_the_smallest_fleet_that_is_good_enough_is_found(needed: int, most: int) -> None:
    """By few runs, each of another size; none at all if the largest is not enough."""
    answer = ask(needed, most)
    assert answer.instances == (needed if needed <= most else None)
    assert len(answer.tried) <= 2 * math.ceil(math.log2(most)) + 1
    for size, good in answer.tried.items():
        assert good is (size >= needed)
    assert answer.at.ttft_s[3] == (1.0 if needed <= most else 3.0)


def test_a_service_level_is_met_by_all_that_it_asks_for() -> None:
    """Both percentiles, and every request ended."""
    slo = Slo(ttft_p99_s=1.0, tpot_p99_s=0.01)
    assert slo.met(ROW)
    assert not slo.met(msgspec.structs.replace(ROW, unfinished=1))
    assert not slo.met(msgspec.structs.replace(ROW, tpot_s=(0.01, 0.01, 0.01, 0.02)))
    assert not slo.met(msgspec.structs.replace(ROW, ttft_s=(1.0, 1.0, 1.0, 1.1)))
    assert slo.met(msgspec.structs.replace(ROW, tpot_s=(math.nan,) * 4)), "answers of one token"


def test_a_service_level_asks_for_something() -> None:
    """Nothing, or a time that is not positive, makes no sense."""
    with pytest.raises(ValueError, match="TTFT, a TPOT or both"):
        Slo()
    with pytest.raises(ValueError, match="positive"):
        Slo(ttft_p99_s=0.0)


@pytest.mark.slow
def test_a_real_fleet_is_sized() -> None:
    """The fleet found meets the level, one instance less does not."""
    trace = chats(duration_s=8.0, qps=15.0)

    def fleet(size: int) -> Metrics:
        return measure(run(trace, instances=size))

    slo = Slo(tpot_p99_s=0.0105)
    answer = instances_needed(fleet, slo, 16)
    assert answer.instances is not None
    assert answer.instances > 1
    assert slo.met(fleet(answer.instances))
    assert not slo.met(fleet(answer.instances - 1))
