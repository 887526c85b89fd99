"""A rolling restart of everything, one after another, as an operator or an orchestrator does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sidecar.config import SidecarConfig
from tests.sim.cluster import Cluster, RouterHost
from tests.sim.sites import Site

LOOK_S = 0.1
_SETTLE_S = SidecarConfig(engine_url="http://engine").settle_s
_DOWN_S = 0.3

Condition = Callable[[], bool]


class RollingRestart:
    """Restarts all instances and all routers of a cluster; `done` when through."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.done = False

    def start(self) -> None:
        """Begin."""
        self._go_on(self._steps())

    def _go_on(self, steps: Iterator[float | Condition], waiting: Condition | None = None) -> None:
        """Take the next step: wait for so long, or until something is so."""
        world = self.cluster.world
        if waiting is not None and not waiting():
            world.after(LOOK_S, self._go_on, steps, waiting)
            return
        step = next(steps, None)
        if step is None:
            self.done = True
        elif callable(step):
            self._go_on(steps, step)
        else:
            world.after(step, self._go_on, steps)

    def _steps(self) -> Iterator[float | Condition]:
        for site in self.cluster.sites.values():
            yield from self._instance(site)
        for host in self.cluster.hosts.values():
            yield from self._router(host)

    def _instance(self, site: Site) -> Iterator[float | Condition]:
        """What the sidecar's SIGTERM does, then a new pair of engine and sidecar."""
        sidecar, engine = site.sidecar, site.engine
        assert sidecar is not None
        assert engine is not None
        sidecar.drain()
        yield _SETTLE_S
        for _ in range(2):
            yield lambda: not engine.unfinished
            yield LOOK_S
        sidecar.say_goodbye()
        yield 0.01
        site.kill_sidecar()
        site.kill_engine()
        yield _DOWN_S
        site.start_engine()
        site.start_sidecar()
        yield lambda: self._is_known(site)

    def _is_known(self, site: Site) -> bool:
        """Whether all routers would send requests to an instance."""
        fleets = [router.plane.fleet for router in self.cluster.routers if router.plane]
        instances = [fleet.get(site.name) for fleet in fleets]
        return all(each is not None and not each.draining for each in instances)

    def _router(self, host: RouterHost) -> Iterator[float | Condition]:
        process = host.process
        assert process is not None
        process.stop()
        yield lambda: not process.alive
        yield _DOWN_S
        host.start()
        yield lambda: any(
            router.name == host.name and router.plane for router in self.cluster.routers
        )
