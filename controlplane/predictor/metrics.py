"""What a predictor process says of itself, as metric families; labels are bounded by models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from controlplane.exporter import Family
from controlplane.predictor.model import ObservedModel
from controlplane.predictor.service import PredictorService

_PREFIX = "multiplane_predictor"

Kind = Literal["gauge", "counter"]

_PROCESS: tuple[tuple[Kind, str, str, Callable[[PredictorService], float]], ...] = (
    ("gauge", "leading", "1 while this process trains.", lambda s: s.leading),
    ("counter", "lease_lost", "Times that another took over.", lambda s: s.lease.lost),
    ("gauge", "messages_waiting", "Bus messages not taken in yet.", lambda s: s.waiting),
)

_MODEL: tuple[tuple[Kind, str, str, Callable[[ObservedModel], float]], ...] = (
    ("gauge", "samples", "Requests that the next model is learnt from.", lambda m: len(m.samples)),
    ("gauge", "requests_open", "Requests whose end is awaited.", lambda m: len(m.joiner)),
    (
        "gauge",
        "version",
        "Version of the model in use; 0 for none.",
        lambda m: 0 if m.published is None else m.published.version,
    ),
)

_CALIBRATION: tuple[tuple[Kind, str, str, int], ...] = (
    ("gauge", "within_p99", "Share of the latest requests within their predicted p99.", 0),
    ("gauge", "absolute_error_seconds", "Mean absolute error of the predicted mean.", 1),
    ("counter", "compared", "Predictions compared with what came.", 2),
)


def describe(service: PredictorService) -> list[Family]:
    """Return everything as of now."""
    models = list(service.models.values())
    families = [
        Family(kind, f"{_PREFIX}_{name}", text, (), [((), float(read(service)))])
        for kind, name, text, read in _PROCESS
    ]
    families += [
        Family(
            kind,
            f"{_PREFIX}_{name}",
            text,
            ("model",),
            [((model.name,), float(read(model))) for model in models],
        )
        for kind, name, text, read in _MODEL
    ]
    for kind, name, text, which in _CALIBRATION:
        samples = []
        for model in models:
            for time_of, found in (("ttft", model.ttft), ("total", model.total)):
                value = float((found.within, found.error_s, found.count)[which])
                if not math.isnan(value):
                    samples.append(((model.name, time_of), value))
        families.append(Family(kind, f"{_PREFIX}_{name}", text, ("model", "time"), samples))
    families.append(_counts("trainings", "outcome", "Trainings, by what came of them.", models))
    told = [((what,), float(count)) for what, count in service.counts.items()]
    families.append(
        Family("counter", f"{_PREFIX}_service", "What happened to the predictor.", ("what",), told)
    )
    return families


def _counts(name: str, label: str, text: str, models: list[ObservedModel]) -> Family:
    samples = [
        ((model.name, what), float(count))
        for model in models
        for what, count in model.counts.items()
    ]
    return Family("counter", f"{_PREFIX}_{name}", text, ("model", label), samples)
