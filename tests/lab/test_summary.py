"""What runs came to: the same numbers as a table and as Markdown."""

from __future__ import annotations

import io

from rich.console import Console

from lab.load import Answered, Planned
from lab.summary import markdown, summarize, table


def answered(ttft_s: float, *, status: int = 200, cached: int = 0) -> Answered:
    """Return what became of a request of 100 tokens."""
    planned = Planned(0.0, "/", bytes, 100)
    return Answered(planned, 0.0, status, "", ttft_s, ttft_s + 0.9, cached, 10)


def test_two_runs_are_compared() -> None:
    """Failures count but do not enter the times; the ratio is ours over theirs."""
    ours = summarize(
        "ours", [answered(1.0, cached=50), answered(9.0, status=503)], {"a": 2, "b": 0}, seconds=1.0
    )
    theirs = summarize("theirs", [answered(2.0, cached=25)], {"a": 1, "b": 1}, seconds=1.0)
    assert (ours.requests, ours.failed, ours.balance) == (2, 1, 2.0)
    lines = markdown([ours, theirs]).splitlines()
    assert lines[0] == "|  | ours | theirs | ratio |"
    assert lines[1] == "| --- | --: | --: | --: |"
    assert "| failed | 1 | 0 |  |" in lines
    assert "| TTFT mean, s | 1.000 | 2.000 | 0.50 |" in lines
    assert "| hit rate | 50.0% | 25.0% | 2.00 |" in lines
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(table([ours, theirs]))
    for line in lines[2:]:
        for cell in line.strip("| ").split(" | "):
            assert cell.strip() in captured.get()


def test_one_run_has_no_ratio() -> None:
    """And a clock that runs faster is taken out of the times."""
    run = summarize("only", [answered(1.0)], {}, seconds=1.0, clock=4.0)
    lines = markdown([run]).splitlines()
    assert lines[0] == "|  | only |"
    assert "| TTFT p99, s | 4.000 |" in lines
    assert "| TPOT mean, ms | 400.0 |" in lines
