r"""Strict parsing of HTTP/1.x heads, requests and responses alike; the only user of httptools.

A head is given whole, first byte to blank line, by whoever found `\r\n\r\n`. llhttp (inside
httptools) checks the grammar; what it tolerates and a proxy must not is refused here, since any
disagreement with the next hop about where a message ends is a smuggling hole: HTTP/0.9 and 2.0,
absolute-form and authority-form targets, double spaces, transfer codings other than `chunked`,
chunked bodies in HTTP/1.0, a missing or repeated Host. Upgrades are never accepted: as RFC 9110
§7.8 allows, the request is served as HTTP/1.1 and the header is dropped.
"""

from __future__ import annotations

from typing import Final

import httptools

Headers = list[tuple[bytes, bytes]]

# RFC 9110 §7.6.1, and what HTTP/1.1 proxies have learnt to add.
HOP_BY_HOP: Final[frozenset[bytes]] = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)


class HeadError(Exception):
    """A head that must not be acted upon.

    Attributes:
        status: what to answer with, when the head was a client's.
        message: what is wrong with it, for a person.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class RequestHead:
    """One request's head, parsed and found sound.

    Attributes:
        method: upper case, as sent.
        target: origin-form (`/path?query`), or `*` for OPTIONS.
        headers: every line in order, names in lower case, values as sent.
        fields: the same as a mapping; of a repeated name, the last value.
        http11: False for HTTP/1.0.
        keep_alive: whether the client expects the connection to stay open.
        chunked: whether the body is chunked; else it has `content_length` bytes.
        content_length: 0 when the head declares no body.
        expect_continue: the client waits for `100 Continue` before it sends the body.
    """

    __slots__ = (
        "chunked",
        "content_length",
        "expect_continue",
        "fields",
        "headers",
        "http11",
        "keep_alive",
        "method",
        "target",
    )

    def __init__(self, method: bytes, target: bytes, headers: Headers, http11: bool) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.fields = dict(headers)
        self.http11 = http11
        self.keep_alive = http11
        self.chunked = False
        self.content_length = 0
        self.expect_continue = False


class ResponseHead:
    """One response's head, parsed and found sound.

    Attributes:
        status: three digits.
        reason: the reason phrase, perhaps empty.
        headers: every line in order, names in lower case, values as sent.
        fields: the same as a mapping; of a repeated name, the last value.
        keep_alive: whether the connection may carry another request afterwards.
        chunked: whether the body is chunked; else it has `content_length` bytes.
        content_length: None when only the connection's end ends the body.
    """

    __slots__ = ("chunked", "content_length", "fields", "headers", "keep_alive", "reason", "status")

    def __init__(self, status: int, reason: bytes, headers: Headers) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.fields = dict(headers)
        self.keep_alive = True
        self.chunked = False
        self.content_length: int | None = None


class _RequestCollector:
    """Receives httptools' callbacks for one request head."""

    __slots__ = ("headers", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: Headers = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


class _ResponseCollector:
    """Receives httptools' callbacks for one response head."""

    __slots__ = ("headers", "reason")

    def __init__(self) -> None:
        self.reason = b""
        self.headers: Headers = []

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def parse_request_head(raw: bytes, headers_max: int = 128) -> RequestHead:
    """Parse a request's head, refusing whatever two servers could read in two ways.

    Args:
        raw: the head with its blank line, nothing after it.
        headers_max: header lines allowed.

    Raises:
        HeadError: with the status to answer: 400, 431, 501 or 505.

    Source: RFC 9112 §3 (request line), §6.3 (length), §11.2 (smuggling).
    """
    seen = _RequestCollector()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # An offered upgrade is declined by going on in HTTP/1.1.
    except httptools.HttpParserError as error:
        raise HeadError(400, f"malformed request head: {error}") from None
    method, target = parser.get_method(), seen.url
    line = raw[: raw.index(b"\r\n")]
    http11 = line.endswith(b"1")
    if line != b"%b %b HTTP/1.%d" % (method, target, http11):
        raise _bad_request_line(line)
    if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
        raise HeadError(400, "the request target must be a path that starts with '/'")
    if b"#" in target:
        raise HeadError(400, "the request target must not carry a fragment")
    if len(seen.headers) > headers_max:
        raise HeadError(431, f"more than {headers_max} header lines")
    head = RequestHead(method, target, seen.headers, http11)
    _read_request_fields(head)
    return head


def _bad_request_line(line: bytes) -> HeadError:
    """Say what is wrong with a request line that llhttp let pass."""
    version = line.rpartition(b" ")[2]
    if version.startswith(b"HTTP/") and version not in (b"HTTP/1.0", b"HTTP/1.1"):
        return HeadError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    return HeadError(400, "malformed request line: expected 'METHOD /path HTTP/1.1'")


def _read_request_fields(head: RequestHead) -> None:
    """Fill in what the headers say about framing and the connection.

    Raises:
        HeadError: 400 for a contradiction, 417 and 501 for what is not spoken here.
    """
    fields = head.fields
    if len(fields) != len(head.headers):
        _refuse_repeats(head.headers, (b"host", b"content-length", b"transfer-encoding", b"expect"))
    if head.http11 and b"host" not in fields:
        raise HeadError(400, "an HTTP/1.1 request needs one Host header")
    connection = fields.get(b"connection")
    if connection is not None:
        tokens = connection_tokens(head.headers)
        head.keep_alive = b"close" not in tokens and (head.http11 or b"keep-alive" in tokens)
    length = fields.get(b"content-length")
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise HeadError(400, "Content-Length and Transfer-Encoding contradict each other")
        if not head.http11:
            raise HeadError(400, "Transfer-Encoding does not exist in HTTP/1.0")
        if coding.strip(b" \t").lower() != b"chunked":
            raise HeadError(501, "the only transfer coding understood is 'chunked'")
        head.chunked = True
    elif length is not None:
        head.content_length = _length(length)
    expect = fields.get(b"expect")
    if expect is not None and head.http11:
        if expect.strip(b" \t").lower() != b"100-continue":
            raise HeadError(417, "the only expectation understood is '100-continue'")
        head.expect_continue = head.chunked or head.content_length > 0


def parse_response_head(raw: bytes) -> ResponseHead:
    """Parse an engine's response head.

    Args:
        raw: the head with its blank line, nothing after it.

    Raises:
        HeadError: whatever the engine sent, it cannot be passed on safely.

    Source: RFC 9112 §4 (status line), §6.3 (length).
    """
    seen = _ResponseCollector()
    parser = httptools.HttpResponseParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        raise HeadError(502, "the engine switched protocols unasked") from None
    except httptools.HttpParserError as error:
        raise HeadError(502, f"malformed response head: {error}") from None
    http11 = raw.startswith(b"HTTP/1.1 ")
    if not http11 and not raw.startswith(b"HTTP/1.0 "):
        raise HeadError(502, "the engine does not speak HTTP/1.x")
    head = ResponseHead(parser.get_status_code(), seen.reason, seen.headers)
    _read_response_fields(head, http11)
    return head


def _read_response_fields(head: ResponseHead, http11: bool) -> None:
    """Fill in what the headers say about framing and the connection.

    Raises:
        HeadError: for a contradiction or an unknown coding.
    """
    fields = head.fields
    if len(fields) != len(head.headers):
        _refuse_repeats(head.headers, (b"content-length", b"transfer-encoding"))
    head.keep_alive = http11
    if b"connection" in fields:
        tokens = connection_tokens(head.headers)
        head.keep_alive = b"close" not in tokens and (http11 or b"keep-alive" in tokens)
    coding = fields.get(b"transfer-encoding")
    length = fields.get(b"content-length")
    if coding is not None:
        if length is not None or not http11:
            raise HeadError(502, "contradicting response lengths")
        if coding.strip(b" \t").lower() != b"chunked":
            raise HeadError(502, "unknown transfer coding in a response")
        head.chunked = True
    elif length is not None:
        head.content_length = _length(length)


def connection_tokens(headers: Headers) -> set[bytes]:
    """Return what all Connection lines name, in lower case: options, and hop-by-hop headers."""
    return {
        token.strip(b" \t").lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }


def hop_by_hop(head: RequestHead | ResponseHead) -> frozenset[bytes] | set[bytes]:
    """Return the names that end at this hop: the fixed ones and those Connection nominates."""
    if b"connection" not in head.fields:
        return HOP_BY_HOP
    return HOP_BY_HOP | connection_tokens(head.headers)


def _refuse_repeats(headers: Headers, names: tuple[bytes, ...]) -> None:
    """Refuse a second line of a header that must be single.

    Raises:
        HeadError: 400, naming the header.
    """
    present = [name for name, _ in headers]
    for name in names:
        if present.count(name) > 1:
            raise HeadError(400, f"repeated header: {name.decode()}")


def _length(value: bytes) -> int:
    """Parse a Content-Length: digits only, and no more of them than any real body needs.

    Raises:
        HeadError: 400 otherwise.
    """
    digits = value.strip(b" \t")
    if not digits.isdigit() or len(digits) > 18:
        raise HeadError(400, "Content-Length must be a plain decimal number")
    return int(digits)
