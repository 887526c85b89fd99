"""Large bodies say the same in steps as at once, but for what need not be read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.big_bodies import BigBody, read_big, with_ids
from router.surface import ENDPOINTS
from schemas.codec import RemoteError

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
