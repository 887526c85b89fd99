"""One request and its answer, as the code above the HTTP server sees them.

Theory of operation. The server hands an `Exchange` to its handler once the request is whole, and
the exchange is then in one of four states, which only move to the right:

    OPEN ──start()──> STREAMING ──finish()──> DONE
      │  ──respond()─────────────────────────> DONE
      └──the client goes away, or abort()────> GONE      (from OPEN and STREAMING)

Either `respond` answers in one piece, or `start`, `write`… and `finish` stream an answer whose
framing the caller vouches for (`router.http_proxy` does, for engines' answers). When the client
goes away the callbacks given to `on_client_gone` run once, at once. Answering an exchange that is
GONE does nothing: the race is the network's, not the caller's fault. Answering twice is a fault.

The client's side of flow control is `writable` with `set_flow`: the server tells the flow when the
client's unsent bytes pass the limit and when they have drained.
"""

from __future__ import annotations

import os
import re
from email.utils import formatdate
from enum import IntEnum
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.http_head import Headers, RequestHead

_STATUS_LINES: Final[dict[int, bytes]] = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
JSON: Final = (b"content-type", b"application/json")

# A client's own id is kept when it is safe to log and to send on.
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_ID_PREFIX: Final = os.urandom(6).hex().encode()
_ID_COUNTER: Final = count()


class State(IntEnum):
    """Where an exchange is in its life; see the module's theory of operation."""

    OPEN = 0
    STREAMING = 1
    DONE = 2
    GONE = 3


# A member looked up on its enum costs as much as a method call; hot paths use these names.
_OPEN, _STREAMING, _DONE, _GONE = State


class Flow(Protocol):
    """What feeds an answer, and can be asked to wait."""

    def pause(self) -> None:
        """Stop feeding: the client does not keep up."""

    def resume(self) -> None:
        """Feed again: the client has caught up."""


class Carrier(Protocol):
    """The client connection, as an exchange needs it."""

    exchange_write: Callable[[bytes], None]  # send bytes to the client

    def exchange_started(self) -> None:
        """The request's body is not needed any more."""

    def exchange_finished(self, keep_alive: bool) -> None:
        """The answer is complete; the connection may serve the next request."""

    def exchange_aborted(self, reset: bool) -> None:
        """The answer cannot be completed; the connection must end visibly."""


class Exchange:
    """One request, whole, and the way to answer it.

    Attributes:
        head: the parsed request head.
        method, target, path, query: of the request line, as sent (`query` without its `?`).
        headers: every header line, names in lower case.
        body: the whole body, chunk framing removed; let go of when the answer begins.
        client: the client's address, as text.
        request_id: the client's X-Request-Id, or one made here.
        state: see the module's theory of operation.
        writable: False while the client has too many unsent bytes.
        draining: the server is stopping, so this answer is the connection's last.
        cors_lines: header lines for the client's browser, each with its line end.
        write: sends the next bytes of a streamed answer; does nothing once the exchange is closed.
    """

    __slots__ = (
        "_carrier",
        "_flow",
        "_gone_callbacks",
        "_request_id",
        "body",
        "client",
        "cors_lines",
        "draining",
        "head",
        "state",
        "writable",
        "write",
    )

    def __init__(self, carrier: Carrier, head: RequestHead, body: bytes, client: str) -> None:
        self._carrier: Carrier | None = carrier
        self._flow: Flow | None = None
        self._gone_callbacks: list[Callable[[], None]] | None = None
        self._request_id = b""
        self.head = head
        self.body = body
        self.client = client
        self.state = _OPEN
        self.writable = True
        self.draining = False
        self.cors_lines = b""
        self.write = carrier.exchange_write  # itself, not a method around it: it runs per token

    @property
    def method(self) -> bytes:
        """The request's method, as sent."""
        return self.head.method

    @property
    def target(self) -> bytes:
        """The path and query, as sent."""
        return self.head.target

    @property
    def path(self) -> bytes:
        """The target up to its `?`, not decoded."""
        return self.head.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """The target after its `?`, not decoded."""
        return self.head.target.partition(b"?")[2]

    @property
    def headers(self) -> Headers:
        """Every header line in order, names in lower case."""
        return self.head.headers

    def header(self, name: bytes) -> bytes | None:
        """Return a header's value (the last, if repeated), or None. `name` is in lower case."""
        return self.head.fields.get(name)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be answered: the answer is complete, or the client is gone."""
        return self.state >= _DONE

    @property
    def request_id(self) -> bytes:
        """The client's X-Request-Id if it is fit to be logged, else one made here; stable."""
        if not self._request_id:
            given = self.head.fields.get(b"x-request-id")
            if given is not None and _REQUEST_ID.fullmatch(given):
                self._request_id = given
            else:
                self._request_id = b"%b-%08x" % (_ID_PREFIX, next(_ID_COUNTER))
        return self._request_id

    @property
    def keep_alive(self) -> bool:
        """Whether the connection is to be kept after this answer, as far as the client goes."""
        return self.head.keep_alive and not self.draining

    def on_client_gone(self, callback: Callable[[], None]) -> None:
        """Run `callback` once if the client leaves before its answer is complete; now if it has."""
        if self.state is _GONE:
            callback()
        elif self._gone_callbacks is None:
            self._gone_callbacks = [callback]
        else:
            self._gone_callbacks.append(callback)

    def set_flow(self, flow: Flow) -> None:
        """Name what is to be paused and resumed as the client falls behind and catches up."""
        self._flow = flow
        if not self.writable:
            flow.pause()

    def respond(
        self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> None:
        """Answer in one piece; does nothing if the client is gone.

        Args:
            status: the status code.
            headers: header lines beyond the framing, Server, Date and X-Request-Id.
            body: the whole body; not sent in answer to HEAD, though its length is.

        Raises:
            RuntimeError: the exchange has been answered already.
        """
        if not self._begin():
            return
        lines = [b"%b: %b\r\n" % header for header in headers]
        framing = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        payload = b"" if self.head.method == b"HEAD" or status in (204, 304) else body
        head = b"%b%b%bserver: multiplane\r\ndate: %b\r\nx-request-id: %b\r\n%b%b\r\n" % (
            status_line(status),
            b"".join(lines),
            self.cors_lines,
            formatdate(usegmt=True).encode(),
            self.request_id,
            framing,
            connection_line(self.head.http11, self.keep_alive),
        )
        self.write(head + payload)
        self.finish(self.keep_alive)

    def respond_error(
        self,
        status: int,
        type_: str,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Answer with an error in OpenAI's JSON form; does nothing if the client is gone.

        Args:
            status: the status code.
            type_: the kind of error, e.g. `invalid_request_error`.
            message: what is wrong and what to do, for a person.
            code: a machine's word for it.
            param: the request field at fault.
            retry_after_s: when to come back, in seconds; sent rounded up.
        """
        headers = [JSON]
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(retry_after_s + 0.499))))
        self.respond(status, headers, error_body(type_, message, code, param))

    def start(self, data: bytes) -> None:
        """Begin a streamed answer with `data`: its head, and perhaps the first of its body.

        Raises:
            RuntimeError: the exchange has been answered already.
        """
        if self._begin() and self._carrier is not None:
            self.write(data)
            self.body = b""  # Nothing is retried from here on, and answers can be long.
            self._carrier.exchange_started()

    def finish(self, keep_alive: bool) -> None:
        """End a streamed answer whose framing is complete; does nothing once closed.

        Args:
            keep_alive: False when only the connection's end tells the client that this is all.
        """
        carrier = self._carrier
        if carrier is not None:
            self._close(_DONE)
            carrier.exchange_finished(keep_alive)

    def abort(self, reset: bool = False) -> None:
        """End an answer that cannot be completed, in a way that the client can tell.

        Args:
            reset: the answer had no framing of its own, so that only a connection reset tells a
                cut from an end.
        """
        carrier = self._carrier
        if carrier is not None:
            self._close(_GONE)
            carrier.exchange_aborted(reset)

    def client_gone(self) -> None:
        """Note that the client has left, and tell whoever asked to know. Called by the server."""
        callbacks = self._gone_callbacks or ()
        if self.closed:
            return
        self._close(_GONE)
        for callback in callbacks:
            callback()

    def client_paused(self) -> None:
        """Note that the client has fallen behind. Called by the server."""
        self.writable = False
        if self._flow is not None:
            self._flow.pause()

    def client_resumed(self) -> None:
        """Note that the client has caught up. Called by the server."""
        self.writable = True
        if self._flow is not None:
            self._flow.resume()

    def _begin(self) -> bool:
        """Move from OPEN to STREAMING; False if the client is gone."""
        if self.state is _GONE:
            return False
        if self.state is not _OPEN:
            raise RuntimeError("this exchange has been answered already")
        self.state = _STREAMING
        return True

    def _close(self, state: State) -> None:
        """Enter a final state and drop every reference that would keep a cycle alive."""
        self.state = state
        self.write = _drop
        self._carrier = None
        self._flow = None
        self._gone_callbacks = None


def _drop(data: bytes) -> None:
    """Send nothing: there is nobody to send it to."""


def status_line(status: int) -> bytes:
    """Return the status line with its line end."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def connection_line(http11: bool, keep_alive: bool) -> bytes:
    """Return the Connection line that says what the HTTP version does not already imply."""
    if http11 == keep_alive:
        return b""
    return b"connection: keep-alive\r\n" if keep_alive else b"connection: close\r\n"


def error_body(
    type_: str, message: str, code: str | None = None, param: str | None = None
) -> bytes:
    """Return an error in OpenAI's JSON form."""
    error = {"message": message, "type": type_, "param": param, "code": code}
    return msgspec.json.encode({"error": error})
