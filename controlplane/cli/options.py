"""Options that several sub-commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import typer

from controlplane.bus import Bus, NatsOptions, connect
from controlplane.bus.protocol import BusError
from controlplane.cli.errors import UsageError
from controlplane.cli.files import check_certificates, read_password
from controlplane.core.policies import POLICIES
from controlplane.ports import PortTakenError, check_free

T = TypeVar("T")

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
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", help="What to log, at least."),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PORT_MAX = 65535
CONNECT_S = 2.0  # a server that answers later than this is taken for absent

DEFAULT_NATS = "nats://127.0.0.1:4222"

if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[tuple(POLICIES)]


def nats_options(user: str | None, password_file: Path | None, ca: Path | None) -> NatsOptions:
    """Return connection options.

    Raises:
        UsageError: a file cannot be used.
    """
    password = read_password("--nats-password-file", password_file)
    check_certificates("--nats-ca", ca)
    return NatsOptions(user=user, password=password, tls_ca=None if ca is None else str(ca))


def require_port(flag: str, host: str, port: int, hint: str = "") -> None:
    """See that a port can be had before anything starts.

    Args:
        hint: what else to say if it cannot.

    Raises:
        UsageError: it cannot; names the flag.
    """
    try:
        check_free(host, port)
    except PortTakenError as error:
        raise UsageError(f"{flag} {port}: {error}{hint}") from error


def require_url(flag: str, url: str) -> None:
    """See that text is the URL of a server.

    Raises:
        UsageError: it is not; names the flag.
    """
    problem = ""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problem = "not a URL of the form http://HOST:PORT"
        elif parts.port == 0:
            problem = "there is no port 0"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UsageError(f"{flag} {url}: {problem}")


def _without_user(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


class BusPlace(msgspec.Struct, frozen=True):
    """Where the bus is, and how to get in."""

    url: str
    options: NatsOptions

    @property
    def shown(self) -> str:
        """The URL without what is secret in it."""
        return ",".join(_without_user(url) for url in self.url.split(","))

    @asynccontextmanager
    async def opened(self, name: str) -> AsyncIterator[Bus]:
        """Give a bus that is connected, and close it.

        Args:
            name: who we are, for the server's tools.

        Raises:
            BusError: no server answers, or it refuses us.
        """
        bus = await connect(self.url, name=name, options=self.options, wait_s=CONNECT_S)
        try:
            if not bus.connected:
                raise BusError(
                    f"no NATS server answers at {self.shown}; start one, or correct --nats"
                )
            yield bus
        finally:
            await bus.close()


def with_bus(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the options that say where the bus is.

    Args:
        command: takes `bus`, a `BusPlace`, as its last parameter.
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        nats: str,
        nats_user: str | None,
        nats_password_file: Path | None,
        nats_ca: Path | None,
        **kwargs: Any,
    ) -> T:
        bus = BusPlace(nats, nats_options(nats_user, nats_password_file, nats_ca))
        return command(*args, bus=bus, **kwargs)

    own = [each for each in signature.parameters.values() if each.name != "bus"]
    parameters = [*own, *_BUS_PARAMETERS]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_BUS_PARAMETERS = (
    _parameter("nats", NatsUrl, DEFAULT_NATS),
    _parameter("nats_user", NatsUser, None),
    _parameter("nats_password_file", NatsPasswordFile, None),
    _parameter("nats_ca", NatsCa, None),
)


def set_up_logs(level: str) -> None:
    """Send logs to standard error."""
    from controlplane import runtime

    runtime.log_to_stderr(level)
