"""Where requests wait before they are sent: for room, or for a prefix that another computes.

Theory of operation. One room a model. A request that is ready to be sent is shown to its room
first, which either lets it go on at once or keeps it:

    hold ── shares a new prefix with one under way ──> follows (`controlplane.core.coalesce`)
      │ └── every eligible instance is at its cap, or the one that has its prefix is, and a place
      │     there is near ──> queued  (`controlplane.core.queue`)
      └── goes on               │ └── its client leaves, it is overdue, would be late, is displaced
                                │
        freed (a booking ended) ──> the next in order goes on
        hold_again ── its instance has failed, no other has room ──> queued, before all others

While anybody waits the room looks around every `LOOK_S`: it predicts services anew in one batch,
looks up prefix hits for some, gives up who is overdue or beyond hope, and sends on whoever has room
that it was not told of, as when another router's request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from controlplane.core.coalesce import FOLLOW_LOOK_S, CoalesceConfig, Coalescer, Follower, Leader
from controlplane.core.decision import RouteRequest
from controlplane.core.latency import Calibration, Estimator
from controlplane.core.outlook import LOOK_S, Outlook
from controlplane.core.queue import AdmissionQueue
from controlplane.core.queue_lines import QueueConfig, Service, Waiting, group_of
from controlplane.core.room import Again, Room
from router import refusals
from router.budgets import Budget
from router.directory import ServedModel
from router.http_exchange import Exchange
from router.metrics import RequestMetrics
from router.refusals import Refusal
from router.tenants import Tenant

logger = logging.getLogger(__name__)


class Guest(Protocol):
    """A request as its room sees it.

    Attributes:
        held_s: when it began to wait; None if it does not.
        pinned: the instance that it has waited for; empty for none.
        waited_s: how long it has waited before.
        service: what was predicted of it last; None if nothing was.
    """

    held_s: float | None
    pinned: str
    waited_s: float
    service: Service | None

    @property
    def exchange(self) -> Exchange:
        """With its client."""

    @property
    def request(self) -> RouteRequest:
        """What the plane knows of it."""

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""

    @property
    def budget(self) -> Budget:
        """When it is due, from `started_s`."""

    @property
    def started_s(self) -> float:
        """When it had come whole."""

    def go(self, now_s: float) -> None:
        """Be decided on and sent."""

    def refuse(self, refusal: Refusal) -> None:
        """Be answered with an error."""

    def degrade(self) -> str:
        """Become what the tenant allows; the way that was found, empty if there is none.

        After `shorten` and `best_effort` it waits on without a deadline; after `other_model` it is
        to `move`.
        """

    def move(self, now_s: float) -> None:
        """Begin anew elsewhere, no guest of this room any more."""

    def left(self) -> None:
        """End: the client has left while this waited."""


class WaitingRoom:
    """The requests of one model that wait at this router.

    Attributes:
        queue: those that wait for room; None if nobody queues.
        coalescer: those that lead and follow; None if nobody does.
        estimator: says how long requests take.
        ttft, total: how its predictions compare with what came.
        counts: how waits ended.
    """

    def __init__(
        self,
        served: ServedModel,
        queue: QueueConfig | None,
        coalesce: CoalesceConfig | None,
        metrics: RequestMetrics,
    ) -> None:
        self.queue = None if queue is None else AdmissionQueue(queue)
        self.coalescer = None if coalesce is None else Coalescer(coalesce)
        self.estimator = Estimator()
        self.ttft = Calibration()
        self.total = Calibration()
        self.counts: Counter[str] = Counter()
        self._plane = served.plane
        self._model = served.model
        self._metrics = metrics
        plane = served.plane
        self._room = Room(plane.fleet, plane.ledger, plane.config.batch_cap, self.estimator)
        self._outlook: Outlook | None = None
        if self.queue is not None:
            self._outlook = Outlook(self.queue, self._room, self.estimator, plane.requests.hits)
        self._places: dict[Guest, Waiting | Follower] = {}
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None
        self._freed = False
        self._predicted_s = float("-inf")

    # --- coming

    def hold(self, guest: Guest, now_s: float) -> bool:
        """Keep a request that is ready to be sent, or answer it; False if it may go on."""
        return self._follow(guest, now_s) or self._enqueue(guest, now_s)

    def _follow(self, guest: Guest, now_s: float) -> bool:
        coalescer = self.coalescer
        if coalescer is None or guest.held_s is not None:
            return False
        request = guest.request
        follower = coalescer.follow(
            guest,
            request,
            # What the leader promises is what there is to wait for.
            lambda: self._plane.requests.best_hit(request, promises=False),
            now_s,
            _owner(guest),
        )
        if follower is None:
            return False
        self._keep(guest, follower, now_s)
        return True

    def _enqueue(self, guest: Guest, now_s: float) -> bool:
        queue = self.queue
        if queue is None:
            return False
        openings = None if len(queue) else self._room(guest.request.lora)
        if openings is not None and not openings.full:
            return False
        waiting = self._waiting(guest, guest.request.lora, now_s)
        if openings is not None and not queue.waits(waiting, openings):
            return False
        roughly = self.estimator.roughly()
        displaced = queue.add(waiting, roughly)
        if displaced is not None:
            self._turn_away(displaced, "full", now_s)
        if displaced is not waiting:
            guest.service = roughly
            self._keep(guest, waiting, now_s)
            self.drain(now_s)
        return True

    def hold_again(self, guest: Guest, now_s: float) -> bool:
        """Keep a request whose instance has failed it; False if another one has room for it.

        It goes on in a later turn of the loop, at the earliest.
        """
        queue, request = self.queue, guest.request
        if queue is None:
            return False
        lane = Again(request.lora, request.tried)
        if not queue.returned and self._room(lane) is not None:
            return False
        guest.service = self.estimator.roughly()
        waiting = self._waiting(guest, lane, now_s - guest.waited_s)
        queue.take_back(waiting, guest.service, now_s)
        self._keep(guest, waiting, now_s)
        self.freed()
        return True

    def _waiting(self, guest: Guest, lane: Hashable, since_s: float) -> Waiting:
        request, tenant, budget = guest.request, guest.tenant, guest.budget
        return Waiting(
            guest,
            since_s,
            tenant=tenant.name,
            weight=tenant.weight,
            lane=lane,
            ttft_by_s=guest.started_s + budget.ttft_s,
            total_by_s=guest.started_s + budget.total_s,
            tokens=request.prompt_tokens,
            hits=self._plane.requests.hits(request),
            size_bytes=len(guest.exchange.body),
            group=_group(guest),
        )

    def _keep(self, guest: Guest, place: Waiting | Follower, now_s: float) -> None:
        if guest.held_s is None:
            guest.held_s = now_s
        self._places[guest] = place
        guest.exchange.on_client_gone(lambda: self._client_gone(guest))
        self._look_soon()

    # --- going

    def freed(self) -> None:
        """Note that a booking has ended: somebody may have room now."""
        if not self._freed and self.queue is not None and len(self.queue):
            self._freed = True
            self._loop.call_soon(self._drain_soon)

    def _drain_soon(self) -> None:
        self._freed = False
        self.drain(time.monotonic())

    def drain(self, now_s: float) -> None:
        """Send on as many as there is room for."""
        queue = self.queue
        while queue is not None and len(queue):
            waiting = queue.take(self._room, now_s)
            if waiting is None:
                return
            self._send(waiting.payload, "sent", now_s)

    def _send(self, guest: Guest, how: str, now_s: float) -> None:
        del self._places[guest]
        self._left(guest, how, now_s)
        guest.go(now_s)

    def _left(self, guest: Guest, how: str, now_s: float) -> None:
        assert guest.held_s is not None
        self.counts[how] += 1
        self._metrics.waited(how, now_s - guest.held_s)

    def _client_gone(self, guest: Guest) -> None:
        place = self._places.pop(guest, None)
        if place is None:
            return
        if isinstance(place, Waiting):
            assert self.queue is not None
            self.queue.cancel(place)
        else:
            assert self.coalescer is not None
            self.coalescer.leave(place)
        self._left(guest, "client_gone", time.monotonic())
        guest.left()

    def _turn_away(self, waiting: Waiting, how: str, now_s: float) -> None:
        """Refuse one that is not in the queue, or no more."""
        assert self.queue is not None
        guest: Guest = waiting.payload
        if self._places.pop(guest, None) is None:
            self.counts[how] += 1
        else:
            self._left(guest, how, now_s)
        wait_s = self.queue.retry_after_s(now_s)
        if how == "full":
            guest.refuse(refusals.queue_full(len(self.queue), wait_s))
        elif how == "overdue":
            guest.refuse(refusals.queue_timeout(now_s - waiting.arrived_s, wait_s))
        else:
            guest.refuse(refusals.too_late(wait_s))

    # --- leading

    def sent(self, guest: Guest, instance_id: str, new_tokens: int, now_s: float) -> Leader | None:
        """Let a request that was just sent lead those that will share its prefix."""
        slot = self._slot(instance_id)
        if self.queue is not None and len(self.queue) and slot is not None:
            self.queue.went(_group(guest), 1 << slot)
        if self.coalescer is None:
            return None
        leader, released = self.coalescer.lead(
            instance_id, guest.request.hashes, new_tokens, now_s, _owner(guest)
        )
        self._release(released, now_s)
        return leader

    def led(self, leader: Leader, computed: bool, now_s: float) -> None:
        """Note that a leader's prompt is computed, or that it has failed."""
        assert self.coalescer is not None
        self._release(self.coalescer.end(leader), now_s, pin=computed)

    def _release(self, followers: Iterable[Follower], now_s: float, *, pin: bool = True) -> None:
        """Let followers go on: into the queue if there is no room."""
        for follower in followers:
            guest: Guest = follower.payload
            del self._places[guest]
            guest.pinned = follower.leader.instance_id if pin else ""
            self._left(guest, "followed" if pin else "leader_failed", now_s)
            if not pin and now_s < follower.until_s:
                guest.held_s = None  # it may follow the next that leads
                if self._follow(guest, now_s):
                    continue
                guest.held_s = now_s
            if not self._enqueue(guest, now_s):
                guest.go(now_s)

    # --- looking around

    def _look_soon(self) -> None:
        if self._looking is None:
            follows = self.coalescer is not None and self.coalescer.following
            self._looking = self._loop.call_later(FOLLOW_LOOK_S if follows else LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        try:
            self._look_around(time.monotonic())
        finally:  # whatever happens to one of them, the others are looked after
            if self._places:
                self._look_soon()

    def _look_around(self, now_s: float) -> None:
        if self.coalescer is not None and self.coalescer.following:
            self._release(self.coalescer.look(self._holds, now_s), now_s)
        if self.queue is not None and len(self.queue):
            if now_s - self._predicted_s >= LOOK_S:
                self._predicted_s = now_s
                self.refresh(now_s)
            self.drain(now_s)

    def _holds(self, instance_id: str, key: int) -> bool:
        slot = self._slot(instance_id)
        return slot is not None and self._plane.index.holds(slot, key)

    def _slot(self, instance_id: str) -> int | None:
        instance = self._plane.fleet.get(instance_id)
        return None if instance is None else instance.slots.get(0)

    def refresh(self, now_s: float) -> None:
        """Predict anew, and give up who is overdue or beyond hope."""
        outlook = self._outlook
        assert outlook is not None
        outlook.renew()
        for waiting in outlook.overdue(now_s):
            self._turn_away(waiting, "overdue", now_s)
        for waiting in outlook.hopeless(now_s):
            self._degrade(waiting, now_s)

    def _degrade(self, waiting: Waiting, now_s: float) -> None:
        """Let one that would be late become what its tenant allows, or refuse it."""
        assert self.queue is not None
        guest: Guest = waiting.payload
        try:
            how = guest.degrade()
        except Exception:  # nobody else shall wait for ever because of it
            logger.exception("a request of %s that waits could not be degraded", self._model)
            how = ""
        if not how:
            self._turn_away(waiting, "late", now_s)
            return
        self._metrics.degraded(how)
        self.counts[f"degraded:{how}"] += 1
        if how == "other_model":
            del self._places[guest]
            self._left(guest, "degraded", now_s)
            guest.move(now_s)
        else:
            waiting.give_up_deadline(self.queue.config.patience_s)
            self.queue.put_back(waiting)

    # --- learning

    def ended(
        self, service: Service | None, ttft_s: float | None, total_s: float, new_tokens: int
    ) -> None:
        """Note what a request took that ended well, from when it was sent."""
        if service is not None and service.total_p99_s > 0:
            self.total.add(service.total_s, service.total_p99_s, total_s)
            if ttft_s is not None:
                self.ttft.add(service.ttft_s, service.ttft_p99_s, ttft_s)
        self.estimator.observe(ttft_s, total_s, new_tokens)

    def stop(self) -> None:
        """Refuse whoever still waits, and look around no more."""
        if self._looking is not None:
            self._looking.cancel()
        for guest in list(self._places):
            self._places.pop(guest)
            guest.refuse(refusals.stopping())

    def state(self) -> dict[str, Any]:
        """Return what there is to see, for people."""
        found: dict[str, Any] = {
            "waiting": len(self._places),
            "counts": dict(self.counts),
            "predictions": self.estimator.source,
        }
        if self.estimator.learnt is not None:
            found["model_version"] = self.estimator.learnt.model.version
        if self.queue is not None:
            now_s = time.monotonic()
            found |= {
                "order": self.queue.config.order,
                "queued": len(self.queue),
                "held": self.queue.held,
                "returned": self.queue.returned,
                "by_tenant": self.queue.counts(),
                "oldest_s": max((now_s - each.arrived_s for each in self.queue), default=0.0),
                "retry_after_s": self.queue.retry_after_s(now_s),
            }
        if self.coalescer is not None:
            found |= {"leading": len(self.coalescer), "following": self.coalescer.following}
        return found


def _owner(guest: Guest) -> str:
    """Return whose requests alone this one may share work with; "" if everybody's."""
    return guest.tenant.name if guest.tenant.isolated else ""


def _group(guest: Guest) -> Hashable:
    """Return what is equal for requests that serve each other's prefix; None for none."""
    request = guest.request
    return group_of(request.hashes, request.prompt_tokens, request.block_size, _owner(guest))
