"""A circuit breaker for one instance: stops sending to what keeps failing, and finds its recovery.

Theory of operation. The breaker is a table of states and events; time is passed in.

    state      event       when                                    next       also
    CLOSED     success                                             CLOSED     forget failures
    CLOSED     failure     fewer than `failures_to_open` in a row  CLOSED     count it
    CLOSED     failure     that many                               OPEN       wait `open_s`
    OPEN       sent        the wait is over                        HALF_OPEN  it is the probe
    OPEN       success     a straggler sent before opening         OPEN
    OPEN       failure     a straggler                             OPEN
    HALF_OPEN  success     fewer than `successes_to_close`         HALF_OPEN  next probe may go
    HALF_OPEN  success     that many                               CLOSED     forget failures
    HALF_OPEN  failure                                             OPEN       wait twice as long
    any        abandoned   the client left: nothing was learnt     same       next probe may go
    CLOSED     pardoned                                            CLOSED     one failure less
    OPEN       pardoned                                            OPEN       a probe may go at once
    HALF_OPEN  pardoned                                            HALF_OPEN  next probe may go

What counts is decided by `judge`: connection failures, resets, time-outs, nonsense and 5xx are
failures; anything else the engine answered, 4xx included, shows that it works; a client that left,
a full pool or a router out of sockets shows nothing. A failure is pardoned that turns out to be the
request's own fault, as other instances answer it with a 5xx as well: or else one client with a
request that no engine can bear would take instance after instance from all others.

Invariants: in HALF_OPEN one probe is out at a time, and one that is never reported (a lost call) is
given up after `probe_s`, so no state is for ever; waits double up to `open_s_max`, and are short
again after the breaker has closed.

A verdict is advice: the caller must still send somewhere when every breaker is open.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from router.http_proxy import Outcome


class State(StrEnum):
    """Whether an instance is sent to."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(StrEnum):
    """What the end of an attempt says about its instance."""

    SUCCESS = "success"
    FAILURE = "failure"
    ABANDONED = "abandoned"
    PARDONED = "pardoned"  # an earlier failure was none


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a breaker opens and closes.

    Fields:
        failures_to_open: failures in a row, at least 1.
        window_s: after so long without a failure the earlier ones no longer count.
        open_s: the first wait before a probe.
        open_s_max: the longest wait.
        successes_to_close: probes in a row, at least 1.
        probe_s: how long a probe may be out before another may go.
    """

    failures_to_open: int = 5
    window_s: float = 30.0
    open_s: float = 1.0
    open_s_max: float = 30.0
    successes_to_close: int = 2
    probe_s: float = 10.0


_OURS: Final = frozenset({Outcome.CLIENT_GONE, Outcome.POOL_FULL, Outcome.NO_SOCKET})


def judge(outcome: Outcome, status: int) -> Verdict:
    """Say what the end of an attempt tells of its instance.

    Args:
        outcome: how the attempt ended.
        status: the engine's status code, 0 if there was no answer.
    """
    if outcome in _OURS:
        return Verdict.ABANDONED
    if outcome == Outcome.COMPLETED and status < 500:
        return Verdict.SUCCESS
    return Verdict.FAILURE


class Breaker:
    """One instance's breaker; pure but for its own state.

    Attributes:
        state: see the module's theory of operation.
        opened: how often it has opened.
    """

    __slots__ = (
        "_failed_s",
        "_failures",
        "_policy",
        "_probe_out_s",
        "_retry_s",
        "_successes",
        "_wait_s",
        "opened",
        "state",
    )

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._failed_s = 0.0
        self._successes = 0
        self._wait_s = policy.open_s
        self._retry_s = 0.0
        self._probe_out_s: float | None = None
        self.opened = 0
        self.state = State.CLOSED

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now; does not change the breaker."""
        if self.state == State.CLOSED:
            return True
        if self.state == State.OPEN:
            return now_s >= self._retry_s
        out_s = self._probe_out_s
        return out_s is None or now_s - out_s >= self._policy.probe_s

    def sent(self, now_s: float) -> None:
        """Note that a request is on its way; if the breaker is waiting for a probe, it is that."""
        if self.state != State.CLOSED and self.allows(now_s):
            if self.state == State.OPEN:
                self._successes = 0
            self.state = State.HALF_OPEN
            self._probe_out_s = now_s

    def ended(self, verdict: Verdict, now_s: float) -> None:
        """Note what the end of a request tells, by the table above."""
        row = _TABLE.get((self.state, verdict))
        if row is not None:
            row(self, now_s)

    def _count_failure(self, now_s: float) -> None:
        if now_s - self._failed_s > self._policy.window_s:
            self._failures = 0
        self._failures += 1
        self._failed_s = now_s
        if self._failures >= self._policy.failures_to_open:
            self._open(now_s)

    def _forget_failures(self, now_s: float) -> None:
        self._failures = 0

    def _count_probe(self, now_s: float) -> None:
        self._probe_out_s = None
        self._successes += 1
        if self._successes >= self._policy.successes_to_close:
            self.state = State.CLOSED
            self._failures = 0
            self._wait_s = self._policy.open_s

    def _reopen(self, now_s: float) -> None:
        self._wait_s = min(2 * self._wait_s, self._policy.open_s_max)
        self._open(now_s)

    def _forget_one(self, now_s: float) -> None:
        self._failures = max(0, self._failures - 1)

    def _end_wait(self, now_s: float) -> None:
        self._wait_s = self._policy.open_s
        self._retry_s = now_s

    def _drop_probe(self, now_s: float) -> None:
        self._probe_out_s = None

    def _open(self, now_s: float) -> None:
        self.state = State.OPEN
        self.opened += 1
        self._probe_out_s = None
        self._retry_s = now_s + self._wait_s


_TABLE: Final[dict[tuple[State, Verdict], Callable[[Breaker, float], None]]] = {
    (State.CLOSED, Verdict.SUCCESS): Breaker._forget_failures,
    (State.CLOSED, Verdict.FAILURE): Breaker._count_failure,
    (State.HALF_OPEN, Verdict.SUCCESS): Breaker._count_probe,
    (State.HALF_OPEN, Verdict.FAILURE): Breaker._reopen,
    (State.HALF_OPEN, Verdict.ABANDONED): Breaker._drop_probe,
    (State.CLOSED, Verdict.PARDONED): Breaker._forget_one,
    (State.OPEN, Verdict.PARDONED): Breaker._end_wait,
    (State.HALF_OPEN, Verdict.PARDONED): Breaker._drop_probe,
}
