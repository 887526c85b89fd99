"""An end-to-end canary: a live plane sees what its engines do, and keeps what it promises.

For every instance, with a prompt that nobody has sent before:

    1. the router's tokens are the engine's (`/debug/explain` against the engine's `/tokenize`)
    2. the router knows nothing of the prompt yet
    3. the engine computes it, and its KV event yields the very keys that the router computed
    4. the router now promises a hit on that instance
    5. the engine reports exactly that many cached tokens

Each finding says what is wrong and what to do about it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from controlplane.bus.protocol import Bus, BusError
from controlplane.core.hashing import chain, pack_tokens, unpack_hashes
from controlplane.http_client import HttpClient, HttpError
from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "joule")


class Finding(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        where: the instance or service that it is about.
        what: what was checked.
        found: what came out.
        mend: what to do; empty where all is well.
    """

    where: str
    what: str
    ok: bool
    found: str
    mend: str = ""


class Doctor:
    """Runs the checks.

    Args:
        admin_url: the operator's port of any one router.
        wait_s: how long an event may take to arrive.
    """

    def __init__(self, bus: Bus, http: HttpClient, admin_url: str, wait_s: float = 5.0) -> None:
        self._bus = bus
        self._http = http
        self._admin = admin_url.rstrip("/")
        self._wait_s = wait_s
        self._stored: dict[str, set[int]] = {}

    async def examine(self, model: str | None = None) -> AsyncIterator[Finding]:
        """Yield findings as they come.

        Args:
            model: only this one; all by default.
        """
        if not self._bus.connected:
            yield Finding("bus", "connection", False, "not connected", "start NATS; check --nats")
            return
        try:
            state = await self._http.get(f"{self._admin}/debug/state")
        except HttpError as error:
            mend = "start a router; check --admin (the port that `multiplane router` prints)"
            yield Finding("router", "answers", False, str(error), mend)
            return
        yield Finding("router", "answers", True, state["router_id"])
        subscription = await self._bus.subscribe(subjects.all_of("kv"), self._on_kv)
        models = {m: s for m, s in state["models"].items() if model in (None, m)}
        if not models:
            mend = "start a sidecar beside each engine, with the same --nats"
            yield Finding("bus", "instances", False, "none registered", mend)
        for name, seen in models.items():
            async for finding in self._model(name, seen):
                yield finding
        await subscription.stop()

    def _on_kv(self, subject: str, payload: bytes) -> None:
        try:
            batch = messages.decode_kv(payload)
        except RemoteError:
            return
        for op in batch.ops:
            if isinstance(op, messages.KvStored):
                stored = self._stored.setdefault(batch.instance_id, set())
                stored.update(unpack_hashes(op.hashes))

    async def _model(self, model: str, seen: dict[str, Any]) -> AsyncIterator[Finding]:
        if not seen["card"]:
            mend = (
                "give the sidecar --model-path with the folder that holds tokenizer.json; "
                "until then requests are routed by load alone"
            )
            yield Finding(model, "model card", False, "none", mend)
            return
        for instance in seen["instances"]:
            async for finding in self._instance(model, instance):
                yield finding

    async def _instance(self, model: str, seen: dict[str, Any]) -> AsyncIterator[Finding]:
        name = seen["instance"]
        if seen["trust"] != "exact":
            mend = "look at the sidecar's log; a snapshot may be failing"
            yield Finding(name, "trust", False, seen["trust"], mend)
            return
        yield Finding(name, "trust", True, f"exact, {seen['blocks']} blocks")
        try:
            async for finding in self._canary(model, name, seen["url"]):
                yield finding
        except HttpError as error:
            mend = "check that the engine serves, and that this machine may reach its url"
            yield Finding(name, "engine answers", False, str(error), mend)

    async def _canary(self, model: str, name: str, url: str) -> AsyncIterator[Finding]:
        body = {"model": model, "messages": _prompt(), "max_tokens": 1, "temperature": 0}
        before = await self._explain(body)
        tokens = await self._http.post(f"{url}/tokenize", {"model": model, **_chat_only(body)})
        keys = [int(key, 16) for key in before["block_hashes"]]
        yield self._same_tokens(name, before, tokens, keys)
        hit = _hit_on(before, name)
        yield Finding(
            name, "new prompt is unknown", hit < before["prompt_tokens"] // 2, f"{hit} hit"
        )
        first = await self._http.post(f"{url}/v1/chat/completions", body)
        yield await self._same_keys(name, keys)
        after = await self._explain(body)
        promised = _hit_on(after, name)
        usage = (await self._http.post(f"{url}/v1/chat/completions", body))["usage"]
        actual = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if actual is None:
            mend = "start vLLM with --enable-prompt-tokens-details to let this be compared"
            yield Finding(name, "promised hit", False, "the engine reports no cached tokens", mend)
            return
        ok = actual == promised and first["usage"]["prompt_tokens"] == before["prompt_tokens"]
        mend = "" if ok else "prefix caching may be off, or another client filled the cache"
        yield Finding(name, "promised hit", ok, f"promised {promised}, engine {actual}", mend)

    async def _explain(self, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._http.post(f"{self._admin}/debug/explain", body)
        return answer

    def _same_tokens(
        self, name: str, explained: dict[str, Any], tokens: dict[str, Any], keys: list[int]
    ) -> Finding:
        what = "tokens equal the engine's"
        if not explained["exact"]:
            mend = "the request cannot be tokenized here; see `reason` in /debug/explain"
            return Finding(name, what, False, explained["reason"], mend)
        ids = tokens["tokens"]
        if chain(pack_tokens(ids), explained["block_size"]) == keys:
            return Finding(name, what, True, f"{len(ids)} tokens, {len(keys)} blocks")
        mend = (
            "the model card differs from what the engine uses: point the sidecar's --model-path "
            "at the engine's own tokenizer and chat template"
        )
        found = f"{explained['prompt_tokens']} tokens here, {len(ids)} there"
        return Finding(name, what, False, found, mend)

    async def _same_keys(self, name: str, keys: list[int]) -> Finding:
        what = "keys from the engine's event equal the router's"
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wait_s
        while not set(keys) <= self._stored.get(name, set()):
            if loop.time() > deadline_s:
                arrived = len(set(keys) & self._stored.get(name, set()))
                mend = (
                    "check --kv-events-config of the engine (publisher zmq, an endpoint with `*`) "
                    "and that its block size is the sidecar's"
                )
                return Finding(name, what, False, f"{arrived} of {len(keys)} came", mend)
            await asyncio.sleep(0.02)
        return Finding(name, what, True, f"{len(keys)} blocks")


def _prompt() -> list[dict[str, str]]:
    """Return a chat that shares no block with any other, about a hundred tokens long."""
    words = " ".join(secrets.choice(_WORDS) for _ in range(96))
    return [
        {"role": "system", "content": f"{secrets.token_hex(16)} {words}"},
        {"role": "user", "content": "Answer with one word."},
    ]


def _chat_only(body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": body["messages"], "add_generation_prompt": True}


def _hit_on(explained: dict[str, Any], instance: str) -> int:
    hits = {c["instance"]: c["hit_tokens"] for c in explained["candidates"]}
    return int(hits.get(instance, 0))


async def doctor(bus: Bus, admin_url: str, model: str | None) -> AsyncIterator[Finding]:
    """Yield the findings on a live plane; see the module's theory of operation."""
    async with HttpClient() as http:
        try:
            async for finding in Doctor(bus, http, admin_url).examine(model):
                yield finding
        except BusError as error:
            yield Finding("bus", "works", False, str(error), "check NATS and its JetStream")
