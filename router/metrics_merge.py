"""Joins the metric pages of several processes into one.

Counters and histograms add up, sample by sample. A gauge says something of its process, and workers
may count the same thing (a block that two of them know), so gauges stay apart by a label `worker`.
Of a process that has ended, or is silent, the counters still count: a sum that falls would be taken
for a restart of everything, and all that is left of it for new.

Source: Prometheus' text format, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_SUMMED: Final = frozenset({"counter", "histogram"})


class _Family:
    """One metric: its comment lines and its samples, in the order of their first appearance."""

    __slots__ = ("comments", "kind", "samples")

    def __init__(self) -> None:
        self.comments: list[str] = []
        self.kind = ""
        self.samples: dict[str, float] = {}


def merge_pages(pages: Mapping[str, str], counted: Iterable[str] = ()) -> str:
    """Return one page; lines that are no samples of any known form are left out.

    Args:
        pages: worker → its page.
        counted: pages of which nothing but counters and histograms are taken.
    """
    families: dict[str, _Family] = {}
    sources: list[tuple[str | None, str]] = [*pages.items(), *((None, page) for page in counted)]
    for worker, page in sources:
        family = _Family()
        for line in page.splitlines():
            if line.startswith("#"):
                family = _comment(families, line, family)
            elif line:
                _sample(family, line, worker)
    return "".join(f"{line}\n" for family in families.values() for line in _lines(family))


def _comment(families: dict[str, _Family], line: str, family: _Family) -> _Family:
    """Take a comment line in; returns the family that the lines after it belong to."""
    words = line.split(" ", 3)
    if len(words) < 4 or words[1] not in ("HELP", "TYPE"):
        return family
    family = families.setdefault(words[2], _Family())
    if words[1] == "TYPE":
        family.kind = words[3]
    if line not in family.comments:
        family.comments.append(line)
    return family


def _sample(family: _Family, line: str, worker: str | None) -> None:
    name, _, value = line.rpartition(" ")
    try:
        number = float(value)
    except ValueError:
        return
    if family.kind in _SUMMED:
        family.samples[name] = family.samples.get(name, 0.0) + number
    elif worker is not None:
        family.samples[_labelled(name, worker)] = number


def _labelled(name: str, worker: str) -> str:
    label = f'worker="{worker}"'
    return f"{name[:-1]},{label}}}" if name.endswith("}") else f"{name}{{{label}}}"


def _lines(family: _Family) -> list[str]:
    samples = [f"{name} {value!r}" for name, value in family.samples.items()]
    return [*family.comments, *samples]
