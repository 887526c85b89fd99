"""The doctor's prompt takes the form that an engine offers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from controlplane.core.hashing import chain, pack_hashes, pack_tokens
from controlplane.doctor_canary import Canary, Finding
from controlplane.http_client import HttpClient, HttpError
from schemas import subjects
from schemas.bus import KvBatch, KvStored
from schemas.codec import encode

BLOCK = 16
CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def text_of(body: dict[str, Any]) -> str:
    """Return the text of a request in whichever form."""
    if "messages" in body:
        return " ".join(message["content"] for message in body["messages"])
    return str(body.get("prompt") or body["input"])


def tokens_of(body: dict[str, Any]) -> list[int]:
    """Return a request's tokens: a token a byte."""
    return list(text_of(body).encode())


def keys_of(body: dict[str, Any]) -> list[int]:
    """Return the hashes of its whole blocks."""
    return chain(pack_tokens(tokens_of(body)), BLOCK)


class Engine:
    """A router's admin port and an engine in one, which offers only some endpoints.

    Attributes:
        asked: the paths that were asked for.
    """

    def __init__(self, *offered: str, status: int = 404) -> None:
        self.asked: list[str] = []
        self.told: Callable[[str, bytes], None] = lambda subject, payload: None
        self._offered = offered
        self._status = status
        self._cached: set[int] = set()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer any request."""
        body = await request.json()
        ids, keys = tokens_of(body), keys_of(body)
        hit = BLOCK * sum(key in self._cached for key in keys)
        self.asked.append(request.path)
        if request.path == "/debug/explain":
            candidate = {"instance": "e", "hit_tokens": hit}
            return web.json_response(
                {
                    "exact": True,
                    "block_size": BLOCK,
                    "block_hashes": [f"{key:016x}" for key in keys],
                    "prompt_tokens": len(ids),
                    "candidates": [candidate],
                }
            )
        if request.path == "/tokenize":
            return web.json_response({"tokens": ids})
        if request.path not in self._offered:
            error = {"message": "the model does not support this"}
            return web.json_response({"error": error}, status=self._status)
        self._cache(keys)
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": hit}}
        return web.json_response({"usage": usage})

    def _cache(self, keys: Iterable[int]) -> None:
        new = [key for key in keys if key not in self._cached]
        self._cached.update(new)
        batch = KvBatch("e", 1, 1, 0.0, [KvStored(pack_hashes(new), 0)])
        self.told(subjects.kv("m", "e"), encode(batch))


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[Canary, str]]:
    """Give a canary for an engine that is served, and its URL."""
    app = web.Application()
    app.router.add_post("/{path:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with HttpClient() as http:
            canary = Canary(http, http, f"http://{host}:{port}", 2.0)
            engine.told = canary.hear
            yield canary, f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def examined(canary: Canary, url: str) -> list[Finding]:
    """Send a prompt; all must be well."""
    findings = [finding async for finding in canary.send("m", "e", url)]
    assert [finding for finding in findings if not finding.ok] == []
    return findings


async def test_a_model_that_chats_is_sent_a_chat() -> None:
    """As most are; nothing is said of it."""
    engine = Engine(CHAT, COMPLETION)
    async with served(engine) as (canary, url):
        findings = await examined(canary, url)
    assert "takes chats" not in [finding.what for finding in findings]
    assert findings[-1].what == "promised hit"
    assert engine.asked.count(CHAT) == 2
    assert COMPLETION not in engine.asked


@pytest.mark.parametrize("status", [400, 404, 501])
async def test_a_model_without_chats_is_sent_a_completion(status: int) -> None:
    """Its tokens, keys and hits are looked at all the same; the next one is not asked again."""
    engine = Engine(COMPLETION, status=status)
    async with served(engine) as (canary, url):
        findings = await examined(canary, url)
        assert findings[0].what == "takes chats"
        assert f"sent as a completion: POST {url}{CHAT}: {status}" in findings[0].found
        assert findings[-1].what == "promised hit"
        before = len(engine.asked)
        assert (await examined(canary, url))[0].what == "takes chats"
        assert CHAT not in engine.asked[before:]


async def test_a_model_that_only_embeds_is_sent_a_text() -> None:
    """What engines do not tell of embeddings is not asked for."""
    engine = Engine(EMBEDDING, status=400)
    async with served(engine) as (canary, url):
        findings = await examined(canary, url)
    assert [finding.what for finding in findings] == [
        "takes chats",
        "tokens equal the engine's",
        "new prompt is unknown",
    ]


async def test_an_engine_that_takes_nothing_is_told_by_its_first_refusal() -> None:
    """And is asked anew the next time: it may have been mended."""
    engine = Engine(status=404)
    async with served(engine) as (canary, url):
        for _ in range(2):
            with pytest.raises(HttpError, match=f"{CHAT}: 404"):
                await examined(canary, url)
    assert engine.asked.count(EMBEDDING) == 2


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_an_engine_that_fails_is_not_taken_for_one_that_offers_less(status: int) -> None:
    """A wrong key or a broken engine is no matter of the request's form."""
    engine = Engine(COMPLETION, status=status)
    async with served(engine) as (canary, url):
        with pytest.raises(HttpError):
            await examined(canary, url)
    assert COMPLETION not in engine.asked
