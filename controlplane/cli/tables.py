"""Listings as people and programs want them: a table on a terminal, plain columns in a pipe, JSON.

What others wrote on the bus is shown as text and nothing else: no markup, no control characters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from controlplane.operator_view import Unreadable


def show(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    data: Sequence[Any],
    unreadable: Sequence[Unreadable] = (),
    json: bool = False,
    empty: str = "",
) -> None:
    """Print a listing.

    Args:
        data: the rows for `json`: anything that msgspec encodes.
        unreadable: entries to name on standard error; in JSON a list beside the rows.
        json: print one JSON object, `rows` and `unreadable`.
        empty: what to say on standard error where there are no rows.
    """
    if json:
        answer = {"rows": list(data), "unreadable": list(unreadable)}
        typer.echo(msgspec.json.encode(answer, enc_hook=str))
        return
    clean = [[printable(cell) for cell in row] for row in rows]
    if not rows:
        if empty:
            typer.echo(empty, err=True)
    elif sys.stdout.isatty():
        _draw(columns, clean)
    else:
        typer.echo("\n".join(_plain(columns, clean)))
    for entry in unreadable:
        said = f"unreadable entry {entry.key} in {entry.bucket}: {entry.why}"
        typer.echo(printable(said), err=True)


def printable(text: str) -> str:
    """Return text in which nothing moves the cursor or ends the line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def size(nbytes: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    if nbytes < 999.5:
        return f"{nbytes:.0f} B"
    for power, unit in enumerate(("kB", "MB", "GB"), 1):
        if nbytes < 999.5 * 1000**power:
            return _three_digits(nbytes / 1000**power, unit)
    return _three_digits(nbytes / 1e12, "TB")


def _three_digits(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def ago(seconds: float) -> str:
    """Return how long ago something was, in the unit that suits it."""
    for unit, unit_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return f"{max(seconds, 0.0):.0f} s ago"


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "blacklisted": "yellow",
    "starting": "yellow",
    "silent": "red",
    "stopped": "red",
}


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines in columns as wide as they must be, whatever the terminal is."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
