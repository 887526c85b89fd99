"""The event plane as the rest of the code sees it: one protocol, two implementations.

`nats_bus.NatsBus` is the real one; `memory_bus.MemoryBus` runs the same contract suite
(`tests/bus/test_contract.py`) and serves tests and the simulator.

What a bus promises:

- publish/subscribe is at most once: a slow or cut-off subscriber loses messages, and finds out by
  the gap in `(epoch, seq)`. Messages of one publisher on one subject arrive in order.
- handlers are plain functions, called on the event loop, and must return quickly.
- buckets keep the last value of a key, with a revision that only grows; `create` and `update`
  compare revisions, which is what leases are made of.
- `publish` never raises for a lost connection: it counts what it had to drop.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Protocol

import msgspec

MessageHandler = Callable[[str, bytes], None]
"""Called with (subject, payload)."""


class BusError(Exception):
    """The bus cannot do this now (not connected, no such bucket, timed out)."""


class WrongRevision(BusError):
    """A compare-and-set lost: somebody else wrote the key first."""


class Entry(msgspec.Struct, frozen=True):
    """One key of a bucket, as of a revision; `value` is None when it was deleted."""

    key: str
    value: bytes | None
    revision: int


class Subscription(Protocol):
    """A running subscription, service or watch."""

    async def stop(self) -> None:
        """End it; no handler call follows."""


class Bucket(Protocol):
    """A key-value bucket."""

    async def put(self, key: str, value: bytes) -> int:
        """Write a key; returns its new revision."""

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that does not exist (or was deleted). Raises WrongRevision."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write a key whose revision is still `revision`. Raises WrongRevision."""

    async def get(self, key: str) -> Entry | None:
        """Read a key; None if it does not exist."""

    async def delete(self, key: str) -> None:
        """Delete a key; watchers see an entry without a value."""

    async def keys(self) -> list[str]:
        """List the keys that exist."""

    async def watch(self, handler: Callable[[Entry], None], prefix: str = "") -> Subscription:
        """Call `handler` with every current entry, then with every change.

        Args:
            prefix: only keys that begin with these dot-separated tokens.
        """


class Objects(Protocol):
    """An object store: values larger than a message."""

    async def put(self, name: str, data: bytes) -> None:
        """Store an object under a name, replacing what was there."""

    async def get(self, name: str) -> bytes | None:
        """Read an object whole; None if there is none."""


class Bus(Protocol):
    """The event plane."""

    @property
    def connected(self) -> bool:
        """Whether messages can flow now."""

    @property
    def dropped(self) -> int:
        """Messages that `publish` had to drop since the start."""

    def publish(self, subject: str, payload: bytes) -> None:
        """Send a message, or count it as dropped; returns at once."""

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Return when everything published so far has left. Raises BusError."""

    async def subscribe(self, subject: str, handler: MessageHandler) -> Subscription:
        """Call `handler` for every message on a subject; `*` and `>` are NATS wildcards."""

    async def serve(
        self, subject: str, handler: Callable[[bytes], AsyncIterable[bytes]]
    ) -> Subscription:
        """Answer requests on a subject with one or more messages."""

    def request(self, subject: str, payload: bytes, *, timeout_s: float) -> AsyncIterator[bytes]:
        """Send a request and yield its answers, in order, until the service's end mark.

        Raises:
            BusError: nobody answers, or `timeout_s` passes without a further answer.
        """

    async def bucket(self, name: str) -> Bucket:
        """Open a bucket that `setup` made. Raises BusError."""

    async def objects(self, name: str) -> Objects:
        """Open an object store that `setup` made. Raises BusError."""

    def on_state(self, handler: Callable[[bool], None]) -> None:
        """Call `handler(connected)` at every loss and return of the connection."""

    async def close(self) -> None:
        """Leave; pending messages are flushed if they can be."""
