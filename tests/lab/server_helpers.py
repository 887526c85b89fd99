"""An emulated server inside the test's own event loop, and a client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

from lab.server import EmulatedServer
from lab.server_options import ServerOptions
from lab.tiny_model import tiny_model_dir

DEADLINE_S = 5.0


class Client:
    """Talks to one server.

    Attributes:
        server: the server itself, for what HTTP does not show.
        url: where it serves.
    """

    def __init__(self, session: aiohttp.ClientSession, server: EmulatedServer, url: str) -> None:
        self.session = session
        self.server = server
        self.url = url

    async def get(self, path: str) -> Any:
        """The JSON that a path gives."""
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json(content_type=None)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON that a body gets."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def ok(self, path: str, body: Any, **headers: str) -> Any:
        """The JSON that a body gets, which must be accepted."""
        status, answer = await self.post(path, body, **headers)
        assert status == 200, answer
        return answer

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end as it should."""
        data = json.dumps({**body, "stream": True}).encode()
        async with self.session.post(self.url + path, data=data) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = (await answer.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def metric(self, name: str, labels: str = "") -> float:
        """The value of one series in /metrics."""
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        for line in text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and labels in line:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name} with {labels!r}")


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Client]:
    """A small, fast server; `options` are those of the command line."""
    small = {"num_blocks": 257, "max_model_len": 4096, "speed": 100.0}
    made = ServerOptions(tiny_model_dir(), **{"names": ["tiny"], **small, **options})
    server = EmulatedServer(made)
    ready = await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(session, server, ready.url)
    finally:
        await server.stop()


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition; fail if it does not come to hold."""
    end_s = time.monotonic() + DEADLINE_S
    while not await holds():
        assert time.monotonic() < end_s, "the condition did not come to hold"
        await asyncio.sleep(0.005)
