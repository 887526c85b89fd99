"""Registered prefixes, as one would count them at a counter with one clerk."""

from __future__ import annotations

from collections import Counter


class NaivePrefixes:
    """What each tenant holds, told of every change as it is written, and of nothing else.

    Attributes:
        references: (tenant, handle) → registrations that were not released.
        made: the marks of all changes.
    """

    def __init__(self) -> None:
        self.references: Counter[tuple[str, str]] = Counter()
        self.made: set[str] = set()

    def write(self, mark: str, tenant: str, handle: str, by: int) -> None:
        """A change is written: once, and it releases nothing that is not there."""
        assert mark not in self.made, f"{mark} was made twice"
        self.made.add(mark)
        self.references[tenant, handle] += by
        assert self.references[tenant, handle] >= 0

    def of(self, tenant: str) -> dict[str, int]:
        """Return what a tenant holds, by handle."""
        return {
            handle: count
            for (owner, handle), count in self.references.items()
            if owner == tenant and count
        }
