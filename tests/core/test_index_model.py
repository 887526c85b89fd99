"""The index against its naive twin, over any order of stores, removals, departures and sweeps."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.core import hit_rows as hit_rows_module
from controlplane.core import index as index_module
from controlplane.core.hashing import pack_hashes
from controlplane.core.hit_rows import SlotRows
from controlplane.core.index import PrefixIndex
from controlplane.core.slots import SlotState
from tests.models.naive_index import NaiveIndex

# A small forest of prompts: every one is a path, and prefixes are shared at several depths.
_WILD = np.random.default_rng(7).integers(1, 2**64, 400, np.uint64).tolist()
_TRUNK = _WILD[:12]
PROMPTS = [
    _TRUNK[:fork] + _WILD[20 + 20 * number : 20 + 20 * number + length]
    for number, (fork, length) in enumerate(
        [(12, 0), (12, 18), (12, 5), (7, 11), (7, 1), (1, 15), (0, 9), (0, 1)]
    )
]
PARENT = {block: p[d - 1] if d else None for p in PROMPTS for d, block in enumerate(p)}

BOUNDS = (
    (index_module, "SHARED_MASKS_MAX"),
    (index_module, "FORKS_MAX"),
    (index_module, "FORK_LOOKS_MAX"),
    (index_module, "FORK_SLOTS_MIN"),
    (hit_rows_module, "MASKS_MAX"),
    (hit_rows_module, "SCATTER_BITS_MAX"),
)

slots_drawn = st.integers(0, 9)
prompts_drawn = st.integers(0, len(PROMPTS) - 1)


class IndexMachine(RuleBasedStateMachine):
    """Does the same to both and asks both the same."""

    def __init__(self) -> None:
        super().__init__()
        self.real = PrefixIndex(slots_max=10)
        self.naive = NaiveIndex()
        self.rows = SlotRows(np.arange(10)[::-1])

    def slot(self, draw: int) -> int:
        """One of the slots that may be written."""
        known = sorted(self.naive.sets)
        return known[draw % len(known)]

    @rule()
    def acquire(self) -> None:
        """A new slot is none that is in use or unswept."""
        dead = [s for s in range(self.real.slots) if self.real.state(s) is SlotState.DEAD]
        slot = self.real.acquire_slot()
        if slot is None:
            assert len(self.naive.sets) + len(dead) == 10
            return
        assert slot not in self.naive.sets
        assert slot not in dead
        self.naive.sets[slot] = set()

    @precondition(lambda self: self.naive.sets)
    @rule(draw=slots_drawn)
    def publish(self, draw: int) -> None:
        """A shadow goes live."""
        slot = self.slot(draw)
        if slot not in self.naive.live:
            self.real.publish_slot(slot)
            self.naive.live.add(slot)

    @precondition(lambda self: self.naive.sets)
    @rule(draw=slots_drawn)
    def release(self, draw: int) -> None:
        """An instance departs, or its set is replaced."""
        slot = self.slot(draw)
        self.real.release_slot(slot)
        del self.naive.sets[slot]
        self.naive.live.discard(slot)

    @precondition(lambda self: self.naive.sets)
    @rule(draw=slots_drawn, prompt=prompts_drawn, depth=st.integers(0, 30))
    def store(self, draw: int, prompt: int, depth: int) -> None:
        """A prefix is cached: whole, as only prefixes are."""
        slot, hashes = self.slot(draw), PROMPTS[prompt][:depth]
        assert self.real.store(slot, pack_hashes(hashes)) is None
        self.naive.store(slot, hashes)

    @precondition(lambda self: self.naive.sets)
    @rule(draw=slots_drawn, prompt=prompts_drawn, depth=st.integers(0, 30))
    def remove_subtree(self, draw: int, prompt: int, depth: int) -> None:
        """Evict what hangs below a block, children first: the set stays prefix-closed."""
        slot, path = self.slot(draw), PROMPTS[prompt]
        gone = set(path[depth : depth + 1])
        while more := {b for b in self.naive.sets[slot] if PARENT[b] in gone} - gone:
            gone |= more
        order = [block for block in reversed(_WILD) if block in gone]
        assert self.real.remove(slot, pack_hashes(order)) == self.naive.remove(slot, order)

    @rule(blocks=st.integers(1, 40))
    def sweep(self, blocks: int) -> None:
        """Erase a little."""
        self.real.sweep(blocks)

    @rule()
    def forget_shared_masks(self) -> None:
        """What is remembered may be forgotten at any time."""
        self.real._shared.clear()
        self.rows._indicators.clear()
        self.rows._filled.clear()
        self.real._forks.clear()

    @invariant()
    def same_answers(self) -> None:
        """Sums, depths and holders are equal."""
        self.real.check()
        for slot, blocks in self.naive.sets.items():
            assert self.real.count(slot) == len(blocks)
            assert self.real.digest(slot) == self.naive.digest(slot)
        for prompt in PROMPTS:
            match = self.real.match(prompt)
            depths = [self.naive.depth(slot, prompt) for slot in range(10)]
            assert self.rows.hits(match).tolist() == depths[::-1]
            for depth, block in enumerate(prompt, 1):
                holders = sum(1 << slot for slot, d in enumerate(depths) if d >= depth)
                assert match.holders(depth) == self.real.holders(block) == holders


class CrowdedIndexMachine(IndexMachine):
    """The same with every bound on what is remembered at its smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = [getattr(module, name) for module, name in BOUNDS]
        for module, name in BOUNDS:
            setattr(module, name, 1)

    def teardown(self) -> None:
        """Put the bounds back."""
        for (module, name), bound in zip(BOUNDS, self.bounds, strict=True):
            setattr(module, name, bound)


@pytest.mark.slow
def test_the_index_answers_as_its_naive_twin():
    """Any history leaves both with the same sets, and so with the same matches."""
    IndexMachine.TestCase.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None
    )
    IndexMachine.TestCase().runTest()


@pytest.mark.slow
def test_the_index_is_right_when_it_remembers_next_to_nothing():
    """Sharing masks and index arrays saves time and memory; no answer depends on it."""
    CrowdedIndexMachine.TestCase.settings = settings(
        max_examples=20, stateful_step_count=30, deadline=None
    )
    CrowdedIndexMachine.TestCase().runTest()
