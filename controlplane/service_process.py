"""A process of a service that lives beside the routers, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

from controlplane import runtime
from controlplane.bus import Bus, NatsOptions, connect
from controlplane.exporter import Exporter, Family

_DESCRIBE_EVERY_S = 1.0


class Service(Protocol):
    """What such a process runs."""

    async def start(self) -> None:
        """Begin to work. Raises BusError."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then end in order."""


class Config(Protocol):
    """What every such process is told, whatever its service."""

    @property
    def bus_url(self) -> str:
        """Where the bus is."""

    @property
    def bus_options(self) -> NatsOptions:
        """How to get in."""

    @property
    def metrics_host(self) -> str:
        """Address for metrics."""

    @property
    def metrics_port(self) -> int | None:
        """Their port; None for no metrics."""


AnyService = TypeVar("AnyService", bound=Service)


def run_service(
    name: str,
    config: Config,
    make: Callable[[Bus], AnyService],
    describe: Callable[[AnyService], list[Family]],
    started: Callable[[AnyService, Exporter | None], None],
) -> int:
    """Run a service in this process until it is signalled; returns the exit status.

    Args:
        name: of the service, for the bus.
        config: where the bus and the metrics are.
        make: returns the service on a bus.
        describe: returns its metrics.
        started: called once it works.

    Raises:
        BusError: the bus refuses this client.
        OSError: the metrics' port cannot be bound.
    """

    async def serve(stop: asyncio.Event) -> int:
        bus = await connect(config.bus_url, name=name, options=config.bus_options)
        service = make(bus)
        exporter = None
        if config.metrics_port is not None:
            exporter = Exporter(config.metrics_host, config.metrics_port)
        describing = asyncio.create_task(_describing(service, describe, exporter))
        try:
            await service.start()
            started(service, exporter)
            await service.run(stop)
        finally:
            describing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await describing
            if exporter is not None:
                exporter.close()
            await bus.close()
        return 0

    return runtime.run(serve)


async def _describing(
    service: AnyService,
    describe: Callable[[AnyService], list[Family]],
    exporter: Exporter | None,
) -> None:
    """Keep the metrics fresh."""
    while exporter is not None:
        exporter.show(describe(service))
        await asyncio.sleep(_DESCRIBE_EVERY_S)
