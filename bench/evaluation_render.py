"""What an evaluation looks like: JSON, pictures, and the tables of docs/evaluation.md.

The document is prose with tables between pairs of marks; only what is between them is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from bench.evaluation_cells import Cell, Evaluation
from lab.replay_metrics import Metrics, Range

RESULTS = "results.json"
_MARKED = re.compile(r"(<!-- table: (?P<name>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_OURS = "multiplicative"


class Column(msgspec.Struct, frozen=True):
    """A column of the tables.

    Attributes:
        better: −1 where less is better, 1 where more is, 0 where neither.
    """

    name: str
    value: Callable[[Cell], Range]
    form: Callable[[float], str]
    better: int = -1


def _seconds(value: float) -> str:
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:.{digits}f}"


def _millis(value: float) -> str:
    return f"{value * 1e3:.1f}" if value < 0.1 else f"{value * 1e3:.0f}"


COLUMNS = (
    Column("TTFT mean, s", lambda cell: cell.ttft_mean_s, _seconds),
    Column("TTFT p99, s", lambda cell: cell.ttft_p99_s, _seconds),
    Column("TPOT mean, ms", lambda cell: cell.tpot_mean_s, _millis),
    Column("TPOT p99, ms", lambda cell: cell.tpot_p99_s, _millis),
    Column("hit rate", lambda cell: cell.hit_rate, lambda value: f"{value:.1%}", 1),
    Column("balance", lambda cell: cell.balance, lambda value: f"{value:.2f}"),
    Column("served/s", lambda cell: cell.served_rps, lambda value: f"{value:.1f}", 1),
)


def write(found: Evaluation, folder: Path) -> None:
    """Write numbers and pictures."""
    from lab import report_plots as plots

    folder.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.encode(found).replace(b"},{", b"},\n{")
    (folder / RESULTS).write_bytes(data + b"\n")
    for scenario in dict.fromkeys(cell.scenario for cell in found.main):
        sweep = against_load(found, scenario)
        (folder / f"load-{scenario}.png").write_bytes(plots.png(plots.against_load(sweep)))


def read(folder: Path) -> Evaluation:
    """Return the numbers that `write` wrote.

    Raises:
        OSError, msgspec.DecodeError: they are not there, or others.
    """
    return msgspec.json.decode((folder / RESULTS).read_bytes(), type=Evaluation)


def against_load(found: Evaluation, scenario: str) -> list[list[Metrics]]:
    """Return the rows of each load, of the policies that were run at all of them."""
    cells = [cell for cell in (*found.main, *found.swept) if cell.scenario == scenario]
    loads = sorted({cell.load for cell in cells})
    by_load = [{cell.policy: cell for cell in cells if cell.load == load} for load in loads]
    everywhere = [name for name in by_load[-1] if all(name in row for row in by_load)]
    return [[_metrics(row[name]) for name in everywhere] for row in by_load]


def _metrics(cell: Cell) -> Metrics:
    """Return the means of a cell as a row."""
    return Metrics(
        policy=cell.policy,
        trace=cell.scenario,
        seed=0,
        requests=cell.requests,
        unfinished=cell.unfinished,
        offered_rps=cell.offered_rps.mean,
        served_rps=cell.served_rps.mean,
        ttft_s=(cell.ttft_mean_s.mean, 0.0, 0.0, cell.ttft_p99_s.mean),
        tpot_s=(cell.tpot_mean_s.mean, 0.0, 0.0, cell.tpot_p99_s.mean),
        hit_rate=cell.hit_rate.mean,
        promised_rate=0.0,
        balance=cell.balance.mean,
        busy=cell.busy.mean,
        preemptions=round(cell.preemptions.mean),
        cpu_s=0.0,
    )


def filled(document: str, folder: Path) -> str:
    """Return the document with its tables as the numbers in a folder say.

    Raises:
        ValueError: a mark names a table that there is not.
    """
    found = read(folder)

    def table_of(match: re.Match[str]) -> str:
        return f"{match[1]}\n{table(found, match['name'])}\n\n{match[3]}"

    return _MARKED.sub(table_of, document)


def table(found: Evaluation, name: str) -> str:
    """Return a table of the document by its name.

    Raises:
        ValueError: there is no such table.
    """
    kind, _, rest = name.partition(" ")
    if kind == "main":
        scenario, load = rest.split()
        cells = [
            cell for cell in found.main if cell.scenario == scenario and cell.load == float(load)
        ]
        return _by_policy(cells)
    if kind == "weights":
        scenario, load = rest.split()
        chosen = [
            cell
            for cell in (*found.main, *found.weights)
            if cell.scenario == scenario and cell.load == float(load)
        ]
        swept = [cell for cell in found.weights if cell in chosen]
        ours = [cell for cell in chosen if cell.policy == _OURS]
        return _by_policy([*ours, *swept])
    if kind == "low":
        return _low(found, float(rest))
    if kind == "swept":
        scenario, load = rest.split()
        return _by_policy(
            [c for c in found.swept if c.scenario == scenario and c.load == float(load)]
        )
    if kind in ("variants", "hotspots"):
        return _by_policy(getattr(found, kind), with_variant=True)
    raise ValueError(f"no table {name!r}")


def _by_policy(cells: Sequence[Cell], *, with_variant: bool = False) -> str:
    """Return a row a cell; the best of each column in bold."""
    head = ["policy", *(column.name for column in COLUMNS)]
    if with_variant:
        head.insert(1, "setting")
    lines = [_line(head), _line(["---", *(["---:"] * (len(head) - 1))])]
    best = {column.name: _best(column, cells) for column in COLUMNS}
    for cell in cells:
        texts = [f"`{cell.policy}`", *([cell.variant] if with_variant else [])]
        for column in COLUMNS:
            text = _text(column, cell)
            texts.append(f"**{text}**" if text == best[column.name] else text)
        lines.append(_line(texts))
    return "\n".join(lines)


def _best(column: Column, cells: Sequence[Cell]) -> str:
    if not column.better or len(cells) < 2:
        return ""
    chosen = min(cells, key=lambda cell: -column.better * column.value(cell).mean)
    return _text(column, chosen)


def _text(column: Column, cell: Cell) -> str:
    found = column.value(cell)
    text = column.form(found.mean)
    if cell.seeds == 1:
        return text
    spread = max(found.most - found.mean, found.mean - found.least)
    return f"{text} ±{column.form(spread)}"


def _low(found: Evaluation, load: float) -> str:
    """Return each policy's mean TTFT over multiplication's, a column a kind of traffic."""
    cells = [cell for cell in found.swept if cell.load == load]
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    ours = {cell.scenario: cell.ttft_mean_s.mean for cell in cells if cell.policy == _OURS}
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        name = cell.policy.partition(":")[0]
        ratio = cell.ttft_mean_s.mean / ours[cell.scenario]
        rows.setdefault(name, {})[cell.scenario] = f"{ratio:.2f}"
    lines = [_line(["policy", *scenarios]), _line(["---", *(["---:"] * len(scenarios))])]
    lines += [
        _line([f"`{name}`", *(row.get(each, "–") for each in scenarios)])
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
