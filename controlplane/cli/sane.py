"""What every command refuses: numbers that are not finite or too large, and text that is none.

`nan` passes every minimum and maximum there is. Integers of Python's have no end, those in messages
do (`schemas.message.Count`). Bytes that are no UTF-8 come from the shell as
characters that nothing on the bus can carry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import typer

from controlplane.cli.errors import UsageError

INT_MAX: Final = 1 << 53


def require_sane(app: typer.Typer) -> None:
    """Let every command below refuse such arguments, by the name of the flag."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _checked(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            require_sane(group.typer_instance)


def _checked(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            problem = _problem(value)
            if problem:
                flag = name.strip("_").replace("_", "-")
                raise UsageError(f"--{flag} {value!r}: {problem}")
        return command(*args, **kwargs)

    return checked


def _problem(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    if isinstance(value, int) and abs(value) > INT_MAX:
        return f"give at most {INT_MAX}"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "this is no UTF-8 text"
    return ""
