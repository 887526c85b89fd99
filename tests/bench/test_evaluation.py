from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import evaluation_render as render
from bench.evaluation import DOCUMENT, FOLDER, HALF, POLICIES, SATURATION, SCENARIOS
from bench.evaluation_cells import Cell, Evaluation, cell_of
from lab.replay_config import parse_policy
from lab.replay_metrics import Metrics


def metrics(policy: str, ttft_s: float, hit_rate: float = 0.5) -> Metrics:
    """Some numbers."""
    four = (ttft_s, ttft_s, ttft_s, 2 * ttft_s)
    return Metrics(
        policy, "t", 0, 100, 0, 5.0, 4.9, four, (0.01,) * 4, hit_rate, 0.5, 1.5, 0.9, 0, 0.1
    )


def cell(policy: str, *ttft_s: float, load: float = 1.0) -> Cell:
    """A cell with a seed for each TTFT."""
    return cell_of("chatbot", load, policy, [metrics(policy, value) for value in ttft_s])


def test_the_document_shows_what_was_measured() -> None:
    """Every table is what its numbers make, and every picture and policy is there."""
    text = DOCUMENT.read_text("utf-8")
    assert render.filled(text, FOLDER) == text
    for scenario in SCENARIOS:
        assert f"(evaluation/load-{scenario.name}.png)" in text
        assert (FOLDER / f"load-{scenario.name}.png").stat().st_size < 60_000
    found = render.read(FOLDER)
    for scenario in SCENARIOS:
        for load in (HALF, SATURATION):
            cells = [c for c in found.main if (c.scenario, c.load) == (scenario.name, load)]
            assert {c.policy.partition(":")[0] for c in cells} == {*POLICIES, "linear"}
            assert all(c.seeds == 3 and c.requests > 0 for c in cells)


def test_loads_keep_the_number_of_requests() -> None:
    """Half the load lasts twice as long."""
    for scenario in SCENARIOS:
        half, full = (
            scenario.job(load, parse_policy("multiplicative")).source for load in (0.5, 1.0)
        )
        assert half.qps == full.qps / 2
        assert half.duration_s == 2 * full.duration_s


def test_cells_hold_the_range_over_seeds() -> None:
    """Mean, least and most, to four digits."""
    made = cell("multiplicative", 0.1, 0.2, 0.33333)
    assert made.seeds == 3
    assert made.requests == 300
    assert msgspec.structs.astuple(made.ttft_mean_s) == (0.2111, 0.1, 0.3333)


def test_tables_mark_the_best_and_show_the_spread() -> None:
    """Less is better for times; a single seed has no spread."""
    found = Evaluation(main=[cell("multiplicative", 0.2, 0.3), cell("round_robin", 1.0, 2.0)])
    lines = render.table(found, "main chatbot 1.0").splitlines()
    assert len(lines) == 4
    assert "| `multiplicative` | **0.250 ±0.050** |" in lines[2]
    assert "| `round_robin` | 1.50 ±0.500 |" in lines[3]
    single = Evaluation(swept=[cell("multiplicative", 12.34)])
    assert "| `multiplicative` | 12.3 |" in render.table(single, "swept chatbot 1.0")
    low = Evaluation(swept=[cell("multiplicative", 0.2), cell("linear:weight=0.5", 0.3)])
    assert render.table(low, "low 1.0").endswith("| `linear` | 1.50 |")


def test_only_what_is_between_marks_is_written(tmp_path: Path) -> None:
    """Prose stays; filling twice changes nothing; a table that there is not is named."""
    found = Evaluation(main=[cell("multiplicative", 0.2)], swept=[cell("multiplicative", 0.3)])
    render.write(found, tmp_path)
    assert render.read(tmp_path) == found
    assert (tmp_path / "load-chatbot.png").read_bytes().startswith(b"\x89PNG")
    text = "before\n\n<!-- table: main chatbot 1.0 -->\nold\n<!-- end -->\n\nafter\n"
    once = render.filled(text, tmp_path)
    assert once.startswith("before\n\n<!-- table: main chatbot 1.0 -->\n\n| policy |")
    assert once.endswith("|\n\n<!-- end -->\n\nafter\n")
    assert render.filled(once, tmp_path) == once
    with pytest.raises(ValueError, match="no table 'nothing'"):
        render.filled("<!-- table: nothing -->\n<!-- end -->", tmp_path)
