"""How promises were kept: prompt tokens that a router counted on, and those the engine found."""

from __future__ import annotations

from controlplane.audit.sets import BlockSets, Position
from controlplane.core.candidates import Candidates
from schemas.bus import Finished, PrefixLevel, Routed

AS_PROMISED = "as promised"
RETRIED = "retried elsewhere, or ended without an answer"
UNSAID = "the engine does not say"
NOT_EXACT = "the prompt was not tokenized exactly"
SET_NOT_EXACT = "the block set was not exact"
UNDER_WAY = "counted on requests that were under way"
EVICTED = "blocks were evicted before they were read"
OTHER_TIER = "blocks were in another memory tier"
COMPUTED = "more blocks were cached meanwhile"
BROKEN_OFF = "its block stream began anew meanwhile, or has a gap"
SILENT = "its block stream said nothing meanwhile"
UNSEEN = "candidates were not recorded, so that causes cannot be told"
UNEXPLAINED = "not explained by the record"


def cause(
    event: Routed,
    end: Finished,
    seen: Candidates | None,
    asked: Position | None,
    sets: BlockSets,
) -> str:
    """Return why an engine found more or fewer cached tokens than were promised.

    Args:
        seen: what the decision saw; None where it was not recorded.
        asked: position of the chosen instance's block stream at the decision.
        sets: as of the request's end.
    """
    if end.cached_tokens is None:
        return UNSAID if end.outcome == "ok" else RETRIED
    if end.cached_tokens == event.hit_tokens:
        return AS_PROMISED
    if not event.exact:
        return NOT_EXACT
    if event.trust != "exact":
        return SET_NOT_EXACT
    if seen is None or asked is None or event.instance_id not in seen.rows.instance_ids:
        return UNSEEN
    if not sets.advanced(asked):
        return SILENT
    row = seen.rows.instance_ids.index(event.instance_id)
    if sets.ended(asked):
        return BROKEN_OFF
    if seen.promised_tokens[row] and end.cached_tokens >= seen.hit_tokens[row]:
        return UNDER_WAY
    if end.cached_tokens > event.hit_tokens:
        return _more(event, asked, sets)
    deepest = _level(event, int(seen.hit_tokens[row]))
    if deepest is not None and sets.changed(deepest.key, asked)[1]:
        return EVICTED
    return OTHER_TIER if deepest is None and seen.hit_tokens[row] else UNEXPLAINED


def _more(event: Routed, asked: Position, sets: BlockSets) -> str:
    """Return why more was cached: the block after the hit came, from whichever request."""
    following = event.classes[0].key if event.classes and not event.hit_tokens else None
    level = _level(event, event.hit_tokens)
    if level is not None:
        following = level.following
    if following is not None and sets.changed(following, asked)[0]:
        return COMPUTED
    return UNEXPLAINED


def _level(event: Routed, hit_tokens: int) -> PrefixLevel | None:
    """Return where a hit of so many tokens ends."""
    assert event.candidates is not None
    for level in event.candidates.levels:
        if level.depth_blocks * event.block_size == hit_tokens:
            return level
    return None
