"""A sidecar beside an emulated engine on some bus, and a receiver of all that it publishes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from controlplane.bus import Bus
from controlplane.bus.protocol import Entry, Subscription
from controlplane.core.hashing import BlockHash
from lab.tiny_model import tiny_model_dir
from schemas import subjects
from schemas.bus import (
    InstanceRecord,
    KvBatch,
    LoadReport,
    SnapshotChunk,
    SnapshotRequest,
    decode_instance,
    decode_kv,
    decode_load,
    decode_snapshot_chunk,
)
from schemas.codec import encode
from sidecar.config import SidecarConfig
from sidecar.service import SidecarService
from tests.bus.worlds import eventually
from tests.models.naive_relay import Receiver

__all__ = ["Router", "eventually", "sidecar_of", "snapshot_of"]

FAST: dict[str, Any] = {
    "heartbeat_s": 0.2,
    "load_s": 0.02,
    "metrics_s": 0.05,
    "health_s": 0.05,
    "http_timeout_s": 1.0,
    "settle_s": 0.02,
    "replay_silence_s_max": 1.0,
}


class Router:
    """What a router would know: records, block sets, loads; every batch is checked."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.records: dict[str, InstanceRecord] = {}
        self.history: list[tuple[str, str]] = []
        self.batches: dict[str, list[KvBatch]] = defaultdict(list)
        self.loads: dict[str, list[LoadReport]] = defaultdict(list)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe to everything."""
        bucket = await self.bus.bucket(subjects.INSTANCES)
        self._subscriptions = [
            await self.bus.subscribe(subjects.all_of("kv"), self._kv),
            await self.bus.subscribe(subjects.all_of("load"), self._load),
            await bucket.watch(self._record),
        ]

    def _kv(self, subject: str, payload: bytes) -> None:
        self.batches[subjects.parse(subject)[2]].append(decode_kv(payload))

    def _load(self, subject: str, payload: bytes) -> None:
        self.loads[subjects.parse(subject)[2]].append(decode_load(payload))

    def _record(self, entry: Entry) -> None:
        name = subjects.parse_key(entry.key)[1]
        if entry.value is None:
            self.records.pop(name, None)
            self.history.append((name, "deleted"))
            return
        record = decode_instance(entry.value)
        self.records[name] = record
        if self.history[-1:] != [(name, record.state)]:
            self.history.append((name, record.state))

    def blocks(self, name: str) -> set[BlockHash]:
        """Return the block set that the last epoch's batches add up to, checking each."""
        epoch = self.batches[name][-1].epoch
        receiver = Receiver()
        for batch in self.batches[name]:
            if batch.epoch == epoch:
                receiver.take(batch)
        return receiver.sets.get(0, set())

    def state(self, name: str) -> str:
        """Return the state in an instance's record; empty if there is none."""
        record = self.records.get(name)
        return record.state if record else ""


async def snapshot_of(bus: Bus, model: str, name: str) -> list[SnapshotChunk]:
    """Ask a sidecar for its block set."""
    asked = encode(SnapshotRequest("test"))
    subject = subjects.snapshot(model, name)
    return [
        decode_snapshot_chunk(chunk) async for chunk in bus.request(subject, asked, timeout_s=5.0)
    ]


@contextlib.asynccontextmanager
async def sidecar_of(url: str, bus: Bus, **settings: Any) -> AsyncIterator[SidecarService]:
    """A running sidecar, drained at the end."""
    given = {"instance_id": "i-1", "model_path": str(tiny_model_dir()), **FAST, **settings}
    service = SidecarService(SidecarConfig(engine_url=url, **given), bus)
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    try:
        yield service
    finally:
        stop.set()
        await running
