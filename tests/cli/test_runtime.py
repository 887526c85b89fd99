"""What every process asks of the machine at its start."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys

import pytest

from controlplane.runtime import raise_file_limit, run


def test_a_process_may_open_as_many_files_as_the_machine_lets_it() -> None:
    """A shell's soft limit of 1,024 would end a router at 500 streams."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hangup_stops_a_service_as_a_termination_does() -> None:
    """What runs is finished; many of them end nothing at once, as a second SIGTERM would."""

    async def main(stop: asyncio.Event) -> int:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.wait()
        return 7

    assert run(main) == 7


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """Whoever was started by nohup outlives the terminal."""

    async def main(stop: asyncio.Event) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(5):
            await asyncio.sleep(0)
        return int(stop.is_set())

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(main) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_router_loads_no_client_library_that_it_does_not_use() -> None:
    """Neither its own command nor a worker: aiohttp costs a quarter of a start and 8 MiB each."""
    script = (
        "import sys, controlplane.cli.app, router.main, router.worker\n"
        "assert 'nats' in sys.modules and 'aiohttp' not in sys.modules\n"
        "import aiohttp"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_first_signal_after_another_cause_to_stop_ends_nothing_at_once() -> None:
    """A worker whose supervisor has told it to stop may be signalled, too, once."""

    async def main(stop: asyncio.Event) -> int:
        stop.set()
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(5):
            await asyncio.sleep(0)
        return 7

    assert run(main) == 7
