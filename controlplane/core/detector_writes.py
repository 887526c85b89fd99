"""What a leading detector has to write, so that the bucket says what it wants: compare, and plan.

The detector's verdicts are what should stand, the bucket is what does. Comparing both, again and
again, needs no memory of what was tried: a write that failed, a verdict of a predecessor, or one
that a deposed leader wrote too late, shows as a difference and is mended.

Every change compares revisions: it names the revision that it replaces, and the bucket refuses it
if somebody else wrote meanwhile. Every verdict is renewed at once by whoever takes over, so what a
predecessor still had under way finds another revision and comes to nothing.

The key of an entry is one of `SLOTS` that the class falls into, not the class itself: a bucket
remembers every key that it ever had, and would fill up over the years. Two hot classes in one slot
are rare (five at a time: 1%); the second waits for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from schemas.bus import HotspotCleared, HotspotRaised, PolicyOverride

SLOTS = 1024
POLICY = "policy"
BY = "detector"
"""How a detector signs its policy override; any other signature is an operator's."""

Message = HotspotRaised | HotspotCleared | PolicyOverride


class Seen(msgspec.Struct, frozen=True):
    """An entry of the bucket, as of a revision that was first seen at `at_s`."""

    message: HotspotRaised | PolicyOverride
    revision: int
    at_s: float


class Write(msgspec.Struct, frozen=True):
    """One change of the bucket.

    Attributes:
        name: of the entry, below its model.
        message: what is told to the audit log once the bucket has taken the change.
        revision: which one it replaces; None for an entry that must not exist.
        delete: whether the entry goes, instead of becoming `message`.
        news: whether the audit log is told: of renewals it is not.
    """

    name: str
    message: Message
    revision: int | None
    delete: bool = False
    news: bool = True


def slot_of(key: int) -> str:
    """Return the name of the entry for a class."""
    return f"hotspot-{key % SLOTS:03x}"


def verdict_writes(
    wanted: Mapping[int, HotspotRaised],
    seen: Mapping[str, Seen],
    cleared: Callable[[HotspotRaised], HotspotCleared],
    now_s: float,
    renew_s: float,
) -> list[Write]:
    """Return what brings the bucket's verdicts in line; what ends comes first.

    Args:
        wanted: verdicts that should stand, by class.
        seen: the bucket's entries, by name; other entries than verdicts are left alone.
        cleared: says why a verdict that stands should not.
        renew_s: a verdict that was written this long ago is renewed.
    """
    ending, lasting = [], []
    for name, entry in seen.items():
        verdict = entry.message
        if not isinstance(verdict, HotspotRaised):
            continue
        present = wanted.get(verdict.key)
        if present is None or name != slot_of(verdict.key):
            ending.append(Write(name, cleared(verdict), entry.revision, delete=True))
        elif now_s - entry.at_s >= renew_s:
            lasting.append(Write(name, present, entry.revision, news=False))
    taken = set(seen)
    for key, verdict in wanted.items():
        name = slot_of(key)
        if name not in taken:
            taken.add(name)
            lasting.append(Write(name, verdict, None))
    return ending + lasting


def is_ours(entry: Seen | None) -> bool:
    """Say whether an override of the policy is a detector's."""
    return (
        entry is not None and isinstance(entry.message, PolicyOverride) and (entry.message.by == BY)
    )


def policy_write(
    wanted: PolicyOverride | None, entry: Seen | None, now_s: float, renew_s: float
) -> Write | None:
    """Return what brings the policy override in line; None if nothing does.

    What an operator said is never touched before it has run out.

    Args:
        wanted: the override that a detector should have in force; None for none.
        entry: the bucket's entry.
        renew_s: an override that was written this long ago is renewed.
    """
    if entry is None:
        return None if wanted is None else Write(POLICY, wanted, None)
    assert isinstance(entry.message, PolicyOverride)
    age_s = now_s - entry.at_s
    if is_ours(entry):
        if wanted is None:
            over = PolicyOverride("", 0, 0.0, None, BY, "calm again")
            return Write(POLICY, over, entry.revision, delete=True)
        return Write(POLICY, wanted, entry.revision, news=False) if age_s >= renew_s else None
    ttl_s = entry.message.ttl_s
    if wanted is not None and ttl_s is not None and age_s >= ttl_s:
        return Write(POLICY, wanted, entry.revision)
    return None
