"""The admission queue, the slow and obvious way: a list, sorted whenever something is wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from controlplane.core.queue_lines import QueueConfig, Waiting


class NaiveQueue:
    """What `AdmissionQueue` promises, for requests whose keys it shares with the real one."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.waiting: list[Waiting] = []
        self.turns: dict[tuple[str, Hashable], int] = {}
        self.ring: list[str] = []
        self.deficits: dict[str, float] = {}
        self.in_turn: set[str] = set()

    def add(self, newcomer: Waiting) -> Waiting | None:
        """Lets one wait; returns who has no place."""
        size = sum(each.size_bytes for each in self.waiting)
        if size + newcomer.size_bytes > self.config.bytes_max:
            return newcomer
        displaced = None
        if len(self.waiting) >= self.config.requests_max:
            loads = {each.tenant: self._load(each) for each in self.waiting}
            most = max(self.ring, key=lambda name: loads[name])
            own = sum(each.tenant == newcomer.tenant for each in self.waiting)
            if most == newcomer.tenant or loads[most] <= (own + 1) / newcomer.weight:
                return newcomer
            displaced = max(
                (each for each in self.waiting if each.tenant == most), key=lambda w: w.number
            )
            self.cancel(displaced)
        self.waiting.append(newcomer)
        if newcomer.tenant not in self.ring:
            self.ring.append(newcomer.tenant)
            self.deficits[newcomer.tenant] = 0.0
        return displaced

    def _load(self, one: Waiting) -> float:
        return sum(each.tenant == one.tenant for each in self.waiting) / one.weight

    def cancel(self, waiting: Waiting) -> None:
        """Takes one out."""
        self.waiting.remove(waiting)
        self._forget(waiting)

    def _forget(self, gone: Waiting) -> None:
        if not any(each.tenant == gone.tenant for each in self.waiting):
            self.ring.remove(gone.tenant)
            del self.deficits[gone.tenant]
            self.in_turn.discard(gone.tenant)
        if not any((each.tenant, each.lane) == (gone.tenant, gone.lane) for each in self.waiting):
            self.turns.pop((gone.tenant, gone.lane), None)

    def choose(self, tenant: str, lane: Hashable) -> Waiting:
        """Returns whose turn it is in one line."""
        line = [each for each in self.waiting if (each.tenant, each.lane) == (tenant, lane)]
        first = self.turns.get((tenant, lane), 0) % self.config.k == 0
        order = self.config.order
        urgent = sorted(line, key=lambda w: (w.start_by_s, w.number))
        if order == "edf" or (order == "edf+klpm" and first):
            return urgent[0]
        if order == "fcfs" or first:
            return min(line, key=lambda w: w.number)
        if order == "klpm":
            return min(line, key=lambda w: (-w.affinity_tokens, w.number))
        limit_s = urgent[0].start_by_s + self.config.band_s
        near = [w for w in urgent[: self.config.band_requests_max] if w.start_by_s <= limit_s]
        return max(near, key=lambda w: w.affinity_tokens)

    def take(self, is_open: Callable[[Hashable], bool]) -> Waiting | None:
        """Takes out whose turn it is, letting rounds pass one at a time."""
        able: list[tuple[str, Waiting]] = []
        for tenant in self.ring:
            lanes = {each.lane for each in self.waiting if each.tenant == tenant}
            heads = [self.choose(tenant, lane) for lane in lanes if is_open(lane)]
            if heads:
                able.append((tenant, min(heads, key=lambda w: (w.start_by_s, w.number))))
        if not able:
            return None
        chosen = able[0][1] if len(self.ring) == 1 else self._in_rounds(able)
        self.waiting.remove(chosen)
        line = (chosen.tenant, chosen.lane)
        self.turns[line] = self.turns.get(line, 0) + 1
        self._forget(chosen)
        return chosen

    def _in_rounds(self, able: list[tuple[str, Waiting]]) -> Waiting:
        while True:
            for tenant, waiting in able:
                if tenant not in self.in_turn:
                    self.in_turn.add(tenant)
                    self.deficits[tenant] += self.config.quantum_tokens * waiting.weight
                if self.deficits[tenant] >= waiting.cost_tokens:
                    at = self.ring.index(tenant)
                    self.ring = self.ring[at:] + self.ring[:at]
                    self.deficits[tenant] -= waiting.cost_tokens
                    return waiting
                self.in_turn.discard(tenant)
