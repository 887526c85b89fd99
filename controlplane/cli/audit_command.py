"""`multiplane audit`: follow decisions, explain one, check all of them."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from controlplane.audit.follow import Follower
from controlplane.audit.heard import understand
from controlplane.audit.report import MEANINGS, Report
from controlplane.audit.selection import Wanted
from controlplane.audit.source import ROWS_S_MAX
from controlplane.audit.story import SHOWN_MAX, StoryTeller, told
from controlplane.audit.verify import Verifier, VerifyLimits
from controlplane.bus.protocol import Record
from controlplane.cli import audit_files
from controlplane.cli.audit_source import From, Model, Since, run, source
from controlplane.cli.errors import UsageError
from controlplane.cli.options import BusPlace, Json, with_bus

app = typer.Typer(
    help="Follow, explain, check, record and export what routers decided.", no_args_is_help=True
)
app.command("record")(audit_files.record)
app.command("export")(audit_files.export)

WHICH = "Which events"
FINDINGS_SHOWN = 20


@app.command()
@with_bus
def tail(
    instance: Annotated[str, typer.Option(help="Of this instance.", rich_help_panel=WHICH)] = "",
    tenant: Annotated[str, typer.Option(help="Of this tenant.", rich_help_panel=WHICH)] = "",
    request: Annotated[
        str, typer.Option(help="Of requests whose id ends so.", rich_help_panel=WHICH)
    ] = "",
    class_key: Annotated[
        str,
        typer.Option(
            "--class", help="Of the class with this key, 16 hex digits.", rich_help_panel=WHICH
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON, a line each.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f/-F", help="Go on with what comes.")
    ] = True,
    since: Since = "0s",
    file: From = None,
    model: Model = "",
    *,
    bus: BusPlace,
) -> None:
    """Print decisions, ends and verdicts as they happen, one a line.

    Example: `multiplane audit tail --since 5m --instance engine-0`
    """
    follower = Follower(Wanted(instance, tenant, request, _key(class_key)))
    where = source(
        bus,
        file=file,
        model=model,
        since="" if file is not None and since == "0s" else since,
        follow=follow and file is None,
    )
    shown_wall_s = where.since_wall_s
    # Routers tell whose columns are whose every few seconds: read from before what is shown.
    where = msgspec.structs.replace(where, since_wall_s=max(shown_wall_s - ROWS_S_MAX, 0.0))

    def hear(record: Record) -> None:
        heard = understand(record)
        shown = record.at_wall_s >= shown_wall_s
        if json:
            for data in follower.data(heard):
                if shown:
                    typer.echo(msgspec.json.encode(data))
        else:
            for line in follower.lines(heard):
                if shown:
                    typer.echo(line)

    async def work() -> int:
        await where.read(("route", "hotspot", "policy"), hear)
        return 0

    run(work())


def _key(text: str) -> int | None:
    """Return the class that `--class` names. Raises UsageError."""
    if not text:
        return None
    try:
        return int(text, 16)
    except ValueError as error:
        raise UsageError(f"--class {text}: give a key of 16 hexadecimal digits") from error


@app.command()
@with_bus
def show(
    request: Annotated[str, typer.Argument(help="Id of a request, or the end of it.")],
    every: Annotated[bool, typer.Option("--all", help="List every candidate.")] = False,
    json: Json = False,
    since: Since = "1h",
    file: From = None,
    model: Model = "",
    *,
    bus: BusPlace,
) -> None:
    """Tell the whole story of one request: tokens, candidates, why, retries, times, promises.

    Example: `multiplane audit show 7f3a9c --all`
    """
    if not request:
        raise UsageError("REQUEST: give the id of a request, or the end of it")
    teller = StoryTeller(request)
    where = source(
        bus,
        file=file,
        model=model,
        since="" if file is not None and since == "1h" else since,
    )

    def hear(record: Record) -> bool:
        teller.hear(understand(record))
        return teller.story is not None and teller.story.ended

    async def work() -> int:
        await where.read(("route",), hear, "looking for the request")
        story = teller.story
        if story is None:
            typer.echo(f"no request {request} since {since}; --since goes further back", err=True)
            return 1
        if json:
            typer.echo(msgspec.json.encode(story.as_dict()))
        else:
            typer.echo("\n".join(told(story, None if every else SHOWN_MAX)))
        return 0

    run(work())


@app.command()
@with_bus
def verify(
    json: Json = False,
    since: Since = "",
    patience_s: Annotated[
        float, typer.Option(min=0.0, help="How late block streams may be in the record.")
    ] = VerifyLimits().patience_s,
    file: From = None,
    model: Model = "",
    *,
    bus: BusPlace,
) -> None:
    """Compute every recorded decision again; exit with 1 if one cannot be explained.

    Choices are computed from what decisions say they saw, hits from block sets that are rebuilt
    from the block streams, and promises compared with the tokens that engines found cached.

    Example: `multiplane audit verify --since 1h`
    """
    verifier = Verifier(VerifyLimits(patience_s=patience_s))
    where = source(bus, file=file, model=model, since=since)

    async def work() -> int:
        kinds = ("kv", "route", "hotspot", "policy")
        await where.read(kinds, lambda record: verifier.hear(understand(record)), "checking")
        verifier.end()
        report = verifier.report
        if json:
            typer.echo(msgspec.json.encode(report.as_dict()))
        else:
            _print(report)
        if not report.decisions:
            typer.echo("there is no decision in the record", err=True)
        return 0 if report.clean else 1

    run(work())


def _print(report: Report) -> None:
    console = Console()
    checked = Table("checked", "", box=None, show_header=False)
    checked.columns[1].justify = "right"
    for name, count in (
        ("decisions", report.decisions),
        ("… whose choice was computed again", report.chosen),
        ("… whose hits were computed again", report.hits),
        ("instances whose hits were computed again", report.instances),
    ):
        checked.add_row(name, f"{count:,}")
    console.print(checked)
    left_out = {why: count for why, count in report.unchecked.items() if count}
    if left_out:
        table = Table("could not be checked, because", "times", box=None, title_justify="left")
        table.columns[1].justify = "right"
        for why, count in sorted(left_out.items(), key=lambda item: -item[1]):
            table.add_row(why, f"{count:,}")
        console.print(table)
    if report.promised:
        console.print(_promises(report))
    for finding in report.findings[:FINDINGS_SHOWN]:
        console.print(f"[red]{finding.kind}[/] {finding.where}", soft_wrap=True, highlight=False)
        console.print(f"    {finding.text}", soft_wrap=True, highlight=False, markup=False)
    if report.clean:
        console.print("[green]nothing is unexplained[/]")
        return
    for kind, count in report.found.items():
        console.print(f"[red]{count:,} {MEANINGS[kind]}[/]")
    if sum(report.found.values()) > FINDINGS_SHOWN:
        console.print("--json lists more of them")


def _promises(report: Report) -> Table:
    table = Table("cached tokens", "requests", "promised", "found", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for cause, entry in sorted(report.promised.items(), key=lambda item: -item[1].requests):
        table.add_row(
            cause,
            f"{entry.requests:,}",
            f"{entry.promised_tokens:,}",
            f"{entry.cached_tokens:,}",
        )
    return table
