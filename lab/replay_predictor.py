"""The predictor in simulated time: the production one, which takes no time to learn."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.predictor.config import PredictorConfig
from controlplane.predictor.learning import learn
from controlplane.predictor.model import ObservedModel
from lab.replay_instance import MODEL
from schemas.bus import LatencyModel, LoadReport, RouteBatch


class SimPredictor:
    """Hears every router and every engine's counts, and tells what it has learnt.

    Attributes:
        observed: the production predictor's view of the model.
    """

    def __init__(self, tell: Callable[[LatencyModel], None]) -> None:
        self._config = PredictorConfig()
        self.observed = ObservedModel(MODEL, self._config.samples_max)
        self._tell = tell

    def load(self, report: LoadReport) -> None:
        """Take what an engine says of itself."""
        self.observed.load(report)

    def hear(self, batch: RouteBatch) -> None:
        """Take what a router did; learn whenever enough requests have ended."""
        observed = self.observed
        observed.batch(batch)
        observed.compare()
        if observed.untrained < self._config.retrain_requests:
            return
        observed.untrained = 0
        samples, trees = list(observed.samples), self._config.trees
        outcome = learn(MODEL, samples, observed.published, 0.0, trees)
        if outcome is not None:
            observed.trained(outcome)
            self._tell(outcome.model)

    @property
    def counts(self) -> dict[str, int]:
        """What its trainings came to, by name."""
        return {f"predictor:{name}": count for name, count in self.observed.counts.items()}
