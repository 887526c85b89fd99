"""What a detector or an operator has said about a model: hotspots and the policy in force.

Every statement has a revision that only grows, so that a late or repeated message changes nothing,
and most expire by themselves, so that a silent detector cannot blind a fleet.

A hotspot verdict says of a class of requests that its share outgrew the part of the fleet that
caches it. Whom it bars is for the router to see: the instances that hold the class at the moment
of the decision, as long as they are too few for the share that the verdict states (`outgrows`).
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.bus import HotspotCleared, HotspotRaised, PolicyOverride

CLASS_DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Prefix lengths, in blocks, at which requests are grouped into classes."""


def outgrows(requests: int, total: int, holders: int, fleet: int) -> bool:
    """Say whether a class's share of requests exceeds its share of instances: x/x̄ > |M|/|M̄|.

    In integers, so that x = 1 divides by nothing and equality is exact. A class that nobody
    caches, or everybody, cannot be spread by barring its holders, and never outgrows them.

    Args:
        requests: of the class, among `total` requests.
        holders: |M|, instances that cache the class, among `fleet` instances.

    Source: LMetric (arXiv 2603.15202), section 5.2.
    """
    return 0 < holders < fleet and requests * (fleet - holders) > (total - requests) * holders


class Verdicts:
    """Current hotspots and policy override of one model.

    Attributes:
        hotspots_max: verdicts kept at once; further ones are refused and counted.
        refused: verdicts that were refused.
    """

    def __init__(self, hotspots_max: int = 1024) -> None:
        self.hotspots_max = hotspots_max
        self.refused = 0
        self._hotspots: dict[int, tuple[HotspotRaised, float]] = {}
        self._revisions: dict[int, int] = {}
        self._override: PolicyOverride | None = None
        self._override_until_s = float("inf")
        self._override_revision = -1

    def raised(self, verdict: HotspotRaised, now_s: float) -> bool:
        """Take a verdict, or a renewal of one; True if its class had none before."""
        if verdict.revision <= self._revisions.get(verdict.key, -1):
            return False
        known = verdict.key in self._hotspots
        if not known and len(self._hotspots) >= self.hotspots_max:
            self.refused += 1
            return False
        self._note(verdict.key, verdict.revision)
        self._hotspots[verdict.key] = (verdict, now_s + verdict.ttl_s)
        return not known

    def cleared(self, verdict: HotspotCleared) -> bool:
        """Lift a verdict; False if there was none or the message is old."""
        if verdict.revision <= self._revisions.get(verdict.key, -1):
            return False
        self._note(verdict.key, verdict.revision)
        return self._hotspots.pop(verdict.key, None) is not None

    def override(self, message: PolicyOverride, now_s: float) -> bool:
        """Take or end a policy override; False if the message is old."""
        if message.revision <= self._override_revision:
            return False
        self._override_revision = message.revision
        self._override = message if message.policy else None
        ttl_s = float("inf") if message.ttl_s is None else message.ttl_s
        self._override_until_s = now_s + ttl_s
        return True

    def policy(self, now_s: float) -> PolicyOverride | None:
        """Return the override in force."""
        return self._override if now_s < self._override_until_s else None

    def expire(self, now_s: float) -> list[HotspotRaised]:
        """Drop what has run out; returns the hotspots that ended so."""
        ended = [raised for raised, until_s in self._hotspots.values() if now_s >= until_s]
        for raised in ended:
            del self._hotspots[raised.key]
        return ended

    def _note(self, key: int, revision: int) -> None:
        """Remember the last revision of a class; the oldest are forgotten first."""
        self._revisions.pop(key, None)
        self._revisions[key] = revision
        while len(self._revisions) > 2 * self.hotspots_max:
            del self._revisions[next(iter(self._revisions))]

    @property
    def hotspots(self) -> list[HotspotRaised]:
        """The verdicts that stand."""
        return [raised for raised, _ in self._hotspots.values()]

    def against(self, hashes: Sequence[int]) -> list[HotspotRaised]:
        """Return the verdicts on the classes that a prompt belongs to. O(depths)."""
        if not self._hotspots:
            return []
        found = []
        for depth in CLASS_DEPTHS:
            if depth > len(hashes):
                break
            verdict = self._hotspots.get(hashes[depth - 1])
            if verdict is not None and verdict[0].depth_blocks == depth:
                found.append(verdict[0])
        return found
