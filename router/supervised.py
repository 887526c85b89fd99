"""Runs a router with several workers until it is signalled."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from controlplane import runtime
from router.config import RouterConfig
from router.http_server import HttpServer
from router.supervisor import Supervisor, WorkerError
from router.supervisor_admin import SupervisorAdmin
from router.upstream import UpstreamPool

logger = logging.getLogger(__name__)

Started = Callable[[Supervisor, tuple[str, int]], None]
"""Told when all workers serve: who they are, and the operators' address."""


async def supervise(
    config: RouterConfig, workers: int, log_level: str, stop: asyncio.Event, started: Started
) -> int:
    """Run workers until `stop` is set; returns the exit status. SIGHUP replaces them one by one."""
    supervisor = Supervisor(config, workers, log_level)
    pool = UpstreamPool(config.upstream)
    admin = HttpServer(SupervisorAdmin(supervisor, pool), config.server)
    admin_address = await admin.start(config.admin_host, config.admin_port)
    wanted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, wanted.set)
    starting = asyncio.create_task(supervisor.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            wanted.clear()  # All are new.
            renewing = asyncio.create_task(_renew(supervisor, wanted))
            started(supervisor, admin_address)
            await stopping
            logger.info("stopping: running requests get up to %.0f s", config.stop_grace_s)
            renewing.cancel()
        starting.cancel()
        await asyncio.wait([starting])
        await supervisor.stop()
    except WorkerError as error:
        logger.error("%s", error)
        return max(error.status, 1)
    finally:
        stopping.cancel()
        await admin.stop(grace_s=0.0)
        await pool.close()
    return 0


async def _renew(supervisor: Supervisor, wanted: asyncio.Event) -> None:
    """Replace all workers whenever that is wanted; once more if it is while they are replaced."""
    while True:
        await wanted.wait()
        wanted.clear()
        await supervisor.renew()


def run_workers(config: RouterConfig, workers: int, log_level: str, started: Started) -> int:
    """Run several workers until this process is signalled; returns the exit status."""
    return runtime.run(lambda stop: supervise(config, workers, log_level, stop, started))
