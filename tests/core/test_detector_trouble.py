"""What is remembered of hot classes, and when locality is given up for a while."""

from __future__ import annotations

from controlplane.core.detector_trouble import PolicySwitch, TroubleConfig, Troubles

CONFIG = TroubleConfig(
    memory_s=60.0,
    damping_max=8,
    rest_s=20.0,
    classes_max=3,
    persist_s=30.0,
    calm_s=10.0,
    share_min=0.25,
    stay_s=40.0,
)


def _alarmed(troubles: Troubles, key: int, since_s: float, until_s: float, requests: int) -> None:
    """Let a class be alarmed once a second; `requests` of 100 are its own."""
    for second in range(int(until_s - since_s) + 1):
        troubles.alarmed(key, requests, 100, since_s + second)


def test_damping_doubles_up_to_its_bound_and_is_forgotten() -> None:
    """Every further raise needs twice the streak; a minute of quiet makes it a new class."""
    troubles = Troubles(CONFIG)
    factors = []
    for _ in range(6):
        factors.append(troubles.factor(1))
        troubles.raised(1, (), 0.0)
    assert factors == [1, 2, 4, 8, 8, 8]
    troubles.expire(59.9)
    assert troubles.factor(1) == 8
    troubles.expire(60.0)
    assert troubles.factor(1) == 1


def test_without_damping_each_streak_is_as_long_as_the_first() -> None:
    """A bound of 1 turns damping off."""
    troubles = Troubles(TroubleConfig(damping_max=1))
    troubles.raised(1, (), 0.0)
    assert troubles.factor(1) == 1


def test_a_class_that_was_never_raised_is_not_remembered() -> None:
    """Alarms alone take no memory here."""
    troubles = Troubles(CONFIG)
    troubles.alarmed(1, 50, 100, 0.0)
    troubles.gave_up(1, 0.0)
    assert len(troubles) == 0
    assert not troubles.resting(1, 0.0)


def test_the_class_raised_longest_ago_makes_room() -> None:
    """The memory has a bound; raising a class again makes it the youngest."""
    troubles = Troubles(CONFIG)
    for key in (1, 2, 3, 1, 4):
        troubles.raised(key, (), 0.0)
    assert len(troubles) == 3
    assert [troubles.factor(key) for key in (1, 2, 3, 4)] == [4, 1, 2, 2]


def test_a_class_rests_after_it_was_given_up() -> None:
    """For `rest_s`, and no longer."""
    troubles = Troubles(CONFIG)
    troubles.raised(1, (), 0.0)
    troubles.gave_up(1, 5.0)
    assert troubles.resting(1, 24.9)
    assert not troubles.resting(1, 25.0)


def test_an_alarm_persists_only_without_a_pause() -> None:
    """A quiet of more than `calm_s` makes it a new alarm."""
    troubles = Troubles(CONFIG)
    troubles.raised(1, (), 0.0)
    _alarmed(troubles, 1, 0.0, 29.0, requests=40)
    assert troubles.persisting_share(29.0) == 0.0
    _alarmed(troubles, 1, 39.5, 40.0, requests=40)
    assert troubles.persisting_share(40.0) == 0.0
    _alarmed(troubles, 1, 41.0, 70.0, requests=40)
    assert troubles.persisting_share(70.0) == 0.4
    assert troubles.persisting_share(80.0) == 0.4
    assert troubles.persisting_share(80.1) == 0.0


def test_shares_of_classes_within_classes_count_once() -> None:
    """A persisting class explains those that extend it."""
    troubles = Troubles(CONFIG)
    for key, above, requests in ((1, (), 30), (2, (1,), 20), (3, (), 10)):
        troubles.raised(key, above, 0.0)
        _alarmed(troubles, key, 0.0, 30.0, requests)
    assert abs(troubles.persisting_share(30.0) - 0.4) < 1e-9


def test_the_switch_turns_on_when_much_traffic_stays_hot() -> None:
    """A small class is not worth everybody's cache; together they may be."""
    troubles, switch = Troubles(CONFIG), PolicySwitch(CONFIG)
    troubles.raised(1, (), 0.0)
    _alarmed(troubles, 1, 0.0, 30.0, requests=24)
    assert not switch.update(troubles, 30.0)
    troubles.raised(2, (), 0.0)
    _alarmed(troubles, 2, 0.0, 30.0, requests=1)
    assert switch.update(troubles, 30.0)
    assert switch.on
    assert abs(switch.share - 0.25) < 1e-9


def test_the_switch_stays_on_for_a_while_and_until_it_is_calm() -> None:
    """It neither flickers nor goes back while a class that was hot still is."""
    troubles, switch = Troubles(CONFIG), PolicySwitch(CONFIG)
    troubles.raised(1, (), 0.0)
    _alarmed(troubles, 1, 0.0, 30.0, requests=50)
    assert switch.update(troubles, 30.0)
    for now_s in (31.0, 50.0, 69.9):
        assert not switch.update(troubles, now_s)  # calm, but too early
    _alarmed(troubles, 1, 65.0, 68.0, requests=50)
    assert not switch.update(troubles, 70.0)  # late enough, but not calm
    assert not switch.update(troubles, 78.0)
    assert switch.update(troubles, 78.1)
    assert not switch.on


def test_a_share_above_one_never_turns_the_switch_on() -> None:
    """That is how the switch is turned off for good."""
    config = TroubleConfig(share_min=1.1, persist_s=1.0)
    troubles, switch = Troubles(config), PolicySwitch(config)
    troubles.raised(1, (), 0.0)
    _alarmed(troubles, 1, 0.0, 30.0, requests=100)
    assert not switch.update(troubles, 30.0)


def test_a_successor_takes_the_switch_over_as_it_is() -> None:
    """What another detector decided stays for its time."""
    troubles, switch = Troubles(CONFIG), PolicySwitch(CONFIG)
    switch.adopt(True, 100.0)
    switch.adopt(True, 120.0)
    assert not switch.update(troubles, 139.9)
    assert switch.update(troubles, 140.0)
    assert not switch.on
