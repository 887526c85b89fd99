"""Options of `multiplane lab`, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from controlplane.cli.errors import UsageError
from controlplane.core.policies import POLICIES
from controlplane.core.queue_lines import Order
from lab.profiles import DEFAULT_PROFILE, PROFILES

if TYPE_CHECKING:
    from lab.replay_config import ReplayConfig
    from lab.replay_plan import Load
    from lab.replay_source import TraceSource

FLEET = "The fleet"
TRAFFIC = "The traffic"
RUNNING = "Running it"

Traces = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE…",
        help="Trace files (Mooncake, Qwen-Bailian, Azure), recordings of `multiplane audit "
        "record`, `sample` for the trace included, or kinds of made-up traffic: chatbot, api, "
        "coder, agent.",
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        metavar="NAME[,NAME…]",
        help=f"Policies to compare: {', '.join(POLICIES)}. Parameters after colons, as "
        "`linear:weight=0.5`. `linear:best` tries ten weights and keeps the best; `all` takes "
        "every policy there is.",
    ),
]
Instances = Annotated[
    int, typer.Option(min=1, max=1024, help="Emulated instances.", rich_help_panel=FLEET)
]
Profile = Annotated[
    str,
    typer.Option(
        metavar="GPU/MODEL|FILE",
        help=f"What they are: {', '.join(PROFILES)}; or a file of `lab calibrate`. "
        f"[default: {DEFAULT_PROFILE}]",
        show_default=False,
        rich_help_panel=FLEET,
    ),
]
KvTokens = Annotated[
    int, typer.Option(min=0, help="KV capacity of each; 0: the GPU's.", rich_help_panel=FLEET)
]
BlockSize = Annotated[
    int,
    typer.Option(
        min=0, help="Tokens a block; 0: the trace's own, 512 at most.", rich_help_panel=FLEET
    ),
]
Routers = Annotated[
    int, typer.Option(min=1, max=64, help="Routers, each with its own view.", rich_help_panel=FLEET)
]
EventLag = Annotated[
    float,
    typer.Option(
        min=0.0, help="Seconds until a router hears of an engine's step.", rich_help_panel=FLEET
    ),
]
BatchCap = Annotated[
    int,
    typer.Option(min=0, help="Largest batch that routers accept; 0: none.", rich_help_panel=FLEET),
]
Queue = Annotated[
    Order | None,
    typer.Option(
        help="Let requests wait in this order while every instance is at its cap; needs "
        "--batch-cap.",
        rich_help_panel=FLEET,
    ),
]
QueueK = Annotated[
    int,
    typer.Option(
        min=1,
        help="Of klpm: every k-th dispatch is the oldest's or most urgent's.",
        rich_help_panel=FLEET,
    ),
]
QueueHold = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Of klpm and edf+klpm: how long a request may be passed over for a full instance that "
        "has its prefix; 0: never.",
        rich_help_panel=FLEET,
    ),
]
Predictor = Annotated[
    bool,
    typer.Option(
        "--predictor/--no-predictor",
        help="Learn how long requests take, for the queue; needs xgboost.",
        rich_help_panel=FLEET,
    ),
]
Coalesce = Annotated[
    int,
    typer.Option(
        min=0,
        help="Let requests wait for a new prefix of at least so many tokens that another one is "
        "computing; 0: never. Routers take 1024 with --coalesce.",
        rich_help_panel=FLEET,
    ),
]
Tenants = Annotated[
    str,
    typer.Option(
        metavar="NAME:share=X:weight=X:budget=X[,…]",
        help="Whose the requests are, by shares; weights are of the queue, budgets are seconds to "
        "the first token.",
        rich_help_panel=TRAFFIC,
    ),
]
Detector = Annotated[bool, typer.Option(help="Run the hotspot detector.", rich_help_panel=FLEET)]
Promise = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Seconds that blocks count as cached before they are there, as of a router; 0: not.",
        rich_help_panel=FLEET,
    ),
]
Speed = Annotated[
    str,
    typer.Option(
        metavar="X[,X…]",
        help="How many times as fast as recorded; several make a sweep.",
        rich_help_panel=TRAFFIC,
    ),
]
Qps = Annotated[
    str,
    typer.Option(
        metavar="X[,X…]",
        help="Requests a second instead; several make a sweep.",
        rich_help_panel=TRAFFIC,
    ),
]
Start = Annotated[
    float, typer.Option(min=0.0, help="Seconds of a file to leave out.", rich_help_panel=TRAFFIC)
]
Duration = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Seconds of it to take; 0: all, or 600 of a kind.",
        rich_help_panel=TRAFFIC,
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Delay each request by up to this many seconds, by the seed. Mooncake's times are "
        "rounded to 3 s: without jitter they are bursts.",
        rich_help_panel=TRAFFIC,
    ),
]
HotspotShare = Annotated[
    float,
    typer.Option(
        "--hotspot",
        min=0.0,
        max=0.99,
        help="Share of the middle third's requests that share one more prefix.",
        rich_help_panel=TRAFFIC,
    ),
]
BudgetTtft = Annotated[
    str,
    typer.Option(
        "--budget-ttft-s",
        metavar="X[,X…]",
        help="Seconds within which answers are to begin, each request's one of these by the seed; "
        "0: whenever. What would be late is shed if there is a queue.",
        rich_help_panel=TRAFFIC,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Of all that is random: the same seed, the same traffic.", rich_help_panel=TRAFFIC
    ),
]
Seeds = Annotated[
    str, typer.Option(metavar="N[,N…]", help="Repeat with each seed.", rich_help_panel=TRAFFIC)
]
WarmUp = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Leave the requests of the first seconds out of latencies and hits.",
        rich_help_panel=TRAFFIC,
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--jobs", min=0, help="Replays at the same time; 0: one a core.", rich_help_panel=RUNNING
    ),
]
UseCache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Keep results, and take those that were made before.",
        rich_help_panel=RUNNING,
    ),
]


def sources(
    traces: Sequence[str], start_s: float, duration_s: float, jitter_s: float, hotspot: float
) -> tuple[TraceSource, ...]:
    """Return where requests come from.

    Raises:
        UsageError: there is no such file or kind.
    """
    from lab.generators import KINDS
    from lab.replay_plan import known_source
    from lab.replay_source import TraceSource

    for name in traces:
        if not known_source(name):
            kinds = ", ".join(KINDS)
            raise UsageError(f"{name} is no file, nor `sample`, nor one of the kinds {kinds}")
    return tuple(
        TraceSource(
            name,
            start_s=start_s,
            duration_s=duration_s or float("inf"),
            jitter_s=jitter_s,
            hotspot_share=hotspot,
        )
        for name in traces
    )


def numbers(flag: str, text: str) -> list[float]:
    """Return a comma-separated list of positive numbers.

    Raises:
        UsageError: it is none.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UsageError(f"{flag} {text}: positive numbers, separated by commas")
    return found


def budgets(text: str) -> tuple[float, ...]:
    """Return the budgets that requests have.

    Raises:
        UsageError: they are no numbers, or negative.
    """
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1.0,)
    if not all(0 <= each < float("inf") for each in found):
        raise UsageError(f"--budget-ttft-s {text}: numbers from 0 on, separated by commas")
    return found


def loads(speed: str, qps: str) -> tuple[Load, ...]:
    """Return the loads of a sweep.

    Raises:
        UsageError: both are given, or one is no list of positive numbers.
    """
    from lab.replay_plan import Load

    if speed and qps:
        raise UsageError("give --speed or --qps, not both")
    if qps:
        return tuple(Load(qps=each) for each in numbers("--qps", qps))
    return tuple(Load(speed=each) for each in numbers("--speed", speed or "1"))


def seeds(text: str) -> tuple[int, ...]:
    """Return the seeds.

    Raises:
        UsageError: they are no whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--seeds {text}: whole numbers, separated by commas") from None


def with_profile(config: ReplayConfig, text: str) -> ReplayConfig:
    """Return settings with the profile that was asked for.

    Raises:
        UsageError: there is none of that name, or the file cannot be used.
    """
    from lab.calibrate import Calibration
    from lab.profiles import PROFILES

    if not text or text in PROFILES:
        return msgspec.structs.replace(config, profile=text or config.profile)
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--profile {text}: no file, nor one of {', '.join(PROFILES)}")
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"--profile {text}: not written by `lab calibrate`: {error}") from error
    kv_tokens = config.kv_tokens or measured.kv_tokens
    if not kv_tokens:
        raise UsageError(f"--profile {text} does not say the KV capacity: give --kv-tokens")
    return msgspec.structs.replace(
        config, profile=measured.name, step_times=measured.step_times, kv_tokens=kv_tokens
    )
