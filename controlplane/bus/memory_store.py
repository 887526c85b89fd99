"""Buckets and object stores of the in-memory bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from controlplane.bus.protocol import (
    BusError,
    ChangeHandler,
    Entry,
    EntryHandler,
    Subscription,
    WrongRevision,
)
from controlplane.bus.view import BucketView
from controlplane.bus.wildcard import matches

if TYPE_CHECKING:
    from controlplane.bus.memory_bus import MemoryBus


class Shelf:
    """The broker's side of one bucket: the last entry of each key, deletions included.

    Attributes:
        written_s: when each key was written last, monotonic seconds.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.written_s: dict[str, float] = {}
        self.watches: list[MemoryWatch] = []
        self._revision = 0

    def live(self, key: str) -> Entry | None:
        """Return the entry of a key that exists."""
        entry = self.entries.get(key)
        return None if entry is None or entry.value is None else entry

    def write(self, key: str, value: bytes | None) -> int:
        """Write or (None) delete a key; tells every watch."""
        self._revision += 1
        entry = Entry(key, value, self._revision)
        self.entries[key] = entry
        self.written_s[key] = time.monotonic()
        for watch in self.watches:
            watch.send(entry)
        return self._revision


class MemoryWatch:
    """A running watch; see `protocol.Watch`."""

    def __init__(self, bus: MemoryBus, shelf: Shelf, handler: EntryHandler, prefix: str) -> None:
        self._bus = bus
        self._shelf = shelf
        self._pattern = f"{prefix}.>" if prefix else ">"
        self._view = BucketView(lambda entry: bus.guard.call(handler, entry))
        self._synced = asyncio.Event()
        self._stopped = False
        shelf.watches.append(self)
        bus.on_heal.append(self.restart)
        if bus.connected:
            self.restart()

    def restart(self) -> None:
        """Send the current entries."""
        self._schedule(self._view.restart)
        now_s = time.monotonic()
        for entry in list(self._shelf.entries.values()):
            age_s = now_s - self._shelf.written_s[entry.key]
            self.send(structs.replace(entry, age_s=age_s))
        self._schedule(self._complete)

    def send(self, entry: Entry) -> None:
        """Send one entry, if it is wanted."""
        if self._bus.connected and matches(self._pattern, entry.key):
            self._schedule(self._view.feed, entry)

    async def synced(self, timeout_s: float) -> None:
        """See `Watch.synced`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            raise BusError(f"the bucket was not read within {timeout_s} s") from None

    async def stop(self) -> None:
        """See `Subscription.stop`."""
        self._stopped = True
        if self in self._shelf.watches:
            self._shelf.watches.remove(self)
            self._bus.on_heal.remove(self.restart)

    def _complete(self) -> None:
        self._view.complete()
        self._synced.set()

    def _schedule(self, step: Callable[..., None], *args: Entry) -> None:
        generation = self._bus.generation

        def deliver() -> None:
            if not self._stopped and self._bus.generation == generation:
                step(*args)

        self._bus.broker.schedule(deliver)


class MemoryBucket:
    """See `protocol.Bucket`."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._subject = f"$KV.{name}."

    async def put(self, key: str, value: bytes) -> int:
        """See `Bucket.put`."""
        return self._write(self._shelf(), key, value)

    async def create(self, key: str, value: bytes) -> int:
        """See `Bucket.create`."""
        shelf = self._shelf()
        if shelf.live(key) is not None:
            raise WrongRevision(f"{key} exists in bucket {self._name}")
        return self._write(shelf, key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `Bucket.update`."""
        self._compare(key, revision)
        return self._write(self._shelf(), key, value)

    def _write(self, shelf: Shelf, key: str, value: bytes) -> int:
        """Write a key, and tell it as a message too, as the server does."""
        revision = shelf.write(key, value)
        self._bus.broker.send(self._subject + key, value)
        return revision

    async def get(self, key: str) -> Entry | None:
        """See `Bucket.get`."""
        return self._shelf().live(key)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `Bucket.delete`."""
        if revision is not None:
            self._compare(key, revision)
        self._shelf().write(key, None)

    async def keys(self) -> list[str]:
        """See `Bucket.keys`."""
        shelf = self._shelf()
        return sorted(key for key in shelf.entries if shelf.live(key))

    async def follow(self, handler: ChangeHandler) -> Subscription:
        """See `Bucket.follow`."""

        def told(subject: str, payload: bytes) -> None:
            if payload:
                handler(subject[len(self._subject) :], payload)

        return await self._bus.subscribe(f"{self._subject}>", told)

    async def watch(self, handler: EntryHandler, prefix: str = "") -> MemoryWatch:
        """See `Bucket.watch`."""
        return MemoryWatch(self._bus, self._shelf(anyway=True), handler, prefix)

    def _compare(self, key: str, revision: int) -> None:
        entry = self._shelf().entries.get(key)
        if (entry.revision if entry else 0) != revision:
            raise WrongRevision(f"{key} in bucket {self._name} is no longer at {revision}")

    def _shelf(self, *, anyway: bool = False) -> Shelf:
        if not anyway:
            self._bus.require()
        shelf = self._bus.broker.shelves.get(self._name)
        if shelf is None:
            raise BusError(f"no bucket {self._name}")
        return shelf


class MemoryObjects:
    """See `protocol.Objects`."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self._bus = bus
        self._name = name

    async def put(self, name: str, data: bytes) -> None:
        """See `Objects.put`."""
        self._store()[name] = bytes(data)

    async def get(self, name: str) -> bytes | None:
        """See `Objects.get`."""
        return self._store().get(name)

    async def delete(self, name: str) -> None:
        """See `Objects.delete`."""
        self._store().pop(name, None)

    async def names(self) -> list[str]:
        """See `Objects.names`."""
        return sorted(self._store())

    def _store(self) -> dict[str, bytes]:
        self._bus.require()
        store = self._bus.broker.stores.get(self._name)
        if store is None:
            raise BusError(f"no object store {self._name}")
        return store
