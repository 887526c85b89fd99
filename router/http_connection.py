"""One client connection: requests in, answers out, in order.

Theory of operation. A connection is in one phase:

    phase     what arrives                            leaves when
    READING   is read into the next request           the request is whole → BUSY
    BUSY      waits, up to a bound (pipelining)       the exchange is answered → READING or CLOSING
    CLOSING   is dropped                              the peer closes, or the deadline passes

So one request at a time is in the handler's hands, and answers cannot change order. What a client
sends ahead waits as bytes, and past `pipeline_bytes_max` reading stops. Nothing new is taken up
while the client is behind in reading, either: a peer that only sends costs a bounded amount.

`deadline_s` is the one time that matters at present; the server's tick looks at it. While the
client is behind, it is the moment by which some of the unsent bytes must have gone.

End of input means that the client has left, or only that it has nothing more to say and waits for
its answer (RFC 9112, section 9.6). An engine must not work for the one, and the other must have its
answer. Who means to wait ends its side with the request, before an answer begins; and who has left
resets the connection as soon as something is sent to it. So the end of input is

- in the middle of an answer: leaving;
- before it has begun, in HTTP/1.1: a question. `100 Continue` is sent, which says nothing (RFC
  9110, section 15.2), again whenever the wait has doubled, and a reset is looked for soon and at
  every tick;
- before it has begun, in HTTP/1.0, which has nothing to ask with: leaving, unless it came within
  `half_close_s` of the request;
- over TLS: leaving.

(While reading has stopped, leaving shows only at the next write; `pipeline_bytes_max` ahead of time
is what a client must not send.)
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from router.http_exchange import JSON, Exchange, State, error_body, status_line
from router.http_head import HeadError, RequestHead
from router.http_reader import Awaiting, RequestReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.http_server import HttpServer

# Requests taken up in one go before other connections get their turn.
BURST_REQUESTS: Final = 16

# To ask a client on the same site, and for its kernel to answer.
RESET_S: Final = 0.02

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Phase(IntEnum):
    """What a connection does with the bytes that arrive."""

    READING = 0
    BUSY = 1
    CLOSING = 2


# A member looked up on its enum costs as much as a method call; hot paths use these names.
_READING, _BUSY, _CLOSING = Phase
_IDLE = Awaiting.IDLE


class ClientConnection(asyncio.Protocol):
    """The server's side of one client connection.

    Attributes:
        client: the peer's address, as text.
        deadline_s: when `on_deadline` is due, on the server's clock.
        exchange_write: sends bytes of the answer.
    """

    __slots__ = (
        "_advancing",
        "_ask_again_s",
        "_asked_s",
        "_awaiting",
        "_behind",
        "_body_bytes",
        "_exchange",
        "_half_closed",
        "_phase",
        "_reader",
        "_reading_paused",
        "_server",
        "_since_s",
        "_transport",
        "_unsent_bytes",
        "_yielded",
        "client",
        "deadline_s",
        "exchange_write",
    )

    _transport: asyncio.Transport
    exchange_write: Callable[[bytes], None]

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._reader = RequestReader(server.limits, server.heads)
        self._phase = _READING
        self._awaiting: Awaiting | None = None  # what the deadline was set for
        self._exchange: Exchange | None = None
        self._body_bytes = 0
        self._advancing = False
        self._yielded = False
        self._reading_paused = False
        self._behind = False
        self._half_closed = False
        self._since_s = 0.0  # when the present exchange began, in HTTP/1.0
        self._asked_s = 0.0
        self._ask_again_s = 0.0
        self._unsent_bytes = 0
        self.client = ""
        self.deadline_s = math.inf

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, or refuse it if there are too many."""
        self._transport = transport  # type: ignore[assignment]  # asyncio's stubs name the base
        self.exchange_write = self._transport.write
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if peer else "local"
        write_buffer_bytes = self._server.limits.write_buffer_bytes
        self._transport.set_write_buffer_limits(high=write_buffer_bytes)
        # Without this the kernel takes megabytes before it lets us feel that a client is slow, and
        # then nothing for so long that the client would seem to have stopped.
        _set_option(transport, socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, write_buffer_bytes)
        refusal = self._server.admit(self)
        if refusal is None:
            self._await_more()
        else:
            self._turn_away(503, refusal, retry_after_s=1)

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent."""
        if self._phase is _CLOSING:
            return
        self._reader.feed(data)
        if self._phase is _READING and not self._behind and not self._yielded:
            self._advance()
        elif self._reader.held_bytes > self._server.limits.pipeline_bytes_max:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Go on if the client waits for its answer, else end; what was answered is still sent."""
        if self._may_wait():
            self._half_closed = True
            self._server.watch_for_reset(self, RESET_S)
            self._ask(RESET_S)
            return True
        busy = self._exchange is not None
        self._enter_closing(self._server.limits.write_stall_s)
        self._lose_exchange()
        if busy:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and tell a waiting handler that its client is gone."""
        self._enter_closing(math.inf)
        self._lose_exchange()
        self._server.forget(self)

    def pause_writing(self) -> None:
        """Note that the client has fallen behind; from now on it has to keep taking bytes."""
        self._behind = True
        self._awaiting = None
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self.deadline_s = self._server.now_s + self._server.limits.write_stall_s
        if self._exchange is not None:
            self._exchange.client_paused()

    def resume_writing(self) -> None:
        """Note that the client has caught up, and go on with what it has sent meanwhile."""
        self._behind = False
        if self._phase is _BUSY:
            self.deadline_s = math.inf
        if self._exchange is not None:
            self._exchange.client_resumed()
        self._go_on()

    # Called by the exchange.

    def exchange_started(self) -> None:
        """Count the request's body out."""
        if self._body_bytes:
            self._book(0)

    def exchange_finished(self, keep_alive: bool) -> None:
        """Turn to the next request, or close."""
        self._exchange = None
        if self._body_bytes:
            self._book(0)
        if not keep_alive or (self._half_closed and not self._reader.held_bytes):
            self._close()
            return
        self._phase = _READING
        if self._reader.held_bytes or self._behind:
            self._go_on()
        else:
            self._awaiting = _IDLE
            self.deadline_s = self._server.idle_deadline_s

    def exchange_aborted(self, reset: bool) -> None:
        """End the connection in the middle of an answer, after what was sent of it or at once."""
        self._exchange = None
        self._book(0)
        self._enter_closing(self._server.limits.write_stall_s)
        if reset and not self._transport.is_closing():
            _set_option(self._transport, socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        else:
            self._transport.close()

    # Called by the server.

    def on_deadline(self, now_s: float) -> None:
        """Do what the present phase demands when its time is up."""
        limits = self._server.limits
        if self._behind:
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes < self._unsent_bytes:
                self._unsent_bytes = unsent_bytes
                self.deadline_s = now_s + limits.write_stall_s
                return
            self._server.stats.write_stalls += 1
            self._transport.abort()
        elif self._phase is _CLOSING:
            self._transport.abort()
        elif self._awaiting == Awaiting.BODY:
            self._refuse(408, f"the body took longer than {limits.body_time_s:g} s")
        elif self._awaiting == Awaiting.HEAD:
            self._refuse(408, f"the head took longer than {limits.header_time_s:g} s")
        else:
            self._close()

    def drain(self, idle_deadline_s: float) -> None:
        """Make the present answer, or the next one if it comes soon, this connection's last.

        An answer that has begun has promised its client to stay: it is the next one that is last.
        """
        if self._exchange is not None:
            self._exchange.draining = self._exchange.state is State.OPEN
        elif self._awaiting == Awaiting.IDLE:
            self.deadline_s = min(self.deadline_s, idle_deadline_s)

    def abort(self) -> None:
        """Close at once, whatever is going on."""
        self._transport.abort()

    def look_for_reset(self, now_s: float) -> None:
        """End a half-closed connection that its client has reset, or ask whether it is there."""
        if self._transport.is_closing():
            return  # Just now; its socket cannot be asked any more.
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        elif now_s - self._asked_s > self._ask_again_s:
            self._ask(2 * self._ask_again_s)

    # The end of input.

    def _may_wait(self) -> bool:
        """Whether a client whose input has ended may be waiting for an answer."""
        if not self._transport.can_write_eof():
            return False
        exchange = self._exchange
        if exchange is None:  # Whole requests may wait for their turn.
            return (self._yielded or self._behind) and self._reader.held_bytes > 0
        if exchange.state is not State.OPEN:
            return False
        soon = self._server.clock() - self._since_s <= self._server.limits.half_close_s
        return exchange.head.http11 or soon

    def _ask(self, again_s: float) -> None:
        """Send something that means nothing, if that can be, to be reset by whoever has left."""
        exchange = self._exchange
        self._asked_s = self._server.now_s
        self._ask_again_s = again_s
        if exchange is not None and exchange.state is State.OPEN and exchange.head.http11:
            self._transport.write(_CONTINUE)

    # From requests to exchanges.

    def _go_on(self) -> None:
        """Take up what had to wait, if nothing stands in the way any more."""
        self._yielded = False
        if self._behind or self._advancing or self._phase is not _READING:
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._advance()

    def _advance(self) -> None:
        """Hand over requests as long as they are whole and answered on the spot."""
        self._advancing = True
        try:
            for _ in range(BURST_REQUESTS):
                request = self._reader.next()
                if request is None:
                    self._await_more()
                    if self._reader.busy:
                        break
                    return
                self._dispatch(*request)
                if self._phase is not _READING or self._behind:
                    return
        except HeadError as error:
            self._refuse(error.status, error.message)
            return
        finally:
            self._advancing = False
        self._yielded = True
        self._server.soon(self._go_on)

    def _await_more(self) -> None:
        """Set the deadline for what is missing of the next request, once for each stage of it."""
        if self._half_closed:
            self._close()
            return
        awaiting = self._reader.awaiting
        if not self._book(self._reader.body_bytes) or awaiting == self._awaiting:
            return
        self._awaiting = awaiting
        server = self._server
        if awaiting == Awaiting.IDLE:
            self.deadline_s = server.idle_deadline_s
        elif awaiting == Awaiting.HEAD:
            self.deadline_s = server.now_s + server.limits.header_time_s
        else:
            self.deadline_s = server.now_s + server.limits.body_time_s
            if self._reader.wants_continue:
                self._transport.write(_CONTINUE)

    def _dispatch(self, head: RequestHead, body: bytes) -> None:
        """Give the handler a whole request."""
        if body and not self._book(len(body)):
            return
        exchange = Exchange(self, head, body, self.client)
        exchange.draining = self._server.draining
        self._exchange = exchange
        self._phase = _BUSY
        self._awaiting = None
        if not head.http11:
            self._since_s = self._server.clock()
        self.deadline_s = math.inf
        self._server.dispatch(exchange)

    def _book(self, body_bytes: int) -> bool:
        """Count the present request's body in the server's total; refuse it if that is too much."""
        if body_bytes == self._body_bytes:
            return True
        self._server.buffered_bytes += body_bytes - self._body_bytes
        self._body_bytes = body_bytes
        if not body_bytes or self._server.buffered_bytes <= self._server.limits.buffered_bytes_max:
            return True
        self._refuse(503, "too many request bodies are held at once", retry_after_s=1)
        return False

    # Ways to end.

    def _lose_exchange(self) -> None:
        """Tell the present exchange, if any, that its client has left."""
        exchange = self._exchange
        self._exchange = None
        self._book(0)
        if exchange is not None:
            self._server.stats.clients_gone += 1
            exchange.client_gone()

    def _refuse(self, status: int, message: str, retry_after_s: int = 0) -> None:
        """Answer a request that never became an exchange, and end the connection."""
        self._server.request_refused(status)
        self._turn_away(status, message, retry_after_s)

    def _turn_away(self, status: int, message: str, retry_after_s: int) -> None:
        """Say why nothing more is taken from this client, and end the connection."""
        self._server.stats.refused += 1
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = error_body(kind, message)
        retry = b"retry-after: %d\r\n" % retry_after_s if retry_after_s else b""
        self._transport.write(
            b"%b%b: %b\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (status_line(status), *JSON, len(body), retry, body)
        )
        self._linger()

    def _close(self) -> None:
        """End the connection after what has been written."""
        if self._reader.held_bytes:
            self._linger()
        else:
            self._enter_closing(self._server.limits.write_stall_s)
            self._transport.close()

    def _linger(self) -> None:
        """End our side, and read on for a while, lest a reset overtakes the answer."""
        self._enter_closing(self._server.limits.linger_s)
        one_way = self._half_closed or not self._transport.can_write_eof()
        if one_way or self._transport.is_closing():
            self._transport.close()
        else:
            self._transport.write_eof()
            self._transport.resume_reading()

    def _enter_closing(self, time_s: float) -> None:
        """Drop what has been read, and allow `time_s` for the rest of the connection's life."""
        self._phase = _CLOSING
        self._reader.clear()
        self._book(0)
        self.deadline_s = self._server.now_s + time_s


def _set_option(
    transport: asyncio.BaseTransport, level: int, option: int, value: int | bytes
) -> None:
    """Set an option of a TCP transport's socket."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(level, option, value)
