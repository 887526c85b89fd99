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
    """Makes batches of the engine's own names."""

    def __init__(self, instance_id: str, heartbeat_s: float = 1.0) -> None:
        self._instance_id = instance_id
        self._heartbeat_s = heartbeat_s
        self._held: set[int] = set()
        self._more: Counter[int] = Counter()  # copies beyond the first
        self._digest = 0
        self._seq = -1
        self._sent_s = float("-inf")

    def take(self, events: Sequence[EngineEvent], now_s: float) -> list[KvBatch]:
        """Return the batch of a step's events, in their order."""
        ops: list[KvOp] = []
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event, ops)
            elif isinstance(event, BlocksRemoved):
                self._remove(event.hashes, ops)
            else:
                assert isinstance(event, CacheCleared)
                self._held.clear()
                self._more.clear()
                self._digest = 0
                ops.append(KvCleared())
        return [self._batch(ops, now_s)] if ops else []

    def heartbeat(self, now_s: float) -> list[KvBatch]:
        """Return an empty batch, if none was published for `heartbeat_s`."""
        return [self._batch([], now_s)] if now_s - self._sent_s >= self._heartbeat_s else []

    def _store(self, event: BlocksStored, ops: list[KvOp]) -> None:
        held, hashes, parent = self._held, event.hashes, event.parent
        if held.isdisjoint(hashes):
            held.update(hashes)
            self._told(hashes, ops, parent)
            return
        run: list[int] = []
        for each in hashes:
            if each in held:
                self._more[each] += 1
                self._told(run, ops, parent)
                run, parent = [], each
            else:
                held.add(each)
                run.append(each)
        self._told(run, ops, parent)

    def _told(self, hashes: Sequence[int], ops: list[KvOp], parent: int | None) -> None:
        if hashes:
            packed = pack_hashes(hashes)
            self._digest ^= _xor(packed)
            ops.append(KvStored(packed, parent))

    def _remove(self, hashes: Sequence[int], ops: list[KvOp]) -> None:
        more = self._more
        if more and not more.keys().isdisjoint(hashes):
            last = []
            for each in hashes:
                if more.get(each):
                    more[each] -= 1
                    if not more[each]:
                        del more[each]
                else:
                    last.append(each)
            hashes = last
        if hashes:
            self._held.difference_update(hashes)
            packed = pack_hashes(hashes)
            self._digest ^= _xor(packed)
            ops.append(KvRemoved(packed))

    def _batch(self, ops: list[KvOp], now_s: float) -> KvBatch:
        self._seq += 1
        self._sent_s = now_s
        return KvBatch(
            self._instance_id, EPOCH, self._seq, now_s, ops, len(self._held), self._digest
        )


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


def _xor(packed: bytes) -> int:
    """Return the XOR of packed hashes."""
    return int(np.bitwise_xor.reduce(np.frombuffer(packed, "<u8")))
