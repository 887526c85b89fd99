"""Requests that wait in a router: for room, in order, within bounds and deadlines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.core.queue_lines import QueueConfig
from controlplane.http_client import HttpError
from router.config import RouterConfig
from schemas import subjects
from schemas.bus import Finished, InstanceRecord, Routed
from schemas.codec import encode
from tests.core.test_latency import model as latency_model
from tests.router.fake_engine import Behaviour, FakeEngine, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow

SLOW = Behaviour(delay_s=0.15)
NEVER = Behaviour(mode=Mode.NEVER)


def rig(queue: QueueConfig | None = None, **settings: Any) -> ServiceRig:
    """Returns a router whose instances take one request at a time."""
    queueing = {"queue": queue or QueueConfig("fcfs"), **settings}
    return ServiceRig(queueing, batch_cap=1)


def queued(plane: ServiceRig) -> int:
    """Returns how many requests wait."""
    room = plane.process.router.rooms.get(MODEL) if plane.process.router.rooms else None
    return 0 if room is None else len(room.queue)


def asked(engine: FakeEngine) -> list[str]:
    """Returns the texts of the chats that an engine got, in order."""
    bodies = [msgspec.json.decode(each.body) for each in engine.received]
    return [body["messages"][0]["content"] for body in bodies]


async def outcome(asking: asyncio.Task[Any]) -> HttpError:
    """Returns the error that a request ends with."""
    with pytest.raises(HttpError) as caught:
        await asking
    return caught.value


async def start(plane: ServiceRig, text: str, **fields: Any) -> asyncio.Task[Any]:
    """Sends a chat that will wait, and waits until it does."""
    before = queued(plane)
    task = asyncio.create_task(plane.chat(text, **fields))
    await until(lambda: queued(plane) > before)
    return task


async def occupy(plane: ServiceRig, engine: FakeEngine) -> asyncio.Task[Any]:
    """Gives an engine a request, and waits until it has it."""
    before = engine.requests
    task = asyncio.create_task(plane.chat("first"))
    await until(lambda: engine.requests > before)
    return task


async def test_requests_wait_for_room_in_the_order_of_their_coming() -> None:
    """No instance gets more than its cap, everybody is answered, and the wait is told."""
    async with rig() as plane:
        engine = await plane.instance("a", SLOW)
        tasks = [await occupy(plane, engine)]
        tasks += [await start(plane, str(number)) for number in range(3)]
        await asyncio.gather(*tasks)
        assert asked(engine) == ["first", "0", "1", "2"]
        await until(lambda: len(plane.of_kind(Finished)) == 4)
        waits = [event.queue_s for event in plane.of_kind(Routed)]
        assert waits[0] == 0.0
        assert waits[1] < waits[2] < waits[3]
        assert [event.batch_size for event in plane.of_kind(Routed)] == [0, 0, 0, 0]
        assert queued(plane) == 0


async def test_without_a_queue_nothing_waits() -> None:
    """A cap alone is kind: where all are full, the request goes on."""
    async with ServiceRig(batch_cap=1) as plane:
        engine = await plane.instance("a", SLOW)
        assert plane.process.router.rooms is None
        await asyncio.gather(plane.chat("a"), plane.chat("b"))
        assert engine.requests == 2


async def test_a_full_queue_says_when_to_come_back() -> None:
    """429, with a time that follows from how fast the queue drains."""
    async with rig(QueueConfig("fcfs", requests_max=1, wait_s_max=30.0)) as plane:
        engine = await plane.instance("a", SLOW)
        tasks = [await occupy(plane, engine), await start(plane, "waits")]
        refused = await plane.refusal("/v1/chat/completions", chat("no place"))
        assert refused.status == 429
        assert "served in about 30 s" in str(refused), "nothing has been served yet"
        await asyncio.gather(*tasks)


async def test_a_client_that_leaves_the_queue_costs_nothing() -> None:
    """Its place is free at once, it reaches no engine, and its tenant's place is free."""
    async with rig() as plane:
        engine = await plane.instance("a", SLOW)
        first = await occupy(plane, engine)
        leaves = await start(plane, "leaves")
        stays = await start(plane, "stays")
        leaves.cancel()
        await until(lambda: queued(plane) == 1)
        await asyncio.gather(first, stays)
        assert asked(engine) == ["first", "stays"]
        assert plane.process.router.access.anybody.running == 0
        page = plane.process.metrics.render().decode()
        assert 'multiplane_queue_waits_total{how="client_gone"} 1.0' in page


async def test_nobody_waits_longer_than_the_bound() -> None:
    """503 when the time is over."""
    async with rig(QueueConfig("fcfs", wait_s_max=0.1)) as plane:
        engine = await plane.instance("a", NEVER)
        first = await occupy(plane, engine)
        overdue = await start(plane, "waits")
        error = await outcome(overdue)
        assert error.status == 503
        assert "no instance had room" in str(error)
        first.cancel()


async def test_room_that_appears_elsewhere_is_found() -> None:
    """An instance that joins takes who waits, though no booking of this router has ended."""
    async with rig() as plane:
        engine = await plane.instance("a", NEVER)
        first = await occupy(plane, engine)
        waits = await start(plane, "waits")
        other = await plane.instance("b", SLOW)
        await waits
        assert asked(other) == ["waits"]
        first.cancel()


async def test_a_router_that_stops_answers_who_waits() -> None:
    """503 at once after the grace, instead of a broken connection."""
    async with rig() as plane:
        engine = await plane.instance("a", NEVER)
        first = await occupy(plane, engine)
        waits = await start(plane, "waits")
        plane.process.router.rooms.stop()  # type: ignore[union-attr]
        error = await outcome(waits)
        assert error.status == 503
        assert "router is stopping" in str(error)
        first.cancel()


# --- deadlines


TENANTS = """
[tenants.default]
{}

[tenants.gateway]
trusted = true

[tenants.urgent]
ttft_budget_s = {}
"""


def files(folder: Path, default: str = "", urgent_s: float = 5.0) -> dict[str, str]:
    """Writes keys and tenants; returns the settings that name them."""
    (folder / "keys").write_text("gate-key gateway\nplain-key default\nurgent-key urgent\n")
    (folder / "tenants").write_text(TENANTS.format(default, urgent_s))
    return {"keys_path": str(folder / "keys"), "tenants_path": str(folder / "tenants")}


async def send(plane: ServiceRig, text: str, key: str, **headers: str) -> Any:
    """Sends a chat with a key and more headers; returns (status, headers, body)."""
    given = {"Authorization": f"Bearer {key}", **headers}
    session = plane.http._session
    assert session is not None
    url = f"{plane.url}/v1/chat/completions"
    async with session.post(url, json=chat(text), headers=given) as answer:
        return answer.status, answer.headers, await answer.json()


async def sent(plane: ServiceRig, text: str, key: str, **headers: str) -> asyncio.Task[Any]:
    """Sends one that will wait, and waits until it does."""
    before = queued(plane)
    task = asyncio.create_task(send(plane, text, key, **headers))
    await until(lambda: queued(plane) > before)
    return task


async def busy(plane: ServiceRig, engine: FakeEngine) -> asyncio.Task[Any]:
    """Lets the router see how long requests take, then gives the engine one that stays."""
    await send(plane, "seen", "plain-key")
    before = engine.requests
    task = asyncio.create_task(send(plane, "stays", "plain-key"))
    await until(lambda: engine.requests > before)
    return task


async def test_a_trusted_caller_may_hurry(tmp_path: Path) -> None:
    """With `edf` a smaller budget in the header goes first; others may not send it."""
    async with rig(QueueConfig("edf"), **files(tmp_path)) as plane:
        engine = await plane.instance("a", SLOW)
        first = await busy(plane, engine)
        late = await sent(plane, "patient", "gate-key")
        hurry = {"X-Multiplane-TTFT-Budget": "8"}
        soon = await sent(plane, "hurries", "gate-key", **hurry)
        status, _, body = await send(plane, "x", "plain-key", **hurry)
        assert (status, body["error"]["code"]) == (403, "not_allowed")
        status, _, body = await send(
            plane, "x", "gate-key", **{"X-Multiplane-Total-Budget": "soon"}
        )
        assert (status, body["error"]["code"]) == (400, "invalid_header")
        await asyncio.gather(first, late, soon)
        assert asked(engine)[2:] == ["hurries", "patient"]
        assert b"x-multiplane-ttft-budget" not in engine.received[2].headers


async def test_what_would_be_late_is_refused_early(tmp_path: Path) -> None:
    """After two more looks, with a clear message; not at its deadline."""
    async with rig(QueueConfig("edf"), **files(tmp_path, urgent_s=0.16)) as plane:
        engine = await plane.instance("a", SLOW)
        engine.behaviour = SLOW
        await send(plane, "seen", "plain-key")
        engine.behaviour = NEVER
        first = await occupy_by_key(plane, engine)
        late = await sent(plane, "late", "urgent-key")
        status, headers, body = await late
        assert (status, body["error"]["code"]) == (503, "deadline_unreachable")
        assert "by its deadline" in body["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        first.cancel()


async def occupy_by_key(plane: ServiceRig, engine: FakeEngine) -> asyncio.Task[Any]:
    """Gives an engine a request with a key, and waits until it has it."""
    before = engine.requests
    task = asyncio.create_task(send(plane, "stays", "plain-key"))
    await until(lambda: engine.requests > before)
    return task


RULES = {
    "best_effort": 'degrade = "best_effort"',
    "shorten": 'degrade = "shorten"\ndegrade_max_tokens = 3',
    "other_model": 'degrade = "other_model"\ndegrade_model = "other"',
}


@pytest.mark.parametrize("how", RULES)
async def test_what_would_be_late_becomes_what_its_tenant_allows(tmp_path: Path, how: str) -> None:
    """It is answered after all, and the answer says what it is."""
    rule = f"ttft_budget_s = 0.2\n{RULES[how]}"
    async with rig(QueueConfig("edf"), **files(tmp_path, rule)) as plane:
        engine = await plane.instance("a", SLOW)
        other = plane.engines["b"] = FakeEngine(SLOW)
        url = f"http://127.0.0.1:{await other.start()}"
        await plane.put(InstanceRecord("b", "other", url, 1, max_model_len=4096))
        await until(lambda: plane.process.router.directory.get("other"))
        await send(plane, "seen", "gate-key")
        engine.behaviour = Behaviour(delay_s=0.8)
        first = asyncio.create_task(send(plane, "stays", "gate-key"))
        await until(lambda: engine.requests == 2)
        late = await sent(plane, "late", "plain-key")
        status, headers, _ = await late
        assert status == 200
        assert headers["x-multiplane-degraded"] == how
        where = other if how == "other_model" else engine
        body = msgspec.json.decode(where.received[-1].body)
        assert body["messages"] == chat("late")["messages"]
        assert body["model"] == ("other" if how == "other_model" else MODEL)
        assert body.get("max_tokens") == (3 if how == "shorten" else None)
        await first
        page = plane.process.metrics.render().decode()
        assert f'multiplane_queue_degraded_total{{how="{how}"}} 1.0' in page


@pytest.mark.parametrize("how", [*RULES, "unknown_model"])
async def test_what_cannot_be_rewritten_is_late_and_the_others_are_not(
    tmp_path: Path, how: str
) -> None:
    """All who wait are answered, though the first is no JSON where nobody looked before."""
    rules = RULES | {"unknown_model": 'degrade = "other_model"\ndegrade_model = "nobody"'}
    rule = f"ttft_budget_s = 0.2\n{rules[how]}"
    async with rig(QueueConfig("edf"), **files(tmp_path, rule)) as plane:
        engine = await plane.instance("a", SLOW)
        other = plane.engines["b"] = FakeEngine(SLOW)
        url = f"http://127.0.0.1:{await other.start()}"
        await plane.put(InstanceRecord("b", "other", url, 1, max_model_len=4096))
        await until(lambda: plane.process.router.directory.get("other"))
        await send(plane, "seen", "gate-key")
        engine.behaviour = Behaviour(delay_s=0.8)
        first = asyncio.create_task(send(plane, "stays", "gate-key"))
        await until(lambda: engine.requests == 2)
        late = [asyncio.create_task(post(plane, UNREADABLE))]
        late += [asyncio.create_task(post(plane, msgspec.json.encode(chat("x")))) for _ in "ab"]
        statuses = await asyncio.wait_for(asyncio.gather(*late), 5)
        able = 503 if how == "unknown_model" else 200
        assert statuses[:2] == [200 if how == "best_effort" else 503, able]
        await first


UNREADABLE = msgspec.json.encode(chat("late"))[:-1] + b',"unknown":1e999}'


async def post(plane: ServiceRig, body: bytes) -> int:
    """Sends a chat as written; returns the status."""
    session = plane.http._session
    assert session is not None
    headers = {"Authorization": "Bearer plain-key", "Content-Type": "application/json"}
    url = f"{plane.url}/v1/chat/completions"
    async with session.post(url, data=body, headers=headers) as answer:
        return answer.status


async def test_the_latency_model_on_the_bus_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """As soon as it is published; nonsense in its place is counted, and the old one stays."""
    async with rig(QueueConfig("edf"), latency_poll_s=0.02) as plane:
        engine = await plane.instance("a", SLOW)
        first = await occupy(plane, engine)
        rooms = plane.process.router.rooms
        assert rooms is not None
        room = rooms.get(MODEL)
        assert room is not None
        objects = await plane.bus.objects(subjects.PREDICTORS)
        await objects.put(MODEL, encode(latency_model()))
        await until(lambda: room.estimator.source == "learnt")
        second = await start(plane, "waits")
        await until(lambda: next(iter(room._places)).service.total_s == 4.0)  # type: ignore[union-attr]
        await objects.put(MODEL, b"nonsense")
        await until(lambda: rooms.counts["unusable"] > 2)
        assert caplog.text.count("is of no use") == 1
        assert room.estimator.source == "learnt"
        await asyncio.gather(first, second)
        state = await plane.http.get(f"{plane.admin}/debug/state")
        found = state["models"][MODEL]["queue"]
        assert (found["queued"], found["predictions"], found["model_version"]) == (0, "learnt", 1)
        assert found["counts"] == {"sent": 1}
        page = plane.process.metrics.render().decode()
        assert f'multiplane_predictions_learnt{{model="{MODEL}"}} 1.0' in page
        assert f'multiplane_queue_requests{{model="{MODEL}"}} 0.0' in page


@pytest.mark.parametrize("hold_s_max", [5.0, 0.0])
async def test_a_request_waits_for_the_instance_that_has_its_prefix(hold_s_max: float) -> None:
    """Though another has room, while a place is sooner to be had than the prefix; or never."""
    text = "You are a helpful assistant. " * 40
    async with rig(QueueConfig("klpm", hold_s_max=hold_s_max)) as plane:
        engines = {"a": await plane.instance("a", NEVER)}
        first = await occupy(plane, engines["a"])
        await plane.publish(plane.publishers["a"].store(await plane.keys(text)))
        engines["b"] = await plane.instance("b", Behaviour())
        assert plane.process.router.rooms is not None
        room = plane.process.router.rooms.of(plane.served)
        for tokens in range(100):
            room.estimator.observe(tokens * 1.0, 0.01, tokens)  # a place is near, a token is not
        await plane.chat("whoever has no prefix")
        asking = asyncio.create_task(plane.chat(text))
        if hold_s_max:
            await until(lambda: queued(plane) == 1)
            assert engines["b"].requests == 1
            state = await plane.http.get(f"{plane.admin}/debug/state")
            assert state["models"][MODEL]["queue"]["held"] == 1
            page = plane.process.metrics.render().decode()
            assert f'multiplane_queue_held_requests{{model="{MODEL}"}} 1.0' in page
            engines["a"].behaviour = Behaviour()
            first.cancel()
        await asking
        assert (engines["a"].requests, engines["b"].requests) == ((2, 1) if hold_s_max else (1, 2))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def test_a_queue_without_a_cap_is_refused() -> None:
    """Nobody would ever wait in it."""
    with pytest.raises(ValueError, match="needs a batch cap"):
        RouterConfig(bus_url="memory://", queue=QueueConfig())
