"""Identifiers as subject tokens: reversible, injective, and valid for NATS whatever they hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.codec import RemoteError
from schemas.ids import decode_token, encode_token

NATS_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")  # what a key-value bucket takes; a dot would split it
ids = st.text(min_size=1)


@given(ids)
@example("Qwen/Qwen3-8B")
@example("gpu-1:8000")
@example("a.b.*.>")
@example("=2F")
@example("\x00 \n\u2028😀")
def test_any_id_comes_back(text: str) -> None:
    """Encoding loses nothing, and gives one token that NATS takes as subject and as key."""
    token = encode_token(text)
    assert decode_token(token) == text
    assert NATS_KEY.fullmatch(token)
    assert "." not in token


@given(ids, ids)
@example("a/b", "a=2Fb")
@example("é", "e\u0301")
def test_no_two_ids_share_a_token(one: str, other: str) -> None:
    """Different ids have different tokens."""
    assert (encode_token(one) == encode_token(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("gpu_1-a", "gpu_1-a"),
        ("Qwen/Qwen3-8B", "Qwen=2FQwen3-8B"),
        ("gpu-1:8000", "gpu-1=3A8000"),
        ("ü", "=C3=BC"),
    ],
)
def test_tokens_are_readable(text: str, token: str) -> None:
    """The form is fixed: subjects in streams and firewall rules rely on it."""
    assert encode_token(text) == token


@given(st.text(st.characters()) | st.text("=0123456789ABCDEFabcdef.-", max_size=12))
@example("\ud800")
@example("a\n")
def test_any_text_is_a_token_or_a_remote_error(token: str) -> None:
    """What decodes is the one token of its id; everything else is a RemoteError."""
    try:
        text = decode_token(token)
    except RemoteError:
        return
    assert encode_token(text) == token


@pytest.mark.parametrize(
    "token", ["", "a.b", "a b", "=", "=2", "=2f", "=ZZ", "a=", "=41", "=FF", "=C3", "ü", "a*", ">"]
)
def test_what_no_id_encodes_to_is_refused(token: str) -> None:
    """Truncated, lower-case, needless and non-UTF-8 escapes would break the one-to-one relation."""
    with pytest.raises(RemoteError, match="encoded id"):
        decode_token(token)


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_an_id_must_be_text_with_something_in_it(text: str) -> None:
    """Neither an empty id nor a lone surrogate can be a subject token."""
    with pytest.raises(ValueError, match=r"empty|surrogates"):
        encode_token(text)
