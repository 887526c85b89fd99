"""`multiplane drain`, `blacklist` and `policy`: what an operator says to the plane."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from controlplane.bus.protocol import Bus, BusError
from controlplane.cli.completion import complete_instance, complete_model
from controlplane.cli.errors import UsageError
from controlplane.cli.options import BusPlace, PolicyName, with_bus
from controlplane.operator import Operator
from controlplane.operator_wait import wait_until_idle

Reason = Annotated[str, typer.Option(help="Why, for the audit log and for `instances`.")]
Ttl = Annotated[
    float | None,
    typer.Option(
        "--ttl-s", min=1.0, max=1e9, help="Ends by itself after this long; by default not."
    ),
]
InstanceId = Annotated[
    str,
    typer.Argument(
        help="Instance, as `multiplane instances` lists it.", autocompletion=complete_instance
    ),
]
OfModel = Annotated[
    str,
    typer.Option(
        help="Its model, where two models have instances of that id.",
        autocompletion=complete_model,
    ),
]
Model = Annotated[str, typer.Argument(help="Model id on the bus.", autocompletion=complete_model)]

blacklist_app = typer.Typer(help="Keep requests from instances for a while.", no_args_is_help=True)
policy_app = typer.Typer(help="Override the routers' policy.", no_args_is_help=True)


def run_operator(place: BusPlace, work: Callable[[Operator, Bus], Awaitable[int]]) -> None:
    """Do something on the bus, and exit with its status."""

    async def run() -> int:
        async with place.opened("operator") as bus:
            return await work(Operator(bus), bus)

    status = asyncio.run(run())
    if status:
        raise typer.Exit(status)


@with_bus
def drain(
    instance: InstanceId,
    off: Annotated[bool, typer.Option("--off", help="Take it back.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once no request runs on it any more.")
    ] = False,
    within_s: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="With --wait: give up after this long, and exit with 1; never by default."
        ),
    ] = None,
    reason: Reason = "",
    model: OfModel = "",
    *,
    bus: BusPlace,
) -> None:
    """Send no new requests to an instance; those that run on it finish.

    Routers stop choosing it at once, and its caches stay as they are. It stays drained until
    `--off`, also across restarts of routers and of the instance itself. A drain is obeyed to the
    letter: where every instance of a model is drained, clients get a 503 that says so.

    Example: `multiplane drain engine-0 --wait --reason "new driver"`
    """
    if off and wait:
        raise UsageError("--off and --wait: an instance that is taken back is not waited for")
    if within_s is not None and not wait:
        raise UsageError("--within-s needs --wait")

    async def work(operator: Operator, nats: Bus) -> int:
        if off:
            return _taken_back(instance, await operator.drain(instance, on=False, model=model))
        record = await operator.find(instance, model)
        await operator.drain(instance, on=True, reason=reason, model=record.model)
        typer.echo(f"{instance} is draining; `multiplane drain {instance} --off` takes it back")
        if not await operator.others(record):
            typer.echo(
                f"warning: no other instance of {record.model} takes requests: clients get a 503 "
                "until one does",
                err=True,
            )
        return await _wait(nats, record.model, instance, within_s) if wait else 0

    run_operator(bus, work)


def _taken_back(instance: str, models: list[str]) -> int:
    if not models:
        typer.echo(f"nothing to take back: nothing of the kind stands for {instance}", err=True)
        return 1
    typer.echo(f"{instance} is taken back")
    return 0


async def _wait(nats: Bus, model: str, instance: str, within_s: float | None) -> int:
    def told(left: int) -> None:
        typer.echo(f"{left} running" if left else f"nothing runs on {instance} any more")

    if await wait_until_idle(nats, model, instance, told, within_s):
        return 0
    typer.echo(f"requests still run on {instance} after {within_s:g} s", err=True)
    return 1


@blacklist_app.command("add")
@with_bus
def blacklist_add(
    instance: InstanceId,
    ttl_s: Ttl = None,
    reason: Reason = "",
    model: OfModel = "",
    *,
    bus: BusPlace,
) -> None:
    """Keep requests from an instance, unless no other is left.

    Example: `multiplane blacklist add engine-0 --ttl-s 600 --reason "slow disk"`
    """

    async def work(operator: Operator, _: Bus) -> int:
        await operator.blacklist(instance, on=True, ttl_s=ttl_s, reason=reason, model=model)
        typer.echo(f"{instance} is blacklisted" + (f" for {ttl_s:g} s" if ttl_s else ""))
        return 0

    run_operator(bus, work)


@blacklist_app.command("remove")
@with_bus
def blacklist_remove(
    instance: InstanceId,
    model: OfModel = "",
    *,
    bus: BusPlace,
) -> None:
    """Take an instance back.

    Example: `multiplane blacklist remove engine-0`
    """

    async def work(operator: Operator, _: Bus) -> int:
        return _taken_back(instance, await operator.blacklist(instance, on=False, model=model))

    run_operator(bus, work)


@policy_app.command("set")
@with_bus
def policy_set(
    model: Model,
    policy: Annotated[PolicyName, typer.Argument(help="Name of the policy.")],
    ttl_s: Ttl = None,
    reason: Reason = "",
    *,
    bus: BusPlace,
) -> None:
    """Make every router use a policy for a model.

    Example: `multiplane policy set Qwen/Qwen3-8B round_robin --ttl-s 3600`
    """
    _check_model(model)

    async def work(operator: Operator, _: Bus) -> int:
        await operator.policy(model, policy, ttl_s=ttl_s, reason=reason)
        typer.echo(f"{model} is routed by {policy}" + (f" for {ttl_s:g} s" if ttl_s else ""))
        await _warn_of_unknown(operator, model)
        return 0

    run_operator(bus, work)


@policy_app.command("clear")
@with_bus
def policy_clear(
    model: Model,
    *,
    bus: BusPlace,
) -> None:
    """Let every router use its configured policy again.

    Example: `multiplane policy clear Qwen/Qwen3-8B`
    """
    _check_model(model)

    async def work(operator: Operator, _: Bus) -> int:
        await operator.policy(model, "")
        typer.echo(f"{model} is routed by the configured policy")
        await _warn_of_unknown(operator, model)
        return 0

    run_operator(bus, work)


def _check_model(model: str) -> None:
    if not model:
        raise UsageError("MODEL: give the id of a model, as `multiplane instances` lists it")


async def _warn_of_unknown(operator: Operator, model: str) -> None:
    try:
        models = await operator.models()
    except BusError:
        return  # it was said; that nobody can check it is no reason to fail
    if model not in models:
        known = ", ".join(models) or "none"
        typer.echo(
            f"warning: no instance of {model} is registered; models that have some: {known}",
            err=True,
        )
