"""What the shell may complete from the bus: instances and models, if it answers at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import typer

from controlplane.bus import connect
from controlplane.bus.protocol import BusError
from controlplane.cli.errors import UsageError
from controlplane.cli.options import nats_options, operators_bus
from schemas import subjects
from schemas.codec import RemoteError

_WITHIN_S = 1.0


def complete_instance(context: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of registered instances that begin so."""
    return _complete(context, incomplete, lambda model, instance: instance)


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of models with instances that begin so."""
    return _complete(context, incomplete, lambda model, instance: model)


def _complete(
    context: typer.Context, incomplete: str, part: Callable[[str, str], str]
) -> list[str]:
    try:
        keys = asyncio.run(_keys(context))
    except (BusError, UsageError, OSError):
        return []  # no completion is better than a message in the middle of somebody's line
    found = set()
    for key in keys:
        try:
            found.add(part(*subjects.parse_key(key)))
        except RemoteError:
            continue
    return sorted(name for name in found if name.startswith(incomplete))


async def _keys(context: typer.Context) -> list[str]:
    """Return the keys of the instances' bucket."""

    def given(name: str) -> str | None:
        return context.params.get(name) or os.environ.get(f"MULTIPLANE_{name.upper()}")

    def path(name: str) -> Path | None:
        value = given(name)
        return None if value is None else Path(value)

    options = nats_options(given("nats_user"), path("nats_password_file"), path("nats_ca"))
    url = given("nats") or operators_bus()[0]
    bus = await connect(url, name="completion", options=options, wait_s=_WITHIN_S)
    try:
        return await (await bus.bucket(subjects.INSTANCES)).keys()
    finally:
        await bus.close()
