"""A whole plane on this machine as real processes: NATS, engines, sidecars, routers, services.

For `multiplane up`, live tests and benchmarks. Leaving the context ends every process; if this
process is killed instead, the kernel ends them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.protocol import BusError
from controlplane.bus.setup import ensure
from controlplane.http_client import HttpClient, HttpError
from controlplane.ports import check_free, free_or_any, free_port
from lab.children import Child, ChildStartError
from lab.driver import LocalFleet, LocalInstance
from lab.tiny_model import tiny_model_dir

READY_S_MAX = 30.0
_POLL_S = 0.05


class StackOptions(msgspec.Struct, frozen=True):
    """What to start. Ports but `port` that somebody else has are replaced by free ones.

    Attributes:
        engines: emulated engines, each with a sidecar; 0 to bring other engines.
        routers: router processes, all on one port.
        host: address for clients.
        port: port for clients; 0 takes a free one.
        engine_flags: of every engine, as for `python -m lab.server`.
        router_flags: of every router, as for `multiplane router`.
        sidecar_flags: of every sidecar, as for `multiplane sidecar`.
        nats: URL of a NATS server to use; an embedded one is started if it is empty.
        nats_port: of the embedded one; 0 takes a free one.
        admin_port: for operators, of the first router; the next has the next one. 0: free ones.
        detector: start one.
        predictor: start one.
        dashboard_port: start a dashboard there, 0 for a free port; None for no dashboard.
    """

    engines: int = 3
    routers: int = 2
    host: str = "127.0.0.1"
    port: int = 0
    engine_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    sidecar_flags: tuple[str, ...] = ()
    nats: str = ""
    nats_port: int = 0
    admin_port: int = 0
    detector: bool = False
    predictor: bool = False
    dashboard_port: int | None = None


class LocalStack:
    """Starts and ends the processes; an async context manager.

    Attributes:
        fleet: the engines.
        sidecars: one for each engine.
        routers: the router processes.
        services: the detector, the predictor and the dashboard, where they are wanted.
        port: for clients, once started.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.fleet = LocalFleet(*options.engine_flags)
        self.sidecars: list[Child] = []
        self.routers: list[Child] = []
        self.services: list[Child] = []
        self.port = options.port
        self.embedded: EmbeddedNats | None = None
        self.nats_url = options.nats

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def admin_urls(self) -> list[str]:
        """Base URL of each router's operator port."""
        return [f"http://{router.ready['admin']}" for router in self.routers]

    @property
    def dashboard_url(self) -> str:
        """Where the dashboard is; empty if there is none."""
        urls = [child.ready["dashboard"] for child in self.services if "dashboard" in child.ready]
        return str(urls[0]) if urls else ""

    @property
    def dead(self) -> set[str]:
        """Names of what was started and has ended."""
        children = (*self.routers, *self.sidecars, *self.services)
        names = {child.name for child in children if not child.running}
        names |= {engine.name for engine in self.fleet.instances if not engine.running}
        if self.embedded is not None and not self.embedded.running:
            names.add("nats")
        return names

    async def __aenter__(self) -> LocalStack:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _start(self) -> None:
        if self.port:
            # Routers share their port with each other, and would with another plane's as well.
            check_free(self.options.host, self.port)
        else:
            self.port = free_port(self.options.host)
        if not self.nats_url:
            self.embedded = await self._start_nats()
            self.nats_url = self.embedded.url
        bus = await NatsBus.connect(self.nats_url, name="up")
        await ensure(bus, layout(size=0.25), missing_only=True)
        await bus.close()
        await _together(
            self.fleet.start(self.options.engines),
            *(self.start_router() for _ in range(self.options.routers)),
            *self._start_services(),
        )
        await self.start_sidecars(self.fleet.instances)
        await self.ready(self.options.engines)

    async def _start_nats(self) -> EmbeddedNats:
        port = self.options.nats_port
        embedded = EmbeddedNats(port=port)
        try:
            return await embedded.start()
        except BusError:
            await embedded.stop()
            if not port or free_or_any(self.options.host, port):
                raise
            return await EmbeddedNats().start()

    async def _start_at(self, child: Child, flag: str) -> None:
        """Start a child; on any free port where somebody else has the one that `flag` names."""
        try:
            await child.start()
        except ChildStartError:
            at = child.command.index(flag) + 1
            port = int(child.command[at])
            if not port or free_or_any(self.options.host, port):
                raise
            child.command = (*child.command[:at], "0", *child.command[at + 1 :])
            await child.start()

    def _start_services(self) -> list[Coroutine[Any, Any, None]]:
        """Make the services that are wanted; returns what starts them."""
        for name in ("detector", "predictor"):
            if getattr(self.options, name):
                self.services.append(Child(name, [*_multiplane(name), *self._bus_flags]))
        starts = [child.start() for child in self.services]
        if self.options.dashboard_port is not None:
            port = str(self.options.dashboard_port)
            command = [*_multiplane("dashboard"), *self._bus_flags, "--port", port]
            self.services.append(Child("dashboard", command))
            starts.append(self._start_at(self.services[-1], "--port"))
        return starts

    @property
    def _bus_flags(self) -> tuple[str, ...]:
        return ("--nats", self.nats_url)

    async def start_router(self, *flags: str) -> Child:
        """Start one more router on the shared port."""
        number = len(self.routers)
        admin = self.options.admin_port + number if self.options.admin_port else 0
        router = Child(
            f"router-{number}",
            [
                *_multiplane("router"),
                *(*self._bus_flags, "--reuse-port", "--log-level", "info"),
                *("--host", self.options.host, "--port", str(self.port)),
                *("--admin-port", str(admin)),
                *self.options.router_flags,
                *flags,
            ],
        )
        self.routers.append(router)
        await self._start_at(router, "--admin-port")
        return router

    async def start_sidecars(self, instances: Sequence[LocalInstance]) -> None:
        """Start a sidecar beside each of these emulated engines."""
        folder = tiny_model_dir()
        await _together(*(self.start_sidecar(i.name, i.url, folder) for i in instances))

    async def start_sidecar(self, name: str, url: str, model_path: Path, *flags: str) -> Child:
        """Start a sidecar beside any engine.

        Args:
            name: instance id.
            url: of the engine.
            model_path: folder of its tokenizer and chat template.
            flags: more, as for `multiplane sidecar`.
        """
        sidecar = Child(
            f"sidecar-{name}",
            [
                *_multiplane("sidecar"),
                *("--engine", url, "--nats", self.nats_url, "--instance-id", name),
                *("--model-path", str(model_path)),
                *self.options.sidecar_flags,
                *flags,
            ],
        )
        self.sidecars.append(sidecar)
        await sidecar.start()
        return sidecar

    async def ready(self, instances: int) -> None:
        """Return once every router sees this many instances, exactly, and can read prompts.

        Raises:
            TimeoutError: that did not happen within READY_S_MAX; says what each router sees.
        """
        deadline_s = asyncio.get_running_loop().time() + READY_S_MAX
        async with HttpClient(timeout_s=5.0) as http:
            while True:
                seen = [await _seen(http, url) for url in self.admin_urls]
                if all(each == {"exact": instances, "cards": True} for each in seen):
                    return
                if asyncio.get_running_loop().time() > deadline_s:
                    logs = "\n".join(child.log(2000) for child in (*self.routers, *self.sidecars))
                    raise TimeoutError(f"the plane is not ready; routers see {seen}\n{logs}")
                await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """End everything, clients' side first."""
        await asyncio.gather(*(router.stop() for router in self.routers))
        await asyncio.gather(*(child.stop() for child in (*self.sidecars, *self.services)))
        for child in (*self.routers, *self.sidecars, *self.services):
            child.close()
        await self.fleet.close()
        if self.embedded is not None:
            await self.embedded.stop()


async def _seen(http: HttpClient, admin_url: str) -> dict[str, object]:
    """Return how many instances a router sees exactly, and whether it can read prompts."""
    try:
        state = await http.get(f"{admin_url}/debug/state")
    except HttpError:
        return {}
    models = state["models"].values()
    exact = sum(i["trust"] == "exact" for model in models for i in model["instances"])
    return {"exact": exact, "cards": all(model["card"] for model in models)}


def _multiplane(command: str) -> list[str]:
    return [sys.executable, "-m", "controlplane.cli.main", command]


async def _together(*starts: Coroutine[Any, Any, Any]) -> None:
    """Run all to their end; when one fails, end the others first and raise what it raised."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
