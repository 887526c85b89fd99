"""Requests that the router answers itself: why, and in which API's form of an error.

Source: OpenAI's error object, as vLLM sends it (entrypoints/serve/engine/protocol.py), and
Anthropic's (entrypoints/anthropic/protocol.py).
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

import msgspec

from router.http_exchange import JSON, Exchange, error_body
from router.tenants import Tenant

RETRY_AFTER_S: Final = 1.0
"""When to come back where nothing better is known."""


class Form(Enum):
    """Whose clients an endpoint serves."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Refusal(msgspec.Struct, frozen=True):
    """An error answer.

    Attributes:
        reason: what to count it under; one of a bounded set.
        message: what is wrong and what to do, for a person.
        kind: the error's type, in OpenAI's words.
        code: a machine's word for it.
        param: the request's field that is at fault.
        retry_after_s: when to come back.
        allowed: methods that the path knows, where that is what is wrong.
    """

    status: int
    reason: str
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    allowed: tuple[str, ...] = ()


CRASHED: Final = Refusal(
    500, "crashed", "the router failed; this is a bug", "server_error", code="internal_error"
)

_ANTHROPIC_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def ended(refusal: Refusal | None) -> tuple[str, int]:
    """Return the outcome and the status of a request that was answered here."""
    return ("ok", 200) if refusal is None else (f"rejected:{refusal.reason}", refusal.status)


def answer(exchange: Exchange, refusal: Refusal, form: Form = Form.OPENAI) -> None:
    """Send an error; does nothing if the client is gone."""
    headers = [JSON]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(refusal.retry_after_s))))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == 405:
        headers.append((b"allow", ", ".join((*refusal.allowed, "OPTIONS")).encode()))
    exchange.respond(refusal.status, headers, _body(refusal, form))


def _body(refusal: Refusal, form: Form) -> bytes:
    if form is Form.OPENAI:
        return error_body(refusal.kind, refusal.message, refusal.code, refusal.param)
    kind = _ANTHROPIC_KINDS.get(refusal.status, "api_error")
    error = {"type": kind, "message": refusal.message}
    return msgspec.json.encode({"type": "error", "error": error})


def unknown_model(name: str, known: list[str]) -> Refusal:
    """Refuse a request for a model that nobody has ever served here."""
    if name:
        shown = name if len(name) <= 128 else name[:128] + "…"
        problem = f"the model {shown!r} does not exist"
    else:
        problem = "the request names no model"
    return Refusal(
        404,
        "unknown_model",
        f"{problem}; there is {', '.join(known[:20]) or 'none'}",
        code="model_not_found",
        param="model",
    )


def too_long(tokens: int, longest: int, param: str, *, exact: bool = True) -> Refusal:
    """Refuse a prompt that no instance can take, as the engine would."""
    many = f"{tokens}" if exact else f"at least {tokens}"
    return Refusal(
        400,
        "too_long",
        f"the prompt has {many} tokens, but the model's context is {longest}, which must also "
        "hold the answer; shorten the prompt",
        code="context_length_exceeded",
        param=param,
    )


def malformed(problem: str) -> Refusal:
    """Refuse a body that is not what the endpoint takes."""
    return Refusal(400, "malformed", f"the request body cannot be read: {problem}")


def wrong_method(path: str, *allowed: str) -> Refusal:
    """Refuse a method that a path does not know; it knows those that are given."""
    return Refusal(405, "method", f"{path} takes {' and '.join(allowed)}", allowed=allowed)


def engine_only(path: str) -> Refusal:
    """Refuse a path that acts on one engine: there are many behind this router."""
    return Refusal(
        404,
        "engine_only",
        f"{path} is a matter of one engine; ask the engine itself, not the router",
        code="engine_only",
    )


def unknown_path(path: str) -> Refusal:
    """Refuse a path that is none of an inference API."""
    return Refusal(
        404,
        "unknown_path",
        f"there is no {path[:128]} here; inference is under /v1/",
        code="not_found",
    )


def loop(routers: int) -> Refusal:
    """Refuse a request that goes in circles."""
    return Refusal(
        508,
        "loop",
        f"this request has passed through {routers} routers, this one perhaps among them: an "
        "instance's url leads to a router; `multiplane instances` lists the urls",
        "server_error",
        code="loop_detected",
    )


def bad_key(key_given: bool) -> Refusal:
    """Refuse a caller without a key, or with a wrong one."""
    if key_given:
        message = "this API key is not known here"
    else:
        message = "this router needs an API key: send `Authorization: Bearer KEY`"
    return Refusal(401, "key", message, code="invalid_api_key")


def not_allowed(message: str) -> Refusal:
    """Refuse what the caller's tenant may not do."""
    return Refusal(403, "not_allowed", message, "permission_error", code="not_allowed")


def too_many(tenant: Tenant, wait_s: float) -> Refusal:
    """Refuse a request beyond a tenant's concurrency."""
    return Refusal(
        429,
        "tenant_requests",
        f"tenant {tenant.name!r} has {tenant.requests_max} requests in flight, which is its limit",
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def too_fast(tenant: Tenant, wait_s: float) -> Refusal:
    """Refuse a request beyond a tenant's token rate."""
    return Refusal(
        429,
        "tenant_tokens",
        f"tenant {tenant.name!r} has used up its {tenant.tokens_per_s:g} tokens a second; there "
        f"is room for this request in {wait_s:.1f} s",
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def bad_header(message: str) -> Refusal:
    """Refuse a header that cannot be used."""
    return Refusal(400, "header", message, code="invalid_header")


def queue_full(waiting: int, wait_s: float) -> Refusal:
    """Refuse a request for which there is no place in the queue."""
    return Refusal(
        429,
        "queue_full",
        f"every instance is full, and {waiting} requests wait already; they will have been served "
        f"in about {wait_s:.0f} s",
        "rate_limit_error",
        code="queue_full",
        retry_after_s=wait_s,
    )


def _unavailable(
    reason: str, message: str, code: str, retry_after_s: float = RETRY_AFTER_S
) -> Refusal:
    return Refusal(
        503, reason, message, "service_unavailable", code=code, retry_after_s=retry_after_s
    )


def queue_timeout(waited_s: float, wait_s: float) -> Refusal:
    """Refuse a request that has waited for as long as any may."""
    return _unavailable(
        "queue_timeout",
        f"no instance had room for this request in {waited_s:.0f} s",
        "queue_timeout",
        wait_s,
    )


def too_late(wait_s: float) -> Refusal:
    """Refuse a request that would miss its deadline."""
    return _unavailable(
        "deadline",
        "at the present load this request cannot be expected to be answered by its deadline; come "
        "back later, or give it a larger budget",
        "deadline_unreachable",
        wait_s,
    )


def stopping() -> Refusal:
    """Refuse a request that still waits when the router ends."""
    return _unavailable(
        "stopping",
        "this router is stopping; send the request again",
        "stopping",
    )


def unknown_prefix(handle: str) -> Refusal:
    """Refuse a handle that stands for nothing of this caller's."""
    return Refusal(
        404,
        "unknown_prefix",
        f"no prefix {handle[:64]!r} is registered, so there is nothing to release or to show; it "
        "was released as often as registered, or its time was over",
        code="prefix_not_found",
    )


def unread_prefix(reason: str, detail: str) -> Refusal:
    """Refuse a prefix whose tokens cannot be known here; says why, as metrics call it."""
    return malformed(f"the prefix cannot be read here ({reason}){detail and ': '}{detail}")


def reader_busy() -> Refusal:
    """Refuse a prefix that there is no time to read now."""
    return _unavailable(
        "reader_busy",
        "too many long texts are being read at this router; send the prefix again",
        "reader_busy",
    )


def prefixes_away(problem: str) -> Refusal:
    """Refuse to change or show registrations that are out of reach."""
    return _unavailable(
        "prefixes_away",
        f"registered prefixes are out of reach: {problem}; is NATS up, and `multiplane bus init` "
        "done? What was asked for may or may not have been done; sent again with the same "
        "Idempotency-Key it counts once",
        "prefixes_unavailable",
    )


def prefixes_busy(problem: str) -> Refusal:
    """Refuse one of too many changes at a time."""
    return Refusal(
        429,
        "prefixes_busy",
        problem,
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=RETRY_AFTER_S,
    )


def too_many_prefixes(problem: str) -> Refusal:
    """Refuse a registration beyond a bound."""
    return Refusal(
        429,
        "prefixes",
        f"{problem}; release some with DELETE /v1/prefixes/HANDLE",
        "rate_limit_error",
        code="too_many_prefixes",
    )
