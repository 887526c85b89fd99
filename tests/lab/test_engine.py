"""What vLLM does and when it tells, one behaviour a test."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lab.engine_types import BlocksRemoved, BlocksStored, CacheCleared
from tests.lab.engine_helpers import (
    chain,
    drain,
    events_of,
    removed,
    request,
    small_engine,
    stored,
)


def test_cold_prompt_is_stored_in_one_event_of_its_step() -> None:
    """All whole blocks of a prompt are one event without parent; the partial block is none."""
    engine = small_engine()
    engine.add_request(request("a", prompt=14))
    result = engine.step()
    assert result.events == [BlocksStored("a", 0, chain(1, 3), None)]
    assert result.scheduled_tokens == {"a": 14}


def test_long_prompt_is_computed_in_chunks_linked_by_parent() -> None:
    """A prompt beyond the token budget takes several steps; each stores what it fills."""
    engine = small_engine(max_num_batched_tokens=10)
    engine.add_request(request("a", prompt=24))
    results = drain(engine)
    assert [result.scheduled_tokens.get("a") for result in results[:3]] == [10, 10, 4]
    first, second, third = events_of(results)
    assert isinstance(second, BlocksStored)
    assert second == BlocksStored("a", 2, chain(1, 5)[2:5], chain(1, 2)[-1])
    assert third == BlocksStored("a", 5, chain(1, 6)[5:], chain(1, 5)[-1])
    assert first == BlocksStored("a", 0, chain(1, 2), None)
    assert [bool(result.outputs) for result in results[:3]] == [False, False, True]


def test_decoding_stores_each_block_it_fills() -> None:
    """Generated tokens fill blocks too; the last token is never computed, so never cached."""
    engine = small_engine()
    engine.add_request(request("a", prompt=3, output=9))
    results = drain(engine)
    assert stored(results) == chain(1, 2)
    assert [output.new_tokens for result in results for output in result.outputs] == [1] * 9


def test_prefix_hit_says_nothing_and_is_reported_with_the_first_token() -> None:
    """A hit makes no event; the first output tells how many prompt tokens were cached."""
    engine = small_engine()
    engine.add_request(request("a", prompt=14))
    drain(engine)
    engine.add_request(request("b", prompt=14, output=2))
    first, second, *_ = drain(engine)
    assert first.events == second.events == []
    assert first.outputs[0].cached_tokens == 12
    assert second.outputs[0].cached_tokens is None
    assert first.scheduled_tokens == {"b": 2}
    assert (first.queries, first.hits) == (14, 12)


def test_hits_are_reannounced_on_request() -> None:
    """A request in `full` report mode repeats its hit blocks, though nothing new is stored."""
    engine = small_engine()
    engine.add_request(request("a", prompt=14))
    drain(engine)
    engine.add_request(request("b", prompt=14, report_hits=True))
    assert engine.step().events == [BlocksStored("b", 0, chain(1, 3), None)]


def test_divergence_stores_only_the_new_blocks() -> None:
    """After a shared prefix the event hangs from the last shared block."""
    engine = small_engine()
    engine.add_request(request("a", prompt=16))
    drain(engine)
    engine.add_request(request("b", prompt=16, prefix=chain(1, 2), root=9))
    (event,) = engine.step().events
    assert isinstance(event, BlocksStored)
    assert (event.first_block, event.parent) == (2, chain(1, 2)[-1])


def test_exact_multiple_is_stored_twice_and_removed_twice() -> None:
    """The last block of a fully cached prompt is computed again into a twin with the same hash."""
    engine = small_engine(num_blocks=9)
    hashes = chain(1, 3)
    engine.add_request(request("a", prompt=12))
    drain(engine)
    engine.add_request(request("b", prompt=12))
    results = drain(engine)
    assert stored(results) == hashes[2:]
    assert engine.pool.copies() == dict(zip(hashes, [1, 1, 2], strict=True))
    engine.add_request(request("c", prompt=31, root=5))
    assert removed(drain(engine)).count(hashes[2]) == 2


def test_twins_are_found_while_one_lives() -> None:
    """After the first of two copies is evicted, the prefix still hits."""
    engine = small_engine(num_blocks=9)
    for name in "ab":
        engine.add_request(request(name, prompt=12))
        drain(engine)
    engine.add_request(request("c", prompt=18, root=5))
    assert removed(drain(engine)) == chain(1, 3)[2:]
    engine.add_request(request("d", prompt=13))
    assert engine.step().outputs[0].cached_tokens == 12


def test_concurrent_identical_prompts_store_twins() -> None:
    """Blocks that fill in the same step are not exchanged for each other."""
    engine = small_engine()
    engine.add_request(request("a", prompt=8))
    engine.add_request(request("b", prompt=8))
    engine.step()
    assert engine.pool.copies() == dict(zip(chain(1, 2), [1, 2], strict=True))


def test_eviction_comes_before_storing_and_tail_first() -> None:
    """The step that takes a cached block tells its removal first; a prompt loses its tail first."""
    engine = small_engine(num_blocks=9)
    engine.add_request(request("a", prompt=20))
    drain(engine)
    engine.add_request(request("b", prompt=24, root=5))
    gone, new = engine.step().events
    assert isinstance(gone, BlocksRemoved)
    assert isinstance(new, BlocksStored)
    assert gone.hashes == chain(1, 5)[:1:-1]


def test_least_recently_used_goes_first() -> None:
    """A hit renews the blocks that it touched."""
    engine = small_engine(num_blocks=9)
    for name, root in (("a", 1), ("b", 2), ("a2", 1)):
        engine.add_request(request(name, prompt=13, root=root))
        drain(engine)
    engine.add_request(request("c", prompt=16, root=5))
    assert removed(drain(engine)) == chain(2, 3)[:0:-1]


def test_finished_request_leaves_its_blocks_cached() -> None:
    """The end of a request makes no event, and its blocks count as free."""
    engine = small_engine()
    engine.add_request(request("a", prompt=8))
    *_, last = drain(engine)
    assert last.events == []
    assert set(engine.pool.cached) == set(chain(1, 2))
    assert last.kv_usage == 0.0


def test_token_budget_is_shared_running_first() -> None:
    """Decoding requests get their token before the next prompt gets a chunk."""
    engine = small_engine(max_num_batched_tokens=8)
    engine.add_request(request("a", prompt=8, output=4))
    engine.step()
    engine.add_request(request("b", prompt=20, root=2))
    assert engine.step().scheduled_tokens == {"a": 1, "b": 7}


def test_batch_is_capped() -> None:
    """No more than max_num_seqs run; the others wait in order of arrival."""
    engine = small_engine(max_num_seqs=2)
    for position in range(4):
        engine.add_request(request(f"r{position}", prompt=4, output=2, root=position + 1))
    first = engine.step()
    assert (first.running, first.waiting) == (2, 2)
    assert list(first.scheduled_tokens) == ["r0", "r1"]
    engine.step()
    assert list(engine.step().scheduled_tokens) == ["r2", "r3"]


def test_admission_needs_blocks_for_the_whole_prompt() -> None:
    """A prompt whose first chunk would fit but not all of it waits, and holds up those behind."""
    engine = small_engine(num_blocks=9, max_num_batched_tokens=16)
    engine.add_request(request("a", prompt=16, output=8))
    engine.step()
    engine.add_request(request("b", prompt=20, root=2))
    engine.add_request(request("c", prompt=1, root=3))
    result = engine.step()
    assert list(result.scheduled_tokens) == ["a"]
    assert result.waiting == 2


def test_free_hits_count_against_free_blocks() -> None:
    """Cached blocks that a prompt would take over cannot be given out for its other blocks too."""
    engine = small_engine(num_blocks=9)
    engine.add_request(request("a", prompt=13))
    drain(engine)
    engine.add_request(request("b", prompt=12, output=12, root=2))
    engine.step()
    engine.add_request(request("c", prompt=21))  # 3 hits, 3 more; 5 are free, 3 of them the hits
    assert engine.step().waiting == 1


def test_watermark_keeps_blocks_free_for_those_that_run() -> None:
    """Beside running requests, admission leaves the watermark free; alone it may use all."""
    engine = small_engine(num_blocks=9, watermark=0.25)  # 2 blocks
    engine.add_request(request("a", prompt=4, output=8))
    engine.step()
    engine.add_request(request("b", prompt=24, root=2))  # 6 blocks of the 7 free ones
    assert engine.step().waiting == 1
    alone = small_engine(num_blocks=9, watermark=0.25)
    alone.add_request(request("b", prompt=31))
    assert alone.step().outputs[0].finish_reason == "length"


def test_preemption_takes_the_last_and_recomputes() -> None:
    """Out of blocks, the request admitted last goes back, later computes anew and still ends."""
    engine = small_engine(num_blocks=5)
    engine.add_request(request("a", prompt=7, output=6))
    engine.add_request(request("b", prompt=7, output=6, root=2))
    results = drain(engine)
    assert [name for result in results for name in result.preempted] == ["b"]
    produced = [output for result in results for output in result.outputs]
    assert [output.request_id for output in produced if output.finish_reason] == ["a", "b"]
    assert sum(output.new_tokens for output in produced) == 12
    assert sum(output.cached_tokens is not None for output in produced) == 2


def test_no_admission_in_a_step_that_preempts() -> None:
    """The blocks that preemption freed are not given to a waiting request in the same step."""
    engine = small_engine(num_blocks=5)
    engine.add_request(request("a", prompt=8, output=4))
    engine.add_request(request("b", prompt=8, output=4, root=2))
    engine.step()
    result = engine.step()
    assert result.preempted == ["b"]
    assert list(result.scheduled_tokens) == ["a"]


def test_abort_frees_at_once_and_one_empty_step_reports_it() -> None:
    """An aborted request says nothing more; the next, empty step shows the new gauges."""
    engine = small_engine()
    engine.add_request(request("a", prompt=8, output=50))
    assert engine.step().kv_usage > 0
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.has_work
    result = engine.step()
    assert (result.steps, result.running, result.kv_usage, result.duration_s) == (0, 0, 0.0, 0.0)
    assert not engine.has_work
    assert set(engine.pool.cached) == set(chain(1, 2))


def test_abort_of_a_waiting_request_lets_the_next_in() -> None:
    """The queue's head may be aborted before it ran."""
    engine = small_engine(max_num_seqs=1)
    for name in "abc":
        engine.add_request(request(name, prompt=4, output=3))
    engine.step()
    assert engine.abort("b")
    names = [output.request_id for result in drain(engine) for output in result.outputs]
    assert list(dict.fromkeys(names)) == ["a", "c"]


def test_reset_is_told_with_the_next_step_only() -> None:
    """On an idle engine a reset stays silent until something runs, and then comes first."""
    engine = small_engine()
    engine.add_request(request("a", prompt=8))
    drain(engine)
    assert engine.reset_prefix_cache()
    assert not engine.has_work
    assert not engine.pool.cached
    engine.add_request(request("a2", prompt=8))
    cleared, again = engine.step().events
    assert isinstance(cleared, CacheCleared)
    assert isinstance(again, BlocksStored)


def test_reset_fails_while_requests_run_unless_they_may_be_preempted() -> None:
    """Reset answers false beside running requests; with preemption they resume and store anew."""
    engine = small_engine()
    engine.add_request(request("a", prompt=8, output=5))
    engine.add_request(request("b", prompt=8, output=5, root=2))
    engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(preempt_running=True)
    result = engine.step()
    assert result.preempted == ["b", "a"]
    assert list(result.scheduled_tokens) == ["a", "b"]
    assert isinstance(result.events[0], CacheCleared)
    assert sum(isinstance(event, BlocksStored) for event in result.events) == 2


def test_without_prefix_caching_nothing_is_stored_or_hit() -> None:
    """With caching off there are no events, and a repeated prompt is computed whole."""
    engine = small_engine(prefix_caching=False)
    for name in "ab":
        engine.add_request(request(name, prompt=8))
        results = drain(engine)
        assert events_of(results) == []
        assert results[0].outputs[0].cached_tokens == 0


def test_events_can_be_left_out() -> None:
    """An engine that reports no events still caches."""
    engine = small_engine(report_events=False, num_blocks=9)
    for name, root in (("a", 1), ("b", 2), ("c", 3), ("c2", 3)):
        engine.add_request(request(name, prompt=17, root=root))
        results = drain(engine)
        assert events_of(results) == []
    assert results[0].outputs[0].cached_tokens == 16


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request("a", prompt=4), "is in use"),
        (request("b", prompt=0), "needs a prompt"),
        (request("b", prompt=4, output=0), "an output token"),
        (request("b", prompt=100, output=100), "exceed max_model_len=128"),
        (request("b", prompt=64, prefix=[5], block=64), "lacks hashes"),
    ],
)
def test_bad_requests_are_refused(bad: object, reason: str) -> None:
    """A request that could never run says why."""
    engine = small_engine()
    engine.add_request(request("a", prompt=4))
    with pytest.raises(ValueError, match=reason):
        engine.add_request(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"max_model_len": 1000}, "do not hold max_model_len=1000"),
    ],
)
def test_bad_limits_are_refused(limits: dict[str, int], reason: str) -> None:
    """An engine that could not work does not start."""
    with pytest.raises(ValueError, match=reason):
        small_engine(**limits)


def test_prefill_progress_is_visible_step_by_step() -> None:
    """Steps are longer the more they compute, and a decode step is shorter than a prompt's."""
    engine = small_engine(num_blocks=2001, max_num_batched_tokens=4000)
    engine.add_request(request("a", prompt=7000, output=5))
    durations = [result.duration_s for result in drain(engine)[:-1]]
    assert durations[0] > durations[2]
    assert all(later > earlier for earlier, later in pairwise(durations[2:]))
