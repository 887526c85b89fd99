"""`multiplane router`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from controlplane.cli.errors import UsageError
from controlplane.cli.files import check_identity, check_writable, read_key
from controlplane.cli.options import (
    PORT_MAX,
    BusPlace,
    LogLevel,
    PolicyName,
    coalesce_config,
    queue_config,
    require_port,
    set_up_logs,
    with_service_bus,
)

if TYPE_CHECKING:
    from router.config import RouterConfig

DECISION = "How it decides"
WAITING = "Who waits, and how"
CLIENTS = "Who may use it"
PROCESS = "How it runs"


@with_service_bus
def router(
    host: Annotated[str, typer.Option(help="Address for clients.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[
        int, typer.Option(min=0, max=PORT_MAX, help="Port for clients; 0 takes a free one.")
    ] = 8000,
    policy: Annotated[
        PolicyName,
        typer.Option(help="What picks the instance.", rich_help_panel=DECISION),
    ] = "multiplicative",
    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of the policy, e.g. weight=0.5; repeatable.",
            rich_help_panel=DECISION,
        ),
    ] = None,
    batch_cap: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest batch of an instance; no cap by default.", rich_help_panel=DECISION
        ),
    ] = None,
    queue: Annotated[
        Literal["fcfs", "edf", "klpm", "edf+klpm"] | None,
        typer.Option(
            help="Let requests wait, in this order, while every instance is at --batch-cap; "
            "by default nobody waits.",
            rich_help_panel=WAITING,
        ),
    ] = None,
    queue_k: Annotated[
        int,
        typer.Option(
            min=1, help="Of klpm: every k-th dispatch is the oldest's.", rich_help_panel=WAITING
        ),
    ] = 2,
    queue_band_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Of edf+klpm: slack within which a longer prefix hit goes first.",
            rich_help_panel=WAITING,
        ),
    ] = 0.25,
    queue_hold_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Of klpm and edf+klpm: how long a request may be passed over for a full instance "
            "that has its prefix; 0: never.",
            rich_help_panel=WAITING,
        ),
    ] = 5.0,
    queue_requests_max: Annotated[
        int,
        typer.Option(min=1, help="Requests that may wait; 429 beyond.", rich_help_panel=WAITING),
    ] = 1024,
    queue_wait_s_max: Annotated[
        float,
        typer.Option(min=0.1, help="Nobody waits for longer.", rich_help_panel=WAITING),
    ] = 60.0,
    coalesce: Annotated[
        bool,
        typer.Option(
            "--coalesce/--no-coalesce",
            help="Let requests wait for a new prefix that another one is computing.",
            rich_help_panel=WAITING,
        ),
    ] = False,
    coalesce_tokens: Annotated[
        int,
        typer.Option(min=1, help="Shared tokens from which on that pays.", rich_help_panel=WAITING),
    ] = 1024,
    stale_s: Annotated[
        float,
        typer.Option(
            min=0.5,
            help="Silence after which an instance's blocks no longer count.",
            rich_help_panel=DECISION,
        ),
    ] = 5.0,
    promise_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="How long what a request will have cached counts as a hit before it is there.",
            rich_help_panel=DECISION,
        ),
    ] = 5.0,
    audit_candidates: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of decisions that record every candidate.",
            rich_help_panel=DECISION,
        ),
    ] = 1.0,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, `KEY TENANT` a line; callers need one. Read anew on change.",
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of tenants: limits, exponents, budgets. Read anew on change.",
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    engine_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File that holds the engines' own API key, sent in place of the caller's.",
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call from a browser, `*` for all; repeatable.",
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Serve TLS with this certificate chain (PEM).", rich_help_panel=CLIENTS),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(help="Its private key, if in a file of its own.", rich_help_panel=CLIENTS),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Router processes that share the port.", rich_help_panel=PROCESS),
    ] = 1,
    admin_host: Annotated[
        str, typer.Option(help="Address for metrics and debugging.", rich_help_panel=PROCESS)
    ] = "127.0.0.1",
    admin_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=PORT_MAX,
            help="Port for metrics and debugging, of all workers together; by default the one "
            "after --port, 0 takes a free one.",
            rich_help_panel=PROCESS,
        ),
    ] = None,
    router_id: Annotated[
        str, typer.Option(help="Name on the bus; made up by default.", rich_help_panel=PROCESS)
    ] = "",
    reuse_port: Annotated[
        bool,
        typer.Option(
            "--reuse-port",
            help="Share the port with other router processes.",
            rich_help_panel=PROCESS,
        ),
    ] = False,
    stop_grace_s: Annotated[
        float,
        typer.Option(min=0.0, help="Time for running streams at a stop.", rich_help_panel=PROCESS),
    ] = 60.0,
    forget_model_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="How long a model without instances is remembered.",
            rich_help_panel=PROCESS,
        ),
    ] = 600.0,
    body_mib_max: Annotated[
        int,
        typer.Option(
            min=1,
            help="Largest request body in MiB, images included; larger ones get a 413.",
            rich_help_panel=PROCESS,
        ),
    ] = 32,
    access_log: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Write a line of JSON for every request; `-` for standard output.",
            rich_help_panel=PROCESS,
        ),
    ] = "",
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="Send traces to this OpenTelemetry collector, e.g. http://host:4318.",
            rich_help_panel=PROCESS,
        ),
    ] = "",
    otlp_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of requests that are traced where the caller has not decided.",
            rich_help_panel=PROCESS,
        ),
    ] = 1.0,
    log_level: LogLevel = "info",
    *,
    bus: BusPlace,
) -> None:
    """Route OpenAI requests to the instances that have registered on the bus.

    A router needs no configuration per model: instances, tokenizers and block sets all come from
    the bus. Run as many as you like behind any load balancer; each prints one line of JSON with its
    addresses once it serves. With several workers, SIGHUP replaces them one by one.

    Example: `multiplane router --nats nats://nats:4222 --port 8000`
    """
    from controlplane.core.plane import PlaneConfig
    from controlplane.core.policies import make_policy
    from router.config import RouterConfig
    from router.limits import MIB, ServerLimits

    set_up_logs(log_level)
    parameters = _parameters(policy_option or [])
    try:
        make_policy(policy, **parameters)
    except ValueError as error:
        raise UsageError(f"--policy: {error}") from error
    plane = PlaneConfig(
        policy=policy,
        policy_parameters=parameters,
        batch_cap=batch_cap,
        stale_s=stale_s,
        promise_s=promise_s,
        audit_candidates=audit_candidates,
    )
    queueing = queue_config(
        queue,
        batch_cap,
        k=queue_k,
        band_s=queue_band_s,
        hold_s_max=queue_hold_s,
        requests_max=queue_requests_max,
        wait_s_max=queue_wait_s_max,
    )
    config = RouterConfig(
        bus_url=bus.url,
        bus_options=bus.options,
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=_admin_port(port) if admin_port is None else admin_port,
        router_id=router_id,
        reuse_port=reuse_port,
        plane=plane,
        forget_model_s=forget_model_s,
        server=ServerLimits(body_bytes_max=body_mib_max * MIB),
        queue=queueing,
        coalesce=coalesce_config(coalesce, coalesce_tokens),
        stop_grace_s=stop_grace_s,
        access_log=access_log,
        otlp_endpoint=otlp_endpoint,
        otlp_share=otlp_share,
        keys_path=_path(api_keys),
        tenants_path=_path(tenants),
        engine_key_path=_path(engine_key_file),
        cors_origins=tuple(cors_origin or ()),
        tls_cert_path=_path(tls_cert),
        tls_key_path=_path(tls_key),
    )
    if workers > 1:
        _check_shared(config)
    _check_files(config)
    _check_ports(config)
    if workers > 1:
        raise typer.Exit(_run_workers(config, workers, log_level))
    raise typer.Exit(_run_one(config))


def _admin_port(port: int) -> int:
    """Return the operators' port that goes with a port for clients, so that two routers differ."""
    return port + 1 if 0 < port < PORT_MAX else 0


def _parameters(options: list[str]) -> dict[str, float]:
    parameters: dict[str, float] = {}
    for option in options:
        name, equals, value = option.partition("=")
        try:
            parameters[name] = float(value)
        except ValueError:
            raise UsageError(f"--policy-option {option}: not NAME=NUMBER") from None
        if not equals:
            raise UsageError(f"--policy-option {option}: not NAME=NUMBER")
    return parameters


def _path(path: Path | None) -> str:
    return "" if path is None else str(path)


def _check_files(config: RouterConfig) -> None:
    """Try what the configuration names, so that a mistake is told before anything starts.

    Raises:
        UsageError: a file cannot be used; says which and why.
    """
    if config.otlp_endpoint:
        try:
            import router.tracing  # noqa: F401
        except ModuleNotFoundError as error:
            raise UsageError(
                f"--otlp-endpoint needs {error.name}: pip install 'multiplane[tracing]'"
            ) from error
    if config.tls_key_path and not config.tls_cert_path:
        raise UsageError("--tls-key needs --tls-cert")
    if config.tls_cert_path:
        key = config.tls_key_path
        check_identity(Path(config.tls_cert_path), Path(key) if key else None)
    _check_callers(config)
    if config.engine_key_path:
        read_key("--engine-key-file", Path(config.engine_key_path))
    if config.access_log not in ("", "-"):
        check_writable("--access-log", Path(config.access_log))


def _check_callers(config: RouterConfig) -> None:
    """See that the files of keys and tenants can be used. Raises UsageError."""
    from router.access import Access, FilesError

    try:
        Access(config.keys_path, config.tenants_path).load(0.0)
    except FilesError as error:
        mistakes = []
        for problem in error.problems:
            flag, wanted = "--api-keys", "a file of API keys, `KEY TENANT` a line"
            if problem.path != config.keys_path:
                flag, wanted = "--tenants", "a TOML file of tables [tenants.NAME]"
            mistakes.append(f"{flag} {problem}; give {wanted}")
        raise UsageError("; ".join(mistakes)) from error


def _check_shared(config: RouterConfig) -> None:
    """Raise UsageError if several processes cannot share the port."""
    if not config.port:
        raise UsageError("--workers needs a --port to share; 0 would give each its own")


def _check_ports(config: RouterConfig) -> None:
    """See that the ports can be had, so that a mistake is told by its flag. Raises UsageError."""
    if not config.reuse_port:
        require_port("--port", config.host, config.port)
    hint = "; give another --admin-port: 0 takes a free one, the default is the one after --port"
    require_port("--admin-port", config.admin_host, config.admin_port, hint)


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _run_one(config: RouterConfig) -> int:
    from router.main import RouterProcess, run_router

    def started(process: RouterProcess) -> None:
        _say(
            {
                "router": process.router_id,
                "address": "{}:{}".format(*process.address),
                "admin": "{}:{}".format(*process.admin_address),
            }
        )

    return run_router(config, started)


def _run_workers(config: RouterConfig, workers: int, log_level: str) -> int:
    from router.supervised import run_workers
    from router.supervisor import Supervisor

    def started(supervisor: Supervisor, admin: tuple[str, int]) -> None:
        ready = [place.worker.ready for place in supervisor.places if place.worker is not None]
        _say(
            {
                "router": config.router_id or ready[0].router_id,
                "address": "{}:{}".format(*ready[0].address),
                "admin": "{}:{}".format(*admin),
                "workers": [each.router_id for each in ready],
            }
        )

    return run_workers(config, workers, log_level, started)
