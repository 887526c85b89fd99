"""Child processes end without a trace, whatever they leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from lab.children import Child

pytestmark = pytest.mark.live

PARENT = """
import json, subprocess, sys
orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"orphan": orphan.pid}), flush=True)
"""


def descriptors() -> set[str]:
    """Return what this process has open."""
    return set(os.listdir("/proc/self/fd"))


async def test_what_a_child_left_running_holds_no_pipe_of_ours() -> None:
    """It has ended, and its pipe is closed, though another may still write; it may start anew."""
    child = Child("parent", [sys.executable, "-c", PARENT])
    before = descriptors()
    for _ in range(2):
        await child.start()
        orphan = child.ready["orphan"]
        try:
            assert await asyncio.wait_for(child.wait(), 10.0) == 0
            child.close()
            assert descriptors() <= before
        finally:
            os.kill(orphan, signal.SIGKILL)  # it lived
