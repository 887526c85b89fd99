"""The request path: what is booked from the decision (`controlplane.core.decider`) to the end.

    decide ──> Decision ──book──> Ticket ──first_byte──> ──finish──> ended
                                    └─ finish may come at any point, on every path; it counts once

A ticket's queued prefill tokens are released at the answer's first byte, as the prompt's blocks
appear in the instance's block stream (`progress`: what an answer that is not streamed needs), or
at the end, whichever comes first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import msgspec

from controlplane.core.columns import ColumnTeller
from controlplane.core.decider import Decider
from controlplane.core.decision import Decision as Decision
from controlplane.core.decision import RouteRequest as RouteRequest
from controlplane.core.fleet import Fleet, Instance
from controlplane.core.index import PrefixIndex
from controlplane.core.load import Booking, Ledger
from controlplane.core.outbox import Outbox
from controlplane.core.scoring import Policy
from controlplane.core.verdicts import Verdicts
from schemas.bus import CandidateColumns, Finished, Prefilled, Routed, RouterTotals

PROGRESS_TOKENS_MIN = 2048
"""Partial prefill progress is told to the other routers in steps of at least this many tokens."""


class Ticket(msgspec.Struct):
    """A request that is on its way: what must be given back when it ends.

    Attributes:
        depth: how many of the prompt's blocks are known to be computed.
        untold: released tokens that the other routers were not told of yet.
        promise: number of the promise that its blocks will be there; 0 for none.
    """

    decision: Decision
    booking: Booking
    attempt: int
    depth: int
    untold: int = 0
    promise: int = 0


class Dispatcher(Decider):
    """Decides on requests and keeps their bookings, for one model.

    Attributes:
        counts: how often each thing happened: decisions by policy, filters ignored, reasons.
        tickets: requests that are on their way, by booking.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        ledger: Ledger,
        index: PrefixIndex,
        verdicts: Verdicts,
        outbox: Outbox,
        policy: Policy,
        batch_cap: int | None,
        blind_s: float,
        tier_credit: Sequence[float],
        audit_candidates: float,
        rows_every_s: float = 5.0,
        promise_s: float,
        rng: random.Random,
    ) -> None:
        super().__init__(
            fleet=fleet,
            ledger=ledger,
            index=index,
            verdicts=verdicts,
            policy=policy,
            batch_cap=batch_cap,
            blind_s=blind_s,
            tier_credit=tier_credit,
            promise_s=promise_s,
            rng=rng,
        )
        self.counts: Counter[str] = Counter()
        self.tickets: dict[int, Ticket] = {}
        self._untold: dict[int, Ticket] = {}  # those of `tickets` whose `untold` is not 0
        self._outbox = outbox
        self._audit_candidates = audit_candidates
        self._teller = ColumnTeller(fleet, policy, tier_credit, rows_every_s)
        self._rng = rng

    def book(
        self,
        decision: Decision,
        now_s: float,
        now_wall_s: float,
        *,
        attempt: int = 0,
        decide_s: float = 0.0,
        tokenize_s: float = 0.0,
        queue_s: float = 0.0,
    ) -> Ticket:
        """Count a request on the instance that was chosen, and tell the others."""
        request, choice, instance = decision.request, decision.choice, decision.instance
        instance_id, hit = instance.record.instance_id, decision.hit
        new = max(request.prompt_tokens - hit, 1)
        booking = self._ledger.book(
            request.request_id, instance_id, new, request.prompt_tokens, now_s
        )
        depth = hit // request.block_size if request.block_size else 0
        ticket = Ticket(decision, booking, attempt, depth)
        self.tickets[id(booking)] = ticket
        if request.hashes:
            instance.awaiting[id(booking)] = ticket
            if self.promises is not None:
                owner = (instance, instance.life)
                ticket.promise = self.promises.add(owner, request.hashes, now_s)
        self.counts[f"policy:{choice.policy}"] += 1
        for name in choice.ignored:
            self.counts[f"ignored:{name}"] += 1
        candidates = self._candidates(decision, now_s) if self._audited() else None
        self._outbox.add(
            Routed(
                request.request_id,
                instance_id,
                now_wall_s,
                attempt=attempt,
                prompt_tokens=request.prompt_tokens,
                exact=request.exact,
                hit_tokens=hit,
                new_tokens=new,
                batch_size=int(decision.batch_size[choice.index]),
                queued_tokens=int(decision.queued_tokens[choice.index]),
                score=choice.score,
                policy=choice.policy,
                reason=decision.reason,
                trust=decision.trust,
                kv_seq=instance.follower.position,
                tenant=request.tenant,
                fleet=len(decision.rows),
                classes=decision.classes(),
                decide_s=decide_s,
                tokenize_s=tokenize_s,
                queue_s=queue_s,
                block_size=request.block_size,
                prompt_key=request.hashes[-1] if request.hashes else None,
                alpha=request.alpha,
                beta=request.beta,
                candidates=candidates,
                head=request.head,
            )
        )
        return ticket

    def _audited(self) -> bool:
        share = self._audit_candidates
        return share >= 1.0 or (share > 0.0 and self._rng.random() < share)

    def _candidates(self, decision: Decision, now_s: float) -> CandidateColumns | None:
        """Return what a decision saw, as it is told."""
        if self._teller.due(now_s):
            self._outbox.add(self._teller.rows(self.batch_cap, now_s))
        return self._teller.columns(decision)

    def first_byte(self, ticket: Ticket, ttft_s: float) -> None:
        """Release a ticket's queued tokens: its prompt is computed."""
        self._release(ticket, 0, ttft_s)

    def progress(self, instance: Instance, tickets_max: int = 32) -> None:
        """Release queued tokens whose blocks have appeared in an instance's block stream.

        Args:
            tickets_max: how many are looked at; with more than that they take turns.

        Complexity: a look-up or two a ticket whose prefill has not begun, a bisection otherwise.
        """
        slot = instance.slots.get(0)
        if slot is None:
            return
        awaiting = instance.awaiting
        turns = len(awaiting) > tickets_max
        for key in list(islice(awaiting, tickets_max)):
            ticket = awaiting[key]
            if turns:
                awaiting[key] = awaiting.pop(key)
            request = ticket.decision.request
            depth = self._computed(slot, request.hashes, ticket.depth)
            if depth == ticket.depth:
                continue
            ticket.depth = depth
            whole = depth == len(request.hashes)
            if whole:
                self._end_promise(ticket)
            left = 0 if whole else request.prompt_tokens - depth * request.block_size
            self._release(ticket, min(left, ticket.booking.queued), None)

    def _computed(self, slot: int, hashes: Sequence[int], depth: int) -> int:
        """Return how many of a prompt's blocks a slot holds, given that it holds `depth`."""
        holds = self._index.holds
        if depth >= len(hashes) or not holds(slot, hashes[depth]):
            return depth
        low, high = depth + 1, len(hashes)
        if holds(slot, hashes[high - 1]):
            return high
        while high - low > 1:
            middle = (low + high) >> 1
            if holds(slot, hashes[middle - 1]):
                low = middle
            else:
                high = middle
        return low

    def _release(self, ticket: Ticket, left: int, ttft_s: float | None) -> None:
        booking = ticket.booking
        ticket.untold += self._ledger.prefilled(booking, left)
        if left == 0:
            ticket.decision.instance.awaiting.pop(id(booking), None)
        if ticket.untold >= PROGRESS_TOKENS_MIN or (left == 0 and ticket.untold):
            self._outbox.add(
                Prefilled(booking.request_id, booking.instance_id, ticket.untold, ttft_s)
            )
            ticket.untold = 0
            self._untold.pop(id(booking), None)
        elif ticket.untold:
            self._untold[id(booking)] = ticket

    def _end_promise(self, ticket: Ticket) -> None:
        if self.promises is not None:
            self.promises.drop(ticket.promise)

    def expire(self, now_s: float) -> None:
        """End promises that are too old."""
        if self.promises is not None:
            self.promises.expire(now_s)

    def tell_totals(self) -> None:
        """Tell the others all that is booked; progress that they were not told of is in it."""
        for ticket in self._untold.values():
            ticket.untold = 0
        self._untold.clear()
        self._outbox.add(RouterTotals(self._ledger.own_totals()))

    def finish(
        self,
        ticket: Ticket,
        outcome: str,
        status: int,
        now_s: float,
        now_wall_s: float,
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        output_estimated: bool = False,
        streamed: bool = False,
        ttft_s: float | None = None,
        started_s: float | None = None,
    ) -> bool:
        """End a ticket and tell the others; False if it had ended already.

        Args:
            outcome: ok, client_gone, upstream_error, timeout or retried.
            status: HTTP status that the client got, or that the attempt ended with; 0 if none.
            cached_tokens: prompt tokens that the engine says it had cached.
            output_estimated: that `output_tokens` are counted by a stream's events.
            streamed: that the answer came as one.
            ttft_s: from `started_s` on.
            started_s: when the request came; with the booking, unless it is given.
        """
        booking, decision = ticket.booking, ticket.decision
        if not self._ledger.finish(booking):
            return False
        del self.tickets[id(booking)]
        self._untold.pop(id(booking), None)
        if outcome == "ok":
            decision.instance.answered_s = now_s
        if booking.queued and outcome != "ok":
            self._end_promise(ticket)
        decision.instance.awaiting.pop(id(booking), None)
        self.counts[f"outcome:{outcome}"] += 1
        self._outbox.add(
            Finished(
                booking.request_id,
                booking.instance_id,
                outcome,
                status,
                now_wall_s,
                released_tokens=booking.queued + ticket.untold,
                prompt_tokens=decision.request.prompt_tokens,
                hit_tokens=decision.hit,
                cached_tokens=cached_tokens,
                output_tokens=output_tokens,
                ttft_s=ttft_s,
                duration_s=now_s - booking.booked_s,
                tenant=decision.request.tenant,
                output_estimated=output_estimated,
                before_s=0.0 if started_s is None else max(booking.booked_s - started_s, 0.0),
                streamed=streamed,
            )
        )
        return True
