"""A router's queue in simulated time: the production one, and who has what budget.

Requests wait while every instance is at its cap, go on as bookings end, and are refused when they
would be late, as in `router.waiting_room`: the same queue, room, estimates and looks, but for
tenants and what they allow instead of a refusal. Estimates are the mean and mean + 3σ of what was
observed, as where no predictor runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from controlplane.core.decision import RouteRequest
from controlplane.core.fleet import Instance
from controlplane.core.latency import Estimator
from controlplane.core.outlook import LOOK_S, Outlook
from controlplane.core.plane import Plane
from controlplane.core.queue import AdmissionQueue
from controlplane.core.queue_lines import QueueConfig, Service, Waiting, group_of
from controlplane.core.room import Room
from lab.engine_types import Request
from lab.replay_agenda import Agenda
from lab.replay_result import Floats


def budgets_of(count: int, choices: tuple[float, ...], seed: int) -> Floats:
    """Return (count,) seconds to each request's first token, by the seed; infinite for none."""
    given = [budget_s or float("inf") for budget_s in choices or (0.0,)]
    if len(given) == 1:
        return np.full(count, given[0])
    return np.array(random.Random(f"budgets {seed}").choices(given, k=count))


class Guest:
    """A request that may wait (`controlplane.core.outlook.Asker`).

    Attributes:
        position: in the trace.
        prompt: the request as an engine takes it.
    """

    __slots__ = ("_request", "position", "prompt", "service")

    def __init__(self, position: int, prompt: Request, request: RouteRequest) -> None:
        self.position = position
        self.prompt = prompt
        self.service: Service | None = None
        self._request = request

    @property
    def request(self) -> RouteRequest:
        """What the plane knows of it."""
        return self._request


class SimQueue:
    """The requests that wait at one router.

    Args:
        send: takes one that has room now.
        shed: takes one that is refused.

    Attributes:
        queue: the production queue.
        counts: how waits ended.
    """

    def __init__(
        self,
        config: QueueConfig,
        plane: Plane,
        agenda: Agenda,
        send: Callable[[Guest], Instance],
        shed: Callable[[Guest], None],
    ) -> None:
        self.queue = AdmissionQueue(config)
        self.counts: Counter[str] = Counter()
        self._estimator = Estimator()
        self._room = Room(plane.fleet, plane.ledger, plane.config.batch_cap, self._estimator)
        self._hits = plane.requests.hits
        self._outlook = Outlook(self.queue, self._room, self._estimator, self._hits)
        self._agenda = agenda
        self._send = send
        self._shed = shed
        self._freed = self._looking = False

    def hold(self, guest: Guest, budget_s: float) -> bool:
        """Keep a request that has come, or refuse it; False if it may go on."""
        queue, request, now_s = self.queue, guest.request, self._agenda.now_s
        openings = None if len(queue) else self._room(request.lora)
        if openings is not None and not openings.full:
            return False
        waiting = Waiting(
            guest,
            now_s,
            lane=request.lora,
            ttft_by_s=now_s + budget_s,
            tokens=request.prompt_tokens,
            hits=self._hits(request),
            group=group_of(request.hashes, request.prompt_tokens, request.block_size),
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

    def ended(self, ttft_s: float, total_s: float, new_tokens: int) -> None:
        """Note that a booking has ended, and what the request took from when it was sent."""
        self._estimator.observe(ttft_s, total_s, new_tokens)
        if not self._freed and len(self.queue):
            self._freed = True
            self._agenda.at(self._agenda.now_s, self._drain_freed)

    def _drain_freed(self) -> None:
        self._freed = False
        self._drain()

    def _drain(self) -> None:
        """Send on as many as there is room for."""
        while len(self.queue):
            waiting = self.queue.take(self._room, self._agenda.now_s)
            if waiting is None:
                return
            self.counts["queue:sent"] += 1
            instance = self._send(waiting.payload)
            slot = instance.slots.get(0)
            if slot is not None:
                self.queue.went(waiting.group, 1 << slot)

    def _look_soon(self) -> None:
        if not self._looking and len(self.queue):
            self._looking = True
            self._agenda.at(self._agenda.now_s + LOOK_S, self._look)

    def _look(self) -> None:
        """Predict anew, give up who is overdue or would be late, send on who has room."""
        self._looking = False
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
