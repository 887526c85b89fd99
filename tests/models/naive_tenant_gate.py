"""A tenant's limits, the slow and obvious way: every use is kept, every level is counted afresh."""

from __future__ import annotations

from fractions import Fraction


class NaiveBucket:
    """A token bucket that replays its whole history, in exact arithmetic."""

    def __init__(self, rate: int, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        self.uses: list[tuple[Fraction, int]] = []

    def level(self, now: Fraction) -> Fraction:
        """Returns the tokens there are: filled from the first use on, never above the burst."""
        level, then = Fraction(self.burst), Fraction(0)
        for when, tokens in self.uses:
            level = min(Fraction(self.burst), level + self.rate * (when - then)) - tokens
            then = when
        return min(Fraction(self.burst), level + self.rate * (now - then))

    def wait(self, tokens: int, now: Fraction) -> Fraction:
        """Returns the seconds until a prompt of so many tokens may start."""
        missing = min(tokens, self.burst) - self.level(now)
        return max(Fraction(0), missing) / self.rate

    def use(self, tokens: int, now: Fraction) -> None:
        """Takes tokens, whatever there is."""
        self.uses.append((now, tokens))
