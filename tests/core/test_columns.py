"""What decisions saw, told in columns and read again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.candidates import Candidates, RowsBook, candidates_of
from controlplane.core.columns import FEW_ROWS, pack, pack_bits, unpack, unpack_bits
from controlplane.core.decision import Decision
from controlplane.core.events import BusState, Tick
from controlplane.core.plane import Plane
from schemas.bus import (
    CandidateColumns,
    Drain,
    FleetRows,
    PrefixLevel,
    RouteBatch,
    Routed,
    RouteEvent,
    decode_route,
)
from schemas.codec import encode
from tests.core.plane_helpers import BLOCK, Publisher, plane, prompt, record, request

NUMBERS = st.lists(st.integers(0, (1 << 53) - 1), min_size=1, max_size=40)


@given(NUMBERS, st.integers(0, 53))
def test_numbers_survive_packing(numbers: list[int], bits: int) -> None:
    """Whatever their size, in the width that the largest needs; few of them in the widest."""
    numbers = [number >> (53 - bits) for number in numbers]
    column = pack(np.array(numbers, np.int64))
    width = next(w for w in (0, 1, 2, 4, 8) if max(numbers) < 1 << (8 * w))
    if width and len(numbers) <= FEW_ROWS:
        width = 8
    assert len(column) == width * len(numbers)
    assert unpack(column, len(numbers)).tolist() == numbers


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_sets_of_rows_survive_packing(rows: list[bool]) -> None:
    """Row r is bit r mod 8 of byte r // 8."""
    packed = pack_bits(np.array(rows))
    assert unpack_bits(packed, len(rows)).tolist() == rows
    as_number = int.from_bytes(packed, "little")
    assert as_number == sum(1 << row for row, inside in enumerate(rows) if inside)


@pytest.mark.parametrize(("column", "rows"), [(b"12345", 2), (b"123", 1), (b"1", 0), (b"1", 2)])
def test_a_column_that_does_not_fit_is_refused(column: bytes, rows: int) -> None:
    """A length that is no whole width names both numbers."""
    with pytest.raises(ValueError, match=f"{len(column)} bytes does not fit {rows} rows"):
        unpack(column, rows)


def test_a_set_that_does_not_fit_is_refused() -> None:
    """Nine rows need two bytes."""
    with pytest.raises(ValueError, match="1 bytes does not fit 9 rows"):
        unpack_bits(b"1", 9)


def _told(made: Plane) -> list[RouteEvent]:
    """Return what a plane has to tell, after a journey over the wire."""
    batch = made.outbox.take(0.0)
    return [] if batch is None else decode_route(encode(batch)).events


def _read(events: list[RouteEvent], book: RowsBook | None = None) -> list[Candidates | None]:
    """Return what each decision of one router saw."""
    book = book or RowsBook()
    found: list[Candidates | None] = []
    for event in events:
        if isinstance(event, FleetRows):
            book.told("r", 1, event)
        elif isinstance(event, Routed):
            found.append(book.read("r", 1, event))
    return found


def _decide(made: Plane, hashes: list[int], now_s: float = 1.0, **fields: object) -> Decision:
    """Decide on a prompt and book it."""
    decision = made.requests.decide(request(hashes, **fields), now_s)
    assert decision is not None
    made.requests.book(decision, now_s, 0.0)
    return decision


def test_readers_see_what_the_decision_saw() -> None:
    """Names, hits, load, scores, filters and eligibility, over a changing fleet and any policy."""
    rng = random.Random(7)
    made = plane("a", "b", "c", batch_cap=6, promise_s=10.0)
    book = RowsBook()
    names = ["a", "b", "c"]
    for step in range(120):
        if step % 20 == 19:
            names.append(f"extra-{step}")
            made.handle(record(names[-1]), 1.0)
            made.handle(Publisher(names[-1]).batch(), 1.0)
        if step % 30 == 29:
            made.handle(Drain(rng.choice(names), rng.random() < 0.7, step, 0.0), 1.0)
        alpha = rng.choice((1.0, 1.5))
        decision = _decide(made, prompt(*range(rng.randrange(1, 6))), alpha=alpha)
        (seen,) = _read(_told(made), book)
        assert seen is not None
        assert seen.listed() == decision.candidates()
        assert set(seen.ignored) == set(decision.choice.ignored)
    assert (book.unknown, book.unreadable) == (0, 0)


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [
        ("linear", {"weight": 0.4}),
        ("dynamo_cost", {"block_size": 16}),
        ("simulated_ttft", {}),
        ("round_robin", {}),
        ("multiplicative", {"moe_factor": 1.5, "smooth_tokens": 30.0}),
    ],
)
def test_scores_of_every_policy_can_be_computed_again(
    policy: str, parameters: dict[str, float]
) -> None:
    """The parameters are told with the rows, and what the policy reads with the columns."""
    made = plane("a", "b", policy=policy, policy_parameters=parameters)
    book = RowsBook()
    for number in range(4):
        decision = _decide(made, prompt(number, 1))
        (seen,) = _read(_told(made), book)
        assert seen is not None
        assert seen.scores is not None
        assert seen.scores.tolist() == decision.choice.scores.tolist()


def test_positions_of_the_block_streams_are_told() -> None:
    """How much of each stream was applied, and whether the set was the published one."""
    made = plane("a", "b")
    publisher = Publisher("a")
    publisher.seq = 0
    _decide(made, prompt(1))
    made.handle(publisher.store(prompt(1, 2)), 1.0)
    made.handle(publisher.batch(), 1.0)
    _decide(made, prompt(1, 2))
    publisher.seq += 3
    made.handle(publisher.batch(), 1.0)
    _decide(made, prompt(1, 2))
    seen = [each for each in _read(_told(made)) if each is not None]
    assert [each.applied.tolist() for each in seen] == [[1, 1], [3, 1], [3, 1]]
    assert [each.exact.tolist() for each in seen] == [[True] * 2, [True] * 2, [False, True]]
    assert unpack(seen[0].rows.epochs, 2).tolist() == [1, 1]


def test_a_new_epoch_is_told_before_the_next_decision() -> None:
    """Positions are of the epoch in the rows, so these are told anew."""
    made = plane("a")
    _decide(made, prompt(1))
    made.handle(Publisher("a", epoch=2).batch(), 1.0)
    _decide(made, prompt(2))
    events = _told(made)
    rows = [event for event in events if isinstance(event, FleetRows)]
    assert [(each.version, unpack(each.epochs, 1).tolist()) for each in rows] == [
        (1, [1]),
        (2, [2]),
    ]


def test_an_outage_shows_in_what_is_told() -> None:
    """After the bus was away no set is exact until it is resynced."""
    made = plane("a")
    made.handle(BusState(False), 1.0)
    made.handle(BusState(True), 1.0)
    _decide(made, prompt(1))
    (seen,) = _read(_told(made))
    assert seen is not None
    assert seen.exact.tolist() == [False]


def test_levels_show_where_hits_end() -> None:
    """With the block that the hit ends in, and the next, unless that could not count."""
    made = plane("a", "b")
    made.handle(_from(1, Publisher("a"), prompt(1, 2, 3)), 1.0)
    made.handle(_from(1, Publisher("b"), prompt(1)), 1.0)
    hashes = prompt(1, 2, 3)
    made.requests.book(_whole(made, hashes), 1.0, 0.0)
    routed = _told(made)[-1]
    assert isinstance(routed, Routed)
    assert routed.candidates is not None
    assert routed.candidates.levels == [
        PrefixLevel(1, hashes[0], hashes[1]),
        PrefixLevel(2, hashes[1], None),
    ]
    assert (routed.block_size, routed.prompt_key) == (BLOCK, hashes[-1])


def _from(seq: int, publisher: Publisher, hashes: list[int]) -> object:
    publisher.seq = seq - 1
    return publisher.store(hashes)


def _whole(made: Plane, hashes: list[int]) -> Decision:
    """Decide on a prompt of whole blocks, of which the last cannot count."""
    whole = request(hashes)
    decision = made.requests.decide(type(whole)("r", len(hashes) * BLOCK, hashes, BLOCK), 1.0)
    assert decision is not None
    return decision


def test_rows_are_told_again_for_who_came_later() -> None:
    """Before a decision whose rows were told some seconds ago, and not while there is none."""
    made = plane("a", rows_every_s=5.0)
    for now_s in (1.0, 3.0, 5.9, 6.0, 20.0):
        made.handle(Tick(), now_s)
        _decide(made, prompt(1), now_s)
    kinds = [type(event) for event in _told(made) if isinstance(event, FleetRows | Routed)]
    assert kinds == [FleetRows, Routed, Routed, Routed, FleetRows, Routed, FleetRows, Routed]


def test_a_decision_over_other_rows_is_told_without_columns() -> None:
    """Columns that would be read by the wrong names are left out."""
    made = plane("a", "b")
    decision = made.requests.decide(request(prompt(1)), 1.0)
    assert decision is not None
    made.handle(record("c"), 1.0)
    made.requests.book(decision, 1.0, 0.0)
    routed = _told(made)[-1]
    assert isinstance(routed, Routed)
    assert routed.candidates is None


def test_what_cannot_be_read_is_counted() -> None:
    """Rows that were not heard of, and columns that do not fit them."""
    book = RowsBook(kept_max=1)
    book.told("r", 1, FleetRows(1, ["a", "b"]))
    cut = Routed("q", "a", 0.0, candidates=CandidateColumns(1, hit_tokens=b"123"))
    odd = Routed("q", "a", 0.0, policy="linear", candidates=CandidateColumns(1))
    assert book.read("r", 1, cut) is None
    assert (book.unknown, book.unreadable) == (0, 1)
    assert book.read("r", 2, cut) is None
    book.told("r", 1, FleetRows(2, ["a", "b"], policy="linear", parameters={"none": 1.0}))
    assert book.read("r", 1, cut) is None
    assert (book.unknown, book.unreadable) == (2, 1)
    two = Routed("q", "a", 0.0, policy="linear", candidates=CandidateColumns(2))
    assert book.read("r", 1, two) is None
    assert book.unreadable == 2
    assert book.read("r", 1, odd) is None
    assert book.read("r", 1, Routed("q", "a", 0.0)) is None


def test_a_policy_of_a_later_version_has_no_scores() -> None:
    """All else can still be read."""
    event = Routed("q", "a", 0.0, policy="unheard of")
    seen = candidates_of(event, CandidateColumns(1, batch_size=b"\x02"), FleetRows(1, ["a"]))
    assert seen.scores is None
    assert seen.listed()[0].batch_size == 2


def test_a_batch_says_whose_rows() -> None:
    """Two routers number their tellings alike; they are kept apart."""
    book = RowsBook()
    for router, name in (("r", "a"), ("s", "b")):
        batch = RouteBatch(router, 1, 0, 0.0, [FleetRows(1, [name])])
        for event in batch.events:
            assert isinstance(event, FleetRows)
            book.told(batch.router_id, batch.epoch, event)
    seen = book.read("s", 1, Routed("q", "b", 0.0, candidates=CandidateColumns(1)))
    assert seen is not None
    assert seen.rows.instance_ids == ["b"]
