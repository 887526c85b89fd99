"""What the core is told besides the bus messages of `schemas.bus`."""

from __future__ import annotations

import msgspec

from schemas.bus import (
    Blacklist,
    Drain,
    HotspotCleared,
    HotspotRaised,
    InstanceRecord,
    KvBatch,
    LoadReport,
    PolicyOverride,
    RouteBatch,
    SnapshotChunk,
)


class InstanceGone(msgspec.Struct, frozen=True):
    """An instance's record was deleted from the bucket."""

    instance_id: str


class SnapshotFailed(msgspec.Struct, frozen=True):
    """A snapshot that was asked for did not come, or not whole."""

    instance_id: str
    reason: str


class BusState(msgspec.Struct, frozen=True):
    """The connection to the bus was lost, or is back."""

    connected: bool


class BreakerState(msgspec.Struct, frozen=True):
    """The data plane's own evidence on an instance: closed means that requests get through."""

    instance_id: str
    open: bool


class Paused(msgspec.Struct, frozen=True):
    """The process did not run for a while: nobody could have been heard."""

    seconds: float


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; sent several times a second."""


Event = (
    InstanceRecord
    | InstanceGone
    | KvBatch
    | SnapshotChunk
    | SnapshotFailed
    | LoadReport
    | RouteBatch
    | HotspotRaised
    | HotspotCleared
    | PolicyOverride
    | Drain
    | Blacklist
    | BusState
    | BreakerState
    | Paused
    | Tick
)
