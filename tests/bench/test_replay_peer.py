"""Our replays beside those of NVIDIA Dynamo's offline replayer, engine for engine."""

import msgspec
import numpy as np
import pytest

from bench import dynamo_env
from bench.replay_peer import PeerOutcome, peer_config, run_peer
from lab.generators import generate
from lab.replay import replay
from lab.replay_config import PolicySpec, ReplayConfig
from lab.replay_result import Result
from lab.traces import Trace, TraceRequest, sample_trace

HIT_DIFFERENCE_MAX = 0.02
TTFT_DIFFERENCE_MAX = 0.15

peer = pytest.mark.peer


def both(trace: Trace, config: ReplayConfig) -> tuple[Result, PeerOutcome]:
    """Replays a trace twice under round robin."""
    return replay(trace, PolicySpec("round_robin"), config), run_peer(trace, config)


def order(at_s: np.ndarray, prompt_tokens: np.ndarray) -> np.ndarray:
    """The order that makes the requests of both comparable: many come at the same time."""
    return np.lexsort((prompt_tokens, at_s))


@peer
@pytest.mark.parametrize(
    ("traffic", "instances", "block_size", "blocks"),
    [("sample", 16, 512, 2_000), ("sample", 8, 512, 400), ("chatbot", 4, 16, 8_000)],
    ids=["roomy", "evicting", "fine blocks"],
)
def test_equal_engines_come_to_the_same(
    traffic: str, instances: int, block_size: int, blocks: int
) -> None:
    """Who serves, what is cached, and how long it takes agree, request by request."""
    trace = sample_trace()
    if traffic != "sample":
        trace = generate(traffic, seed=1, duration_s=120.0, requests_per_s=12.0)
    ours, theirs = both(trace, peer_config(instances, block_size, blocks))
    assert len(ours.at_s) == len(theirs.at_s) == len(trace.requests)
    assert ours.preemptions == 0

    hit_rate = ours.cached_tokens.sum() / ours.prompt_tokens.sum()
    assert abs(hit_rate - theirs.hit_rate) < HIT_DIFFERENCE_MAX
    assert ours.ttft_s.mean() == pytest.approx(theirs.ttft_s.mean(), rel=TTFT_DIFFERENCE_MAX)

    # Far closer than asked for: the two schedulers make the same batches nearly always.
    mine, other = order(ours.at_s, ours.prompt_tokens), order(theirs.at_s, theirs.prompt_tokens)
    assert (ours.instance[mine] == theirs.instance[other]).mean() > 0.99
    assert (ours.cached_tokens[mine] == theirs.cached_tokens[other]).mean() > 0.99
    difference = np.abs(ours.ttft_s[mine] / theirs.ttft_s[other] - 1)
    assert np.percentile(difference, 90) < 0.02
    assert np.nanmean(ours.tpot_s) == pytest.approx(np.nanmean(theirs.tpot_s), rel=0.01)


@peer
def test_few_preemptions_change_little() -> None:
    """Memory so short that requests are sent back: hits and times still agree."""
    trace = sample_trace().within(90_000)
    ours, theirs = both(trace, peer_config(8, 512, 200))
    assert ours.preemptions > 0
    hit_rate = ours.cached_tokens.sum() / ours.prompt_tokens.sum()
    assert abs(hit_rate - theirs.hit_rate) < HIT_DIFFERENCE_MAX
    assert ours.ttft_s.mean() == pytest.approx(theirs.ttft_s.mean(), rel=TTFT_DIFFERENCE_MAX)


@peer
def test_the_peer_takes_a_step_more_for_a_preempted_request() -> None:
    """Why long times of too little memory differ: ours samples a token as it computes anew.

    So does vLLM (tests/vllm/test_engine_fidelity.py). Up to the preemption all times are equal.
    """
    grower = TraceRequest(0.0, 790, 100, tuple(range(50)))
    victim = TraceRequest(0.001, 790, 100, tuple(range(1000, 1050)))
    config = peer_config(1, 16, 100)
    ours, theirs = both(Trace("two", 16, (grower, victim)), config)
    assert ours.preemptions == 1
    assert ours.ttft_s == pytest.approx(theirs.ttft_s)
    ours_s, theirs_s = ours.tpot_s * 99, theirs.tpot_s * 99
    assert ours_s[0] == pytest.approx(theirs_s[0])
    step_s = config.engine.step_times.decode_s(1, 1, 890)
    assert theirs_s[1] - ours_s[1] == pytest.approx(step_s, rel=0.1)


@peer
def test_the_peers_router_does_as_its_cost_does_here() -> None:
    """`dynamo_cost` over our exact index comes to what the peer's own router comes to."""
    trace, config = sample_trace(), peer_config(16, 512, 2_000)
    theirs = run_peer(trace, config, "kv_router")
    ours = replay(trace, PolicySpec("dynamo_cost"), config)
    hit_rate = ours.cached_tokens.sum() / ours.prompt_tokens.sum()
    assert hit_rate == pytest.approx(theirs.hit_rate, abs=HIT_DIFFERENCE_MAX)
    assert ours.ttft_s.mean() == pytest.approx(theirs.ttft_s.mean(), rel=TTFT_DIFFERENCE_MAX)


def test_its_step_times_are_the_peers() -> None:
    """Values that single requests showed: 1,000 and 4,000 new tokens, one and two decoding."""
    times = peer_config(1, 512, 2_000).engine.step_times
    assert times.step_s(1000, 1, pairs=1) == pytest.approx(32.105859e-3)
    assert times.step_s(4001, 2, pairs=1) == pytest.approx(83.971162e-3)
    assert times.step_s(1, 1, kv_tokens=1001) == pytest.approx(5.792772e-3)
    mixed = times.step_s(3001, 2, pairs=1, kv_tokens=1005)
    assert mixed == pytest.approx(126.910977e-3 - 55.277264e-3, abs=1e-6)


@pytest.mark.parametrize(("sequences", "context"), [(1, 700), (40, 300_000)])
def test_runs_of_its_steps_have_a_closed_form(sequences: int, context: int) -> None:
    """Many steps last as long as each by itself, and a horizon is met by no step too many."""
    times = peer_config(1, 512, 2_000).engine.step_times
    single = [times.decode_s(1, sequences, context + sequences * turn) for turn in range(50)]
    assert times.decode_s(50, sequences, context) == pytest.approx(sum(single))
    for horizon_s in (1e-6, 0.02, 0.25):
        steps = times.decode_steps_in(horizon_s, sequences, context)
        assert times.decode_s(steps, sequences, context) >= horizon_s
        assert steps == 1 or times.decode_s(steps - 1, sequences, context) < horizon_s
    assert times.decode_steps_in(float("inf"), sequences, context) > 1_000_000


def test_a_peer_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Where nothing can be installed, the error says what failed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dynamo_env, "PEER", "ai-dynamo-runtime @ file:///nowhere")
    monkeypatch.setattr(dynamo_env.sys, "executable", "/nowhere/python")
    with pytest.raises((dynamo_env.PeerUnavailable, OSError)):
        dynamo_env.interpreter()


def test_settings_are_equal() -> None:
    """Both have the same number of usable blocks; vLLM's null block is not counted by the peer."""
    config = peer_config(2, 16, 100)
    assert config.engine.num_blocks == 101
    assert msgspec.structs.replace(config, instances=3).instances == 3
