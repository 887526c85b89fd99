"""The admission queue: where requests wait while every instance that could serve them is full.

Theory of operation. Requests wait in *lines*, one for each tenant and lane (`queue_lines`), whose
order is configured. Between tenants the queue is shared by deficit round robin: a tenant whose turn
it is may have prefilled `weight · quantum_tokens` more, and keeps what it does not use while it has
requests waiting. Its turn comes once it has what its first request takes, and it pays for whichever
is served. So of what is served while two tenants wait, each gets its weight's part, give or take
one quantum and one longest prompt, whatever the others send.

    add ──> waiting ──take──> to an instance ──take_back──> waiting, before all others
               │ └──cancel──> gone: its client left
               └──expire, hopeless, displaced──> refused, or degraded and put back, by the caller

The queue is bounded. A newcomer for whom there is no room displaces the newest request of the
tenant that is most above its share of the places, if its own tenant is below; else it is refused.
Whoever is refused learns when what waits now will have been served, at the rate of late.

Who was sent in vain, because its instance failed, is *taken back*: it waits before all others, in
no line, is charged to no turn, and is held for nobody. No bound applies to it, so that nothing is
lost that was accepted; newcomers find `requests_max` reached as long as it is with those that came
back, so beyond that there are never more than were under way at once.

Pure: `now_s` comes in. `check` derives everything anew.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any

from sortedcontainers import SortedList

from controlplane.core.openings import Hits, Openings
from controlplane.core.queue_lines import TOLERATED_TOKENS, Line, QueueConfig, Service, Waiting

RETRY_S_MIN, RETRY_S_MAX = 1.0, 300.0
RATE_DISPATCHES = 64
"""How many of the latest dispatches the drain rate is taken over."""

Open = Callable[[Hashable], Openings | None]
"""Says which instances have room for a lane; None if none has."""


class DrainRate:
    """How many requests leave the queue a second, of late, while any wait."""

    def __init__(self, dispatches: int = RATE_DISPATCHES) -> None:
        self._times: deque[float] = deque(maxlen=dispatches)

    def resume(self, now_s: float) -> None:
        """Begin to count again: since the latest dispatch nobody has waited."""
        if self._times:
            idle_s = max(now_s - self._times[-1], 0.0)
            self._times = deque((then_s + idle_s for then_s in self._times), self._times.maxlen)

    def note(self, now_s: float) -> None:
        """Count a dispatch."""
        self._times.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Return the rate up to now, so that a queue that stands still has a falling one."""
        if len(self._times) < 2:
            return 0.0
        span_s = now_s - self._times[0]
        return len(self._times) / span_s if span_s > 0 else float("inf")


class _Tenant:
    """One tenant's lines, and what it may still have served in this round."""

    __slots__ = ("count", "deficit", "in_turn", "lines", "name", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.lines: dict[Hashable, Line] = {}
        self.count = 0
        self.deficit = 0.0
        self.in_turn = False

    def head_cost(self, opened: _Opened) -> int | None:
        """Return what serving its first takes, of the lanes that have room; None if none has."""
        heads = [line.head for lane, line in self.lines.items() if opened(lane) is not None]
        if not heads:
            return None
        return min(heads, key=_urgency).cost_tokens

    def choose(self, opened: _Opened, now_s: float) -> Waiting | None:
        """Return whose turn it is among the lanes that have room: the most urgent, the oldest."""
        found: list[Waiting] = []
        for lane, line in self.lines.items():
            openings = opened(lane)
            chosen = None if openings is None else line.choose(openings, now_s)
            if chosen is not None:
                found.append(chosen)
        return min(found, key=_urgency, default=None)


def _urgency(waiting: Waiting) -> tuple[float, int]:
    return waiting.start_by_s, waiting.number


class _Opened:
    """Who has room, asked once a lane."""

    __slots__ = ("_is_open", "_known")

    def __init__(self, is_open: Open) -> None:
        self._is_open = is_open
        self._known: dict[Hashable, Openings | None] = {}

    def __call__(self, lane: Hashable) -> Openings | None:
        if lane not in self._known:
            self._known[lane] = self._is_open(lane)
        return self._known[lane]


class _Group:
    """Requests that share their prefix; `went` is the mask of where one of them was sent."""

    __slots__ = ("members", "went")

    def __init__(self) -> None:
        self.members: dict[int, Waiting] = {}
        self.went = 0

    def move_up(self, member: Waiting) -> None:
        """Let a member count as having its prefix computed. Only for one that is in no line."""
        if self.went:
            member.grouped = (max(member.tokens - TOLERATED_TOKENS, 0), self.went)


class AdmissionQueue:
    """What waits for one model at one router.

    Attributes:
        config: how requests wait.
        rate: of dispatches.
        nbytes: bodies of what waits.
    """

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.rate = DrainRate()
        self.nbytes = 0
        self._numbers = 0
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self._returned: dict[int, Waiting] = {}  # those of `_waiting` that were taken back
        self._tenants: dict[str, _Tenant] = {}
        self._ring: deque[_Tenant] = deque()
        self._hope: Any = SortedList()  # (hope_until_s, number) of those with a budget
        self._groups: dict[Hashable, _Group] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield what waits, in the order of its coming."""
        return iter(self._waiting.values())

    def __contains__(self, waiting: Waiting) -> bool:
        return self._waiting.get(waiting.number) is waiting

    # --- coming and going

    def add(self, waiting: Waiting, service: Service) -> Waiting | None:
        """Let a request wait; returns who has no place now: None, the newcomer, or another.

        Args:
            waiting: in no queue.
            service: how long it is expected to take.

        Complexity: O(log n), and O(tenants) when full.
        """
        config = self.config
        if self.nbytes + waiting.size_bytes > config.bytes_max:
            return waiting
        displaced: Waiting | None = None
        if len(self._waiting) >= config.requests_max:
            displaced = self._displaced_by(waiting)
            if displaced is None:
                return waiting
            self.cancel(displaced)
        self._begin(waiting, service, waiting.arrived_s)
        return displaced

    def _begin(self, waiting: Waiting, service: Service, now_s: float) -> None:
        waiting.number = self._numbers
        self._numbers += 1
        waiting.expect(service, self.config.patience_s)
        if not self._waiting:
            self.rate.resume(now_s)
        self._insert(waiting)

    def take_back(self, waiting: Waiting, service: Service, now_s: float) -> None:
        """Let a request wait before all others, that was sent in vain; see the module's text.

        Args:
            waiting: in no queue; `arrived_s` is earlier than `now_s` by what it has waited before.
            service: how long it is expected to take.
        """
        waiting.returned = True
        self._begin(waiting, service, now_s)

    def put_back(self, waiting: Waiting) -> None:
        """Let one that was taken out wait on in its old place. O(n)."""
        self._insert(waiting)
        self._waiting = OrderedDict(sorted(self._waiting.items()))
        self._returned = dict(sorted(self._returned.items()))

    def cancel(self, waiting: Waiting) -> bool:
        """Take a request out; False if it is not in."""
        if waiting not in self:
            return False
        if not waiting.returned:
            self._tenants[waiting.tenant].lines[waiting.lane].discard(waiting)
        self._removed(waiting)
        return True

    def _insert(self, waiting: Waiting) -> None:
        self._waiting[waiting.number] = waiting
        self.nbytes += waiting.size_bytes
        if waiting.has_budget:
            self._hope.add((waiting.hope_until_s, waiting.number))
        if waiting.returned:
            self._returned[waiting.number] = waiting
        else:
            self._line_up(waiting)

    def _line_up(self, waiting: Waiting) -> None:
        tenant = self._tenants.get(waiting.tenant)
        if tenant is None:
            tenant = self._tenants[waiting.tenant] = _Tenant(waiting.tenant)
            self._ring.append(tenant)
        tenant.weight = waiting.weight
        tenant.count += 1
        if waiting.group is not None:
            group = self._groups.setdefault(waiting.group, _Group())
            group.members[waiting.number] = waiting
            group.move_up(waiting)
        line = tenant.lines.get(waiting.lane)
        if line is None:
            line = tenant.lines[waiting.lane] = Line(self.config)
        line.add(waiting)

    def _removed(self, waiting: Waiting) -> None:
        """Forget one that has left its line, if it was in one."""
        del self._waiting[waiting.number]
        self.nbytes -= waiting.size_bytes
        if waiting.has_budget:
            self._hope.remove((waiting.hope_until_s, waiting.number))
        if waiting.returned:
            del self._returned[waiting.number]
        else:
            self._step_out(waiting)

    def _step_out(self, waiting: Waiting) -> None:
        tenant = self._tenants[waiting.tenant]
        tenant.count -= 1
        if not tenant.lines[waiting.lane]:
            del tenant.lines[waiting.lane]
        if not tenant.count:
            del self._tenants[waiting.tenant]
            self._ring.remove(tenant)
        if waiting.group is not None:
            group = self._groups[waiting.group]
            del group.members[waiting.number]
            if not group.members:
                del self._groups[waiting.group]

    def _displaced_by(self, newcomer: Waiting) -> Waiting | None:
        """Return the newest of the tenant most above its share; None if that is the newcomer's."""
        own = self._tenants.get(newcomer.tenant)
        own_count = 0 if own is None else own.count
        tenants = self._tenants.values()
        most = max(tenants, key=lambda tenant: tenant.count / tenant.weight, default=None)
        if (
            most is None
            or most is own
            or most.count / most.weight <= (own_count + 1) / newcomer.weight
        ):
            return None
        return max((line.newest for line in most.lines.values()), key=lambda w: w.number)

    # --- serving

    def take(self, is_open: Open, now_s: float) -> Waiting | None:
        """Take out whose turn it is; None if nobody has room, or all are held that were looked at.

        The caller says where it was sent (`went`).

        Complexity: O(log n) for one tenant, O(tenants) in all.
        """
        opened = _Opened(is_open)
        chosen = self._first_returned(opened) if self._returned else None
        if chosen is None:
            if len(self._ring) == 1:
                chosen = self._ring[0].choose(opened, now_s)
            else:
                chosen = self._next_in_round(opened, now_s)
            if chosen is None:
                return None
            self._tenants[chosen.tenant].lines[chosen.lane].served(chosen)
        self._removed(chosen)
        self.rate.note(now_s)
        return chosen

    def _first_returned(self, opened: _Opened) -> Waiting | None:
        able = (each for each in self._returned.values() if opened(each.lane) is not None)
        return next(able, None)

    def _next_in_round(self, opened: _Opened, now_s: float) -> Waiting | None:
        """Return who is served next by deficit round robin, charged to its tenant."""
        able: dict[_Tenant, int] = {}
        for tenant in self._ring:
            cost = tenant.head_cost(opened)
            if cost is None:
                continue
            able[tenant] = cost
            waiting = self._turn_of(tenant, able, opened, now_s)
            if waiting is not None:
                return waiting
        while able:
            self._skip_rounds(able)
            for tenant in list(able):
                waiting = self._turn_of(tenant, able, opened, now_s)
                if waiting is not None:
                    return waiting
        return None

    def _turn_of(
        self, tenant: _Tenant, able: dict[_Tenant, int], opened: _Opened, now_s: float
    ) -> Waiting | None:
        """Return who is served in a tenant's turn; None if its credit does not suffice.

        If all that may go are held the tenant is `able` no more.
        """
        credit = tenant.deficit
        if not tenant.in_turn:
            credit += self.config.quantum_tokens * tenant.weight
        if credit < able[tenant]:
            tenant.deficit, tenant.in_turn = credit, False
            return None
        waiting = tenant.choose(opened, now_s)
        if waiting is None:
            del able[tenant]
            return None
        tenant.deficit, tenant.in_turn = credit - waiting.cost_tokens, True
        while self._ring[0] is not tenant:  # its turn lasts until its credit does not
            self._ring.rotate(-1)
        return waiting

    def _skip_rounds(self, able: dict[_Tenant, int]) -> None:
        """Let the rounds pass at once in which nobody could be served."""
        quantum = self.config.quantum_tokens
        rounds = min(
            math.ceil((cost - tenant.deficit) / (quantum * tenant.weight))
            for tenant, cost in able.items()
        )
        for tenant in able:
            tenant.deficit += max(rounds - 1, 0) * quantum * tenant.weight

    def went(self, group: Hashable, mask: int) -> None:
        """Let those who share the prefix of one that was just sent be served soon, too.

        Args:
            group: of the one that was sent.
            mask: where to.
        """
        found = self._groups.get(group) if group is not None else None
        if found is None:
            return
        found.went |= mask
        for member in list(islice(found.members.values(), self.config.regroup_max)):
            if member.grouped[1] != found.went:
                self._tenants[member.tenant].lines[member.lane].rekey(member, found.move_up)

    def waits(self, newcomer: Waiting, openings: Openings) -> bool:
        """Whether one that could go at once should wait for an instance that is full."""
        if not self.config.holds or not openings.full:
            return False
        here = newcomer.affinity_tokens(openings.open)
        return openings.worth_waiting_s(newcomer.hits, here, {}) > 0.0

    # --- time

    def refresh(self, found: Iterable[tuple[Waiting, Service, Hits]]) -> None:
        """Take new predictions and prefix hits of requests that wait.

        Complexity: O(n log n) for the lines concerned, whole lines being sorted at once.
        """
        lines: dict[int, Line] = {}
        for waiting, service, hits in found:
            if waiting not in self:
                continue
            waiting.expect(service, self.config.patience_s)
            waiting.hits = hits
            if waiting.returned:
                continue
            if waiting.group is not None:
                self._groups[waiting.group].move_up(waiting)
            line = self._tenants[waiting.tenant].lines[waiting.lane]
            lines[id(line)] = line
        for line in lines.values():
            line.rebuild()
        self._hope = SortedList((w.hope_until_s, w.number) for w in self if w.has_budget)

    def expire(self, now_s: float) -> list[Waiting]:
        """Take out who has waited for as long as anybody may."""
        longest_s = self.config.wait_s_max
        overdue = [w for w in self._returned.values() if now_s - w.arrived_s >= longest_s]
        for waiting in self._waiting.values():
            if waiting.returned:
                continue
            if now_s - waiting.arrived_s < longest_s:
                break
            overdue.append(waiting)
        for waiting in overdue:
            self.cancel(waiting)
        return overdue

    def hopeless(self, now_s: float, looks_max: int) -> list[Waiting]:
        """Take out who cannot be expected to meet its deadline, however often looked at.

        Args:
            now_s: the present.
            looks_max: further looks, at later times and with later predictions, that a request
                gets before it is given up.
        """
        beyond = []
        for hope_s, number in self._hope:
            if hope_s >= now_s:
                break
            beyond.append(self._waiting[number])
        given_up = []
        for waiting in beyond:
            waiting.looks += 1
            if waiting.looks > looks_max:
                self.cancel(waiting)
                given_up.append(waiting)
        return given_up

    def retry_after_s(self, now_s: float) -> float:
        """Return when what waits now will have been served, at the rate of late."""
        rate = self.rate.per_s(now_s)
        seconds = len(self) / rate if rate > 0 else self.config.wait_s_max
        return min(max(seconds, RETRY_S_MIN), RETRY_S_MAX)

    @property
    def held(self) -> int:
        """How many wait whose hold has begun. O(n)."""
        return sum(waiting.held_s < math.inf for waiting in self)

    @property
    def returned(self) -> int:
        """How many wait that were taken back."""
        return len(self._returned)

    def counts(self) -> dict[str, int]:
        """Return how many requests of each tenant wait. O(n)."""
        return dict(Counter(waiting.tenant for waiting in self))

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self) - self.returned <= self.config.requests_max
        assert list(self._waiting) == sorted(self._waiting)
        assert list(self._returned) == [w.number for w in self if w.returned]
        assert self.nbytes == sum(w.size_bytes for w in self)
        assert sorted(t.name for t in self._ring) == sorted(self._tenants)
        for name, tenant in self._tenants.items():
            assert tenant.count == sum(map(len, tenant.lines.values())) > 0
            assert tenant.count == sum(w.tenant == name and not w.returned for w in self)
            for line in tenant.lines.values():
                line.check()
        budgets = sorted((w.hope_until_s, w.number) for w in self if w.has_budget)
        assert list(self._hope) == budgets
        grouped = {number for group in self._groups.values() for number in group.members}
        assert grouped == {w.number for w in self if w.group is not None and not w.returned}
