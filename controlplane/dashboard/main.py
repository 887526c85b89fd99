"""A dashboard process from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from controlplane import runtime
from controlplane.bus import NatsOptions, connect
from controlplane.dashboard.server import DashboardServer
from controlplane.dashboard.service import DashboardService


class DashboardConfig(msgspec.Struct, frozen=True):
    """How a dashboard runs.

    Attributes:
        host: address to serve on; loopback unless told otherwise, since it asks nobody who they
            are.
        port: 0 for a free one.
    """

    bus_url: str
    bus_options: NatsOptions = NatsOptions()
    host: str = "127.0.0.1"
    port: int = 8090


async def serve(
    config: DashboardConfig, stop: asyncio.Event, started: Callable[[DashboardServer], None]
) -> int:
    """Run a dashboard until `stop` is set; returns the exit status.

    Raises:
        BusError: the bus refuses this client.
        OSError: the address cannot be had.
    """
    bus = await connect(config.bus_url, name="dashboard", options=config.bus_options)
    service = DashboardService(bus)
    server = DashboardServer(service, config.host, config.port)
    try:
        await service.start()
        await server.start()
        started(server)
        await stop.wait()
    finally:
        await server.stop()
        await service.stop()
        await bus.close()
    return 0


def run_dashboard(config: DashboardConfig, started: Callable[[DashboardServer], None]) -> int:
    """Run a dashboard in this process until it is signalled; returns the exit status."""
    return runtime.run(lambda stop: serve(config, stop, started))
