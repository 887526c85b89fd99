"""What decisions saw, as others read it: the columns of `columns`, with names and scores.

Nothing here is needed to decide; detectors, audits and views use it on what routers told.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from controlplane.core.columns import unpack, unpack_bits
from controlplane.core.decision import Candidate
from controlplane.core.policies import POLICIES, make_policy
from controlplane.core.scoring import (
    BoolArray,
    FleetView,
    FloatArray,
    IntArray,
    Request,
    without_those_that_leave_nobody,
)
from schemas.bus import CandidateColumns, FleetRows, Routed


class Candidates(msgspec.Struct, frozen=True):
    """Every instance as one decision saw it, an array a quantity, by row.

    Attributes:
        rows: whose row each is, and how scores are made.
        hit_tokens: (rows,) by the block sets alone.
        promised_tokens: (rows,) beyond those.
        queued_tokens: (rows,)
        batch_size: (rows,)
        applied: (rows,) batches of each block stream that were applied: seq + 1.
        exact: (rows,) whose block set was known to be the published one.
        eligible: (rows,) who could be chosen.
        excluded: filter → (rows,) whom it excludes, in the order of the filters.
        ignored: filters that had no effect, since they would have left nobody.
        scores: (rows,) under the policy that decided; None where this version does not know it.
    """

    rows: FleetRows
    hit_tokens: IntArray
    promised_tokens: IntArray
    queued_tokens: IntArray
    batch_size: IntArray
    applied: IntArray
    exact: BoolArray
    eligible: BoolArray
    excluded: dict[str, BoolArray]
    ignored: tuple[str, ...]
    scores: FloatArray | None

    def __len__(self) -> int:
        return len(self.rows.instance_ids)

    @property
    def epochs(self) -> list[int]:
        """Epoch of each block stream; 0 where there was none."""
        epochs: list[int] = np.frombuffer(self.rows.epochs or bytes(8 * len(self)), "<u8").tolist()
        return epochs

    def listed(self) -> list[Candidate]:
        """Return the instances one by one."""
        scores = np.zeros(len(self)) if self.scores is None else self.scores
        barred = [
            tuple(name for name, mask in self.excluded.items() if mask[row])
            for row in range(len(self))
        ]
        return list(
            map(
                Candidate,
                self.rows.instance_ids,
                (self.hit_tokens + self.promised_tokens).tolist(),
                self.queued_tokens.tolist(),
                self.batch_size.tolist(),
                scores.tolist(),
                self.eligible.tolist(),
                barred,
            )
        )


class RowsBook:
    """Remembers what routers told of their rows, so that columns can be read.

    Args:
        kept_max: tellings kept, over all routers; the oldest go first.

    Attributes:
        unknown: decisions whose rows are not known: told before this book began, or lost since.
        unreadable: decisions whose columns do not fit their rows.
    """

    def __init__(self, kept_max: int = 1024) -> None:
        assert kept_max > 0
        self.unknown = 0
        self.unreadable = 0
        self._kept_max = kept_max
        self._rows: OrderedDict[tuple[str, int, int], FleetRows] = OrderedDict()

    def told(self, router_id: str, epoch: int, rows: FleetRows) -> None:
        """Take what a router told.

        Args:
            epoch: of the router's stream: versions begin anew with it.
        """
        self._rows[router_id, epoch, rows.version] = rows
        while len(self._rows) > self._kept_max:
            self._rows.popitem(last=False)

    def read(self, router_id: str, epoch: int, event: Routed) -> Candidates | None:
        """Return what a decision saw; None if it does not tell, or in a way that is not known."""
        columns = event.candidates
        if columns is None:
            return None
        rows = self._rows.get((router_id, epoch, columns.version))
        if rows is None:
            self.unknown += 1
            return None
        try:
            return candidates_of(event, columns, rows)
        except ValueError:
            self.unreadable += 1
            return None


def candidates_of(event: Routed, columns: CandidateColumns, rows: FleetRows) -> Candidates:
    """Return what a decision saw, given whose rows they are.

    Raises:
        ValueError: a column does not fit the rows.
    """
    count = len(rows.instance_ids)
    hits = unpack(columns.hit_tokens, count)
    promised = unpack(columns.promised_tokens, count)
    queued = unpack(columns.queued_tokens, count)
    batch = unpack(columns.batch_size, count)
    excluded = {name: unpack_bits(bits, count) for name, bits in columns.excluded.items()}
    eligible, ignored = without_those_that_leave_nobody(
        [(name, ~mask) for name, mask in excluded.items()]
    )
    view = FleetView(batch, queued, unpack(columns.context_tokens, count))
    return Candidates(
        rows=rows,
        hit_tokens=hits,
        promised_tokens=promised,
        queued_tokens=queued,
        batch_size=batch,
        applied=unpack(rows.applied, count) + unpack(columns.applied, count),
        exact=~unpack_bits(columns.inexact, count),
        eligible=np.ones(count, np.bool_) if eligible is None else eligible,
        excluded=excluded,
        ignored=ignored,
        scores=_scores(event, rows, view, hits + promised),
    )


def _scores(event: Routed, rows: FleetRows, view: FleetView, hits: IntArray) -> FloatArray | None:
    """Return (rows,) scores as the router made them; None for a policy that is not known here.

    Raises:
        ValueError: the policy's parameters are not its own.
    """
    if event.policy not in POLICIES:
        return None
    parameters = rows.parameters if event.policy == rows.policy else {}
    policy = make_policy(event.policy, **parameters)
    asked = Request(event.prompt_tokens or 0, hits, alpha=event.alpha, beta=event.beta)
    return policy.score(view, asked)
