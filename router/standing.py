"""Verdicts that stand in the bucket: hotspots, the policy override, drains and blacklists.

The bucket is what routers obey: its watch tells every change in order, and whoever joins late finds
what is in force. (What is said on the `hotspot` and `policy` subjects is for the audit log.)
A deleted entry means the opposite of what it said.

Changes are numbered here, as they come: a server that lost its files counts its revisions anew, and
what an operator says then must not look older than what was said before.

    key            entry            deleted
    -----------    -------------    -------------------------
    hotspot-…      HotspotRaised    HotspotCleared
    policy         PolicyOverride   PolicyOverride, no policy
    drain-…        Drain            Drain off
    blacklist-…    Blacklist        Blacklist off
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError

Verdict = (
    messages.HotspotRaised
    | messages.HotspotCleared
    | messages.PolicyOverride
    | messages.Drain
    | messages.Blacklist
)

_decode: dict[str, Callable[[bytes], Verdict]] = {
    "hotspot": messages.decode_hotspot,
    "policy": messages.decode_policy,
    "drain": messages.decode_policy,
    "blacklist": messages.decode_policy,
}


class StandingVerdicts:
    """What stands, by key; bounded by the bucket."""

    def __init__(self) -> None:
        self._standing: dict[str, tuple[str, Verdict, float]] = {}
        self._changes = 0

    def feed(
        self, key: str, value: bytes | None, now_s: float, age_s: float = 0.0
    ) -> tuple[str, Verdict] | None:
        """Take an entry of the bucket; returns (model, what it says now), None if nothing new.

        Args:
            age_s: how long the entry has stood, which is off its time.

        Raises:
            RemoteError: the entry cannot be read.
        """
        model, name = subjects.parse_key(key)
        self._changes += 1
        if value is None:
            before = self._standing.pop(key, None)
            return None if before is None else (model, _lifted(before[1], self._changes))
        decode = _decode.get(name.partition("-")[0])
        if decode is None:
            raise RemoteError(f"not a verdict: {name!r}")
        verdict: Verdict = msgspec.structs.replace(decode(value), revision=self._changes)
        before = self._standing.get(key)
        self._standing[key] = (model, verdict, now_s - age_s)
        left = _left(verdict, age_s)
        if left is None and before is not None:  # it replaced what stands here, and is over
            left = _lifted(before[1], self._changes)
        return None if left is None else (model, left)

    def of(self, model: str, now_s: float) -> list[Verdict]:
        """Return what stands for a model, with what is left of its time."""
        return [
            left
            for of_model, verdict, since_s in self._standing.values()
            if of_model == model and (left := _left(verdict, now_s - since_s)) is not None
        ]


def _left(verdict: Verdict, age_s: float) -> Verdict | None:
    """Return a verdict with what is left of its time; None if nothing is."""
    ttl_s: Any = getattr(verdict, "ttl_s", None)
    if ttl_s is None:
        return verdict
    if age_s >= ttl_s:
        return None
    shorter: Verdict = msgspec.structs.replace(verdict, ttl_s=ttl_s - age_s)
    return shorter


def _lifted(verdict: Verdict, revision: int) -> Verdict:
    """Return what the end of a verdict means."""
    if isinstance(verdict, messages.HotspotRaised):
        return messages.HotspotCleared(verdict.key, verdict.depth_blocks, revision, 0.0)
    if isinstance(verdict, messages.PolicyOverride):
        return messages.PolicyOverride("", revision, 0.0)
    if isinstance(verdict, messages.Drain | messages.Blacklist):
        return type(verdict)(verdict.instance_id, False, revision, 0.0)
    return verdict
