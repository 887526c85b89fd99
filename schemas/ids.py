"""Identifiers, and how they become NATS subject tokens and key-value keys."""

from __future__ import annotations

import re

from schemas.codec import RemoteError

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")


def encode_token(text: str) -> str:
    """Return `text` as one NATS subject token, reversibly and readably.

    Letters, digits, `_` and `-` stand for themselves; every other byte of the UTF-8 form
    becomes `=XX` (upper-case hexadecimal), so `Qwen/Qwen3-8B` is `Qwen=2FQwen3-8B`. The result
    is also a valid key of a NATS key-value bucket.

    Raises:
        ValueError: `text` is empty; an empty token is not a subject.
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
    raw = bytearray()
    end = 0
    while end < len(token):
        if token[end] != "=":
            raw += token[end].encode()
            end += 1
            continue
        escape = _ESCAPE.match(token, end)
        if escape is None:
            raise RemoteError(f"not an encoded id: {token!r}")
        raw.append(int(escape[1], 16))
        end = escape.end()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RemoteError(f"not an encoded id: {token!r}") from error
    if not text or encode_token(text) != token:
        raise RemoteError(f"not an encoded id: {token!r}")
    return text
