"""Letting instances compute a prefix before anybody needs it."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from controlplane.core.decision import RouteRequest
from controlplane.core.dispatch import Ticket
from controlplane.core.hashing import BlockHash
from controlplane.core.plane import Plane
from controlplane.core.scoring import BoolArray
from router.directory import ServedModel
from router.http_head import ResponseHead
from router.upstream import UpstreamPool
from router.upstream_connection import ErrorKind


class Warming(msgspec.Struct, frozen=True):
    """What is to be computed: a request for one token after the prefix."""

    served: ServedModel
    request: RouteRequest
    path: str
    body: bytes


class Warmer:
    """Sends such requests; they are booked like all others.

    Attributes:
        counts: how they ended.
    """

    def __init__(self, pool: UpstreamPool, request_lines: bytes) -> None:
        self.counts: Counter[str] = Counter()
        self._under_way: set[tuple[ServedModel, str, str]] = set()  # model, prefix, instance
        self._pool = pool
        self._lines = request_lines

    def holders(self, served: ServedModel, key: BlockHash) -> list[str]:
        """Return the instances that hold a whole prefix.

        Args:
            key: of its last whole block.
        """
        index = served.plane.index
        return sorted(
            instance.record.instance_id
            for instance in served.plane.fleet
            if 0 in instance.slots and index.holds(instance.slots[0], key)
        )

    def top_up(self, work: Warming, instances: int) -> int:
        """Let as many instances compute a prefix as are missing for so many to have it.

        Returns:
            How many there were for it.
        """
        return self.warm(work, max(instances - len(self._having(work)), 0))

    def _having(self, work: Warming) -> set[str]:
        """Return the instances that hold a prefix, or compute it because of this router."""
        served, request = work.served, work.request
        having = set(self.holders(served, request.hashes[-1]))
        for of_model, prefix, instance_id in self._under_way:
            if of_model is served and prefix == request.request_id:
                having.add(instance_id)
        return having

    def warm(self, work: Warming, instances: int) -> int:
        """Let so many more instances compute a prefix, those with the smallest batches first.

        Only those that a decision would not rule out: it would send the request to another one.

        Returns:
            How many there were for it.
        """
        plane = work.served.plane
        having = self._having(work)
        able = _able(plane, work.request.lora)
        free = [each for each in plane.fleet if able[each.row]]
        free = [each for each in free if each.record.instance_id not in having]
        free.sort(key=lambda each: int(plane.ledger.batch[each.row]))
        for instance in free[:instances]:
            self._send(work, instance.record.instance_id)
        return len(free[:instances])

    def _send(self, work: Warming, instance_id: str) -> None:
        requests, now_s = work.served.plane.requests, time.monotonic()
        request = msgspec.structs.replace(work.request, pinned=instance_id)
        decision = requests.decide(request, now_s)
        assert decision is not None, "there is a fleet: it has this instance"
        ticket = requests.book(decision, now_s, time.time())
        head = b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n" % (
            work.path.encode(),
            self._lines,
            len(work.body),
        )
        instance_id = decision.instance.record.instance_id
        self._under_way.add((work.served, request.request_id, instance_id))
        key = (work.served.model, instance_id)
        self._pool.send(key, head, work.body, _Sink(self, work, ticket))

    def ended(self, work: Warming, instance_id: str, outcome: str) -> None:
        """Note that an instance computes a prefix no more."""
        self.counts[outcome] += 1
        self._under_way.discard((work.served, work.request.request_id, instance_id))


def _able(plane: Plane, lora: str | None) -> BoolArray:
    """Return (rows,) the instances that would get a request; full ones only if all are."""
    fleet = plane.fleet
    able: BoolArray = fleet.ready & fleet.healthy & fleet.allowed
    capable = fleet.capable(lora)
    if capable is not None:
        able = able & capable
    cap = plane.config.batch_cap
    if cap is not None:
        below = able & (plane.ledger.batch[: len(fleet)] < cap)
        able = below if below.any() else able
    return able


class _Sink:
    """Takes the answer, of which only its end matters."""

    def __init__(self, warmer: Warmer, work: Warming, ticket: Ticket) -> None:
        self._warmer = warmer
        self._work = work
        self._ticket = ticket
        self._status = 0

    def on_response_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_data(self, data: bytes) -> None:
        """Ignore it."""

    def on_end(self) -> None:
        self._finish("ok" if self._status < 400 else "upstream_error")

    def on_error(self, kind: ErrorKind) -> None:
        self._finish("upstream_error")

    def _finish(self, outcome: str) -> None:
        instance_id = self._ticket.decision.instance.record.instance_id
        self._warmer.ended(self._work, instance_id, outcome)
        self._work.served.plane.requests.finish(
            self._ticket, outcome, self._status, time.monotonic(), time.time()
        )
