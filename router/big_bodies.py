"""Reads large bodies in steps, so that nobody's request holds up the others.

A decoder works in one go, and what it costs is not in the bytes but in the values: four megabytes
of text take 3 ms, of empty objects 350. So a large body is first looked at in slices. What its
values would cost is counted; if that is too much, the kinds of values that are large by nature
are set aside,

    lists of token ids         "prompt": [1, 2, …]   decoded by themselves, a slice at a time
    media, written as base64   ;base64,iVBOR…        not needed to route a request
    long texts                 "content": "It was…"  where the body's text is longer than what is
                                                     tokenized at all

and the rest is decoded. A body whose rest still costs too much is refused: no prompt looks like
that, and its model could not be read but by stopping everybody.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import msgspec

from router.surface import Endpoint, Parsed, are_many, read_body
from schemas.codec import RemoteError
from schemas.openai import CompletionRequest, EmbeddingsRequest, GenerateRequest

BIG_BYTES: Final = 64 * 1024
"""A smaller body is read at once: 5 ms, were it all empty objects."""

TEXT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of more text than this nobody would know the tokens: `chars_max` of `router.tokens`."""

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

_PLACE: Final = re.compile(
    rb';base64,|"(?:prompt|input|token_ids)"\s{0,16}:\s{0,16}\['
    rb'|"(?:prompt|input|content|text)"\s{0,16}:\s{0,16}"'
)
_PLACE_BYTES_MAX: Final = 64
_Kind = Literal["ids", "media", "text"]
_KINDS: Final[dict[bytes, _Kind]] = {b",": "media", b"[": "ids", b'"': "text"}
"""By what a place ends with."""
_RUNS: Final = {
    "ids": re.compile(rb"[0-9,\s\[\]]*"),
    "media": re.compile(rb"[A-Za-z0-9+/=_-]*"),
}
_CONTINUING: Final = bytes(range(0x80, 0xC0))  # of UTF-8
_ESCAPES: Final = 32  # backslashes in a row, hardly ever more

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
        chars_cut: how many characters at the least its texts lack; 0 if they are whole.
    """

    parsed: Parsed | None
    name: str
    text_bytes: int
    ids: bytes | None = None
    lists: int = 0
    ids_count: int = 0
    altered: bool = False
    heavy: bool = False
    chars_cut: int = 0


class _Cut(msgspec.Struct):
    """What is left of a body, and what was set aside.

    Attributes:
        media: whether media were cut out.
        text_bytes: length of the texts that were, as written; `chars` their least length.
    """

    kept: bytes
    ids: bytes | None = None
    media: bool = False
    text_bytes: int = 0
    chars: int = 0


async def read_big(endpoint: Endpoint, body: bytes, content_type: bytes) -> BigBody:
    """Return what a large body says, but for its token ids (`with_ids`).

    Raises:
        RemoteError: the endpoint takes JSON, and this is no JSON object, or one of too many values.
    """
    if content_type.startswith(b"multipart/form-data"):
        return BigBody(*read_body(endpoint, body, content_type), text_bytes=len(body))
    cut = _Cut(body)
    cost_ns, heavy = await _look_at(body)
    if cost_ns > _QUICK_NS:
        cut = await _set_aside(body, texts=False)
        if len(cut.kept) > TEXT_BYTES_MAX:
            cut = await _set_aside(body, texts=True)
        cost_ns, heavy = await _look_at(cut.kept)
        _check_cost(cost_ns)
    parsed, name = read_body(endpoint, cut.kept, content_type)
    ids = cut.ids
    length = len(cut.kept) + len(ids or b"") + cut.text_bytes
    if cut.text_bytes:
        return BigBody(parsed, name, length, altered=True, heavy=True, chars_cut=cut.chars)
    if ids is None:
        return BigBody(parsed, name, length, altered=cut.media, heavy=heavy)
    if _ids_of(parsed) != []:
        return BigBody(None, name, length)  # something else than its prompt was cut
    lists, commas = await _count(ids, b"["), await _count(ids, b",")
    return BigBody(parsed, name, length, ids, lists, commas + 1, cut.media, heavy)


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


async def _set_aside(body: bytes, *, texts: bool) -> _Cut:
    """Return a body without token ids and media, and perhaps without long texts."""
    kept: list[bytes] = []
    at = 0
    cut = _Cut(body)
    async for start, kind in _places(body):
        if start < at or (kind == "ids" and cut.ids is not None) or (kind == "text" and not texts):
            continue
        stop = await (_end_of_text(body, start) if kind == "text" else _end(kind, body, start))
        if kind == "ids":
            stop = body.rfind(b"]", start, stop)  # the bracket that closes the list
        if stop - start < _CUT_BYTES_MIN:
            continue
        if kind == "ids":
            cut.ids = body[start:stop]
        elif kind == "media":
            cut.media = True
        else:
            cut.text_bytes += stop - start
            cut.chars += await _chars_min(body, start, stop)
        kept.append(body[at:start])
        at = stop
    if kept:
        cut.kept = b"".join((*kept, body[at:]))
    return cut


async def _places(body: bytes) -> AsyncIterator[tuple[int, _Kind]]:
    """Yield where something may begin that is to be set aside, and what."""
    start = places = 0
    while start < len(body) and places < _PLACES_MAX:
        found = _PLACE.search(body, start, start + _SLICE_BYTES + _PLACE_BYTES_MAX)
        if found is None:
            start += _SLICE_BYTES
            await asyncio.sleep(0)
            continue
        start = found.end()
        places += 1
        yield start, _KINDS[found[0][-1:]]


async def _end(kind: _Kind, body: bytes, start: int) -> int:
    """Return where a run of such bytes ends."""
    while True:
        run = _RUNS[kind].match(body, start, start + _SLICE_BYTES)
        assert run is not None
        if run.end() < start + _SLICE_BYTES:
            return run.end()
        start = run.end()
        await asyncio.sleep(0)


async def _end_of_text(body: bytes, start: int) -> int:
    """Return where the text that begins at `start` ends: at the first mark without an escape."""
    at, looked_at = start, start
    while True:
        found = body.find(b'"', at, at + _SLICE_BYTES)
        if found < 0:
            if at + _SLICE_BYTES >= len(body):
                return len(body)
            at += _SLICE_BYTES
        else:
            if _escapes_before(body, start, found) % 2 == 0:
                return found
            at = found + 1
        if at - looked_at >= _SLICE_BYTES:
            looked_at = at
            await asyncio.sleep(0)


def _escapes_before(body: bytes, start: int, stop: int) -> int:
    """Return how many backslashes in a row stand before `stop`."""
    window = _ESCAPES
    while True:
        part = body[max(start, stop - window) : stop]
        escapes = len(part) - len(part.rstrip(b"\\"))
        if escapes < window:
            return escapes
        window *= 8


async def _chars_min(body: bytes, start: int, stop: int) -> int:
    """Return how many characters a text as written has at the least.

    Each character is written with one byte that continues none; of escapes one takes up to six such
    bytes, and has one backslash or two.
    """
    written = escapes = 0
    for at in range(start, stop, _SLICE_BYTES):
        part = body[at : min(at + _SLICE_BYTES, stop)]
        escapes += part.count(b"\\")
        written += len(part.translate(None, _CONTINUING))
        await asyncio.sleep(0)
    return escapes // 2 + max(0, written - 6 * escapes)


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
