"""The whole plane in front of real vLLM: tokens, hits and block sets must be vLLM's own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from controlplane.bus import NatsBus
from controlplane.core.hashing import ROOT, chain, event_extras, hash_block, pack_tokens
from controlplane.doctor import doctor
from controlplane.http_client import HttpClient, HttpError
from lab.stack import LocalStack, StackOptions
from tests.vllm.fleet import VllmFleet
from tests.vllm.harness import VllmServer, VllmSpec
from tests.vllm.kv_events import events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 20.0
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": "你好,请介绍一下你自己。"}]},
    {"messages": [{"role": "user", "content": "naïve café — 🚀 e\u0301 \u200b end"}]},
    {"messages": [{"role": "user", "content": "a <|im_end|> inside <|im_start|>user text"}]},
    {"messages": [{"role": "user", "content": WORDS * 60}]},
    {
        "messages": [
            {"role": "user", "content": "What is the weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Weather of a city",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}],
            }
        ]
    },
]


async def until(condition: Callable[[], Awaitable[object]], deadline_s: float = DEADLINE_S) -> None:
    """Wait until something holds; fail with its last value when it does not in time."""
    end_s = time.monotonic() + deadline_s
    while not (last := await condition()):
        assert time.monotonic() < end_s, f"still waiting; last: {last}"
        await asyncio.sleep(0.05)


class Plane:
    """A stack in front of vLLM servers.

    Attributes:
        servers: by instance id.
    """

    def __init__(self, stack: LocalStack, servers: dict[str, VllmServer], http: HttpClient) -> None:
        self.stack = stack
        self.servers = servers
        self.http = http

    @property
    def admin(self) -> str:
        """The operator's port of the router."""
        return self.stack.admin_urls[0]

    async def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask how a request would be routed."""
        answer: dict[str, Any] = await self.http.post(f"{self.admin}/debug/explain", body)
        return answer

    async def blocks(self, name: str) -> tuple[set[int], str]:
        """Return the router's view of an instance: its blocks, and its trust in them."""
        seen = await self.http.get(f"{self.admin}/debug/blocks?instance={name}")
        return set(seen["blocks"]), seen["trust"]

    async def equal(self, name: str) -> bool:
        """Whether the router's index equals the engine's own cache; no while it is restarting."""
        try:
            blocks, trust = await self.blocks(name)
        except HttpError:
            return False
        return trust == "exact" and blocks == await asyncio.to_thread(
            true_blocks, self.servers[name]
        )


def true_blocks(server: VllmServer) -> set[int] | None:
    """Return what the engine has cached and can reuse, as our hashes; None before it told.

    The engine's own block pool says which of its hashes are cached; its event history says what is
    in them. A block whose parent is not cached cannot be hit, and does not count.
    """
    cached = set(server.cached_blocks())
    ours: dict[object, int] = {}
    parents: dict[object, object] = {}
    for event in events_of(server):
        if event["type"] != "BlockStored":
            continue
        parent, size, keys = event["parent_block_hash"], event["block_size"], event["extra_keys"]
        for position, name in enumerate(event["block_hashes"]):
            tokens = pack_tokens(event["token_ids"][position * size : (position + 1) * size])
            extras = event_extras(event.get("lora_name"), keys and keys[position])
            seed = ROOT if parent is None else ours[parent]
            ours[name] = hash_block(tokens, extras, seed)
            parents[name] = parent
            parent = name

    def reusable(name: object) -> bool:
        while name is not None:
            if name not in cached:
                return False
            name = parents[name]
        return True

    if not cached <= ours.keys():
        return None
    return {ours[name] for name in cached if reusable(name)}


async def started(fleet: VllmFleet, *specs: VllmSpec) -> AsyncIterator[Plane]:
    """Yield a plane in front of servers of these kinds."""
    servers = await asyncio.to_thread(fleet.servers, *specs)
    named = {f"vllm-{number}": server for number, server in enumerate(servers)}
    options = StackOptions(engines=0, routers=1)
    async with LocalStack(options) as stack, HttpClient(timeout_s=60.0) as http:
        for name, server in named.items():
            await stack.start_sidecar(name, server.url, server.model_dir)
        await stack.ready(len(named))
        yield Plane(stack, named, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(vllm_fleet: VllmFleet) -> AsyncIterator[Plane]:
    """A router in front of three unmodified vLLM servers with a simulated forward pass."""
    spec = VllmSpec(num_blocks=600, max_model_len=2048)
    async for made in started(vllm_fleet, spec, spec, spec):
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_plane(vllm_fleet: VllmFleet) -> AsyncIterator[Plane]:
    """A router in front of one vLLM server that really computes."""
    async for made in started(vllm_fleet, VllmSpec(forward="real", max_model_len=2048)):
        yield made


async def _turns(plane: Plane, turns: int, tag: str) -> list[tuple[str, int, int]]:
    """Hold a chat; returns (instance, promised hit, the engine's cached tokens) of each turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{tag} {WORDS * 4}"}]
    seen = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{tag} question {turn} {WORDS}"})
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
        explained = await plane.explain(body)
        hits = {c["instance"]: c["hit_tokens"] for c in explained["candidates"]}
        answer = await plane.http.post(f"{plane.stack.url}/v1/chat/completions", body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        seen.append((explained["pick"], hits[explained["pick"]], cached))
        assert answer["usage"]["prompt_tokens"] == explained["prompt_tokens"]
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        await until(lambda: _caught_up(plane))
    return seen


async def _caught_up(plane: Plane) -> bool:
    return all([await plane.equal(name) for name in plane.servers])


async def test_a_chat_stays_where_its_prefix_is_and_every_promise_is_kept(plane: Plane) -> None:
    """Over eight turns the instance stays, and the promised hit is vLLM's cached_tokens."""
    turns = await _turns(plane, 8, "alone")
    instances = {instance for instance, _, _ in turns[1:]}
    assert len(instances) == 1
    assert [promised for _, promised, _ in turns] == [cached for _, _, cached in turns]
    assert all(cached > 0 for _, _, cached in turns[1:])


async def test_chats_side_by_side_spread_over_the_fleet(plane: Plane) -> None:
    """Several chats at once use all three instances, and each keeps hitting its own prefix."""
    chats = [[{"role": "user", "content": f"chat {n} {WORDS * 3}"}] for n in range(6)]
    for _ in range(3):
        bodies = [{"model": "tiny", "messages": chat, "max_tokens": 16} for chat in chats]
        url = f"{plane.stack.url}/v1/chat/completions"
        answers = await asyncio.gather(*(plane.http.post(url, body) for body in bodies))
        for chat, answer in zip(chats, answers, strict=True):
            chat.append(answer["choices"][0]["message"])
            chat.append({"role": "user", "content": f"more {WORDS}"})
        await until(lambda: _caught_up(plane))
    sizes = [len((await plane.blocks(name))[0]) for name in plane.servers]
    assert all(sizes)
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert sum(value > 0 for value in cached) >= 5


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
async def test_tokens_equal_vllms_own(plane: Plane, chat: dict[str, Any]) -> None:
    """The router's token count and block keys are those of vLLM's /tokenize."""
    server = next(iter(plane.servers.values()))
    theirs = await plane.http.post(f"{server.url}/tokenize", {"model": "tiny", **chat})
    explained = await plane.explain({"model": "tiny", **chat})
    assert explained["exact"], explained["reason"]
    assert explained["prompt_tokens"] == theirs["count"]
    keys = [f"{key:016x}" for key in chain(pack_tokens(theirs["tokens"]), 16)]
    assert explained["block_hashes"] == keys


async def test_the_index_equals_vllm_after_eviction_reset_and_restart(plane: Plane) -> None:
    """Pressure evicts, a reset clears, a restart forgets: the router follows each time."""
    url = f"{plane.stack.url}/v1/completions"
    for number in range(40):
        body = {"model": "tiny", "prompt": f"{number} " + WORDS * 30, "max_tokens": 8}
        await plane.http.post(url, body)
    await until(lambda: _caught_up(plane))
    server = plane.servers["vllm-1"]
    await asyncio.to_thread(server.reset_prefix_cache)
    await until(lambda: plane.equal("vllm-1"))
    await asyncio.to_thread(server.restart)
    body = {"model": "tiny", "prompt": "after the restart " + WORDS * 5, "max_tokens": 8}
    await plane.http.post(f"{server.url}/v1/completions", body)
    await until(lambda: _caught_up(plane), 40.0)
    blocks, _ = await plane.blocks("vllm-1")
    assert blocks


async def test_streams_pass_through_unchanged(plane: Plane) -> None:
    """A streamed answer through the router is what the engine sends: the same events, then DONE."""
    async with AsyncOpenAI(base_url=f"{plane.stack.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "stream please"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text


async def test_the_doctor_finds_nothing_wrong(plane: Plane) -> None:
    """The canary passes through every engine."""
    bus = await NatsBus.connect(plane.stack.nats_url, name="doctor")
    findings = [finding async for finding in doctor(bus, plane.admin, None)]
    await bus.close()
    assert len(findings) >= 1 + 5 * len(plane.servers)
    assert not [finding for finding in findings if not finding.ok], json.dumps(
        [str(finding) for finding in findings], indent=1
    )


async def test_the_same_plane_before_a_real_forward_pass(real_plane: Plane) -> None:
    """With the CPU worker computing for real, at block size 32, promises hold as well."""
    turns = await _turns(real_plane, 4, "real")
    assert [promised for _, promised, _ in turns] == [cached for _, _, cached in turns]
    assert turns[-1][2] > 0
