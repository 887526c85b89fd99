"""Following one instance's block stream: what to apply, what to wait for, when to ask again.

Theory of operation. A sidecar publishes changes of its block set as `KvBatch(epoch, seq, …)`,
`seq` without gaps from 0, where the set is empty before seq 0. The bus may lose, repeat or delay
batches. A follower applies a batch only if it is the next one; anything else means that the view
may differ from the truth, and only a snapshot makes it equal again.

    state        input                         → state      what to do
    ---------    --------------------------    ---------    ----------------------------------------
    any          batch of an older epoch       same         ignore
    any          newer epoch, seq = 0          EXACT        start from empty, apply
    any          newer epoch, seq > 0          RESYNCING    empty the set, keep it, ask
    any          seq < next                    same         ignore (repeated)
    EXACT        seq = next                    EXACT        apply
    EXACT        seq > next                    RESYNCING    keep it, ask for a snapshot
    RESYNCING    seq ≥ next                    RESYNCING    keep it (bounded)
    any          snapshot as of (epoch, seq)   EXACT        apply the kept batches after seq
                   … with a gap after it       RESYNCING    keep the rest, ask again
                   … older than what is held   same         the caller must not apply it

A message may be wrong, or forged: an epoch or a number that no sidecar has reached must not make
the batches that follow look old. A snapshot settles that, as it is made after it was asked for:
what came before the question (`asked`) and is not covered by the answer was never sent. So kept
batches beyond it are dropped, and so is an epoch of which only such batches came, and a position
beyond it in the same epoch was never reached. That an older epoch is the present one is believed
only where one of these shows it, since an old sidecar may answer while a new one has begun: or
where for long nothing that was heard could be used (`doubt`), whatever had led there.

Epochs grow as long as the sidecar's clock does. If that was set back, the present epoch is an older
one, and the instance's record says so: once it has named an older epoch than the followed one, and
a batch of that has come, before or after, the followed one is void, and the other is a newer epoch.

A follower that has heard nothing yet is RESYNCING. Kept batches are bounded by their blocks; over
the bound the oldest go, which the snapshot that is awaited either covers or shows as a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from schemas.bus import KvBatch, KvCleared


class Trust(StrEnum):
    """How far an instance's block set can be relied on."""

    EXACT = "exact"
    RESYNCING = "resyncing"
    STALE = "stale"


class Step(msgspec.Struct, frozen=True):
    """What one input to a follower means.

    Attributes:
        restart: empty the block set before applying.
        apply: batches to apply, in order.
        lost: why a snapshot is needed now; empty if none newly is.
        ignored: the batch was neither applied nor kept.
    """

    restart: bool = False
    apply: Sequence[KvBatch] = ()
    lost: str = ""
    ignored: bool = False


NOTHING = Step()
IGNORED = Step(ignored=True)


def blocks_in(batch: KvBatch) -> int:
    """Return how many block hashes a batch carries."""
    return sum(len(op.hashes) // 8 for op in batch.ops if not isinstance(op, KvCleared))


class StreamFollower:
    """The state of following one instance.

    Attributes:
        epoch: the followed epoch; -1 before the first batch.
        seq: the last applied sequence number of that epoch; -1 if none is.
        exact: whether everything up to `seq` is applied and nothing is known to be missing.
        kept_dropped: batches that fell out of the bounded buffer.
        never_sent: batches that turned out not to be their sidecar's.
    """

    def __init__(self, kept_blocks_max: int = 1_000_000, kept_batches_max: int = 10_000) -> None:
        self.epoch = -1
        self.seq = -1
        self.exact = False
        self._passed_over = -1  # the older epoch of which a batch came last
        self._named = -1  # the older epoch that the record has named meanwhile
        self.kept_dropped = self.never_sent = 0
        self._kept: deque[KvBatch] = deque()
        self._kept_before_asking = 0
        self._asked_at: tuple[int, int] | None = None
        self._doubted = False
        self._kept_blocks = 0
        self._kept_blocks_max = kept_blocks_max
        self._kept_batches_max = kept_batches_max

    @property
    def position(self) -> tuple[int, int] | None:
        """(epoch, seq) of the applied set; None before there is one."""
        return (self.epoch, self.seq) if self.seq >= 0 else None

    @property
    def kept(self) -> int:
        """Batches waiting for a snapshot."""
        return len(self._kept)

    def receive(self, batch: KvBatch) -> Step:
        """Take a batch as it came from the bus."""
        if batch.epoch < self.epoch:
            if batch.epoch != self._named:
                self._passed_over = batch.epoch
                return IGNORED
            self._forget()
        if batch.epoch > self.epoch:
            return self._enter(batch)
        if batch.seq <= self.seq:
            return IGNORED
        if not self.exact:
            self._keep(batch)
            return NOTHING
        if batch.seq == self.seq + 1:
            self.seq = batch.seq
            return Step(apply=(batch,))
        lost = f"gap: {batch.seq - self.seq - 1} batches before {batch.seq}"
        self.distrust()
        self._keep(batch)
        return Step(lost=lost)

    def _enter(self, batch: KvBatch) -> Step:
        """Begin to follow a newer epoch."""
        self._forget()
        self.epoch = batch.epoch
        if batch.seq == 0:
            self.seq = 0
            self.exact = True
            return Step(restart=True, apply=(batch,))
        self._keep(batch)
        return Step(restart=True, lost=f"joined epoch {batch.epoch} at {batch.seq}")

    def named(self, epoch: int) -> Step:
        """Take note of the epoch that the instance's record names as the present one."""
        if epoch >= self.epoch:
            return NOTHING
        if epoch != self._passed_over:
            self._named = epoch
            return NOTHING
        self._forget()
        return Step(restart=True, lost=f"the epoch was set back to {epoch}")

    def _forget(self) -> None:
        """Follow nothing, as in the beginning: whatever comes next is a newer epoch."""
        self.epoch = self.seq = self._passed_over = self._named = -1
        self.exact = self._doubted = False
        self._asked_at = None
        self._forget_kept()

    def distrust(self) -> None:
        """Require a snapshot: the applied set is known to differ from the published one."""
        self.exact = False

    def doubt(self) -> Step:
        """Believe the next snapshot whatever it says: nothing that is heard can be used."""
        self.distrust()
        self._doubted = True
        return Step(lost="nothing of what it says follows what was taken in")

    def asked(self) -> None:
        """Take note that a snapshot is asked for from now on: its answer covers all sent before."""
        self._kept_before_asking = len(self._kept)
        self._asked_at = (self.epoch, self.seq)

    def outdated(self, epoch: int, seq: int) -> bool:
        """Whether a snapshot as of `(epoch, seq)` would take the applied set back in time."""
        if self._asked_at != (self.epoch, self.seq):  # something was applied since
            return (epoch, seq) < (self.epoch, self.seq)
        return epoch < self.epoch and self.seq >= 0 and not self._doubted

    def snapshot(self, epoch: int, seq: int) -> Step:
        """Take note that the whole set as of `(epoch, seq)` has replaced the applied one.

        The caller has emptied the set and filled it from the snapshot; the returned batches follow.
        The caller must not apply a snapshot that `outdated` names.
        """
        assert not self.outdated(epoch, seq)
        if epoch != self.epoch:
            self.never_sent += len(self._kept) if epoch < self.epoch else 0
            self._forget()
        self.epoch, self.seq, self.exact = epoch, seq, True
        self._asked_at, self._doubted = None, False
        kept = sorted(self._credible(), key=lambda batch: batch.seq)
        self._forget_kept()
        apply: list[KvBatch] = []
        for position, batch in enumerate(kept):
            if batch.seq <= self.seq:
                continue
            if batch.seq != self.seq + 1:
                self.exact = False
                for later in kept[position:]:
                    self._keep(later)
                return Step(apply=apply, lost=f"gap after snapshot: {self.seq + 1} is missing")
            self.seq = batch.seq
            apply.append(batch)
        return Step(apply=apply)

    def _credible(self) -> list[KvBatch]:
        """Return the kept batches, without those that a snapshot as of `seq` gives the lie."""
        credible = [
            batch
            for at, batch in enumerate(self._kept)
            if at >= self._kept_before_asking or batch.seq <= self.seq
        ]
        self.never_sent += len(self._kept) - len(credible)
        return credible

    def _keep(self, batch: KvBatch) -> None:
        self._kept.append(batch)
        self._kept_blocks += blocks_in(batch)
        while self._kept_blocks > self._kept_blocks_max or len(self._kept) > self._kept_batches_max:
            self._kept_blocks -= blocks_in(self._kept.popleft())
            self._kept_before_asking = max(self._kept_before_asking - 1, 0)
            self.kept_dropped += 1

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._kept_blocks = self._kept_before_asking = 0
