"""What an operator sees of a plane: the buckets read whole, and what stands out in them.

Anybody may write to a bucket that the server lets him write to, so an entry may be nonsense. It is
told beside the rest, by its key: one bad entry hides nothing else.

Senders' clocks are not ours. The server knows how long an entry has stood, so the times in what is
read here are put right: as if the entry had been written by our own clock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from controlplane.bus.protocol import Bus, BusError, Entry
from schemas import subjects
from schemas.bus import (
    Blacklist,
    Drain,
    HotspotCleared,
    HotspotRaised,
    InstanceRecord,
    LeaderLease,
    PolicyOverride,
    RegisteredPrefix,
    RouterLease,
    decode_hotspot,
    decode_instance,
    decode_leader,
    decode_load,
    decode_policy,
    decode_prefixes,
    decode_router,
)
from schemas.codec import RemoteError
from schemas.ids import decode_token

T = TypeVar("T")

Statement = Drain | Blacklist | PolicyOverride | HotspotRaised | HotspotCleared

BEATS_MISSED_MAX = 3
"""Heartbeats that may be missing before a sender is taken for lost."""

_READ_S_MAX = 10.0
_DOUBLE_LOOK_S = 5.0  # idle engines' sidecars report once a second: several reports of each
_DOUBLE_REPORTS_MAX = 20_000


class Unreadable(msgspec.Struct, frozen=True):
    """An entry of a bucket that means nothing."""

    bucket: str
    key: str
    why: str


class Listing(msgspec.Struct, Generic[T], frozen=True):
    """What a bucket holds."""

    rows: list[T]
    unreadable: list[Unreadable]


class Standing(msgspec.Struct, frozen=True):
    """A statement in the verdicts bucket, and the model it is about.

    Attributes:
        name: of the entry, as in `drain-engine-0`.
    """

    model: str
    name: str
    statement: Statement

    @property
    def until_wall_s(self) -> float | None:
        """When it ends by itself, Unix seconds; None if it does not."""
        ttl_s = getattr(self.statement, "ttl_s", None)
        return None if ttl_s is None else said_wall_s(self.statement) + float(ttl_s)

    def in_force(self, now_wall_s: float) -> bool:
        """Whether it has not run out."""
        return self.until_wall_s is None or now_wall_s < self.until_wall_s


class RouterEntry(msgspec.Struct, frozen=True):
    """Where a router that serves a model is."""

    model: str
    lease: RouterLease

    def lost(self, now_wall_s: float) -> bool:
        """Whether it has been silent for too long."""
        return now_wall_s - self.lease.sent_wall_s > BEATS_MISSED_MAX * self.lease.heartbeat_s


class PrefixRow(msgspec.Struct, frozen=True):
    """A registered prefix as an operator wants to see it; nothing of its text.

    Attributes:
        id: its handle.
        tokens: its length.
        blocks: its whole blocks.
        references: registrations that were not released.
        idle_s: for how long it has been neither used nor registered, at most: uses are told late.
        ends_s: when it will end if it stays idle, from now.
    """

    tenant: str
    id: str
    model: str
    tokens: int
    blocks: int
    references: int
    pin: bool
    spread: bool
    ttl_s: float
    idle_s: float
    ends_s: float


class InstanceRow(msgspec.Struct, frozen=True):
    """An instance as an operator wants to see it.

    Attributes:
        state: ready, starting, stopped, draining, blacklisted or silent.
        heard_s: how long ago its sidecar was heard last, seconds.
        notes: who drained it and why, what it shares with another, and the like.
        broken: some note says that something is wrong, and not just intended.
    """

    model: str
    instance: str
    url: str
    state: str
    block_size: int
    num_blocks: int | None
    engine: str
    heard_s: float
    notes: list[str] = []
    broken: bool = False


def said_wall_s(statement: Statement) -> float:
    """Return when a statement was made, Unix seconds."""
    if isinstance(statement, HotspotRaised):
        return statement.raised_wall_s
    if isinstance(statement, HotspotCleared):
        return statement.cleared_wall_s
    return statement.set_wall_s


async def read_instances(bus: Bus) -> Listing[InstanceRecord]:
    """Return all records, by model and instance. Raises BusError."""

    def understand(key: str, value: bytes, age_s: float) -> InstanceRecord:
        model, part = subjects.parse_key(key)
        record = decode_instance(value)
        if (record.model, record.instance_id) != (model, part):
            raise RemoteError(f"it speaks of {record.instance_id!r} of {record.model!r}")
        return msgspec.structs.replace(record, sent_wall_s=time.time() - age_s)

    found = await _read(bus, subjects.INSTANCES, understand)
    return _sorted(found, lambda record: (record.model, record.instance_id))


async def read_routers(bus: Bus) -> Listing[RouterEntry]:
    """Return the routers that say where they are, by model and router. Raises BusError."""

    def understand(key: str, value: bytes, age_s: float) -> RouterEntry:
        model, _ = subjects.parse_key(key)
        lease = decode_router(value)
        return RouterEntry(model, msgspec.structs.replace(lease, sent_wall_s=time.time() - age_s))

    found = await _read(bus, subjects.ROUTERS, understand)
    return _sorted(found, lambda entry: (entry.model, entry.lease.router_id))


async def read_standing(bus: Bus) -> Listing[Standing]:
    """Return what operators and detectors have said, hotspots included. Raises BusError."""

    def understand(key: str, value: bytes, age_s: float) -> Standing:
        model, name = subjects.parse_key(key)
        decode = decode_hotspot if name.startswith("hotspot") else decode_policy
        return Standing(model, name, _said_at(decode(value), time.time() - age_s))

    found = await _read(bus, subjects.VERDICTS, understand)
    return _sorted(found, lambda standing: (standing.model, standing.name))


async def read_prefixes(bus: Bus) -> Listing[PrefixRow]:
    """Return what callers have registered, by tenant, in that order. Raises BusError."""

    def understand(key: str, value: bytes, age_s: float) -> list[PrefixRow]:
        record = decode_prefixes(value)
        if record.tenant != decode_token(key):
            raise RemoteError(f"it speaks of tenant {record.tenant!r}")
        return [_prefix_row(record.tenant, each, age_s) for each in record.prefixes]

    found = await _read(bus, subjects.PREFIXES, understand)
    return Listing([row for rows in found.rows for row in rows], found.unreadable)


def _prefix_row(tenant: str, prefix: RegisteredPrefix, age_s: float) -> PrefixRow:
    """Return a prefix as of `age_s` after its tenant's record was written."""
    idle_s = prefix.idle_s + age_s
    return PrefixRow(
        tenant,
        prefix.id,
        prefix.model,
        prefix.tokens,
        prefix.blocks,
        prefix.references,
        prefix.pin,
        prefix.spread,
        prefix.ttl_s,
        idle_s,
        max(prefix.ttl_s - idle_s, 0.0),
    )


async def read_leader(bus: Bus, service: str) -> LeaderLease | None:
    """Return who leads a service; None if nobody does, or says so readably. Raises BusError."""
    entry = await (await bus.bucket(subjects.LEADERS)).get(service)
    if entry is None or entry.value is None:
        return None
    try:
        return decode_leader(entry.value)
    except RemoteError:
        return None


async def _read(bus: Bus, name: str, understand: Callable[[str, bytes, float], T]) -> Listing[T]:
    """Read a bucket whole; `understand(key, value, age_s)` may raise RemoteError."""
    bucket = await bus.bucket(name)
    await bucket.keys()  # a watch would wait for a bucket that is missing
    found: dict[str, Entry] = {}
    watch = await bucket.watch(lambda entry: found.update({entry.key: entry}))
    try:
        await watch.synced(_READ_S_MAX)
    finally:
        await watch.stop()
    listing: Listing[T] = Listing([], [])
    for key, entry in sorted(found.items()):
        if entry.value is None:
            continue
        try:
            listing.rows.append(understand(key, entry.value, entry.age_s))
        except RemoteError as error:
            listing.unreadable.append(Unreadable(name, key, str(error)))
    return listing


def _said_at(statement: Statement, at_wall_s: float) -> Statement:
    """Return a statement as if it had been made then."""
    if isinstance(statement, HotspotRaised):
        return msgspec.structs.replace(statement, raised_wall_s=at_wall_s)
    if isinstance(statement, HotspotCleared):
        return msgspec.structs.replace(statement, cleared_wall_s=at_wall_s)
    return msgspec.structs.replace(statement, set_wall_s=at_wall_s)


def _sorted(listing: Listing[T], order: Callable[[T], tuple[str, ...]]) -> Listing[T]:
    listing.rows.sort(key=order)
    return listing


async def find_doubles(bus: Bus, now_wall_s: float) -> set[tuple[str, str]]:
    """Return the (model, instance) that two sidecars speak for at once.

    Each life of a sidecar has an epoch of its own. A restart changes it once; two sidecars with one
    id take turns, so that an epoch comes back after another one.

    Raises:
        BusError: there is no record of the load reports.
    """
    turns: dict[tuple[str, str], list[int]] = defaultdict(list)
    seen = 0
    since_wall_s = now_wall_s - _DOUBLE_LOOK_S
    async for record in bus.history("MP_LOAD", since_wall_s=since_wall_s):
        seen += 1
        if seen > _DOUBLE_REPORTS_MAX:
            break
        try:
            _, model, instance = subjects.parse(record.subject)
            epoch = decode_load(record.payload).epoch
        except RemoteError:
            continue
        epochs = turns[model, instance]
        if not epochs or epochs[-1] != epoch:
            epochs.append(epoch)
    return {who for who, epochs in turns.items() if len(epochs) > len(set(epochs))}


async def try_doubles(bus: Bus, now_wall_s: float) -> set[tuple[str, str]]:
    """Return what `find_doubles` does, and nobody where that is not on record."""
    try:
        return await find_doubles(bus, now_wall_s)
    except BusError:
        return set()


def instance_rows(
    records: Sequence[InstanceRecord],
    standing: Iterable[Standing],
    doubles: set[tuple[str, str]],
    now_wall_s: float,
) -> list[InstanceRow]:
    """Return the instances with what is said of them and what stands out; pure."""
    said: dict[tuple[str, str], list[Standing]] = defaultdict(list)
    for each in standing:
        if isinstance(each.statement, Drain | Blacklist) and each.in_force(now_wall_s):
            said[each.model, each.statement.instance_id].append(each)
    sharing: dict[tuple[str, int | None], list[InstanceRecord]] = defaultdict(list)
    for record in records:
        sharing[record.url, record.dp_rank].append(record)
    return [
        _row(
            record,
            said[record.model, record.instance_id],
            [each for each in sharing[record.url, record.dp_rank] if each is not record],
            now_wall_s,
            doubled=(record.model, record.instance_id) in doubles,
        )
        for record in records
    ]


def _row(
    record: InstanceRecord,
    said: Sequence[Standing],
    same_url: Sequence[InstanceRecord],
    now_wall_s: float,
    *,
    doubled: bool,
) -> InstanceRow:
    state: str = record.state
    notes = []
    for each in said:
        state = "draining" if isinstance(each.statement, Drain) else "blacklisted"
        notes.append(described(each, now_wall_s))
    heard_s = max(now_wall_s - record.sent_wall_s, 0.0)
    silent = heard_s > BEATS_MISSED_MAX * record.heartbeat_s
    if silent:
        state = "silent"
        notes.append("its sidecar is not heard: is it running?")
    if record.blind:
        notes.append("none of its engine's KV events applies: its cache does not count")
    if not record.mirror_complete:
        notes.append("its sidecar began too late to know all blocks; restart the engine to mend it")
    if doubled:
        notes.append("two sidecars use this id: give each its own --instance-id")
    if same := [each.instance_id for each in same_url if each.same_engine(record)]:
        notes.append(f"{', '.join(same)} has the same url: end one of the sidecars")
    if len(same) < len(same_url):
        notes.append(
            f"{len(same_url) - len(same)} on other machines have the same loopback url: give each "
            "an --advertise-url that routers reach"
        )
    return InstanceRow(
        record.model,
        record.instance_id,
        record.url,
        state,
        record.block_size,
        record.num_blocks,
        record.engine_version,
        heard_s,
        notes,
        broken=silent or doubled or bool(same_url) or record.blind,
    )


def described(standing: Standing, now_wall_s: float) -> str:
    """Return a statement in words: what, by whom, for how much longer, and why."""
    statement = standing.statement
    by = getattr(statement, "by", "") or "a detector"
    if isinstance(statement, Drain):
        what = f"drained by {by}"
    elif isinstance(statement, Blacklist):
        what = f"blacklisted by {by}"
    elif isinstance(statement, PolicyOverride):
        what = f"policy {statement.policy}, set by {by}"
    else:
        what = f"hotspot {statement.key:016x}"
    if standing.until_wall_s is not None:
        what += f" for {max(standing.until_wall_s - now_wall_s, 0.0):.0f} s more"
    return f"{what}: {statement.reason}" if statement.reason else what
