"""`multiplane up`: a whole plane on this machine, shown live, and under a trace if one is given."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from controlplane.bus import NatsBus
from lab.load import Answered, Planned, run_load
from lab.stack import LocalStack, StackOptions
from lab.summary import Summary, summarize, table
from lab.view import BusView

_FRAME_S = 0.25
_QUIET_S = 0.5


class UpOptions(msgspec.Struct, frozen=True):
    """What to run.

    Attributes:
        stack: the processes.
        policy: of the routers.
        planned: requests of a trace; empty to serve until stopped.
        compare: run the same requests under round robin too.
        clock: how many seconds of the engines a second here stands for.
        live: draw the live view; a plain log otherwise.
        json: print the summaries as JSON too.
    """

    stack: StackOptions
    policy: str
    planned: tuple[Planned, ...] = ()
    compare: bool = True
    clock: float = 1.0
    live: bool = True
    json: bool = False


async def up(options: UpOptions, console: Console) -> int:
    """Run until stopped, or until the trace has been replayed; returns the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    policies = [options.policy]
    if options.planned and options.compare and options.policy != "round_robin":
        policies.append("round_robin")
    summaries: list[Summary] = []
    began_s = time.monotonic()
    console.print(
        f"starting NATS, {options.stack.engines} emulated engines with sidecars and "
        f"{options.stack.routers} routers …"
    )
    for policy in policies:
        if stop.is_set():
            break
        flags = (*options.stack.router_flags, "--policy", policy)
        stack_options = msgspec.structs.replace(options.stack, router_flags=flags)
        async with LocalStack(stack_options) as stack:
            view = BusView()
            bus = await NatsBus.connect(stack.nats_url, name="view")
            await view.follow(bus)
            if not summaries:
                _greet(console, stack, time.monotonic() - began_s)
            if options.planned:
                summaries.append(await _replay(options, policy, stack, view, console, stop))
            else:
                await _watch(options, stack, view, console, stop)
            await bus.close()
    if summaries:
        console.print(table(summaries))
        if options.json:
            console.print_json(msgspec.json.encode(summaries).decode())
    failed = sum(summary.failed for summary in summaries)
    return 1 if failed else 0


def _greet(console: Console, stack: LocalStack, took_s: float) -> None:
    console.print(f"[green]ready[/] after {took_s:.1f} s: {stack.url}")
    console.print(f"metrics and /debug/explain: {', '.join(stack.admin_urls)}")
    console.print(f"NATS: {stack.nats_url}\n\nTry:\n")
    body = '{"model":"tiny","stream":true,"messages":[{"role":"user","content":"Hello"}]}'
    console.print(
        f"  curl -N {stack.url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{body}'\n",
        highlight=False,
        soft_wrap=True,
    )


async def _watch(
    options: UpOptions, stack: LocalStack, view: BusView, console: Console, stop: asyncio.Event
) -> None:
    """Show the plane until stopped; a router or engine that dies is said, not hidden."""
    title = f"multiplane · {stack.url} · Ctrl-C stops everything"
    if not options.live:
        await stop.wait()
        return
    with Live(view.render(title), console=console, auto_refresh=False) as live:
        while not stop.is_set():
            dead = [child.name for child in (*stack.routers, *stack.sidecars) if not child.running]
            shown = title if not dead else f"{title} · DEAD: {', '.join(dead)}"
            live.update(view.render(shown), refresh=True)
            await _pause(stop, _FRAME_S)


async def _replay(
    options: UpOptions,
    policy: str,
    stack: LocalStack,
    view: BusView,
    console: Console,
    stop: asyncio.Event,
) -> Summary:
    """Send a trace through the plane, with a progress bar; returns what it came to."""
    planned = options.planned
    progress = Progress(
        TextColumn(f"{policy:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("failed {task.fields[failed]}"),
        console=console,
        auto_refresh=False,
    )
    task = progress.add_task("replay", total=len(planned), failed=0)
    failed = 0

    def answered(result: Answered) -> None:
        nonlocal failed
        failed += not result.ok
        progress.update(task, advance=1, failed=failed)

    began_s = time.monotonic()
    running = asyncio.create_task(run_load(stack.url, planned, answered=answered, stop=stop))
    shown: Group | Progress = progress
    with Live(shown, console=console, auto_refresh=False, transient=options.live) as live:
        while not running.done():
            if options.live:
                picture: Panel = view.render(f"replaying under {policy}")
                shown = Group(picture, progress)
            live.update(shown, refresh=True)
            await asyncio.wait([running], timeout=_FRAME_S)
    console.print()
    results = await running
    took_s = time.monotonic() - began_s
    await asyncio.sleep(_QUIET_S)
    _say_lag(console, results)
    by_instance = view.routed_by_instance()
    return summarize(policy, results, by_instance, seconds=took_s, clock=options.clock)


def _say_lag(console: Console, results: Sequence[Answered]) -> None:
    """Warn when this machine could not send the requests at their times."""
    late = sorted(result.late_s for result in results)
    if late and late[int(0.95 * (len(late) - 1))] > 0.1:
        worst_s = late[-1]
        console.print(
            f"[yellow]this machine sent requests up to {worst_s:.1f} s late: "
            "lower --speed for honest latencies[/]"
        )


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
