"""A client's exchange joined to an engine's call: bytes through, retries, one end.

Theory of operation. `Forwarder.forward` builds the engine's request head once and sends the request
to the instance it is given. The answer's head is held until the first byte of the body (or the end
of an empty one): nothing has reached the client before that, so whatever goes wrong can still be
made good elsewhere. From the first byte on, bytes pass through as they come.

    what went wrong, and when                            what follows
    before the first byte: POOL_FULL, NO_SOCKET,         `next_upstream(attempt, reason)`:
      CONNECT_FAILED, RESET_…,                             a key → sent there;
      FIRST_BYTE_TIMEOUT, a 5xx head                       None → the 5xx passes, or 502 or 503;
                                                           LATER → the caller has it again
    before the first byte: BAD_RESPONSE                  502
    after it: STALLED, RESET_MID_STREAM, BAD_RESPONSE    the client's connection ends visibly
    4xx, at any time                                     passes through
    the client leaves, at any time                       the call is cancelled at once

`next_upstream` is asked with the number of attempts that may have reached an engine: 1 and 2 for a
retry, 3 for the fallback, the last instance that will be tried. An attempt of which nothing was
sent (the first three) is not among them: for up to `CONNECTING_S_MAX` from the first one,
further instances are tried as long as `next_upstream` has any. Where that says LATER, no instance
has room: the forwarder is done with the request, whose client has heard nothing yet. The caller
forwards it anew, with the number of attempts it was told, or answers it.

`Observer` hears of each attempt's end, of the first byte, and, exactly once whatever happens, of
the request's end, in that order and always last; not of the end of one that the caller has again.

A response is framed for the client as the engine framed it, except that an HTTP/1.0 client, which
knows no chunks, gets their content and the connection's end. A body that only the engine's
connection ends is ended by the client's.
"""

from __future__ import annotations

import logging
import re
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from router.cors import RESPONSE_HEADERS
from router.http_chunks import ChunkScanner
from router.http_exchange import connection_line
from router.upstream_connection import BODILESS, ErrorKind

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from router.http_exchange import Exchange
    from router.http_head import ResponseHead
    from router.upstream import UpstreamCall, UpstreamPool

logger = logging.getLogger(__name__)

RETRIES_MAX: Final = 2
CONNECTING_S_MAX: Final = 10.0
"""How long a request may look for an instance that takes connections: five that hang."""
RETRY_AFTER_S: Final = 1.0

_METHODS_WITH_BODY: Final = frozenset({b"POST", b"PUT", b"PATCH"})

# Begins with a literal, which `re` searches for some ten times faster than for a choice.
_CHUNK_BREAK: Final = re.compile(rb"\r\n[0-9A-Fa-f]{1,15}(?:;[^\r\n]*)?\r\n")


LATER: Final = object()
"""What `next_upstream` says in place of a key to have the request again."""


class Outcome(StrEnum):
    """How an attempt, or a request, ended."""

    COMPLETED = "completed"  # the answer passed through whole, whatever its status
    CLIENT_GONE = "client_gone"
    STATUS_5XX = "status_5xx"  # of an attempt that was given up for another
    POOL_FULL = ErrorKind.POOL_FULL.value
    NO_SOCKET = ErrorKind.NO_SOCKET.value
    CONNECT_FAILED = ErrorKind.CONNECT_FAILED.value
    RESET_BEFORE_FIRST_BYTE = ErrorKind.RESET_BEFORE_FIRST_BYTE.value
    FIRST_BYTE_TIMEOUT = ErrorKind.FIRST_BYTE_TIMEOUT.value
    STALLED = ErrorKind.STALLED.value
    RESET_MID_STREAM = ErrorKind.RESET_MID_STREAM.value
    BAD_RESPONSE = ErrorKind.BAD_RESPONSE.value


RETRYABLE: Final = frozenset(
    {
        Outcome.POOL_FULL,
        Outcome.NO_SOCKET,
        Outcome.CONNECT_FAILED,
        Outcome.RESET_BEFORE_FIRST_BYTE,
        Outcome.FIRST_BYTE_TIMEOUT,
        Outcome.STATUS_5XX,
    }
)


_UNSENT: Final = frozenset({Outcome.POOL_FULL, Outcome.NO_SOCKET, Outcome.CONNECT_FAILED})

# What a client is told when nothing else can be tried.
_ANSWERS: Final[dict[Outcome, tuple[int, str]]] = {
    Outcome.POOL_FULL: (503, "the chosen instance has no connection to spare; retry later"),
    Outcome.NO_SOCKET: (503, "this router has no connection to spare; retry later"),
    Outcome.CONNECT_FAILED: (502, "no instance could be reached; retry later"),
    Outcome.RESET_BEFORE_FIRST_BYTE: (502, "the instance dropped the request; retry later"),
    Outcome.FIRST_BYTE_TIMEOUT: (502, "the instance did not answer in time; retry later"),
    Outcome.BAD_RESPONSE: (502, "the instance answered with something that is not HTTP"),
}


class Observer(Protocol):
    """Whoever keeps the books of a request; all times are on the monotonic clock."""

    def on_first_byte(self, now_s: float) -> None:
        """The first byte of the answer's body has come: prefill is done."""

    def on_attempt_end(self, key: Hashable, outcome: Outcome, status: int, now_s: float) -> None:
        """The attempt at `key` is over: release what was booked there. Once for each attempt.

        Args:
            key: the instance.
            outcome: how it ended.
            status: of the engine's answer; 0 if none came.
            now_s: when.
        """

    def on_end(
        self, outcome: Outcome, status: int, body_bytes: int, now_s: float, usage_tail: bytes
    ) -> None:
        """The request is over. Exactly once, and last.

        Args:
            outcome: how it ended.
            status: what the client was answered with; 0 if nothing reached it.
            body_bytes: body bytes from the engine, framing included.
            now_s: when.
            usage_tail: the body's last bytes, some 4 KiB at most, chunk framing removed.
        """


class Forwarder:
    """Sends exchanges to instances.

    Args:
        pool: the connections to the instances.
        retries_max: further attempts that may reach an engine, before the fallback.
        dropped_headers: request headers that clients may not send to engines, in lower case.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: UpstreamPool,
        *,
        retries_max: int = RETRIES_MAX,
        dropped_headers: frozenset[bytes] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.retries_max = retries_max
        self._dropped_headers = dropped_headers
        self.clock = clock

    def forward(
        self,
        exchange: Exchange,
        key: Hashable,
        next_upstream: Callable[[int, Outcome], Hashable | None],
        observer: Observer,
        *,
        body: bytes | None = None,
        request_lines: bytes = b"",
        response_lines: bytes = b"",
        first_byte_s: float | None = None,
        attempts: int = 0,
    ) -> None:
        r"""Send `exchange` to the instance `key`, and see it through.

        Args:
            exchange: an open one; if its client is gone already, this ends at once.
            key: the first instance to try.
            next_upstream: asked for another instance as the module says, given the attempt's
                number, as the module counts them, and why the last one failed; None gives up,
                `LATER` takes the request back.
            observer: see `Observer`.
            body: in place of the client's.
            request_lines: header lines to add for the engine, each with its `\r\n`.
            response_lines: header lines to add for the client, the same.
            first_byte_s: in place of the pool's limit.
            attempts: that may have reached an engine before.
        """
        if body is None:
            body = exchange.body
        head = self._request_head(exchange, body, request_lines)
        forward = _Forward(
            self, exchange, head, body, next_upstream, observer, response_lines, first_byte_s
        )
        forward.begin(key, attempts)

    def _request_head(self, exchange: Exchange, body: bytes, lines: bytes) -> bytes:
        """Return the request line and header lines for the engine, each with its line end."""
        head = exchange.head
        forwarded = head.forwarded
        if not self._dropped_headers.isdisjoint(head.fields):
            forwarded = _without(forwarded, self._dropped_headers)
        if body or head.method in _METHODS_WITH_BODY:
            lines += b"content-length: %d\r\n" % len(body)
        return b"%bx-request-id: %b\r\n%b" % (forwarded, exchange.request_id, lines)


def _without(forwarded: bytes, names: frozenset[bytes]) -> bytes:
    """Return the start of a head without the lines that have these names, in lower case."""
    lines = forwarded.splitlines(keepends=True)
    return b"".join(line for line in lines if line.partition(b":")[0].lower() not in names)


class _Forward:
    """One exchange on its way: the sink of its calls, the flow of its exchange."""

    __slots__ = (
        "_attempt",
        "_body",
        "_call",
        "_ended",
        "_exchange",
        "_first_byte_s",
        "_forwarder",
        "_framed",
        "_head",
        "_key",
        "_next_upstream",
        "_observer",
        "_refused_s",
        "_response",
        "_response_lines",
        "_scanner",
        "_started",
    )

    _attempt: int  # how many may have reached an engine
    _key: Hashable
    _scanner: ChunkScanner  # when chunks must be taken apart

    def __init__(
        self,
        forwarder: Forwarder,
        exchange: Exchange,
        head: bytes,
        body: bytes,
        next_upstream: Callable[[int, Outcome], Hashable | None],
        observer: Observer,
        response_lines: bytes,
        first_byte_s: float | None,
    ) -> None:
        self._forwarder = forwarder
        self._exchange = exchange
        self._head = head
        self._body = body
        self._next_upstream = next_upstream
        self._observer = observer
        self._response_lines = response_lines
        self._first_byte_s = first_byte_s
        self._call: UpstreamCall | None = None
        self._refused_s: float | None = None
        self._response: ResponseHead | None = None
        self._started = False
        self._framed = True
        self._ended = False

    def begin(self, key: Hashable, attempts: int) -> None:
        """Send the request to its first instance, unless the client has left."""
        self._attempt = attempts
        self._key = key
        self._exchange.on_client_gone(self._client_gone)
        if not self._ended:
            self._exchange.set_flow(self)
            self._send(key)

    # Called by the exchange.

    def pause(self) -> None:
        """Take nothing from the engine while the client is behind."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Take from the engine again."""
        if self._call is not None:
            self._call.resume()

    def _client_gone(self) -> None:
        """Stop the engine's work at once."""
        if self._call is not None:
            self._call.cancel()
        self._end(Outcome.CLIENT_GONE)

    # Called by the call.

    def on_response_head(self, head: ResponseHead) -> None:
        """Hold the head until the first byte; try elsewhere if it tells of a failure."""
        self._response = head
        if head.status >= 500:
            self._retry(Outcome.STATUS_5XX)

    def on_data(self, data: bytes) -> None:
        """Begin the client's answer with the first of the body; the rest goes past this object."""
        self._start(data)
        self._tell(self._observer.on_first_byte, self._forwarder.clock())

    def on_end(self) -> None:
        """Complete the client's answer."""
        if not self._started:
            self._start(b"")
        self._end(Outcome.COMPLETED)
        self._exchange.finish(self._exchange.keep_alive and self._framed)

    def on_error(self, kind: ErrorKind) -> None:
        """Try elsewhere if nothing has reached the client, else let it see the break."""
        outcome = Outcome(kind)
        if self._started:
            self._end(outcome)
            self._exchange.abort(reset=not self._framed)
        elif outcome not in RETRYABLE or not self._retry(outcome):
            status, message = _ANSWERS[outcome]
            self._end(outcome, status)
            self._exchange.respond_error(
                status, "server_error", message, code=outcome.value, retry_after_s=RETRY_AFTER_S
            )

    # Attempts, and the end.

    def _send(self, key: Hashable) -> None:
        """Begin an attempt."""
        self._key = key
        self._response = None
        self._call = self._forwarder.pool.send(
            key,
            self._head,
            self._body,
            self,
            bodiless=self._exchange.head.method == b"HEAD",
            first_byte_s=self._first_byte_s,
        )

    def _retry(self, reason: Outcome) -> bool:
        """Go on to another instance, or hand the request back; False if it can only be answered."""
        if reason not in _UNSENT:
            self._attempt += 1
        elif self._refused_s is None:
            # What came before was an engine's silence, not ours to find one.
            self._refused_s = self._forwarder.clock()
        elif self._forwarder.clock() - self._refused_s > CONNECTING_S_MAX:
            return False
        if self._attempt > self._forwarder.retries_max + 1:
            return False
        try:
            key = self._next_upstream(self._attempt, reason)
        except Exception:
            logger.exception("choosing another instance failed")
            return False
        if key is None:
            return False
        if self._call is not None:
            self._call.cancel()
        self._end_attempt(reason, self._forwarder.clock())
        if key is LATER:
            self._call, self._ended = None, True
        else:
            self._send(key)
        return True

    def _end_attempt(self, outcome: Outcome, now_s: float) -> None:
        """Report the present attempt's end."""
        status = self._response.status if self._response is not None else 0
        self._tell(self._observer.on_attempt_end, self._key, outcome, status, now_s)

    def _end(self, outcome: Outcome, status: int = 0) -> None:
        """Report the end of the request and of its last attempt; once.

        Args:
            outcome: how it ended.
            status: of our own answer, if the client gets that.
        """
        if self._ended:
            return
        self._ended = True
        call, self._call = self._call, None
        now_s = self._forwarder.clock()
        self._end_attempt(outcome, now_s)
        response, tail, body_bytes = self._response, b"", 0
        if self._started and response is not None and call is not None:
            status, tail, body_bytes = response.status, call.tail, call.body_bytes
            if response.chunked:
                tail = _CHUNK_BREAK.sub(b"", b"\r\n" + tail)
        self._tell(self._observer.on_end, outcome, status, body_bytes, now_s, tail)

    def _tell(self, method: Callable[..., None], *args: object) -> None:
        """Call the observer; its faults are logged, and must not cost the client its answer."""
        try:
            method(*args)
        except Exception:
            logger.exception("the observer of a request failed")

    # The client's answer.

    def _start(self, data: bytes) -> None:
        """Send the held head, and the first of the body with it."""
        response, exchange = self._response, self._exchange
        assert response is not None
        self._started = True
        self._body = b""
        head = self._response_head(response)
        if response.chunked and not exchange.head.http11:
            self._scanner = ChunkScanner()
            write: Callable[[bytes], None] = self._write_content
            exchange.start(head)
            write(data)
        else:
            exchange.start(head + data)
            write = exchange.write
        if self._call is not None:
            self._call.body = b""
            self._call.pass_to(write)

    def _write_content(self, data: bytes) -> None:
        """Send the content of chunks to a client that knows no chunks."""
        content: list[bytes] = []
        self._scanner.feed(data, content)
        self._exchange.write(b"".join(content))

    def _response_head(self, response: ResponseHead) -> bytes:
        """Return the head for the client: the engine's, but for what ends at this hop."""
        exchange, lines = self._exchange, self._response_lines
        forwarded = response.forwarded
        if exchange.cors_lines:
            lines += exchange.cors_lines
            if not RESPONSE_HEADERS.isdisjoint(response.fields):
                forwarded = _without(forwarded, RESPONSE_HEADERS)
        http11 = exchange.head.http11
        length = self._call.length if self._call is not None else None
        if length is not None:
            if response.status != 204:
                lines += b"content-length: %d\r\n" % length
        elif response.chunked and http11 and response.status not in BODILESS:
            lines += b"transfer-encoding: chunked\r\n"
        else:
            self._framed = exchange.head.method == b"HEAD" or response.status in BODILESS
        if b"x-request-id" not in response.fields:
            lines += b"x-request-id: %b\r\n" % exchange.request_id
        return b"%b%b%b\r\n" % (
            forwarded,
            lines,
            connection_line(http11, exchange.keep_alive and self._framed),
        )
