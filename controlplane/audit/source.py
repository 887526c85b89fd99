"""Reading what the bus recorded: several streams as one, in the order in which they were stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from controlplane.bus.protocol import Bus, BusError, Record
from schemas import subjects

STREAM_OF: dict[str, str] = {
    subject.split(".")[2]: stream for stream, subject in subjects.STREAMS.items()
}
"""Kind of subject → the stream that records it."""

AHEAD_MAX = 2_000
"""Records of one stream that are read before their turn."""

ROWS_S_MAX = 12.0
"""How much earlier one has to read, so that the rows are known that decisions refer to: more than
twice `PlaneConfig.rows_every_s`."""

LAG_S = 0.25
"""While following, how long a silent stream holds up the others: what it still had to say comes
later then, and readers have to take it."""


async def recorded(
    bus: Bus,
    kinds: Sequence[str],
    *,
    model: str | None = None,
    since_wall_s: float = 0.0,
    until_wall_s: float | None = None,
    follow: bool = False,
) -> AsyncIterator[Record]:
    """Yield the records of several kinds, merged by the time at which they were stored.

    Args:
        kinds: of subjects, see `schemas.subjects.KINDS`.
        model: only its records.
        since_wall_s: only what was stored from then on, Unix seconds.
        until_wall_s: end at the first record that was stored later.
        follow: go on with what comes, until the caller ends.

    Raises:
        BusError: there is no such stream, or the connection was lost while not following.
    """
    readers = [
        _Reader(
            bus.history(
                STREAM_OF[kind],
                subject=subjects.all_of(kind, model),
                since_wall_s=since_wall_s,
                follow=follow,
            )
        )
        for kind in kinds
    ]
    try:
        while True:
            await _look(readers, LAG_S if follow else None)
            ready = [reader for reader in readers if reader.head is not None]
            if not ready:
                if all(reader.ended for reader in readers):
                    return
                continue
            first = min(ready, key=lambda reader: reader.at_wall_s)
            record = first.take()
            if until_wall_s is not None and record.at_wall_s > until_wall_s:
                return
            yield record
    finally:
        for reader in readers:
            await reader.stop()


async def _look(readers: list[_Reader], lag_s: float | None) -> None:
    """Wait until every stream shows its next record or its end, or has been silent for `lag_s`.

    A stream that has been silent is not waited for again before it says something.
    """
    for reader in readers:
        reader.peek()
    missing = [reader for reader in readers if reader.head is None and not reader.ended]
    awaited = [reader for reader in missing if not reader.silent]
    if len(missing) < len(readers) and not awaited:
        return
    waits = [asyncio.ensure_future(reader.next()) for reader in missing]
    alone = not awaited
    try:
        done, _ = await asyncio.wait(
            waits,
            timeout=None if alone else lag_s,
            return_when=asyncio.FIRST_COMPLETED if alone else asyncio.ALL_COMPLETED,
        )
    finally:
        for wait in waits:
            wait.cancel()
    for reader in missing:
        reader.silent = reader.head is None
    for wait in done:
        wait.result()


class _Reader:
    """Reads one stream ahead of its turn, up to a bound.

    Attributes:
        head: its next record, if that is there.
        ended: nothing will follow.
        silent: nothing came when it was last waited for.
    """

    def __init__(self, records: AsyncIterator[Record]) -> None:
        self.head: Record | None = None
        self.ended = self.silent = False
        self._queue: asyncio.Queue[Record | None] = asyncio.Queue(AHEAD_MAX)
        self._failure: BusError | None = None
        self._task = asyncio.create_task(self._pump(records))

    @property
    def at_wall_s(self) -> float:
        """When its next record was stored."""
        assert self.head is not None
        return self.head.at_wall_s

    def take(self) -> Record:
        """Return its next record."""
        record, self.head = self.head, None
        assert record is not None
        return record

    def peek(self) -> None:
        """Show the next record if it was read already. Raises BusError if reading failed."""
        if self.head is None and not self.ended and not self._queue.empty():
            self._show(self._queue.get_nowait())

    async def next(self) -> None:
        """Show the next record once it was read. Raises BusError if reading failed."""
        self._show(await self._queue.get())

    def _show(self, record: Record | None) -> None:
        self.head, self.silent = record, False
        if record is None:
            self.ended = True
            if self._failure is not None:
                raise self._failure

    async def _pump(self, records: AsyncIterator[Record]) -> None:
        try:
            async for record in records:
                await self._queue.put(record)
        except BusError as error:
            self._failure = error
        await self._queue.put(None)

    async def stop(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.wait([self._task])
