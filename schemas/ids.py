"""Identifiers, and how they become NATS subject tokens and key-value keys."""

from __future__ import annotations

import re

from schemas.codec import RemoteError

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


def encode_token(text: str) -> str:
    """Return `text` as one NATS subject token, reversibly and readably.

    Letters, digits, `_` and `-` stand for themselves; every other byte of the UTF-8 form
    becomes `=XX` (upper-case hexadecimal), so `Qwen/Qwen3-8B` is `Qwen=2FQwen3-8B`. The result
    is also a valid key of a NATS key-value bucket.

    Raises:
        ValueError: `text` is empty (an empty token is not a subject) or has no UTF-8 form.
    """
    if not text:
        raise ValueError("an id must not be empty")
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        chr(byte) if _PLAIN.fullmatch(chr(byte)) else f"={byte:02X}" for byte in text.encode()
    )


def decode_token(token: str) -> str:
    """Return the id that `encode_token` turned into `token`.

    Raises:
        RemoteError: `token` is not of that form.
    """
    if not _TOKEN.fullmatch(token):
        raise RemoteError(f"not an encoded id: {token!r}")
    raw = _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()), token.encode())
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RemoteError(f"not an encoded id: {token!r}") from error
    if encode_token(text) != token:
        raise RemoteError(f"not the usual form of an encoded id: {token!r}")
    return text
