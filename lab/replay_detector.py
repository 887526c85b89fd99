"""The hotspot detector in simulated time: the production one, leading alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from controlplane.core.detector_writes import Message
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.model import WatchedModel
from lab.replay_agenda import Agenda
from lab.replay_instance import MODEL
from schemas.bus import RouteBatch


class SimDetector:
    """Hears every router, and tells them what stands.

    Attributes:
        model: the production detector of the model.
    """

    def __init__(self, agenda: Agenda, tell: Callable[[Message], None]) -> None:
        self.model = WatchedModel(MODEL, DetectorServiceConfig(), 0.0)
        self.model.lead({}, 0.0)
        self._agenda = agenda
        self._tell = tell
        self._revision = 0

    def hear(self, batch: RouteBatch) -> None:
        """Take what a router did."""
        if self.model.batch(batch, self._agenda.now_s, self._agenda.now_s):
            self._settle()

    def tick(self) -> None:
        """Let time pass."""
        self.model.tick(self._agenda.now_s, self._agenda.now_s)
        self._settle()

    def _settle(self) -> None:
        """Tell the routers of whatever differs from what they were told."""
        now_s = self._agenda.now_s
        for write in self.model.writes(now_s, now_s):
            self._revision += 1
            self.model.written(write, self._revision, now_s)
            self._tell(msgspec.structs.replace(write.message, revision=self._revision))

    @property
    def counts(self) -> dict[str, int]:
        """What it did, by name."""
        return {f"detector:{name}": count for name, count in self.model.detector.counts.items()}
