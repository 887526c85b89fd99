"""Coalescing: of requests that share a new prefix one computes it, and the others wait for that.

Theory of operation. A request that was sent with many tokens to compute *leads* until its prompt is
computed. One that comes meanwhile and shares at least `tokens_min` tokens beyond what any instance
has cached *follows*: it waits until the leader's instance has the shared blocks, then goes there.

    lead ──> computing ──reached──> followers whose blocks are there are released, to its instance
                 ├──done──> all are, to its instance          (its answer begins)
                 └──failed──> all are, to wherever            (the first of them may lead anew)

A follower waits `wait_s_max` at most. Leaders are kept by their chains of block hashes in a radix
tree (`promises`), so that finding who shares most costs a few comparisons however many lead. Hashes
hold adapter and cache salt, so requests that differ in those never follow each other.

Bounds: `leaders_max` leaders, beyond which the oldest is forgotten and its followers are released;
`followers_max` followers in all, beyond which nobody follows.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from controlplane.core.decision import RouteRequest
from controlplane.core.index import usable_blocks
from controlplane.core.promises import Promises

TOKENS_MIN = 1024
FOLLOW_LOOK_S = 0.01
"""How often followers are looked after: an engine's block events come every few milliseconds."""

_BLOCKS_MAX = 10_000_000  # in leaders' chains, which their requests hold anyway


class CoalesceConfig(msgspec.Struct, frozen=True):
    """How requests follow each other.

    Attributes:
        tokens_min: shared tokens, cached nowhere, from which on waiting for them pays.
        wait_s_max: nobody follows for longer.
        leaders_max: requests that can be followed at a time.
        followers_max: requests that follow at a time.
    """

    tokens_min: int = TOKENS_MIN
    wait_s_max: float = 5.0
    leaders_max: int = 1024
    followers_max: int = 1024

    def __post_init__(self) -> None:
        """Refuse what makes no sense. Raises ValueError, which names the setting."""
        for name in ("tokens_min", "wait_s_max", "leaders_max", "followers_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")


class Follower:
    """A request that waits for its leader's prefix.

    Attributes:
        payload: whatever the caller wants back.
        key: hash of the last shared block: once the instance holds it, the wait is over.
        until_s: when the wait is over in any case.
    """

    __slots__ = ("key", "leader", "payload", "until_s")

    def __init__(self, payload: Any, key: int, leader: Leader, until_s: float) -> None:
        self.payload = payload
        self.key = key
        self.leader = leader
        self.until_s = until_s


class Leader:
    """A request that computes a prefix.

    Attributes:
        instance_id: where.
        followers: who waits for it, in the order of their coming.
    """

    __slots__ = ("followers", "instance_id", "number", "promise")

    def __init__(self, number: int, instance_id: str, promise: int) -> None:
        self.number = number
        self.instance_id = instance_id
        self.promise = promise
        self.followers: list[Follower] = []


class Coalescer:
    """Who leads and who follows, for one model at one router.

    Attributes:
        config: how requests follow each other.
        following: requests that wait.
    """

    def __init__(self, config: CoalesceConfig) -> None:
        self.config = config
        self.following = 0
        self._numbers = 0
        self._leaders: OrderedDict[int, Leader] = OrderedDict()
        # Leaders end by themselves; this is for those whose end was never told.
        self._chains: Promises[Hashable] = Promises(3600.0, config.leaders_max, _BLOCKS_MAX)

    def __len__(self) -> int:
        return len(self._leaders)

    def lead(
        self,
        instance_id: str,
        hashes: Sequence[int],
        new_tokens: int,
        now_s: float,
        owner: str = "",
    ) -> tuple[Leader | None, list[Follower]]:
        """Let a request lead that was sent to an instance, if it computes enough.

        Args:
            owner: the tenant, where it is kept apart: it leads nobody else's requests.

        Returns:
            The leader, and the followers of one that had to be forgotten for it.
        """
        if new_tokens < self.config.tokens_min or not hashes:
            return None, []
        released: list[Follower] = []
        if len(self._leaders) >= self.config.leaders_max:
            released = self.end(next(iter(self._leaders.values())))
        self._numbers += 1
        promise = self._chains.add(self._numbers, _of(owner, hashes), now_s)
        leader = Leader(self._numbers, instance_id, promise)
        self._leaders[leader.number] = leader
        return leader, released

    def follow(
        self,
        payload: Any,
        request: RouteRequest,
        cached: Callable[[], int],
        now_s: float,
        owner: str = "",
    ) -> Follower | None:
        """Let a request wait for a leader that shares enough with it; None if there is none.

        Args:
            payload: to be given back.
            request: its prompt.
            cached: tells how many of its tokens some instance has; asked only if somebody leads.
            now_s: the present.
            owner: the tenant, where it is kept apart: it follows nobody else's requests.
        """
        hashes, block_size = request.hashes, request.block_size
        if not self._leaders or not hashes or self.following >= self.config.followers_max:
            return None
        usable = min(usable_blocks(request.prompt_tokens, block_size), len(hashes))
        depths = self._chains.find(_of(owner, hashes), usable)
        if not depths:
            return None
        number = max(depths, key=lambda each: depths[each])
        depth = depths[number]
        if depth * block_size < self.config.tokens_min:
            return None
        if depth * block_size - cached() < self.config.tokens_min:
            return None
        leader = self._leaders[number]  # type: ignore[index]
        follower = Follower(payload, hashes[depth - 1], leader, now_s + self.config.wait_s_max)
        leader.followers.append(follower)
        self.following += 1
        return follower

    def leave(self, follower: Follower) -> bool:
        """Let a follower go whose client has left; False if it does not follow any more."""
        if follower not in follower.leader.followers:
            return False
        follower.leader.followers.remove(follower)
        self.following -= 1
        return True

    def end(self, leader: Leader) -> list[Follower]:
        """End a leader, however it ended; returns who followed it."""
        if self._leaders.pop(leader.number, None) is None:
            return []
        self._chains.drop(leader.promise)
        released, leader.followers = leader.followers, []
        self.following -= len(released)
        return released

    def look(self, holds: Callable[[str, int], bool], now_s: float) -> list[Follower]:
        """Release who has what it waits for, or has waited long enough.

        Args:
            holds: says whether an instance has a block.
            now_s: the present.
        """
        released = []
        for leader in self._leaders.values():
            for follower in list(leader.followers):
                if now_s >= follower.until_s or holds(leader.instance_id, follower.key):
                    self.leave(follower)
                    released.append(follower)
        return released

    def check(self) -> None:
        """Assert every invariant."""
        assert self.following == sum(len(each.followers) for each in self._leaders.values())
        assert self.following <= self.config.followers_max
        assert len(self._leaders) <= self.config.leaders_max
        assert len(self._chains) <= len(self._leaders)


def _of(owner: str, hashes: Sequence[int]) -> Sequence[int]:
    """Return an owner's own names of blocks; those without an owner share the plain ones."""
    if not owner:
        return hashes
    mask = int.from_bytes(hashlib.blake2b(owner.encode(), digest_size=8).digest(), "big")
    return [block ^ mask for block in hashes]
