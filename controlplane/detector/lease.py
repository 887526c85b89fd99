"""A lease on leading, held as one entry of a bucket that is changed by revision only.

Theory of operation. The holder renews the entry; the others look at it. Nobody compares clocks of
different machines: a standby takes over once *it* has seen the same revision for the lease's whole
time, and the holder counts from before it *sent* its last renewal, so the holder's time ends first.
It ends earlier still, by a margin for what may be under way and for clocks that run unevenly.

    free ── create ──> held ── renewed by revision ──> held
      ^                  │ the bus is away, or too slow: nothing may be done any more, and the next
      │                  │ renewal may still succeed, if nobody took over meanwhile
      └── released ──────┤
                         └── the entry has another revision: somebody else holds it

A process that was stopped and goes on finds its time over by its own clock before it does anything.
What was already under way then is caught by the revisions of what it writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from controlplane.bus.protocol import Bucket, Bus, BusError, Entry, WrongRevision
from schemas import subjects
from schemas.bus import LeaderLease, decode_leader
from schemas.codec import RemoteError, encode

_TTL_S_MAX = 60.0  # a lease that claims more is cut: one broken holder must not block for good


class Lease:
    """One process's attempt at leading a service.

    Args:
        service: name of the service: the key of the entry.
        holder: this process; no two, and no two lives of one, may have the same name.

    Attributes:
        taken: how often this process became the holder.
        lost: how often another one took over from it.
    """

    def __init__(
        self,
        bus: Bus,
        service: str,
        holder: str,
        *,
        ttl_s: float,
        margin_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holder = holder
        self.taken = 0
        self.lost = 0
        self._bus = bus
        self._service = service
        self._ttl_s = ttl_s
        self._margin_s = margin_s
        self._clock = clock
        self._until_s = float("-inf")
        self._mine: int | None = None  # the revision that we wrote last, unless somebody took over
        self._seen: tuple[int, float] = (-1, 0.0)  # another's revision, and since when we know it

    @property
    def left_s(self) -> float:
        """Seconds for which this process may still act as the leader; not positive: it may not."""
        return self._until_s - self._margin_s - self._clock()

    def doubt(self) -> None:
        """Do nothing more before the next renewal: somebody else may be leading."""
        self._until_s = float("-inf")

    async def step(self) -> bool:
        """Renew the lease or try to get it; return whether this process may lead.

        Raises:
            BusError: the bus cannot say; what is left of the lease stays valid.
        """
        try:
            async with asyncio.timeout(self._ttl_s / 2):
                bucket = await self._bus.bucket(subjects.LEADERS)
                if self._mine is None:
                    await self._try(bucket)
                else:
                    await self._renew(bucket)
        except TimeoutError as error:
            raise BusError(f"the lease on {self._service} was not answered in time") from error
        return self.left_s > 0

    async def release(self) -> None:
        """Let somebody else lead at once. Raises BusError."""
        mine, self._mine, self._until_s = self._mine, None, float("-inf")
        if mine is not None:
            bucket = await self._bus.bucket(subjects.LEADERS)
            await bucket.delete(self._service, mine)

    async def _renew(self, bucket: Bucket) -> None:
        assert self._mine is not None
        try:
            await self._write(bucket, self._mine)
        except WrongRevision:
            # Either somebody took over, or our last renewal was written and its answer lost.
            entry = await bucket.get(self._service)
            if entry is not None and self._lease_of(entry).holder == self.holder:
                await self._write(bucket, entry.revision)
            else:
                self._mine, self._until_s = None, float("-inf")
                self.lost += 1

    async def _try(self, bucket: Bucket) -> None:
        entry = await bucket.get(self._service)
        try:
            if entry is None:
                await self._write(bucket, None)
            elif self._is_over(entry):
                await self._write(bucket, entry.revision)
            else:
                return
        except WrongRevision:
            return  # another standby was faster
        self.taken += 1

    def _is_over(self, entry: Entry) -> bool:
        """Whether a holder has been silent, as seen from here, for its lease's whole time."""
        now_s, lease = self._clock(), self._lease_of(entry)
        if entry.revision != self._seen[0]:
            self._seen = entry.revision, now_s
        if lease.holder == self.holder:  # we wrote it, and the answer was lost
            return True
        return now_s - self._seen[1] >= min(lease.ttl_s, _TTL_S_MAX)

    async def _write(self, bucket: Bucket, revision: int | None) -> None:
        """Write our lease over a revision, or where there is none. Raises WrongRevision."""
        sent_s = self._clock()
        value = encode(LeaderLease(self.holder, time.time(), self._ttl_s))
        if revision is None:
            self._mine = await bucket.create(self._service, value)
        else:
            self._mine = await bucket.update(self._service, value, revision)
        self._until_s = sent_s + self._ttl_s

    def _lease_of(self, entry: Entry) -> LeaderLease:
        """Return what an entry says; what cannot be read is somebody's lease of our own length."""
        try:
            return decode_leader(entry.value or b"")
        except RemoteError:
            return LeaderLease("", 0.0, self._ttl_s)
