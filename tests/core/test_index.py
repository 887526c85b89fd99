import tracemalloc

import numpy as np
import pytest

from controlplane.core.hashing import pack_hashes
from controlplane.core.index import (
    NO_MATCH,
    Match,
    PrefixIndex,
    Refusal,
    usable_blocks,
)
from controlplane.core.slots import SlotState


def chain(seed: int, length: int) -> list[int]:
    """Hashes as wild as real ones, the same for the same seed."""
    return np.random.default_rng(seed).integers(1, 2**64, length, np.uint64).tolist()


def live_slot(index: PrefixIndex, hashes: list[int]) -> int:
    """Return a new slot that holds these blocks."""
    slot = index.acquire_slot()
    assert slot is not None
    index.publish_slot(slot)
    assert index.store(slot, pack_hashes(hashes)) is None
    return slot


def sweep_all(index: PrefixIndex) -> None:
    """Sweep until nothing is left to erase."""
    while index.sweep(1_000):
        pass


def test_match_says_who_holds_how_much():
    """Each level of a match is a depth at which somebody drops out, with exactly its holders."""
    index, prompt = PrefixIndex(), chain(1, 100)
    live_slot(index, prompt[:100])
    live_slot(index, prompt[:40])
    live_slot(index, prompt[:1])
    live_slot(index, chain(2, 50))
    live_slot(index, prompt[:40] + chain(3, 9))
    assert index.match(prompt) == Match(((1, 0b10111), (40, 0b10011), (100, 0b00001)))
    assert index.match(prompt[:40]) == Match(((1, 0b10111), (40, 0b10011)))
    assert index.match([*prompt[:99], 7]) == Match(((1, 0b10111), (40, 0b10011), (99, 0b00001)))
    assert index.match(chain(4, 30)) is NO_MATCH
    assert index.match([]) is NO_MATCH
    index.check()


@pytest.mark.parametrize("blocks", [0, 1, 39, 40, 41, 99, 100, 1000])
def test_match_may_leave_the_end_of_a_chain_out(blocks: int):
    """Matching the first blocks of a chain is matching a shorter chain."""
    index, prompt = PrefixIndex(), chain(1, 100)
    live_slot(index, prompt)
    live_slot(index, prompt[:40])
    assert index.match(prompt, blocks) == index.match(prompt[:blocks])


def test_match_visits_few_blocks():
    """A long prompt costs a number of look-ups that grows with its logarithm."""
    index, prompt = PrefixIndex(), chain(1, 4096)
    live_slot(index, prompt[:3000])
    live_slot(index, prompt[:77])

    class Counted(list):
        reads = 0

        def __getitem__(self, position):
            Counted.reads += 1
            return super().__getitem__(position)

    match = index.match(Counted(prompt))
    assert [depth for depth, _ in match.levels] == [77, 3000]
    assert Counted.reads <= 26


def test_holders_by_depth_and_by_block():
    """Who holds a prefix can be asked of a match, without look-ups, and of the index."""
    index, prompt = PrefixIndex(), chain(1, 16)
    for held in (16, 3, 2):
        live_slot(index, prompt[:held])
    match = index.match(prompt)
    for depth in range(1, 17):
        assert match.holders(depth) == index.holders(prompt[depth - 1])
    assert [match.holders(depth) for depth in (1, 2, 3, 4, 16)] == [7, 7, 3, 1, 1]
    assert match.holders(17) == 0


def test_a_shadow_slot_counts_only_once_published():
    """A snapshot in progress is invisible; publishing it shows all of it at once."""
    index, prompt = PrefixIndex(), chain(1, 10)
    old = live_slot(index, prompt[:4])
    new = index.acquire_slot()
    assert new is not None
    index.store(new, pack_hashes(prompt[:5]))
    index.store(new, pack_hashes(prompt[5:]))
    assert index.match(prompt) == Match(((4, 1 << old),))
    assert index.holders(prompt[0]) == 1 << old
    index.publish_slot(new)
    index.release_slot(old)
    assert index.match(prompt) == Match(((10, 1 << new),))
    assert index.live == 1 << new
    index.check()


def test_a_released_slot_is_masked_at_once_and_reused_only_after_the_sweep():
    """No hit on a departed instance, and none of its blocks under a new one's name."""
    index, prompt = PrefixIndex(), chain(1, 100)
    keeper = live_slot(index, prompt[:10])
    gone = live_slot(index, prompt)
    index.release_slot(gone)
    assert index.match(prompt) == Match(((10, 1 << keeper),))
    assert index.state(gone) is SlotState.DEAD
    assert index.acquire_slot() == 2
    sweep_all(index)
    assert index.state(gone) is SlotState.FREE
    assert len(index) == 10
    assert index.acquire_slot() == gone
    assert index.count(gone) == index.digest(gone) == 0
    index.check()


@pytest.mark.slow
def test_a_sweep_is_sliced_and_later_deaths_wait_for_the_next_pass():
    """A slice visits about as many blocks as it may, and matches stay right in between."""
    index = PrefixIndex(blocks_max=100_000)
    prompts = [chain(seed, 3_000) for seed in range(4)]
    slots = [live_slot(index, prompt) for prompt in prompts]
    index.release_slot(slots[0])
    assert 100 <= index.sweep(100) < 2_000
    index.release_slot(slots[1])
    slices = 0
    while index.state(slots[0]) is SlotState.DEAD:
        assert index.match(prompts[1]) is NO_MATCH
        assert index.match(prompts[2]) == Match(((3_000, 1 << slots[2]),))
        index.check()
        index.sweep(100)
        slices += 1
    assert slices > 5
    assert index.state(slots[1]) is SlotState.DEAD
    sweep_all(index)
    assert index.state(slots[1]) is SlotState.FREE
    assert len(index) == 6_000
    index.check()


def test_releasing_an_empty_slot_frees_it_without_a_sweep():
    """An instance that never cached anything costs no pass over the index."""
    index = PrefixIndex()
    slot = index.acquire_slot()
    assert slot is not None
    index.release_slot(slot)
    assert index.state(slot) is SlotState.FREE
    assert index.sweep(1) == 0


def test_count_and_digest_are_those_of_the_set_even_if_blocks_repeat():
    """Repeated stores and removals of unknown blocks change nothing."""
    index, prompt = PrefixIndex(), chain(1, 8)
    slot = live_slot(index, prompt[:6])
    index.store(slot, pack_hashes([*prompt[4:], prompt[7]]))
    assert index.count(slot) == 8
    assert index.digest(slot) == int(np.bitwise_xor.reduce(np.array(prompt, np.uint64)))
    assert index.remove(slot, pack_hashes([*prompt[1:], prompt[7], 5])) == 2
    assert (index.count(slot), index.digest(slot)) == (1, prompt[0])
    assert index.holds(slot, prompt[0])
    assert not index.holds(slot, prompt[1])
    index.store(slot, b"")
    assert index.remove(slot, b"") == 0
    index.check()


def test_blocks_without_owner_leave_no_trace():
    """What the last owner removes is gone from memory."""
    index, prompt = PrefixIndex(), chain(1, 500)
    slots = [live_slot(index, prompt) for _ in range(3)]
    for slot in slots:
        index.remove(slot, pack_hashes(prompt[::-1]))
    assert len(index) == 0
    assert index.match(prompt) is NO_MATCH
    index.check()


def test_store_refuses_what_exceeds_the_index():
    """At the bound, a store that brings new blocks is refused whole; known blocks still pass."""
    index = PrefixIndex(blocks_max=100, slot_blocks_max=90)
    first = live_slot(index, chain(1, 60))
    second = live_slot(index, chain(2, 40))
    assert index.store(second, pack_hashes([1, 2])) is Refusal.INDEX_FULL
    assert index.count(second) == 40
    assert len(index) == 100
    assert index.store(second, pack_hashes(chain(1, 60)[:50])) is None
    assert index.store(second, pack_hashes(chain(1, 60))) is Refusal.SLOT_FULL
    assert index.store(second, pack_hashes(chain(1, 60)[:50] * 2)) is None
    index.remove(first, pack_hashes(chain(1, 60)[50:]))
    assert index.store(second, pack_hashes([3, 4])) is Refusal.SLOT_FULL
    assert index.store(first, pack_hashes([3, 4])) is None
    index.check()


def test_slots_are_bounded():
    """At `slots_max` there is no slot until one is swept."""
    index = PrefixIndex(slots_max=2)
    live_slot(index, chain(1, 3))
    second = live_slot(index, chain(2, 3))
    assert index.acquire_slot() is None
    index.release_slot(second)
    assert index.acquire_slot() is None
    sweep_all(index)
    assert index.acquire_slot() == second


def test_a_set_can_be_read_back():
    """An audit sees exactly the blocks of one slot."""
    index = PrefixIndex()
    slots = [live_slot(index, chain(seed, 300)) for seed in (1, 2)]
    index.store(slots[0], pack_hashes(chain(2, 300)[:7]))
    assert set(index.blocks(slots[0])) == {*chain(1, 300), *chain(2, 300)[:7]}
    assert sorted(index.blocks(slots[1])) == sorted(chain(2, 300))


def test_ragged_bytes_are_an_error():
    """A payload that is no whole number of hashes says so and changes nothing."""
    index = PrefixIndex()
    slot = live_slot(index, [1])
    with pytest.raises(ValueError, match="multiple"):
        index.store(slot, b"123456789")
    with pytest.raises(ValueError, match="multiple"):
        index.remove(slot, b"123456789")
    index.check()


def test_a_dead_slot_takes_no_blocks():
    """Storing for a departed instance is our own bug."""
    index = PrefixIndex()
    slot = live_slot(index, [1])
    index.release_slot(slot)
    with pytest.raises(AssertionError):
        index.store(slot, b"")
    with pytest.raises(AssertionError):
        index.release_slot(slot)


@pytest.mark.parametrize(
    ("prompt_tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (8192, 511)]
)
def test_usable_blocks_leave_the_last_token_out(prompt_tokens: int, blocks: int):
    """A block counts as a hit only if at least one token after it must be computed."""
    assert usable_blocks(prompt_tokens, 16) == blocks


@pytest.mark.slow
def test_memory_is_estimated_and_released():
    """The estimate is near what is allocated, and sweeping everything gives the blocks back."""
    data = [pack_hashes(chain(seed, 1_000)) for seed in range(60)]
    tracemalloc.start()
    try:
        index = PrefixIndex(blocks_max=1 << 20)
        empty = tracemalloc.get_traced_memory()[0]
        for number in range(40):
            slot = live_slot(index, [])
            for packed in data[number : number + 20]:
                index.store(slot, packed)
        used = tracemalloc.get_traced_memory()[0]
        assert 0.8 < index.memory_bytes() / used < 1.25
        for slot in range(40):
            index.release_slot(slot)
        sweep_all(index)
        assert len(index) == 0
        # Emptied dicts keep their tables until they are filled again; the blocks' ints are gone.
        assert tracemalloc.get_traced_memory()[0] - empty < 0.7 * (used - empty)
    finally:
        tracemalloc.stop()
