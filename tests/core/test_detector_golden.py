"""Scenarios that a person can read: what happens, and what the detector says to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.detector_script import FOLDER, Script

SCENARIOS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_ends_as_it_is_written(path: Path) -> None:
    """The detector says exactly what the file says that it says."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "a scenario says first what it shows"
    assert Script().play(text) == text


def test_there_are_scenarios() -> None:
    """The folder is where it is looked for."""
    assert len(SCENARIOS) >= 20
