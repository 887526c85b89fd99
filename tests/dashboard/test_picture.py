"""What the page is told: the picture of a model, its bounds, and the frames made of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.dashboard.cells import Cell
from controlplane.dashboard.frames import Viewer, verdicts
from controlplane.dashboard.picture import (
    ATTEMPTS_MAX,
    PREFILLS_MAX,
    UNREGISTERED_S,
    Picture,
    PictureLimits,
)
from controlplane.dashboard.tenants import TENANTS_MAX, Tenants
from controlplane.dashboard.windows import SAMPLES_A_SLOT, Windows, percentile
from schemas.bus import (
    Blacklist,
    Drain,
    Finished,
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
from tests.audit.tape import Tape
from tests.core.plane_helpers import prompt

CELL = (
    *("id", "state", "trust", "batch", "queued", "running", "waiting", "kv", "hit"),
    *("blocks", "routed", "hot"),
)


def heard(tape: Tape, picture: Picture | None = None, now_s: float = 100.0) -> Picture:
    """Return the picture of a tape."""
    picture = picture or Picture("m")
    for each in tape.heard():
        message = each.message  # type: ignore[union-attr]
        if isinstance(message, RouteBatch):
            picture.route(message, now_s)
        elif isinstance(message, KvBatch):
            picture.kv(message, now_s)
    return picture


def cells_of(picture: Picture, now_s: float = 100.0) -> dict[str, dict[str, Any]]:
    """Return the cells by name, their values by name."""
    return {
        name: dict(zip(CELL, values, strict=True))
        for name, values in picture.cell_values(now_s).items()
    }


def _record(name: str, **fields: object) -> InstanceRecord:
    return InstanceRecord(name, "m", f"http://{name}:1", 1, **fields)  # type: ignore[arg-type]


def test_cells_gather_records_load_blocks_and_bookings() -> None:
    """What one sees of an instance comes from four places."""
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2)))
    tape.ask(1, 2, 3)
    tape.begin(1, 2, 5)
    picture = heard(tape)
    picture.record("a", _record("a"))
    picture.load(LoadReport("a", 1, 0, 0.0, 1, 2, kv_usage=0.5), 100.0)
    cell = cells_of(picture)["a"]
    assert (cell["state"], cell["trust"], cell["blocks"], cell["routed"]) == (
        "ready",
        "exact",
        2,
        2,
    )
    assert (cell["batch"], cell["queued"]) == (3, 21), "one of ours, two that no router knows"
    assert (cell["running"], cell["waiting"], cell["kv"]) == (1, 2, 0.5)
    assert cell["hit"] == pytest.approx(32 / 53, abs=1e-3)
    assert cells_of(picture)["b"]["state"] == "unknown"


def test_trust_follows_silence_and_what_routers_say() -> None:
    """Stale after five seconds, resyncing while a router does not hold the set for exact."""
    tape = Tape()
    picture = heard(tape)
    assert cells_of(picture, 104.0)["a"]["trust"] == "exact"
    assert cells_of(picture, 106.0)["a"]["trust"] == "stale"
    tape.publishers["a"].seq += 1
    tape.publish(tape.publishers["a"].batch())
    tape.ask(1)
    assert cells_of(heard(tape, picture))["a"]["trust"] == "resyncing"
    picture.record("b", _record("b", kv_events=False))
    assert cells_of(picture)["b"]["trust"] == "none"


def test_an_instance_that_leaves_gives_its_place_to_the_next() -> None:
    """Rows are reused, and the newcomer does not inherit anything."""
    tape = Tape()
    tape.begin(1)
    picture = heard(tape)
    gone = next(name for name, cell in cells_of(picture).items() if cell["batch"])
    picture.record(gone, _record(gone, state="stopped"))
    picture.record("new", _record("new"))
    cells = cells_of(picture)
    assert gone not in cells
    assert cells["new"]["batch"] == 0
    picture.record("never seen", None)


def test_instances_beyond_the_bound_are_counted() -> None:
    """The picture does not grow with whatever is on the bus."""
    picture = Picture("m", PictureLimits(instances_max=1))
    for name in "ab":
        picture.record(name, _record(name))
        picture.load(LoadReport(name, 1, 0, 0.0, 0, 0), 1.0)
        picture.kv(KvBatch(name, 1, 0, 0.0), 1.0)
    assert (list(picture.cells), picture.refused) == (["a"], 3)


def test_decisions_and_ends_are_fed_once_to_each_page() -> None:
    """In order; a page that comes later gets those that are kept."""
    tape = Tape()
    tape.ask(1, name="q1", tenant="gold")
    picture = heard(tape)
    newest, feed = picture.feed(0)
    assert [each["id"] for each in feed] == ["q1", "q1"]
    decision, end = feed
    assert decision["tenant"] == "gold"
    assert decision["why"].startswith("P 21 × (B 0 + 1) = 21")
    assert [each[0] for each in decision["top"]] == ["a", "b"]
    assert (end["outcome"], end["ttft_s"]) == ("ok", None)
    assert picture.feed(newest) == (newest, [])
    tape.ask(2, name="q2")
    _, feed = heard(tape, Picture("m", PictureLimits(feed_max=3))).feed(0)
    assert [each["id"] for each in feed] == ["q1", "q2", "q2"]


def test_stories_are_told_from_memory_as_far_as_it_goes() -> None:
    """By the id or its end, with candidates; the oldest are forgotten."""
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1)))
    tape.ask(1, name="chat-1")
    ticket = tape.begin(2, name="chat-2")
    tape.finish(ticket, "retried")
    picture = heard(tape, Picture("m", PictureLimits(stories_max=2)))
    story = picture.story("at-1")
    assert story is not None
    assert story.request_id == "chat-1"
    assert story.attempts[0].seen is not None
    assert story.attempts[0].finished is not None
    assert story.attempts[0].prefilled
    assert picture.story("chat-3") is None
    assert picture.story("") is None
    tape.ask(3, name="chat-3")
    heard(tape, picture)
    assert picture.story("chat-1") is None or len(picture._stories) <= 2


def test_a_story_without_candidates_is_told_too() -> None:
    """As where routers sample."""
    tape = Tape(audit_candidates=0.0)
    tape.ask(1, name="q")
    picture = heard(tape)
    story = picture.story("q")
    assert story is not None
    assert story.attempts[0].seen is None
    assert "why" not in picture.feed(0)[1][0]


def test_statements_mark_the_instances_that_they_name() -> None:
    """As long as they stand: until lifted, or run out."""
    picture = Picture("m")
    for name in "abc":
        picture.record(name, _record(name))
    hot = HotspotRaised(7, 1, ["a", "elsewhere"], 1, 0.0, 15.0, share=(6, 10))
    picture.verdict("hotspot-007", hot, 100.0)
    picture.verdict("drain-b", Drain("b", True, 1, 0.0), 100.0)
    picture.verdict("blacklist-c", Blacklist("c", True, 1, 0.0, ttl_s=5.0), 100.0)
    picture.verdict("policy", PolicyOverride("round_robin", 1, 0.0), 100.0)
    cells = cells_of(picture)
    assert [cells[name]["hot"] for name in "abc"] == [1, 0, 0]
    assert [cells[name]["state"] for name in "abc"] == ["ready", "draining", "blacklisted"]
    shown = verdicts(picture, 101.0, 1000.0)
    assert [each["type"] for each in shown] == [
        *("hotspot_raised", "blacklist", "drain", "policy_override")
    ]
    assert (shown[0]["key"], shown[0]["until"]) == ("0000000000000007", 1014.0)
    picture.tick(106.0)
    picture.verdict("hotspot-007", HotspotCleared(7, 1, 2, 0.0), 106.0)
    picture.verdict("drain-b", None, 106.0)
    cells = cells_of(picture)
    assert [cells[name]["state"] for name in "abc"] == ["ready"] * 3
    assert [cells[name]["hot"] for name in "abc"] == [0] * 3
    assert len(verdicts(picture, 106.0, 1000.0)) == 1


def test_statements_are_bounded() -> None:
    """Further ones are not shown; renewals of those that are, are."""
    picture = Picture("m", PictureLimits(verdicts_max=1))
    for name in ("drain-a", "drain-b", "drain-a"):
        picture.verdict(name, Drain(name[-1], True, 1, 0.0), 1.0)
    assert list(picture.verdicts) == ["drain-a"]


def test_a_silent_router_takes_its_bookings_along() -> None:
    """As it does at the other routers."""
    tape = Tape()
    tape.begin(1)
    picture = heard(tape)
    assert sum(cell["batch"] for cell in cells_of(picture).values()) == 1
    picture.tick(110.0)
    assert sum(cell["batch"] for cell in cells_of(picture).values()) == 0


# --- frames


def test_the_first_frame_is_whole_and_later_ones_say_what_changed() -> None:
    """Cells that stay as they are, and statements that stand, are not sent again."""
    tape = Tape()
    tape.ask(1)
    picture = heard(tape)
    viewer = Viewer(picture)
    first = viewer.frame(100.0, 1000.0)
    assert first["full"]
    assert sorted(cell[0] for cell in first["cells"]) == ["a", "b"]
    assert len(first["feed"]) == 2
    assert first["verdicts"] == []
    assert (first["kpi"]["decisions"], first["kpi"]["instances"]) == (1, 2)
    assert first["kpi"]["policy"] == "multiplicative"
    second = viewer.frame(100.1, 1000.1)
    assert not second["full"]
    assert (second["cells"], second["feed"], second["gone"]) == ([], [], [])
    assert "verdicts" not in second
    assert "series" not in second
    picture.load(LoadReport("a", 1, 0, 0.0, 3, 0), 100.2)
    picture.record("b", None)
    picture.verdict("drain-a", Drain("a", True, 1, 0.0), 100.2)
    third = viewer.frame(102.5, 1002.5)
    assert [cell[0] for cell in third["cells"]] == ["a"]
    assert third["gone"] == ["b"]
    assert len(third["verdicts"]) == 1
    assert third["series"]
    msgspec.json.encode(third)


def test_series_hold_what_is_over() -> None:
    """The present slot is not: its rate would always look like a drop."""
    picture = Picture("m")
    for second in range(10):
        slot = picture.windows.now(100.0 + second)
        slot.decisions += 5
        slot.prompt_tokens, slot.cached_tokens = 10, 4
        slot.sample("ttft_s", 0.1, picture.windows._rng)
    points = Viewer(picture).frame(109.0, 1009.0)["series"]
    assert [point[0] for point in points] == [1000.0, 1002.0, 1004.0, 1006.0]
    assert [point[1] for point in points] == [0.1] * 4
    assert [point[5] for point in points] == [5.0] * 4
    assert [point[6] for point in points] == [0.4] * 4


# --- windows and tenants


def test_windows_are_bounded_in_time_and_samples() -> None:
    """Old slots go, gaps are filled, and a sample of a busy slot stays a fair one."""
    windows = Windows(slot_s=1.0, slots_max=5)
    windows.now(10.0).decisions += 1
    windows.now(12.5)
    assert [slot.at_s for slot in windows.slots] == [10.0, 11.0, 12.0]
    windows.now(1000.0)
    assert [slot.at_s for slot in windows.slots] == [996.0, 997.0, 998.0, 999.0, 1000.0]
    slot = windows.now(1000.0)
    for number in range(10_000):
        slot.sample("ttft_s", number / 10_000, windows._rng)
    assert len(slot.ttft_s) == SAMPLES_A_SLOT
    assert percentile(slot.ttft_s, 0.5) == pytest.approx(0.5, abs=0.12)
    assert len(windows.last(1000.5, 2.0)) == 2


def test_ends_are_counted_with_their_times() -> None:
    """Failures count as such; an answer of one token has no time per token."""
    windows = Windows()
    usual: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 60, "ttft_s": 0.1}
    usual["streamed"] = True
    windows.ended(1.0, ok=True, output_tokens=11, duration_s=0.6, **usual)
    windows.ended(1.0, ok=True, output_tokens=1, duration_s=0.2, **usual)
    windows.ended(
        1.0,
        ok=False,
        prompt_tokens=100,
        cached_tokens=None,
        output_tokens=None,
        ttft_s=None,
        duration_s=1.0,
        streamed=False,
    )
    slot = windows.now(1.0)
    assert (slot.ended, slot.failed, slot.output_tokens) == (3, 1, 12)
    assert (slot.prompt_tokens, slot.cached_tokens) == (200, 120)
    assert slot.tpot_s == [pytest.approx(0.05)]
    windows.ended(1.0, ok=True, output_tokens=11, duration_s=0.09, **usual)
    assert len(slot.tpot_s) == 1, "the end before the first byte: a router that told too little"
    windows.ended(1.0, ok=True, output_tokens=11, duration_s=2.0, **{**usual, "streamed": False})
    assert len(slot.tpot_s) == 1, "its first byte is no sign of its first token"
    windows.ended(1.0, ok=True, output_tokens=11, duration_s=0.1003, **usual)
    assert slot.tpot_s[1:] == [pytest.approx(0.00003)], "however fast"


def test_time_per_token_leaves_out_what_a_request_waited() -> None:
    """The first byte counts from the arrival, the duration from the booking."""
    tape, picture = Tape(), Picture("m")
    ticket = tape.begin(1, 2)
    booked_s = ticket.booking.booked_s
    times = {"ttft_s": 3.2, "started_s": booked_s - 3.0, "output_tokens": 11}
    times["streamed"] = True
    tape.plane.requests.finish(ticket, "ok", 200, booked_s + 0.7, 0.0, **times)
    tape.tell()
    heard(tape, picture)
    assert picture.windows.now(100.0).tpot_s == [pytest.approx(0.05)]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 3.0), ([2.0, 1.0], 1.0, 2.0)],
)
def test_percentiles_go_by_rank(values: list[float], share: float, expected: float | None) -> None:
    """Of nothing there is none."""
    assert percentile(values, share) == expected


def test_tenants_are_shown_where_there_are_any() -> None:
    """The busiest first; a plane without tenants or queue has no such table."""
    tenants = Tenants()
    tenants.routed(Routed("q", "a", 0.0), 1.0)
    assert tenants.rows(1.0) == []
    for count, name in ((1, "few"), (3, "many")):
        for _ in range(count):
            tenants.routed(Routed("q", "a", 0.0, tenant=name), 1.0)
    end = Finished("q", "a", "ok", 200, 0.0, 100, 100, 0, 50, 10, 0.2, 1.0, "many")
    tenants.finished(end, 1.0, ok=True)
    rows = tenants.rows(1.0)
    assert [row["tenant"] for row in rows] == ["many", "few"]
    assert (rows[0]["hit"], rows[0]["ttft_p95_s"]) == (0.5, 0.2)
    assert not tenants.queued
    tenants.routed(Routed("q", "a", 0.0, queue_s=0.5), 1.0)
    assert tenants.queued
    assert {row["tenant"]: row["queue_s"] for row in tenants.rows(1.0)}["(none)"] == 0.5


def test_tenants_are_bounded() -> None:
    """The one that was silent for longest is forgotten."""
    tenants = Tenants()
    for number in range(TENANTS_MAX + 3):
        tenants.routed(Routed("q", "a", 0.0, tenant=f"t{number}"), 1.0)
    names = {row["tenant"] for row in tenants.rows(1.0)}
    assert len(names) == TENANTS_MAX
    assert "t0" not in names


def test_details_of_an_instance() -> None:
    """What is looked at closely says more; what is not known is left out."""
    cell = Cell("a", 0)
    assert cell.details() == {"instance": "a"}
    cell.record = _record("a", engine_version="0.32.0")
    cell.load = LoadReport("a", 1, 0, 0.0, 0, 0, prefill_tokens_per_s=9.0)
    assert cell.details()["engine"] == "0.32.0"
    assert cell.details()["prefill_tokens_per_s"] == 9.0


def test_instances_without_a_record_are_forgotten() -> None:
    """The last words of one that left come after its record's end, and would show it for good."""
    picture = Picture("m", PictureLimits(instances_max=2))
    picture.record("gone", _record("gone"))
    picture.record("stays", _record("stays"))
    picture.record("gone", None)
    picture.kv(KvBatch("gone", 1, 0, 0.0, []), 100.0)
    picture.tick(100.0 + UNREGISTERED_S)
    assert set(picture.cells) == {"gone", "stays"}
    picture.tick(100.1 + UNREGISTERED_S)
    assert set(picture.cells) == {"stays"}
    picture.record("next", _record("next"))
    assert set(picture.cell_values(200.0)) == {"stays", "next"}


def test_a_request_that_is_sent_for_ever_has_a_bounded_story() -> None:
    """Also where a router, or who forges one, repeats itself."""
    picture = Picture("m")
    told = [Routed("q", "a", 0.0, attempt=number) for number in range(ATTEMPTS_MAX + 5)] + [
        Prefilled("q", "a", 1)
    ] * (PREFILLS_MAX + 5)
    picture.route(RouteBatch("r", 1, 0, 0.0, told), 100.0)
    story = picture.story("q")
    assert story is not None
    assert len(story.attempts) == ATTEMPTS_MAX
    assert len(story.attempts[-1].prefilled) == PREFILLS_MAX
