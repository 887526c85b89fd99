"""The card on the bus, as a router reads it: proved against the engine that it speaks of."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from router.prefix_cache import PrefixCache
from router.tokens import PromptReader
from schemas import subjects
from schemas.bus import ModelCard, decode_card
from sidecar import card_upload
from tests.bus.worlds import MemoryWorld
from tests.lab.server_helpers import serving
from tests.sidecar.service_helpers import Router, eventually, sidecar_of

pytestmark = pytest.mark.slow


async def card_of(world: MemoryWorld, router: Router, url: str, **settings: Any) -> ModelCard:
    """The card that a sidecar of an engine publishes."""
    bus = await world.bus()
    async with sidecar_of(url, bus, **settings):
        await eventually(lambda: router.state("i-1") == "ready" and router.records["i-1"].card)
        stored = await (await bus.objects(subjects.MODELS)).get(router.records["i-1"].card)
        assert stored is not None
        return decode_card(stored)


def problem_of(card: ModelCard) -> str:
    """What a router finds wrong with a card."""
    with ThreadPoolExecutor(1) as threads:
        return PromptReader(card, PrefixCache(), threads).problem


async def test_a_card_is_proved_by_its_engine(tmp_path: Path) -> None:
    """As it is, it is believed; with a template that is not the engine's, it is not."""
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    async with serving() as client:
        card = await card_of(world, router, client.url)
        assert [bool(probe.messages) for probe in card.probes] == [False, True]
        assert problem_of(card) == ""
        mine = tmp_path / "mine.jinja"
        mine.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        other = await card_of(world, router, client.url, chat_template=str(mine))
        assert other.probes == card.probes
        assert "the engine tokenizes a chat otherwise" in problem_of(other)
    await world.close()


async def test_why_there_is_no_card_is_said_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody thought of costs the card, and is in the log."""

    def fail(_: ModelCard) -> tuple[str, bytes]:
        raise ArithmeticError("unthought of")

    monkeypatch.setattr(card_upload, "digest_of", fail)
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    async with serving() as client, sidecar_of(client.url, await world.bus()):
        await eventually(lambda: "unthought of" in caplog.text)
        await eventually(lambda: router.state("i-1") == "ready")
    await world.close()


async def test_a_template_with_a_date_is_not_compared(tmp_path: Path) -> None:
    """It gives other tokens tomorrow, although nothing is wrong."""
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    dated = tmp_path / "dated.jinja"
    dated.write_text(
        "{{ strftime_now('%d %b') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    async with serving() as client:
        card = await card_of(world, router, client.url, chat_template=str(dated))
        assert [bool(probe.messages) for probe in card.probes] == [False]
    await world.close()


async def test_an_engine_that_does_not_tokenize_is_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `/tokenize` there is a card all the same, and the log says what it lacks."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("sidecar.engine_http.TOKENIZE", "/not-there")
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    async with serving() as client:
        card = await card_of(world, router, client.url)
    assert card.probes == []
    assert problem_of(card) == ""
    assert "cannot be compared with its engine" in caplog.text
    await world.close()
