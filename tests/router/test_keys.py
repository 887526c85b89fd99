"""API keys: the file, the look-up, and that no key is ever told."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys import KEY_CHARS_MAX, parse_keys, presented
from router.tenants import ConfigError

HASHED = hashlib.sha256(b"sk-hidden").hexdigest()
FILE = f"""
# who may come in
sk-acme      acme
sk-a#b       acme   # a comment
sk-plain
sha256:{HASHED} umbrella
"""


def test_keys_lead_to_their_tenants() -> None:
    """Plain, hashed and tenantless keys are known; others are not."""
    ring = parse_keys(FILE)
    assert len(ring) == 4
    assert ring.tenant_of(b"sk-acme") == "acme"
    assert ring.tenant_of(b"sk-a#b") == "acme"
    assert ring.tenant_of(b"sk-plain") == "default"
    assert ring.tenant_of(b"sk-hidden") == "umbrella"
    for wrong in (b"", b"sk-acm", b"sk-acme ", b"acme", HASHED.encode(), b"\xff\x00"):
        assert ring.tenant_of(wrong) is None
    assert ring.tenants == {"acme", "default", "umbrella"}


@given(st.binary())
def test_any_bytes_are_looked_up(key: bytes) -> None:
    """Nothing that a client sends breaks the look-up."""
    assert parse_keys(FILE).tenant_of(key) in {None, "acme", "default", "umbrella"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no key"),
        ("# nothing", "no key"),
        ("sk-secret a b", "line 1: expected KEY TENANT, found 3 words"),
        ("sk-secret a\n\nsk-secret b", "line 3: this key is there already"),
        ("sha256:zz secret", "line 1: sha256: must be followed by 64"),
        (f"sha256:{HASHED[:-2]} secret", "line 1: sha256: must be followed by 64"),
        ("s" * (KEY_CHARS_MAX + 1), "line 1: a key longer than"),
    ],
)
def test_mistakes_name_the_line_and_no_key(text: str, said: str) -> None:
    """An error says where, and never what the key was."""
    with pytest.raises(ConfigError, match=said) as found:
        parse_keys(text)
    assert "secret" not in str(found.value)
    assert HASHED[:-2] not in str(found.value)


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        (b"Bearer sk-1", None, b"sk-1"),
        (b"bearer  sk-1 ", None, b"sk-1"),
        (b"Basic sk-1", None, None),
        (b"Bearer ", None, None),
        (b"sk-1", None, None),
        (None, b"sk-2", b"sk-2"),
        (b"Bearer sk-1", b"sk-2", b"sk-1"),
        (b"Basic x", b"sk-2", b"sk-2"),
        (None, b"", None),
        (None, None, None),
    ],
)
def test_both_ways_to_bring_a_key(
    authorization: bytes | None, x_api_key: bytes | None, key: bytes | None
) -> None:
    """OpenAI's clients send a bearer token, Anthropic's a header of their own."""
    assert presented(authorization, x_api_key) == key
