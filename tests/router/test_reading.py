"""What is known of a prompt whose long texts were not read: how long it is, if it is one prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from controlplane.core.plane import Plane
from router import reading
from router.big_bodies import TEXT_BYTES_MAX, read_big
from router.directory import ServedModel
from router.prefix_cache import PrefixCache
from router.prompt import Inexact, Reason
from router.reading import Rest, read
from router.surface import ENDPOINTS, PASS_THROUGH, Asked
from router.tokens import PromptReader
from schemas.openai import decode_chat
from tests.router.test_tokens import card, reader

pytestmark = pytest.mark.slow

TEXT = "It was a dark night. " * 1_000
PARTS = [{"type": "text", "text": TEXT}] * (5 * TEXT_BYTES_MAX // 4 // len(TEXT))
CONTEXT = 4_096


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """Yields a thread for long texts."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def reading_of(path: bytes, body: dict[str, Any], executor: Executor) -> Inexact:
    """Returns what is made of a large body by a model of a short context."""
    served = ServedModel("m", Plane("m", "router-a", 1))
    served.reader = reader(card(), executor)
    served.max_model_len = CONTEXT
    big = await read_big(ENDPOINTS.get(path, PASS_THROUGH), json.dumps(body).encode(), b"")
    assert big.chars_cut >= TEXT_BYTES_MAX
    asked = Asked(big.parsed, big.text_bytes, big.heavy, big.altered, 0, big.chars_cut)
    found = read(served, asked, None)
    assert isinstance(found, Inexact)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/completions", {"prompt": TEXT * len(PARTS)}),
        (b"/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
    ],
)
async def test_one_prompt_that_cannot_fit_is_known_to_be_too_long(
    path: bytes, body: dict[str, Any], executor: Executor
) -> None:
    """Whatever else it may say: all of the text is in one prompt."""
    found = await reading_of(path, {"model": "m", **body}, executor)
    assert found.reason is Reason.TOO_LONG
    assert found.tokens_min >= CONTEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/rerank", {"query": "night", "documents": [{"content": [each]} for each in PARTS]}),
        (b"/v1/score", {"text_1": "night", "text_2": [{"content": [each]} for each in PARTS]}),
        (b"/tokenize", {"prompt": TEXT * len(PARTS)}),
        (b"/v1/something", {"input": TEXT * len(PARTS)}),
        (b"/v1/embeddings", {"input": TEXT * len(PARTS), "truncate_prompt_tokens": "many"}),
        (
            b"/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Who?"}], "documents": PARTS},
        ),
    ],
)
async def test_texts_of_what_is_no_single_prompt_say_nothing_of_its_length(
    path: bytes, body: dict[str, Any], executor: Executor
) -> None:
    """Many short prompts, or none, or what a template may leave out: the engine will say."""
    found = await reading_of(path, {"model": "m", **body}, executor)
    assert found.tokens_min < CONTEXT


class Faulty(PromptReader):
    """A reader with a fault."""

    async def read_chat(self, *_: Any, **__: Any) -> Any:
        """Fail as code does that has overlooked something."""
        raise TypeError("unhashable type: 'list'")


async def test_a_fault_of_the_reader_costs_no_request(
    executor: Executor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it overlooks, in whichever step, is logged, and the request goes by load."""
    served = ServedModel("m", Plane("m", "router-a", 1))
    served.reader = Faulty(card(), PrefixCache(1_000_000), executor)
    parsed = decode_chat(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}')
    asked = Asked(parsed, 100)
    assert read(served, asked, None) == Inexact(Reason.FAILED)

    def fail(*_: object) -> None:
        raise TypeError("unhashable type: 'list'")

    monkeypatch.setattr(reading, "as_generation", fail)
    assert read(served, asked, None) == Inexact(Reason.FAILED)
    rest = read(served, Asked(parsed, 100, heavy=True), None)
    assert isinstance(rest, Rest)
    assert await rest == Inexact(Reason.FAILED)
    assert caplog.text.count("could not be read") == 3
