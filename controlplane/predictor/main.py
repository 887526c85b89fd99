"""A predictor process from its start to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from controlplane.exporter import Exporter
from controlplane.predictor.config import PredictorConfig
from controlplane.predictor.metrics import describe
from controlplane.predictor.service import PredictorService
from controlplane.service_process import run_service

logger = logging.getLogger(__name__)

Started = Callable[[PredictorService, Exporter | None], None]


def run_predictor(config: PredictorConfig, started: Started) -> int:
    """Run a predictor in this process until it is signalled; returns the exit status.

    Raises:
        BusError: the bus refuses this client.
        OSError: the metrics' port cannot be bound.
    """

    def tell(service: PredictorService, exporter: Exporter | None) -> None:
        started(service, exporter)
        logger.info("predictor %s learns", service.predictor_id)

    return run_service(
        "predictor", config, lambda bus: PredictorService(bus, config), describe, tell
    )
