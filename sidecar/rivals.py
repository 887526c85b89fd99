"""Noticing a second sidecar that speaks for the same instance.

Both write the instance's record in turn, so whoever reads it back now and then finds epochs that it
never used. The first look comes after the first own record: what is there before may be the word of
an earlier life.
"""

from __future__ import annotations

from collections import deque

from schemas.bus import InstanceRecord

LOOK_S = 10.0
"""How often a record is read back."""

_EPOCHS_KEPT = 16


class Rivals:
    """What one sidecar has said, by instance, and who contradicts it.

    Attributes:
        known: instances that another sidecar was found to speak for at the last look.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._epochs: dict[str, deque[int]] = {}

    def said(self, record: InstanceRecord) -> None:
        """Remember a record that was written here."""
        epochs = self._epochs.setdefault(record.instance_id, deque(maxlen=_EPOCHS_KEPT))
        if record.epoch not in epochs:
            epochs.append(record.epoch)

    def look(self, found: InstanceRecord) -> str:
        """Compare what the bucket says of an instance; returns what to complain of, once."""
        epochs = self._epochs.get(found.instance_id)
        if epochs is None:
            return ""
        if found.epoch in epochs or found.state == "stopped":
            self.known.discard(found.instance_id)
            return ""
        if found.instance_id in self.known:
            return ""
        self.known.add(found.instance_id)
        return (
            f"another sidecar, of the engine at {found.url}, speaks for {found.instance_id} too, "
            "so that its blocks are never known for long: stop one of them, or give each an "
            "--instance-id of its own"
        )
