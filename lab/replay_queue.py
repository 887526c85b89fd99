"""A router's waiting room in simulated time: the production queue and coalescing.

Requests wait while every instance is at its cap, or for a full one that has their prefix, go on as
bookings end, and are refused when they would be late; those that share a new prefix with one under
way follow it. It is `router.waiting_room` with the same queue, room, estimates, looks and
coalescer, but for what tenants allow instead of a refusal. Estimates are the mean and mean + 3σ of
what was observed, or a predictor's (`replay_predictor`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

import msgspec

from controlplane.core.coalesce import (
    FOLLOW_LOOK_S,
    CoalesceConfig,
    Coalescer,
    Follower,
    Leader,
)
from controlplane.core.decision import Decision, RouteRequest
from controlplane.core.latency import Estimator
from controlplane.core.outlook import LOOK_S, Outlook
from controlplane.core.plane import Plane
from controlplane.core.queue import AdmissionQueue
from controlplane.core.queue_lines import QueueConfig, Service, Waiting, group_of
from controlplane.core.room import Room
from lab.engine_types import Request
from lab.replay_agenda import Agenda
from lab.replay_tenants import TenantShare
from schemas.bus import LatencyModel


class Guest:
    """A request that may wait (`controlplane.core.outlook.Asker`).

    Attributes:
        position: in the trace.
        prompt: the request as an engine takes it.
        tenant: whose it is.
        due_s: when its first token is due.
        service: what was predicted of it last.
        followed: whether it has waited for another's prefix.
    """

    __slots__ = ("_request", "due_s", "followed", "position", "prompt", "service", "tenant")

    def __init__(
        self,
        position: int,
        prompt: Request,
        request: RouteRequest,
        tenant: TenantShare,
        due_s: float,
    ) -> None:
        self.position = position
        self.prompt = prompt
        self.tenant = tenant
        self.due_s = due_s
        self.service: Service | None = None
        self.followed = False
        self._request = request

    @property
    def request(self) -> RouteRequest:
        """What the plane knows of it."""
        return self._request

    @property
    def owner(self) -> str:
        """Whose requests alone it may share work with; empty if everybody's."""
        return self.tenant.name if self.tenant.isolated else ""

    @property
    def group(self) -> Hashable:
        """What is equal for requests that serve each other's prefix."""
        request = self._request
        return group_of(request.hashes, request.prompt_tokens, request.block_size, self.owner)

    def pin(self, instance_id: str) -> None:
        """Go to an instance if there is room."""
        self._request = msgspec.structs.replace(self._request, pinned=instance_id)


class SimRoom:
    """The requests that wait at one router.

    Args:
        queue: how they wait for room; None if nobody does.
        coalesce: how they follow each other; None if nobody does.
        send: takes one that may go.
        shed: takes one that is refused.

    Attributes:
        counts: how waits ended.
    """

    def __init__(
        self,
        queue: QueueConfig | None,
        coalesce: CoalesceConfig | None,
        plane: Plane,
        agenda: Agenda,
        send: Callable[[Guest], None],
        shed: Callable[[Guest], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._queue = None if queue is None else AdmissionQueue(queue)
        self._coalescer = None if coalesce is None else Coalescer(coalesce)
        self._estimator = Estimator()
        self._room = Room(plane.fleet, plane.ledger, plane.config.batch_cap, self._estimator)
        self._plane = plane
        self._outlook: Outlook | None = None
        if self._queue is not None:
            hits = plane.requests.hits
            self._outlook = Outlook(self._queue, self._room, self._estimator, hits)
        self._agenda = agenda
        self._send = send
        self._shed = shed
        self._freed = self._looking = self._following = False

    def __len__(self) -> int:
        """How many wait."""
        following = 0 if self._coalescer is None else self._coalescer.following
        return following + (0 if self._queue is None else len(self._queue))

    def hold(self, guest: Guest) -> bool:
        """Keep a request that has come, or refuse it; False if it may go on."""
        return self._follow(guest) or self._enqueue(guest)

    # --- for room

    def _enqueue(self, guest: Guest) -> bool:
        queue, request, now_s = self._queue, guest.request, self._agenda.now_s
        if queue is None:
            return False
        openings = None if len(queue) else self._room(request.lora)
        if openings is not None and not openings.full:
            return False
        waiting = Waiting(
            guest,
            now_s,
            tenant=guest.tenant.name,
            weight=guest.tenant.weight,
            lane=request.lora,
            ttft_by_s=guest.due_s,
            tokens=request.prompt_tokens,
            hits=self._plane.requests.hits(request),
            group=guest.group,
        )
        if openings is not None and not queue.waits(waiting, openings):
            return False
        displaced = queue.add(waiting, self._estimator.roughly())
        if displaced is not None:
            self._turn_away(displaced, "full")
        if displaced is not waiting:
            self._drain()
            self._look_soon()
        return True

    def learn(self, model: LatencyModel) -> None:
        """Take a latency model that was published."""
        self._estimator.use(model)

    def ended(self, ttft_s: float, total_s: float, new_tokens: int) -> None:
        """Note that a booking has ended, and what the request took from when it was sent."""
        self._estimator.observe(ttft_s, total_s, new_tokens)
        if not self._freed and self._queue is not None and len(self._queue):
            self._freed = True
            self._agenda.at(self._agenda.now_s, self._drain_freed)

    def _drain_freed(self) -> None:
        self._freed = False
        self._drain()

    def _drain(self) -> None:
        """Send on as many as there is room for."""
        while self._queue is not None and len(self._queue):
            waiting = self._queue.take(self._room, self._agenda.now_s)
            if waiting is None:
                return
            self.counts["queue:sent"] += 1
            self._send(waiting.payload)

    def _look_soon(self) -> None:
        if not self._looking and self._queue is not None and len(self._queue):
            self._looking = True
            self._agenda.at(self._agenda.now_s + LOOK_S, self._look)

    def _look(self) -> None:
        """Predict anew, give up who is overdue or would be late, send on who has room."""
        self._looking = False
        assert self._outlook is not None
        now_s = self._agenda.now_s
        self._outlook.renew()
        for waiting in self._outlook.overdue(now_s):
            self._turn_away(waiting, "overdue")
        for waiting in self._outlook.hopeless(now_s):
            self._turn_away(waiting, "late")
        self._drain()
        self._look_soon()

    def _turn_away(self, waiting: Waiting, how: str) -> None:
        self.counts[f"queue:{how}"] += 1
        self._shed(waiting.payload)

    # --- for a prefix

    def sent(self, guest: Guest, decision: Decision) -> Leader | None:
        """Note where a request went; returns it as the one that others may follow."""
        instance = decision.instance
        slot = instance.slots.get(0)
        if self._queue is not None and len(self._queue) and slot is not None:
            self._queue.went(guest.group, 1 << slot)
        if self._coalescer is None:
            return None
        leader, released = self._coalescer.lead(
            instance.record.instance_id,
            guest.request.hashes,
            decision.new_tokens,
            self._agenda.now_s,
            guest.owner,
        )
        self._release(released)
        return leader

    def computed(self, leader: Leader) -> None:
        """Note that a leader's prompt is computed."""
        assert self._coalescer is not None
        self._release(self._coalescer.end(leader))

    def _follow(self, guest: Guest) -> bool:
        coalescer, request = self._coalescer, guest.request
        if coalescer is None or guest.followed:
            return False
        follower = coalescer.follow(
            guest,
            request,
            lambda: self._plane.requests.best_hit(request, promises=False),
            self._agenda.now_s,
            guest.owner,
        )
        if follower is None:
            return False
        self._follow_up_soon()
        return True

    def _follow_up_soon(self) -> None:
        if not self._following and self._coalescer is not None and self._coalescer.following:
            self._following = True
            self._agenda.at(self._agenda.now_s + FOLLOW_LOOK_S, self._follow_up)

    def _follow_up(self) -> None:
        self._following = False
        assert self._coalescer is not None
        self._release(self._coalescer.look(self._holds, self._agenda.now_s))
        self._follow_up_soon()

    def _holds(self, instance_id: str, block: int) -> bool:
        instance = self._plane.fleet.get(instance_id)
        slot = None if instance is None else instance.slots.get(0)
        return slot is not None and self._plane.index.holds(slot, block)

    def _release(self, followers: Iterable[Follower]) -> None:
        """Let followers go on, to their leader's instance: into the queue if there is no room."""
        for follower in followers:
            guest: Guest = follower.payload
            guest.followed = True
            guest.pin(follower.leader.instance_id)
            self.counts["coalesce:followed"] += 1
            if not self._enqueue(guest):
                self._send(guest)
