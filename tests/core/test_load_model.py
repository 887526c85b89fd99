"""The load ledger against a naive twin: any history of requests, peers, a bad bus and engines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.core.load import Booking, Ledger
from schemas.bus import Prefilled, RouteBatch, RouteEvent, RouterTotals
from tests.core.load_helpers import CONFIG, finished, routed, row
from tests.models.naive_load import NaiveBooking, NaiveLedger

steps = st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(-4, 4), st.integers(0, 8))


@pytest.mark.slow
@given(st.lists(steps, max_size=20))
def test_foreign_load_is_what_two_windows_do_not_explain(
    history: list[tuple[float, int, int]],
) -> None:
    """Whatever comes and goes, foreign load is the count less the most that was known of late."""
    ledger, twin = Ledger("me", CONFIG), NaiveLedger(3.0, CONFIG.foreign_window_s, 2)
    ledger.assign_row("a", 0)
    twin.assign_row("a", 0)
    live: list[tuple[Booking, NaiveBooking]] = []
    now_s = 0.0
    for seconds, change, requests in history:
        now_s += seconds
        live += [(ledger.book("q", "a", 1, 1, now_s), twin.book("a", 1, 1)) for _ in range(change)]
        for booking, double in [live.pop() for _ in range(min(-change, len(live)))]:
            ledger.finish(booking)
            twin.finish(double)
        twin.engine_count("a", requests, now_s)
        assert ledger.engine_count("a", requests, now_s) == twin.foreign["a"]
        assert row(ledger, 0)[0] == twin.column("a")[0] >= len(live)


# --- any history, against the twin

INSTANCES = [f"i{n}" for n in range(4)]
ROWS = [0, 3, 15, 16, 17, 40]
PEERS = ["p0", "p1", "p2"]
instances = st.sampled_from(INSTANCES)
tokens = st.integers(0, 9)


class Peer:
    """Another router: a ledger of its own, and what it tells the others."""

    def __init__(self, name: str, epoch: int = 1) -> None:
        self.name = name
        self.epoch = epoch
        self.seq = -1
        self.ledger = Ledger(name)
        self.live: list[Booking] = []

    def say(self, *events: RouteEvent) -> RouteBatch:
        """Returns the next message of its stream."""
        self.seq += 1
        return RouteBatch(self.name, self.epoch, self.seq, 0.0, list(events))

    def totals(self) -> RouterTotals:
        """Returns its bookings as they stand."""
        return RouterTotals(self.ledger.own_totals())


class AnyHistory(RuleBasedStateMachine):
    """One router's ledger and its twin, three peers, a bus without manners, and engines.

    Invariant: every row shows what the twin counts, `check` agrees, nothing is negative.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ledger = Ledger("me", CONFIG)
        self.twin = NaiveLedger(CONFIG.lease_s, CONFIG.foreign_window_s, CONFIG.peers_max)
        self.mine: list[tuple[Booking, NaiveBooking]] = []
        self.peers = {name: Peer(name) for name in PEERS}
        self.in_flight: list[RouteBatch] = []

    # --- the fleet

    @rule(instance_id=instances, row_number=st.sampled_from(ROWS))
    def assign_row(self, instance_id: str, row_number: int) -> None:
        """An instance joins, or moves; a row has one instance."""
        if self.twin.rows.get(instance_id, row_number) != row_number:
            self.drop_row(instance_id)
        if row_number not in self.twin.rows.values() or instance_id in self.twin.rows:
            self.ledger.assign_row(instance_id, row_number)
            self.twin.assign_row(instance_id, row_number)

    @rule(instance_id=instances)
    def drop_row(self, instance_id: str) -> None:
        """An instance leaves."""
        self.ledger.drop_row(instance_id)
        self.twin.drop_row(instance_id)

    # --- own requests

    @rule(instance_id=instances, queued=tokens, context=tokens)
    def book(self, instance_id: str, queued: int, context: int) -> None:
        """A request is sent."""
        booking = self.ledger.book("q", instance_id, queued, context, self.now_s)
        self.mine.append((booking, self.twin.book(instance_id, queued, context)))

    @precondition(lambda self: self.mine)
    @rule(data=st.data(), left=tokens)
    def prefilled(self, data: st.DataObject, left: int) -> None:
        """A request's prompt is computed in part, or a late report says so."""
        booking, twin = data.draw(st.sampled_from(self.mine))
        assert self.ledger.prefilled(booking, left) == self.twin.prefilled(twin, left)

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A request ends, perhaps not for the first time."""
        booking, twin = data.draw(st.sampled_from(self.mine))
        assert self.ledger.finish(booking) == self.twin.finish(twin)

    # --- peers

    @rule(name=st.sampled_from(PEERS), instance_id=instances, queued=tokens, context=tokens)
    def peer_books(self, name: str, instance_id: str, queued: int, context: int) -> None:
        """A peer sends a request, and says so."""
        peer = self.peers[name]
        peer.live.append(peer.ledger.book("q", instance_id, queued, context, self.now_s))
        self.in_flight.append(peer.say(routed(instance_id, queued, context)))

    @rule(name=st.sampled_from(PEERS), left=tokens)
    def peer_makes_progress(self, name: str, left: int) -> None:
        """A peer's oldest request is computed in part, or ends."""
        peer = self.peers[name]
        if not peer.live:
            return
        booking = peer.live[0]
        released = peer.ledger.prefilled(booking, left)
        if released:
            self.in_flight.append(peer.say(Prefilled("q", booking.instance_id, released)))
            return
        peer.ledger.finish(peer.live.pop(0))
        ended = finished(booking.instance_id, booking.queued, booking.context)
        self.in_flight.append(peer.say(ended))

    @rule(name=st.sampled_from(PEERS))
    def peer_tells_its_totals(self, name: str) -> None:
        """A peer publishes the message that heals."""
        self.in_flight.append(self.peers[name].say(self.peers[name].totals()))

    @rule(name=st.sampled_from(PEERS))
    def peer_restarts(self, name: str) -> None:
        """A peer forgets everything and begins a newer epoch."""
        self.peers[name] = Peer(name, self.peers[name].epoch + 1)

    # --- the bus

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        """Any message in flight arrives, and perhaps once more later."""
        at = data.draw(st.integers(0, len(self.in_flight) - 1))
        self.receive(self.in_flight[at] if again else self.in_flight.pop(at))

    @rule()
    def deliver_all_in_order(self) -> None:
        """The bus catches up."""
        waiting, self.in_flight = self.in_flight, []
        for message in waiting:
            self.receive(message)

    def receive(self, message: RouteBatch) -> None:
        """Takes a peer's message."""
        self.ledger.peer_message(message, self.now_s)
        self.twin.peer_message(message, self.now_s)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Any message in flight is lost."""
        self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))

    # --- time and engines

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        """Silent peers lose their leases."""
        self.now_s += seconds
        expired = self.ledger.expire_peers(self.now_s)
        assert sorted(expired) == sorted(self.twin.expire_peers(self.now_s))

    @rule(instance_id=instances, requests=st.integers(0, 8))
    def engine_counts(self, instance_id: str, requests: int) -> None:
        """An engine reports a count that may be late, foreign or of no known instance."""
        self.ledger.engine_count(instance_id, requests, self.now_s)
        self.twin.engine_count(instance_id, requests, self.now_s)

    @rule(instance_id=instances)
    def engine_is_silent(self, instance_id: str) -> None:
        """Nobody vouches for an engine's count any more."""
        self.ledger.forget_engine(instance_id)
        self.twin.foreign.pop(instance_id, None)

    # --- what must hold

    @invariant()
    def rows_show_what_the_twin_counts(self) -> None:
        """The arrays are right in every row, and zero in rows without an instance."""
        shown = {number: row(self.ledger, number) for number in range(len(self.ledger.batch))}
        expected = dict.fromkeys(shown, (0, 0, 0))
        for instance_id, number in self.twin.rows.items():
            expected[number] = self.twin.column(instance_id)
        assert shown == expected

    @invariant()
    def sources_add_up(self) -> None:
        """The sums by source are the twin's, and `check` finds them sound."""
        for instance_id in INSTANCES:
            own, theirs = self.twin.own(instance_id), self.twin.theirs(instance_id)
            assert self.ledger.of(instance_id) == {
                "own_batch": own[0],
                "own_queued": own[1],
                "peer_batch": theirs[0],
                "peer_queued": theirs[1],
                "foreign": self.twin.foreign.get(instance_id, 0),
            }
        self.ledger.check([booking for booking, _ in self.mine if not booking.ended])
        assert self.ledger.peers == len(self.twin.peers) <= CONFIG.peers_max

    def teardown(self) -> None:
        """Once the bus behaves, one message with totals from each peer heals everything."""
        for peer in [self.peers[name] for name in self.twin.peers]:
            self.ledger.peer_message(peer.say(peer.totals()), self.now_s)
        for instance_id in INSTANCES:
            truth = [
                self.peers[name].ledger.own_totals().get(instance_id, (0, 0, 0))
                for name in self.twin.peers
            ]
            sums = self.ledger.of(instance_id)
            assert sums["peer_batch"] == sum(each[0] for each in truth)
            assert sums["peer_queued"] == sum(each[1] for each in truth)
        for booking, _ in self.mine:
            self.ledger.finish(booking)
        for name in PEERS:
            self.ledger.drop_peer(name)
        for instance_id in INSTANCES:
            self.ledger.drop_row(instance_id)
        self.ledger.check([])
        assert not self.ledger._loads
        for column in (self.ledger.batch, self.ledger.queued, self.ledger.context):
            assert not column.any()


TestAnyHistory = pytest.mark.slow(AnyHistory.TestCase)
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40)
