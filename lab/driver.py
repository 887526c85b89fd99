"""A fleet of emulated engines on this machine, for `multiplane up`, benchmarks and tests.

Theory of operation. Every engine is a process of its own (about 45 MB of memory and 0.4 s of CPU to
start): it can be killed, stalled and restarted like a real one, and uses a core of its own. Ports
are the kernel's choice at first; a restart keeps them, as a supervised engine's would. Engines end
with the thread that started them, so even if its process is killed: start them in the main thread.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from types import TracebackType

import msgspec

from lab.children import Child


class Endpoints(msgspec.Struct, frozen=True):
    """Where an engine serves: the line it prints when it does (`lab.server.Ready`)."""

    url: str
    port: int
    pid: int
    model: str
    block_size: int
    num_blocks: int
    kv_endpoint: str | None
    kv_replay_endpoint: str | None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that take the same ports again."""
        flags = ["--port", str(self.port)]
        for flag, endpoint in (
            ("--kv-port", self.kv_endpoint),
            ("--kv-replay-port", self.kv_replay_endpoint),
        ):
            if endpoint is not None:
                flags += [flag, endpoint.rpartition(":")[2]]
        return tuple(flags)


class LocalInstance:
    """One emulated engine of a fleet.

    Args:
        flags: as for `python -m lab.server`.

    Attributes:
        name: `engine-0`, `engine-1` …
        at: where it serves, once started; the same after a restart, but for the process id.
    """

    at: Endpoints

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        self.name = name
        self._command = (sys.executable, "-m", "lab.server", *flags)
        self._child = Child(name, self._command)

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return self.at.url

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._child.running

    def log(self) -> str:
        """Return the end of what it wrote to stderr."""
        return self._child.log()

    async def start(self) -> None:
        """Start it. Raises ChildStartError."""
        await self._child.start()
        self.at = msgspec.convert(self._child.ready, Endpoints)

    async def stop(self) -> None:
        """Ask it to end, and wait; it is killed if it takes too long."""
        await self._child.stop()

    async def kill(self) -> None:
        """End it as a crash would: no goodbye, connections reset."""
        await self._child.kill()

    def pause(self, *, on: bool) -> None:
        """Freeze its process, sockets open, or let it go on."""
        self._child.pause(on=on)

    async def restart(self) -> None:
        """Kill it if it runs, and start it anew on the same ports with an empty cache.

        Raises:
            ChildStartError: it did not start.
        """
        await self.kill()
        self._child.command = (*self._command, *self.at.flags)
        await self.start()

    async def close(self) -> None:
        """End it, and forget its log."""
        await self.stop()
        self._child.close()


class LocalFleet:
    """Starts and ends emulated engines; an async context manager that leaves none behind.

    Args:
        flags: of every engine, as for `python -m lab.server`.
    """

    def __init__(self, *flags: str) -> None:
        self.flags = flags
        self.instances: list[LocalInstance] = []
        self._count = 0

    async def __aenter__(self) -> LocalFleet:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self, count: int, *flags: str) -> list[LocalInstance]:
        """Start `count` engines at once, with `flags` beside the fleet's own.

        Raises:
            ChildStartError: one did not start; those that did are still in `instances`.
        """
        new = [self._new(flags) for _ in range(count)]
        starts = [asyncio.ensure_future(each.start()) for each in new]
        try:
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in new))
            raise
        for instance, outcome in zip(new, outcomes, strict=True):
            if outcome is None:
                self.instances.append(instance)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return new

    async def close(self) -> None:
        """End every engine."""
        await asyncio.gather(*(instance.close() for instance in self.instances))
        self.instances.clear()

    def _new(self, flags: Sequence[str]) -> LocalInstance:
        name = f"engine-{self._count}"
        self._count += 1
        return LocalInstance(name, (*self.flags, *flags))
