"""One request, from the moment it is whole to its end.

    start ──> read ──> begin ──> decided, booked, sent ──> first byte ──> ended
                │        │         └─ anew, where an attempt fails before its first byte,
                │        │            at once or when there is room
                └────────┴──> refused, or the client is gone

Whatever happens, the end comes exactly once: it gives back the booking and the tenant's place,
counts the request, and writes its line in the access log. `Routing` is the observer of its own
forwarding (`router.http_proxy.Observer`). With tracing off, that costs a request a comparison with
None here and there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

import msgspec

from controlplane.core.dispatch import RouteRequest, Ticket
from controlplane.core.fleet import Instance
from controlplane.core.latency import head_hash
from router import refusals
from router.absence import no_instance
from router.access_log import Entry
from router.directory import Resolved, ServedModel
from router.http_exchange import Exchange, State
from router.http_proxy import LATER, RETRIES_MAX, Outcome
from router.instances import Key
from router.prompt import Inexact, Prompt
from router.reading import Rest, read
from router.refusals import Refusal
from router.surface import Asked, Endpoint, estimate_tokens, is_heavy, read_body
from router.tenant_gate import TenantGate
from router.tenants import Tenant
from router.usage import NO_USAGE, Usage, estimate_output_tokens, read_usage
from router.wait import Wait, hold

if TYPE_CHECKING:
    from router.service import Router
    from router.tracing import Trace

logger = logging.getLogger(__name__)

_OUTCOMES: Final[dict[Outcome, str]] = {
    Outcome.COMPLETED: "ok",
    Outcome.CLIENT_GONE: "client_gone",
    Outcome.FIRST_BYTE_TIMEOUT: "timeout",
    Outcome.STALLED: "timeout",
}
_COMPLETED: Final = Outcome.COMPLETED


class Routing:
    """A request on its way, for a model that exists; its place among its tenant's is taken.

    Attributes:
        router: whose it is.
        exchange: with its client.
        request: what the plane knows of it, once its prompt was read.
        started_s: when it had come whole.
        wait: its deadline and its waiting; None where nobody ever waits.
        trace: its spans; None if nobody collects them.
    """

    __slots__ = (
        "_attempt",
        "_endpoint",
        "_failed_at",
        "_gate",
        "_over",
        "_read_s",
        "_resolved",
        "_ticket",
        "_tried",
        "_ttft_s",
        "exchange",
        "request",
        "router",
        "started_s",
        "trace",
        "wait",
    )

    request: RouteRequest

    def __init__(
        self,
        router: Router,
        exchange: Exchange,
        endpoint: Endpoint,
        gate: TenantGate,
        resolved: Resolved,
        started_s: float,
    ) -> None:
        self.router = router
        self.exchange = exchange
        self._endpoint = endpoint
        self._gate = gate
        self._resolved = resolved
        self.started_s = started_s
        self._over = False
        self._ticket: Ticket | None = None
        self._attempt = 0
        self._tried: tuple[str, ...] = ()
        self._failed_at: tuple[Hashable, ...] = ()  # where it was answered with a 5xx
        self._ttft_s: float | None = None
        self._read_s = 0.0
        self.wait: Wait | None = None
        self.trace: Trace | None = None
        if router.tracer is not None:
            self.trace = router.tracer.begin(exchange.header(b"traceparent"), started_s)

    # --- before the decision

    def start(self, asked: Asked) -> None:
        """Read the prompt, decide and send: now, or once a long new text is tokenized."""
        try:
            found = read(self._resolved.served, asked, self._resolved.lora)
            if not isinstance(found, Rest):
                self._begin(found, asked)
                return
        except Exception:
            self._crashed()
            return
        task = self.router.spawn(self._read(found, asked))
        task.add_done_callback(lambda done: self._reading_ended(done, found))
        self.exchange.on_client_gone(lambda: _cancel(task))

    async def _read(self, found: Rest, asked: Asked) -> None:
        try:
            self._begin(await found, asked)
        except Exception:
            self._crashed()

    def _reading_ended(self, task: asyncio.Task[None], found: Rest) -> None:
        """Give up what was read for a client that left, even if reading had not begun."""
        found.close()
        if task.cancelled():
            self._end("client_gone", 0, time.monotonic())

    def _begin(self, found: Prompt | Inexact, asked: Asked) -> None:
        """Decide and send; answer with an error where that is impossible."""
        now_s = time.monotonic()
        self._read_s = now_s - self.started_s
        refusal = self._admit(found, asked, now_s)
        if refusal is not None:
            self._refuse(refusal)
            return
        if self.router.rooms is not None and hold(self, self.router.rooms, now_s):
            return
        self.send(now_s)

    def send(self, now_s: float) -> None:
        """Decide, and send to the instance that was chosen."""
        instance = self._decide(now_s)
        if instance is None:
            self.refuse_admitted(no_instance(self._resolved.served, self._resolved.lora))
            return
        self.router.forward(self.exchange, self._key_of(instance), self)

    def send_safely(self, now_s: float) -> None:
        """Send one that has waited, on behalf of whoever gave it room."""
        try:
            self.send(now_s)
        except Exception:
            self._crashed()

    def refuse_admitted(self, refusal: Refusal) -> None:
        """Answer one with an error that was charged for already."""
        self._gate.settle(-self.request.prompt_tokens)
        self._refuse(refusal)

    def _admit(self, found: Prompt | Inexact, asked: Asked, now_s: float) -> Refusal | None:
        """Check the prompt against the model's limit and the tenant's, and charge for it."""
        served, tenant = self._resolved.served, self._gate.tenant
        exact = isinstance(found, Prompt)
        tokens = found.tokens if isinstance(found, Prompt) else found.tokens_min
        longest = served.max_model_len
        if longest is not None and tokens >= longest:
            return refusals.too_long(tokens, longest, self._endpoint.param, exact=exact)
        estimated = 0
        if isinstance(found, Inexact):
            self.router.metrics.inexact(found.reason)
            parsed = None if asked.heavy else asked.parsed
            estimated = estimate_tokens(self._endpoint, parsed, asked.text_bytes)
        self.request = route_request(
            self.exchange.request_id.decode("latin-1"), self._resolved, found, estimated, tenant
        )
        self.router.keeper.passed(tenant.name, self._resolved, self.request.hashes, asked)
        if self.router.rooms is not None and isinstance(found, Prompt):
            head = head_hash(found.head)
            self.request = msgspec.structs.replace(self.request, head=head)
        wait_s = self._gate.charge(self.request.prompt_tokens, now_s)
        return None if wait_s is None else refusals.too_fast(tenant, wait_s)

    # --- while it waits

    @property
    def served(self) -> ServedModel:
        """The model that it is for."""
        return self._resolved.served

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
        return self._gate.tenant

    @property
    def endpoint_name(self) -> str:
        """What it asks for."""
        return self._endpoint.name

    def left(self) -> None:
        """End: the client has left while this waited."""
        self._gate.settle(-self.request.prompt_tokens)
        self._end("client_gone", 0, time.monotonic())

    def can_become(self, model: str) -> bool:
        """Whether there is such a model to ask instead."""
        return self.router.directory.resolve(model) is not None

    def become(self, model: str) -> None:
        """Begin anew as a request for another model, which there is; its body asks for that."""
        resolved = self.router.directory.resolve(model)
        assert resolved is not None, "`can_become` said so"
        body = self.exchange.body
        parsed, _ = read_body(self._endpoint, body)
        self._gate.settle(-self.request.prompt_tokens)
        self._resolved, self._tried, self._failed_at = resolved, (), ()
        self.start(Asked(parsed, len(body), is_heavy(parsed, body)))

    # --- the decision

    def _decide(self, now_s: float) -> Instance | None:
        """Choose an instance and book the request on it."""
        router, served = self.router, self._resolved.served
        requests = served.plane.requests
        began_s = time.perf_counter()
        decision = requests.decide(self.request, now_s)
        if decision is None:
            return None
        decide_s = time.perf_counter() - began_s
        self._ticket = requests.book(
            decision,
            now_s,
            time.time(),
            attempt=self._attempt,
            decide_s=decide_s,
            tokenize_s=self._read_s,
            queue_s=0.0 if self.wait is None else self.wait.waited_s,
        )
        if self.wait is not None:
            self.wait.sent(decision, now_s)
        if self.trace is not None:
            self.trace.decided(now_s, decide_s, self._read_s, decision)
        instance = decision.instance
        router.instances.sent(served, instance.record.instance_id, now_s)
        router.metrics.decided(decision, decide_s, self._read_s)
        router.events.told()
        return instance

    def next_upstream(self, attempt: int, reason: Outcome) -> Hashable | None:
        """Choose another instance after an attempt failed before its first byte.

        Where others wait for room and nobody has any, it waits before them, to be sent then.
        """
        assert self._ticket is not None
        failed = self._ticket.decision.instance.record.instance_id
        self._tried = (*self._tried, failed)
        degraded = "retries" if attempt > RETRIES_MAX else self.request.by_load
        request = msgspec.structs.replace(self.request, tried=self._tried, by_load=degraded)
        if not self._resolved.served.plane.requests.may_retry(request):
            return None
        self.request = request
        now_s = time.monotonic()
        self._finish_ticket("retried", 0, now_s, NO_USAGE)
        if self.wait is not None:
            self.wait.failed(now_s)
        self._attempt += 1
        self.router.metrics.retried(reason)
        if self.wait is not None and self.wait.again(attempt, now_s):
            return LATER
        instance = self._decide(now_s)
        return None if instance is None else self._key_of(instance)

    def _key_of(self, instance: Instance) -> Key:
        return self._resolved.served.model, instance.record.instance_id

    # --- called by the forwarder

    def on_first_byte(self, now_s: float) -> None:
        """Prefill is done, unless this API's streams begin with a greeting."""
        if self._endpoint.opens_early:
            return
        self._ttft_s = now_s - self.started_s
        if self.wait is not None:
            self.wait.computed(now_s)
        if self._ticket is not None:
            self._resolved.served.plane.requests.first_byte(self._ticket, self._ttft_s)
            self.router.events.told()

    def on_attempt_end(self, key: Hashable, outcome: Outcome, status: int, now_s: float) -> None:
        """Let the instance's breaker learn from an attempt."""
        self.router.instances.ended(self._resolved.served, key, outcome, status, now_s)
        if status >= 500:
            self._failed_at = (*self._failed_at, key)

    def on_end(
        self, outcome: Outcome, status: int, body_bytes: int, now_s: float, usage_tail: bytes
    ) -> None:
        """The request is over, however it ended."""
        word = _OUTCOMES.get(outcome, "upstream_error")
        if outcome is _COMPLETED and status >= 500:
            word = "upstream_error"
        if len(set(self._failed_at)) > 1 and word != "ok":  # It was the request, not the instances.
            self.router.instances.pardon(self._resolved.served, self._failed_at, now_s)
        usage = read_usage(usage_tail)
        estimate = 0
        if status >= 400 or word == "upstream_error":
            self._gate.settle(-self.request.prompt_tokens)
        else:
            if usage.output_tokens is None:
                estimate = estimate_output_tokens(usage_tail, body_bytes)
            self._settle(usage, estimate)
        self._end(word, status, now_s, usage, estimate)

    def _settle(self, usage: Usage, estimate: int) -> None:
        """Charge the tenant for an answer."""
        output = estimate if usage.output_tokens is None else usage.output_tokens
        if usage.prompt_tokens is not None:
            output += usage.prompt_tokens - self.request.prompt_tokens  # which may be an estimate
        self._gate.settle(output)

    # --- the end

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error of our own."""
        self.router.metrics.rejected(refusal.reason)
        refusals.answer(self.exchange, refusal, self._endpoint.form)
        self._end(f"rejected:{refusal.reason}", refusal.status, time.monotonic())

    def _crashed(self) -> None:
        """Log the exception that is being handled, and let the client know."""
        logger.exception("request %r could not be routed", self.exchange.request_id)
        if self._over:
            return
        self._finish_ticket("upstream_error", 0, time.monotonic(), NO_USAGE)
        if self.exchange.state is State.OPEN:
            self._refuse(refusals.CRASHED)
        else:
            self.exchange.abort()
            self._end("crashed", 0, time.monotonic())

    def _end(
        self,
        outcome: str,
        status: int,
        now_s: float,
        usage: Usage = NO_USAGE,
        output_estimate: int = 0,
    ) -> None:
        """Give everything back, and say what became of the request; once."""
        if self._over:
            return
        self._over = True
        router, ticket = self.router, self._ticket
        duration_s = now_s - self.started_s
        self._finish_ticket(outcome, status, now_s, usage, output_estimate)
        if self.wait is not None:
            good = outcome == "ok" and status < 400
            self.wait.ended(good, self._attempt, self._ttft_s, now_s)
        model, tenant = self._resolved.served.model, self._gate.tenant.name
        router.metrics.ended(model, self._endpoint.name, tenant, outcome, status)
        if ticket is None:
            self._gate.leave()
        else:
            self._gate.leave(duration_s)
            tokens = self.request.prompt_tokens
            router.metrics.served(tenant, duration_s, self._ttft_s, tokens, usage)
        if router.access_log is not None or self.trace is not None:
            self._write_down(self._entry(outcome, status, duration_s, ticket, usage), now_s)

    def _write_down(self, entry: Entry, now_s: float) -> None:
        """Give what is to be told of this request to whoever wants it."""
        router = self.router
        if router.access_log is not None:
            router.access_log.add(entry)
        if router.tracer is not None and self.trace is not None:
            router.tracer.end(self.trace, entry, now_s)

    def _entry(
        self, outcome: str, status: int, duration_s: float, ticket: Ticket | None, usage: Usage
    ) -> Entry:
        """Return this request's line in the access log."""
        known = ticket is not None
        return Entry(
            ts=round(time.time(), 3),
            request_id=self.exchange.request_id.decode("latin-1"),
            tenant=self._gate.tenant.name,
            model=self._resolved.served.model,
            endpoint=self._endpoint.name,
            status=status,
            outcome=outcome,
            instance=ticket.decision.instance.record.instance_id if ticket is not None else "",
            attempts=self._attempt + known,
            exact=known and self.request.exact,
            prompt_tokens=self.request.prompt_tokens if known else 0,
            hit_tokens=ticket.decision.hit if ticket is not None else 0,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            ttft_s=None if self._ttft_s is None else round(self._ttft_s, 6),
            duration_s=round(duration_s, 6),
            queue_s=0.0 if self.wait is None else round(self.wait.waited_s, 6),
        )

    def _finish_ticket(
        self, outcome: str, status: int, now_s: float, usage: Usage, output_estimate: int = 0
    ) -> None:
        """Give the booking back, if there is one."""
        ticket, self._ticket = self._ticket, None
        estimated = usage.output_tokens is None and output_estimate > 0
        if ticket is not None:
            self._resolved.served.plane.requests.finish(
                ticket,
                outcome,
                status,
                now_s,
                time.time(),
                cached_tokens=usage.cached_tokens,
                output_tokens=output_estimate if estimated else usage.output_tokens,
                output_estimated=estimated,
                streamed=usage.streamed,
                ttft_s=self._ttft_s,
                started_s=self.started_s,
            )
            self.router.events.told()


def route_request(
    request_id: str,
    resolved: Resolved,
    found: Prompt | Inexact,
    estimated_tokens: int,
    tenant: Tenant,
) -> RouteRequest:
    """Return what the plane must know of a request.

    Args:
        request_id: of the request.
        resolved: the model and adapter that it names.
        found: its prompt, or why that is not known.
        estimated_tokens: its length, for where it is not known.
        tenant: whose request it is.
    """
    served = resolved.served
    exact = isinstance(found, Prompt)
    longest = served.max_model_len or estimated_tokens
    return RouteRequest(
        request_id,
        found.tokens if isinstance(found, Prompt) else min(estimated_tokens, longest),
        found.hashes if isinstance(found, Prompt) else (),
        served.block_size if exact else 0,
        exact=exact,
        by_load="" if isinstance(found, Prompt) else f"inexact:{found.reason}",
        lora=resolved.lora,
        tenant=tenant.name,
        alpha=tenant.alpha,
        beta=tenant.beta,
    )


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
