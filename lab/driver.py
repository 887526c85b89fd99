"""A fleet of emulated engines on this machine, for `multiplane up`, benchmarks and tests.

Theory of operation. Every engine is a process of its own (about 45 MB of memory and 0.4 s of CPU to
start): it can be killed, stalled and restarted like a real one, and uses a core of its own. Ports
are the kernel's choice at first; a restart keeps them, as a supervised engine's would. Engines end
with the thread that started them, so even if its process is killed: start them in the main thread.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO

import msgspec

START_S_MAX = 30.0
STOP_S_MAX = 5.0


class EngineStartError(RuntimeError):
    """An engine ended or said nothing instead of serving; carries what it wrote to stderr."""


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


class LocalInstance:
    """One emulated engine of a fleet.

    Attributes:
        name: `engine-0`, `engine-1` …
        at: where it serves; the same after a restart, but for the process id.
    """

    def __init__(
        self, name: str, flags: Sequence[str], at: Endpoints, process: _Process, log: IO[bytes]
    ) -> None:
        self.name = name
        self.flags = tuple(flags)
        self.at = at
        self._process = process
        self._log = log

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return self.at.url

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process.returncode is None

    def log(self) -> str:
        """Return what it wrote to stderr so far."""
        return _text(self._log)

    def _signal(self, number: int) -> None:
        if self.running:
            self._process.send_signal(number)


_Process = asyncio.subprocess.Process


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
            EngineStartError: one did not start; those that did are still in `instances`.
        """
        started = await asyncio.gather(
            *(self._start_one(flags) for _ in range(count)), return_exceptions=True
        )
        for each in started:
            if isinstance(each, BaseException):
                raise each
        return [each for each in started if isinstance(each, LocalInstance)]

    async def stop(self, instance: LocalInstance) -> None:
        """Ask an engine to end, and wait; it is killed if it takes longer than STOP_S_MAX."""
        instance._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(instance._process.wait(), STOP_S_MAX)
        except TimeoutError:
            await self.kill(instance)

    async def kill(self, instance: LocalInstance) -> None:
        """End an engine as a crash would: no goodbye, connections reset."""
        instance._signal(signal.SIGKILL)
        await instance._process.wait()

    async def pause(self, instance: LocalInstance, *, on: bool) -> None:
        """Freeze an engine's process, sockets open, or let it go on."""
        instance._signal(signal.SIGSTOP if on else signal.SIGCONT)

    async def restart(self, instance: LocalInstance) -> None:
        """Kill an engine if it runs, and start it anew on the same ports with an empty cache.

        Raises:
            EngineStartError: it did not start.
        """
        await self.kill(instance)
        at = instance.at
        ports = ["--port", str(at.port)]
        for flag, endpoint in (
            ("--kv-port", at.kv_endpoint),
            ("--kv-replay-port", at.kv_replay_endpoint),
        ):
            if endpoint is not None:
                ports += [flag, endpoint.rpartition(":")[2]]
        instance._log.close()
        instance._process, instance._log, instance.at = await _spawn((*instance.flags, *ports))

    async def close(self) -> None:
        """End every engine."""
        for instance in self.instances:
            await self.pause(instance, on=False)
        await asyncio.gather(*map(self.stop, self.instances))
        for instance in self.instances:
            instance._log.close()
        self.instances.clear()

    async def _start_one(self, flags: Sequence[str]) -> LocalInstance:
        name = f"engine-{self._count}"
        self._count += 1
        all_flags = (*self.flags, *flags)
        process, log, at = await _spawn(all_flags)
        instance = LocalInstance(name, all_flags, at, process, log)
        self.instances.append(instance)
        return instance


async def _spawn(flags: Sequence[str]) -> tuple[_Process, IO[bytes], Endpoints]:
    """Start one process and wait until it serves. Raises EngineStartError."""
    log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the engine
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lab.server", "--die-with-parent", *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for whoever started the fleet
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S_MAX)
        return process, log, msgspec.json.decode(line, type=Endpoints)
    except (TimeoutError, msgspec.DecodeError) as error:
        await _end(process)
        said = _text(log).strip() or f"nothing within {START_S_MAX} s"
        log.close()
        raise EngineStartError(f"an emulated engine did not start; it said: {said}") from error
    except asyncio.CancelledError:
        await _end(process)
        log.close()
        raise


async def _end(process: _Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
