"""Promised blocks, the slow and obvious way: a list, and chains compared block by block."""

from __future__ import annotations

from collections.abc import Sequence


class NaivePromises:
    """What `Promises` promises."""

    def __init__(self, lasts_s: float, promises_max: int, blocks_max: int) -> None:
        self.lasts_s = lasts_s
        self.promises_max = promises_max
        self.blocks_max = blocks_max
        self.promises: list[tuple[int, str, list[int], float]] = []
        self.made = 0

    def add(self, owner: str, hashes: Sequence[int], now_s: float) -> int:
        """Remembers a promise; forgets the oldest beyond the bounds."""
        self.made += 1
        self.promises.append((self.made, owner, list(hashes), now_s + self.lasts_s))
        while (
            len(self.promises) > self.promises_max
            or sum(len(chain) for _, _, chain, _ in self.promises) > self.blocks_max
        ):
            del self.promises[0]
        return self.made

    def drop(self, number: int) -> None:
        """Forgets a promise."""
        self.promises = [each for each in self.promises if each[0] != number]

    def expire(self, now_s: float) -> None:
        """Forgets what is too old."""
        self.promises = [each for each in self.promises if each[3] > now_s]

    def find(self, hashes: Sequence[int], blocks: int) -> dict[str, int]:
        """Returns the longest common beginning of a prompt with any promise of each owner."""
        depths: dict[str, int] = {}
        for _, owner, chain, _ in self.promises:
            depth = 0
            while depth < min(blocks, len(chain)) and chain[depth] == hashes[depth]:
                depth += 1
            if depth:
                depths[owner] = max(depth, depths.get(owner, 0))
        return depths
