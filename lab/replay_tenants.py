"""Whose requests a replay's are: shares of the traffic, weights in the queue, budgets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from lab.replay_result import Floats, Ints


class TenantShare(msgspec.Struct, frozen=True):
    """One tenant of a replay.

    Attributes:
        share: of the requests, relative to the other tenants' shares.
        weight: of what is served while others wait, too.
        budget: seconds to the first token of its requests; 0 for those that all requests share.
        isolated: it shares its work with nobody else.
    """

    name: str
    share: float = 1.0
    weight: float = 1.0
    budget: float = 0.0
    isolated: bool = False

    def __post_init__(self) -> None:
        """Refuse what makes no sense. Raises ValueError, which names the tenant and the number."""
        for field in ("share", "weight"):
            if not 1e-6 <= getattr(self, field) <= 1e15:
                raise ValueError(
                    f"tenant {self.name}: {field} must be from 1e-6 to 1e15: {getattr(self, field)}"
                )
        if not self.budget >= 0:
            raise ValueError(f"tenant {self.name}: budget must not be negative: {self.budget}")


EVERYBODY = TenantShare("")
"""Whose requests all are where there are no tenants."""


def parse_tenants(text: str) -> tuple[TenantShare, ...]:
    """Return the tenants that a comma-separated list of `name:field=value:…` stands for.

    Raises:
        ValueError: a name is missing or twice there, or a value makes no sense.
    """
    found = tuple(_tenant(part) for part in text.split(",")) if text else ()
    names = [each.name for each in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tenant {twice[0]} is there twice")
    return found


def _tenant(text: str) -> TenantShare:
    name, *parts = text.split(":")
    if not name:
        raise ValueError(f"tenant {text!r} has no name: NAME:share=X:weight=X:budget=X")
    fields = dict(part.partition("=")[::2] for part in parts)
    unknown = sorted(fields.keys() - {"share", "weight", "budget", "isolated"})
    if unknown:
        raise ValueError(f"tenant {name} has no {unknown[0]!r}: share, weight, budget, isolated")
    try:
        return msgspec.convert({**fields, "name": name}, TenantShare, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"tenant {text!r}: {error}") from None


def tenants_of(count: int, tenants: Sequence[TenantShare], seed: int) -> Ints:
    """Return (count,) which tenant's each request is, by the shares and the seed."""
    if len(tenants) < 2:
        return np.zeros(count, np.int64)
    shares = [each.share for each in tenants]
    chance = random.Random(f"tenants {seed}")
    return np.array(chance.choices(range(len(tenants)), shares, k=count), np.int64)


def budgets_of(count: int, choices: tuple[float, ...], seed: int) -> Floats:
    """Return (count,) seconds to each request's first token, by the seed; infinite for none."""
    given = [budget_s or float("inf") for budget_s in choices or (0.0,)]
    if len(given) == 1:
        return np.full(count, given[0])
    return np.array(random.Random(f"budgets {seed}").choices(given, k=count))


def budgets_by_tenant(budgets_s: Floats, tenants: Sequence[TenantShare], whose: Ints) -> Floats:
    """Return (count,) budgets, where a tenant's own ones stand before those that all share."""
    own = np.array([each.budget for each in tenants or (EVERYBODY,)])[whose]
    return np.where(own > 0, own, budgets_s)
