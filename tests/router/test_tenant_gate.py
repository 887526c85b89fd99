"""What a tenant may have, against a model that replays its whole history."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tenant_gate import TenantGate
from router.tenants import Tenant
from tests.models.naive_tenant_gate import NaiveBucket

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "charge", "settle", "wait"]),
        st.integers(0, 400),
    ),
    max_size=40,
)


def gate(**limits: object) -> TenantGate:
    """Return a fresh gate at time 0."""
    return TenantGate(Tenant(name="t", **limits), 0.0)  # type: ignore[arg-type]


@given(rate=st.integers(1, 50), burst=st.integers(1, 300), steps=STEPS)
def test_the_bucket_is_the_models(rate: int, burst: int, steps: list[tuple[str, int]]) -> None:
    """Who is let in, and how long others wait, is what the whole history says."""
    mine = gate(tokens_per_s=float(rate), tokens_burst=float(burst))
    model = NaiveBucket(rate, burst)
    now = Fraction(0)
    for kind, number in steps:
        if kind == "wait":
            now += Fraction(number, 8)
        elif kind == "settle":
            mine.level(float(now))
            mine.settle(number)
            model.use(number, now)
        else:
            wait = model.wait(number, now)
            found = mine.charge(number, float(now))
            assert (found or 0.0) == pytest.approx(float(wait), abs=1e-6)
            if found is None:
                model.use(number, now)
        level = mine.level(float(now))
        assert level == pytest.approx(float(model.level(now)), abs=1e-6)


@given(rate=st.integers(1, 50), burst=st.integers(1, 300), prompts=st.lists(st.integers(1, 400)))
def test_waiting_as_told_is_enough(rate: int, burst: int, prompts: list[int]) -> None:
    """Whoever comes back after the time that was named is let in, if nobody else came between."""
    mine = gate(tokens_per_s=float(rate), tokens_burst=float(burst))
    now_s = 0.0
    for tokens in prompts:
        wait_s = mine.charge(tokens, now_s)
        if wait_s is not None:
            now_s += wait_s + 1e-9
            assert mine.charge(tokens, now_s) is None


@given(
    rate=st.integers(1, 50),
    burst=st.integers(1, 300),
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 400)), max_size=60),
)
def test_over_any_time_no_more_than_the_limit_is_started(
    rate: int, burst: int, arrivals: list[tuple[int, int]]
) -> None:
    """Prompts of any stretch of time are at most burst + rate · time, or one larger than all."""
    mine = gate(tokens_per_s=float(rate), tokens_burst=float(burst))
    now, started = 0, []
    for pause, tokens in arrivals:
        now += pause
        if mine.charge(tokens, float(now)) is None:
            started.append((now, tokens))
    for first in range(len(started)):
        used = 0
        for when, tokens in started[first:]:
            before = used
            used += tokens
            allowed = burst + rate * (when - started[first][0])
            assert used <= allowed + 1e-6 or (tokens > burst and before <= allowed)


def test_concurrency_is_bounded_and_given_back() -> None:
    """At the limit the next one is told when to come; a place given back is taken again."""
    mine = gate(requests_max=2)
    assert mine.enter() is None
    assert mine.enter() is None
    wait_s = mine.enter()
    assert wait_s is not None
    assert wait_s > 0
    mine.leave(3.0)
    assert mine.enter() is None
    assert mine.running == 2


def test_the_time_to_a_free_place_follows_the_durations() -> None:
    """With long requests the wait is long: the mean duration over the places."""
    mine = gate(requests_max=4)
    for _ in range(200):
        mine.enter()
        mine.leave(20.0)
    for _ in range(4):
        mine.enter()
    assert mine.enter() == pytest.approx(5.0, rel=0.01)


def test_requests_that_were_never_served_say_nothing_of_durations() -> None:
    """Refused requests do not make the wait look short."""
    mine = gate(requests_max=1)
    for _ in range(50):
        mine.enter()
        mine.leave()
    mine.enter()
    assert mine.enter() == pytest.approx(1.0)


def test_without_limits_everything_enters() -> None:
    """A tenant without limits is only counted."""
    mine = gate()
    for _ in range(1000):
        assert mine.enter() is None
        assert mine.charge(1_000_000, 0.0) is None
        mine.settle(1_000_000)
    assert mine.level(0.0) is None
    assert mine.running == 1000


def test_other_limits_apply_at_once_and_keep_what_is_in_use() -> None:
    """A smaller bucket holds no more than it can; a new limit on a rate starts full."""
    mine = gate()
    mine.enter()
    mine.configure(Tenant(name="t", tokens_per_s=10.0, tokens_burst=100.0), 5.0)
    assert (mine.running, mine.level(5.0)) == (1, 100.0)
    mine.charge(30, 5.0)
    mine.configure(Tenant(name="t", tokens_per_s=10.0, tokens_burst=50.0), 5.0)
    assert mine.level(5.0) == 50.0
    mine.charge(50, 5.0)
    mine.configure(Tenant(name="t", tokens_per_s=10.0, tokens_burst=500.0), 5.0)
    assert mine.level(5.0) == 0.0
    mine.configure(Tenant(name="t"), 6.0)
    assert mine.charge(10**9, 6.0) is None


def test_leaving_twice_is_a_fault() -> None:
    """A place given back twice would let too many in: it fails loudly."""
    with pytest.raises(AssertionError, match="had not entered"):
        gate().leave()
