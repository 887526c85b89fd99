"""The prefix cache against its naive twin, at its bounds, and for what it says of its size."""

import os
import random
import tracemalloc
from collections.abc import Sequence

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.core.hashing import NO_EXTRAS, Extras, chain, pack_tokens
from router.prefix_cache import NODE_BYTES, Handle, PrefixCache, Space
from tests.models.naive_prefix_cache import NaivePrefixCache, Prefix

BLOCK = 4
HANDLES_MAX = 6
BUDGET = 12 * NODE_BYTES
# Segments of few and of many tokens, none included: so that blocks end in and between them.
TOKENS = {
    f"s{i}": pack_tokens(range(10 * i, 10 * i + n)) for i, n in enumerate((0, 1, 3, 4, 9, 26))
}
EXTRAS = (NO_EXTRAS, Extras(salt="tenant"), Extras(lora="adapter"))
PROMPTS = st.tuples(
    st.sampled_from(EXTRAS),
    st.sampled_from((b"", pack_tokens([7]), pack_tokens(range(5)))),
    st.lists(st.sampled_from(sorted(TOKENS)), max_size=5).map(tuple),
)


def add(cache: PrefixCache, space: Space, extras: Extras, texts: Sequence[str]) -> Handle:
    """Registers a prompt, a token a letter, extends it to its end, and returns its handle."""
    registered = cache.register(space, extras, texts)
    assert registered is not None
    handle, depth = registered
    for text in texts[depth:]:
        cache.extend(handle, text, pack_tokens(list(text.encode())))
    return handle


class Twins(RuleBasedStateMachine):
    """Both caches see the same prompts, pins and releases, and must agree after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(BUDGET, HANDLES_MAX)
        self.space = self.cache.space(BLOCK)
        self.naive = NaivePrefixCache(BLOCK, BUDGET, HANDLES_MAX)
        self.naive.tokens = TOKENS
        self.handles: dict[int, Handle] = {}
        self.named = 0

    def keep(self, handle: Handle, prefix: Prefix) -> int:
        """Notes a handle in both worlds."""
        self.named += 1
        self.handles[self.named] = handle
        self.naive.handles[self.named] = prefix
        return self.named

    @rule(prompt=PROMPTS)
    def register(self, prompt: Prefix) -> None:
        """The longest known prefix is found, unless too many handles are out."""
        extras, opening, texts = prompt
        registered = self.cache.register(self.space, extras, texts, opening)
        if len(self.handles) >= HANDLES_MAX:
            assert registered is None
            return
        assert registered is not None
        found = self.naive.longest(prompt)
        assert registered[1] == len(found[2])
        self.keep(registered[0], found)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), text=st.sampled_from(sorted(TOKENS)))
    def extend(self, data: st.DataObject, text: str) -> None:
        """A handle moves on by a segment, which may be known already."""
        name = data.draw(st.sampled_from(sorted(self.handles)))
        known = self.cache.tokens_of(self.space, text)
        assert known in (None, TOKENS[text])
        self.cache.extend(self.handles[name], text, known or TOKENS[text])
        extras, opening, texts = self.naive.handles[name]
        self.naive.handles[name] = (extras, opening, (*texts, text))
        self.naive.add(self.naive.handles[name])

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A second handle to the same prefix keeps it as the first one does."""
        name = data.draw(st.sampled_from(sorted(self.handles)))
        handle = self.cache.pin(self.handles[name])
        assert (handle is None) == (len(self.handles) >= HANDLES_MAX)
        if handle is not None:
            self.keep(handle, self.naive.handles[name])

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """What is over the budget goes, least recently used first."""
        name = data.draw(st.sampled_from(sorted(self.handles)))
        self.cache.release(self.handles.pop(name))
        self.naive.release(name)

    @invariant()
    def agree(self) -> None:
        """Sizes, counts, hashes and the order of use are the twin's."""
        self.cache.check()
        stats = self.cache.stats
        assert stats.bytes_used == self.naive.size_bytes()
        assert stats.handles == len(self.handles)
        assert len(self.cache._order) == len(self.naive.order)
        for name, handle in self.handles.items():
            prefix = self.naive.handles[name]
            ids = self.naive.ids(prefix)
            assert handle.tokens == len(ids) // 4
            assert handle.hashes() == self.naive.hashes(prefix)
            assert handle.head(5) == ids[:20]
            more = pack_tokens(range(6))
            assert handle.hashes_with(more) == chain(ids + more, BLOCK, extras=prefix[0])

    def teardown(self) -> None:
        """With all handles back, the budget holds."""
        for name in list(self.handles):
            self.cache.release(self.handles.pop(name))
            self.naive.release(name)
            self.agree()
        assert self.cache.stats.bytes_used <= BUDGET


TestTwins = pytest.mark.slow(Twins.TestCase)
TestTwins.settings = settings(max_examples=40, stateful_step_count=40)


@given(prompts=st.lists(PROMPTS, min_size=2, max_size=2))
def test_extras_never_share_a_chain(prompts: list[Prefix]) -> None:
    """Under another salt, adapter or opening the same segments are found anew and hash apart."""
    (first, opening, texts), (second, other_opening, _) = prompts
    cache = PrefixCache()
    space = cache.space(BLOCK)
    registered = cache.register(space, first, texts, opening)
    assert registered is not None
    handle, _ = registered
    for text in texts:
        cache.extend(handle, text, TOKENS[text])
    other = cache.register(space, second, texts, other_opening)
    assert other is not None
    same = (first, opening) == (second, other_opening)
    assert other[1] == (len(texts) if same else 0)
    if first != second:
        for text in texts:
            cache.extend(other[0], text, TOKENS[text])
        assert not set(handle.hashes()) & set(other[0].hashes())


def test_spaces_share_nothing() -> None:
    """Another model's prompts have their own tokens, whatever their text."""
    cache = PrefixCache()
    one, other = cache.space(BLOCK), cache.space(8)
    cache.release(add(cache, one, NO_EXTRAS, ["hello", "world"]))
    assert cache.tokens_of(other, "hello") is None
    handle, depth = cache.register(other, NO_EXTRAS, ["hello"]) or pytest.fail("refused")
    assert depth == 0
    cache.release(handle)


def test_a_dropped_space_leaves_nothing() -> None:
    """When a model's card is replaced its prompts go; those in use follow once they are idle."""
    cache = PrefixCache()
    space, kept = cache.space(BLOCK), cache.space(BLOCK)
    cache.release(add(cache, kept, NO_EXTRAS, ["stays"]))
    before = cache.stats.bytes_used
    cache.release(add(cache, space, NO_EXTRAS, ["a", "b", "c"]))
    held = add(cache, space, NO_EXTRAS, ["a", "d"])
    cache.drop(space)
    cache.check()
    assert cache.tokens_of(space, "c") is None
    assert held.tokens == 2
    cache.release(held)
    cache.drop(space)
    cache.check()
    assert cache.stats.bytes_used == before
    assert cache.tokens_of(kept, "stays") is not None


def test_without_blocks_there_are_tokens_but_no_hashes() -> None:
    """An engine that publishes no blocks has prompts with lengths all the same."""
    cache = PrefixCache()
    handle = add(cache, cache.space(0), NO_EXTRAS, ["hello", "world"])
    assert (handle.tokens, handle.hashes(), handle.hashes_with(b"1234")) == (10, [], [])


def test_a_handle_is_given_back_once() -> None:
    """Using a handle after its release is a mistake that shows."""
    cache = PrefixCache()
    handle = add(cache, cache.space(BLOCK), NO_EXTRAS, ["a"])
    cache.release(handle)
    with pytest.raises(AssertionError, match="released"):
        cache.release(handle)


def test_pinned_prefixes_outlive_the_budget() -> None:
    """Over a budget of nothing, what a handle refers to stays until the handle is back."""
    cache = PrefixCache(budget_bytes=0)
    space = cache.space(BLOCK)
    held = add(cache, space, NO_EXTRAS, ["a", "b"])
    cache.release(add(cache, space, NO_EXTRAS, ["a", "c"]))
    assert (cache.stats.nodes, cache.stats.evictions) == (3, 1)
    cache.release(held)
    assert (cache.stats.nodes, cache.stats.segments, cache.stats.bytes_used) == (0, 0, 0)
    assert not space.roots


def test_many_salts_leave_no_roots() -> None:
    """Salts that come once and go cost nothing after their prompts are evicted."""
    cache = PrefixCache(budget_bytes=20 * NODE_BYTES)
    space = cache.space(BLOCK)
    for i in range(500):
        cache.release(add(cache, space, Extras(salt=f"tenant {i}"), ["system prompt", f"q{i}"]))
    cache.check()
    assert len(space.roots) <= 20
    assert cache.stats.segments <= 20


def test_a_handle_moves_up_to_what_it_is_to_keep() -> None:
    """It pins the shortest prefix with so many blocks, and what is below it may be evicted."""
    cache = PrefixCache(budget_bytes=4 * NODE_BYTES)
    space = cache.space(BLOCK)
    handle = add(cache, space, NO_EXTRAS, ["a" * 40, "b" * 40, "c" * 40])
    whole, wanted = handle.blocks, add(cache, space, NO_EXTRAS, ["a" * 40, "b" * 40])
    blocks = wanted.blocks
    cache.release(wanted)
    cache.shorten(handle, whole + 1)
    assert handle.blocks == whole
    cache.shorten(handle, blocks)
    assert 0 < handle.blocks == blocks < whole
    for number in range(20):
        cache.release(add(cache, space, NO_EXTRAS, [f"{number}" * 40]))
        cache.check()
    assert handle.blocks == blocks
    cache.release(handle)
    cache.drop(space)
    cache.check()
    assert (cache.stats.handles, cache.stats.nodes) == (0, 0)


def test_long_salts_count_in_the_budget() -> None:
    """A caller who sends one long salt after the other fills the budget, not the memory."""
    cache = PrefixCache(budget_bytes=200_000)
    space = cache.space(BLOCK)
    for i in range(100):
        cache.release(add(cache, space, Extras(salt=f"{i}" * 10_000), ["system prompt", f"q{i}"]))
    cache.check()
    kept = sum(len(extras.salt or "") for extras, _ in space.roots)
    assert 100_000 < kept <= 200_000


@pytest.mark.slow
def test_sizes_are_what_python_takes() -> None:
    """The bytes that the budget is held against are within a fifth of what is really used."""
    chance = random.Random(1)
    texts = [
        [f"<user>{chance.random()}" + "word " * chance.randint(10, 400) for _ in range(8)]
        for _ in range(400)
    ]
    tokens = {text: pack_tokens(range(len(text) // 4)) for chat in texts for text in chat}
    cache = PrefixCache()
    space = cache.space(16)
    tracemalloc.start()
    try:
        for chat in texts:
            registered = cache.register(space, NO_EXTRAS, chat)
            assert registered is not None
            for text in chat[registered[1] :]:
                cache.extend(registered[0], text + "", bytes(bytearray(tokens[text])))
            cache.release(registered[0])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    used += sum(len(text) + 49 for text in tokens)  # the texts were made before
    assert 0.8 < cache.stats.bytes_used / used < 1.25


@pytest.mark.slow
def test_nothing_leaks() -> None:
    """After any number of chats the cache is within its budget, and empty once dropped.

    MULTIPLANE_LEAK_REQUESTS=1000000 makes it the long run, of less than a minute.
    """
    requests = int(os.environ.get("MULTIPLANE_LEAK_REQUESTS", "10000"))
    chance = random.Random(2)
    cache = PrefixCache(budget_bytes=400_000, handles_max=32)
    space = cache.space(BLOCK)
    chats: list[list[str]] = [["system"] for _ in range(50)]
    held: list[Handle] = []
    warm_bytes = 0
    for at in range(requests):
        if at == requests // 10:
            warm_bytes = psutil.Process().memory_info().rss
        slot = chance.randrange(len(chats))
        chats[slot] = [*chats[slot], f"turn {at}"] if len(chats[slot]) < 9 else ["system"]
        handle = add(cache, space, chance.choice(EXTRAS), chats[slot])
        if chance.random() < 0.2 and len(held) < 20:
            held.append(handle)
        else:
            cache.release(handle)
        if len(held) >= 20 or chance.random() < 0.1:
            for handle in held:
                cache.release(handle)
            held.clear()
            assert cache.stats.bytes_used <= cache.budget_bytes
    for handle in held:
        cache.release(handle)
    cache.check()
    assert psutil.Process().memory_info().rss - warm_bytes < 8_000_000
    assert cache.stats.evictions > requests // 2
    cache.drop(space)
    assert (cache.stats.nodes, cache.stats.segments, cache.stats.bytes_used) == (0, 0, 0)
