"""Events as today's vLLM sends them."""

from __future__ import annotations

from typing import Any

from schemas.vllm_events import BlockRemoved, BlockStored, EngineBlockHash

SIZE = 4


def stored(
    names: list[EngineBlockHash],
    tokens: list[int],
    parent: EngineBlockHash | None = None,
    **more: Any,
) -> BlockStored:
    """A store as today's vLLM sends it."""
    fields: dict[str, Any] = {
        "medium": "GPU",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "extra_keys": [None] * len(names),
    }
    return BlockStored(names, parent, tokens, SIZE, **(fields | more))


def removed(*names: EngineBlockHash, medium: str = "GPU", group: int | None = 0) -> BlockRemoved:
    """A removal as today's vLLM sends it."""
    return BlockRemoved(list(names), medium, group)
