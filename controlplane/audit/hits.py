"""Whether the hits that a decision saw are those of the rebuilt block sets. Pure functions."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.audit.sets import UNKNOWN, BlockSets, Position
from controlplane.core.candidates import Candidates
from controlplane.core.index import usable_blocks
from schemas.bus import PrefixLevel, Routed

IntArray = NDArray[np.int64]


class HitsCheck(msgspec.Struct, frozen=True):
    """What came of comparing.

    Attributes:
        checked: instances whose hits were computed again.
        inexact: instances whose block set the router itself did not hold for exact.
        unknown: instances of which the record does not say enough.
        wrong: what differs, an instance a line.
    """

    checked: int
    inexact: int
    unknown: int
    wrong: list[str]


def positions(seen: Candidates) -> list[Position]:
    """Return how much of each block stream a decision had seen."""
    return list(map(Position, seen.rows.instance_ids, seen.epochs, seen.applied.tolist()))


def check_hits(event: Routed, seen: Candidates, sets: BlockSets) -> HitsCheck:
    """Compute the hits of every instance again, from the blocks at which they end."""
    exact = seen.exact
    inexact = int((~exact).sum())
    levels = _levels(event)
    if not levels:
        wrong = [] if not seen.hit_tokens.any() else ["hits without a block that shows them"]
        return HitsCheck(int(exact.sum()), inexact, 0, wrong)
    asked = positions(seen)
    credit = seen.rows.tier_credit
    tokens, unsure = _depths(event, levels, asked, sets, 0)
    for tier in range(1, len(credit)):
        deeper, doubtful = _depths(event, levels, asked, sets, tier)
        more = np.maximum(deeper - tokens, 0)
        tokens = tokens + (more * credit[tier]).astype(np.int64)
        unsure |= doubtful
    differs = exact & ~unsure & (tokens != seen.hit_tokens)
    wrong = [
        f"{asked[row].instance_id}: {int(seen.hit_tokens[row])} hit tokens, but its blocks as of "
        f"epoch {asked[row].epoch} seq {asked[row].applied - 1} make {_named(tokens[row])}"
        for row in differs.nonzero()[0].tolist()
    ]
    return HitsCheck(int((exact & ~unsure).sum()), inexact, int((exact & unsure).sum()), wrong)


_BEYOND = np.int64(1) << 40
"""Stands for a hit that is deeper than any that the decision knew of."""


def _named(tokens: np.int64) -> str:
    return "more" if tokens >= _BEYOND else str(int(tokens))


def _levels(event: Routed) -> list[PrefixLevel]:
    """Return the depths at which hits end, 0 included: who has none lacks the first block."""
    assert event.candidates is not None
    if not event.classes or not event.block_size:
        return []
    first = (
        event.classes[0].key if usable_blocks(event.prompt_tokens or 0, event.block_size) else None
    )
    return [PrefixLevel(0, 0, first), *event.candidates.levels]


def _depths(
    event: Routed, levels: list[PrefixLevel], asked: list[Position], sets: BlockSets, tier: int
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return (rows,) tokens that a tier's sets hold of a prompt, and whose cannot be told."""
    followed = [level for level in levels if level.following is not None]
    keys = [level.key for level in levels[1:]]
    after = [level.following for level in followed if level.following is not None]
    held = sets.held([*keys, *after], asked, tier)
    ends = dict(zip([level.depth_blocks for level in followed], held[len(keys) :], strict=True))
    tokens = np.zeros(len(asked), np.int64)
    unsure = np.zeros(len(asked), np.bool_)
    beyond = ends.get(0, np.zeros(len(asked), np.int8)).copy()
    for level, holds in zip(levels[1:], held[: len(keys)], strict=True):
        inside = holds == 1
        tokens[inside] = level.depth_blocks * event.block_size
        unsure |= holds == UNKNOWN
        end = ends.get(level.depth_blocks)
        beyond[inside] = 0 if end is None else end[inside]
    tokens[beyond == 1] = _BEYOND
    return tokens, unsure | (beyond == UNKNOWN)
