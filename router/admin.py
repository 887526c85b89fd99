"""The operator's side of a router, on a port of its own: metrics, health, and why it decides so.

GET  /metrics                 Prometheus
GET  /health, /ready          liveness and readiness
GET  /debug/state             the fleet as this router sees it
GET  /debug/blocks?instance=  the block hashes it believes an instance has; &model= if two models
                              have instances of that name
POST /debug/explain           any request that has a prompt → every candidate; nothing is sent
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from controlplane.core.dispatch import Decision
from controlplane.core.fleet import Fleet
from router.absence import no_instance
from router.http_exchange import JSON, Exchange, State
from router.local_answers import PROBES
from router.metrics import CONTENT_TYPE
from router.prompt import Inexact, Prompt
from router.reading import read
from router.refusals import answer
from router.routing import route_request
from router.service import Router
from router.surface import ENDPOINTS, Asked, Endpoint, estimate_tokens, read_body
from router.tenants import ANYBODY
from schemas.bus import PolicyOverride
from schemas.codec import RemoteError

logger = logging.getLogger(__name__)


class Admin:
    """Answers operators; a handler for an HTTP server."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """Answer one request; see `router.http_server.Handler`."""
        answer = _ROUTES.get((exchange.method, exchange.path))
        if answer is not None:
            answer(self, exchange)
        elif exchange.method == b"GET" and exchange.path in PROBES:
            PROBES[exchange.path](self._router.directory, exchange)
        else:
            known = ", ".join(sorted(f"{m.decode()} {p.decode()}" for m, p in _ROUTES))
            exchange.respond_error(404, "invalid_request_error", f"there is only {known}")

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, ((b"content-type", CONTENT_TYPE),), self._router.metrics.render())

    def _state(self, exchange: Exchange) -> None:
        models = {
            served.model: {
                "policy": served.plane.config.policy,
                "override": _override(served.plane.verdicts.policy(time.monotonic())),
                "card": served.card,
                "bus_connected": served.plane.bus_connected,
                "instances": [self._instance(served, instance) for instance in served.plane.fleet],
                "index_blocks": len(served.plane.index),
                "tickets": len(served.plane.requests.tickets),
                "hotspots": [msgspec.to_builtins(h) for h in served.plane.verdicts.hotspots],
                "counts": dict(served.plane.requests.counts),
                "queue": self._queue(served.model),
            }
            for served in self._router.directory
        }
        tenants = {
            gate.tenant.name: {
                "running": gate.running,
                "running_elsewhere": gate.elsewhere,
                "tokens_available": gate.level(time.monotonic()),
            }
            for gate in self._router.access.gates
        }
        state = {
            "router_id": self._router.router_id,
            "models": models,
            "tenants": tenants,
            "prefixes": self._router.keeper.state(),
            "unusable": [
                {"model": model, "instance": instance_id, "problem": problem}
                for (model, instance_id), problem in self._router.events.unusable.items()
            ],
        }
        exchange.respond(200, (JSON,), msgspec.json.encode(state))

    def _queue(self, model: str) -> dict[str, Any] | None:
        """Return what waits for a model; None where nothing ever does."""
        rooms = self._router.rooms
        room = None if rooms is None else rooms.get(model)
        return None if room is None else room.state()

    def _instance(self, served: Any, instance: Any) -> dict[str, Any]:
        plane = served.plane
        row = instance.row
        load = instance.load
        return {
            "instance": instance.record.instance_id,
            "url": instance.record.url,
            "state": instance.record.state,
            "trust": instance.trust,
            "mirror_complete": instance.record.mirror_complete,
            "blind": instance.record.blind,
            "card_differs": not served.cards_seen.get(instance.record.card, True),
            "batch_size": int(plane.ledger.batch[row]),
            "queued_tokens": int(plane.ledger.queued[row]),
            "load": plane.ledger.of(instance.record.instance_id),
            "blocks": sum(plane.index.count(slot) for slot in instance.slots.values()),
            "epoch": instance.follower.epoch,
            "seq": instance.follower.seq,
            "drained": instance.drained,
            "blacklisted": time.monotonic() < instance.blacklisted_until_s,
            "kept_out_by": _kept_out_by(plane.fleet, row),
            "breaker_open": instance.breaker_open,
            "kv_usage": None if load is None else load.kv_usage,
            "running": None if load is None else load.running,
            "waiting": None if load is None else load.waiting,
        }

    def _blocks(self, exchange: Exchange) -> None:
        query = parse_qs(exchange.query.decode("latin-1"))
        wanted, model = query.get("instance", [""])[0], query.get("model", [""])[0]
        for served in self._router.directory:
            instance = served.plane.fleet.get(wanted)
            if instance is not None and model in ("", served.model):
                break
        else:
            exchange.respond_error(
                404, "invalid_request_error", f"no instance {wanted!r}", param="instance"
            )
            return
        slot = instance.slots.get(0)
        blocks = [] if slot is None else sorted(served.plane.index.blocks(slot))
        answer = {
            "instance": wanted,
            "trust": instance.trust,
            "epoch": instance.follower.epoch,
            "seq": instance.follower.seq,
            "blocks": blocks,
        }
        exchange.respond(200, (JSON,), msgspec.json.encode(answer))

    def _explain(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._explain_later(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _explain_later(self, exchange: Exchange) -> None:
        try:
            await self._explained(exchange)
        except Exception:
            logger.exception("a request could not be explained")
            if exchange.state is State.OPEN:
                exchange.respond_error(500, "server_error", "the router failed; this is a bug")

    async def _explained(self, exchange: Exchange) -> None:
        body = exchange.body
        endpoint = _endpoint_of(exchange)
        try:
            parsed, name = read_body(endpoint, body)
        except RemoteError as error:
            exchange.respond_error(400, "invalid_request_error", str(error))
            return
        resolved = self._router.directory.resolve(name)
        if resolved is None:
            names = ", ".join(self._router.directory.names) or "none yet"
            exchange.respond_error(
                404, "invalid_request_error", f"no model {name!r}; there is {names}"
            )
            return
        found = read(resolved.served, Asked(parsed, len(body)), resolved.lora)
        if not isinstance(found, Prompt | Inexact):
            found = await found
        estimated = estimate_tokens(endpoint, parsed, len(body))
        request = route_request("explain", resolved, found, estimated, ANYBODY)
        began = time.perf_counter()
        decision = resolved.served.plane.requests.decide(request, time.monotonic())
        took_s = time.perf_counter() - began
        if decision is None:
            answer(exchange, no_instance(resolved.served, resolved.lora))
            return
        explained = _explanation(resolved.served.model, decision) | {"decide_s": took_s}
        exchange.respond(200, (JSON,), msgspec.json.encode(explained))


def _kept_out_by(fleet: Fleet, row: int) -> list[str]:
    """Return the filters that keep an instance from getting requests, whatever these ask for."""
    drained = fleet.undrained is not None and not fleet.undrained[row]
    passes = {
        "drained": not drained,
        "health": fleet.healthy[row],
        "draining": fleet.ready[row],
        "blacklist": fleet.allowed[row],
    }
    return [name for name, passed in passes.items() if not passed]


def _override(override: PolicyOverride | None) -> dict[str, Any] | None:
    """Return the policy that stands in for the configured one, if any does: what, by whom, why."""
    if override is None:
        return None
    return {"policy": override.policy, "by": override.by, "reason": override.reason}


def _explanation(model: str, decision: Decision) -> dict[str, Any]:
    """Return a decision and all that led there, as operators read it."""
    request = decision.request
    candidates = [
        {
            "instance": candidate.instance_id,
            "p_tokens": candidate.queued_tokens
            + max(request.prompt_tokens - candidate.hit_tokens, 1),
            "queued_tokens": candidate.queued_tokens,
            "batch_size": candidate.batch_size,
            "hit_tokens": candidate.hit_tokens,
            "score": candidate.score,
            "eligible": candidate.eligible,
            "excluded_by": candidate.excluded_by,
            "trust": decision.rows[row].trust,
        }
        for row, candidate in enumerate(decision.candidates())
    ]
    return {
        "model": model,
        "pick": decision.instance.record.instance_id,
        "policy": decision.choice.policy,
        "reason": decision.reason,
        "prompt_tokens": request.prompt_tokens,
        "exact": request.exact,
        "block_size": request.block_size,
        "block_hashes": [f"{block:016x}" for block in request.hashes],
        "ties": decision.choice.ties,
        "candidates": candidates,
    }


def _endpoint_of(exchange: Exchange) -> Endpoint:
    """Return what a request is to be read as: `?endpoint=`, or what its body looks like."""
    wanted = parse_qs(exchange.query.decode("latin-1")).get("endpoint", [""])[0]
    default = "chat" if b'"messages"' in exchange.body else "completions"
    by_name = {endpoint.name: endpoint for endpoint in ENDPOINTS.values()}
    return by_name.get(wanted) or by_name[default]


_ROUTES: Final[dict[tuple[bytes, bytes], Callable[[Admin, Exchange], None]]] = {
    (b"GET", b"/metrics"): Admin._metrics,
    (b"GET", b"/debug/state"): Admin._state,
    (b"GET", b"/debug/blocks"): Admin._blocks,
    (b"POST", b"/debug/explain"): Admin._explain,
}
