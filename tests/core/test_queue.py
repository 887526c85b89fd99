from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.openings import ANYWHERE, Hits, Openings
from controlplane.core.queue import RETRY_S_MAX, RETRY_S_MIN, AdmissionQueue, DrainRate
from controlplane.core.queue_lines import (
    ORDERS,
    TOLERATED_TOKENS,
    UNKNOWN,
    QueueConfig,
    Service,
    Waiting,
    group_of,
)
from tests.core.plane_helpers import BLOCK, prompt


def everybody(_: object) -> Openings:
    """Every instance has room, for every lane."""
    return ANYWHERE


def somewhere(tokens: int, mask: int = 1) -> Hits:
    """Hits of so many tokens."""
    return ((tokens, mask),) if tokens else ()


def add(queue: AdmissionQueue, name: str, at_s: float = 0.0, **fields: object) -> Waiting:
    """Adds a request that finds room."""
    service = fields.pop("service", UNKNOWN)
    one = Waiting(name, at_s, **fields)  # type: ignore[arg-type]
    assert queue.add(one, service) is None  # type: ignore[arg-type]
    return one


def names(queue: AdmissionQueue, count: int = 100) -> list[str]:
    """Takes out up to `count` requests."""
    found: list[str] = []
    while len(found) < count and (one := queue.take(everybody, 0.0)) is not None:
        found.append(one.payload)
    return found


def test_edf_serves_the_least_slack_first() -> None:
    """Slack is the deadline less the predicted p99: a long request must start earlier."""
    queue = AdmissionQueue(QueueConfig("edf"))
    add(queue, "late", ttft_by_s=9.0, service=Service(ttft_p99_s=1.0))
    add(queue, "long", ttft_by_s=9.5, service=Service(ttft_p99_s=4.0))
    add(queue, "soon", ttft_by_s=7.0, service=Service(ttft_p99_s=1.0))
    add(queue, "total", total_by_s=6.0, service=Service(ttft_p99_s=1.0, total_p99_s=4.0))
    assert names(queue) == ["total", "long", "soon", "late"]


def test_within_the_band_a_longer_hit_goes_first_and_beyond_it_does_not() -> None:
    """`edf+klpm` looks no further than `band_s` behind the most urgent."""
    queue = AdmissionQueue(QueueConfig("edf+klpm", 2, band_s=1.0))
    for name, due_s, hit in [("a", 5.0, 0), ("b", 5.1, 10), ("c", 5.9, 90), ("d", 7.0, 99)]:
        add(queue, name, ttft_by_s=due_s, tokens=100, hits=somewhere(hit))
    assert names(queue) == ["a", "c", "b", "d"]


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    k=st.integers(1, 5),
    before=st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(0, 99)), max_size=12),
    after=st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(0, 99)), min_size=80, max_size=80),
)
def test_nobody_is_passed_over_beyond_the_stated_bound(
    order: str, k: int, before: list[tuple[float, int]], after: list[tuple[float, int]]
) -> None:
    """One without any hit leaves in time, whatever with better hits keeps coming."""
    queue = AdmissionQueue(QueueConfig(order, k, band_s=5.0))  # type: ignore[arg-type]

    def come(at_s: float, what: tuple[float, int]) -> Waiting:
        return add(queue, "x", at_s, ttft_by_s=at_s + what[0], tokens=100, hits=somewhere(what[1]))

    ahead = [come(0.0, what) for what in before]
    poor = come(0.0, (10.0, 0))
    if "edf" in order:
        ahead = [one for one in ahead if one.start_by_s <= poor.start_by_s]
    allowed = len(ahead) + 1
    for dispatch, what in enumerate(after):
        later = come(0.5 * dispatch, what)  # one comes for each that leaves
        allowed += "edf" in order and later.start_by_s < poor.start_by_s
        if queue.take(everybody, 0.0) is poor:
            break
    else:
        raise AssertionError("it starved")
    assert dispatch + 1 <= allowed * (1 if order in ("fcfs", "edf") else k)


def test_a_request_without_a_budget_becomes_urgent_too() -> None:
    """After `patience_s` it is before those that came later with a budget."""
    queue = AdmissionQueue(QueueConfig("edf", patience_s=5.0))
    add(queue, "patient", 0.0)
    add(queue, "early", 1.0, ttft_by_s=4.0)
    add(queue, "late", 4.5, ttft_by_s=5.5)
    assert names(queue) == ["early", "patient", "late"]


def test_weights_are_shares_of_the_tokens_served() -> None:
    """Two tenants that always have requests waiting are served by their weights."""
    queue = AdmissionQueue(QueueConfig("fcfs", requests_max=1000, quantum_tokens=500))
    for number in range(300):
        add(queue, f"a{number}", tenant="a", weight=1.0, tokens=100 + 7 * (number % 30))
        add(queue, f"b{number}", tenant="b", weight=3.0, tokens=900)
    served = {"a": 0, "b": 0}
    for _ in range(120):
        one = queue.take(everybody, 0.0)
        assert one is not None
        served[one.tenant] += one.cost_tokens
        assert abs(served["b"] - 3 * served["a"]) <= 3 * 500 + 3 * 900 + 500


def test_lanes_without_room_are_passed_over() -> None:
    """A request for a busy adapter does not hold up the others."""
    queue = AdmissionQueue(QueueConfig("fcfs"))
    add(queue, "adapter", lane="lora")
    add(queue, "plain")

    def plain_only(lane: object) -> Openings | None:
        return ANYWHERE if lane is None else None

    taken = queue.take(plain_only, 0.0)
    assert taken is not None
    assert taken.payload == "plain"
    assert queue.take(plain_only, 0.0) is None
    assert names(queue) == ["adapter"]


def test_one_that_is_put_back_keeps_its_place() -> None:
    """It was taken out, and is back where it was."""
    queue = AdmissionQueue(QueueConfig("fcfs"))
    first = add(queue, "first")
    add(queue, "second")
    assert queue.cancel(first)
    queue.put_back(first)
    queue.check()
    assert names(queue) == ["first", "second"]


def test_at_the_bound_the_greediest_tenant_gives_way() -> None:
    """A newcomer of a tenant below its share displaces the newest of the one above it most."""
    queue = AdmissionQueue(QueueConfig("fcfs", requests_max=4))
    flood = [add(queue, f"a{n}", tenant="a") for n in range(4)]
    newcomer = Waiting("b", 0.0, tenant="b")
    assert queue.add(newcomer, UNKNOWN) is flood[3]
    assert queue.add(Waiting("b", 0.0, tenant="b"), UNKNOWN) is flood[2]
    refused = Waiting("b", 0.0, tenant="b")
    assert queue.add(refused, UNKNOWN) is refused, "both have two places now"
    again = Waiting("a", 0.0, tenant="a")
    assert queue.add(again, UNKNOWN) is again
    assert len(queue) == 4
    queue.check()


def test_bodies_are_bounded_too() -> None:
    """A few large bodies fill the queue like many small ones."""
    queue = AdmissionQueue(QueueConfig("fcfs", bytes_max=1000))
    add(queue, "a", size_bytes=600)
    large = Waiting("b", 0.0, size_bytes=401)
    assert queue.add(large, UNKNOWN) is large
    add(queue, "c", size_bytes=400)
    assert queue.nbytes == 1000


def test_retry_after_is_when_what_waits_will_have_been_served() -> None:
    """At 10 dispatches a second 40 requests take 4 s; one that comes back then finds room."""
    queue = AdmissionQueue(QueueConfig("fcfs", wait_s_max=20.0))
    for number in range(60):
        add(queue, str(number))
    assert queue.retry_after_s(0.0) == 20.0, "nothing is known yet: nobody waits longer"
    for number in range(20):
        queue.take(everybody, number / 10)
    assert queue.retry_after_s(1.9) == pytest.approx(4.0, rel=0.1)
    assert queue.retry_after_s(1000.0) == RETRY_S_MAX, "it stands still"
    names(queue, 39)
    assert queue.retry_after_s(1.9) == RETRY_S_MIN


def test_time_in_which_nobody_waits_does_not_slow_the_rate() -> None:
    """An hour after a rush at 10 dispatches a second, 40 requests are told 4 s again."""
    queue = AdmissionQueue(QueueConfig("fcfs"))
    for number in range(20):
        add(queue, str(number))
    for number in range(20):
        queue.take(everybody, number / 10)
    for number in range(40):
        queue.add(Waiting(str(number), 3600.0), UNKNOWN)
    assert queue.retry_after_s(3600.0) == pytest.approx(4.0, rel=0.1)
    assert queue.retry_after_s(3610.0) > 20.0, "since they wait nothing went on"


def test_a_rate_needs_two_dispatches() -> None:
    """One says nothing of a rate."""
    rate = DrainRate()
    rate.note(1.0)
    assert rate.per_s(2.0) == 0.0


def test_the_hopeless_are_given_up_after_two_more_looks() -> None:
    """A request whose latest start is over is looked at thrice before it goes."""
    queue = AdmissionQueue(QueueConfig("edf"))
    one = add(queue, "x", ttft_by_s=1.0, service=Service(ttft_s=0.2, ttft_p99_s=0.5))
    assert queue.hopeless(0.4, looks_max=2) == []
    assert queue.hopeless(0.6, looks_max=2) == []
    queue.refresh([(one, Service(ttft_s=0.1, ttft_p99_s=0.2), ())])
    assert queue.hopeless(0.7, looks_max=2) == [], "there is hope again"
    assert queue.hopeless(0.9, looks_max=2) == []
    assert queue.hopeless(0.95, looks_max=2) == [one]
    assert not len(queue)


def test_one_whose_p99_never_fits_hopes_for_the_mean() -> None:
    """It is not refused at its coming because one of a hundred like it would be late."""
    queue = AdmissionQueue(QueueConfig("edf"))
    add(queue, "x", ttft_by_s=1.0, service=Service(ttft_s=0.3, ttft_p99_s=1.5))
    assert queue.hopeless(0.6, looks_max=0) == []
    assert len(queue.hopeless(0.75, looks_max=0)) == 1


def test_nobody_waits_longer_than_the_bound() -> None:
    """The overdue come out, the oldest first."""
    queue = AdmissionQueue(QueueConfig("edf", wait_s_max=10.0))
    first, _ = add(queue, "a", 0.0), add(queue, "b", 5.0)
    assert queue.expire(9.9) == []
    assert queue.expire(10.0) == [first]
    assert len(queue) == 1


@pytest.mark.parametrize("bad", [{"k": 0}, {"order": "lifo"}, {"wait_s_max": 0}, {"band_s": -1}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        QueueConfig(**bad)  # type: ignore[arg-type]


# --- groups


def test_a_group_tolerates_the_last_three_tokens() -> None:
    """Prompts that differ in no whole block but the last tokens are one group; others are not."""
    hashes, other_end = prompt(1, 2, 3), [*prompt(1, 2, 3)[:-1], 4711]
    length = len(hashes) * BLOCK
    assert group_of(hashes, length, BLOCK) == group_of(other_end, length, BLOCK)
    length += TOLERATED_TOKENS
    assert group_of(hashes, length, BLOCK) != group_of(other_end, length, BLOCK)
    assert group_of([], 100, 0) is None
    assert group_of(hashes, TOLERATED_TOKENS, BLOCK) is None


def test_a_group_is_served_together_and_its_sharing_counts_as_no_hit() -> None:
    """One that follows its group's first keeps its cost and its hit; only its place changes."""
    queue = AdmissionQueue(QueueConfig("klpm", 2))
    add(queue, "a", tokens=100, group="g")
    add(queue, "b", tokens=100, hits=somewhere(50))
    twin = add(queue, "c", tokens=100, group="g")
    assert names(queue, 1) == ["a"]
    queue.went("g", 2)
    assert (twin.affinity_tokens(2), twin.affinity_tokens(1)) == (97, 0), "where the first is"
    assert (twin.hit_tokens, twin.cost_tokens) == (0, 100)
    assert names(queue, 1) == ["c"]
    late = add(queue, "d", tokens=100, group="g")
    assert late.affinity_tokens(2) == 0, "the group has gone; what it left is a matter of real hits"


def test_a_large_group_moves_up_at_the_next_refresh() -> None:
    """At once only the first few do, so that a dispatch costs little."""
    queue = AdmissionQueue(QueueConfig("klpm", 2, regroup_max=2))
    members = [add(queue, str(n), tokens=100, group="g") for n in range(5)]
    names(queue, 1)
    queue.went("g", 1)
    queue.went("nobody's", 1)
    assert [one.grouped for one in members[1:]] == [(97, 1), (97, 1), (0, 0), (0, 0)]
    queue.refresh([(one, UNKNOWN, ()) for one in members[1:]])
    assert [one.grouped for one in members[1:]] == [(97, 1)] * 4
    queue.check()


# --- pairs


A, B, C = 1, 2, 4
"""Instances."""
TOKEN_S = 0.001


def full_but(mask: int, place_s: float = 0.1) -> Callable[[object], Openings]:
    """Some of three instances have room; computing 1,000 tokens takes a second."""
    return lambda _: Openings(mask, (A | B | C) & ~mask, place_s, TOKEN_S)


def test_a_hit_counts_where_there_is_room() -> None:
    """The longest prefix goes first among those that the open instance has, not of all."""
    for order in ("klpm", "edf+klpm"):
        queue = AdmissionQueue(QueueConfig(order, hold_s_max=0.0))
        add(queue, "oldest", tokens=900)
        add(queue, "elsewhere", tokens=900, hits=((800, A), (10, A | B)))
        add(queue, "here", tokens=900, hits=((100, B),))
        taken = [queue.take(full_but(B), 0.0) for _ in range(3)]
        assert [one and one.payload for one in taken] == ["oldest", "here", "elsewhere"]


def test_who_would_lose_its_prefix_waits_for_its_holder() -> None:
    """For as long as computing it would take; others go meanwhile, and it goes once A has room."""
    queue = AdmissionQueue(QueueConfig("klpm"))
    holder = add(queue, "holder", tokens=900, hits=somewhere(800, A))
    cold = add(queue, "cold", tokens=900)
    assert queue.take(full_but(B), 0.0) is cold
    assert queue.take(full_but(B), 0.7) is None, "its place stays empty"
    assert queue.take(full_but(A), 0.7) is holder
    again = add(queue, "again", 1.0, tokens=900, hits=somewhere(800, A))
    assert queue.take(full_but(B), 1.0) is None
    assert queue.take(full_but(B), 1.81) is again, "its hold is over"


def test_nobody_is_held_where_a_place_is_far_or_a_deadline_near() -> None:
    """A place that comes later than the prefix could be computed is not worth waiting for."""
    queue = AdmissionQueue(QueueConfig("klpm"))
    far = add(queue, "far", tokens=900, hits=somewhere(800, A))
    assert queue.take(full_but(B, place_s=0.9), 0.0) is far
    due = add(queue, "due", tokens=900, hits=somewhere(800, A), ttft_by_s=0.7)
    assert queue.take(full_but(B), 0.0) is due
    either = add(queue, "either", tokens=900, hits=somewhere(800, A | C))
    assert queue.take(full_but(B, place_s=0.9), 0.0) is None, "one of two has a place sooner"
    assert queue.take(full_but(A), 0.0) is either
    for order, k in (("fcfs", 2), ("edf", 2), ("klpm", 1), ("edf+klpm", 1)):
        strict = AdmissionQueue(QueueConfig(order, k))  # type: ignore[arg-type]
        first = add(strict, "first", tokens=900, hits=somewhere(800, A))
        assert strict.take(full_but(B), 0.0) is first, "these orders pick nobody by hits"


def test_a_tenant_that_is_held_does_not_hold_up_the_others() -> None:
    """Its turn passes, for nothing; it pays for what is served, not for its first."""
    queue = AdmissionQueue(QueueConfig("klpm", quantum_tokens=10_000))
    held = add(queue, "held", tenant="a", tokens=900, hits=somewhere(800, A))
    cold = add(queue, "cold", tenant="b", tokens=900)
    assert queue.take(full_but(B), 0.0) is cold
    assert queue.take(full_but(B), 0.1) is None
    again = add(queue, "again", tenant="b", tokens=900)
    assert queue.take(full_but(A), 0.2) is held
    assert queue.take(full_but(A), 0.2) is again
    first = [
        add(queue, "first", tenant=name, tokens=9_000, hits=somewhere(8_900, A)) for name in "ab"
    ]
    for name in "ab":
        add(queue, "cold", tenant=name, tokens=9_000)
    taken = [queue.take(full_but(B), 1.0) for _ in range(2)]
    assert [one and one.payload for one in taken] == ["cold", "cold"]
    assert {one.tenant for one in taken if one} == {"a", "b"}, "9,000 tokens are a turn's worth"
    assert queue.take(full_but(A), 1.0) in first


def test_where_everybody_is_held_nobody_goes() -> None:
    """However many masks, turns or rounds it takes to find that out; what they are owed stays."""
    alone = AdmissionQueue(QueueConfig("klpm"))
    first = add(alone, "first")
    add(alone, "held", tokens=900, hits=((800, A), (10, A | B), (5, A | B | C)))
    assert alone.take(everybody, 0.0) is first
    assert alone.take(full_but(B | C), 0.0) is None
    queue = AdmissionQueue(QueueConfig("klpm", quantum_tokens=1000))
    both = {add(queue, "x", tenant=t, tokens=30_000, hits=somewhere(800, A)) for t in "ab"}
    assert queue.take(full_but(B), 0.0) is None
    assert (queue.counts(), queue.held) == ({"a": 1, "b": 1}, 2)
    assert {queue.take(full_but(A), 0.1) for _ in range(2)} == both
    queue.refresh([(both.pop(), UNKNOWN, ())])
    queue.check()


def test_those_ahead_for_the_same_place_count() -> None:
    """With a place every 0.3 s two may wait to save 0.8 s; the third goes."""
    queue = AdmissionQueue(QueueConfig("klpm"))
    three = [add(queue, str(n), tokens=900, hits=somewhere(800, A)) for n in range(3)]
    assert queue.take(full_but(B, place_s=0.3), 0.0) is three[2]
    assert queue.take(full_but(B, place_s=0.3), 0.0) is None


def test_a_newcomer_waits_for_its_holder_though_others_have_room() -> None:
    """So it would if it was passed over; with nobody full, or an order without hits, it goes."""
    for order, waits in (("klpm", True), ("edf+klpm", True), ("fcfs", False), ("edf", False)):
        queue = AdmissionQueue(QueueConfig(order))  # type: ignore[arg-type]
        newcomer = Waiting("x", 0.0, tokens=900, hits=somewhere(800, A))
        assert queue.waits(newcomer, full_but(B)(None)) is waits
        assert not queue.waits(newcomer, full_but(A | B)(None))
        assert not queue.waits(newcomer, ANYWHERE)
    assert not AdmissionQueue(QueueConfig("klpm", 1)).waits(newcomer, full_but(B)(None))


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(["klpm", "edf+klpm"]),
    k=st.integers(2, 4),
    before=st.lists(st.integers(0, 1), max_size=6),
    hold_s_max=st.sampled_from([0.3, 1.0, 5.0]),
)
def test_holds_add_no_more_than_their_bound(
    order: str, k: int, before: list[int], hold_s_max: float
) -> None:
    """Where its holder never has room, a request leaves by its turn, or by its hold's end."""
    config = QueueConfig(order, k, hold_s_max=hold_s_max)  # type: ignore[arg-type]
    queue = AdmissionQueue(config)
    for number, held in enumerate(before):
        add(queue, str(number), tokens=3000, hits=somewhere(2000, A if held else B))
    poor = add(queue, "poor", tokens=3000, hits=somewhere(2000, A))
    turns_after, now_s = 0, 0.0
    for _ in range(2000):
        add(queue, "rich", now_s, tokens=3000, hits=somewhere(2500, B))
        if queue.take(full_but(B), now_s) is poor:
            break
        turns_after += now_s - poor.held_s >= hold_s_max
        now_s += 0.02
    else:
        raise AssertionError("it starved")
    assert turns_after <= k * (len(before) + 1)
    queue.check()
