import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.latency import Estimator
from controlplane.core.openings import ANYWHERE, LEVELS_MAX, Openings, hits_of, mask_of
from controlplane.core.queue_lines import Waiting
from controlplane.core.room import Room
from tests.core.plane_helpers import Publisher, plane, prompt, record


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(-1, 40), st.booleans()), min_size=1, max_size=30
    ),
)
def test_masks_say_what_rows_do(rows: list[tuple[int, int, bool]]) -> None:
    """How much the best of some rows has is the same by rows and by masks."""
    tokens = np.array([each[0] for each in rows], np.int64)
    slots = np.array([each[1] for each in rows], np.int64)
    open_rows = np.array([each[2] for each in rows], np.bool_)
    mask = mask_of(open_rows, slots)
    bits = {slot for _, slot, chosen in rows if chosen and slot >= 0}
    assert mask == sum(1 << bit for bit in bits)
    hits = hits_of(tokens, slots)
    assert len(hits) == min(len({each[0] for each in rows} - {0}), LEVELS_MAX)
    least = hits[-1][0] if hits else 0
    best = max((count for count, slot, _ in rows if slot in bits), default=0)
    found = Waiting("x", 0.0, hits=hits).affinity_tokens(mask)
    assert found == (best if best >= least else 0)


def test_only_the_deepest_change_points_are_kept() -> None:
    """A prompt of which every instance has another part takes no more room than others."""
    many = np.arange(1, 3 * LEVELS_MAX)
    hits = hits_of(many, many)
    assert [tokens for tokens, _ in hits] == many[::-1][:LEVELS_MAX].tolist()
    assert hits_of(None, many) == ()


def test_waiting_pays_while_a_place_is_nearer_than_the_prefix_is_long() -> None:
    """For the deepest of the full ones that pays, and counting who waits there already."""
    hits = ((800, 0b001), (500, 0b111))
    assert ANYWHERE.worth_waiting_s(hits, 0, {}) == 0.0
    one_open = Openings(0b1000, 0b111, 0.3, 0.001)
    ahead: dict[int, int] = {}
    worth = [one_open.worth_waiting_s(hits, 0, ahead) for _ in range(8)]
    assert worth == pytest.approx([0.8, 0.8, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0])
    assert ahead == {0b001: 2, 0b111: 4}, "two save 0.8 s; of three places each 0.1 s one"
    assert one_open.worth_waiting_s(hits, 500, {}) == 0.0, "300 tokens are computed as soon"
    assert one_open.worth_waiting_s(hits, 800, {}) == 0.0
    assert Openings(0b1000, 0b110, 0.3).worth_waiting_s(hits, 0, {}) == 0.0, "no time is known"


def test_rooms_name_who_is_open_who_is_full_and_how_soon_that_changes() -> None:
    """By slots; whoever may not get a request is neither."""
    made = plane()
    for name in "abc":
        made.handle(record(name), 0.0)
        publisher = Publisher(name)
        for batch in (publisher.batch(), publisher.store(prompt(1))):
            made.handle(batch, 0.0)
    estimator = Estimator()
    room = Room(made.fleet, made.ledger, 2, estimator)
    bits = {each.record.instance_id: 1 << each.slots[0] for each in made.fleet}
    assert room(None) is ANYWHERE, "nobody is full, so nobody need look"
    for _ in range(2):
        made.ledger.book("r", "a", 10, 10, 0.0)
    made.ledger.book("r", "b", 10, 10, 0.0)
    assert room(None) == Openings(bits["b"] | bits["c"], bits["a"])
    for tokens in range(100, 3300, 100):
        estimator.observe(0.1 + 0.001 * tokens, 3.0, tokens)
    found = room(None)
    assert found is not None
    assert (found.place_s, found.token_s) == (pytest.approx(1.5), pytest.approx(0.001))
    broken = made.fleet.get("a")
    assert broken is not None
    broken.breaker_open = True
    made.fleet.refresh(broken, 0.0)
    assert room(None) == Openings(bits["b"] | bits["c"], 0, found.place_s, found.token_s)


def test_an_instance_that_holds_nothing_has_room_but_no_bit() -> None:
    """Nobody waits for it, and whoever goes there finds nothing."""
    made = plane("a", "b")
    made.ledger.book("r", "a", 10, 10, 0.0)
    assert Room(made.fleet, made.ledger, 1)(None) == Openings(0)
    made.ledger.book("r", "b", 10, 10, 0.0)
    assert Room(made.fleet, made.ledger, 1)(None) is None


def test_where_every_filter_leaves_nobody_all_are_asked() -> None:
    """Filters are kind here, too: a broken fleet is not one that is full."""
    made = plane("a", "b")
    for instance in made.fleet:
        instance.breaker_open, instance.blacklisted_until_s = True, 100.0
        made.handle(record(instance.record.instance_id, state="draining"), 1.0)
        made.fleet.refresh(instance, 1.0)
    made.ledger.book("r", "a", 10, 10, 0.0)
    assert Room(made.fleet, made.ledger, 1)(None) == Openings(0)
