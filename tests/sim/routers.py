"""A router process: the production plane, driven as `router.event_path` and `router.service` do.

What is mirrored here, without sockets: messages wait in a bounded inbox and are applied a slice at
a time; snapshots are fetched a few at a time; ticks; route events leave after a moment. A request
is decided on, booked, sent, retried elsewhere before its first byte, and finished exactly once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from controlplane.core.dispatch import RouteRequest, Ticket
from controlplane.core.effects import Effect, FetchSnapshot
from controlplane.core.events import (
    BreakerState,
    BusState,
    Event,
    InstanceGone,
    SnapshotFailed,
    Tick,
)
from controlplane.core.plane import Plane, PlaneConfig
from router.breaker import Breaker, BreakerPolicy, State, judge
from router.config import RouterConfig
from router.http_proxy import RETRIES_MAX, Outcome
from router.standing import StandingVerdicts
from schemas import bus as messages
from schemas.codec import encode
from tests.sim.bus import Connection, Entry
from tests.sim.engines import BLOCK
from tests.sim.exchanges import Attempt, Exchange, Sink
from tests.sim.listener import Listener
from tests.sim.network import Link
from tests.sim.settings import MODEL, Settings
from tests.sim.sites import Site
from tests.sim.world import Process, World

_DECODERS: dict[str, Callable[[bytes], Event]] = {
    "kv": messages.decode_kv,
    "load": messages.decode_load,
    "route": messages.decode_route,
}
_SLICE = 16
_TRIES_MAX = 20
_BREAKER = BreakerPolicy(open_s=0.3, open_s_max=2.0)
_CONFIG = RouterConfig(bus_url="")


class RouterProcess(Process):
    """One incarnation of a router.

    Attributes:
        plane: None until an instance's record has come.
        exchanges: requests on their way, by their id.
        fetching: snapshots on their way.
        stopping: whether it takes no new requests.
        counts: what happened, by name.
    """

    def __init__(
        self,
        world: World,
        name: str,
        settings: Settings,
        sites: dict[str, Site],
        links: dict[str, Link],
        skew_s: float,
    ) -> None:
        super().__init__(world, name, skew_s)
        self.settings = settings
        self.sites = sites
        self.links = links
        self.plane: Plane | None = None
        self.routings: dict[str, Routing] = {}
        self.counts: Counter[str] = Counter()
        self.stopping = False
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.breakers: dict[str, Breaker] = {}
        self._epoch = int(self.wall_s * 1e9)
        self._standing = StandingVerdicts()
        self._draining = False
        self.fetching = 0
        self._tries: dict[str, deque[float]] = {}
        self._fetches_waiting: deque[FetchSnapshot] = deque()
        self._flush_due = False
        self._listener = Listener()
        self._accepted: dict[Exchange, None] = {}  # while it is too busy, or paused, to begin

    def start(self, connection: Connection) -> None:
        """Begin to work."""
        self.connection = connection
        connection.listen(frozenset(_DECODERS), self._message)
        connection.watch(self._entry)
        connection.on_state(self._bus_state)
        self.every(_CONFIG.tick_s, self._tick)

    @property
    def ready(self) -> bool:
        """Whether a load balancer should send requests here, as `/ready` tells it."""
        if self.stopping or self.plane is None:
            return False
        fleet = self.plane.fleet
        return bool((fleet.ready & fleet.healthy).any())

    def kill(self) -> None:
        """Die: connections on both sides break."""
        super().kill()
        self.connection.close()
        for routing in list(self.routings.values()):
            routing.router_died()
        for exchange in self._accepted:
            exchange.end("router_died")

    def stop(self) -> None:
        """End in order: what runs may finish first, and what is about to come."""
        self.stopping = True
        self.after(0.05, self._stop_when_idle)

    def _stop_when_idle(self) -> None:
        if self.routings:
            self.after(0.05, self._stop_when_idle)
            return
        self.flush()
        self.kill()

    # --- events in

    def _message(self, kind: str, payload: bytes) -> None:
        """Queue a message, as the kernel and the bus's callback do: even while paused."""
        if len(self.inbox) >= self.settings.inbox_max:
            self.inbox.popleft()
            self.counts["overflow"] += 1
        self.inbox.append((kind, payload))
        if not self._draining:
            self._draining = True
            self.after(0.0, self._drain)

    def _drain(self) -> None:
        for _ in range(min(_SLICE, len(self.inbox))):
            kind, payload = self.inbox.popleft()
            if self.plane is None:
                self.counts["unknown_model"] += 1
            else:
                self.tell(_DECODERS[kind](payload))
        if self.inbox:
            self.after(0.001, self._drain)
        else:
            self._draining = False

    def tell(self, event: Event) -> None:
        """Let the plane know of something, and do what it asks for."""
        assert self.plane is not None
        self._carry_out(self.plane.handle(event, self.clock_s))

    def _entry(self, entry: Entry) -> None:
        kind, _, name = entry.key.partition(" ")
        if kind != "record":
            self._verdict(entry)
        elif entry.value is None:
            if self.plane is not None:
                self.tell(InstanceGone(name))
        else:
            self._record(messages.decode_instance(entry.value))

    def _record(self, record: messages.InstanceRecord) -> None:
        if self.plane is None:
            rng = random.Random(self.world.rng.random())
            config = PlaneConfig(
                stale_s=self.settings.stale_s,
                departed_s=self.settings.departed_s,
                promise_s=self.settings.promise_s,
            )
            self.plane = Plane(MODEL, self.name, self._epoch, config, rng)
        known = self.plane.fleet.get(record.instance_id) is not None
        self.tell(record)
        if not known:
            for verdict in self._standing.of(MODEL, self.clock_s):
                self.tell(verdict)

    def _verdict(self, entry: Entry) -> None:
        found = self._standing.feed(entry.key, entry.value, self.clock_s)
        if found is not None and self.plane is not None:
            self.tell(found[1])

    def _bus_state(self, connected: bool) -> None:
        self.world.note(f"router {self.name}: bus {'up' if connected else 'lost'}")
        if self.plane is not None:
            self.tell(BusState(connected))

    def _tick(self) -> None:
        if self.plane is not None:
            self.tell(Tick())
            for name in self.breakers:
                self.tell_breaker(name)
        self.flush()

    # --- effects out

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, FetchSnapshot):
                self.world.note(
                    f"router {self.name}: fetch {effect.instance_id} in {effect.after_s:.3f} s, "
                    f"try {effect.attempt}: {effect.reason}"
                )
                self._count_try(effect.instance_id)
                self.after(effect.after_s, self._fetch, effect)
            else:
                self.counts[effect.kind] += 1
                self.world.note(
                    f"router {self.name}: {effect.kind} {effect.instance_id}: {effect.text}"
                )

    def _fetch(self, wanted: FetchSnapshot) -> None:
        if self.fetching >= _CONFIG.snapshots_at_once:
            self._fetches_waiting.append(wanted)
            return
        self.fetching += 1
        _Fetch(self, wanted).begin()

    def _count_try(self, name: str) -> None:
        """Notice when an instance is stormed with requests."""
        tries = self._tries.setdefault(name, deque(maxlen=_TRIES_MAX))
        stormed = len(tries) == _TRIES_MAX and self.clock_s - tries[0] < 1.0
        assert not stormed, f"{name} is asked for more than {_TRIES_MAX} snapshots a second"
        tries.append(self.clock_s)

    def fetched(self) -> None:
        """Note that a fetch is over; the next one may begin."""
        self.fetching -= 1
        if self._fetches_waiting:
            self._fetch(self._fetches_waiting.popleft())

    def told(self) -> None:
        """Note that route events wait."""
        if not self._flush_due:
            self._flush_due = True
            self.after(_CONFIG.flush_s, self.flush)

    def flush(self) -> None:
        """Publish the route events that wait."""
        self._flush_due = False
        if self.plane is None:
            return
        while (batch := self.plane.outbox.take(self.wall_s)) is not None:
            self.connection.publish("route", encode(batch))
            self._listener.hear(batch)
        requests = self.plane.requests
        self._listener.check(self.name, self.plane.ledger.own_totals(), requests.tickets.values())

    # --- breakers

    def breaker(self, name: str) -> Breaker:
        """Return an instance's breaker."""
        if name not in self.breakers:
            self.breakers[name] = Breaker(_BREAKER)
        return self.breakers[name]

    def tell_breaker(self, name: str) -> None:
        """Let the plane know whether requests may be sent to an instance."""
        assert self.plane is not None
        instance = self.plane.fleet.get(name)
        is_open = not self.breaker(name).allows(self.clock_s)
        if instance is not None and instance.breaker_open != is_open:
            self.tell(BreakerState(name, is_open))

    # --- requests

    def serve(self, exchange: Exchange) -> None:
        """Take a client's request."""
        self._accepted[exchange] = None
        self.do(self._begin, exchange)

    def _begin(self, exchange: Exchange) -> None:
        del self._accepted[exchange]
        Routing(self, exchange).begin()


class _Fetch:
    """One snapshot on its way, as `EventPath._fetch` fetches it."""

    def __init__(self, router: RouterProcess, wanted: FetchSnapshot) -> None:
        self._router = router
        self._wanted = wanted
        self._over = False

    def begin(self) -> None:
        """Ask, if it is still wanted."""
        router = self._router
        if not self._wanted_still():
            self._finish()
            return
        request = encode(messages.SnapshotRequest(router.name))
        router.connection.request(
            self._wanted.instance_id, request, self._answer, self._end, _CONFIG.snapshot_timeout_s
        )

    def _wanted_still(self) -> bool:
        plane = self._router.plane
        return plane is not None and plane.wants(self._wanted)

    def _answer(self, payload: bytes) -> None:
        if self._over:
            return
        if self._wanted_still():
            self._router.tell(messages.decode_snapshot_chunk(payload))
        if not self._wanted_still():
            self._finish()

    def _end(self, error: str) -> None:
        if self._over:
            return
        self._finish()
        if self._wanted_still():
            reason = error or "the answer ended early"
            self._router.tell(SnapshotFailed(self._wanted.instance_id, reason))

    def _finish(self) -> None:
        self._over = True
        self._router.fetched()


class Routing:
    """One request at one router, from its decision to its end."""

    def __init__(self, router: RouterProcess, exchange: Exchange) -> None:
        self._router = router
        self._exchange = exchange
        self._attempt: Attempt | None = None
        self._number = 0
        self._ticket: Ticket | None = None
        self._at = ""
        self._tried: tuple[str, ...] = ()
        self._started_s = router.clock_s
        self._ttft_s: float | None = None
        self._begun = False
        prompt = len(exchange.job.prompt)
        self._request = RouteRequest(
            exchange.job.job_id,
            prompt,
            exchange.hashes,
            BLOCK,
            exact=bool(exchange.hashes),
            by_load="" if exchange.hashes else "inexact:test",
        )

    def begin(self) -> None:
        """Decide and send, or answer that nobody is there."""
        self._exchange.cancel = self._client_gone
        name = self._decide()
        if name is None:
            self._exchange.end("no_instance")
            return
        self._router.routings[self._exchange.job.job_id] = self
        self._send(name)

    def _decide(self) -> str | None:
        router = self._router
        if router.plane is None:
            return None
        requests = router.plane.requests
        decision = requests.decide(self._request, router.clock_s)
        if decision is None:
            return None
        self._ticket = requests.book(decision, router.clock_s, router.wall_s, attempt=self._number)
        name = decision.instance.record.instance_id
        assert router.plane.fleet.get(name) is decision.instance, f"{name} has departed"
        breaker = router.breaker(name)
        if breaker.state != State.CLOSED:
            breaker.sent(router.clock_s)
            router.tell_breaker(name)
        router.told()
        return name

    def _send(self, name: str) -> None:
        exchange, router = self._exchange, self._router
        exchange.attempts += 1
        self._at = name
        job = msgspec.structs.replace(
            exchange.job, job_id=f"{exchange.job.job_id}/{exchange.attempts}"
        )
        sink = Sink(self._first_byte, self._answered, self._failed)
        self._attempt = Attempt(
            router,
            router.sites.get(name),
            router.links[name],
            job,
            sink,
            streamed=exchange.streamed,
        )
        self._attempt.send()

    # --- what becomes of it

    def _first_byte(self) -> None:
        self._begun = True
        self._ttft_s = self._router.clock_s - self._started_s
        assert self._router.plane is not None
        if self._ticket is not None:
            self._router.plane.requests.first_byte(self._ticket, self._ttft_s)
            self._router.told()

    def _answered(self, tokens: int, cached: int) -> None:
        self._attempt_ended(self._at, Outcome.COMPLETED, 200)
        self._exchange.answered = tokens
        self._over("ok", 200, "ok", cached)

    def _failed(self, outcome: Outcome, status: int) -> None:
        if self._begun:
            self._attempt_ended(self._at, outcome, status)
            self._over("upstream_error", status, f"broken:{outcome}")
            return
        self._number += 1
        name = self._next() if self._number <= RETRIES_MAX + 1 else None
        self._attempt_ended(self._at, outcome, status)
        if name is None:
            self._over("upstream_error", status, f"failed:{outcome}")
        else:
            self._send(name)

    def _next(self) -> str | None:
        """Choose another instance, as `router.service` does."""
        router = self._router
        assert self._ticket is not None
        assert router.plane is not None
        self._tried = (*self._tried, self._at)
        if all(each.record.instance_id in self._tried for each in router.plane.fleet):
            return None
        self._finish("retried", 0)
        degraded = "retries" if self._number > RETRIES_MAX else self._request.by_load
        self._request = msgspec.structs.replace(self._request, tried=self._tried, by_load=degraded)
        return self._decide()

    def _attempt_ended(self, name: str, outcome: Outcome, status: int) -> None:
        """Let the instance's breaker learn."""
        router = self._router
        breaker = router.breaker(name)
        before = breaker.state
        breaker.ended(judge(outcome, status), router.clock_s)
        if breaker.state is not before:
            router.tell_breaker(name)

    def _client_gone(self) -> None:
        self._router.do(self._gone)

    def _gone(self) -> None:
        if self._exchange.ends:
            return
        if self._attempt is not None:
            self._attempt.cancel()
        self._over("client_gone", 0, "client_gone")

    def _over(self, outcome: str, status: int, how: str, cached: int | None = None) -> None:
        self._finish(outcome, status, cached)
        self._router.routings.pop(self._exchange.job.job_id, None)
        self._exchange.end(how)

    def _finish(self, outcome: str, status: int, cached: int | None = None) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        router = self._router
        assert router.plane is not None
        ended = router.plane.requests.finish(
            ticket,
            outcome,
            status,
            router.clock_s,
            router.wall_s,
            cached_tokens=cached,
            ttft_s=self._ttft_s,
        )
        assert ended, "a booking ended twice"
        router.told()

    def router_died(self) -> None:
        """The process is gone: both connections break, nothing is told to anybody."""
        if self._attempt is not None:
            self._attempt.cancel()
        self._exchange.end("router_died")
