import math

import numpy as np
import pytest

from controlplane.core.policies import (
    POLICIES,
    DynamoCost,
    LeastRequests,
    Linear,
    Multiplicative,
    RoundRobin,
    SimulatedTtft,
    make_policy,
    smoothed,
)
from controlplane.core.scoring import FleetView, Policy, Request, decide

VIEW = FleetView(
    batch_size=np.array([0, 1, 4]),
    queued_tokens=np.array([600, 0, -50]),
    context_tokens=np.array([600, 1600, 3200]),
)
REQUEST = Request(1000, np.array([0, 400, 960]))


def scores(policy: Policy, view: FleetView = VIEW, request: Request = REQUEST) -> list[float]:
    """Score the fleet above, or another."""
    return policy.score(view, request).tolist()


def test_multiplicative_by_default():
    """P × (B + 1) and nothing else."""
    assert scores(Multiplicative()) == [1600, 1200, 200]


def test_tenant_exponents():
    """A tenant may weigh prefill against batch."""
    request = Request(1000, REQUEST.hit_tokens, alpha=2.0, beta=0.5)
    assert scores(Multiplicative(), request=request) == pytest.approx(
        [1600**2, 600**2 * math.sqrt(2), 40**2 * math.sqrt(5)]
    )


def test_moe_factor_weighs_new_tokens_only():
    """Queued tokens are not multiplied."""
    assert scores(Multiplicative(moe_factor=1.5)) == [600 + 1500, 900 * 2, 60 * 5]


def test_network_latency_adds_tokens():
    """Latency counts as tokens prefilled in that time."""
    view = FleetView(*_arrays(VIEW), network_tokens=np.array([0.0, 100.0, 0.0]))
    assert scores(Multiplicative(), view) == [1600, 1400, 200]


def test_speed_divides_p():
    """Twice as fast an instance has half the prefill to do."""
    view = FleetView(*_arrays(VIEW), speed=np.array([2.0, 1.0, 0.5]))
    assert scores(Multiplicative(), view) == [800, 1200, 400]


def test_smoothing_bounds_long_contexts():
    """P below the threshold is itself; beyond, it grows with its logarithm, without a jump."""
    p = np.array([1.0, 999.0, 1000.0, 1001.0, 1000 * math.e])
    assert smoothed(p, 1000.0) == pytest.approx([1, 999, 1000, 1000.9995, 2000], abs=1e-4)
    assert scores(Multiplicative(smooth_tokens=1000.0)) == pytest.approx(
        [1000 * (1 + math.log(1.6)), 1200, 200]
    )


def test_without_hits_all_instances_compute_the_whole_prompt():
    """A request that could not be tokenized is scored by its length and the load."""
    assert scores(Multiplicative(), request=Request(100)) == [700, 200, 500]
    assert scores(Multiplicative(), request=Request(0)) == [601, 2, 5]
    assert scores(Linear(), request=Request(0))[0] == pytest.approx(0.7)


def test_round_robin_takes_turns():
    """All score the same, so the rotation decides."""
    rows = [decide(VIEW, REQUEST, RoundRobin(), turn).index for turn in range(4)]
    assert rows == [0, 1, 2, 0]


def test_least_requests_looks_at_the_batch_only():
    """The score is B."""
    assert scores(LeastRequests()) == [0, 1, 4]


def test_linear_sums_miss_ratio_and_relative_load():
    """λ of the miss ratio and the rest of the load, both relative."""
    assert scores(Linear(0.7)) == pytest.approx([0.7, 0.7 * 0.6 + 0.3 / 4, 0.7 * 0.04 + 0.3])
    idle = FleetView(np.zeros(3, np.int64), *_arrays(VIEW)[1:])
    assert scores(Linear(0.5), idle) == pytest.approx([0.5, 0.3, 0.02])


def test_dynamo_cost_counts_blocks():
    """Blocks to prefill, weighted, plus blocks in use."""
    assert scores(DynamoCost()) == [2200 / 16, 2200 / 16, 3240 / 16]
    assert scores(DynamoCost(weight=2.0, block_size=8)) == [3800 / 8, 2800 / 8, 3280 / 8]


def test_simulated_ttft_counts_chunks_and_decodes():
    """Prefill time, plus a step's own and its decodes' cost for every chunk."""
    policy = SimulatedTtft(1000.0, chunk_tokens=512, step_s=0.01, decode_s=0.1)
    assert scores(policy) == pytest.approx(
        [1.6 + 4 * 0.01, 0.6 + 2 * (0.01 + 0.1), 0.04 + 1 * (0.01 + 0.4)]
    )
    view = FleetView(*_arrays(VIEW), speed=np.array([2.0, 1.0, 1.0]))
    assert scores(policy, view)[0] == pytest.approx(0.8 + 0.04)


def test_every_policy_is_made_by_name():
    """The registry names what each policy calls itself."""
    assert sorted(POLICIES) == [
        "dynamo_cost",
        "least_requests",
        "linear",
        "multiplicative",
        "round_robin",
        "simulated_ttft",
    ]
    for name in POLICIES:
        assert make_policy(name).name == name
        assert make_policy(name).score(VIEW, REQUEST).dtype == np.float64
    assert make_policy("linear", weight=0.2) == Linear(0.2)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("fastest", {}, "no policy 'fastest': choose one of dynamo_cost, least_requests, linear"),
        ("linear", {"lambda": 1}, "linear has no parameter lambda; it has weight"),
        ("round_robin", {"name": "x"}, "round_robin has no parameter name; it has none"),
        ("linear", {"weight": "much"}, "policy linear: Expected `float`"),
        ("linear", {"weight": math.nan}, "policy linear: Expected `float`"),
        ("dynamo_cost", {"block_size": 0}, "policy dynamo_cost: Expected `float` > 0.0"),
        ("simulated_ttft", {"prefill_tokens_per_s": -1.0}, "Expected `float` > 0.0"),
    ],
)
def test_wrong_configuration_is_explained(name: str, parameters: dict, says: str):
    """The error says what is wrong and what there is instead."""
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        make_policy(name, **parameters)


def _arrays(view: FleetView):
    return view.batch_size, view.queued_tokens, view.context_tokens
