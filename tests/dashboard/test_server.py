"""The dashboard's server over a bus in memory: what it answers, to whom, and what it keeps up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from controlplane.bus.memory_bus import MemoryBroker, MemoryBus
from controlplane.dashboard import server as server_module
from controlplane.dashboard import service as service_module
from controlplane.dashboard.picture import Picture
from controlplane.dashboard.server import DashboardServer
from controlplane.dashboard.service import DashboardService
from schemas import subjects
from schemas.bus import Drain, InstanceRecord, LoadReport
from schemas.codec import encode
from tests.audit.tape import Tape


class Rig:
    """A dashboard, its bus, and a client.

    Attributes:
        url: of the page, without a path.
    """

    def __init__(
        self, broker: MemoryBroker, service: DashboardService, server: DashboardServer
    ) -> None:
        self.bus: MemoryBus = broker.bus()
        self.service = service
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}"
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20.0))

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        async with self.http.get(self.url + path, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())

    async def play(self, tape: Tape) -> None:
        """Say on the bus what is on a tape, and wait until it was heard."""
        for record in tape.records:
            self.bus.publish(record.subject, record.payload)
        await self.until(lambda: not self.service.waiting)

    async def until(self, condition: Any) -> None:
        """Wait until something holds, for ten seconds at most."""
        async with asyncio.timeout(10.0):
            while not condition():  # noqa: ASYNC110 - the service says nothing of its progress
                await asyncio.sleep(0)


@asynccontextmanager
async def rig(host: str = "127.0.0.1") -> AsyncIterator[Rig]:
    """Run a dashboard."""
    broker = MemoryBroker()
    service = DashboardService(broker.bus())
    await service.start()
    server = DashboardServer(service, host, 0)
    await server.start()
    made = Rig(broker, service, server)
    try:
        yield made
    finally:
        await made.http.close()
        await server.stop()
        await service.stop()


async def test_the_page_and_all_that_it_needs_are_served_from_here() -> None:
    """With headers that keep everything else out."""
    async with rig() as made:
        async with made.http.get(f"{made.url}/") as answer:
            page = await answer.text()
            assert answer.content_type == "text/html"
            assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Frame-Options"] == "DENY"
        assert "http://" not in page
        assert "https://" not in page
        for name, kind in (
            *(("style.css", "text/css"), ("icon.svg", "image/svg+xml")),
            *((f"{part}.js", "text/javascript") for part in ("app", "fleet", "decisions")),
            *((f"{part}.js", "text/javascript") for part in ("charts", "verdicts", "panel")),
            ("format.js", "text/javascript"),
        ):
            async with made.http.get(f"{made.url}/assets/{name}") as answer:
                assert (answer.status, answer.content_type) == (200, kind)


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/assets/nothing.js", "/assets/..%2fserver.py", "/api/state?model=x"],
)
async def test_what_is_not_there_is_a_404_in_json(path: str) -> None:
    """Nothing outside the folder of assets can be had."""
    async with rig() as made:
        status, body = await made.get(path)
        assert status == 404
        assert body["error"]["message"]


async def test_other_hosts_names_are_refused_on_loopback() -> None:
    """A page elsewhere whose name resolves to this machine must not read it."""
    async with rig() as made:
        status, body = await made.get("/health", Host="evil.example")
        assert (status, body["error"]["message"]) == (403, "this dashboard is not evil.example")
        for name in ("localhost:1", "127.0.0.1", "[::1]:80"):
            assert (await made.get("/health", Host=name))[0] == 200
    async with rig("0.0.0.0") as made:
        assert (await made.get("/health", Host="dashboard.internal"))[0] == 200


async def test_state_and_models_follow_the_bus() -> None:
    """Records, blocks, load, decisions and statements of whichever model is asked for."""
    async with rig() as made:
        assert (await made.get("/api/models"))[1] == {"models": []}
        tape = Tape()
        tape.ask(1, name="q1")
        await made.play(tape)
        instances = await made.bus.bucket(subjects.INSTANCES)
        verdicts = await made.bus.bucket(subjects.VERDICTS)
        await instances.put(subjects.key("m", "a"), encode(InstanceRecord("a", "m", "http://h", 1)))
        await instances.put("damaged", b"\xc1")
        await verdicts.put(subjects.key("m", "drain-a"), encode(Drain("a", True, 1, 0.0)))
        await verdicts.put(subjects.key("m", "hotspot-1"), b"\xc1")
        made.bus.publish(subjects.load("m", "a"), encode(LoadReport("a", 1, 0, 0.0, 5, 0)))
        made.bus.publish(subjects.load("m", "a"), b"\xc1")
        await made.until(lambda: made.service.counts["undecodable"] == 3)
        state = (await made.get("/api/state"))[1]
        assert (state["model"], state["models"], state["connected"]) == ("m", ["m"], True)
        cells = {cell[0]: cell for cell in state["cells"]}
        assert cells["a"][1] == "draining"
        assert state["kpi"]["decisions"] == 1
        assert [each["id"] for each in state["feed"]] == ["q1", "q1"]
        assert len(state["verdicts"]) == 1
        assert (await made.get("/api/instance?instance=a"))[1]["url"] == "http://h"
        assert (await made.get("/api/instance?instance=x"))[0] == 404
        await instances.delete(subjects.key("m", "a"))
        await made.until(lambda: "a" not in made.service.pictures["m"].cells)


async def test_events_send_a_whole_frame_and_then_changes() -> None:
    """As server-sent events, several a second, for as long as the page stays."""
    async with rig() as made, made.http.get(f"{made.url}/events") as answer:
        assert answer.content_type == "text/event-stream"
        first = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        assert first == {"models": [], "connected": True}
        tape = Tape()
        tape.ask(1, name="q1")
        await made.play(tape)
        frames = []
        while len(frames) < 2:
            line = await answer.content.readuntil(b"\n\n")
            frame = json.loads(line.removeprefix(b"data: "))
            if "full" in frame:
                frames.append(frame)
        assert [frame["full"] for frame in frames] == [True, False]
        assert [each["id"] for each in frames[0]["feed"]] == ["q1", "q1"]


async def test_pages_that_follow_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound the next one is told so, and a page that leaves makes room."""
    monkeypatch.setattr(server_module, "VIEWERS_MAX", 1)
    monkeypatch.setattr(server_module, "FRAME_S", 0.01)
    async with rig() as made:
        async with made.http.get(f"{made.url}/events") as answer:
            await answer.content.readuntil(b"\n\n")
            status, body = await made.get("/events")
            assert (status, body["error"]["message"]) == (503, "1 pages follow already")
        async with asyncio.timeout(10.0):
            while True:
                async with made.http.get(f"{made.url}/events") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0)


async def test_a_page_that_never_reads_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep others out for as long as it likes, as would a machine that was shut."""
    monkeypatch.setattr(server_module, "FRAME_S", 0.0)
    monkeypatch.setattr(server_module, "WRITE_S_MAX", 0.1)
    async with rig() as made:
        made.service.pictures |= {f"{n:04}" + "m" * 4000: Picture("m") for n in range(50)}
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(made.url).port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        assert made.server.viewers == 1
        await made.until(lambda: not made.server.viewers)
        writer.close()


async def test_stories_come_from_memory_or_from_the_record() -> None:
    """A request that is forgotten is looked up in the stream; one that never was is a 404."""
    async with rig() as made:
        tape = Tape()
        tape.ask(1, name="q1")
        await made.play(tape)
        status, story = await made.get("/api/story?request=q1")
        assert (status, story["request_id"], story["ended"]) == (200, "q1", True)
        made.service.pictures["m"]._stories.clear()
        status, story = await made.get("/api/story?model=m&request=q1")
        assert (status, story["request_id"]) == (200, "q1")
        assert [each["instance_id"] for each in story["attempts"][0]["routed"]["candidates"]]
        status, body = await made.get("/api/story?request=nobody")
        assert (status, body["error"]["message"]) == (404, "no request 'nobody' in the last hour")


async def test_a_search_that_takes_too_long_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Instead of keeping a page waiting."""
    monkeypatch.setattr(service_module, "SEARCH_TIMEOUT_S", 0.0)
    async with rig() as made:
        status, body = await made.get("/api/story?request=q1")
        assert status == 503
        assert "multiplane audit show" in body["error"]["message"]


async def test_searches_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads an hour's record: the next one is told so, and what is in memory is told."""
    monkeypatch.setattr(service_module, "SEARCHES_MAX", 0)
    async with rig() as made:
        tape = Tape()
        tape.ask(1, name="q1")
        await made.play(tape)
        status, body = await made.get("/api/story?request=q2")
        assert (status, body["error"]["message"][:10]) == (503, "0 searches")
        assert (await made.get("/api/story?request=q1"))[0] == 200


async def test_what_comes_too_fast_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound of its queue the oldest go."""
    monkeypatch.setattr(service_module, "QUEUE_MAX", 2)
    async with rig() as made:
        service = made.service
        for seq in range(5):
            report = LoadReport("a", 1, seq, 0.0, 0, 0)
            service._mailbox.put(subjects.load("m", "a"), encode(report))
        await made.until(lambda: not service.waiting)
        assert service.counts == {"overflow": 3, "load": 2}


async def test_models_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counted."""
    monkeypatch.setattr(service_module, "MODELS_MAX", 1)
    async with rig() as made:
        for model in ("m", "n"):
            report = encode(LoadReport("a", 1, 0, 0.0, 0, 0))
            made.bus.publish(subjects.load(model, "a"), report)
        await made.until(lambda: made.service.counts["models_refused"])
        assert list(made.service.pictures) == ["m"]
