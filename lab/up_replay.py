"""Sends a trace through a local plane, and shows how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from lab.load import Answered, Planned, run_load
from lab.screen import draw
from lab.stack import LocalStack
from lab.summary import Summary, summarize
from lab.view import BusView

_FRAME_S = 0.25
_LINE_EVERY_S = 5.0
_QUIET_S = 0.5  # the last ends reach the bus
_PROGRESS_LINES = 2
_LATE_S = 0.1


class Replay(msgspec.Struct, frozen=True):
    """One run of a trace.

    Attributes:
        which: of how many runs this is which, as in `1/2`.
        clock: how many seconds of the engines a second here stands for.
    """

    policy: str
    which: str
    planned: Sequence[Planned]
    clock: float


class _Progress:
    """How far a run is, as a bar and as a line."""

    def __init__(self, run: Replay, console: Console) -> None:
        self._run = run
        self._began_s = time.monotonic()
        self._done = self._failed = 0
        self.bar = Progress(
            TextColumn(f"{run.which} {run.policy}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._task: TaskID = self.bar.add_task("replay", total=len(run.planned), note="")

    def answered(self, result: Answered) -> None:
        """Count a request."""
        self._done += 1
        self._failed += not result.ok

    def update(self) -> None:
        """Bring the bar up to date."""
        self.bar.update(self._task, completed=self._done, note=self._note())

    def line(self) -> str:
        """Return it as one line of a log."""
        total = len(self._run.planned)
        return f"{self._run.which} {self._run.policy}: {self._done:,} of {total:,}, {self._note()}"

    def _note(self) -> str:
        """Return what failed and how long it will take: the trace says when its last one is due."""
        now_s = time.monotonic()
        left_s = self._began_s + self._run.planned[-1].at_s - now_s
        if self._done == len(self._run.planned):
            told = f"took {now_s - self._began_s:.0f} s"
        elif left_s > 0:
            told = f"{left_s:.0f} s left"
        else:
            told = "waiting for the last answers"
        return f"{self._failed:,} failed, {told}"


async def replay(
    run: Replay,
    stack: LocalStack,
    view: BusView,
    console: Console,
    stop: asyncio.Event,
    *,
    live: bool,
) -> Summary:
    """Send a trace through the plane; returns what it came to.

    Args:
        stop: ends the run early; what is under way is still waited for.
        live: draw a bar and the plane; a line every few seconds otherwise.
    """
    progress = _Progress(run, console)
    began_s = time.monotonic()
    running = asyncio.create_task(
        run_load(stack.url, run.planned, answered=progress.answered, stop=stop)
    )
    if live:
        await _draw(running, run, progress, stack, view, console)
    else:
        await _log(running, progress, console)
    results = await running
    took_s = time.monotonic() - began_s
    await asyncio.sleep(_QUIET_S)
    _say_lag(console, results)
    by_instance = view.routed_by_instance()
    return summarize(run.policy, results, by_instance, seconds=took_s, clock=run.clock)


async def _draw(
    running: asyncio.Task[list[Answered]],
    run: Replay,
    progress: _Progress,
    stack: LocalStack,
    view: BusView,
    console: Console,
) -> None:
    size = console.size
    with Live(console=console, auto_refresh=False, transient=True) as shown:
        while not running.done():
            if console.size != size:
                size = console.size
                console.clear()
            view.expire(time.time(), time.monotonic())
            picture = draw(
                view,
                f"replaying under {run.policy}",
                stack.dead,
                size=(size.width, size.height - 1 - _PROGRESS_LINES),
                now_s=time.monotonic(),
            )
            progress.update()
            shown.update(Group(picture, progress.bar), refresh=True)
            await asyncio.wait([running], timeout=_FRAME_S)
    console.print(progress.line(), highlight=False, markup=False)


async def _log(
    running: asyncio.Task[list[Answered]], progress: _Progress, console: Console
) -> None:
    while not running.done():
        console.print(progress.line(), highlight=False, markup=False, soft_wrap=True)
        await asyncio.wait([running], timeout=_LINE_EVERY_S)
    console.print(progress.line(), highlight=False, markup=False, soft_wrap=True)


def _say_lag(console: Console, results: Sequence[Answered]) -> None:
    """Warn when this machine could not send the requests at their times."""
    late = sorted(result.late_s for result in results)
    if late and late[int(0.95 * (len(late) - 1))] > _LATE_S:
        console.print(
            f"[yellow]this machine sent requests up to {late[-1]:.1f} s late: "
            "lower --speed for honest latencies[/]"
        )
