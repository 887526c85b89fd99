"""What this router has to tell the others: route events, in order, in numbered batches."""

from __future__ import annotations

from collections import deque

from schemas.bus import CandidateColumns, FleetRows, RouteBatch, Routed, RouteEvent, RouterTotals

BATCH_BYTES_MAX = 500_000
"""Estimated size at which a batch ends: half of what the bus takes, since it is an estimate. A
decision over a thousand instances alone is some 10 kB where all its candidates are recorded."""

_FIXED_BYTES = 768


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
        """Return the next batch; None if there is nothing to say.

        Args:
            batch_max: most events in it; there are fewer if they are large (`BATCH_BYTES_MAX`).
        """
        if not self._events:
            return None
        events = [self._events.popleft()]
        nbytes = _bytes_of(events[0])
        while self._events and len(events) < batch_max:
            nbytes += _bytes_of(self._events[0])
            if nbytes > BATCH_BYTES_MAX:
                break
            events.append(self._events.popleft())
        batch = RouteBatch(self._router_id, self._epoch, self._seq, now_wall_s, events)
        self._seq += 1
        return batch


def _bytes_of(event: RouteEvent) -> int:
    """Return about how long an event is on the wire, rather more than less."""
    if isinstance(event, Routed):
        return _FIXED_BYTES + len(event.request_id) + _bytes_of_columns(event.candidates)
    if isinstance(event, RouterTotals):
        return 64 + sum(len(name) + 32 for name in event.bookings)
    if isinstance(event, FleetRows):
        names = sum(len(name) + 3 for name in event.instance_ids)
        return 512 + names + len(event.epochs) + len(event.applied)
    return _FIXED_BYTES + len(event.request_id)


def _bytes_of_columns(columns: CandidateColumns | None) -> int:
    if columns is None:
        return 0
    sets = sum(map(len, columns.excluded.values())) if columns.excluded else 0
    return (
        256
        + 32 * len(columns.levels)
        + len(columns.hit_tokens)
        + len(columns.promised_tokens)
        + len(columns.queued_tokens)
        + len(columns.batch_size)
        + len(columns.context_tokens)
        + len(columns.applied)
        + len(columns.inexact)
        + sets
    )
