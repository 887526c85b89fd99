import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lab.block_pool import NULL_BLOCK, BlockPool
from tests.models.naive_block_pool import NaiveBlockPool

NUM_BLOCKS = 9


class PoolAgainstTwin(RuleBasedStateMachine):
    """Requests come, share blocks, fill them and go, in the pool and in its naive twin."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.twin = NaiveBlockPool(NUM_BLOCKS)
        self.requests: list[tuple[list[int], int]] = []  # its blocks, how many of them are full

    @rule(hashes=st.lists(st.integers(0, 5), max_size=4, unique=True), wanted=st.integers(0, 4))
    def admit(self, hashes: list[int], wanted: int) -> None:
        """A request takes over what is cached of its hashes (a chain: none twice), and more."""
        hits = self.pool.find(hashes)
        assert hits == self.twin.find(hashes)
        if wanted + self.pool.count_free(hits) > self.pool.free_count:
            return
        self.pool.touch(hits)
        self.twin.touch(hits)
        evicted: list[int] = []
        evicted_twin: list[int] = []
        blocks = self.pool.allocate(wanted, evicted)
        assert blocks == self.twin.allocate(wanted, evicted_twin)
        assert evicted == evicted_twin
        self.requests.append((hits + blocks, len(hits)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """Some of a request's blocks become full; hashes may be there already."""
        position = data.draw(st.integers(0, len(self.requests) - 1))
        blocks, full = self.requests[position]
        end = data.draw(st.integers(full, len(blocks)))
        hashes = data.draw(st.lists(st.integers(0, 5), min_size=end - full, max_size=end - full))
        self.pool.cache(blocks[full:end], hashes)
        self.twin.cache(blocks[full:end], hashes)
        self.requests[position] = (blocks, end)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request gives all its blocks back."""
        blocks, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pool.release(blocks)
        self.twin.release(blocks)

    @rule()
    def clear(self) -> None:
        """The cache is reset, which works only while nothing is in use."""
        assert self.pool.clear() == self.twin.clear() == (not self._in_use())

    @invariant()
    def agree(self) -> None:
        """Both hold the same blocks and hashes, and the pool's own invariants hold."""
        self.pool.check()
        assert self.pool.free_count == len(self.twin.queue)
        assert self.pool.copies() == self.twin.copies()
        assert set(self.pool.cached) == self.twin.copies().keys()
        assert self.pool.usage == pytest.approx(self._in_use() / (NUM_BLOCKS - 1))

    def _in_use(self) -> int:
        return sum(count > 0 for count in self.twin.references.values())


PoolAgainstTwin.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestPoolAgainstTwin(PoolAgainstTwin.TestCase):  # type: ignore[misc]
    """The pool does what its naive twin does, whatever the order of operations."""


def test_null_block_is_never_handed_out() -> None:
    """All blocks but number 0 can be allocated, and usage counts only those."""
    pool = BlockPool(4)
    assert pool.allocate(3, []) == [1, 2, 3]
    assert NULL_BLOCK not in (1, 2, 3)
    assert pool.usage == 1.0
    with pytest.raises(AssertionError, match="1 blocks asked, 0 free"):
        pool.allocate(1, [])


def test_pool_without_room_is_refused() -> None:
    """A pool of the null block alone says so."""
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_filled_block_must_not_be_filled_again() -> None:
    """A block keeps its hash until it is evicted; a second hash is our bug."""
    pool = BlockPool(3)
    blocks = pool.allocate(1, [])
    pool.cache(blocks, [7])
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache(blocks, [8])
