"""The published block set of one instance: prefix-closed, deduplicated, coalesced, numbered.

Theory of operation. The mirror says which blocks the engine holds; an engine can reuse a block only
if it also holds every block before it, so only such blocks are worth publishing. Each block has

    level   the fastest tier that holds it (`ABSENT` if none does),
    reach   the largest level on its path from the root: the slowest tier that reusing it needs,

and belongs to the published set of tier k if `reach <= k`; that makes every set prefix-closed and
the sets nested. A block whose level changes passes its reach on to its descendants, which are found
by child links; nothing is ever rescanned. A block that is absent but has children in memory stays
as a *hole*: the children are withheld, and published when it returns.

Changes are not sent as they come. The first change of a block's reach since the last flush notes
the reach that receivers know; a flush compares that with the present one, so what came and went
in between costs nothing. A flush removes children before parents, then stores parents before
children, so a receiver's set is prefix-closed after every operation, however the batches are cut.

Tier k > 0 is published from the moment a block is first held in it, so an engine without
offloading pays for tier 0 only.

Invariants (`validate`): reach = max(own level, parent's reach); a node that is absent has children
or waits for the next flush; the counts and digest equal those of the sets as told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import xor

import msgspec

from controlplane.core.hashing import ROOT, BlockHash, pack_hashes
from schemas.bus import KvBatch, KvCleared, KvOp, KvRemoved, KvStored, SnapshotChunk
from sidecar.changes import ABSENT, Change, Cleared, Gone, Held


class RelayConfig(msgspec.Struct, frozen=True):
    """How a block set is published.

    Attributes:
        heartbeat_s: an idle stream sends an empty batch this often.
        batch_hashes_max: block hashes in one batch; larger changes are cut (NATS limits messages,
            to 1 MiB by default), so that a receiver takes each in about a millisecond.
        chunk_hashes_max: block hashes in one chunk of a snapshot.
    """

    heartbeat_s: float = 1.0
    batch_hashes_max: int = 2_048
    chunk_hashes_max: int = 2_048


class _Node(msgspec.Struct, gc=False):
    """One block; children are named by hash, so nodes form no reference cycles.

    Attributes:
        parent: None for the root and for a hole whose own parent is not known.
        children: None, one hash, or a set of several.
    """

    parent: BlockHash | None
    level: int
    reach: int
    children: BlockHash | set[BlockHash] | None = None


def _each(children: BlockHash | set[BlockHash] | None) -> Iterable[BlockHash]:
    if children is None:
        return ()
    return children if isinstance(children, set) else (children,)


class Relay:
    """Turns changes of the mirror into the stream of one instance.

    Attributes:
        epoch: of the stream.
        seq: of the last batch made; -1 before the first.
        count: (tier, block) pairs that a receiver of all batches made so far holds.
        digest: XOR of their hashes.
    """

    def __init__(self, instance_id: str, epoch: int, config: RelayConfig | None = None) -> None:
        self.instance_id = instance_id
        self.config = config or RelayConfig()
        self.reset(epoch)

    def reset(self, epoch: int) -> None:
        """Begin a new epoch with an empty set; what was not sent of the old one is dropped.

        Args:
            epoch: larger than any before.
        """
        self.epoch = epoch
        self.seq = -1
        self._outbox: deque[KvBatch] = deque()
        self._empty()
        self._sent_s = float("-inf")

    def _empty(self) -> None:
        self._nodes: dict[BlockHash, _Node] = {ROOT: _Node(None, 0, 0)}
        self._told: dict[BlockHash, int] = {}
        self._dead: list[BlockHash] = []
        self._tiers = [0]
        self._joining: list[int] = []
        self._cleared = True
        self.count = 0
        self.digest = 0

    # --- changes in

    def apply(self, changes: Iterable[Change]) -> None:
        """Take changes from the mirror, in order. Saying the same thing twice changes nothing."""
        for change in changes:
            if isinstance(change, Held):
                self._hold(change.parent, change.hashes, change.tier)
            elif isinstance(change, Gone):
                self._let_go(change.hashes)
            else:
                assert isinstance(change, Cleared)
                self._empty()

    def _hold(self, parent: BlockHash, hashes: list[BlockHash], tier: int) -> None:
        if tier not in self._tiers:
            self._tiers.append(tier)
            self._joining.append(tier)
        nodes, told = self._nodes, self._told
        above = nodes.get(parent)
        if above is None:
            above = nodes[parent] = _Node(None, ABSENT, ABSENT)
        for block in hashes:
            reach = above.reach if above.reach > tier else tier
            node = nodes.get(block)
            if node is None:
                node = nodes[block] = _Node(parent, tier, reach)
                self._link(above, block)
                if reach != ABSENT:
                    told.setdefault(block, ABSENT)
            else:
                if node.parent is None:
                    node.parent = parent
                    self._link(above, block)
                node.level = tier
                if node.reach != reach:
                    self._spread(block, node, reach)
            parent, above = block, node

    def _link(self, above: _Node, block: BlockHash) -> None:
        children = above.children
        if children is None:
            above.children = block
        elif isinstance(children, set):
            children.add(block)
        else:
            above.children = {children, block}

    def _let_go(self, hashes: list[BlockHash]) -> None:
        nodes = self._nodes
        for block in hashes:
            node = nodes.get(block)
            if node is None or node.level == ABSENT:
                continue
            node.level = ABSENT
            if node.children is None:
                self._dead.append(block)
            if node.reach != ABSENT:
                self._spread(block, node, ABSENT)

    def _spread(self, block: BlockHash, node: _Node, reach: int) -> None:
        """Set a block's reach, and its descendants' as far as theirs follow."""
        nodes, told = self._nodes, self._told
        told.setdefault(block, node.reach)
        node.reach = reach
        if node.children is None:
            return
        stack = [node]
        while stack:
            above = stack.pop()
            for child in _each(above.children):
                below = nodes[child]
                reach = above.reach if above.reach > below.level else below.level
                if reach != below.reach:
                    told.setdefault(child, below.reach)
                    below.reach = reach
                    stack.append(below)

    # --- batches out

    def flush(self, now_s: float, wall_s: float) -> KvBatch | None:
        """Return the next batch to publish, None if there is none; call until None.

        Args:
            now_s: monotonic seconds, for the heartbeat.
            wall_s: Unix seconds, for people.
        """
        if not self._outbox:
            self._collect(wall_s)
        if not self._outbox and now_s - self._sent_s >= self.config.heartbeat_s:
            self._emit([], wall_s)
        if not self._outbox:
            return None
        self._sent_s = now_s
        return self._outbox.popleft()

    def _collect(self, wall_s: float) -> None:
        """Put what changed since the last time into the outbox."""
        if not (self._told or self._cleared or self._joining):
            self._bury()
            return
        nets = [(tier, *self._net(tier)) for tier in sorted(self._tiers)]
        operations: list[KvOp] = [KvCleared()] if self._cleared else []
        whole = sum(len(gone) for _, gone, _ in nets) <= self.config.batch_hashes_max
        for tier, gone, _ in nets:
            if gone:
                operations.append(self._removal(gone, tier, whole))
        for tier, _, fresh in reversed(nets):
            operations += self._stores(fresh, tier)
        self._told = {}
        self._cleared = False
        self._joining = []
        self._bury()
        if operations:
            self._cut(operations, wall_s)

    def _net(self, tier: int) -> tuple[dict[BlockHash, None], dict[BlockHash, None]]:
        """Return the blocks that left a tier's set and those that joined it, since last told."""
        if tier in self._joining:
            return {}, dict.fromkeys(self._reachable(tier))
        nodes = self._nodes
        gone: dict[BlockHash, None] = {}
        fresh: dict[BlockHash, None] = {}
        for block, was in self._told.items():
            reach = nodes[block].reach
            if reach <= tier:
                if was > tier:
                    fresh[block] = None
            elif was <= tier:
                gone[block] = None
        return gone, fresh

    def _removal(self, gone: dict[BlockHash, None], tier: int, whole: bool) -> KvRemoved:
        """Return the operation that removes blocks; children go first unless it stays `whole`."""
        if whole:
            return KvRemoved(pack_hashes(list(gone)), tier)
        ordered = [block for _, chain in self._chains(gone) for block in chain]
        ordered.reverse()
        return KvRemoved(pack_hashes(ordered), tier)

    def _stores(self, fresh: dict[BlockHash, None], tier: int) -> list[KvOp]:
        return [
            KvStored(pack_hashes(chain), parent if parent != ROOT else None, tier)
            for parent, chain in self._chains(fresh)
        ]

    def _chains(
        self, members: dict[BlockHash, None]
    ) -> Iterator[tuple[BlockHash, list[BlockHash]]]:
        """Yield all members as chains under their parents, parents first. Empties `members`."""
        nodes = self._nodes
        chain: list[BlockHash] = []
        start = last = ROOT
        for block in list(members):
            if block not in members:
                continue
            parent = nodes[block].parent
            if parent == last and chain:
                chain.append(block)
                last = block
                del members[block]
                continue
            if chain:
                yield start, chain
            path = [block]
            while parent in members:
                path.append(parent)
                parent = nodes[parent].parent
            path.reverse()
            for step in path:
                del members[step]
            assert parent is not None, "a published block has a known parent"
            start, chain, last = parent, path, block
        if chain:
            yield start, chain

    def _bury(self) -> None:
        """Forget blocks that are gone, and holes that have lost their last child."""
        nodes = self._nodes
        for block in self._dead:
            node = nodes.get(block)
            while node is not None and node.level == ABSENT and node.children is None:
                del nodes[block]
                if node.parent is None:
                    break
                above = nodes[node.parent]
                if isinstance(above.children, set):
                    above.children.discard(block)
                    if not above.children:
                        above.children = None
                else:
                    above.children = None
                block, node = node.parent, above
        self._dead = []

    def _cut(self, operations: list[KvOp], wall_s: float) -> None:
        """Make batches of bounded size out of operations."""
        room = self.config.batch_hashes_max
        batch: list[KvOp] = []
        for operation in operations:
            if isinstance(operation, KvCleared):
                batch.append(operation)
                continue
            rest: KvStored | KvRemoved = operation
            while len(rest.hashes) > 8 * room:
                first, rest = _split(rest, room)
                self._emit([*batch, first] if room else batch, wall_s)
                batch, room = [], self.config.batch_hashes_max
            batch.append(rest)
            room -= len(rest.hashes) // 8
        self._emit(batch, wall_s)

    def _emit(self, operations: list[KvOp], wall_s: float) -> None:
        for operation in operations:
            if isinstance(operation, KvCleared):
                continue
            view = memoryview(operation.hashes).cast("Q")
            self.digest = reduce(xor, view, self.digest)
            self.count += len(view) if isinstance(operation, KvStored) else -len(view)
        self.seq += 1
        self._outbox.append(
            KvBatch(
                self.instance_id, self.epoch, self.seq, wall_s, operations, self.count, self.digest
            )
        )

    # --- the whole set

    def snapshot(self, wall_s: float) -> list[SnapshotChunk]:
        """Return the whole published set as of the last batch made, at least one chunk.

        Pending changes are made into batches first; they wait in the outbox, so the caller flushes
        until None and publishes before it answers.

        Complexity: linear in the blocks, about 0.3 µs each.
        """
        self._collect(wall_s)
        if self.seq < 0:
            self._emit([], wall_s)
        most = self.config.chunk_hashes_max
        parts = [
            (tier, blocks[at : at + most])
            for tier in sorted(self._tiers)
            for blocks in [self._reachable(tier)]
            for at in range(0, len(blocks), most)
        ] or [(0, [])]
        return [
            SnapshotChunk(
                self.instance_id,
                self.epoch,
                self.seq,
                index,
                len(parts),
                pack_hashes(blocks),
                tier,
                self.count,
                self.digest,
            )
            for index, (tier, blocks) in enumerate(parts)
        ]

    def _reachable(self, tier: int) -> list[BlockHash]:
        """Return the blocks of a tier's present set, parents before children."""
        nodes = self._nodes
        found: list[BlockHash] = []
        stack = [ROOT]
        while stack:
            below = nodes[stack.pop()].children
            while isinstance(below, int):  # a chain without branches, the common case
                node = nodes[below]
                if node.reach > tier:
                    break
                found.append(below)
                below = node.children
            else:
                reached = [child for child in below or () if nodes[child].reach <= tier]
                found += reached
                stack += reached
        return found

    @property
    def pending(self) -> int:
        """Blocks whose change has not been made into a batch."""
        return len(self._told)

    @property
    def withheld(self) -> int:
        """Blocks in memory that are not published for want of an ancestor; linear time."""
        return sum(node.level != ABSENT and node.reach == ABSENT for node in self._nodes.values())

    def published(self, tier: int = 0) -> set[BlockHash]:
        """Return the present set of a tier, pending changes included."""
        return set(self._reachable(tier)) if tier in self._tiers else set()

    def validate(self) -> None:
        """Assert the invariants of the module's head by deriving everything anew."""
        for block, node in self._nodes.items():
            for child in _each(node.children):
                assert self._nodes[child].parent == block
            if block == ROOT:
                continue
            above = self._nodes[node.parent] if node.parent is not None else None
            assert node.reach == max(node.level, above.reach if above else ABSENT)
            assert above is None or block in _each(above.children)
            assert node.level != ABSENT or node.children is not None or block in self._dead
        if not (self._told or self._joining):
            sets = [self.published(tier) for tier in self._tiers]
            assert self.count == sum(map(len, sets))
            assert self.digest == reduce(xor, (block for each in sets for block in each), 0)


_BlockOp = KvStored | KvRemoved


def _split(operation: _BlockOp, room: int) -> tuple[_BlockOp, _BlockOp]:
    """Return an operation as two, the first with `room` hashes."""
    head, tail = operation.hashes[: 8 * room], operation.hashes[8 * room :]
    if isinstance(operation, KvRemoved):
        return KvRemoved(head, operation.tier), KvRemoved(tail, operation.tier)
    parent = int.from_bytes(head[-8:], "little") if head else operation.parent
    return KvStored(head, operation.parent, operation.tier), KvStored(tail, parent, operation.tier)
