"""Heads that may be served, and the many that may not."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http_head import (
    HeadError,
    hop_by_hop,
    parse_request_head,
    parse_response_head,
)

HOST = b"Host: t\r\n"


def post(*lines: bytes) -> bytes:
    """Return the head of a POST with the given header lines."""
    return (
        b"POST /p HTTP/1.1\r\nHost: t\r\n" + b"".join(b"%b\r\n" % line for line in lines) + b"\r\n"
    )


def test_request_head_is_read() -> None:
    """Method, target and headers come out as sent, names in lower case, the last repeat winning."""
    head = parse_request_head(b"GET /a?b=c HTTP/1.1\r\nHost: t\r\nX-A: 1\r\nx-a:  2 \r\n\r\n")
    assert (head.method, head.target, head.http11) == (b"GET", b"/a?b=c", True)
    assert [name for name, _ in head.headers] == [b"host", b"x-a", b"x-a"]
    assert head.fields[b"x-a"].strip() == b"2"
    assert (head.keep_alive, head.chunked, head.content_length) == (True, False, 0)


@pytest.mark.parametrize(
    ("raw", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\nHost: t\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: t\r\nConnection: x , CLOSE\r\n\r\n", False),
        (
            b"GET / HTTP/1.1\r\nHost: t\r\nConnection: close\r\nConnection: keep-alive\r\n\r\n",
            False,
        ),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", True),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive, close\r\n\r\n", False),
    ],
)
def test_keep_alive_follows_version_and_connection(raw: bytes, keep_alive: bool) -> None:
    """HTTP/1.1 stays open unless told otherwise, HTTP/1.0 closes unless told otherwise."""
    assert parse_request_head(raw).keep_alive is keep_alive


def test_body_lengths_are_read() -> None:
    """A body is chunked, or as long as Content-Length says; Expect is noted if there is a body."""
    assert parse_request_head(post(b"Content-Length: 007 ")).content_length == 7
    assert parse_request_head(post(b"Transfer-Encoding: Chunked")).chunked
    expecting = parse_request_head(post(b"Content-Length: 1", b"Expect: 100-Continue"))
    assert expecting.expect_continue
    assert not parse_request_head(post(b"Expect: 100-continue")).expect_continue
    assert parse_request_head(b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n").target == b"*"


@pytest.mark.parametrize(
    "upgrade",
    [
        b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Content-Length: 3"),
    ],
)
def test_upgrades_are_declined_by_ignoring_them(upgrade: bytes) -> None:
    """A request that offers an upgrade is an ordinary request, and the offer ends here."""
    head = parse_request_head(upgrade)
    assert head.keep_alive
    assert {b"upgrade", b"http2-settings", b"connection"} <= hop_by_hop(head)


REFUSED = {
    "absolute-form": (400, b"GET http://t/ HTTP/1.1\r\nHost: t\r\n\r\n"),
    "authority-form": (400, b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n"),
    "asterisk without OPTIONS": (400, b"GET * HTTP/1.1\r\nHost: t\r\n\r\n"),
    "fragment": (400, b"GET /a#b HTTP/1.1\r\nHost: t\r\n\r\n"),
    "control in the target": (400, b"GET /\x01 HTTP/1.1\r\nHost: t\r\n\r\n"),
    "tab in the target": (400, b"GET /a\tb HTTP/1.1\r\nHost: t\r\n\r\n"),
    "8-bit target": (400, b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n"),
    "two spaces": (400, b"GET  / HTTP/1.1\r\nHost: t\r\n\r\n"),
    "trailing space": (400, b"GET / HTTP/1.1 \r\nHost: t\r\n\r\n"),
    "leading space": (400, b" GET / HTTP/1.1\r\nHost: t\r\n\r\n"),
    "lower-case method": (400, b"get / HTTP/1.1\r\nHost: t\r\n\r\n"),
    "unknown method": (400, b"BREW / HTTP/1.1\r\nHost: t\r\n\r\n"),
    "HTTP/0.9": (400, b"GET /\r\n\r\n"),
    "HTTP/1.2": (400, b"GET / HTTP/1.2\r\nHost: t\r\n\r\n"),
    "HTTP/2.0": (505, b"GET / HTTP/2.0\r\nHost: t\r\n\r\n"),
    "HTTP/2 preface": (505, b"PRI * HTTP/2.0\r\n\r\n"),
    "another protocol": (400, b"GET / RTSP/1.0\r\nHost: t\r\n\r\n"),
    "empty": (400, b"\r\n\r\n"),
    "bare LF in the request line": (400, b"GET / HTTP/1.1\nHost: t\r\n\r\n"),
    "bare LF after a header": (400, b"GET / HTTP/1.1\r\nHost: t\n\r\n\r\n"),
    "bare CR in a header": (400, b"GET / HTTP/1.1\r\nHost: t\rX: y\r\n\r\n"),
    "no Host": (400, b"GET / HTTP/1.1\r\n\r\n"),
    "two Hosts": (400, b"GET / HTTP/1.1\r\nHost: t\r\nHost: t\r\n\r\n"),
    "folded header": (400, post(b"X: a", b" b")),
    "header without a colon": (400, post(b"X")),
    "header without a name": (400, post(b": x")),
    "space before the colon": (400, post(b"Content-Length : 3")),
    "bad character in a name": (400, post(b"X(: y")),
    "NUL in a value": (400, post(b"X: a\0b")),
    "control in a value": (400, post(b"X: a\x01b")),
    "both lengths": (400, post(b"Content-Length: 3", b"Transfer-Encoding: chunked")),
    "both lengths, turned": (400, post(b"Transfer-Encoding: chunked", b"Content-Length: 3")),
    "two equal lengths": (400, post(b"Content-Length: 3", b"Content-Length: 3")),
    "two lengths": (400, post(b"Content-Length: 3", b"Content-Length: 4")),
    "list of lengths": (400, post(b"Content-Length: 3, 3")),
    "signed length": (400, post(b"Content-Length: +3")),
    "negative length": (400, post(b"Content-Length: -3")),
    "hexadecimal length": (400, post(b"Content-Length: 0x3")),
    "empty length": (400, post(b"Content-Length:")),
    "length of 19 digits": (400, post(b"Content-Length: 1000000000000000000")),
    "chunked in HTTP/1.0": (400, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "unknown coding": (400, post(b"Transfer-Encoding: xchunked")),
    "identity": (400, post(b"Transfer-Encoding: identity")),
    "chunked twice": (400, post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "chunked, then more": (400, post(b"Transfer-Encoding: chunked, gzip")),
    "gzip, chunked": (501, post(b"Transfer-Encoding: gzip, chunked")),
    "vertical tab in a coding": (400, post(b"Transfer-Encoding: \x0bchunked")),
    "unknown expectation": (417, post(b"Content-Length: 1", b"Expect: magic")),
    "129 headers": (431, post(*[b"X: y"] * 128)),
}


@pytest.mark.parametrize(("status", "raw"), REFUSED.values(), ids=REFUSED.keys())
def test_doubtful_requests_are_refused(status: int, raw: bytes) -> None:
    """Whatever two servers might read differently is refused, with the status that says why."""
    with pytest.raises(HeadError) as caught:
        parse_request_head(raw)
    assert caught.value.status == status
    assert caught.value.message


def test_as_many_headers_as_allowed() -> None:
    """The limit on header lines is met exactly: that many pass."""
    assert len(parse_request_head(post(*[b"X: y"] * 127)).headers) == 128


def test_hop_by_hop_includes_what_connection_nominates() -> None:
    """Names listed in any Connection line end at this hop, with the fixed ones."""
    head = parse_request_head(post(b"Connection: X-One, close", b"Connection:x-two"))
    assert {b"x-one", b"x-two", b"te", b"upgrade"} <= hop_by_hop(head)
    assert b"x-three" not in hop_by_hop(head)


def response(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    """Return a response head."""
    return b"\r\n".join((start, *lines, b"", b""))


@pytest.mark.parametrize(
    ("raw", "chunked", "length", "keep_alive"),
    [
        (response(b"Content-Length: 5"), False, 5, True),
        (response(b"Transfer-Encoding: chunked"), True, None, True),
        (response(b"Transfer-Encoding: chunked", b"Connection: close"), True, None, False),
        (response(b"X: y"), False, None, True),
        (response(b"Content-Length: 5", start=b"HTTP/1.0 200 OK"), False, 5, False),
        (response(b"Connection: keep-alive", start=b"HTTP/1.0 200 OK"), False, None, True),
        (response(b"Content-Length: 0", start=b"HTTP/1.1 404 "), False, 0, True),
    ],
)
def test_response_framing_is_read(
    raw: bytes, chunked: bool, length: int | None, keep_alive: bool
) -> None:
    """A response says how its body ends, and whether the connection goes on."""
    head = parse_response_head(raw)
    assert (head.chunked, head.content_length, head.keep_alive) == (chunked, length, keep_alive)


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"garbage\r\n\r\n",
        response(start=b"HTTP/2.0 200 OK"),
        response(start=b"HTTP/1.1 20 OK"),
        response(start=b"HTTP/1.1 2000 OK"),
        response(b"Content-Length: 1", b"Content-Length: 1"),
        response(b"Content-Length: 1", b"Transfer-Encoding: chunked"),
        response(b"Content-Length: -1"),
        response(b"Transfer-Encoding: gzip"),
        response(b"Transfer-Encoding: gzip, chunked"),
        response(b"Transfer-Encoding: chunked", start=b"HTTP/1.0 200 OK"),
        response(b"X: a\0"),
        response(b"X : a"),
        response(b"X: a", b" b"),
        response(b"Upgrade: h2c", b"Connection: Upgrade", start=b"HTTP/1.1 101 Switching"),
    ],
)
def test_doubtful_responses_are_refused(raw: bytes) -> None:
    """A response that cannot be passed on safely is an error."""
    with pytest.raises(HeadError):
        parse_response_head(raw)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_an_error(junk: bytes) -> None:
    """Arbitrary bytes before a blank line give a head or HeadError, and nothing else."""
    raw = junk.replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    for start in (b"", b"GET / HTTP/1.1\r\n"):
        with suppress(HeadError):
            assert parse_request_head(start + raw).method
    for start in (b"", b"HTTP/1.1 200 OK\r\n"):
        with suppress(HeadError):
            assert parse_response_head(start + raw).status
