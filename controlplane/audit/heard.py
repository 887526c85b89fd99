"""What was heard on the bus: messages as they are understood, or why they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from controlplane.bus.protocol import Record
from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError

Message = (
    messages.KvBatch
    | messages.LoadReport
    | messages.RouteBatch
    | messages.HotspotRaised
    | messages.HotspotCleared
    | messages.PolicyOverride
    | messages.Drain
    | messages.Blacklist
    | messages.SnapshotChunk
    | messages.InstanceRecord
)

INSTANCES_PREFIX = f"$KV.{subjects.INSTANCES}."
"""Where the server keeps the records of instances; recordings hold them under these subjects."""

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "kv": messages.decode_kv,
    "load": messages.decode_load,
    "route": messages.decode_route,
    "hotspot": messages.decode_hotspot,
    "policy": messages.decode_policy,
    "snapshot": messages.decode_snapshot_chunk,
}


class Heard(msgspec.Struct, frozen=True):
    """A message that was understood.

    Attributes:
        kind: of its subject: kv, load, route, hotspot, policy, snapshot; `instance` for records.
        source: the instance or router that it is from; empty where the subject has none.
        at_wall_s: when the server stored it, Unix seconds.
        seq: its place in its stream; 0 if it is from no stream.
    """

    kind: str
    model: str
    source: str
    message: Message
    at_wall_s: float
    seq: int = 0


class Unreadable(msgspec.Struct, frozen=True):
    """A message that was not: bytes that no version of ours sends, or that were changed."""

    subject: str
    why: str
    at_wall_s: float
    seq: int = 0


WALL_S_MAX = 1e11
PROMPT_TOKENS_MAX = 1 << 24


def is_time(wall_s: float) -> bool:
    """Whether Unix seconds are a moment that calendars know."""
    return 0.0 <= wall_s < WALL_S_MAX


def is_plausible(event: messages.Routed) -> bool:
    """Whether a decision's numbers can be: anybody on the bus may write what no router would."""
    return (
        is_time(event.at_wall_s)
        and (event.prompt_tokens or 0) <= PROMPT_TOKENS_MAX
        and all(each.depth_blocks <= PROMPT_TOKENS_MAX for each in event.classes)
        and all(0 <= number < 1 << 63 for number in event.kv_seq or ())
    )


def understand(record: Record) -> Heard | Unreadable:
    """Return what a recorded message says."""
    try:
        if record.subject.startswith(INSTANCES_PREFIX):
            key = record.subject.removeprefix(INSTANCES_PREFIX)
            model, source = subjects.parse_key(key)
            kind, message = "instance", messages.decode_instance(record.payload)
        else:
            kind, model, source = subjects.parse(record.subject)
            message = _DECODERS[kind](record.payload)
    except RemoteError as error:
        return Unreadable(record.subject, str(error), record.at_wall_s, record.seq)
    return Heard(kind, model, source, message, record.at_wall_s, record.seq)
