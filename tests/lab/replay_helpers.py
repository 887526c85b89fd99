"""Small traces and replays."""

from __future__ import annotations

from typing import Any

from lab.generators import generate
from lab.replay import replay
from lab.replay_config import ReplayConfig, parse_policy
from lab.replay_result import Result
from lab.traces import Trace, TraceRequest

TIGHT = {"instances": 3, "kv_tokens": 40_000, "max_model_len": 30_000}
"""A fleet that has to evict."""


def chats(seed: int = 1, duration_s: float = 10.0, qps: float = 6.0) -> Trace:
    """Some chats."""
    return generate("chatbot", seed=seed, duration_s=duration_s, requests_per_s=qps)


def agents(seed: int = 1, duration_s: float = 10.0, qps: float = 4.0) -> Trace:
    """Long shared prefixes, often reused."""
    return generate("agent", seed=seed, duration_s=duration_s, requests_per_s=qps)


def run(trace: Trace, policy: str = "multiplicative", **settings: Any) -> Result:
    """Replays a trace."""
    return replay(trace, parse_policy(policy), ReplayConfig(**settings))


def trace_of(*requests: tuple[float, int, int, tuple[int, ...]], block_tokens: int = 16) -> Trace:
    """A trace of (at_s, input tokens, output tokens, block ids)."""
    return Trace("made", block_tokens, tuple(TraceRequest(*each) for each in requests))
