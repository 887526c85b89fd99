"""Checking the record of a plane: every decision computed again from what it saw.

Theory of operation. Messages come in about the order in which they were stored. Of each decision
three things are checked:

1. at once: that its numbers, score, filters and pick follow from its own columns (`choice`);
2. as soon as the block streams are read as far as the router had read them: that the hits in those
   columns are those of the rebuilt sets (`hits`);
3. at its request's end: how many of the promised tokens the engine found cached (`outcomes`).

A decision that waits for block streams does so for `patience_s` of the record's time; then, or at
the end, what is missing counts as not recorded, which is no fault of the decision.

Bounds: `waiting_max` decisions wait for block streams and `open_max` for their ends; beyond either
the oldest are taken as they are, and counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from controlplane.audit.choice import UNKNOWN_POLICY, faults
from controlplane.audit.heard import Heard, Unreadable
from controlplane.audit.hits import check_hits, positions
from controlplane.audit.outcomes import cause
from controlplane.audit.report import Finding, Kind, Report
from controlplane.audit.sets import BlockSets, Position
from controlplane.audit.statements import Statements
from controlplane.core.candidates import Candidates, RowsBook
from schemas.bus import Finished, FleetRows, KvBatch, RouteBatch, Routed, SnapshotChunk


class VerifyLimits(msgspec.Struct, frozen=True):
    """Bounds of a check.

    Attributes:
        patience_s: time of the record that a decision waits for block streams.
        window_s: how far routers may lag behind each other, in the record's time.
        waiting_max: decisions that wait for block streams.
        open_max: decisions that wait for their requests' ends.
        changes_max: changes of block sets that can be undone, a model.
        findings_max: faults that are kept in words; further ones are only counted.
    """

    patience_s: float = 5.0
    window_s: float = 60.0
    waiting_max: int = 10_000
    open_max: int = 100_000
    changes_max: int = 1_000_000
    findings_max: int = 1_000


class _Case:
    """One decision until all is checked.

    Attributes:
        waits: positions of block streams that were not read when it was heard.
        end: how its request ended, if it did while it waited.
    """

    __slots__ = ("asked", "end", "event", "heard_wall_s", "seen", "waits", "where")

    def __init__(
        self, event: Routed, seen: Candidates | None, where: str, heard_wall_s: float
    ) -> None:
        self.event = event
        self.seen = seen
        self.where = where
        self.heard_wall_s = heard_wall_s
        self.asked: list[Position] = [] if seen is None else positions(seen)
        self.waits: deque[Position] = deque(self.asked)
        self.end: Finished | None = None


class _Model:
    """What is known of one model."""

    def __init__(self, limits: VerifyLimits) -> None:
        self.rows = RowsBook()
        self.sets = BlockSets(limits.window_s, limits.changes_max)
        self.statements = Statements()
        self.streams: dict[str, tuple[int, int]] = {}
        self.waiting: OrderedDict[int, _Case] = OrderedDict()
        self.open: OrderedDict[tuple[str, str, str], _Case] = OrderedDict()


class Verifier:
    """Checks a record, message by message.

    Attributes:
        report: what it has come to so far.
    """

    def __init__(self, limits: VerifyLimits = VerifyLimits()) -> None:  # noqa: B008
        self.report = Report(limits.findings_max)
        self._limits = limits
        self._models: dict[str, _Model] = {}

    def hear(self, heard: Heard | Unreadable) -> None:
        """Take the next message."""
        report = self.report
        report.first_wall_s = report.first_wall_s or heard.at_wall_s
        report.last_wall_s = max(report.last_wall_s, heard.at_wall_s)
        if isinstance(heard, Unreadable):
            place = f"{heard.subject} at stream place {heard.seq}"
            self._fault("unreadable", place, heard.why, heard.at_wall_s)
            return
        report.messages[heard.kind] += 1
        model = self._models.get(heard.model)
        if model is None:
            model = self._models[heard.model] = _Model(self._limits)
        message = heard.message
        if isinstance(message, KvBatch | SnapshotChunk):
            self._blocks(model, message, heard)
        elif isinstance(message, RouteBatch):
            self._route(model, message, heard)
        else:
            model.statements.hear(message, heard.at_wall_s)
        self._settle(model, heard.at_wall_s - self._limits.patience_s)

    def end(self) -> None:
        """Check what still waits, with what there is."""
        for model in self._models.values():
            for case in list(model.waiting.values()):
                self._check_hits(model, case)
            self.report.unchecked["end of the request not in the record"] += len(model.open)
            model.open.clear()

    # --- block streams

    def _blocks(self, model: _Model, message: KvBatch | SnapshotChunk, heard: Heard) -> None:
        if isinstance(message, KvBatch):
            wrong = model.sets.batch(message, heard.at_wall_s)
        else:
            wrong = model.sets.snapshot(message, heard.at_wall_s)
        if not wrong:
            return
        if wrong.startswith("digest"):
            where = (
                f"{message.instance_id} epoch {message.epoch} seq {message.seq}, "
                f"place {heard.seq} of its stream"
            )
            self._fault("kv", where, wrong, heard.at_wall_s)
        else:
            self.report.unchecked[f"block stream: {wrong.partition(':')[0]}"] += 1

    # --- decisions

    def _route(self, model: _Model, batch: RouteBatch, heard: Heard) -> None:
        self._contiguous(model, batch)
        for event in batch.events:
            if isinstance(event, FleetRows):
                model.rows.told(batch.router_id, batch.epoch, event)
            elif isinstance(event, Routed):
                self._routed(model, batch, event, heard)
            elif isinstance(event, Finished):
                key = (batch.router_id, event.request_id, event.instance_id)
                case = model.open.pop(key, None)
                if case is None:
                    self.report.unchecked["request decided before the record began"] += 1
                elif id(case) in model.waiting:
                    case.end = event
                else:
                    self._check_promise(model, case, event)

    def _contiguous(self, model: _Model, batch: RouteBatch) -> None:
        epoch, seq = model.streams.get(batch.router_id, (batch.epoch, batch.seq - 1))
        if batch.epoch == epoch and batch.seq > seq + 1:
            self.report.unchecked["messages of routers that were not recorded"] += (
                batch.seq - seq - 1
            )
        model.streams[batch.router_id] = (batch.epoch, batch.seq)

    def _routed(self, model: _Model, batch: RouteBatch, event: Routed, heard: Heard) -> None:
        report, at_wall_s = self.report, heard.at_wall_s
        report.decisions += 1
        unreadable = model.rows.unreadable
        seen = model.rows.read(batch.router_id, batch.epoch, event)
        where = (
            f"request {event.request_id} attempt {event.attempt} by router {batch.router_id}, "
            f"place {heard.seq} of its stream"
        )
        case = _Case(event, seen, where, at_wall_s)
        model.open[batch.router_id, event.request_id, event.instance_id] = case
        while len(model.open) > self._limits.open_max:
            model.open.popitem(last=False)
            report.unchecked["too many requests under way at once"] += 1
        if seen is None:
            if model.rows.unreadable > unreadable:
                self._fault("numbers", where, "its columns do not fit its rows", at_wall_s)
            else:
                told = event.candidates is not None
                report.unchecked["rows not recorded" if told else "candidates not recorded"] += 1
            return
        wrong = [*faults(event, seen), *model.statements.faults(event, seen, at_wall_s)]
        for kind, text in wrong:
            self._fault(kind, where, text, at_wall_s)
        if seen.scores is None:
            report.unchecked[UNKNOWN_POLICY] += 1
        else:
            report.chosen += not wrong
        model.waiting[id(case)] = case

    def _settle(self, model: _Model, before_wall_s: float) -> None:
        """Check the decisions whose block streams have been read, or that waited long enough."""
        while model.waiting:
            case = next(iter(model.waiting.values()))
            waits = case.waits
            while waits and model.sets.reached(waits[0]):
                waits.popleft()
            crowded = len(model.waiting) > self._limits.waiting_max
            if waits and case.heard_wall_s >= before_wall_s and not crowded:
                break  # those behind it saw the streams about as far, and wait no longer for it
            self._check_hits(model, case)

    def _check_hits(self, model: _Model, case: _Case) -> None:
        del model.waiting[id(case)]
        assert case.seen is not None
        report = self.report
        found = check_hits(case.event, case.seen, model.sets)
        report.instances += found.checked
        report.unchecked["block set not exact at the router"] += found.inexact
        report.unchecked["block set not in the record"] += found.unknown
        for text in found.wrong:
            self._fault("hits", case.where, text, case.heard_wall_s)
        report.hits += bool(found.checked and not found.wrong)
        if case.end is not None:
            self._check_promise(model, case, case.end)

    def _check_promise(self, model: _Model, case: _Case, end: Finished) -> None:
        event = case.event
        asked = next((each for each in case.asked if each.instance_id == event.instance_id), None)
        why = cause(event, end, case.seen, asked, model.sets)
        self.report.told(why, event.hit_tokens, end.cached_tokens or 0)

    def _fault(self, kind: Kind, where: str, text: str, at_wall_s: float) -> None:
        self.report.add(Finding(kind, where, text, at_wall_s))
