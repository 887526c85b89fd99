"""`multiplane up`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from controlplane.bus.protocol import BusError
from controlplane.cli.errors import UsageError
from controlplane.cli.files import check_writable
from controlplane.cli.options import PORT_MAX, PolicyName
from controlplane.ports import PortTakenError, free_or_any
from lab.profiles import DEFAULT_PROFILE, PROFILES

if TYPE_CHECKING:
    from lab.load import Planned
    from lab.stack import StackOptions
    from lab.up import UpOptions

    ProfileName = str
else:
    ProfileName = Literal[tuple(PROFILES)]

HOST = "127.0.0.1"
NATS_PORT = 4222
ADMIN_PORT = 8001
DASHBOARD_PORT = 8090

_BLOCK_TOKENS = 16
_PROMPT_TOKENS_MIN = 1024  # a conversation, at least
_PROMPT_TOKENS_MAX = 32_768  # what the demo's model takes
_TRACE_TOKENS_MAX = 131_072
ENGINES = "The emulated engines"
TRACE = "Replaying a trace"


def up(
    engines: Annotated[int, typer.Option(min=1, max=64, help="Emulated engines.")] = 3,
    routers: Annotated[int, typer.Option(min=1, max=16, help="Routers, on one port.")] = 2,
    port: Annotated[
        int, typer.Option(min=0, max=PORT_MAX, help="Port for clients; 0 takes a free one.")
    ] = 8000,
    policy: Annotated[PolicyName, typer.Option(help="Policy of the routers.")] = "multiplicative",
    detector: Annotated[bool, typer.Option(help="Start a hotspot detector.")] = True,
    predictor: Annotated[
        bool, typer.Option(help="Start a latency predictor; needs the extra `predictor`.")
    ] = False,
    dashboard: Annotated[bool, typer.Option(help="Start the dashboard, and say where.")] = True,
    profile: Annotated[
        ProfileName,
        typer.Option(help="GPU/MODEL whose step times they have.", rich_help_panel=ENGINES),
    ] = DEFAULT_PROFILE,
    engine_speed: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1000.0,
            help="How many times as fast as that they run; a replay uses --speed instead.",
            rich_help_panel=ENGINES,
        ),
    ] = 1.0,
    blocks: Annotated[
        int,
        typer.Option(
            min=0,
            max=10_000_000,
            help="KV blocks each, of 16 tokens; 0: the GPU's.",
            rich_help_panel=ENGINES,
        ),
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
            max=1000.0,
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
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write the table to this file: Markdown, or JSON if it ends in .json.",
            rich_help_panel=TRACE,
        ),
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option(
            help="Draw the live view; by default on a terminal. Otherwise a line every 5 s."
        ),
    ] = None,
) -> None:
    """Start a whole plane on this machine: NATS, emulated engines, sidecars and routers.

    Everything is a real process with real sockets; only the GPUs are emulated. Ctrl-C ends all of
    it. With --trace, real HTTP traffic is replayed through it and a table compares the policies.

    Ports, all on 127.0.0.1: 8000 for clients; if they are free 4222 for NATS, 8001 and following
    for the routers' metrics, 8090 for the dashboard; and free ones for the engines. Operators'
    commands in another terminal find the plane by themselves.

    Example: `multiplane up --engines 4 --trace sample --duration 300 --report table.md`
    """
    from lab.up import UpOptions

    clock = speed if trace else engine_speed
    planned: tuple[Planned, ...] = ()
    if trace is not None:
        planned = _planned(trace, speed, duration)
    if report is not None:
        _check_report(report, trace)
    if predictor:
        _check_predictor()
    length = _prompt_tokens(blocks, traced=trace is not None)
    flags = ["--profile", profile, "--speed", str(clock), "--blocks", str(blocks)]
    flags += ["--max-model-len", str(length)]
    options = UpOptions(
        _stack(
            engines,
            routers,
            port,
            tuple(flags),
            detector=detector,
            predictor=predictor,
            dashboard=dashboard,
        ),
        policy,
        planned=planned,
        compare=compare,
        clock=clock,
        live=sys.stdout.isatty() if live is None else live,
        json=json,
        report=report,
    )
    raise typer.Exit(_run(options, port))


def _run(options: UpOptions, port: int) -> int:
    """Run it; returns the exit status, and says in one line why it did not start."""
    from lab.children import ChildStartError
    from lab.up import up as run

    try:
        return asyncio.run(run(options, Console()))
    except PortTakenError as error:
        raise UsageError(
            f"--port {port}: {error} (another `multiplane up`?); stop that, or give another "
            "--port: 0 takes a free one"
        ) from error
    except ChildStartError as error:
        raise BusError(str(error)) from error


def _stack(
    engines: int,
    routers: int,
    port: int,
    engine_flags: tuple[str, ...],
    *,
    detector: bool,
    predictor: bool,
    dashboard: bool,
) -> StackOptions:
    """Return what to start, on the usual ports where they are free."""
    from lab.stack import StackOptions

    admin = range(ADMIN_PORT, ADMIN_PORT + routers)
    return StackOptions(
        engines,
        routers,
        host=HOST,
        port=port,
        engine_flags=engine_flags,
        nats_port=free_or_any(HOST, NATS_PORT),
        admin_port=ADMIN_PORT if all(free_or_any(HOST, each) for each in admin) else 0,
        detector=detector,
        predictor=predictor,
        dashboard_port=free_or_any(HOST, DASHBOARD_PORT) if dashboard else None,
    )


def _prompt_tokens(blocks: int, *, traced: bool) -> int:
    """Return the longest prompt that engines of so many blocks are to take.

    Raises:
        UsageError: they would hold too little.
    """
    needed = _TRACE_TOKENS_MAX if traced else _PROMPT_TOKENS_MIN
    longest = _TRACE_TOKENS_MAX if traced else _PROMPT_TOKENS_MAX
    if not blocks:
        return longest
    held = (blocks - 1) * _BLOCK_TOKENS  # one is vLLM's null block
    if held < needed:
        least = needed // _BLOCK_TOKENS + 1
        what = "a prompt of the trace" if traced else "a conversation"
        raise UsageError(
            f"--blocks {blocks}: {what} of {needed:,} tokens needs {least:,}; 0 takes the GPU's"
        )
    return min(held, longest)


def _check_report(report: Path, trace: str | None) -> None:
    """See that a report can be written before hours of work. Raises UsageError."""
    if trace is None:
        raise UsageError("--report needs --trace: without one there is no table")
    if report.suffix not in (".json", ".md"):
        raise UsageError(f"--report {report}: give a name that ends in .md or .json")
    check_writable("--report", report)


def _check_predictor() -> None:
    """See that a predictor could start, before anything else has. Raises UsageError."""
    from controlplane.predictor.trees import Unavailable, check_installed

    try:
        check_installed()
    except Unavailable as error:
        raise UsageError(f"--predictor: {error}") from error


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
        raise UsageError(f"--trace {error}; give a trace file, or `sample`") from error
    trace = trace.cut(0.0, duration_s).faster(speed)
    if not trace.requests:
        raise UsageError(f"--trace {name}: no request within --duration {duration_s:g} s")
    return plan(trace, "tiny")
