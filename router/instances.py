"""Instances as the data plane knows them: where to connect, and whether to.

The fleets of all models, one pool of connections, and a circuit breaker an instance. What a breaker
finds is told to the plane, so that decisions leave a broken instance out until it may be probed.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Final

from router.breaker import Breaker, BreakerPolicy, State, Verdict, judge
from router.directory import Directory, ServedModel
from router.engine_address import parse_address
from router.http_proxy import Outcome
from router.upstream import UpstreamPool

Key = tuple[str, str]
"""How the data plane names an instance: (model, instance id), since ids are unique per model."""

TellBreaker = Callable[[ServedModel, str, bool], None]
"""Tells a plane whether an instance's breaker is open."""

RANK_HEADER: Final = b"x-data-parallel-rank"
"""By which an engine with several data-parallel ranks is told the one that was chosen."""

_CLOSED = State.CLOSED
_FAILURE = Verdict.FAILURE


class Instances:
    """Keeps the pool equal to the fleets, and a breaker for each instance.

    Attributes:
        breakers: by key; one that was never needed is not there.
    """

    def __init__(
        self, directory: Directory, pool: UpstreamPool, policy: BreakerPolicy, tell: TellBreaker
    ) -> None:
        self.breakers: dict[Key, Breaker] = {}
        self._directory = directory
        self._pool = pool
        self._policy = policy
        self._tell = tell
        self._known: dict[Key, tuple[str, int | None]] = {}

    def changed(self) -> None:
        """Bring the pool in line with the fleets, whose records all have a usable url."""
        wanted = {
            (served.model, instance.record.instance_id): (
                instance.record.url,
                instance.record.dp_rank,
            )
            for served in self._directory
            for instance in served.plane.fleet
        }
        for key in self._known.keys() - wanted.keys():
            self._pool.remove(key)
            self.breakers.pop(key, None)
        for key, (url, rank) in wanted.items():
            if self._known.get(key) != (url, rank):
                self._put(key, url, rank)
        self._known = wanted

    def _put(self, key: Key, url: str, rank: int | None) -> None:
        address = parse_address(url)
        tls = self._tls if address.tls else None
        header = b"" if rank is None else b"%b: %d\r\n" % (RANK_HEADER, rank)
        self._pool.put(key, address.host, address.port, tls=tls, header_lines=header)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """How engines with an https url are talked to: by the system's certificates."""
        return ssl.create_default_context()

    def refresh(self, now_s: float) -> None:
        """Let waits that are over show in the planes, so that a probe may be sent."""
        for served in self._directory:
            for instance in served.plane.fleet:
                breaker = self.breakers.get((served.model, instance.record.instance_id))
                if breaker is not None and (breaker.state != _CLOSED or instance.breaker_open):
                    self._show(served, instance.record.instance_id, breaker, now_s)

    def sent(self, served: ServedModel, instance_id: str, now_s: float) -> None:
        """Note that a request is on its way to an instance: it may be the probe."""
        breaker = self.breakers.get((served.model, instance_id))
        if breaker is not None and breaker.state is not _CLOSED:
            breaker.sent(now_s)
            self._show(served, instance_id, breaker, now_s)

    def ended(
        self, served: ServedModel, key: Hashable, outcome: Outcome, status: int, now_s: float
    ) -> None:
        """Let an instance's breaker learn from the end of an attempt."""
        self._learn(served, key, judge(outcome, status), now_s)

    def pardon(self, served: ServedModel, keys: Iterable[Hashable], now_s: float) -> None:
        """Take failures back that were a request's own fault."""
        for key in keys:
            self._learn(served, key, Verdict.PARDONED, now_s)

    def _learn(self, served: ServedModel, key: Hashable, verdict: Verdict, now_s: float) -> None:
        assert isinstance(key, tuple)
        instance_id: str = key[1]
        breaker = self.breakers.get(key)
        if breaker is None:
            if verdict is not _FAILURE:
                return  # It never failed: there is nothing to forgive.
            if served.plane.fleet.get(instance_id) is None:
                return  # It left meanwhile, and nobody would forget its breaker.
            breaker = self.breakers[key] = Breaker(self._policy)
        before = breaker.state
        breaker.ended(verdict, now_s)
        if breaker.state is not before or verdict is Verdict.PARDONED:
            self._show(served, instance_id, breaker, now_s)

    def _show(self, served: ServedModel, instance_id: str, breaker: Breaker, now_s: float) -> None:
        instance = served.plane.fleet.get(instance_id)
        is_open = not breaker.allows(now_s)
        if instance is not None and instance.breaker_open != is_open:
            self._tell(served, instance_id, is_open)
