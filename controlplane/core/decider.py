"""Who gets a request: its prompt is matched, every instance scored, one picked; nothing is booked.

policy      configured, unless an operator overrides it or what is known is too old to trust
hits        what the index says each instance has, and what requests on their way promise
filters     instances that may not get it, for whatever reason (`controlplane.core.scoring`)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from controlplane.core import scoring
from controlplane.core.decision import Decision, RouteRequest, added, holders_of
from controlplane.core.fleet import Fleet, Instance
from controlplane.core.index import NO_MATCH, Match, PrefixIndex, usable_blocks
from controlplane.core.load import Ledger
from controlplane.core.openings import Hits, hits_of
from controlplane.core.policies import READS_CONTEXT, make_policy
from controlplane.core.promises import Promises
from controlplane.core.scoring import BoolArray, FleetView, IntArray, Policy
from controlplane.core.verdicts import Verdicts, outgrows


class Decider:
    """Decides on requests for one model.

    Attributes:
        batch_cap: instances with so many requests get no more; None for no cap.
        promises: what requests on their way will have cached, by instance and its `life`; None to
            know of nothing but the index.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        ledger: Ledger,
        index: PrefixIndex,
        verdicts: Verdicts,
        policy: Policy,
        batch_cap: int | None,
        blind_s: float,
        tier_credit: Sequence[float],
        promise_s: float,
        rng: random.Random,
    ) -> None:
        self.batch_cap = batch_cap
        self.promises: Promises[tuple[Instance, int]] | None = None
        if promise_s > 0.0:
            self.promises = Promises(promise_s)
        self._fleet = fleet
        self._ledger = ledger
        self._index = index
        self._verdicts = verdicts
        self._policy = policy
        self._policies: dict[str, Policy] = {policy.name: policy}
        self._blind_s = blind_s
        self._blind_since_s: float | None = None
        self._tier_credit = tier_credit
        self._rotation = rng.randrange(1 << 30)

    def decide(self, request: RouteRequest, now_s: float) -> Decision | None:
        """Return where a request should go; None if no instance may get it.

        Changes nothing but the rotation among equal scores.
        """
        fleet = self._fleet
        count = len(fleet)
        if not count or not fleet.leaves_anybody(request.lora):
            return None
        policy, reason = self._policy_for(request, now_s)
        match, hits = self._hits(request)
        promised = None if self.promises is None else self._promised(request, hits)
        batch = self._ledger.batch[:count]
        queued = self._ledger.queued[:count]
        context = self._ledger.context[:count]
        barred = fleet.bars_anybody
        view = FleetView(
            batch,
            queued,
            context,
            undrained=fleet.undrained,
            healthy=fleet.healthy if barred else None,
            ready=fleet.ready if barred else None,
            allowed=fleet.allowed if barred else None,
            batch_cap=self.batch_cap,
            weight=self._ledger.weight[:count],
            backlog=self._ledger.backlog[:count],
        )
        known = added(hits, promised)
        asked = scoring.Request(
            request.prompt_tokens,
            known,
            capable=fleet.capable(request.lora),
            untried=fleet.untried(request.tried) if request.tried else None,
            cool=self._cool(request, hits),
            pinned=self._pinned(request) if request.pinned else None,
            alpha=request.alpha,
            beta=request.beta,
        )
        self._rotation += 1
        choice = scoring.decide(view, asked, policy, self._rotation)
        assert choice is not None
        if choice.ignored:
            reason = ";".join(filter(None, (reason, "ignored:" + "+".join(choice.ignored))))
        return Decision(
            request,
            fleet.rows,
            choice,
            match,
            hits,
            promised,
            batch.copy(),
            queued.copy(),
            context.copy() if policy.name in READS_CONTEXT else None,
            reason,
            fleet.at(choice.index).trust,
            0 if known is None else known.item(choice.index),
        )

    def _policy_for(self, request: RouteRequest, now_s: float) -> tuple[Policy, str]:
        """Return the policy to use, and why if it is not the configured one."""
        override = self._verdicts.policy(now_s)
        if override is not None:
            return self._named(override.policy), f"override:{override.by or 'operator'}"
        if request.by_load:
            return self._named("least_requests"), request.by_load
        if self._fleet.trusts[0]:
            self._blind_since_s = None
            return self._policy, ""
        if self._blind_since_s is None:
            self._blind_since_s = now_s
        if now_s - self._blind_since_s < self._blind_s:
            return self._named("least_requests"), "stale"
        return self._named("round_robin"), "blind"

    def _named(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies[name] = make_policy(name)
        return policy

    def _hits(self, request: RouteRequest) -> tuple[Match, IntArray | None]:
        """Return the match of a prompt, and (rows,) hit tokens by tier credit."""
        if not request.hashes:
            return NO_MATCH, None
        usable = usable_blocks(request.prompt_tokens, request.block_size)
        match = self._index.match(request.hashes, usable)
        if not match.levels:
            return match, None
        fleet = self._fleet
        hits = fleet.slot_rows(0).hits(match, request.block_size)
        for tier in range(1, fleet.tiers):
            more = np.maximum(fleet.slot_rows(tier).hits(match, request.block_size) - hits, 0)
            hits = hits + (more * self._tier_credit[tier]).astype(np.int64)
        return match, hits if fleet.trusts[1] else hits * fleet.trusted

    def _promised(self, request: RouteRequest, hits: IntArray | None) -> IntArray | None:
        """Return (rows,) tokens beyond the hits that are promised; None if nobody promises any."""
        assert self.promises is not None
        if not request.hashes:
            return None
        usable = usable_blocks(request.prompt_tokens, request.block_size)
        found = self.promises.find(request.hashes, min(usable, len(request.hashes)))
        promised: IntArray | None = None
        for (instance, life), depth in found.items():
            if instance.life != life:
                continue  # it lost its blocks since, and its row if it has departed
            row = instance.row
            more = depth * request.block_size - (0 if hits is None else int(hits[row]))
            if more > 0:
                if promised is None:
                    promised = np.zeros(len(self._fleet), np.int64)
                promised[row] = more
        return promised

    def may_retry(self, request: RouteRequest) -> bool:
        """Whether an instance is left that a request may go to and has not tried."""
        untried, undrained = self._fleet.untried(request.tried), self._fleet.undrained
        capable = self._fleet.capable(request.lora)
        for mask in (undrained, capable):
            if mask is not None:
                untried &= mask
        return bool(untried.any())

    def _cool(self, request: RouteRequest, hits: IntArray | None) -> BoolArray | None:
        """Return (rows,) who is not kept from this request's classes; None if nobody is.

        A verdict bars whoever holds the class now, so that the copy that a diverted request makes
        counts like any other, and only while the holders are too few for the class's share.
        """
        verdicts = self._verdicts.against(request.hashes)
        if not verdicts or hits is None:
            return None
        cool: BoolArray | None = None
        for verdict in verdicts:
            inside = holders_of(request, hits, verdict.depth_blocks)
            requests, total = verdict.share
            if not total or outgrows(requests, total, int(np.count_nonzero(inside)), len(inside)):
                cool = ~inside if cool is None else cool & ~inside
        return cool

    def _pinned(self, request: RouteRequest) -> BoolArray | None:
        """Return (rows,) the instance that a request is pinned to, alone; None if it has left."""
        instance = self._fleet.get(request.pinned)
        if instance is None:
            return None
        pinned: BoolArray = np.zeros(len(self._fleet), np.bool_)
        pinned[instance.row] = True
        return pinned

    def best_hit(self, request: RouteRequest, *, promises: bool = True) -> int:
        """Return the longest prefix of a prompt, in tokens, that any instance has or promises.

        Args:
            promises: count what is promised, too.
        """
        known = self._known(request, promises)
        return 0 if known is None else int(known.max())

    def hits(self, request: RouteRequest) -> Hits:
        """Return how much of a prompt which instances have or promise."""
        return hits_of(self._known(request, True), self._fleet.slots)

    def _known(self, request: RouteRequest, promises: bool) -> IntArray | None:
        """Return (rows,) tokens of a prompt that each instance has; None where nobody has any."""
        if not len(self._fleet):
            return None
        _, hits = self._hits(request)
        counted = promises and self.promises is not None
        return added(hits, self._promised(request, hits) if counted else None)
