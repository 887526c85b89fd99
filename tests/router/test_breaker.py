"""The circuit breaker's table, its clock, and the promise that no state is for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.breaker import Breaker, BreakerPolicy, State, Verdict, judge
from router.http_proxy import Outcome

POLICY = BreakerPolicy(
    failures_to_open=3, window_s=10, open_s=1, open_s_max=4, successes_to_close=2, probe_s=5
)
VERDICTS = {"S": Verdict.SUCCESS, "F": Verdict.FAILURE, "A": Verdict.ABANDONED}
VERDICTS |= {"P": Verdict.PARDONED}


def run(script: str) -> tuple[Breaker, float]:
    """Run a script: S, F, A, P end requests, > sends one, numbers wait; return breaker, clock."""
    breaker, now_s = Breaker(POLICY), 0.0
    for step in script.split():
        if step in VERDICTS:
            breaker.ended(VERDICTS[step], now_s)
        elif step == ">":
            breaker.sent(now_s)
        else:
            now_s += float(step)
    return breaker, now_s


# What happens, the state afterwards, and whether a request may then be sent.
TABLE = [
    ("", State.CLOSED, True),
    ("F F", State.CLOSED, True),
    ("F F F", State.OPEN, False),
    ("F F S F F", State.CLOSED, True),  # a success forgets failures
    ("F F A F", State.OPEN, False),  # an abandoned request says nothing
    ("F F 11 F", State.CLOSED, True),  # old failures do not count
    ("F F F 0.9", State.OPEN, False),
    ("F F F S", State.OPEN, False),  # stragglers change nothing
    ("F F F F F 1", State.OPEN, True),
    ("F F F 0.5 >", State.OPEN, False),  # sent against the advice: not a probe
    ("F F F 1 >", State.HALF_OPEN, False),  # one probe at a time
    ("F F F 1 > S", State.HALF_OPEN, True),
    ("F F F 1 > S > S", State.CLOSED, True),
    ("F F P F", State.CLOSED, True),  # a pardoned failure does not count
    ("P F F F", State.OPEN, False),  # and none is forgiven in advance
    ("F F F P", State.OPEN, True),  # what opened it was none: it may be tried at once
    ("F F F 1 > F P > F 1", State.OPEN, False),
    ("F F F 1 > F P > F 2", State.OPEN, True),
    ("F F F 1 > P", State.HALF_OPEN, True),
    ("F F F 1 > S > S F F", State.CLOSED, True),  # closed with a clean slate
    ("F F F 1 > A", State.HALF_OPEN, True),  # the client left: another probe may go
    ("F F F 1 > 4.9", State.HALF_OPEN, False),
    ("F F F 1 > 5", State.HALF_OPEN, True),  # a lost probe is given up
    ("F F F 1 > F", State.OPEN, False),
    ("F F F 1 > F 1.9", State.OPEN, False),  # the wait has doubled
    ("F F F 1 > F 2", State.OPEN, True),
    ("F F F 1 > F 2 > F 4 > F 4", State.OPEN, True),  # and stops doubling at the most
    ("F F F 1 > F 2 > S F", State.OPEN, False),  # a failing probe after a good one
    ("F F F 1 > F 2 > S > S F F F 1", State.OPEN, True),  # short again after having closed
]


@pytest.mark.parametrize(
    ("script", "state", "allows"), TABLE, ids=[row[0] or "new" for row in TABLE]
)
def test_table(script: str, state: State, allows: bool) -> None:
    """Each row of the breaker's table, and its clock."""
    breaker, now_s = run(script)
    assert (breaker.state, breaker.allows(now_s)) == (state, allows)


def test_openings_are_counted() -> None:
    """A metric can tell how often an instance has been given up."""
    assert run("F F F 1 > F")[0].opened == 2


@pytest.mark.parametrize(
    ("outcome", "status", "verdict"),
    [
        (Outcome.COMPLETED, 200, Verdict.SUCCESS),
        (Outcome.COMPLETED, 404, Verdict.SUCCESS),
        (Outcome.COMPLETED, 429, Verdict.SUCCESS),
        (Outcome.COMPLETED, 500, Verdict.FAILURE),
        (Outcome.STATUS_5XX, 503, Verdict.FAILURE),
        (Outcome.CONNECT_FAILED, 0, Verdict.FAILURE),
        (Outcome.RESET_BEFORE_FIRST_BYTE, 0, Verdict.FAILURE),
        (Outcome.RESET_MID_STREAM, 200, Verdict.FAILURE),
        (Outcome.FIRST_BYTE_TIMEOUT, 0, Verdict.FAILURE),
        (Outcome.STALLED, 200, Verdict.FAILURE),
        (Outcome.BAD_RESPONSE, 0, Verdict.FAILURE),
        (Outcome.CLIENT_GONE, 200, Verdict.ABANDONED),
        (Outcome.POOL_FULL, 0, Verdict.ABANDONED),
        (Outcome.NO_SOCKET, 0, Verdict.ABANDONED),
    ],
)
def test_judgement(outcome: Outcome, status: int, verdict: Verdict) -> None:
    """The engine's failures count against it; the client's mistakes and its leaving never do."""
    assert judge(outcome, status) == verdict


def test_every_outcome_is_judged() -> None:
    """No outcome is left out of the judgement above."""
    judged = {judge(outcome, 200) for outcome in Outcome}
    assert judged == {Verdict.SUCCESS, Verdict.FAILURE, Verdict.ABANDONED}


STEPS = st.lists(
    st.one_of(st.sampled_from([*VERDICTS, ">"]), st.floats(0, 20).map(lambda s: f"{s:.3f}")),
    max_size=60,
)


@given(STEPS)
def test_no_state_is_for_ever(steps: list[str]) -> None:
    """Whatever has happened, a request may be sent after the longest wait, and successes close."""
    breaker, now_s = run(" ".join(steps))
    now_s += POLICY.open_s_max + POLICY.probe_s
    for _ in range(POLICY.successes_to_close):
        assert breaker.allows(now_s)
        breaker.sent(now_s)
        breaker.ended(Verdict.SUCCESS, now_s)
    assert breaker.state == State.CLOSED


@given(STEPS)
def test_half_open_lets_one_probe_out(steps: list[str]) -> None:
    """After a probe has been sent no other may go until it ends or is given up."""
    breaker, now_s = run(" ".join(steps))
    if breaker.state != State.CLOSED and breaker.allows(now_s):
        breaker.sent(now_s)
        assert breaker.state == State.HALF_OPEN
        assert not breaker.allows(now_s)
        assert breaker.allows(now_s + POLICY.probe_s + 1e-6)
