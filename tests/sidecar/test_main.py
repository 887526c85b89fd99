"""Sidecars as real processes: beside an engine, around one, and when either is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.setup import ensure
from controlplane.http_client import HttpClient
from lab.tiny_model import tiny_model_dir
from sidecar.config import SidecarConfig
from tests.bus.worlds import IN_MEMORY, fast
from tests.lab.server_helpers import serving
from tests.sidecar.service_helpers import FAST, Router, eventually

pytestmark = [pytest.mark.live, pytest.mark.slow]

START_S_MAX = 30.0

# What `vllm` is to the sidecar: a server with vLLM's flags, and a child in the same process group
# that outlives it unless somebody kills it, as EngineCore does. The child carries the events to
# where they should go: vLLM connects to an endpoint without `*`, the emulated engine listens.
VLLM = """\
#!{python}
import json, os, socket, subprocess, sys
given = sys.argv
assert given[1] == "serve" and "--enable-prefix-caching" in given
events = json.loads(given[given.index("--kv-events-config") + 1])
assert events["endpoint"].startswith("tcp://127.0.0.1:")
with socket.socket() as made:
    made.bind(("127.0.0.1", 0))
    kv_port = str(made.getsockname()[1])
carry = '''
import sys, zmq
context = zmq.Context()
there, here = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
there.connect("tcp://127.0.0.1:" + sys.argv[1])
here.connect(sys.argv[2])
zmq.proxy(there, here)
'''
child = subprocess.Popen([sys.executable, "-c", carry, kv_port, events["endpoint"]])
open(os.environ["CHILD_PID_FILE"], "w").write(f"{{os.getpid()}} {{child.pid}}")
os.environ["PYTHONPATH"] = {root!r}
os.execv(sys.executable, [sys.executable, "-m", "lab.server", "--model-dir", given[2], "--speed",
    "100", "--port", given[given.index("--port") + 1], "--kv-port", kv_port,
    "--kv-replay-port", events["replay_endpoint"].rpartition(":")[2]])
"""

# The same, but it finishes what it has when it is signalled, and a second signal ends it at once.
SIGNALLED_TWICE = """\
import signal, time
engine = subprocess.Popen(COMMAND)
def finish(*_):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    engine.terminate()
    engine.wait()
    while "does not answer while draining" not in open({log!r}).read():
        time.sleep(0.01)
    time.sleep(0.5)
    open({finished!r}, "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, finish)
while True:
    signal.pause()
"""


@pytest.fixture
async def nats() -> AsyncIterator[tuple[str, Router]]:
    """A server of the test's own, and a router's view of it."""
    async with EmbeddedNats() as server:
        bus = await NatsBus.connect(server.url, options=fast())
        await ensure(bus, IN_MEMORY)
        router = Router(bus)
        await router.start()
        yield server.url, router
        await bus.close()


class Process:
    """A sidecar process; its log is in `log`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.running: asyncio.subprocess.Process

    async def start(self, config: SidecarConfig, *command: str, **environment: str) -> None:
        """Start it."""
        script = Path(__file__).with_name("sidecar_process.py")
        with self.log.open("wb") as log:
            self.running = await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), msgspec.json.encode(config).decode(), *command),
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )

    async def end(self, signal_number: int | None = None) -> int:
        """Signal it if asked to, and return its exit status."""
        if signal_number is not None:
            self.running.send_signal(signal_number)
        async with asyncio.timeout(20.0):
            return await self.running.wait()


@contextlib.asynccontextmanager
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    """A process that does not outlive its test; its log is shown when the test fails."""
    made = Process(tmp_path / "sidecar.log")
    try:
        yield made
    except BaseException:
        print(made.log.read_text())
        raise
    finally:
        if made.running.returncode is None:
            made.running.kill()
            await made.running.wait()


def settings(bus_url: str, **more: Any) -> SidecarConfig:
    """Settings of a quick sidecar."""
    given = {"engine_url": "http://unset", "instance_id": "i-1", **FAST, **more}
    return SidecarConfig(bus_url=bus_url, **given)


async def test_a_sidecar_beside_an_engine_ends_when_asked(
    nats: tuple[str, Router], tmp_path: Path
) -> None:
    """It registers, serves its metrics, and deregisters on SIGTERM with status 0."""
    url, router = nats
    metrics = free_port()
    async with serving() as client, process(tmp_path) as sidecar, HttpClient() as http:
        await sidecar.start(settings(url, engine_url=client.url, metrics_port=metrics))
        await eventually(lambda: router.state("i-1") == "ready", START_S_MAX)
        assert router.records["i-1"].host == socket.gethostname()
        assert router.records["i-1"].card == "" or len(router.records["i-1"].card) == 64
        page = await text(f"http://127.0.0.1:{metrics}/metrics")
        assert 'multiplane_sidecar_state{state="ready"} 1.0' in page
        assert 'multiplane_sidecar_stream_live{instance="i-1"} 1.0' in page
        assert await http.get(f"{client.url}/load") == {"server_load": 0}
        assert await sidecar.end(signal.SIGTERM) == 0
        await eventually(lambda: router.history[-1] == ("i-1", "deleted"))


async def launched(
    sidecar: Process, url: str, tmp_path: Path, ending: str = "", **more: Any
) -> list[int]:
    """Start a sidecar around an engine; returns the process ids of engine and its child."""
    vllm = tmp_path / "vllm"
    script = VLLM.format(python=sys.executable, root=str(Path(__file__).parents[2]))
    if ending:
        script = script.replace("os.execv(sys.executable, [", "COMMAND = ([") + ending
    vllm.write_text(script)
    vllm.chmod(0o755)
    pids = tmp_path / "pids"
    await sidecar.start(
        settings(url, **more),
        *(str(vllm), "serve", str(tiny_model_dir()), "--port", str(free_port())),
        CHILD_PID_FILE=str(pids),
    )
    await eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, START_S_MAX)
    return [int(pid) for pid in pids.read_text().split()]


def alive(pids: list[int]) -> list[int]:
    """The processes that still run."""
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


async def test_a_launched_engine_is_followed_and_ended(
    nats: tuple[str, Router], tmp_path: Path
) -> None:
    """The added flags make its blocks visible; SIGTERM ends it and all its children."""
    url, router = nats
    metrics = free_port()
    async with process(tmp_path) as sidecar, HttpClient() as http:
        pids = await launched(sidecar, url, tmp_path, metrics_port=metrics)
        await eventually(lambda: router.state("i-1") == "ready", START_S_MAX)
        engine = router.records["i-1"].url
        silent = 'multiplane_sidecar_messages_total{instance="i-1"} 0.0'
        first = 0
        while silent in await text(f"http://127.0.0.1:{metrics}/metrics"):  # as long as it takes
            first += 100
            body = {"model": "tiny", "prompt": list(range(first, first + 100)), "max_tokens": 4}
            await http.post(f"{engine}/v1/completions", body)
        truth = set((await http.get(f"{engine}/debug/blocks"))["block_hashes"])
        await eventually(lambda: router.blocks("i-1") == truth != set())
        assert alive(pids) == pids
        assert await sidecar.end(signal.SIGTERM) == 0
        await eventually(lambda: alive(pids) == [])
        await eventually(lambda: router.history[-1] == ("i-1", "deleted"))
        assert ("i-1", "draining") in router.history


async def test_an_engine_that_was_signalled_too_is_not_signalled_again(
    nats: tuple[str, Router], tmp_path: Path
) -> None:
    """Whoever stops the sidecar may signal all processes: the engine finishes what it has."""
    url, router = nats
    finished = tmp_path / "finished"
    async with process(tmp_path) as sidecar:
        ending = SIGNALLED_TWICE.format(log=str(sidecar.log), finished=str(finished))
        pids = await launched(sidecar, url, tmp_path, ending, settle_s=1.0)
        await eventually(lambda: router.state("i-1") == "ready", START_S_MAX)
        os.kill(pids[0], signal.SIGTERM)
        assert await sidecar.end(signal.SIGTERM) == 0
        assert finished.exists()
        await eventually(lambda: alive(pids) == [])


async def test_a_launched_engine_that_dies_ends_its_sidecar(
    nats: tuple[str, Router], tmp_path: Path
) -> None:
    """The sidecar says so, deregisters, leaves no orphan, and passes the status on."""
    url, router = nats
    async with process(tmp_path) as sidecar:
        pids = await launched(sidecar, url, tmp_path)
        await eventually(lambda: router.state("i-1") == "ready", START_S_MAX)
        os.kill(pids[0], signal.SIGKILL)
        assert await sidecar.end() == 128 + signal.SIGKILL
        await eventually(lambda: alive(pids) == [])
        await eventually(lambda: router.history[-1] == ("i-1", "deleted"))
        assert "its process ended with status -9" in sidecar.log.read_text()


async def test_an_engine_that_cannot_start_is_an_error(
    nats: tuple[str, Router], tmp_path: Path
) -> None:
    """An engine that ends at once ends the sidecar, never with status 0."""
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\nexit 0\n")
    vllm.chmod(0o755)
    async with process(tmp_path) as sidecar:
        await sidecar.start(settings(nats[0]), str(vllm), "serve", "m")
        assert await sidecar.end() == 1
        assert "its process ended with status 0" in sidecar.log.read_text()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


async def text(url: str) -> str:
    """The body of a page."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()
