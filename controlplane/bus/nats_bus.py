"""The event plane on NATS; see `protocol.Bus` for what it promises.

One task keeps a `Link` open: it connects, makes every subscription anew, tells the state handlers,
sends what waits, and begins again when the link is lost, for ever. A server that is down at the
start is no different from one that goes down later.

Beside the protocol it offers what `jetstream` and `setup` are built on: `call` (one request, one
answer, with headers) and `link`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from controlplane.bus.buffer import OutBuffer
from controlplane.bus.guard import Guard
from controlplane.bus.inbox import Answer, Inbox
from controlplane.bus.jetstream import JetStream
from controlplane.bus.jetstream_store import NatsBucket, NatsObjects
from controlplane.bus.nats_link import Headers, Link, LinkError, RawHandler, open_link
from controlplane.bus.nats_options import NatsOptions, link_options
from controlplane.bus.protocol import (
    BusError,
    BusStats,
    MessageHandler,
    Record,
    RequestHandler,
)
from controlplane.bus.wildcard import check_pattern

log = logging.getLogger(__name__)

_QUEUE_GROUP = "multiplane"
_END = "Multiplane-End"  # on the empty message after the answers: how many there were
_ERROR = "Multiplane-Error"  # on the empty message in place of further answers: why
_NO_RESPONDERS = "503"
_MESSAGES_PER_TURN = 64
_ESTABLISH_S_MAX = 5.0
_FAREWELL_S_MAX = 1.0


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the connection to NATS is given up: this is a bug", exc_info=error)


def is_cancelled() -> bool:
    """Return whether this task was told to end: below us a cancellation may get lost.

    nats-py swallows some, and so does `asyncio.wait_for` before Python 3.12 when what it waits for
    ends at the same moment.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Subscription:
    """A subscription that outlives connections."""

    def __init__(self, bus: NatsBus, subject: str, handler: RawHandler, queue: str = "") -> None:
        check_pattern(subject)
        self.link: Link | None = None
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._queue = queue
        self._handle: Any = None
        self._stopped = False

    async def attach(self, link: Link) -> None:
        self.link = link
        handle = await link.subscribe(self._subject, self._receive, self._queue)
        if self._stopped:
            await link.unsubscribe(handle)
        elif self.link is link:
            self._handle = handle

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._bus.forget(self)
            if self.link is not None and self._handle is not None:
                await self.link.unsubscribe(self._handle)

    def _receive(self, subject: str, reply: str, payload: bytes, headers: Headers | None) -> None:
        if not self._stopped:
            self._handler(subject, reply, payload, headers)


class NatsBus:
    """One client of NATS. Make one with `connect`."""

    def __init__(self, servers: Sequence[str], name: str, options: NatsOptions) -> None:
        self.options = options
        self.guard = Guard()
        self.jetstream = JetStream(self)
        self._servers, self._link_options = link_options(servers, name, options)
        self._inbox = Inbox(f"{self._link_options.inbox}.{secrets.token_hex(6)}")
        self._rng = random.Random()
        self._link: Link | None = None
        self._link_up = asyncio.Event()
        self._out = OutBuffer(options.buffer_messages_max, options.buffer_bytes_max)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._published = self._unsent = self._disconnects = 0
        self._refused = 0
        self._state_handlers: list[Callable[[bool], None]] = []
        self._subscriptions = [_Subscription(self, self._inbox.pattern, self._inbox.receive)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = 0
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._supervisor = asyncio.create_task(self._keep_connected(), name="nats-bus")
        self._supervisor.add_done_callback(_report_failure)

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        name: str = "multiplane",
        options: NatsOptions | None = None,
        wait_s: float = 2.0,
    ) -> NatsBus:
        """Return a bus that is connected, or that goes on trying after `wait_s`.

        Args:
            servers: URLs, one by one or in one string with commas.
            name: shown by the server's tools.

        Raises:
            BusError: the options make no sense, or the server refuses the credentials.
        """
        urls = servers.split(",") if isinstance(servers, str) else servers
        bus = cls([url for url in urls if url.strip()], name, options or NatsOptions())
        await asyncio.wait({bus._first}, timeout=wait_s)
        if not bus._first.done():
            bus._first.cancel()
        elif (error := bus._first.exception()) is not None:
            await bus.close()
            raise error
        return bus

    @property
    def connected(self) -> bool:
        """See `Bus.connected`."""
        return self._link is not None

    @property
    def dropped(self) -> int:
        """See `Bus.dropped`."""
        return self._out.dropped + self._unsent

    def stats(self) -> BusStats:
        """See `Bus.stats`."""
        return BusStats(
            published=self._published,
            dropped=self.dropped,
            received=self.guard.calls,
            disconnects=self._disconnects,
            refused=self._refused + (self._link.refused if self._link else 0),
            handler_errors=self.guard.errors,
            buffered=len(self._out),
            buffered_bytes=self._out.nbytes,
        )

    def publish(self, subject: str, payload: bytes) -> None:
        """See `Bus.publish`."""
        self._out.push(subject, payload)
        if self._idle.is_set():
            self._idle.clear()
            self._loop.call_soon(self._send)

    async def flush(self, timeout_s: float = 2.0) -> None:
        """See `Bus.flush`."""
        link = self.link()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await link.flush(timeout_s)
        except TimeoutError:
            raise BusError(f"not flushed within {timeout_s} s") from None

    async def subscribe(self, subject: str, handler: MessageHandler) -> _Subscription:
        """See `Bus.subscribe`."""

        def receive(subject: str, reply: str, payload: bytes, headers: Headers | None) -> None:
            handler(subject, payload)

        return await self._add(_Subscription(self, subject, receive))

    async def serve(self, subject: str, handler: RequestHandler) -> _Subscription:
        """See `Bus.serve`."""

        def receive(subject: str, reply: str, payload: bytes, headers: Headers | None) -> None:
            if reply and self._link is not None:
                self.spawn(self._answer(self._link, reply, handler, payload))

        return await self._add(_Subscription(self, subject, receive, _QUEUE_GROUP))

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """See `Bus.request`."""
        count = 0
        with self._inbox.open(subject, self.options.answers_max) as box:
            await self.link().publish(subject, payload, box.subject)
            while True:
                answer = await box.get(timeout_s)
                if answer.status == _NO_RESPONDERS:
                    raise BusError(f"nobody answers on {subject}")
                if (reason := answer.headers.get(_ERROR)) is not None:
                    raise BusError(f"the service on {subject} failed: {reason}")
                if (sent := answer.headers.get(_END)) is not None:
                    if sent != str(count):
                        raise BusError(f"{count} of {sent} answers on {subject} arrived")
                    return
                count += 1
                yield answer.payload

    async def call(self, subject: str, payload: bytes, headers: Headers | None = None) -> Answer:
        """Send a request that has one answer, as the server's own interfaces do.

        Raises:
            BusError: nobody answers, or not within `call_s_max`, or the connection was lost.
        """
        with self._inbox.open(subject, 1) as box:
            await self.link().publish(subject, payload, box.subject, headers)
            answer = await box.get(self.options.call_s_max)
        if answer.status == _NO_RESPONDERS:
            raise BusError(
                f"nobody answers on {subject}: does NATS run with JetStream "
                "(`nats-server -js`), and is `multiplane bus init` done?"
            )
        return answer

    async def bucket(self, name: str) -> NatsBucket:
        """See `Bus.bucket`."""
        return NatsBucket(self, name)

    async def objects(self, name: str) -> NatsObjects:
        """See `Bus.objects`."""
        return NatsObjects(self.jetstream, name)

    def history(
        self,
        stream: str,
        *,
        subject: str = ">",
        from_seq: int = 1,
        since_wall_s: float = 0.0,
        follow: bool = False,
    ) -> AsyncIterator[Record]:
        """See `Bus.history`."""
        return self.jetstream.history(stream, subject, from_seq, since_wall_s, follow=follow)

    def on_state(self, handler: Callable[[bool], None]) -> None:
        """See `Bus.on_state`."""
        self._state_handlers.append(handler)

    async def close(self) -> None:
        """See `Bus.close`."""
        if self._link is not None:
            try:
                await self.flush(_FAREWELL_S_MAX)
            except BusError as error:
                log.warning("leaving NATS with messages unsent: %s", error)
        self._state_handlers.clear()
        tasks = {self._supervisor, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def link(self) -> Link:
        """Return the open connection. Raises BusError when there is none."""
        if self._link is None:
            raise BusError("not connected to NATS")
        return self._link

    async def next_link(self) -> Link:
        """Return the open connection, waiting for it as long as it takes."""
        while self._link is None:
            await self._link_up.wait()
        return self._link

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that ends with the bus."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def pause_s(self, attempt: int) -> float:
        """Return how long to wait after failed attempt number `attempt`, from 0."""
        longest = min(self.options.retry_s_max, self.options.retry_s_min * 2.0 ** min(attempt, 20))
        return longest * self._rng.uniform(0.5, 1.0)

    def forget(self, subscription: _Subscription) -> None:
        """Do not make a subscription again."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def _add(self, subscription: _Subscription) -> _Subscription:
        self._subscriptions.append(subscription)
        if self._link is not None:
            try:
                await subscription.attach(self._link)
                await self._link.flush(self.options.call_s_max)
            except BusError as error:
                log.debug("subscribed as the connection went down: %s", error)
        return subscription

    async def _answer(
        self, link: Link, reply: str, handler: RequestHandler, payload: bytes
    ) -> None:
        count, headers = 0, {_ERROR: f"busy with {self._serving} requests"}
        if self._serving < self.options.serving_max:
            self._serving += 1
            try:
                async for answer in handler(payload):
                    await link.publish(reply, answer)
                    count += 1
                headers = {_END: str(count)}
            except Exception as error:
                log.exception("a service failed")
                headers = {_ERROR: f"{type(error).__name__}: {error}"}
            finally:
                self._serving -= 1
        try:
            await link.publish(reply, b"", headers=headers)
        except BusError as error:
            log.debug("an answer found no connection: %s", error)

    async def _keep_connected(self) -> None:
        servers = list(self._servers)
        self._rng.shuffle(servers)
        attempt = 0
        while not is_cancelled():
            server = servers[attempt % len(servers)]
            try:
                link = await self._establish(server)
            except BusError as error:
                self._note_failure(error, attempt)
                attempt += 1
                if attempt % len(servers) == 0:
                    await asyncio.sleep(self.pause_s(attempt // len(servers) - 1))
                continue
            log.info("connected to NATS at %s", server)
            since_s = asyncio.get_running_loop().time()
            await self._stay_connected(link)
            # A server that lets us in only to throw us out is no better than one that is down.
            lasted_s = asyncio.get_running_loop().time() - since_s
            attempt = attempt + 1 if lasted_s < self.options.retry_s_max else 0
            others = [url for url in link.discovered if url not in self._servers]
            servers = [url for url in (*self._servers, *others) if url != server]
            self._rng.shuffle(servers)
            servers.append(server)
            await asyncio.sleep(self._rng.uniform(0.0, self.options.return_s_max))
            if attempt:
                await asyncio.sleep(self.pause_s(attempt))

    def _note_failure(self, error: BusError, attempt: int) -> None:
        log.log(logging.DEBUG if attempt else logging.WARNING, "%s; trying again", error)
        if isinstance(error, LinkError) and error.credentials and not self._first.done():
            self._first.set_exception(error)

    async def _establish(self, server: str) -> Link:
        """Connect and make every subscription; only then is the link used. Raises BusError."""
        link = await open_link(server, self._link_options, self.guard, self._inbox.refuse)
        try:
            while missing := [each for each in self._subscriptions if each.link is not link]:
                for subscription in missing:
                    await subscription.attach(link)
                await link.flush(_ESTABLISH_S_MAX)
            if is_cancelled():
                raise asyncio.CancelledError
        except BaseException:
            await link.close()
            raise
        return link

    async def _stay_connected(self, link: Link) -> None:
        self._link = link
        self._link_up.set()
        writer = asyncio.create_task(self._write(link))
        if not self._first.done():
            self._first.set_result(None)
        self._tell(True)
        self._wake.set()
        try:
            await link.lost.wait()
            self._disconnects += 1
            log.warning("lost the connection to NATS: %s", link.reason)
        finally:
            self._link = None
            self._link_up.clear()
            self._refused += link.refused
            writer.cancel()
            self._inbox.fail("the connection was lost")
            self._tell(False)
            await link.close()

    def _send(self) -> None:
        """Send what this turn of the loop published, without a task; the rest is `_write`'s."""
        link, out = self._link, self._out
        if link is None:
            return  # `_write` begins with it.
        messages: list[tuple[str, bytes]] = []
        while len(messages) < _MESSAGES_PER_TURN and len(out) and link.takes(out.first_bytes):
            messages.append(out.pop())
        if messages:
            link.write(messages)
            self._published += len(messages)
        if len(out):
            self._wake.set()
        else:
            self._idle.set()

    async def _write(self, link: Link) -> None:
        """Send what `_send` left, as fast as the connection takes it."""
        while not link.lost.is_set():
            await self._wake.wait()
            self._wake.clear()
            sent = 0
            while len(self._out) and not link.lost.is_set():
                subject, payload = self._out.pop()
                try:
                    await link.publish(subject, payload)
                    self._published += 1
                except BusError as error:
                    self._unsent += 1
                    log.debug("dropped a message: %s", error)
                sent += 1
                if sent % _MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
            if not len(self._out):
                self._idle.set()

    def _tell(self, connected: bool) -> None:
        for handler in self._state_handlers:
            self.guard.call(handler, connected)
