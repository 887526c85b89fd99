"""Small engines and requests for tests of the emulated engine."""

from __future__ import annotations

from typing import Any

from lab.engine import Engine
from lab.engine_types import (
    BlocksRemoved,
    BlocksStored,
    EngineConfig,
    EngineEvent,
    Request,
    StepResult,
    derived_hashes,
)
from lab.profiles import find_profile

BLOCK = 4
TIMES = find_profile("h100/qwen2.5-7b").step_times


def small_engine(num_blocks: int = 33, **limits: Any) -> Engine:
    """An engine with blocks of 4 tokens; longest request: all blocks."""
    limits = {"block_size": BLOCK, "max_model_len": (num_blocks - 1) * BLOCK, **limits}
    return Engine(EngineConfig(num_blocks=num_blocks, step_times=TIMES, **limits))


def chain(root: int, blocks: int) -> list[int]:
    """A chain of hashes; chains with the same root share their prefix."""
    return derived_hashes(root, blocks)


def request(
    request_id: str,
    prompt: int,
    output: int = 1,
    *,
    root: int = 1,
    prefix: list[int] | None = None,
    block: int = BLOCK,
    **rest: Any,
) -> Request:
    """A request whose hashes follow from `root`, after those in `prefix`."""
    head = prefix or []
    blocks = (prompt + output) // block
    hashes = head + derived_hashes(head[-1] ^ root if head else root, max(0, blocks - len(head)))
    return Request(request_id, prompt, output, hashes, **rest)


def drain(engine: Engine, steps_max: int = 10_000) -> list[StepResult]:
    """Step an engine until it is idle, checking its invariants after each step."""
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.check()
        assert len(results) < steps_max, "the engine does not come to rest"
    return results


def events_of(results: list[StepResult]) -> list[EngineEvent]:
    """All events, in order."""
    return [event for result in results for event in result.events]


def stored(results: list[StepResult]) -> list[int]:
    """All hashes stored, in order."""
    events = events_of(results)
    return [each for event in events if isinstance(event, BlocksStored) for each in event.hashes]


def removed(results: list[StepResult]) -> list[int]:
    """All hashes removed, in order."""
    events = events_of(results)
    return [each for event in events if isinstance(event, BlocksRemoved) for each in event.hashes]
