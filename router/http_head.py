r"""Strict parsing of HTTP/1.x heads, requests and responses alike; the only user of httptools.

A head is given whole, first byte to blank line, by whoever found `\r\n\r\n`. llhttp (inside
httptools) checks the grammar; what it tolerates and a proxy must not is refused here, since any
disagreement with the next hop about where a message ends is a smuggling hole: HTTP/0.9 and 2.0,
absolute-form and authority-form targets, CONNECT (whose answer would be a tunnel) and TRACE (which
would show an engine's key), double spaces, transfer codings other than `chunked`, chunked bodies in
HTTP/1.0, a missing or repeated Host. Upgrades are never accepted: as RFC 9110
§7.8 allows, the request is served as HTTP/1.1 and the header is dropped.

Parsing is the largest part of what a proxied request costs, and nearly every head has been seen
before, but for its Content-Length: a client library sends the same lines every time, an engine the
same within a second. So heads are immutable, the length is returned beside them, and `RequestHeads`
and `ResponseHeads` remember what they have parsed, keyed by all bytes but the length's digits. A
key determines the head: the digits are cut out at the one place where they are looked for, and
only if they are digits.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import httptools
import msgspec

_T = TypeVar("_T")

Headers = list[tuple[bytes, bytes]]

# RFC 9110 §7.6.1, and what HTTP/1.1 proxies have learnt to add.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Written anew for what is really sent.
_REWRITTEN_IN_REQUESTS: Final = frozenset({b"content-length", b"expect", b"host", b"x-request-id"})
_REWRITTEN_IN_RESPONSES: Final = frozenset({b"content-length"})
_SINGLE: Final = (b"host", b"content-length", b"transfer-encoding", b"expect")
_VERSIONS: Final = frozenset({b"HTTP/1.0", b"HTTP/1.1"})
_NOT_SERVED: Final = frozenset({b"CONNECT", b"TRACE"})
_match_reason: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch
_BLANKS: Final = b" \t"

# A few MiB of remembered heads at the most.
REMEMBERED_MAX: Final = 512
REMEMBERED_BYTES_MAX: Final = 2048


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


class RequestHead(msgspec.Struct, frozen=True):
    """A request's head, parsed and found sound; may be shared by requests.

    Fields:
        method: upper case, as sent.
        target: origin-form (`/path?query`), or `*` for OPTIONS.
        headers: every line but Content-Length, in order, names in lower case, values stripped.
        fields: the same as a mapping; of a repeated name, the last value.
        forwarded: the request line and the lines for the next hop, names as sent, each with its
            line end; without Host, Content-Length and X-Request-Id.
        http11: False for HTTP/1.0.
        keep_alive: whether the client expects the connection to stay open.
        chunked: whether the body is chunked.
        expect_continue: the client may wait for `100 Continue` before it sends the body.
    """

    method: bytes
    target: bytes
    headers: Headers
    fields: dict[bytes, bytes]
    forwarded: bytes
    http11: bool
    keep_alive: bool
    chunked: bool
    expect_continue: bool


class ResponseHead(msgspec.Struct, frozen=True):
    """A response's head, parsed and found sound; may be shared by responses.

    Fields:
        status: three digits.
        headers: every line but Content-Length, in order, names in lower case, values stripped.
        fields: the same as a mapping; of a repeated name, the last value.
        forwarded: the status line and the lines for the next hop, names as sent, each with its
            line end; without any that frame the body.
        keep_alive: whether the connection may carry another request afterwards.
        chunked: whether the body is chunked.
    """

    status: int
    headers: Headers
    fields: dict[bytes, bytes]
    forwarded: bytes
    keep_alive: bool
    chunked: bool


class _Collector:
    """Receives httptools' callbacks for one head.

    Attributes:
        lines: names as sent, values stripped.
        headers: the same, names in lower case.
    """

    __slots__ = ("headers", "lines")

    def __init__(self) -> None:
        self.lines: Headers = []
        self.headers: Headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        value = value.strip(_BLANKS)
        self.lines.append((name, value))
        self.headers.append((name.lower(), value))


class RequestHeads:
    """Parses request heads, and remembers them.

    Args:
        headers_max: header lines allowed in a head.
    """

    def __init__(self, headers_max: int = 128) -> None:
        self._headers_max = headers_max
        self._known: dict[bytes, tuple[RequestHead, int]] = {}

    def parse(self, raw: bytes) -> tuple[RequestHead, int]:
        """Parse a head, refusing whatever two servers could read in two ways.

        Args:
            raw: the head with its blank line, nothing after it.

        Returns:
            The head and its Content-Length, 0 if it has none.

        Raises:
            HeadError: with the status to answer: 400, 417, 431, 501 or 505.
        """
        key, length = _part_length(raw)
        found = self._known.get(key)
        if found is None:
            found = parse_request_head(raw, self._headers_max)
            _remember(self._known, key, found)
        return found if length is None else (found[0], length)


class ResponseHeads:
    """Parses response heads, and remembers them."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[ResponseHead, int | None]] = {}

    def parse(self, raw: bytes) -> tuple[ResponseHead, int | None]:
        """Parse an engine's response head.

        Args:
            raw: the head with its blank line, nothing after it.

        Returns:
            The head and its Content-Length, None if it has none.

        Raises:
            HeadError: whatever the engine sent, it cannot be passed on safely.
        """
        key, length = _part_length(raw)
        found = self._known.get(key)
        if found is None:
            found = parse_response_head(raw)
            _remember(self._known, key, found)
        return found if length is None else (found[0], length)


def _part_length(raw: bytes) -> tuple[bytes, int | None]:
    """Return what a head is known by, and the length that was cut out of it.

    A head that has no length in the usual spelling is known by all of its bytes, which cannot be
    those of a head whose length was cut out, as those still have the empty place of the length;
    one that has something else than a length there is not known by anything.
    """
    start = raw.find(b"\r\nContent-Length: ")
    if start < 0:
        start = raw.find(b"\r\ncontent-length: ")
    if start < 0:
        return raw, None
    start += 18
    stop = raw.index(b"\r\n", start)
    digits = raw[start:stop]
    if not digits.isdigit() or len(digits) > 18:
        return b"", None
    return raw[:start] + raw[stop:], int(digits)


def _remember(known: dict[bytes, _T], key: bytes, found: _T) -> None:
    """Remember what a head was parsed to, within bounds, if it is known by anything."""
    if key and len(key) <= REMEMBERED_BYTES_MAX:
        if len(known) >= REMEMBERED_MAX:
            known.clear()  # Dearer ways of forgetting would cost every request something.
        known[key] = found


def parse_request_head(raw: bytes, headers_max: int = 128) -> tuple[RequestHead, int]:
    """Parse a request's head from nothing; see `RequestHeads.parse`.

    Source: RFC 9112 §3 (request line), §6.3 (length), §11.2 (smuggling).
    """
    seen = _Collector()
    try:
        httptools.HttpRequestParser(seen).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # An offered upgrade is declined by going on in HTTP/1.1.
    except httptools.HttpParserError as error:
        raise HeadError(400, f"malformed request head: {error}") from None
    method, target, version = _part_request_line(raw[: raw.index(b"\r\n")])
    headers = seen.headers
    if len(headers) > headers_max:
        raise HeadError(431, f"more than {headers_max} header lines")
    fields = _fields(headers)
    http11 = version == b"HTTP/1.1"
    if http11 and b"host" not in fields:
        raise HeadError(400, "an HTTP/1.1 request needs one Host header")
    chunked, length = _body(fields, http11, 501)
    tokens = _connection_tokens(headers)
    lines = _forwarded(seen.lines, tokens, _REWRITTEN_IN_REQUESTS)
    head = RequestHead(
        method=method,
        target=target,
        headers=[header for header in headers if header[0] != b"content-length"],
        fields=fields,
        forwarded=b"%b %b HTTP/1.1\r\n%b" % (method, target, lines),
        http11=http11,
        keep_alive=_keep_alive(tokens, http11),
        chunked=chunked,
        expect_continue=_expects_continue(fields, http11),
    )
    return head, length or 0


def _part_request_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    """Return method, target and version of a request line that llhttp has let pass.

    Raises:
        HeadError: 400, 501 or 505, for what it should not have let pass.
    """
    parts = line.split(b" ")
    if len(parts) != 3 or parts[2] not in _VERSIONS:
        if parts[-1].startswith(b"HTTP/") and parts[-1] not in _VERSIONS:
            raise HeadError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
        raise HeadError(400, "malformed request line: expected 'METHOD /path HTTP/1.1'")
    method, target, version = parts
    if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
        raise HeadError(400, "the request target must be a path that starts with '/'")
    if method in _NOT_SERVED:
        raise HeadError(501, "CONNECT and TRACE are not served here")
    if b"#" in target:
        raise HeadError(400, "the request target must not carry a fragment")
    return method, target, version


def _expects_continue(fields: dict[bytes, bytes], http11: bool) -> bool:
    """Return whether the client may wait for `100 Continue`.

    Raises:
        HeadError: 417 for any other expectation.
    """
    expect = fields.get(b"expect")
    if expect is None or not http11:
        return False
    if expect.lower() != b"100-continue":
        raise HeadError(417, "the only expectation understood is '100-continue'")
    return True


def parse_response_head(raw: bytes) -> tuple[ResponseHead, int | None]:
    """Parse an engine's response head from nothing; see `ResponseHeads.parse`.

    Source: RFC 9112 §4 (status line), §6.3 (length).
    """
    seen = _Collector()
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
    headers = seen.headers
    fields = _fields(headers)
    chunked, length = _body(fields, http11, 502)
    tokens = _connection_tokens(headers)
    lines = _forwarded(seen.lines, tokens, _REWRITTEN_IN_RESPONSES)
    if b"x-accel-buffering" not in fields and _is_event_stream(fields):
        lines += b"x-accel-buffering: no\r\n"
    status = parser.get_status_code()
    reason = raw[13 : raw.index(b"\r\n")]  # Perhaps empty; some leave out the space before it.
    if status < 100 or not _match_reason(reason):
        raise HeadError(502, "malformed status line")
    head = ResponseHead(
        status=status,
        headers=[header for header in headers if header[0] != b"content-length"],
        fields=fields,
        forwarded=b"HTTP/1.1 %d %b\r\n%b" % (status, reason, lines),
        keep_alive=_keep_alive(tokens, http11),
        chunked=chunked,
    )
    return head, length


def lines_end_in_crlf(part: bytes) -> bool:
    """Whether a part of a head can become a whole one.

    Who ends lines by LF alone never sends the blank line that ends a head, and would be waited for.
    """
    return part.count(b"\n") == part.count(b"\r\n") and b"\0" not in part


def _is_event_stream(fields: dict[bytes, bytes]) -> bool:
    """Whether a response is a stream of server-sent events, which nobody should buffer."""
    return fields.get(b"content-type", b"").lower().startswith(b"text/event-stream")


def _fields(headers: Headers) -> dict[bytes, bytes]:
    """Return headers by name.

    Raises:
        HeadError: 400 for the repeat of a header that must be single.
    """
    fields = dict(headers)
    if len(fields) < len(headers):
        names = [name for name, _ in headers]
        for name in _SINGLE:
            if names.count(name) > 1:
                raise HeadError(400, f"repeated header: {name.decode()}")
    return fields


def _body(fields: dict[bytes, bytes], http11: bool, unknown: int) -> tuple[bool, int | None]:
    """Return whether a body is chunked, and its Content-Length, None if it has none.

    Args:
        fields: the message's headers; the length is taken out of them.
        http11: its version.
        unknown: the status to refuse other transfer codings with.

    Raises:
        HeadError: for a contradiction or what is not spoken here.
    """
    coding, digits = fields.get(b"transfer-encoding"), fields.pop(b"content-length", None)
    if coding is None:
        if digits is None:
            return False, None
        if not digits.isdigit() or len(digits) > 18:
            raise HeadError(400, "Content-Length must be a plain decimal number")
        return False, int(digits)
    if digits is not None:
        raise HeadError(400, "Content-Length and Transfer-Encoding contradict each other")
    if not http11:
        raise HeadError(400, "Transfer-Encoding does not exist in HTTP/1.0")
    if coding.lower() != b"chunked":
        raise HeadError(unknown, "the only transfer coding understood is 'chunked'")
    return True, None


def _connection_tokens(headers: Headers) -> set[bytes]:
    """Return what all Connection lines name, in lower case: options, and headers that end here."""
    return {
        token.strip(_BLANKS).lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }


def _keep_alive(tokens: set[bytes], http11: bool) -> bool:
    """Whether a connection stays open after a message with these Connection tokens."""
    return b"close" not in tokens and (http11 or b"keep-alive" in tokens)


def _forwarded(lines: Headers, tokens: set[bytes], rewritten: frozenset[bytes]) -> bytes:
    """Return the header lines for the next hop, each with its line end."""
    dropped = tokens | _HOP_BY_HOP | rewritten
    kept = (line for line in lines if line[0].lower() not in dropped)
    return b"".join(b"%b: %b\r\n" % line for line in kept)
