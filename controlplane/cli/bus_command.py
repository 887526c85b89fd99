"""`multiplane bus`: what the plane keeps on NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import typer

from controlplane import runtime
from controlplane.bus import NatsBus, connect
from controlplane.bus.layout import Layout, layout
from controlplane.bus.protocol import BusError
from controlplane.bus.room import fitting_size
from controlplane.bus.setup import Change, Holding, NoRoomError, describe, ensure, keep
from controlplane.cli.errors import UsageError
from controlplane.cli.options import BusPlace, Json, with_bus
from controlplane.cli.tables import ago, show, size

app = typer.Typer(help="Create and look at what the plane keeps on NATS.", no_args_is_help=True)


@app.command()
@with_bus
def init(
    replicas: Annotated[int, typer.Option(help="Copies of everything: 1, 3 or 5.")] = 1,
    storage: Annotated[
        Literal["file", "memory"], typer.Option(help="Where the server keeps it.")
    ] = "file",
    size: Annotated[
        float,
        typer.Option(
            max=1000.0,
            help="Factor on every bound in bytes, 6.2 GB in all. Where it does not fit, the error "
            "says what does.",
        ),
    ] = 1.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and create anew what the server has lost.")
    ] = False,
    *,
    bus: BusPlace,
) -> None:
    """Create streams, buckets and object stores, or correct those that differ. Repeatable.

    Example: `multiplane bus init --nats nats://nats:4222 --size 0.1`
    """
    try:
        plan = layout(replicas, storage, size)
    except ValueError as error:
        raise UsageError(f"--replicas or --size: {error}") from error

    async def work() -> None:
        async with _opened(bus) as nats:
            try:
                changes = await ensure(nats, plan)
            except NoRoomError as error:
                raise NoRoomError(f"{error}; {await _smaller(nats, plan)}") from error
            for change in changes:
                _say(change)

    if watch:
        raise typer.Exit(runtime.run(lambda stop: _watch(bus, plan, stop)))
    asyncio.run(work())


async def _smaller(bus: NatsBus, plan: Layout) -> str:
    """Return what to do about a server without the room for a plan."""
    try:
        size = await fitting_size(bus, plan)
    except BusError:
        return "give a smaller --size, or let the server store more"
    gigabytes = layout().nbytes_max / 1e9
    if size is None:
        return f"the server has next to none: all of it takes {gigabytes:.1f} GB × --size"
    return f"--size {size:g} fits, of {gigabytes:.1f} GB; or let the server store more"


def _say(change: Change) -> None:
    typer.echo(f"{change.action:10} {change.kind:7} {change.name}  {change.detail}".rstrip())


async def _watch(place: BusPlace, plan: Layout, stop: asyncio.Event) -> int:
    """Create what is missing until stopped; returns the exit status."""
    runtime.log_to_stderr()
    place.tell()
    bus = await connect(place.url, name="multiplane-bus", options=place.options)
    keeping = asyncio.create_task(keep(bus, plan, _say))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()  # only a bug ends it
    finally:
        for task in (keeping, stopping):
            task.cancel()
        await bus.close()
    return 0


@app.command()
@with_bus
def status(json: Json = False, *, bus: BusPlace) -> None:
    """Show what the server holds; exit with 1 if something is missing.

    Example: `multiplane bus status`
    """

    async def work() -> None:
        plan = layout()
        async with _opened(bus) as nats:
            holdings = await describe(nats, plan)
        now_wall_s = time.time()
        show(
            ("KIND", "NAME", "ENTRIES", "BYTES", "OF", "NEWEST", "READERS", "COPIES"),
            [_cells(held, now_wall_s) for held in holdings],
            data=holdings,
            json=json,
        )
        missing = plan.names - {held.name for held in holdings}
        if missing:
            typer.echo(
                f"missing: {', '.join(sorted(missing))}: run `multiplane bus init`", err=True
            )
            raise typer.Exit(1)

    asyncio.run(work())


@asynccontextmanager
async def _opened(place: BusPlace) -> AsyncIterator[NatsBus]:
    """Give a connected bus that is a server's. Raises BusError, UsageError."""
    async with place.opened("bus") as bus:
        if not isinstance(bus, NatsBus):
            raise UsageError(f"--nats {place.shown}: not a NATS URL")
        yield bus


def _cells(held: Holding, now_wall_s: float) -> tuple[str, ...]:
    newest = "" if held.newest_wall_s is None else ago(now_wall_s - held.newest_wall_s)
    return (
        held.kind,
        held.name,
        f"{held.messages:,}",
        size(held.nbytes),
        size(held.bytes_max),
        newest,
        str(held.consumers),
        f"{held.current}/{held.replicas}",
    )
