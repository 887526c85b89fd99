from __future__ import annotations

import gc

import numpy as np
import pytest

from lab.engine import Engine
from lab.generators import HotspotShape
from lab.profiles import find_profile
from lab.replay import replay
from lab.replay_config import ReplayConfig, parse_policy, policy_names
from lab.replay_metrics import measure
from lab.replay_prompts import NamedPrompts
from lab.replay_result import Result, decode, encode
from lab.replay_source import TraceSource
from lab.traces import sample_trace
from tests.lab.replay_helpers import TIGHT, agents, chats, run, trace_of


def same(one: Result, other: Result) -> bool:
    """Whether two replays came to the same, request by request."""
    columns = ("instance", "ttft_s", "end_s", "cached_tokens", "promised_tokens")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def test_a_replay_is_a_function_of_its_seed() -> None:
    """The same seed gives the same result to the last bit, another one another."""
    trace = chats()
    first, again = run(trace, seed=3), run(trace, seed=3)
    assert same(first, again)
    assert not same(first, run(trace, seed=4))


@pytest.mark.slow
@pytest.mark.parametrize("routers", [1, 3])
def test_the_short_way_of_block_events_leads_to_the_same_decisions(routers: int) -> None:
    """Names instead of tokens, mirror and relay: every decision and every time are equal."""
    for trace in (chats(), agents()):
        short = run(trace, routers=routers, **TIGHT)
        whole = run(trace, routers=routers, through_sidecars=True, **TIGHT)
        assert same(short, whole)
        assert short.cached_tokens.sum() > 0


@pytest.mark.slow
def test_both_ways_agree_on_a_real_trace_that_evicts() -> None:
    """Some seconds of the packaged trace that share much, in small blocks and little memory."""
    trace = sample_trace().cut(300.0, 304.0)
    settings = {"instances": 2, "kv_tokens": 132_000, "block_size": 16}
    short = run(trace, **settings)
    assert same(short, run(trace, through_sidecars=True, **settings))
    roomy = run(trace, **{**settings, "kv_tokens": 0})
    assert roomy.cached_tokens.sum() > short.cached_tokens.sum()


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_serves_every_request(policy: str) -> None:
    """Each request ends once, on some instance, with times that make sense."""
    trace = chats(duration_s=4.0)
    result = run(trace, policy, instances=3)
    count = len(trace.requests)
    assert len(result.at_s) == count
    assert result.unfinished == 0
    assert result.counts["outcome:ok"] == count
    assert (result.ttft_s > 0).all()
    assert (result.end_s >= result.at_s + result.ttft_s).all()
    assert set(result.instance.tolist()) <= {0, 1, 2}
    assert (result.cached_tokens < result.prompt_tokens).all()


def test_a_lone_request_takes_what_the_profile_says() -> None:
    """TTFT is one step of its prompt; each further token is a decode step."""
    times = find_profile("h100/qwen2.5-7b").step_times
    result = run(trace_of((0.0, 1000, 3, tuple(range(63)))), instances=1)
    prefill_s = times.step_s(1000, 1, 1000 * 1001 // 2)
    assert result.ttft_s[0] == pytest.approx(prefill_s)
    decode_s = times.step_s(1, 1, 0, 1001) + times.step_s(1, 1, 0, 1002)
    assert result.end_s[0] == pytest.approx(prefill_s + decode_s)


def test_a_second_turn_finds_the_first_ones_blocks() -> None:
    """The plane sends it to where they are, and promises what the engine then finds."""
    first = (0.0, 320, 2, tuple(range(20)))
    second = (5.0, 480, 2, tuple(range(30)))
    result = run(trace_of(first, second), instances=4)
    assert result.instance[0] == result.instance[1]
    assert result.promised_tokens.tolist() == [0, 320]
    assert result.cached_tokens.tolist() == [0, 320]


def test_what_happened_within_the_lag_is_not_known() -> None:
    """A request that comes before the first one's blocks are heard of gets no hit promised."""
    first = (0.0, 320, 2, tuple(range(20)))
    second = (0.5, 480, 2, tuple(range(30)))
    late = run(trace_of(first, second), instances=1, event_lag_s=1.0)
    assert late.promised_tokens.tolist() == [0, 0]
    assert late.cached_tokens.tolist() == [0, 320]


def test_promised_blocks_count_before_they_are_there() -> None:
    """With promises, a burst that shares a new prefix stays together; without, it scatters."""
    burst = [(0.0, 4000, 2, (*range(240), *range(1000 + 10 * n, 1010 + 10 * n))) for n in range(6)]
    trace = trace_of(*burst)
    assert len(set(run(trace, instances=3).instance.tolist())) == 3
    promised = run(trace, instances=3, promise_s=10.0)
    assert promised.promised_tokens[1:].max() == 240 * 16


def test_a_batch_cap_spreads() -> None:
    """Routers skip an instance whose batch has reached the cap."""
    first = (0.0, 3200, 400, tuple(range(200)))
    more = [(1.0 + n / 100, 3216, 400, (*range(200), 1000 + n)) for n in range(3)]
    trace = trace_of(first, *more)
    assert len(set(run(trace, "linear:weight=1", instances=2).instance.tolist())) == 1
    capped = run(trace, "linear:weight=1", instances=2, batch_cap=2)
    assert np.bincount(capped.instance).tolist() == [2, 2]


def test_requests_that_fit_nowhere_are_left_out() -> None:
    """What is longer than the model allows is not replayed; if that is all, it is an error."""
    fits = (0.0, 100, 10, tuple(range(7)))
    long = (1.0, 4000, 10, tuple(range(250)))
    result = run(trace_of(fits, long), max_model_len=2000)
    assert result.prompt_tokens.tolist() == [100]
    with pytest.raises(ValueError, match="no request has at most 2000 tokens"):
        run(trace_of(long), max_model_len=2000)


def test_a_replay_that_takes_too_long_is_cut_off() -> None:
    """What has not ended some time after the last arrival counts as unfinished."""
    requests = [(0.0, 8000, 200, tuple(range(500 * n, 500 * n + 500))) for n in range(40)]
    result = run(trace_of(*requests), instances=1, drain_s_max=2.0)
    assert result.unfinished > 0
    assert result.unfinished + len(result.at_s) == 40


@pytest.mark.slow
def test_several_routers_know_of_each_others_requests() -> None:
    """Three routers balance nearly as well as one: they tell each other what they booked."""
    trace = chats(duration_s=12.0, qps=12.0)
    one, three = (measure(run(trace, instances=4, routers=count)) for count in (1, 3))
    assert three.balance < one.balance * 1.25
    deaf = measure(run(trace, instances=4, routers=3, event_lag_s=30.0))
    assert deaf.hit_rate < three.hit_rate


@pytest.mark.slow
def test_the_detector_hears_routers_and_routers_hear_it() -> None:
    """A planted hotspot is raised and spread, under a policy that would not let go of it."""
    shared = tuple(range(256))
    background = chats(duration_s=20.0, qps=2.0)
    hot = [(2.0 + n * 0.04, 4112, 30, (*shared, 10**6 + n)) for n in range(300)]
    planted = trace_of(*hot)
    requests = sorted([*background.requests, *planted.requests], key=lambda each: each.at_s)
    trace = type(background)("hot", 16, tuple(requests))
    alone = run(trace, "linear:weight=0.95", instances=8)
    watched = run(trace, "linear:weight=0.95", instances=8, detector=True)
    assert sum(n for name, n in watched.counts.items() if name.startswith("detector:raised")) > 0
    assert measure(watched).balance < measure(alone).balance


@pytest.mark.slow
def test_the_detector_matters_where_few_hold_what_many_ask_for() -> None:
    """A known prefix that surges is spread by a verdict; one that nobody has spreads by itself."""
    for early, matters in ((3, True), (0, False)):
        shape = HotspotShape(8192, said_tokens=32, output_tokens=400, early=early)
        source = TraceSource(
            "agent", duration_s=45.0, qps=6.0, hotspot_share=0.75, hotspot_shape=shape
        )
        settings = {"instances": 8, "profile": "h20/qwen2.5-7b"}
        alone = measure(run(source.load(), **settings))
        watched = run(source.load(), detector=True, **settings)
        raised = sum(n for name, n in watched.counts.items() if "detector:raised" in name)
        assert (raised > 0) is matters
        quicker = measure(watched).tpot_s[0] < 0.85 * alone.tpot_s[0]
        assert quicker is matters


def test_policies_that_look_at_no_cache_are_told_of_none() -> None:
    """Round robin decides the same without block events, so none are made."""
    result = run(chats(duration_s=10.0), "round_robin", instances=3)
    assert result.promised_tokens.sum() == 0
    assert result.cached_tokens.sum() > 0


def test_progress_is_told_and_collection_is_left_as_it_was() -> None:
    """The caller hears of arrivals; garbage collection is off only meanwhile."""
    told: list[int] = []
    trace = chats(duration_s=5.0)
    replay(trace, parse_policy("multiplicative"), ReplayConfig(instances=2), told.append)
    assert told == list(range(1, len(trace.requests) + 1))
    assert gc.isenabled()


def test_results_survive_being_written() -> None:
    """A result that was encoded and decoded is equal in every array and number."""
    result = run(chats(duration_s=5.0), instances=2)
    again = decode(encode(result))
    assert same(result, again)
    assert again.batch.shape == result.batch.shape
    assert measure(again) == measure(result)


def test_the_engine_says_how_long_it_would_decode() -> None:
    """`run_s` is what `step` then takes, and 0 where it would make a single step."""
    config = ReplayConfig(block_size=16).engine
    engine = Engine(config)
    request, _ = NamedPrompts(trace_of((0.0, 100, 50, tuple(range(7)))), 16).make(0)
    engine.add_request(request)
    assert engine.run_s(1.0) == 0.0
    engine.step()
    foreseen = engine.run_s(0.1)
    assert 0.1 <= foreseen == engine.step(0.1).duration_s


def test_a_run_is_cut_where_a_request_comes() -> None:
    """The newcomer waits for the decode step under way, not for the run that was foreseen."""
    times = find_profile("h100/qwen2.5-7b").step_times
    trace = trace_of((0.0, 100, 400, tuple(range(7))), (1.0, 100, 2, tuple(range(10, 17))))
    result = run(trace, instances=1, coast_s_max=10.0)
    prefill_s = times.step_s(101, 2, 100 * 101 // 2, 300)
    assert prefill_s < result.ttft_s[1] < prefill_s + times.step_s(1, 1, 0, 300)
