"""Reads large bodies in steps, so that nobody's request holds up the others.

A decoder works in one go, and what it costs is not in the bytes but in the values: four megabytes
of text take 3 ms, of empty objects 350. So a large body is first looked at in slices. What its
values would cost is counted; if that is too much, the two kinds of values that are large by nature
are set aside,

    lists of token ids         "prompt": [1, 2, …]   decoded by themselves, a slice at a time
    media, written as base64   ;base64,iVBOR…        not needed to route a request

and the rest is decoded. A body whose rest still costs too much is refused: no prompt looks like
that, and its model could not be read but by stopping everybody.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from router.surface import Endpoint, Parsed, are_many, read_body
from schemas.codec import RemoteError
from schemas.openai import CompletionRequest, EmbeddingsRequest, GenerateRequest

BIG_BYTES: Final = 64 * 1024
"""A smaller body is read at once: 5 ms, were it all empty objects."""

_SLICE_BYTES: Final = 128 * 1024
_CUT_BYTES_MIN: Final = 16 * 1024
_PLACES_MAX: Final = 1024
"""Places in a body that may begin something to be set aside; further ones are not looked at."""

# What decoding costs, by measurement. The bounds say above which cost something is set aside, and
# how long one request may hold up the others: text alone, in a body of the default limit's size.
_OBJECT_NS: Final = 90.0
_VALUE_NS: Final = 30.0
_ESCAPE_NS: Final = 8.0
_BYTE_NS: Final = 0.6
_WIDE_BYTE_NS: Final = 2.7
_QUICK_NS: Final = 3e6
_COST_NS_MAX: Final = 20e6

_PLACE: Final = re.compile(rb';base64,|"(?:prompt|input|token_ids)"\s{0,16}:\s{0,16}\[')
_PLACE_BYTES_MAX: Final = 64
_IDS: Final = re.compile(rb"[0-9,\s\[\]]*")
_MEDIA: Final = re.compile(rb"[A-Za-z0-9+/=_-]*")

_decode_ids: Final = msgspec.json.Decoder(list[int]).decode


class BigBody(msgspec.Struct, frozen=True):
    """What a large body says.

    Attributes:
        parsed: the request without what was set aside; None if only its model could be read.
        name: of the model.
        text_bytes: length of what was not set aside.
        ids: what was set aside of its list of token ids, as written; None if nothing was.
        lists: how many lists there are in `ids`; 0 if it is what is inside of one.
        ids_count: how many ids.
        altered: its texts may lack something: it is not to be taken for a prompt known exactly.
        heavy: as `surface.Asked.heavy`.
    """

    parsed: Parsed | None
    name: str
    text_bytes: int
    ids: bytes | None = None
    lists: int = 0
    ids_count: int = 0
    altered: bool = False
    heavy: bool = False


async def read_big(endpoint: Endpoint, body: bytes, content_type: bytes) -> BigBody:
    """Return what a large body says, but for its token ids (`with_ids`).

    Raises:
        RemoteError: the endpoint takes JSON, and this is no JSON object, or one of too many values.
    """
    if content_type.startswith(b"multipart/form-data"):
        return BigBody(*read_body(endpoint, body, content_type), text_bytes=len(body))
    kept, ids, altered = body, None, False
    cost_ns, heavy = await _look_at(body)
    if cost_ns > _QUICK_NS:
        kept, ids, altered = await _set_aside(body)
        cost_ns, heavy = await _look_at(kept)
        _check_cost(cost_ns)
    parsed, name = read_body(endpoint, kept, content_type)
    length = len(kept) + len(ids or b"")
    if ids is None:
        return BigBody(parsed, name, length, altered=altered, heavy=heavy)
    if _ids_of(parsed) != []:
        return BigBody(None, name, length)  # something else than its prompt was cut
    lists, commas = await _count(ids, b"["), await _count(ids, b",")
    return BigBody(parsed, name, length, ids, lists, commas + 1, altered, heavy)


async def check_quick(body: bytes) -> None:
    """Look whether a body can be decoded at once.

    Raises:
        RemoteError: it would hold up the others.
    """
    if len(body) > BIG_BYTES:
        cost_ns, _ = await _look_at(body)
        _check_cost(cost_ns)


def _check_cost(cost_ns: float) -> None:
    if cost_ns > _COST_NS_MAX:
        raise RemoteError("it has too many JSON values for a prompt, or is too large for one")


async def _look_at(body: bytes) -> tuple[float, bool]:
    """Return about how long decoding a body takes at the most, and whether it is heavy."""
    objects = values = 0
    cost_ns = 0.0
    for start in range(0, len(body), _SLICE_BYTES):
        part = body[start : start + _SLICE_BYTES]
        objects += part.count(b"{")
        values += part.count(b",") + part.count(b"[")
        cost_ns += part.count(b"\\") * _ESCAPE_NS
        cost_ns += len(part) * (_BYTE_NS if part.isascii() else _WIDE_BYTE_NS)
        await asyncio.sleep(0)
    cost_ns += objects * _OBJECT_NS + values * _VALUE_NS
    return cost_ns, are_many(objects, values)


async def _count(text: bytes, what: bytes) -> int:
    found = 0
    for start in range(0, len(text), _SLICE_BYTES):
        found += text.count(what, start, start + _SLICE_BYTES)
        await asyncio.sleep(0)
    return found


async def _set_aside(body: bytes) -> tuple[bytes, bytes | None, bool]:
    """Return a body without token ids and media, the ids, and whether media were cut out."""
    kept: list[bytes] = []
    at = 0
    ids: bytes | None = None
    media = False
    async for start, pattern in _places(body):
        if start < at or (pattern is _IDS and ids is not None):
            continue
        stop = await _end(pattern, body, start)
        if pattern is _IDS:
            stop = body.rfind(b"]", start, stop)  # the bracket that closes the list
        if stop - start < _CUT_BYTES_MIN:
            continue
        if pattern is _IDS:
            ids = body[start:stop]
        else:
            media = True
        kept.append(body[at:start])
        at = stop
    return b"".join((*kept, body[at:])) if kept else body, ids, media


async def _places(body: bytes) -> AsyncIterator[tuple[int, re.Pattern[bytes]]]:
    """Yield where something may begin that is to be set aside, and what its bytes look like."""
    start = places = 0
    while start < len(body) and places < _PLACES_MAX:
        found = _PLACE.search(body, start, start + _SLICE_BYTES + _PLACE_BYTES_MAX)
        if found is None:
            start += _SLICE_BYTES
            await asyncio.sleep(0)
            continue
        start = found.end()
        places += 1
        yield start, _MEDIA if found[0] == b";base64," else _IDS


async def _end(pattern: re.Pattern[bytes], body: bytes, start: int) -> int:
    """Return where a run of a pattern's bytes ends."""
    while True:
        run = pattern.match(body, start, start + _SLICE_BYTES)
        assert run is not None
        if run.end() < start + _SLICE_BYTES:
            return run.end()
        start = run.end()
        await asyncio.sleep(0)


def _ids_of(parsed: Parsed | None) -> Any:
    if isinstance(parsed, CompletionRequest):
        return parsed.prompt
    if isinstance(parsed, EmbeddingsRequest):
        return parsed.input
    return parsed.token_ids if isinstance(parsed, GenerateRequest) else None


async def with_ids(big: BigBody) -> Parsed | None:
    """Return a large request with its token ids in place; None if they are no one list of them."""
    written, parsed = big.ids, big.parsed
    if written is None or parsed is None:
        return parsed
    if big.lists:
        written = written.strip(b" \t\r\n").removeprefix(b"[").removesuffix(b"]")
    ids: array[int] = array("I")
    start = 0
    try:
        while start < len(written):
            stop = written.find(b",", start + _SLICE_BYTES)
            stop = len(written) if stop < 0 else stop
            ids.extend(_decode_ids(b"[%b]" % written[start:stop]))
            start = stop + 1
            await asyncio.sleep(0)
    except (msgspec.DecodeError, OverflowError):
        return None
    if isinstance(parsed, CompletionRequest):
        return msgspec.structs.replace(parsed, prompt=ids)
    if isinstance(parsed, EmbeddingsRequest):
        return msgspec.structs.replace(parsed, input=ids)
    return msgspec.structs.replace(parsed, token_ids=ids)
