"""What a router process knows of registered prefixes."""

from __future__ import annotations

import msgspec

from router.prefixes import PrefixRegistry
from schemas.bus import RegisteredPrefix, TenantPrefixes
from tests.core.plane_helpers import prompt


def registered(*texts: int, model: str = "m") -> RegisteredPrefix:
    """Returns a prefix of these blocks."""
    hashes = prompt(*texts)
    return RegisteredPrefix(f"p{hashes[-1]}", model, 40, len(hashes), hashes[-1])


def record(version: int, *prefixes: RegisteredPrefix, tenant: str = "a") -> TenantPrefixes:
    """Returns a tenant's record."""
    return TenantPrefixes(tenant, version, list(prefixes), [f"c{version}"])


def test_what_is_heard_counts_if_it_is_newer() -> None:
    """And begins a new time."""
    registry = PrefixRegistry()
    one, two = record(1, registered(1)), record(2, registered(1), registered(2))
    assert registry.heard(two, 10.0)
    assert not registry.heard(one, 11.0)
    assert not registry.heard(two, 12.0)
    assert registry.record("a") == two
    assert registry.elapsed_s(two, 15.0) == 5.0
    assert registry.elapsed_s(one, 15.0) == 0.0
    assert len(registry) == 2
    assert registry.record("b") == TenantPrefixes("b")
    assert not registry.knows("b")


def test_what_is_read_counts_even_if_it_is_older() -> None:
    """A server may come back without its files; but what was heard meanwhile is newer."""
    registry = PrefixRegistry()
    assert registry.settled(record(5), 0, 1.0)
    assert not registry.settled(record(5), 5, 2.0)
    assert registry.elapsed_s(record(5), 3.0) == 2.0
    assert registry.settled(record(2), 5, 4.0)
    assert registry.record("a").version == 2
    assert registry.heard(record(3), 5.0)
    assert not registry.settled(record(2), 2, 6.0), "3 came while this was read"
    assert registry.settled(record(3, registered(1)), 3, 6.0), "another 3 than ours"


def test_uses_are_of_prompts_that_begin_with_the_whole_prefix() -> None:
    """The tenant's own, of the same model, each prefix of the prompt's for itself."""
    registry = PrefixRegistry()
    short, long, other = registered(1), registered(1, 2), registered(1, 2, model="x")
    registry.heard(record(1, short, long, other), 0.0)
    registry.heard(record(1, short, tenant="b"), 0.0)
    found = [
        registry.used("a", "m", prompt(1, 2, 3)),
        registry.used("a", "m", prompt(1, 3)),
        registry.used("a", "m", prompt(2, 1)),
        registry.used("a", "x", prompt(1)),
        registry.used("c", "m", prompt(1)),
    ]
    assert found == [[short, long], [short], [], [], []]
    assert registry.uses("a") == {short.id: 2, long.id: 1}
    assert registry.uses("b") == registry.uses("c") == {}


def test_uses_are_kept_until_they_are_told() -> None:
    """Those of prefixes that are gone meanwhile are forgotten."""
    registry = PrefixRegistry()
    first, second = registered(1), registered(2)
    registry.heard(record(1, first, second), 0.0)
    for hashes in (prompt(1), prompt(2)):
        registry.used("a", "m", hashes)
    taken = registry.take_uses("a")
    assert taken == {first.id: 1, second.id: 1}
    assert registry.uses("a") == {}
    registry.used("a", "m", prompt(1))
    registry.heard(record(2, first), 1.0)
    registry.give_back("a", taken)
    assert registry.uses("a") == {first.id: 2}
    registry.heard(record(3), 2.0)
    assert registry.uses("a") == {}
    assert registry.take_uses("b") == {}
    registry.give_back("b", taken)


def test_ages_go_on_but_not_while_the_bus_is_away() -> None:
    """What is over is not shown, although it still stands in the record."""
    registry = PrefixRegistry()
    short = msgspec.structs.replace(registered(1), ttl_s=60.0)
    registry.heard(record(1, short, registered(2)), 0.0)
    assert [each.idle_s for each in registry.current("a", 70.0).prefixes] == [70.0, 70.0]
    assert len(registry.current("a", 80.0).prefixes) == 1
    registry.skip(20.0)
    assert len(registry.current("a", 80.0).prefixes) == 2
    assert registry.get("a", short.id) == short


def test_tenants_are_bounded() -> None:
    """Further ones are not known here, and counted."""
    registry = PrefixRegistry(tenants_max=1)
    assert registry.heard(record(1, registered(1)), 0.0)
    assert not registry.heard(record(1, registered(1), tenant="b"), 0.0)
    assert (registry.refused, registry.tenants, registry.is_full) == (1, ["a"], True)
    assert registry.heard(record(2), 0.0)
