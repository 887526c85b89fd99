"""The prefix cache: message prefixes → token ids and block-hash chains.

A prompt is a sequence of *segments*, pieces of its text whose tokenizations can be concatenated
(`router/segments.py`). A trie over segments keeps what a prefix is worth: how many tokens it has
and the hashes of its whole blocks. A next turn walks the trie, one dict look-up a segment, and pays
for its new segments alone.

Theory of operation:

- A `Space` is one tokenizer and block size. Its segments are interned: the same text at any place
  of any prompt is tokenized and kept once. Look-ups compare whole texts, so they are exact.
- A root is one way to begin: extras (LoRA, cache salt) and opening tokens (BOS). Chains under
  different roots never mix, though their segments are shared.
- A node keeps the hashes of the blocks that its segment completed, and the `tail`: the tokens after
  the last whole block, from which the chain goes on.
- A `Handle` is a counted reference to a node: neither it nor its ancestors are evicted while the
  handle is out. Handles are bounded; a refused one costs reuse, never correctness.
- The order of use changes when a handle comes back: its path is touched from the leaf to the root,
  so that a parent comes after its children unless one of them is pinned. Eviction walks the order
  once, from the oldest, and takes what is neither pinned nor a parent.

Pure: no clock, no I/O. Not thread-safe: one event loop owns it. `check()` derives all again.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from controlplane.core.hashing import ROOT, BlockHash, Extras, chain

BUDGET_BYTES_DEFAULT = 500_000_000
HANDLES_MAX_DEFAULT = 65_536

# Sizes in CPython 3.11 beside texts and tokens, on average: the object with its slots, its entry in
# the table that finds it and in the order of use (tests/router/test_prefix_cache.py measures them).
SEGMENT_BYTES = 200
NODE_BYTES = 600
HASH_BYTES = 8 + 32  # a list's pointer and an int of 64 bits


class Stats(msgspec.Struct):
    """Counters since the cache was made, and sizes as of now.

    Attributes:
        lookups: prompts looked up.
        hit_tokens: tokens of theirs that were found.
        hit_segments: segments found.
        new_segments: segments added to a prefix.
        evictions: nodes evicted.
        refused_handles: handles refused at their bound.
        nodes: nodes now, roots included.
        segments: distinct segments now.
        handles: handles out now.
        bytes_used: what nodes and segments take now; over the budget only while pinned.
    """

    lookups: int = 0
    hit_tokens: int = 0
    hit_segments: int = 0
    new_segments: int = 0
    evictions: int = 0
    refused_handles: int = 0
    nodes: int = 0
    segments: int = 0
    handles: int = 0
    bytes_used: int = 0


class _Segment:
    """A text and its token ids (u32 bytes); `uses` counts the nodes that refer to it."""

    __slots__ = ("text", "tokens", "uses")

    def __init__(self, text: str, tokens: bytes) -> None:
        self.text = text
        self.tokens = tokens
        self.uses = 0

    @property
    def size_bytes(self) -> int:
        return SEGMENT_BYTES + sys.getsizeof(self.text) + sys.getsizeof(self.tokens)


class _Root:
    """The empty prefix of prompts that begin alike; also the base of all other prefixes.

    `hashes` are of the blocks that the last step completed, `last` is the hash of the last whole
    block of the prefix, `tail` holds the tokens after it; `blocks` and `tokens` count the prefix.
    """

    __slots__ = (
        *("blocks", "children", "extras", "hashes", "last", "opening", "pins"),
        *("space", "tail", "tokens"),
    )

    def __init__(self, space: Space, extras: Extras, opening: bytes) -> None:
        self.space = space
        self.extras = extras
        self.opening = opening
        self.children: dict[_Segment, _Node] | None = None
        self.pins = 0
        self.hashes: list[BlockHash] = []
        self.last: BlockHash = ROOT
        self.tail = b""
        self.blocks = 0
        self.tokens = 0

    @property
    def size_bytes(self) -> int:
        return NODE_BYTES + HASH_BYTES * len(self.hashes) + len(self.tail) + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """What only a root keeps: its salt is as long as a caller likes."""
        return sys.getsizeof(self.extras.salt) if self.extras.salt else 0

    def grow(self, before: _Root, tokens: bytes) -> None:
        """Become the prefix `before` with `tokens` (u32 bytes) appended."""
        self.hashes, self.tail = before.hash_on(tokens)
        self.last = self.hashes[-1] if self.hashes else before.last
        self.blocks = before.blocks + len(self.hashes)
        self.tokens = before.tokens + len(tokens) // 4

    def hash_on(self, tokens: bytes) -> tuple[list[BlockHash], bytes]:
        """Return the hashes of the blocks that `tokens` complete here, and the tail after them."""
        size = self.space.block_size
        if size == 0:
            return [], b""
        text = self.tail + tokens if self.tail else tokens
        hashes = chain(text, size, self.last, self.extras, self.blocks)
        return hashes, text[4 * size * len(hashes) :]


class _Node(_Root):
    """A prefix: its parent's and one segment more."""

    __slots__ = ("parent", "segment")

    def __init__(self, parent: _Root, segment: _Segment) -> None:
        super().__init__(parent.space, parent.extras, parent.opening)
        self.parent = parent
        self.segment = segment
        self.grow(parent, segment.tokens)

    @property
    def own_bytes(self) -> int:
        return 0


class Space:
    """What prompts of one model share: `PrefixCache.space` makes it, `drop` empties it."""

    __slots__ = ("block_size", "roots", "segments")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.segments: dict[str, _Segment] = {}
        self.roots: dict[tuple[Extras, bytes], _Root] = {}


class Handle:
    """A counted reference to a prefix; `PrefixCache.release` gives it back, once."""

    __slots__ = ("_node",)

    def __init__(self, node: _Root) -> None:
        self._node: _Root | None = node

    @property
    def tokens(self) -> int:
        """Length of the prefix."""
        return self._live().tokens

    @property
    def blocks(self) -> int:
        """Its whole blocks."""
        return self._live().blocks

    def hashes(self) -> list[BlockHash]:
        """Return the hashes of the prefix's whole blocks, in a new list."""
        node = self._live()
        lists = [node.hashes]
        while isinstance(node, _Node):
            node = node.parent
            if node.hashes:
                lists.append(node.hashes)
        out = lists.pop().copy()
        while lists:
            out += lists.pop()
        return out

    def hashes_with(self, tokens: bytes) -> list[BlockHash]:
        """Return the hashes of the prefix with `tokens` (u32 bytes) appended; adds nothing."""
        hashes = self.hashes()
        if tokens:
            hashes += self._live().hash_on(tokens)[0]
        return hashes

    def head(self, tokens_max: int) -> bytes:
        """Return the first token ids of the prefix (u32 bytes), at most `tokens_max` of them."""
        path: list[_Node] = []
        node = self._live()
        while isinstance(node, _Node):
            path.append(node)
            node = node.parent
        out = node.opening
        while path and len(out) < 4 * tokens_max:
            out += path.pop().segment.tokens[: 4 * tokens_max]
        return out[: 4 * tokens_max]

    def _live(self) -> _Root:
        assert self._node is not None, "the handle was released"
        return self._node


class PrefixCache:
    """Tries of message prefixes under one byte budget; see the module for how it works."""

    def __init__(
        self,
        budget_bytes: int = BUDGET_BYTES_DEFAULT,
        handles_max: int = HANDLES_MAX_DEFAULT,
    ) -> None:
        """Make an empty cache.

        Args:
            budget_bytes: prefixes are evicted when their sizes add up to more.
            handles_max: most handles that may be out at a time.
        """
        self.budget_bytes = budget_bytes
        self.handles_max = handles_max
        self.stats = Stats()
        self._order: OrderedDict[_Node, None] = OrderedDict()  # least recently used first

    def space(self, block_size: int) -> Space:
        """Return a new space; `block_size` 0 keeps tokens without hashes."""
        return Space(block_size)

    def drop(self, space: Space) -> None:
        """Forget a space's prefixes; those pinned now go as unused ones do, when room is needed.

        Complexity: the whole cache.
        """
        for node in [node for node in self._order if node.space is space]:
            if not node.pins and not node.children:
                self._unlink(node)
                del self._order[node]

    def register(
        self, space: Space, extras: Extras, texts: Sequence[str], opening: bytes = b""
    ) -> tuple[Handle, int] | None:
        """Find the longest known prefix of a prompt and pin it.

        Args:
            space: of the prompt's model.
            extras: LoRA and cache salt.
            texts: (n,) the prompt's segments.
            opening: token ids (u32 bytes) before the first segment.

        Returns:
            A handle to the prefix and how many of `texts` it holds; None at the bound on handles.

        Complexity: one look-up a segment found; hashing its text dominates.
        """
        stats = self.stats
        stats.lookups += 1
        if stats.handles >= self.handles_max:
            stats.refused_handles += 1
            return None
        node = self._root(space, extras, opening)
        known = space.segments
        depth = 0
        for text in texts:
            segment = known.get(text)
            child = node.children.get(segment) if segment and node.children else None
            if child is None:
                break
            node = child
            depth += 1
        stats.hit_segments += depth
        stats.hit_tokens += node.tokens if depth else 0
        return self._pin(node), depth

    def pin(self, handle: Handle) -> Handle | None:
        """Return one more handle to the same prefix; None at the bound on handles."""
        if self.stats.handles >= self.handles_max:
            self.stats.refused_handles += 1
            return None
        return self._pin(handle._live())

    def shorten(self, handle: Handle, blocks: int) -> None:
        """Move a handle up to the shortest known prefix that has so many whole blocks, if any."""
        node = handle._live()
        while isinstance(node, _Node) and node.parent.blocks >= blocks:
            node.pins -= 1
            node = node.parent
            node.pins += 1
        handle._node = node

    def tokens_of(self, space: Space, text: str) -> bytes | None:
        """Return the token ids (u32 bytes) of a segment that some cached prompt has."""
        segment = space.segments.get(text)
        return segment.tokens if segment else None

    def extend(self, handle: Handle, text: str, tokens: bytes) -> None:
        """Add a segment after the handle's prefix and move the handle there.

        Args:
            handle: to the prefix.
            text: the segment.
            tokens: (4 × n,) its token ids, u32 bytes: what `tokens_of` returned, or the
                tokenizer's answer.
        """
        parent = handle._live()
        segment = self._segment(parent.space, text, tokens)
        if parent.children is None:
            parent.children = {}
        node = parent.children.get(segment)
        if node is None:
            node = parent.children[segment] = _Node(parent, segment)
            segment.uses += 1
            self._order[node] = None
            self.stats.new_segments += 1
            self._account(node, +1)
        node.pins += 1
        parent.pins -= 1
        handle._node = node

    def release(self, handle: Handle) -> None:
        """Give a handle back, note the use of its prefix, and evict what is over the budget."""
        node = handle._live()
        handle._node = None
        node.pins -= 1
        self.stats.handles -= 1
        recent = self._order.move_to_end
        while isinstance(node, _Node):
            recent(node)
            node = node.parent
        self._drop_root_if_idle(node)
        if self.stats.bytes_used > self.budget_bytes:
            self._evict()

    def check(self) -> None:
        """Assert every invariant from scratch: for tests."""
        seen = {node: at for at, node in enumerate(self._order)}
        roots = {node.space.roots[node.extras, node.opening] for node in self._order}
        uses: dict[_Segment, int] = {}
        size = sum(root.size_bytes for root in roots)
        for node, at in seen.items():
            parent, segment = node.parent, node.segment
            assert parent.children is not None
            assert parent.children[segment] is node
            assert node.space.segments[segment.text] is segment
            assert node.tokens == parent.tokens + len(segment.tokens) // 4
            assert node.blocks == parent.blocks + len(node.hashes)
            assert self.stats.handles or parent in roots or seen[parent] > at  # type: ignore[index]
            uses[segment] = uses.get(segment, 0) + 1
            size += node.size_bytes
        for space in {node.space for node in self._order}:
            assert all(uses.get(segment) for segment in space.segments.values())
        assert all(segment.uses == count for segment, count in uses.items())
        assert all(root.children for root in roots)
        size += sum(segment.size_bytes for segment in uses)
        idle = self.stats.nodes - len(self._order) - len(roots)  # roots with nothing but pins
        assert 0 <= idle <= self.stats.handles
        assert self.stats.bytes_used - size == idle * NODE_BYTES or idle
        assert self.stats.segments == len(uses)
        assert sum(node.pins for node in (*seen, *roots)) <= self.stats.handles

    def _root(self, space: Space, extras: Extras, opening: bytes) -> _Root:
        root = space.roots.get((extras, opening))
        if root is None:
            root = space.roots[extras, opening] = _Root(space, extras, opening)
            root.grow(root, opening)
            self._account(root, +1)
        return root

    def _segment(self, space: Space, text: str, tokens: bytes) -> _Segment:
        segment = space.segments.get(text)
        if segment is None:
            segment = space.segments[text] = _Segment(text, tokens)
            self.stats.segments += 1
            self.stats.bytes_used += segment.size_bytes
        return segment

    def _pin(self, node: _Root) -> Handle:
        node.pins += 1
        self.stats.handles += 1
        return Handle(node)

    def _account(self, node: _Root, sign: int) -> None:
        self.stats.nodes += sign
        self.stats.bytes_used += sign * node.size_bytes

    def _evict(self) -> None:
        """Evict leaves, oldest first, until the budget is met or only pinned prefixes are left."""
        evicted: list[_Node] = []
        for node in self._order:
            if self.stats.bytes_used <= self.budget_bytes:
                break
            if not node.pins and not node.children:
                self._unlink(node)
                evicted.append(node)
        for node in evicted:
            del self._order[node]
        self.stats.evictions += len(evicted)

    def _unlink(self, node: _Node) -> None:
        """Take a leaf out of the trie, and with it a segment or a root that nothing else needs."""
        parent, segment = node.parent, node.segment
        assert parent.children is not None
        del parent.children[segment]
        if not parent.children:
            parent.children = None
        self._account(node, -1)
        segment.uses -= 1
        if segment.uses == 0:
            del node.space.segments[segment.text]
            self.stats.segments -= 1
            self.stats.bytes_used -= segment.size_bytes
        if not isinstance(parent, _Node):
            self._drop_root_if_idle(parent)

    def _drop_root_if_idle(self, root: _Root) -> None:
        """Forget a root without children and handles: cache salts come and go."""
        if not root.children and not root.pins:
            del root.space.roots[root.extras, root.opening]
            self._account(root, -1)
