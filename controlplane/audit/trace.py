"""A recorded stretch of traffic as a trace, to be replayed under any policy.

The format is Qwen-Bailian's: a JSON line a request, with its time, its lengths, and an id for each
block of 16 tokens of its prompt, equal where prefixes are equal. Routers say the hash of a prompt's
last whole block, of those at a few depths, and of those where hits end; the others follow from the
`kv` stream, where each block that is stored names the one before it. So a request is written a
little after its end, when its blocks have been stored. Blocks that are not in the record, such as
those that were cached before it began, get ids that follow from the first block after them that is;
a last block that is not whole is nobody else's.

Bounds: `blocks_max` blocks whose parents are remembered, `waiting_max` requests that wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

import msgspec

from controlplane.audit.heard import Heard, Unreadable, is_plausible, is_time
from controlplane.core.hashing import ROOT, unpack_hashes
from schemas.bus import Finished, KvBatch, KvStored, RouteBatch, Routed

TRACE_BLOCK_TOKENS = 16
_STEP = 0x9E37_79B9_7F4A_7C15  # odd, so that no two steps from one block meet
_U64 = (1 << 64) - 1


def _named(event: Routed) -> dict[int, int]:
    """Return the blocks of a prompt that its decision names: depth → hash."""
    named = {each.depth_blocks: each.key for each in event.classes}
    if event.candidates is not None:
        named |= {level.depth_blocks: level.key for level in event.candidates.levels}
    return named


def _blocks_of(event: Routed) -> int:
    """Return how many whole blocks a prompt has; those without any have no key."""
    return (event.prompt_tokens or 0) // event.block_size if event.block_size else 0


class TraceLine(msgspec.Struct, frozen=True):
    """One request, as `lab.traces.read_bailian` reads it.

    Attributes:
        timestamp: seconds since the first request.
        parent_chat_id: the request whose prompt this one's begins with; −1 for none.
    """

    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _Asked(msgspec.Struct):
    event: Routed
    output_tokens: int
    ended_wall_s: float


class TraceWriter:
    """Makes trace lines of what is heard.

    Args:
        settle_s: how long after a request's end its blocks may still appear.

    Attributes:
        counts: requests written; left_out, by why; blocks_unknown, made up since the record does
            not have them, of `blocks` in all.
    """

    def __init__(
        self, settle_s: float = 1.0, blocks_max: int = 4_000_000, waiting_max: int = 100_000
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._settle_s = settle_s
        self._blocks_max = blocks_max
        self._waiting_max = waiting_max
        self._parents: OrderedDict[int, int] = OrderedDict()
        self._running: OrderedDict[tuple[str, str], Routed] = OrderedDict()
        self._ended: deque[_Asked] = deque()
        self._ids: OrderedDict[int, int] = OrderedDict()
        self._chats: OrderedDict[int, int] = OrderedDict()
        self._next_id = self._next_chat = 0
        self._began_wall_s: float | None = None

    def hear(self, heard: Heard | Unreadable) -> Iterator[TraceLine]:
        """Take the next message; yield the requests that are complete."""
        if isinstance(heard, Unreadable):
            self.counts["unreadable"] += 1
            return
        message = heard.message
        if isinstance(message, KvBatch):
            for op in message.ops:
                if isinstance(op, KvStored):
                    self._stored(op)
        elif isinstance(message, RouteBatch):
            for event in message.events:
                self._event(message.router_id, event)
        yield from self._settled(heard.at_wall_s - self._settle_s)

    def end(self) -> Iterator[TraceLine]:
        """Yield the requests that still waited for their blocks."""
        yield from self._settled(float("inf"))

    def _stored(self, op: KvStored) -> None:
        parent = ROOT if op.parent is None else op.parent
        for block in unpack_hashes(op.hashes):
            self._parents[block] = parent
            parent = block
        while len(self._parents) > self._blocks_max:
            self._parents.popitem(last=False)

    def _event(self, router_id: str, event: object) -> None:
        if isinstance(event, Routed) and not event.attempt:
            if not is_plausible(event):
                self.counts["left out: no router would say that"] += 1
                return
            known = event.exact and event.prompt_tokens and event.block_size
            if not known or (event.prompt_key is None and _blocks_of(event)):
                self.counts["left out: no tokens known"] += 1
            elif event.block_size % TRACE_BLOCK_TOKENS:
                self.counts[f"left out: blocks of {event.block_size} tokens"] += 1
            else:
                if self._began_wall_s is None:
                    self._began_wall_s = event.at_wall_s
                self._running[router_id, event.request_id] = event
                if len(self._running) > self._waiting_max:
                    self._running.popitem(last=False)
                    self.counts["left out: too many under way"] += 1
        elif isinstance(event, Finished) and event.outcome != "retried":
            routed = self._running.pop((router_id, event.request_id), None)
            if routed is not None and is_time(event.at_wall_s):
                output = max(event.output_tokens or 1, 1)
                self._ended.append(_Asked(routed, output, event.at_wall_s))

    def _settled(self, before_wall_s: float) -> Iterator[TraceLine]:
        while self._ended and (
            self._ended[0].ended_wall_s < before_wall_s or len(self._ended) > self._waiting_max
        ):
            yield self._line(self._ended.popleft())

    def _line(self, asked: _Asked) -> TraceLine:
        event = asked.event
        assert event.prompt_tokens is not None
        chain = self._chain(event)
        per_block = event.block_size // TRACE_BLOCK_TOKENS
        ids: list[int] = []
        parent = -1
        for block in chain:
            first = self._id_of(block, per_block)
            ids += range(first, first + per_block)
            parent = self._chats.get(block, parent)
        blocks = -(-event.prompt_tokens // TRACE_BLOCK_TOKENS)
        while len(ids) < blocks:
            ids.append(self._id_of(0, 1))
        assert self._began_wall_s is not None
        line = TraceLine(
            self._next_chat,
            parent,
            max(event.at_wall_s - self._began_wall_s, 0.0),
            event.prompt_tokens,
            asked.output_tokens,
            ids,
        )
        self.counts["requests"] += 1
        if chain:
            self._remember(self._chats, chain[-1], self._next_chat)
        self._next_chat += 1
        return line

    def _chain(self, event: Routed) -> list[int]:
        """Return what stands for each of the prompt's whole blocks, in order."""
        length = _blocks_of(event)
        if event.prompt_key is None:
            assert not length
            return []
        named = _named(event) | {length: event.prompt_key}
        known, at = event.prompt_key, length
        chain: list[int] = []
        for depth in range(length, 0, -1):
            block = named.get(depth) or self._parents.get(chain[-1], ROOT)
            if block == ROOT:
                self.counts["blocks_unknown"] += 1
                block = known + (at - depth) * _STEP & _U64
            else:
                known, at = block, depth
            chain.append(block)
        self.counts["blocks"] += length
        return chain[::-1]

    def _id_of(self, block: int, ids: int) -> int:
        """Return the first of the ids of a block; 0 is a block that is nobody else's."""
        known = self._ids.get(block) if block else None
        if known is not None:
            return known
        first, self._next_id = self._next_id, self._next_id + ids
        if block:
            self._remember(self._ids, block, first)
        return first

    def _remember(self, known: OrderedDict[int, int], block: int, value: int) -> None:
        known[block] = value
        while len(known) > self._blocks_max:
            known.popitem(last=False)
