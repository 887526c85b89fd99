"""Options that several sub-commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controlplane.bus import NatsOptions
from controlplane.cli.errors import UsageError

BUS = "Where the bus is"

NatsUrl = Annotated[
    str,
    typer.Option(
        "--nats",
        envvar="MULTIPLANE_NATS",
        help="NATS servers, comma-separated.",
        rich_help_panel=BUS,
    ),
]
NatsUser = Annotated[
    str | None,
    typer.Option(envvar="MULTIPLANE_NATS_USER", help="User at NATS.", rich_help_panel=BUS),
]
NatsPasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="MULTIPLANE_NATS_PASSWORD_FILE",
        help="File that holds the password; never given on a command line.",
        rich_help_panel=BUS,
    ),
]
NatsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="MULTIPLANE_NATS_CA",
        help="Certificates to trust; makes TLS compulsory.",
        rich_help_panel=BUS,
    ),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", help="debug, info, warning or error.", show_default=True)
]

DEFAULT_NATS = "nats://127.0.0.1:4222"


def nats_options(user: str | None, password_file: Path | None, ca: Path | None) -> NatsOptions:
    """Return connection options.

    Raises:
        UsageError: the password file cannot be read.
    """
    password = None
    if password_file is not None:
        try:
            password = password_file.read_text().strip()
        except OSError as error:
            raise UsageError(f"--nats-password-file {password_file}: {error.strerror}") from error
    return NatsOptions(user=user, password=password, tls_ca=None if ca is None else str(ca))


def set_up_logs(level: str) -> None:
    """Send logs to standard error.

    Raises:
        UsageError: there is no such level.
    """
    from controlplane import runtime

    known = ("debug", "info", "warning", "error")
    if level not in known:
        raise UsageError(f"--log-level {level}: choose one of {', '.join(known)}")
    runtime.log_to_stderr(level)
