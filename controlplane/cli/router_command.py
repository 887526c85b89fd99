"""`multiplane router`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Annotated

import typer

from controlplane.cli.errors import UsageError
from controlplane.cli.options import (
    DEFAULT_NATS,
    LogLevel,
    NatsCa,
    NatsPasswordFile,
    NatsUrl,
    NatsUser,
    nats_options,
    set_up_logs,
)

DECISION = "How it decides"
PROCESS = "How it runs"


def router(
    host: Annotated[str, typer.Option(help="Address for clients.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, typer.Option(help="Port for clients; 0 takes a free one.")] = 8000,
    nats: NatsUrl = DEFAULT_NATS,
    nats_user: NatsUser = None,
    nats_password_file: NatsPasswordFile = None,
    nats_ca: NatsCa = None,
    policy: Annotated[
        str,
        typer.Option(
            help="multiplicative, round_robin, least_requests, linear, dynamo_cost or "
            "simulated_ttft.",
            rich_help_panel=DECISION,
        ),
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
    stale_s: Annotated[
        float,
        typer.Option(
            min=0.5,
            help="Silence after which an instance's blocks no longer count.",
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
    workers: Annotated[
        int,
        typer.Option(min=1, help="Router processes that share the port.", rich_help_panel=PROCESS),
    ] = 1,
    admin_host: Annotated[
        str, typer.Option(help="Address for metrics and debugging.", rich_help_panel=PROCESS)
    ] = "127.0.0.1",
    admin_port: Annotated[
        int,
        typer.Option(
            help="Port for metrics and debugging; further workers take the ports after it.",
            rich_help_panel=PROCESS,
        ),
    ] = 8001,
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
    access_log: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Write a line of JSON for every request; `-` for standard output.",
            rich_help_panel=PROCESS,
        ),
    ] = "",
    log_level: LogLevel = "info",
) -> None:
    """Route OpenAI requests to the instances that have registered on the bus.

    A router needs no configuration per model: instances, tokenizers and block sets all come from
    the bus. Run as many as you like behind any load balancer; each prints one line of JSON with its
    addresses once it serves.
    """
    from controlplane.core.plane import PlaneConfig
    from controlplane.core.policies import make_policy
    from router.config import RouterConfig

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
        audit_candidates=audit_candidates,
    )
    config = RouterConfig(
        bus_url=nats,
        bus_options=nats_options(nats_user, nats_password_file, nats_ca),
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        router_id=router_id,
        reuse_port=reuse_port,
        plane=plane,
        stop_grace_s=stop_grace_s,
        access_log=access_log,
    )
    if workers > 1 and not port:
        raise UsageError("--workers needs a --port to share; 0 would give each its own")
    raise typer.Exit(_run_workers(config, workers) if workers > 1 else _run_one(config))


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


def _run_one(config: object) -> int:
    from router.config import RouterConfig
    from router.main import RouterProcess, run_router

    assert isinstance(config, RouterConfig)

    def started(process: RouterProcess) -> None:
        line = {
            "router": process.router_id,
            "address": "{}:{}".format(*process.address),
            "admin": "{}:{}".format(*process.admin_address),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    return run_router(config, started)


def _run_workers(config: object, workers: int) -> int:
    """Fork a router process per worker; the first that ends takes the others with it."""
    import msgspec

    from router.config import RouterConfig

    assert isinstance(config, RouterConfig)
    children: dict[int, int] = {}
    for number in range(workers):
        child = os.fork()
        if child == 0:
            name = f"{config.router_id}-{number}" if config.router_id else ""
            admin_port = config.admin_port + number if config.admin_port else 0
            mine = msgspec.structs.replace(
                config, router_id=name, admin_port=admin_port, reuse_port=True
            )
            os._exit(_run_one(mine))
        children[child] = number

    def pass_on(signum: int, _: object) -> None:
        for pid in children:
            os.kill(pid, signum)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    status = 0
    while children:
        pid, code = os.wait()
        if children.pop(pid, None) is None:
            continue
        status = status or os.waitstatus_to_exitcode(code)
        pass_on(signal.SIGTERM, None)
    return abs(status)
