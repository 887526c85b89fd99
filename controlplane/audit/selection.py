"""Which events somebody wants to see."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from controlplane.audit.heard import Message
from schemas.bus import (
    Blacklist,
    Drain,
    Finished,
    HotspotCleared,
    HotspotRaised,
    Prefilled,
    Routed,
    RouteEvent,
)

REQUESTS_MAX = 100_000


class Wanted(msgspec.Struct, frozen=True):
    """What to show; empty fields exclude nothing.

    Attributes:
        request: its id, or the end of it.
        key: of a class: BlockHash of a prefix.
    """

    instance: str = ""
    tenant: str = ""
    request: str = ""
    key: int | None = None


class Selection:
    """Picks events. What follows a chosen decision is chosen with it.

    Args:
        requests_max: requests whose following events are remembered; the oldest are forgotten.
    """

    def __init__(self, wanted: Wanted, requests_max: int = REQUESTS_MAX) -> None:
        self._wanted = wanted
        self._requests_max = requests_max
        self._chosen: OrderedDict[str, None] = OrderedDict()

    def has(self, event: RouteEvent) -> bool:
        """Whether a route event is wanted; totals and rows never are."""
        wanted = self._wanted
        if isinstance(event, Routed):
            chosen = (
                wanted.instance in ("", event.instance_id)
                and wanted.tenant in ("", event.tenant)
                and event.request_id.endswith(wanted.request)
                and (wanted.key is None or any(each.key == wanted.key for each in event.classes))
            )
            if chosen:
                self._chosen[event.request_id] = None
                if len(self._chosen) > self._requests_max:
                    self._chosen.popitem(last=False)
            return chosen
        if not isinstance(event, Prefilled | Finished):
            return False
        if wanted.instance not in ("", event.instance_id):
            return False
        return wanted == Wanted(instance=wanted.instance) or event.request_id in self._chosen

    def has_statement(self, message: Message) -> bool:
        """Whether a statement of a detector or an operator is wanted."""
        wanted = self._wanted
        if wanted.tenant or wanted.request:
            return False
        if isinstance(message, HotspotRaised | HotspotCleared):
            named = isinstance(message, HotspotCleared) or wanted.instance in message.instances
            return wanted.key in (None, message.key) and (not wanted.instance or named)
        if wanted.key is not None:
            return False
        if isinstance(message, Drain | Blacklist):
            return wanted.instance in ("", message.instance_id)
        return not wanted.instance
