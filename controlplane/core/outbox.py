"""What this router has to tell the others: route events, in order, in numbered batches."""

from __future__ import annotations

from collections import deque

from schemas.bus import RouteBatch, RouteEvent


class Outbox:
    """Route events waiting for the next batch.

    A full outbox drops its oldest events: the totals that follow heal what the others missed.

    Attributes:
        dropped: events that fell out.
    """

    def __init__(self, router_id: str, epoch: int, events_max: int) -> None:
        self.dropped = 0
        self._router_id = router_id
        self._epoch = epoch
        self._seq = 0
        self._events_max = events_max
        self._events: deque[RouteEvent] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: RouteEvent) -> None:
        """Append an event. O(1)."""
        if len(self._events) >= self._events_max:
            self._events.popleft()
            self.dropped += 1
        self._events.append(event)

    def take(self, now_wall_s: float, batch_max: int = 256) -> RouteBatch | None:
        """Return the next batch, at most `batch_max` events; None if there is nothing to say."""
        if not self._events:
            return None
        events = [self._events.popleft() for _ in range(min(batch_max, len(self._events)))]
        batch = RouteBatch(self._router_id, self._epoch, self._seq, now_wall_s, events)
        self._seq += 1
        return batch
