"""Where an engine listens, as the URL in its instance record says; and what is wrong with one."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

URL_CHARS_MAX: Final = 1024
_PORTS: Final = {"http": 80, "https": 443}
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_NAME_CHARS_MAX: Final = 253


class Address(msgspec.Struct, frozen=True):
    """Where to connect.

    Attributes:
        host: a name, or an IP address without brackets.
        tls: whether to speak TLS there.
    """

    host: str
    port: int
    tls: bool


class AddressError(ValueError):
    """A URL that no request can be sent to; says what is wrong and what is expected."""


@lru_cache(4096)
def parse_address(url: str) -> Address:
    """Return where a base URL points to.

    Raises:
        AddressError: it is not `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    """
    if len(url) > URL_CHARS_MAX:
        raise AddressError(f"its url has {len(url)} characters, more than {URL_CHARS_MAX}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"its url {_shown(url)} cannot be read: {error}") from error
    problem = _problem(parts, url)
    if problem or port == 0:
        raise AddressError(
            f"its url {_shown(url)} {problem or 'has port 0'}; it must be http://HOST:PORT or "
            "https://HOST:PORT"
        )
    host = parts.hostname or ""
    return Address(host, port or _PORTS[parts.scheme], parts.scheme == "https")


def _shown(url: str) -> str:
    """Return a URL without the password that it may have."""
    return repr(url.rpartition("@")[2] if "@" in url else url)


def _problem(parts: SplitResult, url: str) -> str:
    """Return what is wrong with a URL's parts; empty if nothing is."""
    if not url:
        return "is empty"
    if parts.scheme not in _PORTS:
        return f"has the scheme {parts.scheme!r}" if parts.scheme else "has no scheme"
    if parts.username is not None or parts.password is not None:
        return "has a user name"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return "has a path"
    if any(letter.isspace() or not letter.isprintable() for letter in url):
        return "has white space in it"
    return "" if _is_host(parts.hostname or "") else "has no usable host"


def _is_host(host: str) -> bool:
    if ":" not in host:
        return len(host) <= _NAME_CHARS_MAX and _NAME.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
