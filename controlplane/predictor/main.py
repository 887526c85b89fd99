"""A predictor process from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from controlplane import runtime
from controlplane.bus import connect
from controlplane.exporter import Exporter
from controlplane.predictor.config import PredictorConfig
from controlplane.predictor.metrics import describe
from controlplane.predictor.service import PredictorService

logger = logging.getLogger(__name__)

_DESCRIBE_EVERY_S = 1.0

Started = Callable[[PredictorService, Exporter | None], None]


async def serve(config: PredictorConfig, stop: asyncio.Event, started: Started) -> int:
    """Run a predictor until `stop` is set; returns the exit status.

    Raises:
        BusError: the bus refuses this client.
        OSError: the metrics' port cannot be bound.
    """
    bus = await connect(config.bus_url, name="predictor", options=config.bus_options)
    service = PredictorService(bus, config)
    exporter = None
    if config.metrics_port is not None:
        exporter = Exporter(config.metrics_host, config.metrics_port)
    describing = asyncio.create_task(_describing(service, exporter))
    try:
        await service.start()
        started(service, exporter)
        logger.info("predictor %s learns", service.predictor_id)
        await service.run(stop)
    finally:
        describing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await describing
        if exporter is not None:
            exporter.close()
        await bus.close()
    return 0


async def _describing(service: PredictorService, exporter: Exporter | None) -> None:
    """Keep the metrics fresh."""
    while exporter is not None:
        exporter.show(describe(service))
        await asyncio.sleep(_DESCRIBE_EVERY_S)


def run_predictor(config: PredictorConfig, started: Started) -> int:
    """Run a predictor in this process until it is signalled; returns the exit status."""
    return runtime.run(lambda stop: serve(config, stop, started))
