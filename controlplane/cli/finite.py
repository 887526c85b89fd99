"""Numbers on the command line are finite: `nan` passes every minimum and maximum there is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import typer

from controlplane.cli.errors import UsageError


def require_finite(app: typer.Typer) -> None:
    """Let every command below refuse numbers that are not finite, by the name of the flag."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _checked(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            require_finite(group.typer_instance)


def _checked(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if isinstance(value, float) and not math.isfinite(value):
                flag = name.strip("_").replace("_", "-")
                raise UsageError(f"--{flag} {value}: give a finite number")
        return command(*args, **kwargs)

    return checked
