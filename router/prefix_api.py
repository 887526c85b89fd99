"""`/v1/prefixes`: callers register the beginnings that many of their prompts will share.

    POST   /v1/prefixes         {"model", "messages" or "tokens", "pin", "warm", "spread"}
    GET    /v1/prefixes         the caller's, and GET /v1/prefixes/HANDLE one of them
    DELETE /v1/prefixes/HANDLE  releases one reference

A handle is a digest of the prefix, the same at every router and worker. Registrations are each
process's own: they steer what it keeps and has computed, and prompts that share the prefix are
found by their tokens everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from controlplane.core.decision import RouteRequest
from controlplane.core.hashing import NO_EXTRAS, Extras
from router import refusals
from router.big_bodies import check_quick
from router.directory import Directory, Resolved
from router.http_exchange import JSON, Exchange, State
from router.prefix_cache import Handle, PrefixCache
from router.prefixes import Full, Options, Prefix, PrefixRegistry, is_hot
from router.prompt import Inexact
from router.refusals import Refusal
from router.tenant_gate import TenantGate
from router.tenants import Tenant
from router.warming import Warmer, Warming
from schemas.codec import RemoteError
from schemas.openai import ChatRequest, CompletionRequest, body_decoder

PATH: Final = b"/v1/prefixes"
WARM_MAX: Final = 64
BODY_BYTES_MAX: Final = 4 << 20
"""Largest registration: it may be kept, to have instances compute it."""
LOOK_S: Final = 5.0
"""How often hot prefixes are spread."""

logger = logging.getLogger(__name__)


class _Body(msgspec.Struct):
    model: str = ""
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    cache_salt: str | None = None
    pin: bool = False
    warm: int = 0
    spread: bool = False


_decode = body_decoder(_Body)


def is_about_prefixes(path: bytes) -> bool:
    """Whether a path is this API's."""
    return path == PATH or path.startswith(PATH + b"/")


class PrefixApi:
    """Answers `/v1/prefixes`, and keeps what was registered.

    Attributes:
        registry: what is registered.
    """

    def __init__(self, directory: Directory, warmer: Warmer, cache: PrefixCache) -> None:
        self.registry = PrefixRegistry()
        self._directory = directory
        self._warmer = warmer
        self._cache = cache
        self._pins: dict[Prefix, Handle | None] = {}
        self._warmings: dict[Prefix, Warming] = {}
        self._spreading: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def handle(
        self,
        exchange: Exchange,
        gate: TenantGate,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """Answer one request."""
        tenant = gate.tenant
        handle = exchange.path[len(PATH) + 1 :].decode("latin-1")
        if exchange.method == b"POST" and not handle:
            spawn(self._register(exchange, gate))
        elif exchange.method == b"GET" and not handle:
            listed = [self._shown(each) for each in self.registry.of(tenant.name)]
            _answer(exchange, 200, {"object": "list", "data": listed})
        elif not handle:
            refusals.answer(exchange, refusals.only_post(PATH.decode()))
        else:
            self._one(exchange, tenant, handle)

    def _one(self, exchange: Exchange, tenant: Tenant, handle: str) -> None:
        prefix = self.registry.get(tenant.name, handle)
        if prefix is None:
            refusals.answer(exchange, refusals.unknown_prefix(handle))
        elif exchange.method == b"GET":
            _answer(exchange, 200, self._shown(prefix))
        elif exchange.method == b"DELETE":
            gone = self.registry.release(prefix)
            if gone:
                self._forget(prefix)
            _answer(exchange, 200, {"id": handle, "deleted": gone, "references": prefix.references})
        else:
            refusals.answer(exchange, refusals.only_post(PATH.decode()))

    async def _register(self, exchange: Exchange, gate: TenantGate) -> None:
        found: Prefix | Refusal
        try:
            found = await self._registered(exchange.body, gate)
        except Exception:
            logger.exception("request %r could not be read", exchange.request_id)
            found = refusals.CRASHED
        if exchange.state is not State.OPEN:
            return  # the client has left
        if isinstance(found, Refusal):
            refusals.answer(exchange, found)
        else:
            _answer(exchange, 200, self._shown(found))

    async def _registered(self, data: bytes, gate: TenantGate) -> Prefix | Refusal:
        """Return what a body registers, or why it does not."""
        tenant = gate.tenant
        if len(data) > BODY_BYTES_MAX:
            return refusals.malformed(f"a prefix has at most {BODY_BYTES_MAX >> 20} MiB")
        try:
            await check_quick(data)
            body = _decode(data)
        except RemoteError as error:
            return refusals.malformed(str(error))
        wait_s = gate.charge(0, time.monotonic()) if body.warm else None
        if wait_s is not None:
            return refusals.too_fast(tenant, wait_s)
        if (body.messages is None) == (body.tokens is None):
            return refusals.malformed("give either `messages` or `tokens`")
        if not 0 <= body.warm <= WARM_MAX:
            return refusals.malformed(f"`warm` is a number of instances, at most {WARM_MAX}")
        resolved = self._directory.resolve(body.model)
        if resolved is None:
            return refusals.unknown_model(body.model, self._directory.names)
        if not tenant.may_use(body.model or resolved.served.model):
            return refusals.not_allowed(f"tenant {tenant.name!r} may not use this model")
        return await self._read(body, gate, resolved)

    async def _read(self, body: _Body, gate: TenantGate, resolved: Resolved) -> Prefix | Refusal:
        served, reader = resolved.served, resolved.served.reader
        if reader is None:
            return refusals.malformed("this model's prompts cannot be read here")
        extras = NO_EXTRAS if resolved.lora is None else Extras(resolved.lora)
        asked: ChatRequest | None = None
        if body.messages is not None:
            asked = ChatRequest(
                messages=body.messages, add_generation_prompt=False, cache_salt=body.cache_salt
            )
            found = await reader.read_chat(asked, extras, tokens_max=served.max_model_len)
        else:
            ids = CompletionRequest(prompt=[*(body.tokens or ())], cache_salt=body.cache_salt)
            found = await reader.read_completion(ids, extras, tokens_max=served.max_model_len)
        if isinstance(found, Inexact):
            return refusals.malformed(f"the prefix cannot be read: {found.reason} {found.detail}")
        if not found.hashes:
            return refusals.malformed("the prefix is shorter than one block: nothing to share")
        options = Options(body.pin, body.warm, body.spread)
        name, hashes = gate.tenant.name, found.hashes
        path, data = _engine_request(body, resolved)
        try:
            prefix = self.registry.add(
                name, served.model, found.tokens, hashes, options, size_bytes=len(data)
            )
        except Full as error:
            return refusals.too_many_prefixes(str(error))
        if prefix.references == 1:
            if body.pin and asked is not None:
                self._pins[prefix] = reader.pin_chat(asked, extras)
            request = RouteRequest(
                prefix.id, found.tokens, hashes, served.block_size, lora=resolved.lora, tenant=name
            )
            work = Warming(served, request, path, data)
            self._warmings[prefix] = work
            gate.settle(self._warmer.warm(work, body.warm) * found.tokens)
            if body.spread and self._spreading is None:
                self._spreading = self._loop.call_later(LOOK_S, self._spread)
        return prefix

    def _spread(self) -> None:
        """Let one more instance compute each hot prefix; look again while any could be."""
        self._spreading = None
        for prefix in self.registry.spreading():
            work = self._warmings[prefix]
            if is_hot(prefix.uses, len(self._warmer.holders(work))):
                self._warmer.warm(work, 1)
            prefix.uses = 0
        if self.registry.watched:
            self._spreading = self._loop.call_later(LOOK_S, self._spread)

    def _forget(self, prefix: Prefix) -> None:
        del self._warmings[prefix]
        handle = self._pins.pop(prefix, None)
        if handle is not None:
            self._cache.release(handle)

    def _shown(self, prefix: Prefix) -> dict[str, Any]:
        return {
            "id": prefix.id,
            "object": "prefix",
            "model": prefix.model,
            "tokens": prefix.tokens,
            "blocks": prefix.blocks,
            "references": prefix.references,
            "pinned": self._pins.get(prefix) is not None,
            "spread": prefix.options.spread,
            "instances": self._warmer.holders(self._warmings[prefix]),
        }

    def stop(self) -> None:
        """Spread nothing more."""
        if self._spreading is not None:
            self._spreading.cancel()


def _engine_request(body: _Body, resolved: Resolved) -> tuple[str, bytes]:
    """Return the path and body that make an engine compute a prefix, and one token more."""
    document: dict[str, Any] = {"model": resolved.lora or resolved.served.model, "max_tokens": 1}
    if body.cache_salt is not None:
        document["cache_salt"] = body.cache_salt
    if body.messages is not None:
        document |= {"messages": body.messages, "add_generation_prompt": False}
        return "/v1/chat/completions", msgspec.json.encode(document)
    return "/v1/completions", msgspec.json.encode(document | {"prompt": body.tokens})


def _answer(exchange: Exchange, status: int, document: dict[str, Any]) -> None:
    exchange.respond(status, (JSON,), msgspec.json.encode(document))
