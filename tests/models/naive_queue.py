"""The admission queue, the slow and obvious way: a list, sorted whenever something is wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from controlplane.core.openings import Openings
from controlplane.core.queue_lines import BAND_SHARE, HELD_MAX, LONGEST_MAX, QueueConfig, Waiting


def found(one: Waiting, mask: int) -> int:
    """Returns how much of its prompt a request finds on the best of some instances."""
    return max((tokens for tokens, holders in one.levels if holders & mask), default=0)


class NaiveQueue:
    """What `AdmissionQueue` promises, for requests whose keys it shares with the real one."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.waiting: list[Waiting] = []
        self.returned: list[Waiting] = []
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
            if not self.ring:
                return newcomer
            loads = {each.tenant: self._load(each) for each in self.lined}
            most = max(self.ring, key=lambda name: loads[name])
            own = sum(each.tenant == newcomer.tenant for each in self.lined)
            if most == newcomer.tenant or loads[most] <= (own + 1) / newcomer.weight:
                return newcomer
            displaced = max(
                (each for each in self.lined if each.tenant == most), key=lambda w: w.number
            )
            self.cancel(displaced)
        self.waiting.append(newcomer)
        if newcomer.tenant not in self.ring:
            self.ring.append(newcomer.tenant)
            self.deficits[newcomer.tenant] = 0.0
        return displaced

    def take_back(self, one: Waiting) -> None:
        """Lets one wait before all others."""
        self.waiting.append(one)
        self.returned.append(one)

    @property
    def lined(self) -> list[Waiting]:
        """Those that wait for their turn."""
        return [each for each in self.waiting if each not in self.returned]

    def _load(self, one: Waiting) -> float:
        return sum(each.tenant == one.tenant for each in self.lined) / one.weight

    def cancel(self, waiting: Waiting) -> None:
        """Takes one out."""
        self.waiting.remove(waiting)
        self._forget(waiting)

    def _forget(self, gone: Waiting) -> None:
        if gone in self.returned:
            self.returned.remove(gone)
            return
        if not any(each.tenant == gone.tenant for each in self.lined):
            self.ring.remove(gone.tenant)
            del self.deficits[gone.tenant]
            self.in_turn.discard(gone.tenant)
        if not any((each.tenant, each.lane) == (gone.tenant, gone.lane) for each in self.lined):
            self.turns.pop((gone.tenant, gone.lane), None)

    def choose(
        self, tenant: str, lane: Hashable, openings: Openings, now_s: float
    ) -> Waiting | None:
        """Returns whose turn it is in one line; None if those that count are held."""
        line = [each for each in self.lined if (each.tenant, each.lane) == (tenant, lane)]
        first = self.turns.get((tenant, lane), 0) % self.config.k == 0
        order = self.config.order
        ordered = sorted(line, key=lambda w: (w.start_by_s if "edf" in order else 0, w.number))
        if "klpm" in order and not first:
            chosen = self._longest(ordered, openings, now_s)
            if chosen is not None:
                return chosen
        if not self.config.holds:
            return ordered[0]
        ahead: list[int] = []
        for one in ordered[:HELD_MAX]:
            if not self._is_held(one, openings, ahead, now_s):
                return one
            one.held_s = min(one.held_s, now_s)
        return None

    def _longest(self, ordered: list[Waiting], openings: Openings, now_s: float) -> Waiting | None:
        """Returns who finds most where there is room, looking at one after the other."""
        ahead: list[int] = []
        if self.config.order == "klpm":
            by_hit = sorted(ordered, key=lambda w: (-found(w, openings.open), w.number))
            hitting = [w for w in by_hit if found(w, openings.open)]
            able = (
                w for w in hitting[:LONGEST_MAX] if not self._is_held(w, openings, ahead, now_s)
            )
            return next(able, None)
        most_s = ordered[0].start_by_s
        limit_s = most_s + max(self.config.band_s, BAND_SHARE * (most_s - now_s))
        best = None
        for one in ordered[: self.config.band_requests_max]:
            if one.start_by_s > limit_s:
                break
            better = best is None or found(one, openings.open) > found(best, openings.open)
            if better and not self._is_held(one, openings, ahead, now_s):
                best = one
        return best

    def _is_held(self, one: Waiting, openings: Openings, ahead: list[int], now_s: float) -> bool:
        """Whether it waits for a full instance; `ahead` lists what those before it wait for."""
        here = found(one, openings.open)
        for tokens, mask in one.hits:
            full = [bit for bit in range(8) if (mask & openings.full) >> bit & 1]
            if tokens <= here or not full:
                continue
            worth_s = (tokens - here) * openings.token_s
            wanted = mask & openings.full
            if (ahead.count(wanted) + 1) * openings.place_s < worth_s * len(full):
                ahead.append(wanted)
                for_s = min(worth_s, self.config.hold_s_max)
                return now_s + for_s < one.start_by_s and now_s - one.held_s < for_s
        return False

    def take(self, room: Callable[[Hashable], Openings | None], now_s: float) -> Waiting | None:
        """Takes out whose turn it is, letting rounds pass one at a time."""
        for one in self.returned:
            if room(one.lane) is not None:
                self.cancel(one)
                return one
        if len(self.ring) == 1:
            one = self._chosen(self.ring[0], room, now_s)
        else:
            one = self._in_rounds(room, now_s)
        if one is None:
            return None
        self.waiting.remove(one)
        line = (one.tenant, one.lane)
        self.turns[line] = self.turns.get(line, 0) + 1
        self._forget(one)
        return one

    def _chosen(
        self, tenant: str, room: Callable[[Hashable], Openings | None], now_s: float
    ) -> Waiting | None:
        """Returns whose turn it is of one tenant."""
        lanes = {each.lane for each in self.lined if each.tenant == tenant}
        opened = [(lane, openings) for lane in lanes if (openings := room(lane)) is not None]
        chosen = [self.choose(tenant, lane, openings, now_s) for lane, openings in opened]
        able = [each for each in chosen if each is not None]
        return min(able, key=lambda w: (w.start_by_s, w.number), default=None)

    def _head(self, tenant: str, room: Callable[[Hashable], Openings | None]) -> Waiting | None:
        """Returns the first of one tenant, in the order of its lines without hits."""
        open_ones = [w for w in self.lined if w.tenant == tenant and room(w.lane) is not None]
        heads = {}
        for one in sorted(open_ones, key=lambda w: w.number):
            known = heads.setdefault(one.lane, one)
            if "edf" in self.config.order and one.start_by_s < known.start_by_s:
                heads[one.lane] = one
        return min(heads.values(), key=lambda w: (w.start_by_s, w.number), default=None)

    def _in_rounds(
        self, room: Callable[[Hashable], Openings | None], now_s: float
    ) -> Waiting | None:
        heads = {tenant: self._head(tenant, room) for tenant in self.ring}
        able = {tenant: head for tenant, head in heads.items() if head is not None}
        while able:
            for tenant, head in list(able.items()):
                credit = self.deficits[tenant]
                if tenant not in self.in_turn:
                    credit += self.config.quantum_tokens * head.weight
                if credit < head.cost_tokens:
                    self.deficits[tenant] = credit
                    self.in_turn.discard(tenant)
                    continue
                waiting = self._chosen(tenant, room, now_s)
                if waiting is None:
                    del able[tenant]
                    continue
                at = self.ring.index(tenant)
                self.ring = self.ring[at:] + self.ring[:at]
                self.deficits[tenant] = credit - waiting.cost_tokens
                self.in_turn.add(tenant)
                return waiting
        return None
