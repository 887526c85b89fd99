"""A detector process from its start to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.metrics import describe
from controlplane.detector.service import DetectorService
from controlplane.exporter import Exporter
from controlplane.service_process import run_service

logger = logging.getLogger(__name__)

Started = Callable[[DetectorService, Exporter | None], None]


def run_detector(config: DetectorServiceConfig, started: Started) -> int:
    """Run a detector in this process until it is signalled; returns the exit status.

    Raises:
        BusError: the bus refuses this client.
        OSError: the metrics' port cannot be bound.
    """

    def tell(service: DetectorService, exporter: Exporter | None) -> None:
        started(service, exporter)
        logger.info("detector %s watches", service.detector_id)

    return run_service("detector", config, lambda bus: DetectorService(bus, config), describe, tell)
