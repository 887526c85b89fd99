"""Large bodies say the same in steps as at once, but for what need not be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from router.big_bodies import TEXT_BYTES_MAX, BigBody, read_big, with_ids
from router.surface import ENDPOINTS
from schemas.codec import RemoteError
from schemas.openai import ChatRequest, CompletionRequest

IDS = [number % 50_000 for number in range(120_000)]
MEDIA = "data:image/png;base64," + "iVBO" * 2_000_000


async def _read(path: bytes, body: dict[str, Any]) -> tuple[BigBody, Any]:
    big = await read_big(ENDPOINTS[path], json.dumps(body).encode(), b"")
    return big, await with_ids(big)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (b"/v1/completions", "prompt"),
        (b"/v1/embeddings", "input"),
        (b"/inference/v1/generate", "token_ids"),
    ],
)
async def test_long_lists_of_token_ids_are_read_in_slices(path: bytes, field: str) -> None:
    """They are set aside, counted, and come back whole."""
    big, parsed = await _read(path, {"model": "m", field: IDS, "cache_salt": "s"})
    assert (big.name, big.ids_count, big.lists) == ("m", len(IDS), 0)
    assert list(getattr(parsed, field)) == IDS
    assert parsed.cache_salt == "s"


async def test_a_single_list_in_a_list_is_a_prompt_too() -> None:
    """As one that stands alone."""
    big, parsed = await _read(b"/v1/completions", {"model": "m", "prompt": [IDS]})
    assert big.lists == 1
    assert list(parsed.prompt) == IDS


@pytest.mark.parametrize(
    "prompt", [[IDS[:60_000], IDS[:60_000]], [1.5] * 120_000, [1 << 40] * 100_000]
)
async def test_what_is_no_list_of_token_ids_has_none(prompt: list[Any]) -> None:
    """Several prompts, fractions and numbers beyond 32 bits are the engine's to judge."""
    big, parsed = await _read(b"/v1/completions", {"model": "m", "prompt": prompt})
    assert big.name == "m"
    assert parsed is None or not isinstance(parsed.prompt[0], int)


async def test_a_list_in_a_text_is_no_prompt() -> None:
    """A prompt that quotes a request is read as the text that it is."""
    text = json.dumps({"prompt": IDS})
    big, parsed = await _read(b"/v1/completions", {"model": "m", "prompt": text})
    assert big.ids is None
    assert parsed.prompt == text


async def test_a_list_elsewhere_makes_the_prompt_unknown() -> None:
    """The list that was set aside is not the prompt: nothing is taken for known."""
    body = {"model": "m", "x": {"prompt": IDS}, "prompt": "hi"}
    big, parsed = await _read(b"/v1/completions", body)
    assert (big.name, parsed) == ("m", None)


async def test_media_are_not_read() -> None:
    """An image's bytes do not count as text, and the request is known not to be whole."""
    url = {"type": "image_url", "image_url": {"url": MEDIA}}
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}, url]}
    big, parsed = await _read(b"/v1/chat/completions", {"model": "m", "messages": [message]})
    assert big.altered
    assert big.text_bytes < 1000
    assert parsed.messages[0]["content"][0]["text"] == "what?"


def _long(unit: str, size_bytes: int = 2 * TEXT_BYTES_MAX) -> str:
    """Return a text that is too long as JSON has it."""
    return unit * (size_bytes // (len(json.dumps(unit)) - 2) + 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/completions", lambda text: {"prompt": text}),
        (b"/v1/embeddings", lambda text: {"input": text}),
        (b"/v1/responses", lambda text: {"input": text}),
        (b"/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        (
            b"/v1/chat/completions",
            lambda text: {"messages": [{"content": [{"type": "text", "text": text}]}]},
        ),
    ],
)
async def test_texts_that_nobody_would_tokenize_are_not_read(
    path: bytes, body: Callable[[str], dict[str, Any]]
) -> None:
    """Their length is known, and all else that the request says."""
    text = _long("It was a dark night. ")
    big, parsed = await _read(path, {"model": "m", **body(text), "stream": True})
    assert big.chars_cut == len(text)
    assert big.text_bytes == len(json.dumps({"model": "m", **body(text), "stream": True}))
    assert (big.altered, big.heavy, big.name) == (True, True, "m")
    assert "dark night" not in repr(parsed)


@pytest.mark.parametrize(
    "unit",
    ["a", "\n", "\\", '"', 'say \\"no\\" ', "é", "日本", "😀", "\u0001 x", 'ends in \\\\"'],
)
@pytest.mark.parametrize("ascii_only", [True, False])
async def test_a_text_ends_where_it_ends(unit: str, ascii_only: bool) -> None:
    """Whatever is escaped in it, and it is never said to be longer than it is."""
    text = _long(unit)
    body = {"model": "m", "prompt": text, "user": "last", "cache_salt": "s"}
    written = json.dumps(body, ensure_ascii=ascii_only).encode()
    big = await read_big(ENDPOINTS[b"/v1/completions"], written, b"")
    assert isinstance(big.parsed, CompletionRequest)
    assert big.parsed.cache_salt == "s"
    if big.chars_cut:
        assert big.parsed.prompt == ""
        assert len(text) / 12 <= big.chars_cut <= len(text)
        assert big.text_bytes == len(written)
    else:
        assert big.parsed.prompt == text


async def test_many_texts_count_together() -> None:
    """None of them is long, and their sum is; what is short stays."""
    messages = [{"role": "user", "content": "ab " * 100_000} for _ in range(20)]
    messages.append({"role": "user", "content": "short"})
    big, parsed = await _read(b"/v1/chat/completions", {"model": "m", "messages": messages})
    assert big.chars_cut == 20 * 300_000
    assert parsed.messages[-1]["content"] == "short"


async def test_a_text_without_an_end_is_no_json() -> None:
    """Cutting it out mends nothing."""
    body = b'{"model":"m","prompt":"' + b"a" * (2 * TEXT_BYTES_MAX)
    with pytest.raises(RemoteError):
        await read_big(ENDPOINTS[b"/v1/completions"], body, b"")


async def test_a_body_may_be_a_bytearray() -> None:
    """As those are that came in pieces."""
    text = "ab " * 50_000
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    written = bytearray(json.dumps(body).encode())
    big = await read_big(ENDPOINTS[b"/v1/chat/completions"], written, b"")  # type: ignore[arg-type]
    assert isinstance(big.parsed, ChatRequest)
    assert big.parsed.messages[0]["content"] == text


@pytest.mark.parametrize("part", ["{}", "[]", '"a"', "1.5"])
async def test_too_many_values_are_refused(part: str) -> None:
    """With a reason, whatever they are."""
    body = f'{{"model":"m","x":[{",".join([part] * 1_000_000)}]}}'.encode()
    with pytest.raises(RemoteError, match="too many JSON values"):
        await read_big(ENDPOINTS[b"/v1/completions"], body, b"")


async def test_a_large_body_that_is_no_json_is_refused() -> None:
    """As a small one is."""
    with pytest.raises(RemoteError):
        await read_big(ENDPOINTS[b"/v1/completions"], b"[" * 100_000, b"")


async def test_reading_gives_others_their_turn() -> None:
    """Between slices the loop goes round."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await _read(b"/v1/completions", {"model": "m", "prompt": IDS})
    counting.cancel()
    assert turns > 10
