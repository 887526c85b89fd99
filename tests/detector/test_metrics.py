"""What a detector says of itself."""

from __future__ import annotations

import urllib.request

import pytest

from controlplane.core.verdicts import CLASS_DEPTHS
from controlplane.detector.metrics import describe
from controlplane.exporter import Buckets, Exporter, Family
from schemas.bus import Finished
from tests.detector.rig import HOT, MODEL, Rig, eventually, routed
from tests.detector.virtual import in_virtual_time

Shown = dict[tuple[str, tuple[str, ...]], float | Buckets]


def _shown(families: list[Family]) -> Shown:
    return {(each.name, labels): value for each in families for labels, value in each.samples}


@in_virtual_time
async def test_a_detector_shows_what_it_knows() -> None:
    """Verdicts by depth and reason, shares by rank, hits, leading, and what it wrote."""
    async with Rig() as rig:
        service = await rig.lead("a")
        rig.router.ask(4, prompt_tokens=100, hit_tokens=75)
        rig.router.say(*[routed(HOT + n, outside=1.0) for n in range(1, 5) for _ in range(n + 2)])
        rig.router.say(Finished("r", "i", "ok", 200, 0.0, prompt_tokens=100, cached_tokens=50))
        await eventually(lambda: rig.router.barred() == {HOT})
        shown = _shown(describe(service))
        prefix = "multiplane_detector"
        assert shown[f"{prefix}_leading", ()] == 1
        assert shown[f"{prefix}_lease_taken", ()] == 1
        assert shown[f"{prefix}_writes", ("written",)] == 1
        assert shown[f"{prefix}_raised", (MODEL, "4")] == 1
        assert shown[f"{prefix}_standing", (MODEL, "4")] == 1
        assert shown[f"{prefix}_standing", (MODEL, "8")] == 0
        assert shown[f"{prefix}_alarms", (MODEL, "4")] == 4
        assert shown[f"{prefix}_window_requests", (MODEL,)] == 22
        shares = [shown[f"{prefix}_class_share", (MODEL, "4", rank)] for rank in "123"]
        assert shares == [6 / 22, 5 / 22, 4 / 22]
        promised = shown[f"{prefix}_hit_ratio", (MODEL, "promised")]
        actual = shown[f"{prefix}_hit_ratio", (MODEL, "actual")]
        assert isinstance(promised, Buckets)
        assert isinstance(actual, Buckets)
        assert (promised.count, promised.sum) == (4, 3.0)
        assert dict(actual.cumulative)[0.4] == 0
        assert dict(actual.cumulative)[0.5] == 1
        rig.router.ask(1, holders=8)
        await eventually(lambda: not rig.router.barred())
        shown = _shown(describe(service))
        assert shown[f"{prefix}_cleared", (MODEL, "covered")] == 1
        assert shown[f"{prefix}_standing", (MODEL, "4")] == 0


@in_virtual_time
async def test_labels_are_bounded_whatever_is_asked_for() -> None:
    """A thousand classes are ranked, not named."""
    async with Rig() as rig:
        service = await rig.lead("a")
        for number in range(1000):
            rig.router.ask(3, HOT + number)
        await eventually(lambda: service.counts["messages"] == 1000)
        families = describe(service)
        samples = {each.name: len(each.samples) for each in families}
        assert samples["multiplane_detector_class_share"] == 3
        assert max(samples.values()) <= max(len(CLASS_DEPTHS), 8)


def test_the_page_is_what_was_last_shown() -> None:
    """Gauges, counters and histograms, in Prometheus' text format, on a port of its own."""
    exporter = Exporter("127.0.0.1", 0)
    try:
        buckets = Buckets([(0.5, 1), (1.0, 3)], 4, 7.5)
        exporter.show([Family("gauge", "old", "Old.", (), [((), 1.0)])])
        exporter.show(
            [
                Family("gauge", "a", "A.", ("model",), [(("m",), 1.5)]),
                Family("counter", "b", "B.", (), [((), 2.0)]),
                Family("histogram", "c", "C.", ("model",), [(("m",), buckets)]),
            ]
        )
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            page = answer.read().decode()
    finally:
        exporter.close()
    for line in (
        'a{model="m"} 1.5',
        "b_total 2.0",
        'c_bucket{le="0.5",model="m"} 1.0',
        'c_bucket{le="+Inf",model="m"} 4.0',
        'c_count{model="m"} 4.0',
        'c_sum{model="m"} 7.5',
    ):
        assert line in page.splitlines()
    assert "old" not in page


@pytest.mark.parametrize("kind", ["gauge", "counter"])
def test_a_histogram_cannot_be_shown_as_something_else(kind: str) -> None:
    """A programming error shows at once, not as a page that scrapers refuse."""
    exporter = Exporter("127.0.0.1", 0)
    try:
        family = Family(kind, "x", "X.", (), [((), Buckets([], 0, 0.0))])  # type: ignore[arg-type]
        exporter.show([family])
        with pytest.raises(OSError, match="500"):
            urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5.0)
    finally:
        exporter.close()
