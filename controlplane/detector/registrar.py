"""Writes what a leader decided into the bucket, by revision and only while the lease lasts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from controlplane.bus.protocol import Bucket, Bus, BusError, WrongRevision
from controlplane.core.detector_writes import Write
from controlplane.detector.lease import Lease
from controlplane.detector.model import WatchedModel
from schemas import subjects
from schemas.bus import HotspotCleared, HotspotRaised, PolicyOverride
from schemas.codec import encode

logger = logging.getLogger(__name__)


class Registrar:
    """Brings the bucket in line with what the models' detectors want.

    A message for the audit log leaves only once the bucket has taken the change that it tells of.

    Attributes:
        counts: written; fenced, writes refused since somebody else had written; failed, writes
            that the bus could not do now; too_late, writes not begun for want of a lease.
    """

    def __init__(self, bus: Bus, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._bus = bus
        self._lease = lease
        self._clock = clock

    async def settle(self, models: Iterable[WatchedModel]) -> None:
        """Write every difference once; what fails is a difference the next time too."""
        bucket = await self._bus.bucket(subjects.VERDICTS)
        for model in models:
            for write in model.writes(self._clock(), time.time()):
                left_s = self._lease.left_s
                if left_s <= 0 or not model.leading:
                    self.counts["too_late"] += 1
                    return
                if not await self._write(bucket, model, write, left_s):
                    return

    async def _write(
        self, bucket: Bucket, model: WatchedModel, write: Write, left_s: float
    ) -> bool:
        """Do one write within what is left of the lease; False if no further one should follow."""
        model.writing(write.name)
        try:
            async with asyncio.timeout(left_s):
                revision = await self._apply(bucket, model.name, write)
        except WrongRevision as error:
            self.counts["fenced"] += 1
            logger.warning("somebody else wrote %s: %s", write.name, error)
            self._lease.doubt()
            await self._reread(bucket, model, write.name)
            return False
        except (BusError, TimeoutError) as error:
            self.counts["failed"] += 1
            logger.debug("%s of %s was not written: %s", write.name, model.name, error)
            return False
        finally:
            model.writing("")
        self.counts["written"] += 1
        model.written(write, revision, self._clock())
        if write.news:
            self._tell(model.name, write.message, revision)
        return True

    async def _apply(self, bucket: Bucket, model: str, write: Write) -> int:
        """Do one write; returns the entry's revision, of a deletion the one that it replaced."""
        key = subjects.key(model, write.name)
        if write.delete:
            assert write.revision is not None
            await bucket.delete(key, write.revision)
            return write.revision
        value = encode(write.message)
        if write.revision is None:
            return await bucket.create(key, value)
        return await bucket.update(key, value, write.revision)

    async def _reread(self, bucket: Bucket, model: WatchedModel, name: str) -> None:
        """Learn what somebody else wrote; if that fails, the next try is fenced as well."""
        model.writing("")
        try:
            entry = await bucket.get(subjects.key(model.name, name))
        except BusError as error:
            logger.debug("%s of %s was not read: %s", name, model.name, error)
            return
        model.reread(name, entry, self._clock())

    def _tell(
        self, model: str, message: HotspotRaised | HotspotCleared | PolicyOverride, revision: int
    ) -> None:
        """Tell the audit log, and whoever listens."""
        told = msgspec.structs.replace(message, revision=revision)
        if isinstance(message, PolicyOverride):
            subject = subjects.policy(model)
            logger.warning("%s: policy %r: %s", model, message.policy, message.reason)
        else:
            subject = subjects.hotspot(model)
            kind = "raised" if isinstance(message, HotspotRaised) else "cleared"
            logger.info("%s: %s %016x: %s", model, kind, message.key, message.reason)
        self._bus.publish(subject, encode(told))
