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
from controlplane.core.coalesce import TOKENS_MIN, CoalesceConfig
from controlplane.core.policies import POLICIES
from controlplane.core.queue_lines import ORDERS, Order, QueueConfig
from controlplane.ports import PortTakenError, check_free
from controlplane.running import running_planes

T = TypeVar("T")

BUS = "Where the bus is"

DEFAULT_NATS = "nats://127.0.0.1:4222"


def _nats_url(otherwise: str) -> Any:
    return Annotated[
        str | None,
        typer.Option(
            "--nats",
            envvar="MULTIPLANE_NATS",
            help=f"NATS servers, comma-separated; by default {otherwise}.",
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
    """Where the bus is, and how to get in.

    Attributes:
        note: what somebody who did not say where it is should know; empty for nothing.
    """

    url: str
    options: NatsOptions
    note: str = ""

    @property
    def shown(self) -> str:
        """The URL without what is secret in it."""
        return ",".join(_without_user(url) for url in self.url.split(","))

    def tell(self) -> None:
        """Say on standard error what is to be known of it."""
        if self.note:
            typer.echo(f"multiplane: {self.note}", err=True)

    @asynccontextmanager
    async def opened(self, name: str) -> AsyncIterator[Bus]:
        """Give a bus that is connected, and close it.

        Args:
            name: who we are, for the server's tools.

        Raises:
            BusError: no server answers, or it refuses us.
        """
        self.tell()
        bus = await connect(self.url, name=name, options=self.options, wait_s=CONNECT_S)
        try:
            if not bus.connected:
                raise BusError(
                    f"no NATS server answers at {self.shown}; start one, or correct --nats"
                )
            yield bus
        finally:
            await bus.close()


def operators_bus() -> tuple[str, str]:
    """Return (URL, note) of the bus of whoever operates a plane and does not say which.

    That is the newest plane of `multiplane up` on this machine, if one runs.
    """
    planes = running_planes()
    if not planes:
        return DEFAULT_NATS, ""
    plane = planes[0]
    if len(planes) == 1 and plane.nats == DEFAULT_NATS:
        return plane.nats, ""
    which = f"the newest of {len(planes)} planes" if len(planes) > 1 else "the plane"
    return plane.nats, f"{which} of `multiplane up` here: process {plane.pid}, --nats {plane.nats}"


def services_bus() -> tuple[str, str]:
    """Return (URL, note) of the bus of a service that is not told which.

    A service may live for months, so who else runs on its machine must not decide.
    """
    others = [plane for plane in running_planes() if plane.nats != DEFAULT_NATS]
    if not others:
        return DEFAULT_NATS, ""
    return DEFAULT_NATS, (
        f"taking --nats {DEFAULT_NATS}; `multiplane up`, process {others[0].pid}, has its bus at "
        f"{others[0].nats}"
    )


def with_bus(command: Callable[..., T]) -> Callable[..., T]:
    """Give an operator's command the options that say where the bus is.

    Args:
        command: takes `bus`, a `BusPlace`, as a parameter, and opens it or lets it `tell`.
    """
    help_text = f"the plane of `multiplane up` on this machine, else {DEFAULT_NATS}"
    return _with_bus(command, operators_bus, help_text)


def with_service_bus(command: Callable[..., T]) -> Callable[..., T]:
    """Give the command of a service that runs for long the same options.

    Args:
        command: takes `bus`, a `BusPlace`, as a parameter.
    """

    def otherwise() -> tuple[str, str]:
        url, note = services_bus()
        BusPlace(url, NatsOptions(), note).tell()
        return url, ""

    return _with_bus(command, otherwise, DEFAULT_NATS)


def _with_bus(
    command: Callable[..., T], otherwise: Callable[[], tuple[str, str]], help_text: str
) -> Callable[..., T]:
    """Add the options.

    Args:
        otherwise: returns (URL, note) where no URL is given.
        help_text: says what that is.
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        nats: str | None,
        nats_user: str | None,
        nats_password_file: Path | None,
        nats_ca: Path | None,
        **kwargs: Any,
    ) -> T:
        options = nats_options(nats_user, nats_password_file, nats_ca)
        url, note = (nats, "") if nats else otherwise()
        return command(*args, bus=BusPlace(url, options, note), **kwargs)

    own = [each for each in signature.parameters.values() if each.name != "bus"]
    where = _parameter("nats", _nats_url(help_text))
    parameters = [*own, where, *_BUS_PARAMETERS]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _parameter(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


_BUS_PARAMETERS = (
    _parameter("nats_user", NatsUser),
    _parameter("nats_password_file", NatsPasswordFile),
    _parameter("nats_ca", NatsCa),
)


def set_up_logs(level: str) -> None:
    """Send logs to standard error."""
    from controlplane import runtime

    runtime.log_to_stderr(level)


def queue_config(order: Order | None, batch_cap: int | None, **settings: Any) -> QueueConfig | None:
    """Return how requests wait; None if they do not.

    Args:
        order: of `--queue`.
        batch_cap: of `--batch-cap`.
        settings: of the flags in `_QUEUE_FLAGS`, their defaults those of `QueueConfig`.

    Raises:
        UsageError: there is no cap to wait for, or a flag would do nothing.
    """
    usual = QueueConfig()
    for name, value in settings.items():
        flag, orders = _QUEUE_FLAGS[name]
        if value == getattr(usual, name):
            continue
        if order is None:
            raise UsageError(f"{flag} needs --queue: without it nobody waits")
        if order not in orders:
            raise UsageError(f"{flag} is of {' and '.join(orders)}, not of --queue {order}")
    if order is None:
        return None
    if not batch_cap:
        raise UsageError("--queue needs a --batch-cap: without one, every instance has room")
    return QueueConfig(order, **settings)


def coalesce_config(coalesce: bool, tokens_min: int) -> CoalesceConfig | None:
    """Return how requests follow each other; None if they do not.

    Args:
        coalesce: of `--coalesce`.
        tokens_min: of `--coalesce-tokens`, by default `TOKENS_MIN`.

    Raises:
        UsageError: the second flag would do nothing.
    """
    if coalesce:
        return CoalesceConfig(tokens_min)
    if tokens_min != TOKENS_MIN:
        raise UsageError("--coalesce-tokens needs --coalesce")
    return None


_BY_HITS = ("klpm", "edf+klpm")
_QUEUE_FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "k": ("--queue-k", _BY_HITS),
    "band_s": ("--queue-band-s", ("edf+klpm",)),
    "hold_s_max": ("--queue-hold-s", _BY_HITS),
    "requests_max": ("--queue-requests-max", ORDERS),
    "wait_s_max": ("--queue-wait-s-max", ORDERS),
}
"""Flags by the setting of `QueueConfig`, and the orders that heed them."""
