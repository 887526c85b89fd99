"""`multiplane doctor`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from controlplane.bus import connect
from controlplane.bus.protocol import BusError
from controlplane.cli.completion import complete_model
from controlplane.cli.files import read_key
from controlplane.cli.options import CONNECT_S, BusPlace, Json, require_url, with_bus
from controlplane.cli.tables import printable

if TYPE_CHECKING:
    from controlplane.doctor_canary import Finding


@with_bus
def doctor(
    admin: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The operators' port of a router, as it prints it; found on the bus by default.",
        ),
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="Only this model.", autocompletion=complete_model)
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="File that holds the engines' API key, if they want one.")
    ] = None,
    json: Json = False,
    *,
    bus: BusPlace,
) -> None:
    """Check a live plane end to end, with a canary through every engine.

    NATS must hold what the plane needs, each id and each engine be registered once, and routers
    know them all. Then the router's tokens must equal the engine's, the keys in the engine's events
    the router's, and the hit that the router promises what the engine reports as cached.

    Exits with 1 if anything is wrong, and says how to mend it. `!` marks what is well but worth
    knowing, as an instance that somebody has drained.

    Example: `multiplane doctor --nats nats://nats:4222`
    """
    if admin:
        admin = admin if "://" in admin else f"http://{admin}"
        require_url("--admin", admin)
    key = read_key("--engine-key-file", engine_key_file) or None
    bus.tell()
    findings = asyncio.run(_examine(bus, admin, model, key, quiet=json))
    well = all(finding.ok for finding in findings)
    if json:
        typer.echo(msgspec.json.encode({"well": well, "findings": findings}))
    else:
        typer.echo("all is well" if well else "something is wrong: see the lines marked ✗")
    raise typer.Exit(0 if well else 1)


async def _examine(
    place: BusPlace, admin: str, model: str | None, key: str | None, *, quiet: bool
) -> list[Finding]:
    """Return the findings, printed as they come unless `quiet`."""
    from controlplane.doctor import doctor as examine
    from controlplane.doctor_canary import Finding

    console = Console()
    findings = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        if not quiet:
            _print(console, finding)

    try:
        nats = await connect(place.url, name="doctor", options=place.options, wait_s=CONNECT_S)
    except BusError as error:
        mend = "correct --nats, --nats-user and --nats-password-file"
        found(Finding("bus", "connection", False, str(error), mend))
        return findings
    try:
        async for finding in examine(nats, admin, model, key):
            found(finding)
    finally:
        await nats.close()
    return findings


def _print(console: Console, finding: Finding) -> None:
    mark = "[red]✗[/]" if not finding.ok else "[yellow]![/]" if finding.mend else "[green]✓[/]"
    where, rest = (
        escape(printable(text)) for text in (finding.where, f"{finding.what}: {finding.found}")
    )
    console.print(f"{mark} [bold]{where}[/]  {rest}", highlight=False, soft_wrap=True)
    if finding.mend:
        mend = escape(printable(finding.mend))
        console.print(f"    → {mend}", highlight=False, soft_wrap=True)
