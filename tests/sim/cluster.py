"""The whole simulated plane: bus, routers, sites, clients, and the power to start and kill them."""

from __future__ import annotations

from tests.sim.bus import BusServer, Connection
from tests.sim.clients import Clients
from tests.sim.engines import Parents
from tests.sim.network import Link
from tests.sim.routers import RouterProcess
from tests.sim.settings import Settings
from tests.sim.sites import Site
from tests.sim.world import World


class RouterHost:
    """Where a router lives, across restarts.

    Attributes:
        process: None while none runs.
        gone: whether none will run again.
        http: its links to the engines, by instance.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.process: RouterProcess | None = None
        self.gone = False
        world, delay_s = cluster.world, cluster.settings.delay_s
        self.bus_link = Link(world, f"{name}~bus", delay_s)
        self.http = {site: Link(world, f"{name}~{site}", delay_s) for site in cluster.sites}
        self._cluster = cluster

    def start(self, skew_s: float = 0.0) -> None:
        """Start a router under the name of the one before, unless that lives or all is over."""
        if self.gone or (self.process is not None and self.process.alive):
            return
        cluster = self._cluster
        cluster.world.note(f"router {self.name} starts, its clock {skew_s:+.3f} s")
        process = RouterProcess(
            cluster.world, self.name, cluster.settings, cluster.sites, self.http, skew_s
        )
        self.process = process
        process.start(Connection(cluster.server, process, self.bus_link))

    def kill(self) -> None:
        """Let it die."""
        if self.process is not None:
            self._cluster.world.note(f"router {self.name} dies")
            process, self.process = self.process, None
            process.kill()


class Cluster:
    """Everything there is.

    Attributes:
        sites: by instance name.
        hosts: of routers, by name.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        self.server = BusServer(world)
        self.parents = Parents()
        names = [f"i{number}" for number in range(settings.instances)]
        self.sites = {
            name: Site(world, name, self.server, settings, self.parents) for name in names
        }
        self.hosts = {
            name: RouterHost(self, name)
            for name in (f"router-{number}" for number in range(settings.routers))
        }
        self.clients = Clients(world, settings, lambda: self.routers, lambda: self.live_sites)

    @property
    def routers(self) -> list[RouterProcess]:
        """The routers that live."""
        return [
            host.process
            for host in self.hosts.values()
            if host.process is not None and host.process.alive
        ]

    @property
    def live_sites(self) -> list[Site]:
        """The sites that have not left for good."""
        return [site for site in self.sites.values() if not site.gone]

    @property
    def links(self) -> list[Link]:
        """Every link."""
        found = [site.local for site in self.sites.values()]
        found += [site.bus_link for site in self.sites.values()]
        for host in self.hosts.values():
            found += [host.bus_link, *host.http.values()]
        return found

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        engines = [site.engine for site in self.sites.values() if site.engine is not None]
        return bool(self.clients.open) or any(engine.unfinished for engine in engines)

    def start(self) -> None:
        """Start everything, in some order."""
        for site in self.sites.values():
            self._start_site(site)
        for host in self.hosts.values():
            self.world.after(self.world.rng.uniform(0.0, 0.3), host.start, self.skew())
        self.clients.start()

    def _start_site(self, site: Site) -> None:
        rng = self.world.rng
        self.world.after(rng.uniform(0.0, 0.3), site.start_engine)
        self.world.after(rng.uniform(0.0, 0.3), site.start_sidecar, self.skew())

    def skew(self) -> float:
        """Return by how much a clock is wrong this time."""
        skew_s = self.settings.skew_s
        return self.world.rng.uniform(-skew_s, skew_s) if skew_s else 0.0

    def freeze(self) -> None:
        """Let no engine begin a step: what is on its way arrives, and then nothing changes."""
        for site in self.sites.values():
            if site.engine is not None:
                site.engine.frozen = True

    def thaw(self) -> None:
        """Let them go on."""
        for site in self.sites.values():
            if site.engine is not None:
                site.engine.thaw()
