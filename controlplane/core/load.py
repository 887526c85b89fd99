"""The load ledger: batch size and queued prefill tokens of every instance, as one router sees them.

Theory of operation. `batch_size` (requests assigned and unfinished) and `queued_prefill_tokens`
(prompt tokens not yet computed) of an instance are sums over four sources:

1. own bookings: made at the decision, released exactly once by `finish`;
2. peers' bookings: the other routers' `Routed`, `Prefilled` and `Finished` events add and subtract;
   each router's `RouterTotals`, a few times a second, replace what was summed, so that a lost event
   heals; a router that is silent for `lease_s` loses its contribution;
3. prefill progress: releases part of a booking's queued tokens before its end;
4. foreign load: what the engine itself counts beyond all routers' bookings. Engine counts lag, so
   they are compared with the largest known total of the last `foreign_window_s`, twice over.

Besides, `context_tokens`, the prompt tokens of unfinished requests, is summed from 1 and 2.

Sums are written into arrays by row, so that a decision reads them without a loop. Rows belong to
the fleet; bookings on an instance without a row are kept and written once it gets one, while an
engine's count is not: nobody can be sent there, and the next report is near.

Invariants (`check`): the arrays equal the recomputed sums; nothing is negative.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.bus import Finished, Prefilled, RouteBatch, Routed, RouterTotals


class LoadConfig(msgspec.Struct, frozen=True):
    """Limits of the ledger.

    Attributes:
        lease_s: silence after which a peer's bookings no longer count: eight totals missed. A
            router that restarts with its clock set back is believed again after as long.
        foreign_window_s: half of the time over which known load may explain an engine's count.
        peers_max: routers whose bookings are kept; further ones are counted and ignored.
    """

    lease_s: float = 2.0
    foreign_window_s: float = 1.0
    peers_max: int = 256


Sums = tuple[int, int, int]
"""Requests, queued prefill tokens and context tokens."""

_NONE: Sums = (0, 0, 0)

# What one router may claim of one instance: far beyond any truth, and so that no sum over routers
# overflows an array. A router that claims more is broken, and must not break this one.
_CLAIM_MAX: Sums = (1_000_000, 1_000_000_000_000, 1_000_000_000_000)


class Booking(msgspec.Struct):
    """One request's place on one instance; ended exactly once.

    Attributes:
        queued: prompt tokens still to be computed.
        context: prompt tokens in all.
    """

    request_id: str
    instance_id: str
    queued: int
    context: int
    booked_s: float
    ended: bool = False


class _Load:
    """The sums of one instance."""

    __slots__ = (
        "foreign",
        "known_max",
        "known_max_before",
        "own_batch",
        "own_context",
        "own_queued",
        "peer_batch",
        "peer_context",
        "peer_queued",
        "row",
        "window_s",
    )

    def __init__(self) -> None:
        self.row = -1
        self.own_batch = self.own_queued = self.own_context = 0
        self.peer_batch = self.peer_queued = self.peer_context = 0
        self.foreign = 0
        self.known_max = self.known_max_before = 0
        self.window_s = float("-inf")

    @property
    def known(self) -> int:
        return self.own_batch + self.peer_batch

    @property
    def idle(self) -> bool:
        return not (
            self.known
            or self.own_queued
            or self.own_context
            or self.peer_queued
            or self.peer_context
            or self.foreign
        )


class _Peer:
    """What one other router has booked."""

    __slots__ = ("bookings", "epoch", "heard_s", "seq")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seq = -1
        self.heard_s = 0.0
        self.bookings: dict[str, Sums] = {}


class Ledger:
    """Batch sizes and queued prefill tokens, by row.

    Attributes:
        batch: (rows,) int64, requests assigned and unfinished.
        queued: (rows,) int64, prompt tokens booked and not yet computed.
        context: (rows,) int64, prompt tokens of unfinished requests.
        weight: (rows,) float64, `batch` + 1: what scores are made of.
        backlog: (rows,) float64, `queued`, likewise.
        peer_gaps: messages of peers that were lost.
        peers_refused: messages of routers beyond `peers_max`.
    """

    def __init__(self, router_id: str, config: LoadConfig = LoadConfig()) -> None:  # noqa: B008
        self.router_id = router_id
        self.config = config
        self.batch: NDArray[np.int64] = np.zeros(16, np.int64)
        self.queued: NDArray[np.int64] = np.zeros(16, np.int64)
        self.context: NDArray[np.int64] = np.zeros(16, np.int64)
        self.weight: NDArray[np.float64] = np.ones(16)
        self.backlog: NDArray[np.float64] = np.zeros(16)
        self.peer_gaps = 0
        self.peers_refused = 0
        self._loads: dict[str, _Load] = {}
        self._peers: dict[str, _Peer] = {}

    # --- rows

    def assign_row(self, instance_id: str, row: int) -> None:
        """Let `row` show the load of an instance from now on."""
        if row >= len(self.batch):
            grow = max(row + 1, 2 * len(self.batch)) - len(self.batch)
            self.batch = np.pad(self.batch, (0, grow))
            self.queued = np.pad(self.queued, (0, grow))
            self.context = np.pad(self.context, (0, grow))
            self.weight = np.pad(self.weight, (0, grow), constant_values=1.0)
            self.backlog = np.pad(self.backlog, (0, grow))
        load = self._load(instance_id)
        if load.row >= 0:
            self._blank(load.row)
        load.row = row
        self._write(load)

    def drop_row(self, instance_id: str) -> None:
        """Forget which row an instance had; bookings on it stay until they end."""
        load = self._loads.get(instance_id)
        if load is None or load.row < 0:
            return
        self._blank(load.row)
        load.row = -1
        load.foreign = 0
        if load.idle:
            del self._loads[instance_id]

    # --- own bookings

    def book(
        self, request_id: str, instance_id: str, new_tokens: int, prompt_tokens: int, now_s: float
    ) -> Booking:
        """Count a request on an instance. O(1)."""
        load = self._load(instance_id)
        load.own_batch += 1
        load.own_queued += new_tokens
        load.own_context += prompt_tokens
        self._write(load)
        return Booking(request_id, instance_id, new_tokens, prompt_tokens, now_s)

    def prefilled(self, booking: Booking, left: int = 0) -> int:
        """Lower a booking's queued tokens to `left`; returns how many were released.

        Neither an ended booking nor one that has fewer left changes anything.
        """
        released = booking.queued - left
        if booking.ended or released <= 0:
            return 0
        booking.queued = left
        load = self._load(booking.instance_id)
        load.own_queued -= released
        self._write(load)
        return released

    def finish(self, booking: Booking) -> bool:
        """End a booking; False if it had ended already, so that every path may call this."""
        if booking.ended:
            return False
        booking.ended = True
        load = self._load(booking.instance_id)
        load.own_batch -= 1
        load.own_queued -= booking.queued
        load.own_context -= booking.context
        self._write(load)
        self._forget_if_idle(booking.instance_id, load)
        return True

    def own_totals(self) -> dict[str, Sums]:
        """Return this router's bookings for `RouterTotals`."""
        return {
            instance_id: (load.own_batch, load.own_queued, load.own_context)
            for instance_id, load in self._loads.items()
            if load.own_batch or load.own_queued
        }

    # --- peers

    def peer_message(self, message: RouteBatch, now_s: float) -> None:
        """Take in what another router did; this router's own messages are ignored."""
        if message.router_id == self.router_id:
            return
        peer = self._peers.get(message.router_id)
        if peer is None or message.epoch > peer.epoch:
            if peer is None and len(self._peers) >= self.config.peers_max:
                self.peers_refused += 1
                return
            self.drop_peer(message.router_id)
            peer = self._peers[message.router_id] = _Peer(message.epoch)
            peer.seq = message.seq - 1
        if message.epoch < peer.epoch or message.seq <= peer.seq:
            return
        self.peer_gaps += message.seq - peer.seq - 1
        peer.seq = message.seq
        peer.heard_s = now_s
        for event in message.events:
            if isinstance(event, Routed):
                more = (1, event.new_tokens, event.prompt_tokens or 0)
                self._peer_add(peer, event.instance_id, more)
            elif isinstance(event, Prefilled):
                self._peer_add(peer, event.instance_id, (0, -event.new_tokens, 0))
            elif isinstance(event, Finished):
                more = (-1, -event.released_tokens, -(event.prompt_tokens or 0))
                self._peer_add(peer, event.instance_id, more)
            elif isinstance(event, RouterTotals):
                self._peer_replace(peer, event)

    def expire_peers(self, now_s: float) -> list[str]:
        """Drop the bookings of routers that are silent for `lease_s`; returns their ids."""
        silent = [
            router_id
            for router_id, peer in self._peers.items()
            if now_s - peer.heard_s > self.config.lease_s
        ]
        for router_id in silent:
            self.drop_peer(router_id)
        return silent

    def excuse_peers(self, seconds: float, now_s: float) -> None:
        """Leave a time out of every router's silence: we could not have heard them."""
        for peer in self._peers.values():
            peer.heard_s = min(peer.heard_s + seconds, now_s)

    def drop_peer(self, router_id: str) -> None:
        """Drop the bookings of one router."""
        peer = self._peers.pop(router_id, None)
        if peer is not None:
            self._peer_replace(peer, RouterTotals())

    @property
    def peers(self) -> int:
        """Routers whose bookings count."""
        return len(self._peers)

    def _peer_add(self, peer: _Peer, instance_id: str, more: Sums) -> None:
        sums = peer.bookings.get(instance_id, _NONE)
        self._peer_set(peer, instance_id, (sums[0] + more[0], sums[1] + more[1], sums[2] + more[2]))

    def _peer_replace(self, peer: _Peer, totals: RouterTotals) -> None:
        for instance_id in {**peer.bookings, **totals.bookings}:
            self._peer_set(peer, instance_id, totals.bookings.get(instance_id, _NONE))

    def _peer_set(self, peer: _Peer, instance_id: str, claim: Sums) -> None:
        batch, queued, context = (
            min(max(value, 0), most) for value, most in zip(claim, _CLAIM_MAX, strict=True)
        )
        load = self._load(instance_id)
        before = peer.bookings.get(instance_id, _NONE)
        load.peer_batch += batch - before[0]
        load.peer_queued += queued - before[1]
        load.peer_context += context - before[2]
        if batch or queued or context:
            peer.bookings[instance_id] = (batch, queued, context)
        else:
            peer.bookings.pop(instance_id, None)
        self._write(load)
        self._forget_if_idle(instance_id, load)

    # --- the engine's own counts

    def engine_count(self, instance_id: str, requests: int, now_s: float) -> int:
        """Take the engine's running + waiting; returns the foreign load that follows from it."""
        load = self._loads.get(instance_id)
        if load is None or load.row < 0:
            return 0
        if now_s - load.window_s >= self.config.foreign_window_s:
            load.known_max_before, load.known_max = load.known_max, load.known
            load.window_s = now_s
        requests = min(requests, _CLAIM_MAX[0])
        load.foreign = max(0, requests - max(load.known_max, load.known_max_before))
        self._write(load)
        return load.foreign

    def forget_engine(self, instance_id: str) -> None:
        """Drop foreign load that nobody vouches for any more (the reports went silent)."""
        load = self._loads.get(instance_id)
        if load is not None and load.foreign:
            load.foreign = 0
            self._write(load)

    # --- inside

    def of(self, instance_id: str) -> dict[str, int]:
        """Return the sums of one instance by source, for `explain` and metrics."""
        load = self._loads.get(instance_id) or _Load()
        return {
            "own_batch": load.own_batch,
            "own_queued": load.own_queued,
            "peer_batch": load.peer_batch,
            "peer_queued": load.peer_queued,
            "foreign": load.foreign,
        }

    def _load(self, instance_id: str) -> _Load:
        load = self._loads.get(instance_id)
        if load is None:
            load = self._loads[instance_id] = _Load()
        return load

    def _forget_if_idle(self, instance_id: str, load: _Load) -> None:
        if load.row < 0 and load.idle:
            self._loads.pop(instance_id, None)

    def _write(self, load: _Load) -> None:
        known = load.own_batch + load.peer_batch
        if known > load.known_max:
            load.known_max = known
        if load.row >= 0:
            batch = known + load.foreign
            self.batch[load.row] = batch
            self.weight[load.row] = batch + 1
            queued = load.own_queued + load.peer_queued
            self.queued[load.row] = self.backlog[load.row] = queued
            self.context[load.row] = load.own_context + load.peer_context

    def _blank(self, row: int) -> None:
        self.batch[row] = self.queued[row] = self.context[row] = 0
        self.weight[row], self.backlog[row] = 1.0, 0.0

    def check(self, bookings: list[Booking]) -> None:
        """Assert that the sums equal their recomputation from the live bookings and peers."""
        own: dict[str, list[int]] = {}
        for booking in bookings:
            _add(own, booking.instance_id, (1, booking.queued, booking.context))
        peers: dict[str, list[int]] = {}
        for peer in self._peers.values():
            for instance_id, sums in peer.bookings.items():
                _add(peers, instance_id, sums)
        nothing = [0, 0, 0]
        for instance_id in {*own, *peers, *self._loads}:
            load = self._loads.get(instance_id) or _Load()
            mine = [load.own_batch, load.own_queued, load.own_context]
            theirs = [load.peer_batch, load.peer_queued, load.peer_context]
            assert mine == own.get(instance_id, nothing), instance_id
            assert theirs == peers.get(instance_id, nothing), instance_id
            if load.row >= 0:
                assert self.batch[load.row] == load.known + load.foreign
                assert self.queued[load.row] == load.own_queued + load.peer_queued
                assert self.context[load.row] == load.own_context + load.peer_context
            else:
                assert not load.foreign, instance_id
                assert instance_id not in self._loads or not load.idle, instance_id
            assert min(mine + theirs) >= 0 <= load.foreign, instance_id
        rows = [load.row for load in self._loads.values() if load.row >= 0]
        assert len(rows) == len(set(rows)), "two instances share a row"
        for column in (self.batch, self.queued, self.context):
            assert column.sum() == column[rows].sum(), "a row without an instance shows load"
        assert (self.weight == self.batch + 1).all()
        assert (self.backlog == self.queued).all()


def _add(sums: dict[str, list[int]], instance_id: str, more: Sums) -> None:
    total = sums.setdefault(instance_id, [0, 0, 0])
    for position, value in enumerate(more):
        total[position] += value
