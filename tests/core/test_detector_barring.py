"""Whom a router bars while a hotspot verdict stands."""

from __future__ import annotations

import pytest

from controlplane.core.plane import Plane
from controlplane.core.verdicts import outgrows
from schemas.bus import HotspotRaised, Routed
from tests.core.plane_helpers import Publisher, plane, prompt, request

HOT = prompt(1, 2)
NAMES = ("a", "b", "c", "d")


def _fleet(*holders: str) -> tuple[Plane, dict[str, Publisher]]:
    """Return a plane of four instances of which some hold the hot class."""
    made = plane(*NAMES)
    publishers = {name: Publisher(name) for name in NAMES}
    for name, publisher in publishers.items():
        publisher.batch()
        if name in holders:
            made.handle(publisher.store(HOT), 0.1)
    return made, publishers


def _verdict(share: tuple[int, int], revision: int = 1, **fields: object) -> HotspotRaised:
    return HotspotRaised(HOT[1], 2, ["a"], revision, 0.0, 15.0, share, **fields)  # type: ignore[arg-type]


def _pick(made: Plane, number: int, now_s: float = 1.0) -> str:
    decision = made.requests.decide(request(prompt(1, 2, number)), now_s)
    assert decision is not None
    return decision.instance.record.instance_id


def test_each_copy_counts_as_soon_as_the_router_knows_of_it() -> None:
    """Diversions go to instances without the class until enough of them hold it."""
    made, publishers = _fleet("a")
    made.handle(_verdict((60, 100)), 0.2)  # outgrows 1 and 2 of 4, not 3
    first = _pick(made, 10)
    assert first != "a"
    made.handle(publishers[first].store(HOT), 0.3)
    second = _pick(made, 11)
    assert second not in ("a", first)
    made.handle(publishers[second].store(HOT), 0.4)
    assert {_pick(made, number) for number in range(12, 30)} == {"a", first, second}


def test_who_lost_the_class_is_not_barred() -> None:
    """Eviction takes an instance out of M, whatever the verdict once said."""
    made, publishers = _fleet("a", "b")
    made.handle(_verdict((90, 100)), 0.2)
    assert {_pick(made, number) for number in range(10, 20)} == {"c", "d"}
    made.handle(publishers["a"].remove(reversed(HOT)), 0.3)
    assert {_pick(made, number) for number in range(20, 32)} == {"a", "c", "d"}


def test_a_verdict_without_evidence_bars_all_holders() -> None:
    """Where no share is stated, the router cannot judge by itself when to stop."""
    made, _ = _fleet("a", "b", "c")
    made.handle(_verdict((0, 0)), 0.2)
    assert {_pick(made, number) for number in range(10, 16)} == {"d"}


def test_a_class_that_everybody_holds_bars_nobody() -> None:
    """There is nobody to spread to, so nothing is filtered and nothing has to be ignored."""
    made, _ = _fleet(*NAMES)
    made.handle(_verdict((100, 100)), 0.2)
    assert {_pick(made, number) for number in range(10, 20)} == set(NAMES)


def test_barring_everybody_who_is_left_falls_back_and_is_counted() -> None:
    """With everybody outside M out of order, the holders serve their class after all."""
    made, _ = _fleet("a")
    made.handle(_verdict((90, 100)), 0.2)
    asked = request(prompt(1, 2, 9), tried=("b", "c", "d"))
    decision = made.requests.decide(asked, 1.0)
    assert decision is not None
    assert decision.instance.record.instance_id == "a"
    assert decision.reason == "ignored:hotspot"
    made.requests.book(decision, 1.0, 0.0)
    assert made.requests.counts["ignored:hotspot"] == 1


def test_overlapping_verdicts_bar_together() -> None:
    """A request of two hot classes avoids the holders of both."""
    made, publishers = _fleet("a")
    made.handle(publishers["b"].store(prompt(1)), 0.15)
    made.handle(_verdict((90, 100)), 0.2)
    made.handle(HotspotRaised(HOT[0], 1, [], 2, 0.0, 15.0, (95, 100)), 0.2)
    assert {_pick(made, number) for number in range(10, 20)} == {"c", "d"}


def test_the_detector_is_told_what_the_router_sees() -> None:
    """While a class is barred its holders have no score, so that the streak cannot go on."""
    made, _ = _fleet("a")
    made.handle(_verdict((90, 100)), 0.2)
    decision = made.requests.decide(request(prompt(1, 2, 9)), 1.0)
    assert decision is not None
    made.requests.book(decision, 1.0, 0.0)
    batch = made.outbox.take(0.0)
    assert batch is not None
    event = batch.events[-1]
    assert isinstance(event, Routed)
    coverage = [(c.depth_blocks, c.holders, c.best_inside) for c in event.classes]
    assert coverage == [(1, 1, None), (2, 1, None)]


def test_a_renewal_is_no_news() -> None:
    """A verdict that is renewed lasts longer, and is told once."""
    made, _ = _fleet("a")
    assert made.handle(_verdict((90, 100)), 0.0)
    assert made.handle(_verdict((90, 100), revision=2), 10.0) == []
    made.verdicts.expire(20.0)
    assert len(made.verdicts.hotspots) == 1
    made.verdicts.expire(25.0)
    assert made.verdicts.hotspots == []


@pytest.mark.parametrize(
    ("requests", "total", "holders", "fleet", "expected"),
    [
        (1, 1, 1, 1, False),  # one instance: nowhere else to go
        (50, 100, 0, 8, False),  # nobody holds it
        (100, 100, 8, 8, False),  # everybody holds it
        (100, 100, 7, 8, True),  # x = 1, and one instance is left
        (25, 100, 2, 8, False),  # equality is no excess
        (26, 100, 2, 8, True),
        (24, 100, 2, 8, False),
        (1 << 60, (1 << 60) + 1, 1, 4096, True),  # integers do not round
    ],
)
def test_a_class_outgrows_its_holders(
    requests: int, total: int, holders: int, fleet: int, expected: bool
) -> None:
    """The share of requests is compared with the share of instances, exactly."""
    assert outgrows(requests, total, holders, fleet) is expected


def test_a_burst_spreads_before_its_copies_are_known() -> None:
    """Diverted requests count as queued tokens, so they do not all go to one instance."""
    made, _ = _fleet("a")
    made.handle(_verdict((90, 100)), 0.2)
    chosen = []
    for number in range(6):
        decision = made.requests.decide(request(prompt(1, 2, 10 + number)), 1.0)
        assert decision is not None
        made.requests.book(decision, 1.0, 0.0)
        chosen.append(decision.instance.record.instance_id)
    assert sorted(chosen) == ["b", "b", "c", "c", "d", "d"]


def test_saturated_instances_outside_fall_back_to_the_holders() -> None:
    """At the batch cap nobody outside M can take more, so M serves its class after all."""
    made, publisher = plane(*NAMES, batch_cap=1), Publisher("a")
    publisher.batch()
    made.handle(publisher.store(HOT), 0.1)
    made.handle(_verdict((90, 100)), 0.2)
    reasons = []
    for number in range(4):
        decision = made.requests.decide(request(prompt(1, 2, 10 + number)), 1.0)
        assert decision is not None
        made.requests.book(decision, 1.0, 0.0)
        reasons.append((decision.instance.record.instance_id == "a", decision.reason))
    assert reasons == [(False, "")] * 3 + [(True, "ignored:hotspot")]
