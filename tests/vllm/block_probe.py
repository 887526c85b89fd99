"""Lets a test read which blocks a running vLLM truly holds; loaded inside vLLM's engine process.

vLLM has no endpoint for it. Its own extension points suffice, and nothing of it is patched:

- `--scheduler-cls block_probe.ObservedScheduler` names vLLM's scheduler, which here also notes its
  block pool in this module;
- `POST /collective_rpc` (VLLM_SERVER_DEV_MODE=1) calls a method of the worker by name, in the
  engine's process, between two steps. `--worker-extension-cls block_probe.BlockProbe` gives a real
  worker the method `cached_blocks`; the simulated worker of sim_executor inherits it.

So the answer is the block pool's own map, as of one moment between two engine steps. It needs the
worker in the engine's process (VLLM_ENABLE_V1_MULTIPROCESSING=0). Tied to vLLM 0.32.
"""

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    get_block_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler

_pools: list[BlockPool] = []  # of this process: one an engine


class ObservedScheduler(Scheduler):
    """vLLM's scheduler, whose block pool `cached_blocks` reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _pools[:] = [self.kv_cache_manager.block_pool]


class BlockProbe:
    """What a worker gains: a look at the engine's prefix cache."""

    def cached_blocks(self) -> list[list[int]]:
        """Returns `[hash, copies]` for each full block that a request could hit now.

        The hash is the one in vLLM's events, the low 64 bits. vLLM does not de-duplicate, so one
        hash may have several physical blocks: `copies`.
        """
        (pool,) = _pools
        return block_copies(pool)


def block_copies(pool: BlockPool) -> list[list[int]]:
    """Returns `[hash, copies]` for each hash in a pool's map, in no order."""
    entries = pool.cached_block_hash_to_block._cache.items()
    return [[_event_hash(key), len(held) if isinstance(held, dict) else 1] for key, held in entries]


def _event_hash(key: BlockHashWithGroupId) -> int:
    engine_hash = maybe_convert_block_hash(get_block_hash(key))
    assert isinstance(engine_hash, int), "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES must be on"
    return engine_hash
