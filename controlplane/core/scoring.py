"""The decision: filter, score, pick. Pure functions over one row an instance.

    P(i)     = queued(i) + max(prompt − hit(i), 1)
    B(i)     = requests assigned to i and unfinished
    score(i) = P(i)^α × (B(i) + 1)^β                  the smallest wins

Scores are float64: exact for products below 2^53 with α = β = 1, and never wrapping beyond. Equal
scores rotate, so that a burst over idle instances spreads. Filters are kind: one that would leave
nobody is ignored and named in the outcome.

Source: LMetric (arXiv 2603.15202); the queue term and the +1 are in its released code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class FleetView(msgspec.Struct, gc=False):
    """The instances of one model, a row each, as the decision sees them.

    The owner keeps the arrays up to date in place; a decision only reads them. None always means
    "no such restriction or correction", and costs nothing.

    Attributes:
        batch_size: (n,) B, requests assigned and unfinished.
        queued_tokens: (n,) queued prefill tokens; transiently negative values count as 0.
        context_tokens: (n,) prompt tokens of the unfinished requests (`dynamo_cost` uses it).
        present: (n,) rows that have an instance; the others are never chosen.
        healthy: (n,) instances that requests get through to.
        ready: (n,) instances that are not draining.
        allowed: (n,) instances that no operator keeps requests away from.
        batch_cap: (n,) or a number: instances with batch_size below it may get a request.
        speed: (n,) prefill speed relative to the fleet's reference, which has 1.0.
        network_tokens: (n,) network latency, as tokens the instance prefills in that time.
    """

    batch_size: IntArray
    queued_tokens: IntArray
    context_tokens: IntArray
    present: BoolArray | None = None
    healthy: BoolArray | None = None
    ready: BoolArray | None = None
    allowed: BoolArray | None = None
    batch_cap: IntArray | int | None = None
    speed: FloatArray | None = None
    network_tokens: FloatArray | None = None

    def __len__(self) -> int:
        """Return n, the number of rows."""
        return len(self.batch_size)


class Request(msgspec.Struct, gc=False):
    """What a decision knows of one request.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: (n,) tokens of the prompt that each instance has cached: whole blocks, capped
            at `index.usable_blocks`; None where nothing is known.
        capable: (n,) instances that serve the request's model or adapter.
        cool: (n,) instances that no hotspot verdict forbids to the request's class.
        alpha: the tenant's exponent of P.
        beta: the tenant's exponent of B + 1.
    """

    prompt_tokens: int
    hit_tokens: IntArray | None = None
    capable: BoolArray | None = None
    cool: BoolArray | None = None
    alpha: float = 1.0
    beta: float = 1.0


class Policy(Protocol):
    """A way to rank instances."""

    @property
    def name(self) -> str:
        """What configuration, events and metrics call it."""

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return (n,) scores: the lowest is best, equal ones are equally good."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What was decided, and why.

    Attributes:
        index: row of the chosen instance.
        score: its score.
        policy: name of the policy that ranked.
        ties: how many candidates had this score, the chosen one included.
        scores: (n,) of all instances, candidates or not.
        candidates: (n,) rows that passed the filters; None if nothing filtered.
        ignored: names of the filters that would have left nobody.
    """

    index: int
    score: float
    policy: str
    ties: int
    scores: FloatArray
    candidates: BoolArray | None = None
    ignored: tuple[str, ...] = ()


def decide(view: FleetView, request: Request, policy: Policy, rotation: int) -> Choice | None:
    """Return the instance that should serve a request; None if there is no instance at all.

    Args:
        rotation: any number that changes with every decision; it turns among equal scores.
    """
    if not len(view) or (view.present is not None and not view.present.any()):
        return None
    candidates, ignored = _filtered(view, request)
    scores = policy.score(view, request)
    ranked = scores if candidates is None else np.where(candidates, scores, np.inf)
    best = np.minimum.reduce(ranked)
    tied = (ranked == best).nonzero()[0]
    index = int(tied[rotation % len(tied)])
    return Choice(index, float(best), policy.name, len(tied), scores, candidates, ignored)


def _filtered(view: FleetView, request: Request) -> tuple[BoolArray | None, tuple[str, ...]]:
    """Return who passed all filters that leave somebody, and the names of those that do not."""
    candidates = view.present
    ignored: tuple[str, ...] = ()
    for name, keep in _filters(view, request):
        kept = keep if candidates is None else candidates & keep
        if kept.any():
            candidates = kept
        else:
            ignored += (name,)
    return candidates, ignored


def _filters(view: FleetView, request: Request) -> Iterator[tuple[str, BoolArray]]:
    """Yield the filters in force, most compelling first."""
    if view.healthy is not None:
        yield "health", view.healthy
    if view.ready is not None:
        yield "draining", view.ready
    if view.allowed is not None:
        yield "blacklist", view.allowed
    if request.capable is not None:
        yield "model", request.capable
    if view.batch_cap is not None:
        yield "batch_cap", view.batch_size < view.batch_cap
    if request.cool is not None:
        yield "hotspot", request.cool


def new_tokens(request: Request) -> IntArray | np.int64:
    """Return (n,) tokens each instance would have to compute, at least 1; a scalar if all equal."""
    if request.hit_tokens is None:
        return np.int64(max(request.prompt_tokens, 1))
    return np.maximum(request.prompt_tokens - request.hit_tokens, 1)


def queued_tokens(view: FleetView) -> IntArray:
    """Return (n,) queued prefill tokens, never negative."""
    return np.maximum(view.queued_tokens, 0)
