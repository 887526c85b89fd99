"""The prefix index as one would explain it: a set of hashes a slot, and a loop over the prompt."""

from __future__ import annotations

from functools import reduce
from operator import xor


class NaiveIndex:
    """Slot → set of hashes. Dead slots are simply gone; nothing is swept."""

    def __init__(self) -> None:
        self.sets: dict[int, set[int]] = {}
        self.live: set[int] = set()

    def store(self, slot: int, hashes: list[int]) -> None:
        """Add blocks."""
        self.sets[slot] |= set(hashes)

    def remove(self, slot: int, hashes: list[int]) -> int:
        """Remove blocks; how many were not there."""
        absent = sum(block not in self.sets[slot] for block in hashes)
        self.sets[slot] -= set(hashes)
        return absent

    def depth(self, slot: int, hashes: list[int]) -> int:
        """How many leading blocks of the prompt a live slot holds."""
        if slot not in self.live:
            return 0
        held = self.sets[slot]
        return next((d for d, block in enumerate(hashes) if block not in held), len(hashes))

    def digest(self, slot: int) -> int:
        """XOR of a slot's blocks."""
        return reduce(xor, self.sets[slot], 0)

    def blocks(self) -> int:
        """Distinct blocks of all slots."""
        return len(set().union(*self.sets.values()))
