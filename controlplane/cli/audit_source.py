"""Where the audit commands read from: a bus or a recording, with a progress bar."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from controlplane.audit.recording import RecordingError, read_recording
from controlplane.audit.source import recorded
from controlplane.bus import Bus
from controlplane.bus.protocol import Record
from controlplane.cli.completion import complete_model
from controlplane.cli.errors import UsageError
from controlplane.cli.options import BusPlace

WHAT = "What to read"

From = Annotated[
    Path | None,
    typer.Option("--from", help="A recording to read instead of the bus.", rich_help_panel=WHAT),
]
Since = Annotated[
    str,
    typer.Option(
        help="Only what was said since: 90s, 15m, 2h, 3d, or an ISO time.", rich_help_panel=WHAT
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="Only this model, by its id on the bus.",
        rich_help_panel=WHAT,
        autocompletion=complete_model,
    ),
]

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_REDRAW_S = 0.1


class Source(msgspec.Struct, frozen=True):
    """What a command reads.

    Attributes:
        since_wall_s: 0 for all that there is.
        follow: go on with what comes.
    """

    bus: BusPlace
    file: Path | None
    model: str
    since_wall_s: float
    follow: bool = False

    async def records(self, kinds: Sequence[str], bus: Bus | None) -> AsyncGenerator[Record, None]:
        """Yield the records, in the order of their times, from a file or from `bus`."""
        if bus is not None:
            async for record in recorded(
                bus,
                kinds,
                model=self.model or None,
                since_wall_s=self.since_wall_s,
                until_wall_s=None if self.follow else time.time(),
                follow=self.follow,
            ):
                yield record
            return
        assert self.file is not None
        try:
            for record, _ in read_recording(self.file):
                if record.at_wall_s >= self.since_wall_s:
                    yield record
        except RecordingError as error:
            raise UsageError(f"--from {error}") from error

    async def read(
        self, kinds: Sequence[str], hear: Callable[[Record], bool | None], title: str = ""
    ) -> None:
        """Give every record to `hear`, until it returns True.

        Args:
            title: of a progress bar on standard error; none without it, or while following.
        """
        async with AsyncExitStack() as stack:
            bus = None
            if self.file is None:
                bus = await stack.enter_async_context(self.bus.opened("audit"))
            records = await stack.enter_async_context(aclosing(self.records(kinds, bus)))
            if title and not self.follow:
                await self._with_progress(records, hear, title)
                return
            async for record in records:
                if hear(record):
                    return

    async def _with_progress(
        self, records: AsyncIterator[Record], hear: Callable[[Record], bool | None], title: str
    ) -> None:
        """Show how far the record's time has come."""
        now_wall_s = time.time()
        first_wall_s: float | None = None
        drawn_s, count = 0.0, 0
        with _progress() as progress:
            task = progress.add_task(title, total=1.0, count=0)
            async for record in records:
                count += 1
                first_wall_s = record.at_wall_s if first_wall_s is None else first_wall_s
                if hear(record):
                    return
                if time.monotonic() - drawn_s > _REDRAW_S:
                    drawn_s = time.monotonic()
                    span_s = max(now_wall_s - first_wall_s, 1e-9)
                    done = min((record.at_wall_s - first_wall_s) / span_s, 1.0)
                    progress.update(task, completed=done, count=count)
                    await asyncio.sleep(0)
            progress.update(task, completed=1.0, count=count)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[count]:,} messages"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def source(
    bus: BusPlace,
    *,
    file: Path | None = None,
    model: str = "",
    since: str = "",
    follow: bool = False,
) -> Source:
    """Return what the options name. Raises UsageError."""
    if file is not None and follow:
        raise UsageError("--from and --follow: a recording has an end; leave one of them out")
    return Source(bus, file, model, since_wall_s(since, time.time()), follow)


def since_wall_s(text: str, now_wall_s: float) -> float:
    """Return the moment that `--since` names, Unix seconds; 0 for the beginning.

    Raises:
        UsageError: it is neither a stretch of time nor an ISO time.
    """
    if not text:
        return 0.0
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now_wall_s - float(ago[1]) * _UNITS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError(f"--since {text}: write 90s, 15m, 2h, 3d or 2026-11-29T12:00") from error


def run(work: Coroutine[Any, Any, int]) -> None:
    """Run a command to its end, and exit with its status; Ctrl-C ends it quietly."""
    try:
        status = asyncio.run(work)
    except KeyboardInterrupt:
        status = 130
    if status:
        raise typer.Exit(status)
