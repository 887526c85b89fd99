"""Several workers on one port, and routers that take over from each other, as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from controlplane.http_client import HttpClient
from lab.stack import LocalStack, StackOptions
from tests.live.test_up import alive
from tests.live.workers_load import SteadyLoad

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

FAST = ("--speed", "50")


def stack(*router_flags: str) -> LocalStack:
    """A plane of two engines and one router, with these flags."""
    options = StackOptions(engines=2, routers=1, engine_flags=FAST, router_flags=router_flags)
    return LocalStack(options)


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 30.0) -> None:
    """Wait until an async condition holds; fail when it does not in time."""
    async with asyncio.timeout(deadline_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


async def page(admin_url: str) -> str:
    """Returns the metrics."""
    host, port = admin_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


def total(text: str, name: str) -> float:
    """Returns the sum of a metric's samples."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


async def test_workers_share_the_load_and_show_one_page_of_metrics(tmp_path: Path) -> None:
    """Both serve; counts add up, gauges stay apart, and the log has a line for each request."""
    log = tmp_path / "access.log"
    async with stack("--workers", "2", "--access-log", str(log)) as plane, HttpClient() as http:
        admin = plane.admin_urls[0]
        async with SteadyLoad(plane.url) as load:
            await load.answers(60)
        assert not load.failures
        text = await page(admin)
        assert total(text, "multiplane_requests_total") == load.answered
        for worker in "01":
            assert f'worker="{worker}"' in text
            requests = re.search(rf'multiplane_http_connections_open{{worker="{worker}"}}', text)
            assert requests
        assert total(text, "multiplane_workers") == 2
        health = await http.get(f"{admin}/health")
        assert health["status"] == "ok"
        assert await http.get(f"{admin}/ready") == {"status": "ready"}
        states = [await http.get(f"{admin}/debug/state?worker={n}") for n in (0, 1)]
        assert states[0]["router_id"] != states[1]["router_id"]
        await until(lambda: _lines(log, load.answered))
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert {entry["status"] for entry in entries} == {200}
    assert {entry["outcome"] for entry in entries} == {"ok"}
    assert all(entry["prompt_tokens"] and entry["instance"] for entry in entries)


async def _lines(path: Path, count: int) -> bool:
    return len(path.read_text().splitlines()) >= count  # noqa: ASYNC240 - a small file


async def test_a_worker_that_dies_is_started_anew() -> None:
    """Killing one of two leaves the port served; a successor takes its place, no count falls."""
    async with stack("--workers", "2") as plane, HttpClient() as http:
        admin = plane.admin_urls[0]
        async with SteadyLoad(plane.url) as load:
            await load.answers(60)
        before = total(await page(admin), "multiplane_requests_total")
        assert before == load.answered
        victim = (await http.get(f"{admin}/health"))["workers"][0]["pid"]
        os.kill(victim, signal.SIGKILL)

        async def restarted() -> bool:
            health = await http.get(f"{admin}/health")
            workers = health["workers"]
            return health["status"] == "ok" and workers[0]["pid"] != victim

        await until(restarted)
        assert (await http.get(f"{admin}/health"))["workers"][0]["restarts"] == 1
        async with SteadyLoad(plane.url) as load:
            await load.answers(20)
        assert not load.failures
        text = await page(admin)
        assert total(text, "multiplane_requests_total") == before + load.answered
        assert len(re.findall(r"^multiplane_http_connections_open", text, re.M)) == 2


async def test_renewing_all_workers_loses_no_request() -> None:
    """SIGHUP replaces the workers one by one under load; nobody notices."""
    async with stack("--workers", "2") as plane, HttpClient() as http:
        admin = plane.admin_urls[0]
        before = [worker["pid"] for worker in (await http.get(f"{admin}/health"))["workers"]]
        async with SteadyLoad(plane.url) as load:
            await load.answers(20)
            plane.routers[0].signal(signal.SIGHUP)

            async def renewed() -> bool:
                now = [w["pid"] for w in (await http.get(f"{admin}/health"))["workers"]]
                return not set(before) & set(now) and not any(map(alive, before))

            await until(renewed, 60.0)
            await load.answers(20)
        assert not load.failures
        assert load.answered > 50


async def test_workers_end_with_their_supervisor() -> None:
    """Asked to stop, it takes them with it; killed, they notice and stop by themselves."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        async with stack("--workers", "2") as plane, HttpClient() as http:
            workers = (await http.get(f"{plane.admin_urls[0]}/health"))["workers"]
            pids = [worker["pid"] for worker in workers]
            plane.routers[0].signal(number)
            await plane.routers[0].wait()

            async def gone(pids: list[int] = pids) -> bool:
                return not any(map(alive, pids))

            await until(gone)


async def test_a_signal_to_all_processes_is_a_stop_like_any_other() -> None:
    """Where workers are signalled along with their supervisor, as by systemd, streams end well."""
    options = StackOptions(
        engines=1, routers=1, engine_flags=("--speed", "1"), router_flags=("--workers", "2")
    )
    async with LocalStack(options) as plane, HttpClient() as http:
        workers = (await http.get(f"{plane.admin_urls[0]}/health"))["workers"]
        async with SteadyLoad(plane.url) as load:
            await load.answers(1)
            await asyncio.sleep(0.1)
            for pid in (*(worker["pid"] for worker in workers), plane.routers[0].pid):
                os.kill(pid, signal.SIGTERM)
            load.stop()
            assert await asyncio.wait_for(plane.routers[0].wait(), 30.0) == 0
        assert not load.failures


async def test_a_router_takes_over_from_another_without_a_lost_request() -> None:
    """The new one starts on the same port, then the old one is stopped: no request fails."""
    async with stack() as plane:
        async with SteadyLoad(plane.url) as load:
            await load.answers(30)
            for _ in range(3):
                before = plane.routers[-1]
                await plane.start_router()
                await load.answers(10)
                before.signal(signal.SIGTERM)
                assert await asyncio.wait_for(before.wait(), 30.0) == 0
                await load.answers(10)
        assert not load.failures
        assert load.answered > 80


async def test_a_stop_finishes_what_is_running() -> None:
    """A stream that began before SIGTERM is answered to its end."""
    options = StackOptions(engines=1, routers=1, engine_flags=("--speed", "1"))
    async with LocalStack(options) as plane:
        async with SteadyLoad(plane.url, clients=1) as load:
            await load.answers(1)
            await asyncio.sleep(0.1)
            plane.routers[0].signal(signal.SIGTERM)
            load.stop()
            assert await asyncio.wait_for(plane.routers[0].wait(), 30.0) == 0
        assert not load.failures
