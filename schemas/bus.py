"""The messages on the bus.

Every message is a tagged map in msgpack, so that any language can read it. Fields are only ever
appended, with defaults: bytes of an earlier version stay decodable (`tests/schemas/golden`).

Times that end in `_wall_s` are the sender's wall clock in Unix seconds: for people and audits,
never for decisions. Every stream carries `(epoch, seq)`: `epoch` names one incarnation of the
sender's state, `seq` counts its messages from 0 without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from schemas.codec import decoder


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of all messages."""


# --- kv: who caches what ------------------------------------------------------------------------


class KvStored(Message, frozen=True, tag="stored"):
    """A chain of blocks joined the published set.

    Attributes:
        hashes: packed BlockHash values, u64 little endian, in prompt order; none of them was in
            the set before.
        parent: the BlockHash before the first one, in the set; None at the root.
        tier: 0 is the engine's own memory; tier k holds what is reusable from tiers 0 to k.
    """

    hashes: bytes
    parent: int | None = None
    tier: int = 0


class KvRemoved(Message, frozen=True, tag="removed"):
    """Blocks left the published set; every child left with or before its parent."""

    hashes: bytes
    tier: int = 0


class KvCleared(Message, frozen=True, tag="cleared"):
    """The published set is empty."""


KvOp = KvStored | KvRemoved | KvCleared


class KvBatch(Message, frozen=True, tag="kv_batch"):
    """A change of one instance's published block set; with no `ops`, a heartbeat.

    Attributes:
        count: how many (tier, block) pairs the set holds after this batch.
        digest: XOR of the hashes of those pairs: a receiver whose own differs must resync.
    """

    instance_id: str
    epoch: int
    seq: int
    sent_wall_s: float
    ops: list[KvOp] = []
    count: int = 0
    digest: int = 0


class SnapshotRequest(Message, frozen=True, tag="snapshot_request"):
    """A router asks a sidecar for its whole published set."""

    router_id: str


class SnapshotChunk(Message, frozen=True, tag="snapshot_chunk"):
    """One part of a published set as of `(epoch, seq)`; chunk `index` of `chunks`, from 0.

    Attributes:
        hashes: packed BlockHash values, u64 little endian, parents before children.
        count: as in `KvBatch`, of the whole snapshot.
        digest: as in `KvBatch`, of the whole snapshot.
    """

    instance_id: str
    epoch: int
    seq: int
    index: int
    chunks: int
    hashes: bytes
    tier: int = 0
    count: int = 0
    digest: int = 0


# --- load ---------------------------------------------------------------------------------------


class LoadReport(Message, frozen=True, tag="load"):
    """What the engine says of itself.

    Attributes:
        running: requests in the engine's batch (`vllm:num_requests_running`).
        waiting: requests in the engine's queue (`vllm:num_requests_waiting`).
        server_load: requests in the API process, queued ones included (`/load`); None where the
            server does not track it. Immediate, whereas the two above lag by an engine step.
        kv_usage: share of blocks held by running requests, 0 to 1.
        prefill_tokens_per_s: computed prompt tokens per second, recent; None if none ran.
        decode_tokens_per_s: generated tokens per second, recent; None if none ran.
    """

    instance_id: str
    epoch: int
    seq: int
    sent_wall_s: float
    running: int
    waiting: int
    server_load: int | None = None
    kv_usage: float = 0.0
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None


# --- route: what routers decided ----------------------------------------------------------------


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One instance as the decision saw it: P = queued + max(prompt − hit, 1), B before the +1."""

    instance_id: str
    hit_tokens: int
    queued_tokens: int
    batch_size: int
    score: float
    eligible: bool = True


class ClassCoverage(msgspec.Struct, frozen=True, array_like=True):
    """The request's class at one prefix depth, as the hotspot detector needs it.

    Attributes:
        key: BlockHash of the prefix of `depth_blocks` blocks.
        holders: |M|, how many instances cache it.
        best_inside: smallest score in M, None if M is empty or none of it is eligible.
        best_outside: smallest score outside M, likewise.
    """

    key: int
    depth_blocks: int
    holders: int
    best_inside: float | None = None
    best_outside: float | None = None


class Routed(Message, frozen=True, tag="routed"):
    """A request was sent to an instance.

    Attributes:
        attempt: 0, or the how manieth retry this is.
        prompt_tokens: None where the request could not be tokenized exactly.
        hit_tokens: what the index promised on the chosen instance.
        new_tokens: what the ledger booked as queued prefill on it.
        policy: the policy that decided, after overrides and degradation.
        reason: why that policy or that set of candidates, where it was not the default.
        trust: of the chosen instance's block set: exact, resyncing or stale.
        kv_seq: (epoch, seq) of the chosen instance's block stream at the decision.
        candidates: in full or empty, as the router's audit sampling says.
        fleet: N, instances that serve this model.
    """

    request_id: str
    instance_id: str
    at_wall_s: float
    attempt: int = 0
    prompt_tokens: int | None = None
    hit_tokens: int = 0
    new_tokens: int = 0
    batch_size: int = 0
    queued_tokens: int = 0
    score: float = 0.0
    policy: str = "multiplicative"
    reason: str = ""
    trust: str = "exact"
    kv_seq: tuple[int, int] | None = None
    tenant: str = ""
    fleet: int = 0
    classes: list[ClassCoverage] = []
    candidates: list[Candidate] = []
    decide_s: float = 0.0
    tokenize_s: float = 0.0
    queue_s: float = 0.0


class Prefilled(Message, frozen=True, tag="prefilled"):
    """A request's queued prefill tokens were released: its prompt is computed."""

    request_id: str
    instance_id: str
    new_tokens: int
    ttft_s: float | None = None


class Finished(Message, frozen=True, tag="finished"):
    """A booking ended, however it ended.

    Attributes:
        outcome: ok, client_gone, upstream_error, timeout, retried.
        released_tokens: queued prefill tokens that were still booked.
        cached_tokens: what the engine reported, None where it does not.
    """

    request_id: str
    instance_id: str
    outcome: str
    status: int
    at_wall_s: float
    released_tokens: int = 0
    prompt_tokens: int | None = None
    hit_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    tenant: str = ""


class RouterTotals(Message, frozen=True, tag="totals"):
    """A router's own bookings: instance id → (batch size, queued prefill tokens). It heals losses.

    The totals are as of this message's place in the stream; an instance that is absent has none.
    """

    bookings: dict[str, tuple[int, int]] = {}


RouteEvent = Routed | Prefilled | Finished | RouterTotals


class RouteBatch(Message, frozen=True, tag="route_batch"):
    """What one router did for one model, in order."""

    router_id: str
    epoch: int
    seq: int
    sent_wall_s: float
    events: list[RouteEvent] = []


# --- hotspot and policy -------------------------------------------------------------------------


class HotspotRaised(Message, frozen=True, tag="hotspot_raised"):
    """Requests of class `key` must not go to `instances` until cleared or expired.

    Attributes:
        share: (class requests, all requests) in the window.
        streak: consecutive class requests that still preferred M.
    """

    key: int
    depth_blocks: int
    instances: list[str]
    revision: int
    raised_wall_s: float
    ttl_s: float
    share: tuple[int, int] = (0, 0)
    holders: int = 0
    fleet: int = 0
    streak: int = 0
    best_inside: float | None = None
    best_outside: float | None = None
    reason: str = ""


class HotspotCleared(Message, frozen=True, tag="hotspot_cleared"):
    """The verdict on class `key` is lifted."""

    key: int
    depth_blocks: int
    revision: int
    cleared_wall_s: float
    reason: str = ""


class PolicyOverride(Message, frozen=True, tag="policy_override"):
    """Use `policy` instead of the configured one; an empty `policy` ends the override."""

    policy: str
    revision: int
    set_wall_s: float
    ttl_s: float | None = None
    by: str = ""
    reason: str = ""


class Drain(Message, frozen=True, tag="drain"):
    """Send no new requests to an instance (`on`), or take it back."""

    instance_id: str
    on: bool
    revision: int
    set_wall_s: float
    by: str = ""
    reason: str = ""


class Blacklist(Message, frozen=True, tag="blacklist"):
    """An operator keeps an instance from new requests for a while, class or no class."""

    instance_id: str
    on: bool
    revision: int
    set_wall_s: float
    ttl_s: float | None = None
    by: str = ""
    reason: str = ""


# --- records in key-value buckets ---------------------------------------------------------------


class InstanceRecord(Message, frozen=True, tag="instance"):
    """What a router must know of an instance; renewed by the sidecar as a heartbeat.

    Attributes:
        model: the model id on the bus: the engine's first served name.
        aliases: other names that the engine answers to (served names, LoRA adapters).
        url: base URL of the engine's API server.
        dp_rank: value for `X-data-parallel-rank`; None where the engine has a single rank.
        block_size: tokens a block; 0 where the engine publishes no blocks.
        card: digest of its ModelCard in the object store; empty where it has none.
        epoch: of its block stream.
        state: starting, ready, draining or stopped.
        kv_events: whether its block set is published at all.
    """

    instance_id: str
    model: str
    url: str
    epoch: int
    state: Literal["starting", "ready", "draining", "stopped"] = "ready"
    aliases: list[str] = []
    loras: list[str] = []
    dp_rank: int | None = None
    block_size: int = 0
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    engine_version: str = ""
    card: str = ""
    kv_events: bool = True
    heartbeat_s: float = 2.0
    seq: int = 0
    sent_wall_s: float = 0.0


class RouterLease(Message, frozen=True, tag="router"):
    """A router is alive; its bookings count only while it renews this."""

    router_id: str
    epoch: int
    seq: int
    sent_wall_s: float
    heartbeat_s: float = 1.0


class LeaderLease(Message, frozen=True, tag="leader"):
    """Who leads a service that must have one leader."""

    holder: str
    sent_wall_s: float
    ttl_s: float


class ModelCard(Message, frozen=True, tag="model_card"):
    """What turns a request into the engine's token ids.

    Attributes:
        tokenizer: the bytes of `tokenizer.json`; empty where there is none.
        chat_template: Jinja source; None where the model has none.
        special_tokens: name (`bos_token`, `eos_token` …) → text, for the template.
        adds_special_tokens: whether plain prompts get the tokenizer's special tokens (BOS).
    """

    model: str
    tokenizer: bytes
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    adds_special_tokens: bool = True
    block_size: int = 0
    max_model_len: int | None = None
    tokenizer_config: dict[str, Any] = {}


Bytes = bytes | memoryview

decode_kv: Callable[[Bytes], KvBatch] = decoder(KvBatch)
decode_snapshot_request: Callable[[Bytes], SnapshotRequest] = decoder(SnapshotRequest)
decode_snapshot_chunk: Callable[[Bytes], SnapshotChunk] = decoder(SnapshotChunk)
decode_load: Callable[[Bytes], LoadReport] = decoder(LoadReport)
decode_route: Callable[[Bytes], RouteBatch] = decoder(RouteBatch)
decode_hotspot: Callable[[Bytes], HotspotRaised | HotspotCleared] = decoder(
    HotspotRaised | HotspotCleared
)
decode_policy: Callable[[Bytes], PolicyOverride | Drain | Blacklist] = decoder(
    PolicyOverride | Drain | Blacklist
)
decode_instance: Callable[[Bytes], InstanceRecord] = decoder(InstanceRecord)
decode_router: Callable[[Bytes], RouterLease] = decoder(RouterLease)
decode_leader: Callable[[Bytes], LeaderLease] = decoder(LeaderLease)
decode_card: Callable[[Bytes], ModelCard] = decoder(ModelCard)
