"""What a router answers by itself: which models there are, and how it is."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Final
from urllib.parse import unquote

import msgspec

from router.absence import unavailable
from router.cors import Cors
from router.directory import Directory, Resolved
from router.http_exchange import JSON, Exchange
from router.refusals import Refusal, answer, not_allowed, unknown_model
from router.tenants import Tenant

MODELS: Final = b"/v1/models"
_ONE_MODEL: Final = b"/v1/models/"


def health(directory: Directory, exchange: Exchange) -> None:
    """Answer GET /health: this process serves."""
    exchange.respond(200, (JSON,), b'{"status":"ok"}')


def ready(directory: Directory, exchange: Exchange) -> None:
    """Answer GET /ready: a request sent now would find an instance."""
    if directory.ready:
        exchange.respond(200, (JSON,), b'{"status":"ready"}')
        return
    missing = directory.learning and f"this router has not learnt yet: {directory.learning}"
    answer(exchange, unavailable("not_ready", missing or "no instance is ready"))


def version(directory: Directory, exchange: Exchange) -> None:
    """Answer GET /version: this is a router, and no engine."""
    body = {"version": metadata.version("multiplane"), "server": "multiplane router"}
    exchange.respond(200, (JSON,), msgspec.json.encode(body))


def options(cors: Cors | None, exchange: Exchange) -> None:
    """Answer OPTIONS, such as a browser's preflight, which brings no key."""
    lines = [(b"allow", b"GET, HEAD, POST, DELETE, OPTIONS")]
    if cors is not None:
        lines += cors.preflight(exchange)
    exchange.respond(204, lines)


PROBES: Final[dict[bytes, Callable[[Directory, Exchange], None]]] = {
    b"/health": health,
    b"/ready": ready,
    b"/version": version,
}
"""Paths that need no key."""


def is_about_models(path: bytes) -> bool:
    """Whether a path asks for models."""
    return path == MODELS or path.startswith(_ONE_MODEL)


def models(directory: Directory, tenant: Tenant, exchange: Exchange) -> Refusal | None:
    """Answer GET /v1/models and /v1/models/NAME: every name, once, over the whole fleet.

    Returns:
        What was refused; None if nothing was.
    """
    path = exchange.path
    if path == MODELS:
        names = [name for name in directory.names if tenant.may_use(name)]
        cards = [_card(name, found) for name in names if (found := directory.resolve(name))]
        exchange.respond(200, (JSON,), msgspec.json.encode({"object": "list", "data": cards}))
        return None
    name = unquote(path[len(_ONE_MODEL) :].decode("latin-1"))
    found = directory.resolve(name) if name else None
    refusal: Refusal | None = None
    if found is None:
        refusal = unknown_model(name, directory.names)
    elif not tenant.may_use(name):
        refusal = not_allowed(f"tenant {tenant.name!r} may not use {name!r}")
    else:
        exchange.respond(200, (JSON,), msgspec.json.encode(_card(name, found)))
    if refusal is not None:
        answer(exchange, refusal)
    return refusal


def _card(name: str, found: Resolved) -> dict[str, object]:
    served = found.served
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "multiplane",
        "root": served.model,
        "parent": served.model if found.lora else None,
        "max_model_len": served.max_model_len,
        "permission": [],
    }
