"""What the other routers let in, by tenant: so that a limit holds for the fleet, not for each.

Theory of operation. Every router tells what it routes and what has ended (the `route` subject), and
whose it was. So each one knows what a tenant has in flight elsewhere and what it has used there,
some milliseconds late: a limit may be overshot by what several routers let in at the same moment.

A lost message would leave requests in flight for ever. `RouterTotals`, a few times a second, heals
that: they say how many requests a router has in all, and of more than so many the oldest have
ended unheard. A router that is silent for `lease_s` has nothing in flight any more.

A request's id is its client's to choose, so many at once may have the same: each of them counts.

Pure: `now_s` comes in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from schemas.bus import Finished, RouteBatch, Routed, RouterTotals

PEERS_MAX = 1024
"""Streams (a router and a model each) whose requests are counted; further ones are ignored."""
REQUESTS_MAX = 100_000
"""Requests in flight that are known of one stream; beyond it the oldest are forgotten."""


class PeerUse:
    """What tenants have and use at other routers.

    Args:
        router_id: this router's own.
        lease_s: silence after which a router's requests no longer count.

    Attributes:
        running: tenant → requests in flight at other routers.
    """

    def __init__(self, router_id: str, lease_s: float) -> None:
        self.running: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._changed: set[str] = set()
        self._router_id = router_id
        self._lease_s = lease_s
        self._peers: dict[tuple[str, str], _Peer] = {}

    def told(self, model: str, batch: RouteBatch, now_s: float) -> None:
        """Take in what a router tells of a model; this router's own messages are ignored."""
        if batch.router_id == self._router_id:
            return
        key = batch.router_id, model
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                return
            peer = self._peers[key] = _Peer(batch.epoch)
        if batch.epoch > peer.epoch:
            self._forget(peer, 0)
            peer.epoch = batch.epoch
        elif batch.epoch < peer.epoch:
            return
        peer.heard_s = now_s
        for event in batch.events:
            if isinstance(event, Routed):
                self._routed(peer, event)
            elif isinstance(event, Finished):
                self._finished(peer, event)
            elif isinstance(event, RouterTotals):
                self._forget(peer, sum(sums[0] for sums in event.bookings.values()))

    def take_changes(self) -> dict[str, tuple[int, int]]:
        """Return what is new since the last call: tenant → requests in flight, tokens used."""
        changed, self._changed = self._changed, set()
        tokens, self._tokens = self._tokens, Counter()
        return {tenant: (self.running[tenant], tokens[tenant]) for tenant in changed}

    def expire(self, now_s: float) -> None:
        """Forget the requests of routers that went silent."""
        for key, peer in list(self._peers.items()):
            if now_s - peer.heard_s > self._lease_s:
                self._forget(peer, 0)
                del self._peers[key]

    def _routed(self, peer: _Peer, event: Routed) -> None:
        self._changed.add(event.tenant)
        if event.attempt == 0:
            self._tokens[event.tenant] += event.prompt_tokens or 0
        key = event.request_id, event.tenant
        peer.requests[key] = peer.requests.get(key, 0) + 1
        peer.running += 1
        self.running[event.tenant] += 1
        self._forget(peer, REQUESTS_MAX)

    def _finished(self, peer: _Peer, event: Finished) -> None:
        self._changed.add(event.tenant)
        self._tokens[event.tenant] += event.output_tokens or 0
        self._end(peer, (event.request_id, event.tenant))

    def _end(self, peer: _Peer, key: tuple[str, str]) -> None:
        count = peer.requests.pop(key, 0)
        if not count:
            return
        if count > 1:
            peer.requests[key] = count - 1
        peer.running -= 1
        tenant = key[1]
        self._changed.add(tenant)
        self.running[tenant] -= 1
        if not self.running[tenant]:
            del self.running[tenant]

    def _forget(self, peer: _Peer, most: int) -> None:
        """Forget the oldest requests of a router beyond so many."""
        while peer.running > most:
            self._end(peer, next(iter(peer.requests)))


class _Peer:
    """One router's requests for one model, by id and tenant, about the oldest first."""

    __slots__ = ("epoch", "heard_s", "requests", "running")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.heard_s = 0.0
        # To find the first of a plain dict takes the longer the more were deleted before it.
        self.requests: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.running = 0
