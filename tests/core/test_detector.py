"""The detector beyond its scenarios: bounds, evidence, settings, and many routers."""

from __future__ import annotations

import pytest

from controlplane.core.detector import Change, DetectorConfig, HotspotDetector
from controlplane.core.detector_trouble import TroubleConfig
from schemas.bus import ClassCoverage, HotspotCleared, HotspotRaised, Routed
from tests.core.candidate_helpers import candidates


def _routed(key: int, holders: int = 1, **fields: object) -> Routed:
    coverage = ClassCoverage(key, 4, holders, 100.0, 900.0)
    return Routed("r", "i", 0.0, fleet=8, classes=[coverage], **fields)  # type: ignore[arg-type]


def _leader(**fields: object) -> HotspotDetector:
    defaults: dict[str, object] = {"requests_min": 3}
    config = DetectorConfig(**(defaults | fields))  # type: ignore[arg-type]
    return HotspotDetector(config, -1000.0, leading=True)


def _raise(detector: HotspotDetector, key: int, now_s: float = 1.0) -> HotspotRaised:
    """Ask for a class until it is raised."""
    for _ in range(1000):
        for change in detector.routed(_routed(key), now_s, 0.0):
            assert isinstance(change, HotspotRaised)
            return change
    raise AssertionError("the class was not raised")


def test_a_verdict_carries_its_evidence() -> None:
    """Counts, holders, fleet, streak, scores, the reason in words, and who held the class."""
    detector = _leader()
    names = candidates("abc", hits=(16, 64, 0))
    others = [Routed("o", "i", 0.0)] * 2
    changes: list[Change] = []
    for event in (*others, *[_routed(7)] * 4):
        changes += detector.routed(event, 1.0, 123.0, lambda: names)
    (verdict,) = changes
    assert isinstance(verdict, HotspotRaised)
    assert (verdict.key, verdict.depth_blocks, verdict.instances) == (7, 4, ["b"])
    assert (verdict.share, verdict.holders, verdict.fleet) == ((4, 6), 1, 8)
    assert (verdict.streak, verdict.best_inside, verdict.best_outside) == (2, 100.0, 900.0)
    assert (verdict.raised_wall_s, verdict.ttl_s) == (123.0, 15.0)
    assert "4 of 6 requests" in verdict.reason
    assert "1 of 8 instances" in verdict.reason


def test_a_decision_without_candidates_names_nobody() -> None:
    """Routers may sample what they tell; the verdict does not depend on names."""
    assert _raise(_leader(), 7).instances == []


def test_the_evidence_follows_the_class_while_the_verdict_stands() -> None:
    """Routers judge by the verdict's share, so a renewal has to state the present one."""
    detector = _leader()
    _raise(detector, 7)
    for event in (Routed("o", "i", 0.0), _routed(7, holders=2)):
        assert detector.routed(event, 2.0, 0.0) == []
    verdict = detector.standing[7].verdict
    assert (verdict.share, verdict.holders, verdict.raised_wall_s) == ((5, 6), 2, 0.0)


def test_memory_is_bounded_whatever_comes() -> None:
    """Requests, alarms and verdicts have bounds, and the counts stay exact at them."""
    detector = _leader(requests_max=200, standing_max=4)
    for number in range(3000):
        detector.routed(_routed(number % 60), 0.001 * number, 0.0)
        if number % 100 == 0:
            detector.check()
    assert detector.window.total == 200
    assert detector.window.shortened == 2800
    assert len(detector.alarms) + len(detector.standing) <= 200 // 3
    assert len(detector.standing) <= 4


def test_a_shortened_window_still_finds_the_hotspot() -> None:
    """At the bound shares are those of a shorter time, and are judged alike."""
    detector = _leader(requests_max=50)
    for number in range(100):
        detector.routed(_routed(1000 + number), 0.01 * number, 0.0)
    verdict = _raise(detector, 7, 1.0)
    assert verdict.share[1] == 50
    assert verdict.share[0] * 8 > 50


def test_requests_of_several_routers_are_one_stream() -> None:
    """Each router sees its own requests only; the detector's counts are those of all."""
    detector = _leader()
    changes: list[Change] = []
    for number in range(4):
        event = _routed(7, kv_seq=(number % 2, 0), tenant=f"t{number % 2}")
        changes += detector.routed(event, 0.1 * number, 0.0)
    assert len(changes) == 1


def test_the_first_request_that_is_diverted_follows_the_2m_th() -> None:
    """For |M| = 3 the sixth hot win in a row raises; five do not."""
    detector = _leader(requests_min=1)
    said = [len(detector.routed(_routed(7, holders=3), 0.1 * n, 0.0)) for n in range(6)]
    assert said == [0, 0, 0, 0, 0, 1]


def test_only_the_leader_says_something() -> None:
    """Neither raising nor clearing is a standby's business, and nothing is lost by that."""
    detector = _leader(window_s=10.0)
    detector.leading = False
    for number in range(6):
        assert detector.routed(_routed(7), 0.1 * number, 0.0) == []
    detector.adopt(HotspotRaised(7, 4, [], 5, 0.0, 15.0, holders=1), 1.0)
    assert detector.routed(_routed(7, holders=8), 2.0, 0.0) == []
    assert detector.tick(50.0, 0.0) == []
    detector.leading = True
    (cleared,) = detector.tick(50.0, 0.0)
    assert isinstance(cleared, HotspotCleared)


def test_adopting_again_changes_nothing() -> None:
    """A renewal that is seen in the bucket does not restart what is known of the verdict."""
    detector = _leader(give_up_s=5.0)
    verdict = HotspotRaised(7, 4, [], 5, 0.0, 15.0, holders=1)
    for at_s in (0.0, 4.0):
        detector.adopt(verdict, at_s)
    detector.leading = False
    detector.routed(_routed(7), 4.5, 0.0)
    detector.leading = True
    assert detector.troubles.factor(7) == 2
    changes: list[Change] = []
    for _ in range(3):
        changes += detector.routed(_routed(7), 5.0, 0.0)
    assert len(changes) == 1


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (DetectorConfig, {"window_s": 0.0}, "window_s"),
        (DetectorConfig, {"ttl_s": -1.0}, "ttl_s"),
        (DetectorConfig, {"give_up_s": 0.0}, "give_up_s"),
        (DetectorConfig, {"requests_min": 0}, "requests_min"),
        (DetectorConfig, {"streak_per_holder": 0}, "streak_per_holder"),
        (DetectorConfig, {"standing_max": 0}, "standing_max"),
        (DetectorConfig, {"requests_max": 10, "requests_min": 20}, "no class could ever"),
        (TroubleConfig, {"damping_max": 0}, "damping_max"),
        (TroubleConfig, {"share_min": 0.0}, "share_min"),
        (TroubleConfig, {"calm_s": -1.0}, "calm_s"),
        (TroubleConfig, {"classes_max": 0}, "classes_max"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    kind: type[DetectorConfig | TroubleConfig], fields: dict[str, float], named: str
) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=named):
        kind(**fields)  # type: ignore[arg-type]
