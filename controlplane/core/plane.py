"""The plane of one model: everything a router knows of it, and the decisions it makes.

Theory of operation. Bus messages and local events come in through `handle`, which returns effects;
requests come in through `decide`. Nothing here waits, reads a clock or talks to anybody: the
router, the simulator and the tests drive the same object.

The parts: `fleet` (instances and rows), `intake` (block streams into `index`), `ledger` (load),
`verdicts` (hotspots, overrides), `requests` (the request path), `outbox` (what this router tells
the others, taken every few milliseconds).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from controlplane.core.dispatch import Dispatcher
from controlplane.core.effects import Alarm, Effect, FetchSnapshot, Note
from controlplane.core.events import (
    BreakerState,
    BusState,
    Event,
    InstanceGone,
    Paused,
    SnapshotFailed,
    Tick,
)
from controlplane.core.fleet import Fleet, Instance
from controlplane.core.index import PrefixIndex
from controlplane.core.intake import BlockIntake, IntakeConfig
from controlplane.core.load import Ledger, LoadConfig
from controlplane.core.outbox import Outbox
from controlplane.core.policies import POLICIES, make_policy
from controlplane.core.stream import Trust
from controlplane.core.verdicts import Verdicts
from schemas.bus import (
    Blacklist,
    Drain,
    HotspotCleared,
    HotspotRaised,
    InstanceRecord,
    KvBatch,
    LoadReport,
    PolicyOverride,
    RouteBatch,
    SnapshotChunk,
)

SET_BACK_S = 60.0
"""An epoch that went back once, as after a clock was set, is forgotten after this long."""

SET_BACKS_MAX = 3
SET_BACKS_TOLD = 100
"""The third time is an alarm, and then every hundredth: about every three minutes."""


class PlaneConfig(msgspec.Struct, frozen=True):
    """How a plane behaves.

    Attributes:
        policy: name of the policy when nothing overrides it.
        policy_parameters: of that policy, by name.
        stale_s: silence after which an instance's block set no longer counts.
        unreachable_s: silence of its sidecar after which an instance has departed to which no
            request got through for as long, while the bus is up.
        departed_s: silence of sidecar and engine after which any instance has: as long as its
            engine answers requests, the loss of a sidecar takes no capacity away.
        blind_s: with every instance stale for this long, even load is unknown: round robin.
        batch_cap: largest batch of an instance; None for no cap.
        totals_every_s: how often `RouterTotals` are published.
        rows_every_s: how old `FleetRows` may be that a decision refers to.
        sweep_blocks: blocks swept at a time, and what is left of a shard: a millisecond or two.
        route_events_max: route events kept for the next batch; the oldest go beyond it.
        tier_credit: what a hit token is worth, by memory tier.
        audit_candidates: share of decisions whose candidates are recorded in full, 0 to 1.
        promise_s: how long the blocks that a request will have cached count as hits before they
            are there (`promises`); 0 for not at all. At three quarters of the saturating load this
            halves the TTFT of conversations (docs/evaluation.md).
    """

    policy: str = "multiplicative"
    policy_parameters: dict[str, float] = {}
    stale_s: float = 5.0
    unreachable_s: float = 30.0
    departed_s: float = 600.0
    blind_s: float = 60.0
    batch_cap: int | None = None
    totals_every_s: float = 0.25
    rows_every_s: float = 5.0
    sweep_blocks: int = 2_000
    route_events_max: int = 10_000
    tier_credit: tuple[float, ...] = (1.0, 0.75, 0.5)
    audit_candidates: float = 1.0
    promise_s: float = 5.0
    instances_max: int = 4096
    intake: IntakeConfig = IntakeConfig()
    load: LoadConfig = LoadConfig()


class Plane:
    """The state of one model at one router."""

    def __init__(
        self,
        model: str,
        router_id: str,
        epoch: int,
        config: PlaneConfig = PlaneConfig(),  # noqa: B008
        rng: random.Random | None = None,
    ) -> None:
        self.model = model
        self.router_id = router_id
        self.config = config
        self.fleet = Fleet(config.instances_max, config.intake.tiers_max)
        self.ledger = Ledger(router_id, config.load)
        self.index = PrefixIndex()
        rng = rng or random.Random(epoch)
        self.intake = BlockIntake(model, self.fleet, self.index, config.intake, rng)
        self.verdicts = Verdicts()
        self.bus_connected = True
        self.counts: Counter[str] = Counter()
        self.outbox = Outbox(router_id, epoch, config.route_events_max)
        self.requests = Dispatcher(
            fleet=self.fleet,
            ledger=self.ledger,
            index=self.index,
            verdicts=self.verdicts,
            outbox=self.outbox,
            policy=make_policy(config.policy, **config.policy_parameters),
            batch_cap=config.batch_cap,
            blind_s=config.blind_s,
            tier_credit=config.tier_credit,
            audit_candidates=config.audit_candidates,
            rows_every_s=config.rows_every_s,
            promise_s=config.promise_s,
            rng=rng,
        )
        self._totals_due_s = float("-inf")
        self._on: dict[type, Callable[[Any, float], list[Effect]]] = {
            InstanceRecord: self._record,
            InstanceGone: self._gone,
            KvBatch: self._kv,
            SnapshotChunk: self._chunk,
            SnapshotFailed: self._snapshot_failed,
            LoadReport: self._load,
            RouteBatch: self._route,
            HotspotRaised: self._hotspot_raised,
            HotspotCleared: self._hotspot_cleared,
            PolicyOverride: self._policy_override,
            Drain: self._drain,
            Blacklist: self._blacklist,
            BusState: self._bus_state,
            BreakerState: self._breaker,
            Paused: self._paused,
            Tick: self._tick,
        }

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event; returns what the surroundings have to do about it."""
        return self._on[type(event)](event, now_s)

    def wants(self, fetch: FetchSnapshot) -> bool:
        """Whether a snapshot that was asked for is still awaited; if not, its parts are void."""
        instance = self.fleet.get(fetch.instance_id)
        return instance is not None and instance.fetch == fetch.fetch

    # --- instances come and go

    def _record(self, record: InstanceRecord, now_s: float) -> list[Effect]:
        instance = self.fleet.get(record.instance_id)
        if record.state == "stopped":
            return [] if instance is None else self._leave(instance, "stopped", now_s)
        if instance is None:
            instance = self.fleet.add(record, now_s)
            if instance is None:
                return [Alarm("fleet_full", record.instance_id, "the fleet is at its bound")]
            self.ledger.assign_row(record.instance_id, instance.row)
            joined = Note("joined", record.instance_id, f"{record.url} is {record.state}")
            return [joined, *self.intake.join(instance, now_s), *self._twins(instance, now_s)]
        changed = instance.record.state != record.state
        before = instance.record
        moved = (before.url, before.dp_rank, before.host) != (
            record.url,
            record.dp_rank,
            record.host,
        )
        effects = self._voices(instance, record, now_s)
        instance.record = record
        if moved:
            effects += self._twins(instance, now_s)
        self.fleet.records_changed()
        self.fleet.refresh(instance, now_s)
        effects += self.intake.renewed(instance, now_s)
        if changed:
            effects.append(Note("state", record.instance_id, f"is {record.state}"))
        return effects

    def _voices(self, instance: Instance, record: InstanceRecord, now_s: float) -> list[Effect]:
        """Notice when two sidecars speak for one instance: its epoch goes back again and again."""
        if record.epoch >= instance.record.epoch:
            return []
        if now_s - instance.set_back_s > SET_BACK_S:
            instance.set_backs = 0
        instance.set_backs += 1
        instance.set_back_s = now_s
        if instance.set_backs % SET_BACKS_TOLD != SET_BACKS_MAX:
            return []
        text = (
            "two sidecars speak for it in turn, so that its blocks are never known for long; stop "
            "one, or give each an --instance-id of its own"
        )
        return [Alarm("two_sidecars", record.instance_id, text)]

    def _twins(self, instance: Instance, now_s: float) -> list[Effect]:
        """Notice that an engine is known by another name too.

        One whose sidecar is silent has been renamed, and departs; where both speak, whatever the
        engine does counts twice, and somebody has to decide.
        """
        instance_id = instance.record.instance_id
        effects: list[Effect] = []
        others = self._others_at(instance)
        for other in others:
            if other.trust is Trust.STALE:
                effects += self._leave(other, f"its engine goes by {instance_id} now", now_s)
        speaking = [other.record.instance_id for other in others if other.trust is not Trust.STALE]
        if speaking:
            text = (
                f"{speaking[0]} has the same address, {instance.record.url}: one engine with two "
                "sidecars, of which one must be stopped; or two engines that need an "
                "--advertise-url each"
            )
            effects.append(Alarm("two_names", instance_id, text))
        return effects + self._strangers(instance)

    def _strangers(self, instance: Instance) -> list[Effect]:
        """Notice that engines of several machines are said to be at one loopback address.

        One alarm tells of all of them, when the second machine comes.
        """
        mine = instance.record
        there = [
            each.record
            for each in self.fleet
            if each is not instance
            and each.record.url == mine.url
            and each.record.dp_rank == mine.dp_rank
        ]
        strangers = [record for record in there if not record.same_engine(mine)]
        if len(strangers) < len(there) or len({record.host for record in strangers}) != 1:
            return []
        other = strangers[0]
        text = (
            f"{other.instance_id} on {other.host} has the address {mine.url} too, which means "
            "each router's own machine: give every sidecar an --advertise-url that routers reach"
        )
        return [Alarm("loopback_url", mine.instance_id, text)]

    def doubled(self) -> int:
        """Return how many instances, of those that speak, share their address with another one."""
        heard = [each.record for each in self.fleet if each.trust is not Trust.STALE]
        addresses = Counter((record.url, record.dp_rank) for record in heard)
        places = Counter(r.place for r in heard if addresses[r.url, r.dp_rank] > 1)
        return sum(count for count in places.values() if count > 1)

    def _others_at(self, instance: Instance) -> list[Instance]:
        return [
            other
            for other in self.fleet
            if other is not instance and other.record.same_engine(instance.record)
        ]

    def _gone(self, event: InstanceGone, now_s: float) -> list[Effect]:
        instance = self.fleet.get(event.instance_id)
        return [] if instance is None else self._leave(instance, "its record was deleted", now_s)

    def _leave(self, instance: Instance, why: str, now_s: float) -> list[Effect]:
        self.intake.leave(instance)
        self.ledger.drop_row(instance.record.instance_id)
        moved = self.fleet.remove(instance, now_s)
        if moved is not None:
            self.ledger.assign_row(moved.record.instance_id, moved.row)
        return [Note("left", instance.record.instance_id, why)]

    # --- what sidecars say

    def _kv(self, batch: KvBatch, now_s: float) -> list[Effect]:
        instance = self.fleet.get(batch.instance_id)
        if instance is None:
            self.counts["kv_of_unknown_instance"] += 1
            return []
        effects = self.intake.batch(instance, batch, now_s)
        if instance.awaiting and batch.ops:
            self.requests.progress(instance)
        return effects

    def _chunk(self, chunk: SnapshotChunk, now_s: float) -> list[Effect]:
        instance = self.fleet.get(chunk.instance_id)
        if instance is None:
            return []
        effects = self.intake.chunk(instance, chunk, now_s)
        if instance.awaiting and not instance.fetch:
            self.requests.progress(instance)
        return effects

    def _snapshot_failed(self, event: SnapshotFailed, now_s: float) -> list[Effect]:
        instance = self.fleet.get(event.instance_id)
        return [] if instance is None else self.intake.failed(instance, event.reason, now_s)

    def _load(self, report: LoadReport, now_s: float) -> list[Effect]:
        instance = self.fleet.get(report.instance_id)
        if instance is None:
            return []
        instance.load = report
        instance.load_s = now_s
        requests = max(report.running + report.waiting, report.server_load or 0)
        self.ledger.engine_count(report.instance_id, requests, now_s)
        return []

    # --- what other routers say

    def _route(self, batch: RouteBatch, now_s: float) -> list[Effect]:
        self.ledger.peer_message(batch, now_s)
        return []

    # --- what detectors and operators say

    def _hotspot_raised(self, verdict: HotspotRaised, now_s: float) -> list[Effect]:
        if not self.verdicts.raised(verdict, now_s):
            return []
        return [Note("hotspot_raised", ",".join(verdict.instances), verdict.reason)]

    def _hotspot_cleared(self, verdict: HotspotCleared, now_s: float) -> list[Effect]:
        if not self.verdicts.cleared(verdict):
            return []
        return [Note("hotspot_cleared", "", verdict.reason)]

    def _policy_override(self, message: PolicyOverride, now_s: float) -> list[Effect]:
        unknown = message.policy if message.policy and message.policy not in POLICIES else ""
        if unknown:
            message = msgspec.structs.replace(message, policy="")
        if not self.verdicts.override(message, now_s):
            return []
        if unknown:
            text = (
                f"an override names {unknown[:64]!r}, which this router does not know; the "
                f"configured policy goes on. There is {', '.join(POLICIES)}"
            )
            return [Alarm("unknown_policy", "", text)]
        text = f"{message.policy or 'configured policy'}: {message.reason}"
        return [Note("policy", "", text)]

    def _drain(self, message: Drain, now_s: float) -> list[Effect]:
        instance = self.fleet.get(message.instance_id)
        if instance is None or message.revision <= instance.drain_revision:
            return []
        instance.drain_revision = message.revision
        instance.drained = message.on
        self.fleet.drains_changed()
        self.fleet.refresh(instance, now_s)
        return [Note("drain", message.instance_id, "on" if message.on else "off")]

    def _blacklist(self, message: Blacklist, now_s: float) -> list[Effect]:
        instance = self.fleet.get(message.instance_id)
        if instance is None or message.revision <= instance.blacklist_revision:
            return []
        instance.blacklist_revision = message.revision
        ttl_s = float("inf") if message.ttl_s is None else message.ttl_s
        instance.blacklisted_until_s = now_s + ttl_s if message.on else float("-inf")
        self.fleet.refresh(instance, now_s)
        return [Note("blacklist", message.instance_id, "on" if message.on else "off")]

    # --- what happens here

    def _bus_state(self, event: BusState, now_s: float) -> list[Effect]:
        """After an outage every stream may have lost something: resync, spread over time."""
        was_connected, self.bus_connected = self.bus_connected, event.connected
        self.intake.connected = event.connected
        if not event.connected or was_connected:
            return []
        effects: list[Effect] = []
        for instance in self.fleet:
            instance.heard_s = now_s
            effects += self.intake.resync(instance, "the bus is back", now_s)
        return effects

    def _breaker(self, event: BreakerState, now_s: float) -> list[Effect]:
        instance = self.fleet.get(event.instance_id)
        if instance is None or instance.breaker_open == event.open:
            return []
        instance.breaker_open = event.open
        instance.breaker_s = now_s
        self.fleet.refresh(instance, now_s)
        return [Note("breaker", event.instance_id, "open" if event.open else "sent to again")]

    def _paused(self, event: Paused, now_s: float) -> list[Effect]:
        """Blame nobody for a silence that was our own deafness."""
        for instance in self.fleet:
            instance.heard_s = min(instance.heard_s + event.seconds, now_s)
            instance.load_s = min(instance.load_s + event.seconds, now_s)
        self.ledger.excuse_peers(event.seconds, now_s)
        return []

    def _tick(self, _: Tick, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for instance in list(self.fleet):
            effects += self._age(instance, now_s)
        effects += [
            Note("router_silent", router_id, "its bookings no longer count")
            for router_id in self.ledger.expire_peers(now_s)
        ]
        effects += [
            Note("hotspot_expired", ",".join(ended.instances), "its detector did not renew it")
            for ended in self.verdicts.expire(now_s)
        ]
        self.requests.expire(now_s)
        self.sweep()
        if now_s >= self._totals_due_s:
            self._totals_due_s = now_s + self.config.totals_every_s
            self.requests.tell_totals()
        return effects

    def sweep(self) -> bool:
        """Erase some of what departed; whether there is more. Call as often as there is time."""
        return self.index.sweep(self.config.sweep_blocks) > 0

    def _age(self, instance: Instance, now_s: float) -> list[Effect]:
        """Let an instance grow stale, and depart, by its silence."""
        silent_s = now_s - instance.heard_s
        instance_id = instance.record.instance_id
        config = self.config
        failing_s = now_s - instance.breaker_s if instance.breaker_open else 0.0
        unreachable = min(silent_s, failing_s) > config.unreachable_s
        mute = min(silent_s, now_s - instance.answered_s) > config.departed_s
        if (unreachable or mute) and self.bus_connected:
            return self._leave(instance, f"silent for {silent_s:.0f} s", now_s)
        if now_s - instance.load_s > config.stale_s:
            self.ledger.forget_engine(instance_id)
        effects: list[Effect] = []
        changed = now_s >= instance.blacklisted_until_s and not self.fleet.allowed[instance.row]
        if silent_s > config.stale_s and instance.trust is not Trust.STALE:
            for other in self._others_at(instance):
                if self.bus_connected and now_s - other.heard_s <= config.stale_s:
                    now_called = other.record.instance_id
                    return self._leave(instance, f"its engine goes by {now_called} now", now_s)
            instance.trust = Trust.STALE
            effects.append(Note("trust", instance_id, f"block set is {Trust.STALE}"))
            changed = True
        if changed:
            self.fleet.refresh(instance, now_s)
        return effects
