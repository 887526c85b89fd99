"""Prometheus metrics of a router: a listener, never asked by the logic.

What a request does is observed as it happens; everything that is a state (fleet, index, queues) is
read at the scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.core.dispatch import Decision
from controlplane.core.stream import Trust
from router.directory import Directory, ServedModel

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_SCHEDULING_S = (25e-6, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 16e-4, 5e-3, 2e-2, 1e-1)

Sample = tuple[str, str, float]
"""(metric name, help, value) of something counted outside the planes."""


class RequestMetrics:
    """Counts what requests do.

    Attributes:
        registry: what `render` renders.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "multiplane_requests",
            "Requests that ended, by how, and by the HTTP status class of the answer.",
            ("outcome", "status"),
            registry=self.registry,
        )
        self._rejected = Counter(
            "multiplane_requests_rejected",
            "Requests answered by the router itself, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._inexact = Counter(
            "multiplane_requests_inexact",
            "Requests routed by load because their tokens are not known exactly, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._retries = Counter(
            "multiplane_request_retries",
            "Attempts made on another instance, by why the one before failed.",
            ("reason",),
            registry=self.registry,
        )
        self._decisions = Counter(
            "multiplane_decisions",
            "Decisions, by policy and by trust in the chosen instance's block set.",
            ("policy", "trust"),
            registry=self.registry,
        )
        self._decide = Histogram(
            "multiplane_decision_seconds",
            "Time to match, score and pick.",
            buckets=_SCHEDULING_S,
            registry=self.registry,
        )
        self._tokenize = Histogram(
            "multiplane_tokenize_seconds",
            "Time to turn a request into block hashes.",
            buckets=_SCHEDULING_S,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "multiplane_request_ttft_seconds",
            "Time from the whole request to the first byte of the answer's body.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "multiplane_request_duration_seconds",
            "Time from the whole request to the end of the answer.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of decided requests.")
        self._promised = self._counter(
            "hit_tokens_promised", "Prompt tokens that the chosen instances were believed to cache."
        )
        self._cached = self._counter(
            "hit_tokens_actual", "Prompt tokens that engines reported as cached."
        )
        self._output = self._counter(
            "output_tokens", "Generated tokens, where engines report them."
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"multiplane_{name}", text, registry=self.registry)

    def rejected(self, reason: str) -> None:
        """Count a request that the router answered itself."""
        self._rejected.labels(reason).inc()

    def inexact(self, reason: str) -> None:
        """Count a request without exact tokens."""
        self._inexact.labels(reason).inc()

    def retried(self, reason: str) -> None:
        """Count a further attempt."""
        self._retries.labels(reason).inc()

    def decided(self, decision: Decision, decide_s: float, tokenize_s: float) -> None:
        """Count a decision."""
        self._decisions.labels(decision.choice.policy, decision.trust).inc()
        self._decide.observe(decide_s)
        self._tokenize.observe(tokenize_s)
        self._prompt.inc(decision.request.prompt_tokens)
        self._promised.inc(decision.hit)

    def ended(
        self,
        outcome: str,
        status: int,
        duration_s: float,
        ttft_s: float | None,
        output_tokens: int | None,
        cached_tokens: int | None,
    ) -> None:
        """Count a request's end."""
        self._requests.labels(outcome, f"{status // 100}xx" if status else "none").inc()
        self._duration.observe(duration_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        self._output.inc(output_tokens or 0)
        self._cached.inc(cached_tokens or 0)

    def watch(self, directory: Directory, samples: Callable[[], Iterable[Sample]]) -> None:
        """Let scrapes read the planes of a directory, and whatever `samples` yields."""
        self.registry.register(_States(directory, samples))

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _States(Collector):
    """Reads states at the scrape."""

    def __init__(self, directory: Directory, samples: Callable[[], Iterable[Sample]]) -> None:
        self._directory = directory
        self._samples = samples

    def describe(self) -> Iterable[Metric]:
        """Say that names are only known at the scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all states."""
        yield from self._planes()
        for name, text, value in self._samples():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"multiplane_{name.removesuffix('_total')}", text)
            metric.add_metric((), value)
            yield metric

    def _planes(self) -> Iterator[Metric]:
        label = ("model",)
        per_instance = ("model", "instance")
        trust = GaugeMetricFamily(
            "multiplane_instances",
            "Instances by trust in their block sets.",
            labels=("model", "trust"),
        )
        usable = GaugeMetricFamily(
            "multiplane_instances_usable", "Instances that take requests.", labels=label
        )
        batch = GaugeMetricFamily(
            "multiplane_instance_batch_size",
            "Requests assigned and unfinished, as this router believes.",
            labels=per_instance,
        )
        queued = GaugeMetricFamily(
            "multiplane_instance_queued_prefill_tokens",
            "Prompt tokens booked and not yet computed.",
            labels=per_instance,
        )
        blocks = GaugeMetricFamily("multiplane_index_blocks", "Distinct blocks.", labels=label)
        memory = GaugeMetricFamily(
            "multiplane_index_memory_bytes", "Estimated memory of the index.", labels=label
        )
        peers = GaugeMetricFamily(
            "multiplane_peer_routers", "Other routers whose bookings count.", labels=label
        )
        hotspots = GaugeMetricFamily(
            "multiplane_hotspots", "Hotspot verdicts in force.", labels=label
        )
        events = CounterMetricFamily(
            "multiplane_plane_events", "What happened in a plane.", labels=("model", "event")
        )
        for served in self._directory:
            plane, model = served.plane, served.model
            for state in Trust:
                count = sum(instance.trust is state for instance in plane.fleet)
                trust.add_metric((model, state), count)
            usable.add_metric((model,), int((plane.fleet.ready & plane.fleet.healthy).sum()))
            for instance in plane.fleet:
                key = (model, instance.record.instance_id)
                batch.add_metric(key, int(plane.ledger.batch[instance.row]))
                queued.add_metric(key, int(plane.ledger.queued[instance.row]))
            blocks.add_metric((model,), len(plane.index))
            memory.add_metric((model,), plane.index.memory_bytes())
            peers.add_metric((model,), plane.ledger.peers)
            hotspots.add_metric((model,), len(plane.verdicts.hotspots))
            for name, value in _counts(served):
                events.add_metric((model, name), value)
        yield from (trust, usable, batch, queued, blocks, memory, peers, hotspots, events)


def _counts(served: ServedModel) -> Iterator[tuple[str, float]]:
    plane = served.plane
    for counts in (plane.counts, plane.intake.counts, plane.requests.counts):
        yield from counts.items()
    yield "outbox_dropped", plane.outbox.dropped
    yield "peer_gaps", plane.ledger.peer_gaps
    yield "peers_refused", plane.ledger.peers_refused
    yield "instances_refused", plane.fleet.refused
    yield "hotspots_refused", plane.verdicts.refused
