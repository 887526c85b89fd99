"""vLLM's KV-cache events, in both of its encodings (vllm/distributed/kv_events.py).

A ZMQ message has three frames: topic, sequence number (u64, big endian), payload. The payload is
an array `[ts, events, data_parallel_rank]`. Up to vLLM 0.23 each event is a positional array
`["BlockStored", …]`, as long as that version knew fields; since then it is a map whose key `type`
holds the tag. Both are decoded here into the same classes; fields and tags that a newer vLLM adds
are ignored, and an event that cannot be understood costs only itself, never its batch.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Literal

import msgspec

from schemas.codec import RemoteError

EngineBlockHash = int | bytes
"""vLLM's own name for a block: the low 64 bits of its hash, or all of it as bytes."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that became reusable: a chain that hangs from `parent_block_hash`.

    Attributes:
        block_hashes: (n,) names of the blocks, in prompt order.
        parent_block_hash: the block before the first one; None at the root of a prompt.
        token_ids: (n × block_size,) their tokens; other lengths occur in sparse (sliding-window)
            groups and in placeholder events of offloading tiers.
        extra_keys: (n,) what else went into each hash: LoRA name, cache salt (first block only),
            multimodal items; None where nothing did.
    """

    block_hashes: list[EngineBlockHash]
    parent_block_hash: EngineBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True):
    """Physical copies of blocks that are gone; another copy of the same block may remain."""

    block_hashes: list[EngineBlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The engine's whole prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def _always() -> None:
    """Return the default of a field that vLLM never leaves out of its maps, None or not."""


class _MapStored(BlockStored, frozen=True, tag="BlockStored", tag_field="type"):
    lora_id: int | None = msgspec.field(default_factory=_always)
    medium: str | None = msgspec.field(default_factory=_always)
    lora_name: str | None = msgspec.field(default_factory=_always)


class _MapRemoved(BlockRemoved, frozen=True, tag="BlockRemoved", tag_field="type"):
    medium: str | None = msgspec.field(default_factory=_always)


class _MapCleared(AllBlocksCleared, frozen=True, tag="AllBlocksCleared", tag_field="type"):
    pass


class _ArrayStored(BlockStored, frozen=True, tag="BlockStored", array_like=True):
    pass


class _ArrayRemoved(BlockRemoved, frozen=True, tag="BlockRemoved", array_like=True):
    pass


class _ArrayCleared(AllBlocksCleared, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


class EventBatch(msgspec.Struct, frozen=True):
    """One decoded payload.

    Attributes:
        ts: the engine's wall clock, seconds; never compared with a monotonic clock.
        events: the events that were understood, in order.
        rejected: how many were not (unknown tag, wrong shape).
        data_parallel_rank: the publishing rank, where the engine says it.
    """

    ts: float
    events: list[Event]
    rejected: int = 0
    data_parallel_rank: int | None = None


_MapEvent = _MapStored | _MapRemoved | _MapCleared
_ArrayEvent = _ArrayStored | _ArrayRemoved | _ArrayCleared


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_MapEvent]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ArrayEvent]
    data_parallel_rank: int | None = None


# A batch of which every event is understood, as nearly all are, is decoded as a whole: twice
# as fast as event by event.
_WHOLE = (msgspec.msgpack.Decoder(_MapBatch), msgspec.msgpack.Decoder(_ArrayBatch))
_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_MAP_EVENT = msgspec.msgpack.Decoder(_MapEvent)
_ARRAY_EVENT = msgspec.msgpack.Decoder(_ArrayEvent)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _is_array(raw: memoryview) -> bool:
    """True if msgpack bytes begin with an array header (fixarray, array16, array32)."""
    first = raw[0]
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Decode the third frame of a KV-event message.

    Raises:
        RemoteError: the batch itself is not of the documented form.
    """
    for decoder in _WHOLE:
        try:
            whole: Any = decoder.decode(payload)
        except _MALFORMED:
            continue
        return EventBatch(whole.ts, whole.events, 0, whole.data_parallel_rank)
    return _decode_one_by_one(payload)


def _decode_one_by_one(payload: bytes | memoryview) -> EventBatch:
    """Decode what can be decoded of a batch. Raises RemoteError."""
    try:
        raw = _BATCH.decode(payload)
    except _MALFORMED as error:
        raise RemoteError(f"not a KV event batch: {error}") from error
    events: list[Event] = []
    for item in raw.events:
        view = memoryview(item)
        try:
            events.append(_ARRAY_EVENT.decode(view) if _is_array(view) else _MAP_EVENT.decode(view))
        except _MALFORMED:
            continue
    rejected = len(raw.events) - len(events)
    return EventBatch(raw.ts, events, rejected, raw.data_parallel_rank)


_fields_of_stored = attrgetter(*BlockStored.__struct_fields__)
_fields_of_removed = attrgetter(*BlockRemoved.__struct_fields__)


def _as(event: Event, encoding: Literal["map", "array"]) -> Event:
    array = encoding == "array"
    if isinstance(event, BlockStored):
        stored = _ArrayStored if array else _MapStored
        return stored(*_fields_of_stored(event))
    if isinstance(event, BlockRemoved):
        removed = _ArrayRemoved if array else _MapRemoved
        return removed(*_fields_of_removed(event))
    return _ArrayCleared() if array else _MapCleared()


def encode_batch(
    ts: float,
    events: list[Event],
    data_parallel_rank: int | None = None,
    encoding: Literal["map", "array"] = "map",
) -> bytes:
    """Encode a batch as vLLM does: what the emulated engine publishes.

    Args:
        ts: wall clock, seconds.
        events: in order.
        data_parallel_rank: the publishing rank.
        encoding: `map` as vLLM since 0.24, `array` as before.
    """
    return msgspec.msgpack.encode([ts, [_as(e, encoding) for e in events], data_parallel_rank])
