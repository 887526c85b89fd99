"""Which requests a router lets through at all: paths, browsers, circles, and nobody to go to."""

from __future__ import annotations

import asyncio
import http.client
import json
from email.message import Message
from typing import Any, NamedTuple

import msgspec
import pytest

from controlplane.operator import Operator
from router.main import RouterProcess
from schemas.bus import InstanceRecord
from tests.router.fake_engine import Behaviour, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow  # each starts a router with a real tokenizer


class Answer(NamedTuple):
    """What a client got; `headers` finds names in any case."""

    status_code: int
    headers: Message
    content: bytes

    def json(self) -> Any:
        """Return the body."""
        return json.loads(self.content)


def _request(url: str, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20.0)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    found = Answer(answer.status, answer.headers, answer.read())
    connection.close()
    return found


async def _ask(
    at: ServiceRig | str,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    url = at if isinstance(at, str) else at.url
    return await asyncio.to_thread(_request, url, method, path, body, headers or {})


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/reset_prefix_cache", "engine_only"),
        ("/metrics", "engine_only"),
        ("/v1/load_lora_adapter", "engine_only"),
        ("/v1/load_lora_adapter/", "not_found"),
        ("/some/future/switch", "not_found"),
        ("/v1/%2e%2e/sleep", "not_found"),
        ("/v1//sleep", "not_found"),
        ("/", "not_found"),
    ],
)
async def test_only_inference_passes_through(path: str, code: str) -> None:
    """What else an engine can be told to do is nothing for a router's clients."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        for method in ("GET", "POST"):
            answer = await _ask(rig, method, path, body={"model": MODEL})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
        assert not engine.received


@pytest.mark.parametrize("path", ["/pooling", "/classify", "/v1/audio/transcriptions", "/v1/new.x"])
async def test_inference_that_is_not_known_here_passes_through(path: str) -> None:
    """Newer endpoints work from the first day."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        assert (await _ask(rig, "POST", path, body={"model": MODEL})).status_code == 200
        assert len(engine.received) == 1


async def test_a_router_says_that_it_is_one() -> None:
    """So that nobody takes it for an engine."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        answer = await _ask(rig, "GET", "/version")
        assert answer.headers["server"] == "multiplane"
        assert answer.json()["server"] == "multiplane router"
        (card,) = (await _ask(rig, "GET", "/v1/models")).json()["data"]
        assert card["owned_by"] == "multiplane"
        head = await _ask(rig, "HEAD", "/v1/models")
        assert (head.status_code, head.content) == (200, b"")


async def test_options_are_answered_here() -> None:
    """Without configured origins no page may call, and no engine is asked."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        answer = await _ask(rig, "OPTIONS", "/v1/chat/completions", headers={"Origin": "http://p"})
        assert (answer.status_code, "POST" in answer.headers["allow"]) == (204, True)
        assert "access-control-allow-origin" not in answer.headers
        assert not engine.received


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("*",), "https://b.example", "*"),
    ],
)
async def test_pages_of_configured_origins_may_call(
    origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    """In preflights, answers and errors; an engine's own word on it is dropped."""
    raw = b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-length: 2\r\n\r\n{}"
    async with ServiceRig({"cors_origins": origins}) as rig:
        await rig.instance("a", Behaviour(mode=Mode.RAW, raw=raw))
        headers = {"Origin": origin, "Access-Control-Request-Headers": "x-mine"}
        for method, path, body in (
            ("OPTIONS", "/v1/chat/completions", None),
            ("POST", "/v1/chat/completions", chat("hi")),
            ("POST", "/v1/chat/completions", {"model": "nope", "messages": []}),
        ):
            answer = await _ask(rig, method, path, body=body, headers=headers)
            found = answer.headers.get_all("access-control-allow-origin", [])
            assert found == ([] if allowed is None else [allowed])
            if method == "OPTIONS":
                assert answer.headers["access-control-allow-headers"] == "x-mine"


async def test_a_request_that_goes_in_circles_is_stopped() -> None:
    """An instance whose url leads back to the router gets nothing, and the client is told why."""
    async with ServiceRig() as rig:
        await rig.put(InstanceRecord("loop", MODEL, rig.url, epoch=1, kv_events=False))
        await until(lambda: rig.process.router.directory.names)
        error = await rig.refusal("/v1/chat/completions", chat("hi"))
        assert error.status == 508
        assert "multiplane instances" in str(error)


async def test_engines_and_further_routers_are_told_where_a_request_was() -> None:
    """Each router adds its name; a fifth is one too many."""
    async with ServiceRig({"router_id": "here"}) as rig:
        engine = await rig.instance("a")
        await rig.chat("hi")
        assert engine.received[-1].headers[b"x-multiplane-router"] == b"here"
        path = "/v1/chat/completions"
        hops = {"X-Multiplane-Router": "one, two"}
        assert (await _ask(rig, "POST", path, body=chat("hi"), headers=hops)).status_code == 200
        assert engine.received[-1].headers[b"x-multiplane-router"] == b"one, two, here"
        hops = {"X-Multiplane-Router": "one, two, three, four"}
        assert (await _ask(rig, "POST", path, body=chat("hi"), headers=hops)).status_code == 508


async def test_when_all_are_drained_nothing_is_sent_and_explain_says_why() -> None:
    """An operator who drains the whole fleet means it."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        operator = Operator(rig.bus, by="test")
        await operator.drain("a", on=True)
        await until(lambda: rig.known("a").drained)
        answer = await _ask(rig, "POST", "/v1/chat/completions", body=chat("hi"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "drained"
        assert "multiplane drain" in answer.json()["error"]["message"]
        assert not engine.received
        with pytest.raises(Exception, match="drained"):
            await rig.explain(chat("hi"))
        state = await rig.http.get(f"{rig.admin}/debug/state")
        (shown,) = state["models"][MODEL]["instances"]
        assert shown["kept_out_by"] == ["drained", "draining"]
        await rig.instance("b")
        await rig.chat("hi")
        by_name = {c["instance"]: c for c in (await rig.explain(chat("hi")))["candidates"]}
        assert by_name["a"]["excluded_by"] == ["drained", "draining"]
        assert not engine.received


async def test_why_there_is_no_instance_is_told_in_every_case() -> None:
    """Never registered, unusable, left: each with what to look at."""
    async with ServiceRig() as rig:
        path = "/v1/chat/completions"
        assert "no instance has registered yet" in str(await rig.refusal(path, chat("hi")))
        await rig.put(InstanceRecord("bad", MODEL, "nonsense", epoch=1))
        await until(lambda: rig.process.events.unusable)
        assert "none can be used" in str(await rig.refusal(path, chat("hi")))
        await rig.instance("a")
        record = rig.known("a").record
        await rig.put(msgspec.structs.replace(record, state="stopped"))
        await rig.put(InstanceRecord("bad", MODEL, "nonsense", epoch=1, state="stopped"))
        await until(lambda: rig.known("a") is None)
        error = await rig.refusal(path, chat("hi"))
        assert error.status == 503
        assert "has left" in str(error)


async def test_a_router_that_knows_nothing_yet_takes_no_requests() -> None:
    """Until the bus has told of instances; then it does, by itself."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        bus = rig.broker.bus()
        bus.cut()
        changes = {"router_id": "other", "join_s_max": 0.2}
        other = RouterProcess(msgspec.structs.replace(rig.process.config, **changes), bus)
        await other.start()
        url = "http://{}:{}".format(*other.address)
        answer = await _ask(url, "POST", "/v1/chat/completions", chat("hi"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "starting"
        assert (await _ask(url, "GET", "/ready")).status_code == 503
        assert (await _ask(url, "GET", "/health")).status_code == 200
        bus.heal()
        await until(lambda: other.router.directory.ready)
        assert (await _ask(url, "POST", "/v1/chat/completions", chat("hi"))).status_code == 200
        await other.stop()
