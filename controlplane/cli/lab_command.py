"""`multiplane lab`: replay traffic in simulated time, and see."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from controlplane.cli import lab_options as options
from controlplane.cli.errors import UsageError
from controlplane.cli.files import check_writable, check_writable_folder, read_key
from controlplane.cli.options import queue_config

if TYPE_CHECKING:
    from lab.cache import Cache
    from lab.capacity import Slo
    from lab.replay_plan import Plan
    from lab.replay_result import Result
    from lab.replay_runs import Job
    from lab.report import Case

app = typer.Typer(
    help="Replay traffic in simulated time: which policy, how many instances, what if.",
    no_args_is_help=True,
)

DEFAULT_POLICIES = "multiplicative,linear,dynamo_cost,least_requests,round_robin"
SLO = "The service level"
_GAP: Final = 2  # beside each column of a table
_EDGES: Final = 4  # of a table, and beside the policies' names


@app.command()
def replay(
    traces: options.Traces,
    policies: options.Policies = DEFAULT_POLICIES,
    instances: options.Instances = 8,
    profile: options.Profile = "",
    kv_tokens: options.KvTokens = 0,
    block_size: options.BlockSize = 0,
    routers: options.Routers = 1,
    event_lag: options.EventLag = 0.005,
    batch_cap: options.BatchCap = 0,
    queue: options.Queue = None,
    queue_k: options.QueueK = 2,
    queue_hold_s: options.QueueHold = 5.0,
    predictor: options.Predictor = False,
    coalesce: options.Coalesce = 0,
    tenants: options.Tenants = "",
    budget_ttft_s: options.BudgetTtft = "",
    detector: options.Detector = False,
    promise: options.Promise = 5.0,
    speed: options.Speed = "",
    qps: options.Qps = "",
    start: options.Start = 0.0,
    duration: options.Duration = 0.0,
    jitter: options.Jitter = 0.0,
    hotspot: options.HotspotShare = 0.0,
    seeds: options.Seeds = "0",
    warm_up: options.WarmUp = 0.0,
    processes: options.Processes = 0,
    use_cache: options.UseCache = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html, pictures and metrics.json."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Replay traffic under several policies, through the code that decides in production.

    Engines are emulated by the step: the same batches, blocks and evictions as vLLM's scheduler
    makes, with the step times of a stated GPU and model. An hour of traffic takes seconds.

    Example: `multiplane lab replay sample --policies multiplicative,round_robin --instances 8`
    """
    from controlplane.core.coalesce import CoalesceConfig
    from controlplane.predictor import trees
    from lab import report
    from lab.replay_config import ReplayConfig
    from lab.replay_plan import Plan, parse_policies
    from lab.replay_tenants import parse_tenants

    console = Console(stderr=json)
    with _explained():
        if out is not None:
            check_writable_folder("--out", out)
            report.check_installed()
        if predictor:
            trees.library()
        specs, best_linear = parse_policies(policies)
        config = ReplayConfig(
            instances=instances,
            kv_tokens=kv_tokens,
            block_size=block_size,
            routers=routers,
            event_lag_s=event_lag,
            batch_cap=batch_cap,
            queue=queue_config(queue, batch_cap, k=queue_k, hold_s_max=queue_hold_s),
            coalesce=CoalesceConfig(coalesce) if coalesce else None,
            tenants=parse_tenants(tenants),
            budgets_ttft_s=options.budgets(budget_ttft_s),
            detector=detector,
            predictor=predictor,
            promise_s=promise,
        )
        plan = Plan(
            options.sources(traces, start, duration, jitter, hotspot),
            specs,
            options.loads(speed, qps),
            options.seeds(seeds),
            options.with_profile(config, profile),
            best_linear,
        )
        results = _run(plan.jobs(), processes, _cache(use_cache), console)
        cases = plan.cases(results, warm_up)
        for case in cases:
            console.print(*_tables(case, console.width), sep="\n")
        if json:
            rows = [row for case in cases for row in case.rows]
            sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        if out is not None:
            command = shlex.join(["multiplane", *sys.argv[1:]])
            console.print(f"wrote {report.write(cases, out, command)}")


@app.command()
def capacity(
    traces: options.Traces,
    policies: options.Policies = "multiplicative,round_robin",
    ttft_p99: Annotated[
        float, typer.Option(min=0.0, help="Seconds; 0: not asked for.", rich_help_panel=SLO)
    ] = 0.0,
    tpot_p99: Annotated[
        float, typer.Option(min=0.0, help="Seconds; 0: not asked for.", rich_help_panel=SLO)
    ] = 0.0,
    instances_max: Annotated[
        int, typer.Option("--max", min=1, max=1024, help="Largest fleet to try.")
    ] = 64,
    profile: options.Profile = "",
    kv_tokens: options.KvTokens = 0,
    routers: options.Routers = 1,
    promise: options.Promise = 5.0,
    speed: options.Speed = "",
    qps: options.Qps = "",
    start: options.Start = 0.0,
    duration: options.Duration = 0.0,
    jitter: options.Jitter = 0.0,
    seed: options.Seed = 0,
    warm_up: options.WarmUp = 0.0,
    use_cache: options.UseCache = True,
) -> None:
    """Find how many instances a service level needs, under each policy.

    Example: `multiplane lab capacity sample --ttft-p99 6 --policies multiplicative,round_robin`
    """
    from lab.replay_config import ReplayConfig
    from lab.replay_plan import Plan, parse_policies

    console = Console()
    with _explained():
        slo = _slo(ttft_p99, tpot_p99)
        config = ReplayConfig(kv_tokens=kv_tokens, routers=routers, promise_s=promise)
        specs, _ = parse_policies(policies)
        plan = Plan(
            options.sources(traces, start, duration, jitter, 0.0),
            specs,
            options.loads(speed, qps),
            (seed,),
            options.with_profile(config, profile),
        )
        shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("traffic", "policy", "instances", "TTFT p99", "TPOT p99", "hit rate", "tried"):
            names = name in ("traffic", "policy")
            shown.add_column(name, justify="left" if names else "right", no_wrap=names)
        _fill_capacity(shown, plan, slo, instances_max, warm_up, _cache(use_cache), console)
        console.print(shown)


def _slo(ttft_s: float, tpot_s: float) -> Slo:
    from lab.capacity import Slo

    try:
        return Slo(ttft_s or float("inf"), tpot_s or float("inf"))
    except ValueError as error:
        raise UsageError(f"--ttft-p99, --tpot-p99: {error}") from error


def _fill_capacity(
    shown: Table,
    plan: Plan,
    slo: Slo,
    instances_max: int,
    warm_up_s: float,
    cache: Cache | None,
    console: Console,
) -> None:
    """Add a row for each trace, load and policy."""
    from lab.capacity import instances_needed
    from lab.replay_metrics import Metrics, measure
    from lab.replay_runs import run_jobs

    for job in plan.jobs():

        def run(size: int, job: Job = job) -> Metrics:
            config = msgspec.structs.replace(job.config, instances=size)
            sized = msgspec.structs.replace(job, config=config)
            with console.status(f"{job.source.name}, {job.policy.label}: {size} instances"):
                return measure(run_jobs([sized], cache=cache)[0], warm_up_s)

        source = job.source
        answer = instances_needed(run, slo, instances_max)
        load = f"{source.qps:g}/s" if source.qps else f"× {source.speed:g}"
        shown.add_row(
            f"{Path(source.name).stem} {load}",
            job.policy.label,
            f"> {instances_max}" if answer.instances is None else str(answer.instances),
            f"{answer.at.ttft_s[3]:.2f} s",
            f"{answer.at.tpot_s[3] * 1e3:.1f} ms",
            f"{answer.at.hit_rate:.1%}",
            " ".join(f"{size}{'✓' if good else '✗'}" for size, good in answer.tried.items()),
        )


@app.command()
def calibrate(
    url: Annotated[str, typer.Argument(help="Base URL of a running engine that nobody uses.")],
    out: Annotated[Path, typer.Option(help="File for `--profile`.")] = Path("profile.json"),
    model: Annotated[str, typer.Option(help="Model id; the first served one if empty.")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File that holds the engine's API key.")
    ] = None,
    budget: Annotated[
        int, typer.Option(min=2048, help="The engine's --max-num-batched-tokens.")
    ] = 8192,
) -> None:
    """Fit a step-time profile to a running engine, for `lab replay --profile FILE`.

    Example: `multiplane lab calibrate http://127.0.0.1:8100 --out mine.json`
    """
    import asyncio

    from lab.calibrate import CalibrationError, Experiment, calibrate

    key = read_key("--api-key-file", api_key_file)
    check_writable("--out", out)
    lengths = tuple(n for n in Experiment().prompt_tokens if n <= budget)
    console = Console()
    try:
        with console.status(f"measuring {url}"):
            made = asyncio.run(
                calibrate(url, model=model, api_key=key, experiment=Experiment(lengths))
            )
    except CalibrationError as error:
        raise UsageError(str(error)) from error
    out.write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
    console.print(
        f"{made.name}: predictions are {made.error:.1%} off what was measured, on average; "
        f"wrote {out}"
    )


@app.command()
def generate(
    kind: Annotated[
        Literal["chatbot", "api", "coder", "agent"], typer.Argument(help="Whose traffic.")
    ],
    out: Annotated[Path, typer.Option(help="File to write, in the Qwen-Bailian format.")],
    qps: Annotated[float, typer.Option(min=0.001, help="Mean requests a second.")] = 1.0,
    duration: Annotated[float, typer.Option(min=1.0, help="Seconds.")] = 600.0,
    seed: options.Seed = 0,
    hotspot: options.HotspotShare = 0.0,
) -> None:
    """Make up traffic and write it as a trace file; the same seed gives the same file.

    Example: `multiplane lab generate chatbot --out trace.jsonl --qps 4`
    """
    from lab.replay_source import TraceSource
    from lab.trace_files import write_bailian

    check_writable("--out", out)
    with _explained():
        source = TraceSource(kind, duration_s=duration, qps=qps, hotspot_share=hotspot, seed=seed)
        trace = source.load()
        write_bailian(trace, out, kind)
    Console().print(
        f"wrote {out}: {len(trace.requests):,} requests, {trace.input_tokens:,} prompt tokens"
    )


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what a trace or a setting got wrong into one line."""
    from controlplane.predictor.trees import Unavailable
    from lab.report import Missing

    try:
        yield
    except (ValueError, Missing, Unavailable) as error:
        raise UsageError(str(error)) from error


def _cache(wanted: bool) -> Cache | None:
    from lab.cache import default_cache

    return default_cache() if wanted else None


def _run(
    jobs: Sequence[Job], processes: int, cache: Cache | None, console: Console
) -> list[Result]:
    """Run jobs behind a progress bar."""
    from lab.replay_runs import run_jobs

    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    counts = {source: len(source.load().requests) for source in {job.source for job in jobs}}
    total = sum(counts[job.source] for job in jobs)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        return run_jobs(
            jobs,
            processes=processes or os.cpu_count() or 1,
            cache=cache,
            progress=lambda more: progress.update(bar, advance=more),
        )


def _tables(case: Case, width: int) -> list[Table]:
    """Return a case as tables, a row a policy; of several each has columns that fit the width."""
    from lab.report import by_policy, cell, columns_of

    policies = by_policy(case.rows)
    columns = [
        (each.name, ["\n".join(filter(None, cell(each, rows))) for rows in policies.values()])
        for each in columns_of(case)
    ]
    room = width - max(map(len, policies), default=0) - _EDGES
    parts: list[list[tuple[str, list[str], int]]] = []
    left = 0
    for name, cells in columns:
        wide = max(map(len, (*name.split(), *"\n".join(cells).split("\n"))))
        if not parts or wide + _GAP > left:
            left = room
            parts.append([])
        left -= wide + _GAP
        parts[-1].append((name, cells, wide))
    tables = [_part(list(policies), part) for part in parts]
    tables[0].title, tables[0].title_justify = case.title, "left"
    tables[-1].caption, tables[-1].caption_justify = case.note or None, "left"
    return tables


def _part(policies: list[str], columns: Sequence[tuple[str, list[str], int]]) -> Table:
    """Return a table of some columns: each a name, a cell for each policy, and a least width."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("policy", no_wrap=True)
    for name, _, wide in columns:
        shown.add_column(name, justify="right", min_width=wide)
    for number, policy in enumerate(policies):
        shown.add_row(policy, *(cells[number] for _, cells, _ in columns))
    return shown
