import math
import random
import statistics

import msgspec
import numpy as np
import pytest

from controlplane.core.latency import (
    FEATURES,
    OLD_REQUESTS,
    Calibration,
    Circumstances,
    Estimator,
    Observed,
    Trend,
    head_hash,
    rows_of,
)
from controlplane.core.queue_lines import Service
from schemas.bus import LatencyModel, TreeSet

SOME = Circumstances(1000, 200, 4, 300, 0.5, 0.1, 2.0, head_hash([1, 2, 3, 4, 5]), "gold")


def constant(value: float) -> TreeSet:
    """Returns a tree that always says the same."""
    leaves = np.full(2, value, "<f4").tobytes()
    return TreeSet(1, 1, np.array([0], "<i2").tobytes(), bytes(4), leaves)


def model(version: int = 1, confirmed: int = 0, **fields: object) -> LatencyModel:
    """Returns a model that always predicts 0.5 and 1 s to the first byte, 4 and 8 to the end."""
    sets = [constant(0.5), constant(math.log(0.5)), constant(4.0), constant(math.log(4.0))]
    made = LatencyModel("m", version, confirmed, 0.0, list(FEATURES), 1000, *sets, (2.0, 2.0))
    return msgspec.structs.replace(made, **fields)


def test_a_row_has_a_value_for_each_feature() -> None:
    """Names and token ids become numbers that a float32 holds exactly."""
    rows = rows_of([SOME, SOME], {})
    assert rows.shape == (2, len(FEATURES))
    assert rows[0, :5].tolist() == [1000, 200, 4, 300, 0.5]
    assert int(rows[0, 7]) == SOME.head >> 40
    assert rows_of([], {}).shape == (0, len(FEATURES))


def test_mean_and_spread_are_those_of_what_was_observed() -> None:
    """As long as nothing is forgotten, they equal the textbook's."""
    values = [0.1, 0.4, 0.2, 0.9, 0.3]
    observed = Observed()
    for value in values:
        observed.add(value)
    assert observed.mean == pytest.approx(statistics.mean(values))
    assert observed.sigma == pytest.approx(statistics.pstdev(values))
    assert observed.high == pytest.approx(observed.mean + 3 * observed.sigma)


def test_old_observations_fade() -> None:
    """After several times its memory, what was before does not count."""
    observed = Observed(memory=10)
    for value in [100.0] * 50 + [1.0] * 100:
        observed.add(value)
    assert observed.mean == pytest.approx(1.0, abs=0.01)


def test_cold_predictions_are_mean_and_three_sigma() -> None:
    """Without a model, and without anything observed, nothing is claimed."""
    estimator = Estimator()
    assert estimator.source == "none"
    assert estimator.predict([SOME]) == [Service()]
    for number in range(200):
        estimator.observe(0.1 * (1 + number % 2), 2.0)
    assert estimator.source == "cold"
    (service,) = estimator.predict([SOME])
    assert service.ttft_s == pytest.approx(0.15)
    assert service.ttft_p99_s == pytest.approx(0.15 + 3 * 0.05)
    assert service.total_p99_s == pytest.approx(2.0)


def test_a_learnt_model_predicts_until_it_is_old() -> None:
    """One that nobody confirmed for long is believed no more; a confirmation renews it."""
    estimator = Estimator()
    assert estimator.use(model())
    assert estimator.predict([SOME, SOME]) == [Service(0.5, 1.0, 4.0, 8.0)] * 2
    for _ in range(OLD_REQUESTS + 1):
        estimator.observe(0.2, 1.0)
    assert estimator.source == "old"
    assert estimator.predict([SOME])[0].ttft_s == pytest.approx(0.2)
    assert not estimator.use(model()), "it is the same"
    assert estimator.use(model(confirmed=1))
    assert estimator.source == "learnt"


def test_an_older_model_is_not_taken() -> None:
    """Versions only grow."""
    estimator = Estimator()
    assert estimator.use(model(version=2, confirmed=7))
    assert not estimator.use(model(version=1, confirmed=9))
    assert estimator.use(model(version=2, confirmed=8))


def test_a_p99_is_never_below_the_mean() -> None:
    """Whatever the trees say."""
    estimator = Estimator()
    estimator.use(model(margins=(0.1, 0.1)))
    assert estimator.predict([SOME]) == [Service(0.5, 0.5, 4.0, 4.0)]


def test_a_model_of_other_features_is_refused() -> None:
    """A later predictor may know more than this router."""
    with pytest.raises(ValueError, match="looks at"):
        Estimator().use(model(features=["prompt_tokens"]))


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), 1e300])
def test_a_model_that_would_predict_no_time_is_refused(margin: float) -> None:
    """A queue that is ordered by what is no number would lose who waits in it."""
    estimator = Estimator()
    with pytest.raises(ValueError, match="margin"):
        estimator.use(model(margins=(1.0, margin)))
    assert estimator.source == "none"


def test_calibration_counts_what_stayed_within_the_p99() -> None:
    """Over the latest requests only, with the mean's absolute error."""
    calibration = Calibration(window=4)
    assert math.isnan(calibration.within)
    for actual_s in (9.0, 0.5, 1.5, 2.5, 0.5):
        calibration.add(1.0, 2.0, actual_s)
    assert calibration.count == 5
    assert calibration.within == 0.75
    assert calibration.error_s == pytest.approx((0.5 + 0.5 + 1.5 + 0.5) / 4)


def test_a_trend_is_the_slope_of_what_was_observed_late() -> None:
    """It says nothing before it has seen enough, or of sizes that are all alike."""
    rng = random.Random(3)
    trend, flat = Trend(memory=100, pairs_min=10), Trend(pairs_min=10)
    for slope in (5.0, 0.5):
        for number in range(600):
            size = rng.uniform(0.0, 10.0)
            trend.add(size, 1.0 + slope * size + rng.gauss(0.0, 0.1))
            flat.add(4.0, size)
            if slope == 5.0 and number < 9:
                assert trend.slope == 0.0
    assert trend.slope == pytest.approx(0.5, abs=0.05)
    assert flat.slope == 0.0


def test_a_trend_never_falls() -> None:
    """More tokens never take less time, whatever chance has it."""
    trend = Trend(pairs_min=2)
    for size in range(10):
        trend.add(size, -size)
    assert trend.slope == 0.0
