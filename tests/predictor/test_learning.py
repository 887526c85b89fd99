import msgspec
import numpy as np
import pytest

from controlplane.core.latency import Learnt, rows_of
from controlplane.predictor.learning import learn
from controlplane.predictor.model import ObservedModel
from controlplane.predictor.samples import Joiner, Sample
from tests.predictor.samples import batches

pytestmark = pytest.mark.slow

TREES = 30


def samples(count: int, seed: int = 1, scale: float = 1.0) -> list[Sample]:
    """Returns samples that follow the rule."""
    joiner = Joiner()
    made = batches(count, seed=seed, scale=scale)
    return [each for batch in made for each in joiner.batch(batch)]


def test_a_model_learns_the_rule() -> None:
    """Its means err less than half as much as the overall mean, and its p99s hold for 99 %."""
    outcome = learn("m", samples(2000), None, 0.0, TREES)
    assert outcome is not None
    assert outcome.replaced
    fresh = samples(2000, seed=2)
    found = Learnt(outcome.model).predict(rows_of([each.known for each in fresh], {}))
    totals = np.array([each.total_s for each in fresh])
    error = np.abs(found[:, 2] - totals).mean()
    assert error < 0.5 * np.abs(totals - totals.mean()).mean()
    ttfts = np.array([each.ttft_s for each in fresh])
    assert (ttfts <= found[:, 1]).mean() == pytest.approx(0.99, abs=0.01)
    assert (totals <= found[:, 3]).mean() == pytest.approx(0.99, abs=0.01)


def test_too_few_samples_make_no_model() -> None:
    """There must be enough to learn from beside those that are held back."""
    assert learn("m", samples(250), None, 0.0, TREES) is None


def test_a_worse_model_does_not_replace_the_one_in_use() -> None:
    """The old one stays, confirmed, with margins for what is so now."""
    good = learn("m", samples(4000), None, 0.0, TREES)
    assert good is not None
    outcome = learn("m", samples(400, seed=3), good.model, 1.0, 1)
    assert outcome is not None
    assert not outcome.replaced
    assert (outcome.model.version, outcome.model.confirmed) == (1, 1)
    assert outcome.model.total == good.model.total


def test_a_model_follows_a_change_of_times() -> None:
    """Once everything takes three times as long, the new model replaces the old one."""
    before = learn("m", samples(1000), None, 0.0, TREES)
    assert before is not None
    after = learn("m", samples(1500, seed=4, scale=3.0), before.model, 1.0, TREES)
    assert after is not None
    assert after.replaced
    assert after.model.version == 2
    assert after.model.within[1] == pytest.approx(0.99, abs=0.011)


def test_answers_that_are_not_streamed_teach_the_end_as_first_byte() -> None:
    """Where no time to a first byte is known, none is made up."""
    silent = [msgspec.structs.replace(each, ttft_s=None) for each in samples(600)]
    outcome = learn("m", silent, None, 0.0, 5)
    assert outcome is not None
    assert outcome.model.within[0] == 0.0


def test_predictions_are_compared_with_what_comes() -> None:
    """Before a model is learnt by mean + 3σ, afterwards by the model."""
    observed = ObservedModel("m", 8000)
    for batch in batches(1000):
        observed.batch(batch)
        observed.compare()
    assert observed.untrained == 1000
    assert observed.total.count == 950, "of the first ones nothing could be foreseen"
    cold_error_s = observed.total.error_s
    outcome = learn("m", list(observed.samples), observed.published, 0.0, TREES)
    assert outcome is not None
    observed.trained(outcome)
    for batch in batches(1000, seed=5):
        observed.batch(batch)
        observed.compare()
    assert observed.total.within == pytest.approx(0.99, abs=0.01)
    assert observed.ttft.within == pytest.approx(0.99, abs=0.01)
    assert observed.total.error_s < 0.6 * cold_error_s
