"""The mirror, event by event."""

from __future__ import annotations

import pytest

from controlplane.core.hashing import ROOT, Extras, chain, pack_tokens
from schemas.vllm_events import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
)
from sidecar.changes import Change, Cleared, Gone, Held
from sidecar.mirror import Mirror, MirrorConfig, Outcome
from tests.sidecar.mirror_events import SIZE, removed, stored


def feed(mirror: Mirror, *events: Event) -> list[Change]:
    """Apply one batch and check the mirror's own invariants."""
    changes = mirror.apply(EventBatch(0.0, list(events)))
    mirror.validate()
    return changes


def test_a_store_is_hashed_as_a_router_hashes_the_prompt() -> None:
    """Token ids, adapter and salt give the hashes that a request with them has."""
    mirror = Mirror()
    tokens = list(range(3 * SIZE))
    keys = [["lora", "salty"], ["lora"], ["lora"]]
    (change,) = feed(mirror, stored([1, 2, 3], tokens, lora_name="lora", extra_keys=keys))
    expected = chain(pack_tokens(tokens), SIZE, extras=Extras(lora="lora", salt="salty"))
    assert change == Held(ROOT, expected)
    assert mirror.held() == set(expected)


def test_a_child_hangs_from_its_parent_by_the_engines_name() -> None:
    """A later store continues the chain of the block it names."""
    mirror = Mirror()
    tokens = list(range(3 * SIZE))
    whole = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1, 2], tokens[: 2 * SIZE]))
    assert feed(mirror, stored([3], tokens[2 * SIZE :], parent=2)) == [Held(whole[1], [whole[2]])]


def test_a_second_copy_must_be_removed_too() -> None:
    """A block stored twice is lost with its second removal, not its first (ai-dynamo #8012)."""
    mirror = Mirror()
    tokens = list(range(2 * SIZE))
    first, second = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1, 2], tokens))
    assert feed(mirror, stored([2], tokens[SIZE:], parent=1)) == []
    assert feed(mirror, removed(2)) == []
    assert mirror.held() == {first, second}
    assert feed(mirror, removed(2)) == [Gone([second])]
    assert mirror.outcomes[Outcome.REPEATED] == 1


def test_a_report_of_hits_leaves_doubts_that_the_next_store_settles() -> None:
    """`kv_cache_report_mode=full` inflates counts only until the blocks are stored again."""
    mirror = Mirror()
    tokens = list(range(2 * SIZE))
    blocks = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1, 2], tokens))
    for _ in range(5):
        feed(mirror, stored([1, 2], tokens))  # reports, as far as anyone can tell
    assert feed(mirror, removed(2, 1)) == []
    assert (mirror.held(), mirror.doubtful) == (set(blocks), 2)
    feed(mirror, stored([1, 2], tokens))
    assert mirror.doubtful == 0
    assert feed(mirror, removed(2, 1)) == [Gone(blocks[::-1])]


def test_second_copies_of_a_prompt_of_one_block_are_copies() -> None:
    """Such a prompt is computed again each time, and looks like a report of one hit."""
    mirror = Mirror()
    tokens = list(range(SIZE))
    feed(mirror, stored([1], tokens), stored([1], tokens))
    feed(mirror, removed(1))
    feed(mirror, stored([1], tokens))
    assert feed(mirror, removed(1)) == []
    assert feed(mirror, removed(1)) == [Gone(chain(pack_tokens(tokens), SIZE))]


def test_doubts_go_when_the_engine_has_no_room_for_them() -> None:
    """Copies beyond the engine's capacity cannot exist; the oldest doubts are given up."""
    mirror = Mirror()
    mirror.capacity_blocks = 3
    old = list(range(SIZE))
    feed(mirror, stored([1], old), stored([1], old))
    feed(mirror, removed(1))  # only the doubt is left
    new = list(range(100, 100 + 3 * SIZE))
    changes = feed(mirror, stored([11, 12, 13], new))
    assert changes == [Held(ROOT, chain(pack_tokens(new), SIZE)), Gone(chain(pack_tokens(old), 4))]
    assert mirror.doubts_trimmed == 1
    assert mirror.held() == set(chain(pack_tokens(new), SIZE))


def test_clearing_forgets_all_and_makes_the_mirror_complete() -> None:
    """After the engine's reset nothing can be held that the mirror does not know."""
    mirror = Mirror()
    mirror.reset(complete=False)
    feed(mirror, stored([1], list(range(SIZE))))
    assert not mirror.complete
    assert feed(mirror, AllBlocksCleared()) == [Cleared()]
    assert mirror.complete
    assert (len(mirror), mirror.held()) == (0, set())


def test_blocks_of_unknown_parents_wait_and_are_adopted() -> None:
    """When the parent is stored, everything that hangs from it becomes known, whole chains too."""
    mirror = Mirror()
    tokens = list(range(5 * SIZE))
    whole = chain(pack_tokens(tokens), SIZE)
    assert feed(mirror, stored([4, 5], tokens[3 * SIZE :], parent=3)) == []
    assert feed(mirror, stored([2, 3], tokens[SIZE : 3 * SIZE], parent=1)) == []
    assert mirror.outcomes[Outcome.UNKNOWN_PARENT] == 2
    assert len(mirror.orphans) == 4
    feed(mirror, stored([1], tokens[:SIZE]))
    assert mirror.held() == set(whole)
    assert len(mirror.orphans) == 0


def test_an_orphan_can_be_removed_before_it_is_adopted() -> None:
    """A block that left while its parent was unknown does not come back with the parent."""
    mirror = Mirror()
    tokens = list(range(2 * SIZE))
    feed(mirror, stored([2], tokens[SIZE:], parent=1))
    feed(mirror, removed(2))
    assert mirror.outcomes[Outcome.REMOVED] == 1
    feed(mirror, stored([1], tokens[:SIZE]))
    assert mirror.held() == set(chain(pack_tokens(tokens[:SIZE]), SIZE))


def test_a_report_of_hits_may_name_orphans() -> None:
    """The copy of an orphan and the one in the report may be the same: the second is in doubt."""
    mirror = Mirror()
    tokens = list(range(3 * SIZE))
    blocks = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([2, 3], tokens[SIZE:], parent=1))
    feed(mirror, stored([1, 2, 3], tokens))
    assert (mirror.held(), mirror.doubtful) == (set(blocks), 2)
    mirror.capacity_blocks = 2
    assert feed(mirror, removed(3)) == [Gone([blocks[2]])]


def test_orphans_are_bounded() -> None:
    """At the bound further orphans are dropped and counted."""
    mirror = Mirror(MirrorConfig(orphans_max=3))
    feed(mirror, stored([1, 2, 3, 4, 5], list(range(5 * SIZE)), parent=99))
    assert (len(mirror.orphans), mirror.orphans.dropped) == (3, 2)


def test_a_lost_block_can_still_be_a_parent() -> None:
    """Names of lost blocks are remembered for a while, so their children keep their place."""
    mirror = Mirror()
    tokens = list(range(2 * SIZE))
    first, second = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1], tokens[:SIZE]))
    feed(mirror, removed(1))
    assert feed(mirror, stored([2], tokens[SIZE:], parent=1)) == [Held(first, [second])]


def test_departed_names_are_bounded() -> None:
    """The oldest names of lost blocks are forgotten."""
    mirror = Mirror(MirrorConfig(departed_max=2))
    for name in range(1, 7):
        feed(mirror, stored([name], [name] * SIZE))
        feed(mirror, removed(name))
    feed(mirror, stored([100], [0] * SIZE, parent=1))
    assert mirror.outcomes[Outcome.UNKNOWN_PARENT] == 1
    feed(mirror, stored([101], [0] * SIZE, parent=6))
    assert mirror.outcomes[Outcome.UNKNOWN_PARENT] == 1


def test_blocks_are_bounded() -> None:
    """At the bound stores are refused and counted."""
    mirror = Mirror(MirrorConfig(blocks_max=3))
    feed(mirror, stored([1, 2], list(range(2 * SIZE))))
    assert feed(mirror, stored([3, 4], list(range(2 * SIZE)), parent=2)) == []
    assert mirror.outcomes[Outcome.OVER_BOUND] == 1


def test_two_names_of_one_block_add_up() -> None:
    """A block that the engine names twice is lost when both are gone; no name stays for ever."""
    mirror = Mirror()
    tokens = list(range(SIZE))
    (block,) = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1], tokens), stored([2], tokens))
    assert feed(mirror, removed(1)) == []
    assert mirror.held() == {block}
    assert feed(mirror, removed(2)) == [Gone([block])]


def test_left_over_names_are_swept() -> None:
    """The names that outlive their blocks do not pile up."""
    mirror = Mirror()
    for name in range(1, 9001, 2):
        tokens = [name] * SIZE
        feed_fast = EventBatch(0.0, [stored([name], tokens), stored([name + 1], tokens)])
        mirror.apply(feed_fast)
        mirror.apply(EventBatch(0.0, [removed(name), removed(name + 1)]))
    assert len(mirror) <= 4097
    mirror.validate()


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (stored([1], list(range(SIZE)), kv_cache_spec_kind="sliding_window"), Outcome.SPARSE),
        (stored([1], list(range(3 * SIZE))), Outcome.SPARSE),
        (stored([], list(range(SIZE))), Outcome.SPARSE),
        (BlockStored([1], None, [], 0, medium="CPU"), Outcome.PLACEHOLDER),
        (BlockStored([1], None, [1, 2], 2), Outcome.ODD_SIZE),
        (stored([1], [-1] * SIZE), Outcome.MALFORMED),
        (stored([1], [2**32] * SIZE), Outcome.MALFORMED),
        (stored([1], [1] * SIZE, extra_keys=[["a"], ["b"]]), Outcome.MALFORMED),
        (stored([1], [1] * SIZE, parent=9, extra_keys=[["a"], ["b"]]), Outcome.MALFORMED),
        (stored([1], list(range(SIZE)), parent=77), Outcome.UNKNOWN_PARENT),
        (removed(5), Outcome.UNKNOWN_REMOVAL),
    ],
)
def test_what_cannot_be_mirrored_is_counted_by_its_reason(event: Event, outcome: Outcome) -> None:
    """Every event has an outcome, and none that cannot be applied changes anything."""
    mirror = Mirror()
    feed(mirror, stored([1000], [1] * SIZE))
    assert feed(mirror, event) == []
    assert mirror.outcomes == {Outcome.STORED: 1, Outcome.REJECTED: 0, outcome: 1}


def test_removals_of_skipped_groups_are_no_surprise() -> None:
    """A removal does not say its group's kind; it is known from the group's stores."""
    mirror = Mirror()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    feed(mirror, stored([1], list(range(SIZE))), stored([1], list(range(SIZE)), **window))
    feed(mirror, removed(1, group=1))
    assert mirror.outcomes[Outcome.SPARSE] == 2
    assert mirror.unknown_removals == 0


def test_a_block_counts_only_if_every_full_attention_group_has_it() -> None:
    """Two groups of full attention evict on their own; a hit needs both."""
    mirror = Mirror()
    tokens = list(range(2 * SIZE))
    first, second = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1, 2], tokens), stored([1, 2], tokens, group_idx=1))
    assert mirror.held() == {first, second}
    assert feed(mirror, removed(2, group=1)) == [Gone([second])]
    feed(mirror, removed(2, group=0))
    assert mirror.held() == {first}
    assert len(mirror) == 1
    feed(mirror, stored([2], tokens[SIZE:], parent=1))
    assert mirror.held() == {first}
    assert feed(mirror, stored([2], tokens[SIZE:], parent=1, group_idx=1)) == [
        Held(first, [second])
    ]


def test_offloaded_blocks_move_to_a_slower_tier() -> None:
    """A placeholder store of a known block puts it into host memory, to outlive the GPU's."""
    mirror = Mirror()
    tokens = list(range(SIZE))
    (block,) = chain(pack_tokens(tokens), SIZE)
    feed(mirror, stored([1], tokens))
    offload = BlockStored([1], None, [], 0, medium="CPU", group_idx=0)
    feed(mirror, offload)
    assert feed(mirror, removed(1)) == [Held(ROOT, [block], tier=1)]
    assert (mirror.held(0), mirror.held(1)) == (set(), {block})
    feed(mirror, offload)  # tiers keep one copy, however often they say so
    assert feed(mirror, removed(1, medium="CPU")) == [Gone([block])]
    assert feed(mirror, offload) == [Held(ROOT, [block], tier=1)], "known by its departed name"


def test_block_names_may_be_bytes() -> None:
    """`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0` names blocks by whole hashes."""
    mirror = Mirror()
    tokens = list(range(2 * SIZE))
    feed(mirror, stored([b"\x01" * 32], tokens[:SIZE]))
    feed(mirror, stored([b"\x02" * 32], tokens[SIZE:], parent=b"\x01" * 32))
    assert mirror.held() == set(chain(pack_tokens(tokens), SIZE))


def test_a_mirror_that_applies_nothing_is_blind() -> None:
    """Events that arrive while none applies are an alarm, and one that applies ends it."""
    mirror = Mirror(MirrorConfig(silent_batches_max=3))
    for _ in range(3):
        mirror.apply(EventBatch(0.0, [], rejected=2))
    assert mirror.blind
    mirror.apply(EventBatch(0.0, []))
    assert mirror.blind
    feed(mirror, stored([1], list(range(SIZE))))
    assert not mirror.blind
    assert mirror.outcomes[Outcome.REJECTED] == 6


def test_both_encodings_give_the_same_mirror() -> None:
    """Array events of older engines and map events of newer ones are the same to the mirror."""
    events: list[Event] = [stored([1, 2], list(range(2 * SIZE))), removed(2)]
    as_map, as_array = Mirror(), Mirror()
    as_map.apply(decode_batch(encode_batch(0.0, events, 0, "map")))
    as_array.apply(decode_batch(encode_batch(0.0, events, 0, "array")))
    assert as_map.held() == as_array.held() != set()
