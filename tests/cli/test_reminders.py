"""What goes on is said ever less often, and what changes at once."""

from __future__ import annotations

from itertools import pairwise

from controlplane.reminders import Reminders


def test_gaps_double_up_to_the_longest() -> None:
    """Asked every second for an hour: the first at once, then the gaps 10, 20, … 300 seconds."""
    reminders = Reminders(10.0, 300.0)
    said_s = [second for second in range(3600) if reminders.due("no bus", float(second))]
    assert said_s[:6] == [0, 10, 30, 70, 150, 310]
    gaps = [later - sooner for sooner, later in pairwise(said_s[5:])]
    assert set(gaps) == {300}
    assert len(gaps) == 10


def test_a_change_is_said_at_once_and_so_is_what_comes_back() -> None:
    """Gaps begin anew with either."""
    reminders = Reminders(10.0)
    assert reminders.due("no bus", 0.0)
    assert not reminders.due("no bus", 9.0)
    assert reminders.due("no buckets", 9.0)
    assert not reminders.due("no buckets", 18.0)
    assert reminders.due("no buckets", 19.0)
    reminders.over()
    assert reminders.due("no buckets", 20.0)
    assert reminders.due("no buckets", 30.0)


def test_each_subject_has_its_own_and_the_oldest_is_forgotten() -> None:
    """However many there are."""
    reminders = Reminders(10.0, subjects_max=2)
    assert [reminders.due("x", 0.0, name) for name in "abab"] == [True, True, False, False]
    assert reminders.due("x", 1.0, "c")
    assert not reminders.due("x", 2.0, "b")
    assert reminders.due("x", 2.0, "a")
