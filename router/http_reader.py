"""From a client's bytes to whole requests, without I/O.

Theory of operation. Bytes come in by `feed`, requests go out by `next`, one at a time and in order;
what was sent ahead stays in the reader as bytes. Between calls the reader is in one state:

    IDLE   nothing of the next request has come
    HEAD   some of its head has, but no blank line
    BODY   its head is read and sound, its body is not whole

Invariants: an unfinished head never exceeds `header_bytes_max`, a body never `body_bytes_max`
(both raise `HeadError` at once, after which the connection must end, as message boundaries are
lost); what is kept besides is what the caller fed and has not yet asked for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, cast

from router.http_chunks import ChunkError, ChunkScanner
from router.http_head import HeadError, RequestHead, RequestHeads, lines_end_in_crlf

if TYPE_CHECKING:
    from router.limits import ServerLimits


CHUNKS_AT_ONCE: Final = 1024
"""Chunks of a body that are read in one go, about 1 ms: each may be a single byte."""
_PART_BYTES: Final = 8 * 1024


class Awaiting(IntEnum):
    """What of the next request is still missing."""

    IDLE = 0
    HEAD = 1
    BODY = 2


# A member looked up on its enum costs as much as a method call; hot paths use these names.
_IDLE, _HEAD, _BODY = Awaiting


class RequestReader:
    """Cuts one connection's bytes into requests.

    Args:
        limits: see `router.limits`.
        heads: parses heads; shared by all connections, so that it knows most of them already.

    Attributes:
        awaiting: what of the next request is missing; see the module's theory of operation.
        body_bytes: how much of the unfinished body is kept, framing removed.
    """

    __slots__ = ("_body", "_head", "_heads", "_held", "_length", "_limits", "_scanner", "awaiting")

    def __init__(self, limits: ServerLimits, heads: RequestHeads) -> None:
        self._limits = limits
        self._heads = heads
        self._held = b""
        self._head: RequestHead | None = None
        self._length = 0
        self._body = bytearray()
        self._scanner: ChunkScanner | None = None
        self.awaiting = _IDLE

    @property
    def held_bytes(self) -> int:
        """Bytes fed and not yet made into a request or its body."""
        return len(self._held)

    @property
    def body_bytes(self) -> int:
        """Bytes of the unfinished body."""
        return len(self._body)

    @property
    def busy(self) -> bool:
        """Whether `next` returned None although there is more to read: call it again, later."""
        return self._head is not None and bool(self._held)

    @property
    def wants_continue(self) -> bool:
        """Whether the client waits for `100 Continue` and has sent nothing of the body."""
        head = self._head
        return head is not None and head.expect_continue and not self._body

    def feed(self, data: bytes) -> None:
        """Take in the next bytes of the connection."""
        self._held = self._held + data if self._held else data

    def clear(self) -> None:
        """Forget everything: no further request will be read."""
        self._held = b""
        self._head = None
        self._body = bytearray()

    def next(self) -> tuple[RequestHead, bytes] | None:
        """Return the next request with its whole body, or None until more bytes are fed.

        Raises:
            HeadError: what was fed is not a request that may be served; `status` says why.
        """
        head = self._head
        if head is not None:
            return self._finish(head)
        stop = self._end_of_head() if self._held else 0
        if not stop:
            return None
        held = self._held
        head, length = self._heads.parse(held[:stop])
        if length > self._limits.body_bytes_max:
            raise self._too_large()
        end = stop + length
        if not head.chunked and len(held) >= end:  # As nearly always: all in one read.
            self._held = held[end:]
            self.awaiting = _IDLE
            return head, held[stop:end]
        self._held = held[stop:]
        self._head, self._length = head, length
        self._scanner = ChunkScanner() if head.chunked else None
        self.awaiting = _BODY
        return self._finish(head)

    def _end_of_head(self) -> int:
        """Return where the held bytes' first head ends, or 0 if it is not whole.

        Raises:
            HeadError: it is too long, or cannot become a head.
        """
        held, header_bytes_max = self._held, self._limits.header_bytes_max
        if held.startswith(b"\r\n"):
            held = self._held = held[2:]  # RFC 9112 §2.2: an empty line before it is forgiven.
        stop = held.find(b"\r\n\r\n", 0, header_bytes_max)
        if stop >= 0:
            return stop + 4
        if len(held) >= header_bytes_max:
            raise HeadError(431, f"a request's head is limited to {header_bytes_max} B")
        if not lines_end_in_crlf(held):
            raise HeadError(400, "malformed request head: its lines must end in CRLF")
        self.awaiting = _HEAD if held else _IDLE
        return 0

    def _finish(self, head: RequestHead) -> tuple[RequestHead, bytes] | None:
        """Return the request whose head has been read, if its body is whole by now."""
        body = self._rest_of_body()
        if body is None:
            return None
        self._head = None
        self.awaiting = _IDLE
        return head, body

    def _rest_of_body(self) -> bytes | None:
        """Move held bytes into the body; return it once it is whole.

        Raises:
            HeadError: it is too long, or its chunks are malformed.
        """
        if self._scanner is not None:
            return self._rest_of_chunks(self._scanner)
        held = self._held
        missing = self._length - len(self._body)
        if len(held) < missing:
            self._body += held
            self._held = b""
            return None
        self._held = held[missing:]
        return self._take_body(held[:missing])

    def _rest_of_chunks(self, scanner: ChunkScanner) -> bytes | None:
        """The same for a chunked body."""
        content: list[bytes] = []
        held, start, stop = self._held, 0, -1
        try:
            while stop < 0 and start < len(held) and len(content) < CHUNKS_AT_ONCE:
                part = held[start : start + _PART_BYTES]
                stop = scanner.feed(part, content)
                start += len(part) if stop < 0 else stop
        except ChunkError as error:
            raise HeadError(400, f"malformed chunked body: {error}") from None
        data = b"".join(content)
        # What a chunk promises counts at once: nobody need send it to be refused.
        promised = len(self._body) + len(data) + scanner.owed_bytes
        if promised > self._limits.body_bytes_max:
            raise self._too_large()
        self._held = held[start:]
        if stop < 0:
            self._body += data
            return None
        return self._take_body(data)

    def _take_body(self, last: bytes) -> bytes:
        """Return the whole body, and keep none of it.

        One that came in pieces is a bytearray, as they were put together: to copy the largest would
        take 20 ms, and nobody who reads a body needs it to be immutable.
        """
        if not self._body:
            return last
        body, self._body = self._body, bytearray()
        body += last
        return cast("bytes", body)

    def _too_large(self) -> HeadError:
        return HeadError(413, f"a request's body is limited to {self._limits.body_bytes_max} B")
