"""The picture of one model that the dashboard shows: bus messages in, what a page needs out.

Pure: messages and the time come in. Everything is bounded: instances as the bus has them, decisions
and stories by number, tenants by number, series by time.

What instances are at comes from the routers' own words, summed as routers sum each other's
(`core.load.Ledger`); the dashboard is a router that never decides.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec

from controlplane.audit.lines import key_text
from controlplane.audit.story import Attempt, Story
from controlplane.audit.why import ranked, sentence, why
from controlplane.core.candidates import Candidates, candidates_of
from controlplane.core.columns import unpack_bits
from controlplane.core.load import Ledger, LoadConfig
from controlplane.dashboard.cells import Cell
from controlplane.dashboard.tenants import Tenants
from controlplane.dashboard.windows import Windows
from schemas.bus import (
    Blacklist,
    Drain,
    Finished,
    FleetRows,
    HotspotCleared,
    HotspotRaised,
    InstanceRecord,
    KvBatch,
    LoadReport,
    PolicyOverride,
    Prefilled,
    RouteBatch,
    Routed,
)

CANDIDATES_SHOWN = 5
ROWS_KEPT_MAX = 256
UNREGISTERED_S = 60.0
"""An instance without a record is forgotten when it was not named for this long."""

ATTEMPTS_MAX = 256
PREFILLS_MAX = 16
Verdict = HotspotRaised | PolicyOverride | Drain | Blacklist


class PictureLimits(msgspec.Struct, frozen=True):
    """Bounds of a picture.

    Attributes:
        stories_max: requests whose story can be told from memory.
        feed_max: decisions and ends that a page can still get one by one; a page that is too slow
            for them, or a moment that is too busy, misses the oldest.
        instances_max: instances shown; further ones are counted.
        verdicts_max: statements in force that are shown.
    """

    stories_max: int = 5_000
    feed_max: int = 400
    instances_max: int = 4_096
    verdicts_max: int = 256


class Fed:
    """A decision as pages are fed it.

    Its columns are read only if a page shows them: there may be a thousand decisions a second, over
    a thousand instances each.
    """

    __slots__ = ("_brief", "_event", "_full", "_rows")

    def __init__(self, event: Routed, router_id: str, rows: FleetRows | None) -> None:
        self._event = event
        self._rows = rows
        self._brief = decision_data(event, router_id)
        self._full: dict[str, Any] | None = None

    def data(self, *, full: bool) -> dict[str, Any]:
        """Return it with its best candidates and why, or without."""
        if not full:
            return self._brief
        if self._full is None:
            seen = _read(self._event, self._rows)
            more = {} if seen is None else reasons(self._event, seen)
            self._full = self._brief | more
        return self._full


class Picture:
    """What is known of one model.

    Attributes:
        cells: its instances, by id.
        windows: latencies and rates over the last minutes.
        verdicts: statements in force, by the name of their entry.
        decisions: decisions heard, retries included.
        refused: instances beyond the bound.
        verdicts_version: grows with every change of `verdicts`.
    """

    def __init__(self, model: str, limits: PictureLimits = PictureLimits()) -> None:  # noqa: B008
        self.model = model
        self.cells: dict[str, Cell] = {}
        self.windows = Windows()
        self.tenants = Tenants()
        self.verdicts: dict[str, tuple[Verdict, float]] = {}
        self.decisions = 0
        self.refused = 0
        self.verdicts_version = 0
        self.policy = ""
        self._limits = limits
        self._ledger = Ledger("dashboard", LoadConfig(lease_s=3.0))
        self._free_rows: list[int] = []
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._told: OrderedDict[tuple[str, int, int], FleetRows] = OrderedDict()
        self._inexact: dict[str, tuple[int, bytes]] = {}
        self._feed: deque[tuple[int, Fed | dict[str, Any]]] = deque(maxlen=limits.feed_max)
        self._fed = 0

    # --- what is heard

    def record(self, instance_id: str, record: InstanceRecord | None) -> None:
        """Take an instance's record, or its end."""
        if record is None or record.state == "stopped":
            self._drop(instance_id)
            return
        cell = self._cell(instance_id)
        if cell is not None:
            cell.record = record

    def kv(self, batch: KvBatch, now_s: float) -> None:
        """Take a change of a block set, or a heartbeat."""
        cell = self._cell(batch.instance_id)
        if cell is not None:
            cell.blocks = batch.count
            cell.heard_s = cell.named_s = now_s

    def load(self, report: LoadReport, now_s: float) -> None:
        """Take what an engine says of itself."""
        cell = self._cell(report.instance_id)
        if cell is not None:
            cell.load = report
            cell.named_s = now_s
            requests = max(report.running + report.waiting, report.server_load or 0)
            self._ledger.engine_count(report.instance_id, requests, now_s)

    def route(self, batch: RouteBatch, now_s: float) -> None:
        """Take what a router did."""
        self._ledger.peer_message(batch, now_s)
        for event in batch.events:
            if isinstance(event, FleetRows):
                self._told[batch.router_id, batch.epoch, event.version] = event
                while len(self._told) > ROWS_KEPT_MAX:
                    self._told.popitem(last=False)
                self.policy = event.policy
            elif isinstance(event, Routed):
                self._routed(event, batch, now_s)
            elif isinstance(event, Prefilled):
                self._went_on(event, batch.sent_wall_s)
            elif isinstance(event, Finished):
                self._finished(event, now_s)

    def verdict(self, name: str, verdict: Verdict | HotspotCleared | None, now_s: float) -> None:
        """Take a statement that is in force from now on, or its end, by its entry's name."""
        if verdict is None or isinstance(verdict, HotspotCleared):
            self.verdicts.pop(name, None)
        elif name in self.verdicts or len(self.verdicts) < self._limits.verdicts_max:
            self.verdicts[name] = (verdict, now_s)
        self.verdicts_version += 1
        self._mark()

    def tick(self, now_s: float) -> None:
        """Let time pass: routers that fell silent, statements that ran out, names of nobody."""
        self._ledger.expire_peers(now_s)
        for name, cell in list(self.cells.items()):
            # The last words of one that left come after its record's end.
            if cell.record is None and now_s - cell.named_s > UNREGISTERED_S:
                self._drop(name)
        for name, (verdict, since_s) in list(self.verdicts.items()):
            ttl_s = getattr(verdict, "ttl_s", None)
            if ttl_s is not None and now_s - since_s > ttl_s:
                del self.verdicts[name]
                self.verdicts_version += 1
                self._mark()

    # --- requests

    def _routed(self, event: Routed, batch: RouteBatch, now_s: float) -> None:
        self.decisions += 1
        self.windows.now(now_s).decisions += 1
        self.tenants.routed(event, now_s)
        cell = self._cell(event.instance_id)
        if cell is not None:
            cell.routed += 1
            cell.named_s = now_s
        rows = None
        if event.candidates is not None:
            rows = self._told.get((batch.router_id, batch.epoch, event.candidates.version))
        if rows is not None:
            self._trust(batch.router_id, event, rows)
        story = self._stories.get(event.request_id)
        if story is None or not event.attempt:
            story = self._stories[event.request_id] = Story(
                event.request_id, self.model, batch.router_id
            )
            if len(self._stories) > self._limits.stories_max:
                self._stories.popitem(last=False)
        # Of a decision only its bytes are kept; they are read if somebody asks.
        if len(story.attempts) < ATTEMPTS_MAX:
            story.attempts.append(Attempt(event, None))
        self._say(Fed(event, batch.router_id, rows))

    def _trust(self, router_id: str, event: Routed, rows: FleetRows) -> None:
        """Note whose block set a router does not hold for exact, if that is news."""
        assert event.candidates is not None
        news = (rows.version, event.candidates.inexact)
        if self._inexact.get(router_id) == news:
            return
        if len(self._inexact) >= ROWS_KEPT_MAX:
            self._inexact.clear()
        self._inexact[router_id] = news
        try:
            inexact = unpack_bits(event.candidates.inexact, len(rows.instance_ids)).tolist()
        except ValueError:
            return
        for instance_id, doubted in zip(rows.instance_ids, inexact, strict=True):
            cell = self.cells.get(instance_id)
            if cell is not None:
                cell.inexact = doubted

    def _attempt(self, event: Prefilled | Finished) -> Attempt | None:
        story = self._stories.get(event.request_id)
        for attempt in reversed(story.attempts if story is not None else ()):
            if attempt.routed.instance_id == event.instance_id:
                return attempt
        return None

    def _went_on(self, event: Prefilled, at_wall_s: float) -> None:
        attempt = self._attempt(event)
        if attempt is not None and len(attempt.prefilled) < PREFILLS_MAX:
            attempt.prefilled.append((event, at_wall_s))

    def _finished(self, event: Finished, now_s: float) -> None:
        attempt = self._attempt(event)
        if attempt is not None:
            attempt.finished = event
        cell = self.cells.get(event.instance_id)
        if cell is not None:
            cell.ended(event, now_s)
        if event.outcome != "retried":
            ok = event.outcome == "ok" and event.status < 400
            self.windows.ended(
                now_s,
                ok=ok,
                prompt_tokens=event.prompt_tokens or 0,
                cached_tokens=event.cached_tokens,
                output_tokens=event.output_tokens,
                ttft_s=event.ttft_s,
                duration_s=event.before_s + event.duration_s,
                streamed=event.streamed,
            )
            self.tenants.finished(event, now_s, ok=ok)
        self._say(end_data(event))

    def story(self, request: str) -> Story | None:
        """Return the story of a request by its id or the end of it, if it is remembered."""
        story = self._stories.get(request)
        if story is None and request:
            fitting = (each for each in reversed(self._stories) if each.endswith(request))
            story = self._stories.get(next(fitting, ""))
        if story is None:
            return None
        attempts = [
            Attempt(each.routed, self._seen(each.routed, story), each.prefilled, each.finished)
            for each in story.attempts
        ]
        return Story(story.request_id, story.model, story.router_id, attempts)

    def _seen(self, event: Routed, story: Story) -> Candidates | None:
        if event.candidates is None:
            return None
        for (router_id, _, version), rows in reversed(self._told.items()):
            if (router_id, version) == (story.router_id, event.candidates.version):
                return _read(event, rows)
        return None

    # --- what pages get

    def feed(self, after: int, full_max: int = 80) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the newest decision or end, and those after a number, in order.

        Args:
            full_max: so many of the newest decisions come with their candidates.
        """
        found: list[dict[str, Any]] = []
        decisions = 0
        for number, item in reversed(self._feed):
            if number <= after:
                break
            if isinstance(item, Fed):
                decisions += 1
                found.append(item.data(full=decisions <= full_max))
            else:
                found.append(item)
        return self._fed, found[::-1]

    def _say(self, data: Fed | dict[str, Any]) -> None:
        self._fed += 1
        self._feed.append((self._fed, data))

    def cell_values(self, now_s: float) -> dict[str, list[Any]]:
        """Return every instance's values, by id."""
        batch, queued = self._ledger.batch, self._ledger.queued
        return {
            name: cell.values(int(batch[cell.row]), int(queued[cell.row]), now_s)
            for name, cell in self.cells.items()
        }

    def _cell(self, instance_id: str) -> Cell | None:
        cell = self.cells.get(instance_id)
        if cell is not None:
            return cell
        if len(self.cells) >= self._limits.instances_max:
            self.refused += 1
            return None
        row = self._free_rows.pop() if self._free_rows else len(self.cells)
        cell = self.cells[instance_id] = Cell(instance_id, row)
        self._ledger.assign_row(instance_id, row)
        self._mark()
        return cell

    def _drop(self, instance_id: str) -> None:
        """Show an instance no more."""
        cell = self.cells.pop(instance_id, None)
        if cell is not None and cell.row >= 0:
            self._ledger.drop_row(instance_id)
            self._free_rows.append(cell.row)

    def _mark(self) -> None:
        """Let instances show what is said of them."""
        for cell in self.cells.values():
            cell.drained = cell.blacklisted = cell.hot = False
        for verdict, _ in self.verdicts.values():
            if isinstance(verdict, HotspotRaised):
                for name in verdict.instances:
                    if name in self.cells:
                        self.cells[name].hot = True
            elif isinstance(verdict, Drain | Blacklist) and verdict.instance_id in self.cells:
                cell = self.cells[verdict.instance_id]
                cell.drained = cell.drained or isinstance(verdict, Drain)
                cell.blacklisted = cell.blacklisted or isinstance(verdict, Blacklist)


def _read(event: Routed, rows: FleetRows | None) -> Candidates | None:
    """Return what a decision saw; None if that cannot be read."""
    if rows is None or event.candidates is None:
        return None
    try:
        return candidates_of(event, event.candidates, rows)
    except ValueError:
        return None


def decision_data(event: Routed, router_id: str) -> dict[str, Any]:
    """Return a decision as the page's list shows it, without its candidates."""
    return {
        "id": event.request_id,
        "at": event.at_wall_s,
        "router": router_id,
        "instance": event.instance_id,
        "attempt": event.attempt,
        "prompt": event.prompt_tokens or 0,
        "exact": event.exact,
        "hit": event.hit_tokens,
        "p": event.queued_tokens + event.new_tokens,
        "batch": event.batch_size,
        "score": event.score,
        "policy": event.policy,
        "reason": event.reason,
        "trust": event.trust,
        "tenant": event.tenant,
        "us": round(event.decide_s * 1e6),
        "queue_ms": round(event.queue_s * 1e3),
        "fleet": event.fleet,
        "keys": [key_text(each.key) for each in event.classes],
    }


def reasons(event: Routed, seen: Candidates) -> dict[str, Any]:
    """Return why a decision was made, and its best candidates."""
    return {
        "why": sentence(event, why(event, seen)),
        "top": [
            [each.instance_id, each.score, each.hit_tokens, list(each.excluded_by)]
            for each in ranked(seen, CANDIDATES_SHOWN)
        ],
    }


def end_data(event: Finished) -> dict[str, Any]:
    """Return an end as the page's list shows it."""
    return {
        "id": event.request_id,
        "instance": event.instance_id,
        "outcome": event.outcome,
        "status": event.status,
        "ttft_s": event.ttft_s,
        "duration_s": event.duration_s,
        "cached": event.cached_tokens,
        "hit": event.hit_tokens,
        "output": event.output_tokens,
    }
