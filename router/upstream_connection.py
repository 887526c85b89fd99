"""One connection to an engine: a request out, its answer back, byte for byte.

Theory of operation. A connection is in one state:

    state      what arrives is                       leaves when
    IDLE       unasked for, hence fatal              a call takes the connection → HEAD
    HEAD       kept until a blank line               a final head is whole → a body state, or IDLE
    LENGTH     body, so many bytes of it             the last one has come → IDLE or CLOSED
    CHUNKED    body, its end found by a scanner      the same
    UNTIL_EOF  body, up to the connection's end      the engine closes
    CLOSED     nothing

The bytes of a body go to the call's sink as they came, chunk framing included: they are looked at
only to find their end. They are counted here, too, and the last of them kept for whoever reads
them when all is over, as one function less to call for every token is felt. A connection is used
again only if nothing speaks against it: the engine keeps it alive, the request was sent in full,
not a byte came after the answer's end, and none is to be feared: an engine may send the body all
the same that an answer to HEAD announces and must not have, and the next call would read it.

All heads of an answer together, interim ones too, may have `head_bytes_max`.

A sink may cancel its call from within any callback; whatever follows a callback checks for that.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final

from router.http_chunks import ChunkError, ChunkScanner, chunk_start
from router.http_head import HeadError, ResponseHead, lines_end_in_crlf

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.upstream import Instance, UpstreamCall, UpstreamPool

TAIL_BYTES_MAX: Final = 4096
# The last reads of a body are kept as they are and cut to the tail once in so many bytes.
_TRIM_EVERY_BYTES: Final = 2 * TAIL_BYTES_MAX

# Below this a body is copied behind its head, to be sent by one cheap write.
_JOIN_BYTES_MAX: Final = 64 * 1024
BODILESS: Final = frozenset({204, 304})
_RESPONSE_START: Final = b"HTTP/1."


class ErrorKind(StrEnum):
    """Why a call failed."""

    POOL_FULL = "pool_full"  # the instance has as many connections as it may
    NO_SOCKET = "no_socket"  # this process has as many as it may, or the machine
    CONNECT_FAILED = "connect_failed"
    RESET_BEFORE_FIRST_BYTE = "reset_before_first_byte"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    STALLED = "stalled"
    RESET_MID_STREAM = "reset_mid_stream"
    BAD_RESPONSE = "bad_response"


class Wire(IntEnum):
    """What a connection expects next; see the module's theory of operation."""

    IDLE = 0
    HEAD = 1
    LENGTH = 2
    CHUNKED = 3
    UNTIL_EOF = 4
    CLOSED = 5


# A member looked up on its enum costs as much as a method call; hot paths use these names.
_IDLE, _HEAD, _LENGTH, _CHUNKED, _UNTIL_EOF, _CLOSED = Wire


class UpstreamConnection(asyncio.Protocol):
    """Our side of one connection to an engine.

    Attributes:
        state: what is expected next.
        heard: body bytes have come since whoever cleared this last looked.
        idle_since_s: when the connection was last put aside, on the pool's clock.
    """

    __slots__ = (
        "_body_bytes",
        "_call",
        "_counted",
        "_held",
        "_instance",
        "_keep_alive",
        "_last",
        "_left",
        "_on_data",
        "_pool",
        "_reused",
        "_room_bytes",
        "_scanner",
        "_transport",
        "heard",
        "idle_since_s",
        "state",
    )

    _transport: asyncio.Transport
    _scanner: ChunkScanner  # the present body's
    _on_data: Callable[[bytes], None]  # the present call's sink, or what it passes bytes on to

    def __init__(self, pool: UpstreamPool, instance: Instance) -> None:
        self._pool = pool
        self._instance = instance
        self._counted = True
        self._call: UpstreamCall | None = None
        self._held = b""
        self._left = 0
        # The last reads of the present body; before them, all reads came to
        # `_body_bytes` + `_TRIM_EVERY_BYTES` - `_room_bytes`.
        self._last: list[bytes] = []
        self._body_bytes = 0
        self._room_bytes = _TRIM_EVERY_BYTES
        self._keep_alive = False
        self._reused = False
        self.state = _IDLE
        self.heard = False
        self.idle_since_s = 0.0

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]  # asyncio's stubs name the base

    def data_received(self, data: bytes) -> None:
        """Pass on what the engine sent, and notice where its answer ends."""
        state = self.state
        if state is _CHUNKED:
            self.heard = True
            size = len(data)
            whole = data.startswith(chunk_start(size)) and data.endswith(b"\r\n")
            if whole and self._scanner.between:
                self._last.append(data)
                room_bytes = self._room_bytes = self._room_bytes - size
                if room_bytes < 0:
                    self._trim()
                on_data = self._on_data  # A call through a local name is cheaper.
                on_data(data)
            else:
                self._scan(data)
        elif state is _HEAD:
            self._read_head(self._held + data if self._held else data)
        elif state is _LENGTH:
            self.heard = True
            stop = self._left
            self._left = stop - len(data)
            if self._left > 0:
                self._pass(data)
            else:
                self._last_data(data, stop)
        elif state is _UNTIL_EOF:
            self.heard = True
            self._pass(data)
        else:
            self.close()  # Unasked for; the stream can no longer be trusted.

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the call, if there is one, what the end of the connection means to it."""
        state, call = self.state, self._call
        self._detach()
        self.give_up()
        if call is None:
            return
        if state is _UNTIL_EOF and exc is None:
            self._pool.ended(call)
        elif self._reused and state is _HEAD and not self._held:
            self._pool.resend(call)
        elif call.begun or self.heard:
            self._pool.failed(call, ErrorKind.RESET_MID_STREAM)
        else:
            self._pool.failed(call, ErrorKind.RESET_BEFORE_FIRST_BYTE)

    # Called by the pool and by calls.

    @property
    def usable(self) -> bool:
        """Whether a call may take this connection."""
        return self.state is _IDLE and not self._transport.is_closing()

    def assign(self, call: UpstreamCall, reused: bool) -> None:
        """Send a call's request, and expect its answer."""
        self._call = call
        self._reused = reused
        self._held = b""
        self.heard = False
        self.state = _HEAD
        self._left = self._pool.limits.head_bytes_max
        if len(call.body) < _JOIN_BYTES_MAX:
            self._transport.write(call.head + call.body)
        else:
            self._transport.writelines((call.head, call.body))

    def pass_to(self, write: Callable[[bytes], None]) -> None:
        """Give the present body's further bytes to `write` instead of the sink."""
        self._on_data = write

    def drop(self) -> None:
        """Leave the call, and close at once: the engine shall stop working for it."""
        self._detach()
        self._transport.abort()

    def give_up(self) -> None:
        """Be counted out, once; also when the connection was never made."""
        self.state = _CLOSED
        if self._counted:
            self._counted = False
            self._instance.forget(self)

    def close(self) -> None:
        """Close an unused connection."""
        self.state = _CLOSED
        self._transport.close()

    def pause_reading(self) -> None:
        """Let the kernel, and then the engine, hold what it has to say."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    # The parts of an answer.

    def _read_head(self, data: bytes) -> None:
        """Read interim heads and the final one, and turn to the body."""
        call = self._call
        assert call is not None
        start, most = 0, self._left
        while True:
            stop = data.find(b"\r\n\r\n", start, most) + 4
            if stop < 4:
                data = data[start:]
                if start + len(data) >= most:
                    self._fail(f"heads of more than {self._pool.limits.head_bytes_max} B")
                    return
                if not _is_plausible(data):
                    self._fail("no HTTP/1.x")
                    return
                self._held, self._left = data, most - start
                return
            try:
                head, call.length = self._pool.heads.parse(data[start:stop])
            except HeadError as error:
                self._fail(error.message)
                return
            start = stop
            if head.status >= 200:
                break
        data = data[stop:]
        self._held = b""
        self._expect_body(call, head)
        call.sink.on_response_head(head)
        if self._call is not call:
            return
        if self.state is _LENGTH and not self._left:
            self._complete(call, bool(data))
        elif data:
            self.data_received(data)

    def _expect_body(self, call: UpstreamCall, head: ResponseHead) -> None:
        """Set the state that fits the body which `head` announces (RFC 9112 §6.3)."""
        self._keep_alive = head.keep_alive
        self._on_data = call.sink.on_data
        if call.bodiless or head.status in BODILESS:
            self.state, self._left = _LENGTH, 0
            if head.chunked or call.length:
                self._keep_alive = False
        elif head.chunked:
            self.state, self._scanner = _CHUNKED, ChunkScanner()
        elif call.length is not None:
            self.state, self._left = _LENGTH, call.length
        else:
            self.state = _UNTIL_EOF

    def _scan(self, data: bytes) -> None:
        """Pass on a chunked body's bytes that are not just one chunk."""
        try:
            stop = self._scanner.feed(data)
        except ChunkError as error:
            self._fail(str(error))
            return
        if stop < 0:
            self._pass(data)
        else:
            self._last_data(data, stop)

    def _pass(self, data: bytes) -> None:
        """Count bytes of the body, keep them for now, and pass them on."""
        self._last.append(data)
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            self._trim()
        self._on_data(data)

    def _trim(self) -> None:
        """Keep no more of the body than its tail."""
        self._last = [b"".join(self._last)[-TAIL_BYTES_MAX:]]
        self._body_bytes += _TRIM_EVERY_BYTES - self._room_bytes
        self._room_bytes = _TRIM_EVERY_BYTES

    def _last_data(self, data: bytes, stop: int) -> None:
        """Pass on the body's last bytes, and end the call unless its sink just did."""
        call = self._call
        assert call is not None
        surplus = len(data) > stop
        self._pass(data[:stop] if surplus else data)
        if self._call is call:
            self._complete(call, surplus)

    def _complete(self, call: UpstreamCall, surplus: bool) -> None:
        """End the call, and keep the connection if that is safe."""
        self._detach()
        transport = self._transport
        if self._keep_alive and not surplus and not transport.get_write_buffer_size():
            if call.paused:
                transport.resume_reading()
            self.state = _IDLE
            self._instance.put_aside(self, self._pool.now_s)
        else:
            self.close()
        self._pool.ended(call)

    def _fail(self, problem: str) -> None:
        """Close, and end the call: the answer is not fit to be passed on."""
        call = self._call
        assert call is not None
        self._instance.complain(f"its answer cannot be passed on: {problem}", self._pool.now_s)
        self.drop()
        self._pool.failed(call, ErrorKind.BAD_RESPONSE)

    def _detach(self) -> None:
        """Part from the call, and leave it what is known of its body."""
        call = self._call
        if call is not None:
            self._call = call.connection = None
            if self._last:
                call.tail = b"".join(self._last)[-TAIL_BYTES_MAX:]
                call.body_bytes = self._body_bytes + _TRIM_EVERY_BYTES - self._room_bytes
                self._last = []
                self._body_bytes, self._room_bytes = 0, _TRIM_EVERY_BYTES


def _is_plausible(data: bytes) -> bool:
    """Whether what has come so far can still become an answer's head."""
    if not data.startswith(_RESPONSE_START[: len(data)]):
        return False
    return lines_end_in_crlf(data)
