"""Ctrl-C during a replay in several processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil
import pytest

from tests.bus.worlds import eventually

pytestmark = [pytest.mark.live, pytest.mark.slow]

# Whoever runs the tests in the background may have SIGINT ignored, which processes hand down.
RUN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from controlplane.cli.main import run; sys.exit(run())"
)
LONG = "lab replay chatbot --policies all --duration 3600 --no-cache --jobs 2"


async def test_ctrl_c_ends_all_processes_without_a_word() -> None:
    """A terminal sends it to the whole group; no process prints where it was."""
    replay = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, *LONG.split()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        parent = psutil.Process(replay.pid)
        await eventually(lambda: len(parent.children()) > 2, 60.0)  # one looks after semaphores
        children = parent.children()
        os.killpg(replay.pid, signal.SIGINT)
        said, _ = await asyncio.wait_for(replay.communicate(), 30.0)
    finally:
        if replay.returncode is None:
            os.killpg(replay.pid, signal.SIGKILL)
    assert b"Traceback" not in said, said.decode()
    assert replay.returncode == 130
    await eventually(lambda: not any(child.is_running() for child in children))
