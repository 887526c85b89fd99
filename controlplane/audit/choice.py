"""Whether a decision follows from what it saw: numbers, score, filters, pick. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, isfinite

import numpy as np

from controlplane.audit.report import Kind
from controlplane.core.candidates import Candidates
from schemas.bus import Routed

Fault = tuple[Kind, str]

UNKNOWN_POLICY = "the policy is of a later version"


def faults(event: Routed, seen: Candidates) -> Iterator[Fault]:
    """Yield what is wrong with a decision, given what it saw of the instances."""
    ids = seen.rows.instance_ids
    if event.instance_id not in ids:
        yield "choice", f"{event.instance_id} is none of the {len(ids)} candidates"
        return
    row = ids.index(event.instance_id)
    yield from _numbers(event, seen, row)
    yield from _filters(event, seen)
    if event.policy != seen.rows.policy and not event.reason:
        yield "policy", f"{event.policy} decided without a reason instead of {seen.rows.policy}"
    if seen.scores is not None:
        yield from _pick(event, seen, row)


def _numbers(event: Routed, seen: Candidates, row: int) -> Iterator[Fault]:
    """Compare what the event says of the chosen instance with its row."""
    hit = int(seen.hit_tokens[row] + seen.promised_tokens[row])
    pairs = (
        ("hit_tokens", event.hit_tokens, hit),
        ("new_tokens", event.new_tokens, max((event.prompt_tokens or 0) - hit, 1)),
        ("batch_size", event.batch_size, int(seen.batch_size[row])),
        ("queued_tokens", event.queued_tokens, int(seen.queued_tokens[row])),
        ("fleet", event.fleet, len(seen)),
    )
    for name, said, computed in pairs:
        if said != computed:
            yield "numbers", f"{name} is {said}, but its row says {computed}"


def _filters(event: Routed, seen: Candidates) -> Iterator[Fault]:
    cap = seen.rows.batch_cap
    barred = seen.excluded.get("batch_cap")
    if barred is not None:
        full = np.zeros(len(seen), np.bool_) if cap is None else seen.batch_size >= cap
        if (barred != full).any():
            yield "filter", f"batch_cap={cap} excludes others than those whose batch reaches it"
    if seen.ignored:
        named = "ignored:" + "+".join(seen.ignored)
        if named not in event.reason.split(";"):
            yield "filter", f"{named} is not in the reason {event.reason!r}"


def _pick(event: Routed, seen: Candidates, row: int) -> Iterator[Fault]:
    """Compare the pick with the least score of those who were eligible."""
    assert seen.scores is not None
    ids = seen.rows.instance_ids
    if not seen.eligible[row]:
        by = [name for name, mask in seen.excluded.items() if mask[row]]
        yield "choice", f"{event.instance_id} was chosen though excluded by {', '.join(by)}"
        return
    score = float(seen.scores[row])
    if not _same(event.score, score):
        yield "score", f"the score is {event.score!r}, but computes to {score!r}"
    ranked = np.where(seen.eligible, seen.scores, np.inf)
    best = int(ranked.argmin())
    if isfinite(float(ranked[best])) and not _same(score, float(ranked[best])):
        yield (
            "choice",
            f"{event.instance_id} was chosen at {score!r}, but {ids[best]} has {ranked[best]!r}",
        )


def _same(first: float, second: float) -> bool:
    """Whether two scores are one, computed on machines whose powers may differ in a last bit."""
    return first == second or isclose(first, second, rel_tol=1e-12)
