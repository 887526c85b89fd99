"""What goes into and comes out of the emulated engine, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import xxhash

from controlplane.core.hashing import BlockHash
from lab.block_pool import EngineHash
from lab.profiles import StepTimes

FinishReason = Literal["stop", "length", "abort"]

_ENGINE_MARK = 0x9E37_79B9_7F4A_7C15


def engine_hash(block_hash: BlockHash) -> EngineHash:
    """Return the engine's name for one of our blocks: one to one, and equal to none in practice.

    Real vLLM's names are unrelated to ours; a component that confuses the two must fail in the lab.
    """
    return block_hash ^ _ENGINE_MARK


def engine_hashes(block_hashes: Iterable[BlockHash]) -> list[EngineHash]:
    """Return `engine_hash` of each block, faster than one by one."""
    return [each ^ _ENGINE_MARK for each in block_hashes]


def block_hash_of(name: EngineHash) -> BlockHash:
    """Return the block that `engine_hash` gave this name."""
    return name ^ _ENGINE_MARK


def digest(data: bytes) -> int:
    """Return 64 well mixed bits of `data`: a seed."""
    return xxhash.xxh3_64_intdigest(data)


def chained_id(number: int, parent: int) -> int:
    """Return 64 bits that stand for `number` after everything that `parent` stands for."""
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), parent)


def derived_hashes(parent: EngineHash, count: int) -> list[EngineHash]:
    """Return a chain of `count` hashes for blocks whose tokens nobody needs, after `parent`."""
    chain: list[EngineHash] = []
    for _ in range(count):
        parent = xxhash.xxh3_64_intdigest(b"derived", parent)
        chain.append(parent)
    return chain


class EngineConfig(msgspec.Struct, frozen=True):
    """Limits of one engine, under vLLM's names.

    Attributes:
        num_blocks: with the null block.
        watermark: share of blocks kept free when a waiting request is admitted beside others.
        report_events: whether block events are collected.

    Raises:
        ValueError: a limit is not positive, or one longest request does not fit.
    """

    num_blocks: int
    step_times: StepTimes
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 32_768
    watermark: float = 0.0
    prefix_caching: bool = True
    report_events: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark={self.watermark} must be at least 0 and less than 1")
        if (self.num_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_size} tokens (one is the null block) do "
                f"not hold max_model_len={self.max_model_len}: raise the former or lower the latter"
            )


class Request(msgspec.Struct, frozen=True):
    """One request, its answer's length included: the emulated engine knows how it will end.

    Attributes:
        prompt_tokens: at least 1.
        output_tokens: tokens until it ends, at least 1.
        block_hashes: the chain of the engine's hashes over prompt and answer: at least one for
            every whole block of all tokens but the last, which is never computed.
        finish_reason: why it ends after `output_tokens`.
        report_hits: re-announce the blocks that it hits (`kv_cache_report_mode` "full").
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[EngineHash]
    finish_reason: FinishReason = "length"
    report_hits: bool = False


class BlocksStored(msgspec.Struct, frozen=True):
    """Whole blocks of a request that became reusable (or, on request, were re-announced).

    Attributes:
        first_block: position in the request of the first one.
        parent: the hash before it; None at the root.
    """

    request_id: str
    first_block: int
    hashes: Sequence[EngineHash]
    parent: EngineHash | None


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Evicted copies, in order; on the wire each is an event of its own."""

    hashes: Sequence[EngineHash]


class CacheCleared(msgspec.Struct, frozen=True):
    """The whole prefix cache was reset."""


EngineEvent = BlocksStored | BlocksRemoved | CacheCleared


class Output(msgspec.Struct, frozen=True):
    """What a step gave one request.

    Attributes:
        new_tokens: generated in it: 1, or more where steps were skipped over.
        finish_reason: None while the request goes on.
        cached_tokens: with its first token, how many prompt tokens were hits; else None.
    """

    request_id: str
    new_tokens: int
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None


class StepResult(msgspec.Struct, frozen=True):
    """One engine step, or several alike; all of it is due `duration_s` after the step began.

    Attributes:
        steps: how many engine steps this stands for; 0 where nothing was scheduled.
        scheduled_tokens: request id → tokens computed.
        preempted: requests sent back to the queue.
        queries: tokens of the requests admitted for the first time, for the hit-rate counters.
        hits: how many of them were found cached.
        running: requests in the batch after it, likewise `waiting` in the queue.
        kv_usage: share of blocks in use after it.
    """

    duration_s: float
    steps: int
    scheduled_tokens: dict[str, int]
    outputs: list[Output]
    events: list[EngineEvent]
    preempted: list[str]
    queries: int
    hits: int
    running: int
    waiting: int
    kv_usage: float
