from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from controlplane.core.queue_lines import QueueConfig
from lab import report, report_plots
from lab.replay_config import ReplayConfig
from lab.replay_metrics import Metrics, measure
from lab.replay_plan import Load, Plan, parse_policies
from lab.replay_runs import run_jobs
from lab.replay_source import TraceSource
from lab.report import COLUMNS, Case, by_policy, cell, columns_of
from tests.lab.replay_helpers import chats, run

POLICIES = "multiplicative,round_robin"


def cases(seeds: tuple[int, ...] = (0, 1)) -> list[Case]:
    """A small sweep."""
    specs, _ = parse_policies(POLICIES)
    plan = Plan(
        (TraceSource("api", duration_s=4.0),),
        specs,
        (Load(qps=3.0), Load(qps=6.0)),
        seeds,
        ReplayConfig(instances=2),
    )
    return plan.cases(run_jobs(plan.jobs()), 0.0)


class Page(HTMLParser):
    """What a page holds, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag."""
        self.tags.append(tag)
        for name, value in attrs:
            fetches = name in ("src", "href", "xlink:href") and tag != "use"
            if fetches and not (value or "").startswith(("#", "data:")):
                self.fetched.append(value or "")


@pytest.mark.slow
def test_a_report_is_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    """Every picture is inside, twice as files beside it, and the numbers as JSON."""
    made = cases()
    page = report.write(made, tmp_path / "out", "multiplane lab replay <api>")
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    assert found.fetched == []
    assert found.tags.count("svg") == 1 + 2 * 4
    assert found.tags.count("table") == 2
    assert "lab replay &lt;api&gt;" in text
    assert "prefers-color-scheme: dark" in text
    names = {each.name for each in page.parent.glob("*.png")}
    kinds = ("cdf", "queues", "balance", "decisions")
    assert names == {"load-api.png"} | {
        f"{kind}-{number}.png" for kind in kinds for number in (0, 1)
    }
    rows = msgspec.json.decode((page.parent / "metrics.json").read_bytes(), type=list[Metrics])
    assert len(rows) == 2 * 2 * 2


def test_pictures_take_the_colour_of_the_page() -> None:
    """No ink is fixed in an SVG, and a PNG is a picture of some size."""
    results = [run(chats(duration_s=4.0), name, instances=2) for name in POLICIES.split(",")]
    for draw in (
        report_plots.cdfs,
        report_plots.queues,
        report_plots.balance,
        report_plots.decisions,
    ):
        figure = draw(results)
        text = report_plots.svg(figure)
        assert "currentColor" in text
        assert "#123457" not in text
        assert ElementTree.fromstring(text).attrib.keys().isdisjoint({"width", "height"})
        picture = report_plots.png(figure)
        assert picture.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", picture[16:24])
        assert width > 500 < height + 400


def test_pictures_of_nothing_are_drawn() -> None:
    """A policy under which no answer has a second token, and no request was sampled."""
    result = run(chats(duration_s=4.0), instances=2)
    nothing = msgspec.structs.replace(result, output_tokens=result.output_tokens * 0 + 1)
    report_plots.png(report_plots.cdfs([nothing]))
    report_plots.png(report_plots.against_load([[measure(result)]]))


def test_policies_have_colours_of_their_own() -> None:
    """The plane's default always the same one."""
    paint = report_plots.colours(["round_robin", "linear", "multiplicative", "linear"])
    assert len(set(paint.values())) == 3
    assert paint["multiplicative"] == report_plots.colours(["multiplicative"])["multiplicative"]


def test_cells_show_the_spread_over_seeds() -> None:
    """The mean, and the largest difference from it; nothing for a single seed."""
    row = measure(run(chats(duration_s=4.0), instances=2))
    mean = next(column for column in COLUMNS if column.name == "TTFT, s")
    later = msgspec.structs.replace(row, ttft_s=(row.ttft_s[0] + 0.5, *row.ttft_s[1:]))
    assert cell(mean, [row]) == (f"{row.ttft_s[0]:.3f}", "")
    assert cell(mean, [row, later]) == (f"{row.ttft_s[0] + 0.25:.3f}", "±0.250")
    assert by_policy([row, later]) == {"multiplicative": [row, later]}


def test_a_number_that_no_request_had_is_a_dash() -> None:
    """Answers of one token have no time per token."""
    row = measure(run(chats(duration_s=4.0), instances=2))
    tpot = next(column for column in COLUMNS if column.name == "TPOT, ms")
    short = msgspec.structs.replace(row, tpot_s=(float("nan"),) * 4)
    assert cell(tpot, [short]) == cell(tpot, [short, row]) == ("–", "")


def test_the_best_of_a_column_stands_out() -> None:
    """Less is better for times, more for hits."""
    row = measure(run(chats(duration_s=4.0), instances=2))
    result = run(chats(duration_s=4.0), instances=2)
    worse = msgspec.structs.replace(row, policy="other", ttft_s=(9.0,) * 4, hit_rate=0.0)
    other = msgspec.structs.replace(result, policy="other")
    text = report._table(Case("c", "t", ((result, row), (other, worse))))
    assert f">{row.ttft_s[0]:.3f}</td>" in text
    first, second = text.split("<tr>")[2:]
    columns = columns_of(Case("c", "t", ((result, row),)))
    assert first.count("class=best") == len(columns) < len(COLUMNS)
    assert "class=best" not in second


def test_waits_and_goodput_are_shown_where_there_are_any() -> None:
    """A case with a queue and budgets has their columns; one without has none of them."""
    plain = run(chats(duration_s=3.0), instances=2)
    queue = QueueConfig("edf")
    queued = run(
        chats(duration_s=3.0), instances=2, batch_cap=4, queue=queue, budgets_ttft_s=(5.0,)
    )
    shown = [
        [column.name for column in columns_of(Case("c", "t", ((result, measure(result)),)))]
        for result in (plain, queued)
    ]
    more = ["wait, s", "wait p99", "shed", "in time", "goodput/s"]
    assert shown[1] == [*shown[0], *more]
    text = report._table(Case("c", "t", ((queued, measure(queued)),)))
    assert "<th>goodput/s</th>" in text
