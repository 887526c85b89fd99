"""Child processes that say where they serve in one line of JSON, and end with us."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

import msgspec

START_S_MAX = 30.0
STOP_S_MAX = 10.0
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1


class ChildStartError(RuntimeError):
    """A child ended, or said nothing, instead of serving; carries what it wrote."""


def end_with_parent() -> None:
    """Run in the child before exec, or at its start: the kernel ends it when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One child process in a session of its own, so that Ctrl-C reaches only its parent.

    It may be started again once it has ended; its log goes on. Start it from the main thread:
    children end with the thread that started them.

    Attributes:
        ready: what it said when it was ready.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.command = tuple(command)
        self.ready: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait for its line.

        Raises:
            ChildStartError: it ended, or said nothing for START_S_MAX.
        """
        self._close_pipe()
        if self._log is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_S_MAX)
            self.ready = msgspec.json.decode(line)
        except (TimeoutError, msgspec.DecodeError) as error:
            await self.kill()
            said = self.log().strip() or f"nothing within {START_S_MAX:.0f} s"
            self.close()
            raise ChildStartError(f"{self.name} did not start; it said:\n{said}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise

    def log(self, bytes_max: int = 8192) -> str:
        """Return the end of what it wrote to standard error."""
        if self._log is None:
            return ""
        end = self._log.seek(0, 2)
        self._log.seek(max(0, end - bytes_max))
        text = self._log.read().decode("utf-8", "replace")
        self._log.seek(0, 2)
        return text

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.running:
            assert self._process is not None
            self._process.send_signal(number)

    def pause(self, *, on: bool) -> None:
        """Freeze it, sockets open, or let it go on."""
        self.signal(signal.SIGSTOP if on else signal.SIGCONT)

    async def wait(self) -> int:
        """Return its exit status once it has ended.

        What it left running may hold its standard output for long; asyncio would wait for it, too.
        """
        assert self._process is not None
        while self._process.returncode is None:  # noqa: ASYNC110 (asyncio tells nobody)
            await asyncio.sleep(_POLL_S)
        self._close_pipe()
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, even if it is frozen, and kill it if it takes longer than STOP_S_MAX."""
        if not self.running:
            return
        self.signal(signal.SIGTERM)
        self.pause(on=False)
        try:
            await asyncio.wait_for(self.wait(), STOP_S_MAX)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it as a crash would: no goodbye, connections reset."""
        self.signal(signal.SIGKILL)
        await self.wait()

    def close(self) -> None:
        """Forget its log. Call once it has ended."""
        self._close_pipe()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _close_pipe(self) -> None:
        """Close our end of the pipe of a process that has ended; asyncio itself has no call."""
        if self._process is not None and not self.running:
            self._process._transport.close()  # type: ignore[attr-defined]
