"""Processes under measurement: started from a target, their CPU time and memory read from /proc."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Self

import psutil

from bench.proxy_load import connect, request_bytes

if TYPE_CHECKING:
    from bench.proxy_targets import Target

READY_S_MAX = 60.0
_LOOK_S = 0.5
_BUSY_SHARE_MAX = 0.05


class NotReady(Exception):
    """A server did not begin to answer."""


def free_port() -> int:
    """Return a port that nothing uses at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Running:
    """A process with all its children; stopped when the context ends.

    Attributes:
        name: what it is called in the report.
        port: where it listens.
    """

    def __init__(self, name: str, argv: list[str], env: dict[str, str], port: int) -> None:
        self.name = name
        self.port = port
        self._dir = TemporaryDirectory(prefix="proxy-bench-")
        self._argv = argv
        self._env = env
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def of(cls, target: Target, engine_ports: list[int], bus_url: str = "") -> Self:
        """Prepare a target to be run in front of engines, on a bus if it wants one."""
        running = cls(target.name, [], {}, free_port())
        servers = [f"127.0.0.1:{port}" for port in engine_ports]
        words = {
            "port": str(running.port),
            "port2": str(free_port()),
            "dir": running._dir.name,
            "engines": ",".join(servers),
            "python": sys.executable,
            "bus": bus_url,
            "servers_haproxy": "\n".join(f"    server s{s[-5:]} {s}" for s in servers),
            "servers_nginx": "\n".join(f"        server {s};" for s in servers),
        }
        for argument in target.argv:
            if argument == "{engine_urls}":
                running._argv += [f"http://{server}" for server in servers]
            else:
                running._argv.append(argument.format(**words))
        running._env = {name: value.format(**words) for name, value in target.env.items()}
        for name, content in target.files.items():
            (Path(running._dir.name) / name).write_text(content.format(**words))
        return running

    def __enter__(self) -> Self:
        log: IO[str] = (Path(self._dir.name) / "log").open("w")
        with log:
            self._process = subprocess.Popen(
                self._argv,
                env={**os.environ, **self._env},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        family = self._family()
        for process in family:
            process.terminate()
        psutil.wait_procs(family, timeout=5)
        for process in family:
            if process.is_running():
                process.kill()
        if self._process is not None:
            self._process.wait()
        self._dir.cleanup()

    async def ready(self) -> None:
        """Wait until completions are answered with 200, and nothing is left to do but answer.

        A router may go on with its preparations for a while, and they are not what is measured.

        Raises:
            NotReady: that is not so in time, or the process has ended; with the end of its output.
        """
        request = request_bytes(f"127.0.0.1:{self.port}", stream=False)
        try:
            async with asyncio.timeout(READY_S_MAX):
                while not await _answers(self.port, request):
                    if self._process is None or self._process.poll() is not None:
                        raise NotReady(f"{self.name} ended: {self.output()}")
                    await asyncio.sleep(0.1)
                while await self._busy_share() > _BUSY_SHARE_MAX:
                    pass
        except TimeoutError:
            raise NotReady(f"{self.name} does not answer: {self.output()}") from None

    async def _busy_share(self) -> float:
        """Return the share of one core that is used, over a short while."""
        before_s, start_s = self.cpu_s(), time.monotonic()
        await asyncio.sleep(_LOOK_S)
        return (self.cpu_s() - before_s) / (time.monotonic() - start_s)

    def output(self) -> str:
        """Return the end of what the process has printed."""
        return (Path(self._dir.name) / "log").read_text(errors="replace")[-2000:]

    def cpu_s(self) -> float:
        """Return the CPU time used so far by all threads of all processes, in seconds.

        Threads that have ended are not in it; servers keep theirs.
        """
        total_ns = 0
        for process in self._family():
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                total_ns += int((thread / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    def rss_bytes(self) -> int:
        """Return the resident memory of all processes."""
        return sum(process.memory_info().rss for process in self._family())

    def _family(self) -> list[psutil.Process]:
        """Return the process and all below it that are alive."""
        if self._process is None:
            return []
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


async def _answers(port: int, request: bytes) -> bool:
    """Whether a server answers a request with 200."""
    try:
        client = await connect(port)
    except OSError:
        return False
    try:
        return await client.ask(request)
    finally:
        client.transport.abort()


class Engines:
    """The mock engines' process.

    Attributes:
        ports: one for each engine.
    """

    def __init__(self, engines: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.proxy_engine", "--engines", str(engines)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.ports = [int(self._process.stdout.readline()) for _ in range(engines)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
