"""The decision: filter, score, pick. Pure functions over one row an instance.

    P(i)     = queued(i) + max(prompt − hit(i), 1)
    B(i)     = requests assigned to i and unfinished
    score(i) = P(i)^α × (B(i) + 1)^β                  the smallest wins

Scores are float64: exact for products below 2^53 with α = β = 1, and never wrapping beyond. Equal
scores rotate, so that a burst over idle instances spreads. Filters are kind: one that would leave
nobody is ignored and named in the outcome. (An operator's drain is not: where it leaves nobody,
there is no decision to make, and the caller does not ask for one.)

Source: LMetric (arXiv 2603.15202); the queue term and the +1 are in its released code.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


_ZERO, _ONE, _INFINITY = np.array(0), np.array(1), np.array(np.inf)
"""As arrays, because numpy takes longer to make one of a Python number than to use it."""

_FLOAT = np.dtype(np.float64)
"""Made once, because numpy takes a while to find out what a Python type means."""


class FleetView(msgspec.Struct, gc=False):
    """The instances of one model, a row each, as the decision sees them.

    The owner keeps the arrays up to date in place; a decision only reads them. None always means
    "no such restriction or correction", and costs nothing.

    Attributes:
        batch_size: (n,) B, requests assigned and unfinished.
        queued_tokens: (n,) queued prefill tokens; transiently negative values count as 0.
        context_tokens: (n,) prompt tokens of the unfinished requests (`dynamo_cost` uses it).
        undrained: (n,) instances that no operator drained; at least one that is capable.
        healthy: (n,) instances that requests get through to.
        ready: (n,) instances that are not draining.
        allowed: (n,) instances that no operator keeps requests away from.
        batch_cap: instances with batch_size below it may get a request.
        speed: (n,) prefill speed relative to the fleet's reference, which has 1.0.
        network_tokens: (n,) network latency, as tokens the instance prefills in that time.
        weight: (n,) batch_size + 1, where the owner keeps that, too; None: it is worked out.
        backlog: (n,) queued_tokens, likewise; never negative.
    """

    batch_size: IntArray
    queued_tokens: IntArray
    context_tokens: IntArray
    undrained: BoolArray | None = None
    healthy: BoolArray | None = None
    ready: BoolArray | None = None
    allowed: BoolArray | None = None
    batch_cap: int | None = None
    speed: FloatArray | None = None
    network_tokens: FloatArray | None = None
    weight: FloatArray | None = None
    backlog: FloatArray | None = None

    def __len__(self) -> int:
        """Return n, the number of instances."""
        return len(self.batch_size)


class Request(msgspec.Struct, gc=False):
    """What a decision knows of one request.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: (n,) tokens of the prompt that each instance has cached: whole blocks, capped
            at `index.usable_blocks`; None where nothing is known.
        capable: (n,) instances that serve the request's model or adapter.
        untried: (n,) instances that have not failed this request yet.
        cool: (n,) instances that no hotspot verdict forbids to the request's class.
        pinned: (n,) the instance that has just computed the request's prefix.
        alpha: the tenant's exponent of P.
        beta: the tenant's exponent of B + 1.
    """

    prompt_tokens: int
    hit_tokens: IntArray | None = None
    capable: BoolArray | None = None
    untried: BoolArray | None = None
    cool: BoolArray | None = None
    pinned: BoolArray | None = None
    alpha: float = 1.0
    beta: float = 1.0


class Policy(Protocol):
    """A way to rank instances."""

    @property
    def name(self) -> str:
        """What configuration, events and metrics call it."""

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return (n,) scores, the caller's own: the lowest is best, equal ones are equally good."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What was decided, and why.

    Attributes:
        index: row of the chosen instance.
        score: its score.
        policy: name of the policy that ranked.
        ties: how many candidates had this score, the chosen one included.
        scores: (n,) of all instances, candidates or not.
        candidates: (n,) instances that passed the filters; None if all did.
        ignored: names of the filters that would have left nobody.
        filters: (name, (n,) who passes) of those in force, in order; empty if everybody passed all.
    """

    index: int
    score: float
    policy: str
    ties: int
    scores: FloatArray
    candidates: BoolArray | None = None
    ignored: tuple[str, ...] = ()
    filters: Sequence[tuple[str, BoolArray]] = ()


def decide(view: FleetView, request: Request, policy: Policy, rotation: int) -> Choice | None:
    """Return the instance that should serve a request; None if there is no instance at all.

    Args:
        rotation: any number that changes with every decision; it turns among equal scores.
    """
    if not len(view):
        return None
    filters = _filters(view, request)
    candidates: BoolArray | None = None
    ignored: tuple[str, ...] = ()
    for _, keep in filters:
        candidates = keep if candidates is None else candidates & keep
    if candidates is not None:
        passed = np.count_nonzero(candidates)
        if passed == len(view):
            candidates, filters = None, []
        elif not passed:
            candidates, ignored = without_those_that_leave_nobody(filters)
    scores = policy.score(view, request)
    ranked = scores if candidates is None else np.where(candidates, scores, _INFINITY)
    first = int(ranked.argmin())
    best: float = ranked.item(first)
    if not isfinite(best):  # Scores beyond float64, as absurd exponents make them, say nothing.
        tied = np.arange(len(view)) if candidates is None else candidates.nonzero()[0]
    elif _is_alone(ranked, first, best):
        return Choice(first, best, policy.name, 1, scores, candidates, ignored, filters)
    else:
        tied = (ranked == best).nonzero()[0]
    index: int = tied.item(rotation % len(tied))
    return Choice(index, best, policy.name, len(tied), scores, candidates, ignored, filters)


def _is_alone(ranked: FloatArray, first: int, best: float) -> bool:
    """Whether only one row has the best score: to look for a second costs less than to compare."""
    ranked[first] = _INFINITY
    second: float = ranked.item(ranked.argmin())
    ranked[first] = best
    return second != best


def without_those_that_leave_nobody(
    filters: list[tuple[str, BoolArray]],
) -> tuple[BoolArray | None, tuple[str, ...]]:
    """Return who passes the other filters, taken in order, and the names of the ignored ones."""
    candidates: BoolArray | None = None
    ignored: list[str] = []
    for name, keep in filters:
        kept = keep if candidates is None else candidates & keep
        if np.count_nonzero(kept):
            candidates = kept
        else:
            ignored.append(name)
    return candidates, tuple(ignored)


def _filters(view: FleetView, request: Request) -> list[tuple[str, BoolArray]]:
    """Return the filters in force, most compelling first."""
    filters: list[tuple[str, BoolArray]] = []
    if view.undrained is not None:
        filters.append(("drained", view.undrained))
    if request.capable is not None:
        filters.append(("model", request.capable))
    if request.untried is not None:
        filters.append(("tried", request.untried))
    if view.healthy is not None:
        filters.append(("health", view.healthy))
    if view.ready is not None:
        filters.append(("draining", view.ready))
    if view.allowed is not None:
        filters.append(("blacklist", view.allowed))
    if view.batch_cap is not None and view.batch_size[view.batch_size.argmax()] >= view.batch_cap:
        filters.append(("batch_cap", view.batch_size < view.batch_cap))
    if request.cool is not None:
        filters.append(("hotspot", request.cool))
    if request.pinned is not None:
        filters.append(("pinned", request.pinned))
    return filters


def new_tokens(request: Request) -> IntArray | np.int64:
    """Return (n,) tokens each instance would have to compute, at least 1; a scalar if all equal."""
    if request.hit_tokens is None:
        return np.int64(max(request.prompt_tokens, 1))
    new: IntArray = request.prompt_tokens - request.hit_tokens
    if new.item(new.argmin()) < 1:
        new = np.maximum(new, _ONE)
    return new


def queued_tokens(view: FleetView) -> IntArray:
    """Return (n,) queued prefill tokens, never negative."""
    queued = view.queued_tokens
    if queued.item(queued.argmin()) < 0:
        queued = np.maximum(queued, _ZERO)
    return queued


def product(a: IntArray, b: IntArray) -> FloatArray:
    """Return a × b for (n,) columns of numbers from 0 on: exact below 2^53, and never wrapping."""
    # Converted one after the other: a multiplication that converts goes through small buffers.
    exact: FloatArray = a.astype(_FLOAT)
    return np.multiply(exact, b.astype(_FLOAT), out=exact)
