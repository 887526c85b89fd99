"""The engine as a child: in a process group of its own, of which nothing survives the sidecar."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PORT_TRIES = 100
_PORT_MIN = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what outgoing connections take
_PORT_RANGE_USUAL = 32_768


class EngineProcess:
    """One engine: `start`, then `wait` for its end or `stop` it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._buried = False

    async def start(self) -> None:
        """Start it; its output goes where ours goes.

        Raises:
            OSError: the program cannot be started; it is named.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            reason = f"{error.strerror}; is the environment with vLLM active?"
            raise OSError(f"cannot start {self.command[0]}: {reason}") from error
        logger.info("started the engine as process %d", self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, and id of the group."""
        assert self._process is not None
        return self._process.pid

    async def wait(self) -> int:
        """Return its exit status once it ended, negative for a signal; kills what it left."""
        assert self._process is not None
        status = await self._process.wait()
        if not self._buried:  # once: the number may be another group's later
            self._buried = True
            self._kill_group()
        return status

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, and kill it and all its children after `grace_s`; returns as `wait`."""
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                logger.warning("the engine did not end within %.0f s: killing it", grace_s)
                self._kill_group()
        return await self.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Run in the child before exec: the kernel asks it to end when the sidecar dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def find_ports(count: int) -> int:
    """Return the first of `count` consecutive TCP ports that are free, and likely to remain so.

    An engine binds them when it has loaded its model, minutes later. Until then any outgoing
    connection of this machine could get them, so they lie below the ports that those are given.

    Raises:
        OSError: none were found.
    """
    last = max(_first_outgoing_port(), _PORT_MIN + _PORT_TRIES) - count
    for _ in range(_PORT_TRIES):
        with contextlib.ExitStack() as held:
            first = random.randint(_PORT_MIN, last)
            try:
                for port in range(first, first + count):
                    _bind(held, port)
            except OSError:
                continue
            return first
    raise OSError(f"no {count} consecutive free ports were found")


def _first_outgoing_port() -> int:
    """Return the least port that the kernel gives to outgoing connections."""
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _PORT_RANGE_USUAL


def _bind(held: contextlib.ExitStack, port: int) -> None:
    held.enter_context(socket.socket()).bind(("", port))
