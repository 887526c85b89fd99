"""Requests that wait, and the orders in which they are served.

    fcfs       the oldest
    edf        least slack: the one whose latest start comes first (`Waiting.start_by_s`)
    klpm       the oldest, then k − 1 times the longest prefix hit, and so on (k-LPM)
    edf+klpm   the most urgent, then k − 1 times the longest prefix hit among those whose latest
               start is within `band_s` of the most urgent one's, or within a tenth of its slack,
               and so on

A hit is what counts where a request would go: on the instances that have room now. With k > 1 the
last two orders pick the pair, then: they pass over a request that would find less there than on an
instance that is full, while a place on that one is expected sooner than the difference could be
computed (`openings`). Its *hold* begins when it is first passed over at its turn, and lasts as long
as computing the difference would take, `hold_s_max` at most; it is never held so long that it would
be late. If all that were looked at are held, the place stays empty.

How long a request can be passed over, in dispatches of its line (one tenant's requests of one
kind), where n are before it when it comes:

- `fcfs`: n.
- `edf`: n, and one for each that comes before its own latest start: a latest start is never before
  the arrival, so who comes later than that is behind it.
- `klpm`: k · (n + 1), since every k-th dispatch is the oldest's, and those during its hold.
- `edf+klpm`: k · (n' + 1), n' as for `edf`, since every k-th dispatch is the most urgent one's, and
  those during its hold.

A request without a budget has `patience_s` for one: it becomes urgent like all others.

Source: k-LPM is arXiv 2502.04677, where one instance serves all; slack is deadline − now −
predicted service time, of which `now` is the same for all. To pass over for a while who would lose
its data is delay scheduling (Zaharia et al., EuroSys 2010).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import msgspec
from sortedcontainers import SortedList

from controlplane.core.openings import Hits, Openings
from controlplane.core.queue_hits import HitLines

Order = Literal["fcfs", "edf", "klpm", "edf+klpm"]
ORDERS: tuple[str, ...] = get_args(Order)

_INFINITY = float("inf")

HELD_MAX = 8
"""So many in order that are held are passed over for one dispatch, at some microseconds each."""

LONGEST_MAX = 4
"""So many of the longest hits are looked at; if all are held, it is the foremost's turn."""

BAND_SHARE = 0.1
"""The band of `edf+klpm` as a share of the most urgent one's slack, where that is more than
`band_s`: of those that are not urgent the hit decides."""


class QueueConfig(msgspec.Struct, frozen=True):
    """How requests wait.

    Attributes:
        order: see the module's text.
        k: of `klpm` and `edf+klpm`; 1 serves the oldest or most urgent every time.
        band_s: slack within which `edf+klpm` prefers a longer prefix hit.
        band_requests_max: how many of the most urgent it looks at.
        requests_max: bound on what waits.
        bytes_max: bound on its bodies.
        wait_s_max: nobody waits longer.
        patience_s: budget, for the order alone, of requests that have none.
        quantum_tokens: what a tenant of weight 1 may have prefilled in a round.
        hold_s_max: how long a request may be passed over for an instance that is full; 0 for never.
        regroup_max: members of a group that are moved up at once when one of it is served; the
            rest follow at the next refresh.
    """

    order: Order = "edf+klpm"
    k: int = 2
    band_s: float = 0.25
    band_requests_max: int = 32
    requests_max: int = 1024
    bytes_max: int = 256_000_000
    wait_s_max: float = 60.0
    patience_s: float = 30.0
    quantum_tokens: int = 4096
    hold_s_max: float = 5.0
    regroup_max: int = 4

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: names the setting.
        """
        if self.order not in ORDERS:
            raise ValueError(f"no order {self.order!r}; there are {', '.join(ORDERS)}")
        for name in ("k", "band_requests_max", "requests_max", "bytes_max", "quantum_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        for name in ("wait_s_max", "patience_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")
        for name in ("band_s", "hold_s_max", "regroup_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")

    @property
    def holds(self) -> bool:
        """Whether a request may be passed over for an instance that is full."""
        return "klpm" in self.order and self.k > 1 and self.hold_s_max > 0


TOLERATED_TOKENS = 3
"""Prompts that differ in no more than so many last tokens are one group."""


def group_of(
    hashes: Sequence[int], prompt_tokens: int, block_size: int, owner: str = ""
) -> Hashable:
    """Return what is equal for prompts whose whole blocks agree, but for their last tokens.

    It orders the queue and nothing else: what is cached is a matter of exact hashes. Those differ
    by adapter and cache salt, so such prompts are never in one group.

    Args:
        hashes: (n,) block hashes of the prompt.
        prompt_tokens: its length.
        block_size: tokens a block; 0 where hashes are not known.
        owner: tenant, where tenants are kept apart.

    Returns:
        None if not one whole block is left.
    """
    blocks = (prompt_tokens - TOLERATED_TOKENS) // block_size if block_size else 0
    blocks = min(blocks, len(hashes))
    return (owner, hashes[blocks - 1]) if blocks > 0 else None


class Service(msgspec.Struct, frozen=True):
    """How long a request is expected to take once an instance has it; zeros where nobody knows.

    Attributes:
        ttft_s: mean time to the first byte, `ttft_p99_s` its 99th percentile.
        total_s: mean time to the end, `total_p99_s` likewise.
    """

    ttft_s: float = 0.0
    ttft_p99_s: float = 0.0
    total_s: float = 0.0
    total_p99_s: float = 0.0


UNKNOWN = Service()


class Waiting:
    """One request that waits; its line's order is kept by `number`, `start_by_s`, `hits`.

    Args:
        payload: whatever the caller wants back.
        lane: what decides which instances can serve it (an adapter); requests of a lane that no
            instance has room for are passed over.
        ttft_by_s: when its first byte is due, in the caller's clock; infinite if never.
        total_by_s: when its end is due, likewise.
        tokens: prompt tokens, for its tenant's share.
        hits: how much of it which instances have, as last looked.
        size_bytes: of its body.
        group: equal for requests that serve each other's prefix; None for none.

    Attributes:
        number: place in the order of arrival.
        start_by_s: latest start that meets its deadlines with the predicted p99.
        hope_until_s: when it is given up: its latest start, or, if that was never to be met, the
            latest start that meets its deadlines with the predicted mean.
        grouped: the prefix of it that one of its group has just had computed, and where, as a
            level of hits; it moves this one up, and counts as a hit nowhere else.
        held_s: when its hold began; infinite before.
        service: what was predicted last.
        returned: it was sent before, in vain.
        looks: how often it was found beyond hope.
    """

    __slots__ = (
        *("arrived_s", "group", "grouped", "held_s", "hits", "hope_until_s", "lane", "looks"),
        *("number", "payload", "returned", "service", "size_bytes", "start_by_s", "tenant"),
        *("tokens", "total_by_s", "ttft_by_s", "weight"),
    )

    def __init__(
        self,
        payload: Any,
        arrived_s: float,
        *,
        tenant: str = "",
        weight: float = 1.0,
        lane: Hashable = None,
        ttft_by_s: float = _INFINITY,
        total_by_s: float = _INFINITY,
        tokens: int = 1,
        hits: Hits = (),
        size_bytes: int = 0,
        group: Hashable = None,
    ) -> None:
        self.payload = payload
        self.arrived_s = arrived_s
        self.tenant = tenant
        self.weight = weight
        self.lane = lane
        self.ttft_by_s = ttft_by_s
        self.total_by_s = total_by_s
        self.tokens = tokens
        self.hits = hits
        self.grouped = (0, 0)
        self.held_s = _INFINITY
        self.size_bytes = size_bytes
        self.group = group
        self.number = -1
        self.returned = False
        self.looks = 0
        self.service = UNKNOWN
        self.start_by_s = self.hope_until_s = _INFINITY

    @property
    def has_budget(self) -> bool:
        """Whether anything is due."""
        return self.ttft_by_s < _INFINITY or self.total_by_s < _INFINITY

    @property
    def hit_tokens(self) -> int:
        """The longest prefix that any instance has of it."""
        return self.hits[0][0] if self.hits else 0

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """How much of its prompt it is likely to find computed, and where: its group's included."""
        return (*self.hits, self.grouped) if self.grouped[0] else self.hits

    def affinity_tokens(self, mask: int) -> int:
        """How much of its prompt it is likely to find computed on the best of some instances."""
        grouped, where = self.grouped
        if not where & mask:
            grouped = 0
        for tokens, holders in self.hits:
            if holders & mask:
                return tokens if tokens > grouped else grouped
        return grouped

    @property
    def cost_tokens(self) -> int:
        """What serving it takes of its tenant's share: tokens to be computed."""
        return max(self.tokens - self.hit_tokens, 1)

    def expect(self, service: Service, patience_s: float) -> None:
        """Take a prediction. Changes the keys: only for one that is in no line."""
        self.service = service
        if not self.has_budget:
            self.start_by_s, self.hope_until_s = self.arrived_s + patience_s, _INFINITY
            return
        latest_s = min(self.ttft_by_s - service.ttft_p99_s, self.total_by_s - service.total_p99_s)
        self.start_by_s = max(self.arrived_s, latest_s)
        if latest_s <= self.arrived_s:
            latest_s = min(self.ttft_by_s - service.ttft_s, self.total_by_s - service.total_s)
        self.hope_until_s = latest_s

    def give_up_deadline(self, patience_s: float) -> None:
        """Wait on without a budget. Only for one that is in no line."""
        self.ttft_by_s = self.total_by_s = _INFINITY
        self.expect(self.service, patience_s)


class Line:
    """The requests of one tenant and lane, in the configured order.

    Complexity: add, discard and choose are O(log n), choose besides looks at the masks that several
    instances share (`klpm`) or up to `band_requests_max` requests (`edf+klpm`), and at up to
    `HELD_MAX` that are held.
    """

    __slots__ = ("_by_hit", "_by_urgency", "_config", "_holds", "_turn", "_waiting")

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._holds = config.holds
        self._turn = 0
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self._by_urgency: Any = SortedList() if "edf" in config.order else None
        self._by_hit = HitLines() if config.order == "klpm" else None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        """Put a request in its place; one that comes back keeps its number, and its place."""
        number = waiting.number
        newest = next(reversed(self._waiting), -1)
        self._waiting[number] = waiting
        if number < newest:
            self._waiting = OrderedDict(sorted(self._waiting.items()))
        if self._by_urgency is not None:
            self._by_urgency.add((waiting.start_by_s, number))
        if self._by_hit is not None:
            self._by_hit.add(number, waiting.levels)

    def discard(self, waiting: Waiting) -> None:
        """Take a request out that is in."""
        number = waiting.number
        del self._waiting[number]
        if self._by_urgency is not None:
            self._by_urgency.remove((waiting.start_by_s, number))
        if self._by_hit is not None:
            self._by_hit.discard(number, waiting.levels)

    def rekey(self, waiting: Waiting, change: Callable[[Waiting], None]) -> None:
        """Let `change` alter the affinity of a request that is in."""
        if self._by_hit is not None:
            self._by_hit.discard(waiting.number, waiting.levels)
        change(waiting)
        if self._by_hit is not None:
            self._by_hit.add(waiting.number, waiting.levels)

    def rebuild(self) -> None:
        """Sort anew after keys have changed in place: faster than one by one if most have."""
        values = self._waiting.values()
        if self._by_urgency is not None:
            self._by_urgency = SortedList((w.start_by_s, w.number) for w in values)
        if self._by_hit is not None:
            self._by_hit = HitLines((w.number, w.levels) for w in values)

    @property
    def newest(self) -> Waiting:
        """Who came last."""
        return self._waiting[next(reversed(self._waiting))]

    @property
    def head(self) -> Waiting:
        """Who is first in order: the oldest, or the most urgent."""
        return next(self._in_order())

    def choose(self, openings: Openings, now_s: float) -> Waiting | None:
        """Return whose turn it is; None if everybody that was looked at is held.

        Changes nothing but that holds begin.
        """
        config = self._config
        chosen: Waiting | None = None
        if "klpm" in config.order and self._turn % config.k:
            by_hit = self._by_hit is not None
            chosen = (self._longest if by_hit else self._longest_near)(openings, now_s)
        return self._foremost(openings, now_s) if chosen is None else chosen

    def _foremost(self, openings: Openings, now_s: float) -> Waiting | None:
        """Return the oldest, or the most urgent, of those that are not held."""
        if not self._holds or not openings.full:
            return self.head
        ahead: dict[int, int] = {}
        for waiting in islice(self._in_order(), HELD_MAX):
            hit = waiting.affinity_tokens(openings.open)
            if not self._held(waiting, hit, openings, ahead, now_s):
                return waiting
            waiting.held_s = min(waiting.held_s, now_s)
        return None

    def _in_order(self) -> Iterator[Waiting]:
        if self._by_urgency is None:
            return iter(self._waiting.values())
        return (self._waiting[number] for _, number in self._by_urgency)

    def _longest(self, openings: Openings, now_s: float) -> Waiting | None:
        """Return who finds most where there is room and is not held; None if nobody finds any."""
        assert self._by_hit is not None
        ahead: dict[int, int] = {}
        longest = self._by_hit.longest(openings.open)
        for less, number in islice(longest, LONGEST_MAX):
            waiting = self._waiting[number]
            if not self._held(waiting, -less, openings, ahead, now_s):
                return waiting
        return None

    def _longest_near(self, openings: Openings, now_s: float) -> Waiting | None:
        """Return the same of those that are about as urgent as the most urgent."""
        config = self._config
        most_s: float = self._by_urgency[0][0]
        until_s = most_s + max(config.band_s, BAND_SHARE * (most_s - now_s))
        best, best_hit, ahead = None, -1, dict[int, int]()
        for start_by_s, number in islice(self._by_urgency, config.band_requests_max):
            if start_by_s > until_s:
                break
            waiting = self._waiting[number]
            hit = waiting.affinity_tokens(openings.open)
            if hit > best_hit and not self._held(waiting, hit, openings, ahead, now_s):
                best, best_hit = waiting, hit
        return best

    def _held(
        self,
        waiting: Waiting,
        hit: int,
        openings: Openings,
        ahead: dict[int, int],
        now_s: float,
    ) -> bool:
        """Whether a request that finds so much where there is room waits for who has more."""
        hits = waiting.hits
        if not self._holds or not openings.full or not hits or hits[0][0] <= hit:
            return False
        worth_s = openings.worth_waiting_s(hits, hit, ahead)
        if not worth_s:
            return False
        worth_s = min(worth_s, self._config.hold_s_max)
        return now_s - waiting.held_s < worth_s and now_s + worth_s < waiting.start_by_s

    def served(self, waiting: Waiting) -> None:
        """Take out whose turn it was, and let the next turn come."""
        self.discard(waiting)
        self._turn += 1

    def check(self) -> None:
        """Assert that all orders hold the same requests by their present keys."""
        values = self._waiting.values()
        assert list(self._waiting) == sorted(self._waiting)
        if self._by_urgency is not None:
            assert list(self._by_urgency) == sorted((w.start_by_s, w.number) for w in values)
        if self._by_hit is not None:
            assert self._by_hit.same_as(HitLines((w.number, w.levels) for w in values))
