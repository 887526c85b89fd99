"""Prefixes that callers have registered: who holds them, how often, and what for.

A registration names a prompt's beginning and is answered with a handle. Registering the same one
again counts one more reference to it, with the options it had; it is gone when all are released.
What counts as its use is exact: a prompt whose blocks begin with all of the prefix's.

Pure. Bounds: `prefixes_max` and `bytes_max` in all, `of_tenant_max` of each tenant and a quarter of
the bytes; beyond them nothing is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from controlplane.core.hashing import BlockHash

HOT_USES = 8
"""A prefix is hot if each instance that holds it would have got more uses than this in a window."""


class Options(msgspec.Struct, frozen=True):
    """What a registration is for.

    Attributes:
        pin: keep its tokens in the router's prefix cache.
        warm: instances that should compute it right away.
        spread: let one more instance compute it whenever it is hot.
    """

    pin: bool = False
    warm: int = 0
    spread: bool = False


class Prefix:
    """One registered prefix.

    Attributes:
        id: its handle.
        key: hash of its last whole block.
        references: registrations that were not released.
        uses: prompts that began with it, since the last look.
        size_bytes: what is kept to have it computed.
    """

    __slots__ = (
        "blocks",
        "id",
        "key",
        "model",
        "options",
        "references",
        "size_bytes",
        "tenant",
        "tokens",
        "uses",
    )

    def __init__(
        self,
        tenant: str,
        model: str,
        tokens: int,
        hashes: Sequence[BlockHash],
        options: Options,
        size_bytes: int = 0,
    ) -> None:
        self.id = f"pfx_{hashes[-1]:016x}{len(hashes):x}"
        self.tenant = tenant
        self.model = model
        self.tokens = tokens
        self.key = hashes[-1]
        self.blocks = len(hashes)
        self.options = options
        self.references = 1
        self.uses = 0
        self.size_bytes = size_bytes


class Full(Exception):
    """There is no room for another prefix; says whose bound it is."""


class PrefixRegistry:
    """All registered prefixes of a router."""

    def __init__(
        self, prefixes_max: int = 1024, of_tenant_max: int = 64, bytes_max: int = 64 << 20
    ) -> None:
        self.prefixes_max = prefixes_max
        self.of_tenant_max = of_tenant_max
        self.bytes_max = bytes_max
        self._prefixes: dict[tuple[str, str], Prefix] = {}  # by tenant and handle
        self._watched: dict[tuple[str, int], dict[BlockHash, list[Prefix]]] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def watched(self) -> bool:
        """Whether any use is to be counted."""
        return bool(self._watched)

    def add(
        self,
        tenant: str,
        model: str,
        tokens: int,
        hashes: Sequence[BlockHash],
        options: Options,
        size_bytes: int = 0,
    ) -> Prefix:
        """Register a prefix of at least one whole block, or refer to it once more.

        Raises:
            Full: a bound is reached.
        """
        new = Prefix(tenant, model, tokens, hashes, options, size_bytes)
        known = self._prefixes.get((tenant, new.id))
        if known is not None:
            known.references += 1
            return known
        self._check_room(tenant, size_bytes)
        self._prefixes[tenant, new.id] = new
        if options.spread:
            table = self._watched.setdefault((model, new.blocks), {})
            table.setdefault(new.key, []).append(new)
        return new

    def _check_room(self, tenant: str, size_bytes: int) -> None:
        own = list(self.of(tenant))
        if len(self) >= self.prefixes_max:
            raise Full(f"{self.prefixes_max} prefixes are registered at this router, its most")
        if len(own) >= self.of_tenant_max:
            raise Full(f"tenant {tenant!r} has registered {self.of_tenant_max} prefixes, its most")
        if sum(each.size_bytes for each in own) + size_bytes > self.bytes_max // 4:
            raise Full(
                f"the prefixes of tenant {tenant!r} would exceed {self.bytes_max // 4} bytes"
            )
        if sum(each.size_bytes for each in self._prefixes.values()) + size_bytes > self.bytes_max:
            raise Full(f"the prefixes at this router would exceed {self.bytes_max} bytes")

    def get(self, tenant: str, handle: str) -> Prefix | None:
        """Return a tenant's prefix."""
        return self._prefixes.get((tenant, handle))

    def of(self, tenant: str) -> Iterator[Prefix]:
        """Yield a tenant's prefixes."""
        return (each for each in self._prefixes.values() if each.tenant == tenant)

    def release(self, prefix: Prefix) -> bool:
        """Give up one reference; returns whether that was the last, and the prefix is gone."""
        prefix.references -= 1
        if prefix.references:
            return False
        del self._prefixes[prefix.tenant, prefix.id]
        place = (prefix.model, prefix.blocks)
        if prefix.options.spread:
            table = self._watched[place]
            table[prefix.key].remove(prefix)
            if not table[prefix.key]:
                del table[prefix.key]
            if not table:
                del self._watched[place]
        return True

    def used(self, model: str, hashes: Sequence[BlockHash]) -> None:
        """Count the uses of prefixes in a prompt. A look-up for each length that is registered."""
        for (of_model, blocks), table in self._watched.items():
            if of_model == model and blocks <= len(hashes):
                for prefix in table.get(hashes[blocks - 1], ()):
                    prefix.uses += 1

    def spreading(self) -> Iterator[Prefix]:
        """Yield what is to be spread when hot."""
        for table in self._watched.values():
            for prefixes in table.values():
                yield from prefixes


def is_hot(uses: int, holders: int) -> bool:
    """Say whether a prefix is used so much that one more instance should hold it."""
    return uses > HOT_USES * max(holders, 1)
