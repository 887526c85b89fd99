"""Clients that keep asking and count what fails, for tests of stops and restarts."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import aiohttp


class SteadyLoad:
    """Asks over new and over kept connections until the context ends.

    Attributes:
        answered: whole answers so far.
        failures: what went wrong, request by request.
    """

    def __init__(self, url: str, clients: int = 8) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._clients = clients
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._ask(number, kept=number % 2 == 0))
            for number in range(self._clients)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopping = True

    async def answers(self, more: int) -> None:
        """Wait for so many more answers, or failures, with a deadline."""
        until = self.answered + len(self.failures) + more
        async with asyncio.timeout(60):
            while True:
                if self.answered + len(self.failures) >= until:
                    return
                await asyncio.sleep(0.01)

    async def _ask(self, number: int, *, kept: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not kept)
        async with aiohttp.ClientSession(connector=connector) as session:
            turn = 0
            while not self._stopping:
                turn += 1
                body: dict[str, Any] = {
                    "model": "tiny",
                    "prompt": f"{number} {turn} " * 20,
                    "max_tokens": 20,
                    "stream": number % 4 < 2,
                }
                try:
                    async with session.post(f"{self._url}/v1/completions", json=body) as answer:
                        text = await answer.text()
                        whole = "[DONE]" in text if body["stream"] else "usage" in text
                        if answer.status != 200 or not whole:
                            raise ValueError(f"{answer.status} {text[-200:]}")
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    self.failures.append(f"{number}/{turn} {type(error).__name__}: {error}")
                else:
                    self.answered += 1
