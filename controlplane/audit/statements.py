"""What detectors and operators said, and whether a decision's filters and policy follow from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from controlplane.audit.choice import Fault
from controlplane.audit.heard import Message
from controlplane.core.candidates import Candidates
from schemas.bus import Blacklist, HotspotCleared, HotspotRaised, PolicyOverride, Routed

SLACK_S = 5.0
"""How long a statement that ended may still show in decisions: it has to reach the routers."""

STATEMENTS_MAX = 10_000


class Statements:
    """Statements on one model, as the streams record them.

    A statement that was made before the record began is not in it; so a filter without one is a
    fault only if the record shows that it had ended.
    """

    def __init__(self) -> None:
        # What was said last, and when: True while it stands.
        self._hotspots: OrderedDict[int, tuple[bool, float]] = OrderedDict()
        self._barred: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self._override: tuple[bool, float] | None = None

    def hear(self, message: Message, at_wall_s: float) -> None:
        """Take a statement; anything else is ignored."""
        if isinstance(message, HotspotRaised | HotspotCleared):
            self._hotspots[message.key] = (isinstance(message, HotspotRaised), at_wall_s)
            _trim(self._hotspots)
        elif isinstance(message, Blacklist):
            self._barred[message.instance_id] = (message.on, at_wall_s)
            _trim(self._barred)
        elif isinstance(message, PolicyOverride):
            self._override = (bool(message.policy), at_wall_s)

    def faults(self, event: Routed, seen: Candidates, at_wall_s: float) -> Iterator[Fault]:
        """Yield what in a decision had been taken back before."""
        if "hotspot" in seen.excluded:
            said = [self._hotspots.get(each.key) for each in event.classes]
            if all(each is not None and _over(each, at_wall_s) for each in said):
                yield "filter", "a hotspot filter, but every verdict on its classes was lifted"
        barred = seen.excluded.get("blacklist")
        if barred is not None:
            for row in barred.nonzero()[0].tolist():
                said_of = self._barred.get(seen.rows.instance_ids[row])
                if said_of is not None and _over(said_of, at_wall_s):
                    name = seen.rows.instance_ids[row]
                    yield "filter", f"{name} was kept out, but its blacklisting had been lifted"
        overridden = event.reason.startswith("override:")
        if overridden and self._override is not None and _over(self._override, at_wall_s):
            yield "policy", f"{event.policy} by an override that had been ended"


def _over(said: tuple[bool, float], at_wall_s: float) -> bool:
    """Whether a statement was taken back, long enough ago that every router knew."""
    return not said[0] and at_wall_s - said[1] > SLACK_S


def _trim(
    statements: OrderedDict[int, tuple[bool, float]] | OrderedDict[str, tuple[bool, float]],
) -> None:
    while len(statements) > STATEMENTS_MAX:
        statements.popitem(last=False)
