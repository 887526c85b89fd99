"""Reading an engine's metrics page, and the load that follows from it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.load import Load, LoadTracker
from sidecar.metrics_text import (
    RANKS_MAX,
    CacheInfo,
    EngineSample,
    MetricsPage,
    parse_metrics,
)

PAGE = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
process_start_time_seconds 1.79e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a\\"}b"} 16.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a"} 8.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.451
vllm:prompt_tokens_total{engine="0",model_name="a"} 4019.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="a",source="local_compute"} 3635.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="a",source="local_cache_hit"} 384.0
vllm:generation_tokens_total{engine="0",model_name="a"} 741.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",\
num_gpu_blocks="72",prefix_caching_hash_algo="sha256"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="None"} 1.0
"""


def test_each_rank_has_its_numbers() -> None:
    """Gauges, counters and cache settings are told apart by the label `engine`."""
    page = parse_metrics(PAGE)
    assert page == MetricsPage(
        engines={0: EngineSample(16, 8, 0.451, 3635.0, 741.0), 1: EngineSample(running=2)},
        caches={0: CacheInfo(32, 72, True), 1: CacheInfo(16, None, None)},
        started_wall_s=1.79e9,
    )


def test_names_of_older_engines_are_known() -> None:
    """Without the split by source, computed tokens are those that were not found cached."""
    old = """\
vllm:num_requests_running{model_name="a"} 3
vllm:gpu_cache_usage_perc{model_name="a"} 0.25
vllm:prompt_tokens_total{model_name="a"} 100
vllm:gpu_prefix_cache_hits_total{model_name="a"} 30
"""
    assert parse_metrics(old).engines == {0: EngineSample(3, 0, 0.25, 70.0, 0.0)}


def test_numbers_that_make_no_sense_are_skipped() -> None:
    """NaN, infinity and text are as if they were not there."""
    page = parse_metrics(
        'vllm:num_requests_running{engine="0"} NaN\n'
        'vllm:num_requests_waiting{engine="0"} +Inf\n'
        'vllm:kv_cache_usage_perc{engine="x"} 1\n'
        'vllm:generation_tokens_total{engine="0"} many\n'
        "vllm:num_requests_running_not 5\n"
    )
    assert page.engines == {}


@given(st.text(alphabet='vllm:num_requests_running{}="\\engine0 \n1.5', max_size=300))
def test_any_page_gives_some_answer(page: str) -> None:
    """Nothing that a server sends raises."""
    parse_metrics(PAGE[: len(page)] + page)


def test_load_is_believed_from_its_first_positive_value_on() -> None:
    """`/load` says 0 where it is not tracked, so a 0 means nothing before that."""
    tracker = LoadTracker()
    tracker.take_server_load(0)
    assert tracker.load().server_load is None
    tracker.take_server_load(24)
    assert tracker.load().server_load == 24
    tracker.take_server_load(0)
    assert tracker.load().server_load == 0
    assert tracker.load().idle


def test_load_that_says_nothing_while_requests_run_is_not_tracked() -> None:
    """Metrics lag, so it takes two looks; a positive value still changes the verdict."""
    tracker = LoadTracker()
    tracker.take_server_load(0)
    tracker.take_sample(EngineSample(running=2), 1.0)
    assert tracker.tracked is None
    tracker.take_sample(EngineSample(running=2), 1.5)
    assert tracker.tracked is False
    assert tracker.load() == Load(running=2)
    tracker.take_server_load(3)
    assert tracker.load().server_load == 3


def test_rates_are_the_growth_over_the_window() -> None:
    """Only the last seconds count, and no growth is no rate."""
    tracker = LoadTracker(window_s=2.0)
    assert tracker.load().prefill_tokens_per_s is None
    for at in range(6):
        tracker.take_sample(EngineSample(0, 0, 0.0, 1000.0 * at, 50.0), float(at))
    assert tracker.load().prefill_tokens_per_s == 1000.0
    assert tracker.load().decode_tokens_per_s is None
    for at in range(6, 9):
        tracker.take_sample(EngineSample(0, 0, 0.0, 5000.0, 50.0), float(at))
    assert tracker.load().prefill_tokens_per_s is None


def test_counters_that_shrink_begin_a_new_window() -> None:
    """A restarted engine counts from 0, which is no negative rate."""
    tracker = LoadTracker()
    tracker.take_sample(EngineSample(computed_tokens=1000.0), 0.0)
    tracker.take_sample(EngineSample(computed_tokens=100.0), 1.0)
    assert tracker.load().prefill_tokens_per_s is None
    tracker.take_sample(EngineSample(computed_tokens=300.0), 2.0)
    assert tracker.load().prefill_tokens_per_s == 200.0
    tracker.forget()
    assert tracker.load() == Load()


def test_an_engine_is_still_while_requests_run_and_nothing_moves() -> None:
    """Tokens of either kind or KV events are signs of life, and so is having nothing to do."""
    tracker = LoadTracker()
    busy = EngineSample(running=3, computed_tokens=100.0, generated_tokens=10.0)
    tracker.take_sample(busy, 0.0, events=5)
    tracker.take_sample(busy, 1.0, events=5)
    assert tracker.still_s(1.0) == 0.0
    tracker.take_sample(busy, 2.0, events=5)
    assert tracker.still_s(4.0) == 3.0
    tracker.take_sample(busy, 5.0, events=6)
    assert tracker.still_s(5.0) == 0.0
    tracker.take_sample(busy, 6.0, events=6)
    assert tracker.still_s(7.0) == 1.0
    for moved in (
        EngineSample(running=3, computed_tokens=101.0, generated_tokens=10.0),
        EngineSample(running=3, computed_tokens=101.0, generated_tokens=11.0),
        EngineSample(computed_tokens=101.0, generated_tokens=11.0),
    ):
        tracker.take_sample(moved, 8.0, events=6)
        assert tracker.still_s(9.0) == 0.0


def test_braces_that_nobody_closes_cost_no_more_than_their_lines() -> None:
    """A page cut off again and again is read in one pass, and what is whole in it counts."""
    page = "vllm:num_requests_running{\n" * 20_000 + 'vllm:num_requests_waiting{engine="0"} 3\n'
    began_s = time.monotonic()
    assert parse_metrics(page).engines == {0: EngineSample(waiting=3)}
    assert time.monotonic() - began_s < 2.0


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0"} 1e300',
        'vllm:num_requests_running{engine="-1"} 1',
        f'vllm:num_requests_running{{engine="{RANKS_MAX}"}} 1',
        "process_start_time_seconds 1e300",
    ],
)
def test_numbers_that_no_message_carries_are_not_there(line: str) -> None:
    """They would end the sidecar where it reports them."""
    assert parse_metrics(line) == MetricsPage({}, {})


@pytest.mark.parametrize("digits", [30, 5000])
def test_cache_settings_of_absurd_size_are_unknown(digits: int) -> None:
    """Also where Python itself refuses to read so many digits."""
    many = "9" * digits
    page = parse_metrics(f'vllm:cache_config_info{{block_size="{many}",num_gpu_blocks="{many}"}} 1')
    assert page.caches == {0: CacheInfo()}


def test_rates_stay_within_what_messages_carry() -> None:
    """Counters that leap give a report that receivers read."""
    tracker = LoadTracker()
    tracker.take_sample(EngineSample(), 0.0)
    tracker.take_sample(EngineSample(computed_tokens=1e15, generated_tokens=1e15), 0.01)
    assert tracker.load().prefill_tokens_per_s == tracker.load().decode_tokens_per_s == 1e15
