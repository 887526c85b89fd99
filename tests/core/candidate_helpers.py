"""What a decision saw of a few instances, for tests of those who read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.core.candidates import Candidates
from schemas.bus import FleetRows


def candidates(
    names: Sequence[str],
    *,
    hits: Sequence[int] = (),
    scores: Sequence[float] | None = None,
    eligible: Sequence[bool] = (),
) -> Candidates:
    """Return candidates with these names; what is left out is nothing, or everybody."""
    count = len(names)
    nothing = np.zeros(count, np.int64)
    return Candidates(
        rows=FleetRows(1, list(names)),
        hit_tokens=np.array(hits or nothing, np.int64),
        promised_tokens=nothing,
        queued_tokens=nothing,
        batch_size=nothing,
        applied=nothing,
        exact=np.ones(count, np.bool_),
        eligible=np.array(eligible or [True] * count, np.bool_),
        excluded={},
        ignored=(),
        scores=None if scores is None else np.array(scores, np.float64),
    )
