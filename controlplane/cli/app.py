"""All of `multiplane`'s commands; each imports what it runs when it runs."""

from __future__ import annotations

import typer

from controlplane.cli import (
    audit_command,
    bus_command,
    lab_command,
    listing_commands,
    operator_commands,
    sane,
)
from controlplane.cli.dashboard_command import dashboard
from controlplane.cli.detector_command import detector
from controlplane.cli.doctor_command import doctor
from controlplane.cli.predictor_command import predictor
from controlplane.cli.router_command import router
from controlplane.cli.sidecar_command import USAGE, sidecar
from controlplane.cli.up_command import up

app = typer.Typer(
    name="multiplane",
    help="A control plane for fleets of vLLM servers: KV-cache-aware routing that can be audited.",
    epilog="Start with `multiplane up`: a whole plane on this machine, no GPU needed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"multiplane {version('multiplane')}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """A control plane for fleets of vLLM servers: KV-cache-aware routing that can be audited."""


app.command()(up)
app.command()(router)
app.command(context_settings=USAGE)(sidecar)
app.command()(detector)
app.command()(predictor)
app.command()(dashboard)
app.command()(doctor)
app.command()(listing_commands.instances)
app.command()(listing_commands.routers)
app.command()(listing_commands.prefixes)
app.command()(operator_commands.drain)
app.add_typer(operator_commands.blacklist_app, name="blacklist")
app.add_typer(operator_commands.policy_app, name="policy")
app.add_typer(audit_command.app, name="audit")
app.add_typer(bus_command.app, name="bus")
app.add_typer(lab_command.app, name="lab")
sane.require_sane(app)
