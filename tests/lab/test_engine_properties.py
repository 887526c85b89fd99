"""Random workloads: invariants hold, everybody ends, and skipping ahead changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.engine import Engine
from lab.engine_types import EngineEvent, Output, Request, StepResult
from tests.lab.engine_helpers import BLOCK, chain, drain, request, small_engine


class Arrival(NamedTuple):
    """A request that comes `after_s` after the one before it."""

    after_s: float
    request: Request


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """A few requests whose prompts share prefixes, some of them exactly."""
    plan = []
    for position in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, 60))
        shared = draw(st.integers(0, prompt // BLOCK))
        made = request(
            f"r{position}",
            prompt,
            draw(st.integers(1, 40)),
            prefix=chain(draw(st.integers(1, 2)), shared) if shared else None,
            root=draw(st.integers(1, 3)),
            report_hits=draw(st.sampled_from([False, False, False, True])),
        )
        plan.append(Arrival(draw(st.sampled_from([0.0, 0.004, 0.05, 0.3])), made))
    return plan


limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(26, 60),
        "max_num_batched_tokens": st.sampled_from([7, 16, 64, 512]),
        "max_num_seqs": st.integers(1, 5),
        "watermark": st.sampled_from([0.0, 0.1]),
        "max_model_len": st.just(100),
    }
)


@pytest.mark.slow
@given(plan=arrivals(), bounds=limits)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_with_all_its_tokens(
    plan: list[Arrival], bounds: dict[str, int]
) -> None:
    """Whatever is preempted, each request yields exactly its tokens and one end."""
    engine = small_engine(**bounds)
    for _, each in plan:
        engine.add_request(each)
    tokens = dict.fromkeys((each.request_id for _, each in plan), 0)
    ended: list[str] = []
    for result in drain(engine):
        assert sum(result.scheduled_tokens.values()) <= bounds["max_num_batched_tokens"]
        for output in result.outputs:
            tokens[output.request_id] += output.new_tokens
            assert output.request_id not in ended
            ended += [output.request_id] if output.finish_reason else []
    assert tokens == {each.request_id: each.output_tokens for _, each in plan}
    assert sorted(ended) == sorted(tokens)
    assert engine.pool.usage == 0.0


def run(engine: Engine, plan: list[Arrival], skip: bool) -> list[tuple[float, StepResult]]:
    """Play arrivals against an engine in simulated time; each result with the time it is due."""
    results = []
    queue, now_s, due_s = list(plan), 0.0, 0.0
    while queue or engine.has_work:
        while queue and (not engine.has_work or due_s + queue[0].after_s <= now_s):
            due_s += queue[0].after_s
            now_s = max(now_s, due_s)
            engine.add_request(queue.pop(0).request)
        arrival_s = due_s + queue[0].after_s if queue else float("inf")
        result = engine.step(arrival_s - now_s if skip else 0.0)
        now_s += result.duration_s
        results.append((now_s, result))
    return results


def ends(results: list[tuple[float, StepResult]]) -> dict[str, list[float]]:
    """Request id → when its first and last tokens were due."""
    times: dict[str, list[float]] = {}
    for due_s, result in results:
        for output in result.outputs:
            if output.cached_tokens is not None or output.finish_reason:
                times.setdefault(output.request_id, []).append(due_s)
    return times


def total(results: list[tuple[float, StepResult]]) -> tuple[list[EngineEvent], int, int]:
    """All events, all steps, all new tokens."""
    outputs: list[Output] = [output for _, result in results for output in result.outputs]
    return (
        [event for _, result in results for event in result.events],
        sum(result.steps for _, result in results),
        sum(output.new_tokens for output in outputs),
    )


@pytest.mark.slow
@given(plan=arrivals(), bounds=limits)
@settings(max_examples=250, deadline=None)
def test_skipping_ahead_changes_nothing(plan: list[Arrival], bounds: dict[str, int]) -> None:
    """Taken at once or one by one, steps make the same events, tokens, end times and caches."""
    stepped, skipped = small_engine(**bounds), small_engine(**bounds)
    one_by_one, at_once = run(stepped, plan, skip=False), run(skipped, plan, skip=True)
    assert total(at_once) == total(one_by_one)
    expected = ends(one_by_one)
    for name, times in ends(at_once).items():
        assert times == pytest.approx(expected[name], rel=1e-9)
    assert skipped.pool.copies() == stepped.pool.copies()
    skipped.check()


def test_a_lone_answer_is_one_result() -> None:
    """With nothing else to come, a whole decode takes one call after the prompt's step."""
    engine = small_engine()
    engine.add_request(request("a", prompt=10, output=100))
    engine.step(float("inf"))
    result = engine.step(float("inf"))
    assert (result.steps, result.outputs[0].finish_reason) == (99, "length")


def test_a_block_that_lets_the_next_request_in_ends_the_run() -> None:
    """While a running request fills the very block that the queue's head waits for, no skipping."""
    engine = small_engine(num_blocks=8)
    engine.add_request(request("a", prompt=5, output=20))
    engine.step()
    engine.add_request(request("b", prompt=25, output=1))
    assert engine.step().waiting == 1
    results = [engine.step(float("inf")) for _ in range(2)]
    assert [list(result.scheduled_tokens) for result in results] == [["a"], ["a", "b"]]
