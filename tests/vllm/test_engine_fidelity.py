"""The emulated engine does, step for step and block for block, what vLLM's own scheduler does.

Both are driven in lockstep through the same random scenario: requests that share prefixes, repeat
each other or carry salts, under little memory, with aborts and cache resets in between. After each
step the batch, the queue, preemptions, hits, ends, free blocks and KV events must be the same; at
the end so must the caches. vLLM names blocks its own way, so its events are read as a router would:
by recomputing our hashes from their tokens and extras.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.core.hashing import (
    ROOT,
    BlockHash,
    Extras,
    chain,
    event_extras,
    hash_block,
    pack_tokens,
)
from lab.engine import Engine
from lab.engine_types import (
    BlocksRemoved,
    BlocksStored,
    EngineConfig,
    EngineEvent,
    Request,
    StepResult,
    block_hash_of,
    engine_hashes,
)
from lab.profiles import find_profile
from tests.vllm.probe import SchedulerProbe, Step
from tests.vllm.token_rule import sampled_token

BLOCK = 16
STEPS_MAX = 2000
TIMES = find_profile("h100/qwen2.5-7b").step_times

Plain = tuple[str, tuple[BlockHash, ...], BlockHash | None]
"""An event in our hashes: what, which blocks, after which."""


class Arrival(NamedTuple):
    """A request, and after which step it comes."""

    step: int
    name: str
    prompt: list[int]
    max_tokens: int
    seed: str
    salt: str | None
    report_hits: bool


class Scenario(NamedTuple):
    """Limits, and what happens after which step."""

    limits: dict[str, Any]
    arrivals: list[Arrival]
    aborts: dict[int, str]
    resets: dict[int, bool]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Little memory, few token streams to draw prompts from, and trouble."""
    limits = {
        "num_blocks": draw(st.integers(18, 60)),
        "block_size": BLOCK,
        "max_model_len": 256,
        "max_num_batched_tokens": draw(st.sampled_from([16, 40, 64, 256, 2048])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
    }
    arrivals = []
    for position in range(draw(st.integers(1, 12))):
        max_tokens = draw(st.integers(1, 60))
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 40)),
                name=f"r{position}",
                prompt=draw(prompts(255 - max_tokens)),
                max_tokens=max_tokens,
                seed=draw(st.sampled_from(["x", "y", f"r{position}"])),
                salt=draw(st.sampled_from([None, None, None, "t"])),
                report_hits=draw(st.sampled_from([False, False, False, True])),
            )
        )
    names = [each.name for each in arrivals]
    aborts = draw(st.dictionaries(st.integers(1, 60), st.sampled_from(names), max_size=3))
    resets = draw(st.dictionaries(st.integers(1, 60), st.booleans(), max_size=2))
    return Scenario(limits, arrivals, aborts, resets)


@st.composite
def prompts(draw: st.DrawFn, longest: int) -> list[int]:
    """A prefix of one of two token streams, then possibly tokens of a third."""
    length = draw(st.one_of(st.integers(1, longest), st.sampled_from([16, 32, 48, 64, 96])))
    shared = draw(st.integers(0, length))
    stream, other = draw(st.sampled_from([100, 1000])), draw(st.sampled_from([2000, 3000]))
    return [stream + i for i in range(shared)] + [other + i for i in range(length - shared)]


class Translator:
    """Reads vLLM's events: keeps which of our hashes each of its names stands for."""

    def __init__(self) -> None:
        self._ours: dict[int, BlockHash] = {}

    def read(self, event: dict[str, Any]) -> Plain:
        """One event in our hashes."""
        if event["type"] == "AllBlocksCleared":
            return ("cleared", (), None)
        names = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            return ("removed", tuple(self._ours[name] for name in names), None)
        parent = event["parent_block_hash"]
        before = ROOT if parent is None else self._ours[parent]
        after = None if parent is None else before
        hashes = []
        for position, name in enumerate(names):
            ids = event["token_ids"][position * BLOCK : (position + 1) * BLOCK]
            extras = event_extras(event["lora_name"], event["extra_keys"][position])
            before = hash_block(pack_tokens(ids), extras, before)
            hashes.append(before)
            self._ours[name] = before
        return ("stored", tuple(hashes), after)

    def cache(self, blocks: dict[int, int]) -> dict[BlockHash, int]:
        """A cache's content, hash → copies, in our hashes."""
        return {self._ours[name]: copies for name, copies in blocks.items()}


def plain(events: list[EngineEvent]) -> list[Plain]:
    """The emulated engine's events in our hashes, one removal a block."""
    found: list[Plain] = []
    for event in events:
        if isinstance(event, BlocksStored):
            parent = None if event.parent is None else block_hash_of(event.parent)
            found.append(("stored", tuple(map(block_hash_of, event.hashes)), parent))
        elif isinstance(event, BlocksRemoved):
            found += [("removed", (block_hash_of(each),), None) for each in event.hashes]
        else:
            found.append(("cleared", (), None))
    return found


def request_of(arrival: Arrival) -> Request:
    """What the emulated engine is given: the same tokens, as hashes."""
    length = len(arrival.prompt)
    answer = [sampled_token(arrival.seed, length + i) for i in range(arrival.max_tokens)]
    tokens = pack_tokens(arrival.prompt + answer)
    return Request(
        arrival.name,
        length,
        arrival.max_tokens,
        engine_hashes(chain(tokens, BLOCK, extras=Extras(salt=arrival.salt))),
        report_hits=arrival.report_hits,
    )


def compare(ours: StepResult, theirs: Step, engine: Engine, translator: Translator) -> None:
    """One step of both."""
    assert list(ours.scheduled_tokens.items()) == [tuple(each) for each in theirs.scheduled]
    assert [output.request_id for output in ours.outputs] == list(theirs.sampled)
    assert {
        output.request_id: output.cached_tokens
        for output in ours.outputs
        if output.cached_tokens is not None
    } == theirs.cached_tokens
    assert {o.request_id for o in ours.outputs if o.finish_reason} == theirs.finished.keys()
    assert (ours.running, ours.waiting) == (len(theirs.running), len(theirs.waiting))
    assert engine.pool.free_count == theirs.free_blocks
    assert plain(ours.events) == [translator.read(event) for event in theirs.events]


@pytest.mark.slow
@given(scenario=scenarios())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_engines_agree_step_for_step(scheduler_probe: SchedulerProbe, scenario: Scenario) -> None:
    """Same requests in: same batches, hits, preemptions, events and caches out."""
    scheduler_probe.open(**scenario.limits)
    engine = Engine(EngineConfig(step_times=TIMES, **scenario.limits))
    translator = Translator()
    unfinished = {arrival.name for arrival in scenario.arrivals}
    for step in range(STEPS_MAX):
        if step in scenario.aborts and engine.abort(scenario.aborts[step]):
            scheduler_probe.abort(scenario.aborts[step])
            unfinished.discard(scenario.aborts[step])
        if step in scenario.resets:
            forced = scenario.resets[step]
            assert engine.reset_prefix_cache(preempt_running=forced) == (
                scheduler_probe.reset_prefix_cache(running_too=forced)
            )
        for arrival in scenario.arrivals:
            if arrival.step == step:
                engine.add_request(request_of(arrival))
                scheduler_probe.add(
                    arrival.name,
                    arrival.prompt,
                    max_tokens=arrival.max_tokens,
                    seed=arrival.seed,
                    cache_salt=arrival.salt,
                    report_hits=arrival.report_hits,
                )
        ours = engine.step()
        compare(ours, scheduler_probe.step(), engine, translator)
        unfinished -= {output.request_id for output in ours.outputs if output.finish_reason}
        if not unfinished and not engine.has_work:
            break
    else:
        raise AssertionError("the scenario did not end")
    copies = {block_hash_of(each): count for each, count in engine.pool.copies().items()}
    assert copies == translator.cache(scheduler_probe.blocks())
