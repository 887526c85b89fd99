"""Learns trees with XGBoost, and takes them out of it: nobody else needs the library.

Loaded when first needed: importing it takes half a second and 100 MB.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.core.forest import DEPTH_MAX
from controlplane.core.latency import Rows
from schemas.records import TreeSet

TREES = 60
_COMMON: dict[str, Any] = {
    "max_depth": DEPTH_MAX,
    "eta": 0.12,
    "min_child_weight": 5.0,
    "subsample": 0.8,
    "tree_method": "hist",
    "nthread": 1,
    "seed": 7,
    "verbosity": 0,
}

_MISSING = "the predictor needs XGBoost: pip install 'multiplane[predictor]'"

Targets = NDArray[np.float32]


class Unavailable(Exception):
    """XGBoost is not installed."""


def library() -> Any:
    """Return the library.

    Raises:
        Unavailable: it is not there; says how to get it.
    """
    try:
        import xgboost
    except ImportError as error:
        raise Unavailable(_MISSING) from error
    return xgboost


def check_installed() -> None:
    """See that the library is there, without loading it. Raises Unavailable."""
    if find_spec("xgboost") is None:
        raise Unavailable(_MISSING)


def learn_mean(rows: Rows, targets: Targets, trees: int = TREES) -> TreeSet:
    """Return trees whose sum is the expected target. Takes long: keep off an event loop."""
    return exported(_train(rows, targets, {"objective": "reg:squarederror"}, trees))


def learn_quantile(rows: Rows, targets: Targets, share: float, trees: int = TREES) -> TreeSet:
    """Return trees whose sum is what that share of targets stays below; likewise."""
    objective = {"objective": "reg:quantileerror", "quantile_alpha": share}
    return exported(_train(rows, targets, objective, trees))


def _train(rows: Rows, targets: Targets, objective: dict[str, Any], trees: int) -> Any:
    xgboost = library()
    data = xgboost.DMatrix(rows, targets, nthread=1)
    return xgboost.train(_COMMON | objective, data, trees)


def exported(booster: Any) -> TreeSet:
    """Return a booster's trees in arrays; their sums equal its raw predictions."""
    learner = msgspec.json.decode(bytes(booster.save_raw("json")))["learner"]
    base = learner["learner_model_param"]["base_score"].strip("[]")
    trees = learner["gradient_booster"]["model"]["trees"]
    inner = (1 << DEPTH_MAX) - 1
    features = np.full((len(trees), inner), -1, "<i2")
    thresholds = np.zeros((len(trees), inner), "<f4")
    leaves = np.zeros((len(trees), inner + 1), "<f4")
    for number, tree in enumerate(trees):
        _fill(tree, 0, 0, 0, features[number], thresholds[number], leaves[number])
    return TreeSet(
        DEPTH_MAX,
        len(trees),
        features.tobytes(),
        thresholds.tobytes(),
        leaves.tobytes(),
        float(base),
    )


def _fill(
    tree: dict[str, Any],
    node: int,
    place: int,
    level: int,
    features: NDArray[np.int16],
    thresholds: NDArray[np.float32],
    leaves: NDArray[np.float32],
) -> None:
    """Copy the tree below a node to the perfect one below a place; a leaf higher up fills both."""
    left, right = tree["left_children"][node], tree["right_children"][node]
    if left < 0:
        width = 1 << (DEPTH_MAX - level)
        first = (place + 1 - (1 << level)) * width
        leaves[first : first + width] = tree["split_conditions"][node]
        return
    features[place] = tree["split_indices"][node]
    thresholds[place] = tree["split_conditions"][node]
    _fill(tree, left, 2 * place + 1, level + 1, features, thresholds, leaves)
    _fill(tree, right, 2 * place + 2, level + 1, features, thresholds, leaves)
