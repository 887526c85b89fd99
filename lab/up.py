"""`multiplane up`: a whole plane on this machine, shown live, and under a trace if one is given."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.live import Live

from controlplane.bus import NatsBus
from controlplane.running import RunningPlane, announced
from lab.load import Planned
from lab.screen import draw, plain
from lab.stack import LocalStack, StackOptions
from lab.summary import Summary, markdown, table
from lab.up_replay import Replay, replay
from lab.view import BusView

T = TypeVar("T")

FRAME_S = 0.25
LINE_EVERY_S = 5.0
_FIRST_LINE_S = 1.0  # by then the bus has told what there is


class UpOptions(msgspec.Struct, frozen=True):
    """What to run.

    Attributes:
        stack: the processes.
        policy: of the routers.
        planned: requests of a trace; empty to serve until stopped.
        compare: run the same requests under round robin too.
        clock: how many seconds of the engines a second here stands for.
        live: draw the live view; a line every few seconds otherwise.
        json: print the summaries as JSON too.
        report: file to write the table to, as Markdown or, if its name says so, JSON.
    """

    stack: StackOptions
    policy: str
    planned: tuple[Planned, ...] = ()
    compare: bool = True
    clock: float = 1.0
    live: bool = True
    json: bool = False
    report: Path | None = None


async def up(options: UpOptions, console: Console) -> int:
    """Run until stopped, or until the trace has been replayed; returns the exit status.

    Raises:
        ChildStartError: a process did not start; nothing is left running.
        PortTakenError: likewise, because somebody else serves clients' port.
        BusError: likewise, NATS.
    """
    stop = _stop_on_signals()
    policies = [options.policy]
    if options.planned and options.compare and options.policy != "round_robin":
        policies.append("round_robin")
    summaries: list[Summary] = []
    _announce(options, len(policies), console)
    for number, policy in enumerate(policies, 1):
        async with _plane(options, policy, stop) as stack:
            if stack is None:
                break
            if number == 1:
                greet(console, stack)
            else:
                console.print(f"started anew, with empty caches, under {policy}")
            async with _seen(stack) as view:
                if not options.planned:
                    await _watch(options, stack, view, console, stop)
                    break
                run = Replay(policy, f"{number}/{len(policies)}", options.planned, options.clock)
                summaries.append(await replay(run, stack, view, console, stop, live=options.live))
        if stop.is_set():
            break
    _report(options, summaries, console)
    return 1 if any(summary.failed for summary in summaries) else 0


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first signal sets; the second one ends everything at once."""
    stop = asyncio.Event()

    def asked() -> None:
        if stop.is_set():
            os._exit(130)  # the kernel ends the children
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    return stop


def _announce(options: UpOptions, runs: int, console: Console) -> None:
    stack = options.stack
    console.print(
        f"starting NATS, {_counted(stack.engines, 'emulated engine')}, a sidecar each, "
        f"{_counted(stack.routers, 'router')}"
        f"{', a detector' if stack.detector else ''} …"
    )
    if options.planned:
        took_s = options.planned[-1].at_s
        console.print(
            f"{len(options.planned):,} requests over {took_s:.0f} s"
            f"{', under each of 2 policies' if runs == 2 else ''}: "
            f"about {runs * (took_s + 10.0) / 60.0:.1f} minutes in all"
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


@asynccontextmanager
async def _plane(
    options: UpOptions, policy: str, stop: asyncio.Event
) -> AsyncIterator[LocalStack | None]:
    """Give a started plane; None if it is stopped before it has started."""
    flags = (*options.stack.router_flags, "--policy", policy)
    stack = LocalStack(msgspec.structs.replace(options.stack, router_flags=flags))
    started = await _unless(stop, stack.__aenter__())
    try:
        if started is None:
            yield None
            return
        plane = RunningPlane(os.getpid(), stack.nats_url, stack.url, time.time())
        with announced(plane):
            yield started
    finally:
        await stack.close()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` does; None if `stop` is set first, once it has been cancelled."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return None
    finally:
        stopping.cancel()


@asynccontextmanager
async def _seen(stack: LocalStack) -> AsyncIterator[BusView]:
    """Give a picture of the plane that follows the bus."""
    view = BusView()
    bus = await NatsBus.connect(stack.nats_url, name="view")
    try:
        await view.follow(bus)
        yield view
    finally:
        await bus.close()


def greet(console: Console, stack: LocalStack) -> None:
    """Say where everything is, and what to try."""
    lines = [
        ("clients", stack.url),
        ("dashboard", stack.dashboard_url),
        ("routers' /metrics, /debug", " ".join(stack.admin_urls)),
        ("NATS", stack.nats_url),
    ]
    console.print("[green]ready[/]")
    for name, place in lines:
        if place:
            console.print(f"  {name:<26} {place}", highlight=False, soft_wrap=True)
    if stack.nats_url != "nats://127.0.0.1:4222":
        said = f"  other commands find it; services that you add want --nats {stack.nats_url}"
        console.print(said, highlight=False, soft_wrap=True)
    body = '{"model":"tiny","stream":true,"messages":[{"role":"user","content":"Hello"}]}'
    console.print(
        f"try: curl -N {stack.url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"       -d '{body}'",
        highlight=False,
        soft_wrap=True,
    )


async def _watch(
    options: UpOptions, stack: LocalStack, view: BusView, console: Console, stop: asyncio.Event
) -> None:
    """Show the plane until stopped; what dies is said, not hidden."""
    if options.live:
        await _draw_until(stop, stack, view, console)
    else:
        await _log_until(stop, stack, view, console)


async def _draw_until(
    stop: asyncio.Event, stack: LocalStack, view: BusView, console: Console
) -> None:
    title = f"multiplane · {stack.url} · Ctrl-C stops everything"
    size = console.size
    with Live(console=console, auto_refresh=False) as live:
        while not stop.is_set():
            if console.size != size:
                # Lines that were drawn for another width cannot be found again to redraw them.
                size = console.size
                console.clear()
                greet(console, stack)
            view.expire(time.time(), time.monotonic())
            picture = draw(
                view,
                title,
                stack.dead,
                size=(size.width, size.height - 1),
                now_s=time.monotonic(),
            )
            live.update(picture, refresh=True)
            await pause(stop, FRAME_S)


async def _log_until(
    stop: asyncio.Event, stack: LocalStack, view: BusView, console: Console
) -> None:
    """Print a line every few seconds, and at once when something dies or the bus goes or comes."""
    said: object = (stack.dead, True)
    due_s = time.monotonic() + _FIRST_LINE_S
    while not stop.is_set():
        now_s = time.monotonic()
        state = (stack.dead, view.connected)
        if now_s >= due_s or state != said:
            view.expire(time.time(), time.monotonic())
            stamp = time.strftime("%H:%M:%S")
            line = f"{stamp} {plain(view, stack.dead, now_s)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            said, due_s = state, now_s + LINE_EVERY_S
        await pause(stop, FRAME_S)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or less if stopped."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


def _report(options: UpOptions, summaries: list[Summary], console: Console) -> None:
    """Print the table, and write it where it is wanted."""
    if not summaries:
        return
    console.print(table(summaries))
    as_json = msgspec.json.encode(summaries)
    if options.json:
        console.print_json(as_json.decode())
    if options.report is not None:
        is_json = options.report.suffix == ".json"
        options.report.write_text(as_json.decode() if is_json else markdown(summaries))
        console.print(f"written to {options.report}", highlight=False, markup=False)
