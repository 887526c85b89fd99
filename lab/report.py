"""What replays came to, as files: numbers, pictures, and one page that holds everything.

The page is a single file: pictures are inside, nothing is fetched. It reads in light and in dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lab.replay_metrics import Metrics, Range, over_seeds
from lab.replay_result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_MAX = 8
"""Policies whose instances are drawn one by one: more would be too small to read."""


class Missing(Exception):
    """A library that reports need is not installed."""


class Case(msgspec.Struct, frozen=True):
    """Runs to be compared: one trace at one load, several policies, one or more seeds.

    Attributes:
        traffic: what came; cases of the same traffic differ in load.
        runs: (result, its numbers), by policy and seed.
        note: what else is to be said of them.
        tenants: the runs' numbers for each tenant's requests alone; empty where nobody is named.
    """

    title: str
    traffic: str
    runs: tuple[tuple[Result, Metrics], ...]
    note: str = ""
    tenants: tuple[Metrics, ...] = ()

    @property
    def rows(self) -> list[Metrics]:
        """The numbers of all runs, and of each tenant after them."""
        return [*(row for _, row in self.runs), *self.tenants]

    @property
    def shown(self) -> list[Result]:
        """The first seed's results, a policy each."""
        first: dict[str, Result] = {}
        for result, _ in self.runs:
            first.setdefault(result.policy, result)
        return list(first.values())


class Column(msgspec.Struct, frozen=True):
    """A column of the tables.

    Attributes:
        better: −1 where less is better, 1 where more is, 0 where neither.
    """

    name: str
    value: Callable[[Metrics], float | None]
    form: str
    better: int = -1


COLUMNS = (
    Column("TTFT, s", lambda row: row.ttft_s[0], ".3f"),
    Column("p50", lambda row: row.ttft_s[1], ".3f"),
    Column("p99", lambda row: row.ttft_s[3], ".2f"),
    Column("TPOT, ms", lambda row: row.tpot_s[0] * 1e3, ".1f"),
    Column("p99", lambda row: row.tpot_s[3] * 1e3, ".1f"),
    Column("hits", lambda row: row.hit_rate, ".1%", 1),
    Column("balance", lambda row: row.balance, ".2f"),
    Column("busy", lambda row: row.busy, ".0%"),
    Column("req/s", lambda row: row.served_rps, ".2f", 1),
    Column("wait, s", lambda row: row.wait_s and row.wait_s[0], ".3f"),
    Column("wait p99", lambda row: row.wait_s and row.wait_s[3], ".2f"),
    Column("shed", lambda row: row.shed_rate, ".1%"),
    Column("in time", lambda row: row.in_time_rate, ".1%", 1),
    Column("goodput/s", lambda row: row.goodput_rps, ".2f", 1),
)


def columns_of(case: Case) -> list[Column]:
    """Return the columns that say something of a case: no waits where nobody queues."""
    rows = case.rows
    return [each for each in COLUMNS if any(each.value(row) is not None for row in rows)]


def _range(column: Column, rows: Sequence[Metrics]) -> Range:
    """Return a column's range over seeds; NaN where a row has no such number."""
    values = [column.value(row) for row in rows]
    return over_seeds([math.nan if value is None else value for value in values])


def by_policy(rows: Iterable[Metrics]) -> dict[str, list[Metrics]]:
    """Return rows by policy, seeds together, in order of appearance."""
    found: dict[str, list[Metrics]] = {}
    for row in rows:
        found.setdefault(row.policy, []).append(row)
    return found


def cell(column: Column, rows: Sequence[Metrics]) -> tuple[str, str]:
    """Return a column's mean over seeds for one policy, and its spread; empty for one seed."""
    found = _range(column, rows)
    if math.isnan(found.mean):
        return "–", ""  # no request had one, as no answer of a single token has a TPOT
    text = format(found.mean, column.form)
    if len(rows) == 1:
        return text, ""
    spread = max(found.most - found.mean, found.mean - found.least)
    return text, f"±{format(spread, column.form)}"


def check_installed() -> None:
    """Make sure that a report can be written, before a replay of minutes ends without one.

    Raises:
        Missing: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise Missing("--out needs matplotlib: pip install 'multiplane[lab]'")


def write(cases: Sequence[Case], folder: Path, command: str) -> Path:
    """Write numbers, pictures and the page; return the page's path.

    Raises:
        Missing: matplotlib is not installed.
    """
    check_installed()
    from lab import report_plots as plots

    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for case in cases for row in case.rows]
    (folder / "metrics.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    sections: list[str] = []

    def draw(name: str, title: str, figure: Figure) -> str:
        (folder / f"{name}.png").write_bytes(plots.png(figure))
        return f"<figure>{plots.svg(figure)}<figcaption>{html.escape(title)}</figcaption></figure>"

    for traffic in dict.fromkeys(case.traffic for case in cases):
        sweep = [case for case in cases if case.traffic == traffic]
        if len(sweep) > 1:
            figure = plots.against_load([[row for _, row in case.runs] for case in sweep])
            picture = draw(f"load-{traffic}", "Latency and hits against load", figure)
            sections.append(f"<h2>{html.escape(traffic)}: against load</h2>{picture}")
    for number, case in enumerate(cases):
        shown = case.shown
        drawn = [
            ("cdf", "How TTFT and TPOT are distributed", plots.cdfs(shown)),
            ("queues", "How even the load is, and how much there is", plots.queues(shown)),
            ("balance", "Requests on each instance", plots.balance(shown[:SHOWN_MAX])),
            ("decisions", "Every decision", plots.decisions(shown[:SHOWN_MAX])),
        ]
        pictures = "".join(draw(f"{name}-{number}", title, fig) for name, title, fig in drawn)
        note = f"<p>{html.escape(case.note)}</p>" if case.note else ""
        sections.append(f"<h2>{html.escape(case.title)}</h2>{_table(case)}{note}{pictures}")
    page = folder / "report.html"
    text = _PAGE.replace("{command}", html.escape(command)).replace("{body}", "".join(sections))
    page.write_text(text, encoding="utf-8")
    return page


def _table(case: Case) -> str:
    """Return the numbers of a case as a table; the best of each column stands out."""
    policies = by_policy(row for _, row in case.runs)
    columns = columns_of(case)
    heads = "".join(f"<th>{html.escape(column.name)}</th>" for column in columns)
    best = {}
    for place, column in enumerate(columns):
        means = {name: _range(column, own).mean for name, own in policies.items()}
        best[place] = (max if column.better > 0 else min)(means, key=lambda name: means[name])
    lines = []
    for policy, own in by_policy(case.rows).items():
        cells = "".join(
            f"<td{' class=best' if best[place] == policy else ''}>{_cell(column, own)}</td>"
            for place, column in enumerate(columns)
        )
        lines.append(f"<tr><th>{html.escape(policy)}</th>{cells}</tr>")
    return f"<table><tr><th>policy</th>{heads}</tr>{''.join(lines)}</table>"


def _cell(column: Column, rows: Sequence[Metrics]) -> str:
    text, spread = cell(column, rows)
    return f"{text} <small>{spread}</small>" if spread else text


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Multiplane: replays</title>
<style>
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1d2430; --soft: #667080; --line: #d8dde5; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #dfe5ee; --soft: #98a2b3; --line: #343b46; }
}
body { background: var(--page); color: var(--ink); margin: 2rem auto; padding: 0 1rem;
  max-width: 70rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
code { background: color-mix(in srgb, var(--soft) 18%, transparent); padding: .1rem .35rem;
  border-radius: 4px; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
th, td { padding: .25rem .45rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-weight: normal; }
tr:first-child th { color: var(--soft); } th:first-child { text-align: left; }
small { color: var(--soft); font-weight: normal; }
.best { font-weight: 600; color: color-mix(in srgb, #1a9850 75%, var(--ink)); }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .9rem; }
</style></head><body>
<h1>Replays</h1>
<p>Made by <code>{command}</code>. TTFT: time to first token; TPOT: mean time a token after it;
balance: the largest batch over the mean one, over time; busy: share of time in which engines step;
wait: time in routers' queues; shed: share refused; in time: share answered within its budget;
goodput: such answers a second.
With several seeds: mean ± the largest difference from it. Green: best mean of a column.</p>
{body}
</body></html>
"""
