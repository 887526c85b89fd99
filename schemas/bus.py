"""The messages on the bus.

Every message is a tagged map in msgpack, so that any language can read it. Fields are only ever
appended, with defaults: bytes of an earlier version stay decodable (`tests/schemas/golden`).

Times that end in `_wall_s` are the sender's wall clock in Unix seconds: for people and audits,
never for decisions. Every stream carries `(epoch, seq)`: `epoch` names one incarnation of the
sender's state, `seq` counts its messages from 0 without gaps.

Decoding checks what nobody could use: negative counts, hashes cut in the middle, durations that are
negative or no number. Such bytes are a RemoteError; a reader need not look again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from schemas.codec import decoder
from schemas.message import U64, Amount, Count
from schemas.message import Message as Message
from schemas.records import InstanceRecord as InstanceRecord
from schemas.records import LatencyModel as LatencyModel
from schemas.records import LeaderLease as LeaderLease
from schemas.records import ModelCard as ModelCard
from schemas.records import RegisteredPrefix as RegisteredPrefix
from schemas.records import RouterLease as RouterLease
from schemas.records import TenantPrefixes as TenantPrefixes
from schemas.records import TokenProbe as TokenProbe
from schemas.records import TreeSet as TreeSet


def _check_packed(hashes: bytes) -> None:
    if len(hashes) % 8:
        raise ValueError(f"`hashes` holds {len(hashes)} bytes, which is no multiple of 8")


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
    parent: U64 | None = None
    tier: Count = 0

    def __post_init__(self) -> None:
        _check_packed(self.hashes)


class KvRemoved(Message, frozen=True, tag="removed"):
    """Blocks left the published set; every child left with or before its parent."""

    hashes: bytes
    tier: Count = 0

    def __post_init__(self) -> None:
        _check_packed(self.hashes)


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
    epoch: U64
    seq: Count
    sent_wall_s: float
    ops: list[KvOp] = []
    count: Count = 0
    digest: U64 = 0


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
    epoch: U64
    seq: Count
    index: Count
    chunks: Count
    hashes: bytes
    tier: Count = 0
    count: Count = 0
    digest: U64 = 0

    def __post_init__(self) -> None:
        _check_packed(self.hashes)


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
    epoch: U64
    seq: Count
    sent_wall_s: float
    running: Count
    waiting: Count
    server_load: Count | None = None
    kv_usage: Amount = 0.0
    prefill_tokens_per_s: Amount | None = None
    decode_tokens_per_s: Amount | None = None


# --- route: what routers decided ----------------------------------------------------------------


class FleetRows(Message, frozen=True, tag="fleet_rows"):
    """What the columns of a router's later decisions stand for, and how its scores are made.

    Told before the first decision that refers to it, and again every few seconds.

    Attributes:
        version: which telling of this router this is; it grows.
        instance_ids: (rows,) whose row each is.
        epochs: packed u64, little endian: the epoch of each instance's block stream; 0 if none.
        applied: column (see `CandidateColumns`) of how many batches of it were applied: seq + 1.
        policy: the configured one.
        parameters: of that policy; another one, as an override names it, has its defaults.
        tier_credit: what a hit token is worth, by memory tier.
        batch_cap: largest batch of an instance; None for no cap.
    """

    version: Count
    instance_ids: list[str]
    epochs: bytes = b""
    applied: bytes = b""
    policy: str = "multiplicative"
    parameters: dict[str, int | float | None] = {}
    tier_credit: tuple[float, ...] = (1.0,)
    batch_cap: Count | None = None

    def __post_init__(self) -> None:
        if len(self.epochs) not in (0, 8 * len(self.instance_ids)):
            raise ValueError(
                f"`epochs` holds {len(self.epochs)} bytes for {len(self.instance_ids)} instances"
            )


class PrefixLevel(msgspec.Struct, frozen=True, array_like=True):
    """A depth at which instances drop out of a prompt.

    Attributes:
        key: BlockHash of the prefix of `depth_blocks` blocks: whose hit ends here holds it.
        following: BlockHash of the block after it, which they do not hold; None if a hit cannot be
            deeper, because the last token is always computed.
    """

    depth_blocks: Count
    key: U64
    following: U64 | None = None


class CandidateColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every instance as the decision saw it: P = queued + max(prompt − hit, 1), B before the +1.

    Columns are little-endian unsigned integers of 1, 2, 4 or 8 bytes, whichever the length divided
    by the rows says; an empty one is all zeros. Sets of rows are bit sets: row r is bit r mod 8 of
    byte r // 8; an empty one is nobody.

    Attributes:
        version: of the `FleetRows` that says whose row each is.
        hit_tokens: column of the prompt's tokens in the instance's block set.
        promised_tokens: column of the tokens beyond, that requests on their way were to add.
        queued_tokens: column of queued prefill tokens.
        batch_size: column of B.
        context_tokens: column of the prompt tokens of unfinished requests, for `dynamo_cost`.
        applied: column of the batches of the block stream applied since those rows were told.
        inexact: set of the rows whose block set was not exact (resyncing or stale).
        excluded: filter → set of the rows that it excludes, in the order of the filters. One that
            would leave nobody, after those before it, was ignored.
        levels: where the prompt's hits end, by depth.
    """

    version: Count
    hit_tokens: bytes = b""
    promised_tokens: bytes = b""
    queued_tokens: bytes = b""
    batch_size: bytes = b""
    context_tokens: bytes = b""
    applied: bytes = b""
    inexact: bytes = b""
    excluded: dict[str, bytes] = {}
    levels: list[PrefixLevel] = []


class ClassCoverage(msgspec.Struct, frozen=True, array_like=True):
    """The request's class at one prefix depth, as the hotspot detector needs it.

    Attributes:
        key: BlockHash of the prefix of `depth_blocks` blocks.
        holders: |M|, how many instances cache it.
        best_inside: smallest score in M, None if M is empty or none of it is eligible.
        best_outside: smallest score outside M, likewise.
    """

    key: U64
    depth_blocks: Count
    holders: Count
    best_inside: float | None = None
    best_outside: float | None = None


class Routed(Message, frozen=True, tag="routed"):
    """A request was sent to an instance.

    Attributes:
        attempt: 0, or which retry this is, from 1.
        prompt_tokens: length of the prompt; an estimate unless `exact`.
        exact: whether the request was tokenized exactly.
        hit_tokens: what the index promised on the chosen instance.
        new_tokens: what the ledger booked as queued prefill on it.
        policy: the policy that decided, after overrides and degradation.
        reason: why that policy or that set of candidates, where it was not the default.
        trust: of the chosen instance's block set: exact, resyncing or stale.
        kv_seq: (epoch, seq) of the chosen instance's block stream at the decision.
        fleet: N, instances that serve this model.
        block_size: tokens a block of this prompt's hashes; 0 where they are not known.
        prompt_key: BlockHash of the prompt's last whole block, which stands for all before it.
        alpha: exponent of P, by tenant.
        beta: exponent of B + 1, by tenant.
        candidates: what was seen of every instance; None where the router's audit leaves it out.
        head: hash of the prompt's first token ids, for the latency predictor; None where no router
            queue needs it.
    """

    request_id: str
    instance_id: str
    at_wall_s: float
    attempt: Count = 0
    prompt_tokens: Count | None = None
    exact: bool = True
    hit_tokens: Count = 0
    new_tokens: Count = 0
    batch_size: Count = 0
    queued_tokens: Count = 0
    score: float = 0.0
    policy: str = "multiplicative"
    reason: str = ""
    trust: str = "exact"
    kv_seq: tuple[int, int] | None = None
    tenant: str = ""
    fleet: Count = 0
    classes: list[ClassCoverage] = []
    decide_s: Amount = 0.0
    tokenize_s: Amount = 0.0
    queue_s: Amount = 0.0
    block_size: Count = 0
    prompt_key: U64 | None = None
    alpha: float = 1.0
    beta: float = 1.0
    candidates: CandidateColumns | None = None
    head: U64 | None = None


class Prefilled(Message, frozen=True, tag="prefilled"):
    """A request's queued prefill tokens were released: its prompt is computed."""

    request_id: str
    instance_id: str
    new_tokens: Count
    ttft_s: Amount | None = None


class Finished(Message, frozen=True, tag="finished"):
    """A booking ended, however it ended.

    Attributes:
        outcome: ok, client_gone, upstream_error, timeout, retried.
        released_tokens: queued prefill tokens that were still booked.
        cached_tokens: what the engine reported, None where it does not.
        output_tokens: likewise; for a stream that brought no usage, about as many as it had events.
        output_estimated: it is the latter.
        ttft_s: from the request's arrival to its first byte.
        duration_s: from the booking to its end.
        before_s: from the request's arrival to the booking, failed attempts included.
        streamed: the answer came as a stream of events, so that times per token can be told.
    """

    request_id: str
    instance_id: str
    outcome: str
    status: Count
    at_wall_s: float
    released_tokens: Count = 0
    prompt_tokens: Count | None = None
    hit_tokens: Count = 0
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    ttft_s: Amount | None = None
    duration_s: Amount = 0.0
    tenant: str = ""
    output_estimated: bool = False
    before_s: Amount = 0.0
    streamed: bool = False


class RouterTotals(Message, frozen=True, tag="totals"):
    """A router's own bookings, as of this message's place in the stream. It heals losses.

    Attributes:
        bookings: instance id → (batch size, queued prefill tokens, prompt tokens of unfinished
            requests); an instance that is absent has none.
    """

    bookings: dict[str, tuple[Count, Count, Count]] = {}


RouteEvent = Routed | Prefilled | Finished | RouterTotals | FleetRows


class RouteBatch(Message, frozen=True, tag="route_batch"):
    """What one router did for one model, in order."""

    router_id: str
    epoch: U64
    seq: Count
    sent_wall_s: float
    events: list[RouteEvent] = []


# --- hotspot and policy -------------------------------------------------------------------------


class HotspotRaised(Message, frozen=True, tag="hotspot_raised"):
    """Requests of class `key` must not go to `instances` until cleared or expired.

    Attributes:
        share: (class requests, all requests) in the window.
        streak: consecutive class requests that still preferred M.
    """

    key: U64
    depth_blocks: Count
    instances: list[str]
    revision: U64
    raised_wall_s: float
    ttl_s: Amount
    share: tuple[Count, Count] = (0, 0)
    holders: Count = 0
    fleet: Count = 0
    streak: Count = 0
    best_inside: float | None = None
    best_outside: float | None = None
    reason: str = ""


class HotspotCleared(Message, frozen=True, tag="hotspot_cleared"):
    """The verdict on class `key` is lifted."""

    key: U64
    depth_blocks: Count
    revision: U64
    cleared_wall_s: float
    reason: str = ""


class PolicyOverride(Message, frozen=True, tag="policy_override"):
    """Use `policy` instead of the configured one; an empty `policy` ends the override."""

    policy: str
    revision: U64
    set_wall_s: float
    ttl_s: Amount | None = None
    by: str = ""
    reason: str = ""


class Drain(Message, frozen=True, tag="drain"):
    """Send no new requests to an instance (`on`), or take it back."""

    instance_id: str
    on: bool
    revision: U64
    set_wall_s: float
    by: str = ""
    reason: str = ""


class Blacklist(Message, frozen=True, tag="blacklist"):
    """An operator keeps an instance from new requests for a while, class or no class."""

    instance_id: str
    on: bool
    revision: U64
    set_wall_s: float
    ttl_s: Amount | None = None
    by: str = ""
    reason: str = ""


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
decode_prefixes: Callable[[Bytes], TenantPrefixes] = decoder(TenantPrefixes)
decode_card: Callable[[Bytes], ModelCard] = decoder(ModelCard)
decode_latency_model: Callable[[Bytes], LatencyModel] = decoder(LatencyModel)
