"""Registered prefixes behind one port: two routers of two workers each, on a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest

from controlplane.bus import NatsBus
from controlplane.http_client import HttpClient, HttpError
from lab.stack import LocalStack, StackOptions
from schemas import subjects
from tests.live.test_up import alive
from tests.live.test_workers import FAST, page, total, until

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "tiny"
SYSTEM = [{"role": "system", "content": "You know the whole manual by heart. " * 20}]
EVERYBODY = 60
"""So many connections reach each of four processes, but for one time in ten million."""


async def ask(plane: LocalStack, method: str, handle: str = "", **body: Any) -> Any:
    """Sends a request over a connection of its own, to whichever process gets it."""
    path = f"/v1/prefixes/{handle}" if handle else "/v1/prefixes"
    async with HttpClient(timeout_s=20.0) as http:
        return await http._ask(method, plane.url + path, body or None)


async def register(plane: LocalStack, **options: Any) -> Any:
    """Registers the system message."""
    return await ask(plane, "POST", model=MODEL, messages=SYSTEM, **options)


async def talk(plane: LocalStack, times: int) -> None:
    """Sends chats that go on from the system message, each over a connection of its own."""
    messages = [*SYSTEM, {"role": "user", "content": "Hello"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    for _ in range(times):
        async with HttpClient(timeout_s=20.0) as http:
            await http.post(f"{plane.url}/v1/chat/completions", body)


async def pinned(plane: LocalStack) -> float:
    """Returns in how many processes the prefix is pinned."""
    pages = [await page(router) for router in plane.admin_urls]
    return sum(total(text, "multiplane_prefixes_pinned") for text in pages)


async def test_a_handle_outlives_routers_and_losses_of_the_bus() -> None:
    """Whoever is asked answers alike, whatever was killed or cut off meanwhile."""
    flags = ("--workers", "2")
    options = StackOptions(engines=2, routers=2, engine_flags=FAST, router_flags=flags)
    async with LocalStack(options) as plane:
        handle = (await register(plane, pin=True))["id"]
        for _ in range(EVERYBODY):
            assert (await ask(plane, "GET", handle))["references"] == 1
        assert await pinned(plane) == 1
        await talk(plane, EVERYBODY)
        assert await pinned(plane) == 4

        answers = await asyncio.gather(*(register(plane) for _ in range(20)))
        assert sorted(each["references"] for each in answers) == list(range(2, 22))
        for left in range(20, 1, -1):
            assert (await ask(plane, "DELETE", handle))["references"] == left

        await _kill_a_router(plane)
        await plane.start_router()
        for _ in range(EVERYBODY):
            listed = await ask(plane, "GET")
            assert [(each["id"], each["references"]) for each in listed["data"]] == [(handle, 2)]

        await _cut_the_bus(plane, handle)
        assert (await ask(plane, "DELETE", handle))["references"] == 1
        await _lose_the_bucket(plane)
        await until(lambda: _shown(plane, handle))
        assert (await ask(plane, "DELETE", handle))["deleted"]

        async def gone() -> bool:
            return await pinned(plane) == 0

        await until(gone)
        with pytest.raises(HttpError, match="nothing to release"):
            await ask(plane, "DELETE", handle)


async def _kill_a_router(plane: LocalStack) -> None:
    """Kill the first router as hard as can be, workers and all."""
    async with HttpClient() as http:
        workers = (await http.get(f"{plane.admin_urls[0]}/health"))["workers"]
    victim = plane.routers.pop(0)
    await victim.kill()
    victim.close()
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker["pid"], signal.SIGKILL)

    async def gone() -> bool:
        return not any(alive(worker["pid"]) for worker in workers)

    await until(gone)


async def _cut_the_bus(plane: LocalStack, handle: str) -> None:
    """Take NATS away: what is known is shown, nothing changes, and all is well once it is back."""
    assert plane.embedded is not None
    await plane.embedded.kill()

    async def noticed() -> bool:
        return "stale" in await ask(plane, "GET", handle)

    await until(noticed)
    for _ in range(10):
        assert (await ask(plane, "GET", handle))["references"] == 2
        with pytest.raises(HttpError, match="out of reach") as caught:
            await register(plane)
        assert caught.value.status == 503
    await talk(plane, 2)
    await plane.embedded.start()

    async def back() -> bool:
        return "stale" not in await ask(plane, "GET", handle)

    await until(back)
    for _ in range(EVERYBODY):
        await until(back)
    assert (await ask(plane, "GET", handle))["references"] == 2


async def _lose_the_bucket(plane: LocalStack) -> None:
    """Empty the bucket, as a server without its files would have it."""
    bus = await NatsBus.connect(plane.nats_url)
    await bus.jetstream.api(f"STREAM.PURGE.KV_{subjects.PREFIXES}")
    await bus.close()


async def _shown(plane: LocalStack, handle: str) -> bool:
    shown = await ask(plane, "GET", handle)
    return bool(shown["references"] == 1)
