"""docs/metrics.md, made from what running processes export.

python -m tests.deploy.metrics_page          # writes it
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from tests.deploy.exported import Exported, exported

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_HEAD = """\
# Metrics

Made from the registries of running processes by `python -m tests.deploy.metrics_page`; a test keeps
it current.

Scrape routers (`--admin-port`), sidecars, detectors and predictors (`--metrics-port`) as
`deploy/compose/prometheus.yaml` does: `honor_labels: true` is needed, since a label `instance`
names an engine here. `deploy/prometheus-rules.yaml` has the alarms, `deploy/grafana` a board.
`docs/router.md` and `docs/hotspots.md` say what the numbers mean together.

Labels are bounded: models, instances and tenants by configuration, everything else by the code;
nothing of a request's own is ever a label. With `--workers N` a router's page is that of all
workers: counters and histograms are added up, gauges are apart by a label `worker`.
"""
_TITLES = {
    "router": (
        "Routers",
        "Further `multiplane_upstream_…_total` and `multiplane_events_…_total` appear with their "
        "first event.",
    ),
    "sidecar": ("Sidecars", ""),
    "detector": ("Detectors", ""),
    "predictor": ("Predictors", ""),
}


def page(metrics: list[Exported]) -> str:
    """Return the page."""
    parts = [_HEAD]
    order = list(_TITLES)
    ordered = sorted(metrics, key=lambda each: (order.index(each.source), each.name))
    for source, group in groupby(ordered, lambda each: each.source):
        title, note = _TITLES[source]
        parts.append(f"\n## {title}\n\n" + (f"{note}\n\n" if note else ""))
        parts.append("| metric | kind | labels | |\n|---|---|---|---|\n")
        parts += [_line(each) for each in group if not _comes_and_goes(each)]
    return "".join(parts)


def _line(each: Exported) -> str:
    labels = ", ".join(f"`{label}`" for label in each.labels)
    return f"| `{each.name}` | {each.kind} | {labels} | {each.text} |\n"


def _comes_and_goes(each: Exported) -> bool:
    """Whether a metric exists only once something has happened."""
    ours = each.name.startswith(("multiplane_events_", "multiplane_upstream_"))
    return ours and each.kind == "counter"


def made() -> str:
    """Return the page as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        return page(asyncio.run(exported(Path(folder))))


def main() -> int:
    """Write the page."""
    PAGE.write_text(made(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
