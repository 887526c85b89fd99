"""A router in simulated time: the production plane, with a view of its own that is late."""

from __future__ import annotations

import random
from collections.abc import Callable

from controlplane.core.decision import Decision, RouteRequest
from controlplane.core.dispatch import Ticket
from controlplane.core.effects import FetchSnapshot
from controlplane.core.events import Event, Tick
from controlplane.core.plane import Plane, PlaneConfig
from lab.baselines import BASELINES, Rival, Surroundings
from lab.replay_agenda import Agenda
from lab.replay_config import PolicySpec, ReplayConfig, plane_parameters
from lab.replay_feed import EPOCH
from lab.replay_instance import MODEL
from schemas.bus import InstanceRecord, RouteBatch, SnapshotChunk

FLUSH_S = 0.005
"""How long route events wait for company, as in the router's own settings."""


class SimRouter:
    """One router.

    Attributes:
        name: its id.
        lag_s: how late messages reach it.
        plane: the production plane.
        rival: the policy in its place, where that is one of the lab's.
        tell: takes what this router tells the others; None where nobody listens.
    """

    def __init__(
        self,
        position: int,
        spec: PolicySpec,
        config: ReplayConfig,
        agenda: Agenda,
        records: list[InstanceRecord],
        lag_s: float,
        tell: Callable[[RouteBatch], None] | None,
    ) -> None:
        self.name = f"router-{position}"
        self.lag_s = lag_s
        self.tell = tell
        self.rival: Rival | None = None
        self._agenda = agenda
        self._flush_due = False
        own = spec.name not in BASELINES
        rng = random.Random(f"{config.seed} {position}")
        plane_config = PlaneConfig(
            policy=spec.name if own else "multiplicative",
            policy_parameters=plane_parameters(spec) if own else {},
            batch_cap=config.batch_cap or None,
            promise_s=config.promise_s,
            audit_candidates=0.0,
            route_events_max=1 if tell is None else PlaneConfig().route_events_max,
        )
        self.plane = Plane(MODEL, self.name, EPOCH, plane_config, rng)
        if not own:
            around = Surroundings(self.plane.fleet, config.engine, rng)
            self.rival = BASELINES[spec.name](around, **spec.parameters)
            # The same request path, filters and ties; only who ranks is another.
            self.plane.requests._policy = self.rival
        self._begin(records)

    def _begin(self, records: list[InstanceRecord]) -> None:
        """Get to know the instances, all empty."""
        for record in records:
            for effect in self.plane.handle(record, 0.0):
                if isinstance(effect, FetchSnapshot):
                    empty = SnapshotChunk(record.instance_id, EPOCH, 0, 0, 1, b"")
                    self.plane.handle(empty, 0.0)

    # --- what it hears

    def hear(self, event: Event) -> None:
        """Take a message that has reached it."""
        self.plane.handle(event, self._agenda.now_s)
        self._flush_soon()

    def tick(self) -> None:
        """Let time pass."""
        self.plane.handle(Tick(), self._agenda.now_s)
        self._flush_soon()

    # --- requests

    def route(self, request: RouteRequest, waited_s: float = 0.0) -> Ticket:
        """Decide on a request and book it, after so long in the queue."""
        now_s = self._agenda.now_s
        if self.rival is not None:
            self.rival.arriving(request, now_s)
        decision: Decision | None = self.plane.requests.decide(request, now_s)
        assert decision is not None, "there are instances"
        ticket = self.plane.requests.book(decision, now_s, now_s, queue_s=waited_s)
        if self.rival is not None:
            self.rival.sent(decision.choice.index, request, decision.hit)
        self._flush_soon()
        return ticket

    def first_byte(self, ticket: Ticket, ttft_s: float) -> None:
        """Note that a request's answer has begun."""
        self.plane.requests.first_byte(ticket, ttft_s)
        if self.rival is not None:
            self.rival.began(ticket.decision.choice.index, ticket.decision.request.request_id)
        self._flush_soon()

    def finish(
        self,
        ticket: Ticket,
        output_tokens: int,
        cached_tokens: int,
        ttft_s: float,
        waited_s: float = 0.0,
    ) -> None:
        """Note that a request has ended, `waited_s` of whose TTFT were in the queue."""
        now_s = self._agenda.now_s
        self.plane.requests.finish(
            ticket,
            "ok",
            200,
            now_s,
            now_s,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            ttft_s=ttft_s,
        )
        if self.rival is not None:
            took_s = now_s - ticket.booking.booked_s - (ttft_s - waited_s)
            tpot_s = took_s / max(output_tokens - 1, 1)
            decision = ticket.decision
            self.rival.ended(
                decision.choice.index, decision.request.request_id, output_tokens, tpot_s
            )
        self._flush_soon()

    # --- what it tells

    def _flush_soon(self) -> None:
        if self.tell is not None and not self._flush_due and len(self.plane.outbox):
            self._flush_due = True
            self._agenda.at(self._agenda.now_s + FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        assert self.tell is not None
        while (batch := self.plane.outbox.take(self._agenda.now_s)) is not None:
            self.tell(batch)
