"""The chunk scanner against a plain decoder, and against everything that is not quite a chunk."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.http_chunks import (
    LINE_BYTES_MAX,
    TRAILER_BYTES_MAX,
    ChunkError,
    ChunkScanner,
    chunk_start,
)

EXTENSIONS = st.sampled_from([b"", b";a", b";a=b", b';a="b c"', b";\xff"])
TRAILERS = st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nEtag:\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Return a chunked body and its content."""
    raw, content = b"", b""
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        size = (b"%x" if draw(st.booleans()) else b"%04X") % len(data)
        raw += size + draw(EXTENSIONS) + b"\r\n" + data + b"\r\n"
        content += data
    return raw + b"0" + draw(EXTENSIONS) + b"\r\n" + draw(TRAILERS) + b"\r\n", content


def pieces_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    """Cut `raw` at the given places (taken modulo its length)."""
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[a:b] for a, b in pairwise(edges)]


@given(bodies(), st.lists(st.integers(0, 10_000), max_size=8), st.binary(max_size=10))
@example((b"0\r\n\r\n", b""), [], b"")
def test_end_is_found_in_any_split(
    body: tuple[bytes, bytes], cuts: list[int], surplus: bytes
) -> None:
    """However a body is cut, its content and its last byte are found, and nothing after it."""
    raw, content = body
    pieces = pieces_of(raw, cuts)
    pieces[-1] += surplus
    counting, decoding = ChunkScanner(), ChunkScanner()
    found: list[bytes] = []
    for piece in pieces[:-1]:
        assert counting.feed(piece) == -1
        assert decoding.feed(piece, found) == -1
    end = len(pieces[-1]) - len(surplus)
    assert counting.feed(pieces[-1]) == end
    assert decoding.feed(pieces[-1], found) == end
    assert b"".join(found) == content


def feed_all(pieces: list[bytes]) -> None:
    """Feed pieces to one scanner."""
    scanner = ChunkScanner()
    for piece in pieces:
        scanner.feed(piece)


BAD = {
    "0x prefix": b"0x3\r\nabc\r\n",
    "sign": b"+3\r\nabc\r\n",
    "underscore": b"1_0\r\n",
    "space before the size": b" 3\r\nabc\r\n",
    "space after the size": b"3 \r\nabc\r\n",
    "no size": b"\r\nabc",
    "no size but an extension": b";a\r\nabc\r\n",
    "not hexadecimal": b"xyz\r\n",
    "bare LF after the size": b"3\nabc\r\n",
    "bare CR after the size": b"3\rabc\r\n",
    "LF hidden in an extension": b"3;a\nb\r\nabc\r\n",
    "NUL in an extension": b"3;\0\r\nabc\r\n",
    "bare LF after the data": b"3\r\nabc\n0\r\n\r\n",
    "chunk longer than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "chunk shorter than its size": b"4\r\nabc\r\n0\r\n\r\n",
    "size of 16 digits": b"0000000000000003\r\nabc\r\n",
    "endless size": b"1" * LINE_BYTES_MAX,
    "endless extension": b"3;" + b"a" * LINE_BYTES_MAX,
    "trailer without a colon": b"0\r\nX\r\n\r\n",
    "folded trailer": b"0\r\nX: y\r\n z\r\n\r\n",
    "bad trailer name": b"0\r\nX y: z\r\n\r\n",
    "NUL in a trailer": b"0\r\nX: \0\r\n\r\n",
    "endless trailers": b"0\r\n" + b"X: y\r\n" * (TRAILER_BYTES_MAX // 6 + 1),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("step", [1, 10_000])
def test_what_is_not_quite_a_chunk_is_refused(raw: bytes, step: int) -> None:
    """Anything that a lenient parser could read differently is an error, whole or byte by byte."""
    pieces = [raw[start : start + step] for start in range(0, len(raw), step)]
    with pytest.raises(ChunkError):
        feed_all(pieces)


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_any_bytes_are_scanned_or_refused(pieces: list[bytes]) -> None:
    """Arbitrary bytes lead to an end, to more being wanted, or to ChunkError: to nothing else."""
    scanner = ChunkScanner()
    for piece in pieces:
        try:
            stop = scanner.feed(piece)
        except ChunkError:
            return
        assert -1 <= stop <= len(piece)
        if stop >= 0:
            return


def test_a_read_of_one_chunk_begins_as_its_length_says():
    """Every size has its own length in full, and lengths between them are no chunk's."""
    sizes = [*range(1, 300), *range(4090, 4100), *range(65_530, 65_540), 2**40]
    starts = {len(b"%x" % size) + size + 4: b"%x\r\n" % size for size in sizes}
    assert len(starts) == len(sizes)
    for length, start in starts.items():
        assert chunk_start(length) == start
    for length in (0, 1, 5, 21, 262, 4103):  # too short, or between f and 10, ff and 100 …
        assert chunk_start(length) == b"\r\n"
