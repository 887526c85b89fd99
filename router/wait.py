"""What waiting adds to a request: its deadline, its place in a room, whom it leads.

Only made where requests can wait at all; `router.routing` tells it what happens to the request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from controlplane.core.coalesce import Leader
from controlplane.core.decision import Decision, RouteRequest
from controlplane.core.queue_lines import Service
from router.big_bodies import BIG_BYTES
from router.budgets import Budget, budget_of
from router.degrade import for_model, shortened
from router.http_exchange import Exchange
from router.refusals import Refusal
from router.tenants import Tenant

if TYPE_CHECKING:
    from router.routing import Routing
    from router.waiting_room import WaitingRoom
    from router.waiting_rooms import WaitingRooms

DEGRADED_HEADER: Final = b"x-multiplane-degraded: %b\r\n"


def hold(routing: Routing, rooms: WaitingRooms, now_s: float) -> bool:
    """Keep a request that is ready to be sent, or answer it; False if it may go on."""
    budget = budget_of(routing.exchange, routing.tenant, routing.router.access)
    if isinstance(budget, Refusal):
        routing.refuse_admitted(budget)
        return True
    room = rooms.of(routing.served)
    routing.wait = Wait(routing, room, budget, routing.wait)
    return room.hold(routing.wait, now_s)


class Wait:
    """One request as its waiting room sees it (`router.waiting_room.Guest`).

    Attributes:
        waited_s: how long it has waited in all, once it does no more.
        degraded: what it became to be in time; empty if it is what it was.
        attempts: how many may have reached an engine (`router.http_proxy`) before it waited last.
    """

    __slots__ = (
        *(
            "_leader",
            "_new_tokens",
            "_room",
            "_routing",
            "_sent_s",
            "attempts",
            "budget",
            "degraded",
            "held_s",
            "pinned",
        ),
        *("service", "waited_s"),
    )

    def __init__(
        self, routing: Routing, room: WaitingRoom, budget: Budget, before: Wait | None
    ) -> None:
        self.budget = budget
        self.held_s: float | None = None
        self.pinned = ""
        self.service: Service | None = None
        self.waited_s: float = 0.0 if before is None else before.waited_s
        self.degraded: str = "" if before is None else before.degraded
        self.attempts = 0
        self._routing = routing
        self._room = room
        self._leader: Leader | None = None
        self._sent_s: float | None = None
        self._new_tokens = 0

    # --- as its room sees it

    @property
    def exchange(self) -> Exchange:
        """With its client."""
        return self._routing.exchange

    @property
    def request(self) -> RouteRequest:
        """What the plane knows of it."""
        return self._routing.request

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
        return self._routing.tenant

    @property
    def started_s(self) -> float:
        """When it had come whole."""
        return self._routing.started_s

    def go(self, now_s: float) -> None:
        """Be decided on and sent."""
        self._waited(now_s)
        routing = self._routing
        if self.pinned:
            routing.request = msgspec.structs.replace(routing.request, pinned=self.pinned)
        routing.send_safely(now_s)

    def refuse(self, refusal: Refusal) -> None:
        """Be answered with an error."""
        self._waited(time.monotonic())
        self._routing.refuse_admitted(refusal)

    def left(self) -> None:
        """End: the client has left while this waited."""
        self._waited(time.monotonic())
        self._routing.left()

    def degrade(self) -> str:
        """Become what the tenant allows; see `Guest.degrade`. Only once."""
        if self.degraded:
            return ""
        tenant, routing = self.tenant, self._routing
        if tenant.degrade != "best_effort" and len(self.exchange.body) > BIG_BYTES:
            return ""  # to rewrite it would hold up everybody else
        if tenant.degrade == "best_effort":
            self.degraded = "best_effort"
        elif tenant.degrade == "shorten":
            assert tenant.degrade_max_tokens is not None
            body = shortened(self.exchange.body, routing.endpoint_name, tenant.degrade_max_tokens)
            if body is not None:
                self.exchange.body = body
                self.degraded = "shorten"
        elif tenant.degrade == "other_model":
            body = for_model(self.exchange.body, tenant.degrade_model)
            if body is not None and routing.can_become(tenant.degrade_model):
                self.exchange.body = body
                self.degraded = "other_model"
        return self.degraded

    def move(self, now_s: float) -> None:
        """Begin anew as a request for the tenant's other model."""
        self._waited(now_s)
        self._routing.become(self.tenant.degrade_model)

    def _waited(self, now_s: float) -> None:
        if self.held_s is not None:
            self.waited_s += now_s - self.held_s
            self.held_s = None

    # --- as it goes on

    @property
    def note(self) -> bytes:
        """Header lines that tell the client what became of its request."""
        return DEGRADED_HEADER % self.degraded.encode() if self.degraded else b""

    def sent(self, decision: Decision, now_s: float) -> None:
        """Note where the request goes."""
        self._sent_s = now_s
        instance_id = decision.instance.record.instance_id
        self._new_tokens = decision.new_tokens
        self._leader = self._room.sent(self, instance_id, self._new_tokens, now_s)

    def computed(self, now_s: float) -> None:
        """Note that the prompt is computed: the answer has begun."""
        leader, self._leader = self._leader, None
        if leader is not None:
            self._room.led(leader, True, now_s)

    def failed(self, now_s: float) -> None:
        """Note that an attempt has failed."""
        leader, self._leader = self._leader, None
        if leader is not None:
            self._room.led(leader, False, now_s)
        self._room.freed()

    def again(self, attempts: int, now_s: float) -> bool:
        """Wait until another instance has room, after an attempt has failed; False if one has."""
        self.attempts = attempts
        return self._room.hold_again(self, now_s)

    def ended(self, good: bool, attempts: int, ttft_s: float | None, now_s: float) -> None:
        """Note that the request is over.

        Args:
            good: whether its answer came through whole.
            attempts: made before the last one; their time is in `ttft_s`.
            ttft_s: from its coming to its first byte.
            now_s: the present.
        """
        sent_s = self._sent_s
        if sent_s is not None and good:
            self.computed(now_s)
            if ttft_s is not None:
                ttft_s = None if attempts else max(ttft_s - (sent_s - self.started_s), 0.0)
            self._room.ended(self.service, ttft_s, now_s - sent_s, self._new_tokens)
        self.failed(now_s)
