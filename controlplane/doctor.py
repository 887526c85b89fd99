"""An examination of a live plane, from what NATS holds to what each engine has cached.

It only reads, but for one prompt that is sent to each engine (`doctor_canary`). Every finding that
is not well says what is wrong and what to do about it; one that is well may say what one may want
to do, as where an operator has drained an instance.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from operator import itemgetter
from typing import Any

from controlplane.bus import NatsBus
from controlplane.bus.layout import layout
from controlplane.bus.protocol import Bus, BusError
from controlplane.bus.setup import describe
from controlplane.doctor_canary import Canary, Finding
from controlplane.http_client import HttpClient, HttpError
from controlplane.operator_view import (
    BEATS_MISSED_MAX,
    InstanceRow,
    Listing,
    Standing,
    described,
    instance_rows,
    read_instances,
    read_leader,
    read_routers,
    read_standing,
    try_doubles,
)
from schemas import subjects
from schemas.bus import PolicyOverride

_ENGINE_TIMEOUT_S = 60.0  # a cold or busy engine may take its time over one token
_ADMIN_TIMEOUT_S = 10.0
_NAMED_MAX = 5


class Doctor:
    """Runs the checks, the cheapest and most telling first.

    Args:
        admin_url: the operators' port of a router; found on the bus if it is empty.
        engine_key: the engines' API key, if they want one.
        wait_s: how long an event may take to arrive.
    """

    def __init__(
        self,
        bus: Bus,
        admin: HttpClient,
        engine: HttpClient,
        admin_url: str = "",
        wait_s: float = 5.0,
    ) -> None:
        self._bus = bus
        self._admin = admin
        self._engine = engine
        self._admin_urls = [admin_url.rstrip("/")] if admin_url else []
        self._wait_s = wait_s
        self._rows: list[InstanceRow] = []

    async def examine(self, model: str = "") -> AsyncIterator[Finding]:
        """Yield findings as they come.

        Args:
            model: send prompts to the instances of this one only; to all by default.

        Raises:
            BusError: the bus was lost meanwhile.
        """
        async for finding in self._bus_holds():
            yield finding
            if not finding.ok:
                return
        async for finding in self._registry():
            yield finding
        yield await self._detector()
        async for finding in self._routers(model):
            yield finding

    # --- what is on the bus

    async def _bus_holds(self) -> AsyncIterator[Finding]:
        if not self._bus.connected:
            mend = "start NATS (`nats-server -js`), or correct --nats"
            yield Finding("bus", "connection", False, "no server answers", mend)
            return
        if not isinstance(self._bus, NatsBus):
            yield Finding("bus", "holds what the plane needs", True, "in memory")
            return
        plan = layout()
        try:
            missing = plan.names - {held.name for held in await describe(self._bus, plan)}
        except BusError as error:
            mend = "start NATS with JetStream (`nats-server -js`)"
            yield Finding("bus", "holds what the plane needs", False, str(error), mend)
            return
        what = "holds what the plane needs"
        if missing:
            mend = "run `multiplane bus init` with the same --nats"
            found = f"missing: {', '.join(sorted(missing))}"
            yield Finding("bus", what, False, found, mend)
        else:
            yield Finding("bus", what, True, f"{len(plan.names)} streams, buckets and stores")

    async def _registry(self) -> AsyncIterator[Finding]:
        """Examine instances and what is said of them."""
        records, standing = await read_instances(self._bus), await read_standing(self._bus)
        for finding in (_unreadable(records), _unreadable(standing)):
            if finding is not None:
                yield finding
        now_wall_s = time.time()
        doubles = await try_doubles(self._bus, now_wall_s)
        self._rows = instance_rows(records.rows, standing.rows, doubles, now_wall_s)
        if not self._rows:
            mend = "start `multiplane sidecar` beside each engine, with the same --nats"
            yield Finding("bus", "instances", False, "none has registered", mend)
        for row in self._rows:
            yield _of_row(row)
        for each in standing.rows:
            if isinstance(each.statement, PolicyOverride) and each.in_force(now_wall_s):
                yield _of_override(each, now_wall_s)

    async def _detector(self) -> Finding:
        leader = await read_leader(self._bus, "detector")
        if leader is not None and leader.holder:
            silent_s = time.time() - leader.sent_wall_s
            if silent_s <= BEATS_MISSED_MAX * leader.ttl_s:
                return Finding("detector", "leads", True, leader.holder.partition("/")[0])
        mend = "start `multiplane detector`; without one routing works, but no hotspot is spread"
        return Finding("detector", "leads", True, "none is heard", mend)

    # --- what routers and engines say

    async def _routers(self, model: str) -> AsyncIterator[Finding]:
        """Examine the routers, then the engines through the first one that answers."""
        leases = await read_routers(self._bus)
        unreadable = _unreadable(leases)
        if unreadable is not None:
            yield unreadable
        now_wall_s = time.time()
        heard = {e.lease.admin: e.lease.router_id for e in leases.rows if not e.lost(now_wall_s)}
        urls = self._admin_urls or [f"http://{admin}" for admin in sorted(heard) if admin]
        if not urls:
            mend = (
                "start `multiplane router` with the same --nats, or name its port for operators "
                "with --admin"
            )
            yield Finding("router", "answers", False, "none is heard", mend)
        states: list[tuple[str, dict[str, Any]]] = []
        for url in urls:
            try:
                states.append((url, await self._admin.get(f"{url}/debug/state")))
            except HttpError as error:
                mend = (
                    "is the router up, and may this machine reach that port? "
                    "--admin URL names another one"
                )
                yield Finding("router", "answers", False, str(error), mend)
                continue
            yield self._of_router(*states[-1])
        if states:
            async for finding in self._models(*states[0], model):
                yield finding

    def _of_router(self, url: str, state: dict[str, Any]) -> Finding:
        """Compare what a router knows with what has registered."""
        name = state["router_id"]
        known = {i["instance"] for served in state["models"].values() for i in served["instances"]}
        registered = {row.instance for row in self._rows if row.state != "silent"}
        if any(not served["bus_connected"] for served in state["models"].values()):
            mend = "look at its log: can it reach NATS?"
            return Finding(name, "hears the bus", False, "cut off from NATS", mend)
        if unusable := state.get("unusable"):
            mend = "mend what its sidecar says of it: version, --instance-id, --advertise-url"
            found = "; ".join(f"{u['instance']}: {u['problem']}" for u in unusable[:_NAMED_MAX])
            return Finding(name, "can use the records", False, found, mend)
        if unknown := sorted(registered - known):
            mend = "has it the same --nats? Otherwise look at its log"
            found = f"does not know {_named(unknown)}"
            return Finding(name, "knows the instances", False, found, mend)
        return Finding(name, "knows the instances", True, f"{len(known)}, asked at {url}")

    async def _models(self, url: str, state: dict[str, Any], wanted: str) -> AsyncIterator[Finding]:
        models = {m: served for m, served in state["models"].items() if wanted in ("", m)}
        if wanted and not models:
            known = ", ".join(sorted(state["models"])) or "none"
            mend = f"choose another --model; there are: {known}"
            yield Finding(wanted, "model", False, "no instance serves it", mend)
        canary = Canary(self._admin, self._engine, url, self._wait_s)
        subscription = await self._bus.subscribe(subjects.all_of("kv"), canary.hear)
        try:
            for name, served in models.items():
                if not served["card"]:
                    yield _no_card(name)
                    continue
                for instance in sorted(served["instances"], key=itemgetter("instance")):
                    async for finding in _instance(canary, name, instance):
                        yield finding
        finally:
            await subscription.stop()


async def _instance(canary: Canary, model: str, seen: dict[str, Any]) -> AsyncIterator[Finding]:
    """Examine one instance as a router sees it."""
    name = seen["instance"]
    if seen["breaker_open"]:
        mend = f"requests to {seen['url']} fail: look at the engine's log"
        yield Finding(name, "breaker", False, "open: the router does not send to it", mend)
    if seen["trust"] != "exact":
        mend = (
            "its blocks do not count until they are: look at the sidecar's log; a snapshot may be "
            "failing"
        )
        yield Finding(name, "trust", False, seen["trust"], mend)
        return
    yield Finding(name, "trust", True, f"exact, {seen['blocks']} blocks")
    if seen["drained"]:
        yield Finding(name, "prompt", True, "not sent, since the instance is drained")
        return
    try:
        async for finding in canary.send(model, name, seen["url"]):
            yield finding
    except HttpError as error:
        mend = "check that the engine serves, and that this machine may reach its url"
        if error.status in (401, 403):
            mend = "the engine wants its API key: give it with --engine-key-file"
        yield Finding(name, "engine answers", False, str(error), mend)


def _unreadable(listing: Listing[Any]) -> Finding | None:
    """Return what is wrong with a bucket that holds nonsense."""
    if not listing.unreadable:
        return None
    bucket = listing.unreadable[0].bucket
    found = f"{len(listing.unreadable)} unreadable: {_named([e.key for e in listing.unreadable])}"
    mend = (
        f"something else writes to the bucket {bucket}: find it, and delete the entries "
        f"(`nats kv del {bucket} KEY`)"
    )
    return Finding("bus", "entries", False, found, mend)


def _of_row(row: InstanceRow) -> Finding:
    found = "; ".join([row.state, *row.notes])
    if row.broken or row.state == "stopped":
        mend = "start its sidecar again, or wait until its record runs out, two hours from then"
        if row.state != "silent":
            mend = "see the note; `multiplane instances` shows when it is mended"
        return Finding(row.instance, "registered", False, found, mend)
    mend = ""
    if row.state == "draining" and row.notes:
        mend = f"`multiplane drain {row.instance} --off` takes it back"
    elif row.state == "blacklisted":
        mend = f"`multiplane blacklist remove {row.instance}` takes it back"
    elif row.state in ("starting", "draining"):
        mend = "wait until it is ready"
    return Finding(row.instance, "registered", True, found, mend)


def _of_override(standing: Standing, now_wall_s: float) -> Finding:
    mend = f"`multiplane policy clear {standing.model}` ends it"
    return Finding(standing.model, "policy", True, described(standing, now_wall_s), mend)


def _no_card(model: str) -> Finding:
    mend = (
        "give the sidecar --model-path with the folder that holds tokenizer.json; until then "
        "requests are routed by load alone"
    )
    return Finding(model, "model card", False, "none: prompts cannot be read", mend)


def _named(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


async def doctor(
    bus: Bus, admin_url: str = "", model: str | None = None, engine_key: str | None = None
) -> AsyncIterator[Finding]:
    """Yield the findings on a live plane; see the module's docstring and `Doctor`."""
    async with (
        HttpClient(_ADMIN_TIMEOUT_S) as admin,
        HttpClient(_ENGINE_TIMEOUT_S, engine_key) as engine,
    ):
        try:
            async for finding in Doctor(bus, admin, engine, admin_url).examine(model or ""):
                yield finding
        except BusError as error:
            mend = "is NATS up, with JetStream? `multiplane bus status` looks closer"
            yield Finding("bus", "works", False, str(error), mend)
