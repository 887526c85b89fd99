"""What is expected of requests that wait for room, looked at again every `LOOK_S`.

All that wait are predicted anew in one batch; prefix hits are looked up for some, in turns. Who is
overdue, or beyond hope, is given up. A router does this by its clock, the lab in simulated time.

Pure: `now_s` comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final, Protocol

from controlplane.core.decision import RouteRequest
from controlplane.core.latency import Circumstances, Estimator
from controlplane.core.openings import Hits
from controlplane.core.queue import AdmissionQueue
from controlplane.core.queue_lines import Service, Waiting
from controlplane.core.room import FleetLoad, Room

LOOK_S: Final = 0.05
"""How often predictions are made anew."""
PREDICTED_MAX: Final = 1000
"""Requests predicted in one batch; with more than that they take turns."""
MATCHED_MAX: Final = 64
"""Prefix hits looked up in one look, at about 50 µs each; likewise."""
RETRIES: Final = 2
"""Further looks that a request gets whose deadline seems out of reach."""


class Asker(Protocol):
    """The payload of whatever waits.

    Attributes:
        service: what was predicted of it last; None if nothing was.
    """

    service: Service | None

    @property
    def request(self) -> RouteRequest:
        """What the plane knows of it."""


class Outlook:
    """Looks at one queue, whose payloads are `Asker`s.

    Args:
        hits: returns how much of a prompt which instances have.

    Attributes:
        estimator: says how long requests take.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        room: Room,
        estimator: Estimator,
        hits: Callable[[RouteRequest], Hits],
    ) -> None:
        self.estimator = estimator
        self._queue = queue
        self._room = room
        self._hits = hits
        self._turn = self._matched = 0

    def renew(self) -> None:
        """Predict anew."""
        queue = self._queue
        count = len(queue)
        if not count:
            return
        first = self._turn % count
        self._turn = first + PREDICTED_MAX
        chosen = list(islice(queue, first, first + PREDICTED_MAX))
        hits = [each.hits for each in chosen]
        for place in range(min(len(chosen), MATCHED_MAX)):
            place = (self._matched + place) % len(chosen)
            hits[place] = self._hits(chosen[place].payload.request)
        self._matched += MATCHED_MAX
        busy = self._room.load()
        found = self.estimator.predict([self._circumstances(each, busy) for each in chosen])
        queue.refresh(zip(chosen, found, hits, strict=True))
        for waiting, service in zip(chosen, found, strict=True):
            waiting.payload.service = service

    def _circumstances(self, waiting: Waiting, busy: FleetLoad) -> Circumstances:
        asker: Asker = waiting.payload
        request, recent = asker.request, self.estimator.recent
        return Circumstances(
            request.prompt_tokens,
            waiting.cost_tokens,
            busy.batch_size,
            busy.queued_tokens,
            busy.kv_usage,
            recent.ttft_s.mean,
            recent.total_s.mean,
            request.head or 0,
            request.tenant,
        )

    def overdue(self, now_s: float) -> list[Waiting]:
        """Take out who has waited for as long as anybody may."""
        return self._queue.expire(now_s)

    def hopeless(self, now_s: float) -> list[Waiting]:
        """Take out who would be late, after looks enough."""
        # The last of its looks is when it would have to start.
        return self._queue.hopeless(now_s + RETRIES * LOOK_S, RETRIES)
