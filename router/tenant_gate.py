"""What a tenant has in use, and whether it may have more.

Theory of operation. Two limits:

- Concurrency: `enter` counts a request in, or says when to come back; `leave` counts it out.
- Tokens: a bucket that fills at `tokens_per_s` up to `burst`. A request's prompt is taken from it
  at once by `charge`; a prompt larger than the whole bucket needs it full. The answer's length is
  not known before its end: `settle` takes it then, below zero if need be, and what follows waits
  until the debt is paid. So over any time t a tenant's prompts get at most burst + rate · t tokens,
  and one that overdraws pays later: nothing is forgiven, and nothing is charged twice.

Times to come back are honest: a request that waited so long, with nobody of its tenant in between,
is let in (the bucket), or is when a place is to be expected (concurrency: the mean duration of late
over the places there are).

What other routers have let in counts too, as far as it is known (`router.tenant_peers`).

Pure: `now_s` comes in. One gate a tenant and router process; it keeps its state when the
configuration changes.
"""

from __future__ import annotations

from router.tenants import Tenant

_SMOOTHING = 0.1  # weight of the latest request in the mean duration
_DURATION_S_FIRST = 1.0  # before any request has ended


class TenantGate:
    """One tenant's use of this router.

    Attributes:
        tenant: the limits in force.
        running: requests let in and not yet out.
        elsewhere: likewise at other routers.
    """

    __slots__ = (
        "_burst",
        "_duration_s",
        "_filled_s",
        "_level",
        "_rate",
        "elsewhere",
        "running",
        "tenant",
    )

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self.tenant = tenant
        self.running = 0
        self.elsewhere = 0
        self._rate = tenant.tokens_per_s
        self._burst = tenant.burst
        self._level = self._burst
        self._filled_s = now_s
        self._duration_s = _DURATION_S_FIRST

    def configure(self, tenant: Tenant, now_s: float) -> None:
        """Apply other limits from now on; what is in use stays in use."""
        self._fill(now_s)
        began_to_limit = self._rate is None
        self.tenant = tenant
        self._rate, self._burst = tenant.tokens_per_s, tenant.burst
        self._level = self._burst if began_to_limit else min(self._level, self._burst)

    def enter(self) -> float | None:
        """Let a request in; None if it is in, else the seconds after which to try again."""
        limit = self.tenant.requests_max
        if limit is not None and self.running + self.elsewhere >= limit:
            return self._duration_s / limit
        self.running += 1
        return None

    def charge(self, tokens: int, now_s: float) -> float | None:
        """Take a prompt's tokens; None if that was possible, else the seconds until it is.

        With 0 tokens this asks whether a debt is still to be paid.
        """
        if self._rate is None:
            return None
        self._fill(now_s)
        missing = min(tokens, self._burst) - self._level
        if missing > 0:
            return missing / self._rate
        self._level -= tokens
        return None

    def settle(self, tokens: int) -> None:
        """Take what was used beyond the charge; a negative number gives back."""
        if self._rate is not None:
            self._level -= tokens

    def leave(self, duration_s: float | None = None) -> None:
        """Count a request out that `enter` let in; None if it was never served."""
        assert self.running > 0, "a request left that had not entered"
        self.running -= 1
        if duration_s is not None:
            self._duration_s += _SMOOTHING * (duration_s - self._duration_s)

    def level(self, now_s: float) -> float | None:
        """Return the tokens that could be used now; None if there is no limit."""
        if self._rate is None:
            return None
        self._fill(now_s)
        return self._level

    def _fill(self, now_s: float) -> None:
        if now_s <= self._filled_s:
            return
        if self._rate is not None:
            filled = self._level + self._rate * (now_s - self._filled_s)
            self._level = min(self._burst, filled)
        self._filled_s = now_s
