"""The sliding window: exact counts of what it spans, and bounds on what it keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.detector_window import ClassWindow
from schemas.bus import ClassCoverage


def _request(*keys: int) -> list[ClassCoverage]:
    return [ClassCoverage(key, key % 10, 1) for key in keys]


def test_the_window_is_open_at_its_old_end() -> None:
    """A request counts for exactly the window's length."""
    window = ClassWindow(10.0, 100, 1)
    window.add(_request(11), 0.0)
    window.expire(9.999)
    assert (window.count(11), window.total) == (1, 1)
    window.expire(10.0)
    assert (window.count(11), window.total, window.classes) == (0, 0, 0)


def test_the_window_is_shortened_at_its_bound_and_stays_exact() -> None:
    """Beyond the bound the oldest request leaves early, with its classes, and is counted."""
    window = ClassWindow(10.0, 3, 1)
    for number in range(5):
        window.add(_request(11 if number < 2 else 21), 0.1 * number)
        window.check()
    assert (window.count(11), window.count(21), window.total) == (0, 3, 3)
    assert window.shortened == 2


def test_the_most_frequent_classes_of_a_depth_come_first() -> None:
    """Only frequent classes are ranked, each depth by itself."""
    window = ClassWindow(10.0, 100, 2)
    for key, times in ((11, 5), (21, 3), (31, 1), (12, 4)):
        for _ in range(times):
            window.add(_request(key), 0.0)
    assert window.top(1, 3) == [5, 3]
    assert window.top(1, 1) == [5]
    assert window.top(2, 3) == [4]
    assert window.top(4, 3) == []


def test_it_tells_which_class_is_frequent_no_more() -> None:
    """Whoever keeps something by class learns when to let go of it."""
    gone: list[int] = []
    window = ClassWindow(10.0, 100, 2, gone.append)
    for at_s in (0.0, 1.0, 2.0):
        window.add(_request(11), at_s)
    window.expire(10.0)
    assert gone == []
    window.expire(11.0)
    assert gone == [11]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 3.0]),
            st.lists(st.sampled_from([11, 12, 14, 21, 22]), unique=True, max_size=3),
        ),
        max_size=60,
    ),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_counts_equal_a_recount(
    steps: list[tuple[float, list[int]]], requests_max: int, frequent_min: int
) -> None:
    """Whatever comes and however small the bound, each class counts what the window spans."""
    window = ClassWindow(4.0, requests_max, frequent_min)
    came: list[tuple[float, list[int]]] = []
    now_s = 0.0
    for wait_s, keys in steps:
        now_s += wait_s
        window.add(_request(*keys), now_s)
        came.append((now_s, keys))
        came = [each for each in came if each[0] > now_s - 4.0][-requests_max:]
        window.check()
        assert window.total == len(came)
        for key in (11, 12, 14, 21, 22):
            assert window.count(key) == sum(key in keys for _, keys in came)
