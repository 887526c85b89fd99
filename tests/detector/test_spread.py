"""What verdicts do to a fleet: emulated engines and production planes, in simulated time.

`-s` prints the numbers. Times are those of H100s running a model four times slower than a 7B one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from controlplane.core.detector import DetectorConfig
from controlplane.core.dispatch import Dispatcher, RouteRequest
from controlplane.core.scoring import BoolArray, IntArray
from lab.traces import sample_trace
from tests.detector.fleet import BLOCK, Fleet, Traffic

pytestmark = pytest.mark.slow

PREFIX_BLOCKS = 512
INSTANCES = 8


class Outcome(msgspec.Struct, frozen=True):
    """What one run came to, for the hot class unless it says otherwise."""

    requests: int
    p50_s: float
    p99_s: float
    others_p99_s: float
    misses: int
    served_by: int
    batch_max: int
    said: list[tuple[float, str, str]]


def _planted(
    config: DetectorConfig | None,
    seed: int,
    *,
    instances: int = INSTANCES,
    rates: tuple[float, float] = (1.5, 1.5),
    rule: Callable[[Fleet], None] = lambda _: None,
) -> Outcome:
    """Run a class that outgrows its cache: long prompts that differ in a block, long answers.

    It is cached on an instance or two while it is rare; then it makes half of all requests, whose
    other half has short prompts and short answers. A hit is worth 200 times a miss, so the product
    lets the holders' batches grow far beyond what an engine runs at once.

    Args:
        rates: requests a second, of the class and of the others.
    """
    fleet = Fleet(instances, config=config, slowness=4.0, max_num_seqs=32)
    rule(fleet)
    traffic = Traffic(fleet, seed)
    hot = traffic.prefix(7, PREFIX_BLOCKS)
    others = traffic.one_of([traffic.prefix(100 + number, 64) for number in range(200)])
    traffic.poisson("other", rates[1], (0.0, 105.0), others, 4, 8)
    traffic.poisson("hot", 0.5, (1.0, 12.0), lambda: hot, 1, 1200)
    traffic.poisson("hot", rates[0], (12.0, 105.0), lambda: hot, 1, 1200)
    fleet.run(120.0)
    of_class = [each for each in fleet.ended if each.label == "hot"]
    others_ttft_s = [each.ttft_s for each in fleet.ended if each.label == "other"]
    p50_s, p99_s = np.percentile([each.ttft_s for each in of_class], (50, 99)).tolist()
    return Outcome(
        len(of_class),
        p50_s,
        p99_s,
        float(np.percentile(others_ttft_s, 99)),
        sum(each.hit_tokens < PREFIX_BLOCKS * BLOCK for each in of_class),
        len({each.instance for each in of_class}),
        max(fleet.batch_max.values()),
        fleet.said,
    )


def _show(name: str, outcome: Outcome) -> None:
    print(
        f"\n{name:>12}: {outcome.requests} requests of the class, TTFT p50 {outcome.p50_s:.3f} s, "
        f"p99 {outcome.p99_s:.2f} s; {outcome.misses} misses; on {outcome.served_by} instances; "
        f"largest batch {outcome.batch_max}; others' p99 {outcome.others_p99_s:.3f} s"
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_planted_hotspot_is_raised_spread_and_cleared(seed: int) -> None:
    """With a detector the class's slowest answers begin a tenth as late as without one."""
    off, on = _planted(None, seed), _planted(DetectorConfig(), seed)
    _show("detector off", off)
    _show("detector on", on)
    for at_s, verb, why in on.said:
        print(f"{at_s:12.2f} s: {verb}: {why}")
    assert [verb for _, verb, _ in on.said[:2]] == ["raised", "cleared"]
    assert len(on.said) % 2 == 0, "every verdict was lifted"
    raised_s, cleared_s = on.said[0][0], on.said[1][0]
    assert 12.0 < raised_s < 40.0
    assert cleared_s - raised_s < 15.0
    assert "suffices" in on.said[1][2]
    assert on.served_by >= INSTANCES // 2
    assert on.p99_s < off.p99_s / 5
    assert on.batch_max < off.batch_max
    assert on.misses <= INSTANCES + 2, "spreading costs a miss a copy, and no more"
    assert on.others_p99_s < 0.5


def _bar_the_list(fleet: Fleet) -> None:
    """Let routers bar the instances that the verdict names, for as long as it stands."""

    def rule(requests: Dispatcher) -> None:
        def cool(request: RouteRequest, hits: IntArray | None) -> BoolArray | None:
            names = {
                name
                for verdict in requests._verdicts.against(request.hashes)
                for name in verdict.instances
            }
            if not names:
                return None
            rows = requests._fleet.rows
            return np.array([row.record.instance_id not in names for row in rows], np.bool_)

        requests._cool = cool  # type: ignore[method-assign]

    for plane in fleet.planes:
        rule(plane.requests)


def test_barring_present_holders_beats_barring_a_list() -> None:
    """A list moves the class to its first new holder; present holders make it grow."""
    config = DetectorConfig()
    listed = _planted(config, 1, instances=16, rates=(3.0, 1.0), rule=_bar_the_list)
    present = _planted(config, 1, instances=16, rates=(3.0, 1.0))
    _show("a list", listed)
    _show("present", present)
    assert present.p99_s < listed.p99_s
    assert present.batch_max < listed.batch_max


@pytest.mark.parametrize(("classes", "rate"), [(400, 12.0), (2 * INSTANCES, 6.0)])
def test_uniform_load_raises_nothing(classes: int, rate: float) -> None:
    """Many classes, or two for each instance, all equally wanted: nobody is a hotspot."""
    fleet = Fleet(INSTANCES, config=DetectorConfig(), slowness=4.0)
    traffic = Traffic(fleet, 3)
    prefixes = [traffic.prefix(number, 128) for number in range(classes)]
    traffic.poisson("uniform", rate, (0.0, 90.0), traffic.one_of(prefixes), 2, 40)
    fleet.run(100.0)
    assert len(fleet.ended) > 500
    assert fleet.said == []


def test_conversations_raise_nothing() -> None:
    """All requests of Mooncake's trace begin with one block, and yet no class is a hotspot."""
    fleet = Fleet(INSTANCES, config=DetectorConfig())
    trace = sample_trace().cut(0.0, 160.0).faster(2.0)
    for request in trace.requests:
        hashes = trace.prompt_hashes(request, BLOCK)
        tokens = request.input_tokens
        fleet.at(request.at_s, fleet.ask, "chat", hashes, tokens, request.output_tokens)
    fleet.run(trace.duration_s + 5.0)
    assert len(fleet.ended) > 300
    assert fleet.said == []
    assert fleet.watched is not None
    assert fleet.watched.detector.window.total > 250
