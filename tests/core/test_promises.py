"""Promised blocks: what is being computed counts, and nothing is promised for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.core.decision import RouteRequest
from controlplane.core.events import Tick
from controlplane.core.hashing import chain, pack_tokens
from controlplane.core.plane import Plane
from controlplane.core.promises import Promises
from tests.core.plane_helpers import BLOCK, Publisher, plane, prompt, record, request
from tests.models.naive_promises import NaivePromises


def test_who_shares_a_beginning_finds_how_much_of_it_is_promised() -> None:
    """Each owner counts with the longest of its promises, and no further than asked."""
    promises = Promises(1.0)
    promises.add("a", prompt(1, 2, 3, 4), 0.0)
    promises.add("b", prompt(1, 2, 9), 0.0)
    promises.add("a", prompt(1), 0.0)
    assert promises.find(prompt(1, 2, 3, 8), 4) == {"a": 3, "b": 2}
    assert promises.find(prompt(1, 2, 3, 8), 1) == {"a": 1, "b": 1}
    assert promises.find(prompt(1, 2, 9, 9, 9), 5) == {"a": 2, "b": 3}
    assert promises.find(prompt(7), 1) == {}
    assert promises.find(prompt(1), 0) == {}


def test_dropping_leaves_what_others_have_promised() -> None:
    """Equal promises are counted; dropping one twice changes nothing more."""
    promises = Promises(1.0)
    first = promises.add("a", prompt(1, 2), 0.0)
    second = promises.add("a", prompt(1, 2), 0.0)
    promises.drop(first)
    promises.drop(first)
    assert promises.find(prompt(1, 2), 2) == {"a": 2}
    promises.drop(second)
    assert promises.find(prompt(1, 2), 2) == {}
    promises.check()


def test_promises_end_with_their_time() -> None:
    """At the end of its time a promise counts no more."""
    promises = Promises(2.0)
    promises.add("a", prompt(1), 0.0)
    promises.add("b", prompt(1), 1.0)
    promises.expire(1.9)
    assert len(promises) == 2
    promises.expire(2.0)
    assert promises.find(prompt(1), 1) == {"b": 1}


def test_the_oldest_promises_make_room() -> None:
    """At either bound all is kept; beyond it the oldest go, and are counted."""
    few = Promises(1.0, promises_max=2)
    for number in (1, 2, 3):
        few.add("a", prompt(number), 0.0)
    assert (len(few), few.crowded_out) == (2, 1)
    assert few.find(prompt(1), 1) == {}
    short = Promises(1.0, blocks_max=4)
    short.add("a", prompt(1, 2), 0.0)
    short.add("a", prompt(3, 4), 0.0)
    assert (len(short), short.crowded_out) == (2, 0)
    short.add("a", prompt(5), 0.0)
    assert (len(short), short.crowded_out) == (2, 1)


def test_a_chain_beyond_all_room_is_not_promised() -> None:
    """One prompt cannot take more memory than all may."""
    promises = Promises(1.0, blocks_max=2)
    promises.add("a", prompt(1, 2, 3), 0.0)
    assert len(promises) == 0
    promises.check()


# --- against the naive twin

WORDS = st.integers(1, 3)
CHAINS = st.lists(WORDS, min_size=1, max_size=7).map(lambda words: prompt(*words))


class AnyPromises(RuleBasedStateMachine):
    """Any promises, dropped and asked for in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Promises(3.0, promises_max=6, blocks_max=24)
        self.naive = NaivePromises(3.0, promises_max=6, blocks_max=24)
        self.now_s = 0.0

    @rule(owner=st.sampled_from("abc"), hashes=CHAINS)
    def add(self, owner: str, hashes: list[int]) -> None:
        """Both give it the same number."""
        number = self.real.add(owner, hashes, self.now_s)
        assert number == self.naive.add(owner, hashes, self.now_s)

    @rule(back=st.integers(0, 8))
    def drop(self, back: int) -> None:
        """A late one, an early one, or one that is gone."""
        number = self.naive.made - back
        self.real.drop(number)
        self.naive.drop(number)

    @rule(more_s=st.floats(0.0, 2.0))
    def wait(self, more_s: float) -> None:
        """Time passes."""
        self.now_s += more_s
        self.real.expire(self.now_s)
        self.naive.expire(self.now_s)

    @rule(hashes=CHAINS, data=st.data())
    def find(self, hashes: list[int], data: st.DataObject) -> None:
        """Both know the same."""
        blocks = data.draw(st.integers(0, len(hashes)))
        assert self.real.find(hashes, blocks) == self.naive.find(hashes, blocks)

    @invariant()
    def agree(self) -> None:
        """The tree is sound, and as large as the list."""
        self.real.check()
        assert len(self.real) == len(self.naive.promises)


TestAnyPromises = pytest.mark.slow(AnyPromises.TestCase)
TestAnyPromises.settings = settings(max_examples=150, stateful_step_count=40)


# --- in the plane


def _send(made: Plane, hashes: list[int], now_s: float = 1.0) -> str:
    decision = made.requests.decide(request(hashes), now_s)
    assert decision is not None
    made.requests.book(decision, now_s, 0.0)
    return decision.instance.record.instance_id


def _tails(beginning: list[int], count: int) -> list[list[int]]:
    """Returns prompts that share a beginning of 32 blocks, each with one block of its own."""
    tails = [chain(pack_tokens([900 + n] * BLOCK), BLOCK, beginning[-1]) for n in range(count)]
    return [beginning + tail for tail in tails]


def _crowd(made: Plane) -> None:
    """Let four requests run on every instance, their prompts computed."""
    for number in range(16):
        decision = made.requests.decide(request(prompt(number + 100)), 1.0)
        assert decision is not None
        made.requests.first_byte(made.requests.book(decision, 1.0, 0.0), 0.1)


def test_followers_stay_with_what_is_computed_though_its_events_are_late() -> None:
    """With promises the followers of a new beginning go where it is; without, they scatter."""
    beginning = prompt(5, blocks_each=32)
    chosen: dict[float, set[str]] = {}
    for promise_s in (5.0, 0.0):
        made = plane("a", "b", "c", "d", promise_s=promise_s)
        _crowd(made)
        leader = made.requests.decide(request(beginning), 1.0)
        assert leader is not None
        made.requests.first_byte(made.requests.book(leader, 1.0, 0.0), 0.1)
        name = leader.instance.record.instance_id
        chosen[promise_s] = {_send(made, hashes) for hashes in _tails(beginning, 3)} ^ {name}
    assert chosen[5.0] == set()
    assert len(chosen[0.0]) > 1


def test_a_promised_hit_is_part_of_the_decision() -> None:
    """What was believed is booked, and is in the record of the decision."""
    made = plane("a", promise_s=5.0)
    beginning = prompt(5, blocks_each=32)
    _send(made, beginning)
    decision = made.requests.decide(request(_tails(beginning, 1)[0]), 1.0)
    assert decision is not None
    assert decision.hit == 32 * BLOCK
    assert decision.new_tokens == BLOCK + 5
    assert [each.hit_tokens for each in decision.candidates()] == [32 * BLOCK]
    assert {each.holders for each in decision.classes()} == {0}, "nobody holds it yet"


def test_a_promise_is_dropped_when_the_blocks_are_there() -> None:
    """From then on the index says more, evictions included."""
    made, a = plane("a", promise_s=5.0), Publisher("a")
    a.batch()
    hashes = prompt(1, 2, 3)
    _send(made, hashes)
    assert made.requests.promises is not None
    assert len(made.requests.promises) == 1
    made.handle(a.store(hashes), 1.1)
    assert len(made.requests.promises) == 0


@pytest.mark.parametrize(("outcome", "left"), [("upstream_error", 0), ("retried", 0), ("ok", 1)])
def test_a_promise_is_broken_by_a_request_that_fails(outcome: str, left: int) -> None:
    """What was not computed will not be cached; what was answered is, though no event came yet."""
    made = plane("a", promise_s=5.0)
    decision = made.requests.decide(request(prompt(1, 2)), 1.0)
    assert decision is not None
    ticket = made.requests.book(decision, 1.0, 0.0)
    made.requests.finish(ticket, outcome, 0, 1.1, 0.0)
    assert made.requests.promises is not None
    assert len(made.requests.promises) == left


def test_an_instance_that_lost_its_blocks_has_promised_nothing() -> None:
    """A new epoch, a cleared cache and a departure all break what was promised before."""
    for lose in (
        lambda made, a: made.handle(Publisher("a", epoch=2).batch(), 1.2),
        lambda made, a: made.handle(a.clear(), 1.2),
        lambda made, a: [made.handle(record("a", state=s), 1.2) for s in ("stopped", "ready")],
    ):
        made, a = plane("a", promise_s=5.0), Publisher("a")
        a.batch()
        _send(made, prompt(1, 2, 3))
        lose(made, a)
        decision = made.requests.decide(request(prompt(1, 2, 3)), 1.3)
        assert decision is not None
        assert decision.hit == 0


def test_what_a_departed_instance_promised_is_nobody_elses() -> None:
    """Its row may be gone, or be another's: promises do not go by rows."""
    made, a = plane("a", "b", promise_s=5.0), Publisher("a")
    a.batch()
    made.handle(a.store(prompt(1)), 0.5)
    for _ in range(4):
        _send(made, prompt(1, 2, 3))
    made.handle(record("b", state="stopped"), 1.1)
    decision = made.requests.decide(request(prompt(1, 2, 3)), 1.2)
    assert decision is not None
    made.handle(record("b"), 1.3)
    made.handle(record("a", state="stopped"), 1.4)
    decision = made.requests.decide(request(prompt(1, 2, 3)), 1.5)
    assert decision is not None
    assert decision.hit == 0


def test_ticks_end_promises() -> None:
    """Nothing is promised for ever."""
    made = plane("a", promise_s=0.5)
    _send(made, prompt(1, 2, 3))
    made.handle(Tick(), 1.4)
    assert made.requests.promises is not None
    assert len(made.requests.promises) == 1
    made.handle(Tick(), 1.6)
    assert len(made.requests.promises) == 0


def test_promises_can_be_turned_off() -> None:
    """With no time to last, they are not even kept."""
    assert plane("a", promise_s=0.0).requests.promises is None
    assert plane("a").requests.promises is not None


def test_a_prompt_that_is_not_known_is_promised_nothing() -> None:
    """Without hashes there is no block size either, and load decides as ever."""
    made = plane("a", promise_s=5.0)
    _send(made, prompt(1, 2, 3))
    unknown = RouteRequest("unknown", 100, exact=False, by_load="inexact:multimodal")
    assert made.requests.best_hit(unknown) == 0
    decision = made.requests.decide(unknown, 1.0)
    assert decision is not None
    assert (decision.promised_tokens, decision.hit) == (None, 0)
