"""A router process: the bus, the event path, the client side and the operator's side together."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from controlplane import runtime
from controlplane.bus import connect
from controlplane.bus.protocol import Bus
from controlplane.reminders import Reminders
from router.access import Access
from router.access_log import AccessLog
from router.admin import Admin
from router.config import RouterConfig
from router.directory import Directory
from router.event_path import EventPath
from router.http_server import HttpServer
from router.limits import ServerLimits, within_files
from router.metrics import RequestMetrics, Sample, counted
from router.plane_samples import plane_samples, tenant_samples
from router.prefix_cache import PrefixCache
from router.registration import Registration
from router.server_tls import ServerTls
from router.service import Router
from router.tenant_peers import PeerUse
from router.tokens import PromptReader
from router.upstream import UpstreamPool
from router.watched_files import WatchedFiles
from schemas.bus import ModelCard, RouteBatch, RouterLease

if TYPE_CHECKING:
    import ssl

    from router.tracing import Tracer

logger = logging.getLogger(__name__)

_OUTCOME = ("outcome",)
_CACHE_LEVELS = ("nodes", "segments", "handles", "bytes_used")


class RouterProcess:
    """Everything that one router runs.

    Attributes:
        router: the request path.
        events: the event path.
        metrics: what it counts.
        address: (host, port) for clients, once started.
        admin_address: (host, port) for operators, once started.
    """

    def __init__(self, config: RouterConfig, bus: Bus) -> None:
        """Build everything that can fail before a port is taken.

        Raises:
            ValueError: a configuration file cannot be used.
            OSError: a key or certificate cannot be read, or the access log not written.
        """
        self.config = config
        self.router_id = config.router_id or f"router-{secrets.token_hex(4)}"
        self.metrics = RequestMetrics()
        self.address = ("", 0)
        self.admin_address = ("", 0)
        self._bus = bus
        self._access = Access(config.keys_path, config.tenants_path)
        self._peer_use = PeerUse(self.router_id, config.plane.load.lease_s)
        self._files = WatchedFiles()
        self._tls = self._watch_files()
        self._log = AccessLog(config.access_log) if config.access_log else None
        self._tracer = _tracer(config, self.router_id)
        self._cache = PrefixCache(config.prefix_cache_bytes)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._directory = Directory(self.router_id, time.time_ns(), config.plane)
        self._pool = UpstreamPool(config.upstream)
        self.router = Router(
            config,
            bus,
            self._directory,
            self._pool,
            self._cache,
            self.metrics,
            self.router_id,
            access=self._access,
            access_log=self._log,
            tracer=self._tracer,
            engine_key=_secret(config.engine_key_path),
        )
        self.events = EventPath(
            bus,
            self._directory,
            config,
            self.router_id,
            make_reader=self._make_reader,
            instances_changed=self.router.instances.changed,
            ticked=self._ticked,
            peer_told=self._peer_told if self._access.limits_anybody else None,
        )
        self.router.events = self.events
        self._server = HttpServer(
            self.router,
            _fitted(config.server),
            refused=self._log.refused if self._log is not None else None,
        )
        self._admin = HttpServer(Admin(self.router), config.server)
        self._watching: asyncio.Task[None] | None = None
        self._learning: asyncio.Task[None] | None = None
        self._reminders = Reminders()
        self._registration: Registration | None = None
        self._predicting: asyncio.Task[NoReturn] | None = None
        self._registering: asyncio.Task[NoReturn] | None = None

    def _watch_files(self) -> ssl.SSLContext | None:
        """Load keys, tenants and certificate, now and whenever they change."""
        config = self.config
        self._files.add(self._access.paths, lambda: self._access.load(time.monotonic()))
        if not config.tls_cert_path:
            return None
        tls = ServerTls(config.tls_cert_path, config.tls_key_path)
        self._files.add(tls.paths, tls.load)
        return tls.context

    def _peer_told(self, model: str, batch: RouteBatch, now_s: float) -> None:
        """Let what another router does count for its tenants here."""
        self._peer_use.told(model, batch, now_s)
        self._access.used_elsewhere(self._peer_use.take_changes())

    def _ticked(self, now_s: float) -> None:
        """Let time show where nothing else happens."""
        for served in self._directory.forget(now_s, self.config.forget_model_s):
            logger.info("%s is forgotten: it has no instances any more", served.model)
            self.metrics.forget(served.model)
            if self.router.rooms is not None:
                self.router.rooms.forget(served.model)
        self.router.instances.refresh(now_s)
        self._peer_use.expire(now_s)
        self._access.used_elsewhere(self._peer_use.take_changes())

    def _make_reader(self, card: ModelCard) -> PromptReader:
        return PromptReader(card, self._cache, self._executor)

    async def start(self) -> None:
        """Serve operators, learn what the bus knows, then serve clients; returns once it does.

        Raises:
            OSError: a port cannot be bound.
        """
        config = self.config
        self.metrics.watch(self._samples)
        self.admin_address = await self._admin.start(config.admin_host, config.admin_port)
        await self.events.start()
        await self.router.keeper.start()
        await self._learn()
        self.address = await self._server.start(
            config.host, config.port, reuse_port=config.reuse_port, tls=self._tls
        )
        self._watching = asyncio.create_task(self._files.run())
        if self.router.rooms is not None:
            self._predicting = asyncio.create_task(self.router.rooms.follow(self._bus))
        self._register()
        runtime.settle_gc()
        logger.info(
            "router %s serves on %s:%d, metrics and debugging on %s:%d",
            self.router_id,
            *self.address,
            *self.admin_address,
        )

    async def _learn(self) -> None:
        """Learn what the bus knows before clients come.

        On a shared port that takes as long as the bus is away: whoever knows the instances answers
        meanwhile, and a router that does not would only refuse its share of the requests.
        """
        config, directory = self.config, self._directory
        directory.learning = "the bus does not answer"
        if self._bus.connected or config.reuse_port:
            await self._learn_records(until_known=config.reuse_port)
        if directory.learning:
            logger.warning("refusing requests until the bus has told of instances")
            self._learning = asyncio.create_task(self._learn_records(until_known=True))

    async def _learn_records(self, *, until_known: bool) -> None:
        """Learn which instances there are, and how to read prompts for them.

        Args:
            until_known: try again until the bus has told of instances.
        """
        within_s = self.config.join_s_max
        while problem := await self.events.synced(within_s):
            problem += "; is NATS up, and `multiplane bus init` done?"
            self._directory.learning = problem
            waits = "listening on the shared port" if self.config.reuse_port else "taking requests"
            if self._reminders.due(problem, time.monotonic()):
                logger.warning("not %s until the bus has told of instances: %s", waits, problem)
            if not until_known:
                return
        if not await self.events.caught_up(within_s):
            logger.warning("serving without having learnt all that the bus knows")
        self._directory.learning = ""

    def _register(self) -> None:
        """Begin to tell where this router is."""
        lease = RouterLease(
            self.router_id,
            time.time_ns(),
            seq=0,
            sent_wall_s=0.0,
            heartbeat_s=self.config.register_s,
            address="{}:{}".format(*self.address),
            admin="{}:{}".format(*self.admin_address),
        )
        self._registration = Registration(self._bus, self._directory, lease)
        self._registering = asyncio.create_task(self._registration.run())

    async def stop(self) -> None:
        """Finish what is running, up to `stop_grace_s`, and end."""
        if self._registering is not None and self._registration is not None:
            self._registering.cancel()
            await self._registration.end()
        for task in (self._watching, self._learning, self._predicting):
            if task is not None:
                task.cancel()
        await self._server.stop(grace_s=self.config.stop_grace_s)
        await self.router.stop()
        await self.events.stop()
        await self._pool.close()
        await self._admin.stop(grace_s=0.0)
        await self._bus.close()
        if self._log is not None:
            await self._log.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _samples(self) -> Iterator[Sample]:
        """Yield every state that metrics show."""
        now_s = time.monotonic()
        yield from plane_samples(self._directory, self.router.instances, now_s)
        yield from tenant_samples(self._access, now_s)
        yield from self.router.prefixes.samples()
        yield from self.router.keeper.samples()
        if self.router.rooms is not None:
            yield from self.router.rooms.samples()
        for name, text, value in counted(self._server.stats):
            shown = "loop_lag_seconds" if name == "loop_lag_s" else f"http_{name}_total"
            yield Sample(shown, text, value)
        yield Sample("asyncio_tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))
        yield Sample("http_connections_open", "From clients.", self._server.connections_open)
        yield Sample("upstream_calls_open", "Requests at engines.", self._pool.calls_open)
        for name, value in self._pool.counts.items():
            yield Sample(f"upstream_{name}_total", "Of connections to engines.", value)
        yield Sample("bus_connected", "Whether the bus is connected.", self._bus.connected)
        for name, text, value in counted(self._bus.stats()):
            suffix = "" if name.startswith("buffered") else "_total"
            yield Sample(f"bus_{name}{suffix}", text, value)
        yield Sample(
            "model_records_refused_total",
            "Instance records of models beyond the most that a router knows.",
            self._directory.refused,
        )
        yield Sample(
            "records_unusable",
            "Instance records that no request can be sent by, such as for a bad url.",
            len(self.events.unusable),
        )
        yield Sample("events_waiting", "Bus messages not taken in yet.", self.events.waiting)
        for name, value in self.events.counts.items():
            yield Sample(f"events_{name}_total", "Of bus messages and block sets.", value)
        for name, text, value in counted(self._cache.stats):
            suffix = "" if name in _CACHE_LEVELS else "_total"
            yield Sample(f"prefix_cache_{name}{suffix}", text, value)
        yield Sample("config_loads_total", "Changed files taken into use.", self._files.loads)
        yield Sample(
            "config_failures_total", "Changed files that were no use.", self._files.failures
        )
        if self._log is not None:
            yield Sample("access_log_lines_total", "Lines taken.", self._log.lines)
            yield Sample("access_log_dropped_total", "Lines not written.", self._log.dropped)
        if self._tracer is not None:
            spans = Sample("trace_spans_total", "Spans, by what became of them.", labels=_OUTCOME)
            spans.values.update(((outcome,), n) for outcome, n in self._tracer.counts.items())
            yield spans


def _fitted(limits: ServerLimits) -> ServerLimits:
    """Return limits that the files which this process may open suffice for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitted = limits if files == resource.RLIM_INFINITY else within_files(limits, files)
    if fitted is not limits:
        logger.warning(
            "this process may open %d files, so it takes %d connections of clients, not %d; raise "
            "its limit (ulimit -n)",
            files,
            fitted.connections_max,
            limits.connections_max,
        )
    return fitted


def _tracer(config: RouterConfig, router_id: str) -> Tracer | None:
    """Return what sends traces, if somebody collects them; only then is OpenTelemetry imported."""
    if not config.otlp_endpoint:
        return None
    from router.tracing import Tracer

    return Tracer(config.otlp_endpoint, router_id, config.otlp_share)


def _secret(path: str) -> str:
    """Return the secret that a file holds; empty without a file."""
    return Path(path).read_text(encoding="ascii").strip() if path else ""


async def connect_bus(config: RouterConfig) -> Bus:
    """Connect as a router does: what it tells the others need not come back to it.

    Raises:
        BusError: see `controlplane.bus.connect`.
    """
    options = msgspec.structs.replace(config.bus_options, echo=False)
    return await connect(config.bus_url, name="router", options=options)


async def serve(
    config: RouterConfig, stop: asyncio.Event, started: Callable[[RouterProcess], None]
) -> int:
    """Run a router until `stop` is set; returns the exit status."""
    bus = await connect_bus(config)
    process = RouterProcess(config, bus)
    starting = asyncio.create_task(process.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done():
            starting.result()
            started(process)
            await stopping
            logger.info("stopping: running requests get up to %.0f s", config.stop_grace_s)
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await process.stop()
    return 0


def run_router(config: RouterConfig, started: Callable[[RouterProcess], None]) -> int:
    """Run a router in this process until it is signalled; returns the exit status."""
    return runtime.run(lambda stop: serve(config, stop, started))
