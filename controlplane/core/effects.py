"""What the core asks its surroundings to do, and what happened that somebody should know."""

from __future__ import annotations

import msgspec


class FetchSnapshot(msgspec.Struct, frozen=True):
    """Ask this instance's sidecar for its whole block set, not before `after_s` from now.

    The answer comes back as `SnapshotChunk` events, or as one `SnapshotFailed`, for as long as
    `Plane.wants` says so; a fetch that is not wanted any more ends, or does not begin.

    Attributes:
        attempt: 1 for the first try; the delay already grows with it.
        reason: what was lost, for the log.
        fetch: which one this is: a number that no other fetch of the plane has.
    """

    model: str
    instance_id: str
    after_s: float
    attempt: int
    reason: str
    fetch: int = 0


class Alarm(msgspec.Struct, frozen=True):
    """Something an operator must be able to see: counted by `kind`, logged with `text`."""

    kind: str
    instance_id: str
    text: str


class Note(msgspec.Struct, frozen=True):
    """A change of state worth a line in the log (an instance joined, left, became exact …)."""

    kind: str
    instance_id: str
    text: str


Effect = FetchSnapshot | Alarm | Note
