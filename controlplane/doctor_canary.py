"""A prompt that nobody has seen, sent through one engine: the plane sees it, and keeps its promise.

1. the router's tokens are the engine's (`/debug/explain` against the engine's `/tokenize`)
2. the router knows nothing of the prompt yet
3. the engine computes it, and its KV event yields the very keys that the router computed
4. the router now promises a hit on that instance
5. the engine reports exactly that many cached tokens

It goes as a chat; as a completion to an engine that takes no chats, such as a base model's; and as
a text to embed to one that generates nothing. Of embeddings engines report no cached tokens, and
many models' prompts are not cached for them, so there the last two steps are left out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from controlplane.core.hashing import chain, pack_tokens, unpack_hashes
from controlplane.http_client import HttpClient, HttpError
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


class _Form(msgspec.Struct, frozen=True):
    """A way to send a prompt.

    Attributes:
        path: of the engine.
        fields: return what a request says, but for its model.
        read: the fields among them that `/tokenize` takes too, and how it calls them.
        more: what else `/tokenize` is told.
        sampled: whether tokens are generated, so that caching and usage can be looked at.
    """

    name: str
    path: str
    fields: Callable[[], dict[str, Any]]
    read: tuple[str, str]
    more: dict[str, Any] = {}
    sampled: bool = True


class _Sent(msgspec.Struct, frozen=True):
    """A prompt that an engine took.

    Attributes:
        body: of the request.
        before: what the router had said of it.
        tokens: what the engine makes of it.
        answer: of the engine.
        refused: why it did not go as a chat; empty if it did.
    """

    form: _Form
    body: dict[str, Any]
    before: dict[str, Any]
    tokens: dict[str, Any]
    answer: dict[str, Any]
    refused: str


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
        self._refused: dict[str, dict[str, str]] = {}  # model → form → what its engine said

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
        sent = await self._send_first(model, url)
        before = sent.before
        keys = [int(key, 16) for key in before["block_hashes"]]
        if sent.refused:
            found = f"no, so it was sent {sent.form.name}: {sent.refused}"
            yield Finding(name, "takes chats", True, found)
        yield self._same_tokens(name, before, sent.tokens, keys)
        yield _unknown(name, _hit_on(before, name), before["prompt_tokens"])
        if not sent.form.sampled:
            return
        yield await self._same_keys(name, keys)
        after = await self._explain(sent.body)
        promised = _hit_on(after, name)
        usage = (await self._engine.post(f"{url}{sent.form.path}", sent.body))["usage"]
        actual = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if actual is None:
            mend = "start vLLM with --enable-prompt-tokens-details to let this be compared"
            yield Finding(name, "promised hit", False, "the engine reports no cached tokens", mend)
            return
        ok = actual == promised and sent.answer["usage"]["prompt_tokens"] == before["prompt_tokens"]
        mend = "" if ok else "prefix caching may be off, or another client filled the cache"
        yield Finding(name, "promised hit", ok, f"promised {promised}, engine {actual}", mend)

    async def _send_first(self, model: str, url: str) -> _Sent:
        """Send a new prompt in the first form that the engine takes.

        Raises:
            HttpError: it takes none, for which the first one's reason is given, or is not there.
        """
        refused = self._refused.setdefault(model, {})
        first: HttpError | None = None
        for form in _FORMS:
            if form.name in refused:
                continue
            try:
                return await self._send_as(form, model, url, next(iter(refused.values()), ""))
            except HttpError as error:
                if error.status not in _NOT_OFFERED:
                    raise
                first = first or error
                refused[form.name] = str(error)
        refused.clear()
        assert first is not None, "a form that was not refused before was tried"
        raise first

    async def _send_as(self, form: _Form, model: str, url: str, refused: str) -> _Sent:
        """Send a new prompt in one form. Raises HttpError."""
        body = {"model": model, **form.fields()}
        before = await self._explain(body)
        mine, theirs = form.read
        asked = {"model": model, theirs: body[mine], **form.more}
        tokens = await self._engine.post(f"{url}/tokenize", asked)
        answer = await self._engine.post(f"{url}{form.path}", body)
        return _Sent(form, body, before, tokens, answer, refused)

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


def _text() -> str:
    """Return a text that shares no block with any other, about a hundred tokens long."""
    words = " ".join(secrets.choice(_WORDS) for _ in range(96))
    return f"{secrets.token_hex(16)} {words}"


def _chat() -> dict[str, Any]:
    messages = [
        {"role": "system", "content": _text()},
        {"role": "user", "content": "Answer with one word."},
    ]
    return {"messages": messages, **_ONE_TOKEN}


_ONE_TOKEN: Final[dict[str, Any]] = {"max_tokens": 1, "temperature": 0}
_FORMS: Final = (
    _Form(
        "as a chat",
        "/v1/chat/completions",
        _chat,
        ("messages", "messages"),
        {"add_generation_prompt": True},
    ),
    _Form(
        "as a completion",
        "/v1/completions",
        lambda: {"prompt": _text(), **_ONE_TOKEN},
        ("prompt", "prompt"),
    ),
    _Form(
        "to be embedded",
        "/v1/embeddings",
        lambda: {"input": _text()},
        ("input", "prompt"),
        sampled=False,
    ),
)
_NOT_OFFERED: Final = frozenset({400, 404, 405, 422, 501})
"""How engines say that a model is none for such a request."""


def _hit_on(explained: dict[str, Any], instance: str) -> int:
    hits = {c["instance"]: c["hit_tokens"] for c in explained["candidates"]}
    return int(hits.get(instance, 0))
