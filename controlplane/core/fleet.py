"""The instances that serve one model: their rows, their trust, and who may get a request.

Theory of operation. Every known instance has a row in the arrays that decisions read. Rows are
dense: when an instance leaves, the one in the last row takes its place. Whether an instance may get
requests follows from these facts:

    healthy   the data plane finds that requests get through (the breaker is closed)
    ready     its record is `ready`, and no drain is in force
    allowed   no operator's blacklist is in force
    drained   an operator said so: nothing new is sent there, even if that leaves nobody
    trusted   excludes nobody; it decides whether the block set counts

Trust is `exact` or `resyncing` as its block stream says, and `stale` once nothing was heard of the
instance for `stale_s`. While the bus is up, one that is silent has departed after `unreachable_s`
if it was not healthy for as long, and after `departed_s` if its engine answered nothing either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.core.hit_rows import SlotRows
from controlplane.core.stream import StreamFollower, Trust
from schemas.bus import InstanceRecord, LoadReport


class Instance:
    """What is known of one instance.

    Attributes:
        awaiting: requests whose prompts it is computing, by booking.
        slots: index slot of each tier's block set, by tier.
        shadow: slots that a snapshot in progress is filling, by tier.
        life: grows whenever all its blocks are lost: a new epoch, a cleared cache, a departure.
        heard_s: when a heartbeat last came, by any path.
        answered_s: when its engine last answered a request of this router whole.
        breaker_open: requests do not get through, or (False) do, since `breaker_s`.
        load: the engine's last report on itself, taken at `load_s`.
        shadow_of: what its chunks must agree in: epoch, seq, number of chunks.
        resync_attempt: tries since the set was last exact.
        fetch: the snapshot that was asked for and has neither come nor failed; 0 for none.
        fetch_due_s: when it is asked for.
        set_backs: how often its record named an older epoch, last at `set_back_s`.
        wrongs: how often its set was wrong as it came, last at `wrong_s`.
        unused: batches in a row that were old, since one could be used, at `used_s`.
        drained: an operator's drain is in force.
        blacklisted_until_s: an operator's blacklist is in force until then.
    """

    __slots__ = (
        "answered_s",
        "awaiting",
        "blacklist_revision",
        "blacklisted_until_s",
        "breaker_open",
        "breaker_s",
        "drain_revision",
        "drained",
        "fetch",
        "fetch_due_s",
        "follower",
        "heard_s",
        "life",
        "load",
        "load_s",
        "record",
        "resync_attempt",
        "row",
        "set_back_s",
        "set_backs",
        "shadow",
        "shadow_chunks",
        "shadow_of",
        "slots",
        "trust",
        "unused",
        "used_s",
        "wrong_s",
        "wrongs",
    )

    def __init__(self, record: InstanceRecord, row: int, now_s: float) -> None:
        self.record = record
        self.row = row
        self.follower = StreamFollower()
        self.trust = Trust.RESYNCING
        self.heard_s = now_s
        self.answered_s = now_s
        self.life = 0
        self.awaiting: dict[int, Any] = {}
        self.slots: dict[int, int] = {}
        self.shadow: dict[int, int] = {}
        self.shadow_chunks = 0
        self.shadow_of = (0, 0, 0)
        self.load: LoadReport | None = None
        self.load_s = float("-inf")
        self.resync_attempt = 0
        self.fetch = 0
        self.fetch_due_s = 0.0
        self.set_backs = 0
        self.set_back_s = float("-inf")
        self.wrongs = 0
        self.wrong_s = float("-inf")
        self.unused = 0
        self.used_s = now_s
        self.drained = False
        self.drain_revision = -1
        self.breaker_open = False
        self.breaker_s = now_s
        self.blacklisted_until_s = float("-inf")
        self.blacklist_revision = -1

    @property
    def draining(self) -> bool:
        """Whether it should get no new requests, by its own word or an operator's."""
        return self.drained or self.record.state != "ready"


class Fleet:
    """Instances by id and by row, with the masks that filters read.

    Attributes:
        healthy: (rows,) bool; see the module's theory of operation.
        ready: (rows,) bool, likewise.
        allowed: (rows,) bool, likewise.
        trusted: (rows,) bool, likewise.
        undrained: (rows,) bool, whom no operator drained; None if that is everybody.
        exact: (rows,) bool, whose block set is known to be the published one.
        epochs: (rows,) uint64, of the block streams; 0 before anything came.
        applied: (rows,) int64, batches of them that were applied: seq + 1.
        version: grows whenever rows or epochs change, or a stream goes back.
        tiers: how many tiers any instance has had.
        rows: the instances by row, as a tuple that decisions may keep.
        instances_max: bound on the rows.
        refused: instances that the bound kept out.
    """

    def __init__(self, instances_max: int = 4096, tiers_max: int = 3) -> None:
        self.instances_max = instances_max
        self.tiers = 1
        self.version = 0
        self.rows: tuple[Instance, ...] = ()
        self.refused = 0
        self._by_id: dict[str, Instance] = {}
        self._by_row: list[Instance] = []
        self._healthy: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._ready: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._allowed: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._trusted: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._exact: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self._epochs: NDArray[np.uint64] = np.zeros(16, np.uint64)
        self._applied: NDArray[np.int64] = np.zeros(16, np.int64)
        self._slots: NDArray[np.int64] = np.full((tiers_max, 16), -1, np.int64)
        self._slot_rows: dict[int, SlotRows] = {}
        self._capable: dict[str, NDArray[np.bool_]] = {}
        self._barred: bool | None = None
        self._trusts: tuple[bool, bool] | None = None
        self.undrained: NDArray[np.bool_] | None = None
        self._views()

    def __len__(self) -> int:
        return len(self._by_row)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_row)

    def get(self, instance_id: str) -> Instance | None:
        """Return an instance by id."""
        return self._by_id.get(instance_id)

    def at(self, row: int) -> Instance:
        """Return the instance of a row."""
        return self._by_row[row]

    def add(self, record: InstanceRecord, now_s: float) -> Instance | None:
        """Give a new instance a row; None if the fleet is at its bound."""
        if len(self) >= self.instances_max:
            self.refused += 1
            return None
        instance = Instance(record, len(self), now_s)
        self._by_row.append(instance)
        self._by_id[record.instance_id] = instance
        self._views()
        self.refresh(instance, now_s)
        return instance

    def remove(self, instance: Instance, now_s: float) -> Instance | None:
        """Free an instance's row; returns the instance that moved into it, if one did."""
        del self._by_id[instance.record.instance_id]
        last = self._by_row.pop()
        self._views()
        if last is instance:
            return None
        last.row = instance.row
        self._by_row[last.row] = last
        self._views()
        self.refresh(last, now_s)
        return last

    def refresh(self, instance: Instance, now_s: float) -> None:
        """Write what an instance's facts mean into the masks. Call after changing any of them."""
        row = instance.row
        self._barred = self._trusts = None
        self.healthy[row] = not instance.breaker_open
        self.ready[row] = not instance.draining
        self.allowed[row] = now_s >= instance.blacklisted_until_s
        self.trusted[row] = instance.trust is not Trust.STALE
        follows = instance.follower.exact or not instance.record.kv_events
        self.exact[row] = follows and instance.trust is Trust.EXACT
        self._follow(row, instance.follower)
        for tier, column in enumerate(self._slots):
            slot = instance.slots.get(tier, -1)
            if column[row] != slot:
                column[row] = slot
                self._slot_rows.pop(tier, None)
                self.tiers = max(self.tiers, tier + 1)

    def _follow(self, row: int, follower: StreamFollower) -> None:
        """Write how far a block stream has come."""
        epoch, applied = max(follower.epoch, 0), follower.seq + 1
        if applied < self._applied[row] or epoch != self._epochs[row]:
            self._epochs[row] = epoch
            self.version += 1
        self._applied[row] = applied

    @property
    def bars_anybody(self) -> bool:
        """Whether there is anybody who is not healthy, not ready or not allowed."""
        if self._barred is None:
            masks = (self.healthy, self.ready, self.allowed)
            self._barred = any(len(mask) and not mask[mask.argmin()] for mask in masks)
        return self._barred

    @property
    def trusts(self) -> tuple[bool, bool]:
        """Whether there is anybody who is trusted, and whether everybody is."""
        if self._trusts is None:
            count = int(np.count_nonzero(self.trusted))
            self._trusts = count > 0, count == len(self.trusted)
        return self._trusts

    @property
    def slots(self) -> NDArray[np.int64]:
        """(rows,) index slot of the block set in each one's first tier; -1 where there is none."""
        return self._slots[0, : len(self)]

    def slot_rows(self, tier: int) -> SlotRows:
        """Return which row each index slot of a tier's block sets belongs to."""
        slot_rows = self._slot_rows.get(tier)
        if slot_rows is None:
            slot_rows = self._slot_rows[tier] = SlotRows(self._slots[tier, : len(self)])
        return slot_rows

    def capable(self, lora: str | None) -> NDArray[np.bool_] | None:
        """Return (rows,) who can serve an adapter; None where none is asked for."""
        if lora is None:
            return None
        mask = self._capable.get(lora)
        if mask is None:
            mask = np.array([lora in instance.record.loras for instance in self._by_row], np.bool_)
            if len(self._capable) >= 1024:
                self._capable.clear()
            self._capable[lora] = mask
        return mask

    def untried(self, tried: Iterable[str]) -> NDArray[np.bool_]:
        """Return (rows,) who is not among some instances, the caller's own."""
        untried = np.ones(len(self), np.bool_)
        for instance_id in tried:
            instance = self.get(instance_id)
            if instance is not None:
                untried[instance.row] = False
        return untried

    def leaves_anybody(self, lora: str | None) -> bool:
        """Whether operators have left anybody who can serve the model, or an adapter of it."""
        undrained = self.undrained
        if undrained is None:
            return True
        capable = self.capable(lora)
        if capable is None or not capable.any():
            return bool(undrained.any())
        return bool((undrained & capable).any())

    def drains_changed(self) -> None:
        """Look anew for operators' drains. Call after one came or went."""
        undrained = np.array([not instance.drained for instance in self._by_row], np.bool_)
        self.undrained = None if undrained.all() else undrained

    def records_changed(self) -> None:
        """Forget what was derived from records. Call after replacing one."""
        self._capable.clear()

    def _views(self) -> None:
        """Cut the arrays to the rows in use, after growing what is under them."""
        rows = len(self)
        if rows > len(self._healthy):
            self._healthy = np.pad(self._healthy, (0, rows))
            self._ready = np.pad(self._ready, (0, rows))
            self._allowed = np.pad(self._allowed, (0, rows))
            self._trusted = np.pad(self._trusted, (0, rows))
            self._exact = np.pad(self._exact, (0, rows))
            self._epochs = np.pad(self._epochs, (0, rows))
            self._applied = np.pad(self._applied, (0, rows))
            self._slots = np.pad(self._slots, ((0, 0), (0, rows)), constant_values=-1)
        self.healthy = self._healthy[:rows]
        self.ready = self._ready[:rows]
        self.allowed = self._allowed[:rows]
        self.trusted = self._trusted[:rows]
        self.exact = self._exact[:rows]
        self.epochs = self._epochs[:rows]
        self.applied = self._applied[:rows]
        self._slot_rows.clear()
        self.rows = tuple(self._by_row)
        self._barred = self._trusts = None
        self.drains_changed()
        self.version += 1
        self._capable.clear()
