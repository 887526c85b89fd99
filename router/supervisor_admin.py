"""The operator's side of a router with several workers: one page of metrics, one health.

GET  /metrics           of all workers: counters and histograms added up, those that have ended
                        included, gauges by worker
GET  /health            which workers live; 503 if none does, once they have all been started
GET  /ready             whether some worker is ready
     /debug/…?worker=1  passed to one worker's own port; the first that lives if none is named
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Mapping
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from router.http_exchange import JSON, Exchange
from router.http_head import ResponseHead
from router.http_proxy import Forwarder, Outcome
from router.metrics_merge import merge_pages
from router.supervisor import Place, Supervisor
from router.upstream import ErrorKind, UpstreamPool

_ANSWER_S_MAX: Final = 5.0
_TEXT: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class SupervisorAdmin:
    """Answers operators; a handler for an HTTP server."""

    def __init__(self, supervisor: Supervisor, pool: UpstreamPool) -> None:
        self._supervisor = supervisor
        self._pool = pool
        self._forwarder = Forwarder(pool)
        self._ports: dict[int, int] = {}
        self._pages: dict[int, str] = {}  # the last of each worker, by its process
        self._ended = ""  # what workers that are no more have counted
        # One page at a time: an answer from before its worker's end, looked at after that was
        # noticed, would add what the worker had counted once more.
        self._adding_up = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """Answer one request; see `router.http_server.Handler`."""
        path = exchange.path
        if path == b"/health":
            self._health(exchange)
        elif path == b"/metrics":
            self._later(self._metrics(exchange))
        elif path == b"/ready":
            self._later(self._ready(exchange))
        elif path.startswith(b"/debug/"):
            self._pass_on(exchange)
        else:
            exchange.respond_error(
                404,
                "invalid_request_error",
                "there is only /metrics, /health, /ready and a worker's own /debug/…?worker=N",
            )

    def _later(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answering)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _health(self, exchange: Exchange) -> None:
        places = self._supervisor.places
        workers = [
            {
                "worker": place.number,
                "router": None if place.worker is None else place.worker.ready.router_id,
                "pid": None if place.worker is None else place.worker.ready.pid,
                "restarts": place.restarts,
            }
            for place in places
        ]
        living = sum(place.worker is not None for place in places)
        starting = not self._supervisor.started
        if living == len(places):
            status = "ok"
        elif starting:
            status = "starting"
        else:
            status = "degraded" if living else "down"
        body = msgspec.json.encode({"status": status, "workers": workers})
        exchange.respond(503 if status == "down" else 200, (JSON,), body)

    async def _ready(self, exchange: Exchange) -> None:
        answers = await self._ask_all(b"/ready")
        if any(answer.status == 200 for answer in answers.values()):
            exchange.respond(200, (JSON,), b'{"status":"ready"}')
        else:
            exchange.respond_error(
                503, "service_unavailable", "no worker is ready", "not_ready", retry_after_s=1.0
            )

    async def _metrics(self, exchange: Exchange) -> None:
        async with self._adding_up:
            page = self._added_up(await self._ask_all(b"/metrics"))
        exchange.respond(200, (_TEXT,), page.encode())

    def _added_up(self, answers: Mapping[int, _Answer]) -> str:
        """Return one page of what workers answered, and of what those that cannot had counted."""
        answered = {n: answer for n, answer in answers.items() if answer.status == 200}
        self._pages |= {answer.pid: answer.text for answer in answered.values()}
        living = [place.worker for place in self._supervisor.places if place.worker is not None]
        for pid in self._pages.keys() - {worker.ready.pid for worker in living}:
            self._ended = merge_pages({}, (self._ended, self._pages.pop(pid)))
        silent = self._pages.keys() - {answer.pid for answer in answered.values()}
        pages = {str(n): answer.text for n, answer in answered.items() if answer.pid in self._pages}
        page = merge_pages(pages, (self._ended, *(self._pages[pid] for pid in silent)))
        return page + self._own_metrics(len(pages))

    def _own_metrics(self, answered: int) -> str:
        restarts = sum(place.restarts for place in self._supervisor.places)
        return (
            "# HELP multiplane_workers Workers whose metrics are in this page.\n"
            "# TYPE multiplane_workers gauge\n"
            f"multiplane_workers {answered}\n"
            "# HELP multiplane_worker_restarts_total Workers that ended and were started anew.\n"
            "# TYPE multiplane_worker_restarts_total counter\n"
            f"multiplane_worker_restarts_total {restarts}\n"
        )

    def _pass_on(self, exchange: Exchange) -> None:
        """Let one worker answer."""
        wanted = parse_qs(exchange.query.decode("latin-1")).get("worker", [""])[0]
        for place in self._supervisor.places:
            if wanted in ("", str(place.number)) and self._connect(place):
                self._forwarder.forward(exchange, place.number, _nobody_else, _NOTHING)
                return
        exchange.respond_error(404, "invalid_request_error", f"no worker {wanted!r} lives")

    def _connect(self, place: Place) -> bool:
        """Bring the pool in line with who is at a place; False if nobody is."""
        if place.worker is None:
            return False
        host, port = place.worker.ready.admin_address
        if self._ports.get(place.number) != port:
            self._pool.put(place.number, host, port)
            self._ports[place.number] = port
        return True

    async def _ask_all(self, path: bytes) -> dict[int, _Answer]:
        """GET a path of every worker; those that do not answer in time are left out."""
        head = b"GET %b HTTP/1.1\r\n" % path
        answers: dict[int, _Answer] = {}
        for place in self._supervisor.places:
            if place.worker is not None and self._connect(place):
                answer = answers[place.number] = _Answer(place.worker.ready.pid)
                self._pool.send(place.number, head, b"", answer, first_byte_s=_ANSWER_S_MAX)
        await asyncio.gather(*(answer.done for answer in answers.values()))
        return answers


class _Answer:
    """A worker's whole answer; a sink of the pool.

    Attributes:
        pid: whose it is.
        status: 0 if it did not come.
        done: set when it has come, or will not.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    @property
    def text(self) -> str:
        return b"".join(self._parts).decode()

    def on_response_head(self, head: ResponseHead) -> None:
        self.status = head.status

    def on_data(self, data: bytes) -> None:
        self._parts.append(data)

    def on_end(self) -> None:
        self.done.set_result(None)

    def on_error(self, kind: ErrorKind) -> None:
        self.status = 0
        self.done.set_result(None)


class _Nothing:
    """An observer that keeps no books."""

    def on_first_byte(self, now_s: float) -> None:
        """Nothing was booked."""

    def on_attempt_end(self, key: Hashable, outcome: Outcome, status: int, now_s: float) -> None:
        """Nothing was booked."""

    def on_end(
        self, outcome: Outcome, status: int, body_bytes: int, now_s: float, usage_tail: bytes
    ) -> None:
        """Nothing was booked."""


_NOTHING: Final = _Nothing()


def _nobody_else(attempt: int, reason: Outcome) -> None:
    return None
