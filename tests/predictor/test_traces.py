"""On replayed traffic, 99 % of requests stay within their predicted p99."""

from __future__ import annotations

import pytest

from controlplane.core.latency import Calibration
from controlplane.predictor.learning import learn
from controlplane.predictor.model import ObservedModel
from lab.generators import generate
from lab.replay import Replay
from lab.replay_config import ReplayConfig, parse_policy
from lab.traces import Trace
from schemas.bus import RouteBatch

pytestmark = pytest.mark.slow

RETRAIN = 1000
CONFIG = ReplayConfig(instances=4, routers=2)


class Listening(Replay):
    """A replay whose routers' events a predictor hears, and learns from."""

    def __init__(self, trace: Trace) -> None:
        config = CONFIG.resolved(trace.block_tokens)
        within = trace.within(config.engine.max_model_len)
        super().__init__(within, parse_policy("multiplicative"), config, None)
        self.observed = ObservedModel("m", 8000)

    def _told(self, batch: RouteBatch) -> None:
        super()._told(batch)
        observed = self.observed
        observed.batch(batch)
        observed.compare()
        if observed.untrained >= RETRAIN:
            observed.untrained = 0
            outcome = learn("m", list(observed.samples), observed.published, 0.0)
            assert outcome is not None
            if observed.published is None:  # what is predicted by mean + 3σ is another matter
                observed.ttft, observed.total = Calibration(10**6), Calibration(10**6)
            observed.trained(outcome)


@pytest.mark.parametrize(("kind", "rate"), [("agent", 8.0), ("chatbot", 6.0)])
def test_predicted_p99s_hold_for_99_percent_of_a_trace(kind: str, rate: float) -> None:
    """Give or take one percent, for first bytes and ends, over all that a model predicted."""
    trace = generate(kind, seed=1, duration_s=3600.0 / rate, requests_per_s=rate)
    replay = Listening(trace)
    replay.run()
    observed = replay.observed
    assert observed.ttft.count > 1500
    assert observed.counts["replaced"] >= 1
    assert observed.ttft.within == pytest.approx(0.99, abs=0.01)
    assert observed.total.within == pytest.approx(0.99, abs=0.01)
