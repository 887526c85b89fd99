"""The event plane in one process: for tests, the simulator and single-process trials.

A `MemoryBroker` stands for the server; each `MemoryBus` it hands out for one client's connection.
Nothing is delivered inside `publish`: every delivery goes through the broker's `schedule`, so a
simulator that brings its own sees all of them, in order, and may put them off. Faults are
injected per client (`cut`, `heal`) or for all messages (`drop`, a probability).

Unlike the server, it forgets no entry by time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from controlplane.bus.buffer import OutBuffer
from controlplane.bus.guard import Guard
from controlplane.bus.layout import BUCKETS, STORES
from controlplane.bus.memory_store import MemoryBucket, MemoryObjects, Shelf
from controlplane.bus.protocol import (
    BusError,
    BusStats,
    MessageHandler,
    Record,
    RequestHandler,
)
from controlplane.bus.wildcard import check_pattern, matches
from schemas.subjects import STREAMS

Schedule = Callable[..., object]
"""`schedule(callback, *args)`: call it soon, in order. `loop.call_soon` is one."""

_ROUTES_MAX = 4096


def _call_soon(callback: Callable[..., object], *args: Any) -> None:
    asyncio.get_running_loop().call_soon(callback, *args)


class _Subscription:
    """A subscription or a service of one client."""

    def __init__(self, bus: MemoryBus, subject: str, handler: Callable[..., Any]) -> None:
        self.bus = bus
        self.subject = subject
        self.handler = handler
        self.stopped = False

    def deliver(self, subject: str, payload: bytes) -> None:
        if not self.stopped and self.bus.connected:
            self.bus.guard.call(self.handler, subject, payload)

    async def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.bus.release(self)


class MemoryBroker:
    """The server: routes messages between the buses it hands out and holds the state.

    Args:
        schedule: delivers; default: the running loop's `call_soon`.
        rng: decides which messages are lost; needed only with `drop`.
        drop: probability that a delivery to one subscriber is lost.
        history_max: messages kept of each stream.
        wall: the clock of records, Unix seconds.
    """

    def __init__(
        self,
        *,
        schedule: Schedule = _call_soon,
        rng: random.Random | None = None,
        drop: float = 0.0,
        history_max: int = 10_000,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.schedule = schedule
        self.rng = rng or random.Random(0)
        self.drop = drop
        self.lost = 0
        self.shelves = {name: Shelf() for name in BUCKETS}
        self.stores: dict[str, dict[str, bytes]] = {name: {} for name in STORES}
        self.records: dict[str, deque[Record]] = {
            name: deque(maxlen=history_max) for name in STREAMS
        }
        self.recorded = asyncio.Event()
        self._wall = wall
        self._subscriptions: list[_Subscription] = []
        self._services: list[_Subscription] = []
        self._routes: dict[str, list[_Subscription]] = {}
        self._sequences = dict.fromkeys(STREAMS, 0)

    def bus(self, *, buffer_messages_max: int = 10_000) -> MemoryBus:
        """Connect a new client."""
        return MemoryBus(self, buffer_messages_max)

    def add(self, subscription: _Subscription, *, service: bool) -> None:
        """Begin to route to a subscription or a service."""
        (self._services if service else self._subscriptions).append(subscription)
        self._routes.clear()

    def forget(self, subscription: _Subscription) -> None:
        """Stop routing to it."""
        for group in (self._services, self._subscriptions):
            if subscription in group:
                group.remove(subscription)
        self._routes.clear()

    def send(self, subject: str, payload: bytes) -> None:
        """Record a message and schedule its delivery to every connected subscriber."""
        self._record(subject, payload)
        for subscription in self._route(subject):
            if not subscription.bus.connected:
                continue
            if self.drop and self.rng.random() < self.drop:
                self.lost += 1
                continue
            self.schedule(subscription.deliver, subject, payload)

    def service(self, subject: str) -> _Subscription | None:
        """Return the connected service that answers a subject: the newest one."""
        for service in reversed(self._services):
            if service.bus.connected and matches(service.subject, subject):
                return service
        return None

    def _route(self, subject: str) -> list[_Subscription]:
        route = self._routes.get(subject)
        if route is None:
            if len(self._routes) >= _ROUTES_MAX:
                self._routes.clear()
            route = [s for s in self._subscriptions if matches(s.subject, subject)]
            self._routes[subject] = route
        return route

    def _record(self, subject: str, payload: bytes) -> None:
        for stream, pattern in STREAMS.items():
            if matches(pattern, subject):
                self._sequences[stream] += 1
                record = Record(subject, payload, self._sequences[stream], self._wall())
                self.records[stream].append(record)
                self.recorded.set()


class MemoryBus:
    """One client of a `MemoryBroker`; see `protocol.Bus`."""

    def __init__(self, broker: MemoryBroker, buffer_messages_max: int) -> None:
        self.broker = broker
        self.guard = Guard()
        self.connected = True
        self.generation = 0
        self.on_heal: list[Callable[[], None]] = []
        self._closed = False
        self._out = OutBuffer(buffer_messages_max, bytes_max=1 << 30)
        self._published = 0
        self._disconnects = 0
        self._state_handlers: list[Callable[[bool], None]] = []
        self._mine: list[_Subscription] = []

    @property
    def dropped(self) -> int:
        """See `Bus.dropped`."""
        return self._out.dropped

    def stats(self) -> BusStats:
        """See `Bus.stats`."""
        return BusStats(
            published=self._published,
            dropped=self._out.dropped,
            received=self.guard.calls,
            disconnects=self._disconnects,
            handler_errors=self.guard.errors,
            buffered=len(self._out),
            buffered_bytes=self._out.nbytes,
        )

    def cut(self) -> None:
        """Lose the connection: what is under way to this client is lost."""
        if self.connected:
            self.connected = False
            self.generation += 1
            self._disconnects += 1
            self._tell(False)

    def heal(self) -> None:
        """Get the connection back; what was published meanwhile goes out."""
        if self.connected or self._closed:
            return
        self.connected = True
        for resume in self.on_heal:
            resume()
        self._tell(True)
        self._drain()

    def publish(self, subject: str, payload: bytes) -> None:
        """See `Bus.publish`."""
        self._out.push(subject, payload)
        if self.connected:
            self._drain()

    async def flush(self, timeout_s: float = 2.0) -> None:
        """See `Bus.flush`; nothing is ever on its way out here, so there is nothing to wait for."""
        self.require()

    async def subscribe(self, subject: str, handler: MessageHandler) -> _Subscription:
        """See `Bus.subscribe`."""
        return self._add(subject, handler, service=False)

    async def serve(self, subject: str, handler: RequestHandler) -> _Subscription:
        """See `Bus.serve`."""
        return self._add(subject, handler, service=True)

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """See `Bus.request`."""
        self.require()
        service = self.broker.service(subject)
        if service is None:
            raise BusError(f"nobody answers on {subject}")
        answers = aiter(service.handler(payload))
        lost = False
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await anext(answers)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise BusError(f"no answer on {subject} within {timeout_s} s") from None
            except Exception as error:
                raise BusError(f"the service on {subject} failed: {error}") from error
            self.require()
            service.bus.require()
            if self.broker.drop and self.broker.rng.random() < self.broker.drop:
                lost = True
            else:
                yield answer
        if lost:
            raise BusError(f"an answer on {subject} was lost")

    async def bucket(self, name: str) -> MemoryBucket:
        """See `Bus.bucket`."""
        return MemoryBucket(self, name)

    async def objects(self, name: str) -> MemoryObjects:
        """See `Bus.objects`."""
        return MemoryObjects(self, name)

    async def history(
        self,
        stream: str,
        *,
        subject: str = ">",
        from_seq: int = 1,
        since_wall_s: float = 0.0,
        follow: bool = False,
    ) -> AsyncIterator[Record]:
        """See `Bus.history`."""
        records = self.broker.records.get(stream)
        if records is None:
            raise BusError(f"no stream {stream}")
        position = from_seq
        while True:
            self.broker.recorded.clear()
            for record in [r for r in records if r.seq >= position]:
                position = record.seq + 1
                if record.at_wall_s >= since_wall_s and matches(subject, record.subject):
                    yield record
            if records and records[-1].seq >= position:
                continue
            if not follow:
                return
            await self.broker.recorded.wait()

    def on_state(self, handler: Callable[[bool], None]) -> None:
        """See `Bus.on_state`."""
        self._state_handlers.append(handler)

    async def close(self) -> None:
        """See `Bus.close`."""
        self._closed = True
        self._state_handlers.clear()
        for subscription in list(self._mine):
            await subscription.stop()
        self.cut()

    def release(self, subscription: _Subscription) -> None:
        """Forget a subscription that stopped."""
        self._mine.remove(subscription)
        self.broker.forget(subscription)

    def require(self) -> None:
        """Raise BusError unless connected."""
        if not self.connected:
            raise BusError("not connected to the bus")

    def _add(self, subject: str, handler: Callable[..., Any], *, service: bool) -> _Subscription:
        check_pattern(subject)
        subscription = _Subscription(self, subject, handler)
        self._mine.append(subscription)
        self.broker.add(subscription, service=service)
        return subscription

    def _drain(self) -> None:
        while len(self._out):
            self._published += 1
            self.broker.send(*self._out.pop())

    def _tell(self, connected: bool) -> None:
        for handler in self._state_handlers:
            self.guard.call(handler, connected)
