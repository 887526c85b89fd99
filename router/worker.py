"""A router process under a supervisor: `python -m router.worker`.

Its order, a `WorkerOrder`, comes as one line of JSON on standard input, so that no secret is on a
command line. Its answer, a `WorkerReady`, goes out as one line on standard output once it serves.
Before and after it, an empty line now and then says that the event loop turns; the worker keeps the
pipe for that when the access log takes the place of standard output. When standard input ends, so
has the supervisor, and the worker stops as if it had been signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import Final

import msgspec

from controlplane import runtime
from controlplane.bus.protocol import BusError
from router.config import BEAT, WorkerOrder, WorkerReady
from router.main import RouterProcess, serve

logger = logging.getLogger(__name__)

BEAT_S: Final = 2.0
"""How often a worker tells that it lives: some times in each of its supervisor's waits."""


def main() -> int:
    """Run a worker; returns its exit status."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerOrder)
    runtime.log_to_stderr(order.log_level)
    try:
        return runtime.run(lambda stop: _serve(order, stop))
    except (BusError, OSError, ValueError) as error:
        logger.error("this worker cannot serve: %s", error)
        return 1


async def _serve(order: WorkerOrder, stop: asyncio.Event) -> int:
    loop = asyncio.get_running_loop()
    supervisor = os.dup(sys.stdout.fileno())
    os.set_blocking(supervisor, False)
    _beat(loop, supervisor)
    # Nothing more is written to it: it becomes readable when it ends.
    loop.add_reader(sys.stdin.fileno(), _supervisor_gone, loop, stop)
    return await serve(order.config, stop, lambda process: _started(order, process))


def _beat(loop: asyncio.AbstractEventLoop, supervisor: int) -> None:
    """Tell the supervisor that the loop turns, and do so again in a while."""
    # One that does not read is stuck itself; one that is gone shows at standard input.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(supervisor, BEAT)
    loop.call_later(BEAT_S, _beat, loop, supervisor)


def _supervisor_gone(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.remove_reader(sys.stdin.fileno())
    stop.set()


def _started(order: WorkerOrder, process: RouterProcess) -> None:
    ready = WorkerReady(process.router_id, os.getpid(), process.address, process.admin_address)
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
    os.dup2(order.stdout, sys.stdout.fileno())  # for the access log
    os.close(order.stdout)


if __name__ == "__main__":
    sys.exit(main())
