import numpy as np
import pytest
import xgboost

from controlplane.core.forest import Forest
from controlplane.predictor import trees

pytestmark = pytest.mark.slow


def data(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of nine features, and targets that depend on three of them."""
    rng = np.random.default_rng(3)
    rows = (rng.random((count, 9)) * np.array([8000, 8000, 32, 1e5, 1, 1, 9, 2**24, 9])).astype(
        "f4"
    )
    seconds = rows[:, 1] / 2e4 + rows[:, 2] * 0.05 + rng.exponential(0.1, count)
    return rows, seconds.astype("f4")


@pytest.mark.parametrize(
    "objective",
    [{"objective": "reg:squarederror"}, {"objective": "reg:quantileerror", "quantile_alpha": 0.99}],
)
def test_exported_trees_predict_what_the_library_predicts(objective: dict[str, object]) -> None:
    """To float32's precision, on rows that they have not seen."""
    rows, seconds = data(3000)
    booster = trees._train(rows[:2000], seconds[:2000], objective, 60)
    theirs = booster.predict(xgboost.DMatrix(rows))
    ours = Forest([trees.exported(booster)], 9).sums(rows)[:, 0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_trees_that_stop_early_are_filled_up() -> None:
    """A target without structure gives trees of one leaf, which say the same everywhere."""
    rows, _ = data(300)
    found = Forest([trees.learn_mean(rows, np.full(300, 2.5, "f4"), 4)], 9).sums(rows)
    np.testing.assert_allclose(found, 2.5, rtol=1e-5)
