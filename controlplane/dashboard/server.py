"""The dashboard's web server: the page, its live feed, and stories. It only reads.

GET /                     the page
GET /assets/…             its style and scripts, all of them here
GET /events?model=        server-sent events: a frame a quarter of a second (`frames`)
GET /api/models           the models there are
GET /api/state?model=     one whole frame
GET /api/story?model=&request=
GET /api/instance?model=&instance=
GET /health

Whoever listens on loopback is reached by any page in the user's browser that guesses the port and a
name that resolves here; so requests for other hosts' names are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from controlplane.bus.protocol import BusError
from controlplane.dashboard.frames import Viewer
from controlplane.dashboard.picture import Picture
from controlplane.dashboard.service import DashboardService

FRAME_S = 0.25
VIEWERS_MAX = 64
WRITE_S_MAX = 30.0
"""A page that takes nothing for this long gives its place to another."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class DashboardServer:
    """Serves pages; start and stop it.

    Attributes:
        port: where it listens, once started.
        viewers: pages that follow now.
    """

    def __init__(self, service: DashboardService, host: str, port: int) -> None:
        self.port = port
        self.viewers = 0
        self._service = service
        self._host = host
        self._assets = load_assets()
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/assets/{name}", self._asset)
        app.router.add_get("/events", self._events)
        app.router.add_get("/api/models", self._models)
        app.router.add_get("/api/state", self._state)
        app.router.add_get("/api/story", self._story)
        app.router.add_get("/api/instance", self._instance)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listen. Raises OSError if the address cannot be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all pages' feeds and listen no more."""
        await self._runner.cleanup()

    @web.middleware
    async def _guarded(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Refuse names that are not ours, and give every answer its headers."""
        if self._host in LOOPBACK and _host_name(request.host) not in LOOPBACK:
            return _error(403, f"this dashboard is not {_host_name(request.host)}")
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        if not answer.prepared:
            answer.headers.update(_HEADERS)
        return answer

    # --- the page

    async def _page(self, _: web.Request) -> web.Response:
        return self._file("index.html")

    async def _asset(self, request: web.Request) -> web.Response:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        body = self._assets.get(name)
        if body is None:
            raise web.HTTPNotFound
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    # --- data

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send frames until the page goes."""
        if self.viewers >= VIEWERS_MAX:
            return _error(503, f"{VIEWERS_MAX} pages follow already")
        answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        self.viewers += 1
        try:
            await answer.prepare(request)
            await self._follow(answer, request.query.get("model", ""))
        except (ConnectionResetError, asyncio.CancelledError):
            return answer
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # to end in order would wait for the page, too
        finally:
            self.viewers -= 1
        return answer

    async def _follow(self, answer: web.StreamResponse, model: str) -> None:
        viewer: Viewer | None = None
        while True:
            picture = self._service.picture(model)
            if picture is not None and (viewer is None or viewer.picture is not picture):
                viewer = Viewer(picture)
            async with asyncio.timeout(WRITE_S_MAX):
                await answer.write(b"data: " + _json(self._frame(viewer)) + b"\n\n")
            await asyncio.sleep(FRAME_S)

    def _frame(self, viewer: Viewer | None) -> dict[str, Any]:
        frame: dict[str, Any] = {"models": sorted(self._service.pictures)}
        frame["connected"] = self._service.connected
        if viewer is not None:
            frame["model"] = viewer.picture.model
            frame |= viewer.frame(time.monotonic(), time.time())
        return frame

    async def _models(self, _: web.Request) -> web.Response:
        return _answer({"models": sorted(self._service.pictures)})

    async def _state(self, request: web.Request) -> web.Response:
        return _answer(self._frame(Viewer(self._picture(request))))

    async def _story(self, request: web.Request) -> web.Response:
        wanted = request.query.get("request", "")
        try:
            story = await self._service.story(request.query.get("model", ""), wanted)
        except BusError as error:
            return _error(503, str(error))
        if story is None:
            return _error(404, f"no request {wanted!r} in the last hour")
        return _answer(story.as_dict())

    async def _instance(self, request: web.Request) -> web.Response:
        cell = self._picture(request).cells.get(request.query.get("instance", ""))
        if cell is None:
            return _error(404, "no such instance")
        return _answer(cell.details())

    async def _health(self, _: web.Request) -> web.Response:
        return _answer({"status": "ok", "connected": self._service.connected})

    def _picture(self, request: web.Request) -> Picture:
        picture = self._service.picture(request.query.get("model", ""))
        if picture is None:
            raise web.HTTPNotFound(reason="no such model")
        return picture


def load_assets() -> dict[str, bytes]:
    """Return the page and what it needs, by file name."""
    folder = resources.files("controlplane.dashboard") / "assets"
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _json(data: Any) -> bytes:
    return msgspec.json.encode(data)


def _answer(data: Any) -> web.Response:
    return web.Response(body=_json(data), content_type="application/json", charset="utf-8")


def _error(status: int, message: str) -> web.Response:
    body = _json({"error": {"message": message}})
    return web.Response(
        body=body,
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers=_HEADERS,
    )
