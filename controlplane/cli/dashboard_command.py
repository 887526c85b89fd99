"""`multiplane dashboard`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from controlplane.cli.options import (
    PORT_MAX,
    BusPlace,
    LogLevel,
    require_port,
    set_up_logs,
    with_bus,
)


@with_bus
def dashboard(
    host: Annotated[
        str, typer.Option(help="Address to serve on. It asks nobody who they are.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=PORT_MAX, help="Port; 0 for a free one.")] = 8090,
    log_level: LogLevel = "warning",
    *,
    bus: BusPlace,
) -> None:
    """Serve a page that shows the plane live: fleet, decisions, hotspots, latencies, stories.

    Example: `multiplane dashboard --nats nats://nats:4222 --port 8090`
    """
    from controlplane.dashboard.main import DashboardConfig, run_dashboard
    from controlplane.dashboard.server import DashboardServer

    set_up_logs(log_level)
    require_port("--port", host, port)
    bus.tell()

    def started(server: DashboardServer) -> None:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(json.dumps({"dashboard": f"http://{shown}:{server.port}/"}))

    status = run_dashboard(DashboardConfig(bus.url, bus.options, host, port), started)
    raise typer.Exit(status)
