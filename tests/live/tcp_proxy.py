"""A TCP proxy whose connections can be cut, black-holed, slowed down and healed."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

_PIECE_BYTES = 64 * 1024
_SLOW_PIECE_BYTES = 1024
_HELD_BYTES = 256 * 1024  # by the kernel; with less a segment of the loopback does not fit


class TcpProxy:
    """Listens on a port of its own and passes bytes to and from a target; an async context.

    Args:
        port: of the target, on this host.

    Attributes:
        port: where it listens, the same after a cut.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self._target = port
        self._listener: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._pause_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.heal()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        """Where NATS clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._writers:
            writer.transport.abort()

    def black_hole(self) -> None:
        """Accept connections, keep those there are, and let no byte through."""
        self._passing.clear()

    def slow_down(self, pause_s: float) -> None:
        """Pass 1 KiB to the client, pause, and so on, on each connection."""
        self._pause_s = pause_s

    async def heal(self) -> None:
        """Pass everything, as in the beginning."""
        self._pause_s = 0.0
        self._passing.set()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._listener.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on, both ways, until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        ends = [writer]
        try:
            there, onward = await asyncio.open_connection(sock=await self._socket())
            self._writers.add(onward)
            ends.append(onward)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, onward, slow=False))
                both.create_task(self._pass(there, writer, slow=True))
        except* (OSError, asyncio.CancelledError):
            pass  # either side is gone, or the proxy is
        finally:
            for end in ends:
                end.transport.abort()
                self._writers.discard(end)
            self._tasks.discard(task)

    async def _socket(self) -> socket.socket:
        """Connect to the target, so that little of what it sends is held on the way."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _HELD_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._target))
        except (OSError, asyncio.CancelledError):
            sock.close()
            raise
        return sock

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool
    ) -> None:
        """Pass on what one side sends; ends with an error, so that the other direction does too."""
        while True:
            pause_s = self._pause_s if slow else 0.0
            data = await reader.read(_SLOW_PIECE_BYTES if pause_s else _PIECE_BYTES)
            if not data:
                raise ConnectionResetError
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
