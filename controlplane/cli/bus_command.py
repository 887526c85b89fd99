"""`multiplane bus`: what the plane keeps on NATS."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from controlplane import runtime
from controlplane.bus import NatsBus, connect
from controlplane.bus.layout import Layout, layout
from controlplane.bus.protocol import BusError
from controlplane.bus.setup import Change, Holding, describe, ensure, keep
from controlplane.cli.errors import UsageError
from controlplane.cli.options import BusPlace, with_bus

app = typer.Typer(help="Create and look at what the plane keeps on NATS.", no_args_is_help=True)


@app.command()
@with_bus
def init(
    replicas: Annotated[int, typer.Option(help="Copies of everything: 1, 3 or 5.")] = 1,
    storage: Annotated[str, typer.Option(help="file or memory.")] = "file",
    size: Annotated[
        float, typer.Option(help="Factor on every bound in bytes; 0.1 for a small disk.")
    ] = 1.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and create anew what the server has lost.")
    ] = False,
    *,
    bus: BusPlace,
) -> None:
    """Create streams, buckets and object stores, or correct those that differ. Repeatable."""
    if storage not in ("file", "memory"):
        raise UsageError(f"--storage {storage}: choose file or memory")
    kind: Literal["file", "memory"] = "memory" if storage == "memory" else "file"
    try:
        plan = layout(replicas, kind, size)
    except ValueError as error:
        raise UsageError(f"--replicas or --size: {error}") from error

    async def work() -> None:
        nats = await _connected(bus)
        for change in await ensure(nats, plan):
            _say(change)
        await nats.close()

    if watch:
        raise typer.Exit(runtime.run(lambda stop: _watch(bus, plan, stop)))
    asyncio.run(work())


def _say(change: Change) -> None:
    typer.echo(f"{change.action:10} {change.kind:7} {change.name}  {change.detail}".rstrip())


async def _watch(place: BusPlace, plan: Layout, stop: asyncio.Event) -> int:
    """Create what is missing until stopped; returns the exit status."""
    runtime.log_to_stderr()
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
def status(*, bus: BusPlace) -> None:
    """Show what the server holds."""

    async def work() -> None:
        nats = await _connected(bus)
        plan = layout()
        holdings = await describe(nats, plan)
        await nats.close()
        Console().print(_table(holdings))
        wanted = len(plan.streams) + len(plan.buckets) + len(plan.stores)
        if len(holdings) < wanted:
            missing = wanted - len(holdings)
            typer.echo(f"{missing} missing: run `multiplane bus init`", err=True)
            raise typer.Exit(1)

    asyncio.run(work())


async def _connected(place: BusPlace) -> NatsBus:
    bus = await connect(place.url, name="multiplane-bus", options=place.options)
    if not isinstance(bus, NatsBus):
        raise UsageError(f"--nats {place.url}: not a NATS URL")
    if not bus.connected:
        await bus.close()
        raise BusError(f"no NATS server answers at {place.url}; start one, or correct --nats")
    return bus


def _table(holdings: list[Holding]) -> Table:
    table = Table("kind", "name", "entries", "bytes", "of", "newest", "readers", "copies")
    now_s = time.time()
    for held in holdings:
        newest = "" if held.newest_wall_s is None else f"{now_s - held.newest_wall_s:.0f} s ago"
        table.add_row(
            held.kind,
            held.name,
            f"{held.messages:,}",
            f"{held.nbytes / 1e6:,.1f} MB",
            f"{held.bytes_max / 1e6:,.0f} MB",
            newest,
            str(held.consumers),
            f"{held.current}/{held.replicas}",
        )
    return table
