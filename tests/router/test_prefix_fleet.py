"""Registered prefixes behind a load balancer: several routers on one bus in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.bus.protocol import BusError
from controlplane.http_client import HttpError
from router.prefix_records import HOT_USES, tended
from schemas import subjects
from schemas.bus import Finished, decode_prefixes
from tests.router.gated_bucket import GatedBus
from tests.router.service_rig import MODEL, ServiceRig, until
from tests.router.test_prefix_api import SYSTEM, ask, only_test_looks, register

pytestmark = pytest.mark.slow

KEYS = {"authorization": "Bearer secret"}


@asynccontextmanager
async def two(
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[ServiceRig, ServiceRig]]:
    """Runs two routers of one plane, that look only when the test says so."""
    async with ServiceRig(settings) as one, ServiceRig(settings, broker=one.broker) as other:
        await one.instance("a")
        await until(lambda: other.known("a"))
        for rig in (one, other):
            only_test_looks(rig)
        yield one, other


async def talk(rig: ServiceRig, text: str = "Hello") -> None:
    """Sends a chat that goes on from the registered one."""
    messages = [*SYSTEM, {"role": "user", "content": text}]
    await rig.http.post(f"{rig.url}/v1/chat/completions", {"model": MODEL, "messages": messages})


def keeper(rig: ServiceRig) -> Any:
    """Returns a router's keeper."""
    return rig.process.router.keeper


def pins(rig: ServiceRig) -> int:
    """Returns how many prefixes a router pins."""
    return rig.process._cache.stats.handles


def bus_of(rig: ServiceRig) -> Any:
    """Returns a router's connection."""
    return rig.process._bus


async def test_a_handle_is_known_to_every_router() -> None:
    """Registered at one it is shown and listed at the other; references count wherever from."""
    async with two() as (one, other):
        first = await register(one, pin=True)
        assert (await ask(other, "GET", first["id"]))["references"] == 1
        assert (await ask(other, "GET"))["data"][0]["tokens"] == first["tokens"]
        again = await register(other)
        assert (again["id"], again["references"], again["pin"]) == (first["id"], 2, True)
        assert (await ask(one, "GET", first["id"]))["references"] == 2
        assert (await ask(one, "DELETE", first["id"]))["references"] == 1
        assert pins(one) == 1
        assert (await ask(other, "DELETE", first["id"]))["deleted"]
        await until(lambda: pins(one) == pins(other) == 0)
        with pytest.raises(HttpError, match="nothing to release"):
            await ask(one, "DELETE", first["id"])


async def test_many_registrations_at_once_count_once_each() -> None:
    """Routers that change the same record at the same time begin anew until all are in."""
    async with two() as (one, other):
        answers = await asyncio.gather(*(register(rig) for _ in range(12) for rig in (one, other)))
        assert sorted(each["references"] for each in answers) == list(range(1, 25))
        done = sum(keeper(rig).store.counts["done"] for rig in (one, other))
        assert done == 24
        handle = answers[0]["id"]
        released = await asyncio.gather(
            *(ask(rig, "DELETE", handle) for _ in range(12) for rig in (one, other))
        )
        assert sum(each["deleted"] for each in released) == 1


async def test_a_router_that_starts_knows_what_is_registered() -> None:
    """And the one that took the registration is not needed any more."""
    async with ServiceRig() as one:
        await one.instance("a")
        first = await register(one, pin=True)
        await one.process.router.keeper.stop()
        async with ServiceRig(broker=one.broker) as other:
            await until(lambda: other.known("a"))
            only_test_looks(other)
            assert [each["id"] for each in (await ask(other, "GET"))["data"]] == [first["id"]]
            await talk(other)
            await until(lambda: pins(other) == 1)
            assert (await ask(other, "GET", first["id"]))["pinned"]


async def test_a_pin_forms_where_the_prefix_passes_first() -> None:
    """It holds the prefix and not what followed it, and is made once."""
    async with two() as (one, other):
        first = await register(one, pin=True)
        await until(lambda: keeper(other).registry.knows("default"))
        assert pins(other) == 0
        await one.chat("something else")
        await talk(other, "what follows is a text of its own " * 20)
        await until(lambda: pins(other) == 1)
        (kept,) = keeper(other)._kept["default"].values()
        assert kept.handle.blocks == first["blocks"]
        await talk(other)
        assert pins(other) == 1
        await keeper(other).look()
        assert pins(other) == 1


async def test_without_the_bus_what_is_known_is_shown_and_nothing_changes() -> None:
    """What happened meanwhile is known once it is back."""
    async with two() as (one, other):
        first = await register(one, pin=True)
        await until(lambda: keeper(other).registry.knows("default"))
        bus_of(one).cut()
        shown = await ask(one, "GET", first["id"])
        assert (shown["id"], shown["stale"], shown["pinned"]) == (first["id"], True, True)
        assert (await ask(one, "GET"))["stale"]
        for method, handle, body in (
            ("DELETE", first["id"], None),
            ("POST", "", {"model": MODEL, "messages": SYSTEM}),
        ):
            with pytest.raises(HttpError, match="out of reach") as caught:
                await ask(one, method, handle, body)
            assert caught.value.status == 503
        assert (await ask(other, "DELETE", first["id"]))["deleted"]
        assert pins(one) == 1
        bus_of(one).heal()
        await keeper(one).look()
        assert pins(one) == 0
        assert (await register(one))["references"] == 1


async def test_a_router_that_never_reached_the_bus_says_so() -> None:
    """It knows nothing that it could show."""
    async with two() as (one, other):
        bus_of(other).cut()
        with pytest.raises(HttpError, match="multiplane bus init") as caught:
            await ask(other, "GET")
        assert caught.value.status == 503
        await talk(other)
        bus_of(other).heal()
        await register(one)
        assert len((await ask(other, "GET"))["data"]) == 1


async def test_what_a_server_lost_it_is_told_again() -> None:
    """A bucket that is empty all of a sudden gets back what routers know."""
    async with two() as (one, other):
        first = await register(one)
        one.broker.shelves[subjects.PREFIXES].entries.clear()
        assert (await ask(other, "GET", first["id"]))["id"] == first["id"]
        assert (await ask(one, "GET", first["id"]))["references"] == 1


async def test_a_record_that_cannot_be_read_is_replaced() -> None:
    """Nobody can do anything with it; what is known here still stands."""
    async with two() as (one, _):
        first = await register(one)
        bucket = await one.bus.bucket(subjects.PREFIXES)
        await bucket.put("default", b"junk")
        assert (await register(one))["references"] == 2
        await until(lambda: keeper(one).store.counts["unreadable"] >= 2)
        assert (await ask(one, "GET", first["id"]))["references"] == 2


async def test_one_router_spreads_what_all_use() -> None:
    """Uses add up over the routers, and one of them acts, even if none saw too many itself."""
    async with two() as (one, other):
        await one.instance("b")
        await until(lambda: other.known("b"))
        first = await register(one, spread=True)
        await until(lambda: keeper(other).registry.knows("default"))
        for rig in (one, other):
            for _ in range(HOT_USES - 2):
                await talk(rig)
        for rig in (other, one, other, one):
            await keeper(rig).look()
        done = [event for event in one.of_kind(Finished) if event.request_id == first["id"]]
        await until(lambda: _warmed(one, first["id"]))
        assert sum(keeper(rig).counts["spread"] for rig in (one, other)) == 1, done


def _warmed(rig: ServiceRig, handle: str) -> list[Any]:
    return [event for event in rig.of_kind(Finished) if event.request_id == handle]


async def test_who_is_late_to_spread_does_not() -> None:
    """Two routers see at once that a prefix is hot: the one that writes first is the one."""
    async with two() as (one, other):
        await one.instance("b")
        await until(lambda: other.known("b"))
        first = await register(one, spread=True)
        await until(lambda: keeper(other).registry.knows("default"))
        await talk(other)
        await until(lambda: keeper(other)._kept)
        for rig in (one, other):
            keeper(rig).registry.take_uses("default")
        await keeper(other).store.change(
            "default", "uses", lambda record: tended(record, {first["id"]: HOT_USES + 1}, {})[0]
        )
        gated = GatedBus(bus_of(one), lambda key, value: None)
        keeper(one).store._bucket = await gated.bucket(subjects.PREFIXES)
        look = asyncio.create_task(keeper(one).look())
        for _ in range(2):  # what the look reads again, and the record that is to be changed
            await until(lambda: gated.gates)
            gated.gates.popleft().set_result("done")
        await until(lambda: gated.gates)
        await keeper(other).look()
        while not look.done():
            await until(lambda: gated.gates or look.done())
            if gated.gates:
                gated.gates.popleft().set_result("done")
        assert [keeper(rig).counts["spread"] for rig in (one, other)] == [0, 1]
        assert keeper(one).store.counts["conflict"] == 1


async def test_a_router_spreads_by_what_it_has_seen_pass() -> None:
    """The engine gets token ids, and computes exactly the prefix's blocks."""
    async with two() as (one, other):
        first = await register(one, spread=True)
        await keeper(one).stop()
        await until(lambda: keeper(other).registry.knows("default"))
        for _ in range(HOT_USES + 1):
            await talk(other)
        await keeper(other).look()
        await until(lambda: _warmed(other, first["id"]))
        body = msgspec.json.decode(one.engines["a"].received[-1].body)
        explained = await other.explain({"model": MODEL, "prompt": body["prompt"]})
        assert len(body["prompt"]) == first["blocks"] * 16
        assert first["id"].startswith(f"pfx_{explained['block_hashes'][-1]}")


async def test_what_is_spread_is_charged_to_its_tenant(tmp_path: Path) -> None:
    """And of a tenant in debt nothing is."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.default]\ntokens_per_s = 0.001\ntokens_burst = 100_000\n")
    async with two({"tenants_path": str(tenants)}) as (one, _):
        gate = one.process._access.anybody
        first = await register(one, spread=True)
        for _ in range(HOT_USES + 1):
            await talk(one)
        before = gate.level(0.0)
        await keeper(one).look()
        assert before is not None
        assert gate.level(0.0) == pytest.approx(before - first["tokens"], abs=1)
        gate.settle(1_000_000)
        for _ in range(HOT_USES + 1):
            keeper(one).registry.used("default", MODEL, [0] * (first["blocks"] - 1) + [_key(first)])
        await keeper(one).look()
        assert keeper(one).counts["spread"] == 1


def _key(shown: dict[str, Any]) -> int:
    return int(shown["id"][4:20], 16)


async def test_a_request_that_is_sent_again_counts_once() -> None:
    """At any router, by its Idempotency-Key; another handle or method is another request."""
    async with two() as (one, other):
        body = {"model": MODEL, "messages": SYSTEM}
        for rig in (one, other, one):
            found = await _with_key(rig, "POST", "/v1/prefixes", body)
            assert found["references"] == 1
        await register(one)
        for rig in (one, other):
            gone = await _with_key(rig, "DELETE", f"/v1/prefixes/{found['id']}", None)
            assert gone["references"] == 1


async def _with_key(rig: ServiceRig, method: str, path: str, body: Any) -> Any:
    session = rig.http._session
    assert session is not None
    headers = {"Idempotency-Key": "once"}
    async with session.request(method, rig.url + path, json=body, headers=headers) as answer:
        assert answer.status == 200
        return await answer.json()


async def test_tenants_have_their_own(tmp_path: Path) -> None:
    """Neither sees the other's, nor counts its uses, though the prefix be the same."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.default]\ntrusted = true\n[tenants.b]\n")
    async with two({"tenants_path": str(tenants)}) as (one, other):
        first = await register(one, spread=True)
        session = other.http._session
        assert session is not None
        headers = {"X-Multiplane-Tenant": "b"}
        url = f"{other.url}/v1/prefixes"
        async with session.get(url, headers=headers) as answer:
            assert (await answer.json())["data"] == []
        async with session.delete(f"{url}/{first['id']}", headers=headers) as answer:
            assert answer.status == 404
        async with session.post(
            url, json={"model": MODEL, "messages": SYSTEM}, headers=headers
        ) as answer:
            assert (await answer.json())["references"] == 1
        assert (await ask(one, "GET", first["id"]))["references"] == 1
        await talk(other)
        assert keeper(other).registry.uses("b") == {}


async def test_nothing_of_a_prompt_is_on_the_bus() -> None:
    """A record has digests and numbers, whatever was registered."""
    async with two() as (one, _):
        await register(one, pin=True, spread=True, cache_salt="sesame")
        entry = await (await one.bus.bucket(subjects.PREFIXES)).get("default")
        assert entry is not None
        assert entry.value is not None
        assert b"manual" not in entry.value
        assert b"sesame" not in entry.value
        (prefix,) = decode_prefixes(entry.value).prefixes
        assert set(prefix.__struct_fields__) == {
            *("id", "model", "tokens", "blocks", "key", "nbytes", "references", "pin", "spread"),
            *("ttl_s", "idle_s", "uses", "window_s"),
        }


async def test_too_many_callers_at_a_time_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one tenant, at one router; a list is of what is known then."""
    monkeypatch.setattr("router.prefix_store.WAITING_MAX", 0)
    async with two() as (one, _):
        with pytest.raises(HttpError) as caught:
            await register(one)
        assert caught.value.status == 429


async def test_a_bucket_that_cannot_be_read_is_not_asked_for_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As before `multiplane bus init`: once at a tenant's first request, and then at looks."""
    async with two() as (one, _):
        bucket, asked = keeper(one).store._bucket, 0

        async def missing(key: str) -> None:
            nonlocal asked
            asked += 1
            raise BusError("no such bucket")

        with monkeypatch.context() as patch:
            patch.setattr(bucket, "get", missing)
            for _ in range(5):
                await talk(one)
            assert asked == 1
            await keeper(one).look()
            assert asked == 2
        await keeper(one).look()
        assert keeper(one).registry.knows("default")


async def test_a_prefix_beyond_the_room_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept here, which shows and is counted."""
    monkeypatch.setattr("router.prefix_keeper.KEPT_BYTES_MAX", 10)
    async with two() as (one, _):
        first = await register(one, pin=True, spread=True)
        assert (first["references"], first["pin"], first["pinned"]) == (1, True, False)
        assert pins(one) == 0
        assert keeper(one).counts["refused"] == 1


async def test_another_card_reads_otherwise() -> None:
    """What was kept by the reader before it is let go of at the next look."""
    async with two() as (one, _):
        await register(one, pin=True, spread=True)
        await one.swap_card(chat_template="{{ messages[0].content }}")
        assert pins(one) == 1
        await keeper(one).look()
        assert pins(one) == 0


async def test_the_registered_are_shown_as_metrics() -> None:
    """Gauges and counts, by outcome."""
    async with two() as (one, _):
        await register(one, pin=True, warm=1)
        await until(lambda: keeper(one)._warmer.counts)
        with pytest.raises(HttpError):
            await ask(one, "DELETE", "pfx_x")
        page = one.process.metrics.render().decode()
        for line in (
            'multiplane_prefix_requests_total{outcome="ok"} 1.0',
            'multiplane_prefix_requests_total{outcome="unknown_prefix"} 1.0',
            "multiplane_prefixes 1.0",
            "multiplane_prefixes_pinned 1.0",
            'multiplane_prefix_changes_total{outcome="done"} 1.0',
            'multiplane_prefix_warmings_total{outcome="ok"} 1.0',
            'multiplane_prefix_looks_total{outcome="spread"} 0.0',
        ):
            assert line in page


async def test_operators_see_what_a_router_knows_and_keeps() -> None:
    """In /debug/state: of each tenant, with what was not told yet, and nothing of the text."""
    async with two() as (one, other):
        found = await register(one, pin=True, spread=True)
        await until(lambda: keeper(other).registry.knows("default"))
        await talk(other)
        await until(lambda: keeper(other).pinned("default", found["id"]))
        for rig, uses in ((one, 0), (other, 1)):
            state = (await rig.http.get(f"{rig.admin}/debug/state"))["prefixes"]
            (shown,) = state["tenants"]["default"]
            assert shown["id"] == found["id"]
            assert (shown["references"], shown["uses_untold"]) == (1, uses)
            assert shown["pinned"]
            assert shown["spread_from_here"]
            assert state["connected"]
            assert state["kept_bytes"] > 0
            assert "manual" not in str(state)


async def test_a_prefix_of_token_ids_is_met_in_prompts_of_token_ids() -> None:
    """Nothing of it can be pinned, but any router that has seen it can spread it."""
    async with two() as (one, other):
        ids = list(range(40))
        first = await ask(
            one, "POST", body={"model": MODEL, "tokens": ids, "pin": True, "spread": True}
        )
        assert not first["pinned"]
        await keeper(one).stop()
        await until(lambda: keeper(other).registry.knows("default"))
        for _ in range(HOT_USES + 1):
            body = {"model": MODEL, "prompt": [*ids, 1, 2, 3]}
            await other.http.post(f"{other.url}/v1/completions", body)
        await keeper(other).look()
        await until(lambda: _warmed(other, first["id"]))
        assert msgspec.json.decode(one.engines["a"].received[-1].body)["prompt"] == ids[:32]
