"""A sidecar process: beside an engine that runs, or around one that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from controlplane import runtime
from controlplane.bus import connect
from sidecar.config import SidecarConfig
from sidecar.engine_process import EngineProcess, find_ports
from sidecar.exporter import Exporter
from sidecar.launcher import prepare
from sidecar.model_card import default_hub_cache
from sidecar.service import SidecarService

logger = logging.getLogger(__name__)

ENGINE_GRACE_S = 30.0

Started = Callable[[SidecarService, Exporter | None], None]
"""Called once the sidecar runs, before the engine answers, with its parts."""


async def serve(
    config: SidecarConfig, command: Sequence[str], stop: asyncio.Event, started: Started
) -> int:
    """Run a sidecar until `stop` is set or its engine ends; returns the exit status.

    Args:
        command: of the engine to start; empty for one that runs at `config.engine_url`.

    Raises:
        LaunchError: the command contradicts what the sidecar needs.
        BusError: the bus refuses us for good.
        OSError: the metrics port is taken, or the engine's program is not there.
    """
    engine: EngineProcess | None = None
    if command:
        launch = prepare(command, config, find_ports, os.environ)
        config = launch.config
        engine = EngineProcess(launch.command)
        logger.info("adding to the engine's command: %s", " ".join(launch.added) or "nothing")
    config = _completed(config, os.environ, socket.gethostname())
    bus = await connect(config.bus_url, name="sidecar", options=config.bus_options)
    try:
        service = SidecarService(config, bus)
        with contextlib.ExitStack() as stack:
            exporter = None
            if config.metrics_port is not None:
                exporter = Exporter(service, bus, config.metrics_host, config.metrics_port)
                stack.callback(exporter.close)
            if engine is not None:
                await engine.start()
            started(service, exporter)
            runtime.settle_gc()
            if engine is None:
                await service.run(stop)
                return 0
            return await _serve_around(service, engine, stop)
    finally:
        await bus.close()


def _completed(
    config: SidecarConfig, environment: Mapping[str, str], host_name: str
) -> SidecarConfig:
    """Return settings with what this machine says where they are empty."""
    url = urlsplit(config.advertise_url or config.engine_url)
    local = url.hostname in ("127.0.0.1", "::1", "localhost")
    if local and "127.0.0.1" not in config.bus_url and "localhost" not in config.bus_url:
        logger.warning(
            "routers on other machines cannot reach %s; give the address that they can use with "
            "--advertise-url",
            config.advertise_url or config.engine_url,
        )
    name = host_name if local else str(url.hostname)
    return msgspec.structs.replace(
        config,
        host=config.host or host_name,
        instance_id=config.instance_id or f"{name}-{url.port or 80}".replace(".", "-"),
        hub_cache=config.hub_cache or default_hub_cache(environment),
    )


async def _serve_around(service: SidecarService, engine: EngineProcess, stop: asyncio.Event) -> int:
    """Run the sidecar while its own engine lives; drain, then end the engine, when stopped."""
    serving = asyncio.create_task(service.run(stop))
    ended = asyncio.create_task(engine.wait())
    try:
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set() and ended.done():
            service.lose(f"its process ended with status {ended.result()}")
            stop.set()
            await serving
            return _exit_status(ended.result()) or 1
        await serving
        if service.engine_left:
            # Somebody has signalled it, too, as systemd does; a second one might end it at once.
            await asyncio.wait([ended], timeout=ENGINE_GRACE_S)
        status = await engine.stop(ENGINE_GRACE_S)
        return 0 if status == -signal.SIGTERM else _exit_status(status)
    finally:
        ended.cancel()
        await engine.stop(0.0)


def _exit_status(status: int) -> int:
    """Return a process's status as a shell shows it: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


def run_sidecar(
    config: SidecarConfig,
    command: Sequence[str] = (),
    started: Started = lambda service, exporter: None,
) -> int:
    """Run a sidecar in this process until it is signalled; returns the exit status."""
    return runtime.run(lambda stop: serve(config, command, stop, started))
