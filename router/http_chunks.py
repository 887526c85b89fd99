"""Finding the end of a chunked body without rewriting it (RFC 9112 §7.1).

Theory of operation. A scanner is fed the raw bytes as they come, in any split, and answers one
question: has the body ended, and where? It keeps a state, the data bytes still owed by the current
chunk, and, when a read ends inside a size line, a line break or a trailer, that unfinished piece:

    state     reads                                     then
    SIZE      1*15HEX [;extension] CRLF                 DATA, or TRAILER when the size is 0
    DATA      exactly that many bytes                   BREAK
    BREAK     CRLF                                      SIZE
    TRAILER   lines up to an empty one                  DONE

Invariants: what is kept is at most one line (`LINE_BYTES_MAX`) or the trailers
(`TRAILER_BYTES_MAX`); a size never exceeds 15 hex digits; no byte after DONE is consumed. Anything
that a lenient parser might read otherwise (bare LF, spaces, `0x`, signs) is an error.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

LINE_BYTES_MAX: Final = 256
TRAILER_BYTES_MAX: Final = 8192

# An extension holds no control characters: a CR or LF hidden in one is a smuggling vector.
_match_size_line: Final = re.compile(
    rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]{0,200})?\r\n"
).match
_SIZE_LINE_PREFIX: Final = re.compile(
    rb"(?:[0-9A-Fa-f]{1,15}(?:;[\t\x20-\x7e\x80-\xff]{0,200})?\r?)?"
)
_TRAILER: Final = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")

_PLAIN_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,15}")
_PLAIN_SIZE_LINE_BYTES_MAX: Final = 17

_SIZE, _DATA, _BREAK, _TRAILERS, _DONE = range(5)


class ChunkError(Exception):
    """The bytes are not a chunked body."""


class ChunkScanner:
    """Follows one chunked body to its end.

    Attributes:
        between: no chunk has begun that is not complete; so a read that is exactly one chunk, as
            nearly every read of a stream is, need not be fed (see `chunk_start`).
    """

    __slots__ = ("_kept", "_left", "_state", "between")

    def __init__(self) -> None:
        self._state = _SIZE
        self._left = 0
        self._kept = b""
        self.between = True

    @property
    def owed_bytes(self) -> int:
        """Data bytes that the chunk which has begun still lacks."""
        return self._left

    def feed(self, data: bytes, content: list[bytes] | None = None) -> int:
        """Follow the body through `data`; O(chunks), not O(bytes).

        Args:
            data: the next raw bytes of the body.
            content: when given, the chunks' data is appended to it, framing left out.

        Returns:
            The offset in `data` just past the body's last byte, or -1 if the body goes on.

        Raises:
            ChunkError: the bytes are not a chunked body; the scanner is of no further use.
        """
        pos = 0
        if self.between and content is None:
            pos = _past_plain_chunks(data)
            if pos == len(data):
                return -1
        stop = self._follow(data, pos, content)
        self.between = self._state == _SIZE and not self._kept
        return stop

    def _follow(self, data: bytes, pos: int, content: list[bytes] | None) -> int:
        """Follow the body through `data` from `pos` on, whatever there is in it; see `feed`."""
        kept = len(self._kept)
        if kept:
            data = self._kept + data
            self._kept = b""
        end = len(data)
        while True:
            if self._state == _DATA:
                taken = min(self._left, end - pos)
                if content is not None:
                    content.append(data[pos : pos + taken])
                pos += taken
                self._left -= taken
                if self._left:
                    return -1
                self._state = _BREAK
            if self._state == _BREAK:
                if end - pos < 2:
                    return self._keep(data[pos:], b"\r\n".startswith(data[pos:]))
                if data[pos : pos + 2] != b"\r\n":
                    raise ChunkError("a chunk is longer than its size says")
                pos += 2
                self._state = _SIZE
            if self._state == _TRAILERS:
                done = self._end_of_trailers(data, pos)
                return done if done < 0 else done - kept
            line = _match_size_line(data, pos)
            if line is None:
                rest = data[pos : pos + LINE_BYTES_MAX]
                return self._keep(rest, _SIZE_LINE_PREFIX.fullmatch(rest) is not None)
            pos = line.end()
            self._left = int(line[1], 16)
            self._state = _DATA if self._left else _TRAILERS

    def _keep(self, rest: bytes, plausible: bool) -> int:
        """Keep an unfinished line for the next read, if it can still become a valid one.

        Raises:
            ChunkError: it cannot.
        """
        if not plausible:
            raise ChunkError("malformed chunk framing")
        self._kept = rest
        return -1

    def _end_of_trailers(self, data: bytes, pos: int) -> int:
        """Return the offset past the blank line that ends the trailers, or -1.

        Raises:
            ChunkError: malformed or oversized trailers.
        """
        if data.startswith(b"\r\n", pos):
            stop = pos + 2
        else:
            blank = data.find(b"\r\n\r\n", pos, pos + TRAILER_BYTES_MAX)
            if blank < 0:
                return self._keep(data[pos:], len(data) - pos < TRAILER_BYTES_MAX)
            stop = blank + 4
            if _TRAILER.fullmatch(data, pos, stop) is None:
                raise ChunkError("malformed trailers")
        self._state = _DONE
        return stop


def _past_plain_chunks(data: bytes) -> int:
    """Return where the first of the chunks that `data` begins with is not whole and plain.

    A read that lags behind an engine has many: they are passed without a pattern.
    """
    pos, end = 0, len(data)
    while True:
        line_end = data.find(b"\r\n", pos, pos + _PLAIN_SIZE_LINE_BYTES_MAX)
        size = _plain_size(data[pos:line_end]) if line_end > 0 else 0
        stop = line_end + size + 4
        if not size or stop > end or not data.startswith(b"\r\n", stop - 2):
            return pos
        pos = stop


@lru_cache(4096)
def _plain_size(line: bytes) -> int:
    """Return the size that a size line without extension says, 0 if it is not one."""
    return int(line, 16) if _PLAIN_SIZE.fullmatch(line) else 0


@lru_cache(4096)
def chunk_start(length: int) -> bytes:
    """Return what a read of `length` bytes begins with if it is one chunk, as servers write them.

    That is a size line without extension, in lower case; of no length there are two that fit. Where
    there is none, a chunk begins in no way: what is returned no chunk begins with.
    """
    for digits in range(1, 16):
        line = b"%x\r\n" % max(length - digits - 4, 0)
        if len(line) == digits + 2 and not line.startswith(b"0"):
            return line
    return b"\r\n"
