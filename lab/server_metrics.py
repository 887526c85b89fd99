"""The emulated engine's `/metrics`: vLLM 0.32's names, labels and buckets.

Gauges change when a step's outputs are due, not when a request comes, as in vLLM: they lag the
truth by an engine step. The counters of tokens and requests do too. A step costs plain additions;
Prometheus' own objects are made for a scrape only.

Source: vllm/v1/metrics/loggers.py of vLLM 0.32 (names and meanings).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lab.engine_types import EngineConfig, Output, StepResult
from lab.server_engine import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS_MAX = 16_384
_SECONDS = {
    "time_to_first_token": _FIRST_TOKEN_S,
    "inter_token_latency": _TOKEN_S,
    "request_time_per_output_token": _TOKEN_S,
    "e2e_request_latency": _REQUEST_S,
    "request_queue_time": _REQUEST_S,
    "request_prefill_time": _REQUEST_S,
    "request_decode_time": _REQUEST_S,
    "request_inference_time": _REQUEST_S,
}
_COUNTS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_prefill_kv_computed_tokens",
)
_COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
)
_REASONS = ("stop", "length", "abort", "error")


class _Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return (bound, values up to it) for each bound, and the sum of all."""
        total, buckets = 0, []
        names = [*map(str, self._bounds), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        return buckets, self._sum


class ServerMetrics(Collector):
    """Everything that `/metrics` shows."""

    def __init__(self, model_name: str, config: EngineConfig) -> None:
        self._labels = (model_name, "0")
        self._config = config
        self._last: StepResult | None = None
        self._counters = Counter(dict.fromkeys(_COUNTERS, 0))
        self._success = Counter(dict.fromkeys(_REASONS, 0))
        self._rejections = 0
        lengths = _powers(config.max_model_len)
        self._histograms = {
            **{f"{name}_seconds": _Histogram(bounds) for name, bounds in _SECONDS.items()},
            **{name: _Histogram(lengths) for name in _COUNTS},
            "iteration_tokens_total": _Histogram(_powers(_STEP_TOKENS_MAX)),
        }
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return the text that a scrape gets."""
        return generate_latest(self._registry)

    def observe_step(
        self, result: StepResult, generations: Mapping[str, Generation], now_s: float
    ) -> None:
        """Record one engine step; call it before the generations get its outputs."""
        self._last = result
        counters = self._counters
        counters["num_preemptions"] += len(result.preempted)
        counters["prefix_cache_queries"] += result.queries
        counters["prefix_cache_hits"] += result.hits
        if result.steps:
            tokens = sum(result.scheduled_tokens.values())
            self._histograms["iteration_tokens_total"].observe(tokens)
        for request_id in result.scheduled_tokens:
            generation = generations.get(request_id)
            if generation is not None and generation.scheduled_s is None:
                generation.scheduled_s = max(generation.submitted_s, now_s - result.duration_s)
        for output in result.outputs:
            counters["generation_tokens"] += output.new_tokens
            generation = generations.get(output.request_id)
            if generation is not None:
                self._observe_output(output, generation, now_s)

    def observe_rejection(self) -> None:
        """Count a request that the queue limit kept out."""
        self._rejections += 1

    def collect(self) -> Iterator[Metric]:
        """Yield every family, for Prometheus' registry."""
        yield from self._gauges()
        for name, value in self._counters.items():
            yield self._counter(name, value)
        yield self._split("prompt_tokens_by_source", "source", self._sources())
        yield self._split("request_success", "finished_reason", self._success)
        yield self._rejected()
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", _help(name), labels=_LABELS)
            buckets, total = histogram.cumulative()
            family.add_metric(self._labels, buckets, total)
            yield family

    def _observe_output(self, output: Output, generation: Generation, now_s: float) -> None:
        histograms = self._histograms
        if output.cached_tokens is not None:
            prompt_tokens = len(generation.job.prompt_ids)
            self._counters["prompt_tokens"] += prompt_tokens
            self._counters["prompt_tokens_cached"] += output.cached_tokens
            computed = prompt_tokens - output.cached_tokens
            histograms["request_prefill_kv_computed_tokens"].observe(computed)
            first_s = now_s - generation.submitted_s
            histograms["time_to_first_token_seconds"].observe(first_s)
        elif generation.last_token_s is not None:
            gap_s = now_s - generation.last_token_s
            histograms["inter_token_latency_seconds"].observe(gap_s)
        if output.finish_reason is not None:
            self._success[output.finish_reason] += 1
            self._observe_end(generation, now_s)

    def _observe_end(self, generation: Generation, now_s: float) -> None:
        histograms = self._histograms
        tokens = len(generation.job.answer.token_ids)
        scheduled_s = generation.scheduled_s or now_s
        first_s = generation.first_token_s or now_s
        spans_s = {
            "e2e_request_latency": now_s - generation.submitted_s,
            "request_queue_time": scheduled_s - generation.submitted_s,
            "request_prefill_time": first_s - scheduled_s,
            "request_decode_time": now_s - first_s,
            "request_inference_time": now_s - scheduled_s,
        }
        for name, span_s in spans_s.items():
            histograms[f"{name}_seconds"].observe(span_s)
        if tokens > 1:
            tpot_s = (now_s - first_s) / (tokens - 1)
            histograms["request_time_per_output_token_seconds"].observe(tpot_s)
        histograms["request_prompt_tokens"].observe(len(generation.job.prompt_ids))
        histograms["request_generation_tokens"].observe(tokens)

    def _gauges(self) -> Iterator[Metric]:
        last = self._last
        waiting = last.waiting if last else 0
        yield self._gauge("num_requests_running", last.running if last else 0)
        yield self._gauge("num_requests_waiting", waiting)
        yield self._gauge("kv_cache_usage_perc", last.kv_usage if last else 0.0)
        for name, label, values in (
            ("num_requests_waiting_by_reason", "reason", {"capacity": waiting, "deferred": 0}),
            ("engine_sleep_state", "sleep_state", {"awake": 1}),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", _help(name), labels=(*_LABELS, label))
            for key, value in values.items():
                family.add_metric((*self._labels, key), value)
            yield family
        yield self._cache_info()

    def _cache_info(self) -> Metric:
        config = self._config
        slots = config.num_blocks * config.block_size
        facts = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_blocks),
            "kv_cache_size_tokens": str(slots),
            "kv_cache_max_concurrency": str(slots / config.max_model_len),
            "enable_prefix_caching": str(config.prefix_caching),
            "prefix_caching_hash_algo": "xxh3",
            "engine": "0",
        }
        name = "cache_config_info"
        family = GaugeMetricFamily(f"vllm:{name}", _help(name), labels=tuple(facts))
        family.add_metric(tuple(facts.values()), 1)
        return family

    def _rejected(self) -> Metric:
        """Return what the API process refused: of no engine, so without its label."""
        name = "admission_rejections"
        family = CounterMetricFamily(f"vllm:{name}", _help(name), labels=("model_name", "reason"))
        family.add_metric((self._labels[0], "max_num_queued_reqs"), self._rejections)
        return family

    def _sources(self) -> dict[str, int]:
        """Return prompt tokens by where their keys and values came from."""
        cached = self._counters["prompt_tokens_cached"]
        computed = self._counters["prompt_tokens"] - cached
        return {"local_compute": computed, "local_cache_hit": cached}

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", _help(name), labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, value: int) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", _help(name), labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _split(self, name: str, label: str, values: Mapping[str, int]) -> Metric:
        """Return a counter with one more label."""
        family = CounterMetricFamily(f"vllm:{name}", _help(name), labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family


def _help(name: str) -> str:
    return name.replace("_", " ").capitalize() + "."


def _powers(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20 … up to `largest`, vLLM's buckets for counts."""
    series = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    return [float(each) for each in series if each <= largest]
