"""The few numbers of an engine's `/metrics` that matter here, read fast and without a model of it.

A page of vLLM is some 50 kB, of which a dozen lines are wanted, so one regular expression picks
those. Names that vLLM has changed are known under both.

Source: vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import re

import msgspec

from schemas.message import AMOUNT_MAX

_PROCESS = "process_start_time_seconds"
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prompt_tokens_cached_total": "cached_tokens",
    "vllm:prefix_cache_hits_total": "hit_tokens",
    "vllm:gpu_prefix_cache_hits_total": "hit_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_INFO = "vllm:cache_config_info"

_NAMES = "|".join(map(re.escape, (*_GAUGES, _BY_SOURCE, _INFO, _PROCESS)))
_LINE = re.compile(
    # No part of it reaches beyond its line: a page of open braces would take forever.
    rf'^({_NAMES})(?:\{{((?:[^"}}\n]|"(?:[^"\\\n]|\\.)*")*)\}})?[ \t]+([^ \t\n]+)',
    re.MULTILINE,
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

RANKS_MAX = 1024
"""Ranks of one engine; each has sockets of its own."""

_DIGITS_MAX = 15


class EngineSample(msgspec.Struct, frozen=True):
    """One engine rank at one moment; counters count from the process's start.

    Attributes:
        running: requests in the batch.
        waiting: requests in the queue.
        kv_usage: share of blocks held by running requests, 0 to 1.
        computed_tokens: prompt tokens computed, cached ones not among them.
        generated_tokens: tokens generated.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    computed_tokens: float = 0.0
    generated_tokens: float = 0.0


class CacheInfo(msgspec.Struct, frozen=True):
    """`vllm:cache_config_info` of one rank; None or 0 where it does not say."""

    block_size: int = 0
    num_blocks: int | None = None
    prefix_caching: bool | None = None


class MetricsPage(msgspec.Struct, frozen=True):
    """What a page says.

    Attributes:
        engines: rank → sample.
        caches: rank → cache settings.
        started_wall_s: when the server's process began; another value is another process. None
            where the page does not say (several API processes).
    """

    engines: dict[int, EngineSample]
    caches: dict[int, CacheInfo]
    started_wall_s: float | None = None


def parse_metrics(page: str) -> MetricsPage:
    """Read a page; lines that make no sense are as if they were not there."""
    values: dict[int, dict[str, float]] = {}
    caches: dict[int, CacheInfo] = {}
    started: float | None = None
    for name, labels_text, number in _LINE.findall(page):
        labels = dict(_LABEL.findall(labels_text))
        try:
            value = float(number)
            rank = int(labels.get("engine", "0"))
        except ValueError:
            continue
        if not (abs(value) <= AMOUNT_MAX and 0 <= rank < RANKS_MAX):
            continue
        if name == _PROCESS:
            started = value
        elif name == _INFO:
            caches[rank] = _cache_info(labels)
        elif name == _BY_SOURCE:
            if labels.get("source") == "local_compute":
                values.setdefault(rank, {})["computed"] = value
        else:
            values.setdefault(rank, {})[_GAUGES[name]] = value
    return MetricsPage({rank: _sample(each) for rank, each in values.items()}, caches, started)


def _sample(values: dict[str, float]) -> EngineSample:
    prompt = values.get("prompt_tokens", 0.0)
    cached = values.get("cached_tokens", values.get("hit_tokens", 0.0))
    return EngineSample(
        running=max(int(values.get("running", 0)), 0),
        waiting=max(int(values.get("waiting", 0)), 0),
        kv_usage=min(max(values.get("kv_usage", 0.0), 0.0), 1.0),
        computed_tokens=values.get("computed", max(prompt - cached, 0.0)),
        generated_tokens=values.get("generated_tokens", 0.0),
    )


def _cache_info(labels: dict[str, str]) -> CacheInfo:
    blocks = labels.get("num_gpu_blocks", "")
    size = labels.get("block_size", "")
    caching = labels.get("enable_prefix_caching", "").lower()
    return CacheInfo(
        block_size=_whole(size) or 0,
        num_blocks=_whole(blocks),
        prefix_caching={"true": True, "false": False}.get(caching),
    )


def _whole(text: str) -> int | None:
    """Return a whole number that messages can carry, None if the text is no such number."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else None
