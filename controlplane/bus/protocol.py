"""The event plane as the rest of the code sees it: one protocol, two implementations.

`nats_bus.NatsBus` is the real one; `memory_bus.MemoryBus` runs the same contract suite
(`tests/bus/test_contract_*.py`) and serves tests and the simulator.

What a bus promises:

- publish/subscribe is at most once: a slow or cut-off subscriber loses messages, and finds out by
  the gap in `(epoch, seq)`. Messages of one publisher on one subject arrive in order.
- handlers are plain functions, called on the event loop, and must return quickly; one that raises
  is logged and counted, and loses that message only.
- buckets keep the last value of a key, with a revision that only grows; `create` and `update`
  compare revisions, which is what leases are made of.
- while the connection is down everything stays usable that can be: `publish` keeps the newest
  messages for its return, up to a bound, and counts what it drops; `subscribe`, `serve` and
  `watch` are remembered and come alive when it returns. Everything else raises `BusError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Protocol

import msgspec

PAYLOAD_BYTES_MAX = 1_000_000
"""Largest payload of one message: under the default `max_payload` of nats-server (1 MiB)."""

MessageHandler = Callable[[str, bytes], None]
"""Called with (subject, payload)."""

RequestHandler = Callable[[bytes], AsyncIterable[bytes]]
"""Called with a request's payload; yields the answers."""


class BusError(Exception):
    """The bus cannot do this now (not connected, no such bucket, timed out)."""


class WrongRevision(BusError):
    """A compare-and-set lost: somebody else wrote the key first."""


class Entry(msgspec.Struct, frozen=True):
    """One key of a bucket, as of a revision.

    Attributes:
        value: None when the key is gone.
        expired: it is gone though nobody deleted it: its time to live passed, or the server came
            back without it. Not a proof that its owner left; an owner that lives writes it again.
        age_s: how long it had stood when a watch began that found it there, by the server's
            clock; 0 for what is told as it happens.
    """

    key: str
    value: bytes | None
    revision: int
    expired: bool = False
    age_s: float = 0.0


EntryHandler = Callable[[Entry], None]

ChangeHandler = Callable[[str, bytes], None]
"""Called with (key, value)."""


class Record(msgspec.Struct, frozen=True):
    """One message that a stream recorded.

    Attributes:
        seq: its place in the stream, from 1, growing, with gaps where messages were discarded.
        at_wall_s: when the server stored it, Unix seconds.
    """

    subject: str
    payload: bytes
    seq: int
    at_wall_s: float


class BusStats(msgspec.Struct, frozen=True):
    """What a bus counted since it was made; the last two are levels.

    Attributes:
        published: messages handed to the connection.
        dropped: messages that `publish` had to drop, oldest first.
        received: messages handed to handlers.
        disconnects: losses of the connection; a server also cuts off who reads too slowly.
        refused: operations that the server's permissions forbade.
        handler_errors: handlers that raised.
        buffered: messages waiting to be sent now.
        buffered_bytes: their payloads.
    """

    published: int = 0
    dropped: int = 0
    received: int = 0
    disconnects: int = 0
    refused: int = 0
    handler_errors: int = 0
    buffered: int = 0
    buffered_bytes: int = 0


class Subscription(Protocol):
    """A running subscription, service or watch."""

    async def stop(self) -> None:
        """End it; no handler call follows."""


class Watch(Subscription, Protocol):
    """A running watch."""

    async def synced(self, timeout_s: float) -> None:
        """Return once the handler has had every entry that was there when the watch began.

        Raises:
            BusError: `timeout_s` passed first; the watch goes on.
        """


class Bucket(Protocol):
    """A key-value bucket. Every call but `watch` raises BusError where the bus cannot do it."""

    async def put(self, key: str, value: bytes) -> int:
        """Write a key; returns its new revision."""

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that does not exist (or was deleted). Raises WrongRevision."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write a key whose revision is still `revision`. Raises WrongRevision."""

    async def get(self, key: str) -> Entry | None:
        """Read a key; None if it does not exist."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Delete a key; watchers see an entry without a value.

        Raises:
            WrongRevision: `revision` was given, and the key has another one.
        """

    async def keys(self) -> list[str]:
        """List the keys that exist, sorted."""

    async def follow(self, handler: ChangeHandler) -> Subscription:
        """Call `handler(key, value)` with what is written from now on, at most once each.

        For whoever may not watch: it takes no right to have old values sent. Deletions are not
        told, and one's own writes may or may not be.
        """

    async def watch(self, handler: EntryHandler, prefix: str = "") -> Watch:
        """Call `handler` with every current entry, then with every change.

        After a loss of the connection it is told what changed meanwhile, deletions included. A
        watch of a bucket that does not exist yet waits for it.

        Args:
            prefix: only keys below these dot-separated tokens: `a` matches `a.b`, not `a`.
        """


class Objects(Protocol):
    """An object store: values larger than a message. Every call may raise BusError."""

    async def put(self, name: str, data: bytes) -> None:
        """Store an object under a name, replacing what was there."""

    async def get(self, name: str) -> bytes | None:
        """Read an object whole and verified; None if there is none."""

    async def delete(self, name: str) -> None:
        """Remove an object if it is there."""

    async def names(self) -> list[str]:
        """List the objects that exist, sorted."""


class Bus(Protocol):
    """The event plane."""

    @property
    def connected(self) -> bool:
        """Whether messages can flow now."""

    @property
    def dropped(self) -> int:
        """Messages that `publish` had to drop since the start."""

    def stats(self) -> BusStats:
        """What this bus counted, for metrics."""

    def publish(self, subject: str, payload: bytes) -> None:
        """Send a message, or count it as dropped; returns at once.

        Raises:
            ValueError: the payload is over PAYLOAD_BYTES_MAX: the caller must split it.
        """

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Return when everything published so far has left. Raises BusError."""

    async def subscribe(self, subject: str, handler: MessageHandler) -> Subscription:
        """Call `handler` for every message on a subject; `*` and `>` are NATS wildcards.

        Raises:
            ValueError: it is not a subject.
        """

    async def serve(self, subject: str, handler: RequestHandler) -> Subscription:
        """Answer requests on a subject with one or more messages each.

        Of several services on one subject one gets the request. A handler that raises, or too
        many requests at a time, is an error at the requester.

        Raises:
            ValueError: it is not a subject.
        """

    def request(self, subject: str, payload: bytes, *, timeout_s: float) -> AsyncIterator[bytes]:
        """Send a request and yield its answers, in order, until the service's end mark.

        Raises:
            BusError: nobody answers, an answer was lost, the service failed, the connection was
                lost, or `timeout_s` passed without a further answer.
        """

    async def bucket(self, name: str) -> Bucket:
        """Open a bucket; it is its calls that raise BusError if `setup` did not make it."""

    async def objects(self, name: str) -> Objects:
        """Open an object store; likewise."""

    def history(
        self,
        stream: str,
        *,
        subject: str = ">",
        from_seq: int = 1,
        since_wall_s: float = 0.0,
        follow: bool = False,
    ) -> AsyncIterator[Record]:
        """Yield what a stream recorded, in order, at the caller's pace.

        Args:
            stream: a name in `schemas.subjects.STREAMS`.
            subject: only what matches it; `*` and `>` are NATS wildcards.
            from_seq: the first sequence number wanted.
            since_wall_s: skip what was stored before this moment, Unix seconds.
            follow: wait for more at the end, across losses of the connection, instead of ending.

        Raises:
            BusError: there is no such stream, or the connection was lost while not following.
        """

    def on_state(self, handler: Callable[[bool], None]) -> None:
        """Call `handler(connected)` at every loss and return of the connection, until `close`."""

    async def close(self) -> None:
        """Leave; pending messages are flushed if they can be."""
