"""What becomes of a tenant's registered prefixes, change by change."""

from __future__ import annotations

from typing import Any

import pytest

from router.prefix_records import (
    BYTES_MAX,
    CHANGES_KEPT,
    GRACE_S,
    HOT_USES,
    PREFIXES_MAX,
    WINDOW_S,
    Full,
    Unknown,
    aged,
    find,
    is_due,
    marked,
    register,
    release,
    tended,
)
from schemas.bus import RegisteredPrefix, TenantPrefixes

EMPTY = TenantPrefixes("a")


def prefix(number: int = 1, **fields: Any) -> RegisteredPrefix:
    """Returns a prefix of the model m."""
    return RegisteredPrefix(f"p{number}", "m", 40, 2, number, **fields)


def of(*prefixes: RegisteredPrefix) -> TenantPrefixes:
    """Returns a record that holds these."""
    return TenantPrefixes("a", 1, list(prefixes))


def test_the_same_prefix_is_referred_to_and_gone_when_all_are_released() -> None:
    """It keeps the options that it had first."""
    record = register(register(EMPTY, prefix()), prefix(pin=True))
    assert record.prefixes == [prefix(references=2)]
    record = release(record, "p1")
    assert record.prefixes == [prefix()]
    assert release(record, "p1").prefixes == []
    with pytest.raises(Unknown):
        release(record, "p2")


def test_registrations_are_bounded_in_number() -> None:
    """What is there can still be referred to."""
    record = of(*(prefix(number) for number in range(PREFIXES_MAX)))
    with pytest.raises(Full, match="tenant 'a' has registered 64"):
        register(record, prefix(PREFIXES_MAX))
    assert register(record, prefix(0)).prefixes[0].references == 2


def test_registrations_are_bounded_in_bytes() -> None:
    """What is released makes room."""
    record = of(prefix(1, nbytes=BYTES_MAX - 1), prefix(2, nbytes=1))
    with pytest.raises(Full, match="would exceed 16 MiB"):
        register(record, prefix(3, nbytes=1))
    assert len(register(release(record, "p2"), prefix(3, nbytes=1)).prefixes) == 2


def test_what_is_neither_used_nor_registered_ends() -> None:
    """A while after its own time, since a use may be told late; either begins its time anew."""
    record = of(prefix(1, ttl_s=60.0), prefix(2, ttl_s=600.0))
    assert aged(record, 60.0 + GRACE_S).prefixes[0].idle_s == 60.0 + GRACE_S
    assert [each.id for each in aged(record, 60.1 + GRACE_S).prefixes] == ["p2"]
    later = aged(record, 70.0)
    used, _ = tended(later, {"p1": 3}, {})
    again = register(later, prefix(1, ttl_s=120.0))
    assert find(used, "p1") == prefix(1, ttl_s=60.0, uses=3)
    assert (again.prefixes[0].idle_s, again.prefixes[0].ttl_s) == (0.0, 120.0)
    assert [each.id for each in aged(aged(used, 40.0), 30.0).prefixes] == ["p1", "p2"]


def test_a_change_is_marked_for_a_while() -> None:
    """Versions grow by one, and so many marks are kept."""
    record = EMPTY
    for number in range(CHANGES_KEPT + 1):
        record = marked(record, f"c{number}")
    assert record.version == CHANGES_KEPT + 1
    assert record.changes == [f"c{number}" for number in range(1, CHANGES_KEPT + 1)]


def test_uses_of_all_routers_add_up_to_what_is_hot() -> None:
    """The one whose uses are too many for the holders is to spread it, and nobody else."""
    record = of(prefix(spread=True))
    record, claimed = tended(record, {"p1": HOT_USES}, {"p1": 1})
    assert claimed == []
    record, claimed = tended(aged(record, 1.0), {"p1": 1}, {})
    assert claimed == [], "this router cannot"
    after, claimed = tended(aged(record, 1.0), {}, {"p1": 1})
    assert claimed == ["p1"]
    assert tended(after, {}, {"p1": 1})[1] == []
    assert tended(record, {}, {"p1": 2})[1] == [], "two take twice as many"
    assert tended(record, {}, {"p1": 0})[1] == ["p1"], "none counts as one"


def test_uses_count_in_windows() -> None:
    """What was used long ago is not hot now, and the next use begins a window."""
    record, _ = tended(of(prefix(spread=True)), {"p1": HOT_USES + 1}, {})
    late = aged(record, WINDOW_S + 0.1)
    assert tended(late, {}, {"p1": 1})[1] == []
    again, claimed = tended(late, {"p1": 1}, {"p1": 1})
    assert (again.prefixes[0].uses, again.prefixes[0].window_s, claimed) == (1, 0.0, [])


def test_only_what_is_to_spread_is_spread() -> None:
    """However often it is used."""
    assert tended(of(prefix()), {"p1": 1000}, {"p1": 1})[1] == []


@pytest.mark.parametrize(
    ("fields", "elapsed_s", "uses", "holders", "due"),
    [
        ({}, 5.0, {}, {}, False),
        ({}, 5.0, {"p1": 9}, {}, False),
        ({"idle_s": 10_795.1}, 5.0, {"p1": 1}, {}, True),
        ({"spread": True}, 5.0, {"p1": 1}, {}, True),
        ({"spread": True}, 5.0, {}, {"p1": 1}, False),
        ({"spread": True, "uses": 9}, 1.0, {}, {"p1": 1}, True),
        ({"spread": True, "uses": 9}, 5.0, {}, {"p1": 1}, False),
        ({}, 21_600.1, {}, {}, True),
        ({"ttl_s": 60.0, "idle_s": 70.0}, 5.1, {}, {}, True),
        ({"ttl_s": 60.0, "idle_s": 70.0}, 4.9, {}, {}, False),
    ],
)
def test_most_looks_write_nothing(
    fields: dict[str, Any],
    elapsed_s: float,
    uses: dict[str, int],
    holders: dict[str, int],
    due: bool,
) -> None:
    """Due are uses to add up, a renewal, a spread, idle time of long, and an end."""
    assert is_due(of(prefix(**fields)), elapsed_s, uses, holders) is due
