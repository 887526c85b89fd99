"""What a router process does for registered prefixes: keeps tokens, counts uses, spreads.

Theory of operation. Nothing of a prompt is ever on the bus, so each process keeps what it has met
itself. The one that takes a registration keeps it at once; the others, and a process that was
started anew, when a prompt first passes that begins with the prefix: they pin what their prefix
cache holds of it, and have its token ids, by which any instance can compute it.

At every look, `LOOK_S` apart, the uses seen here are added to the tenants' records, which renews
them, prefixes whose time is over are taken out, and hot ones are spread: by one router, since it is
a change of the record that says who (`router.prefix_records`).

What is kept is bounded by `KEPT_BYTES_MAX`; a prefix beyond it stays registered, and is not kept.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

import msgspec

from controlplane.bus.protocol import Bus, BusError
from controlplane.core.decision import RouteRequest
from controlplane.core.hashing import NO_EXTRAS, BlockHash, Extras
from router.access import Access
from router.directory import Directory, Resolved, ServedModel
from router.metrics import Sample
from router.prefix_cache import Handle, PrefixCache
from router.prefix_records import is_due, tended
from router.prefix_store import Busy, PrefixStore
from router.prefixes import PrefixRegistry
from router.prompt import Inexact, single
from router.surface import Asked, as_generation
from router.tokens import PromptReader
from router.warming import Warmer, Warming
from schemas.bus import RegisteredPrefix, TenantPrefixes
from schemas.openai import ChatRequest, CompletionRequest

LOOK_S: Final = 5.0
KEPT_BYTES_MAX: Final = 64 << 20
"""Bytes, as registered, of the prefixes that a process keeps."""
PASSING_BYTES_MAX: Final = 256 << 10
"""Longest request that is looked at for a prefix to keep: its text is rendered once more."""
READS_A_LOOK: Final = 16

logger = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """What is kept of one prefix.

    Attributes:
        reader: by which its tokens were read: another one reads them otherwise.
        handle: pins them in the prefix cache; None where that was not asked for.
        work: has an instance compute it; None where it is not to be spread.
    """

    reader: PromptReader
    handle: Handle | None
    work: Warming | None
    nbytes: int


class PrefixKeeper:
    """One process's part in registered prefixes.

    Attributes:
        registry: all prefixes, as known here.
        store: where they are registered.
        counts: spread (an instance began to compute one), refused (no room to keep one).
    """

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        warmer: Warmer,
        cache: PrefixCache,
        access: Access,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = PrefixRegistry()
        self.store = PrefixStore(bus, self.registry, self._changed, clock=clock)
        self.counts: Counter[str] = Counter(spread=0, refused=0)
        self._directory = directory
        self._warmer = warmer
        self._cache = cache
        self._access = access
        self._clock = clock
        self._kept: dict[str, dict[str, _Kept]] = {}
        self._bytes = 0
        self._met: set[tuple[str, str]] = set()
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.Task[NoReturn] | None = None
        self._learning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to hear of registrations and to look; does not wait for the bus."""
        await self.store.start()
        self._looking = asyncio.create_task(self._look_for_ever())

    async def stop(self) -> None:
        """End; what was registered stays so."""
        tasks = [task for task in (self._looking, self._learning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.stop()

    # --- requests that pass

    def passed(
        self, tenant: str, resolved: Resolved, hashes: Sequence[BlockHash], asked: Asked
    ) -> None:
        """Count a prompt as a use of the prefixes that it begins with, and keep those from it."""
        tables = self.registry.tables.get(tenant)
        if not tables:
            if tables is None:
                self._learn(tenant)
            return
        for prefix in self.registry.used(tenant, resolved.served.model, hashes):
            met = tenant, prefix.id
            if (prefix.pin or prefix.spread) and met not in self._met:
                self._met.add(met)
                self._loop.call_soon(self._keep_from, tenant, prefix, resolved, hashes, asked)

    def _learn(self, tenant: str) -> None:
        """Read what a tenant has registered, soon; without the bus, at a later look.

        Once: where that fails, it is the next look's turn, lest each request asks in vain.
        """
        if self.registry.is_full or tenant in self.store.stale:
            return
        self.store.stale.add(tenant)
        if self.store.connected and (self._learning is None or self._learning.done()):
            self._learning = self._loop.create_task(self._refresh(0))

    def _keep_from(
        self,
        tenant: str,
        prefix: RegisteredPrefix,
        resolved: Resolved,
        hashes: Sequence[BlockHash],
        asked: Asked,
    ) -> None:
        """Keep a prefix from a prompt that begins with it, if that is quick."""
        served = resolved.served
        if asked.heavy or asked.altered or asked.text_bytes > PASSING_BYTES_MAX:
            return
        generation = as_generation(served, asked.parsed)
        if isinstance(generation, Inexact) or served.reader is None:
            return
        handle = self._pin(served.reader, generation, resolved, prefix)
        work = None
        if prefix.spread:
            ids = _first_ids(handle, generation, prefix.blocks * served.block_size)
            if ids:
                salt = generation.cache_salt
                path, body = engine_request(resolved, salt, {"prompt": ids})
                work = self.warming(tenant, prefix, resolved, hashes, path, body)
        self._keep(tenant, prefix, served.reader, handle, work)

    # --- what is kept

    def pinned(self, tenant: str, handle: str) -> bool:
        """Whether this process keeps a prefix's tokens in its prefix cache."""
        kept = self._kept.get(tenant, {}).get(handle)
        return kept is not None and kept.handle is not None

    def instances(self, prefix: RegisteredPrefix) -> list[str]:
        """Return the instances that hold a prefix."""
        served = self._directory.get(prefix.model)
        return [] if served is None else self._warmer.holders(served, prefix.key)

    def warming(
        self,
        tenant: str,
        prefix: RegisteredPrefix,
        resolved: Resolved,
        hashes: Sequence[BlockHash],
        path: str,
        body: bytes,
    ) -> Warming:
        """Return what has an instance compute a prefix."""
        request = RouteRequest(
            prefix.id,
            prefix.tokens,
            hashes[: prefix.blocks],
            resolved.served.block_size,
            lora=resolved.lora,
            tenant=tenant,
        )
        return Warming(resolved.served, request, path, body)

    def keep_new(
        self,
        tenant: str,
        prefix: RegisteredPrefix,
        resolved: Resolved,
        asked: ChatRequest | CompletionRequest,
        work: Warming,
    ) -> None:
        """Keep a prefix that was registered here just now."""
        reader = resolved.served.reader
        if reader is not None and prefix.id not in self._kept.get(tenant, ()):
            handle = self._pin(reader, asked, resolved, prefix)
            self._keep(tenant, prefix, reader, handle, work if prefix.spread else None)

    def _pin(
        self,
        reader: PromptReader,
        asked: ChatRequest | CompletionRequest,
        resolved: Resolved,
        prefix: RegisteredPrefix,
    ) -> Handle | None:
        extras = NO_EXTRAS if resolved.lora is None else Extras(resolved.lora)
        return reader.pin(asked, extras, prefix.blocks)

    def _keep(
        self,
        tenant: str,
        prefix: RegisteredPrefix,
        reader: PromptReader,
        handle: Handle | None,
        work: Warming | None,
    ) -> None:
        if handle is not None and not prefix.pin:
            self._cache.release(handle)
            handle = None
        kept = _Kept(reader, handle, work, prefix.nbytes)
        if handle is None and work is None:
            return
        if prefix.id in self._kept.get(tenant, ()):
            self._let_go(kept)
            return
        if self._bytes + prefix.nbytes > KEPT_BYTES_MAX:
            self.counts["refused"] += 1
            self._let_go(kept)
            return
        self._bytes += prefix.nbytes
        self._kept.setdefault(tenant, {})[prefix.id] = kept
        self._met.add((tenant, prefix.id))
        self._changed(tenant)  # it may have been released meanwhile

    def _let_go(self, kept: _Kept) -> None:
        if kept.handle is not None:
            self._cache.release(kept.handle)

    def _changed(self, tenant: str) -> None:
        """Keep nothing of what a tenant has not registered any more."""
        registered = {each.id for each in self.registry.record(tenant).prefixes}
        self._drop(tenant, self._kept.get(tenant, {}).keys() - registered)

    def _drop(self, tenant: str, handles: set[str]) -> None:
        mine = self._kept.get(tenant, {})
        for handle in handles:
            kept = mine.pop(handle)
            self._bytes -= kept.nbytes
            self._let_go(kept)
        if not mine:
            self._kept.pop(tenant, None)

    # --- looks

    async def _look_for_ever(self) -> NoReturn:
        await asyncio.sleep(LOOK_S * random.random())  # so that not all routers look at once
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("registered prefixes could not be tended")
                self.counts["crashed"] += 1
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Tell uses, spread what is hot, end what is over, and read what may have been missed."""
        for tenant, mine in list(self._kept.items()):
            self._drop(tenant, {handle for handle, kept in mine.items() if self._is_old(kept)})
        self._met = {(tenant, handle) for tenant, mine in self._kept.items() for handle in mine}
        if self.store.connected:
            await self._refresh(READS_A_LOOK)
        for tenant in self.registry.tenants:
            if self.store.connected:
                await self._tend(tenant)

    def _is_old(self, kept: _Kept) -> bool:
        """Whether the model is read otherwise by now, or is another one of the same name."""
        served: ServedModel | None = None
        if kept.work is not None:
            served = kept.work.served
            if self._directory.get(served.model) is not served:
                return True
            return served.reader is not kept.reader
        return all(each.reader is not kept.reader for each in self._directory)

    async def _refresh(self, more: int) -> None:
        try:
            await self.store.refresh(more)
        except BusError as error:
            logger.debug("registered prefixes were not read: %s", error)

    async def _tend(self, tenant: str) -> None:
        """Bring one tenant's record up to date, if there is something to tell."""
        registry = self.registry
        record = registry.record(tenant)
        holders = self._spreadable(tenant)
        elapsed_s = registry.elapsed_s(record, self._clock())
        if not is_due(record, elapsed_s, registry.uses(tenant), holders):
            return
        uses = registry.take_uses(tenant)
        claimed: list[str] | None = None

        def apply(record: TenantPrefixes) -> TenantPrefixes:
            nonlocal claimed
            after, claimed = tended(record, uses, holders)
            return after

        def due(record: TenantPrefixes, elapsed_s: float) -> bool:
            nonlocal claimed
            claimed = None  # what an attempt before this one claimed, it did not get
            return is_due(record, elapsed_s, uses, holders)

        try:
            await self.store.change(tenant, secrets.token_hex(8), apply, due)
        except (BusError, Busy) as error:
            logger.debug("uses of prefixes of %r are told later: %s", tenant, error)
            claimed = None
        if claimed is None:
            registry.give_back(tenant, uses)
        for handle in claimed or ():
            self._spread(tenant, handle)

    def _spreadable(self, tenant: str) -> dict[str, int]:
        """Return how many instances hold each prefix that can be spread from here."""
        gate = self._access.gate(tenant)
        if gate is None or gate.charge(0, time.monotonic()) is not None:
            return {}
        return {
            handle: len(self._warmer.holders(kept.work.served, kept.work.request.hashes[-1]))
            for handle, kept in self._kept.get(tenant, {}).items()
            if kept.work is not None
        }

    def _spread(self, tenant: str, handle: str) -> None:
        """Let one more instance compute a prefix, at its tenant's cost."""
        kept = self._kept.get(tenant, {}).get(handle)
        gate = self._access.gate(tenant)
        if kept is None or kept.work is None or gate is None:
            return
        count = self._warmer.warm(kept.work, 1)
        self.counts["spread"] += count
        gate.settle(count * kept.work.request.prompt_tokens)

    def state(self) -> dict[str, Any]:
        """Return what there is to see, for people; nothing of a prompt."""
        now_s = self._clock()
        return {
            "connected": self.store.connected,
            "changes": dict(self.store.counts),
            "looks": dict(self.counts),
            "kept_bytes": self._bytes,
            "tenants": {
                tenant: [
                    self._prefix_state(tenant, each)
                    for each in self.registry.current(tenant, now_s).prefixes
                ]
                for tenant in self.registry.tenants
            },
        }

    def _prefix_state(self, tenant: str, prefix: RegisteredPrefix) -> dict[str, Any]:
        kept = self._kept.get(tenant, {}).get(prefix.id)
        return {
            "id": prefix.id,
            "model": prefix.model,
            "tokens": prefix.tokens,
            "references": prefix.references,
            "pin": prefix.pin,
            "pinned": self.pinned(tenant, prefix.id),
            "spread": prefix.spread,
            "spread_from_here": kept is not None and kept.work is not None,
            "idle_s": prefix.idle_s,
            "ttl_s": prefix.ttl_s,
            "uses": prefix.uses,
            "uses_untold": self.registry.uses(tenant).get(prefix.id, 0),
            "instances": self.instances(prefix),
        }

    def samples(self) -> Iterator[Sample]:
        """Yield what metrics show."""
        kept = [each for mine in self._kept.values() for each in mine.values()]
        yield Sample("prefixes", "Registered prefixes that are known here.", len(self.registry))
        yield Sample(
            "prefixes_pinned",
            "Registered prefixes whose tokens are kept in the prefix cache.",
            sum(each.handle is not None for each in kept),
        )
        yield Sample(
            "prefixes_kept_bytes",
            "Size of the registered prefixes that are kept here.",
            self._bytes,
        )
        told = (
            ("prefix_changes", "Changes of tenants' registrations, by how they went.", self.store),
            ("prefix_warmings", "Prefixes computed ahead, by how that ended.", self._warmer),
            ("prefix_looks", "What became of registered prefixes at looks.", self),
        )
        for name, text, source in told:
            sample = Sample(f"{name}_total", text, labels=("outcome",))
            sample.values.update(((outcome,), n) for outcome, n in source.counts.items())
            yield sample


def engine_request(
    resolved: Resolved, cache_salt: str | None, prompt: dict[str, Any]
) -> tuple[str, bytes]:
    """Return the path and body that make an engine compute a prefix, and one token more.

    Args:
        prompt: `messages` of a chat, or a `prompt`.
    """
    document: dict[str, Any] = {"model": resolved.lora or resolved.served.model, "max_tokens": 1}
    if cache_salt is not None:
        document["cache_salt"] = cache_salt
    if "messages" in prompt:
        document |= {"add_generation_prompt": False}
        return "/v1/chat/completions", msgspec.json.encode(document | prompt)
    return "/v1/completions", msgspec.json.encode(document | prompt)


def _first_ids(
    handle: Handle | None, asked: ChatRequest | CompletionRequest, tokens: int
) -> list[int]:
    """Return a prompt's first token ids; none if not so many are at hand."""
    if handle is not None and handle.tokens >= tokens:
        return memoryview(handle.head(tokens)).cast("I").tolist()
    prompt = single(asked.prompt) if isinstance(asked, CompletionRequest) else ""
    if isinstance(prompt, str | Inexact) or len(prompt) < tokens:
        return []
    return list(prompt[:tokens])
