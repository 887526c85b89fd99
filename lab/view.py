"""A picture of the plane for people, kept by a plain subscriber of the bus, as anybody may be one.

An instance is in the picture from its first sign of life on. What it is in, by what says so last:

    dead       its process has ended: told by whoever started it
    gone       its sidecar took its record back, or the record ran out
    silent     there is a record, but no block stream for some heartbeats
    draining   an operator drained it, or it is about to stop
    blacklisted   an operator's blacklist is in force
    starting, ready   as its record says
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

import msgspec

from controlplane.audit.lines import ID_LENGTH
from controlplane.bus.protocol import Bus, Entry, Watch
from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError

WINDOW_S = 10.0
LAST_MAX = 12
SILENT_S = 5.0
_EVENTS_MAX = 20_000
_INSTANCES_MAX = 1024
_ROUTERS_MAX = 256
_SOURCES_MAX = 4096


class InstanceView:
    """What the bus says of one instance.

    Attributes:
        state: as its record says; empty without one.
        recent: (when, prompt tokens, hit tokens, ttft) of requests that ended in the window.
        heard_s: when its block stream was heard last.
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
        self.state = ""
        self.heard_s = float("-inf")
        self.recent: deque[tuple[float, int, int, float | None]] = deque(maxlen=_EVENTS_MAX)

    def trim(self, now_s: float) -> None:
        """Forget what left the window."""
        while self.recent and self.recent[0][0] < now_s - WINDOW_S:
            self.recent.popleft()


class Flow(msgspec.Struct, frozen=True):
    """What happened in the window: of one instance, or of all.

    Attributes:
        hit_rate: of prompt tokens; None without any.
        ttft_s: mean; None without any.
    """

    per_s: float
    hit_rate: float | None
    ttft_s: float | None


class _Bookings:
    """What one router has booked for one model: (batch size, queued tokens) by instance."""

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.of: dict[str, tuple[int, int]] = {}


class BusView:
    """Keeps a picture of the plane from its streams and buckets.

    Attributes:
        instances: by instance id.
        routers: when each was heard last.
        connected: whether the bus is there.
        standing: what operators and detectors say now, by the key of the entry.
        decisions: decisions seen.
        last: the newest decisions, as lines of text.
    """

    def __init__(self) -> None:
        self.instances: dict[str, InstanceView] = {}
        self.routers: dict[str, float] = {}
        self.connected = True
        self.standing: dict[str, messages.HotspotRaised | Statement] = {}
        self.decisions = 0
        self.last: deque[str] = deque(maxlen=LAST_MAX)
        self._booked: dict[str, _Bookings] = {}  # by the subject that a router tells them on
        self._lost_s = 0.0
        self._watches: list[Watch] = []

    async def follow(self, bus: Bus) -> None:
        """Subscribe; the picture follows by itself from then on."""
        bus.on_state(self._bus_state)
        for kind, handler in (("route", self._route), ("load", self._load), ("kv", self._kv)):
            await bus.subscribe(subjects.all_of(kind), handler)
        for bucket, take in (
            (subjects.INSTANCES, self._record),
            (subjects.VERDICTS, self._verdict),
        ):
            self._watches.append(await (await bus.bucket(bucket)).watch(take))

    def routed_by_instance(self) -> dict[str, int]:
        """Return how many requests each instance got."""
        return {name: view.routed for name, view in self.instances.items()}

    def state_of(self, name: str, dead: Collection[str], now_s: float) -> str:
        """Return the word for what an instance is in; see the module's table."""
        view = self.instances[name]
        if name in dead:
            return "dead"
        if not view.state or view.state == "stopped":
            return "gone"
        if self.connected and now_s - view.heard_s > SILENT_S:
            return "silent"
        for statement in self.standing.values():
            if isinstance(statement, messages.Drain) and statement.instance_id == name:
                return "draining"
            if isinstance(statement, messages.Blacklist) and statement.instance_id == name:
                return "blacklisted"
        return view.state

    def routers_heard(self, now_s: float) -> int:
        """Return how many routers were heard of late."""
        return sum(now_s - heard_s <= SILENT_S for heard_s in self.routers.values())

    def bus_lost_s(self, now_s: float) -> float | None:
        """Return for how long the bus has been away; None while it is there."""
        return None if self.connected else now_s - self._lost_s

    def flow(self, now_s: float, name: str | None = None) -> Flow:
        """Return what happened in the window on one instance, or on all."""
        views = self.instances.values() if name is None else [self.instances[name]]
        count = prompt = hit = 0
        ttft: list[float] = []
        for view in views:
            view.trim(now_s)
            count += len(view.recent)
            prompt += sum(entry[1] for entry in view.recent)
            hit += sum(entry[2] for entry in view.recent)
            ttft += [entry[3] for entry in view.recent if entry[3] is not None]
        return Flow(
            count / WINDOW_S,
            hit / prompt if prompt else None,
            sum(ttft) / len(ttft) if ttft else None,
        )

    def expire(self, wall_s: float, now_s: float) -> None:
        """Drop statements whose time is over, and bookings of routers that are silent."""
        for source, known in list(self._booked.items()):
            if self.connected and now_s - known.heard_s > SILENT_S:
                self._forget(source)
                del self._booked[source]
        for key, statement in list(self.standing.items()):
            ttl_s = getattr(statement, "ttl_s", None)
            said_s = getattr(statement, "set_wall_s", None) or getattr(
                statement, "raised_wall_s", 0.0
            )
            if ttl_s is not None and wall_s > said_s + ttl_s:
                del self.standing[key]

    def _of(self, instance_id: str) -> InstanceView:
        view = self.instances.get(instance_id)
        if view is None:
            view = InstanceView()
            if len(self.instances) < _INSTANCES_MAX:
                self.instances[instance_id] = view
        return view

    def _bus_state(self, connected: bool) -> None:
        self.connected = connected
        self._lost_s = time.monotonic()

    def _record(self, entry: Entry) -> None:
        try:
            _, name = subjects.parse_key(entry.key)
            state = "" if entry.value is None else messages.decode_instance(entry.value).state
        except RemoteError:
            return
        view = self._of(name)
        if state and not view.state:
            view.heard_s = time.monotonic()
        view.state = state

    def _verdict(self, entry: Entry) -> None:
        try:
            _, name = subjects.parse_key(entry.key)
            decode = (
                messages.decode_hotspot if name.startswith("hotspot") else messages.decode_policy
            )
            said = None if entry.value is None else decode(entry.value)
        except RemoteError:
            return
        if said is None or isinstance(said, messages.HotspotCleared):
            self.standing.pop(entry.key, None)
        else:
            self.standing[entry.key] = said

    def _route(self, subject: str, payload: bytes) -> None:
        try:
            batch = messages.decode_route(payload)
        except RemoteError:
            return
        now_s = time.monotonic()
        if batch.router_id in self.routers or len(self.routers) < _ROUTERS_MAX:
            self.routers[batch.router_id] = now_s
        if subject in self._booked or len(self._booked) < _SOURCES_MAX:
            self._booked.setdefault(subject, _Bookings()).heard_s = now_s
        for event in batch.events:
            if isinstance(event, messages.Routed):
                self._routed(subject, event)
            elif isinstance(event, messages.Prefilled):
                self._book(subject, event.instance_id, 0, -event.new_tokens)
            elif isinstance(event, messages.Finished):
                self._finished(subject, event, now_s)
            elif isinstance(event, messages.RouterTotals):
                self._forget(subject)
                for name, (batch_size, queued, _) in event.bookings.items():
                    self._book(subject, name, batch_size, queued)

    def _book(self, source: str, instance_id: str, batch: int, queued: int) -> None:
        """Count what a router has booked for a model, or given back."""
        known = self._booked.get(source)
        if known is None or (instance_id not in known.of and len(known.of) >= _INSTANCES_MAX):
            return
        view, before = self._of(instance_id), known.of.get(instance_id, (0, 0))
        after = max(0, before[0] + batch), max(0, before[1] + queued)
        view.batch += after[0] - before[0]
        view.queued += after[1] - before[1]
        if any(after):
            known.of[instance_id] = after
        else:
            known.of.pop(instance_id, None)

    def _forget(self, source: str) -> None:
        """Give back all that a router has booked for a model."""
        for name, (batch, queued) in list(self._booked[source].of.items()):
            self._book(source, name, -batch, -queued)

    def _routed(self, source: str, event: messages.Routed) -> None:
        self.decisions += 1
        view = self._of(event.instance_id)
        self._book(source, event.instance_id, 1, event.new_tokens)
        view.routed += 1
        sizes = f"{event.prompt_tokens or 0:,} tokens, {event.hit_tokens:,} cached"
        turns = event.policy == "round_robin"  # which scores nobody
        why = event.policy if turns else f"score {event.score:,.0f} ({event.policy})"
        self.last.append(f"{event.request_id[-ID_LENGTH:]} → {event.instance_id}  {sizes}, {why}")

    def _finished(self, source: str, event: messages.Finished, now_s: float) -> None:
        view = self._of(event.instance_id)
        self._book(source, event.instance_id, -1, -event.released_tokens)
        view.finished += 1
        prompt, hit = event.prompt_tokens or 0, event.cached_tokens
        view.recent.append((now_s, prompt, event.hit_tokens if hit is None else hit, event.ttft_s))

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
        view = self._of(batch.instance_id)
        view.blocks = batch.count
        view.heard_s = time.monotonic()


Statement = messages.Drain | messages.Blacklist | messages.PolicyOverride
