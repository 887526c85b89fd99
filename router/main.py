"""A router process: the bus, the event path, the client side and the operator's side together."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from controlplane import runtime
from controlplane.bus import connect
from controlplane.bus.protocol import Bus
from router.admin import Admin
from router.config import RouterConfig
from router.directory import Directory
from router.event_path import EventPath
from router.http_server import HttpServer
from router.metrics import RequestMetrics, Sample
from router.prefix_cache import PrefixCache
from router.service import Router
from router.tokens import PromptReader
from router.upstream import UpstreamPool
from schemas.bus import ModelCard

logger = logging.getLogger(__name__)


class RouterProcess:
    """Everything that one router runs.

    Attributes:
        router: the request path.
        events: the event path.
        address: (host, port) for clients, once started.
        admin_address: (host, port) for operators, once started.
    """

    def __init__(self, config: RouterConfig, bus: Bus) -> None:
        self.config = config
        self.router_id = config.router_id or f"router-{secrets.token_hex(4)}"
        self._bus = bus
        self._cache = PrefixCache(config.prefix_cache_bytes)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._directory = Directory(self.router_id, time.time_ns(), config.plane)
        self._pool = UpstreamPool(config.upstream)
        self.metrics = RequestMetrics()
        self.router = Router(config, self._directory, self._pool, self.metrics, self.router_id)
        self.events = EventPath(
            bus,
            self._directory,
            config,
            self.router_id,
            make_reader=self._make_reader,
            instances_changed=self.router.instances_changed,
            ticked=self.router.refresh_breakers,
        )
        self.router.events = self.events
        self._server = HttpServer(self.router, config.server)
        self._admin = HttpServer(Admin(self.router), config.server)
        self.address = ("", 0)
        self.admin_address = ("", 0)

    def _make_reader(self, card: ModelCard) -> PromptReader:
        return PromptReader(card, self._cache, self._executor)

    async def start(self) -> None:
        """Learn what the bus knows, then serve; returns once both ports listen.

        Raises:
            OSError: a port cannot be bound.
        """
        config = self.config
        self.metrics.watch(self._directory, self._samples)
        await self.events.start()
        if not await self.events.caught_up(config.join_s_max if self._bus.connected else 0.0):
            logger.warning("serving without having learnt all that the bus knows")
        self.address = await self._server.start(
            config.host, config.port, reuse_port=config.reuse_port
        )
        self.admin_address = await self._admin.start(config.admin_host, config.admin_port)
        runtime.settle_gc()
        logger.info(
            "router %s serves on %s:%d, metrics and debugging on %s:%d",
            self.router_id,
            *self.address,
            *self.admin_address,
        )

    async def stop(self) -> None:
        """Finish what is running, up to `stop_grace_s`, and end."""
        await self._server.stop(grace_s=self.config.stop_grace_s)
        await self.router.stop()
        await self.events.stop()
        await self._pool.close()
        await self._admin.stop(grace_s=0.0)
        await self._bus.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _samples(self) -> Iterator[Sample]:
        stats, counts, bus = self._server.stats, self._pool.counts, self._bus.stats()
        for name in stats.__slots__:
            suffix = "" if name == "loop_lag_s" else "_total"
            shown = "loop_lag_seconds" if name == "loop_lag_s" else f"http_{name}"
            yield shown + suffix, "See router.http_server.ServerStats.", getattr(stats, name)
        yield "http_connections_open", "Client connections.", self._server.connections_open
        yield "upstream_calls_open", "Requests at engines.", self._pool.calls_open
        for name, value in counts.items():
            yield f"upstream_{name}_total", "See router.upstream.UpstreamPool.counts.", value
        yield "bus_connected", "Whether the bus is connected.", self._bus.connected
        for name in bus.__struct_fields__:
            suffix = "" if name.startswith("buffered") else "_total"
            yield f"bus_{name}{suffix}", "See BusStats.", getattr(bus, name)
        yield "events_waiting", "Bus messages not taken in yet.", self.events.waiting
        for name, value in self.events.counts.items():
            yield f"events_{name}_total", "See EventPath.counts.", value
        cache = self._cache.stats
        for name in cache.__struct_fields__:
            yield f"prefix_cache_{name}", "See router.prefix_cache.Stats.", getattr(cache, name)


async def serve(
    config: RouterConfig, stop: asyncio.Event, started: Callable[[RouterProcess], None]
) -> int:
    """Run a router until `stop` is set; returns the exit status."""
    bus = await connect(config.bus_url, name="router", options=config.bus_options)
    process = RouterProcess(config, bus)
    await process.start()
    started(process)
    await stop.wait()
    logger.info("stopping: running requests get up to %.0f s", config.stop_grace_s)
    await process.stop()
    return 0


def run_router(config: RouterConfig, started: Callable[[RouterProcess], None]) -> int:
    """Run a router in this process until it is signalled; returns the exit status."""
    return runtime.run(lambda stop: serve(config, stop, started))
