"""Encoding and decoding of every message, with one error for every way a peer can send nonsense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class RemoteError(Exception):
    """A peer sent bytes that do not mean anything: count it, resync if need be, carry on."""


def decoder(kind: type[T] | Any) -> Callable[[bytes | memoryview], T]:
    """Return a msgpack decoder for `kind` that raises only `RemoteError`.

    Args:
        kind: a Struct type or a union of tagged Struct types.
    """
    raw = msgspec.msgpack.Decoder(kind)
    name = getattr(kind, "__name__", str(kind))

    def decode(payload: bytes | memoryview) -> T:
        try:
            return raw.decode(payload)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteError(f"not a {name}: {error}") from error

    return decode


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Return the msgpack bytes of one message."""
    return _ENCODER.encode(message)
