"""What the plane keeps on the server: streams, buckets and object stores, and their bounds.

Pure data; `setup` makes the server agree with it. Every one is bounded by bytes, and by age where
old content is worthless. The sizes are caps, not reservations of disk, but nats-server refuses a
stream whose cap exceeds the space it may use, so `size` scales them all.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas import subjects

MIB = 1 << 20
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

Storage = Literal["file", "memory"]


class StreamSpec(msgspec.Struct, frozen=True):
    """One stream of the audit log; the oldest messages go first."""

    name: str
    subject: str
    age_s_max: float
    bytes_max: int


class BucketSpec(msgspec.Struct, frozen=True):
    """One key-value bucket.

    Attributes:
        history: how many values of a key are kept.
        ttl_s: an entry vanishes when it was not written for this long; 0: never.
    """

    name: str
    history: int
    ttl_s: float
    bytes_max: int


class StoreSpec(msgspec.Struct, frozen=True):
    """One object store."""

    name: str
    bytes_max: int


class Layout(msgspec.Struct, frozen=True):
    """All of it.

    Attributes:
        replicas: copies of everything: 1, or 3 on a cluster that must survive a node.
        storage: `memory` for tests and trials.
    """

    streams: tuple[StreamSpec, ...]
    buckets: tuple[BucketSpec, ...]
    stores: tuple[StoreSpec, ...]
    replicas: int = 1
    storage: Storage = "file"

    @property
    def names(self) -> set[str]:
        """The names of all that is kept."""
        return {
            *(spec.name for spec in self.streams),
            *(spec.name for spec in self.buckets),
            *(spec.name for spec in self.stores),
        }

    @property
    def nbytes_max(self) -> int:
        """The sum of all bounds: what a server must be allowed to keep."""
        return (
            sum(spec.bytes_max for spec in self.streams)
            + sum(spec.bytes_max for spec in self.buckets)
            + sum(spec.bytes_max for spec in self.stores)
        )


_STREAM_BOUNDS: dict[str, tuple[float, int]] = {
    "MP_KV": (DAY_S, 2048 * MIB),
    "MP_LOAD": (DAY_S, 256 * MIB),
    "MP_ROUTE": (7 * DAY_S, 2048 * MIB),
    "MP_HOTSPOT": (30 * DAY_S, 64 * MIB),
    "MP_POLICY": (30 * DAY_S, 64 * MIB),
}

_BUCKETS = (
    # Renewed every 2 s. The time to live only sweeps up after the dead; it is long, so that a
    # server that was down for minutes does not come back having forgotten everybody, and so that
    # routers that start while all sidecars are gone still know the engines for a while.
    BucketSpec(subjects.INSTANCES, history=1, ttl_s=2 * HOUR_S, bytes_max=64 * MIB),
    BucketSpec(subjects.ROUTERS, history=1, ttl_s=300.0, bytes_max=16 * MIB),
    BucketSpec(subjects.VERDICTS, history=8, ttl_s=0.0, bytes_max=64 * MIB),
    BucketSpec(subjects.LEADERS, history=8, ttl_s=60.0, bytes_max=4 * MIB),
    # Rewritten by routers while anything in it lives; the time to live sweeps up after tenants
    # that are gone, and is longer than any registration may be idle.
    BucketSpec(subjects.PREFIXES, history=1, ttl_s=45 * DAY_S, bytes_max=64 * MIB),
)

_STORES = (
    StoreSpec(subjects.MODELS, bytes_max=1024 * MIB),
    StoreSpec(subjects.PREDICTORS, bytes_max=256 * MIB),
)

BUCKETS: tuple[str, ...] = tuple(spec.name for spec in _BUCKETS)
STORES: tuple[str, ...] = tuple(spec.name for spec in _STORES)


def layout(replicas: int = 1, storage: Storage = "file", size: float = 1.0) -> Layout:
    """Return the plane's layout.

    Args:
        replicas: copies of everything.
        storage: where the server keeps it.
        size: factor on every bound in bytes.

    Raises:
        ValueError: replicas or size make no sense.
    """
    if replicas not in (1, 3, 5):
        raise ValueError(f"replicas must be 1, 3 or 5, not {replicas}")
    if size <= 0:
        raise ValueError(f"size must be a positive factor, not {size}")

    def scaled(spec_bytes: int) -> int:
        return max(int(spec_bytes * size), MIB)

    return Layout(
        streams=tuple(
            StreamSpec(name, subject, age_s, scaled(bytes_max))
            for name, subject in subjects.STREAMS.items()
            for age_s, bytes_max in [_STREAM_BOUNDS[name]]
        ),
        buckets=tuple(
            msgspec.structs.replace(spec, bytes_max=scaled(spec.bytes_max)) for spec in _BUCKETS
        ),
        stores=tuple(
            msgspec.structs.replace(spec, bytes_max=scaled(spec.bytes_max)) for spec in _STORES
        ),
        replicas=replicas,
        storage=storage,
    )
