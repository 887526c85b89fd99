"""The HTTP server: listens, bounds its connections, keeps their deadlines, stops gracefully.

Use:

    class Handler:
        def handle(self, exchange: Exchange) -> None: ...   # at once, or later from a callback

    server = HttpServer(Handler(), ServerLimits())
    await server.start("0.0.0.0", 8000, reuse_port=True)
    ...
    await server.stop(grace_s=30)

`handle` is called for every whole request, synchronously: it answers on the spot, or keeps the
exchange and answers from a later callback or task of its own (`router.http_exchange` says how).
If it raises, the client gets a 500 and the error is logged.

Deadlines are not timers: one tick looks at every connection, so that a request costs no timer.
Processes that share a port (`reuse_port`) share nothing else. Counters are in `stats`, for whoever
exports them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from router.http_connection import ClientConnection
from router.http_exchange import State
from router.http_head import RequestHeads
from router.limits import ServerLimits
from router.port_handover import HANDSHAKE_S, ignore_handshakes

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from router.http_exchange import Exchange

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """Whoever decides what becomes of a request."""

    def handle(self, exchange: Exchange) -> None:
        """Answer `exchange`, now or later; must not block."""


class ServerStats:
    """What a server has done so far; plain counters, read by the metrics exporter.

    Attributes:
        connections: accepted so far, the refused included.
        connections_refused: over a connection limit.
        requests: handed to the handler.
        refused: answered without the handler: malformed, too large, too slow, too many.
        clients_gone: left before their answer was complete.
        clients_half_closed: ended their own side before an answer began, to wait or to leave.
        write_stalls: dropped for not reading their answer.
        handler_errors: the handler raised.
        loop_lag_s: how late the last tick ran: how long the event loop was busy with other things.
    """

    __slots__ = (
        "clients_gone",
        "clients_half_closed",
        "connections",
        "connections_refused",
        "handler_errors",
        "loop_lag_s",
        "refused",
        "requests",
        "write_stalls",
    )

    def __init__(self) -> None:
        self.connections = 0
        self.connections_refused = 0
        self.requests = 0
        self.refused = 0
        self.clients_gone = 0
        self.clients_half_closed = 0
        self.write_stalls = 0
        self.handler_errors = 0
        self.loop_lag_s = 0.0


class HttpServer:
    """An HTTP/1.x server on the running event loop.

    Attributes:
        limits: see `router.limits`.
        stats: see `ServerStats`.
        heads: parses request heads for all connections.
        clock: gives the time in seconds.
        now_s: the clock as of the last tick; what deadlines are set from.
        idle_deadline_s: until when a connection that turns idle now is kept.
        draining: whether `stop` has been called.
        buffered_bytes: request bodies held at present.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        refused: Callable[[int], None] | None = None,
    ) -> None:
        """Build a server that does not listen yet; see the class.

        Args:
            handler: gets every whole request.
            limits: what clients may cost.
            clock: gives the time in seconds.
            refused: told the status of every request that is answered without the handler.
        """
        self.limits = limits or ServerLimits()
        self.stats = ServerStats()
        self.heads = RequestHeads(self.limits.headers_max)
        self.now_s = clock()
        self.idle_deadline_s = self.now_s + self.limits.idle_time_s
        self.draining = False
        self.buffered_bytes = 0
        self._handler = handler
        self._refused = refused
        self.clock = clock
        self._connections: set[ClientConnection] = set()
        self._half_closed: set[ClientConnection] = set()
        self._per_client: dict[str, int] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._listeners: list[asyncio.Server] = []
        self._shares_port = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def connections_open(self) -> int:
        """Client connections open at present."""
        return len(self._connections)

    async def start(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        backlog: int = 4096,
    ) -> tuple[str, int]:
        """Listen, and return the address in use; may be called again to listen elsewhere too.

        Args:
            host: address to bind.
            port: port to bind; 0 for a free one.
            reuse_port: let other processes share the port (SO_REUSEPORT).
            tls: serve TLS with this context.
            backlog: connections the kernel queues for us.

        Raises:
            OSError: the address cannot be bound.
        """
        listener = await self._loop.create_server(
            lambda: ClientConnection(self),
            host,
            port,
            reuse_port=reuse_port or None,
            ssl=tls,
            ssl_handshake_timeout=self.limits.tls_handshake_s if tls else None,
            backlog=backlog,
        )
        self._listeners.append(listener)
        self._shares_port = self._shares_port or reuse_port
        if self._tick_handle is None:
            self._tick()
        address: tuple[str, int] = listener.sockets[0].getsockname()[:2]
        return address

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, let answers in progress finish for up to `grace_s`, then close all.

        Idle connections may bring one more request within `drain_idle_s`; every answer from now on
        tells its client to close. Connections that the kernel has dealt to us on a shared port are
        accepted; see `router.port_handover`.
        """
        self.draining = True
        if self._shares_port:
            sockets = [sock for listener in self._listeners for sock in listener.sockets]
            if all(ignore_handshakes(sock) for sock in sockets):
                await asyncio.sleep(HANDSHAKE_S)
        while self._listeners:
            self._listeners.pop().close()
        self.idle_deadline_s = self.clock() + self.limits.drain_idle_s
        for connection in tuple(self._connections):
            connection.drain(self.idle_deadline_s)
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("stopping: %d connections cut off", len(self._connections))
            for connection in tuple(self._connections):
                connection.abort()
            await self._empty.wait()
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None

    # Called by connections.

    def admit(self, connection: ClientConnection) -> str | None:
        """Count a new connection in; return why it must be refused, or None."""
        self.stats.connections += 1
        self._connections.add(connection)
        self._empty.clear()
        mine = self._per_client.get(connection.client, 0) + 1
        self._per_client[connection.client] = mine
        if len(self._connections) > self.limits.connections_max:
            refusal = "too many connections"
        elif mine > self.limits.connections_per_client_max:
            refusal = "too many connections from this address"
        else:
            return None
        self.stats.connections_refused += 1
        return refusal

    def forget(self, connection: ClientConnection) -> None:
        """Count a closed connection out."""
        self._connections.discard(connection)
        self._half_closed.discard(connection)
        left = self._per_client[connection.client] - 1
        if left:
            self._per_client[connection.client] = left
        else:
            del self._per_client[connection.client]
        if not self._connections:
            self._empty.set()

    def request_refused(self, status: int) -> None:
        """Tell of a request that is answered without the handler."""
        if self._refused is not None:
            self._refused(status)

    def soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` after the other connections have had their turn."""
        self._loop.call_soon(callback)

    def watch_for_reset(self, connection: ClientConnection, first_s: float) -> None:
        """Let a connection look for a reset, in `first_s` and then at every tick."""
        self.stats.clients_half_closed += 1
        self._half_closed.add(connection)
        self._loop.call_later(first_s, self._look_for_reset, connection)

    def dispatch(self, exchange: Exchange) -> None:
        """Give an exchange to the handler, and answer for it if it raises."""
        self.stats.requests += 1
        try:
            self._handler.handle(exchange)
        except Exception:
            self.stats.handler_errors += 1
            logger.exception("request %s failed", exchange.request_id.decode())
            if exchange.state == State.OPEN:
                exchange.respond_error(500, "server_error", "internal error")
            else:
                exchange.abort()

    def _tick(self) -> None:
        """Look at every connection's deadline, and come back in a while."""
        self._tick_handle = self._loop.call_later(self.limits.tick_s, self._tick)
        due_s = self.now_s + self.limits.tick_s
        now_s = self.now_s = self.clock()
        limits = self.limits
        self.idle_deadline_s = now_s + (
            limits.drain_idle_s if self.draining else limits.idle_time_s
        )
        self.stats.loop_lag_s = max(0.0, now_s - due_s)
        for connection in tuple(self._half_closed):
            connection.look_for_reset(self.now_s)
        overdue = [c for c in self._connections if c.deadline_s <= now_s]
        for connection in overdue:
            connection.on_deadline(now_s)

    def _look_for_reset(self, connection: ClientConnection) -> None:
        if connection in self._half_closed:
            connection.look_for_reset(self.now_s)
