"""`/v1/prefixes`, over HTTP and down to the engines."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.http_client import HttpError
from router.prefix_keeper import PrefixKeeper
from router.tokens import ReadLimits
from schemas.bus import Finished
from tests.router.fake_engine import Behaviour
from tests.router.service_rig import MODEL, ServiceRig, until

pytestmark = pytest.mark.slow

SYSTEM = [{"role": "system", "content": "You know the whole manual by heart. " * 20}]


async def ask(rig: ServiceRig, method: str, handle: str = "", body: Any = None) -> Any:
    """Sends a request about prefixes; returns the answer."""
    path = f"/v1/prefixes/{handle}" if handle else "/v1/prefixes"
    return await rig.http._ask(method, rig.url + path, body)


async def register(rig: ServiceRig, **options: Any) -> Any:
    """Registers the system message."""
    return await ask(rig, "POST", body={"model": MODEL, "messages": SYSTEM, **options})


def only_test_looks(rig: ServiceRig) -> PrefixKeeper:
    """Returns the router's keeper, which does not look by itself any more."""
    keeper = rig.process.router.keeper
    assert keeper._looking is not None
    keeper._looking.cancel()
    return keeper


async def test_a_prefix_is_registered_listed_and_released() -> None:
    """References are counted; the last release ends it, pins included."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        first = await register(rig, pin=True)
        assert first["pinned"]
        assert (first["references"], first["instances"]) == (1, [])
        again = await register(rig)
        assert (again["id"], again["references"]) == (first["id"], 2)
        assert rig.process._cache.stats.handles == 1
        listed = await ask(rig, "GET")
        assert [each["id"] for each in listed["data"]] == [first["id"]]
        assert (await ask(rig, "GET", first["id"]))["tokens"] == first["tokens"]
        assert (await ask(rig, "DELETE", first["id"])) == {
            "id": first["id"], "deleted": False, "references": 1,
        }  # fmt: skip
        assert (await ask(rig, "DELETE", first["id"]))["deleted"]
        assert rig.process._cache.stats.handles == 0
        for method in ("GET", "DELETE"):
            with pytest.raises(HttpError, match="nothing to release") as caught:
                await ask(rig, method, first["id"])
            assert caught.value.status == 404
        assert (await register(rig))["id"] == first["id"], "it is a digest of the prefix"


async def test_a_registered_chat_is_the_beginning_of_those_that_go_on_from_it() -> None:
    """Its blocks are those of the longer prompt, so that what is warmed is found."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        first = await register(rig)
        body = {"model": MODEL, "messages": [*SYSTEM, {"role": "user", "content": "Hello"}]}
        explained = await rig.explain(body)
        key = explained["block_hashes"][first["blocks"] - 1]
        assert first["id"].startswith(f"pfx_{key}")


async def test_a_prefix_is_warmed_on_as_many_instances_as_asked_for() -> None:
    """Each computes it and one token; the work is booked like any other."""
    async with ServiceRig() as rig:
        engines = [await rig.instance(name) for name in "abc"]
        await register(rig, warm=2)
        await until(lambda: len(rig.of_kind(Finished)) == 2)
        asked = [each.received[0] for each in engines if each.requests]
        assert [each.requests for each in engines if each.requests] == [1, 1]
        body = msgspec.json.decode(asked[0].body)
        assert (body["messages"], body["max_tokens"]) == (SYSTEM, 1)
        assert not rig.served.plane.requests.tickets


async def test_registering_again_warms_as_many_as_are_missing() -> None:
    """Those that have it or compute it count; a request that is sent again warms nobody."""
    async with ServiceRig() as rig:
        engines = {name: await rig.instance(name, Behaviour(delay_s=0.3)) for name in "abc"}

        def asked() -> list[int]:
            return [each.requests for each in engines.values()]

        await register(rig)
        await register(rig, warm=1)
        await until(lambda: sum(asked()) == 1)
        await register(rig, warm=2)
        await register(rig, warm=2)
        await until(lambda: len(rig.of_kind(Finished)) == 2)
        assert sorted(asked()) == [0, 1, 1]
        blocks = await hashes_of_system(rig)
        for name, engine in engines.items():
            if engine.requests:
                await rig.publish(rig.publishers[name].store(blocks))
        await register(rig, warm=2)
        for _ in range(2):
            await register_once(rig, warm=3)
        await until(lambda: len(rig.of_kind(Finished)) == 3)
        await register_once(rig, warm=3)
        await register(rig)
        assert asked() == [1, 1, 1]


async def hashes_of_system(rig: ServiceRig) -> list[int]:
    """Returns the hashes of the system message's blocks."""
    body = {"model": MODEL, "messages": [*SYSTEM, {"role": "user", "content": "Hello"}]}
    hashes = (await rig.explain(body))["block_hashes"]
    (found,) = (await ask(rig, "GET"))["data"]
    return [int(each, 16) for each in hashes[: found["blocks"]]]


async def register_once(rig: ServiceRig, **options: Any) -> None:
    """Registers the system message, always as the same request."""
    session = rig.http._session
    assert session is not None
    headers = {"Idempotency-Key": "once"}
    body = {"model": MODEL, "messages": SYSTEM, **options}
    async with session.post(f"{rig.url}/v1/prefixes", json=body, headers=headers) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("fault", ["blacklisted", "broken", "full"])
async def test_nobody_is_warmed_who_would_not_get_a_request(fault: str) -> None:
    """Nor does another one compute the prefix in its place, once more; its tenant pays for one."""
    async with ServiceRig(batch_cap=1) as rig:
        for name in "ab":
            await rig.instance(name)
        fleet, instance = rig.served.plane.fleet, rig.known("a")
        if fault == "blacklisted":
            instance.blacklisted_until_s = float("inf")
        elif fault == "broken":
            instance.breaker_open = True
        else:
            rig.served.plane.ledger.batch[instance.row] += 1
        fleet.refresh(instance, time.monotonic())
        await register(rig, warm=2)
        await until(lambda: rig.of_kind(Finished))
        await until(lambda: not rig.served.plane.requests.tickets)
        assert (rig.engines["a"].requests, rig.engines["b"].requests) == (0, 1)


async def test_a_hot_prefix_is_spread_to_one_more_instance() -> None:
    """Uses are counted in prompts that begin with it; a cool one stays where it is."""
    async with ServiceRig() as rig:
        for name in "ab":
            await rig.instance(name)
        found = await register(rig, spread=True)
        keeper = only_test_looks(rig)
        user = {"role": "user", "content": "Hello"}
        for _ in range(10):
            body = {"model": MODEL, "messages": [*SYSTEM, user]}
            await rig.http.post(f"{rig.url}/v1/chat/completions", body)
        await rig.chat("something else")
        assert keeper.registry.uses("default") == {found["id"]: 10}
        await until(lambda: len(rig.of_kind(Finished)) == 11)  # they are told in batches
        before = len(rig.of_kind(Finished))
        await keeper.look()
        await until(lambda: len(rig.of_kind(Finished)) > before)
        assert rig.of_kind(Finished)[-1].request_id == found["id"]
        assert not keeper.registry.uses("default")
        await keeper.look()
        await rig.chat("wait for what follows")
        assert len(rig.of_kind(Finished)) <= before + 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": MODEL}, "either `messages` or `tokens`"),
        ({"model": MODEL, "tokens": [1, 2, 3]}, "shorter than one block"),
        ({"model": MODEL, "messages": SYSTEM, "warm": 1000}, "at most 64"),
        ({"model": MODEL, "messages": SYSTEM, "ttl_s": 59}, "from 60 to 2592000"),
        ({"model": "nobody", "messages": SYSTEM}, "does not exist"),
        ({"model": MODEL, "tokens": "x"}, "cannot be read"),
        ({"model": MODEL, "tokens": [-1] * 64}, r"\(invalid\): a token id out of range"),
        ({"model": MODEL, "messages": []}, r"\(invalid\): messages is empty"),
        ({"model": MODEL, "tokens": [1] * 200_000}, "at least 200000 tokens, but the model's"),
    ],
)
async def test_mistakes_are_explained(body: dict[str, Any], said: str) -> None:
    """Nothing is registered then."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        with pytest.raises(HttpError, match=said):
            await ask(rig, "POST", body=body)
        assert (await ask(rig, "GET"))["data"] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"messages":[{"a":' + b"[" * 5_000, "recursion"),
        (b'{"messages":[' + b"{}," * 300_000 + b"{}]}", "too many JSON values"),
        (b'{"cache_salt":"' + b"x" * (5 << 20) + b'"}', "at most 4 MiB"),
    ],
    ids=["deep", "many", "long"],
)
async def test_what_would_hold_up_others_is_refused(body: bytes, said: str) -> None:
    """And answered, whatever it is."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        session = rig.http._session
        assert session is not None
        async with (
            asyncio.timeout(5),
            session.post(f"{rig.url}/v1/prefixes", data=io.BytesIO(body)) as answer,
        ):
            assert answer.status == 400
            assert said in (await answer.json())["error"]["message"]


async def test_what_is_warmed_is_charged_to_its_tenant(tmp_path: Path) -> None:
    """On each instance; who is in debt warms nothing more."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.default]\ntokens_per_s = 1\ntokens_burst = 100\n")
    async with ServiceRig({"tenants_path": str(tenants)}) as rig:
        for name in "ab":
            await rig.instance(name)
        await ask(rig, "POST", body={"model": MODEL, "tokens": [*range(80)], "warm": 2})
        with pytest.raises(HttpError) as caught:
            await ask(rig, "POST", body={"model": MODEL, "tokens": [*range(90)], "warm": 1})
        assert caught.value.status == 429
        assert await ask(rig, "POST", body={"model": MODEL, "tokens": [*range(90)]})


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("PUT", "/v1/prefixes", 405, "/v1/prefixes takes GET and POST"),
        ("DELETE", "/v1/prefixes", 405, "/v1/prefixes takes GET and POST"),
        ("POST", "/v1/prefixes/x", 405, "/v1/prefixes/x takes GET and DELETE"),
        ("GET", "/v1/prefixesX", 503, "no instance"),
    ],
)
async def test_only_its_own_paths_are_answered(
    method: str, path: str, status: int, said: str
) -> None:
    """What only looks like one goes where all unknown paths go: here there is no instance."""
    async with ServiceRig() as rig:
        with pytest.raises(HttpError, match=said) as caught:
            await rig.http._ask(method, rig.url + path, None)
        assert caught.value.status == status


async def test_a_wrong_method_is_told_the_right_ones() -> None:
    """In the header, too; HEAD is answered like GET."""
    async with ServiceRig() as rig:
        session = rig.http._session
        assert session is not None
        async with session.put(f"{rig.url}/v1/prefixes/x") as answer:
            assert answer.headers["allow"] == "GET, DELETE, OPTIONS"
        async with session.get(f"{rig.url}/v1/completions") as answer:
            assert answer.headers["allow"] == "POST, OPTIONS"
        async with session.head(f"{rig.url}/v1/prefixes") as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_who_finds_the_reader_busy_is_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is wrong with such a prefix, so that it is no 400."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        limits = ReadLimits(chars_now_max=0, chars_library_now_max=0, long_texts_max=0)
        monkeypatch.setattr(rig.served.reader, "_limits", limits)
        with pytest.raises(HttpError, match="send the prefix again") as caught:
            await register(rig)
        assert caught.value.status == 503


async def test_tokens_can_be_registered_as_they_are() -> None:
    """With a salt they are another prefix."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        ids = list(range(40))
        plain = await ask(rig, "POST", body={"model": MODEL, "tokens": ids, "warm": 1})
        salted = await ask(rig, "POST", body={"model": MODEL, "tokens": ids, "cache_salt": "x"})
        assert (plain["tokens"], plain["blocks"]) == (40, 2)
        assert plain["id"] != salted["id"]
        engine = rig.engines["a"]
        await until(lambda: engine.requests == 1)
        assert msgspec.json.decode(engine.received[0].body)["prompt"] == ids


async def test_requests_about_prefixes_are_in_the_access_log(tmp_path: Path) -> None:
    """With their outcomes; one line each, whatever became of them."""
    log = tmp_path / "access.log"
    async with ServiceRig({"access_log": str(log)}) as rig:
        await rig.instance("a")
        handle = (await register(rig))["id"]
        await ask(rig, "GET")
        await ask(rig, "DELETE", handle)
        for method, of, status in (("GET", handle, 404), ("PUT", handle, 405), ("POST", "", 400)):
            with pytest.raises(HttpError) as caught:
                await ask(rig, method, of, body=None if method == "GET" else {"model": MODEL})
            assert caught.value.status == status
        keeper, waits = rig.process.router.keeper, asyncio.Event()
        keeper.store.read = _reader_that(waits)  # type: ignore[method-assign]
        leaving = asyncio.create_task(ask(rig, "GET"))
        await asyncio.wait_for(waits.wait(), 10.0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert {line["endpoint"] for line in lines} == {"prefixes"}
    assert [(line["outcome"], line["status"]) for line in lines] == [
        ("ok", 200),
        ("ok", 200),
        ("ok", 200),
        ("rejected:unknown_prefix", 404),
        ("rejected:method", 405),
        ("rejected:malformed", 400),
        ("client_gone", 0),
    ]
    assert lines[0]["duration_s"] > 0.0
    assert lines[0]["tenant"] == "default"


def _reader_that(waits: asyncio.Event) -> Any:
    """Returns what reads a tenant's record for ever, and says when it has begun."""

    async def read(tenant: str) -> Any:
        waits.set()
        await asyncio.Event().wait()

    return read
