"""Blocks whose parent is not known: kept, bounded, until it is.

Their hash in our naming cannot be computed without the parent's. They occur when a sidecar begins
to listen in the middle of an engine's life; once a parent is stored anew, its descendants here, of
which the engine says nothing more, become usable again.
"""

from __future__ import annotations

import msgspec

from schemas.vllm_events import EngineBlockHash
from sidecar.memories import GPU, Place


class Orphan(msgspec.Struct):
    """One block.

    Attributes:
        tokens: u32 little endian.
        extras: canonical bytes (`hashing.event_extras`).
        copies: place → copies there.
    """

    name: EngineBlockHash
    parent: EngineBlockHash
    tokens: bytes
    extras: bytes
    copies: dict[Place, int]


class Orphans:
    """A bounded set of blocks that wait for their parents.

    Attributes:
        dropped: blocks that found no room.
    """

    def __init__(self, orphans_max: int) -> None:
        self.dropped = 0
        self._orphans_max = orphans_max
        self._by_name: dict[EngineBlockHash, Orphan] = {}
        self._by_parent: dict[EngineBlockHash, list[EngineBlockHash]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: EngineBlockHash) -> bool:
        return name in self._by_name

    def keep(
        self,
        name: EngineBlockHash,
        parent: EngineBlockHash,
        tokens: bytes,
        extras: bytes,
        place: Place,
    ) -> None:
        """Remember a copy of a block until its parent is known, or drop it at the bound.

        Copies are counted on the GPU only, as in `memories`.
        """
        orphan = self._by_name.get(name)
        if orphan is None:
            if len(self._by_name) >= self._orphans_max:
                self.dropped += 1
                return
            orphan = self._by_name[name] = Orphan(name, parent, tokens, extras, {})
            self._by_parent.setdefault(parent, []).append(name)
        held = orphan.copies.get(place, 0) if place.medium == GPU else 0
        orphan.copies[place] = held + 1

    def release(self, name: EngineBlockHash, place: Place) -> bool:
        """Remove a copy; False if none is known there."""
        orphan = self._by_name.get(name)
        if orphan is None or place not in orphan.copies:
            return False
        orphan.copies[place] -= 1
        if not orphan.copies[place]:
            del orphan.copies[place]
        if not orphan.copies:
            del self._by_name[name]
            siblings = self._by_parent[orphan.parent]
            siblings.remove(name)
            if not siblings:
                del self._by_parent[orphan.parent]
        return True

    def adopt(self, parent: EngineBlockHash) -> list[Orphan]:
        """Take out the blocks that wait for `parent`."""
        return [self._by_name.pop(name) for name in self._by_parent.pop(parent, ())]

    def clear(self) -> None:
        """Forget all."""
        self._by_name.clear()
        self._by_parent.clear()
