"""The sequence of engine events: gaps, replays, overlaps, restarts, truncation."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidecar.engine_stream import (
    Apply,
    EngineStream,
    EngineStreamConfig,
    NewEpoch,
    RequestReplay,
    StreamEffect,
)


def pay(seq: int, process: int = 0) -> bytes:
    """The payload that a process sends under a number."""
    return f"{process}:{seq}".encode()


def joined(first: int = 0, last: int = 4, **config: int | bool) -> EngineStream:
    """A stream that has replayed messages `first` to `last` and is live."""
    stream = EngineStream(EngineStreamConfig(**config))  # type: ignore[arg-type]
    stream.start()
    for seq in range(first, last + 1):
        stream.replayed(seq, pay(seq))
    stream.replay_ended()
    assert stream.live
    return stream


def seqs(effects: list[StreamEffect]) -> list[int]:
    """The numbers of the messages applied."""
    return [effect.seq for effect in effects if isinstance(effect, Apply)]


def test_a_start_asks_for_everything_from_zero() -> None:
    """What the engine still has from its start makes the state complete."""
    stream = EngineStream()
    assert stream.start() == [NewEpoch("started", complete=True), RequestReplay(0)]
    assert stream.message(2, pay(2)) == []
    assert seqs(stream.replayed(0, pay(0)) + stream.replayed(1, pay(1))) == [0, 1]
    assert stream.replay_ended() == [Apply(2, pay(2))]
    assert stream.message(3, pay(3)) == [Apply(3, pay(3))]


def test_an_engine_that_published_nothing_is_followed_from_its_first_message() -> None:
    """An empty replay is a complete one."""
    stream = joined(0, -1)
    assert stream.message(0, pay(0)) == [Apply(0, pay(0))]


def test_replay_and_live_overlap_without_being_applied_twice() -> None:
    """A live message that was replayed is dropped, even when it comes after the replay's end."""
    stream = joined(0, 4)
    assert stream.message(3, pay(3)) == []
    assert stream.message(4, pay(4)) == []
    assert stream.message(5, pay(5)) == [Apply(5, pay(5))]
    assert (stream.overlaps, stream.restarts) == (2, 0)


def test_a_gap_is_replayed_from_the_message_before_it() -> None:
    """The last applied message is asked for too, to see that the process is the same."""
    stream = joined(0, 4)
    assert stream.message(7, pay(7)) == [RequestReplay(4)]
    assert stream.message(8, pay(8)) == []
    assert stream.replayed(4, pay(4)) == []
    assert seqs(stream.replayed(5, pay(5)) + stream.replayed(6, pay(6))) == [5, 6]
    assert seqs(stream.replay_ended()) == [7, 8]
    assert (stream.gaps, stream.restarts, stream.kept) == (1, 0, 0)


def test_a_seq_that_goes_back_to_zero_is_a_restart() -> None:
    """The new process is followed at once and completely."""
    stream = joined(0, 4)
    stream.message(5, pay(5))
    fresh, applied = stream.message(0, pay(0, 1))
    assert isinstance(fresh, NewEpoch)
    assert fresh.complete
    assert applied == Apply(0, pay(0, 1))
    assert stream.message(1, pay(1, 1)) == [Apply(1, pay(1, 1))]


def test_a_restart_noticed_late_is_replayed_from_zero() -> None:
    """Messages of the new process that were missed are asked for."""
    stream = joined(0, 4)
    stream.message(5, pay(5))
    fresh, request = stream.message(2, pay(2, 1))
    assert isinstance(fresh, NewEpoch)
    assert request == RequestReplay(0)
    assert seqs(stream.replayed(0, pay(0, 1)) + stream.replayed(1, pay(1, 1))) == [0, 1]
    assert stream.replay_ended() == [Apply(2, pay(2, 1))]


def test_a_restart_hidden_in_the_overlap_is_told_by_the_payload() -> None:
    """A number that was replayed, with another payload, is another process."""
    stream = joined(0, 4)
    effects = stream.message(3, pay(3, 1))
    assert effects[1:] == [RequestReplay(0)]
    assert stream.restarts == 1


def test_a_restart_hidden_in_a_gap_is_told_by_the_anchor() -> None:
    """Numbers that go on where the old process stopped do not make it the same process."""
    stream = joined(0, 4)
    stream.message(9, pay(9, 1))
    fresh, request = stream.replayed(4, pay(4, 1))
    assert isinstance(fresh, NewEpoch)
    assert request == RequestReplay(0)


def test_an_engine_without_the_anchor_is_another_one() -> None:
    """A replay that brings nothing from the last applied message on shows a restart."""
    stream = joined(0, 4)
    assert stream.probe(after_outage=True) == [RequestReplay(4)]
    fresh, request = stream.replay_ended()
    assert isinstance(fresh, NewEpoch)
    assert fresh.complete
    assert request == RequestReplay(0)
    assert stream.replay_ended() == []
    assert stream.message(0, pay(0, 1)) == [Apply(0, pay(0, 1))]
    assert stream.restarts == 1


def test_a_probe_of_the_same_process_changes_nothing() -> None:
    """After an outage of the network alone the state is kept, and completed."""
    stream = joined(0, 4)
    assert stream.probe(after_outage=True) == [RequestReplay(4)]
    assert stream.replayed(4, pay(4)) == []
    assert seqs(stream.replayed(5, pay(5))) == [5]
    assert stream.replay_ended() == []
    assert stream.live


def test_an_unanswered_probe_of_a_silent_engine_changes_nothing() -> None:
    """A replay socket that does not answer is no reason to give up a live stream's state."""
    stream = joined(0, 4)
    assert stream.probe(after_outage=False) == [RequestReplay(4)]
    stream.message(5, pay(5))
    assert stream.replay_failed("timed out") == [Apply(5, pay(5))]
    stream.probe(after_outage=False)
    stream.message(8, pay(8))
    assert stream.replay_failed("timed out") == [RequestReplay(5)]
    no_socket = EngineStream(EngineStreamConfig(replay=False))
    no_socket.start()
    assert no_socket.probe(after_outage=False) == []


def test_an_unanswered_probe_after_an_outage_loses_the_state() -> None:
    """Nothing shows then that the engine is the same."""
    stream = joined(0, 4, tries_max=1)
    stream.probe(after_outage=True)
    assert stream.replay_failed("timed out") == [NewEpoch("timed out", complete=False)]


def test_a_start_beyond_the_engines_buffer_is_not_complete() -> None:
    """If the buffer does not reach back to 0, also on a second look, earlier blocks are unknown."""
    stream = EngineStream()
    stream.start()
    assert stream.replayed(50, pay(50)) == []
    assert stream.replayed(51, pay(51)) == []
    assert stream.replay_ended() == [RequestReplay(0)]
    fresh, applied = stream.replayed(50, pay(50))
    assert isinstance(fresh, NewEpoch)
    assert not fresh.complete
    assert applied == Apply(50, pay(50))
    assert stream.replayed(51, pay(51)) == [Apply(51, pay(51))]
    assert stream.replay_ended() == []
    assert stream.message(52, pay(52)) == [Apply(52, pay(52))]


def test_live_messages_from_before_a_late_join_are_no_restart() -> None:
    """The replay may begin after messages that are still on their way."""
    stream = EngineStream()
    stream.start()
    stream.message(48, pay(48))
    stream.replayed(50, pay(50))
    stream.replay_ended()
    stream.replayed(50, pay(50))
    assert stream.replay_ended() == []
    assert stream.message(49, pay(49)) == []
    assert (stream.overlaps, stream.restarts) == (2, 0)


def test_a_truncated_replay_is_resumed_where_it_broke() -> None:
    """A hole within a replay voids the rest of it, and the next request begins at the hole."""
    stream = EngineStream()
    stream.start()
    assert seqs(stream.replayed(0, pay(0)) + stream.replayed(1, pay(1))) == [0, 1]
    assert stream.replayed(4, pay(4)) == []
    assert stream.replayed(5, pay(5)) == []
    assert stream.replay_ended() == [RequestReplay(1)]
    applied = [stream.replayed(seq, pay(seq)) for seq in range(1, 6)]
    assert [seq for each in applied for seq in seqs(each)] == [2, 3, 4, 5]
    assert stream.replay_ended() == []


def test_a_gap_that_cannot_be_closed_loses_the_state() -> None:
    """After the tries the stream goes on from what it has, incomplete."""
    stream = joined(0, 4, tries_max=2)
    assert stream.message(7, pay(7)) == [RequestReplay(4)]
    assert stream.replay_failed("timed out") == [RequestReplay(4)]
    fresh, applied = stream.replay_failed("timed out")
    assert fresh == NewEpoch("timed out", complete=False)
    assert applied == Apply(7, pay(7))
    assert (stream.live, stream.losses) == (True, 1)


def test_a_replay_that_ends_before_the_gap_is_closed_is_asked_for_again() -> None:
    """The engine may answer before it has buffered what it just published."""
    stream = joined(0, 4, tries_max=2)
    stream.message(7, pay(7))
    stream.replayed(4, pay(4))
    stream.replayed(5, pay(5))
    assert stream.replay_ended() == [RequestReplay(5)]
    stream.replayed(5, pay(5))
    (fresh, applied) = stream.replay_ended()
    assert isinstance(fresh, NewEpoch)
    assert applied == Apply(7, pay(7))


def test_without_a_replay_socket_every_gap_is_a_loss() -> None:
    """Such a stream is complete only if it hears the engine's first message."""
    stream = EngineStream(EngineStreamConfig(replay=False))
    (fresh,) = stream.start()
    assert isinstance(fresh, NewEpoch)
    assert not fresh.complete
    first, applied = stream.message(0, pay(0))
    assert first == NewEpoch("the engine's first message", complete=True)
    assert applied == Apply(0, pay(0))
    lost, applied = stream.message(2, pay(2))
    assert isinstance(lost, NewEpoch)
    assert not lost.complete
    assert applied == Apply(2, pay(2))
    restarted = stream.message(1, pay(1, 1))
    assert [type(effect) for effect in restarted] == [NewEpoch, Apply]
    assert isinstance(stream.probe(after_outage=True)[0], NewEpoch)


def test_kept_messages_are_bounded() -> None:
    """At the bound what was kept is dropped and counted; a further replay brings it."""
    stream = joined(0, 4, kept_messages_max=2)
    for seq in (7, 8, 9):
        stream.message(seq, pay(seq))
    assert (stream.kept, stream.kept_dropped) == (1, 2)
    for seq in range(4, 8):
        stream.replayed(seq, pay(seq))
    assert stream.replay_ended() == [RequestReplay(7)]


def test_kept_bytes_are_bounded() -> None:
    """Large messages count by their size."""
    stream = joined(0, 4, kept_bytes_max=100)
    stream.message(7, b"x" * 60)
    stream.message(8, b"x" * 60)
    assert (stream.kept, stream.kept_dropped) == (1, 1)


class StreamMachine(RuleBasedStateMachine):
    """An engine that restarts, a network that loses, replays that are cut: what is applied."""

    @initialize(buffer=st.integers(1, 12), seed=st.integers(0, 2**32))
    def start(self, buffer: int, seed: int) -> None:
        """Begin with an engine whose replay buffer is small."""
        self.rng = random.Random(seed)
        self.buffer = buffer
        self.process = 0
        self.sent: list[bytes] = []
        self.wire: list[tuple[int, bytes]] = []
        self.request: int | None = None
        self.applied: list[tuple[int, bytes]] = []
        self.complete = False
        self.stream = EngineStream(EngineStreamConfig(tries_max=2, kept_messages_max=6))
        self.run(self.stream.start())

    def run(self, effects: list[StreamEffect]) -> None:
        """Carry out what the stream asks for."""
        for effect in effects:
            if isinstance(effect, Apply):
                self.applied.append((effect.seq, effect.payload))
            elif isinstance(effect, NewEpoch):
                self.applied = []
                self.complete = effect.complete
            else:
                self.request = effect.from_seq

    @rule(count=st.integers(1, 4), lost=st.integers(0, 5))
    def publish(self, count: int, lost: int) -> None:
        """The engine publishes; some of it is lost on the way, never a process's first message.

        A process whose messages are lost up to the very number that is expected next cannot be
        told from its predecessor by its messages alone; probes are for that.
        """
        for at in range(count):
            seq = len(self.sent)
            self.sent.append(pay(seq, self.process))
            if at != lost or seq == 0:
                self.wire.append((seq, self.sent[-1]))

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        """Live messages arrive, later than they were sent."""
        for seq, payload in self.wire[:count]:
            self.run(self.stream.message(seq, payload))
        del self.wire[:count]

    @rule(chance=st.integers(0, 5))
    def restart(self, chance: int) -> None:
        """Now and then the engine begins anew; what is on the wire still arrives."""
        if chance == 0:
            self.process += 1
            self.sent = []

    @rule(cut=st.integers(0, 6), fails=st.booleans())
    def answer(self, cut: int, fails: bool) -> None:
        """A request for a replay is answered, perhaps with a hole, or not at all."""
        if self.request is None:
            return
        request, self.request = self.request, None
        if fails and cut == 0:
            self.run(self.stream.replay_failed("timed out"))
            return
        first = max(len(self.sent) - self.buffer, 0)
        for at, seq in enumerate(range(max(request, first), len(self.sent))):
            if at + 1 != cut:
                self.run(self.stream.replayed(seq, self.sent[seq]))
            if self.request is not None:
                return  # a newer request voids this answer
        self.run(self.stream.replay_ended())

    @rule(after_outage=st.booleans())
    def probe(self, after_outage: bool) -> None:
        """The engine is back from an outage, or has been silent for a while."""
        self.run(self.stream.probe(after_outage=after_outage))

    @invariant()
    def no_gaps(self) -> None:
        """What one epoch applies is in order, and from 0 if it is complete."""
        if not getattr(self, "applied", None):
            return
        first = self.applied[0][0]
        assert [seq for seq, _ in self.applied] == list(range(first, first + len(self.applied)))
        assert first == 0 or not self.complete

    def teardown(self) -> None:
        """When the faults stop, the stream follows the living process up to its last message."""
        if not hasattr(self, "stream"):
            return
        self.deliver(len(self.wire))
        for _ in range(2):
            self.publish(1, lost=5)
            self.deliver(1)
            for _ in range(8):
                self.answer(cut=0, fails=False)
        assert self.stream.live
        first = self.applied[0][0]
        assert self.applied == list(enumerate(self.sent))[first:]


StreamMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.slow
class TestStream(StreamMachine.TestCase):
    """Random losses, cut replays and restarts."""
