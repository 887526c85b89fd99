"""Decisions as rows of a table: what was decided, what it saw, and how it ended."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec

from controlplane.audit.heard import Heard, Unreadable, is_plausible
from controlplane.audit.why import why
from controlplane.core.candidates import Candidates, RowsBook
from controlplane.core.decision import Candidate
from schemas.bus import Finished, FleetRows, RouteBatch, Routed


class DecisionRow(msgspec.Struct, frozen=True):
    """One decision.

    Attributes:
        class_keys: BlockHash of the prompt's prefix at each of `class_depths`, in blocks.
        next_instance_id: best of the others, at `next_score`; None if that is not known.
        ended: whether its end is in the record; what follows is None if not.
        candidates: every instance as it saw it; None where that was not recorded, or is not wanted.
    """

    model: str
    router_id: str
    request_id: str
    attempt: int
    at_wall_s: float
    instance_id: str
    policy: str
    reason: str
    trust: str
    tenant: str
    exact: bool
    prompt_tokens: int | None
    hit_tokens: int
    new_tokens: int
    queued_tokens: int
    batch_size: int
    score: float
    alpha: float
    beta: float
    fleet: int
    block_size: int
    prompt_key: int | None
    class_keys: list[int]
    class_depths: list[int]
    kv_epoch: int | None
    kv_seq: int | None
    decide_s: float
    tokenize_s: float
    queue_s: float
    eligible: int | None
    ties: int | None
    next_instance_id: str | None
    next_score: float | None
    ended: bool = False
    outcome: str | None = None
    status: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    candidates: list[Candidate] | None = None


class Table:
    """Joins decisions with their ends.

    Args:
        with_candidates: keep every candidate in its row.
        open_max: decisions that wait for their ends; beyond it the oldest leave without.

    Attributes:
        counts: rows, rows without an end, ends without a decision, unreadable messages,
            implausible decisions.
    """

    def __init__(self, *, with_candidates: bool = False, open_max: int = 100_000) -> None:
        self.counts: Counter[str] = Counter()
        self._with_candidates = with_candidates
        self._open_max = open_max
        self._rows: dict[str, RowsBook] = {}
        self._open: OrderedDict[tuple[str, str, str, str], DecisionRow] = OrderedDict()

    def hear(self, heard: Heard | Unreadable) -> Iterator[DecisionRow]:
        """Take the next message; yield the rows that it completes."""
        if isinstance(heard, Unreadable):
            self.counts["unreadable"] += 1
            return
        if not isinstance(heard.message, RouteBatch):
            return
        batch = heard.message
        rows = self._rows.setdefault(heard.model, RowsBook())
        for event in batch.events:
            if isinstance(event, FleetRows):
                rows.told(batch.router_id, batch.epoch, event)
            elif isinstance(event, Routed) and not is_plausible(event):
                self.counts["implausible"] += 1
            elif isinstance(event, Routed):
                seen = rows.read(batch.router_id, batch.epoch, event)
                key = (heard.model, batch.router_id, event.request_id, event.instance_id)
                self._open[key] = self._row(heard.model, batch.router_id, event, seen)
                if len(self._open) > self._open_max:
                    yield self._without_end(self._open.popitem(last=False)[1])
            elif isinstance(event, Finished):
                key = (heard.model, batch.router_id, event.request_id, event.instance_id)
                row = self._open.pop(key, None)
                if row is None:
                    self.counts["ends without a decision"] += 1
                else:
                    self.counts["rows"] += 1
                    yield _ended(row, event)

    def end(self) -> Iterator[DecisionRow]:
        """Yield the rows whose ends did not come."""
        while self._open:
            yield self._without_end(self._open.popitem(last=False)[1])

    def _without_end(self, row: DecisionRow) -> DecisionRow:
        self.counts["rows"] += 1
        self.counts["rows without an end"] += 1
        return row

    def _row(
        self, model: str, router_id: str, event: Routed, seen: Candidates | None
    ) -> DecisionRow:
        found = None if seen is None else why(event, seen)
        best = None if found is None else found.next_best
        return DecisionRow(
            model=model,
            router_id=router_id,
            request_id=event.request_id,
            attempt=event.attempt,
            at_wall_s=event.at_wall_s,
            instance_id=event.instance_id,
            policy=event.policy,
            reason=event.reason,
            trust=event.trust,
            tenant=event.tenant,
            exact=event.exact,
            prompt_tokens=event.prompt_tokens,
            hit_tokens=event.hit_tokens,
            new_tokens=event.new_tokens,
            queued_tokens=event.queued_tokens,
            batch_size=event.batch_size,
            score=event.score,
            alpha=event.alpha,
            beta=event.beta,
            fleet=event.fleet,
            block_size=event.block_size,
            prompt_key=event.prompt_key,
            class_keys=[each.key for each in event.classes],
            class_depths=[each.depth_blocks for each in event.classes],
            kv_epoch=None if event.kv_seq is None else event.kv_seq[0],
            kv_seq=None if event.kv_seq is None else event.kv_seq[1],
            decide_s=event.decide_s,
            tokenize_s=event.tokenize_s,
            queue_s=event.queue_s,
            eligible=None if found is None else found.eligible,
            ties=None if found is None else found.ties,
            next_instance_id=None if best is None else best[0],
            next_score=None if best is None else best[1],
            candidates=seen.listed() if seen is not None and self._with_candidates else None,
        )


def _ended(row: DecisionRow, end: Finished) -> DecisionRow:
    """Return a row with how its request ended."""
    return msgspec.structs.replace(
        row,
        ended=True,
        outcome=end.outcome,
        status=end.status,
        cached_tokens=end.cached_tokens,
        output_tokens=end.output_tokens,
        ttft_s=end.ttft_s,
        duration_s=end.duration_s,
    )
