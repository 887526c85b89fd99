"""Builders for tests of the plane: records, batches and a publisher that counts as sidecars do."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.dispatch import RouteRequest
from controlplane.core.hashing import chain, pack_hashes, pack_tokens
from controlplane.core.plane import Plane, PlaneConfig
from schemas.bus import (
    InstanceRecord,
    KvBatch,
    KvCleared,
    KvOp,
    KvRemoved,
    KvStored,
    SnapshotChunk,
)

BLOCK = 16


def prompt(*numbers: int, blocks_each: int = 1) -> list[int]:
    """Return the block hashes of a prompt made of recognisable blocks."""
    tokens = [number for number in numbers for _ in range(BLOCK * blocks_each)]
    return chain(pack_tokens(tokens), BLOCK)


def record(name: str, **fields: object) -> InstanceRecord:
    """Return a ready instance's record."""
    defaults: dict[str, object] = {
        "url": f"http://{name}:8000",
        "epoch": 1,
        "block_size": BLOCK,
    }
    return InstanceRecord(name, "m", **(defaults | fields))  # type: ignore[arg-type]


def plane(*names: str, now_s: float = 0.0, **config: object) -> Plane:
    """Return a plane of instances whose block sets are empty and exact."""
    made = Plane("m", "router-a", 1, PlaneConfig(**config))  # type: ignore[arg-type]
    for name in names:
        made.handle(record(name), now_s)
        made.handle(Publisher(name).batch(), now_s)
    return made


def request(hashes: list[int], **fields: object) -> RouteRequest:
    """Return a request whose prompt is these blocks and a little more."""
    defaults: dict[str, object] = {"block_size": BLOCK}
    tokens = len(hashes) * BLOCK + 5
    return RouteRequest("r", tokens, hashes, **(defaults | fields))  # type: ignore[arg-type]


class Publisher:
    """What a sidecar publishes of one block set: sequence, count and digest as they should be."""

    def __init__(self, name: str, epoch: int = 1) -> None:
        self.name = name
        self.epoch = epoch
        self.seq = -1
        self.blocks: set[int] = set()

    @property
    def digest(self) -> int:
        """XOR of the set."""
        digest = 0
        for block in self.blocks:
            digest ^= block
        return digest

    def batch(self, *ops: KvOp) -> KvBatch:
        """Return the next batch with these ops."""
        self.seq += 1
        count, digest = len(self.blocks), self.digest
        return KvBatch(self.name, self.epoch, self.seq, 0.0, list(ops), count, digest)

    def store(self, hashes: Iterable[int]) -> KvBatch:
        """Return a batch that stores what is new of a chain."""
        new = [block for block in hashes if block not in self.blocks]
        self.blocks.update(new)
        return self.batch(KvStored(pack_hashes(new)))

    def remove(self, hashes: Iterable[int]) -> KvBatch:
        """Return a batch that removes blocks."""
        gone = list(hashes)
        self.blocks.difference_update(gone)
        return self.batch(KvRemoved(pack_hashes(gone)))

    def clear(self) -> KvBatch:
        """Return a batch that empties the set."""
        self.blocks.clear()
        return self.batch(KvCleared())

    def snapshot(self, chunks: int = 1) -> list[SnapshotChunk]:
        """Return the set as a snapshot."""
        blocks = sorted(self.blocks)
        size = max(1, -(-len(blocks) // chunks))
        parts = [blocks[start : start + size] for start in range(0, size * chunks, size)]
        return [
            SnapshotChunk(
                self.name,
                self.epoch,
                self.seq,
                index,
                chunks,
                pack_hashes(part),
                count=len(blocks),
                digest=self.digest,
            )
            for index, part in enumerate(parts)
        ]
