"""Which URLs of instances can be used, and what is said of the others."""

from __future__ import annotations

import pytest

from router.engine_address import Address, AddressError, parse_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.7:8000", Address("10.0.0.7", 8000, tls=False)),
        ("http://engine-1.ns.svc/", Address("engine-1.ns.svc", 80, tls=False)),
        ("https://engine_1", Address("engine_1", 443, tls=True)),
        ("http://[::1]:8000", Address("::1", 8000, tls=False)),
    ],
)
def test_where_an_engine_listens_is_read_from_its_url(url: str, address: Address) -> None:
    """A name or an address, a port or the scheme's own."""
    assert parse_address(url) == address


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "is empty"),
        ("http://h:99999", "Port out of range"),
        ("http://h:0", "port 0"),
        ("http://[::1", "Invalid IPv6"),
        ("http://", "no usable host"),
        ("http://" + "a" * 64, "no usable host"),
        ("http://a..b", "no usable host"),
        ("ftp://h", "the scheme 'ftp'"),
        ("h", "no scheme"),
        ("http://h/v1", "has a path"),
        ("http://h?x=1", "has a path"),
        ("http://h h", "white space"),
        ("http://h\r\n", "white space"),
        ("http://h" + "x" * 2000, "characters"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, problem: str) -> None:
    """Nothing but an `AddressError` comes of it."""
    with pytest.raises(AddressError, match=problem.replace("(", "\\(")):
        parse_address(url)


def test_a_password_in_a_url_is_not_shown() -> None:
    """The message is logged."""
    with pytest.raises(AddressError, match="user name") as caught:
        parse_address("http://user:secret@h")
    assert "secret" not in str(caught.value)
