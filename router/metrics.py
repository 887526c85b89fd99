"""Prometheus metrics of a router: a listener, never asked by the logic.

What a request does is counted as it happens, in `router.tally`; everything that is a state (fleet,
index, queues) is read at the scrape. Label sets are bounded: outcomes, reasons and endpoints are
fixed sets, models and tenants have a configured most.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from controlplane.core.dispatch import Decision
from router.tally import Spread, Tally
from router.usage import Usage

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PREFIX = "multiplane_"

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_OVERHEAD_S = (25e-6, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 16e-4, 5e-3, 2e-2, 1e-1)


def counted(counts: object) -> Iterator[tuple[str, str, float]]:
    """Yield (name, what its class says of it, value) of each of an object's numbers."""
    documented = type(counts)
    section = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in found}
    for name in getattr(documented, "__struct_fields__", None) or vars(documented)["__slots__"]:
        text = texts.get(name, name)
        yield name, text[:1].upper() + text[1:], getattr(counts, name)


class Sample:
    """A metric whose value is a state: what it is called, and what it is now.

    Attributes:
        name: without prefix; one that ends in `_total` is a counter.
        help: one sentence.
        labels: their names.
        values: label values → value.
    """

    __slots__ = ("help", "labels", "name", "values")

    def __init__(
        self,
        name: str,
        text: str,
        value: float | None = None,
        *,
        labels: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {} if value is None else {(): value}


class RequestMetrics:
    """Counts what requests do, and renders it with everything else there is to see."""

    def __init__(self) -> None:
        self._requests = Tally(
            "requests",
            "Requests that ended: how, with which class of HTTP status.",
            *("model", "endpoint", "outcome", "status"),
        )
        self._of_tenants = Tally(
            "tenant_requests", "Requests that ended, by tenant and outcome.", "tenant", "outcome"
        )
        self._tokens_of_tenants = Tally(
            "tenant_tokens", "Tokens of prompts and answers, by tenant.", "tenant", "kind"
        )
        self._rejected = Tally(
            "requests_rejected", "Requests answered by the router itself, by reason.", "reason"
        )
        self._inexact = Tally(
            "requests_inexact",
            "Requests routed by load because their tokens are not known exactly, by reason.",
            "reason",
        )
        self._retries = Tally(
            "request_retries",
            "Attempts made on another instance, by why the one before failed.",
            "reason",
        )
        self._decisions = Tally(
            "policy_decisions",
            "Decisions, by policy and by trust in the chosen instance's block set.",
            *("policy", "trust"),
        )
        self._prompt = Tally("prompt_tokens", "Prompt tokens of decided requests.")
        self._output = Tally("output_tokens", "Generated tokens, where engines report them.")
        self._selected = Tally(
            "kv_selected_cached_prefix_tokens",
            "Prompt tokens that the chosen instances were believed to cache.",
        )
        self._best = Tally(
            "kv_best_cached_prefix_tokens",
            "Prompt tokens that the instances with the longest prefixes were believed to cache.",
        )
        self._reused = Tally("kv_reused_tokens", "Prompt tokens that engines reported as cached.")
        self._lookup_hits = Tally(
            "kv_cache_index_lookup_hits", "Decisions on prompts of which a part was cached."
        )
        self._schedule = Spread(
            "scheduler_e2e_duration_seconds", "Time to match, score and pick.", _OVERHEAD_S
        )
        self._tokenize = Spread(
            "tokenize_duration_seconds", "From whole request to its block hashes.", _OVERHEAD_S
        )
        self._ttft = Spread(
            "request_ttft_seconds",
            "From whole request to the first byte of the answer's body.",
            _LATENCY_S,
        )
        self._waits = Tally("queue_waits", "Waits that ended, by how.", "how")
        self._degraded = Tally(
            "queue_degraded", "Requests that became something else to be in time, by what.", "how"
        )
        self._wait = Spread(
            "queue_wait_seconds", "From when a request began to wait until it did not.", _LATENCY_S
        )
        self._duration = Spread(
            "request_duration_seconds", "From whole request to the answer's end.", _LATENCY_S
        )
        self._registry = CollectorRegistry()
        self._registry.register(_Tallies(self))

    def rejected(self, reason: str) -> None:
        """Count a request that the router answered itself."""
        self._rejected[(reason,)] += 1

    def inexact(self, reason: str) -> None:
        """Count a request without exact tokens."""
        self._inexact[(reason,)] += 1

    def retried(self, reason: str) -> None:
        """Count a further attempt."""
        self._retries[(reason,)] += 1

    def waited(self, how: str, seconds: float) -> None:
        """Count a wait that has ended."""
        self._waits[(how,)] += 1
        self._wait.observe(seconds)

    def degraded(self, how: str) -> None:
        """Count a request that became something else."""
        self._degraded[(how,)] += 1

    def decided(self, decision: Decision, decide_s: float, tokenize_s: float) -> None:
        """Count a decision."""
        self._decisions[decision.choice.policy, decision.trust] += 1
        self._schedule.observe(decide_s)
        self._tokenize.observe(tokenize_s)
        self._prompt[()] += decision.request.prompt_tokens
        if decision.hit_tokens is not None:
            self._lookup_hits[()] += 1
            self._selected[()] += decision.hit
            self._best[()] += decision.hit_tokens.item(decision.hit_tokens.argmax())

    def ended(self, model: str, endpoint: str, tenant: str, outcome: str, status: int) -> None:
        """Count a request's end."""
        self._requests[model, endpoint, outcome, _STATUS_CLASSES[status // 100]] += 1
        self._of_tenants[tenant, outcome] += 1

    def served(
        self,
        tenant: str,
        duration_s: float,
        ttft_s: float | None,
        prompt_tokens: int,
        usage: Usage,
    ) -> None:
        """Count what a request used that went to an instance."""
        self._duration.observe(duration_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        self._tokens_of_tenants[tenant, "prompt"] += prompt_tokens
        if usage.output_tokens:
            self._tokens_of_tenants[tenant, "output"] += usage.output_tokens
            self._output[()] += usage.output_tokens
        if usage.cached_tokens:
            self._reused[()] += usage.cached_tokens

    def forget(self, model: str) -> None:
        """Show nothing of a model any more."""
        for key in [key for key in self._requests if key[0] == model]:
            del self._requests[key]

    def watch(self, samples: Callable[[], Iterable[Sample]]) -> None:
        """Let scrapes show whatever `samples` yields then."""
        self._registry.register(_Samples(samples))

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    @property
    def tallies(self) -> Iterator[Tally]:
        """All counts."""
        return (each for each in vars(self).values() if isinstance(each, Tally))

    @property
    def spreads(self) -> Iterator[Spread]:
        """All distributions."""
        return (each for each in vars(self).values() if isinstance(each, Spread))


_STATUS_CLASSES = ("none", "1xx", "2xx", "3xx", "4xx", "5xx", "6xx", "7xx", "8xx", "9xx")


class _Tallies(Collector):
    """Shows what requests did."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Say that names are only known at the scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all counts and distributions."""
        for tally in self._metrics.tallies:
            family = CounterMetricFamily(PREFIX + tally.name, tally.help, labels=tally.labels)
            for labels, count in tally.items():
                family.add_metric(labels, count)
            yield family
        for spread in self._metrics.spreads:
            buckets = [(_bound(bound), count) for bound, count in spread.cumulative()]
            histogram = HistogramMetricFamily(PREFIX + spread.name, spread.help)
            histogram.add_metric((), buckets, spread.total)
            yield histogram


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


class _Samples(Collector):
    """Shows states as of the scrape."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterable[Metric]:
        """Say that names are only known at the scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all states."""
        for sample in self._samples():
            kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
            name = PREFIX + sample.name.removesuffix("_total")
            family = kind(name, sample.help, labels=sample.labels)
            for labels, value in sample.values.items():
                family.add_metric(labels, value)
            yield family
