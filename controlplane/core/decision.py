"""What the request path is asked, and what it decides: values that keep all that led there."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np

from controlplane.core.fleet import Instance
from controlplane.core.index import Match, usable_blocks
from controlplane.core.scoring import BoolArray, Choice, IntArray
from controlplane.core.stream import Trust
from controlplane.core.verdicts import CLASS_DEPTHS
from schemas.bus import ClassCoverage


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """What the plane must know of a request.

    Attributes:
        prompt_tokens: length of the prompt; an estimate unless `exact`.
        hashes: block hashes of its whole blocks; empty where they are not known.
        block_size: tokens a block of `hashes`.
        exact: whether the prompt was tokenized exactly.
        by_load: why load alone must decide; empty if the configured policy may.
        alpha: the tenant's exponent of P.
        beta: the tenant's exponent of B + 1.
        tried: instances that already failed this request.
        pinned: the instance that it should go to if that may get it; empty for no matter which.
        head: hash of the first token ids, to be told; None where nobody asks for it.
    """

    request_id: str
    prompt_tokens: int
    hashes: Sequence[int] = ()
    block_size: int = 0
    exact: bool = True
    by_load: str = ""
    lora: str | None = None
    tenant: str = ""
    alpha: float = 1.0
    beta: float = 1.0
    tried: tuple[str, ...] = ()
    pinned: str = ""
    head: int | None = None


class Candidate(msgspec.Struct, frozen=True):
    """One instance as a decision saw it: P = queued + max(prompt − hit, 1), B before the +1.

    Attributes:
        hit_tokens: promised ones included.
        eligible: whether it could be chosen.
        excluded_by: filters that excluded it; they may have been ignored.
    """

    instance_id: str
    hit_tokens: int
    queued_tokens: int
    batch_size: int
    score: float
    eligible: bool = True
    excluded_by: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and everything that led there.

    Attributes:
        rows: the fleet at the decision; the arrays below and `choice` are by its positions.
        hit_tokens: (rows,) hits by the index; None where it knows of none.
        promised_tokens: (rows,) tokens beyond those that requests on their way will have cached by
            then; None where there are none.
        batch_size: (rows,) B.
        queued_tokens: (rows,) queued prefill tokens.
        context_tokens: (rows,) prompt tokens of unfinished requests; None where the policy does not
            look at them.
        reason: why the policy or the candidates were not the configured ones; empty if they were.
        hit: prompt tokens that the chosen instance is believed to have cached when it begins.
    """

    request: RouteRequest
    rows: tuple[Instance, ...]
    choice: Choice
    match: Match
    hit_tokens: IntArray | None
    promised_tokens: IntArray | None
    batch_size: IntArray
    queued_tokens: IntArray
    context_tokens: IntArray | None
    reason: str
    trust: Trust
    hit: int

    @property
    def instance(self) -> Instance:
        """The chosen instance."""
        return self.rows[self.choice.index]

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that the chosen instance has to compute."""
        return max(self.request.prompt_tokens - self.hit, 1)

    def candidates(self) -> list[Candidate]:
        """Return every instance as the decision saw it."""
        count = len(self.rows)
        kept = self.choice.candidates
        known = added(self.hit_tokens, self.promised_tokens)
        hits = [0] * count if known is None else known.tolist()
        eligible = [True] * count if kept is None else kept.tolist()
        ids = [instance.record.instance_id for instance in self.rows]
        columns = (self.queued_tokens.tolist(), self.batch_size.tolist())
        scores = self.choice.scores.tolist()
        barred = [
            tuple(name for name, keep in self.choice.filters if not keep[row])
            for row in range(count)
        ]
        return list(map(Candidate, ids, hits, *columns, scores, eligible, barred))

    def classes(self) -> list[ClassCoverage]:
        """Return the request's classes as the hotspot detector needs them."""
        hashes, levels = self.request.hashes, self.match.levels
        found: list[ClassCoverage] = []
        blocks = len(hashes)
        reach = 0.0  # the depth down to which the same instances hold the prompt
        for depth in CLASS_DEPTHS:
            if depth > blocks:
                break
            if depth > reach:
                reach = next((down for down, _ in levels if down >= depth), inf)
                holders, inside, outside = self._coverage(depth)
            found.append(ClassCoverage(hashes[depth - 1], depth, holders, inside, outside))
        return found

    def _coverage(self, depth: int) -> tuple[int, float | None, float | None]:
        """Return |M| at a depth and the best scores inside and outside M."""
        choice = self.choice
        best = None if choice.score == inf else choice.score
        if self.hit_tokens is None:
            return 0, None, best
        inside = holders_of(self.request, self.hit_tokens, depth)
        holders = int(np.count_nonzero(inside))
        if not holders:
            return 0, None, best
        if holders == len(inside):
            return holders, best, None
        # Whoever was chosen is the best of one side; only the other has to be looked at.
        if inside[choice.index]:
            return holders, best, self._least_of(~inside)
        return holders, self._least_of(inside), best

    def _least_of(self, rows: BoolArray) -> float | None:
        """Return the least score among the candidates of some rows; None if none is finite."""
        choice = self.choice
        if choice.candidates is not None:
            rows = rows & choice.candidates
        least = np.where(rows, choice.scores, inf)
        score = float(least[least.argmin()])
        return None if score == inf else score


def holders_of(request: RouteRequest, hit_tokens: IntArray, depth: int) -> BoolArray:
    """Return (rows,) M: who holds the first `depth` blocks of a request."""
    # Hits are capped below the whole prompt; a class as long as the prompt is not lost.
    blocks = min(depth, usable_blocks(request.prompt_tokens, request.block_size))
    inside: BoolArray = hit_tokens >= max(blocks, 1) * request.block_size
    return inside


def added(hits: IntArray | None, more: IntArray | None) -> IntArray | None:
    """Return the sum of two columns, where None stands for zeros."""
    if hits is None or more is None:
        return more if hits is None else hits
    return hits + more
