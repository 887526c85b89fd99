"""The live terminal view: a plain subscriber of the bus, as anybody may be one."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from controlplane.bus.protocol import Bus
from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError

WINDOW_S = 10.0
_EVENTS_MAX = 20_000


class InstanceView:
    """What the bus says of one instance.

    Attributes:
        recent: (when, prompt tokens, hit tokens, ttft) of requests that ended in the window.
    """

    def __init__(self) -> None:
        self.batch = 0
        self.queued = 0
        self.routed = 0
        self.finished = 0
        self.blocks = 0
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.recent: deque[tuple[float, int, int, float | None]] = deque(maxlen=_EVENTS_MAX)

    def trim(self, now_s: float) -> None:
        """Forget what left the window."""
        while self.recent and self.recent[0][0] < now_s - WINDOW_S:
            self.recent.popleft()


class BusView:
    """Keeps a picture of the plane from its streams.

    Attributes:
        instances: by instance id.
        decisions: decisions seen.
        last: the newest decisions, as lines of text.
    """

    def __init__(self) -> None:
        self.instances: dict[str, InstanceView] = {}
        self.decisions = 0
        self.last: deque[str] = deque(maxlen=6)

    async def follow(self, bus: Bus) -> None:
        """Subscribe; the picture follows by itself from then on."""
        for kind, handler in (("route", self._route), ("load", self._load), ("kv", self._kv)):
            await bus.subscribe(subjects.all_of(kind), handler)

    def reset(self) -> None:
        """Begin anew, as before another run."""
        self.instances.clear()
        self.decisions = 0
        self.last.clear()

    def routed_by_instance(self) -> dict[str, int]:
        """Return how many requests each instance got."""
        return {name: view.routed for name, view in self.instances.items()}

    def _of(self, instance_id: str) -> InstanceView:
        return self.instances.setdefault(instance_id, InstanceView())

    def _route(self, subject: str, payload: bytes) -> None:
        try:
            batch = messages.decode_route(payload)
        except RemoteError:
            return
        now_s = time.monotonic()
        for event in batch.events:
            if isinstance(event, messages.Routed):
                self._routed(event)
            elif isinstance(event, messages.Prefilled):
                view = self._of(event.instance_id)
                view.queued = max(0, view.queued - event.new_tokens)
            elif isinstance(event, messages.Finished):
                view = self._of(event.instance_id)
                view.batch = max(0, view.batch - 1)
                view.queued = max(0, view.queued - event.released_tokens)
                view.finished += 1
                prompt, hit = event.prompt_tokens or 0, event.cached_tokens
                view.recent.append(
                    (now_s, prompt, event.hit_tokens if hit is None else hit, event.ttft_s)
                )

    def _routed(self, event: messages.Routed) -> None:
        self.decisions += 1
        view = self._of(event.instance_id)
        view.batch += 1
        view.queued += event.new_tokens
        view.routed += 1
        sizes = f"{event.prompt_tokens or 0:,} tokens, {event.hit_tokens:,} cached"
        self.last.append(
            f"{event.request_id[-12:]:>12} → {event.instance_id}  {sizes}, "
            f"score {event.score:,.0f} ({event.policy})"
        )

    def _load(self, subject: str, payload: bytes) -> None:
        try:
            report = messages.decode_load(payload)
        except RemoteError:
            return
        view = self._of(report.instance_id)
        view.running, view.waiting = report.running, report.waiting
        view.kv_usage = report.kv_usage

    def _kv(self, subject: str, payload: bytes) -> None:
        try:
            batch = messages.decode_kv(payload)
        except RemoteError:
            return
        self._of(batch.instance_id).blocks = batch.count

    def render(self, title: str) -> Panel:
        """Return the picture for a terminal."""
        now_s = time.monotonic()
        table = Table("instance", expand=True, box=None, header_style="dim")
        for name in ("batch", "queued tokens", "running", "waiting", "KV use", "cached blocks"):
            table.add_column(name, justify="right")
        for name in ("requests", "hit rate", "TTFT"):
            table.add_column(name, justify="right")
        for name, view in sorted(self.instances.items()):
            view.trim(now_s)
            prompt = sum(entry[1] for entry in view.recent)
            hit = sum(entry[2] for entry in view.recent)
            ttft = [entry[3] for entry in view.recent if entry[3] is not None]
            table.add_row(
                name,
                f"{view.batch} {'▇' * min(view.batch, 20)}",
                f"{view.queued:,}",
                str(view.running),
                str(view.waiting),
                f"{view.kv_usage:.0%}",
                f"{view.blocks:,}",
                f"{view.routed:,}",
                f"{hit / prompt:.0%}" if prompt else "–",
                f"{1e3 * sum(ttft) / len(ttft):,.0f} ms" if ttft else "–",
            )
        lines = Text("\n".join(self.last) or "no decisions yet", style="dim")
        return Panel(Group(table, Text(), lines), title=title, border_style="cyan")
