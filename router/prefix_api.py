"""`/v1/prefixes`: callers register the beginnings that many of their prompts will share.

    POST   /v1/prefixes         {"model", "messages" or "tokens", "pin", "warm", "spread", "ttl_s"}
    GET    /v1/prefixes         the caller's, and GET /v1/prefixes/HANDLE one of them
    DELETE /v1/prefixes/HANDLE  releases one reference

A handle is a digest of the prefix. Any router and worker answers for all of them: registrations are
on the bus (`router.prefix_store`), and every answer is of what stands there now. While the bus is
away, what is known here is shown and nothing can be changed.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import msgspec

from controlplane.bus.protocol import BusError
from controlplane.core.hashing import NO_EXTRAS, BlockHash, Extras
from router import refusals
from router.big_bodies import check_quick
from router.directory import Directory, Resolved, ServedModel
from router.http_exchange import JSON, Exchange, State
from router.metrics import Sample
from router.prefix_keeper import PrefixKeeper, engine_request
from router.prefix_records import Full, Unknown, find, register, release
from router.prefix_store import Busy
from router.prompt import Inexact, Prompt, Reason
from router.refusals import Refusal
from router.tenant_gate import TenantGate
from router.warming import Warmer
from schemas.bus import RegisteredPrefix, TenantPrefixes
from schemas.codec import RemoteError
from schemas.openai import ChatRequest, CompletionRequest, body_decoder

PATH: Final = b"/v1/prefixes"
WARM_MAX: Final = 64
BODY_BYTES_MAX: Final = 4 << 20
"""Largest registration: it may be kept, to have instances compute it."""
TTL_S: Final = 86_400.0
TTL_S_MIN: Final = 60.0
TTL_S_MAX: Final = 30 * 86_400.0
IDEMPOTENCY_HEADER: Final = b"idempotency-key"
"""A request that is sent again with the same value counts once."""

logger = logging.getLogger(__name__)


class _Body(msgspec.Struct):
    model: str = ""
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    cache_salt: str | None = None
    pin: bool = False
    warm: int = 0
    spread: bool = False
    ttl_s: float = TTL_S


_decode = body_decoder(_Body)


class _Read(msgspec.Struct, frozen=True):
    """What a body asks to register: whose model, how the prompt reads, and what came of that."""

    body: _Body
    resolved: Resolved
    asked: ChatRequest | CompletionRequest
    prompt: Prompt


def is_about_prefixes(path: bytes) -> bool:
    """Whether a path is this API's."""
    return path == PATH or path.startswith(PATH + b"/")


class PrefixApi:
    """Answers `/v1/prefixes`.

    Attributes:
        counts: answers, `ok` or the reason of a refusal; those too whose clients had left.
    """

    def __init__(self, directory: Directory, warmer: Warmer, keeper: PrefixKeeper) -> None:
        self.counts = Counter(ok=0)
        self._directory = directory
        self._warmer = warmer
        self._keeper = keeper

    def handle(
        self,
        exchange: Exchange,
        gate: TenantGate,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        told: Callable[[str, int], None],
    ) -> None:
        """Answer one request.

        Args:
            spawn: runs what takes longer.
            told: hears the outcome and the status, once.
        """
        method, handle = exchange.method, exchange.path[len(PATH) + 1 :].decode("latin-1")
        work: Coroutine[Any, Any, dict[str, Any] | Refusal]
        if method == b"POST" and not handle:
            work = self._register(exchange, gate)
        elif method in (b"GET", b"HEAD"):
            work = self._show(gate.tenant.name, handle)
        elif method == b"DELETE" and handle:
            work = self._release(exchange, gate.tenant.name, handle)
        else:
            path = exchange.path.decode("latin-1")
            other = "DELETE" if handle else "POST"
            refusal = refusals.wrong_method(path, "GET", other)
            self.counts[refusal.reason] += 1
            refusals.answer(exchange, refusal)
            told(*refusals.ended(refusal))
            return
        spawn(self._answer(exchange, work, told))

    async def _answer(
        self,
        exchange: Exchange,
        work: Coroutine[Any, Any, dict[str, Any] | Refusal],
        told: Callable[[str, int], None],
    ) -> None:
        outcome = "client_gone", 0
        try:
            found = await self._found(exchange, work)
            if exchange.state is State.OPEN:
                refusal = found if isinstance(found, Refusal) else None
                outcome = refusals.ended(refusal)
                if refusal is not None:
                    refusals.answer(exchange, refusal)
                else:
                    exchange.respond(200, (JSON,), msgspec.json.encode(found))
        finally:
            told(*outcome)

    async def _found(
        self, exchange: Exchange, work: Coroutine[Any, Any, dict[str, Any] | Refusal]
    ) -> dict[str, Any] | Refusal:
        found: dict[str, Any] | Refusal
        try:
            found = await work
        except Full as error:
            found = refusals.too_many_prefixes(str(error))
        except Busy as error:
            found = refusals.prefixes_busy(str(error))
        except BusError as error:
            found = refusals.prefixes_away(str(error))
        except Exception:
            logger.exception("request %r could not be answered", exchange.request_id)
            found = refusals.CRASHED
        self.counts[found.reason if isinstance(found, Refusal) else "ok"] += 1
        return found

    def samples(self) -> Iterator[Sample]:
        """Yield what metrics show."""
        text = "Requests about prefixes, by how they were answered: ok, or why not."
        sample = Sample("prefix_requests_total", text, labels=("outcome",))
        sample.values.update(((outcome,), n) for outcome, n in self.counts.items())
        yield sample

    # --- what there is

    async def _show(self, tenant: str, handle: str) -> dict[str, Any] | Refusal:
        record, stale = await self._latest(tenant)
        marked: dict[str, Any] = {"stale": True} if stale else {}
        if not handle:
            listed = [self._shown(tenant, each) for each in record.prefixes]
            return {"object": "list", "data": listed, **marked}
        prefix = find(record, handle)
        if prefix is None:
            return refusals.unknown_prefix(handle)
        return self._shown(tenant, prefix) | marked

    async def _latest(self, tenant: str) -> tuple[TenantPrefixes, bool]:
        """Return a tenant's record; and whether it is only what was known here.

        Raises:
            BusError: the bus is away, and nothing was known here before.
        """
        keeper = self._keeper
        try:
            return await keeper.store.read(tenant), False
        except (BusError, Busy):
            if not keeper.registry.knows(tenant):
                raise
            return keeper.registry.current(tenant, time.monotonic()), True

    async def _release(
        self, exchange: Exchange, tenant: str, handle: str
    ) -> dict[str, Any] | Refusal:
        try:
            record = await self._keeper.store.change(
                tenant, _mark(exchange, handle), lambda record: release(record, handle)
            )
        except Unknown:
            return refusals.unknown_prefix(handle)
        left = find(record, handle)
        references = 0 if left is None else left.references
        return {"id": handle, "deleted": left is None, "references": references}

    def _shown(self, tenant: str, prefix: RegisteredPrefix) -> dict[str, Any]:
        return {
            "id": prefix.id,
            "object": "prefix",
            "model": prefix.model,
            "tokens": prefix.tokens,
            "blocks": prefix.blocks,
            "references": prefix.references,
            "pin": prefix.pin,
            "pinned": self._keeper.pinned(tenant, prefix.id),
            "spread": prefix.spread,
            "ttl_s": prefix.ttl_s,
            "idle_s": round(prefix.idle_s, 3),
            "instances": self._keeper.instances(prefix),
        }

    # --- registering

    async def _register(self, exchange: Exchange, gate: TenantGate) -> dict[str, Any] | Refusal:
        read = await self._understood(exchange.body, gate)
        if isinstance(read, Refusal):
            return read
        tenant, body, hashes = gate.tenant.name, read.body, read.prompt.hashes
        prompt: dict[str, Any] = {"prompt": body.tokens}
        if body.messages is not None:
            prompt = {"messages": body.messages}
        path, data = engine_request(read.resolved, body.cache_salt, prompt)
        new = RegisteredPrefix(
            _handle(read.resolved.served.model, hashes),
            read.resolved.served.model,
            read.prompt.tokens,
            len(hashes),
            hashes[-1],
            len(data),
            pin=body.pin,
            spread=body.spread,
            ttl_s=body.ttl_s,
        )
        counts = False  # rather than being sent again

        def apply(record: TenantPrefixes) -> TenantPrefixes:
            nonlocal counts
            counts = True
            return register(record, new)

        record = await self._keeper.store.change(tenant, _mark(exchange, new.id), apply)
        prefix = find(record, new.id)
        if prefix is None:  # sent again, and released since it was sent first
            return refusals.unknown_prefix(new.id)
        work = self._keeper.warming(tenant, prefix, read.resolved, hashes, path, data)
        self._keeper.keep_new(tenant, prefix, read.resolved, read.asked, work)
        if counts:
            gate.settle(self._warmer.top_up(work, body.warm) * read.prompt.tokens)
        return self._shown(tenant, prefix)

    async def _understood(self, data: bytes, gate: TenantGate) -> _Read | Refusal:
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
        problem = _problem(body)
        if problem:
            return refusals.malformed(problem)
        resolved = self._directory.resolve(body.model)
        if resolved is None:
            return refusals.unknown_model(body.model, self._directory.names)
        if not tenant.may_use(body.model or resolved.served.model):
            return refusals.not_allowed(f"tenant {tenant.name!r} may not use this model")
        return await self._read(body, resolved)

    async def _read(self, body: _Body, resolved: Resolved) -> _Read | Refusal:
        served, reader = resolved.served, resolved.served.reader
        if reader is None:
            return refusals.malformed("this model's prompts cannot be read here")
        extras = NO_EXTRAS if resolved.lora is None else Extras(resolved.lora)
        asked: ChatRequest | CompletionRequest
        if body.messages is not None:
            asked = ChatRequest(
                messages=body.messages, add_generation_prompt=False, cache_salt=body.cache_salt
            )
            found = await reader.read_chat(asked, extras, tokens_max=served.max_model_len)
        else:
            asked = CompletionRequest(prompt=[*(body.tokens or ())], cache_salt=body.cache_salt)
            found = await reader.read_completion(asked, extras, tokens_max=served.max_model_len)
        if isinstance(found, Inexact):
            return _unread(found, served, "tokens" if body.messages is None else "messages")
        if not found.hashes:
            return refusals.malformed("the prefix is shorter than one block: nothing to share")
        return _Read(body, resolved, asked, found)


def _unread(found: Inexact, served: ServedModel, param: str) -> Refusal:
    """Return the answer to a prefix whose tokens are not known."""
    longest = served.max_model_len
    if found.reason is Reason.BUSY:
        return refusals.reader_busy()
    if found.reason is Reason.TOO_LONG and longest is not None and found.tokens_min > longest:
        return refusals.too_long(found.tokens_min, longest, param, exact=False)
    return refusals.unread_prefix(found.reason, found.detail)


def _problem(body: _Body) -> str:
    """Return what is wrong with a body; empty if nothing is."""
    if (body.messages is None) == (body.tokens is None):
        return "give either `messages` or `tokens`"
    if not 0 <= body.warm <= WARM_MAX:
        return f"`warm` is a number of instances, at most {WARM_MAX}"
    if not TTL_S_MIN <= body.ttl_s <= TTL_S_MAX:
        return f"`ttl_s` is a number of seconds from {TTL_S_MIN:.0f} to {TTL_S_MAX:.0f}"
    return ""


def _handle(model: str, hashes: list[BlockHash]) -> str:
    """Return the handle of a model's prefix: models may read a prompt alike."""
    digest = hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
    return f"pfx_{hashes[-1]:016x}{digest}{len(hashes):x}"


def _mark(exchange: Exchange, handle: str) -> str:
    """Return the mark of the change that a request asks for; the caller's own if it has one."""
    key = exchange.header(IDEMPOTENCY_HEADER)
    if key is None:
        return secrets.token_hex(8)
    said = b"\0".join((exchange.method, handle.encode(), key))
    return hashlib.blake2b(said, digest_size=8).hexdigest()
