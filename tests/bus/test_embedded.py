"""The nats-server child: found, started, ended, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.bus import BusError, NatsBus, embedded
from controlplane.bus.embedded import EmbeddedNats, find_server
from controlplane.bus.setup import ensure
from tests.bus.worlds import ON_DISK, eventually, fast

pytestmark = pytest.mark.live


async def test_it_starts_stops_and_keeps_its_port_and_files(tmp_path: Path) -> None:
    """A restart, in order or after a crash, is on the same port with the same contents."""
    server = await EmbeddedNats(store_dir=tmp_path).start()
    first = server.port
    assert first > 0
    for end in (server.restart, server.kill):
        before = server.pid
        await end()
        await server.start()
        await server.start()
        assert server.port == first
        assert server.pid not in (None, before)
    bus = await NatsBus.connect(server.url, options=fast())
    changes = await ensure(bus, ON_DISK)
    assert {change.action for change in changes} == {"created"}
    await bus.close()
    await server.stop()
    assert not server.running
    async with EmbeddedNats(store_dir=tmp_path) as again:
        bus = await NatsBus.connect(again.url, options=fast())
        changes = await ensure(bus, ON_DISK)
        assert {change.action for change in changes} == {"unchanged"}
        await bus.close()


async def test_failure_shows_the_log() -> None:
    """A server that does not come up says why."""
    server = EmbeddedNats(args=["--cluster", "nonsense"])
    with pytest.raises(BusError, match="missing port in address"):
        await server.start()
    assert not server.running
    await server.stop()


async def test_what_cannot_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its folder goes with it, and the mark in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = EmbeddedNats(args=["--cluster", "nonsense"])
    with pytest.raises(BusError):
        await server.__aenter__()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_owner_leaves_is_swept_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next one removes the folder of an owner that died, and none that is in use or strange."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    strange = tmp_path / "multiplane-nats-strange"
    strange.mkdir()
    script = (
        "import os, signal\n"
        "from controlplane.bus.embedded import EmbeddedNats\n"
        "EmbeddedNats()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    (left,) = set(tmp_path.iterdir()) - {strange}
    servers = [EmbeddedNats(), EmbeddedNats()]
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 3
    for server in servers:
        asyncio.run(server.stop())
        asyncio.run(server.stop())
    assert list(tmp_path.iterdir()) == [strange]


async def test_two_servers_do_not_meet() -> None:
    """Each has its own port and files."""
    async with EmbeddedNats() as one, EmbeddedNats() as two:
        assert one.port != two.port


def test_without_a_binary_the_error_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It names the extra to install; and a binary on PATH is used."""
    monkeypatch.setattr(embedded.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BusError, match=r"multiplane\[embedded\]"):
        find_server()
    elsewhere = tmp_path / "bin"
    elsewhere.mkdir()
    (elsewhere / "nats-server").write_text("#!/bin/sh\n")
    (elsewhere / "nats-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert find_server() == elsewhere / "nats-server"


CHILD = """
import asyncio
from controlplane.bus.embedded import EmbeddedNats

async def main():
    server = await EmbeddedNats().start()
    print(server.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie that nobody reaped does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
async def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Kill -9 of the parent leaves no server behind."""
    command, env = [sys.executable, "-c", CHILD], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
    await eventually(lambda: not alive(pid))
