"""From an engine's block events to the batches that its sidecar would publish.

Two ways that lead to the same decisions. `SidecarFeed` takes the production way: vLLM's events with
tokens, through the mirror and the relay. `DirectFeed` makes batches straight from the events' names
and is some ten times faster. It may, because of two things that hold for an engine's own cache:

- it is prefix-closed at any time: whoever uses a block uses its parents as well, and releases them
  after it, so least-recently-used eviction takes children first; nothing needs to be withheld;
- names stand for prefixes one to one, so they can serve as block hashes.

What is left is to count copies: a block that is computed twice is stored twice, and gone only when
both copies are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from controlplane.core.hashing import pack_hashes
from lab.block_pool import BlockPool
from lab.engine_types import BlocksRemoved, BlocksStored, CacheCleared, EngineEvent
from schemas.bus import KvBatch, KvCleared, KvOp, KvRemoved, KvStored
from schemas.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from sidecar.mirror import APPLIED, Mirror, Outcome
from sidecar.relay import Relay

EPOCH = 1


class BlockFeed(Protocol):
    """Turns one engine's events into batches."""

    def take(self, events: Sequence[EngineEvent], now_s: float) -> list[KvBatch]:
        """Return what is published because of a step's events; may be nothing."""

    def heartbeat(self, now_s: float) -> list[KvBatch]:
        """Return an empty batch, if none was published for a while."""


class DirectFeed:
    """Makes batches of the engine's own names.

    It keeps no set of its own: how many copies of a block there were before a step follows from
    how many the engine has after it. Steps that touch no copies, nearly all, need no counting.
    """

    def __init__(self, instance_id: str, pool: BlockPool, heartbeat_s: float = 1.0) -> None:
        self._instance_id = instance_id
        self._pool = pool
        self._heartbeat_s = heartbeat_s
        self._count = self._digest = 0
        self._seq = -1
        self._sent_s = float("-inf")

    def take(self, events: Sequence[EngineEvent], now_s: float) -> list[KvBatch]:
        """Return the batch of a step's events; the step must be the engine's last one.

        Stores come first: what was stored and removed within the step is gone, then.
        """
        stored: list[int] = []
        removed: list[int] = []
        ops: list[KvOp] = []
        for event in events:
            if isinstance(event, BlocksStored):
                stored += event.hashes
            elif isinstance(event, BlocksRemoved):
                removed += event.hashes
            else:
                assert isinstance(event, CacheCleared)
                assert not stored, "a cache is cleared between steps"
                self._digest = 0
                ops.append(KvCleared())
        if self._copied(stored, removed):
            stored, removed = self._net(stored, removed)
        if stored:
            ops.append(KvStored(self._told(stored)))
        if removed:
            ops.append(KvRemoved(self._told(removed)))
        self._count = len(self._pool.cached)
        return [self._batch(ops, now_s)] if ops else []

    def heartbeat(self, now_s: float) -> list[KvBatch]:
        """Return an empty batch, if none was published for `heartbeat_s`."""
        return [self._batch([], now_s)] if now_s - self._sent_s >= self._heartbeat_s else []

    def _told(self, hashes: list[int]) -> bytes:
        packed = pack_hashes(hashes)
        self._digest ^= int(np.bitwise_xor.reduce(np.frombuffer(packed, "<u8")))
        return packed

    def _copied(self, stored: list[int], removed: list[int]) -> bool:
        """Whether a block with copies is among them: one stored was there, or one removed still is.

        Two copies that left together show as a block that was removed twice.
        """
        twins, cached = self._pool.twins.keys(), self._pool.cached
        plain = twins.isdisjoint(stored) and cached.isdisjoint(removed)
        return not plain or len(set(removed)) < len(removed)

    def _net(self, stored: list[int], removed: list[int]) -> tuple[list[int], list[int]]:
        """Return the blocks that joined the cache by a step, and those that left it."""
        pool, growth = self._pool, Counter(stored)
        growth.subtract(removed)
        joined, left = [], []
        for each, more in growth.items():
            after = 1 + len(pool.twins.get(each, ())) if each in pool.cached else 0
            if after and after == more:
                joined.append(each)
            elif not after and more < 0:
                left.append(each)
        return joined, left

    def _batch(self, ops: list[KvOp], now_s: float) -> KvBatch:
        self._seq += 1
        self._sent_s = now_s
        return KvBatch(self._instance_id, EPOCH, self._seq, now_s, ops, self._count, self._digest)


class SidecarFeed:
    """The production way: vLLM's events, then the sidecar's mirror and relay.

    Args:
        tokens_of: the prompt and answer of a request that has not ended.
    """

    def __init__(
        self, instance_id: str, block_size: int, tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        self._block_size = block_size
        self._tokens_of = tokens_of
        self._mirror = Mirror()
        self._relay = Relay(instance_id, EPOCH)

    def take(self, events: Sequence[EngineEvent], now_s: float) -> list[KvBatch]:
        """Return the batches that the relay makes of a step's events."""
        batch = EventBatch(now_s, [each for event in events for each in self._wire(event)])
        self._relay.apply(self._mirror.apply(batch))
        assert self._mirror.outcomes.keys() <= APPLIED | {Outcome.REJECTED}
        return self._flush(now_s)

    def heartbeat(self, now_s: float) -> list[KvBatch]:
        """Return an empty batch, if none was published for a while."""
        return self._flush(now_s)

    def _flush(self, now_s: float) -> list[KvBatch]:
        batches = []
        while (batch := self._relay.flush(now_s, now_s)) is not None:
            batches.append(batch)
        return batches

    def _wire(self, event: EngineEvent) -> list[Event]:
        """Return an event as vLLM sends it."""
        size = self._block_size
        if isinstance(event, BlocksStored):
            end = event.first_block + len(event.hashes)
            tokens = self._tokens_of(event.request_id)[event.first_block * size : end * size]
            return [BlockStored(list(event.hashes), event.parent, list(tokens), size, medium="GPU")]
        if isinstance(event, BlocksRemoved):
            return [BlockRemoved([name], medium="GPU") for name in event.hashes]
        return [AllBlocksCleared()]
