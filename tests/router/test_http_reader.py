"""The request reader: any split gives the same requests, and no limit can be passed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http_head import HeadError, RequestHeads
from router.http_reader import CHUNKS_AT_ONCE, Awaiting, RequestReader
from router.limits import ServerLimits

LIMITS = ServerLimits(header_bytes_max=200, body_bytes_max=100)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Return a request as bytes, its target and its body."""
    target = b"/" + draw(st.text("abc?=/%", max_size=8)).encode()
    body = draw(st.binary(max_size=60))
    framing = draw(st.sampled_from(["length", "chunked", "none"]))
    if framing == "length":
        rest = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "chunked":
        half = len(body) // 2
        parts = [part for part in (body[:half], body[half:]) if part]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        rest = b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunks
    else:
        rest, body = b"\r\n", b""
    empty_line = draw(st.sampled_from([b"", b"\r\n"]))
    return b"%bPOST %b HTTP/1.1\r\nHost: t\r\n%b" % (empty_line, target, rest), target, body


def read(reader: RequestReader) -> list[tuple[bytes, bytes]]:
    """Take every whole request out of a reader."""
    found = []
    while (request := reader.next()) is not None:
        found.append((request[0].target, request[1]))
    return found


@given(st.lists(requests(), max_size=4), st.lists(st.integers(0, 10_000), max_size=10))
def test_requests_are_the_same_in_any_split(
    sent: list[tuple[bytes, bytes, bytes]], cuts: list[int]
) -> None:
    """However a connection's bytes are cut, the same requests come out, in order."""
    raw = b"".join(each[0] for each in sent)
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    reader = RequestReader(LIMITS, RequestHeads())
    found = []
    for start, stop in pairwise(edges):
        reader.feed(raw[start:stop])
        found += read(reader)
    assert found == [(target, body) for _, target, body in sent]
    assert (reader.awaiting, reader.held_bytes, reader.body_bytes) == (Awaiting.IDLE, 0, 0)


def test_what_is_missing_is_known() -> None:
    """The reader tells idle from an unfinished head from an unfinished body."""
    reader = RequestReader(LIMITS, RequestHeads())
    for data, awaiting in (
        (b"\r\n", Awaiting.IDLE),
        (b"POST / HTTP/1.1\r\nHost: t\r\n", Awaiting.HEAD),
        (b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", Awaiting.BODY),
    ):
        reader.feed(data)
        assert reader.next() is None
        assert reader.awaiting == awaiting
    assert reader.wants_continue
    reader.feed(b"ab")
    assert reader.next() is None
    assert not reader.wants_continue
    assert reader.body_bytes == 2
    reader.feed(b"c")
    assert read(reader) == [(b"/", b"abc")]


@pytest.mark.parametrize(
    "part", [b"GET / HTTP/1.1\nHost: t\n\n", b"\x16\x03\x01\0\xa5\1\0", b"GET / HTTP/1.1\r\nX: y\n"]
)
def test_what_cannot_become_a_head_is_not_waited_for(part: bytes) -> None:
    """Lines that end in LF alone, or another protocol's bytes, are refused at once."""
    reader = RequestReader(LIMITS, RequestHeads())
    reader.feed(part)
    with pytest.raises(HeadError) as caught:
        reader.next()
    assert (caught.value.status, "CRLF" in caught.value.message) == (400, True)


def read_in_steps(raw: bytes, step: int) -> list[tuple[bytes, bytes]] | int:
    """Feed `raw` in steps; return the requests that came out, or the status of the refusal."""
    reader = RequestReader(LIMITS, RequestHeads())
    found = []
    try:
        for start in range(0, len(raw), step):
            reader.feed(raw[start : start + step])
            found += read(reader)
    except HeadError as error:
        return error.status
    return found


def test_a_chunk_that_is_promised_too_large_is_not_waited_for() -> None:
    """Its size line is enough, alone or with what came before; at the limit it is read."""
    head = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    for raw in (b"FFFFFFFFFFFFFFF\r\n", b"65\r\n", b"32\r\n" + b"x" * 50 + b"\r\n33\r\n"):
        assert read_in_steps(head + raw, 1000) == 413
        assert read_in_steps(head + raw, 1) == 413
    whole = b"32\r\n" + b"x" * 50 + b"\r\n"
    assert read_in_steps(head + 2 * whole + b"0\r\n\r\n", 1) == [(b"/", b"x" * 100)]


def test_small_chunks_are_read_a_bounded_number_at_a_time() -> None:
    """The rest waits, and the reader says so."""
    reader = RequestReader(ServerLimits(), RequestHeads())
    count = 2 * CHUNKS_AT_ONCE + 10
    reader.feed(b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
    reader.feed(b"1\r\na\r\n" * count + b"0\r\n\r\n")
    turns, found = 0, None
    while found is None:
        turns += 1
        found = reader.next()
        assert found is not None or reader.busy
    assert found[1] == b"a" * count
    assert 2 <= turns <= 3
    assert not reader.busy


def padded(head_bytes: int) -> bytes:
    """Return a request head of exactly so many bytes."""
    head = b"GET / HTTP/1.1\r\nHost: t\r\nX: %b\r\n\r\n"
    return head % (b"a" * (head_bytes - len(head) + 2))


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_head_limit(step: int) -> None:
    """A head of exactly the limit passes, one byte more is refused, whether or not it ends."""
    assert read_in_steps(padded(200), step) == [(b"/", b"")]
    assert read_in_steps(padded(201), step) == 431
    assert read_in_steps(b"GET /" + b"a" * 500, step) == 431


def chunked(sizes: list[int]) -> bytes:
    """Return a request whose body comes in chunks of the given sizes."""
    body = b"".join(b"%x\r\n%b\r\n" % (size, b"a" * size) for size in sizes)
    return b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + body


def with_length(size: int) -> bytes:
    """Return a request with a body of the given size, by Content-Length."""
    return b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % size + b"a" * size


@pytest.mark.parametrize(
    ("raw", "good"),
    [
        (with_length(100), True),
        (with_length(101), False),
        (chunked([50, 50]) + b"0\r\n\r\n", True),
        (chunked([50, 51]), False),
        (chunked([1] * 101), False),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_body_limit(raw: bytes, good: bool, step: int) -> None:
    """A body of exactly the limit passes, one byte more is refused before it has all come."""
    assert read_in_steps(raw, step) == ([(b"/", b"a" * 100)] if good else 413)


def test_malformed_chunks_are_a_bad_request() -> None:
    """Chunk framing that cannot be trusted is answered with 400."""
    reader = RequestReader(LIMITS, RequestHeads())
    reader.feed(chunked([3]) + b"zz\r\n")
    with pytest.raises(HeadError) as caught:
        reader.next()
    assert caught.value.status == 400


def test_cleared_reader_holds_nothing() -> None:
    """After `clear` neither bytes nor a half-read body are kept."""
    reader = RequestReader(LIMITS, RequestHeads())
    reader.feed(with_length(50)[:-10])
    assert reader.next() is None
    reader.clear()
    assert (reader.held_bytes, reader.body_bytes, reader.next()) == (0, 0, None)
