"""The least that a relay in Python can do: what of the router's CPU time is the language's.

    python -m bench.proxy_floor --port 8000 --engines 127.0.0.1:8001,127.0.0.1:8002

Requests go to the engines in turns, over kept connections, and answers come back as they are. Heads
are searched for a length and nothing else, the end of a chunked body is taken to be the end of a
read. It checks nothing, limits nothing, times nothing, counts nothing and survives nothing: no
server may be like that. What it costs is uvloop's reading and writing, which nothing in Python
that moves the same bytes can go below.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from itertools import cycle
from typing import Final

import uvloop

_LAST_CHUNK: Final = b"0\r\n\r\n"


def _message_bytes(data: bytes, stop: int) -> int | None:
    """Return how long a message is whose head ends at `stop`; None if that is not said."""
    start = data.find(b"ontent-", 0, stop)
    while start >= 0 and data[start + 7 : start + 14].lower() != b"length:":
        start = data.find(b"ontent-", start + 7, stop)
    return None if start < 0 else stop + int(data[start + 14 : data.index(b"\r\n", start)])


class _Engine(asyncio.Protocol):
    """A connection to an engine, of one client at a time."""

    def __init__(self, idle: list[_Engine]) -> None:
        self._idle = idle
        self._client: _Client | None = None
        self._left: int | None = 0
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = transport.write  # type: ignore[attr-defined]

    def take(self, client: _Client, request: bytes) -> None:
        """Send a client's request."""
        self._client, self._begun = client, False
        self._to_client = client.transport.write
        self.write(request)

    def data_received(self, data: bytes) -> None:
        self._to_client(data)
        if not self._begun:
            self._begun = True
            self._left = _message_bytes(data, data.index(b"\r\n\r\n") + 4)
        if self._left is None:
            whole = data.endswith(_LAST_CHUNK)
        else:
            self._left -= len(data)
            whole = self._left <= 0
        if whole:
            self._idle.append(self)


class _Client(asyncio.Protocol):
    """A client's connection, which asks one thing at a time."""

    transport: asyncio.Transport

    def __init__(self, engines: list[tuple[str, int, list[_Engine]]], turns: cycle[int]) -> None:
        self._engines = engines
        self._turns = turns
        self._held = b""
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        held = self._held + data if self._held else data
        stop = held.find(b"\r\n\r\n") + 4
        if stop < 4 or len(held) < (_message_bytes(held, stop) or stop):
            self._held = held
            return
        self._held = b""
        host, port, idle = self._engines[next(self._turns)]
        if idle:
            idle.pop().take(self, held)
        else:
            self._opening = asyncio.create_task(self._open(host, port, idle, held))

    async def _open(self, host: str, port: int, idle: list[_Engine], request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(lambda: _Engine(idle), host, port)
        engine.take(self, request)


async def _serve(port: int, engines: list[str]) -> None:
    loop = asyncio.get_running_loop()
    parts = [engine.rpartition(":") for engine in engines]
    known: list[tuple[str, int, list[_Engine]]] = [(host, int(p), []) for host, _, p in parts]
    turns = cycle(range(len(known)))
    await loop.create_server(lambda: _Client(known, turns), "127.0.0.1", port, backlog=4096)
    gc.freeze()
    await loop.create_future()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engines", required=True, help="host:port, separated by commas")
    options = parser.parse_args()
    uvloop.run(_serve(options.port, options.engines.split(",")))


if __name__ == "__main__":
    main()
