"""`multiplane detector`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from controlplane.cli.errors import UsageError
from controlplane.cli.options import (
    PORT_MAX,
    BusPlace,
    LogLevel,
    require_port,
    set_up_logs,
    with_service_bus,
)

JUDGEMENT = "When a class is a hotspot"
FALLBACK = "When alarms persist"
PROCESS = "How it runs"


@with_service_bus
def detector(
    window_s: Annotated[
        float,
        typer.Option(min=1.0, help="Time over which shares are taken.", rich_help_panel=JUDGEMENT),
    ] = 60.0,
    requests_min: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests of a class in that time before it can be alarmed.",
            rich_help_panel=JUDGEMENT,
        ),
    ] = 20,
    requests_max: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests of a model kept at once; beyond it the window gets shorter.",
            rich_help_panel=JUDGEMENT,
        ),
    ] = 100_000,
    ttl_s: Annotated[
        float,
        typer.Option(
            min=10.0,
            help="How long a verdict lasts without a detector that renews it.",
            rich_help_panel=JUDGEMENT,
        ),
    ] = 15.0,
    switch: Annotated[
        bool,
        typer.Option(
            "--switch/--no-switch",
            help="Switch a model to round robin while its alarms persist.",
            rich_help_panel=FALLBACK,
        ),
    ] = True,
    persist_s: Annotated[
        float,
        typer.Option(min=1.0, help="An alarm this old persists.", rich_help_panel=FALLBACK),
    ] = 60.0,
    share_min: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Share of requests in such classes that it takes.",
            rich_help_panel=FALLBACK,
        ),
    ] = 0.25,
    stay_s: Annotated[
        float,
        typer.Option(min=1.0, help="How long the switch lasts at least.", rich_help_panel=FALLBACK),
    ] = 60.0,
    detector_id: Annotated[
        str, typer.Option(help="Name on the bus; made up by default.", rich_help_panel=PROCESS)
    ] = "",
    lease_ttl_s: Annotated[
        float,
        typer.Option(
            min=2.0,
            help="Silence of the leader after which a standby takes over.",
            rich_help_panel=PROCESS,
        ),
    ] = 3.0,
    metrics_host: Annotated[
        str, typer.Option(help="Address of the metrics.", rich_help_panel=PROCESS)
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=PORT_MAX,
            help="Port of the metrics, 0 for a free one; none by default.",
            rich_help_panel=PROCESS,
        ),
    ] = None,
    log_level: LogLevel = "info",
    *,
    bus: BusPlace,
) -> None:
    """Watch what the routers decide, and bar the holders of classes that outgrow them.

    Routers work without it. Run two or more for availability: one leads, the others stand by. It
    prints one line of JSON once it watches.

    Example: `multiplane detector --nats nats://nats:4222 --window-s 30`
    """
    set_up_logs(log_level)
    require_port("--metrics-port", metrics_host, metrics_port or 0)
    judgement = {
        "window_s": window_s,
        "requests_min": requests_min,
        "requests_max": requests_max,
        "ttl_s": ttl_s,
    }
    fallback = {
        "memory_s": window_s,
        "persist_s": persist_s,
        "share_min": share_min if switch else 2.0,
        "stay_s": stay_s,
    }
    process = {
        "bus_url": bus.url,
        "bus_options": bus.options,
        "detector_id": detector_id,
        "lease_ttl_s": lease_ttl_s,
        "lease_renew_s": lease_ttl_s / 3,
        "renew_s": ttl_s / 3,
        "metrics_host": metrics_host,
        "metrics_port": metrics_port,
    }
    raise typer.Exit(_run(judgement, fallback, process))


def _run(judgement: dict[str, Any], fallback: dict[str, Any], process: dict[str, Any]) -> int:
    from controlplane.core.detector import DetectorConfig
    from controlplane.core.detector_trouble import TroubleConfig
    from controlplane.detector.config import DetectorServiceConfig
    from controlplane.detector.main import run_detector
    from controlplane.detector.service import DetectorService
    from controlplane.exporter import Exporter

    def started(service: DetectorService, exporter: Exporter | None) -> None:
        shown = None if exporter is None else f"{process['metrics_host']}:{exporter.port}"
        line = json.dumps({"detector": service.detector_id, "metrics": shown})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        trouble = TroubleConfig(**fallback)
        config = DetectorServiceConfig(
            detector=DetectorConfig(trouble=trouble, **judgement), **process
        )
    except ValueError as error:
        raise UsageError(f"these settings do not go together: {error}") from error
    return run_detector(config, started)
