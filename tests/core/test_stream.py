"""Following a block stream: exact means equal to the truth, whatever the bus loses or repeats."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.core.hashing import pack_hashes, unpack_hashes
from controlplane.core.stream import IGNORED, NOTHING, Step, StreamFollower, blocks_in
from schemas.bus import KvBatch, KvCleared, KvOp, KvRemoved, KvStored


def batch(seq: int, *hashes: int, epoch: int = 1) -> KvBatch:
    """Returns a batch that stores some hashes; without any, a heartbeat."""
    ops: list[KvOp] = [KvStored(pack_hashes(hashes))] if hashes else []
    return KvBatch("i", epoch, seq, 0.0, ops)


def exact_at(seq: int, epoch: int = 1) -> StreamFollower:
    """Returns a follower that has applied everything up to a batch."""
    follower = StreamFollower()
    follower.snapshot(epoch, seq)
    return follower


def resyncing(applied: int, *kept: int) -> StreamFollower:
    """Returns a follower that lost something after `applied` and keeps some later batches."""
    follower = exact_at(applied)
    follower.distrust()
    for seq in kept:
        assert follower.receive(batch(seq)) == NOTHING
    return follower


# --- one test a row of the table


def test_a_batch_of_an_older_epoch_is_ignored() -> None:
    """A dead incarnation's late words change nothing, in either state."""
    for follower in (exact_at(3), resyncing(3)):
        before = follower.exact
        assert follower.receive(batch(4, epoch=0)) == IGNORED
        assert (follower.epoch, follower.seq, follower.exact) == (1, 3, before)
        assert follower.kept == 0


def test_the_first_batch_of_a_newer_epoch_starts_from_empty() -> None:
    """Nothing can be missing before seq 0, so no snapshot is needed."""
    first = batch(0, 5, epoch=2)
    for follower in (StreamFollower(), exact_at(3), resyncing(3, 9)):
        assert follower.receive(first) == Step(restart=True, apply=(first,))
        assert (follower.epoch, follower.seq, follower.exact, follower.kept) == (2, 0, True, 0)


def test_a_later_batch_of_a_newer_epoch_empties_the_set_and_asks() -> None:
    """The old incarnation's blocks are gone for sure; what the new one has is not yet known."""
    for follower in (StreamFollower(), exact_at(3), resyncing(3, 9)):
        assert follower.receive(batch(7, epoch=2)) == Step(restart=True, lost="joined epoch 2 at 7")
        assert (follower.epoch, follower.seq, follower.exact, follower.kept) == (2, -1, False, 1)


def test_a_repeated_batch_is_ignored() -> None:
    """What is applied already is neither applied again nor kept."""
    for follower in (exact_at(3), resyncing(3)):
        for seq in (0, 2, 3):
            assert follower.receive(batch(seq, 5)) == IGNORED
        assert (follower.seq, follower.kept) == (3, 0)


def test_the_next_batch_is_applied() -> None:
    """In step with the stream, every batch is applied as it comes."""
    follower = exact_at(3)
    for seq in (4, 5, 6):
        assert follower.receive(batch(seq, seq)) == Step(apply=(batch(seq, seq),))
    assert (follower.seq, follower.exact) == (6, True)


def test_a_gap_asks_for_a_snapshot() -> None:
    """The batch after the gap is kept, the applied set stays as it was, and the step says why."""
    follower = exact_at(3)
    assert follower.receive(batch(6)) == Step(lost="gap: 2 batches before 6")
    assert (follower.seq, follower.exact, follower.kept) == (3, False, 1)


def test_while_resyncing_batches_are_kept_without_asking_again() -> None:
    """One loss is one request; even the batch that would have been next waits for its answer."""
    follower = resyncing(3, 4, 9)
    assert (follower.seq, follower.exact, follower.kept) == (3, False, 2)


def test_a_snapshot_makes_exact_and_kept_batches_follow() -> None:
    """Kept batches that it covers are dropped, later ones applied in order, however they came."""
    follower = resyncing(3, 8, 6, 7, 6, 5)
    assert follower.snapshot(1, 6) == Step(apply=[batch(7), batch(8)])
    assert (follower.seq, follower.exact, follower.kept) == (8, True, 0)


def test_a_gap_after_the_snapshot_asks_again() -> None:
    """What is contiguous is applied, the rest kept for the next snapshot."""
    follower = resyncing(3, 5, 6, 8, 9)
    assert follower.snapshot(1, 4) == Step(
        apply=[batch(5), batch(6)], lost="gap after snapshot: 7 is missing"
    )
    assert (follower.seq, follower.exact, follower.kept) == (6, False, 2)
    assert follower.snapshot(1, 8) == Step(apply=[batch(9)])
    assert (follower.seq, follower.exact, follower.kept) == (9, True, 0)


def test_an_outdated_snapshot_must_not_be_applied() -> None:
    """It would take the set back to where the batches since cannot be applied again."""
    follower = resyncing(3, 5)
    for epoch, seq in ((1, 2), (0, 99)):
        assert follower.outdated(epoch, seq)
        with pytest.raises(AssertionError):
            follower.snapshot(epoch, seq)
    assert not follower.outdated(1, 3)
    assert not follower.outdated(2, 0)
    assert (follower.seq, follower.exact, follower.kept) == (3, False, 1)


def test_a_snapshot_of_a_newer_epoch_replaces_everything() -> None:
    """What was kept of the old incarnation is dropped with it."""
    follower = resyncing(3, 5, 6)
    assert follower.snapshot(2, 4) == Step(apply=[])
    assert (follower.epoch, follower.seq, follower.exact, follower.kept) == (2, 4, True, 0)
    assert follower.receive(batch(7)) == IGNORED


def test_nothing_heard_is_not_exact() -> None:
    """An empty set is a claim too."""
    follower = StreamFollower()
    assert (follower.epoch, follower.seq, follower.exact, follower.kept) == (-1, -1, False, 0)


def test_the_position_is_that_of_the_applied_set() -> None:
    """It is told only where there is a set to speak of, exact or not."""
    follower = StreamFollower()
    assert follower.position is None
    follower.receive(batch(0))
    assert follower.position == (1, 0)
    follower.receive(batch(5))
    assert follower.position == (1, 0)
    follower.receive(batch(3, epoch=2))
    assert follower.position is None


def test_an_older_epoch_counts_once_the_record_names_it_and_a_batch_of_it_came() -> None:
    """In either order: then the followed epoch is void, and whatever is kept of it."""
    first = exact_at(3, epoch=5)
    assert first.receive(batch(0, epoch=2)) == IGNORED
    step = first.named(2)
    assert (step.restart, bool(step.lost), first.epoch, first.exact) == (True, True, -1, False)
    second = exact_at(3, epoch=5)
    assert second.named(2) == NOTHING
    assert (second.epoch, second.exact) == (5, True)
    assert second.receive(batch(0, epoch=2)).restart
    assert (second.epoch, second.exact) == (2, True)


def test_a_record_that_names_the_followed_epoch_or_a_newer_one_changes_nothing() -> None:
    """Records and batches have no common order: either may be first to tell of a new epoch."""
    follower = exact_at(3, epoch=5)
    for epoch in (5, 6):
        assert follower.named(epoch) == NOTHING
    assert (follower.epoch, follower.seq, follower.exact) == (5, 3, True)


def test_what_was_named_before_the_present_epoch_began_is_forgotten() -> None:
    """A record of the old epoch that was late does not make its stragglers count."""
    follower = exact_at(3, epoch=5)
    follower.named(4)
    follower.receive(batch(0, epoch=6))
    assert follower.receive(batch(9, epoch=4)) == IGNORED
    assert (follower.epoch, follower.exact) == (6, True)


# --- what no sidecar sent

FAR = 10**12


def test_a_number_that_was_never_reached_is_dropped_by_the_next_snapshot() -> None:
    """It came before the question, and the answer does not cover it: nobody sent it."""
    follower = exact_at(3)
    follower.receive(batch(FAR, 7))
    follower.asked()
    follower.receive(batch(4))
    follower.receive(batch(6))
    assert follower.snapshot(1, 5) == Step(apply=[batch(6)])
    assert (follower.seq, follower.exact, follower.never_sent) == (6, True, 1)
    assert follower.receive(batch(7)) == Step(apply=(batch(7),))


def test_what_came_after_the_question_is_kept_for_the_next_one() -> None:
    """The answer may have been made before it: so it proves nothing yet."""
    follower = exact_at(3)
    follower.receive(batch(5))
    follower.asked()
    follower.receive(batch(FAR, 7))
    assert follower.snapshot(1, 5).lost
    assert (follower.exact, follower.kept) == (False, 1)
    follower.asked()
    assert follower.snapshot(1, 8) == Step(apply=[])
    assert (follower.exact, follower.never_sent) == (True, 1)


def test_an_epoch_that_was_never_reached_ends_with_the_next_snapshot() -> None:
    """A sidecar that had begun it would answer in it."""
    follower = exact_at(3)
    assert follower.receive(batch(9, 7, epoch=FAR)).restart
    assert follower.outdated(1, 4), "an answer to an earlier question"
    follower.asked()
    assert not follower.outdated(1, 4)
    assert follower.snapshot(1, 4) == Step(apply=[])
    assert (follower.epoch, follower.seq, follower.exact, follower.never_sent) == (1, 4, True, 1)
    assert follower.receive(batch(5)) == Step(apply=(batch(5),))


def test_an_epoch_of_which_something_was_applied_is_not_given_up_for_an_older_one() -> None:
    """An old sidecar may still answer while the new one has begun."""
    follower = exact_at(3, epoch=5)
    follower.distrust()
    follower.asked()
    assert follower.outdated(4, 99)


def test_a_position_that_was_never_reached_ends_with_the_next_snapshot() -> None:
    """A wrong batch may have come in time: its sidecar answers as of the batch before it."""
    follower = exact_at(3)
    follower.receive(batch(4, 99))
    follower.distrust()
    assert follower.outdated(1, 3), "an answer to an earlier question"
    follower.asked()
    assert not follower.outdated(1, 3)
    assert follower.snapshot(1, 3) == Step(apply=[])
    assert follower.receive(batch(4, 7)) == Step(apply=(batch(4, 7),))


def test_an_answer_proves_nothing_about_what_was_applied_after_the_question() -> None:
    """A stream may become exact by itself meanwhile."""
    follower = StreamFollower()
    follower.asked()
    follower.receive(batch(0))
    follower.receive(batch(1))
    assert follower.outdated(1, 0)


def test_whoever_can_use_nothing_believes_the_next_snapshot() -> None:
    """Even one of an older epoch; until it comes, what is known stays."""
    follower = exact_at(FAR, epoch=FAR)
    step = follower.doubt()
    assert (step.restart, bool(step.lost), follower.exact) == (False, True, False)
    assert follower.receive(batch(4)) == IGNORED
    follower.asked()
    assert not follower.outdated(1, 4)
    assert follower.snapshot(1, 4) == Step(apply=[])
    assert follower.receive(batch(5)) == Step(apply=(batch(5),))
    follower.receive(batch(9, epoch=7))
    follower.snapshot(7, 9)
    follower.distrust()
    follower.asked()
    assert follower.outdated(1, 99), "the doubt is over"


# --- bounds


def test_kept_batches_are_bounded_by_number() -> None:
    """At the bound nothing is lost; beyond it the oldest go, and are counted."""
    follower = StreamFollower(kept_batches_max=3)
    for seq in (1, 2, 3):
        follower.receive(batch(seq))
    assert (follower.kept, follower.kept_dropped) == (3, 0)
    follower.receive(batch(4))
    assert (follower.kept, follower.kept_dropped) == (3, 1)
    assert follower.snapshot(1, 1) == Step(apply=[batch(2), batch(3), batch(4)])


def test_kept_batches_are_bounded_by_blocks() -> None:
    """Few large batches count as much as many small ones; room is given back when they go."""
    follower = StreamFollower(kept_blocks_max=6)
    for seq in (1, 2, 3):
        follower.receive(batch(seq, 10, 11))
    assert (follower.kept, follower.kept_dropped) == (3, 0)
    follower.receive(batch(4, 12))
    assert (follower.kept, follower.kept_dropped) == (3, 1)
    follower.receive(batch(5, 13))
    assert (follower.kept, follower.kept_dropped) == (4, 1)
    follower.snapshot(1, 5)
    follower.distrust()
    for seq in (6, 7, 8):
        follower.receive(batch(seq, 10, 11))
    assert (follower.kept, follower.kept_dropped) == (3, 1)


def test_a_batch_over_the_whole_bound_is_not_kept() -> None:
    """One message cannot take more memory than all may; the snapshot shows its absence."""
    follower = StreamFollower(kept_blocks_max=3)
    follower.receive(batch(1))
    follower.receive(batch(2, 10, 11, 12, 13))
    assert (follower.kept, follower.kept_dropped) == (0, 2)
    follower.receive(batch(3))
    assert follower.snapshot(1, 1).lost == "gap after snapshot: 2 is missing"


def test_blocks_in_counts_stores_and_removals() -> None:
    """Clearing carries no hashes."""
    ops: list[KvOp] = [KvCleared(), KvStored(pack_hashes([1, 2])), KvRemoved(pack_hashes([3]))]
    assert blocks_in(KvBatch("i", 1, 0, 0.0, ops)) == 3


# --- any publisher over any bus

BATCHES_MAX = 4
BLOCKS_MAX = 8
some_hashes = st.frozensets(st.integers(1, 6), max_size=4)


class AnyStream(RuleBasedStateMachine):
    """A publisher with a true history, a bus without manners, and a router that follows.

    Invariant: the follower is either not exact, or its set is the publisher's as of the very
    (epoch, seq) that it claims.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.seq = -1
        self.truth: set[int] = set()
        self.history: dict[tuple[int, int], frozenset[int]] = {}
        self.in_flight: list[KvBatch] = []
        self.answers: list[tuple[int, int, frozenset[int]]] = []
        self.follower = StreamFollower(BLOCKS_MAX, BATCHES_MAX)
        self.view: set[int] = set()

    # --- the publisher

    @rule(stored=some_hashes, removed=some_hashes, cleared=st.booleans())
    def publish(self, stored: frozenset[int], removed: frozenset[int], cleared: bool) -> None:
        """Change the set and send what changed; without a change, a heartbeat."""
        ops: list[KvOp] = []
        if cleared:
            ops.append(KvCleared())
            self.truth.clear()
        gone = removed & self.truth
        if gone:
            ops.append(KvRemoved(pack_hashes(sorted(gone))))
            self.truth -= gone
        fresh = stored - self.truth
        if fresh:
            ops.append(KvStored(pack_hashes(sorted(fresh))))
            self.truth |= fresh
        self.seq += 1
        self.history[self.epoch, self.seq] = frozenset(self.truth)
        self.in_flight.append(KvBatch("i", self.epoch, self.seq, 0.0, ops))

    @rule()
    def begin_a_new_epoch(self) -> None:
        """The engine or its sidecar restarts: the set is empty before seq 0."""
        self.epoch += 1
        self.seq = -1
        self.truth.clear()

    @precondition(lambda self: self.seq >= 0)
    @rule()
    def answer_a_snapshot_request(self) -> None:
        """The whole set as of now; when it arrives is the bus's choice."""
        self.answers.append((self.epoch, self.seq, frozenset(self.truth)))

    @rule(ahead=st.sampled_from((2, 3, FAR)), epochs=st.sampled_from((0, FAR)))
    def forge(self, ahead: int, epochs: int) -> None:
        """Somebody else, or a bug, sends what the publisher never did."""
        ops: list[KvOp] = [KvStored(pack_hashes([99]))]
        self.receive(KvBatch("i", self.epoch + epochs, self.seq + FAR + ahead, 0.0, ops))

    @precondition(lambda self: self.seq >= 0)
    @rule()
    def ask_and_answer(self) -> None:
        """Whatever had come before, one question with its answer makes exact."""
        self.answers.clear()  # of earlier questions, which are void
        self.follower.asked()
        assert not self.follower.outdated(self.epoch, self.seq)
        self.take_snapshot(self.epoch, self.seq, frozenset(self.truth))
        assert self.follower.exact

    # --- the bus

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        """Any batch in flight arrives, and perhaps once more later."""
        at = data.draw(st.integers(0, len(self.in_flight) - 1))
        message = self.in_flight[at] if again else self.in_flight.pop(at)
        self.receive(message)

    @rule()
    def catch_up(self) -> None:
        """All of the running epoch arrive in order; stragglers of older ones stay in flight."""
        current = [message for message in self.in_flight if message.epoch == self.epoch]
        self.in_flight = [message for message in self.in_flight if message.epoch < self.epoch]
        for message in current:
            self.receive(message)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Any batch in flight is lost."""
        self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def deliver_a_snapshot(self, data: st.DataObject) -> None:
        """Any snapshot arrives, asked for or not, old or new."""
        self.take_snapshot(*self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    # --- the router

    @rule()
    def distrust(self) -> None:
        """The router finds a reason of its own to resync."""
        self.follower.distrust()
        assert not self.follower.exact

    def receive(self, message: KvBatch) -> None:
        """Takes a batch as a router does."""
        was_exact = self.follower.exact
        step = self.follower.receive(message)
        assert not (step.lost and self.follower.exact)
        entered = step.restart and message.seq > 0
        assert bool(step.lost) == (entered or (was_exact and not self.follower.exact))
        self.apply(step)

    def take_snapshot(self, epoch: int, seq: int, blocks: frozenset[int]) -> None:
        """Takes a snapshot as a router does: never one that is outdated."""
        if self.follower.outdated(epoch, seq):
            return
        self.view = set(blocks)
        step = self.follower.snapshot(epoch, seq)
        assert not step.restart
        assert bool(step.lost) != self.follower.exact
        self.apply(step)

    def apply(self, step: Step) -> None:
        """Changes the view as a step says."""
        if step.restart:
            self.view.clear()
        for message in step.apply:
            for op in message.ops:
                if isinstance(op, KvCleared):
                    self.view.clear()
                elif isinstance(op, KvStored):
                    self.view |= set(unpack_hashes(op.hashes))
                else:
                    self.view -= set(unpack_hashes(op.hashes))

    @invariant()
    def exact_means_equal(self) -> None:
        """What is claimed exact is the truth as of the claimed place in the stream."""
        follower = self.follower
        if follower.exact:
            assert follower.position is not None
            assert self.view == self.history[follower.position]
            assert follower.kept == 0

    @invariant()
    def kept_batches_stay_within_bounds(self) -> None:
        """Neither their number nor their blocks exceed what is configured."""
        assert self.follower.kept <= BATCHES_MAX
        assert sum(blocks_in(kept) for kept in self.follower._kept) <= BLOCKS_MAX

    def teardown(self) -> None:
        """Once the bus behaves, one heartbeat and one snapshot at most make all equal."""
        self.publish(frozenset(), frozenset(), cleared=False)
        self.catch_up()
        if not self.follower.exact:
            self.ask_and_answer()
        assert (self.follower.epoch, self.follower.seq) == (self.epoch, self.seq)
        assert self.view == self.truth


TestAnyStream = pytest.mark.slow(AnyStream.TestCase)
TestAnyStream.settings = settings(max_examples=100, stateful_step_count=40)
