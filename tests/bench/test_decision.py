import json

import pytest

from bench import decision
from bench.decision import Cell, missed, run, table


@pytest.mark.slow
def test_cells_are_measured_without_the_peer():
    """A tiny run of the benchmark fills a cell for every prompt length."""
    cells = run([3, 16], 12_000, rounds=1, with_peer=False)
    assert [(cell.instances, cell.prompt_tokens) for cell in cells] == [
        (instances, tokens) for instances in (3, 16) for tokens in (1_024, 8_192, 65_536)
    ]
    assert all(0 < cell.p50_us <= cell.p99_us for cell in cells)
    assert len(table(cells).splitlines()) == 2 + len(cells)


def test_bars_are_judged_by_fleet_and_prompt():
    """Each bar is reported in words when it is missed, and only where it applies."""
    good = Cell(1_024, 8_192, 1, 2.0, 74.0, 299.0, 250.0, 299.0, 800.0, 0.1, 0.3)
    assert missed(good) == []
    bad = Cell(1_024, 8_192, 1, 2.0, 76.0, 301.0, 245.0, 299.0, 800.0, 0.1, 0.31)
    assert missed(bad) == [
        "76.00 p50 µs > 75.0",
        "301.00 p99 µs > 300.0",
        "0.31 of the peer's look-up alone > 0.3",
    ]
    assert missed(Cell(16, 1_024, 1, 2.0, 76.0, 301.0)) == []


@pytest.mark.slow
def test_the_command_prints_json_and_its_status_says_whether_bars_were_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The output is one JSON document with every cell."""
    argv = ["decision", "--no-peer", "--json", "--instances", "4", "--blocks", "9000"]
    monkeypatch.setattr("sys.argv", [*argv, "--rounds", "1"])
    status = decision.main()
    document = json.loads(capsys.readouterr().out)
    assert document["peer"] is None
    assert len(document["cells"]) == 3
    assert status == any(cell["missed"] for cell in document["cells"])
