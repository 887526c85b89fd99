"""When an answer is due: by its tenant's budget, or as a trusted caller says in a header."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from router.access import Access
from router.http_exchange import Exchange
from router.refusals import Refusal, bad_header, not_allowed
from router.tenants import Tenant

TTFT_HEADER: Final = b"x-multiplane-ttft-budget"
TOTAL_HEADER: Final = b"x-multiplane-total-budget"
BUDGET_HEADERS: Final = frozenset({TTFT_HEADER, TOTAL_HEADER})

_SECONDS_MAX = 86_400.0


class Budget(msgspec.Struct, frozen=True):
    """Seconds from a request's coming to its first byte, and to its end; infinite for no limit."""

    ttft_s: float
    total_s: float


def budget_of(exchange: Exchange, tenant: Tenant, access: Access) -> Budget | Refusal:
    """Return when a request is due, or why what it says about that is refused."""
    ttft_s = tenant.ttft_budget_s or math.inf
    total_s = tenant.total_budget_s or math.inf
    if BUDGET_HEADERS.isdisjoint(exchange.head.fields) or not access.paths:
        return Budget(ttft_s, total_s)
    if not access.trusts(exchange):
        return not_allowed(
            "only a trusted tenant may send X-Multiplane-TTFT-Budget or X-Multiplane-Total-Budget"
        )
    try:
        return Budget(
            _seconds(exchange.header(TTFT_HEADER), ttft_s),
            _seconds(exchange.header(TOTAL_HEADER), total_s),
        )
    except ValueError:
        return bad_header(
            f"X-Multiplane-TTFT-Budget and X-Multiplane-Total-Budget are seconds, above 0 and at "
            f"most {_SECONDS_MAX:g}"
        )


def _seconds(value: bytes | None, default_s: float) -> float:
    if value is None:
        return default_s
    seconds = float(value)
    if not 0 < seconds <= _SECONDS_MAX:
        raise ValueError("out of range")
    return seconds
