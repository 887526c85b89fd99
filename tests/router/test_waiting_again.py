"""Requests whose instance fails while all others are full: they wait again, before all others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.core.queue_lines import QueueConfig
from router.http_exchange import Exchange
from router.http_proxy import LATER
from schemas.bus import Finished, InstanceRecord, Routed
from tests.router.fake_engine import Behaviour, FakeEngine, Mode
from tests.router.http_rig import Books, Rig, on_uvloop, parse_answers, request
from tests.router.service_rig import MODEL, ServiceRig, chat, until
from tests.router.test_waiting import (
    NEVER,
    RULES,
    asked,
    files,
    outcome,
    queued,
    rig,
    send,
    start,
)

pytestmark = pytest.mark.slow


class Scene:
    """Engine `a`, about to fail with a request, and engine `b`, which has one; one each fits.

    Attributes:
        doomed: the request at `a`.
        other: the one at `b`.
    """

    a: FakeEngine
    b: FakeEngine
    doomed: asyncio.Task[Any]
    other: asyncio.Task[Any]

    async def set(self, plane: ServiceRig, a: Behaviour = NEVER, b: Behaviour = NEVER) -> Scene:
        """Start the engines, and fill them."""
        self.a = await plane.instance("a", a)
        self.doomed = await self._send(plane, self.a, "doomed")
        self.b = await plane.instance("b", b)
        self.other = await self._send(plane, self.b, "other")
        return self

    async def _send(self, plane: ServiceRig, engine: FakeEngine, text: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(plane.chat(text))
        await until(lambda: engine.requests)
        return task

    async def fail(self, plane: ServiceRig) -> None:
        """Let `a` die, and wait until its request waits again."""
        await self.a.stop()
        await until(lambda: returned(plane))


def returned(plane: ServiceRig) -> int:
    """Returns how many requests wait that were sent before."""
    (room,) = plane.process.router.rooms._rooms.values()  # type: ignore[union-attr]
    return int(room.state()["returned"])


async def test_what_ran_on_an_instance_that_dies_waits_for_room_before_all_others() -> None:
    """The survivor gets one at a time, as its cap says, and everybody is answered once."""
    async with rig() as plane:
        scene = await Scene().set(plane, b=Behaviour(delay_s=0.3))
        waits = [await start(plane, f"waits {number}") for number in range(2)]
        await scene.fail(plane)
        await asyncio.gather(scene.doomed, scene.other, *waits)
        assert asked(scene.b)[:2] == ["other", "doomed"]
        assert sorted(asked(scene.b)[2:]) == ["waits 0", "waits 1"]
        at_b = [each for each in plane.of_kind(Routed) if each.instance_id == "b"]
        assert [each.batch_size for each in at_b] == [0] * 4
        await until(lambda: len(plane.of_kind(Finished)) == len(plane.of_kind(Routed)))
        ends = [each.outcome for each in plane.of_kind(Finished)]
        assert ends.count("ok") == 4
        assert set(ends) == {"ok", "retried"}
        assert (queued(plane), returned(plane)) == (0, 0)
        assert plane.process.router.access.anybody.running == 0


async def test_a_failed_answer_is_given_up_for_a_place_elsewhere() -> None:
    """A 503 of a full engine is no reason to fill another one beyond its cap."""
    async with rig() as plane:
        scene = await Scene().set(
            plane, a=Behaviour(status=503, delay_s=0.1), b=Behaviour(delay_s=0.4)
        )
        answer, _ = await asyncio.gather(scene.doomed, scene.other)
        assert answer["object"] == "text_completion"
        assert asked(scene.b) == ["other", "doomed"]
        at_b = [each for each in plane.of_kind(Routed) if each.instance_id == "b"]
        assert [each.batch_size for each in at_b] == [0, 0]
        assert at_b[-1].queue_s > 0.0


async def test_a_client_that_leaves_while_its_request_waits_again_costs_nothing() -> None:
    """No instance gets it, it ends once, and its tenant's place is free."""
    async with rig() as plane:
        scene = await Scene().set(plane)
        await scene.fail(plane)
        scene.doomed.cancel()
        await until(lambda: queued(plane) == 0)
        scene.other.cancel()
        await until(lambda: plane.process.router.access.anybody.running == 0)
        assert asked(scene.b) == ["other"]
        page = plane.process.metrics.render().decode()
        assert 'multiplane_queue_waits_total{how="client_gone"} 1.0' in page
        ends = [line for line in page.splitlines() if line.startswith("multiplane_requests_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in ends) == 2, ends


async def test_a_request_that_waits_again_waits_no_longer_than_anybody(tmp_path: Path) -> None:
    """503 when the time is over; its line in the access log tells of the attempt."""
    log = tmp_path / "access.log"
    settings = {"access_log": str(log)}
    async with rig(QueueConfig("fcfs", wait_s_max=0.2), **settings) as plane:
        scene = await Scene().set(plane)
        await scene.fail(plane)
        error = await outcome(scene.doomed)
        assert error.status == 503
        assert "no instance had room" in str(error)
        scene.other.cancel()
    entry = msgspec.json.decode(log.read_bytes().splitlines()[0])
    assert (entry["outcome"], entry["attempts"]) == ("rejected:queue_timeout", 1)
    assert entry["queue_s"] >= 0.2


async def test_a_router_that_stops_answers_who_waits_again() -> None:
    """503, and nothing is left of it."""
    async with rig() as plane:
        scene = await Scene().set(plane)
        await scene.fail(plane)
        plane.process.router.rooms.stop()  # type: ignore[union-attr]
        error = await outcome(scene.doomed)
        assert "router is stopping" in str(error)
        scene.other.cancel()
        await until(lambda: plane.process.router.access.anybody.running == 0)


@pytest.mark.parametrize("how", ["", *RULES])
async def test_a_request_that_waits_again_keeps_its_deadline(tmp_path: Path, how: str) -> None:
    """What would be late is refused, or becomes what its tenant allows."""
    rule = f"ttft_budget_s = 0.4\n{RULES.get(how, '')}"
    async with rig(QueueConfig("edf"), **files(tmp_path, rule)) as plane:
        a = await plane.instance("a", NEVER)
        doomed = asyncio.create_task(send(plane, "doomed", "plain-key"))
        await until(lambda: a.requests)
        b = await plane.instance("b", Behaviour(delay_s=0.8))
        stays = asyncio.create_task(send(plane, "stays", "gate-key"))
        await until(lambda: b.requests)
        other = plane.engines["c"] = FakeEngine()
        url = f"http://127.0.0.1:{await other.start()}"
        await plane.put(InstanceRecord("c", "other", url, 1, max_model_len=4096))
        await until(lambda: plane.process.router.directory.get("other"))
        await a.stop()
        status, headers, body = await doomed
        if how:
            assert (status, headers["x-multiplane-degraded"]) == (200, how)
            where = other if how == "other_model" else b
            sent = msgspec.json.decode(where.received[-1].body)
            assert sent["messages"] == chat("doomed")["messages"]
            assert sent.get("max_tokens") == (3 if how == "shorten" else None)
        else:
            assert (status, body["error"]["code"]) == (503, "deadline_unreachable")
        assert (await stays)[0] == 200
        await until(lambda: not any(g.running for g in plane.process.router.access.gates))


async def test_what_became_another_models_is_no_excuse_for_the_first(tmp_path: Path) -> None:
    """A 5xx of one model's only instance that was asked counts, whatever the other's answers."""
    rule = f"ttft_budget_s = 0.6\n{RULES['other_model']}"
    async with rig(QueueConfig("edf"), **files(tmp_path, rule)) as plane:
        a = await plane.instance("a", Behaviour(status=503, delay_s=0.3))
        doomed = asyncio.create_task(send(plane, "doomed", "plain-key"))
        await until(lambda: a.requests)
        b = await plane.instance("b", NEVER)
        stays = asyncio.create_task(send(plane, "stays", "gate-key"))
        await until(lambda: b.requests)
        other = plane.engines["c"] = FakeEngine(Behaviour(status=500))
        url = f"http://127.0.0.1:{await other.start()}"
        await plane.put(InstanceRecord("c", "other", url, 1, max_model_len=4096))
        await until(lambda: plane.process.router.directory.get("other"))
        status, _, _ = await doomed
        assert (status, other.requests) == (500, 1)
        breakers = plane.process.router.instances.breakers
        assert breakers[MODEL, "a"]._failures == 1
        stays.cancel()


async def test_a_full_queue_takes_back_whatever_comes() -> None:
    """What was accepted is not lost; a newcomer is refused until there is a place again."""
    async with rig(QueueConfig("fcfs", requests_max=1)) as plane:
        scene = await Scene().set(plane, b=Behaviour(delay_s=0.3))
        waits = await start(plane, "waits")
        await scene.fail(plane)
        refused = await plane.refusal("/v1/chat/completions", chat("no place"))
        assert refused.status == 429
        await asyncio.gather(scene.doomed, scene.other, waits)


# --- the forwarder, which hands the request back


class HandsBack(Rig):
    """A server whose requests come back after their first attempt.

    Attributes:
        back: the latest one.
        told: what was told of it.
    """

    back: Exchange
    told: Books

    def forward(self, exchange: Exchange) -> None:
        """Send it to the first engine, and take it back once that has failed."""
        self.back, self.told = exchange, Books([LATER])
        self.forwarder.forward(exchange, "e0", self.told.next_upstream, self.told)

    async def failed(self) -> Exchange:
        """Wait for the first attempt's end; returns the request."""
        await until(lambda: hasattr(self, "told") and self.told.events)
        assert not self.pool.calls_open
        return self.back


@on_uvloop
@pytest.mark.parametrize(
    "first", [Behaviour(mode=Mode.DIE_BEFORE_HEAD), Behaviour(status=503)], ids=["dead", "503"]
)
async def test_a_request_that_comes_back_is_sent_anew(first: Behaviour) -> None:
    """Its client hears of the later answer alone; attempts count on, up to as many as ever."""
    dies = Behaviour(mode=Mode.DIE_BEFORE_HEAD)
    async with HandsBack(first, dies, dies, dies, Behaviour()) as rig:
        talk = asyncio.create_task(rig.talk(request("/v1", b"{}", "Connection: close")))
        exchange = await rig.failed()
        books = Books(["e2", "e3", "e4"])
        rig.books.append(books)
        rig.forwarder.forward(exchange, "e1", books.next_upstream, books, attempts=1)
        (answer,) = parse_answers(await talk)
        assert answer.status == 502
        assert [attempt for attempt, _ in books.asked] == [2, 3]
        assert rig.engines[4].requests == 0
        assert [event[0] for event in rig.told.events] == ["attempt"], "its end is told once"


@on_uvloop
async def test_nobody_is_told_that_the_client_of_what_came_back_has_left() -> None:
    """Whoever has the request asks for that itself."""
    async with HandsBack(Behaviour(mode=Mode.DIE_BEFORE_HEAD)) as rig:
        client = await rig.connect()
        client.send(request("/v1", b"{}"))
        exchange = await rig.failed()
        client.abort()
        await until(lambda: exchange.closed)
        assert [event[0] for event in rig.told.events] == ["attempt"]
