"""Whether there is room for another request, and how busy the fleet is meanwhile."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from controlplane.core.fleet import Fleet
from controlplane.core.latency import Estimator
from controlplane.core.load import Ledger
from controlplane.core.openings import ANYWHERE, Openings, mask_of
from controlplane.core.scoring import BoolArray, without_those_that_leave_nobody


class Again(NamedTuple):
    """The lane of a request that comes back: its adapter, and the instances that have failed it."""

    lora: str | None
    tried: tuple[str, ...]


class FleetLoad:
    """How busy the least busy instances are: what a request sent next would meet.

    Attributes:
        batch_size: of the instance with the smallest batch.
        queued_tokens: prefill tokens of the one with the fewest.
        kv_usage: mean share of blocks in use, of those that say.
    """

    __slots__ = ("batch_size", "kv_usage", "queued_tokens")

    def __init__(self, batch_size: int, queued_tokens: int, kv_usage: float) -> None:
        self.batch_size = batch_size
        self.queued_tokens = queued_tokens
        self.kv_usage = kv_usage


class Room:
    """The room in one model's fleet under a batch cap; callable with a lane.

    A lane is an adapter's name, or None without one; `Again` for a request that comes back.

    The same filters as a decision's, kind like those, so that a decision made when there is room
    finds it.

    Args:
        estimator: tells how soon places become free, and what a prompt token takes.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        batch_cap: int | None,
        estimator: Estimator | None = None,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._batch_cap = batch_cap
        self._estimator = estimator

    def __call__(self, lane: Hashable) -> Openings | None:
        """Return who has room, or `ANYWHERE` if nobody is to be waited for; None if nobody has."""
        count, cap = len(self._fleet), self._batch_cap
        lora, tried = _parted(lane)
        if cap is None or not count or not self._fleet.leaves_anybody(lora):
            return ANYWHERE
        below: BoolArray = self._ledger.batch[:count] < cap
        free = int(np.count_nonzero(below))
        if free == count:
            return ANYWHERE
        if not free:
            return None
        eligible = self._eligible(lora, tried)
        if eligible is None:
            eligible = np.ones(count, np.bool_)
        able = below & eligible
        if not able.any():
            return None
        slots, estimator = self._fleet.slots, self._estimator
        place_s = token_s = 0.0
        if estimator is not None:
            place_s, token_s = estimator.total_s.mean / cap, estimator.token_s.slope
        return Openings(mask_of(able, slots), mask_of(eligible & ~below, slots), place_s, token_s)

    def _eligible(self, lora: str | None, tried: tuple[str, ...]) -> BoolArray | None:
        fleet = self._fleet
        filters: list[tuple[str, BoolArray]] = []
        if fleet.undrained is not None:
            filters.append(("drained", fleet.undrained))
        capable = fleet.capable(lora)
        if capable is not None:
            filters.append(("model", capable))
        if tried:
            filters.append(("tried", fleet.untried(tried)))
        if fleet.bars_anybody:
            filters += [
                ("health", fleet.healthy),
                ("draining", fleet.ready),
                ("blacklist", fleet.allowed),
            ]
        return without_those_that_leave_nobody(filters)[0]

    def load(self) -> FleetLoad:
        """Return how busy the fleet is."""
        count = len(self._fleet)
        if not count:
            return FleetLoad(0, 0, 0.0)
        batch, queued = self._ledger.batch[:count], self._ledger.queued[:count]
        usages = [i.load.kv_usage for i in self._fleet if i.load is not None]
        return FleetLoad(
            int(batch.min()),
            max(int(queued.min()), 0),
            float(np.mean(usages)) if usages else 0.0,
        )


def _parted(lane: Hashable) -> tuple[str | None, tuple[str, ...]]:
    """Return a lane's adapter, and the instances that are none for it."""
    if isinstance(lane, Again):
        return lane.lora, lane.tried
    return (lane if isinstance(lane, str) else None), ()
