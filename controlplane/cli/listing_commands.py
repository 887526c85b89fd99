"""`multiplane instances`, `routers`, `prefixes`, and what stands: lists of what is on the bus."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import typer

from controlplane.bus.protocol import Bus
from controlplane.cli.operator_commands import blacklist_app, policy_app, run_operator
from controlplane.cli.options import BusPlace, Json, with_bus
from controlplane.cli.tables import ago, printable, show
from controlplane.operator import Operator
from controlplane.operator_view import (
    Standing,
    described,
    instance_rows,
    read_instances,
    read_prefixes,
    read_routers,
    read_standing,
    try_doubles,
)
from schemas.bus import HotspotCleared, HotspotRaised, PolicyOverride

_NO_INSTANCE = (
    "no instance has registered: start `multiplane sidecar` beside each engine, with the same "
    "--nats; `multiplane doctor` looks further"
)
_NO_ROUTER = (
    "no router says where it is: start `multiplane router` with the same --nats "
    "(it says so once an instance has registered)"
)
_PREFIX_COLUMNS = (
    *("TENANT", "HANDLE", "MODEL", "TOKENS", "BLOCKS"),
    *("REFERENCES", "IDLE", "ENDS", "OPTIONS"),
)


@with_bus
def instances(json: Json = False, *, bus: BusPlace) -> None:
    """List the registered instances: what state they are in, and what stands out.

    An instance is *draining* or *blacklisted* because somebody said so, and *silent* when its
    sidecar was not heard for some heartbeats. Notes say who, why and how to mend it.

    Example: `multiplane instances --json | jq '.rows[].url'`
    """

    async def work(_: Operator, nats: Bus) -> int:
        records = await read_instances(nats)
        standing = await read_standing(nats)
        now_wall_s = time.time()
        doubles = await try_doubles(nats, now_wall_s)
        rows = instance_rows(records.rows, standing.rows, doubles, now_wall_s)
        show(
            ("MODEL", "INSTANCE", "STATE", "URL", "HEARD", "BLOCK", "BLOCKS", "ENGINE", "NOTES"),
            [
                (
                    row.model,
                    row.instance,
                    row.state,
                    row.url,
                    ago(row.heard_s),
                    str(row.block_size),
                    str(row.num_blocks or "?"),
                    row.engine,
                    "; ".join(row.notes),
                )
                for row in rows
            ],
            data=rows,
            unreadable=(*records.unreadable, *standing.unreadable),
            json=json,
            empty=_NO_INSTANCE,
        )
        if not json:
            _tell_overrides(standing.rows, now_wall_s)
        return 0

    run_operator(bus, work)


def _tell_overrides(standing: Sequence[Standing], now_wall_s: float) -> None:
    for each in standing:
        if isinstance(each.statement, PolicyOverride) and each.in_force(now_wall_s):
            typer.echo(printable(f"{each.model}: {described(each, now_wall_s)}"), err=True)


@with_bus
def routers(json: Json = False, *, bus: BusPlace) -> None:
    """List the routers, and where each answers clients and operators.

    Example: `multiplane routers`
    """

    async def work(_: Operator, nats: Bus) -> int:
        found = await read_routers(nats)
        now_wall_s = time.time()
        show(
            ("MODEL", "ROUTER", "CLIENTS", "OPERATORS", "HEARD"),
            [
                (
                    entry.model,
                    entry.lease.router_id,
                    entry.lease.address,
                    entry.lease.admin,
                    ago(now_wall_s - entry.lease.sent_wall_s)
                    + (" (lost)" if entry.lost(now_wall_s) else ""),
                )
                for entry in found.rows
            ],
            data=[
                {
                    "model": entry.model,
                    "lost": entry.lost(now_wall_s),
                    **msgspec.to_builtins(entry.lease),
                }
                for entry in found.rows
            ],
            unreadable=found.unreadable,
            json=json,
            empty=_NO_ROUTER,
        )
        return 0

    run_operator(bus, work)


@with_bus
def prefixes(json: Json = False, *, bus: BusPlace) -> None:
    """List the prefixes that callers have registered, of all tenants; nothing of their text.

    Uses are told late, and not each: a prefix was idle for so long at most.

    Example: `multiplane prefixes --json | jq '.rows[] | select(.tenant == "chat")'`
    """

    async def work(_: Operator, nats: Bus) -> int:
        found = await read_prefixes(nats)
        show(
            _PREFIX_COLUMNS,
            [
                (
                    row.tenant,
                    row.id,
                    row.model,
                    str(row.tokens),
                    str(row.blocks),
                    str(row.references),
                    f"{row.idle_s:.0f} s",
                    f"in {row.ends_s:.0f} s",
                    ", ".join(name for name in ("pin", "spread") if getattr(row, name)),
                )
                for row in found.rows
            ],
            data=found.rows,
            unreadable=found.unreadable,
            json=json,
            empty="no prefix is registered: callers do that with POST /v1/prefixes",
        )
        return 0

    run_operator(bus, work)


@blacklist_app.command("list")
@with_bus
def blacklist_list(json: Json = False, *, bus: BusPlace) -> None:
    """List what keeps requests from instances: blacklists, drains, and detectors' hotspots.

    Example: `multiplane blacklist list`
    """

    def wanted(standing: Standing) -> bool:
        return not isinstance(standing.statement, PolicyOverride | HotspotCleared)

    run_operator(bus, lambda _, nats: _list_standing(nats, wanted, json=json))


@policy_app.command("list")
@with_bus
def policy_list(json: Json = False, *, bus: BusPlace) -> None:
    """List the policy overrides in force.

    Example: `multiplane policy list`
    """

    def wanted(standing: Standing) -> bool:
        return isinstance(standing.statement, PolicyOverride)

    run_operator(bus, lambda _, nats: _list_standing(nats, wanted, json=json))


async def _list_standing(nats: Bus, wanted: Callable[[Standing], bool], *, json: bool) -> int:
    """Print the statements in force that are wanted; the exit status."""
    found = await read_standing(nats)
    now_wall_s = time.time()
    rows = [each for each in found.rows if wanted(each) and each.in_force(now_wall_s)]
    show(
        ("MODEL", "WHAT", "ABOUT", "UNTIL", "BY", "REASON"),
        [_cells(each, now_wall_s) for each in rows],
        data=[
            {
                "model": each.model,
                "name": each.name,
                "until_wall_s": each.until_wall_s,
                "statement": each.statement,
            }
            for each in rows
        ],
        unreadable=found.unreadable,
        json=json,
        empty="nothing is in force",
    )
    return 0


def _cells(standing: Standing, now_wall_s: float) -> tuple[str, ...]:
    statement = standing.statement
    what = standing.name.partition("-")[0]
    if isinstance(statement, HotspotRaised):
        about = f"class {statement.key:016x}: {', '.join(statement.instances)}"
    elif isinstance(statement, PolicyOverride):
        about = statement.policy
    else:
        about = getattr(statement, "instance_id", "")
    return (
        standing.model,
        what,
        about,
        _until(standing.until_wall_s, now_wall_s),
        getattr(statement, "by", "") or "detector",
        statement.reason,
    )


def _until(until_wall_s: float | None, now_wall_s: float) -> str:
    """Return a moment as a clock shows it, and how far it is."""
    if until_wall_s is None:
        return "taken back"
    try:
        clock = time.strftime("%H:%M:%S", time.localtime(until_wall_s))
    except (OverflowError, ValueError, OSError):
        return "far away"
    return f"{clock}, in {until_wall_s - now_wall_s:.0f} s"
