"""What a request that would miss its deadline may become, where its tenant allows that.

Bodies pass through this router untouched, but for these: a field of theirs is set, and the rest is
what it was.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.openai import MALFORMED

_LENGTH_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
"""By the endpoint's name, the fields that bound an answer's length, the one in force first."""


def shortened(body: bytes, endpoint: str, tokens_max: int) -> bytes | None:
    """Return a body that asks for no more than so many tokens.

    Returns:
        None if this endpoint's answers have no such length, this one is as short already, or the
        body cannot be written anew.
    """
    fields = _LENGTH_FIELDS.get(endpoint)
    if fields is None:
        return None
    document = _whole(body)
    if document is None:
        return None
    given = [name for name in fields if document.get(name) is not None]
    name = given[0] if given else fields[-1]
    asked = document.get(name)
    if isinstance(asked, int) and asked <= tokens_max:
        return None
    document[name] = tokens_max
    least = document.get("min_tokens")
    if isinstance(least, int) and least > tokens_max:
        document["min_tokens"] = tokens_max
    return msgspec.json.encode(document)


def for_model(body: bytes, model: str) -> bytes | None:
    """Return a body that asks for another model; None if it cannot be written anew."""
    document = _whole(body)
    return None if document is None else msgspec.json.encode(document | {"model": model})


def _whole(body: bytes) -> dict[str, Any] | None:
    """Return all that a body says; None if a field that nobody here reads is no good JSON."""
    try:
        document = msgspec.json.decode(body)
    except MALFORMED:
        return None
    return document if isinstance(document, dict) else None
