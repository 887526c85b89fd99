"""A detector process from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from controlplane import runtime
from controlplane.bus import connect
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.metrics import describe
from controlplane.detector.service import DetectorService
from controlplane.exporter import Exporter

logger = logging.getLogger(__name__)

_DESCRIBE_EVERY_S = 1.0

Started = Callable[[DetectorService, Exporter | None], None]


async def serve(config: DetectorServiceConfig, stop: asyncio.Event, started: Started) -> int:
    """Run a detector until `stop` is set; returns the exit status.

    Raises:
        BusError: the bus refuses this client.
        OSError: the metrics' port cannot be bound.
    """
    bus = await connect(config.bus_url, name="detector", options=config.bus_options)
    service = DetectorService(bus, config)
    exporter = None
    if config.metrics_port is not None:
        exporter = Exporter(config.metrics_host, config.metrics_port)
    describing = asyncio.create_task(_describing(service, exporter))
    try:
        await service.start()
        started(service, exporter)
        logger.info("detector %s watches", service.detector_id)
        await service.run(stop)
    finally:
        describing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await describing
        if exporter is not None:
            exporter.close()
        await bus.close()
    return 0


async def _describing(service: DetectorService, exporter: Exporter | None) -> None:
    """Keep the metrics fresh."""
    while exporter is not None:
        exporter.show(describe(service))
        await asyncio.sleep(_DESCRIBE_EVERY_S)


def run_detector(config: DetectorServiceConfig, started: Started) -> int:
    """Run a detector in this process until it is signalled; returns the exit status."""
    return runtime.run(lambda stop: serve(config, stop, started))
