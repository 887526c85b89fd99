from __future__ import annotations

from functools import reduce
from operator import xor

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.hashing import unpack_hashes
from lab.block_pool import BlockPool
from lab.engine import Engine
from lab.engine_types import BlocksRemoved, BlocksStored, CacheCleared, EngineEvent
from lab.replay_feed import DirectFeed
from schemas.bus import KvBatch, KvCleared, KvRemoved, KvStored
from tests.lab.engine_helpers import chain, request, small_engine


class Receiver:
    """What a router makes of batches, without an index."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.seq = -1

    def take(self, batches: list[KvBatch]) -> None:
        """Apply batches, each checked against its own count and digest."""
        for batch in batches:
            assert batch.seq == self.seq + 1
            self.seq = batch.seq
            for op in batch.ops:
                if isinstance(op, KvCleared):
                    self.blocks.clear()
                elif isinstance(op, KvStored):
                    hashes = unpack_hashes(op.hashes)
                    assert len(set(hashes)) == len(hashes)
                    self.blocks.update(hashes)
                else:
                    hashes = unpack_hashes(op.hashes)
                    assert len(set(hashes)) == len(hashes)
                    self.blocks.difference_update(hashes)
            assert batch.count == len(self.blocks)
            assert batch.digest == reduce(xor, self.blocks, 0)


def step(engine: Engine, feed: DirectFeed, receiver: Receiver) -> None:
    """One step, and what is published of it."""
    receiver.take(feed.take(engine.step().events, 0.0))
    assert receiver.blocks == set(engine.pool.cached)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 30)), max_size=12))
def test_a_receiver_holds_what_the_engine_caches(asked: list[tuple[int, int, int]]) -> None:
    """After every step, whatever is shared, twice computed, evicted or preempted."""
    engine, receiver = small_engine(33), Receiver()
    feed = DirectFeed("i0", engine.pool)
    for number, (root, prompt, output) in enumerate(asked):
        engine.add_request(request(f"r{number}", prompt, output, root=root))
        step(engine, feed, receiver)
    for _ in range(2000):
        if not engine.has_work:
            break
        step(engine, feed, receiver)
    assert not engine.has_work


def test_a_block_with_two_copies_is_told_once_and_gone_with_the_last() -> None:
    """Two requests compute the same prompt at once; both copies are evicted one by one."""
    engine, receiver = small_engine(17), Receiver()
    feed = DirectFeed("i0", engine.pool)
    for name in ("a", "b"):
        engine.add_request(request(name, 24, 2))
    step(engine, feed, receiver)
    assert receiver.blocks == set(chain(1, 6))
    while engine.has_work:
        step(engine, feed, receiver)
    for number in range(6):
        engine.add_request(request(f"more{number}", 20, 1, root=10 + number))
        while engine.has_work:
            step(engine, feed, receiver)
    assert not receiver.blocks & set(chain(1, 6))


def test_what_a_step_stored_and_removed_is_gone() -> None:
    """The order within a step is the engine's, whatever the order of the operations."""
    pool, receiver = BlockPool(4), Receiver()
    feed = DirectFeed("i0", pool)
    events: list[EngineEvent] = [BlocksStored("a", 0, [1, 2], None), BlocksRemoved([2])]
    pool.cache(pool.allocate(1, []), [1])
    receiver.take(feed.take(events, 0.0))
    assert receiver.blocks == {1}


def test_a_cleared_cache_is_told() -> None:
    """A reset empties the set; what the step stores afterwards is in it."""
    engine, receiver = small_engine(33), Receiver()
    feed = DirectFeed("i0", engine.pool)
    engine.add_request(request("a", 24, 1))
    while engine.has_work:
        step(engine, feed, receiver)
    assert engine.reset_prefix_cache()
    engine.add_request(request("b", 24, 1, root=2))
    events = engine.step().events
    assert isinstance(events[0], CacheCleared)
    receiver.take(feed.take(events, 0.0))
    assert receiver.blocks == set(chain(2, 6))


def test_an_idle_stream_has_heartbeats_and_a_busy_one_none() -> None:
    """An empty batch after a second of silence, with the count and digest as they are."""
    engine, receiver = small_engine(33), Receiver()
    feed = DirectFeed("i0", engine.pool)
    receiver.take(feed.heartbeat(0.0))
    engine.add_request(request("a", 24, 1))
    events = engine.step().events
    assert feed.heartbeat(0.5) == [], "half a second after the last batch"
    receiver.take(feed.heartbeat(1.0))
    assert receiver.blocks == set(), "the step is not over"
    receiver.take(feed.take(events, 1.5))
    assert feed.heartbeat(2.4) == []
    (beat,) = feed.heartbeat(2.5)
    receiver.take([beat])
    assert beat.ops == []
    assert beat.count == 6


def test_events_become_at_most_one_store_and_one_removal() -> None:
    """However many events a step had: receivers pay by the operation."""
    engine = small_engine(17, max_num_batched_tokens=64)
    feed = DirectFeed("i0", engine.pool)
    for number in range(8):
        engine.add_request(request(f"r{number}", 20, 4, root=number + 1))
    while engine.has_work:
        for batch in feed.take(engine.step().events, 0.0):
            kinds = [type(op) for op in batch.ops]
            assert kinds in ([KvStored], [KvRemoved], [KvStored, KvRemoved])
