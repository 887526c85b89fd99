"""The emulated engine's `/metrics`: vLLM 0.32's names, labels and buckets.

Gauges change when a step's outputs are due, not when a request comes, as in vLLM: they lag the
truth by an engine step. The counters of tokens and requests do too.

Source: vllm/v1/metrics/loggers.py of vLLM 0.32 (names and meanings).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lab.engine_types import EngineConfig, Output, StepResult
from lab.server_engine import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LABELS = ("model_name", "engine")


class ServerMetrics:
    """Everything that `/metrics` shows."""

    def __init__(self, model_name: str, config: EngineConfig) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._max_model_len = config.max_model_len
        self._gauges()
        self._counters()
        self._histograms()
        self._cache_info(config)

    def exposition(self) -> bytes:
        """Return the text that a scrape gets."""
        return generate_latest(self._registry)

    def observe_step(
        self, result: StepResult, generations: Mapping[str, Generation], now_s: float
    ) -> None:
        """Record one engine step; call it before the generations get its outputs."""
        self.running.set(result.running)
        self.waiting.set(result.waiting)
        self.waiting_capacity.set(result.waiting)
        self.kv_usage.set(result.kv_usage)
        if result.preempted:
            self.preemptions.inc(len(result.preempted))
        if result.queries:
            self.queries.inc(result.queries)
            self.hits.inc(result.hits)
        if result.steps:
            self.iteration_tokens.observe(sum(result.scheduled_tokens.values()))
        for request_id in result.scheduled_tokens:
            generation = generations.get(request_id)
            if generation is not None and generation.scheduled_s is None:
                generation.scheduled_s = max(generation.submitted_s, now_s - result.duration_s)
        if result.outputs:
            self.generation_tokens.inc(sum(output.new_tokens for output in result.outputs))
        for output in result.outputs:
            generation = generations.get(output.request_id)
            if generation is not None:
                self._observe_output(output, generation, now_s)

    def observe_rejection(self) -> None:
        """Count a request that the queue limit kept out."""
        self.rejections.labels(*self._labels, "max_num_queued_reqs").inc()

    def _observe_output(self, output: Output, generation: Generation, now_s: float) -> None:
        if output.cached_tokens is not None:
            prompt_tokens = len(generation.job.prompt_ids)
            self.ttft.observe(now_s - generation.submitted_s)
            self.prompt_tokens.inc(prompt_tokens)
            self.prompt_tokens_cached.inc(output.cached_tokens)
            self.prompt_tokens_computed_here.inc(prompt_tokens - output.cached_tokens)
            self.prompt_tokens_hit_here.inc(output.cached_tokens)
            self.prefill_kv_computed.observe(prompt_tokens - output.cached_tokens)
        elif generation.last_token_s is not None:
            self.itl.observe(now_s - generation.last_token_s)
        if output.finish_reason is not None:
            self.success.labels(*self._labels, output.finish_reason).inc()
            self._observe_end(generation, now_s)

    def _observe_end(self, generation: Generation, now_s: float) -> None:
        tokens = len(generation.job.answer.token_ids)
        scheduled_s = generation.scheduled_s or now_s
        first_s = generation.first_token_s or now_s
        self.e2e.observe(now_s - generation.submitted_s)
        self.queue_time.observe(scheduled_s - generation.submitted_s)
        self.prefill_time.observe(first_s - scheduled_s)
        self.decode_time.observe(now_s - first_s)
        self.inference_time.observe(now_s - scheduled_s)
        self.request_prompt_tokens.observe(len(generation.job.prompt_ids))
        self.request_generation_tokens.observe(tokens)
        if tokens > 1:
            self.tpot.observe((now_s - first_s) / (tokens - 1))

    def _gauges(self) -> None:
        self.running = self._gauge("num_requests_running", "Requests in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue, by what keeps them there.",
            (*_LABELS, "reason"),
            registry=self._registry,
        )
        self.waiting_capacity = by_reason.labels(*self._labels, "capacity")
        by_reason.labels(*self._labels, "deferred").set(0)
        sleep = Gauge(
            "vllm:engine_sleep_state",
            "1 for the state the engine is in.",
            (*_LABELS, "sleep_state"),
            registry=self._registry,
        )
        sleep.labels(*self._labels, "awake").set(1)

    def _counters(self) -> None:
        self.preemptions = self._counter("num_preemptions", "Requests preempted.")
        self.queries = self._counter("prefix_cache_queries", "Tokens looked up.")
        self.hits = self._counter("prefix_cache_hits", "Tokens found cached.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens hit.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            (*_LABELS, "source"),
            registry=self._registry,
        )
        self.prompt_tokens_computed_here = by_source.labels(*self._labels, "local_compute")
        self.prompt_tokens_hit_here = by_source.labels(*self._labels, "local_cache_hit")
        self.success = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused, by which limit.",
            (*_LABELS, "reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(*self._labels, reason)

    def _histograms(self) -> None:
        tokens = _powers(self._max_model_len)
        made = self._histogram
        self.ttft = made("time_to_first_token_seconds", _TTFT_BUCKETS)
        self.itl = made("inter_token_latency_seconds", _TOKEN_BUCKETS)
        self.tpot = made("request_time_per_output_token_seconds", _TOKEN_BUCKETS)
        self.e2e = made("e2e_request_latency_seconds", _REQUEST_BUCKETS)
        self.queue_time = made("request_queue_time_seconds", _REQUEST_BUCKETS)
        self.prefill_time = made("request_prefill_time_seconds", _REQUEST_BUCKETS)
        self.decode_time = made("request_decode_time_seconds", _REQUEST_BUCKETS)
        self.inference_time = made("request_inference_time_seconds", _REQUEST_BUCKETS)
        self.request_prompt_tokens = made("request_prompt_tokens", tokens)
        self.request_generation_tokens = made("request_generation_tokens", tokens)
        self.prefill_kv_computed = made("request_prefill_kv_computed_tokens", tokens)
        self.iteration_tokens = made("iteration_tokens_total", _powers(16_384))

    def _cache_info(self, config: EngineConfig) -> None:
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
        info = Gauge(
            "vllm:cache_config_info", "The cache's settings.", tuple(facts), registry=self._registry
        )
        info.labels(**facts).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        made = Counter(f"vllm:{name}", text, _LABELS, registry=self._registry)
        return made.labels(*self._labels)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        made = Histogram(
            f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=tuple(buckets)
        )
        return made.labels(*self._labels)


def _powers(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20 … up to `largest`, vLLM's buckets for counts."""
    series = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    return [float(each) for each in series if each <= largest]
