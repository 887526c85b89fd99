"""Real processes: fleets start, die, restart and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from lab.children import ChildStartError
from lab.driver import LocalFleet

pytestmark = [pytest.mark.live, pytest.mark.slow]

FLAGS = ("--blocks", "256", "--max-model-len", "2048", "--speed", "50")


async def eventually(holds: Callable[[], bool], deadline_s: float = 5.0) -> None:
    """Wait for a condition; fail if it does not come to hold."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, "the condition did not come to hold"
        await asyncio.sleep(0.02)


async def blocks(url: str) -> dict[str, object]:
    """What /debug/blocks says."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/debug/blocks") as answer:
        found: dict[str, object] = await answer.json()
        return found


async def complete(url: str, prompt: list[int]) -> int:
    """Send a completion; return the status."""
    body = {"prompt": prompt, "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        return answer.status


async def test_engines_start_serve_and_end() -> None:
    """Each engine of a fleet serves on ports of its own; after closing, no process is left."""
    async with LocalFleet(*FLAGS) as fleet:
        first, second = await fleet.start(2, "--name", "m")
        assert {first.name, second.name} == {"engine-0", "engine-1"}
        assert first.url != second.url
        assert first.at.kv_endpoint != second.at.kv_endpoint
        assert await complete(first.url, [5] * 40) == 200
        assert len((await blocks(first.url))["engine_hashes"]) == 2  # type: ignore[arg-type]
        assert (await blocks(second.url))["engine_hashes"] == []
        pids = [first.at.pid, second.at.pid]
    assert not any(map(alive, pids))


async def test_restart_keeps_ports_and_forgets_blocks() -> None:
    """A restarted engine is another process on the same ports, with an empty cache."""
    async with LocalFleet(*FLAGS) as fleet:
        (instance,) = await fleet.start(1)
        before = instance.at
        assert await complete(instance.url, [5] * 40) == 200
        await instance.kill()
        assert not instance.running
        with pytest.raises(aiohttp.ClientConnectionError):
            await blocks(instance.url)
        await instance.restart()
        assert instance.running
        assert instance.at.pid != before.pid
        assert (instance.url, instance.at.kv_endpoint) == (before.url, before.kv_endpoint)
        assert (await blocks(instance.url))["next_seq"] == 0


async def test_paused_engine_answers_after_it_goes_on() -> None:
    """A frozen process keeps its connections and answers late."""
    async with LocalFleet(*FLAGS) as fleet:
        (instance,) = await fleet.start(1)
        instance.pause(on=True)
        waiting = asyncio.create_task(complete(instance.url, [5] * 40))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        instance.pause(on=False)
        assert await waiting == 200


async def test_engine_that_cannot_start_says_why() -> None:
    """A bad flag or impossible limits end in an error that carries the engine's own words."""
    async with LocalFleet(*FLAGS) as fleet:
        with pytest.raises(ChildStartError, match="do not hold max_model_len"):
            await fleet.start(1, "--blocks", "2")
        with pytest.raises(ChildStartError, match="--speed"):
            await fleet.start(1, "--speed", "0")


def test_engines_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """When the starter is killed, its engines end too."""
    script = tmp_path / "starter.py"
    script.write_text(
        "import asyncio\n"
        "from lab.driver import LocalFleet\n"
        "async def main():\n"
        f"    (instance,) = await LocalFleet(*{FLAGS!r}).start(1)\n"
        "    print(instance.at.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert alive(pid)
        starter.kill()
    asyncio.run(eventually(lambda: not alive(pid)))


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    os.kill(pid, 0)
    return state != "Z"
