"""Messages that wait for their turn: how a service takes in a stream without standing still.

The bus's callback only puts a message in. It is taken in from the event loop, in slices of time
between which everything else has its turn: requests, pages, the renewal of a lease. So a burst
costs no one else more than a slice, and memory is bounded: beyond the bound the oldest goes, is
counted, and shows its reader as a gap in its stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable


class Mailbox:
    """A bounded queue of messages, and what empties it.

    Args:
        take: takes in one message: subject, payload. Its errors are the loop's to report, and cost
            that message alone.
        counts: `overflow` counts there what found no room.
        messages_max: that wait; the oldest goes beyond it.
        slice_s: how long messages are taken in without a pause.
    """

    __slots__ = ("_counts", "_draining", "_loop", "_max", "_slice_s", "_take", "_waiting")

    def __init__(
        self,
        take: Callable[[str, bytes], None],
        counts: Counter[str],
        *,
        messages_max: int,
        slice_s: float,
    ) -> None:
        self._take = take
        self._counts = counts
        self._max = messages_max
        self._slice_s = slice_s
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._draining = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._waiting)

    def put(self, subject: str, payload: bytes) -> None:
        """Let a message wait; a handler for a subscription."""
        if len(self._waiting) >= self._max:
            self._waiting.popleft()
            self._counts["overflow"] += 1
        self._waiting.append((subject, payload))
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Take messages in for one slice of time."""
        waiting, take = self._waiting, self._take
        until_s = time.monotonic() + self._slice_s
        try:
            while waiting:
                take(*waiting.popleft())
                if time.monotonic() >= until_s:
                    break
        finally:
            if waiting:
                self._loop.call_soon(self._drain)
            else:
                self._draining = False
