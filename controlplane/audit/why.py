"""Why a decision was made: its formula with the numbers in it, the next best, who was left out."""

from __future__ import annotations

import msgspec
import numpy as np

from controlplane.core.candidates import Candidates
from controlplane.core.decision import Candidate
from schemas.bus import Routed


class Why(msgspec.Struct, frozen=True):
    """A decision in a few numbers.

    Attributes:
        p_tokens: P of the chosen instance.
        ties: candidates with the best score, the chosen one included; they take turns.
        next_best: the best of the others, with its score; None if there is no other.
        excluded: instances by the filter that excluded them; ignored filters are not in it.
        eligible: how many could be chosen.
    """

    p_tokens: int
    batch_size: int
    score: float
    ties: int
    next_best: tuple[str, float] | None
    excluded: dict[str, int]
    ignored: tuple[str, ...]
    eligible: int
    fleet: int


def why(event: Routed, seen: Candidates) -> Why:
    """Return why a decision was made, given what it saw of the instances."""
    scores = np.full(len(seen), np.nan) if seen.scores is None else seen.scores
    ranked = np.where(seen.eligible, scores, np.inf)
    ids = seen.rows.instance_ids
    others = np.array([name != event.instance_id for name in ids]) & seen.eligible
    best: tuple[str, float] | None = None
    if seen.scores is not None and others.any():
        row = int(np.where(others, ranked, np.inf).argmin())
        best = (ids[row], float(scores[row]))
    excluded = {
        name: int(mask.sum()) for name, mask in seen.excluded.items() if name not in seen.ignored
    }
    return Why(
        p_tokens=event.queued_tokens + event.new_tokens,
        batch_size=event.batch_size,
        score=event.score,
        ties=max(int((ranked == event.score).sum()), 1),
        next_best=best,
        excluded=excluded,
        ignored=seen.ignored,
        eligible=int(seen.eligible.sum()),
        fleet=len(seen),
    )


def formula(event: Routed) -> str:
    """Return how the score was made, where it is our own product."""
    if event.policy != "multiplicative":
        return f"{event.policy} {event.score:,.4g}"
    p = event.queued_tokens + event.new_tokens
    alpha = f"^{event.alpha:g}" if event.alpha != 1.0 else ""
    beta = f"^{event.beta:g}" if event.beta != 1.0 else ""
    return f"P {p:,}{alpha} × (B {event.batch_size:,} + 1){beta} = {event.score:,.0f}"


def sentence(event: Routed, found: Why) -> str:
    """Return why, for people."""
    parts = [formula(event)]
    if event.policy == "round_robin":
        parts.append(f"a turn among {found.eligible:,}")
    elif found.ties > 1:
        parts.append(f"one of {found.ties:,} equally good, in turn")
    elif found.next_best is not None:
        parts.append(f"next {found.next_best[0]} {found.next_best[1]:,.0f}")
    if found.excluded:
        left_out = ", ".join(f"{name} {count:,}" for name, count in found.excluded.items())
        parts.append(f"left out: {left_out}")
    if event.reason:
        parts.append(event.reason)
    return "; ".join(parts)


def ranked(seen: Candidates, most: int | None = None) -> list[Candidate]:
    """Return the candidates, the best first, those that could not be chosen last."""
    listed = sorted(seen.listed(), key=lambda each: (not each.eligible, each.score))
    return listed if most is None else listed[:most]
