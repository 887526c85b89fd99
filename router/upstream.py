"""Calls to engines: one pool of kept connections an instance, and the clock on every call.

Use:

    pool = UpstreamPool(UpstreamLimits())
    pool.put(key, "10.0.0.7", 8000)
    call = pool.send(key, head, body, sink)      # head: request line and header lines
    ...
    call.cancel()                                # at any time; no callback after that

Theory of operation. `send` takes the most recently used idle connection of the instance, or opens
one, writes the request, and from then on the `Sink` is told what comes back, in this order:

    on_response_head, on_data…, on_end         or, at any point, on_error as the last word

Exactly one of `on_end`, `on_error` and the caller's own `cancel` ends a call, and none of the
callbacks runs inside `send`. An engine that closes a kept connection just as we use it is not at
fault: a call whose *reused* connection dies before any byte of an answer is sent again, once, on a
fresh one; nothing else is retried here (`router.http_proxy` retries on other instances).

Deadlines are not timers: one tick looks at all calls. What a call waits for:

    stage                             bound           failure
    connection                        connect_s       CONNECT_FAILED, NO_SOCKET if we have none
    request sent … first body byte    first_byte_s    FIRST_BYTE_TIMEOUT
    silence inside the body           stall_s         STALLED (not while paused by `pause`)

Invariants: an instance has at most `connections_max` connections, those being opened included; an
idle one is closed within a tick of `idle_time_s`; a call that has ended holds no connection.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol

from router.http_head import ResponseHeads
from router.limits import UpstreamLimits
from router.upstream_connection import ErrorKind, UpstreamConnection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Hashable

    from router.http_head import ResponseHead

logger = logging.getLogger(__name__)

COMPLAINT_S: Final = 10.0
"""An instance's faults are logged once in so long, whatever their number."""

# What this process or machine is out of: descriptors, memory for sockets, local ports.
_OUR_FAULT: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)

__all__ = ["ErrorKind", "Instance", "Sink", "UpstreamCall", "UpstreamPool"]


class Sink(Protocol):
    """Whoever receives an answer."""

    def on_response_head(self, head: ResponseHead) -> None:
        """The final response head has come (interim ones are dropped)."""

    def on_data(self, data: bytes) -> None:
        """Bytes of the body have come, framing included; the first call is the first byte.

        May leave those that follow to another, see `UpstreamCall.pass_to`.
        """

    def on_end(self) -> None:
        """The body is complete."""

    def on_error(self, kind: ErrorKind) -> None:
        """The call has failed, perhaps in the middle of the body."""


class Instance:
    """What the pool knows of one instance.

    Attributes:
        host, port, tls: where it listens.
        head_end: what every request's head to it ends with: Host, its own lines, the blank line.
        connections_open: connections to it, those being opened included.
        gone: it has been removed or replaced; its connections end with their calls.
    """

    __slots__ = (
        "_idle",
        "_quiet_until_s",
        "connections_open",
        "gone",
        "head_end",
        "host",
        "port",
        "tls",
    )

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        header_lines: bytes = b"",
    ) -> None:
        self.host = host
        self.port = port
        self.tls = tls
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.head_end = b"host: %b\r\n%b\r\n" % (authority.encode(), header_lines)
        self.connections_open = 0
        self.gone = False
        self._quiet_until_s = 0.0
        self._idle: dict[UpstreamConnection, None] = {}  # least recently used first

    @property
    def connections_idle(self) -> int:
        """Kept connections that no call uses."""
        return len(self._idle)

    def take(self, oldest_s: float) -> UpstreamConnection | None:
        """Return the most recently used idle connection put aside since `oldest_s`, or None."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.usable and connection.idle_since_s >= oldest_s:
                return connection
            connection.close()
        return None

    def put_aside(self, connection: UpstreamConnection, now_s: float) -> None:
        """Keep a connection for the next call."""
        if self.gone:
            connection.close()
        else:
            connection.idle_since_s = now_s
            self._idle[connection] = None

    def forget(self, connection: UpstreamConnection) -> None:
        """Count a connection out that is closed, or never came to be."""
        self._idle.pop(connection, None)
        self.connections_open -= 1

    def complain(self, problem: str, now_s: float) -> None:
        """Log what is wrong with it, unless something was a moment ago."""
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + COMPLAINT_S
            logger.warning("engine %s:%d: %s", self.host, self.port, problem)

    def close_idle(self, oldest_s: float) -> None:
        """Close the idle connections put aside before `oldest_s`."""
        while self._idle:
            connection = next(iter(self._idle))
            if connection.idle_since_s >= oldest_s:
                return
            del self._idle[connection]
            connection.close()


class UpstreamCall:
    """One request on its way to an instance and back.

    Attributes:
        instance: where it goes.
        head, body: the request, ready to be sent.
        sink: who is told; see `Sink`.
        bodiless: the request is a HEAD, so its answer has no body.
        first_byte_s: bound on the wait for the first body byte, from the moment of sending.
        deadline_s: when the present wait ends, on the pool's clock.
        begun: body bytes have come (noticed by the tick; see `UpstreamConnection.heard`).
        paused: the caller does not want data for now.
        length: the answer's Content-Length, None if it has none; known with its head.
        body_bytes, tail: how many bytes of the body have come, framing included, and the last of
            them; known once the call has ended.
        ended: nothing more will be told.
        connection: what carries it, once there is one.
    """

    __slots__ = (
        "_pool",
        "begun",
        "bodiless",
        "body",
        "body_bytes",
        "connection",
        "deadline_s",
        "ended",
        "first_byte_s",
        "head",
        "instance",
        "length",
        "paused",
        "sink",
        "tail",
    )

    def __init__(
        self,
        pool: UpstreamPool,
        instance: Instance,
        head: bytes,
        body: bytes,
        sink: Sink,
        bodiless: bool,
        first_byte_s: float,
    ) -> None:
        self._pool = pool
        self.instance = instance
        self.head = head
        self.body = body
        self.sink = sink
        self.bodiless = bodiless
        self.first_byte_s = first_byte_s
        self.deadline_s = 0.0
        self.begun = False
        self.paused = False
        self.length: int | None = None
        self.body_bytes = 0
        self.tail = b""
        self.ended = False
        self.connection: UpstreamConnection | None = None

    def cancel(self) -> None:
        """End the call and close its connection at once; no callback follows."""
        if self.ended:
            return
        self._pool.forget(self)
        if self.connection is not None:
            self.connection.drop()

    def pass_to(self, write: Callable[[bytes], None]) -> None:
        """Let `write` have the body's further bytes, in place of the sink's `on_data`."""
        if self.connection is not None:
            self.connection.pass_to(write)

    def pause(self) -> None:
        """Take no more data for now."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause_reading()

    def resume(self) -> None:
        """Take data again."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume_reading()


class UpstreamPool:
    """Sends requests to instances, over connections that are kept.

    Attributes:
        limits: see `router.limits`.
        now_s: the clock as of the last tick; what deadlines are set from.
        heads: parses response heads for all connections.
        counts: how often things happened: `connects`, `resends`, and each `ErrorKind`.
    """

    def __init__(
        self,
        limits: UpstreamLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or UpstreamLimits()
        self.now_s = clock()
        self.heads = ResponseHeads()
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._instances: dict[Hashable, Instance] = {}
        self._calls: set[UpstreamCall] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._tick()

    @property
    def calls_open(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def put(
        self,
        key: Hashable,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        header_lines: bytes = b"",
    ) -> Instance:
        r"""Make an instance known, in place of any other under the same key.

        Args:
            key: how `send` names it.
            host: name or address.
            port: TCP port.
            tls: speak TLS with this context.
            header_lines: complete lines (`name: value\r\n`) for every request to this instance.
        """
        self.remove(key)
        instance = Instance(host, port, tls, header_lines)
        self._instances[key] = instance
        return instance

    def remove(self, key: Hashable) -> None:
        """Forget an instance: its idle connections close now, the others with their calls."""
        instance = self._instances.pop(key, None)
        if instance is not None:
            instance.gone = True
            instance.close_idle(float("inf"))

    def get(self, key: Hashable) -> Instance | None:
        """Return what is known of an instance."""
        return self._instances.get(key)

    def send(
        self,
        key: Hashable,
        head: bytes,
        body: bytes,
        sink: Sink,
        *,
        bodiless: bool = False,
        first_byte_s: float | None = None,
    ) -> UpstreamCall:
        """Send a request to an instance; `sink` is told what becomes of it, never from in here.

        Args:
            key: the instance.
            head: request line and header lines, without Host and without the blank line.
            body: as the head announces it.
            sink: see `Sink`.
            bodiless: the request is a HEAD.
            first_byte_s: in place of `limits.first_byte_s`.
        """
        instance = self._instances.get(key)
        if instance is None:  # Removed since it was chosen.
            instance = Instance("", 0)
            instance.gone = True
        if first_byte_s is None:
            first_byte_s = self.limits.first_byte_s
        head += instance.head_end
        call = UpstreamCall(self, instance, head, body, sink, bodiless, first_byte_s)
        self._calls.add(call)
        connection = instance.take(self.now_s - self.limits.idle_time_s)
        if connection is None:
            self._open(call)
        else:
            self._assign(connection, call, reused=True)
        return call

    async def close(self) -> None:
        """Close every connection and end every call, without telling the sinks."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for key in tuple(self._instances):
            self.remove(key)
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._connecting)

    # Called by connections and calls.

    def ended(self, call: UpstreamCall) -> None:
        """Tell a call's sink that the answer is complete."""
        self.forget(call)
        call.sink.on_end()

    def failed(self, call: UpstreamCall, kind: ErrorKind) -> None:
        """Tell a call's sink that the call has failed; once, and not after its end."""
        if call.ended:
            return
        self.counts[kind] += 1
        self.forget(call)
        call.sink.on_error(kind)

    def resend(self, call: UpstreamCall) -> None:
        """Send a call again, whose kept connection died before any answer, on a fresh one."""
        self.counts["resends"] += 1
        self._open(call)

    def forget(self, call: UpstreamCall) -> None:
        """Drop a call that ends now."""
        call.ended = True
        self._calls.discard(call)

    # Connections and time.

    def _open(self, call: UpstreamCall) -> None:
        """Open a connection for a call, if its instance may have another."""
        instance = call.instance
        if instance.gone:
            self._loop.call_soon(self.failed, call, ErrorKind.CONNECT_FAILED)
            return
        if instance.connections_open >= self.limits.connections_max:
            self._loop.call_soon(self.failed, call, ErrorKind.POOL_FULL)
            return
        instance.connections_open += 1
        call.deadline_s = float("inf")  # The connection attempt has a bound of its own.
        task = self._loop.create_task(self._connect(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, call: UpstreamCall) -> None:
        """Open a connection and give it to `call`, or keep it if the call has ended meanwhile."""
        instance = call.instance
        connection = UpstreamConnection(self, instance)
        self.counts["connects"] += 1
        try:
            async with asyncio.timeout(self.limits.connect_s):
                await self._loop.create_connection(
                    lambda: connection, instance.host, instance.port, ssl=instance.tls
                )
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            connection.give_up()
            in_vain = str(error) or f"no connection within {self.limits.connect_s:g} s"
            instance.complain(f"cannot be reached: {in_vain}", self.now_s)
            self.failed(call, _kind_of(error))
            return
        if call.ended:
            instance.put_aside(connection, self.now_s)
        elif connection.usable:
            self._assign(connection, call, reused=False)
        else:
            self.failed(call, ErrorKind.CONNECT_FAILED)

    def _assign(self, connection: UpstreamConnection, call: UpstreamCall, reused: bool) -> None:
        """Send a call over a connection, and start its clock."""
        call.connection = connection
        call.deadline_s = self.now_s + call.first_byte_s
        connection.assign(call, reused)
        if call.paused:
            connection.pause_reading()

    def _tick(self) -> None:
        """Look at every call's deadline and at the age of idle connections."""
        self._tick_handle = self._loop.call_later(self.limits.tick_s, self._tick)
        now_s = self.now_s = self._clock()
        overdue = [call for call in self._calls if self._is_overdue(call, now_s)]
        for call in overdue:
            kind = ErrorKind.STALLED if call.begun else ErrorKind.FIRST_BYTE_TIMEOUT
            if call.connection is not None:
                call.connection.drop()
            self.failed(call, kind)
        for instance in self._instances.values():
            instance.close_idle(now_s - self.limits.idle_time_s)

    def _is_overdue(self, call: UpstreamCall, now_s: float) -> bool:
        """Whether the call has waited too long; notes that it has not, if data has come."""
        connection = call.connection
        if connection is not None and (connection.heard or (call.begun and call.paused)):
            connection.heard = False
            call.begun = True
            call.deadline_s = now_s + self.limits.stall_s
        return now_s >= call.deadline_s


def _kind_of(error: OSError | ValueError) -> ErrorKind:
    """Say whose fault it is that a connection could not be made."""
    ours = isinstance(error, OSError) and error.errno in _OUR_FAULT
    return ErrorKind.NO_SOCKET if ours else ErrorKind.CONNECT_FAILED
