"""Draws the picture that `lab.view` keeps: a panel that fits its terminal, or one plain line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lab.view import BusView, InstanceView
from schemas import bus as messages

_WIDE = 110
_FRAME_LINES = 5  # the panel's two edges, the state, the heads of the columns, an empty line
_DECISIONS_MIN = 2
_BAR_MAX = 12
_STYLES = {"ready": "green", "dead": "bold red", "gone": "red", "silent": "red"}
_COLUMNS = ("batch", "queued", "run+wait", "KV", "blocks", "hits", "TTFT")
_NARROW = 74
_NARROW_COLUMNS = ("batch", "queued", "TTFT")


def draw(
    view: BusView, title: str, dead: Collection[str], *, size: tuple[int, int], now_s: float
) -> Panel:
    """Return the picture, no larger than it may be.

    Args:
        dead: processes that have ended, by name.
        size: columns and lines of the terminal.
    """
    width, height = size
    notes = _notes(view, dead)
    room = max(height - _FRAME_LINES - len(notes), 2)
    names = sorted(view.instances, key=lambda name: (view.state_of(name, dead, now_s), name))
    shown = names[: max(room - _DECISIONS_MIN, 1)]
    if len(shown) < len(names):
        shown = shown[:-1]  # its line tells how many are left out
    left_out = len(names) - len(shown)
    lines = list(view.last)[-max(room - len(shown) - bool(left_out), 0) :][-6:]
    parts: list[Table | Text] = [_line(_summary(view, dead, now_s), "")]
    parts += [_line(note, "yellow") for note in notes]
    parts.append(_table(view, sorted(shown), dead, now_s, width))
    if left_out:
        parts.append(_line(f"… and {left_out} more", "dim"))
    parts.append(Text())
    parts += [_line(line, "dim") for line in lines or ["no decisions yet"]]
    style = "cyan" if view.connected and not dead else "red"
    return Panel(Group(*parts), title=Text(title), border_style=style, width=width)


def plain(view: BusView, dead: Collection[str], now_s: float) -> str:
    """Return the picture as one line of a log."""
    instances = " ".join(
        f"{name}:{view.state_of(name, dead, now_s)}/{each.batch}"
        for name, each in sorted(view.instances.items())
    )
    return f"{_summary(view, dead, now_s)} · {instances}"


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _summary(view: BusView, dead: Collection[str], now_s: float) -> str:
    """Return the state of everything in one line."""
    lost_s = view.bus_lost_s(now_s)
    states = Counter(view.state_of(name, dead, now_s) for name in view.instances)
    flow, routers = view.flow(now_s), view.routers_heard(now_s)
    parts = [
        "bus ok" if lost_s is None else f"BUS DOWN for {lost_s:.0f} s",
        f"{routers} router{'s' if routers != 1 else ''}",
        ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no instance",
        f"{view.decisions:,} decisions",
        f"{flow.per_s:.1f}/s",
    ]
    if flow.hit_rate is not None:
        parts.append(f"hits {flow.hit_rate:.0%}")
    if flow.ttft_s is not None:
        parts.append(f"TTFT {_milliseconds(flow.ttft_s)}")
    return " · ".join(parts)


def _notes(view: BusView, dead: Collection[str]) -> list[str]:
    """Return what an onlooker should know, a line each."""
    notes = []
    if dead:
        notes.append(f"DEAD: {', '.join(sorted(dead))}")
    said = []
    hotspots = 0
    for statement in view.standing.values():
        if isinstance(statement, messages.HotspotRaised):
            hotspots += 1
        elif isinstance(statement, messages.PolicyOverride):
            said.append(f"policy {statement.policy} by {statement.by or 'the detector'}")
        else:
            word = "drained" if isinstance(statement, messages.Drain) else "blacklisted"
            said.append(f"{statement.instance_id} {word} by {statement.by or 'an operator'}")
    if hotspots:
        said.append(f"{hotspots} hotspots")
    if said:
        notes.append("; ".join(said))
    return notes


def _table(
    view: BusView, names: list[str], dead: Collection[str], now_s: float, width: int
) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    table.add_column("instance", no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    table.add_column("state", no_wrap=True, min_width=8)
    columns: tuple[str, ...] = _COLUMNS if width >= _NARROW else _NARROW_COLUMNS
    if width >= _WIDE:
        columns += ("requests",)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("", no_wrap=True, width=_BAR_MAX)
    for name in names:
        each = view.instances[name]
        state = view.state_of(name, dead, now_s)
        cells = _cells(view, name, each, now_s)
        styled = Text(state, style=_STYLES.get(state, "yellow"))
        bar = "▇" * min(each.batch, _BAR_MAX) if width >= _WIDE else ""
        table.add_row(Text(name), styled, *(cells[column] for column in columns), bar)
    return table


def _cells(view: BusView, name: str, each: InstanceView, now_s: float) -> dict[str, str]:
    """Return what stands in an instance's row, by column."""
    flow = view.flow(now_s, name)
    return {
        "batch": str(each.batch),
        "queued": f"{each.queued:,}",
        "run+wait": f"{each.running}+{each.waiting}",
        "KV": f"{each.kv_usage:.0%}",
        "blocks": f"{each.blocks:,}",
        "hits": "–" if flow.hit_rate is None else f"{flow.hit_rate:.0%}",
        "TTFT": "–" if flow.ttft_s is None else _milliseconds(flow.ttft_s),
        "requests": f"{each.routed:,}",
    }


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
