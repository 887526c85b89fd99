from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lab.cache import Cache, code_digest, key_of
from lab.replay_agenda import Agenda
from lab.replay_config import PolicySpec, ReplayConfig, looks_at_blocks, parse_policy
from lab.replay_metrics import measure, over_seeds
from lab.replay_plan import BEST_LINEAR, LINEAR_WEIGHTS, Load, Plan, parse_policies
from lab.replay_prompts import NamedPrompts, TokenPrompts
from lab.replay_runs import Job, run_jobs
from lab.replay_source import TraceSource
from lab.trace_files import write_bailian
from lab.traces import TraceError, read_bailian, sample_trace
from tests.lab.replay_helpers import chats, run, trace_of

# --- time


def test_an_agenda_goes_by_time_and_then_by_order() -> None:
    """Calls come at their times; those of one moment in the order in which they were put."""
    agenda, seen = Agenda(), []
    agenda.at(2.0, seen.append, "c")
    agenda.at(1.0, seen.append, "a")
    agenda.at(1.0, seen.append, "b")
    agenda.run(1.5)
    assert (seen, agenda.now_s) == (["a", "b"], 1.0)
    agenda.run()
    assert (seen, agenda.now_s, len(agenda)) == (["a", "b", "c"], 2.0, 0)


# --- settings


def test_policies_are_read_with_their_parameters() -> None:
    """A name, or a name with parameters after colons; the label reads the same."""
    assert parse_policy("round_robin") == PolicySpec("round_robin")
    spec = parse_policy("dynamo_cost:weight=2:block_size=64")
    assert spec == PolicySpec("dynamo_cost", {"weight": 2.0, "block_size": 64.0})
    assert parse_policy(spec.label) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fastest", "no policy 'fastest'; there are"),
        ("linear:weight", "'weight' is not parameter=number"),
        ("linear:lambda=0.5", "has no parameter lambda"),
        ("sglang:threshhold=0.5", "has no parameter 'threshhold'; it has threshold"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_there_is(text: str, said: str) -> None:
    """The message says what is wrong and what could be meant."""
    with pytest.raises(ValueError, match=said):
        parse_policy(text)


@pytest.mark.parametrize(
    "wrong", [{"instances": 0}, {"tick_s": 0.0}, {"event_lag_s": -1.0}, {"kv_tokens": -1}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    """By name."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReplayConfig(**wrong)  # type: ignore[arg-type]


def test_the_block_size_is_the_traces_own_unless_it_is_given() -> None:
    """512 for Mooncake's, 16 for made-up traffic; never coarser than 512."""
    assert ReplayConfig().resolved(512).block_size == 512
    assert ReplayConfig().resolved(16).block_size == 16
    assert ReplayConfig().resolved(1024).block_size == 512
    assert ReplayConfig(block_size=32).resolved(512).block_size == 32


def test_an_engine_has_room_for_what_the_gpu_has() -> None:
    """The longest request never exceeds the memory that there is."""
    config = ReplayConfig(profile="a100/qwen3-30b-a3b", block_size=16)
    assert config.engine.max_model_len == (config.engine.num_blocks - 1) * 16 < 131_072
    small = ReplayConfig(kv_tokens=32_000, block_size=16).engine
    assert (small.num_blocks, small.max_model_len) == (2000, 1999 * 16)


def test_some_policies_look_at_no_cache() -> None:
    """Only those that do are told of blocks."""
    assert not looks_at_blocks(parse_policy("round_robin"))
    assert not looks_at_blocks(parse_policy("sglang"))
    assert looks_at_blocks(parse_policy("multiplicative"))
    assert looks_at_blocks(parse_policy("llm_d"))


# --- prompts


def test_names_and_tokens_share_the_same_prefixes() -> None:
    """Two prompts have as many equal first blocks by name as by their tokens' hashes."""
    trace = sample_trace().cut(0.0, 20.0)
    named, tokens = NamedPrompts(trace, 16), TokenPrompts(trace, 16)
    count = min(len(trace.requests), 24)
    hashes = [(named.make(place)[1].hashes, tokens.make(place)[1].hashes) for place in range(count)]
    for first in range(count):
        for second in range(first):
            by_name, by_token = (
                _shared(hashes[first][way], hashes[second][way]) for way in range(2)
            )
            assert by_name == by_token
    for place in range(count):
        tokens.forget(f"{place}")


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first blocks are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# --- sources


def test_a_recorded_trace_is_cut_and_paced() -> None:
    """A part of it, as fast as asked, or at a rate."""
    source = TraceSource("sample", start_s=60.0, duration_s=120.0, speed=2.0)
    trace = source.load()
    assert trace.duration_s <= 60.0
    paced = TraceSource("sample", start_s=60.0, duration_s=120.0, qps=10.0).load()
    assert len(paced.requests) / paced.duration_s == pytest.approx(10.0)
    assert len(paced.requests) == len(trace.requests)


def test_jitter_spreads_by_the_seed() -> None:
    """Times that were rounded are no bursts any more; nothing else changes."""
    rounded = TraceSource("sample").load()
    spread = [TraceSource("sample", jitter_s=3.0, seed=seed).load() for seed in (1, 1, 2)]
    assert spread[0] == spread[1] != spread[2]
    times = [[each.at_s for each in trace.requests] for trace in (rounded, spread[0])]
    assert len(set(times[0])) < len(set(times[1])) == len(times[1])
    assert times[1] == sorted(times[1])
    assert times[1][0] == 0.0
    assert spread[0].input_tokens == rounded.input_tokens


def test_a_made_trace_has_its_rate_and_its_hotspot() -> None:
    """Half of the middle third's requests share a prefix that nobody had before."""
    source = TraceSource("api", duration_s=90.0, qps=10.0, hotspot_share=0.5, seed=3)
    trace = source.load()
    hot = [each for each in trace.requests if each.session == "hotspot"]
    middle = trace.cut(30.0, 30.0).requests
    assert 0.4 < len(hot) / len(middle) < 0.6
    assert len({each.block_ids[0] for each in hot}) == 1


def test_a_digest_tells_traces_apart(tmp_path: Path) -> None:
    """By every setting, and by a file's content."""
    file = tmp_path / "trace.jsonl"
    write_bailian(chats(seed=1), file)
    before = TraceSource(str(file)).digest()
    assert before == TraceSource(str(file)).digest()
    assert before != TraceSource(str(file), speed=2.0).digest()
    write_bailian(chats(seed=2), file)
    assert before != TraceSource(str(file)).digest()


def test_nothing_left_of_a_trace_is_an_error() -> None:
    """A part that begins after its end."""
    with pytest.raises(ValueError, match="no request within the part"):
        TraceSource("sample", start_s=10_000.0).load()


# --- files


def test_a_written_trace_is_read_back(tmp_path: Path) -> None:
    """Times, lengths, blocks and who continues whom."""
    trace = chats(duration_s=60.0)
    file = tmp_path / "trace.jsonl"
    write_bailian(trace, file)
    again = read_bailian(file)
    start_s = trace.requests[0].at_s
    for one, other in zip(trace.requests, again.requests, strict=True):
        assert other.at_s == pytest.approx(one.at_s - start_s)
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert one.block_ids == other.block_ids
    sessions = {one.session: other.session for one, other in _pairs(trace, again)}
    assert len(set(sessions.values())) == len(sessions)
    assert all(sessions[one.session] == other.session for one, other in _pairs(trace, again))


def _pairs(trace: object, again: object) -> list[tuple[object, object]]:
    return list(zip(trace.requests, again.requests, strict=True))  # type: ignore[attr-defined]


def test_blocks_of_another_size_are_not_written(tmp_path: Path) -> None:
    """The format has blocks of 16 tokens."""
    with pytest.raises(TraceError, match="blocks of 512"):
        write_bailian(sample_trace(), tmp_path / "trace.jsonl")


# --- numbers


def test_numbers_are_of_what_came_after_the_warm_up() -> None:
    """Latencies and hits leave the first seconds out; rates do not."""
    result = run(chats(), instances=2)
    whole, late = measure(result), measure(result, warm_up_s=5.0)
    assert whole.requests == len(result.at_s) > late.requests == (result.at_s >= 5.0).sum()
    assert whole.served_rps == late.served_rps
    assert whole.ttft_s[0] == pytest.approx(result.ttft_s.mean())
    assert whole.ttft_s[3] == pytest.approx(np.percentile(result.ttft_s, 99))
    assert whole.hit_rate == result.cached_tokens.sum() / result.prompt_tokens.sum()


def test_balance_is_one_where_all_are_alike() -> None:
    """Max over mean of the batches while there is a request for each."""
    result = run(chats(duration_s=5.0), instances=2)
    even = msgspec.structs.replace(result, batch=np.full_like(result.batch, 3))
    assert measure(even).balance == 1.0
    lone = np.zeros_like(result.batch)
    lone[:, 0] = 4
    assert measure(msgspec.structs.replace(result, batch=lone)).balance == 2.0
    empty = msgspec.structs.replace(result, batch=np.zeros_like(result.batch))
    assert measure(empty).balance == 1.0


def test_answers_of_one_token_have_no_tpot() -> None:
    """They count in TTFT only; where there are no others, TPOT is not a number."""
    result = run(trace_of((0.0, 100, 1, tuple(range(7)))), instances=1)
    assert np.isnan(result.tpot_s).all()
    assert np.isnan(measure(result).tpot_s).all()


def test_a_range_has_its_mean_and_its_ends() -> None:
    """Over seeds."""
    found = over_seeds([1.0, 2.0, 6.0])
    assert (found.mean, found.least, found.most) == (3.0, 1.0, 6.0)


# --- the cache


def test_a_cache_keeps_and_finds(tmp_path: Path) -> None:
    """What was put is found, what was not is not, and both are counted."""
    cache = Cache(tmp_path / "deep")
    assert cache.get("a") is None
    cache.put("a", b"1")
    assert cache.get("a") == b"1"
    assert (cache.hits, cache.misses) == (1, 1)


def test_a_cache_is_bounded_and_drops_what_was_not_asked_for(tmp_path: Path) -> None:
    """At the bound the file goes that was used longest ago."""
    cache = Cache(tmp_path, bytes_max=25)
    for age, name in enumerate(("a", "b")):
        cache.put(name, b"x" * 10)
        os.utime(tmp_path / f"{name}.result", (age, age))
    assert cache.get("a") is not None
    cache.put("c", b"x" * 10)
    assert cache.get("b") is None
    assert cache.get("a") is not None
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 25


def test_keys_cover_the_code() -> None:
    """The same question under the same code is the same key."""
    assert key_of("a", "b") == key_of("a", "b") != key_of("a", "c")
    assert len(code_digest()) == 64


# --- plans and runs


def test_a_plan_crosses_traces_loads_seeds_and_policies() -> None:
    """Each combination is one job; cases come back in the same order."""
    specs, best = parse_policies("round_robin,least_requests")
    assert not best
    plan = Plan(
        (TraceSource("api", duration_s=4.0), TraceSource("chatbot", duration_s=4.0)),
        specs,
        (Load(qps=2.0), Load(qps=4.0)),
        (0, 1),
        ReplayConfig(instances=2),
    )
    jobs = plan.jobs()
    assert len(jobs) == 2 * 2 * 2 * 2
    assert {(job.source.qps, job.source.seed, job.config.seed) for job in jobs} == {
        (2.0, 0, 0),
        (2.0, 1, 1),
        (4.0, 0, 0),
        (4.0, 1, 1),
    }
    cases = plan.cases(run_jobs(jobs), 0.0)
    assert [case.title.split(",")[0] for case in cases] == ["api", "api", "chatbot", "chatbot"]
    for case in cases:
        assert [row.policy for _, row in case.runs] == ["round_robin", "least_requests"] * 2
        assert [result.policy for result in case.shown] == ["round_robin", "least_requests"]


@pytest.mark.slow
def test_the_best_weight_stands_for_all_of_them() -> None:
    """`linear:best` runs ten weights and keeps the one with the least mean TTFT."""
    specs, best = parse_policies(f"round_robin,{BEST_LINEAR}")
    assert best
    assert len(specs) == 1 + len(LINEAR_WEIGHTS)
    source = TraceSource("agent", duration_s=6.0)
    plan = Plan((source,), specs, (Load(qps=4.0),), (0,), ReplayConfig(instances=2), best)
    results = run_jobs(plan.jobs())
    (case,) = plan.cases(results, 0.0)
    rows = {row.policy: row for _, row in case.runs}
    assert set(rows) == {"round_robin", BEST_LINEAR}
    assert rows[BEST_LINEAR].ttft_s[0] == min(measure(each).ttft_s[0] for each in results[1:])
    assert "linear:weight=" in case.note


def test_what_was_run_before_comes_from_the_cache(tmp_path: Path) -> None:
    """The second time nothing is replayed, and the results are equal."""
    jobs = [
        Job(TraceSource("api", duration_s=4.0, qps=4.0), parse_policy(name), ReplayConfig())
        for name in ("multiplicative", "round_robin")
    ]
    cache, told = Cache(tmp_path), []
    first = run_jobs(jobs, cache=cache, progress=told.append)
    assert (cache.hits, cache.misses) == (0, 2)
    again = run_jobs(jobs, cache=cache, progress=told.append)
    assert (cache.hits, cache.misses) == (2, 2)
    assert [measure(each) for each in first] == [measure(each) for each in again]
    assert sum(told) == 4 * len(first[0].at_s)


@pytest.mark.slow
def test_runs_in_processes_come_to_the_same(tmp_path: Path) -> None:
    """Two at a time, in fresh processes; progress is told of every request."""
    jobs = [
        Job(TraceSource("api", duration_s=4.0, qps=8.0), parse_policy(name), ReplayConfig())
        for name in ("multiplicative", "round_robin")
    ]
    told: list[int] = []
    apart = run_jobs(jobs, processes=2, cache=Cache(tmp_path), progress=told.append)
    here = run_jobs(jobs)
    for one, other in zip(apart, here, strict=True):
        assert np.array_equal(one.ttft_s, other.ttft_s)
    assert sum(told) == 2 * len(here[0].at_s)


@pytest.mark.slow
def test_an_error_in_a_process_reaches_the_caller() -> None:
    """A trace of which nothing fits: the error, not a dead process."""
    config = ReplayConfig(max_model_len=10)
    job = Job(TraceSource("api", duration_s=4.0), parse_policy("round_robin"), config)
    with pytest.raises(ValueError, match="no request has at most 10 tokens"):
        run_jobs([job, job], processes=2)
