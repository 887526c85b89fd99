"""What a fleet has cached, made up to resemble chat and agent traffic, for the benchmarks.

System prompts are shared by most instances; a conversation lives on one instance, sometimes with
an earlier stretch of it on another; some of either is partly evicted, from the end. Everything is
prefix-closed, and follows from the seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
"""Tokens a block: vLLM's default."""

Hashes = npt.NDArray[np.uint64]


class Stored(msgspec.Struct, frozen=True):
    """A chain of blocks that an instance cached.

    Attributes:
        hashes: (n,) in prompt order.
        parent: the hash before the first; None at the root.
    """

    instance: int
    hashes: Hashes
    parent: int | None


class Shape(msgspec.Struct, frozen=True):
    """How the content is made; the shares are of instances or conversations.

    Attributes:
        instances: size of the fleet.
        blocks: distinct blocks, roughly.
        prompt_tokens: lengths of prompts; each length gets an equal share of the blocks.
        system_prompts: how many there are; popular in inverse proportion to their rank.
        system_blocks: shortest and longest of them.
        system_whole: instances that hold all of a given system prompt.
        system_partial: instances that hold the beginning of it.
        moved: conversations of which other instances hold an earlier stretch.
        moved_holders: on how many others.
        evicted: conversations that are partly evicted.
        next_turns: prompts that continue a conversation.
        new_conversations: prompts that share only a system prompt; the rest shares nothing.
    """

    instances: int
    blocks: int = 1_000_000
    prompt_tokens: tuple[int, ...] = (1_024, 8_192, 65_536)
    system_prompts: int = 8
    system_blocks: tuple[int, int] = (16, 56)
    system_whole: float = 0.95
    system_partial: float = 0.02
    moved: float = 0.25
    moved_holders: int = 1
    evicted: float = 0.3
    next_turns: float = 0.75
    new_conversations: float = 0.2


class FleetCaches:
    """Content and prompts of one shape.

    Attributes:
        stores: what to put into an index, in this order.
        distinct: how many distinct blocks that is.
    """

    def __init__(self, shape: Shape, seed: int = 1) -> None:
        self.shape = shape
        self._rng = np.random.default_rng(seed)
        self._systems = [
            self._fresh(int(self._rng.integers(*shape.system_blocks, endpoint=True)))
            for _ in range(shape.system_prompts)
        ]
        weights = 1.0 / np.arange(1, shape.system_prompts + 1)
        self._popularity = weights / weights.sum()
        # Per prompt length: (system prompt, the conversation's own blocks).
        self._conversations: dict[int, list[tuple[int, Hashes]]] = {}
        # Blocks of each system prompt that each instance holds.
        self._held = np.zeros((shape.instances, shape.system_prompts), np.int64)
        self.stores: list[Stored] = []
        self._cache_system_prompts()
        conversations = [
            stored for tokens in shape.prompt_tokens for stored in self._cache_conversations(tokens)
        ]
        self._rng.shuffle(conversations)
        self.stores += conversations
        self.distinct = len(np.unique(np.concatenate([s.hashes for s in self.stores])))

    def _fresh(self, blocks: int) -> Hashes:
        return self._rng.integers(1, 2**64, blocks, np.uint64)

    def _cache_system_prompts(self) -> None:
        shape = self.shape
        for system, hashes in enumerate(self._systems):
            for instance, draw in enumerate(self._rng.random(shape.instances)):
                if draw < shape.system_whole:
                    self._hold_system(instance, system, len(hashes))
                elif draw < shape.system_whole + shape.system_partial:
                    self._hold_system(instance, system, int(self._rng.integers(1, len(hashes))))

    def _hold_system(self, instance: int, system: int, depth: int) -> None:
        held, hashes = int(self._held[instance, system]), self._systems[system]
        if depth > held:
            parent = int(hashes[held - 1]) if held else None
            self.stores.append(Stored(instance, hashes[held:depth], parent))
            self._held[instance, system] = depth

    def _cache_conversations(self, tokens: int) -> Iterator[Stored]:
        """Yield the conversations' own blocks, with the system prompts under them stored before."""
        shape, rng = self.shape, self._rng
        blocks, made = tokens // BLOCK_SIZE, 0
        conversations = self._conversations[tokens] = []
        while made < shape.blocks // len(shape.prompt_tokens):
            system = int(rng.choice(shape.system_prompts, p=self._popularity))
            prompt = self._systems[system]
            own = self._fresh(blocks - len(prompt))
            conversations.append((system, own))
            reach = rng.uniform(0.8, 0.97) * (rng.random() if rng.random() < shape.evicted else 1.0)
            made += int(len(own) * reach)
            reaches = {int(rng.integers(shape.instances)): reach}
            if rng.random() < shape.moved:
                for other in rng.integers(shape.instances, size=shape.moved_holders):
                    reaches.setdefault(int(other), reach * rng.random())
            for instance, share in reaches.items():
                self._hold_system(instance, system, len(prompt))
                held = own[: int(len(own) * share)]
                if len(held):
                    yield Stored(instance, held, int(prompt[-1]))

    def prompts(self, tokens: int, count: int) -> list[list[int]]:
        """Return hash chains of prompts of one length: next turns, new conversations, strangers."""
        shape, rng = self.shape, self._rng
        prompts: list[list[int]] = []
        for draw in rng.random(count):
            if draw < shape.next_turns:
                known = self._conversations[tokens]
                system, own = known[int(rng.integers(len(known)))]
            elif draw < shape.next_turns + shape.new_conversations:
                system = int(rng.choice(shape.system_prompts, p=self._popularity))
                own = self._fresh(tokens // BLOCK_SIZE - len(self._systems[system]))
            else:
                prompts.append(self._fresh(tokens // BLOCK_SIZE).tolist())
                continue
            prompts.append([*self._systems[system].tolist(), *own.tolist()])
        return prompts
