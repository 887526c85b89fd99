"""From what a user asks for to jobs, and from their results to cases that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from lab.generators import KINDS
from lab.replay_config import PolicySpec, ReplayConfig, parse_policy, policy_names
from lab.replay_metrics import Metrics, measure, over_seeds
from lab.replay_result import Result
from lab.replay_runs import Job
from lab.replay_source import SAMPLE, TraceSource
from lab.report import Case

BEST_LINEAR = "linear:best"
LINEAR_WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


class Load(msgspec.Struct, frozen=True):
    """How fast requests come: `qps` a second if given, else `speed` times as recorded."""

    speed: float = 1.0
    qps: float = 0.0

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.qps:g} requests/s" if self.qps else f"speed {self.speed:g}"


class Plan(msgspec.Struct, frozen=True):
    """What to replay: every trace at every load, under every policy, with every seed."""

    sources: tuple[TraceSource, ...]
    policies: tuple[PolicySpec, ...]
    loads: tuple[Load, ...]
    seeds: tuple[int, ...]
    config: ReplayConfig
    best_linear: bool = False

    def jobs(self) -> list[Job]:
        """Return the replays; the policies of one trace, load and seed follow each other."""
        return [
            Job(self.source(source, load, seed), policy, self.config_of(seed))
            for source in self.sources
            for load in self.loads
            for seed in self.seeds
            for policy in self.policies
        ]

    def source(self, source: TraceSource, load: Load, seed: int) -> TraceSource:
        """Return a trace at a load, with a seed."""
        return msgspec.structs.replace(source, speed=load.speed, qps=load.qps, seed=seed)

    def config_of(self, seed: int) -> ReplayConfig:
        """Return the settings with a seed."""
        return msgspec.structs.replace(self.config, seed=seed)

    def cases(self, results: Sequence[Result], warm_up_s: float) -> list[Case]:
        """Return what can be compared, from the results of `jobs` in their order."""
        each = len(self.seeds) * len(self.policies)
        found = []
        for number, (source, load) in enumerate(
            (source, load) for source in self.sources for load in self.loads
        ):
            own = results[number * each : (number + 1) * each]
            runs = [(result, measure(result, warm_up_s)) for result in own]
            note = ""
            if self.best_linear:
                runs, weight = _with_best_linear(runs)
                note = f"{BEST_LINEAR} is {weight} here: the least mean TTFT."
            name = Path(source.name).stem
            title = f"{name}, {load.text}, {self.config.fleet}"
            found.append(Case(title, name, tuple(runs), note, _by_tenant(runs, warm_up_s)))
        return found


def _by_tenant(runs: Iterable[tuple[Result, Metrics]], warm_up_s: float) -> tuple[Metrics, ...]:
    """Return the numbers of each tenant's requests alone, where there are tenants."""
    return tuple(
        measure(result.of_tenant(place), warm_up_s)
        for result, _ in runs
        for place, name in enumerate(result.tenants)
        if name
    )


def parse_policies(text: str) -> tuple[tuple[PolicySpec, ...], bool]:
    """Return the policies that a comma-separated list names, and whether to find the best λ.

    Raises:
        ValueError: one of them does not exist.
    """
    names = policy_names() if text == "all" else text.split(",")
    best = BEST_LINEAR in names or text == "all"
    specs = [parse_policy(name) for name in names if name != BEST_LINEAR]
    if best:
        specs += [PolicySpec("linear", {"weight": weight}) for weight in LINEAR_WEIGHTS]
    return tuple({spec.label: spec for spec in specs}.values()), best


def known_source(name: str) -> bool:
    """Whether a trace can be made or read."""
    return name in KINDS or name == SAMPLE or Path(name).is_file()


def _with_best_linear(
    runs: Iterable[tuple[Result, Metrics]],
) -> tuple[list[tuple[Result, Metrics]], str]:
    """Return runs with the best weight of `linear` in place of all of them, and which one it is."""
    swept = {PolicySpec("linear", {"weight": weight}).label for weight in LINEAR_WEIGHTS}
    kept: list[tuple[Result, Metrics]] = []
    tried: dict[str, list[tuple[Result, Metrics]]] = {}
    for result, row in runs:
        if row.policy in swept:
            tried.setdefault(row.policy, []).append((result, row))
        else:
            kept.append((result, row))
    best = min(tried, key=lambda name: over_seeds([row.ttft_s[0] for _, row in tried[name]]).mean)
    for result, row in tried[best]:
        renamed = msgspec.structs.replace(result, policy=BEST_LINEAR)
        kept.append((renamed, msgspec.structs.replace(row, policy=BEST_LINEAR)))
    return kept, best
