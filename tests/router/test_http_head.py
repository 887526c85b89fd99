"""Heads that may be served, and the many that may not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.http_head import (
    REMEMBERED_BYTES_MAX,
    REMEMBERED_MAX,
    HeadError,
    RequestHead,
    RequestHeads,
    ResponseHeads,
    parse_request_head,
    parse_response_head,
)

HOST = b"Host: t\r\n"


def post(*lines: bytes) -> bytes:
    """Return the head of a POST with the given header lines."""
    return (
        b"POST /p HTTP/1.1\r\nHost: t\r\n" + b"".join(b"%b\r\n" % line for line in lines) + b"\r\n"
    )


def head_of(raw: bytes) -> RequestHead:
    """Return a parsed request head."""
    return parse_request_head(raw)[0]


def test_request_head_is_read() -> None:
    """Method, target and headers come out, names in lower case, the last repeat winning."""
    raw = b"GET /a?b=c HTTP/1.1\r\nHost: t\r\nX-A:  1 \r\nx-a:2\r\nY:\r\n\r\n"
    head, length = parse_request_head(raw)
    assert (head.method, head.target, head.http11) == (b"GET", b"/a?b=c", True)
    assert head.headers == [(b"host", b"t"), (b"x-a", b"1"), (b"x-a", b"2"), (b"y", b"")]
    assert head.fields == {b"host": b"t", b"x-a": b"2", b"y": b""}
    assert (head.keep_alive, head.chunked, length) == (True, False, 0)


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
    assert head_of(raw).keep_alive is keep_alive


def test_body_lengths_are_read() -> None:
    """A body is chunked, or as long as Content-Length says; Expect is noted."""
    assert parse_request_head(post(b"Content-Length: 007 "))[1] == 7
    assert head_of(post(b"Transfer-Encoding: Chunked")).chunked
    assert head_of(post(b"Content-Length: 1", b"Expect: 100-Continue")).expect_continue
    assert not head_of(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\n\r\n").expect_continue
    assert head_of(b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n").target == b"*"


@pytest.mark.parametrize(
    "upgrade",
    [
        b"GET / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        post(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Content-Length: 3"),
    ],
)
def test_upgrades_are_declined_by_ignoring_them(upgrade: bytes) -> None:
    """A request that offers an upgrade is an ordinary request, and the offer ends here."""
    head = head_of(upgrade)
    assert head.keep_alive
    assert b"pgrade" not in head.forwarded
    assert b"Settings" not in head.forwarded


REFUSED = {
    "absolute-form": (400, b"GET http://t/ HTTP/1.1\r\nHost: t\r\n\r\n"),
    "authority-form": (400, b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n"),
    "CONNECT to a path": (501, b"CONNECT /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"),
    "TRACE": (501, b"TRACE /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"),
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
    "two codings": (400, post(b"Transfer-Encoding: x", b"Transfer-Encoding: chunked")),
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
    assert len(head_of(post(*[b"X: y"] * 127)).headers) == 128


def test_what_is_passed_on() -> None:
    """Lines go on as they came, but for the fixed ones that end here and the nominated ones."""
    sent = [b"A: 1", b"Connection: X-One, close", b"X-One: x", b"TE: t", b"b:2", b"Keep-Alive: 5"]
    sent += [b"Connection:x-two", b"X-TWO: x", b"Proxy-Authorization: x", b"Expect: 100-continue"]
    sent += [b"X-Request-Id: 7", b"X-Three: Connection: x", b"Teapot: t", b"Content-Length: 3"]
    head = head_of(post(*sent))
    assert head.forwarded == (
        b"POST /p HTTP/1.1\r\nA: 1\r\nb: 2\r\nX-Three: Connection: x\r\nTeapot: t\r\n"
    )
    assert not head.keep_alive


@st.composite
def header_lines(draw: st.DrawFn) -> list[tuple[bytes, bytes, bytes]]:
    """Return header lines as (name, blanks and value, value)."""
    names = st.text("abcXYZ-!#$%&'*+.^_`|~019", min_size=1, max_size=6).map(str.encode)
    names |= st.sampled_from([b"TE", b"Upgrade", b"Keep-Alive", b"x-te", b"Teapot"])
    inner = st.text("".join(map(chr, range(0x21, 0x7F))) + "\xff :\t", max_size=8)
    blanks = st.sampled_from([b"", b" ", b" \t"])
    lines = []
    for name in draw(st.lists(names, max_size=8)):
        value = draw(inner).strip().encode("latin-1")
        lines.append((name, draw(blanks) + value + draw(blanks), value))
    return lines


@given(header_lines())
def test_headers_agree_with_a_plain_reading(lines: list[tuple[bytes, bytes, bytes]]) -> None:
    """Names, values and what is passed on are those that a line-by-line reading finds."""
    raw = b"GET / HTTP/1.1\r\nHost: t\r\n"
    raw += b"".join(b"%b:%b\r\n" % (name, text) for name, text, _ in lines) + b"\r\n"
    head = head_of(raw)
    plain = [(name.lower(), value) for name, _, value in lines]
    assert head.headers[1:] == plain
    assert head.fields == {b"host": b"t", **dict(plain)}
    ending = {b"te", b"upgrade", b"keep-alive"}
    kept = [b"%b: %b\r\n" % (name, value) for name, _, value in lines if name.lower() not in ending]
    assert head.forwarded == b"GET / HTTP/1.1\r\n" + b"".join(kept)


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
        (response(b"Content-Length: 0", start=b"HTTP/1.1 404"), False, 0, True),
    ],
)
def test_response_framing_is_read(
    raw: bytes, chunked: bool, length: int | None, keep_alive: bool
) -> None:
    """A response says how its body ends, and whether the connection goes on."""
    head, found = parse_response_head(raw)
    assert (head.chunked, found, head.keep_alive) == (chunked, length, keep_alive)
    start = b"HTTP/1.1 404 \r\n" if head.status == 404 else b"HTTP/1.1 200 OK\r\n"
    assert head.forwarded.startswith(start)


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
            assert head_of(start + raw).method
    for start in (b"", b"HTTP/1.1 200 OK\r\n"):
        with suppress(HeadError):
            assert parse_response_head(start + raw)[0].status


LENGTHS = [b"0", b"5", b"007", b"12", b"", b"+5", b"5,5", b" 5", b"5 ", b"x", b"1" * 18, b"1" * 19]
LINES = [b"Host: t", b"Host: u", b"X: y", b"x-request-id: 7", b"Connection: close"]
LINES += [b"%b %b" % (name, digits) for digits in LENGTHS for name in (b"Content-Length:", b"A:")]
LINES += [b"content-length: %b" % digits for digits in LENGTHS[:6]]
LINES += [b"CONTENT-LENGTH: 4", b"Content-Length:3", b"Transfer-Encoding: chunked"]


def outcome(parse: Callable[[bytes], object], raw: bytes) -> object:
    """Return what parsing comes to, be it a head or an error."""
    try:
        return parse(raw)
    except HeadError as error:
        return error.status, error.message


@given(st.lists(st.lists(st.sampled_from(LINES), max_size=4), min_size=1, max_size=12))
@example([[b"Content-Length: 5", b"Host: t"], [b"Content-Length: ", b"Host: t"]])
@example([[b"content-length: 5", b"Host: t"], [b"content-length: 5", b"Content-Length: 6"]])
def test_remembering_changes_nothing(heads: list[list[bytes]]) -> None:
    """Whatever was parsed before, a head is parsed to what it is parsed to from nothing."""
    requests, responses = RequestHeads(), ResponseHeads()
    for lines in heads * 2:
        rest = b"".join(b"%b\r\n" % line for line in lines) + b"\r\n"
        for start in (b"POST /a HTTP/1.1\r\n", b"POST /a HTTP/1.0\r\n"):
            raw = start + rest
            assert outcome(requests.parse, raw) == outcome(parse_request_head, raw)
        raw = b"HTTP/1.1 200 OK\r\n" + rest
        assert outcome(responses.parse, raw) == outcome(parse_response_head, raw)


def test_heads_are_remembered_but_for_their_length() -> None:
    """The same lines with another length give the same head, which is not parsed again."""
    requests, responses = RequestHeads(), ResponseHeads()
    first, _ = requests.parse(post(b"Content-Length: 5", b"X: y"))
    again, length = requests.parse(post(b"Content-Length: 12345", b"X: y"))
    assert first is again
    assert length == 12345
    answers = [responses.parse(response(b"content-length: %d" % size)) for size in range(3)]
    assert [size for _, size in answers] == [0, 1, 2]
    assert answers[0][0] is answers[1][0] is answers[2][0]


def test_remembered_heads_are_bounded() -> None:
    """Neither many different heads nor large ones pile up."""
    requests = RequestHeads()
    for number in range(2 * REMEMBERED_MAX):
        requests.parse(post(b"X: %d" % number))
        assert len(requests._known) <= REMEMBERED_MAX
    large = RequestHeads()
    large.parse(post(b"X: " + b"y" * REMEMBERED_BYTES_MAX))
    assert not large._known
