"""`multiplane doctor`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from controlplane.bus import connect
from controlplane.cli.options import BusPlace, with_bus
from controlplane.doctor import doctor as examine


@with_bus
def doctor(
    admin: Annotated[
        str, typer.Option(help="The operator's port of a router, as it prints it.")
    ] = "http://127.0.0.1:8001",
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    *,
    bus: BusPlace,
) -> None:
    """Check a live plane end to end, with a canary through every engine.

    The router's tokens must equal the engine's, the keys in the engine's events must equal the
    router's, and the hit that the router promises must equal what the engine reports as cached.
    Exits with 1 if anything is wrong, and says how to mend it.

    Example: `multiplane doctor --nats nats://nats:4222`
    """
    console = Console()

    async def work() -> bool:
        nats = await connect(bus.url, name="doctor", options=bus.options)
        well = True
        try:
            async for finding in examine(nats, admin, model):
                well = well and finding.ok
                mark = "[green]✓[/]" if finding.ok else "[red]✗[/]"
                console.print(
                    f"{mark} [bold]{finding.where}[/]  {finding.what}: {finding.found}",
                    highlight=False,
                )
                if finding.mend:
                    console.print(f"    → {finding.mend}", highlight=False)
        finally:
            await nats.close()
        return well

    well = asyncio.run(work())
    console.print("all is well" if well else "something is wrong: see the lines marked ✗")
    raise typer.Exit(0 if well else 1)
