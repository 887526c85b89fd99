"""The benchmark of a chat's next turn: short, and that it would notice a missed bar."""

from __future__ import annotations

import json

import msgspec
import pytest

from bench import tokens
from bench.tokens import Cell, missed

GOOD = Cell("english", 8_192, 800, 999.0, 1_500.0, 300.0, 4_000.0, 30_000.0, 30.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_command_measures_every_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short chat of each length and kind is read in all ways, with equal answers."""
    monkeypatch.setattr("sys.argv", ["tokens", "--json", "--chats", "1", "--rounds", "1"])
    monkeypatch.setattr(tokens, "WARM_UP_CHATS", 1)
    monkeypatch.setattr(tokens, "LENGTHS", (1_024, 2_048))
    status = tokens.main()
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["text"] for cell in cells] == ["english", "mixed"] * 2
    assert all(0 < cell["new_tokens"] < cell["prompt_tokens"] for cell in cells)
    assert status == any(cell["missed"] for cell in cells)


def test_a_missed_bar_is_found() -> None:
    """The time is judged at 8k tokens, the ratio at every length."""
    assert missed(GOOD, 8_192) == []
    slow = msgspec.structs.replace(GOOD, cached_us=1_001.0, ratio=9.9)
    assert missed(slow, 8_192) == ["next turn 1001 µs > 1000", "9.9 × less than whole < 10"]
    assert missed(slow, 65_536) == ["9.9 × less than whole < 10"]
