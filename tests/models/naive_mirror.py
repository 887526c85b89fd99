"""A mirror too simple to be wrong, and an engine whose blocks are known, for mirrors to equal."""

from __future__ import annotations

import hashlib
import random

from controlplane.core.hashing import (
    ROOT,
    BlockHash,
    Extras,
    event_extras,
    hash_block,
    pack_tokens,
)
from schemas.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBlockHash,
    Event,
)

Place = tuple[str, int | None, str | None]


class NaiveMirror:
    """Copies by engine name and place; every look recomputes all hashes from the root.

    Attributes:
        copies: (name, place) → (copies that exist, copies that may).
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[EngineBlockHash, Place], tuple[int, int]] = {}
        self.blocks: dict[EngineBlockHash, tuple[EngineBlockHash | None, bytes, bytes]] = {}

    def apply(self, event: Event) -> None:
        """Take an event of the kind that describes itself."""
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            self.blocks.clear()
        elif isinstance(event, BlockStored):
            self._store(event)
        else:
            place = (event.medium or "GPU", event.group_idx, event.ownership)
            for name in event.block_hashes:
                self._remove(name, place)

    def _remove(self, name: EngineBlockHash, place: Place) -> None:
        sure, doubts = self.copies.pop((name, place), (0, 0))
        if sure + doubts > 1:
            self.copies[name, place] = (sure - 1, doubts) if sure else (0, doubts - 1)
        elif self.hash_of(name) is None and not any(held == name for held, _ in self.copies):
            self.blocks.pop(name, None)

    def _store(self, event: BlockStored) -> None:
        place = (event.medium or "GPU", event.group_idx, event.ownership)
        parent = event.parent_block_hash
        size = event.block_size
        keys = event.extra_keys or [None] * len(event.block_hashes)
        for at, name in enumerate(event.block_hashes):
            tokens = pack_tokens(event.token_ids[at * size : (at + 1) * size])
            self.blocks[name] = (parent, tokens, event_extras(event.lora_name, keys[at]))
            sure, doubts = self.copies.get((name, place), (0, 0))
            lone_root = event.parent_block_hash is None and len(event.block_hashes) == 1
            if place[0] != "GPU" or not sure:
                self.copies[name, place] = (1, doubts if lone_root else 0)
            elif event.parent_block_hash is None:
                self.copies[name, place] = (sure, doubts + 1)
            else:
                self.copies[name, place] = (sure + 1, doubts)
            parent = name

    def hash_of(self, name: EngineBlockHash) -> BlockHash | None:
        """Return our hash of a block, None if an ancestor was never seen."""
        if name not in self.blocks:
            return None
        parent, tokens, extras = self.blocks[name]
        above = ROOT if parent is None else self.hash_of(parent)
        return None if above is None else hash_block(tokens, extras, above)

    def held(self, tier: int) -> set[BlockHash]:
        """Return the blocks that some medium of a tier up to `tier` has in all of its groups."""
        found: set[BlockHash] = set()
        for medium in {place[0] for _, place in self.copies}:
            if {"GPU": 0, "CPU": 1}.get(medium, 2) > tier:
                continue
            groups: dict[int | None, set[BlockHash]] = {}
            for name, place in self.copies:
                block = self.hash_of(name)
                if place[0] == medium and block is not None:
                    groups.setdefault(place[1], set()).add(block)
            found |= set.intersection(*groups.values()) if groups else set()
        return found


class TruthfulEngine:
    """A tiny prefix cache that reports as vLLM does, and knows what it holds.

    Blocks live in numbered physical slots; the least recently freed one is reused first. Requests
    run one at a time, so every slot is free between them.

    Attributes:
        slots: physical slot → name of the block in it, least recently used first.
    """

    def __init__(self, capacity: int, block_size: int, rng: random.Random) -> None:
        self.block_size = block_size
        self.rng = rng
        self.slots: dict[int, bytes | None] = dict.fromkeys(range(capacity))

    def name(self, parent: bytes | None, tokens: list[int], salt: str | None) -> bytes:
        """Return the engine's own name of a block."""
        return hashlib.sha256(repr((parent, tokens, salt)).encode()).digest()

    def names(self, prompt: list[int], salt: str | None) -> list[bytes]:
        """Return the names of a prompt's whole blocks."""
        names: list[bytes] = []
        for end in range(self.block_size, len(prompt) + 1, self.block_size):
            tokens = prompt[end - self.block_size : end]
            parent = names[-1] if names else None
            names.append(self.name(parent, tokens, None if names else salt))
        return names

    def serve(
        self, prompt: list[int], salt: str | None = None, *, full: bool = False
    ) -> list[Event]:
        """Compute a prompt; returns the events.

        Args:
            full: also report the blocks that were hit, as `kv_cache_report_mode=full` does.
        """
        names = self.names(prompt, salt)
        held = set(self.slots.values())
        hits = 0
        while hits < min(len(names), (len(prompt) - 1) // self.block_size) and names[hits] in held:
            hits += 1
        events: list[Event] = []
        if full and hits:
            events.append(self._stored(prompt, names, 0, hits, salt))
        used = [self._touch(name) for name in names[:hits]]
        fresh = names[hits:]
        for name in fresh:
            slot = next(slot for slot in self.slots if slot not in used)
            evicted = self.slots.pop(slot)
            if evicted is not None:
                events.append(BlockRemoved([evicted], "GPU", 0))
            self.slots[slot] = name
            used.append(slot)
        if fresh:
            events.append(self._stored(prompt, names, hits, len(names), salt))
        for slot in reversed(used):  # freed tail first, so that leaves are reused first
            self.slots[slot] = self.slots.pop(slot)
        return events

    def _touch(self, name: bytes) -> int:
        return next(slot for slot, held in self.slots.items() if held == name)

    def _stored(
        self, prompt: list[int], names: list[bytes], start: int, end: int, salt: str | None
    ) -> BlockStored:
        keys: list[list[str] | None] = [None] * (end - start)
        if start == 0 and salt is not None:
            keys[0] = [salt]
        return BlockStored(
            block_hashes=list(names[start:end]),
            parent_block_hash=names[start - 1] if start else None,
            token_ids=prompt[start * self.block_size : end * self.block_size],
            block_size=self.block_size,
            medium="GPU",
            extra_keys=keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def clear(self) -> list[Event]:
        """Reset the prefix cache."""
        self.slots = dict.fromkeys(self.slots)
        return [AllBlocksCleared()]

    def holds(self, chains: list[tuple[list[int], str | None]]) -> set[BlockHash]:
        """Return our hashes of what is held, of all prompts ever served."""
        held = set(self.slots.values())
        found: set[BlockHash] = set()
        for prompt, salt in chains:
            parent = ROOT
            for at, name in enumerate(self.names(prompt, salt)):
                tokens = pack_tokens(prompt[at * self.block_size : (at + 1) * self.block_size])
                parent = hash_block(tokens, Extras(salt=salt).of_block(at), parent)
                if name in held:
                    found.add(parent)
        return found
