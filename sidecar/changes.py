"""What the mirror tells the relay: changes of which blocks an engine holds, and in which memory."""

from __future__ import annotations

import msgspec

from controlplane.core.hashing import BlockHash

TIERS = 3
"""Memory tiers: 0 the engine's own (GPU), 1 host memory (CPU), 2 everything else (storage)."""

ABSENT = TIERS
"""The tier of a block that is in no memory."""


class Held(msgspec.Struct, frozen=True):
    """Blocks whose fastest memory is now `tier`.

    Attributes:
        parent: the block before the first one; `hashing.ROOT` where a prompt begins.
        hashes: a chain in prompt order: each block's parent is the one before it.
        tier: below `TIERS`.
    """

    parent: BlockHash
    hashes: list[BlockHash]
    tier: int = 0


class Gone(msgspec.Struct, frozen=True):
    """Blocks that are in no memory any more."""

    hashes: list[BlockHash]


class Cleared(msgspec.Struct, frozen=True):
    """The engine holds no block at all."""


Change = Held | Gone | Cleared
