"""`multiplane lab`: replay traces in simulated time, and see."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from lab.replay_metrics import Metrics

app = typer.Typer(
    help="Replay traffic in simulated time: which policy, how many instances, what if.",
    no_args_is_help=True,
)

FLEET = "The fleet"
DEFAULT_POLICIES = "multiplicative,round_robin,least_requests,linear"


@app.command()
def replay(
    traces: Annotated[
        list[str],
        typer.Argument(help="Trace files, kinds of traffic (see `lab generate`), or `sample`."),
    ],
    policies: Annotated[
        str, typer.Option(help="Comma-separated; parameters as `linear:weight=0.5`; `all`.")
    ] = DEFAULT_POLICIES,
    instances: Annotated[int, typer.Option(min=1, max=1024, rich_help_panel=FLEET)] = 8,
    profile: Annotated[
        str, typer.Option(help="GPU/MODEL of the instances.", rich_help_panel=FLEET)
    ] = "",
    routers: Annotated[int, typer.Option(min=1, max=64, rich_help_panel=FLEET)] = 1,
    speed: Annotated[
        str, typer.Option(help="How many times as fast as recorded; several: a sweep.")
    ] = "1",
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0",
) -> None:
    """Replay traces under policies, through the code that routes in production."""
    from lab.cache import default_cache
    from lab.profiles import DEFAULT_PROFILE
    from lab.replay_config import ReplayConfig, parse_policy
    from lab.replay_metrics import measure
    from lab.replay_runs import Job, run_jobs
    from lab.replay_source import TraceSource

    specs = [parse_policy(name) for name in policies.split(",")]
    jobs = [
        Job(
            TraceSource(name, speed=float(pace), seed=int(seed)),
            spec,
            ReplayConfig(
                instances=instances,
                profile=profile or DEFAULT_PROFILE,
                routers=routers,
                seed=int(seed),
            ),
        )
        for name in traces
        for pace in speed.split(",")
        for seed in seeds.split(",")
        for spec in specs
    ]
    console = Console()
    total = sum(len(job.source.load().requests) for job in jobs)
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        results = run_jobs(
            jobs,
            processes=os.cpu_count() or 1,
            cache=default_cache(),
            progress=lambda more: progress.update(bar, advance=more),
        )
    console.print(_table([measure(result) for result in results]))


def _table(rows: list[Metrics]) -> Table:
    """Return runs as a table, a row each."""
    shown = Table(box=SIMPLE_HEAD)
    shown.add_column("policy")
    for name in ("TTFT mean", "p50", "p99", "TPOT p99", "hits", "balance", "req/s", "CPU s"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.policy,
            f"{row.ttft_s[0]:.3f} s",
            f"{row.ttft_s[1]:.3f} s",
            f"{row.ttft_s[3]:.3f} s",
            f"{row.tpot_s[3] * 1e3:.1f} ms",
            f"{row.hit_rate:.1%}",
            f"{row.balance:.2f}",
            f"{row.served_rps:.2f}",
            f"{row.cpu_s:.1f}",
        )
    return shown
