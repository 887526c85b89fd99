"""The sidecar beside a real vLLM: its mirror counts what vLLM's own block pool holds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sidecar.feed import BlockFeed
from sidecar.mirror import Outcome
from tests.bus.worlds import MemoryWorld
from tests.sidecar.service_helpers import Router, eventually, sidecar_of
from tests.vllm.conftest import TIMEOUT_S, vllm_nursery, vllm_python
from tests.vllm.harness import VllmServer, VllmSpec
from tests.vllm.launch import Nursery

__all__ = ["vllm_nursery", "vllm_python"]  # fixtures

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

WAIT_S = 30.0


async def ask(server: VllmServer, prompt: list[int], tokens: int = 1, **more: Any) -> None:
    """Have the engine compute a prompt."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, **more}
    await asyncio.to_thread(server.post, "/v1/completions", body)


async def blocks_agree(server: VllmServer, feed: BlockFeed, router: Router) -> None:
    """Return once mirror and published set equal the engine's block pool, copies included."""
    truth = await asyncio.to_thread(server.cached_blocks)

    def same() -> bool:
        named = {feed.mirror.hash_of(name) for name in truth}
        held = feed.mirror.held()
        return named == held and feed.mirror.copies - sum(truth.values()) == 0

    await eventually(same, WAIT_S)
    feed.mirror.validate()
    feed.relay.validate()
    await eventually(lambda: router.blocks(feed.instance_id) == feed.relay.published(), WAIT_S)


async def test_the_mirror_counts_what_vllm_holds(vllm_nursery: Nursery) -> None:
    """Second copies, shared prefixes, eviction, resets, a late sidecar and a restart."""
    server = VllmServer(VllmSpec(num_blocks=120, max_model_len=1024), vllm_nursery)
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.wait_ready)
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    rng = random.Random(7)
    texts = [[rng.randrange(300, 3000) for _ in range(400)] for _ in range(4)]
    try:
        await ask(server, texts[0][:96])  # before the sidecar is there
        async with sidecar_of(server.url, await world.bus()) as service:
            await eventually(lambda: router.state("i-1") == "ready", WAIT_S)
            feed = service.instances[0].feed
            assert feed is not None
            assert feed.mirror.complete
            await blocks_agree(server, feed, router)

            for _ in range(3):  # whole blocks: the last one gets a second copy each time
                await ask(server, texts[0][:96])
                await ask(server, texts[1][:16])
            assert feed.mirror.outcomes[Outcome.REPEATED] >= 3
            await blocks_agree(server, feed, router)

            for _ in range(40):  # over and over what the cache holds
                text = rng.choice(texts)
                salt = {"cache_salt": "tenant"} if rng.random() < 0.2 else {}
                await ask(server, text[: rng.randrange(16, 400)], rng.randrange(1, 40), **salt)
            await blocks_agree(server, feed, router)
            await asyncio.gather(*(ask(server, texts[n % 4][:250], 20) for n in range(8)))
            await blocks_agree(server, feed, router)
            assert feed.mirror.outcomes[Outcome.REMOVED] > 50
            assert feed.mirror.unknown_removals == 0

            await asyncio.to_thread(server.reset_prefix_cache)
            await ask(server, texts[2][:200])
            await blocks_agree(server, feed, router)
            assert feed.mirror.outcomes[Outcome.CLEARED] == 1

            epoch = feed.epoch
            await asyncio.to_thread(server.kill)
            await eventually(lambda: router.state("i-1") == "stopped", WAIT_S)
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(server.wait_ready)
            await eventually(lambda: router.state("i-1") == "ready", WAIT_S)
            assert feed.epoch > epoch
            await ask(server, texts[3][:100])
            await blocks_agree(server, feed, router)
            card = router.records["i-1"].card
            assert len(card) == 64
            assert service.instances[0].load.tracked
    finally:
        await asyncio.to_thread(server.kill)
        await world.close()


async def test_each_rank_of_an_engine_is_an_instance(vllm_nursery: Nursery) -> None:
    """Data-parallel ranks have their own records, block streams and loads."""
    server = VllmServer(VllmSpec(data_parallel=2, num_blocks=200, max_model_len=1024), vllm_nursery)
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.wait_ready)
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    try:
        async with sidecar_of(server.url, await world.bus()):
            for rank in (0, 1):
                await eventually(lambda: router.state(f"i-1-dp{rank}") == "ready", WAIT_S)  # noqa: B023
                assert router.records[f"i-1-dp{rank}"].dp_rank == rank
            body = {"model": server.model, "prompt": list(range(300, 400)), "max_tokens": 1}
            headers = {"X-data-parallel-rank": "1"}
            await asyncio.to_thread(server.post, "/v1/completions", body, **headers)
            await eventually(lambda: len(router.blocks("i-1-dp1")) == 6, WAIT_S)
            assert router.blocks("i-1-dp0") == set()
            await eventually(lambda: router.loads["i-1-dp1"], WAIT_S)
            assert router.loads["i-1-dp1"][-1].server_load is None
    finally:
        await asyncio.to_thread(server.kill)
        await world.close()
