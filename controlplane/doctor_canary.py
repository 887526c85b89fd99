"""A prompt that nobody has seen, sent through one engine: the plane sees it, and keeps its promise.

1. the router's tokens are the engine's (`/debug/explain` against the engine's `/tokenize`)
2. the router knows nothing of the prompt yet
3. the engine computes it, and its KV event yields the very keys that the router computed
4. the router now promises a hit on that instance
5. the engine reports exactly that many cached tokens
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from controlplane.core.hashing import chain, pack_tokens, unpack_hashes
from controlplane.http_client import HttpClient
from schemas import bus as messages
from schemas.codec import RemoteError

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "joule")


class Finding(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        where: the instance or service that it is about.
        what: what was checked.
        found: what came out.
        mend: what to do; empty where all is well. On a check that is `ok`: what one may want to do.
    """

    where: str
    what: str
    ok: bool
    found: str
    mend: str = ""


class Canary:
    """Sends the prompts.

    Args:
        admin: asks the router.
        engine: asks the engines, with their key.
        admin_url: the router's port for operators.
        wait_s: how long an event may take to arrive.
    """

    def __init__(
        self, admin: HttpClient, engine: HttpClient, admin_url: str, wait_s: float
    ) -> None:
        self._admin = admin
        self._engine = engine
        self._admin_url = admin_url
        self._wait_s = wait_s
        self._stored: dict[str, set[int]] = {}

    def hear(self, subject: str, payload: bytes) -> None:
        """Take a message of a block stream."""
        try:
            batch = messages.decode_kv(payload)
        except RemoteError:
            return
        for op in batch.ops:
            if isinstance(op, messages.KvStored):
                stored = self._stored.setdefault(batch.instance_id, set())
                stored.update(unpack_hashes(op.hashes))

    async def send(self, model: str, name: str, url: str) -> AsyncIterator[Finding]:
        """Yield what comes out on one instance. Raises HttpError."""
        body = {"model": model, "messages": _prompt(), "max_tokens": 1, "temperature": 0}
        before = await self._explain(body)
        tokens = await self._engine.post(f"{url}/tokenize", {"model": model, **_chat_only(body)})
        keys = [int(key, 16) for key in before["block_hashes"]]
        yield self._same_tokens(name, before, tokens, keys)
        yield _unknown(name, _hit_on(before, name), before["prompt_tokens"])
        first = await self._engine.post(f"{url}/v1/chat/completions", body)
        yield await self._same_keys(name, keys)
        after = await self._explain(body)
        promised = _hit_on(after, name)
        usage = (await self._engine.post(f"{url}/v1/chat/completions", body))["usage"]
        actual = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if actual is None:
            mend = "start vLLM with --enable-prompt-tokens-details to let this be compared"
            yield Finding(name, "promised hit", False, "the engine reports no cached tokens", mend)
            return
        ok = actual == promised and first["usage"]["prompt_tokens"] == before["prompt_tokens"]
        mend = "" if ok else "prefix caching may be off, or another client filled the cache"
        yield Finding(name, "promised hit", ok, f"promised {promised}, engine {actual}", mend)

    async def _explain(self, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await self._admin.post(f"{self._admin_url}/debug/explain", body)
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


def _unknown(name: str, hit: int, prompt_tokens: int) -> Finding:
    """Say whether hardly more than the template is known of a prompt that nobody has sent."""
    ok = hit < prompt_tokens // 2
    found = f"{hit} of {prompt_tokens} tokens hit"
    mend = "" if ok else "the router's index is wrong: look for resyncs in its log, and report it"
    return Finding(name, "new prompt is unknown", ok, found, mend)


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
