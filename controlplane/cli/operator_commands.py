"""`multiplane drain`, `blacklist` and `policy`: what an operator says to the plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from controlplane.bus import connect
from controlplane.bus.protocol import BusError
from controlplane.cli.errors import UsageError
from controlplane.cli.options import BusPlace, with_bus
from controlplane.core.policies import POLICIES
from controlplane.operator import Operator

Reason = Annotated[str, typer.Option(help="Why, for the audit log.")]
Ttl = Annotated[
    float | None, typer.Option("--ttl-s", min=1.0, help="Ends by itself after this long.")
]
InstanceId = Annotated[str, typer.Argument(help="Instance, as `multiplane instances` lists it.")]

_BEATS_MISSED_MAX = 3

blacklist_app = typer.Typer(help="Keep requests from instances for a while.", no_args_is_help=True)
policy_app = typer.Typer(help="Override the routers' policy.", no_args_is_help=True)


def _with_operator(place: BusPlace, work: Callable[[Operator], Awaitable[None]]) -> None:
    async def run() -> None:
        bus = await connect(place.url, name="operator", options=place.options)
        try:
            if not bus.connected:
                raise BusError(
                    f"no NATS server answers at {place.url}; start one, or correct --nats"
                )
            await work(Operator(bus))
        finally:
            await bus.close()

    asyncio.run(run())


@with_bus
def drain(
    instance: InstanceId,
    off: Annotated[bool, typer.Option("--off", help="Take it back.")] = False,
    reason: Reason = "",
    *,
    bus: BusPlace,
) -> None:
    """Send no new requests to an instance; running ones finish."""

    async def work(operator: Operator) -> None:
        await operator.drain(instance, on=not off, reason=reason)
        typer.echo(f"{instance} is {'taken back' if off else 'draining'}")

    _with_operator(bus, work)


@with_bus
def instances(
    *,
    bus: BusPlace,
) -> None:
    """List the registered instances."""
    from rich.console import Console
    from rich.table import Table

    async def work(operator: Operator) -> None:
        table = Table("model", "instance", "url", "state", "block", "blocks", "engine")
        for record in await operator.instances():
            table.add_row(
                record.model,
                record.instance_id,
                record.url,
                record.state,
                str(record.block_size),
                str(record.num_blocks or "?"),
                record.engine_version,
            )
        Console().print(table)

    _with_operator(bus, work)


@with_bus
def routers(
    *,
    bus: BusPlace,
) -> None:
    """List the routers, and where each answers clients and operators."""
    from rich.console import Console
    from rich.table import Table

    async def work(operator: Operator) -> None:
        table = Table("model", "router", "clients", "operators", "last heard")
        for entry in await operator.routers():
            lease = entry.lease
            silent_s = time.time() - lease.sent_wall_s
            lost = " (lost)" if silent_s > _BEATS_MISSED_MAX * lease.heartbeat_s else ""
            heard = f"{silent_s:.0f} s ago{lost}"
            table.add_row(entry.model, lease.router_id, lease.address, lease.admin, heard)
        Console().print(table)

    _with_operator(bus, work)


@blacklist_app.command("add")
@with_bus
def blacklist_add(
    instance: InstanceId,
    ttl_s: Ttl = None,
    reason: Reason = "",
    *,
    bus: BusPlace,
) -> None:
    """Keep requests from an instance, unless no other is left."""

    async def work(operator: Operator) -> None:
        await operator.blacklist(instance, on=True, ttl_s=ttl_s, reason=reason)
        typer.echo(f"{instance} is blacklisted" + (f" for {ttl_s:g} s" if ttl_s else ""))

    _with_operator(bus, work)


@blacklist_app.command("remove")
@with_bus
def blacklist_remove(
    instance: InstanceId,
    *,
    bus: BusPlace,
) -> None:
    """Take an instance back."""

    async def work(operator: Operator) -> None:
        await operator.blacklist(instance, on=False, ttl_s=None)
        typer.echo(f"{instance} is taken back")

    _with_operator(bus, work)


@blacklist_app.command("list")
@with_bus
def blacklist_list(
    *,
    bus: BusPlace,
) -> None:
    """List what operators and detectors have said that is still in force."""

    async def work(operator: Operator) -> None:
        for standing in await operator.standing():
            typer.echo(f"{standing.model}: {standing.statement}")

    _with_operator(bus, work)


@policy_app.command("set")
@with_bus
def policy_set(
    model: Annotated[str, typer.Argument(help="Model id on the bus.")],
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    ttl_s: Ttl = None,
    reason: Reason = "",
    *,
    bus: BusPlace,
) -> None:
    """Make every router use a policy for a model."""
    if policy not in POLICIES:
        raise UsageError(f"POLICY {policy}: choose one of {', '.join(sorted(POLICIES))}")

    async def work(operator: Operator) -> None:
        await operator.policy(model, policy, ttl_s=ttl_s, reason=reason)
        typer.echo(f"{model} is routed by {policy}" + (f" for {ttl_s:g} s" if ttl_s else ""))

    _with_operator(bus, work)


@policy_app.command("clear")
@with_bus
def policy_clear(
    model: Annotated[str, typer.Argument(help="Model id on the bus.")],
    *,
    bus: BusPlace,
) -> None:
    """Let every router use its configured policy again."""

    async def work(operator: Operator) -> None:
        await operator.policy(model, "")
        typer.echo(f"{model} is routed by the configured policy")

    _with_operator(bus, work)
