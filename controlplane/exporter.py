"""Prometheus metrics of the services: a listener that shows what they last said of themselves.

A service describes itself now and then as a list of `Family`; the page is served by a thread of its
own from the latest list, so that a scrape neither waits for the service nor reads what it is
changing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector


class Buckets(msgspec.Struct, frozen=True):
    """A histogram: how many values are at most each bound, how many there are, their sum."""

    cumulative: Sequence[tuple[float, int]]
    count: int
    sum: float


class Family(msgspec.Struct, frozen=True):
    """One metric with all its labels.

    Attributes:
        name: without `_total`, which counters get.
        samples: label values → value; of a histogram, `Buckets`.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    text: str
    labels: tuple[str, ...] = ()
    samples: Sequence[tuple[tuple[str, ...], float | Buckets]] = ()


class Exporter:
    """Serves the metrics page; `close` it.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the address is taken."""
        registry = CollectorRegistry()
        self._latest = _Latest()
        registry.register(self._latest)
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = int(self._server.server_address[1])

    def show(self, families: Sequence[Family]) -> None:
        """Serve these from now on."""
        self._latest.families = families

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Latest(Collector):
    """What was last shown."""

    def __init__(self) -> None:
        self.families: Sequence[Family] = ()

    def collect(self) -> Iterator[Metric]:
        """Yield everything."""
        yield from map(_metric, self.families)


def _metric(family: Family) -> Metric:
    """Return a family as the library has it."""
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, value in family.samples:
            assert isinstance(value, Buckets)
            bounds = [(f"{bound:g}", float(count)) for bound, count in value.cumulative]
            histogram.add_metric(labels, [*bounds, ("+Inf", float(value.count))], value.sum)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.text, labels=family.labels)
    for labels, value in family.samples:
        assert not isinstance(value, Buckets)
        metric.add_metric(labels, float(value))
    return metric
