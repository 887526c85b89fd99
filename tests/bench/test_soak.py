"""The soak run: short, so that it cannot rot; and that it would notice."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from rich.progress import Progress

from bench.soak import AtRest, findings_of, run

QUIET = dict.fromkeys(
    (
        *("tasks", "connections", "calls", "tickets", "booked", "queued_tokens"),
        *("tenants_running", "prefix_handles"),
    ),
    0.0,
)
REST = AtRest(memory_mib=100.0, descriptors=20, threads=7, gauges=QUIET)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("queue", [False, True])
async def test_a_short_run_finds_nothing(queue: bool) -> None:
    """Six hundred requests over failing engines leave a router as it was."""
    with Progress(disable=True) as progress:
        report = await run(600, seed=3, progress=progress, queue=queue)
    assert not report.findings
    assert report.answers["200"] > 200
    assert report.answers["left"] > 50
    assert ("waiting" in report.after.gauges) is queue


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_mib": 140.0}, "memory grew by 40.0 MiB"),
        ({"descriptors": 40}, "descriptors grew by 20"),
        ({"threads": 12}, "threads grew by 5"),
        ({"gauges": {**QUIET, "tasks": 9.0}}, "tasks grew from 0 to 9"),
        ({"gauges": {**QUIET, "booked": 1.0}}, "booked is 1 at rest"),
        ({"gauges": {**QUIET, "prefix_handles": 2.0}}, "prefix_handles is 2 at rest"),
    ],
)
def test_growth_is_found(changes: dict[str, object], said: str) -> None:
    """Each thing that may leak is looked at."""
    after = msgspec.structs.replace(REST, **changes)
    assert list(findings_of(REST, after, Counter({"200": 100}))) == [said]


def test_failures_that_no_fault_explains_are_found() -> None:
    """Retries hide what engines do; much of it showing is a fault of ours."""
    assert not list(findings_of(REST, REST, Counter({"200": 100, "502": 4})))
    assert list(findings_of(REST, REST, Counter({"200": 90, "502": 10})))
    assert list(findings_of(REST, REST, Counter({"200": 90, "not connected": 1})))
