"""What an emulated server publishes, read from a real socket as a sidecar would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from controlplane.core.hashing import event_extras, hash_block, pack_tokens
from lab.engine_types import block_hash_of
from schemas.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
)
from tests.lab.server_helpers import Client, serving

COMPLETION = "/v1/completions"


class Listener:
    """A subscriber of one server's events."""

    def __init__(self, client: Client, socket: zmq.asyncio.Socket) -> None:
        self.client = client
        self.socket = socket

    async def batch(self) -> EventBatch:
        """The next batch."""
        assert await self.socket.poll(5000), "no batch came"
        frames = await self.socket.recv_multipart()
        return decode_batch(frames[2])

    async def complete(self, prompt: list[int], **fields: Any) -> EventBatch:
        """Send a completion, and return the first batch it makes."""
        await self.client.ok(COMPLETION, {"prompt": prompt, "max_tokens": 1, **fields})
        return await self.batch()


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[Listener]:
    """A server and a subscriber that already hears it."""
    async with serving(**options) as client:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.connect(client.server.publisher.endpoint)  # type: ignore[union-attr]
        socket.subscribe(b"")
        while not await socket.poll(20):
            client.server.publisher.publish(b"probe")  # type: ignore[union-attr]
        while await socket.poll(50):
            await socket.recv_multipart()
        try:
            yield Listener(client, socket)
        finally:
            context.destroy(linger=0)


def recomputed(event: BlockStored, parent: int = 0) -> list[int]:
    """Our hashes of an event's blocks, from its tokens and extras alone."""
    hashes = []
    keys = event.extra_keys or [None] * len(event.block_hashes)
    for ids, extra in zip(batched_ids(event), keys, strict=True):
        parent = hash_block(pack_tokens(ids), event_extras(event.lora_name, extra), parent)
        hashes.append(parent)
    return hashes


def batched_ids(event: BlockStored) -> list[list[int]]:
    """An event's tokens, block by block."""
    starts = range(0, len(event.token_ids), event.block_size)
    return [event.token_ids[start : start + event.block_size] for start in starts]


@pytest.mark.parametrize("encoding", ["map", "array"])
async def test_stored_blocks_carry_their_tokens(encoding: str) -> None:
    """In both encodings an event's tokens and hashes are the prompt's, without the rest."""
    prompt = list(range(300, 340))
    async with listening(kv_encoding=encoding) as listener:
        batch = await listener.complete(prompt)
        assert batch.rejected == 0
        assert batch.data_parallel_rank == 0
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert event.token_ids == prompt[:32]
        assert (event.parent_block_hash, event.medium, event.group_idx) == (None, "GPU", 0)
        assert event.extra_keys == [None, None]
        assert recomputed(event) == [block_hash_of(each) for each in event.block_hashes]


async def test_generated_tokens_are_stored_with_their_parent() -> None:
    """A block that ends within the answer has the prompt's tail and the answer's tokens."""
    prompt = list(range(300, 328))
    async with listening() as listener:
        body = {"prompt": prompt, "max_tokens": 12, "return_token_ids": True}
        answer = await listener.client.ok(COMPLETION, body)
        first, second = (await listener.batch()).events, (await listener.batch()).events
        assert isinstance(first[0], BlockStored)
        assert isinstance(second[0], BlockStored)
        assert second[0].parent_block_hash == first[0].block_hashes[-1]
        tokens = prompt + answer["choices"][0]["token_ids"]
        assert second[0].token_ids == tokens[16:32]


async def test_extras_are_told_untagged() -> None:
    """Salt on the first block, adapter on every one, both recomputable."""
    prompt = list(range(300, 340))
    async with listening(loras=["style"]) as listener:
        (event,) = (await listener.complete(prompt, model="style", cache_salt="t")).events
        assert isinstance(event, BlockStored)
        assert event.extra_keys == [["style", "t"], ["style"]]
        assert (event.lora_name, event.lora_id) == ("style", 1)
        assert recomputed(event) == [block_hash_of(each) for each in event.block_hashes]


async def test_session_is_told() -> None:
    """A session id from the header comes with the stored blocks."""
    async with listening() as listener:
        body = {"prompt": list(range(300, 320)), "max_tokens": 1}
        await listener.client.ok(COMPLETION, body, **{"X-Session-ID": "s-9"})
        (event,) = (await listener.batch()).events
        assert isinstance(event, BlockStored)
        assert event.session_id == "s-9"


async def test_hits_are_told_on_request_only() -> None:
    """`kv_cache_report_mode` full repeats the hit blocks."""
    prompt = list(range(300, 340))
    async with listening() as listener:
        (first,) = (await listener.complete(prompt)).events
        full = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
        (again,) = (await listener.complete(prompt, **full)).events
        assert again == first


async def test_removals_are_one_event_a_block() -> None:
    """Evictions come before what is stored, each block on its own."""
    async with listening(num_blocks=9, max_model_len=128) as listener:
        await listener.complete(list(range(300, 380)))
        batch = await listener.complete(list(range(400, 496)))
        *removed, stored = batch.events
        assert isinstance(stored, BlockStored)
        assert all(isinstance(event, BlockRemoved) for event in removed)
        assert [
            len(event.block_hashes) for event in removed if isinstance(event, BlockRemoved)
        ] == ([1] * len(removed))
        assert len(removed) == 3


async def test_reset_is_told_with_the_next_step() -> None:
    """After a reset the next request's batch begins with the clearing."""
    prompt = list(range(300, 340))
    async with listening() as listener:
        await listener.complete(prompt)
        await listener.client.ok("/reset_prefix_cache", b"")
        assert not await listener.socket.poll(50)
        cleared, stored = (await listener.complete(prompt)).events
        assert isinstance(cleared, AllBlocksCleared)
        assert isinstance(stored, BlockStored)


async def test_lost_batches_can_be_asked_for() -> None:
    """The fault `drop_events` leaves a gap in the numbers that a later batch shows."""
    async with listening() as listener:
        await listener.client.ok("/debug/fault", {"kind": "drop_events", "count": 1})
        lost = listener.client.server.publisher.next_seq  # type: ignore[union-attr]
        body = {"prompt": list(range(300, 320)), "max_tokens": 1}
        await listener.client.ok(COMPLETION, body)
        await listener.client.ok(COMPLETION, {**body, "prompt": list(range(400, 420))})
        assert await listener.socket.poll(5000)
        _, seq, _ = await listener.socket.recv_multipart()
        assert int.from_bytes(seq, "big") == lost + 1
