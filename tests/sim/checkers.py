"""What must hold: always, once the world is quiet, and when nothing is left to do.

steady    at any time: sums equal their recomputation, slots have owners, bounds hold, and a
          block set that is claimed exact equals what was published at that place of its stream
settled   in quiet, under load, with nothing on its way: every router's view equals the truth
drained   with no request left: nothing is booked anywhere, each request ended exactly once
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core.fleet import Instance
from controlplane.core.hashing import BlockHash
from controlplane.core.plane import Plane
from controlplane.core.slots import SlotState
from controlplane.core.stream import Trust
from router.config import RouterConfig
from tests.sim.routers import RouterProcess
from tests.sim.sites import Site

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


_SNAPSHOTS_MAX = RouterConfig(bus_url="").snapshots_at_once


class Failure(AssertionError):
    """Something that must hold does not."""


def require(holds: object, what: str) -> None:
    """Raise `Failure` unless something holds."""
    if not holds:
        raise Failure(what)


def blocks_of(plane: Plane, instance: Instance) -> set[BlockHash]:
    """Return the blocks that a router believes an instance to hold."""
    slot = instance.slots.get(0)
    return set() if slot is None else set(plane.index.blocks(slot))


# --- at any time


def steady(cluster: Cluster, *, thorough: bool = True) -> None:
    """Check what holds at any time.

    Args:
        thorough: visit every block, which takes milliseconds.
    """
    for router in cluster.routers:
        if router.plane is not None:
            _bounds(router)
            _ledger(router.plane)
            if thorough:
                _index(router.plane)
                for instance in router.plane.fleet:
                    _exact(cluster, router, instance)
    for exchange in cluster.clients.exchanges:
        require(len(exchange.ends) <= 1, f"{exchange.job.job_id} ended twice: {exchange.ends}")


def _ledger(plane: Plane) -> None:
    if plane.requests.promises is not None:
        plane.requests.promises.check()
    plane.ledger.check([ticket.booking for ticket in plane.requests.tickets.values()])


def _index(plane: Plane) -> None:
    plane.index.check()
    owned: list[int] = []
    for row, instance in enumerate(plane.fleet):
        require(instance.row == row, f"{instance.record.instance_id} is in another row")
        owned += instance.slots.values()
        for slot in instance.slots.values():
            require(plane.index.state(slot) is SlotState.LIVE, f"slot {slot} is not live")
        for slot in instance.shadow.values():
            require(plane.index.state(slot) is SlotState.SHADOW, f"slot {slot} is no shadow")
    live = [s for s in range(plane.index.slots) if plane.index.live >> s & 1]
    require(sorted(owned) == live, "a departed instance's blocks still count")


def _bounds(router: RouterProcess) -> None:
    plane = router.plane
    assert plane is not None
    require(len(router.inbox) <= router.settings.inbox_max, "the inbox overflows")
    require(len(plane.outbox) <= plane.config.route_events_max, "the outbox overflows")
    require(len(plane.requests.tickets) <= len(router.routings), "a ticket outlives its request")
    require(router.fetching <= _SNAPSHOTS_MAX, f"{router.name} fetches {router.fetching} at once")
    for instance in plane.fleet:
        live = {id(ticket.booking) for ticket in plane.requests.tickets.values()}
        require(live.issuperset(instance.awaiting), "a request that ended is awaited")


def _exact(cluster: Cluster, router: RouterProcess, instance: Instance) -> None:
    """A set that is claimed exact is what the sidecar had published there."""
    if not instance.follower.exact:
        return
    assert router.plane is not None
    name, position = instance.record.instance_id, instance.follower.position
    assert position is not None
    require(
        blocks_of(router.plane, instance) == cluster.sites[name].published[position],
        f"{router.name} has {name} exact at {position}, and wrong",
    )


# --- in quiet


def settled(cluster: Cluster) -> None:
    """Check that everybody knows the truth: nothing is on its way, and requests may be running."""
    for site in cluster.live_sites:
        _sidecar(site)
        _booked(cluster, site)
    for router in cluster.routers:
        plane = router.plane
        assert plane is not None, f"{router.name} knows of no instance"
        for site in cluster.live_sites:
            _knows(router, plane, site)
        for other in cluster.routers:
            _knows_bookings(router, other)
        for site in cluster.live_sites:
            _foreign(router, plane, site)
        require(not router.inbox, f"{router.name} has messages left")


def _sidecar(site: Site) -> None:
    sidecar = site.sidecar
    assert sidecar is not None
    published, truth = set(sidecar.relay.published()), site.truth()
    require(published == site.told, f"{site.name} has told something else than it holds")
    if site.engine is not None and site.engine.silent:
        return
    # A store that may be a report of hits leaves a doubt, which is settled later, or given up for
    # want of room: until then the mirror knows that it may be wrong.
    mirror, wrong = sidecar.mirror, published - truth
    if mirror.complete and not mirror.doubtful and not mirror.doubts_trimmed:
        missing = len(truth - published)
        require(
            published == truth, f"{site.name}: {missing} blocks unpublished, {len(wrong)} wrong"
        )
    require(
        len(wrong) <= mirror.doubtful,
        f"{site.name} publishes {len(wrong)} blocks that its engine lacks",
    )


def _booked(cluster: Cluster, site: Site) -> None:
    """Every booking is a request that its engine has, and the other way round."""
    assert site.engine is not None
    booked = [
        f"{ticket.booking.request_id}/{router.name}"
        for router in cluster.routers
        if router.plane is not None
        for ticket in router.plane.requests.tickets.values()
        if ticket.booking.instance_id == site.name
    ]
    running = site.engine.unfinished - site.engine.foreign
    require(len(booked) == running, f"{site.name} has {running} requests, booked are {booked}")


def _foreign(router: RouterProcess, plane: Plane, site: Site) -> None:
    """What is taken for foreign load is that, and not somebody's bookings."""
    assert site.engine is not None
    believed, true = plane.ledger.of(site.name)["foreign"], site.engine.foreign
    require(
        0 <= believed <= true,
        f"{router.name} takes {believed} requests on {site.name} for foreign, there are {true}",
    )


def _knows(router: RouterProcess, plane: Plane, site: Site) -> None:
    assert site.sidecar is not None
    instance = plane.fleet.get(site.name)
    if instance is None:
        raise Failure(f"{router.name} does not know {site.name}")
    where = f"{router.name} on {site.name}"
    require(instance.trust is Trust.EXACT, f"{where}: trust is {instance.trust}")
    published = set(site.sidecar.relay.published())
    known = blocks_of(plane, instance)
    require(
        known == published,
        f"{where}: {len(known - published)} blocks too many, {len(published - known)} missing",
    )
    require(not instance.shadow, f"{where}: a shadow is left")
    require(not instance.follower.kept, f"{where}: batches are left")
    require(plane.fleet.trusted[instance.row], f"{where}: not trusted")
    for ticket in instance.awaiting.values():
        hashes, slot = ticket.decision.request.hashes, instance.slots.get(0)
        computed = sum(block in known for block in hashes)
        require(slot is None or ticket.depth >= computed, f"{where}: progress is not released")


def _knows_bookings(router: RouterProcess, other: RouterProcess) -> None:
    if other is router:
        return
    assert router.plane is not None
    assert other.plane is not None
    peer = router.plane.ledger._peers.get(other.name)
    known = {} if peer is None else peer.bookings
    truth = other.plane.ledger.own_totals()
    require(known == truth, f"{router.name} thinks that {other.name} has {known}, not {truth}")


def departed(cluster: Cluster) -> None:
    """Check that nobody believes in an instance that is gone."""
    gone = [site.name for site in cluster.sites.values() if site.gone]
    for router in cluster.routers:
        assert router.plane is not None
        for name in gone:
            require(router.plane.fleet.get(name) is None, f"{router.name} still has {name}")


def peers_expired(cluster: Cluster) -> None:
    """Check that only routers that live have bookings."""
    alive = {router.name for router in cluster.routers}
    for router in cluster.routers:
        assert router.plane is not None
        peers = set(router.plane.ledger._peers)
        require(peers <= alive, f"{router.name} counts dead routers: {peers - alive}")


# --- in the end


def drained(cluster: Cluster) -> None:
    """Check that nothing is left of any request."""
    for exchange in cluster.clients.exchanges:
        require(len(exchange.ends) == 1, f"{exchange.job.job_id} ended {exchange.ends}")
        if exchange.ends[0] == "ok":
            want = len(exchange.job.answer)
            require(exchange.answered == want, f"{exchange.job.job_id} lost tokens")
    for router in cluster.routers:
        plane = router.plane
        assert plane is not None
        require(not plane.requests.tickets, f"{router.name} has tickets left")
        for name in (*cluster.sites,):
            load = plane.ledger.of(name)
            require(not any(load.values()), f"{router.name} books {load} on {name}")
        for column in ("batch", "queued", "context"):
            left = getattr(plane.ledger, column).tolist()
            require(not any(left), f"{router.name}: {column} is {left} in the end")
        for instance in plane.fleet:
            gone = cluster.sites[instance.record.instance_id].gone
            require(gone or not instance.fetch, f"{router.name} still fetches")
