"""The engine as a child process: ended politely, or by force, with all that it started."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from sidecar.engine_process import EngineProcess, find_ports
from tests.bus.worlds import eventually

pytestmark = [pytest.mark.live, pytest.mark.slow]


def script(tmp_path: Path, body: str) -> EngineProcess:
    """A shell script as engine; it writes the pid of a child that would outlive it."""
    path = tmp_path / "engine"
    path.write_text(f"#!/bin/sh\n{body}\nsleep 600 &\necho $! > {tmp_path}/child\nwait\nwait\n")
    path.chmod(0o755)
    return EngineProcess([str(path)])


async def child_of(tmp_path: Path) -> int:
    """The child's pid, once it is there."""
    child = tmp_path / "child"
    await eventually(lambda: child.exists() and child.read_text().strip())
    return int(child.read_text())


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_an_engine_that_ends_when_asked_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM goes to the engine; its children are killed after it."""
    engine = script(tmp_path, "trap 'exit 7' TERM")
    await engine.start()
    child = await child_of(tmp_path)
    assert os.getpgid(child) == engine.pid != os.getpgid(0)
    assert await engine.stop(10.0) == 7
    await eventually(lambda: gone(child))


async def test_an_engine_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    """After the grace the whole group goes."""
    engine = script(tmp_path, "trap '' TERM")
    await engine.start()
    child = await child_of(tmp_path)
    assert await engine.stop(0.1) == -signal.SIGKILL
    await eventually(lambda: gone(child))
    assert await engine.stop(0.1) == -signal.SIGKILL


async def test_a_program_that_is_not_there_is_named() -> None:
    """The usual reason is an environment that is not active."""
    with pytest.raises(OSError, match=r"cannot start vllm-9: No such file .* vLLM active"):
        await EngineProcess(["vllm-9", "serve", "m"]).start()


def test_free_ports_are_consecutive_and_free() -> None:
    """All of them can be bound at once, and no outgoing connection is given one meanwhile."""
    first = find_ports(4)
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert not outgoing.exists() or first + 4 <= int(outgoing.read_text().split()[0])
    made = [socket.socket() for _ in range(4)]
    for at, each in enumerate(made):
        each.bind(("127.0.0.1", first + at))
        each.close()
