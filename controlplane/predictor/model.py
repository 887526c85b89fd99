"""What the predictor keeps of one model: its samples, and how well they were foreseen."""

from __future__ import annotations

from collections import Counter, deque

from controlplane.core.latency import Calibration, Estimator
from controlplane.predictor.learning import Outcome
from controlplane.predictor.samples import Joiner, Sample
from schemas.bus import LatencyModel, LoadReport, RouteBatch

COMPARE_MAX = 1000


class ObservedModel:
    """One model on the bus.

    Args:
        name: its id.
        samples_max: samples that it learns from, the newest.

    Attributes:
        samples: the oldest first.
        untrained: samples since the last training.
        ttft, total: predictions compared with what came.
        estimator: makes them, as routers do.
        published: the newest model; None if there is none.
        counts: trainings that replaced, confirmed, or failed.
    """

    def __init__(self, name: str, samples_max: int) -> None:
        self.name = name
        self.joiner = Joiner()
        self.samples: deque[Sample] = deque(maxlen=samples_max)
        self.untrained = 0
        self.ttft = Calibration()
        self.total = Calibration()
        self.estimator = Estimator()
        self.counts: Counter[str] = Counter()
        self._uncompared: list[Sample] = []

    @property
    def published(self) -> LatencyModel | None:
        """The model in use."""
        learnt = self.estimator.learnt
        return None if learnt is None else learnt.model

    def load(self, report: LoadReport) -> None:
        """Take what an engine says of itself."""
        self.joiner.load(report)

    def batch(self, batch: RouteBatch) -> None:
        """Take what a router did."""
        self._uncompared += self.joiner.batch(batch)
        if len(self._uncompared) >= COMPARE_MAX:
            self.compare()

    def compare(self) -> None:
        """Compare what came since last time with what is predicted of it, then learn of it."""
        samples, self._uncompared = self._uncompared, []
        if not samples:
            return
        foreseen = self.estimator.predict([each.known for each in samples])
        begun = self.estimator.source != "none"
        for sample, service in zip(samples, foreseen, strict=True):
            if begun:
                self.total.add(service.total_s, service.total_p99_s, sample.total_s)
                if sample.ttft_s is not None:
                    self.ttft.add(service.ttft_s, service.ttft_p99_s, sample.ttft_s)
            self.estimator.observe(sample.ttft_s, sample.total_s)
        self.samples += samples
        self.untrained += len(samples)

    def trained(self, outcome: Outcome) -> None:
        """Take what a training came to."""
        self.counts["replaced" if outcome.replaced else "confirmed"] += 1
        self.estimator.use(outcome.model)
