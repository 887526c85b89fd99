"""Browsers on other origins: who may call, and the header lines that tell the browser so.

A browser sends `Origin`, and shows an answer to its page only if the answer names that origin.
Where origins are configured, the router says so in place of the engines, whose own lines are
dropped: two answers to one question count as none.

Source: the Fetch standard, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.http_exchange import Exchange

RESPONSE_HEADERS: Final = frozenset(
    {
        b"access-control-allow-credentials",
        b"access-control-allow-origin",
        b"access-control-expose-headers",
    }
)
"""What engines may say of origins."""
_PREFLIGHT_S: Final = 600
_ANY: Final = "*"
_USUAL_HEADERS: Final = b"authorization, content-type"


class Cors:
    """The origins whose pages may call.

    Args:
        origins: such as `https://chat.example.org`; `*` for all.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = _ANY in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def mark(self, exchange: Exchange) -> None:
        """Let every answer to a request tell whether its page may read it."""
        origin = exchange.header(b"origin")
        if origin is None:
            return
        if self._any:
            exchange.cors_lines = b"access-control-allow-origin: *\r\n"
        elif origin in self._origins:
            exchange.cors_lines = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
        else:
            exchange.cors_lines = b"vary: origin\r\n"

    def preflight(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """Return what a browser wants to know before it sends a request."""
        wanted = (
            exchange.header(b"access-control-request-headers") or b"authorization, content-type"
        )
        return [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"%d" % _PREFLIGHT_S),
        ]
