"""One page of metrics for a router with several workers, whenever these end."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any, cast

from router.config import RouterConfig, WorkerReady
from router.http_exchange import Exchange
from router.http_server import HttpServer
from router.limits import ServerLimits, UpstreamLimits
from router.supervisor import Supervisor, Worker
from router.supervisor_admin import SupervisorAdmin
from router.upstream import UpstreamPool
from tests.router.service_rig import until

PAGE = b"# TYPE served_total counter\nserved_total %d\n"


class FakeWorker:
    """A worker's admin port, with one counter.

    Attributes:
        asked: requests that it has not answered, once it holds them.
    """

    def __init__(self, served: int, *, holds: bool = False) -> None:
        self.asked: list[Exchange] = []
        self._page = PAGE % served
        self._holds = holds

    def handle(self, exchange: Exchange) -> None:
        """Answer, now or when that is let go."""
        self.asked.append(exchange)
        if not self._holds:
            self.go()

    def go(self) -> None:
        """Answer what was asked, and hold nothing more."""
        self._holds = False
        while self.asked:
            self.asked.pop().respond(200, (), self._page)

    async def serve(self, pid: int, stack: AsyncExitStack) -> Worker:
        """Listen until the stack ends; returns what a supervisor knows of it."""
        address = await _serve(self, stack)
        return Worker(cast("Any", None), WorkerReady(f"w-{pid}", pid, address, address))


async def _serve(handler: Any, stack: AsyncExitStack) -> tuple[str, int]:
    server = HttpServer(handler, ServerLimits())
    address = await server.start("127.0.0.1", 0)
    stack.push_async_callback(server.stop, grace_s=0.0)
    return address


async def test_a_worker_that_ends_while_two_ask_is_counted_once() -> None:
    """What it had counted stays in the sum, and never twice."""
    async with AsyncExitStack() as stack:
        slow = FakeWorker(2, holds=True)
        kept = Supervisor(RouterConfig(bus_url="nats://127.0.0.1:1", admin_port=0), 2)
        stack.callback(os.close, kept._stdout)
        pool = UpstreamPool(UpstreamLimits())
        stack.push_async_callback(pool.close)
        handler = SupervisorAdmin(kept, pool)
        admin = await _serve(handler, stack)
        first, second = kept.places
        first.worker = await FakeWorker(5).serve(1, stack)
        second.worker = await slow.serve(2, stack)

        async def served() -> float:
            reader, writer = await asyncio.open_connection(*admin)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
            page = (await reader.read()).decode()
            writer.close()
            (line,) = [each for each in page.splitlines() if each.startswith("served_total ")]
            return float(line.split()[1])

        asking = [asyncio.create_task(served()) for _ in range(2)]
        await until(lambda: slow.asked and len(handler._tasks) == 2)
        await asyncio.sleep(0)  # in which the second asks, too, if it does not wait for the first
        first.worker = await FakeWorker(0).serve(3, stack)
        slow.go()
        assert await asyncio.gather(*asking) == [7.0, 7.0]
        assert await served() == 7.0
