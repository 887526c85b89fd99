import pytest

from bench.caches import BLOCK_SIZE, FleetCaches, Shape
from bench.decision import Ours

SHAPE = Shape(6, 20_000, prompt_tokens=(1_024, 8_192), moved=0.8, moved_holders=3)


def test_content_is_prefix_closed_and_stored_once():
    """Every chain hangs from what its instance holds already, and brings only new blocks."""
    held = [set[int]() for _ in range(SHAPE.instances)]
    caches = FleetCaches(SHAPE)
    for stored in caches.stores:
        mine = held[stored.instance]
        hashes = stored.hashes.tolist()
        assert hashes
        assert stored.parent is None or stored.parent in mine
        assert not mine & set(hashes)
        mine.update(hashes)
    assert caches.distinct == len(set.union(*held)) == pytest.approx(20_000, rel=0.2)


def test_content_and_prompts_follow_from_the_seed():
    """The same seed makes the same content and prompts; another makes others."""
    first, second, other = FleetCaches(SHAPE), FleetCaches(SHAPE), FleetCaches(SHAPE, seed=2)
    assert first.prompts(1_024, 5) == second.prompts(1_024, 5) != other.prompts(1_024, 5)


def test_prompts_hit_as_conversations_do():
    """Prompts have the length that was asked for; most are partly cached, some not at all."""
    caches = FleetCaches(SHAPE)
    ours = Ours(SHAPE.instances, caches.stores)
    for tokens in SHAPE.prompt_tokens:
        prompts = caches.prompts(tokens, 200)
        assert {len(prompt) for prompt in prompts} == {tokens // BLOCK_SIZE}
        hits = [max(ours.blocks_held(prompt).values(), default=0) for prompt in prompts]
        assert 0 < hits.count(0) < 40
        assert sum(hit > 0.5 * tokens / BLOCK_SIZE for hit in hits) > 60
