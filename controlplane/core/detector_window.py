"""How many requests each class had lately: an exact sliding window of bounded memory.

Theory of operation. The window holds one entry a request, with the keys of its classes; a count a
class follows what enters and leaves. Nothing is sampled or rounded: a class that is asked for once
in the window counts once. What bounds the memory is the number of requests: beyond `requests_max`
the oldest leave early, so that the window spans less time and still counts exactly what it spans.
Shares stay honest then, since a class and the total shrink alike.

Classes with at least `frequent_min` requests are kept by name besides. At most
depths × requests_max / frequent_min classes can be that frequent, so whoever ranks classes looks at
those and never at the long tail.

Invariants (`check`): counts equal a recount of the entries; the frequent classes are exactly those
that reach `frequent_min`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import nlargest

from schemas.bus import ClassCoverage


class ClassWindow:
    """Requests of the last `window_s` seconds, by class: those with now − window < at ≤ now.

    Args:
        on_rare: called with each class that ceases to be frequent.

    Attributes:
        shortened: requests that left before their time, for want of room.
        frequent: classes with at least `frequent_min` requests: key → depth in blocks.
    """

    def __init__(
        self,
        window_s: float,
        requests_max: int,
        frequent_min: int,
        on_rare: Callable[[int], object] = lambda _: None,
    ) -> None:
        assert window_s > 0
        assert requests_max > 0
        assert frequent_min > 0
        self.window_s = window_s
        self.requests_max = requests_max
        self.frequent_min = frequent_min
        self.shortened = 0
        self.frequent: dict[int, int] = {}
        self._on_rare = on_rare
        self._entries: deque[tuple[float, tuple[int, ...]]] = deque()
        self._counts: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Requests in the window, those of no class included."""
        return len(self._entries)

    @property
    def classes(self) -> int:
        """Distinct classes in the window."""
        return len(self._counts)

    def count(self, key: int) -> int:
        """Return how many requests of a class are in the window."""
        return self._counts.get(key, 0)

    def add(self, classes: Sequence[ClassCoverage], now_s: float) -> None:
        """Count a request that came now, and forget what is too old. O(depths), amortised."""
        self.expire(now_s)
        if len(self._entries) >= self.requests_max:
            self.shortened += 1
            self._forget()
        keys = []
        for each in classes:
            key = each.key
            count = self._counts.get(key, 0) + 1
            self._counts[key] = count
            if count == self.frequent_min:
                self.frequent[key] = each.depth_blocks
            keys.append(key)
        self._entries.append((now_s, tuple(keys)))

    def expire(self, now_s: float) -> None:
        """Forget the requests that left the window."""
        oldest_s = now_s - self.window_s
        entries = self._entries
        while entries and entries[0][0] <= oldest_s:
            self._forget()

    def _forget(self) -> None:
        """Forget the oldest request."""
        for key in self._entries.popleft()[1]:
            count = self._counts[key] - 1
            if count:
                self._counts[key] = count
            else:
                del self._counts[key]
            if count == self.frequent_min - 1:
                del self.frequent[key]
                self._on_rare(key)

    def top(self, depth_blocks: int, number: int) -> list[int]:
        """Return the counts of the most frequent classes of a depth, largest first."""
        counts = (
            self._counts[key] for key, depth in self.frequent.items() if depth == depth_blocks
        )
        return nlargest(number, counts)

    def check(self) -> None:
        """Assert every invariant; for tests: it visits all entries."""
        recount = Counter(key for _, keys in self._entries for key in keys)
        assert recount == Counter(self._counts)
        assert min(self._counts.values(), default=1) > 0
        often = {key for key, count in recount.items() if count >= self.frequent_min}
        assert often == set(self.frequent)
        assert len(self._entries) <= self.requests_max
        times = [at_s for at_s, _ in self._entries]
        assert times == sorted(times)
