"""Making the server hold what the plane needs, and saying what it holds.

`ensure` may run as often as one likes, by anybody who may, beside running services: it creates
what is missing, corrects what differs and leaves the rest alone. `keep` goes on creating what is
missing: a server that lost its files has an empty plane a few seconds later, and sidecars fill it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Literal, NoReturn

import msgspec

from controlplane.bus.jetstream import JetStream, JetStreamError, Json
from controlplane.bus.layout import BucketSpec, Layout, StoreSpec, StreamSpec, layout
from controlplane.bus.nats_bus import NatsBus
from controlplane.bus.protocol import Bus, BusError

log = logging.getLogger(__name__)

KEEP_EVERY_S = 2.0

_NS = 1_000_000_000
_SMALL = 0.1  # of the usual bounds, for a disk that has no room for them
_NOT_FOUND = 404
_OTHER_CONFIG = 10058  # somebody else created it meanwhile, otherwise than we would have
_NO_ROOM = (10002, 10023, 10028, 10047)  # of the account, the server, its memory, its disk
_DUPLICATE_WINDOW_S = 120.0
_MARKER_TTL_S = (
    60.0  # how long the note that an entry expired stays, for watchers cut off just then
)
_MARKERS_API_LEVEL = 1  # nats-server 2.11

Kind = Literal["stream", "bucket", "store"]


class NoRoomError(BusError):
    """The server may not use as much disk or memory as a bound says."""


class Change(msgspec.Struct, frozen=True):
    """What `ensure` did, or found, for one name."""

    kind: Kind
    name: str
    action: Literal["created", "updated", "unchanged"]
    detail: str = ""


class Holding(msgspec.Struct, frozen=True):
    """What the server holds under one name.

    Attributes:
        messages: in a stream; in a bucket keys that exist; in a store objects.
        nbytes: stored, of at most `bytes_max`.
        oldest_wall_s: when the oldest was stored, Unix seconds; None when empty.
        newest_wall_s: likewise the newest.
        consumers: readers that the server knows of.
        replicas: copies wanted; `current` of them are up to date.
        leader: server that leads it; empty outside a cluster.
    """

    kind: Kind
    name: str
    messages: int
    nbytes: int
    bytes_max: int
    age_s_max: float
    oldest_wall_s: float | None
    newest_wall_s: float | None
    consumers: int
    replicas: int
    current: int
    leader: str = ""


async def ensure(bus: Bus, plan: Layout, *, missing_only: bool = False) -> list[Change]:
    """Make the server hold exactly what the plan says; nothing to do on a bus in memory.

    Args:
        missing_only: leave what is there as it is, whatever the plan says of it.

    Raises:
        BusError: the server refuses, or holds something that cannot be changed in place.
    """
    if not isinstance(bus, NatsBus):
        return []
    js = bus.jetstream
    markers = await _has_markers(js)
    wanted: list[tuple[Kind, str, Json]] = [
        *(("stream", spec.name, _stream(spec, plan)) for spec in plan.streams),
        *(("bucket", spec.name, _bucket(spec, plan, markers=markers)) for spec in plan.buckets),
        *(("store", spec.name, _store(spec, plan)) for spec in plan.stores),
    ]
    return [
        await _ensure_one(js, kind, name, config, missing_only=missing_only)
        for kind, name, config in wanted
    ]


async def keep(
    bus: Bus, plan: Layout, told: Callable[[Change], None], every_s: float = KEEP_EVERY_S
) -> NoReturn:
    """Create what the server lacks, now and for ever; tells what was created.

    While the server is away, or refuses, this waits: only the first failure in a row is logged.
    """
    failing = False
    while True:
        try:
            for change in await ensure(bus, plan, missing_only=True):
                if change.action == "created":
                    told(change)
            failing = False
        except BusError as error:
            log.log(logging.DEBUG if failing else logging.WARNING, "cannot look: %s", error)
            failing = True
        await asyncio.sleep(every_s)


async def create_missing(bus: Bus) -> list[Change]:
    """Create what the server lacks, if it lets anybody do so; returns what was created.

    A server that asks who we are leaves this to operators: `multiplane bus init`.

    Raises:
        BusError: the server is away, or refuses.
    """
    if not isinstance(bus, NatsBus) or bus.options.identified:
        return []
    try:
        changes = await ensure(bus, layout(), missing_only=True)
    except NoRoomError:
        try:
            changes = await ensure(bus, layout(size=_SMALL), missing_only=True)
        except NoRoomError as error:
            raise NoRoomError(f"{error}; `multiplane bus init` tells what `--size` fits") from error
    return [change for change in changes if change.action == "created"]


async def describe(bus: NatsBus, plan: Layout) -> list[Holding]:
    """Return what the server holds of the plan; what is missing is left out."""
    names: list[tuple[Kind, str, str]] = [
        *(("stream", spec.name, spec.name) for spec in plan.streams),
        *(("bucket", spec.name, f"KV_{spec.name}") for spec in plan.buckets),
        *(("store", spec.name, f"OBJ_{spec.name}") for spec in plan.stores),
    ]
    holdings = []
    for kind, name, stream in names:
        info = await _info(bus.jetstream, stream)
        if info is not None:
            holdings.append(await _holding(bus, kind, name, info))
    return holdings


def _common(plan: Layout, name: str, subjects: list[str], bytes_max: int) -> Json:
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": plan.storage,
        "num_replicas": plan.replicas,
        "max_bytes": bytes_max,
        "max_consumers": -1,
        "max_msgs": -1,
    }


def _stream(spec: StreamSpec, plan: Layout) -> Json:
    return _common(plan, spec.name, [spec.subject], spec.bytes_max) | {
        "discard": "old",
        "max_age": int(spec.age_s_max * _NS),
    }


def _bucket(spec: BucketSpec, plan: Layout, *, markers: bool) -> Json:
    window_s = min(_DUPLICATE_WINDOW_S, spec.ttl_s or _DUPLICATE_WINDOW_S)
    config = _common(plan, f"KV_{spec.name}", [f"$KV.{spec.name}.>"], spec.bytes_max) | {
        "discard": "new",
        "max_age": int(spec.ttl_s * _NS),
        "max_msgs_per_subject": spec.history,
        "duplicate_window": int(window_s * _NS),
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        # Reads go to the leader, so that who writes sees what was written; and a reader of raw
        # values by name could have them sent to any subject as its reply.
        "allow_direct": False,
    }
    if markers and spec.ttl_s:
        config |= {"allow_msg_ttl": True, "subject_delete_marker_ttl": int(_MARKER_TTL_S * _NS)}
    return config


def _store(spec: StoreSpec, plan: Layout) -> Json:
    subjects = [f"$O.{spec.name}.C.>", f"$O.{spec.name}.M.>"]
    return _common(plan, f"OBJ_{spec.name}", subjects, spec.bytes_max) | {
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": False,
    }


async def _has_markers(js: JetStream) -> bool:
    level = (await js.api("INFO")).get("api", {}).get("level", 0)
    return int(level) >= _MARKERS_API_LEVEL


async def _info(js: JetStream, stream: str) -> Json | None:
    try:
        return await js.api(f"STREAM.INFO.{stream}")
    except JetStreamError as error:
        if error.code == _NOT_FOUND:
            return None
        raise


async def _ensure_one(
    js: JetStream, kind: Kind, name: str, config: Json, *, missing_only: bool
) -> Change:
    stream = config["name"]
    info = await _info(js, stream)
    try:
        if info is None:
            await js.api(f"STREAM.CREATE.{stream}", config)
            return Change(kind, name, "created")
        present: Json = info["config"]
        different = {key for key, value in config.items() if present.get(key, False) != value}
        if not different or missing_only:
            return Change(kind, name, "unchanged")
        await js.api(f"STREAM.UPDATE.{stream}", present | config)
        return Change(kind, name, "updated", ", ".join(sorted(different)))
    except JetStreamError as error:
        if missing_only and error.err_code == _OTHER_CONFIG:
            return Change(kind, name, "unchanged")
        problem = f"{kind} {name}: {error} (code {error.err_code})"
        if is_no_room(error):
            raise NoRoomError(problem) from error
        raise BusError(problem) from error


def is_no_room(error: JetStreamError) -> bool:
    """Whether a server refused a bound because it may not use as much disk or memory."""
    return error.err_code in _NO_ROOM


async def _holding(bus: NatsBus, kind: Kind, name: str, info: Json) -> Holding:
    config, state, cluster = info["config"], info["state"], info.get("cluster") or {}
    messages = state["messages"]
    if kind == "bucket":
        messages = len(await (await bus.bucket(name)).keys())
    elif kind == "store":
        messages = len(await (await bus.objects(name)).names())
    followers = cluster.get("replicas") or []
    return Holding(
        kind=kind,
        name=name,
        messages=messages,
        nbytes=state["bytes"],
        bytes_max=config["max_bytes"],
        age_s_max=config["max_age"] / _NS,
        oldest_wall_s=_wall_s(state["first_ts"]) if state["messages"] else None,
        newest_wall_s=_wall_s(state["last_ts"]) if state["messages"] else None,
        consumers=state["consumer_count"],
        replicas=config["num_replicas"],
        current=1 + sum(bool(peer.get("current")) for peer in followers),
        leader=cluster.get("leader", ""),
    )


def _wall_s(stamp: str) -> float:
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    whole = datetime.fromisoformat(f"{seconds}+00:00").timestamp()
    return whole + float(f"0.{fraction or 0}")
