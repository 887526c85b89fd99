"""The hotspot detector, the slow and obvious way: the whole story is kept and read again each time.

It leads, and has watched for longer than a window.
"""

from __future__ import annotations

from fractions import Fraction

from schemas.bus import ClassCoverage, Routed

BLIND = ("round_robin", "least_requests")
Said = tuple[str, int, str]
"""(raised or cleared, key, why it was cleared)."""


class NaiveDetector:
    """What `HotspotDetector` promises.

    Attributes:
        story: (time, event), oldest first.
        found: key → what its requests were found to be, oldest first: hot, nothing or break.
        raised: key → (when it was raised, most holders since then, when those grew).
    """

    def __init__(
        self,
        window_s: float,
        requests_min: int,
        give_up_s: float,
        standing_max: int,
        memory_s: float,
        rest_s: float,
        damping_max: int,
    ) -> None:
        self.window_s = window_s
        self.requests_min = requests_min
        self.give_up_s = give_up_s
        self.standing_max = standing_max
        self.memory_s = memory_s
        self.rest_s = rest_s
        self.damping_max = damping_max
        self.story: list[tuple[float, Routed]] = []
        self.found: dict[int, list[str]] = {}
        self.raised: dict[int, tuple[float, int, float]] = {}
        self.raises: dict[int, int] = {}
        self.alarmed_s: dict[int, float] = {}
        self.given_up_s: dict[int, float] = {}

    def routed(self, event: Routed, now_s: float) -> list[Said]:
        """Takes a request; returns what is said to it."""
        if event.attempt:
            return []
        self._forget_rows_of_the_rare(now_s)
        self.story.append((now_s, event))
        said: list[Said] = []
        explained = False
        for each in sorted(event.classes, key=lambda each: -each.depth_blocks):
            if each.key in self.raised:
                why = self._why_it_ends(event, each, now_s)
                self._find(each.key, "break")
                if why:
                    said.append(("cleared", each.key, why))
                    del self.raised[each.key]
                else:
                    self.alarmed_s[each.key] = now_s
                    explained = True
            elif not self._outgrows(event, each, now_s) or (
                self._count(each.key, now_s) < self.requests_min
            ):
                self._find(each.key, "break")
            else:
                if each.key in self.raises:
                    self.alarmed_s[each.key] = now_s
                if not explained:
                    self._find(each.key, self._win(event, each))
                    if self._ripe(each, now_s):
                        said.append(("raised", each.key, ""))
                        self.raised[each.key] = (now_s, each.holders, now_s)
                        self.raises[each.key] = self.raises.get(each.key, 0) + 1
                        self.alarmed_s[each.key] = now_s
                        self._find(each.key, "break")
                explained = True
        return said

    def tick(self, now_s: float) -> list[Said]:
        """Lets time pass; returns what is said to that."""
        silent = [key for key in self.raised if not self._count(key, now_s)]
        for key in silent:
            del self.raised[key]
        for key in [key for key in self.raises if now_s - self.alarmed_s[key] >= self.memory_s]:
            del self.raises[key]
            self.given_up_s.pop(key, None)
        self._forget_rows_of_the_rare(now_s)
        return [("cleared", key, "silent") for key in silent]

    def _find(self, key: int, what: str) -> None:
        self.found.setdefault(key, []).append(what)

    def _forget_rows_of_the_rare(self, now_s: float) -> None:
        for key in self.found:
            if self._count(key, now_s) < self.requests_min:
                self._find(key, "break")

    def _in_window(self, now_s: float) -> list[Routed]:
        return [event for at_s, event in self.story if at_s > now_s - self.window_s]

    def _count(self, key: int, now_s: float) -> int:
        return sum(any(c.key == key for c in event.classes) for event in self._in_window(now_s))

    def _outgrows(self, event: Routed, each: ClassCoverage, now_s: float) -> bool:
        if each.holders == 0 or each.holders == event.fleet:
            return False
        share = Fraction(self._count(each.key, now_s), len(self._in_window(now_s)))
        return share > Fraction(each.holders, event.fleet)

    def _win(self, event: Routed, each: ClassCoverage) -> str:
        if each.best_inside is None:
            return "break"
        if each.best_outside is None or event.policy in BLIND:
            return "nothing"
        return "hot" if each.best_inside <= each.best_outside else "break"

    def _streak(self, key: int) -> int:
        streak = 0
        for what in reversed(self.found[key]):
            if what == "break":
                break
            streak += what == "hot"
        return streak

    def _ripe(self, each: ClassCoverage, now_s: float) -> bool:
        factor = min(2 ** self.raises.get(each.key, 0), self.damping_max)
        resting = now_s < self.given_up_s.get(each.key, -1e9) + self.rest_s
        full = len(self.raised) >= self.standing_max
        return self._streak(each.key) >= 2 * each.holders * factor and not resting and not full

    def _why_it_ends(self, event: Routed, each: ClassCoverage, now_s: float) -> str:
        since_s, most, grown_s = self.raised[each.key]
        if each.holders > most:
            most, grown_s = each.holders, now_s
        self.raised[each.key] = since_s, most, grown_s
        if self._count(each.key, now_s) < self.requests_min:
            return "few"
        if not self._outgrows(event, each, now_s):
            return "covered" if each.holders else "evicted"
        if now_s - grown_s >= self.give_up_s:
            self.given_up_s[each.key] = now_s
            return "futile"
        return ""
