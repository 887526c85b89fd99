"""The load ledger, the slow and obvious way: everything is kept, every answer is counted afresh."""

from __future__ import annotations

from schemas.bus import Finished, Prefilled, RouteBatch, RouteEvent, RouterTotals

Sums = tuple[int, int, int]
NONE: Sums = (0, 0, 0)


class NaiveBooking:
    """One request of this router."""

    def __init__(self, instance_id: str, queued: int, context: int) -> None:
        self.instance_id = instance_id
        self.queued = queued
        self.context = context
        self.ended = False


class NaivePeer:
    """All that one other router was heard to say, as far as it counts."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seq = -1
        self.heard_s = 0.0
        self.events: list[RouteEvent] = []

    def sums(self, instance_id: str) -> Sums:
        """Returns what the events add up to for an instance, never below zero."""
        batch, queued, context = NONE
        for event in self.events:
            if isinstance(event, RouterTotals):
                batch, queued, context = event.bookings.get(instance_id, NONE)
            elif event.instance_id != instance_id:
                continue
            elif isinstance(event, Prefilled):
                queued = max(queued - event.new_tokens, 0)
            elif isinstance(event, Finished):
                batch = max(batch - 1, 0)
                queued = max(queued - event.released_tokens, 0)
                context = max(context - (event.prompt_tokens or 0), 0)
            else:
                batch += 1
                queued += event.new_tokens
                context += event.prompt_tokens or 0
        return batch, queued, context


class NaiveLedger:
    """What `Ledger` promises, recomputed from all that ever happened."""

    def __init__(self, lease_s: float, window_s: float, peers_max: int) -> None:
        self.lease_s = lease_s
        self.window_s = window_s
        self.peers_max = peers_max
        self.bookings: list[NaiveBooking] = []
        self.peers: dict[str, NaivePeer] = {}
        self.rows: dict[str, int] = {}
        self.foreign: dict[str, int] = {}
        self.known_log: dict[str, list[int]] = {}
        self.windows: dict[str, list[tuple[float, int]]] = {}

    # --- answers

    def own(self, instance_id: str) -> Sums:
        """Returns the sums of this router's bookings."""
        live = [b for b in self.bookings if b.instance_id == instance_id and not b.ended]
        return len(live), sum(b.queued for b in live), sum(b.context for b in live)

    def theirs(self, instance_id: str) -> Sums:
        """Returns the sums over the other routers."""
        each = [peer.sums(instance_id) for peer in self.peers.values()]
        return sum(s[0] for s in each), sum(s[1] for s in each), sum(s[2] for s in each)

    def column(self, instance_id: str) -> Sums:
        """Returns what the row of an instance has to show."""
        own, theirs = self.own(instance_id), self.theirs(instance_id)
        foreign = self.foreign.get(instance_id, 0)
        return own[0] + theirs[0] + foreign, own[1] + theirs[1], own[2] + theirs[2]

    # --- inputs

    def assign_row(self, instance_id: str, row: int) -> None:
        """Shows an instance in a row."""
        self.rows[instance_id] = row
        self.note_known()

    def drop_row(self, instance_id: str) -> None:
        """Shows an instance no longer, and forgets what its engine counted."""
        self.rows.pop(instance_id, None)
        self.foreign.pop(instance_id, None)
        self.note_known()

    def book(self, instance_id: str, queued: int, context: int) -> NaiveBooking:
        """Counts a request."""
        booking = NaiveBooking(instance_id, queued, context)
        self.bookings.append(booking)
        self.note_known()
        return booking

    def prefilled(self, booking: NaiveBooking, left: int) -> int:
        """Lowers what is queued; returns by how much."""
        before = booking.queued
        booking.queued = before if booking.ended else min(before, left)
        return before - booking.queued

    def finish(self, booking: NaiveBooking) -> bool:
        """Ends a request, once."""
        ended_before, booking.ended = booking.ended, True
        self.note_known()
        return not ended_before

    def peer_message(self, message: RouteBatch, now_s: float) -> None:
        """Takes a message unless it is refused, old or repeated."""
        peer = self.peers.get(message.router_id)
        if peer is None and len(self.peers) == self.peers_max:
            return
        if peer is None or message.epoch > peer.epoch:
            peer = self.peers[message.router_id] = NaivePeer(message.epoch)
            self.note_known()
        if message.epoch == peer.epoch and message.seq > peer.seq:
            peer.seq, peer.heard_s = message.seq, now_s
            for event in message.events:
                peer.events.append(event)
                self.note_known()

    def expire_peers(self, now_s: float) -> list[str]:
        """Forgets the routers that have been silent for longer than the lease."""
        silent = [name for name, peer in self.peers.items() if now_s - peer.heard_s > self.lease_s]
        for name in silent:
            del self.peers[name]
        self.note_known()
        return silent

    def engine_count(self, instance_id: str, requests: int, now_s: float) -> None:
        """Takes the engine's count: what no booking of the last two windows explains is foreign."""
        if instance_id not in self.rows:
            return
        log, windows = self.known_log[instance_id], self.windows[instance_id]
        if now_s - windows[-1][0] >= self.window_s:
            windows.append((now_s, len(log) - 1))
        start = windows[max(len(windows) - 2, 0)][1]
        self.foreign[instance_id] = max(0, requests - max(log[start:]))

    # --- bookkeeping of what the engine may still be counting

    def note_known(self) -> None:
        """Records how many requests are known on each instance; call after each single change."""
        named = {b.instance_id for b in self.bookings} | set(self.rows) | set(self.known_log)
        for peer in self.peers.values():
            for event in peer.events:
                named |= (
                    set(event.bookings) if isinstance(event, RouterTotals) else {event.instance_id}
                )
        for instance_id in named:
            idle = not any(self.column(instance_id))
            if idle and instance_id not in self.rows:
                self.known_log.pop(instance_id, None)
                self.windows.pop(instance_id, None)
                continue
            log = self.known_log.setdefault(instance_id, [0])
            self.windows.setdefault(instance_id, [(float("-inf"), 0)])
            log.append(self.own(instance_id)[0] + self.theirs(instance_id)[0])
