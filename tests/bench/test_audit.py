import json

import pytest

from bench import audit
from bench.audit import Cell, missed


def _cell(instances: int, ratio: float) -> Cell:
    return Cell(instances, {}, {}, ratio, 1.0)


def test_the_bar_is_for_256_instances():
    """It is reported in words when it is missed, and only where it applies."""
    assert missed(_cell(256, 1.25)) == []
    assert missed(_cell(256, 1.26)) == ["full costs 1.26 × none > 1.25"]
    assert missed(_cell(1_024, 2.0)) == []


@pytest.mark.slow
def test_the_command_measures_each_fleet_and_prints_json(capsys: pytest.CaptureFixture[str]):
    """A tiny run: recording more tells more, and the status says whether a bar was missed."""
    argv = ["--json", "--instances", "4", "40", "--blocks", "9000", "--rounds", "1"]
    status = audit.main(argv)
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["instances"] for cell in cells] == [4, 40]
    for cell in cells:
        assert cell["cpu_us"]["none"] > 0
        sizes = [cell["nbytes"][name] for name in ("none", "sampled", "full")]
        assert sizes == sorted(sizes)
    assert status == any(cell["missed"] for cell in cells)


def test_the_table_has_a_line_a_fleet():
    """Times, sizes and ratios, for people."""
    numbers = {"none": 100.0, "sampled": 102.0, "full": 110.0}
    lines = audit.table([Cell(256, numbers, numbers, 1.1, 1.02)]).splitlines()
    assert len(lines) == 3
    assert lines[-1].split() == [
        "256",
        "100.0",
        "102.0",
        "110.0",
        "100",
        "102",
        "110",
        "1.02",
        "1.10",
    ]
