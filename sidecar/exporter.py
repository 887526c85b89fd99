"""The sidecar's own metrics for Prometheus: a listener that reads what others count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.bus.protocol import Bus
from sidecar.feed import BlockFeed
from sidecar.service import SidecarService

_PREFIX = "multiplane_sidecar"
_STATES = ("starting", "ready", "draining", "stopped")

_GAUGES: tuple[tuple[str, str, Callable[[BlockFeed], float]], ...] = (
    ("blocks", "Blocks known by name.", lambda feed: len(feed.mirror)),
    ("blocks_published", "(tier, block) pairs published.", lambda feed: feed.relay.count),
    ("orphans", "Blocks kept whose parent is unknown.", lambda feed: len(feed.mirror.orphans)),
    ("mirror_complete", "1 if no unknown block can be held.", lambda feed: feed.mirror.complete),
    ("blind", "1 while KV events arrive and none applies.", lambda feed: feed.mirror.blind),
    ("stream_live", "1 while the event sequence is joined.", lambda feed: feed.stream.live),
    ("kept_messages", "Events waiting for a replay.", lambda feed: feed.stream.kept),
)

_COUNTERS: tuple[tuple[str, str, Callable[[BlockFeed], float]], ...] = (
    ("messages", "Live event messages received.", lambda feed: feed.source.received),
    ("malformed", "Messages without their frames.", lambda feed: feed.source.malformed),
    ("foreign", "Messages of other topics.", lambda feed: feed.source.foreign),
    ("gaps", "Times that messages were missing.", lambda feed: feed.stream.gaps),
    ("engine_restarts", "Other engine processes found.", lambda feed: feed.stream.restarts),
    ("losses", "Gaps that could not be closed.", lambda feed: feed.stream.losses),
    ("overlaps", "Messages both replayed and live.", lambda feed: feed.stream.overlaps),
    ("kept_dropped", "Events without room in a replay.", lambda feed: feed.stream.kept_dropped),
    ("orphans_dropped", "Orphans without room.", lambda feed: feed.mirror.orphans.dropped),
    ("unknown_removals", "Unknown blocks removed.", lambda feed: feed.mirror.unknown_removals),
    ("doubts_trimmed", "Doubtful copies given up.", lambda feed: feed.mirror.doubts_trimmed),
)


class _SidecarCollector(Collector):
    def __init__(self, service: SidecarService, bus: Bus) -> None:
        self._service = service
        self._bus = bus

    def collect(self) -> Iterator[Metric]:
        """Yield everything as of now."""
        feeds = [i.feed for i in self._service.instances if i.feed is not None]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["instance"])
            for feed in feeds:
                gauge.add_metric([feed.instance_id], float(read(feed)))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["instance"])
            for feed in feeds:
                counter.add_metric([feed.instance_id], float(read(feed)))
            yield counter
        yield from self._labelled(feeds)
        yield from self._process()

    def _labelled(self, feeds: list[BlockFeed]) -> Iterator[Metric]:
        outcomes = CounterMetricFamily(
            f"{_PREFIX}_events", "KV events by what became of them.", labels=["instance", "outcome"]
        )
        others = CounterMetricFamily(
            f"{_PREFIX}_feed", "What happened to an engine's events.", labels=["instance", "what"]
        )
        for feed in feeds:
            for outcome, count in list(feed.mirror.outcomes.items()):
                outcomes.add_metric([feed.instance_id, str(outcome)], count)
            for what, count in list(feed.counts.items()):
                others.add_metric([feed.instance_id, what], count)
        yield outcomes
        yield others

    def _process(self) -> Iterator[Metric]:
        still = GaugeMetricFamily(
            f"{_PREFIX}_engine_still_seconds",
            "How long requests have run while the engine computed nothing.",
            labels=["instance"],
        )
        for instance in list(self._service.instances):
            still.add_metric([instance.instance_id], instance.load.still_s(time.monotonic()))
        yield still
        rival = GaugeMetricFamily(
            f"{_PREFIX}_contested",
            "1 while another sidecar speaks for it too.",
            labels=["instance"],
        )
        contested = self._service.contested
        for instance in list(self._service.instances):
            rival.add_metric([instance.instance_id], float(instance.instance_id in contested))
        yield rival
        state = GaugeMetricFamily(f"{_PREFIX}_state", "1 for the present state.", labels=["state"])
        for each in _STATES:
            state.add_metric([each], float(self._service.state == each))
        yield state
        counts = CounterMetricFamily(
            f"{_PREFIX}_service", "What happened to the sidecar.", labels=["what"]
        )
        for what, count in list(self._service.counts.items()):
            counts.add_metric([what], count)
        yield counts
        yield GaugeMetricFamily(
            f"{_PREFIX}_bus_connected", "1 while connected.", float(self._bus.connected)
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_bus_dropped", "Messages that the bus client dropped.", self._bus.dropped
        )


class Exporter:
    """Serves the metrics page in a thread of its own; `close` it.

    Attributes:
        port: where it listens.
    """

    def __init__(self, service: SidecarService, bus: Bus, host: str, port: int) -> None:
        """Listen. Raises OSError if the address is taken."""
        registry = CollectorRegistry()
        registry.register(_SidecarCollector(service, bus))
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
