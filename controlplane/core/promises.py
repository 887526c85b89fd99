"""Blocks promised: what requests that are on their way will have cached once they are computed.

Theory of operation. Between a decision and the engine's block events nobody's index shows the new
blocks of a prompt, so a burst of requests that share a new beginning would scatter over the fleet.
A promise says that an owner will hold a prompt's whole chain; it counts like a hit until it is
dropped (kept, or broken), or too old.

Promises are kept in a radix tree over chains of block hashes. A hash stands for all blocks up to
it, so whether two chains agree up to some depth is one comparison, and how far they agree within an
edge is found by bisection: no operation looks at a chain block by block.

    node     an edge `chain[start:end]` from its parent, and who owns a promise that reaches `end`
    child    found by the first hash of its edge
    promise  ends at the end of a node: adding one splits the edge in which it ends

Invariants (`check`): a node's owners are those of the promises that end at it or below it, counted;
a node without owners does not exist; edges are not empty, and only the root has none.

Bounds: `promises_max` promises and `blocks_max` blocks in their chains; the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Generic, TypeVar

from controlplane.core.hashing import BlockHash

Owner = TypeVar("Owner", bound=Hashable)


class Promises(Generic[Owner]):
    """Promised chains of blocks, by owner.

    Args:
        lasts_s: a promise counts for this long at most.
        promises_max: promises kept at a time.
        blocks_max: sum of their chains' lengths.

    Attributes:
        crowded_out: promises that went before their time for want of room.
    """

    def __init__(
        self, lasts_s: float, promises_max: int = 4096, blocks_max: int = 1_000_000
    ) -> None:
        assert lasts_s > 0
        assert promises_max > 0
        self.lasts_s = lasts_s
        self.promises_max = promises_max
        self.blocks_max = blocks_max
        self.crowded_out = 0
        self._root: _Node[Owner] = _Node((), 0, 0, None)
        self._numbers = count(1)
        # Oldest first: all last equally long, so this is the order in which they end, too. (To find
        # the first of a plain dict takes the longer the more were deleted before it.)
        self._promises: OrderedDict[int, tuple[_Node[Owner], Owner, float]] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._promises)

    def add(self, owner: Owner, hashes: Sequence[BlockHash], now_s: float) -> int:
        """Promise that `owner` will hold a chain; returns the promise's number, to drop it by.

        Args:
            hashes: (n,) the chain, n ≥ 1; kept, and not to be changed.

        Complexity: a bisection for each node on the path.
        """
        number = next(self._numbers)
        node = self._grow(hashes)
        self._promises[number] = (node, owner, now_s + self.lasts_s)
        self._blocks += node.end
        step: _Node[Owner] | None = node
        while step is not None:
            step.owners[owner] = step.owners.get(owner, 0) + 1
            step = step.parent
        while len(self._promises) > self.promises_max or self._blocks > self.blocks_max:
            self.drop(next(iter(self._promises)))
            self.crowded_out += 1
        return number

    def drop(self, number: int) -> None:
        """End a promise, if it has not ended yet. Complexity: the nodes on its path."""
        promise = self._promises.pop(number, None)
        if promise is None:
            return
        step: _Node[Owner] | None = promise[0]
        owner = promise[1]
        self._blocks -= promise[0].end
        while step is not None:
            left = step.owners[owner] - 1
            above = step.parent
            if left:
                step.owners[owner] = left
            else:
                del step.owners[owner]
                if not step.owners and above is not None:
                    del above.children[step.chain[step.start]]
                    step.parent = None
            step = above

    def expire(self, now_s: float) -> None:
        """End the promises whose time is over."""
        while self._promises:
            number = next(iter(self._promises))
            if self._promises[number][2] > now_s:
                return
            self.drop(number)

    def find(self, hashes: Sequence[BlockHash], blocks: int) -> dict[Owner, int]:
        """Return how many of the first `blocks` blocks of a prompt each owner has promised to hold.

        Complexity: a bisection for each node on the path, and its owners.
        """
        depths: dict[Owner, int] = {}
        node, depth = self._root, 0
        while depth < blocks:
            child = node.children.get(hashes[depth])
            if child is None:
                break
            depth = child.agrees(hashes, blocks)
            for owner in child.owners:
                depths[owner] = depth
            if depth < child.end:
                break
            node = child
        return depths

    def _grow(self, hashes: Sequence[BlockHash]) -> _Node[Owner]:
        """Return the node at which a chain ends, made if need be."""
        node, depth, length = self._root, 0, len(hashes)
        assert length
        while depth < length:
            child = node.children.get(hashes[depth])
            if child is None:
                child = node.children[hashes[depth]] = _Node(hashes, depth, length, node)
            depth = child.agrees(hashes, length)
            node = child if depth == child.end else child.split(depth)
        return node

    def check(self) -> None:
        """Assert the module's invariants by deriving everything anew; for tests."""
        owners: dict[int, dict[Owner, int]] = {}
        nodes = {id(self._root): self._root}
        for end, owner, _ in self._promises.values():
            step: _Node[Owner] | None = end
            while step is not None:
                nodes[id(step)] = step
                counted = owners.setdefault(id(step), {})
                counted[owner] = counted.get(owner, 0) + 1
                step = step.parent
        for key, node in nodes.items():
            assert node.owners == owners.get(key, {})
            assert all(id(child) in nodes for child in node.children.values())
            for first, child in node.children.items():
                assert child.parent is node
                assert (child.start, child.chain[child.start]) == (node.end, first)
                assert child.start < child.end
        assert self._blocks == sum(end.end for end, _, _ in self._promises.values())
        assert len(self) <= self.promises_max
        assert self._blocks <= self.blocks_max


class _Node(Generic[Owner]):
    """One edge of the tree and what hangs from it.

    Attributes:
        chain: some promise's hashes, of which `start:end` is this edge.
        owners: owner → promises that reach `end`.
    """

    __slots__ = ("chain", "children", "end", "owners", "parent", "start")

    def __init__(
        self, chain: Sequence[BlockHash], start: int, end: int, parent: _Node[Owner] | None
    ) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[BlockHash, _Node[Owner]] = {}
        self.owners: dict[Owner, int] = {}

    def agrees(self, hashes: Sequence[BlockHash], length: int) -> int:
        """Return the depth up to which `hashes` go along this edge; they agree at `start`."""
        chain, low, high = self.chain, self.start + 1, min(self.end, length)
        if chain[high - 1] == hashes[high - 1]:
            return high
        while high - low > 1:
            middle = (low + high) >> 1
            if chain[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def split(self, depth: int) -> _Node[Owner]:
        """Cut this edge in two; returns the new upper node, which has this one as its child."""
        assert self.start < depth < self.end
        assert self.parent is not None
        upper: _Node[Owner] = _Node(self.chain, self.start, depth, self.parent)
        upper.owners = dict(self.owners)
        upper.children[self.chain[depth]] = self
        self.parent.children[self.chain[self.start]] = upper
        self.parent, self.start = upper, depth
        return upper
