"""What goes wrong: faults drawn at random times, each undone after a while, all undone for quiet.

A fault is a function that does some harm and says how to undo it. Which ones a run may meet is part
of its settings, so that seeds differ in kind and not only in luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from controlplane.core.hashing import pack_hashes
from schemas import subjects
from schemas.bus import Blacklist, Drain, KvBatch, KvStored
from schemas.codec import encode
from tests.sim.settings import MODEL

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster, RouterHost
    from tests.sim.network import Link
    from tests.sim.sites import Site
    from tests.sim.world import Process

Undo = Callable[[], None]

FAR = 10**12
"""Epochs and numbers so far ahead that no sidecar reaches them."""


class Faults:
    """Harms a cluster until told to stop.

    Attributes:
        done: how many faults there were.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.done = 0
        self._until_s = 0.0
        self._revision = 0

    def start(self, until_s: float) -> None:
        """Do harm until then."""
        self._until_s = until_s
        if self.cluster.settings.kinds:
            self._next()
        if self.cluster.settings.forge_every_s:
            self._forge_next(random.Random(f"forger {self.world.seed}"))

    def _next(self) -> None:
        wait_s = self.world.rng.expovariate(1.0 / self.cluster.settings.fault_every_s)
        if self.world.now_s + wait_s < self._until_s:
            self.world.after(wait_s, self._strike)

    def _strike(self) -> None:
        kind = self.world.rng.choice(self.cluster.settings.kinds)
        undo = KINDS[kind](self)
        if undo is not None:
            self.done += 1
            most_s = self._until_s - self.world.now_s
            lasts_s = self.world.rng.expovariate(1.0 / self.cluster.settings.lasts_s)
            lasts_s = min(lasts_s, most_s)
            self.world.after(lasts_s, undo)
        self._next()

    def _forge_next(self, rng: random.Random) -> None:
        wait_s = rng.expovariate(1.0 / self.cluster.settings.forge_every_s)
        if self.world.now_s + wait_s < self._until_s:
            self.world.after(wait_s, self._forge, rng)

    def _forge(self, rng: random.Random) -> None:
        """Somebody, or a bug, sends routers a batch in an instance's name, absurdly far ahead."""
        site = rng.choice(list(self.cluster.sites.values()))
        epoch = 0 if site.sidecar is None else site.sidecar.relay.epoch
        epoch, seq = rng.choice([(epoch, FAR), (epoch + FAR, FAR), (epoch + FAR, 1)])
        self.world.note(f"a batch is forged for {site.name}: {epoch}, {seq}")
        stored = KvStored(pack_hashes([rng.getrandbits(64)]))
        payload = encode(KvBatch(site.name, epoch, seq, 0.0, [stored], 1, 1))
        for connection in self.cluster.server.connections.values():
            if "kv" in connection.kinds:
                connection.link.carry("kv<forger", connection.deliver, "kv", payload)
        self.done += 1
        self._forge_next(rng)

    def end(self) -> None:
        """Undo whatever is left: from now on the world is good."""
        cluster = self.cluster
        self.world.note("quiet: every fault is undone")
        if not cluster.server.up:
            cluster.server.recover()
        for link in cluster.links:
            link.calm()
            link.heal()
        for connection in list(cluster.server.connections.values()):
            connection.heal()
        for site in cluster.sites.values():
            site.replay_trouble = site.snapshot_trouble = 0.0
            self._revive_site(site)
        for host in cluster.hosts.values():
            self._revive_router(host)

    def _revive_site(self, site: Site) -> None:
        for process in (site.engine, site.sidecar):
            if process is not None and process.paused:
                process.resume()
        if site.engine is not None:
            site.engine.refusing = 0.0
        site.start_engine()
        site.start_sidecar(self.cluster.skew())

    def _revive_router(self, host: RouterHost) -> None:
        if host.process is not None and host.process.paused:
            host.process.resume()
        host.start(self.cluster.skew())

    # --- choosing

    def _site(self) -> Site | None:
        sites = self.cluster.live_sites
        return self.world.rng.choice(sites) if sites else None

    def _host(self) -> RouterHost:
        return self.world.rng.choice(list(self.cluster.hosts.values()))

    def _bus_ends(self) -> list[str]:
        return list(self.cluster.server.connections)

    def _link(self) -> Link:
        return self.world.rng.choice(self.cluster.links)

    # --- the network

    def cut_from_bus(self) -> Undo | None:
        """One process is cut off from the bus; it notices, late, or not at all."""
        names = self._bus_ends()
        if not names:
            return None
        name = self.world.rng.choice(names)
        connection = self.cluster.server.connections[name]
        notice_s = self.world.rng.choice([0.0, 0.05, 0.5, None])
        self.world.note(f"{name} is cut off from the bus, noticed after {notice_s}")
        connection.cut(notice_s)

        def undo() -> None:
            now = self.cluster.server.connections.get(name)
            if now is not None:
                now.heal()
            else:
                connection.link.heal()

        return undo

    def swizzle(self) -> Undo | None:
        """Several processes are cut off one after another, and come back in another order."""
        rng = self.world.rng
        names = [name for name in self._bus_ends() if rng.random() < 0.5]
        self.world.note(f"swizzle: {', '.join(names)}")
        for name in names:
            self.world.after(rng.uniform(0.0, 0.5), self._cut_named, name)
        rng.shuffle(names)
        undone = list(names)

        def undo() -> None:
            for name in undone:
                self.world.after(rng.uniform(0.0, 0.5), self._heal_named, name)

        return undo

    def _cut_named(self, name: str) -> None:
        connection = self.cluster.server.connections.get(name)
        if connection is not None and self.world.now_s < self._until_s:
            connection.cut(0.01)

    def _heal_named(self, name: str) -> None:
        connection = self.cluster.server.connections.get(name)
        if connection is not None:
            connection.heal()

    def bus_outage(self) -> Undo | None:
        """The server goes down, and perhaps loses its buckets."""
        server = self.cluster.server
        if not server.up:
            return None
        forget = self.world.rng.random() < 0.2
        self.world.note(f"the bus is down{', and forgets' if forget else ''}")
        server.fail()
        if forget:
            server.forget()

        def undo() -> None:
            if not server.up:
                self.world.note("the bus is back")
                server.recover()

        return undo

    def bad_link(self) -> Undo | None:
        """A link loses, repeats, reorders or delays; an engine's own socket loses and delays."""
        link, rng = self._link(), self.world.rng
        link.loss = rng.choice([0.0, 0.1, 0.5])
        if not link.name.endswith("~local"):
            link.twice = rng.choice([0.0, 0.2])
            link.overtake = rng.choice([0.0, 0.2])
        link.delay_s = rng.choice([link.delay_s, (0.001, 0.1), (0.1, 0.4)])
        self.world.note(f"{link.name} is bad: {link.loss} {link.twice} {link.overtake}")
        return link.calm

    def cut_link(self) -> Undo | None:
        """Any link is cut: a router from an engine, a sidecar from its engine."""
        link = self._link()
        if link.name.endswith("~bus"):
            return None
        self.world.note(f"{link.name} is cut")
        link.cut()
        return link.heal

    # --- processes

    def kill_engine(self) -> Undo | None:
        """An engine dies; another one takes its place, at once or later."""
        site = self._site()
        if site is None or site.engine is None:
            return None
        site.kill_engine()
        if self.world.rng.random() < 0.3:  # before anybody can notice
            self.world.after(0.01, site.start_engine)
        return site.start_engine

    def kill_sidecar(self) -> Undo | None:
        """A sidecar dies and is started again, its clock wrong perhaps."""
        site = self._site()
        if site is None or site.sidecar is None:
            return None
        site.kill_sidecar()
        if self.world.rng.random() < 0.3:
            self.world.after(0.01, site.start_sidecar, self.cluster.skew())
        return lambda: site.start_sidecar(self.cluster.skew())

    def kill_router(self) -> Undo | None:
        """A router dies and is started again under its name."""
        host = self._host()
        if host.process is None:
            return None
        host.kill()
        if self.world.rng.random() < 0.3:  # by a supervisor, at once
            self.world.after(0.01, host.start, self.cluster.skew())
        return lambda: host.start(self.cluster.skew())

    def lose_router(self) -> Undo | None:
        """A router dies for good."""
        if sum(not host.gone for host in self.cluster.hosts.values()) < 2:
            return None
        host = self._host()
        self.world.note(f"{host.name} is gone for good")
        host.gone = True
        host.kill()
        return lambda: None

    def pause(self) -> Undo | None:
        """A process stops for a while, as by SIGSTOP."""
        site = self._site()
        processes: list[Process | None] = [self._host().process]
        if site is not None:
            processes += [site.engine, site.sidecar]
        process = self.world.rng.choice(processes)
        if process is None or process.paused:
            return None
        self.world.note(f"{type(process).__name__} {process.name} is paused")
        process.pause()
        return process.resume

    def lose_site(self) -> Undo | None:
        """An instance leaves for good, without a word or with one."""
        if len(self.cluster.live_sites) < 2:
            return None
        site = self._site()
        assert site is not None
        self.world.note(f"{site.name} is gone for good")
        site.gone = True
        if site.sidecar is not None and self.world.rng.random() < 0.5:
            site.sidecar.say_goodbye()
        site.kill_engine()
        site.kill_sidecar()
        return lambda: None

    # --- what processes do wrong

    def refuse(self) -> Undo | None:
        """An engine answers with 500 now and then, or always."""
        site = self._site()
        if site is None or site.engine is None:
            return None
        engine = site.engine
        engine.refusing = self.world.rng.choice([0.3, 1.0])
        self.world.note(f"engine {site.name} refuses {engine.refusing}")

        def undo() -> None:
            engine.refusing = 0.0

        return undo

    def bad_answers(self) -> Undo | None:
        """Replays and snapshots come incomplete."""
        site = self._site()
        if site is None:
            return None
        site.replay_trouble = site.snapshot_trouble = 0.7
        self.world.note(f"{site.name} answers badly")

        def undo() -> None:
            site.replay_trouble = site.snapshot_trouble = 0.0

        return undo

    def reset_cache(self) -> Undo | None:
        """An engine forgets its whole cache."""
        site = self._site()
        if site is None or site.engine is None:
            return None
        self.world.note(f"engine {site.name} resets its cache")
        site.engine.do(site.engine.reset_cache)
        return lambda: None

    # --- operators

    def drain(self) -> Undo | None:
        """An operator drains an instance, and takes it back."""
        site = self._site()
        if site is None:
            return None
        key = subjects.key(MODEL, f"drain-{site.name}")
        self._revision += 1
        self.cluster.server.put(key, encode(Drain(site.name, True, self._revision, 0.0)))
        return lambda: self._lift(key)

    def blacklist(self) -> Undo | None:
        """An operator blacklists an instance for a while."""
        site = self._site()
        if site is None:
            return None
        key = subjects.key(MODEL, f"blacklist-{site.name}")
        self._revision += 1
        message = Blacklist(site.name, True, self._revision, 0.0, ttl_s=1.0)
        self.cluster.server.put(key, encode(message))
        return lambda: self._lift(key)

    def _lift(self, key: str) -> None:
        self.cluster.server.put(key, None)

    def delete_record(self) -> Undo | None:
        """Somebody deletes the record of an instance that lives."""
        site = self._site()
        if site is None:
            return None
        self.world.note(f"the record of {site.name} is deleted")
        self.cluster.server.put(f"record {site.name}", None)
        return lambda: None


KINDS: dict[str, Callable[[Faults], Undo | None]] = {
    "cut_from_bus": Faults.cut_from_bus,
    "swizzle": Faults.swizzle,
    "bus_outage": Faults.bus_outage,
    "bad_link": Faults.bad_link,
    "cut_link": Faults.cut_link,
    "kill_engine": Faults.kill_engine,
    "kill_sidecar": Faults.kill_sidecar,
    "kill_router": Faults.kill_router,
    "lose_router": Faults.lose_router,
    "pause": Faults.pause,
    "lose_site": Faults.lose_site,
    "refuse": Faults.refuse,
    "bad_answers": Faults.bad_answers,
    "reset_cache": Faults.reset_cache,
    "drain": Faults.drain,
    "blacklist": Faults.blacklist,
    "delete_record": Faults.delete_record,
}
