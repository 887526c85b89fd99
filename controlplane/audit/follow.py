"""Following decisions: records in, lines or data out, as `audit tail` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from controlplane.audit.heard import Heard, Unreadable
from controlplane.audit.lines import route_data, route_line, statement_data, statement_line
from controlplane.audit.selection import Selection, Wanted
from controlplane.core.candidates import RowsBook
from schemas.bus import Finished, FleetRows, Prefilled, RouteBatch, Routed

STATEMENTS = frozenset({"hotspot", "policy"})
MODELS_MAX = 256


class Follower:
    """Turns what is heard into what is printed.

    Attributes:
        counts: shown, left_out, unreadable.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.counts: Counter[str] = Counter()
        self._selection = Selection(wanted)
        self._rows: dict[str, RowsBook] = {}

    def lines(self, heard: Heard | Unreadable) -> Iterator[str]:
        """Yield lines of text."""
        for item in self._items(heard):
            yield item[0]

    def data(self, heard: Heard | Unreadable) -> Iterator[dict[str, Any]]:
        """Yield plain data."""
        for item in self._items(heard):
            yield item[1]

    def _items(self, heard: Heard | Unreadable) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(heard, Unreadable):
            self.counts["unreadable"] += 1
            return
        message = heard.message
        if isinstance(message, RouteBatch):
            yield from self._route(heard, message)
        elif heard.kind in STATEMENTS and self._selection.has_statement(message):
            self.counts["shown"] += 1
            yield (
                statement_line(message, heard.at_wall_s),
                statement_data(message, heard.model, heard.at_wall_s),
            )

    def _route(self, heard: Heard, batch: RouteBatch) -> Iterator[tuple[str, dict[str, Any]]]:
        if heard.model not in self._rows and len(self._rows) >= MODELS_MAX:
            self._rows.clear()
        rows = self._rows.setdefault(heard.model, RowsBook())
        # Progress has the time of its batch, which leaves later than what it tells of.
        ends = {
            (event.request_id, event.instance_id): event.at_wall_s
            for event in batch.events
            if isinstance(event, Finished)
        }
        for event in batch.events:
            if isinstance(event, FleetRows):
                rows.told(batch.router_id, batch.epoch, event)
            elif not self._selection.has(event):
                self.counts["left_out"] += 1
            else:
                self.counts["shown"] += 1
                at_wall_s = batch.sent_wall_s
                if isinstance(event, Routed | Finished):
                    at_wall_s = event.at_wall_s
                elif isinstance(event, Prefilled):
                    key = (event.request_id, event.instance_id)
                    at_wall_s = min(at_wall_s, ends.get(key, at_wall_s))
                seen = None
                if isinstance(event, Routed):
                    seen = rows.read(batch.router_id, batch.epoch, event)
                yield (
                    route_line(event, at_wall_s, seen),
                    route_data(event, heard.model, batch.router_id, at_wall_s, seen),
                )
