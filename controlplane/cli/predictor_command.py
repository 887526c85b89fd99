"""`multiplane predictor`."""

from __future__ import annotations

import json
from typing import Annotated

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


@with_service_bus
def predictor(
    bus: BusPlace,
    retrain_requests: Annotated[
        int, typer.Option(min=200, help="Train whenever so many requests have ended.")
    ] = 1000,
    samples_max: Annotated[
        int, typer.Option(min=500, help="Requests of each model to learn from, the newest.")
    ] = 8000,
    predictor_id: Annotated[str, typer.Option(help="Name on the bus; made up by default.")] = "",
    lease_ttl_s: Annotated[
        float, typer.Option(min=2.0, help="Silence of the leader after which a standby takes over.")
    ] = 5.0,
    metrics_host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=PORT_MAX, help="Port of the metrics, 0 for a free one; none by default."
        ),
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Learn from what routers tell how long requests take, and publish it for their queues.

    Routers work without it, by mean + 3σ of what they see. Run two or more for availability: one
    leads, the others stand by. It prints one line of JSON once it learns.

    Example: `multiplane predictor --nats nats://nats:4222 --metrics-port 9092`
    """
    from controlplane.exporter import Exporter
    from controlplane.predictor import trees
    from controlplane.predictor.config import PredictorConfig
    from controlplane.predictor.main import run_predictor
    from controlplane.predictor.service import PredictorService

    set_up_logs(log_level)
    require_port("--metrics-port", metrics_host, metrics_port or 0)

    def started(service: PredictorService, exporter: Exporter | None) -> None:
        shown = None if exporter is None else f"{metrics_host}:{exporter.port}"
        typer.echo(json.dumps({"predictor": service.predictor_id, "metrics": shown}))

    try:
        trees.library()
        config = PredictorConfig(
            bus_url=bus.url,
            bus_options=bus.options,
            predictor_id=predictor_id,
            retrain_requests=retrain_requests,
            samples_max=samples_max,
            lease_ttl_s=lease_ttl_s,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
        )
    except trees.Unavailable as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(f"these settings do not go together: {error}") from error
    raise typer.Exit(run_predictor(config, started))
