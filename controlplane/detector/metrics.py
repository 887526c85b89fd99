"""What a detector process says of itself, as metric families.

Labels are bounded: models by `models_max`, depths by `CLASS_DEPTHS`, classes by their rank and not
by their keys, reasons by the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from controlplane.core.detector_stats import Histogram
from controlplane.core.verdicts import CLASS_DEPTHS
from controlplane.detector.model import WatchedModel
from controlplane.detector.service import DetectorService
from controlplane.exporter import Buckets, Family

_PREFIX = "multiplane_detector"
_RANKS = 3

Kind = Literal["gauge", "counter"]

_PROCESS: tuple[tuple[Kind, str, str, Callable[[DetectorService], float]], ...] = (
    ("gauge", "leading", "1 while this process decides.", lambda s: s.leading),
    ("gauge", "lease_left_seconds", "For how long it may.", lambda s: max(s.lease.left_s, 0.0)),
    ("counter", "lease_taken", "Times that it became the leader.", lambda s: s.lease.taken),
    ("counter", "lease_lost", "Times that another took over.", lambda s: s.lease.lost),
    ("gauge", "messages_waiting", "Bus messages not taken in yet.", lambda s: s.waiting),
)

_MODEL: tuple[tuple[Kind, str, str, Callable[[WatchedModel], float | None]], ...] = (
    ("counter", "requests", "Decisions seen.", lambda m: m.stats.requests),
    (
        "gauge",
        "score_variance",
        "Variance of P × (B + 1) over the instances of a decision, recent ones weighing most.",
        lambda m: m.stats.variance,
    ),
    (
        "gauge",
        "score_variation",
        "Standard deviation of P × (B + 1) over its mean, likewise: 0 is even.",
        lambda m: m.stats.variation,
    ),
    (
        "gauge",
        "window_requests",
        "Requests in the window.",
        lambda m: m.detector.window.total,
    ),
    (
        "gauge",
        "window_classes",
        "Distinct classes in the window.",
        lambda m: m.detector.window.classes,
    ),
    (
        "counter",
        "window_shortened",
        "Requests that left the window early, for want of room.",
        lambda m: m.detector.window.shortened,
    ),
    ("counter", "lost", "Messages of routers that never came.", lambda m: m.streams.lost),
    ("counter", "repeated", "Messages of routers that came before.", lambda m: m.streams.repeated),
    (
        "counter",
        "refused",
        "Requests that would have raised a verdict beyond the bound.",
        lambda m: m.detector.counts["refused"],
    ),
    ("gauge", "unwritten", "Verdicts that the bucket has not taken yet.", lambda m: m.waiting),
    (
        "counter",
        "foreign",
        "Verdicts in the bucket that no leader had put there.",
        lambda m: m.counts["foreign"],
    ),
    (
        "gauge",
        "persisting_share",
        "Share of requests in classes whose alarm persists.",
        lambda m: m.switch.share,
    ),
    (
        "gauge",
        "policy_override",
        "1 while the detector wants round robin.",
        lambda m: m.switch.on,
    ),
)


def describe(service: DetectorService) -> list[Family]:
    """Return everything as of now. O(models × verdicts and frequent classes)."""
    models = list(service.models.values())
    return [
        *(_single(kind, name, text, read(service)) for kind, name, text, read in _PROCESS),
        _counts("writes", "outcome", "Writes to the bucket.", service.registrar.counts),
        _counts("service", "what", "What happened to the detector.", service.counts),
        *(_by_model(models, *each) for each in _MODEL),
        *_hotspots(models),
        _shares(models),
        _hits(models),
    ]


def _single(kind: Kind, name: str, text: str, value: float) -> Family:
    return Family(kind, f"{_PREFIX}_{name}", text, (), [((), value)])


def _counts(name: str, label: str, text: str, counts: Mapping[str, int]) -> Family:
    samples = [((what,), float(count)) for what, count in counts.items()]
    return Family("counter", f"{_PREFIX}_{name}", text, (label,), samples)


def _by_model(
    models: list[WatchedModel],
    kind: Kind,
    name: str,
    text: str,
    read: Callable[[WatchedModel], float | None],
) -> Family:
    values = [((model.name,), read(model)) for model in models]
    samples = [(labels, float(value)) for labels, value in values if value is not None]
    return Family(kind, f"{_PREFIX}_{name}", text, ("model",), samples)


def _hotspots(models: list[WatchedModel]) -> Iterator[Family]:
    counted: dict[str, list[tuple[tuple[str, ...], float]]] = {"raised": [], "cleared": []}
    standing, alarms = [], []
    for model in models:
        for name, count in model.detector.counts.items():
            kind, _, detail = name.partition(":")
            if kind in counted:
                counted[kind].append(((model.name, detail), float(count)))
        verdicts = [each.verdict for each in model.detector.standing.values()]
        stand = Counter(verdict.depth_blocks for verdict in verdicts)
        alarmed = Counter(alarm.depth_blocks for alarm in model.detector.alarms.values())
        for depth in CLASS_DEPTHS:
            standing.append(((model.name, str(depth)), float(stand[depth])))
            alarms.append(((model.name, str(depth)), float(alarmed[depth])))
    by_depth, by_reason = ("model", "depth"), ("model", "reason")
    text = "Verdicts that this process raised, by depth in blocks."
    yield Family("counter", f"{_PREFIX}_raised", text, by_depth, counted["raised"])
    text = "Verdicts that this process cleared, by reason."
    yield Family("counter", f"{_PREFIX}_cleared", text, by_reason, counted["cleared"])
    yield Family("gauge", f"{_PREFIX}_standing", "Verdicts in force.", by_depth, standing)
    yield Family("gauge", f"{_PREFIX}_alarms", "Classes alarmed, not barred.", by_depth, alarms)


def _shares(models: list[WatchedModel]) -> Family:
    samples = []
    for model in models:
        window = model.detector.window
        for depth in CLASS_DEPTHS:
            for rank, count in enumerate(window.top(depth, _RANKS), 1):
                samples.append(((model.name, str(depth), str(rank)), count / window.total))
    text = "Share of requests of the most frequent classes of each depth, by rank."
    labels = ("model", "depth", "rank")
    return Family("gauge", f"{_PREFIX}_class_share", text, labels, samples)


def _hits(models: list[WatchedModel]) -> Family:
    samples = []
    for model in models:
        samples.append(((model.name, "promised"), _buckets(model.stats.promised)))
        samples.append(((model.name, "actual"), _buckets(model.stats.actual)))
    text = "Share of a prompt that was cached, as promised and as engines report."
    return Family("histogram", f"{_PREFIX}_hit_ratio", text, ("model", "source"), samples)


def _buckets(histogram: Histogram) -> Buckets:
    return Buckets(histogram.cumulative(), histogram.count, histogram.sum)
