import pytest

from router.prefixes import HOT_USES, Full, Options, PrefixRegistry, is_hot
from tests.core.plane_helpers import prompt


def test_the_same_prefix_is_referred_to_and_gone_when_all_are_released() -> None:
    """Each tenant has its own, even of equal prompts."""
    registry = PrefixRegistry()
    first = registry.add("a", "m", 40, prompt(1), Options())
    assert registry.add("a", "m", 40, prompt(1), Options(pin=True)) is first
    other = registry.add("b", "m", 40, prompt(1), Options())
    assert other is not first
    assert first.references == 2
    assert not registry.release(first)
    assert registry.get("a", first.id) is first
    assert registry.release(first)
    assert registry.get("a", first.id) is None
    assert list(registry.of("b")) == [other]


def test_registrations_are_bounded_in_all_and_by_tenant() -> None:
    """Beyond a bound the error says whose it is; what is there can still be referred to."""
    registry = PrefixRegistry(prefixes_max=3, of_tenant_max=2)
    known = registry.add("a", "m", 40, prompt(1), Options())
    registry.add("a", "m", 40, prompt(2), Options())
    with pytest.raises(Full, match="tenant 'a' has registered 2"):
        registry.add("a", "m", 40, prompt(3), Options())
    registry.add("b", "m", 40, prompt(1), Options())
    with pytest.raises(Full, match="3 prefixes"):
        registry.add("b", "m", 40, prompt(2), Options())
    assert registry.add("a", "m", 40, prompt(1), Options()) is known


def test_the_bytes_that_are_kept_are_bounded_in_all_and_by_tenant() -> None:
    """A tenant gets a quarter of them; what is released makes room."""
    registry = PrefixRegistry(bytes_max=400)
    first = registry.add("a", "m", 40, prompt(1), Options(), size_bytes=100)
    with pytest.raises(Full, match="tenant 'a' would exceed 100 bytes"):
        registry.add("a", "m", 40, prompt(2), Options(), size_bytes=1)
    for tenant in "bcd":
        registry.add(tenant, "m", 40, prompt(1), Options(), size_bytes=100)
    with pytest.raises(Full, match="this router would exceed 400 bytes"):
        registry.add("e", "m", 40, prompt(1), Options(), size_bytes=1)
    registry.release(first)
    registry.add("e", "m", 40, prompt(1), Options(), size_bytes=1)


def test_uses_are_of_prompts_that_begin_with_the_whole_prefix() -> None:
    """Of the same model only, and only where somebody wants to know."""
    registry = PrefixRegistry()
    registry.add("a", "m", 40, prompt(9), Options())
    assert not registry.watched
    spread = registry.add("a", "m", 40, prompt(1, 2), Options(spread=True))
    for model, used in [("m", prompt(1, 2, 3)), ("m", prompt(1)), ("x", prompt(1, 2, 3))]:
        registry.used(model, used)
    assert spread.uses == 1
    assert list(registry.spreading()) == [spread]
    registry.release(spread)
    assert not registry.watched


def test_a_prefix_is_hot_by_its_uses_for_each_holder() -> None:
    """More holders take more uses; none counts as one."""
    assert not is_hot(HOT_USES, 1)
    assert is_hot(HOT_USES + 1, 0)
    assert not is_hot(2 * HOT_USES, 2)
