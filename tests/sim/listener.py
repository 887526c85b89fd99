"""A peer that misses nothing: what it makes of a router's events is what that router booked."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.dispatch import Ticket
from controlplane.core.load import Ledger, Sums
from schemas.bus import RouteBatch


class Listener:
    """Follows one router's route events, without loss, from the beginning."""

    def __init__(self) -> None:
        self._ledger = Ledger("listener")

    def hear(self, batch: RouteBatch) -> None:
        """Take the next batch."""
        self._ledger.peer_message(batch, 0.0)

    def check(self, router_id: str, books: dict[str, Sums], tickets: Iterable[Ticket]) -> None:
        """Assert that it knows the books, apart from progress that is not told yet.

        Args:
            books: what the router's own ledger says.
            tickets: the router's requests.
        """
        expected = dict(books)
        for ticket in tickets:
            name = ticket.booking.instance_id
            requests, queued, context = expected[name]
            expected[name] = (requests, queued + ticket.untold, context)
        peer = self._ledger._peers.get(router_id)
        known = {} if peer is None else peer.bookings
        assert known == expected, f"{router_id} has booked {expected}, but its events say {known}"
