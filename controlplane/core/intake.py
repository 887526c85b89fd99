"""From block streams and snapshots to the index: every instance's set is kept equal to the truth.

Theory of operation. `stream.StreamFollower` says which batches to apply and when a snapshot is
needed; this module applies them and checks, after each batch, the count and digest that the sidecar
sent along: a set that differs in any block is found at once and resynced.

A snapshot fills *shadow* slots that no decision sees, chunk by chunk, so that none of its steps
holds up requests; once whole and verified it replaces the old slots in one step. Old slots are
masked at once and swept later (`PrefixIndex.sweep`).

At most one fetch of an instance is wanted at a time. A new one voids the one before: what that
still brings is not taken (`Plane.wants`), so that parts of two answers never mix, and an answer
with a hole leads to one further try, however many parts follow the hole. Tries that fail come ever
later; but an instance that is heard of is asked within `retry_heard_s`, however long it was silent,
and while the bus is away nobody is asked: its return resyncs all.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from controlplane.core.effects import Alarm, Effect, FetchSnapshot, Note
from controlplane.core.fleet import Fleet, Instance
from controlplane.core.index import PrefixIndex
from controlplane.core.stream import Step, Trust
from schemas.bus import KvBatch, KvCleared, KvStored, SnapshotChunk

HEARD_S = 2.0
"""An instance of which nothing came for this long, twice its heartbeat, is silent."""

FORGIVEN_S = 60.0
"""A set that did not add up, or found no room, is forgotten after this long."""

CHUNKS_MAX = 100_000
"""Parts of a snapshot: a hundred times what the largest set needs; more would never end."""

UNUSED_BATCHES_MAX = 3
UNUSED_S_MAX = 5.0
"""So many batches over so long of which none could be used are no late or repeated ones."""

ALARMING_ATTEMPT = 3
"""Earlier tries to get a snapshot fail for no other reason than that both sides just came back."""


class IntakeConfig(msgspec.Struct, frozen=True):
    """How eagerly block sets are resynced.

    Attributes:
        first_delay_s_max: a first snapshot is asked for after a random part of this, so that many
            routers, or one router with many instances, do not ask at the same moment.
        retry_s: wait before the second try; doubles with each further one.
        retry_s_max: longest wait between tries while the instance is silent. Long, since a sign of
            life ends it, and tries at many silent instances would hold up the others.
        retry_heard_s: the same while it is heard of. Together with a router's
            `snapshot_timeout_s` it bounds how long a set stays wrong after the last fault.
        retry_wrong_s_max: the same where sets came, but did not add up or found no room: more
            than once within `FORGIVEN_S`, and to fetch them again and again would not help.
        tiers_max: memory tiers an instance may have; blocks of further ones are ignored.
    """

    first_delay_s_max: float = 0.1
    retry_s: float = 0.2
    retry_s_max: float = 60.0
    retry_heard_s: float = 0.5
    retry_wrong_s_max: float = 10.0
    tiers_max: int = 3


class BlockIntake:
    """Applies what sidecars publish to the index.

    Attributes:
        connected: whether the bus can carry requests.
        counts: how often each thing happened, by name: batches, blocks_stored, blocks_removed,
            resyncs, snapshots, digest_mismatch, slots_full, slot_full, index_full, snapshot_failed,
            snapshot_outdated, never_sent and doubted (see `stream`).
    """

    def __init__(
        self, model: str, fleet: Fleet, index: PrefixIndex, config: IntakeConfig, rng: random.Random
    ) -> None:
        self.model = model
        self.fleet = fleet
        self.index = index
        self.config = config
        self.connected = True
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._fetches = 0

    # --- live batches

    def batch(self, instance: Instance, batch: KvBatch, now_s: float) -> list[Effect]:
        """Take one batch of an instance's block stream."""
        self.counts["batches"] += 1
        step = instance.follower.receive(batch)
        if not step.ignored:
            instance.unused, instance.used_s = 0, now_s
            return self._heard(instance, step, now_s)
        instance.unused += 1
        if instance.unused >= UNUSED_BATCHES_MAX and now_s - instance.used_s > UNUSED_S_MAX:
            self.counts["doubted"] += 1
            instance.unused, instance.used_s = 0, now_s
            return self._heard(instance, instance.follower.doubt(), now_s)
        if batch.epoch < instance.follower.epoch:
            return []  # the last words of a sidecar that is gone
        return self._heard(instance, step, now_s)

    def renewed(self, instance: Instance, now_s: float) -> list[Effect]:
        """Take note of an instance's new record, which names the present epoch."""
        return self._heard(instance, instance.follower.named(instance.record.epoch), now_s)

    def _heard(self, instance: Instance, step: Step, now_s: float) -> list[Effect]:
        """Do what follows from a sign of life."""
        instance.heard_s = now_s
        effects = self._follow(instance, step, now_s)
        waits_s = instance.fetch_due_s - now_s if instance.fetch else 0.0
        if waits_s > self.config.retry_heard_s and not self._often_wrong(instance, now_s):
            effects += self._ask(instance, "it is heard of again", now_s, anew=True)
        return effects + self.settle(instance, now_s)

    def _follow(self, instance: Instance, step: Step, now_s: float) -> list[Effect]:
        if step.restart:
            self._lose_all(instance)
            self._end_fetch(instance)
            instance.resync_attempt = 0
        lost = step.lost
        for batch in step.apply:
            wrong = self._apply(instance, batch)
            if wrong:
                instance.follower.distrust()
                lost = self._wrong(instance, wrong, now_s)
                break
        self.fleet.refresh(instance, now_s)
        return self._ask(instance, lost, now_s) if lost else []

    def _wrong(self, instance: Instance, what: str, now_s: float) -> str:
        """Remember that an instance's set was wrong as it came; returns `what`."""
        if now_s - instance.wrong_s > FORGIVEN_S:
            instance.wrongs = 0
        instance.wrongs += 1
        instance.wrong_s = now_s
        return what

    def _often_wrong(self, instance: Instance, now_s: float) -> bool:
        return instance.wrongs > 1 and now_s - instance.wrong_s <= FORGIVEN_S

    def _apply(self, instance: Instance, batch: KvBatch) -> str:
        """Change the index as a batch says; returns what is wrong, empty if nothing is."""
        for op in batch.ops:
            if isinstance(op, KvCleared):
                self._lose_all(instance)
                continue
            if op.tier >= self.config.tiers_max:
                continue
            if not isinstance(op, KvStored):
                slot = instance.slots.get(op.tier)
                if slot is not None:
                    self.index.remove(slot, op.hashes)
                    self.counts["blocks_removed"] += len(op.hashes) // 8
                continue
            wrong = self._store(instance.slots, op.tier, op.hashes, live=True)
            if wrong:
                return wrong
        if self._sums(instance.slots) != (batch.count, batch.digest):
            self.counts["digest_mismatch"] += 1
            return f"the block set differs from the sidecar's at seq {batch.seq}"
        return ""

    def _store(self, slots: dict[int, int], tier: int, hashes: bytes, *, live: bool) -> str:
        """Add blocks to the set in `slots`; returns what is wrong, empty if nothing is."""
        slot = slots.get(tier)
        if slot is None:
            slot = self.index.acquire_slot()
            if slot is None:
                self.counts["slots_full"] += 1
                return "the index has no free slot"
            slots[tier] = slot
            if live:
                self.index.publish_slot(slot)
        refusal = self.index.store(slot, hashes)
        if refusal is not None:
            self.counts[refusal] += 1
            return f"the index refused blocks: {refusal}"
        self.counts["blocks_stored"] += len(hashes) // 8
        return ""

    def _sums(self, slots: dict[int, int]) -> tuple[int, int]:
        """Return (count, digest) over the tiers of one set, as sidecars compute them."""
        count = digest = 0
        for slot in slots.values():
            count += self.index.count(slot)
            digest ^= self.index.digest(slot)
        return count, digest

    def _lose_all(self, instance: Instance) -> None:
        """Drop an instance's set because the instance itself has nothing any more."""
        self._release(instance)
        instance.life += 1

    def _release(self, instance: Instance) -> None:
        for slot in instance.slots.values():
            self.index.release_slot(slot)
        instance.slots = {}

    # --- snapshots

    def _ask(
        self, instance: Instance, reason: str, now_s: float, *, anew: bool = False
    ) -> list[Effect]:
        """Ask for a snapshot, unless one is on its way.

        Args:
            anew: void the one that is on its way.
        """
        if (instance.fetch and not anew) or not self.connected:
            return []
        self._end_fetch(instance)
        self._fetches += 1
        instance.fetch = self._fetches
        instance.follower.asked()
        instance.resync_attempt += 1
        self.counts["resyncs"] += 1
        delay_s = self._delay_s(instance, now_s)
        instance.fetch_due_s = now_s + delay_s
        return [
            FetchSnapshot(
                self.model,
                instance.record.instance_id,
                delay_s,
                instance.resync_attempt,
                reason,
                instance.fetch,
            )
        ]

    def _delay_s(self, instance: Instance, now_s: float) -> float:
        """Return how long to wait before a try: a random part, so that routers do not agree."""
        config, rng = self.config, self._rng
        if self._often_wrong(instance, now_s):
            longest_s = config.retry_s * 2.0 ** min(instance.wrongs, 16)
            return min(longest_s, config.retry_wrong_s_max) * rng.uniform(0.5, 1.0)
        if instance.resync_attempt == 1:
            return rng.uniform(0.0, config.first_delay_s_max)
        silent = now_s - instance.heard_s > HEARD_S
        most_s = config.retry_s_max if silent else config.retry_heard_s
        longest_s = config.retry_s * 2.0 ** min(instance.resync_attempt - 2, 16)
        return min(longest_s, most_s) * rng.uniform(0.5, 1.0)

    def join(self, instance: Instance, now_s: float) -> list[Effect]:
        """Begin with an instance that has just become known: its set may be old and large."""
        if not instance.record.kv_events:
            return self.settle(instance, now_s)
        return self._ask(instance, "joined", now_s)

    def resync(self, instance: Instance, reason: str, now_s: float) -> list[Effect]:
        """Ask for a snapshot of a set that may have missed something, such as after an outage."""
        if not instance.record.kv_events:
            return []
        instance.follower.distrust()
        instance.trust = Trust.RESYNCING
        self.fleet.refresh(instance, now_s)
        instance.resync_attempt = 0
        return self._ask(instance, reason, now_s, anew=True)

    def chunk(self, instance: Instance, chunk: SnapshotChunk, now_s: float) -> list[Effect]:
        """Take one part of a snapshot that was asked for; the last one replaces the old set."""
        if not instance.fetch:
            return []
        instance.heard_s = now_s
        if chunk.chunks > CHUNKS_MAX:
            wrong = f"a snapshot of {chunk.chunks} parts"
            return self.failed(instance, self._wrong(instance, wrong, now_s), now_s)
        of = (chunk.epoch, chunk.seq, chunk.chunks)
        if chunk.index == 0:
            self._drop_shadow(instance)
            instance.shadow_of = of
        if chunk.index != instance.shadow_chunks or of != instance.shadow_of:
            return self.failed(instance, f"chunk {instance.shadow_chunks} is missing", now_s)
        instance.shadow_chunks += 1
        if chunk.hashes and chunk.tier < self.config.tiers_max:
            wrong = self._store(instance.shadow, chunk.tier, chunk.hashes, live=False)
            if wrong:
                return self.failed(instance, self._wrong(instance, wrong, now_s), now_s)
        if chunk.index + 1 < chunk.chunks:
            return []
        return self._complete(instance, chunk, now_s)

    def _complete(self, instance: Instance, last: SnapshotChunk, now_s: float) -> list[Effect]:
        """Replace the applied set by a snapshot whose last chunk has come."""
        if self._sums(instance.shadow) != (last.count, last.digest):
            self.counts["digest_mismatch"] += 1
            wrong = self._wrong(instance, "the snapshot differs from its own digest", now_s)
            return self.failed(instance, wrong, now_s)
        follower = instance.follower
        instance.fetch = 0
        if follower.outdated(last.epoch, last.seq):
            self.counts["snapshot_outdated"] += 1
            self._drop_shadow(instance)
            if follower.exact:
                return []
            return self._ask(instance, "the snapshot came too late", now_s)
        self.counts["snapshots"] += 1
        self._release(instance)
        instance.slots, instance.shadow, instance.shadow_chunks = instance.shadow, {}, 0
        for slot in instance.slots.values():
            self.index.publish_slot(slot)
        instance.unused, instance.used_s = 0, now_s
        never_sent = follower.never_sent
        step = follower.snapshot(last.epoch, last.seq)
        self.counts["never_sent"] += follower.never_sent - never_sent
        return self._follow(instance, step, now_s) + self.settle(instance, now_s)

    def failed(self, instance: Instance, reason: str, now_s: float) -> list[Effect]:
        """Give up on a snapshot, and try again later if one is still needed."""
        self.counts["snapshot_failed"] += 1
        self._end_fetch(instance)
        told = Alarm if instance.resync_attempt >= ALARMING_ATTEMPT else Note
        effects: list[Effect] = [told("snapshot_failed", instance.record.instance_id, reason)]
        if not instance.follower.exact:
            effects += self._ask(instance, reason, now_s)
        return effects

    def _end_fetch(self, instance: Instance) -> None:
        """Want no snapshot; what came of one is void."""
        instance.fetch = 0
        self._drop_shadow(instance)

    def _drop_shadow(self, instance: Instance) -> None:
        for slot in instance.shadow.values():
            self.index.release_slot(slot)
        instance.shadow, instance.shadow_chunks = {}, 0

    # --- trust and departure

    def settle(self, instance: Instance, now_s: float) -> list[Effect]:
        """Let an instance's trust follow from its stream, now that it was heard of."""
        exact = instance.follower.exact or not instance.record.kv_events
        trust = Trust.EXACT if exact else Trust.RESYNCING
        if trust is Trust.EXACT:
            instance.resync_attempt = 0
        if trust is instance.trust:
            return []
        instance.trust = trust
        self.fleet.refresh(instance, now_s)
        return [Note("trust", instance.record.instance_id, f"block set is {trust}")]

    def leave(self, instance: Instance) -> None:
        """Drop everything that an instance that departed has in the index."""
        self._lose_all(instance)
        self._end_fetch(instance)
