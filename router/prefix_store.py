"""Tenants' registered prefixes on the bus: read, changed by revision, heard when others do so.

Theory of operation. A change reads the record, makes the next one of it and writes that over the
revision that it read; where somebody was faster it begins again. Each change has a mark that the
record keeps for a while: where the answer to a write was lost, the next reading tells whether it
was made, so that a change counts once. One change a tenant is under way in a process at a time, so
that no more compete than there are processes; and so many a second (`RATE_S`), so that no tenant
keeps the bus busy.

Routers may not have old values of what they write sent to them (`controlplane.bus.accounts`), so
there is no watch: they hear what is written as it is, and read again what they may have missed: all
after the bus was away, and a few at every look.

A server that lost its files gets back what a router knows, with the next reading.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from controlplane.bus.protocol import Bucket, Bus, BusError, Entry, Subscription, WrongRevision
from router.prefix_records import aged, marked
from router.prefixes import PrefixRegistry
from router.tenant_gate import TenantGate
from router.tenants import TENANTS_MAX, Tenant
from schemas import subjects
from schemas.bus import TenantPrefixes, decode_prefixes
from schemas.codec import RemoteError, encode
from schemas.ids import decode_token, encode_token

ATTEMPTS_MAX: Final = 32
WAITING_MAX: Final = 32
"""Callers of one tenant that wait for their turn in this process."""
RATE_S: Final = 50.0
"""Readings and changes a second of one tenant in this process, in the long run."""
BURST: Final = 200.0
"""And at once."""
CHANGE_S_MAX: Final = 5.0

_LIMIT: Final = Tenant(tokens_per_s=RATE_S, tokens_burst=BURST)

Apply = Callable[[TenantPrefixes], TenantPrefixes]
Due = Callable[[TenantPrefixes, float], bool]
"""Called with a record and the seconds since it was written."""

logger = logging.getLogger(__name__)


class Busy(Exception):
    """A tenant's callers ask for too much, or too many of them wait for their turn."""


class PrefixStore:
    """One process's access to the records.

    Args:
        registry: gets everything that is learnt.
        changed: called with a tenant whose record has changed in the registry.
        pause_s: how long to wait after a conflict, at the most, times the conflicts so far.

    Attributes:
        counts: changes by how they went: done, conflict (begun anew), retried (the answer was
            lost), failed; and records that could not be read.
        stale: tenants whose records are to be read.
    """

    def __init__(
        self,
        bus: Bus,
        registry: PrefixRegistry,
        changed: Callable[[str], None],
        *,
        pause_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counter(done=0, conflict=0, retried=0, failed=0, unreadable=0)
        self.stale: set[str] = set()
        self._bus = bus
        self._registry = registry
        self._changed = changed
        self._pause_s = pause_s
        self._clock = clock
        self._rng = random.Random()
        self._bucket: Bucket | None = None
        self._following: Subscription | None = None
        self._lost_s: float | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._rates: dict[str, TenantGate] = {}

    @property
    def connected(self) -> bool:
        """Whether records can be read and changed now."""
        return self._bus.connected

    async def start(self) -> None:
        """Begin to hear what others change; does not wait for the bus."""
        self._bucket = await self._bus.bucket(subjects.PREFIXES)
        self._bus.on_state(self._bus_state)
        self._following = await self._bucket.follow(self._heard)

    async def stop(self) -> None:
        """Hear nothing more."""
        if self._following is not None:
            await self._following.stop()

    async def read(self, tenant: str) -> TenantPrefixes:
        """Return a tenant's record as it is now.

        Raises:
            BusError: the bus cannot say.
            Busy: its callers ask for too much.
        """
        async with self._turn(tenant):
            before = self._registry.record(tenant)
            entry = await self._opened().get(encode_token(tenant))
            if entry is None and before.prefixes:
                logger.warning("the bus has lost the prefixes of tenant %r: told anew", tenant)
                mark = secrets.token_hex(8)
                return await self._change(tenant, mark, lambda record: record, lambda *_: True)
            record = self._understood(tenant, entry)
            self._settle(record, before.version)
            return aged(record, self._registry.elapsed_s(record, self._clock()))

    async def change(
        self, tenant: str, mark: str, apply: Apply, due: Due = lambda record, elapsed_s: True
    ) -> TenantPrefixes:
        """Change a tenant's record, once.

        Args:
            mark: the change's own: one that was made already is not made again.
            apply: makes the next record; it may be called more than once, and what it raises is
                raised here, with nothing changed.
            due: whether there is anything to change, once the record was read.

        Returns:
            The record as it was written; a later one if the change had been made already.

        Raises:
            BusError: it was not made, or nobody can say whether it was.
            Busy: its callers ask for too much.
        """
        async with self._turn(tenant):
            return await self._change(tenant, mark, apply, due)

    async def refresh(self, more: int) -> None:
        """Read the records that may be old, and so many others, by chance.

        Raises:
            BusError: the bus cannot say.
        """
        known = self._registry.tenants
        due = [*self.stale, *self._rng.sample(known, min(more, len(known)))]
        for tenant in dict.fromkeys(due):
            try:
                await self.read(tenant)
            except Busy:
                continue  # whoever is before us reads it
            self.stale.discard(tenant)

    # --- one change

    async def _change(self, tenant: str, mark: str, apply: Apply, due: Due) -> TenantPrefixes:
        try:
            async with asyncio.timeout(CHANGE_S_MAX):
                record = await self._attempts(tenant, mark, apply, due)
        except TimeoutError:
            self.counts["failed"] += 1
            raise BusError(f"not done within {CHANGE_S_MAX:g} s") from None
        except BusError:
            self.counts["failed"] += 1
            raise
        self.counts["done"] += 1
        return record

    async def _attempts(self, tenant: str, mark: str, apply: Apply, due: Due) -> TenantPrefixes:
        problem = "others change it all the time"
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(self._pause_s * attempt * self._rng.random())
            try:
                return await self._attempt(tenant, mark, apply, due)
            except WrongRevision:
                self.counts["conflict"] += 1
            except BusError as error:
                if not self._bus.connected:
                    raise
                self.counts["retried"] += 1
                problem = str(error)
        raise BusError(f"not done in {ATTEMPTS_MAX} attempts: {problem}")

    async def _attempt(self, tenant: str, mark: str, apply: Apply, due: Due) -> TenantPrefixes:
        bucket, key = self._opened(), encode_token(tenant)
        version_before = self._registry.record(tenant).version
        entry = await bucket.get(key)
        record = self._understood(tenant, entry)
        elapsed_s = self._registry.elapsed_s(record, self._clock())
        if mark in record.changes or not due(record, elapsed_s):
            self._settle(record, version_before)
            return record
        after = marked(apply(aged(record, elapsed_s)), mark)
        if entry is None:
            await bucket.create(key, encode(after))
        else:
            await bucket.update(key, encode(after), entry.revision)
        self._settle(after, version_before)
        return after

    def _understood(self, tenant: str, entry: Entry | None) -> TenantPrefixes:
        """Return the record in an entry; what is known here where there is none to read."""
        if entry is not None and entry.value is not None:
            try:
                return _decoded(entry.key, entry.value)
            except RemoteError as error:
                self.counts["unreadable"] += 1
                logger.error("the prefixes of tenant %r cannot be read: %s", tenant, error)
        return self._registry.record(tenant)

    def _settle(self, record: TenantPrefixes, version_before: int) -> None:
        if self._registry.settled(record, version_before, self._clock()):
            self._changed(record.tenant)

    def _opened(self) -> Bucket:
        if self._bucket is None:
            raise BusError("the router is still starting")
        return self._bucket

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """Be the only one to read or change a tenant's record. Raises Busy."""
        rate = self._rates.get(tenant)
        if rate is None:
            if len(self._rates) >= 2 * TENANTS_MAX:
                del self._rates[next(iter(self._rates))]
            rate = self._rates[tenant] = TenantGate(_LIMIT, self._clock())
        if rate.charge(1, self._clock()) is not None:
            raise Busy(f"tenant {tenant!r} may ask {RATE_S:.0f} times a second for its prefixes")
        if self._waiting[tenant] >= WAITING_MAX:
            raise Busy(f"{WAITING_MAX} requests about the prefixes of {tenant!r} wait already")
        self._waiting[tenant] += 1
        try:
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._locks[tenant]

    # --- from the bus

    def _heard(self, key: str, value: bytes) -> None:
        try:
            record = _decoded(key, value)
        except RemoteError as error:
            self.counts["unreadable"] += 1
            logger.warning("unreadable prefixes %s: %s", key, error)
            return
        if self._registry.heard(record, self._clock()):
            self._changed(record.tenant)

    def _bus_state(self, connected: bool) -> None:
        """Note for how long nothing could be told or heard; read everything after that."""
        if not connected:
            self._lost_s = self._clock()
            return
        if self._lost_s is not None:
            self._registry.skip(self._clock() - self._lost_s)
            self._lost_s = None
        self.stale.update(self._registry.tenants)


def _decoded(key: str, value: bytes) -> TenantPrefixes:
    """Return the record in an entry.

    Raises:
        RemoteError: it cannot be read, or stands under another tenant's key.
    """
    record = decode_prefixes(value)
    if record.tenant != decode_token(key):
        raise RemoteError("it is about another tenant than its key")
    return record
