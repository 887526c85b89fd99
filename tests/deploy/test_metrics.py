"""Boards and alarms are built on metrics that exist, and the page of metrics names them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import pytest_asyncio
import yaml

from tests.deploy.exported import Exported, exported, pages
from tests.deploy.metrics_page import PAGE, page

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "multiplane.json"
RULES = DEPLOY / "prometheus-rules.yaml"
OF_PROMETHEUS = {"instance", "job", "le", "worker"}
"""Labels that scraping, histograms and a supervisor's page add."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metrics(tmp_path_factory: pytest.TempPathFactory) -> list[Exported]:
    """Return what a router, a sidecar and a detector export."""
    return await exported(tmp_path_factory.mktemp("metrics"))


def board() -> dict[str, Any]:
    """Return Grafana's board."""
    found: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    """Return Prometheus' rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield (where it is, query) of everything that asks Prometheus."""
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']!r}", target["expr"]
    for rule in rules():
        yield f"rule {rule.get('alert') or rule['record']}", rule["expr"]


def problems(query: str, known: dict[str, Exported], recorded: set[str]) -> Iterator[str]:
    """Yield what a query asks for that nobody exports."""
    used = set(re.findall(r"\bmultiplane\w*", query)) - {"multiplane"}
    yield from (f"no metric {name}" for name in used if name not in known)
    if not used and not recorded & set(re.findall(r"[\w:]+", query)):
        yield "it asks for nothing of ours"
    for name, selector in re.findall(r"\b(multiplane_\w+)\{([^}]*)\}", query):
        for label in re.findall(r'(\w+)\s*[=!]~?\s*"', selector):
            if name in known and label not in {*known[name].labels, *OF_PROMETHEUS}:
                yield f"{name} has no label {label}"
    labels = {label for name in used & set(known) for label in known[name].labels}
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        for label in re.findall(r"\w+", grouped):
            if used and label not in labels | OF_PROMETHEUS:
                yield f"nothing here has a label {label}"


async def test_every_query_asks_for_what_is_exported(metrics: list[Exported]) -> None:
    """Names and labels, of every panel and every rule, on real pages."""
    known = pages(metrics)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    found = [
        f"{where}: {problem}"
        for where, query in queries()
        for problem in problems(query, known, recorded)
    ]
    assert found == []
    assert len(list(queries())) > 60


async def test_every_query_is_one() -> None:
    """As Prometheus' own grammar has it, with Grafana's variables filled in."""
    for where, query in queries():
        filled = query.replace("$__rate_interval", "1m").replace("$model", ".*")
        try:
            promql_parser.parse(filled)
        except ValueError as error:
            raise AssertionError(f"{where}: {error}: {query}") from error
    with pytest.raises(ValueError, match=r"\S"):
        promql_parser.parse("sum by (rate(x[5m])")


async def test_what_is_not_exported_is_found(metrics: list[Exported]) -> None:
    """The check can fail: by name, by selector, by grouping, and where nothing is asked for."""
    known = pages(metrics)
    for query, problem in (
        ("rate(multiplane_request_total[5m])", "no metric multiplane_request_total"),
        ('multiplane_instances{tenant="a"}', "multiplane_instances has no label tenant"),
        ("sum by (tenant) (multiplane_instances)", "nothing here has a label tenant"),
        ("up == 0", "it asks for nothing of ours"),
        ("multiplane_request_ttft_seconds", "no metric multiplane_request_ttft_seconds"),
    ):
        assert list(problems(query, known, set())) == [problem]


async def test_the_page_of_metrics_is_current(metrics: list[Exported]) -> None:
    """`python -m tests.deploy.metrics_page` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page(metrics)


async def test_metrics_are_named_as_prometheus_asks(metrics: list[Exported]) -> None:
    """Counters end in `_total`, times in seconds, and everybody says what it is."""
    for each in metrics:
        assert each.name.startswith("multiplane_")
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        assert not re.search(r"_(ms|us|s|millis|milliseconds)$", each.name), each.name
        assert len(each.text) > 5, each.name
        assert not each.text.startswith("See "), each.name


async def test_no_label_comes_from_a_request(metrics: list[Exported]) -> None:
    """Every label is one of those that have a bound."""
    bounded = {
        *("model", "instance", "tenant"),  # by configuration and the bus
        *("depth", "rank", "source", "time"),  # of hotspots and predictions: by the code
        *("endpoint", "event", "kind", "outcome", "policy", "reason", "state", "status"),
        *("how", "trust", "what"),
    }
    used = {label for each in metrics for label in each.labels}
    assert used <= bounded, used - bounded


async def test_the_board_can_be_read() -> None:
    """Panels have titles, descriptions, units and places of their own; one data source."""
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"


async def test_what_grafana_and_prometheus_are_given_fits_together() -> None:
    """The board's folder is provided, rules are loaded, and names of engines survive."""
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "multiplane.yaml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"].endswith("/dashboards")
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    scraping = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    assert scraping["rule_files"]
    jobs = {job["job_name"]: job for job in scraping["scrape_configs"]}
    assert all(jobs[name]["honor_labels"] for name in ("router", "sidecar", "detector"))


async def test_alarms_say_what_to_do() -> None:
    """Each has a severity, a summary and a description, and there is one for every way to fail."""
    alarms = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    for alarm in alarms.values():
        assert alarm["labels"]["severity"] in {"page", "ticket", "info"}
        assert alarm["annotations"].keys() == {"summary", "description"}
    for wanted in (
        *("NoInstance", "NoRouter", "NoDetector", "BusLost", "BreakerOpen", "RequestsFail"),
        *("BlocksStale", "BlocksNeverExact", "ResyncStorm", "HitsBroken", "EngineHangs"),
        *("QueueGivesUp", "QueueLong", "NoPredictor", "PredictionsOff"),
        *("PrefixChangesFail", "PrefixesUnreadable", "PrefixesNotKept"),
        *("Hotspot", "HotspotNotCured", "RoundRobin", "ScoresUneven", "RouterSlow"),
    ):
        assert f"Multiplane{wanted}" in alarms
