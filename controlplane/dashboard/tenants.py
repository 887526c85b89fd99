"""What each tenant asks for and gets, recently; the busiest are shown."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from controlplane.dashboard.windows import Windows, percentile
from schemas.bus import Finished, Routed

TENANTS_MAX = 64
WINDOW_S = 60.0


class Tenants:
    """Rates and latencies by tenant; the one that was silent for longest is forgotten first.

    Attributes:
        queued: whether any request waited in a queue.
    """

    def __init__(self) -> None:
        self.queued = False
        self._windows: OrderedDict[str, Windows] = OrderedDict()
        self._queue: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def routed(self, event: Routed, now_s: float) -> None:
        """Take a decision."""
        if event.queue_s:
            self.queued = True
        if not event.tenant and not self.queued:
            return
        self._of(event.tenant).now(now_s).decisions += 1
        longest = max(self._queue.get(event.tenant, (0.0, 0.0))[0] * 0.98, event.queue_s)
        self._queue[event.tenant] = (longest, now_s)
        while len(self._queue) > TENANTS_MAX:
            self._queue.popitem(last=False)

    def finished(self, event: Finished, now_s: float, *, ok: bool) -> None:
        """Take the end of a request."""
        if event.tenant in self._windows:
            self._of(event.tenant).ended(
                now_s,
                ok=ok,
                prompt_tokens=event.prompt_tokens or 0,
                cached_tokens=event.cached_tokens,
                output_tokens=event.output_tokens,
                ttft_s=event.ttft_s,
                duration_s=event.before_s + event.duration_s,
                streamed=event.streamed,
            )

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return the tenants, the busiest first."""
        found = []
        for name, windows in self._windows.items():
            slots = windows.last(now_s, WINDOW_S)
            prompt = sum(slot.prompt_tokens for slot in slots)
            ttft = [value for slot in slots for value in slot.ttft_s]
            found.append(
                {
                    "tenant": name or "(none)",
                    "per_s": sum(slot.decisions for slot in slots) / WINDOW_S,
                    "hit": sum(slot.cached_tokens for slot in slots) / prompt if prompt else None,
                    "ttft_p50_s": percentile(ttft, 0.5),
                    "ttft_p95_s": percentile(ttft, 0.95),
                    "queue_s": self._queue.get(name, (0.0, 0.0))[0],
                    "failed": sum(slot.failed for slot in slots),
                }
            )
        return sorted(found, key=lambda row: -float(row["per_s"]))

    def _of(self, tenant: str) -> Windows:
        windows = self._windows.get(tenant)
        if windows is None:
            windows = self._windows[tenant] = Windows(slots_max=40)
            while len(self._windows) > TENANTS_MAX:
                self._windows.popitem(last=False)
        self._windows.move_to_end(tenant)
        return windows
