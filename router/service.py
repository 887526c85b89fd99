"""The router: requests in, a decision each, answers out.

Theory of operation. `handle` is called for every whole request and returns at once. What it needs
to decide is in memory, so the common request is read, decided on, booked and sent within that one
call; only a long text that is new to the prefix cache is tokenized elsewhere first. From then on
the request is a `Routing` (`router.routing`), which keeps the books until it is over.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from controlplane.bus.protocol import Bus
from router import refusals
from router.absence import no_model, starting
from router.access import KEY_HEADERS, TENANT_HEADER, Access
from router.access_log import AccessLog, Entry
from router.big_bodies import BIG_BYTES, read_big, with_ids
from router.budgets import BUDGET_HEADERS
from router.config import RouterConfig
from router.cors import Cors
from router.directory import Directory, Resolved, ServedModel
from router.event_path import EventPath
from router.http_exchange import Exchange
from router.http_proxy import Forwarder
from router.instances import RANK_HEADER, Instances, Key
from router.local_answers import PROBES, is_about_models, models, options
from router.metrics import RequestMetrics
from router.prefix_api import PrefixApi, is_about_prefixes
from router.prefix_cache import PrefixCache
from router.prefix_keeper import PrefixKeeper
from router.refusals import Refusal, ended
from router.routing import Routing
from router.surface import (
    ENDPOINTS,
    ENGINE_ONLY,
    PASS_THROUGH,
    Asked,
    Endpoint,
    is_heavy,
    is_inference,
    read_body,
)
from router.tenant_gate import TenantGate
from router.tenants import NOBODY, Tenant
from router.upstream import UpstreamPool
from router.waiting_rooms import WaitingRooms
from router.warming import Warmer
from schemas.codec import RemoteError

if TYPE_CHECKING:
    from router.tracing import Tracer

HOPS_HEADER: Final = b"x-multiplane-router"
"""Which routers a request has passed through, so that one that goes in circles is noticed."""
HOPS_MAX: Final = 4

_GET: Final = (b"GET", b"HEAD")
_NO_TOKEN: Final = re.compile(rb"[^A-Za-z0-9._-]")

_Found = tuple[Resolved, Asked] | Refusal
"""What a request is for, and what it says; or why it is refused."""

logger = logging.getLogger(__name__)


class Router:
    """Decides on requests and sends them; the handler of the client-side HTTP server.

    Attributes:
        directory: the models.
        events: the event path, which keeps the models up to date.
        instances: where requests can go.
        access: who may send them.
        metrics: what is counted a request.
        access_log: gets a line for each request; None if there is no log.
        tracer: gets its spans; None if nobody collects them.
        router_id: this router's name on the bus.
        rooms: where requests wait; None if they never do.
        keeper: what it does for prefixes that callers have registered.
        prefixes: answers callers who register them.
    """

    events: EventPath

    def __init__(
        self,
        config: RouterConfig,
        bus: Bus,
        directory: Directory,
        pool: UpstreamPool,
        cache: PrefixCache,
        metrics: RequestMetrics,
        router_id: str,
        *,
        access: Access,
        access_log: AccessLog | None = None,
        tracer: Tracer | None = None,
        engine_key: str = "",
    ) -> None:
        self.router_id = router_id
        self.directory = directory
        self.metrics = metrics
        self.access = access
        self.access_log = access_log
        self.tracer = tracer
        self.instances = Instances(directory, pool, config.breaker, self._tell_breaker)
        self.rooms: WaitingRooms | None = None
        if config.queue is not None or config.coalesce is not None:
            self.rooms = WaitingRooms(config, metrics)
        own_keys = access.asks_for_keys or bool(engine_key)
        dropped = (KEY_HEADERS if own_keys else frozenset()) | {TENANT_HEADER, HOPS_HEADER}
        dropped |= BUDGET_HEADERS | {RANK_HEADER}
        if tracer is not None:
            dropped |= {b"traceparent"}  # in place of which engines get this router's
        self._forwarder = Forwarder(pool, dropped_headers=dropped)
        self._cors = Cors(config.cors_origins) if config.cors_origins else None
        self._hop = _NO_TOKEN.sub(b"_", router_id.encode())
        self._engine_lines = b"%b: %b\r\n" % (HOPS_HEADER, self._hop)
        if engine_key:
            self._engine_lines += b"authorization: Bearer %b\r\n" % engine_key.encode()
        warmer = Warmer(pool, self._engine_lines)
        self.keeper = PrefixKeeper(bus, directory, warmer, cache, access)
        self.prefixes = PrefixApi(directory, warmer, self.keeper)
        self._reading: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def handle(self, exchange: Exchange) -> None:
        """Take one request; see `router.http_server.Handler`."""
        path, method = exchange.path, exchange.method
        if self._cors is not None:
            self._cors.mark(exchange)
        if method in _GET and path in PROBES:
            PROBES[path](self.directory, exchange)
            return
        if method == b"OPTIONS":
            options(self._cors, exchange)
            return
        endpoint = ENDPOINTS.get(path, PASS_THROUGH)
        caller = self.access.identify(exchange)
        if isinstance(caller, Refusal):
            self._refuse(exchange, endpoint, NOBODY, caller)
            return
        refusal = self._unfit(exchange, path, endpoint)
        if refusal is not None:
            self._refuse(exchange, endpoint, caller.tenant, refusal)
        elif method in _GET and is_about_models(path):
            refusal = models(self.directory, caller.tenant, exchange)
            self._write_down(exchange, "models", caller.tenant, *ended(refusal))
        elif endpoint is PASS_THROUGH and is_about_prefixes(path):
            self._about_prefixes(exchange, caller)
        else:
            self._route(exchange, endpoint, caller)

    def _about_prefixes(self, exchange: Exchange, gate: TenantGate) -> None:
        """Answer a request about registered prefixes."""
        began_s = time.monotonic()

        def told(outcome: str, status: int) -> None:
            took_s = time.monotonic() - began_s
            self._write_down(exchange, "prefixes", gate.tenant, outcome, status, took_s)

        self.prefixes.handle(exchange, gate, self.spawn, told)

    def _unfit(self, exchange: Exchange, path: bytes, endpoint: Endpoint) -> Refusal | None:
        """Return why a request is none for this router, whatever its body says."""
        if self.directory.learning:
            return starting(self.directory.learning)
        if endpoint.decode is not None:
            if exchange.method != b"POST":
                return refusals.wrong_method(path.decode("latin-1"), "POST")
        elif path in ENGINE_ONLY:
            return refusals.engine_only(path.decode("latin-1"))
        elif not is_inference(path) and not is_about_models(path):
            return refusals.unknown_path(path.decode("latin-1"))
        hops = exchange.header(HOPS_HEADER)
        passed = [] if hops is None else [hop.strip() for hop in hops.split(b",")]
        if len(passed) >= HOPS_MAX or self._hop in passed:
            return refusals.loop(len(passed))
        return None

    def _route(self, exchange: Exchange, endpoint: Endpoint, gate: TenantGate) -> None:
        """Let a request in among its tenant's, find its model, and send it on its way."""
        started_s = time.monotonic()
        tenant = gate.tenant
        wait_s = gate.charge(0, started_s)
        if wait_s is not None:
            self._refuse(exchange, endpoint, tenant, refusals.too_fast(tenant, wait_s))
            return
        wait_s = gate.enter()
        if wait_s is not None:
            self._refuse(exchange, endpoint, tenant, refusals.too_many(tenant, wait_s))
            return
        body = exchange.body
        if len(body) > BIG_BYTES:
            self._read_big(exchange, endpoint, gate, started_s)
            return
        try:
            parsed, name = read_body(endpoint, body, _content_type(exchange, endpoint))
        except RemoteError as error:
            self._begin(exchange, endpoint, gate, started_s, refusals.malformed(str(error)))
            return
        resolved = self._resolve(name, bool(body), tenant)
        if isinstance(resolved, Refusal):
            self._begin(exchange, endpoint, gate, started_s, resolved)
        else:
            asked = Asked(parsed, len(body), is_heavy(parsed, body))
            Routing(self, exchange, endpoint, gate, resolved, started_s).start(asked)

    def _begin(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        gate: TenantGate,
        started_s: float,
        found: _Found,
    ) -> None:
        """Route a request that has been understood, or let its tenant's place go."""
        if isinstance(found, Refusal):
            gate.leave()
            self._refuse(exchange, endpoint, gate.tenant, found)
        else:
            resolved, asked = found
            Routing(self, exchange, endpoint, gate, resolved, started_s).start(asked)

    def _read_big(
        self, exchange: Exchange, endpoint: Endpoint, gate: TenantGate, started_s: float
    ) -> None:
        """Understand a large body in steps, and route its request then."""

        async def reading() -> None:
            try:
                found = await self._understand_big(exchange, endpoint, gate.tenant)
            except Exception:
                logger.exception("request %r could not be read", exchange.request_id)
                found = refusals.CRASHED
            self._begin(exchange, endpoint, gate, started_s, found)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                gate.leave()
                self._ended(exchange, endpoint, gate.tenant, "client_gone", 0)

        task = self.spawn(reading())
        task.add_done_callback(ended)
        exchange.on_client_gone(lambda: _cancel(task))

    async def _understand_big(
        self, exchange: Exchange, endpoint: Endpoint, tenant: Tenant
    ) -> _Found:
        """Return the model that a large request is for, and what its body says."""
        body = exchange.body
        try:
            big = await read_big(endpoint, body, _content_type(exchange, endpoint))
        except RemoteError as error:
            return refusals.malformed(str(error))
        resolved = self._resolve(big.name, has_body=True, tenant=tenant)
        if isinstance(resolved, Refusal):
            return resolved
        longest = resolved.served.max_model_len
        count = big.ids_count if big.lists <= 1 else 0
        if longest is None or count < longest:
            parsed, count = await with_ids(big), 0
        else:
            parsed = big.parsed  # it will be refused, or cut by the engine
        asked = Asked(parsed, big.text_bytes, big.heavy, big.altered, count, big.chars_cut)
        return resolved, asked

    def _resolve(self, name: str, has_body: bool, tenant: Tenant) -> Resolved | Refusal:
        """Return the model that a request is for."""
        directory = self.directory
        resolved = directory.resolve(name) or (None if has_body else directory.some())
        if resolved is None:
            absent = no_model(directory, name, self.events.unusable)
            return absent or refusals.unknown_model(name, directory.names)
        if not tenant.may_use(name or resolved.served.model):
            return refusals.not_allowed(f"tenant {tenant.name!r} may not use this model")
        return resolved

    def _refuse(
        self, exchange: Exchange, endpoint: Endpoint, tenant: Tenant, refusal: Refusal
    ) -> None:
        """Answer a request that nobody's books need to know of."""
        self.metrics.rejected(refusal.reason)
        refusals.answer(exchange, refusal, endpoint.form)
        self._ended(exchange, endpoint, tenant, f"rejected:{refusal.reason}", refusal.status)

    def _ended(
        self, exchange: Exchange, endpoint: Endpoint, tenant: Tenant, outcome: str, status: int
    ) -> None:
        """Count a request that never had a model, and write its line in the access log."""
        self.metrics.ended("", endpoint.name, tenant.name, outcome, status)
        self._write_down(exchange, endpoint.name, tenant, outcome, status)

    def _write_down(
        self,
        exchange: Exchange,
        endpoint: str,
        tenant: Tenant,
        outcome: str,
        status: int,
        duration_s: float = 0.0,
    ) -> None:
        """Write a line in the access log on a request that no engine was asked for."""
        if self.access_log is not None:
            self.access_log.add(
                Entry(
                    ts=round(time.time(), 3),
                    request_id=exchange.request_id.decode("latin-1"),
                    tenant=tenant.name,
                    model="",
                    endpoint=endpoint,
                    status=status,
                    outcome=outcome,
                    duration_s=round(duration_s, 6),
                )
            )

    # --- called by requests on their way

    def forward(self, exchange: Exchange, key: Key, routing: Routing) -> None:
        """Send a request to an instance, and to others if that fails."""
        lines, trace, wait, note, attempts = self._engine_lines, routing.trace, routing.wait, b"", 0
        hops = exchange.header(HOPS_HEADER)
        if hops is not None:
            lines = b"%b: %b, " % (HOPS_HEADER, hops) + lines.removeprefix(HOPS_HEADER + b": ")
        if trace is not None:
            lines += trace.line
        if wait is not None:
            note, attempts = wait.note, wait.attempts
        self._forwarder.forward(
            exchange,
            key,
            routing.next_upstream,
            routing,
            request_lines=lines,
            response_lines=note,
            attempts=attempts,
        )

    def spawn(self, reading: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run what takes longer than a request may hold up the others."""
        task = self._loop.create_task(reading)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return task

    async def stop(self) -> None:
        """End what is still being read."""
        await self.keeper.stop()
        if self.rooms is not None:
            self.rooms.stop()
        for task in list(self._reading):
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    def _tell_breaker(self, served: ServedModel, instance_id: str, is_open: bool) -> None:
        self.events.breaker(served, instance_id, is_open)


def _content_type(exchange: Exchange, endpoint: Endpoint) -> bytes:
    """Return what a body is said to be; empty where the endpoint takes JSON only."""
    return b"" if endpoint.decode else exchange.header(b"content-type") or b""


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
