"""The prefix cache at its plainest: prefixes in order of use, and all else computed anew."""

from __future__ import annotations

import sys

from controlplane.core.hashing import BlockHash, Extras, chain
from router.prefix_cache import HASH_BYTES, NODE_BYTES, SEGMENT_BYTES

Prefix = tuple[Extras, bytes, tuple[str, ...]]  # how it begins, opening tokens, segments


class NaivePrefixCache:
    """Keeps prefixes by their segments; a prefix's parent is the same without the last one."""

    def __init__(self, block_size: int, budget_bytes: int, handles_max: int) -> None:
        self.block_size = block_size
        self.budget_bytes = budget_bytes
        self.handles_max = handles_max
        self.order: list[Prefix] = []  # least recently used first
        self.handles: dict[int, Prefix] = {}
        self.tokens: dict[str, bytes] = {}  # of every segment ever seen; the truth, never evicted

    def ids(self, prefix: Prefix) -> bytes:
        """Returns the token ids of a prefix, u32 bytes."""
        return prefix[1] + b"".join(self.tokens[text] for text in prefix[2])

    def hashes(self, prefix: Prefix) -> list[BlockHash]:
        """Returns the hashes of a prefix's whole blocks, computed from its first token."""
        return chain(self.ids(prefix), self.block_size, extras=prefix[0])

    def longest(self, wanted: Prefix) -> Prefix:
        """Returns the longest known prefix of `wanted`."""
        extras, opening, texts = wanted
        for depth in range(len(texts), 0, -1):
            if (extras, opening, texts[:depth]) in self.order:
                return extras, opening, texts[:depth]
        return extras, opening, ()

    def add(self, prefix: Prefix) -> None:
        """Adds a prefix whose parent is known or empty."""
        if prefix not in self.order:
            self.order.append(prefix)

    def release(self, handle: int) -> None:
        """Gives a handle back: its path becomes the most recent, and room is made."""
        extras, opening, texts = self.handles.pop(handle)
        for depth in range(len(texts), 0, -1):
            path = (extras, opening, texts[:depth])
            self.order.remove(path)
            self.order.append(path)
        while self.size_bytes() > self.budget_bytes:
            victim = next(filter(self._may_go, self.order), None)
            if victim is None:
                return
            self.order.remove(victim)

    def _may_go(self, prefix: Prefix) -> bool:
        extras, opening, texts = prefix
        pinned = prefix in self.handles.values()
        children = any(
            other[:2] == (extras, opening) and other[2][:-1] == texts for other in self.order
        )
        return not pinned and not children

    def size_bytes(self) -> int:
        """Returns what the cache says that it takes."""
        roots = {(extras, opening, ()) for extras, opening, _ in [*self.order, *self.pinned()]}
        texts = {prefix[2][-1] for prefix in self.order}
        return (
            sum(map(self._node_bytes, {*self.order, *roots}))
            + sum(SEGMENT_BYTES + sys.getsizeof(t) + sys.getsizeof(self.tokens[t]) for t in texts)
        )  # fmt: skip

    def pinned(self) -> list[Prefix]:
        """Returns the prefixes that handles refer to."""
        return list(self.handles.values())

    def _node_bytes(self, prefix: Prefix) -> int:
        extras, opening, texts = prefix
        before = len(self.hashes((extras, opening, texts[:-1]))) if texts else 0
        own = len(self.hashes(prefix)) - before
        tail = len(self.ids(prefix)) - 4 * self.block_size * len(self.hashes(prefix))
        salt = 0 if texts or not extras.salt else sys.getsizeof(extras.salt)
        return NODE_BYTES + HASH_BYTES * own + tail + salt
