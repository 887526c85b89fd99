"""Keys, tenants, TLS and the access log of a whole router."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from router import watched_files
from schemas import subjects
from schemas.bus import Finished, RouteBatch, Routed, RouteEvent
from schemas.codec import encode
from tests.bus.certificates import make_certificates
from tests.router.fake_engine import Behaviour, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow  # each starts a router with a real tokenizer

TENANTS = """
[tenants.acme]
requests_max = 1
alpha = 2.0
beta = 0.5
[tenants.slow]
tokens_per_s = 10.0
tokens_burst = 40.0
[tenants.narrow]
models = ["other"]
[tenants.gateway]
trusted = true
"""
KEYS = "sk-acme acme\nsk-slow slow\nsk-narrow narrow\nsk-gate gateway\n"
NEVER = Behaviour(mode=Mode.NEVER)
USAGE = b'{"object":"x","usage":{"prompt_tokens":%d,"completion_tokens":%d}}'


class Answer(NamedTuple):
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: Any


@asynccontextmanager
async def guarded(tmp_path: Path, **settings: Any) -> AsyncIterator[ServiceRig]:
    """A router with keys and tenants, and one instance."""
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    files = {
        "keys_path": str(tmp_path / "keys"),
        "tenants_path": str(tmp_path / "tenants.toml"),
    }
    async with ServiceRig({**files, **settings}) as rig:
        await rig.instance("a")
        yield rig


async def ask(
    rig: ServiceRig,
    key: str = "",
    path: str = "/v1/chat/completions",
    body: Any = None,
    *,
    method: str = "POST",
    **headers: str,
) -> Answer:
    """Send a request with a key; returns whatever comes back."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        sent["authorization"] = f"Bearer {key}"
    data = json.dumps(chat("hi") if body is None else body) if method == "POST" else None
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, rig.url + path, data=data, headers=sent) as answer,
    ):
        raw = await answer.read()
        found = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(answer.status, found, json.loads(raw) if raw else None)


async def test_without_a_key_nothing_but_health_is_told(tmp_path: Path) -> None:
    """A missing and a wrong key get a 401 in OpenAI's form, and reach no engine."""
    async with guarded(tmp_path) as rig:
        for key in ("", "sk-wrong"):
            answer = await ask(rig, key)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.body["error"]["code"] == "invalid_api_key"
            assert "sk-wrong" not in json.dumps(answer.body)
        assert (await ask(rig, path="/v1/models", method="GET")).status == 401
        assert (await ask(rig, path="/health", method="GET")).status == 200
        assert (await ask(rig, path="/ready", method="GET")).status == 200
        assert (await ask(rig, path="/v1/chat/completions", method="OPTIONS")).status == 204
        anthropic = await ask(rig, path="/v1/messages")
        assert anthropic.body["error"]["type"] == "authentication_error"
        assert not rig.engines["a"].received


async def test_keys_stay_here_and_the_engines_own_goes_on(tmp_path: Path) -> None:
    """No caller's key reaches an engine; the engine's does."""
    (tmp_path / "engine-key").write_text("sk-engine\n")
    async with guarded(tmp_path, engine_key_path=str(tmp_path / "engine-key")) as rig:
        assert (await ask(rig, "sk-acme", x_api_key="sk-acme")).status == 200
        headers = rig.engines["a"].received[-1].headers
        assert headers[b"authorization"] == b"Bearer sk-engine"
        assert b"x-api-key" not in headers


async def test_without_keys_the_callers_authorization_goes_on() -> None:
    """A router that asks for no keys leaves them to the engines."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        assert (await ask(rig, "sk-theirs")).status == 200
        assert engine.received[-1].headers[b"authorization"] == b"Bearer sk-theirs"


async def test_the_rank_is_the_routers_to_choose() -> None:
    """A client cannot send its request to another rank than the one that was booked."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a", dp_rank=1)
        assert (await ask(rig, x_data_parallel_rank="7")).status == 200
        head = engine.received[-1].head.lower()
        assert [line for line in head.split(b"\r\n") if b"parallel" in line] == [
            b"x-data-parallel-rank: 1"
        ]


async def test_a_tenant_at_its_limit_is_told_when_to_come_back(tmp_path: Path) -> None:
    """The second request of one gets a 429; the place is free again when the first ends."""
    async with guarded(tmp_path) as rig:
        rig.engines["a"].behaviour = NEVER
        running = asyncio.create_task(ask(rig, "sk-acme"))
        await until(lambda: rig.engines["a"].received)
        refused = await ask(rig, "sk-acme")
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.body["error"]["code"] == "rate_limit_exceeded"
        assert "'acme' has 1 requests in flight" in refused.body["error"]["message"]
        rig.engines["a"].behaviour = Behaviour()
        assert (await ask(rig, "sk-slow")).status == 200
        running.cancel()
        await until(lambda: not rig.served.plane.requests.tickets)
        assert (await ask(rig, "sk-acme")).status == 200


async def test_a_tenant_pays_for_prompts_and_answers(tmp_path: Path) -> None:
    """Tokens of both leave the bucket; the wait that is told is the time to fill it again."""
    async with guarded(tmp_path) as rig:
        rig.engines["a"].behaviour = Behaviour(body=USAGE % (20, 100))
        assert (await ask(rig, "sk-slow")).status == 200
        await until(lambda: not rig.served.plane.requests.tickets)
        refused = await ask(rig, "sk-slow")
        assert refused.status == 429
        assert 6 <= int(refused.headers["retry-after"]) <= 9
        assert "10 tokens a second" in refused.body["error"]["message"]
        assert (await ask(rig, "sk-gate", x_multiplane_tenant="slow")).status == 429
        metrics = rig.process.metrics.render().decode()
        assert 'multiplane_requests_rejected_total{reason="tenant_tokens"} 2.0' in metrics
        assert 'multiplane_tenant_tokens_total{kind="output",tenant="slow"} 100.0' in metrics


async def test_what_was_not_served_is_not_charged(tmp_path: Path) -> None:
    """An engine's refusal or failure gives the prompt's tokens back."""
    async with guarded(tmp_path) as rig:
        gates = {gate.tenant.name: gate for gate in rig.process._access.gates}
        for status in (422, 500):
            rig.engines["a"].behaviour = Behaviour(status=status)
            assert (await ask(rig, "sk-slow")).status == status
            await until(lambda: not rig.served.plane.requests.tickets)
            assert gates["slow"].level(time.monotonic()) == 40.0
        state = await rig.http.get(f"{rig.admin}/debug/state")
        assert state["tenants"]["slow"]["tokens_available"] == 40.0


async def test_a_limit_holds_over_all_routers(tmp_path: Path) -> None:
    """What another router has let in takes places and tokens here, until it has ended."""
    async with guarded(tmp_path) as rig:
        subject, numbers = subjects.route(MODEL, "other"), itertools.count()

        def told(*events: RouteEvent) -> None:
            batch = RouteBatch("other", 1, next(numbers), 0.0, list(events))
            rig.bus.publish(subject, encode(batch))

        told(Routed("r1", "a", 0.0, tenant="acme", prompt_tokens=7))
        gates = {gate.tenant.name: gate for gate in rig.process._access.gates}
        await until(lambda: gates["acme"].elsewhere == 1)
        assert (await ask(rig, "sk-acme")).status == 429
        told(Finished("r1", "a", "ok", 200, 0.0, tenant="acme", output_tokens=7))
        await until(lambda: gates["acme"].elsewhere == 0)
        assert (await ask(rig, "sk-acme")).status == 200
        told(Finished("r2", "a", "ok", 200, 0.0, tenant="slow", output_tokens=500))
        await until(lambda: (gates["slow"].level(time.monotonic()) or 0.0) < 0)
        assert (await ask(rig, "sk-slow")).status == 429


async def test_a_tenants_exponents_and_name_reach_the_decision(tmp_path: Path) -> None:
    """The plane weighs the request as the tenant's file says, and tells whose it is."""
    async with guarded(tmp_path) as rig:
        await ask(rig, "sk-acme")
        await until(lambda: rig.of_kind(Routed))
        assert rig.of_kind(Routed)[0].tenant == "acme"


async def test_a_tenant_sees_and_uses_its_own_models_only(tmp_path: Path) -> None:
    """Another model is a 403, and is not listed."""
    async with guarded(tmp_path) as rig:
        assert (await ask(rig, "sk-narrow")).status == 403
        listed = await ask(rig, "sk-narrow", "/v1/models", method="GET")
        assert listed.body["data"] == []
        assert (await ask(rig, "sk-narrow", f"/v1/models/{MODEL}", method="GET")).status == 403
        one = await ask(rig, "sk-acme", f"/v1/models/{MODEL}", method="GET")
        assert one.body["id"] == MODEL
        assert (await ask(rig, "sk-acme", "/v1/models/no%20pe", method="GET")).status == 404


async def test_changed_files_are_in_force_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new key works, a revoked one does not, and nonsense changes nothing."""
    monkeypatch.setattr(watched_files, "LOOK_S", 0.02)
    async with guarded(tmp_path) as rig:
        files = rig.process._files
        (tmp_path / "keys").write_text("sk-new acme\n")
        await until(lambda: files.loads == 1)
        assert (await ask(rig, "sk-new")).status == 200
        assert (await ask(rig, "sk-slow")).status == 401
        (tmp_path / "tenants.toml").write_text("nonsense")
        await until(lambda: files.failures == 1)
        assert (await ask(rig, "sk-new")).status == 200
        assert "multiplane_config_failures_total 1.0" in rig.process.metrics.render().decode()


async def test_every_request_gets_its_line(tmp_path: Path) -> None:
    """Served, refused and abandoned ones alike; no prompt and no key is in it."""
    log = tmp_path / "access.log"
    async with guarded(tmp_path, access_log=str(log)) as rig:
        rig.engines["a"].behaviour = Behaviour(body=USAGE % (20, 7))
        await ask(rig, "sk-gate", body=chat("secret words"), x_request_id="mine-1")
        await ask(rig, "sk-wrong", body=chat("secret words"))
        await ask(rig, "sk-gate", body={"model": "nope", "messages": []})
        await ask(rig, "sk-narrow")
        rig.engines["a"].behaviour = NEVER
        gone = asyncio.create_task(ask(rig, "sk-gate"))
        await until(lambda: rig.served.plane.requests.tickets)
        gone.cancel()
        await until(lambda: not rig.served.plane.requests.tickets)
    text = log.read_text()
    assert "secret" not in text
    assert "sk-" not in text
    served, wrong, unknown, forbidden, abandoned = map(json.loads, text.splitlines())
    assert (served["request_id"], served["tenant"], served["instance"]) == (
        "mine-1",
        "gateway",
        "a",
    )
    assert (served["outcome"], served["output_tokens"], served["exact"]) == ("ok", 7, True)
    assert served["ttft_s"] <= served["duration_s"]
    assert (wrong["tenant"], wrong["outcome"], wrong["status"]) == ("-", "rejected:key", 401)
    assert (unknown["outcome"], forbidden["outcome"]) == (
        *("rejected:unknown_model", "rejected:not_allowed"),
    )
    assert (abandoned["outcome"], abandoned["status"]) == ("client_gone", 0)


async def test_clients_are_served_over_tls(tmp_path: Path) -> None:
    """With a certificate the port speaks TLS; operators' port stays as it is."""
    make_certificates(tmp_path / "tls")
    tls = {
        "tls_cert_path": str(tmp_path / "tls" / "server.pem"),
        "tls_key_path": str(tmp_path / "tls" / "server.key"),
    }
    async with ServiceRig(tls) as rig:
        await rig.instance("a")
        trust = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))
        url = f"https://localhost:{rig.process.address[1]}/v1/chat/completions"
        connector = aiohttp.TCPConnector(ssl=trust, family=2)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(url, json=chat("hi")) as answer,
        ):
            assert answer.status == 200
        assert (await rig.http.get(f"{rig.admin}/health")) == {"status": "ok"}
