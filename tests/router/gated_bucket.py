"""A bus whose bucket does nothing until a test says how it goes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from controlplane.bus.memory_bus import MemoryBus
from controlplane.bus.protocol import BusError


class GatedBus:
    """A client in memory whose reads and writes of buckets wait, in order.

    Args:
        written: called with (key, value) after each write that was done.
    """

    def __init__(self, bus: MemoryBus, written: Callable[[str, bytes], None]) -> None:
        self.gates: deque[asyncio.Future[str]] = deque()
        self._bus = bus
        self._written = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def bucket(self, name: str) -> GatedBucket:
        """See `Bus.bucket`."""
        return GatedBucket(self, await self._bus.bucket(name))

    async def through(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Do something as soon and as well as the test says.

        It is done; or "refused": it is not done, and fails; or "lost": done, without an answer.
        """
        gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        verdict = await gate
        if verdict == "refused":
            raise BusError("refused")
        found = await operation()
        if verdict == "lost":
            raise BusError("no answer")
        return found

    async def write(self, key: str, value: bytes, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Likewise, for a write."""

        async def writing() -> Any:
            revision = await operation()
            self._written(key, value)
            return revision

        return await self.through(writing)


class GatedBucket:
    """See `protocol.Bucket`."""

    def __init__(self, bus: GatedBus, bucket: Any) -> None:
        self._bus = bus
        self._bucket = bucket
        self.follow = bucket.follow

    async def get(self, key: str) -> Any:
        """See `Bucket.get`."""
        return await self._bus.through(lambda: self._bucket.get(key))

    async def create(self, key: str, value: bytes) -> Any:
        """See `Bucket.create`."""
        return await self._bus.write(key, value, lambda: self._bucket.create(key, value))

    async def update(self, key: str, value: bytes, revision: int) -> Any:
        """See `Bucket.update`."""
        return await self._bus.write(key, value, lambda: self._bucket.update(key, value, revision))
