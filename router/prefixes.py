"""What a router process knows of all registered prefixes, and the uses that it has seen of them.

Theory of operation. For each tenant whose requests come here, or of whom another router tells,
there is the latest record known, with the moment from which its ages count. Records come from two
sides: read from the bucket, which settles what is true, and heard as others write them, where only
a higher version counts. A message that is lost leaves an older record until the next reading.

What counts as a use is exact: a prompt of the tenant's own, for the prefix's model, whose blocks
begin with all of the prefix's. Uses are kept until a router has told them.

Pure: `now_s` comes in. Bounds: `TENANTS_MAX` records of at most `PREFIXES_MAX` prefixes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.core.hashing import BlockHash
from router.prefix_records import aged, find
from router.tenants import TENANTS_MAX
from schemas.bus import RegisteredPrefix, TenantPrefixes

_Lengths = dict[int, dict[BlockHash, RegisteredPrefix]]
_NOTHING: Final[_Lengths] = {}


class _Tenant:
    """One tenant's record, and since when; the uses of its prefixes."""

    __slots__ = ("record", "since_s", "uses")

    def __init__(self, record: TenantPrefixes, now_s: float) -> None:
        self.uses: Counter[str] = Counter()
        self.take(record, now_s)

    def take(self, record: TenantPrefixes, now_s: float) -> None:
        self.record = record
        self.since_s = now_s
        for handle in self.uses.keys() - {each.id for each in record.prefixes}:
            del self.uses[handle]


class PrefixRegistry:
    """The registered prefixes of all tenants, as far as they are known here.

    Attributes:
        tables: tenant → model → whole blocks → key → prefix; of all whose records are known.
        refused: records of tenants beyond the most that are known at once.
    """

    def __init__(self, tenants_max: int = TENANTS_MAX) -> None:
        self.tables: dict[str, dict[str, _Lengths]] = {}
        self.refused = 0
        self._tenants_max = tenants_max
        self._tenants: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        """Prefixes that are known here."""
        return sum(len(tenant.record.prefixes) for tenant in self._tenants.values())

    @property
    def is_full(self) -> bool:
        """Whether no further tenant's record can be known."""
        return len(self._tenants) >= self._tenants_max

    @property
    def tenants(self) -> list[str]:
        """Those whose records are known."""
        return list(self._tenants)

    def knows(self, tenant: str) -> bool:
        """Whether a tenant's record is known, be it empty."""
        return tenant in self._tenants

    def record(self, tenant: str) -> TenantPrefixes:
        """Return the latest record of a tenant; an empty one of version 0 if none is known."""
        known = self._tenants.get(tenant)
        return TenantPrefixes(tenant) if known is None else known.record

    def elapsed_s(self, record: TenantPrefixes, now_s: float) -> float:
        """Return how long ago a record was written; 0 for one that is not the latest known here."""
        known = self._tenants.get(record.tenant)
        if known is None or known.record != record:
            return 0.0
        return max(now_s - known.since_s, 0.0)

    def current(self, tenant: str, now_s: float) -> TenantPrefixes:
        """Return a tenant's record as of now."""
        record = self.record(tenant)
        return aged(record, self.elapsed_s(record, now_s))

    def get(self, tenant: str, handle: str) -> RegisteredPrefix | None:
        """Return a tenant's prefix."""
        return find(self.record(tenant), handle)

    def heard(self, record: TenantPrefixes, now_s: float) -> bool:
        """Take what another router tells; returns whether it was news."""
        if record.version <= self.record(record.tenant).version:
            return False
        return self._take(record, now_s)

    def settled(self, record: TenantPrefixes, version_before: int, now_s: float) -> bool:
        """Take what was read from the bucket or written to it, though its version be lower.

        Args:
            version_before: of the record known when that was begun: if another one was heard
                meanwhile, it may be the newer one.

        Returns:
            Whether it was news.
        """
        known = self.record(record.tenant)
        if record == known and self.knows(record.tenant):
            return False
        if known.version != version_before and record.version < known.version:
            return False
        return self._take(record, now_s)

    def _take(self, record: TenantPrefixes, now_s: float) -> bool:
        known = self._tenants.get(record.tenant)
        if known is not None:
            known.take(record, now_s)
        elif self.is_full:
            self.refused += 1
            return False
        else:
            self._tenants[record.tenant] = _Tenant(record, now_s)
        tables: dict[str, _Lengths] = {}
        for each in record.prefixes:
            lengths = tables.setdefault(each.model, {})
            lengths.setdefault(each.blocks, {})[each.key] = each
        self.tables[record.tenant] = tables
        return True

    def skip(self, seconds: float) -> None:
        """Let a time pass that counts for nothing: nobody could tell a use without the bus."""
        for tenant in self._tenants.values():
            tenant.since_s += seconds

    def used(self, tenant: str, model: str, hashes: Sequence[BlockHash]) -> list[RegisteredPrefix]:
        """Count the uses of a tenant's prefixes in a prompt of its own; returns these prefixes.

        Complexity: a look-up for each length that the tenant has registered for the model.
        """
        found: list[RegisteredPrefix] = []
        count = len(hashes)
        for blocks, table in self.tables.get(tenant, {}).get(model, _NOTHING).items():
            if blocks <= count:
                prefix = table.get(hashes[blocks - 1])
                if prefix is not None:
                    self._tenants[tenant].uses[prefix.id] += 1
                    found.append(prefix)
        return found

    def uses(self, tenant: str) -> Mapping[str, int]:
        """Return the uses by handle that were not told yet."""
        known = self._tenants.get(tenant)
        return {} if known is None else known.uses

    def take_uses(self, tenant: str) -> dict[str, int]:
        """Return the uses that were not told yet, and forget them."""
        known = self._tenants.get(tenant)
        if known is None:
            return {}
        taken, known.uses = dict(known.uses), Counter()
        return taken

    def give_back(self, tenant: str, uses: Mapping[str, int]) -> None:
        """Keep uses that could not be told, of prefixes that still exist."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.uses.update({h: n for h, n in uses.items() if find(known.record, h) is not None})
