import json

import pytest

from bench import queue
from controlplane.core.queue_lines import ORDERS


@pytest.mark.slow
def test_the_command_prints_json_and_its_status_says_whether_bars_were_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The output is one JSON document with a cell for every order, and one for predictions."""
    argv = ["queue", "--json", "--waiting", "200", "--predicted", "50", "--steps", "50"]
    monkeypatch.setattr("sys.argv", [*argv, "--rounds", "1"])
    status = queue.main()
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["what"] for cell in cells] == [
        *(f"enqueue + dispatch, {order}" for order in ORDERS),
        "prediction batch",
    ]
    assert all(0 < cell["p50_us"] <= cell["p99_us"] for cell in cells)
    assert status == any(cell["missed"] for cell in cells)


def test_the_table_names_what_was_missed():
    """A missed bar is on its line."""
    text = queue.table([queue.Cell("a", 1, 2.0, 3.0), queue.Cell("b", 1, 2.0, 300.0, "too slow")])
    assert [line.endswith("too slow") for line in text.splitlines()] == [False, False, True]
