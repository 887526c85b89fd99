"""What still runs on an instance, as its sidecar and the routers tell, until nothing does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from controlplane.bus.protocol import Bus
from schemas import subjects
from schemas.bus import RouterTotals, decode_load, decode_route
from schemas.codec import RemoteError

_SETTLE_S = 1.0  # routers take note of a drain within it
_SILENT_S = 5.0  # who says nothing for this long is not waited for
_LOOK_S = 0.05


class Running:
    """Counts the requests of one instance.

    Args:
        since_s: what was said before this moment does not count, monotonic seconds.
    """

    def __init__(self, instance_id: str, since_s: float) -> None:
        self._instance_id = instance_id
        self._since_s = since_s
        self._engine: tuple[int, float] | None = None
        self._routers: dict[str, tuple[int, float]] = {}

    def hear_load(self, payload: bytes, now_s: float) -> None:
        """Take a load report."""
        try:
            report = decode_load(payload)
        except RemoteError:
            return
        if report.instance_id == self._instance_id and now_s >= self._since_s:
            self._engine = (report.running + report.waiting, now_s)

    def hear_route(self, payload: bytes, now_s: float) -> None:
        """Take what a router did, of which only its totals count."""
        try:
            batch = decode_route(payload)
        except RemoteError:
            return
        for event in batch.events:
            if isinstance(event, RouterTotals) and now_s >= self._since_s:
                booked = event.bookings.get(self._instance_id, (0, 0, 0))
                self._routers[batch.router_id] = (booked[0], now_s)

    def left(self, now_s: float) -> int | None:
        """Return how many requests run; None until that is known."""
        fresh = [count for count, at_s in self._routers.values() if now_s - at_s < _SILENT_S]
        if self._engine is not None and now_s - self._engine[1] < _SILENT_S:
            return max(self._engine[0], sum(fresh))
        if now_s - self._since_s < _SILENT_S:
            return None
        return sum(fresh)


async def wait_until_idle(
    bus: Bus,
    model: str,
    instance_id: str,
    told: Callable[[int], None] = lambda _: None,
    within_s: float | None = None,
) -> bool:
    """Wait until nothing runs on an instance; False if that took longer than `within_s`.

    Args:
        told: called with the number of requests whenever it changes.
    """
    running = Running(instance_id, time.monotonic() + _SETTLE_S)
    subscriptions = [
        await bus.subscribe(
            subjects.load(model, instance_id),
            lambda _, payload: running.hear_load(payload, time.monotonic()),
        ),
        await bus.subscribe(
            subjects.all_of("route", model),
            lambda _, payload: running.hear_route(payload, time.monotonic()),
        ),
    ]
    last: int | None = None
    try:
        async with asyncio.timeout(within_s):
            while last != 0:
                left = running.left(time.monotonic())
                if left is not None and left != last:
                    last = left
                    told(left)
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        return False
    finally:
        for subscription in subscriptions:
            await subscription.stop()
    return True
