"""The router: requests in, a decision each, answers out.

Theory of operation. `handle` is called for every whole request and returns at once. What it needs
to decide is in memory, so the common request is read, decided on, booked and sent within that one
call; only a long text that is new to the prefix cache is tokenized elsewhere first. From then on
the request is a `Routing`: it is told of the first byte, of each attempt's end and of the end, and
keeps the books accordingly.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Final
from urllib.parse import urlsplit

import msgspec

from controlplane.core.dispatch import RouteRequest, Ticket
from controlplane.core.fleet import Instance
from router.breaker import Breaker, State, judge
from router.config import RouterConfig
from router.directory import Directory, Resolved, ServedModel
from router.event_path import EventPath
from router.http_exchange import JSON, Exchange
from router.http_proxy import RETRIES_MAX, Forwarder, Outcome
from router.metrics import RequestMetrics
from router.prompt import Inexact, Prompt
from router.surface import BYTES_PER_TOKEN, ENDPOINTS, PASS_THROUGH, Parsed, read, read_body
from router.upstream import UpstreamPool
from schemas.codec import RemoteError
from schemas.openai import CompletionRequest

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1.0

_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')

_OUTCOMES: Final[dict[Outcome, str]] = {
    Outcome.COMPLETED: "ok",
    Outcome.CLIENT_GONE: "client_gone",
    Outcome.FIRST_BYTE_TIMEOUT: "timeout",
    Outcome.STALLED: "timeout",
}


class Router:
    """Decides on requests and sends them; the handler of the client-side HTTP server.

    Attributes:
        directory: the models.
        events: the event path, which keeps the models up to date.
        metrics: what is counted a request.
        router_id: this router's name on the bus.
    """

    def __init__(
        self,
        config: RouterConfig,
        directory: Directory,
        pool: UpstreamPool,
        metrics: RequestMetrics,
        router_id: str,
    ) -> None:
        self.router_id = router_id
        self.config = config
        self.directory = directory
        self.pool = pool
        self.metrics = metrics
        self.forwarder = Forwarder(pool)
        self.events: EventPath | None = None
        self._breakers: dict[Hashable, Breaker] = {}
        self._known: dict[Hashable, tuple[str, int | None]] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    # --- requests

    def handle(self, exchange: Exchange) -> None:
        """Take one request; see `router.http_server.Handler`."""
        path = exchange.path
        if exchange.method == b"GET" and path in LOCAL:
            LOCAL[path](self, exchange)
            return
        endpoint = ENDPOINTS.get(path, PASS_THROUGH)
        if endpoint.decode is not None and exchange.method != b"POST":
            exchange.respond_error(
                405, "invalid_request_error", f"{path.decode('latin-1')} takes POST"
            )
            return
        try:
            parsed, name = read_body(endpoint, exchange.body)
        except RemoteError as error:
            self.metrics.rejected("malformed")
            exchange.respond_error(
                400, "invalid_request_error", f"the request body cannot be read: {error}"
            )
            return
        resolved = self.directory.resolve(name)
        if resolved is None:
            self._unknown_model(exchange, name)
            return
        self._route(exchange, resolved, parsed)

    def _unknown_model(self, exchange: Exchange, name: str) -> None:
        names = self.directory.names
        if not names:
            self.metrics.rejected("no_instance")
            exchange.respond_error(
                503,
                "service_unavailable",
                "no instance has registered yet; check that sidecars reach the same NATS",
                code="no_instance",
                retry_after_s=RETRY_AFTER_S,
            )
            return
        self.metrics.rejected("unknown_model")
        if name:
            shown = name if len(name) <= 128 else name[:128] + "…"
            problem = f"the model {shown!r} does not exist"
        else:
            problem = "the request names no model"
        exchange.respond_error(
            404,
            "invalid_request_error",
            f"{problem}; there is {', '.join(names[:20])}",
            code="model_not_found",
            param="model",
        )

    def _route(self, exchange: Exchange, resolved: Resolved, parsed: Parsed | None) -> None:
        started_s = time.monotonic()
        found = read(resolved.served, parsed, resolved.lora)
        if isinstance(found, Prompt | Inexact):
            Routing(self, exchange, resolved, parsed, started_s).begin(found)
            return
        task = self._loop.create_task(self._route_later(exchange, resolved, parsed, found))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        exchange.on_client_gone(lambda: _cancel(task))

    async def _route_later(
        self,
        exchange: Exchange,
        resolved: Resolved,
        parsed: Parsed | None,
        found: Awaitable[Prompt | Inexact],
    ) -> None:
        """Route once a long new text is tokenized."""
        routing = Routing(self, exchange, resolved, parsed, time.monotonic())
        try:
            routing.begin(await found)
        except Exception:
            logger.exception("a request could not be routed")
            if not exchange.closed:
                exchange.respond_error(500, "server_error", "the router failed; this is a bug")

    @property
    def ready(self) -> bool:
        """Whether a request sent now would find an instance that takes it."""
        fleets = [served.plane.fleet for served in self.directory]
        return any((fleet.ready & fleet.healthy).any() for fleet in fleets)

    # --- instances, as the data plane knows them

    def instances_changed(self) -> None:
        """Bring the upstream pool in line with the fleets."""
        wanted: dict[Hashable, tuple[str, int | None]] = {}
        for served in self.directory:
            for instance in served.plane.fleet:
                record = instance.record
                wanted[record.instance_id] = (record.url, record.dp_rank)
        for key in self._known.keys() - wanted.keys():
            self.pool.remove(key)
            self._breakers.pop(key, None)
        for key, (url, rank) in wanted.items():
            if self._known.get(key) == (url, rank):
                continue
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                logger.error("instance %s has an unusable url %r", key, url)
                continue
            header = b"" if rank is None else b"x-data-parallel-rank: %d\r\n" % rank
            port = parts.port or (443 if parts.scheme == "https" else 80)
            self.pool.put(key, parts.hostname, port, header_lines=header)
        self._known = wanted

    def breaker_of(self, key: Hashable) -> Breaker:
        """Return an instance's breaker."""
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = self._breakers[key] = Breaker(self.config.breaker)
        return breaker

    def refresh_breakers(self, now_s: float) -> None:
        """Let waits that are over show in the planes, so that a probe may be sent."""
        for served in self.directory:
            for instance in served.plane.fleet:
                breaker = self._breakers.get(instance.record.instance_id)
                if breaker is not None and (breaker.state != State.CLOSED or instance.breaker_open):
                    self.tell_breaker(served, instance.record.instance_id, now_s)

    def tell_breaker(self, served: ServedModel, instance_id: str, now_s: float) -> None:
        """Let the plane know whether requests may be sent to an instance."""
        assert self.events is not None
        instance = served.plane.fleet.get(instance_id)
        is_open = not self.breaker_of(instance_id).allows(now_s)
        if instance is not None and instance.breaker_open != is_open:
            self.events.breaker(served, instance_id, is_open)

    def told(self) -> None:
        """Note that route events wait."""
        assert self.events is not None
        self.events.told()

    async def stop(self) -> None:
        """End what is still being read."""
        for task in list(self._reading):
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)


class Routing:
    """One request from its decision to its end: the observer of its forwarding."""

    __slots__ = (
        "_attempt",
        "_decide_s",
        "_exchange",
        "_lora",
        "_parsed",
        "_request",
        "_router",
        "_served",
        "_started_s",
        "_ticket",
        "_tokenize_s",
        "_tried",
        "_ttft_s",
    )

    def __init__(
        self,
        router: Router,
        exchange: Exchange,
        resolved: Resolved,
        parsed: Parsed | None,
        started_s: float,
    ) -> None:
        self._router = router
        self._exchange = exchange
        self._served = resolved.served
        self._lora = resolved.lora
        self._parsed = parsed
        self._started_s = started_s
        self._ticket: Ticket | None = None
        self._attempt = 0
        self._tried: tuple[str, ...] = ()
        self._ttft_s: float | None = None
        self._tokenize_s = 0.0
        self._decide_s = 0.0

    def begin(self, found: Prompt | Inexact) -> None:
        """Decide and send; answer with an error where that is impossible."""
        now_s = time.monotonic()
        self._tokenize_s = now_s - self._started_s
        if isinstance(found, Inexact):
            self._router.metrics.inexact(found.reason)
        elif self._too_long(found):
            return
        self._request = route_request(
            self._exchange.request_id.decode("latin-1"),
            self._served,
            found,
            self._lora,
            len(self._exchange.body),
        )
        instance = self._decide(now_s)
        if instance is None:
            self._router.metrics.rejected("no_instance")
            self._exchange.respond_error(
                503,
                "service_unavailable",
                f"no instance serves {self._served.model!r} at present",
                code="no_instance",
                retry_after_s=RETRY_AFTER_S,
            )
            return
        self._router.forwarder.forward(
            self._exchange, instance.record.instance_id, self._next_upstream, self
        )

    def _too_long(self, prompt: Prompt) -> bool:
        """Refuse a prompt that no instance can take, as the engine would."""
        longest = self._served.max_model_len
        if longest is None or prompt.tokens < longest:
            return False
        self._router.metrics.rejected("too_long")
        self._exchange.respond_error(
            400,
            "invalid_request_error",
            f"the prompt has {prompt.tokens} tokens, but the model's context is {longest}, "
            "which must also hold the answer; shorten the prompt",
            code="context_length_exceeded",
            param="prompt" if isinstance(self._parsed, CompletionRequest) else "messages",
        )
        return True

    def _decide(self, now_s: float) -> Instance | None:
        """Choose an instance and book the request on it."""
        began = time.perf_counter()
        requests = self._served.plane.requests
        decision = requests.decide(self._request, now_s)
        if decision is None:
            return None
        self._decide_s = time.perf_counter() - began
        self._ticket = requests.book(
            decision,
            now_s,
            time.time(),
            attempt=self._attempt,
            decide_s=self._decide_s,
            tokenize_s=self._tokenize_s,
        )
        instance = decision.instance
        breaker = self._router.breaker_of(instance.record.instance_id)
        if breaker.state != State.CLOSED:
            breaker.sent(now_s)
            self._router.tell_breaker(self._served, instance.record.instance_id, now_s)
        self._router.metrics.decided(decision, self._decide_s, self._tokenize_s)
        self._router.told()
        return instance

    # --- called by the forwarder

    def _next_upstream(self, attempt: int, reason: Outcome) -> Hashable | None:
        """Choose another instance for a request whose attempt failed before its first byte."""
        assert self._ticket is not None
        failed = self._ticket.decision.instance.record.instance_id
        self._tried = (*self._tried, failed)
        fleet = self._served.plane.fleet
        if all(instance.record.instance_id in self._tried for instance in fleet):
            return None
        now_s = time.monotonic()
        self._finish_ticket("retried", 0, now_s)
        self._attempt = attempt
        degraded = "retries" if attempt > RETRIES_MAX else self._request.by_load
        self._request = msgspec.structs.replace(self._request, tried=self._tried, by_load=degraded)
        self._router.metrics.retried(reason)
        instance = self._decide(now_s)
        return None if instance is None else instance.record.instance_id

    def on_first_byte(self, now_s: float) -> None:
        """Prefill is done."""
        self._ttft_s = now_s - self._started_s
        if self._ticket is not None:
            self._served.plane.requests.first_byte(self._ticket, self._ttft_s)
            self._router.told()

    def on_attempt_end(self, key: Hashable, outcome: Outcome, status: int, now_s: float) -> None:
        """Let the instance's breaker learn from an attempt."""
        assert isinstance(key, str)
        breaker = self._router.breaker_of(key)
        before = breaker.state
        breaker.ended(judge(outcome, status), now_s)
        if breaker.state is not before:
            self._router.tell_breaker(self._served, key, now_s)

    def on_end(
        self, outcome: Outcome, status: int, body_bytes: int, now_s: float, usage_tail: bytes
    ) -> None:
        """The request is over, however it ended."""
        cached = _last_number(_CACHED, usage_tail)
        output = _last_number(_COMPLETION, usage_tail)
        word = _OUTCOMES.get(outcome, "upstream_error")
        if outcome is Outcome.COMPLETED and status >= 500:
            word = "upstream_error"
        self._finish_ticket(word, status, now_s, cached, output)
        self._router.metrics.ended(
            word, status, now_s - self._started_s, self._ttft_s, output, cached
        )

    def _finish_ticket(
        self,
        outcome: str,
        status: int,
        now_s: float,
        cached: int | None = None,
        output: int | None = None,
    ) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._served.plane.requests.finish(
                ticket,
                outcome,
                status,
                now_s,
                time.time(),
                cached_tokens=cached,
                output_tokens=output,
                ttft_s=self._ttft_s,
            )
            self._router.told()


def route_request(
    request_id: str, served: ServedModel, found: Prompt | Inexact, lora: str | None, body_bytes: int
) -> RouteRequest:
    """Return what the plane must know of a request."""
    if isinstance(found, Inexact):
        tokens = max(1, body_bytes // BYTES_PER_TOKEN)
        why = f"inexact:{found.reason}"
        return RouteRequest(request_id, tokens, exact=False, by_load=why, lora=lora)
    return RouteRequest(request_id, found.tokens, found.hashes, served.block_size, lora=lora)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _last_number(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    """Return the last number that a usage field has in the end of an answer."""
    found = pattern.findall(tail)
    return int(found[-1]) if found else None


def _models(router: Router, exchange: Exchange) -> None:
    """Answer GET /v1/models: every name, once, over the whole fleet."""
    data = []
    for name in router.directory.names:
        resolved = router.directory.resolve(name)
        assert resolved is not None
        served = resolved.served
        card: dict[str, object] = {"id": name, "object": "model", "owned_by": "vllm"}
        card["root"] = served.model
        card["parent"] = served.model if resolved.lora else None
        card["max_model_len"] = served.max_model_len
        data.append(card)
    exchange.respond(200, (JSON,), msgspec.json.encode({"object": "list", "data": data}))


def _health(router: Router, exchange: Exchange) -> None:
    """Answer GET /health: this process serves."""
    exchange.respond(200, (JSON,), b'{"status":"ok"}')


def _ready(router: Router, exchange: Exchange) -> None:
    """Answer GET /ready: a request sent now would find an instance."""
    if router.ready:
        exchange.respond(200, (JSON,), b'{"status":"ready"}')
    else:
        exchange.respond_error(
            503,
            "service_unavailable",
            "no instance is ready",
            code="not_ready",
            retry_after_s=RETRY_AFTER_S,
        )


LOCAL: Final[dict[bytes, Callable[[Router, Exchange], None]]] = {
    b"/health": _health,
    b"/ready": _ready,
    b"/v1/models": _models,
}
