"""A block pool that is slow and obvious: the queue is a list, and every question is a scan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NaiveBlockPool:
    """The same promises as `lab.block_pool.BlockPool`, written down as plainly as they read."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(1, num_blocks))
        self.references = dict.fromkeys(range(1, num_blocks), 0)
        self.labels: list[tuple[int, int]] = []  # (hash, block), in the order of caching

    def find(self, hashes: Iterable[int]) -> list[int]:
        """The oldest block of each hash, up to the first hash that none carries."""
        hits = []
        for each in hashes:
            carriers = [block for label, block in self.labels if label == each]
            if not carriers:
                break
            hits.append(carriers[0])
        return hits

    def touch(self, blocks: Iterable[int]) -> None:
        """One reference more; out of the queue."""
        for block in blocks:
            if block in self.queue:
                self.queue.remove(block)
            self.references[block] += 1

    def allocate(self, count: int, evicted: list[int]) -> list[int]:
        """The queue's first blocks, without their labels."""
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            evicted += [label for label, carrier in self.labels if carrier == block]
            self.labels = [pair for pair in self.labels if pair[1] != block]
            self.references[block] = 1
        return taken

    def cache(self, blocks: Iterable[int], hashes: Iterable[int]) -> None:
        """Each block gets its label."""
        self.labels += zip(hashes, blocks, strict=True)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less; last block first, unlabelled ones to the front of the queue."""
        for block in blocks:
            self.references[block] -= 1
        freed = [block for block in reversed(blocks) if not self.references[block]]
        labelled = {block for _, block in self.labels}
        front = [block for block in freed if block not in labelled]
        back = [block for block in freed if block in labelled]
        self.queue = front + self.queue + back

    def clear(self) -> bool:
        """No labels, if nothing is in use."""
        if any(self.references.values()):
            return False
        self.labels = []
        return True

    def copies(self) -> dict[int, int]:
        """Hash → how many blocks carry it."""
        hashes = [label for label, _ in self.labels]
        return {label: hashes.count(label) for label in hashes}
