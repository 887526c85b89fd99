"""The detector against its naive twin, on whatever requests Hypothesis thinks of."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.detector import DetectorConfig, HotspotDetector
from controlplane.core.detector_trouble import TroubleConfig
from schemas.bus import ClassCoverage, HotspotRaised, Routed
from tests.models.naive_detector import NaiveDetector, Said

FLEET = 4
PATHS = ((11, 12, 14), (11, 12, 24), (11, 22), (31, 32, 34), (31,), ())
"""Chains of class keys: nested, forking and short ones. The last digit is the depth."""

scores = st.sampled_from([None, 1.0, 2.0, 2.0, 3.0])


@st.composite
def routed(draw: st.DrawFn) -> Routed:
    """Return a request whose holders shrink with depth, as they do in life."""
    path = draw(st.sampled_from(PATHS + PATHS[:1] * 6))
    holders = draw(st.integers(0, FLEET)) if draw(st.integers(0, 3)) == 0 else 1
    best = draw(st.sampled_from([(1.0, 2.0)] * 6 + [(2.0, 2.0), (3.0, 2.0)]))
    if draw(st.integers(0, 9)) == 0:
        best = (draw(scores), draw(scores))
    classes = []
    for key in path:
        classes.append(ClassCoverage(key, key % 10, holders, *best))
        holders = max(0, holders - draw(st.integers(0, 1)) * draw(st.integers(0, 1)))
    policy = draw(st.sampled_from(["multiplicative"] * 9 + ["round_robin"]))
    attempt = int(draw(st.integers(0, 19)) == 0)
    return Routed("r", "i", 0.0, attempt=attempt, policy=policy, fleet=FLEET, classes=classes)


steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.1, 0.5, 1.0, 4.0]), st.none() | routed()), max_size=60
)
TROUBLE = TroubleConfig(memory_s=8.0, rest_s=3.0, damping_max=4)
CONFIG = DetectorConfig(
    window_s=6.0, requests_min=2, give_up_s=3.0, standing_max=2, trouble=TROUBLE
)


@given(steps)
@settings(max_examples=100)
def test_the_detector_says_what_its_twin_says(story: list[tuple[float, Routed | None]]) -> None:
    """Whatever is asked for, held and preferred, verdicts are raised and cleared alike."""
    detector = HotspotDetector(CONFIG, -100.0, leading=True)
    twin = NaiveDetector(6.0, 2, 3.0, 2, 8.0, 3.0, 4)
    now_s = 0.0
    for wait_s, event in story:
        now_s += wait_s
        cleared = {reason: count for reason, count in detector.counts.items() if "cl" in reason}
        if event is None:
            changes, expected = detector.tick(now_s, 0.0), twin.tick(now_s)
        else:
            changes, expected = detector.routed(event, now_s, 0.0), twin.routed(event, now_s)
        detector.check()
        reasons = {
            reason.partition(":")[2]
            for reason, count in detector.counts.items()
            if "cl" in reason and count != cleared.get(reason, 0)
        }
        said: list[Said] = [
            ("raised" if isinstance(change, HotspotRaised) else "cleared", change.key, "")
            for change in changes
        ]
        assert sorted(said) == sorted((verb, key, "") for verb, key, _ in expected)
        assert reasons == {why for verb, _, why in expected if verb == "cleared"}
        assert detector.standing.keys() == twin.raised.keys()
