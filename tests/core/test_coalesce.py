import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.coalesce import CoalesceConfig, Coalescer, Follower, Leader
from controlplane.core.decision import RouteRequest
from controlplane.core.hashing import Extras, chain, pack_tokens
from tests.core.plane_helpers import BLOCK

TOKENS = 4 * BLOCK
CONFIG = CoalesceConfig(TOKENS, 5.0)


def hashes(shared: int, own: int, extras: Extras = Extras()) -> list[int]:  # noqa: B008
    """Returns a chain of `shared` blocks that all have, and two of its own."""
    ids = [*range(shared * BLOCK), *(own + n for n in range(2 * BLOCK))]
    return chain(pack_tokens(ids), BLOCK, extras=extras)


def follow(
    coalescer: Coalescer, blocks: list[int], cached: int = 0, now_s: float = 0.0
) -> Follower | None:
    """Lets a request follow, if it may."""
    return coalescer.follow("payload", asked(blocks), lambda: cached, now_s)


def asked(blocks: list[int]) -> RouteRequest:
    """Returns a request with these blocks."""
    return RouteRequest("r", len(blocks) * BLOCK, blocks, BLOCK)


def lead(coalescer: Coalescer, blocks: list[int], new: int = 10_000) -> Leader:
    """Lets a request lead at instance `i`."""
    leader, _ = coalescer.lead("i", blocks, new, 0.0)
    assert leader is not None
    return leader


def test_a_request_that_shares_enough_follows_until_the_prefix_is_there() -> None:
    """Its instance must hold the last block that both share; its own blocks do not matter."""
    coalescer = Coalescer(CONFIG)
    leader = lead(coalescer, hashes(6, 1000))
    follower = follow(coalescer, hashes(6, 2000))
    assert follower is not None
    assert follower.key == hashes(6, 2000)[5]
    assert coalescer.look(lambda instance, key: False, 1.0) == []
    assert coalescer.look(lambda instance, key: (instance, key) == ("i", follower.key), 1.0) == [
        follower
    ]
    assert coalescer.end(leader) == []
    coalescer.check()


@pytest.mark.parametrize(
    ("shared", "cached", "follows"), [(4, 0, True), (3, 0, False), (6, 48, False)]
)
def test_what_is_shared_must_be_long_and_cached_nowhere(
    shared: int, cached: int, follows: bool
) -> None:
    """Waiting for less costs more than computing it twice."""
    coalescer = Coalescer(CONFIG)
    lead(coalescer, hashes(shared, 1000))
    assert (follow(coalescer, hashes(shared, 2000), cached) is not None) == follows


def test_other_salts_and_adapters_are_other_prefixes() -> None:
    """They share no block, whatever their texts."""
    coalescer = Coalescer(CONFIG)
    lead(coalescer, hashes(8, 1000, Extras("lora")))
    lead(coalescer, hashes(8, 1000, Extras(None, "salt")))
    assert follow(coalescer, hashes(8, 1000)) is None
    assert follow(coalescer, hashes(8, 1000, Extras("lora", "salt"))) is None
    assert follow(coalescer, hashes(8, 1000, Extras("lora"))) is not None


def test_a_tenant_that_is_kept_apart_follows_itself_alone() -> None:
    """The same blocks have other names for it, but what it waits for is the block itself."""
    coalescer = Coalescer(CONFIG)
    blocks = hashes(6, 1000)

    def follows(owner: str) -> Follower | None:
        return coalescer.follow("x", asked(blocks), lambda: 0, 0.0, owner)

    leader, _ = coalescer.lead("i", blocks, 10_000, 0.0, "acme")
    assert leader is not None
    assert follows("") is follows("other") is None
    follower = follows("acme")
    assert follower is not None
    assert follower.key in blocks
    coalescer.end(leader)
    lead(coalescer, blocks)
    assert follows("acme") is None
    assert follows("") is not None


def test_a_short_computation_is_not_worth_following() -> None:
    """A request with few new tokens leads nobody."""
    coalescer = Coalescer(CONFIG)
    assert coalescer.lead("i", hashes(8, 1), TOKENS - 1, 0.0) == (None, [])
    assert coalescer.lead("i", [], 10_000, 0.0) == (None, [])


def test_followers_are_released_when_the_leader_ends_or_their_time_does() -> None:
    """In the order of their coming; ending twice releases nobody."""
    coalescer = Coalescer(CONFIG)
    leader = lead(coalescer, hashes(6, 1000))
    first, second = follow(coalescer, hashes(6, 1)), follow(coalescer, hashes(6, 2), now_s=3.0)
    assert first is not None
    assert coalescer.look(lambda *_: False, 5.0) == [first]
    assert coalescer.end(leader) == [second]
    assert coalescer.end(leader) == []
    assert not coalescer.leave(first)
    coalescer.check()


def test_at_the_bounds_the_oldest_leader_goes_and_nobody_follows() -> None:
    """What followed a forgotten leader is released."""
    config = CoalesceConfig(TOKENS, 5.0, leaders_max=1, followers_max=1)
    coalescer = Coalescer(config)
    lead(coalescer, hashes(6, 1000))
    follower = follow(coalescer, hashes(6, 2))
    assert follow(coalescer, hashes(6, 3)) is None
    _, released = coalescer.lead("j", hashes(5, 7000), 10_000, 0.0)
    assert released == [follower]
    assert len(coalescer) == 1
    coalescer.check()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("LFEXT"), st.integers(2, 8), st.integers(0, 9)), max_size=60)
)
def test_its_books_stay_right_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    """Leaders and followers come, leave, end and time out in any order; none is lost."""
    coalescer = Coalescer(CoalesceConfig(TOKENS, 5.0, leaders_max=3, followers_max=4))
    leaders: list[Leader] = []
    waiting: list[Follower] = []
    for now, (step, shared, own) in enumerate(steps):
        released: list[Follower] = []
        if step == "L":
            leader, released = coalescer.lead("i", hashes(shared, 1000 * own), 9999, float(now))
            assert leader is not None
            leaders.append(leader)
        elif step == "F":
            found = follow(coalescer, hashes(shared, 500 + 1000 * own), now_s=float(now))
            waiting += [found] if found is not None else []
        elif step == "E" and leaders:
            released = coalescer.end(leaders.pop(own % len(leaders)))
        elif step == "X" and waiting:
            assert coalescer.leave(waiting.pop(own % len(waiting)))
        else:
            released = coalescer.look(lambda _, key: key % 3 == 0, float(now))
        for each in released:
            waiting.remove(each)
        assert coalescer.following == len(waiting)
        coalescer.check()
