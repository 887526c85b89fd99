"""Problems that go on are said again, and ever less often."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

GAP_S: Final = 10.0
GAP_S_MAX: Final = 300.0
SUBJECTS_MAX: Final = 256


class Reminders:
    """Tells when a problem is to be said: at once, after gaps that double, and when it changes.

    Args:
        gap_s: between the first and the second time.
        gap_s_max: the longest.
        subjects_max: whose problems are remembered; beyond it, the oldest is forgotten.
    """

    def __init__(
        self,
        gap_s: float = GAP_S,
        gap_s_max: float = GAP_S_MAX,
        subjects_max: int = SUBJECTS_MAX,
    ) -> None:
        self._gap_s = gap_s
        self._gap_s_max = gap_s_max
        self._subjects_max = subjects_max
        self._said: OrderedDict[str, tuple[str, float, float]] = OrderedDict()

    def due(self, problem: str, now_s: float, subject: str = "") -> bool:
        """Whether to say what is wrong now; True counts as said."""
        before, due_s, gap_s = self._said.get(subject, ("", 0.0, self._gap_s))
        if problem != before:
            gap_s = self._gap_s
        elif now_s < due_s:
            return False
        self._said[subject] = (problem, now_s + gap_s, min(2 * gap_s, self._gap_s_max))
        self._said.move_to_end(subject)
        while len(self._said) > self._subjects_max:
            self._said.popitem(last=False)
        return True

    def over(self, subject: str = "") -> None:
        """Note that nothing is wrong any more: what is, later, is said at once."""
        self._said.pop(subject, None)
