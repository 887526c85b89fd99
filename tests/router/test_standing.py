"""Verdicts that stand: told in order, lifted by deletion, and never outranked by the past."""

from __future__ import annotations

import pytest

from controlplane.core.plane import Plane
from router.standing import StandingVerdicts
from schemas import subjects
from schemas.bus import Blacklist, Drain, HotspotCleared, HotspotRaised, PolicyOverride
from schemas.codec import RemoteError, encode
from tests.core.plane_helpers import plane

DRAIN = subjects.key("m", "drain-a")
POLICY = subjects.key("m", "policy")
HOTSPOT = subjects.key("m", "hotspot-7-1")


def obey(made: Plane, told: tuple[str, object] | None) -> None:
    """Give a plane what a change of the bucket means."""
    if told is not None:
        made.handle(told[1], 0.0)  # type: ignore[arg-type]


def test_what_an_operator_says_counts_after_the_server_lost_its_files() -> None:
    """The loss lifts a drain, and a new one is obeyed whatever its revision in the new bucket."""
    standing, made = StandingVerdicts(), plane("a", "b")
    instance = made.fleet.get("a")
    assert instance is not None
    obey(made, standing.feed(DRAIN, encode(Drain("a", True, 57, 0.0)), 0.0))
    assert instance.drained
    obey(made, standing.feed(DRAIN, None, 0.0))
    assert not instance.drained
    obey(made, standing.feed(DRAIN, encode(Drain("a", True, 1, 0.0)), 0.0))
    assert instance.drained


def test_an_override_and_a_hotspot_are_lifted_and_made_again() -> None:
    """Deleting an entry means the opposite of what it said, each time."""
    standing, made = StandingVerdicts(), plane("a", "b")
    raised = HotspotRaised(7, 1, ["a"], 9, 0.0, ttl_s=60.0)
    for _ in range(2):
        obey(made, standing.feed(POLICY, encode(PolicyOverride("round_robin", 9, 0.0)), 0.0))
        obey(made, standing.feed(HOTSPOT, encode(raised), 0.0))
        assert made.verdicts.policy(0.0) is not None
        assert len(made.verdicts.hotspots) == 1
        lifted = standing.feed(HOTSPOT, None, 0.0)
        assert lifted is not None
        assert isinstance(lifted[1], HotspotCleared)
        obey(made, lifted)
        obey(made, standing.feed(POLICY, None, 0.0))
        assert made.verdicts.policy(0.0) is None
        assert not made.verdicts.hotspots


def test_a_newcomer_is_told_what_is_left_of_a_verdicts_time() -> None:
    """What stands is told with its remaining time, and not at all once that is over."""
    standing = StandingVerdicts()
    standing.feed(POLICY, encode(PolicyOverride("round_robin", 1, 0.0, ttl_s=10.0)), 100.0)
    standing.feed(DRAIN, encode(Drain("a", True, 1, 0.0)), 100.0)
    assert standing.of("other", 101.0) == []
    left = standing.of("m", 104.0)
    assert [getattr(verdict, "ttl_s", None) for verdict in left] == [6.0, None]
    assert [type(verdict) for verdict in standing.of("m", 110.0)] == [Drain]


def test_a_router_that_comes_late_gives_a_verdict_what_is_left_of_its_time() -> None:
    """Its time runs from when it was said, not from when it was read; what is over is not told."""
    standing, made = StandingVerdicts(), plane("a", "b")
    raised = encode(HotspotRaised(7, 1, ["a"], 9, 0.0, ttl_s=60.0))
    obey(made, standing.feed(HOTSPOT, raised, 0.0, age_s=45.0))
    assert len(made.verdicts.hotspots) == 1
    made.verdicts.expire(15.0)
    assert not made.verdicts.hotspots
    late = StandingVerdicts()
    assert late.feed(HOTSPOT, raised, 0.0, age_s=60.0) is None
    assert late.of("m", 0.0) == []
    ban = encode(Blacklist("a", True, 1, 0.0, ttl_s=30.0))
    told = standing.feed(subjects.key("m", "blacklist-a"), ban, 100.0, age_s=20.0)
    assert told is not None
    assert told[1] == Blacklist("a", True, 2, 0.0, ttl_s=10.0)
    assert standing.feed(DRAIN, encode(Drain("a", True, 1, 0.0)), 0.0, age_s=1e6) is not None


def test_what_replaced_a_standing_verdict_and_is_over_lifts_it() -> None:
    """After an outage a router finds that an override was replaced, and that its time is over."""
    standing, made = StandingVerdicts(), plane("a", "b")
    obey(made, standing.feed(POLICY, encode(PolicyOverride("round_robin", 1, 0.0)), 0.0))
    assert made.verdicts.policy(0.0) is not None
    short = encode(PolicyOverride("linear", 2, 0.0, ttl_s=10.0))
    obey(made, standing.feed(POLICY, short, 50.0, age_s=20.0))
    assert made.verdicts.policy(50.0) is None


def test_deleting_what_is_not_known_means_nothing() -> None:
    """A deletion that comes first, or twice, changes nothing."""
    assert StandingVerdicts().feed(DRAIN, None, 0.0) is None


@pytest.mark.parametrize("key", [subjects.key("m", "whim-a"), "no-model"])
def test_what_is_no_verdict_is_refused(key: str) -> None:
    """An entry of an unknown kind is a remote error that names it."""
    with pytest.raises(RemoteError):
        StandingVerdicts().feed(key, encode(Drain("a", True, 1, 0.0)), 0.0)
