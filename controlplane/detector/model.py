"""One model as a detector process watches it: its requests, and the bucket's statements on it.

What stands in the bucket is mirrored whether this process leads or not. A standby follows it; the
leader writes what `writes` returns, and takes the answers in with `written`. Nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import msgspec

from controlplane.bus.protocol import Entry
from controlplane.core.candidates import RowsBook
from controlplane.core.detector import Change, HotspotDetector
from controlplane.core.detector_stats import RouteStats
from controlplane.core.detector_streams import RouterStreams
from controlplane.core.detector_trouble import PolicySwitch
from controlplane.core.detector_writes import (
    BY,
    POLICY,
    Seen,
    Write,
    is_ours,
    policy_write,
    verdict_writes,
)
from controlplane.detector.config import DetectorServiceConfig
from schemas.bus import (
    Finished,
    FleetRows,
    HotspotCleared,
    HotspotRaised,
    PolicyOverride,
    RouteBatch,
    Routed,
    decode_hotspot,
    decode_policy,
)
from schemas.codec import RemoteError

SAFE_POLICY = "round_robin"
"""What a model is routed by while its alarms persist: it looks at nothing that could mislead it."""


class WatchedModel:
    """The detector of one model, and what the bucket says of the model.

    Attributes:
        detector: judges; its `leading` is ours.
        switch: whether alarms persist.
        stats: what decisions look like.
        streams: which messages of routers are new.
        seen: the bucket's entries that matter here, by name below the model.
        counts: foreign, verdicts in the bucket that this leader had not put there; unreadable.
    """

    def __init__(self, name: str, config: DetectorServiceConfig, now_s: float) -> None:
        self.name = name
        self.detector = HotspotDetector(config.detector, now_s)
        self.switch = PolicySwitch(config.detector.trouble)
        self.stats = RouteStats()
        self.streams = RouterStreams()
        self.seen: dict[str, Seen] = {}
        self.counts: Counter[str] = Counter()
        self._config = config
        self._rows = RowsBook()
        self._cleared: dict[int, HotspotCleared] = {}
        self._policy_rests_until_s = float("-inf")
        self._writing = ""
        self._revisions: dict[str, int] = {}

    @property
    def leading(self) -> bool:
        """Whether this process decides."""
        return self.detector.leading

    # --- requests

    def batch(self, batch: RouteBatch, now_s: float, now_wall_s: float) -> list[Change]:
        """Take a router's message; return what changes by it."""
        if not self.streams.is_new(batch):
            return []
        changes: list[Change] = []
        for event in batch.events:
            if isinstance(event, Routed):
                seen = partial(self._rows.read, batch.router_id, batch.epoch, event)
                self.stats.routed(event, now_s, seen)
                changes += self.detector.routed(event, now_s, now_wall_s, seen)
            elif isinstance(event, FleetRows):
                self._rows.told(batch.router_id, batch.epoch, event)
            elif isinstance(event, Finished):
                self.stats.finished(event)
        return self._noted(changes)

    def tick(self, now_s: float, now_wall_s: float) -> list[Change]:
        """Let time pass; return what changes by it."""
        changes = self.detector.tick(now_s, now_wall_s)
        if self.leading:
            self.switch.update(self.detector.troubles, now_s)
        return self._noted(changes)

    def _noted(self, changes: list[Change]) -> list[Change]:
        """Remember why verdicts ended, until the bucket has been told."""
        for change in changes:
            if isinstance(change, HotspotCleared):
                self._cleared[change.key] = change
        return changes

    # --- the bucket, as it is

    def entry(self, name: str, entry: Entry, now_s: float) -> None:
        """Take an entry of the bucket, in the order of revisions.

        Raises:
            RemoteError: it cannot be read.
        """
        if name == self._writing:
            return
        before = self.seen.get(name)
        if entry.value is None:
            if entry.expired:
                self._revisions.pop(name, None)  # a server that lost its files counts anew
            self._gone(name, before, now_s, expired=entry.expired)
        elif entry.revision > self._revisions.get(name, -1):
            self._revisions[name] = entry.revision
            self._stands(name, before, entry.value, entry.revision, now_s)

    def _stands(
        self, name: str, before: Seen | None, value: bytes, revision: int, now_s: float
    ) -> None:
        if name.startswith("hotspot-"):
            verdict = decode_hotspot(value)
            if not isinstance(verdict, HotspotRaised):
                return
            self.seen[name] = Seen(verdict, revision, now_s)
            if self.leading:
                self.counts["foreign"] += verdict.key not in self.detector.standing
                return
            if before is not None and isinstance(before.message, HotspotRaised):
                self.detector.forget(before.message.key)
            self.detector.adopt(verdict, now_s)
        elif name == POLICY:
            override = decode_policy(value)
            if isinstance(override, PolicyOverride):
                self.seen[name] = Seen(override, revision, now_s)
                self._policy_changed(before, now_s)

    def _gone(self, name: str, before: Seen | None, now_s: float, *, expired: bool) -> None:
        if before is None:
            return
        del self.seen[name]
        if self.leading and expired:
            return  # the server lost it; the next look at the differences writes it again
        if isinstance(before.message, HotspotRaised):
            self.detector.forget(before.message.key)
        else:
            self._policy_changed(before, now_s)

    def _policy_changed(self, before: Seen | None, now_s: float) -> None:
        """Follow an override that somebody else wrote or lifted."""
        ours = is_ours(self.seen.get(POLICY))
        if self.leading and is_ours(before) and not ours:
            self._policy_rests_until_s = now_s + self._config.operator_rest_s
        if not self.leading:
            self.switch.adopt(ours, now_s)

    def lost(self, now_s: float) -> None:
        """Note that messages were missed: the bus was away."""
        self.detector.lost(now_s)

    # --- leading

    def lead(self, entries: dict[str, Entry], now_s: float) -> None:
        """Begin to decide, from what stands in the bucket; our part of it is due for renewal."""
        for name in {*self.seen, *entries}:
            self.reread(name, entries.get(name), now_s)
        for name, seen in self.seen.items():
            if isinstance(seen.message, HotspotRaised) or is_ours(seen):
                self.seen[name] = msgspec.structs.replace(seen, at_s=float("-inf"))
        self.detector.leading = True

    def follow(self) -> None:
        """Cease to decide: what stands is what the bucket says, not what we wanted."""
        self.detector.leading = False
        verdicts = [each.message for each in self.seen.values()]
        known = {verdict.key for verdict in verdicts if isinstance(verdict, HotspotRaised)}
        for key in self.detector.standing.keys() - known:
            self.detector.forget(key)
        self._cleared.clear()

    def reread(self, name: str, entry: Entry | None, now_s: float) -> None:
        """Believe what the bucket says of an entry now, whatever was known of it."""
        self._revisions.pop(name, None)
        try:
            self.entry(name, entry or Entry(name, None, 0), now_s)
        except RemoteError:
            self.counts["unreadable"] += 1

    # --- what a leader writes

    def writes(self, now_s: float, now_wall_s: float) -> list[Write]:
        """Return what the bucket lacks, or has and should not have."""
        if not self.leading:
            return []
        wanted = {key: each.verdict for key, each in self.detector.standing.items()}
        renew_s = self._config.renew_s

        def cleared(verdict: HotspotRaised) -> HotspotCleared:
            why = "raised by a detector that no longer leads"
            known = self._cleared.get(verdict.key)
            return known or HotspotCleared(verdict.key, verdict.depth_blocks, 0, now_wall_s, why)

        found = verdict_writes(wanted, self.seen, cleared, now_s, renew_s)
        override = self._override(now_s, now_wall_s)
        policy = policy_write(override, self.seen.get(POLICY), now_s, renew_s)
        return found if policy is None else [*found, policy]

    def _override(self, now_s: float, now_wall_s: float) -> PolicyOverride | None:
        """Return the policy override that should stand; None if none should, or somebody minds."""
        if not self.switch.on or now_s < self._policy_rests_until_s:
            return None
        reason = (
            f"alarms persist although their classes were spread; {self.switch.share:.0%} of the "
            f"requests are in them"
        )
        ttl_s = self._config.detector.ttl_s
        return PolicyOverride(SAFE_POLICY, 0, now_wall_s, ttl_s, BY, reason)

    def writing(self, name: str) -> None:
        """Note that a write is under way: its own echo is no news. Empty for none."""
        self._writing = name

    def written(self, write: Write, revision: int, now_s: float) -> None:
        """Note that the bucket took a write; a deletion has the revision that it replaced."""
        self._revisions[write.name] = revision
        if write.delete:
            self.seen.pop(write.name, None)
            if isinstance(write.message, HotspotCleared):
                self._cleared.pop(write.message.key, None)
        else:
            assert isinstance(write.message, HotspotRaised | PolicyOverride)
            self.seen[write.name] = Seen(write.message, revision, now_s)

    @property
    def waiting(self) -> int:
        """Verdicts that should stand and do not yet."""
        verdicts = [each.message for each in self.seen.values()]
        known = {verdict.key for verdict in verdicts if isinstance(verdict, HotspotRaised)}
        return len(self.detector.standing.keys() - known)
