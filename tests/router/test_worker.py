"""A worker as its supervisor sees it, as a real process."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import pytest

from router.config import BEAT, RouterConfig, WorkerOrder

pytestmark = [pytest.mark.live, pytest.mark.slow]


async def test_a_worker_without_the_bus_says_that_it_lives() -> None:
    """Until it serves it sends empty lines and nothing else, and it ends with its input."""
    config = RouterConfig(
        bus_url="nats://127.0.0.1:1", port=0, admin_port=0, reuse_port=True, join_s_max=0.1
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.worker"), stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    order = WorkerOrder(config, "info", stdout=-1)  # of use only to one that serves
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    async with asyncio.timeout(60.0):
        for _ in range(3):
            assert await process.stdout.readline() == BEAT
        process.stdin.close()
        assert await process.wait() == 0
