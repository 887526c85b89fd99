"""What happens when, in simulated time: one heap."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Calls by the time at which they are due; calls due at one time keep their order.

    Attributes:
        now_s: the present.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        """Let `call(*args)` happen at `at_s`, which must not be past."""
        self._count += 1
        heapq.heappush(self._entries, (at_s, self._count, call, args))

    def run(self, until_s: float = float("inf")) -> None:
        """Let everything happen that is due by `until_s`."""
        entries, pop = self._entries, heapq.heappop
        while entries and entries[0][0] <= until_s:
            self.now_s, _, call, args = pop(entries)
            call(*args)
