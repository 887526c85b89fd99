"""The decision as the papers state it: integers, one instance at a time, no arrays."""

from __future__ import annotations

from collections.abc import Sequence


def multiplicative(prompt: int, queued: Sequence[int], hits: Sequence[int], batch: Sequence[int]):
    """Scores as exact integers."""
    return [
        (max(q, 0) + max(prompt - h, 1)) * (b + 1)
        for q, h, b in zip(queued, hits, batch, strict=True)
    ]


def pick(scores: Sequence[float], filters: Sequence[tuple[str, Sequence[bool]]], rotation: int):
    """Return (index, ties, ignored filters)."""
    candidates = list(range(len(scores)))
    ignored = []
    for name, keep in filters:
        kept = [i for i in candidates if keep[i]]
        if kept:
            candidates = kept
        else:
            ignored.append(name)
    best = min(scores[i] for i in candidates)
    tied = [i for i in candidates if scores[i] == best]
    return tied[rotation % len(tied)], len(tied), tuple(ignored)
