"""Compares all policies on four kinds of traffic, and writes what docs/evaluation.md shows.

    python -m bench.evaluation [--jobs N] [--only NAME]     replay, then write numbers and pictures
    python -m bench.evaluation --render                     write the document's tables anew

Everything is simulated time: the lab's engines, the production decision code. The numbers depend on
nothing but the code and the seeds, so two runs of one commit agree to the last digit. Replays that
were made before come from the lab's cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from bench import evaluation_render as render
from bench.evaluation_cells import Cell, Evaluation, cell_of
from controlplane.core.queue_lines import QueueConfig
from lab.cache import default_cache
from lab.generators import HotspotShape
from lab.replay_config import PolicySpec, ReplayConfig, parse_policy
from lab.replay_metrics import Metrics, measure
from lab.replay_runs import Job, run_jobs
from lab.replay_source import TraceSource

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "evaluation"
DOCUMENT = ROOT / "docs" / "evaluation.md"

SEEDS = (0, 1, 2)
HALF, SATURATION = 0.5, 1.0
SWEPT_LOADS = (0.25, 1.25)
WEIGHTS = (0.3, 0.5, 0.7, 0.85, 0.95)
POLICIES = (
    "multiplicative",
    "dynamo_cost",
    "simulated_ttft",
    "least_requests",
    "round_robin",
    "vllm_jsq",
    "llm_d",
    "sglang",
    "aibrix",
    "preble",
    "oracle_ttft",
)
SWEPT = ("multiplicative", "dynamo_cost", "preble", "least_requests", "round_robin")
INSTANCES = 8


class Scenario(msgspec.Struct, frozen=True):
    """One kind of traffic on one fleet.

    Attributes:
        saturation_rps: requests a second at which multiplication keeps the engines busy nine
            tenths of the time or more.
        warm_up_s: at saturation; what came in it does not count. Twice as long at half the load.
    """

    name: str
    source: TraceSource
    profile: str
    saturation_rps: float
    warm_up_s: float

    def job(self, load: float, policy: PolicySpec, seed: int = 0, **changes: object) -> Job:
        """Return a replay at a share of the saturating load."""
        source = msgspec.structs.replace(
            self.source,
            seed=seed,
            qps=load * self.saturation_rps,
            duration_s=self.source.duration_s / load,  # as many requests at every load
        )
        settings = {"instances": INSTANCES, "profile": self.profile, "seed": seed, **changes}
        return Job(source, policy, ReplayConfig(**settings))  # type: ignore[arg-type]


SCENARIOS = (
    Scenario("chatbot", TraceSource("chatbot", duration_s=16.0), "h20/qwen3-30b-a3b", 60.0, 4.0),
    Scenario("api", TraceSource("api", duration_s=6.0), "h20/qwen2.5-7b", 120.0, 1.5),
    Scenario("coder", TraceSource("coder", duration_s=50.0), "h20/qwen3-30b-a3b", 9.0, 10.0),
    Scenario("agent", TraceSource("agent", duration_s=45.0), "h20/qwen2.5-7b", 12.0, 9.0),
)

VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("1 router, 5 ms", {}),
    ("4 routers, 5 ms", {"routers": 4}),
    ("1 router, 0.5 s", {"event_lag_s": 0.5}),
    ("4 routers, 0.5 s", {"routers": 4, "event_lag_s": 0.5}),
    ("4 routers, 2 s", {"routers": 4, "event_lag_s": 2.0}),
    ("blocks promised for 5 s", {"promise_s": 5.0}),
    ("batch cap 16", {"batch_cap": 16}),
    ("batch cap 16, queue fcfs", {"batch_cap": 16, "queue": QueueConfig("fcfs")}),
    ("batch cap 16, queue klpm", {"batch_cap": 16, "queue": QueueConfig("klpm")}),
    ("batch cap 16, queue edf+klpm", {"batch_cap": 16, "queue": QueueConfig()}),
)
"""What is varied under multiplication: what routers know, and when."""


class Bench:
    """Replays on some cores behind a progress bar, from the cache where they were made."""

    def __init__(self, processes: int, console: Console) -> None:
        self._processes = processes
        self._console = console
        self._cache = default_cache()
        self.requests = 0

    def rows(self, what: str, jobs: Sequence[Job], warm_up_s: Sequence[float]) -> list[Metrics]:
        """Return the numbers of each replay."""
        with Progress(console=self._console, transient=True) as progress:
            bar = progress.add_task(what, total=None)
            results = run_jobs(
                jobs,
                processes=self._processes,
                cache=self._cache,
                progress=lambda more: progress.update(bar, advance=more),
            )
        rows = [measure(*pair) for pair in zip(results, warm_up_s, strict=True)]
        self.requests += sum(len(each.at_s) for each in results)
        self._console.print(f"{what}: {len(rows)} replays")
        return rows

    def cells(
        self,
        scenario: Scenario,
        load: float,
        policies: Iterable[str],
        seeds: Sequence[int],
        **changes: object,
    ) -> list[Cell]:
        """Return a cell for each policy at a load."""
        names = list(policies)
        jobs = [
            scenario.job(load, parse_policy(name), seed, **changes)
            for name in names
            for seed in seeds
        ]
        warm_up_s = scenario.warm_up_s / load
        rows = self.rows(f"{scenario.name} × {load:g}", jobs, [warm_up_s] * len(jobs))
        count = len(seeds)
        return [
            cell_of(scenario.name, load, name, rows[place * count : (place + 1) * count])
            for place, name in enumerate(names)
        ]


def linear(weight: float) -> str:
    """Return the name of linear scoring with a weight."""
    return PolicySpec("linear", {"weight": weight}).label


def evaluate(bench: Bench, scenario: Scenario) -> Evaluation:
    """Return all cells of one kind of traffic."""
    main: list[Cell] = []
    weights: list[Cell] = []
    best = {}
    for load in (HALF, SATURATION):
        tried = bench.cells(scenario, load, [linear(weight) for weight in WEIGHTS], (0,))
        weights += tried
        best[load] = min(tried, key=lambda cell: cell.ttft_mean_s.mean).policy
        main += bench.cells(scenario, load, [POLICIES[0], best[load], *POLICIES[1:]], SEEDS)
    swept = [
        cell
        for load in SWEPT_LOADS
        for cell in bench.cells(scenario, load, [SWEPT[0], best[SATURATION], *SWEPT[1:]], (0,))
    ]
    return Evaluation(main=main, weights=weights, swept=swept)


def variants(bench: Bench, scenario: Scenario) -> Evaluation:
    """Return what several routers, late events, promises, caps and queues change."""
    found = []
    for name, changes in VARIANTS:
        (cell,) = bench.cells(scenario, 0.75, ["multiplicative"], SEEDS[:1], **changes)
        found.append(msgspec.structs.replace(cell, variant=name))
    return Evaluation(variants=found)


HOTSPOTS = (
    ("a new prefix", 0.5, HotspotShape()),
    ("a known prefix", 0.75, HotspotShape(8192, said_tokens=32, output_tokens=400, early=3)),
)
"""What many requests of the middle third share: one that nobody has, or one that few have."""


def hotspots(bench: Bench, scenario: Scenario) -> Evaluation:
    """Return what the detector changes where many requests share one more prefix."""
    found = []
    for what, share, shape in HOTSPOTS:
        source = msgspec.structs.replace(scenario.source, hotspot_share=share, hotspot_shape=shape)
        planted = msgspec.structs.replace(scenario, source=source)
        for name, detector in (("no detector", False), ("detector", True)):
            names = ["multiplicative", linear(0.95)]
            cells = bench.cells(planted, HALF, names, SEEDS, detector=detector)
            variant = f"{what}, {name}"
            found += [msgspec.structs.replace(cell, variant=variant) for cell in cells]
    return Evaluation(hotspots=found)


def run(bench: Bench, scenarios: Sequence[Scenario]) -> Evaluation:
    """Return everything."""
    parts = [evaluate(bench, scenario) for scenario in scenarios]
    for scenario in scenarios:
        if scenario.name == "agent":
            parts += [variants(bench, scenario), hotspots(bench, scenario)]
    joined = {
        field: [cell for part in parts for cell in getattr(part, field)]
        for field in Evaluation.__struct_fields__
    }
    return Evaluation(**joined)


def main() -> int:
    """Run the evaluation, or write its tables anew; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.evaluation", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="replays at the same time")
    parser.add_argument("--only", choices=[each.name for each in SCENARIOS])
    parser.add_argument("--render", action="store_true", help="from the numbers that are there")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    console = Console(stderr=True)
    if not options.render:
        chosen = [each for each in SCENARIOS if options.only in (None, each.name)]
        bench = Bench(options.jobs, console)
        found = run(bench, chosen)
        render.write(found, options.out)
        console.print(f"{bench.requests:,} requests replayed; wrote {options.out}")
    if options.out == FOLDER and options.only is None:
        DOCUMENT.write_text(render.filled(DOCUMENT.read_text("utf-8"), FOLDER), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
