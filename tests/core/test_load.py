"""The load ledger: no leak survives, whatever is lost, repeated, silent or foreign."""

from __future__ import annotations

import pytest

from controlplane.core.load import Ledger
from schemas.bus import Finished, Prefilled, Routed, RouterTotals
from tests.core.load_helpers import CONFIG, finished, routed, row, said


@pytest.fixture
def ledger() -> Ledger:
    """Returns the ledger of router "me", with instance "a" in row 0 and "b" in row 1."""
    fresh = Ledger("me", CONFIG)
    fresh.assign_row("a", 0)
    fresh.assign_row("b", 1)
    return fresh


# --- own bookings


def test_a_request_counts_until_it_ends(ledger: Ledger) -> None:
    """Booked, prefilled in two parts, finished: the row follows, and ends where it began."""
    booking = ledger.book("q1", "a", 64, 800, 0.0)
    assert row(ledger, 0) == (1, 64, 800)
    assert ledger.prefilled(booking, left=20) == 44
    assert row(ledger, 0) == (1, 20, 800)
    assert ledger.prefilled(booking) == 20
    assert row(ledger, 0) == (1, 0, 800)
    assert ledger.finish(booking)
    assert row(ledger, 0) == row(ledger, 1) == (0, 0, 0)
    ledger.check([])


def test_a_request_ends_once(ledger: Ledger) -> None:
    """Every path may end it; only the first counts, and nothing follows the end."""
    first, second = (ledger.book(name, "a", 5, 9, 0.0) for name in ("q1", "q2"))
    assert ledger.finish(first)
    assert not ledger.finish(first)
    assert ledger.prefilled(first) == 0
    assert row(ledger, 0) == (1, 5, 9)
    ledger.check([second])


def test_prefill_progress_never_goes_back(ledger: Ledger) -> None:
    """A late or repeated report of what is left changes nothing."""
    booking = ledger.book("q1", "a", 64, 64, 0.0)
    ledger.prefilled(booking, left=10)
    for left in (10, 30, 64, 99):
        assert ledger.prefilled(booking, left) == 0
    assert row(ledger, 0) == (1, 10, 64)


def test_totals_are_what_peers_need_to_know(ledger: Ledger) -> None:
    """Own bookings only, and only of instances that have some."""
    ledger.book("q1", "a", 5, 9, 0.0)
    ledger.book("q2", "a", 6, 7, 0.0)
    ledger.finish(ledger.book("q3", "b", 1, 1, 0.0))
    ledger.peer_message(said(0, routed("b")), 0.0)
    assert ledger.own_totals() == {"a": (2, 11, 16)}


# --- rows


def test_rows_grow_beyond_the_first_sixteen(ledger: Ledger) -> None:
    """What is booked stays in place when the arrays grow, by one or by a jump."""
    ledger.book("q1", "a", 5, 9, 0.0)
    for number in (15, 16, 17, 500):
        ledger.assign_row(f"i{number}", number)
        ledger.book("q", f"i{number}", number, number, 0.0)
        assert row(ledger, number) == (1, number, number)
    assert len(ledger.batch) == len(ledger.queued) == len(ledger.context) == 501
    assert row(ledger, 0) == (1, 5, 9)


def test_load_outlives_its_row(ledger: Ledger) -> None:
    """Requests on an instance that left still end there, and count again should it return."""
    booking = ledger.book("q1", "a", 5, 9, 0.0)
    ledger.drop_row("a")
    assert row(ledger, 0) == (0, 0, 0)
    ledger.assign_row("a", 7)
    assert row(ledger, 7) == (1, 5, 9)
    ledger.drop_row("a")
    assert ledger.finish(booking)
    ledger.assign_row("a", 0)
    assert row(ledger, 0) == row(ledger, 7) == (0, 0, 0)


def test_an_instance_that_moves_leaves_no_load_behind(ledger: Ledger) -> None:
    """A second row without dropping the first does not count requests twice."""
    booking = ledger.book("q1", "a", 5, 9, 0.0)
    ledger.assign_row("a", 4)
    assert (row(ledger, 0), row(ledger, 4)) == ((0, 0, 0), (1, 5, 9))
    ledger.check([booking])


def test_dropping_what_has_no_row_is_nothing(ledger: Ledger) -> None:
    """Instances may leave twice, or never have come."""
    ledger.drop_row("a")
    ledger.drop_row("a")
    ledger.drop_row("never seen")
    ledger.check([])


def test_instances_that_are_gone_and_idle_take_no_memory(ledger: Ledger) -> None:
    """Whatever is said about unknown instances, nothing of it is kept once it is zero."""
    ledger.drop_row("a")
    for number in range(100):
        name = f"unknown-{number}"
        ledger.engine_count(name, 7, 0.0)
        ledger.forget_engine(name)
        ledger.finish(ledger.book("q", name, 1, 1, 0.0))
        ledger.peer_message(said(number, routed(name), finished(name), finished(name)), 0.0)
    assert set(ledger._loads) == {"b"}
    assert ledger.of("unknown-0") == dict.fromkeys(ledger.of("b"), 0)


# --- peers


def test_peers_requests_count_like_own_ones(ledger: Ledger) -> None:
    """Routed adds, Prefilled and Finished subtract, and the sources stay apart."""
    ledger.book("q1", "a", 5, 9, 0.0)
    ledger.peer_message(said(0, routed("a"), routed("a"), routed("b")), 0.0)
    assert (row(ledger, 0), row(ledger, 1)) == ((3, 25, 209), (1, 10, 100))
    ledger.peer_message(said(1, Prefilled("q", "a", 10), finished("b")), 0.0)
    assert (row(ledger, 0), row(ledger, 1)) == ((3, 15, 209), (0, 0, 0))
    assert ledger.of("a") == {
        "own_batch": 1,
        "own_queued": 5,
        "peer_batch": 2,
        "peer_queued": 10,
        "foreign": 0,
    }


def test_a_request_without_known_length_counts_as_one(ledger: Ledger) -> None:
    """Some requests cannot be tokenized; they still fill a place in the batch."""
    ledger.peer_message(said(0, Routed("q", "a", 0.0)), 0.0)
    assert row(ledger, 0) == (1, 0, 0)
    ledger.peer_message(said(1, Finished("q", "a", "ok", 200, 0.0)), 0.0)
    assert row(ledger, 0) == (0, 0, 0)


def test_own_messages_are_ignored(ledger: Ledger) -> None:
    """The bus brings back what this router published."""
    ledger.peer_message(said(0, routed("a"), router="me"), 0.0)
    assert (row(ledger, 0), ledger.peers) == ((0, 0, 0), 0)


def test_repeated_and_late_messages_count_once(ledger: Ledger) -> None:
    """A sequence number at or below the last one is old."""
    for seq in (5, 5, 6, 5, 6, 3):
        ledger.peer_message(said(seq, routed("a")), 0.0)
    assert (row(ledger, 0)[0], ledger.peer_gaps) == (2, 0)


def test_totals_heal_what_was_lost(ledger: Ledger) -> None:
    """After a gap the sums are wrong until the next totals, which replace them all."""
    ledger.peer_message(said(0, routed("a"), routed("b")), 0.0)
    ledger.peer_message(said(4, routed("a")), 0.0)
    assert (row(ledger, 0)[0], row(ledger, 1)[0], ledger.peer_gaps) == (2, 1, 3)
    ledger.peer_message(said(5, RouterTotals({"a": (7, 70, 700)})), 0.0)
    assert (row(ledger, 0), row(ledger, 1)) == ((7, 70, 700), (0, 0, 0))


def test_an_end_without_a_beginning_is_not_negative(ledger: Ledger) -> None:
    """A router that is joined in the middle of its work ends requests that were never heard of."""
    ledger.peer_message(said(7, finished("a"), Prefilled("q", "a", 99), routed("b")), 0.0)
    assert (row(ledger, 0), row(ledger, 1)) == ((0, 0, 0), (1, 10, 100))


def test_a_restarted_router_begins_anew(ledger: Ledger) -> None:
    """A newer epoch drops what the old one had booked, and the old one's late words."""
    ledger.peer_message(said(8, routed("a"), routed("a"), epoch=1), 0.0)
    ledger.peer_message(said(0, routed("b"), epoch=2), 0.0)
    ledger.peer_message(said(9, routed("a"), epoch=1), 0.0)
    assert (row(ledger, 0), row(ledger, 1)) == ((0, 0, 0), (1, 10, 100))
    assert (ledger.peers, ledger.peer_gaps) == (1, 0)


def test_a_silent_router_loses_its_lease(ledger: Ledger) -> None:
    """Its bookings count up to the lease and not beyond; any message renews it."""
    ledger.peer_message(said(0, routed("a")), 0.0)
    ledger.peer_message(said(1), 2.0)
    assert ledger.expire_peers(5.0) == []
    assert row(ledger, 0)[0] == 1
    assert ledger.expire_peers(5.01) == ["peer"]
    assert (row(ledger, 0), ledger.peers) == ((0, 0, 0), 0)
    ledger.peer_message(said(9, routed("a")), 6.0)
    assert (row(ledger, 0)[0], ledger.peer_gaps) == (1, 0)


def test_repeated_messages_do_not_renew_a_lease(ledger: Ledger) -> None:
    """What a dead router once said proves nothing about its life."""
    ledger.peer_message(said(3, routed("a")), 0.0)
    ledger.peer_message(said(3, routed("a")), 2.9)
    ledger.peer_message(said(4, routed("a"), epoch=0), 2.9)
    assert ledger.expire_peers(3.5) == ["peer"]


def test_routers_are_bounded(ledger: Ledger) -> None:
    """At the bound all count; one more is refused and counted until another leaves."""
    for name in ("p1", "p2", "p3", "p3"):
        ledger.peer_message(said(0, routed("a"), router=name), 0.0)
    assert (ledger.peers, row(ledger, 0)[0], ledger.peers_refused) == (2, 2, 2)
    ledger.drop_peer("p1")
    ledger.drop_peer("p1")
    ledger.peer_message(said(1, routed("a"), router="p3"), 0.0)
    assert (ledger.peers, row(ledger, 0)[0], ledger.peers_refused) == (2, 2, 2)


@pytest.mark.parametrize(
    "claim",
    [(2**60, 2**60, 2**60), (-5, -7, -9), (2**60, -7, 3)],
)
def test_absurd_claims_are_bounded(ledger: Ledger, claim: tuple[int, int, int]) -> None:
    """A broken router can neither overflow an array nor make an instance look less than idle."""
    for name in ("p1", "p2"):
        ledger.peer_message(said(0, RouterTotals({"a": claim}), router=name), 0.0)
        more = routed("a", new=claim[1], prompt=claim[2])
        ledger.peer_message(said(1, *[more] * 3, router=name), 0.0)
    assert ledger.engine_count("a", 2**60, 0.0) <= 1_000_000
    assert 0 <= row(ledger, 0)[0] <= 3_000_000
    assert max(row(ledger, 0)) <= 2_000_000_000_000
    assert min(row(ledger, 0)) >= 0
    ledger.check([])


# --- foreign load


def test_what_nobody_here_sent_is_foreign(ledger: Ledger) -> None:
    """It appears with the engine's count, adds to the batch, and goes with the next count."""
    ledger.book("q1", "a", 5, 9, 0.0)
    ledger.peer_message(said(0, routed("a")), 0.0)
    assert ledger.engine_count("a", 6, 0.0) == 4
    assert row(ledger, 0) == (6, 15, 109)
    assert ledger.engine_count("a", 3, 0.1) == 1
    assert ledger.engine_count("a", 2, 0.2) == 0
    assert row(ledger, 0)[0] == 2


def test_a_burst_that_the_engine_has_not_seen_is_not_foreign_twice(ledger: Ledger) -> None:
    """The engine's count lags behind a burst's begin and end; neither makes foreign load."""
    burst = [ledger.book(f"q{n}", "a", 5, 9, 0.0) for n in range(24)]
    assert ledger.engine_count("a", 0, 0.1) == 0
    assert ledger.engine_count("a", 24, 0.6) == 0
    for booking in burst:
        ledger.finish(booking)
    assert ledger.engine_count("a", 24, 0.7) == 0
    assert ledger.engine_count("a", 24, 1.2) == 0
    assert row(ledger, 0)[0] == 0


def test_what_stays_after_the_lag_is_foreign(ledger: Ledger) -> None:
    """A count that no booking of the last two windows explains is somebody else's."""
    booking = ledger.book("q1", "a", 5, 9, 0.0)
    counts = []
    for tenth in range(1, 40):
        if tenth == 10:
            ledger.finish(booking)
        counts.append(ledger.engine_count("a", 1, tenth / 10))
    assert set(counts[:20]) == {0}
    assert set(counts[30:]) == {1}


def test_silent_reports_leave_no_foreign_load(ledger: Ledger) -> None:
    """When nobody vouches for it any more it is dropped, and the bookings stay."""
    ledger.book("q1", "a", 5, 9, 0.0)
    ledger.engine_count("a", 9, 0.0)
    for _ in range(2):
        ledger.forget_engine("a")
        assert row(ledger, 0) == (1, 5, 9)
    ledger.forget_engine("never seen")


def test_an_instance_that_returns_starts_without_foreign_load(ledger: Ledger) -> None:
    """What its last life counted says nothing about the next."""
    ledger.engine_count("a", 9, 0.0)
    ledger.drop_row("a")
    ledger.assign_row("a", 0)
    assert row(ledger, 0) == (0, 0, 0)
