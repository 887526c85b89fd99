"""The mirror against its naive twin, and against an engine whose blocks are known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from schemas.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBlockHash,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
)
from sidecar.changes import Cleared, Gone
from sidecar.mirror import Mirror
from tests.models.naive_mirror import NaiveMirror, TruthfulEngine
from tests.sidecar.mirror_events import SIZE, stored

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class TruthMachine(RuleBasedStateMachine):
    """The mirror holds exactly what an engine holds that never re-reports hits."""

    @initialize(capacity=st.integers(5, 12))
    def start(self, capacity: int) -> None:
        """Begin with a small cache, so that blocks are evicted all the time."""
        self.engine = TruthfulEngine(capacity, 2, random.Random(0))
        self.mirror = Mirror()
        self.mirror.capacity_blocks = capacity
        self.prompts: list[tuple[list[int], str | None]] = []

    def feed(self, events: list[Event]) -> None:
        """Pass a batch over the wire."""
        self.mirror.apply(decode_batch(encode_batch(0.0, events, 0)))

    @rule(prompt=PROMPTS, salt=st.sampled_from([None, None, "s"]))
    def serve(self, prompt: list[int], salt: str | None) -> None:
        """Serve a prompt of few tokens, so that prefixes are shared."""
        prompt = prompt[: 2 * len(self.engine.slots)]
        if (prompt, salt) not in self.prompts:
            self.prompts.append((prompt, salt))
        self.feed(self.engine.serve(prompt, salt))

    @rule(chance=st.integers(0, 9))
    def clear(self, chance: int) -> None:
        """Now and then the cache is reset."""
        if chance == 0:
            self.feed(self.engine.clear())

    @invariant()
    def equals_the_truth(self) -> None:
        """The mirror's blocks are the engine's."""
        if not hasattr(self, "engine"):
            return
        self.mirror.validate()
        assert self.mirror.held() == self.engine.holds(self.prompts)
        assert self.mirror.unknown_removals == 0


TruthMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=35)


@pytest.mark.slow
class TestTruth(TruthMachine.TestCase):
    """Random prompts, evictions and resets."""


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=3, max_size=14), st.booleans())),
    st.integers(7, 12),
)
def test_reports_of_hits_never_lose_a_block(
    requests: list[tuple[list[int], bool]], capacity: int
) -> None:
    """With some requests in full mode nothing held is missed, and what is wrong stays bounded.

    Prompts are longer than one block: the second copy of such a prompt looks like a report.
    """
    engine = TruthfulEngine(capacity, 2, random.Random(0))
    mirror = Mirror()
    mirror.capacity_blocks = capacity
    prompts: list[tuple[list[int], str | None]] = []
    for prompt, full in requests:
        prompts.append((prompt, None))
        mirror.apply(EventBatch(0.0, engine.serve(prompt, full=full)))
        mirror.validate()
        truth = engine.holds(prompts)
        assert mirror.held() >= truth
        assert len(mirror.held()) <= capacity


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
MEDIA = st.sampled_from(["GPU", "GPU", "CPU", "STORAGE"])
OWNERS = st.sampled_from([None, "x"])


class TwinMachine(RuleBasedStateMachine):
    """The mirror against its naive twin, on events in any order, whether they make sense or not."""

    @initialize(plain=st.booleans())
    def start(self, plain: bool) -> None:
        """Begin empty."""
        self.plain = plain
        self.mirror = Mirror()
        self.twin = NaiveMirror()
        self.tiers: dict[int, int] = {}

    def feed(self, event: Event) -> None:
        """Tell both, and follow the changes that the mirror reports."""
        for change in self.mirror.apply(EventBatch(0.0, [event])):
            if isinstance(change, Cleared):
                self.tiers.clear()
            elif isinstance(change, Gone):
                for block in change.hashes:
                    self.tiers.pop(block, None)
            else:
                self.tiers.update(dict.fromkeys(change.hashes, change.tier))
        self.twin.apply(event)

    @rule(path=PATHS, start=st.integers(0, 4), medium=MEDIA, owner=OWNERS)
    def store(self, path: list[int], start: int, medium: str, owner: str | None) -> None:
        """Store a part of a path, whether or not what is before it was stored."""
        start = min(start, len(path) - 1)
        names: list[EngineBlockHash] = [str(path[: end + 1]).encode() for end in range(len(path))]
        parent = names[start - 1] if start else None
        tokens = [token for token in path[start:] for _ in range(SIZE)]
        place = {} if self.plain else {"medium": medium, "ownership": owner}
        self.feed(stored(names[start:], tokens, parent, **place))

    @rule(path=PATHS, medium=MEDIA, owner=OWNERS)
    def remove(self, path: list[int], medium: str, owner: str | None) -> None:
        """Remove a block, held or not."""
        medium, owner = ("GPU", None) if self.plain else (medium, owner)
        self.feed(BlockRemoved([str(path).encode()], medium, 0, ownership=owner))

    @rule(chance=st.integers(0, 19))
    def clear(self, chance: int) -> None:
        """Now and then the cache is reset."""
        if chance == 0:
            self.feed(AllBlocksCleared())

    @invariant()
    def agrees(self) -> None:
        """The same blocks are held in the same tiers, and the changes add up to them."""
        if not hasattr(self, "mirror"):
            return
        self.mirror.validate()
        for tier in range(3):
            held = self.twin.held(tier)
            assert self.mirror.held(tier) == held
            assert {block for block, at in self.tiers.items() if at <= tier} == held


TwinMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=35)


@pytest.mark.slow
class TestTwin(TwinMachine.TestCase):
    """Random stores and removals in all media."""


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@pytest.mark.slow
@given(
    names=st.lists(st.integers(0, 9) | st.binary(max_size=2), max_size=4),
    parent=st.none() | st.integers(0, 9),
    tokens=st.lists(st.integers(-1, 2**64 - 1), max_size=9),
    size=st.integers(-1, 4),
    keys=st.none() | st.lists(st.none() | st.lists(JUNK, max_size=3), max_size=4),
    lora=st.none() | st.just("lora"),
)
def test_no_event_raises(
    names: list[EngineBlockHash],
    parent: int | None,
    tokens: list[int],
    size: int,
    keys: list[list[Any] | None] | None,
    lora: str | None,
) -> None:
    """Whatever decodes as an event is applied or counted, and the mirror stays sound."""
    mirror = Mirror()
    event = BlockStored(names, parent, tokens, size, lora_name=lora, extra_keys=keys)
    for each in (stored([5], list(range(SIZE))), event, event, BlockRemoved(names, None)):
        mirror.apply(EventBatch(0.0, [each]))
        mirror.validate()
    assert mirror.outcomes.total() == 4
