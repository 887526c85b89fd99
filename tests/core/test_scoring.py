import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.policies import Multiplicative, RoundRobin
from controlplane.core.scoring import Choice, FleetView, Request, decide, product
from tests.models import naive_scoring

FILTERS = ("model", "tried", "health", "draining", "blacklist", "batch_cap", "hotspot")


def fleet(batch, queued=None, **restrictions) -> FleetView:
    """Make a view from lists."""
    zeros = np.zeros(len(batch), np.int64)
    return FleetView(
        np.array(batch, np.int64),
        zeros if queued is None else np.array(queued, np.int64),
        zeros,
        **restrictions,
    )


def choose(view: FleetView, request: Request, rotation: int = 0) -> Choice:
    """Decide by the default policy."""
    choice = decide(view, request, Multiplicative(), rotation)
    assert choice is not None
    return choice


def request(prompt: int, hits=None, **facts) -> Request:
    """Make a request from lists."""
    return Request(prompt, None if hits is None else np.array(hits, np.int64), **facts)


def test_the_smallest_product_wins():
    """New prefill tokens times batch size: neither the cached nor the idle instance as such."""
    view = fleet(batch=[9, 0, 3], queued=[0, 500, 0])
    choice = choose(view, request(1000, [900, 0, 800]))
    assert choice.scores.tolist() == [1000.0, 1500.0, 800.0]
    assert (choice.index, choice.score, choice.ties) == (2, 800.0, 1)
    assert choice.policy == "multiplicative"
    assert choice.candidates is None
    assert choice.ignored == ()


def test_queued_tokens_spread_a_burst():
    """Requests that hit equally do not all go where the first one went."""
    view = fleet(batch=[0, 0, 0, 0])
    for rotation in range(40):
        row = choose(view, request(100), rotation).index
        view.batch_size[row] += 1
        view.queued_tokens[row] += 100
    assert view.batch_size.tolist() == [10, 10, 10, 10]


def test_a_wholly_cached_prompt_still_minds_the_load():
    """P is never 0, even where a hit covers the prompt: else the load would not count at all."""
    assert choose(fleet(batch=[5, 2]), request(64, [64, 64])).index == 1


def test_negative_queues_count_as_empty():
    """A correction that comes before what it corrects does not make an instance attractive."""
    view = fleet(batch=[0, 0], queued=[-1_000_000, 0])
    assert choose(view, request(10, [0, 1])).index == 1


def test_products_beyond_64_bits_do_not_wrap():
    """Huge queues and batches stay worse than small ones."""
    view = fleet(batch=[2**40, 2**62, 0], queued=[2**62, 2**62, 2**61])
    choice = choose(view, request(1))
    assert choice.index == 2
    assert (choice.scores > 0).all()


@pytest.mark.parametrize("beta", [0.0, -500.0])
def test_scores_beyond_floats_choose_in_turn_among_candidates(beta: float):
    """Absurd exponents cost the ranking, never the filters."""
    asked = request(10**6, alpha=400.0, beta=beta)
    for keep, rows in ((None, [0, 1, 2, 0]), (np.array([True, False, True]), [0, 2, 0, 2])):
        view = fleet([9, 9, 9], healthy=keep)
        assert [choose(view, asked, turn).index for turn in range(4)] == rows


def test_ties_rotate_among_the_equal():
    """Equal scores are served in turn; the lowest index is nothing special."""
    view = fleet(batch=[1, 0, 0, 1, 0])
    rows = [choose(view, request(10), rotation).index for rotation in range(6)]
    assert rows == [1, 2, 4, 1, 2, 4]
    assert choose(view, request(10)).ties == 3


def test_nobody_to_choose_from():
    """An empty fleet has no choice."""
    assert decide(fleet([]), request(1), RoundRobin(), 0) is None


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_excludes_and_yields_when_it_would_exclude_all(name: str):
    """Every filter keeps out whom it names, and is ignored by name if that leaves nobody."""
    for masks, winner, ignored in (([False, True], 1, ()), ([False, False], 0, (name,))):
        keep = np.array(masks)
        view = fleet([0, 5])
        asked = request(10)
        if name == "batch_cap":
            view = fleet(np.where(keep, 5, 6), [0, 1000], batch_cap=6)
        elif name in ("model", "tried", "hotspot"):
            field = {"model": "capable", "tried": "untried", "hotspot": "cool"}[name]
            asked = request(10, **{field: keep})
        else:
            field = {"health": "healthy", "draining": "ready", "blacklist": "allowed"}[name]
            view = fleet([0, 5], **{field: keep})
        choice = choose(view, asked)
        assert (choice.index, choice.ignored) == (winner, ignored)


def test_filters_that_pass_everyone_restrict_nothing():
    """The outcome tells a restricted choice from an unrestricted one."""
    everyone = np.array([True, True])
    choice = choose(fleet([1, 0], healthy=everyone, ready=everyone), request(10, cool=everyone))
    assert (choice.index, choice.candidates, choice.ignored) == (1, None, ())


def test_an_instance_at_its_batch_cap_has_no_room():
    """Below the cap there is room; at the cap there is none; if nowhere, the outcome says so."""
    view = fleet([3, 4], queued=[1000, 0], batch_cap=4)
    assert choose(view, request(10)).index == 0
    view.batch_size[0] = 4
    assert choose(view, request(10)).ignored == ("batch_cap",)


masks_drawn = st.lists(st.booleans(), min_size=5, max_size=5)


@pytest.mark.slow
@given(
    prompt=st.integers(0, 200),
    rows=st.lists(
        st.tuples(st.integers(-5, 300), st.integers(0, 250), st.integers(0, 4)),
        min_size=5,
        max_size=5,
    ),
    keeps=st.lists(masks_drawn, min_size=7, max_size=7),
    in_force=st.lists(st.booleans(), min_size=7, max_size=7),
    rotation=st.integers(0, 2**64),
)
def test_decisions_are_those_of_the_naive_twin(prompt, rows, keeps, in_force, rotation):
    """Arrays and plain integers agree on score, winner, ties and ignored filters."""
    queued, hits, batch = zip(*rows, strict=True)
    arrays = [np.array(keep) if on else None for keep, on in zip(keeps, in_force, strict=True)]
    model, untried, health, ready, allowed, cap, cool = arrays
    view = fleet(batch, queued, healthy=health, ready=ready, allowed=allowed)
    if cap is not None:
        view.batch_cap = 3
        keeps[5] = [b < 3 for b in batch]
    asked = request(prompt, hits, capable=model, untried=untried, cool=cool)
    choice = choose(view, asked, rotation)
    scores = naive_scoring.multiplicative(prompt, queued, hits, batch)
    named = [(name, keep) for name, keep, on in zip(FILTERS, keeps, in_force, strict=True) if on]
    assert choice.scores.tolist() == scores
    assert (choice.index, choice.ties, choice.ignored) == naive_scoring.pick(
        scores, named, rotation
    )


@given(
    rows=st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 200)), min_size=1, max_size=20),
    factor=st.integers(1, 1000),
)
def test_scaling_all_p_or_all_b_changes_nothing(rows, factor):
    """Common factors vanish when products are compared: there is no weight to calibrate."""
    p, b = np.array(rows).T
    plain = choose(fleet(b - 1, p - 1), request(1), 3)
    assert choose(fleet(b - 1, p * factor - 1), request(1), 3).index == plain.index
    assert choose(fleet(b * factor - 1, p - 1), request(1), 3).index == plain.index


@given(st.lists(st.tuples(st.integers(0, 2**53), st.integers(1, 2**53)), min_size=1, max_size=6))
def test_products_neither_wrap_nor_differ_by_how_they_are_made(pairs: list[tuple[int, int]]):
    """A column of products is what Python makes of them, however large the largest is."""
    a, b = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    assert product(a, b).tolist() == [float(x) * float(y) for x, y in pairs]
