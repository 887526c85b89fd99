"""Requests that wait, and the orders in which they are served.

    fcfs       the oldest
    edf        least slack: the one whose latest start comes first (`Waiting.start_by_s`)
    klpm       the oldest, then k − 1 times the longest prefix hit, and so on (k-LPM)
    edf+klpm   the most urgent, then k − 1 times the longest prefix hit among those whose latest
               start is within `band_s` of the most urgent one's, and so on

How long a request can be passed over, in dispatches of its line (one tenant's requests of one
kind), where n are before it when it comes:

- `fcfs`: n.
- `edf`: n, and one for each that comes before its own latest start: a latest start is never before
  the arrival, so who comes later than that is behind it.
- `klpm`: k · (n + 1), since every k-th dispatch is the oldest's.
- `edf+klpm`: k · (n' + 1), n' as for `edf`: every k-th dispatch is the most urgent one's.

A request without a budget has `patience_s` for one: it becomes urgent like all others.

Source: k-LPM is arXiv 2502.04677; slack is deadline − now − predicted service time, of which `now`
is the same for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import msgspec
from sortedcontainers import SortedList

Order = Literal["fcfs", "edf", "klpm", "edf+klpm"]
ORDERS: tuple[str, ...] = get_args(Order)

_INFINITY = float("inf")


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
    regroup_max: int = 8

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
        for name in ("band_s", "regroup_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")


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
    """One request that waits; its line's order is kept by `number`, `start_by_s`, `hit_tokens`.

    Args:
        payload: whatever the caller wants back.
        lane: what decides which instances can serve it (an adapter); requests of a lane that no
            instance has room for are passed over.
        ttft_by_s: when its first byte is due, in the caller's clock; infinite if never.
        total_by_s: when its end is due, likewise.
        tokens: prompt tokens, for its tenant's share.
        size_bytes: of its body.
        group: equal for requests that serve each other's prefix; None for none.

    Attributes:
        number: place in the order of arrival.
        start_by_s: latest start that meets its deadlines with the predicted p99.
        hope_until_s: when it is given up: its latest start, or, if that was never to be met, the
            latest start that meets its deadlines with the predicted mean.
        hit_tokens: the longest prefix that some instance has of it, as last looked.
        grouped_tokens: the prefix of it that one of its group has just had computed; it moves this
            one up, and counts as a hit nowhere.
        service: what was predicted last.
        looks: how often it was found beyond hope.
    """

    __slots__ = (
        *("arrived_s", "group", "grouped_tokens", "hit_tokens", "hope_until_s", "lane", "looks"),
        *("number", "payload", "service", "size_bytes", "start_by_s", "tenant", "tokens"),
        *("total_by_s", "ttft_by_s", "weight"),
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
        hit_tokens: int = 0,
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
        self.hit_tokens = hit_tokens
        self.grouped_tokens = 0
        self.size_bytes = size_bytes
        self.group = group
        self.number = -1
        self.looks = 0
        self.service = UNKNOWN
        self.start_by_s = self.hope_until_s = _INFINITY

    @property
    def has_budget(self) -> bool:
        """Whether anything is due."""
        return self.ttft_by_s < _INFINITY or self.total_by_s < _INFINITY

    @property
    def affinity_tokens(self) -> int:
        """How much of its prompt it is likely to find computed."""
        return max(self.hit_tokens, self.grouped_tokens)

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

    Complexity: add, discard and choose are O(log n), choose of `edf+klpm` looks at up to
    `band_requests_max` besides.
    """

    __slots__ = ("_by_hit", "_by_urgency", "_config", "_turn", "_waiting")

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._turn = 0
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self._by_urgency: Any = SortedList() if "edf" in config.order else None
        self._by_hit: Any = SortedList() if config.order == "klpm" else None

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
            self._by_hit.add((-waiting.affinity_tokens, number))

    def discard(self, waiting: Waiting) -> None:
        """Take a request out that is in."""
        number = waiting.number
        del self._waiting[number]
        if self._by_urgency is not None:
            self._by_urgency.remove((waiting.start_by_s, number))
        if self._by_hit is not None:
            self._by_hit.remove((-waiting.affinity_tokens, number))

    def rekey(self, waiting: Waiting, change: Callable[[Waiting], None]) -> None:
        """Let `change` alter the affinity of a request that is in."""
        if self._by_hit is not None:
            self._by_hit.remove((-waiting.affinity_tokens, waiting.number))
        change(waiting)
        if self._by_hit is not None:
            self._by_hit.add((-waiting.affinity_tokens, waiting.number))

    def rebuild(self) -> None:
        """Sort anew after keys have changed in place: faster than one by one if most have."""
        if self._by_urgency is not None:
            self._by_urgency = SortedList((w.start_by_s, w.number) for w in self._waiting.values())
        if self._by_hit is not None:
            self._by_hit = SortedList(
                (-w.affinity_tokens, w.number) for w in self._waiting.values()
            )

    @property
    def newest(self) -> Waiting:
        """Who came last."""
        return self._waiting[next(reversed(self._waiting))]

    def choose(self) -> Waiting:
        """Return whose turn it is; changes nothing."""
        config, waiting = self._config, self._waiting
        first = self._turn % config.k == 0
        if config.order == "fcfs" or (first and config.order == "klpm"):
            return waiting[next(iter(waiting))]
        if config.order == "klpm":
            return waiting[self._by_hit[0][1]]
        start_by_s, number = self._by_urgency[0]
        if first or config.order == "edf":
            return waiting[number]
        best = waiting[number]
        for within_s, number in islice(self._by_urgency, 1, config.band_requests_max):
            if within_s > start_by_s + config.band_s:
                break
            if waiting[number].affinity_tokens > best.affinity_tokens:
                best = waiting[number]
        return best

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
            assert list(self._by_hit) == sorted((-w.affinity_tokens, w.number) for w in values)
