"""The emulated engine's KV-cache blocks: who holds them, which hash each one caches, who goes next.

Theory of operation. A block is a number; block 0 is the null block and never handed out. A block
is in use (it has references) or free, and free blocks wait in one queue. A block that was filled
may carry a hash; it keeps it while free, so that a later prompt can take it back (`touch`), and
loses it only when `allocate` takes it from the queue's front. So the queue is both the list of free
blocks and the order of eviction:

- blocks released without a hash go to the front: nothing is lost by reusing them first;
- blocks released with one go to the back: least recently used first, and since a request releases
  its blocks last to first, a prompt's tail is evicted before its head.

Several blocks may carry the same hash: a block that fills is never exchanged for its twin, so that
a request's block list only grows. The oldest twin serves hits.

Invariants (`check`): in use and free partition the blocks 1 … n−1; a block is in the map under its
hash exactly if it has one.

Source: vllm/v1/core/block_pool.py, kv_cache_utils.py of vLLM 0.32 (semantics; the code is our own).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Mapping, Sequence

EngineHash = int
"""The engine's own name for a full block, 64 bits."""

NULL_BLOCK = 0


class BlockPool:
    """Blocks with reference counts, a prefix cache and LRU eviction.

    All operations are O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: the null block and at least one more")
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.references = [0] * num_blocks
        self._hash_of: list[EngineHash | None] = [None] * num_blocks
        self._block_of: dict[EngineHash, int] = {}  # the oldest block that carries the hash
        self._twins: dict[EngineHash, list[int]] = {}  # the others, oldest first; no empty lists

    @property
    def free_count(self) -> int:
        """How many blocks `allocate` could hand out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1; free blocks with a hash count as free."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    @property
    def cached(self) -> KeysView[EngineHash]:
        """The hashes that a look-up finds, as a live view."""
        return self._block_of.keys()

    @property
    def twins(self) -> Mapping[EngineHash, Sequence[int]]:
        """The blocks that carry a hash beside the one that serves hits, as a live view."""
        return self._twins

    def copies(self) -> Mapping[EngineHash, int]:
        """Return hash → how many blocks carry it."""
        return {each: 1 + len(self._twins.get(each, ())) for each in self._block_of}

    def find(self, hashes: Iterable[EngineHash]) -> list[int]:
        """Return the blocks of the longest run of cached hashes from the start; changes nothing."""
        hits: list[int] = []
        lookup = self._block_of.get
        for each in hashes:
            block = lookup(each)
            if block is None:
                break
            hits.append(block)
        return hits

    def count_free(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are free: a hit on them shrinks what `allocate` can give."""
        references = self.references
        return sum(references[block] == 0 for block in blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; free ones leave the queue with their hash."""
        references, free = self.references, self._free
        for block in blocks:
            if references[block] == 0:
                del free[block]
            references[block] += 1

    def allocate(self, count: int, evicted: list[EngineHash]) -> list[int]:
        """Hand out `count` blocks from the queue's front, each with one reference and no hash.

        Args:
            count: at most `free_count`.
            evicted: receives the hashes that the blocks carried, in order.
        """
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        take, references, hash_of = self._free.popitem, self.references, self._hash_of
        blocks = [take(False)[0] for _ in range(count)]  # last=False; positional is faster
        labels = [hash_of[block] for block in blocks]
        for block in blocks:
            references[block] = 1
            hash_of[block] = None
        self._forget(blocks, labels)
        evicted += [label for label in labels if label is not None]
        return blocks

    def cache(self, blocks: Iterable[int], hashes: Iterable[EngineHash]) -> None:
        """Give each block, now full, its hash; a hash that is there already gets one block more."""
        hash_of, block_of = self._hash_of, self._block_of
        for block, each in zip(blocks, hashes, strict=True):
            assert hash_of[block] is None, f"block {block} is cached already"
            hash_of[block] = each
            if block_of.setdefault(each, block) != block:
                self._twins.setdefault(each, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a request's blocks.

        Args:
            blocks: in prompt order; they join the queue from the last to the first.
        """
        references, hash_of, free = self.references, self._hash_of, self._free
        without_hash: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                continue
            if hash_of[block] is None:
                without_hash.append(block)
            else:
                free[block] = None
        for block in reversed(without_hash):
            free[block] = None
            free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Forget every hash if no block is in use; return whether that was so."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._block_of.clear()
        self._twins.clear()
        self._hash_of = [None] * self.num_blocks
        return True

    def check(self) -> None:
        """Raise AssertionError where an invariant of this module does not hold."""
        for block in range(1, self.num_blocks):
            assert self.references[block] >= 0
            assert (self.references[block] == 0) == (block in self._free), f"block {block}"
        assert NULL_BLOCK not in self._free
        carriers: dict[EngineHash, set[int]] = {}
        for block, carried in enumerate(self._hash_of):
            if carried is not None:
                carriers.setdefault(carried, set()).add(block)
        assert carriers.keys() == self._block_of.keys()
        for each, blocks in carriers.items():
            assert blocks == {self._block_of[each], *self._twins.get(each, ())}
        assert all(self._twins.values())

    def _forget(self, blocks: list[int], labels: list[EngineHash | None]) -> None:
        """Take blocks out of the map, each with the hash that it carried."""
        block_of, twins = self._block_of, self._twins
        if twins.keys().isdisjoint(labels):
            for label in labels:
                if label is not None:
                    del block_of[label]
            return
        for block, label in zip(blocks, labels, strict=True):
            if label is not None and label not in twins:
                del block_of[label]
            elif label is not None:
                self._forget_twin(block, label)

    def _forget_twin(self, block: int, label: EngineHash) -> None:
        twins = self._twins[label]
        if self._block_of[label] == block:
            self._block_of[label] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[label]
