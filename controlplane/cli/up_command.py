"""`multiplane up`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from controlplane.cli.errors import UsageError
from controlplane.core.policies import POLICIES

if TYPE_CHECKING:
    from lab.load import Planned

ENGINES = "The emulated engines"
TRACE = "Replaying a trace"


def up(
    engines: Annotated[int, typer.Option(min=1, max=64, help="Emulated engines.")] = 3,
    routers: Annotated[int, typer.Option(min=1, max=16, help="Routers, on one port.")] = 2,
    port: Annotated[int, typer.Option(help="Port for clients; 0 takes a free one.")] = 8000,
    policy: Annotated[str, typer.Option(help="Policy of the routers.")] = "multiplicative",
    profile: Annotated[
        str,
        typer.Option(help="GPU/MODEL whose step times they have.", rich_help_panel=ENGINES),
    ] = "",
    engine_speed: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="How many times as fast as that they run; a replay uses --speed instead.",
            rich_help_panel=ENGINES,
        ),
    ] = 1.0,
    blocks: Annotated[
        int, typer.Option(min=0, help="KV blocks each; 0: the GPU's.", rich_help_panel=ENGINES)
    ] = 0,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Trace file in Mooncake's format, or `sample` for the one that is included.",
            rich_help_panel=TRACE,
        ),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Compress time: the trace and the engines run this much faster, and times are "
            "reported as if they had not.",
            rich_help_panel=TRACE,
        ),
    ] = 4.0,
    duration: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds of the trace to replay.", rich_help_panel=TRACE),
    ] = 600.0,
    compare: Annotated[
        bool,
        typer.Option(help="Replay it under round robin as well.", rich_help_panel=TRACE),
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON too.", rich_help_panel=TRACE)
    ] = False,
    live: Annotated[
        bool | None, typer.Option(help="Draw the live view; by default on a terminal.")
    ] = None,
) -> None:
    """Start a whole plane on this machine: NATS, emulated engines, sidecars and routers.

    Everything is a real process with real sockets; only the GPUs are emulated. Ctrl-C ends all of
    it. With --trace, real HTTP traffic is replayed through it and a table compares the policies.
    """
    from lab.profiles import DEFAULT_PROFILE, PROFILES
    from lab.stack import StackOptions
    from lab.up import UpOptions
    from lab.up import up as run

    if policy not in POLICIES:
        raise UsageError(f"--policy {policy}: choose one of {', '.join(sorted(POLICIES))}")
    profile = profile or DEFAULT_PROFILE
    if profile not in PROFILES:
        raise UsageError(f"--profile {profile}: choose one of {', '.join(PROFILES)}")
    console = Console()
    clock = speed if trace else engine_speed
    flags = ["--profile", profile, "--speed", str(clock), "--blocks", str(blocks)]
    planned: tuple[Planned, ...] = ()
    if trace:
        planned = _planned(trace, speed, duration)
        flags += ["--max-model-len", "131072"]
    options = UpOptions(
        StackOptions(engines, routers, port=port, engine_flags=tuple(flags)),
        policy,
        planned=planned,
        compare=compare,
        clock=clock,
        live=sys.stdout.isatty() if live is None else live,
        json=json,
    )
    raise typer.Exit(asyncio.run(run(options, console)))


def _planned(name: str, speed: float, duration_s: float) -> tuple[Planned, ...]:
    """Return the requests of a trace, at their times in a faster world.

    Raises:
        UsageError: the trace cannot be used, or nothing of it is left.
    """
    from lab.load import plan
    from lab.traces import TraceError, read_trace, sample_trace

    try:
        trace = sample_trace() if name == "sample" else read_trace(Path(name))
    except (TraceError, OSError) as error:
        raise UsageError(f"--trace {name}: {error}") from error
    trace = trace.cut(0.0, duration_s).faster(speed)
    if not trace.requests:
        raise UsageError(f"--trace {name}: no request within --duration {duration_s:g} s")
    return plan(trace, "tiny")
